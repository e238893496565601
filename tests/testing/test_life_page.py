"""`docs/reference/life-of-a-store.md`: each sentence names the tests that read it, and these are there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from tdstore_h5.store import H5Store
from tdstore_icechunk.store import IcechunkStore
from tdstore_redis.store import RedisStore
from tdstore_zarr.store import ZarrStore

import tdstore
from tdstore.builtin.cuda import CudaStore
from tdstore.builtin.memmap.store import MemmapStore
from tdstore.builtin.memory import MemoryStore
from tdstore.builtin.shared.store import SharedStore
from tdstore.builtin.tdz.store import TdzStore
from tdstore.bytestore.store import ByteStore
from tdstore.header import Group, Header
from tdstore.registry import registry
from tdstore.store import Store
from tdstore.storekit import CheckedStore, refusals
from tdstore.testing import CrashTests, StoreTests
from tdstore.testing.checks.places.openings import SHARED
from tdstore.types import LeafSpec, Read, Write

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "life-of-a-store.md"
MARK = re.compile(r"<!-- (.*?) -->")


def sentences() -> list[str]:
    """Lines of the sections: each is one sentence. The introduction and tables with their captions are none."""
    _, _, body = PAGE.read_text().partition("\n## ")
    lines = [line for line in body.splitlines()[1:] if line and not line.startswith(("#", "|"))]
    return [line for line in lines if not line.startswith("An option of these names means the same")]


def test_each_sentence_names_its_tests():
    bare = [line for line in sentences() if not MARK.search(line)]
    assert not bare, "sentences without a test:\n" + "\n".join(bare)
    assert len(sentences()) > 50
    for line in sentences():
        text = MARK.sub("", line).strip().rstrip("`")
        assert text.endswith("."), f"a line is one sentence, with its tests after it: {line}"


def test_the_tests_are_there():
    for line in sentences():
        for name in " ".join(MARK.findall(line)).split():
            path, _, test = name.rpartition("::")
            if path:
                assert f"def {test}(" in (ROOT / path).read_text(), name
            else:
                assert hasattr(StoreTests, name) or hasattr(CrashTests, name), f"{name} is no test of the kit: {line}"


def test_the_table_has_the_options_that_the_kit_tests():
    _, _, section = PAGE.read_text().partition("## Options that backends share")
    named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert named == ["durable", "verify", "recover", "lock_timeout", "max_bytes", "layout"]
    assert sorted(named) == sorted(SHARED)


KINDS: dict[str, type[Store]] = {
    "cuda": CudaStore,
    "h5": H5Store,
    "icechunk": IcechunkStore,
    "memmap": MemmapStore,
    "memory": MemoryStore,
    "redis": RedisStore,
    "remote": ByteStore,
    "shared": SharedStore,
    "tdz": TdzStore,
    "zarr": ZarrStore,
}


def test_the_table_names_the_backends_with_a_generation():
    assert sorted(KINDS) == [backend.name for backend in tdstore.backends() if backend.name in KINDS]
    _, _, section = PAGE.read_text().partition("These backends have a `generation`")
    named = re.findall(r"^\| `(\w+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert sorted(named) == sorted(name for name, kind in KINDS.items() if kind.generation is not Store.generation)


def test_the_protocol_lists_what_a_checked_store_calls_and_its_errors():
    _, _, section = (ROOT / "docs/reference/storage-protocol.md").read_text().partition("## The storekit")
    section = section.partition("\n## ")[0]
    called = re.findall(r"^\| `(_\w+)\(", section, re.MULTILINE)
    assert sorted(called) == sorted(re.findall(r"^    `(_\w+)\(", CheckedStore.__doc__ or "", re.MULTILINE) + ["_spec"])
    errors = re.findall(r"`(\w+)\(", section.partition("| when | error |")[2].partition("\n\n")[0])
    assert len(errors) > 7
    for name in errors:
        assert inspect.isfunction(getattr(refusals, name)), name


def test_the_table_of_sizes_names_all_backends():
    _, _, section = PAGE.read_text().partition("### The largest row and leaf")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", section.partition("\n## ")[0], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(KINDS)


ON_DISK = True
"""Rows of 4 GiB: a file system in memory reserves their space by taking it."""
ROW = (4 << 30) + 1000


@pytest.mark.parametrize("name", [pytest.param("memmap", marks=pytest.mark.slow), "h5", "zarr", "remote"])
def test_a_row_of_more_than_4_gib(name, tmp_path):
    place = f"memory://large-{tmp_path.name}" if name == "remote" else str(tmp_path / "large")
    backend = registry().get(name)
    last = (slice(2, 3, 1), slice(ROW - 1, ROW, 1))
    value = torch.full((1, 1), 7 if name != "memmap" else 0, dtype=torch.uint8)
    with registry().open(backend, place, mode="w") as store:
        store.create({("a",): LeafSpec((3, ROW), "uint8")})
        if name != "memmap":  # which would take the room of a whole row
            store.write([Write(("a",), last, value)])
        store.save_header(Header({(): Group(batch_size=())}))
    with registry().open(backend, place) as store:
        assert torch.equal(store.read([Read(("a",), last)])[0], value)
