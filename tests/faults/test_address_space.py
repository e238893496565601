"""A process that may have little memory (`ulimit -v`): what maps files says so, and what need not map them reads."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from tdstore.errors import StoreIOError
from tdstore.header import Group, Header
from tdstore.registry import registry
from tdstore.store import Store
from tdstore.testing.crash import in_child
from tdstore.types import LeafSpec, Mode, Read, Write

ROWS, ROW = 4 << 20, 1000
REQUEST = Read(("a",), (slice(2, 3, 1),))


def opened(name: str, place: Path, mode: Mode) -> Store:
    return registry().open(registry().get(name), str(place), mode=mode)


def limited(extra: int) -> None:
    """Let this process have so many bytes of addresses more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra,) * 2)


@pytest.fixture(params=["memmap", "h5"])
def stored(request, tmp_path):
    with opened(request.param, tmp_path / "x", "w") as store:
        store.create({("a",): LeafSpec((ROWS, ROW), "uint8")})
        store.save_header(Header({(): Group(batch_size=())}))
    return request.param, tmp_path / "x"


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file_larger_than_the_limit(stored, mode):
    name, place = stored

    def work() -> None:
        limited(500 << 20)
        if name == "h5":  # which maps what it can, and reads the rest
            with opened(name, place, mode) as store:
                assert not store.read([REQUEST])[0].any()
                assert store.read([Read(("a",), (torch.tensor([5, ROWS - 1]),))])[0].shape == (2, ROW)
                if mode == "r+":
                    store.write([Write(("a",), REQUEST.index, torch.ones(1, ROW, dtype=torch.uint8))])
                    assert store.read([REQUEST])[0].all()
            return
        with pytest.raises(StoreIOError, match=f"mapping leaf 'a': this process may not map {ROWS * ROW} bytes") as e:
            opened(name, place, mode)
        assert str(place) in str(e.value) and "ulimit -v" in str(e.value)

    assert in_child(work) == 0


def test_a_leaf_that_is_made_and_has_no_room(tmp_path):
    def work() -> None:
        limited(500 << 20)
        store = opened("memmap", tmp_path / "y", "w")
        store.create({("a",): LeafSpec((ROWS, ROW), "uint8")})
        with pytest.raises(StoreIOError, match=f"mapping leaf 'a': this process may not map {ROWS * ROW} bytes"):
            store.read([REQUEST])
        store.close()

    assert in_child(work) == 0
