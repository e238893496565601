"""`td.verify()` and `tdstore.verify(location)`: on every backend, clean and damaged."""

from __future__ import annotations

import os
import signal
from pathlib import Path as FsPath

import pytest
import torch

import tdstore
from tdstore import TensorDict, lazy_stack
from tdstore.errors import StoreNotFoundError
from tdstore.testing.crash import in_child

PLACES = ["d", "x.tdz", "x.h5", "x.zarr", "objects", "redis", "shm"]
CHECKED = ["d", "x.tdz", "x.h5", "x.zarr", "objects"]


@pytest.fixture
def place(tmp_path: FsPath, request: pytest.FixtureRequest):
    def find(name: str) -> str:
        if name == "redis":
            return f"{request.getfixturevalue('redis').url}/0?name=verify-{os.getpid()}-{request.node.name[:8]}"
        if name == "shm":
            return f"shm://verify-{os.getpid()}"
        return f"file://{tmp_path}/objects/" if name == "objects" else str(tmp_path / name)

    return find


def example() -> TensorDict:
    noise = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 255, (64, 4096), dtype=torch.uint8, generator=noise)
    return TensorDict({"x": rows, "n": {"y": torch.arange(64.0)}, "s": "text"}, [64])


@pytest.mark.parametrize("name", PLACES)
def test_clean(place, name: str) -> None:
    where = place(name)
    saved = example().save(where)
    assert saved.verify() == []
    assert saved["n"].verify() == [] if name != "shm" else True
    assert tdstore.verify(where) == []
    saved.close()
    assert tdstore.open(where).verify() == [] if name != "shm" else True


@pytest.mark.parametrize("name", CHECKED)
def test_one_flipped_byte_is_told_with_its_leaf(place, tmp_path: FsPath, name: str) -> None:
    where = place(name)
    example().save(where).close()
    needle = example()["x"][40].numpy().tobytes()[:64]
    flipped = 0
    for file in [p for p in tmp_path.rglob("*") if p.is_file()]:
        data = file.read_bytes()
        at = data.find(needle)
        if at >= 0:
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            flipped += 1
    assert flipped == 1, "the data is there once, as it is"
    faults = tdstore.verify(where)
    assert [fault.path for fault in faults] == [("x",)]
    assert faults[0].reason
    # Small memmap datasets and archives are compared when they are opened.
    with tdstore.open(where, **({"verify": "none"} if name in ("d", "x.tdz") else {})) as td:
        assert [fault.path for fault in td.verify()] == [("x",)]
        assert td["n"].verify() == []


def test_in_memory_and_nothing(tmp_path: FsPath) -> None:
    assert example().verify() == []
    assert lazy_stack([example(), example()]).verify() == []
    with pytest.raises(StoreNotFoundError):
        tdstore.verify(tmp_path / "none")


def test_elements_of_a_lazy_stack_are_numbered(tmp_path: FsPath) -> None:
    for name in ("a", "b"):
        example().save(tmp_path / name).close()
    with open(tmp_path / "b" / "x.memmap", "r+b") as file:
        file.seek(100_000)
        file.write(b"\0\1\2\3\4\5")
    stack = lazy_stack([tdstore.open(tmp_path / name, verify="none") for name in ("a", "b")])
    assert [fault.path for fault in stack.verify()] == [("1", "x")]


def test_a_writer_that_died_is_a_fault(tmp_path: FsPath) -> None:
    example().save(tmp_path / "d").close()

    def work() -> None:
        td = tdstore.open(tmp_path / "d", mode="r+")
        td["x"][3] = 0
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work) == -signal.SIGKILL
    assert [fault.path for fault in tdstore.verify(tmp_path / "d")] == [("x",)]
