"""Datasets that grow on a really full disk: what was committed stays readable, and nothing is left over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import StoreIOError
from tdstore.storekit import files
from tests.builtin.memmap.support import in_child, small_disk

ROWS = 4000


@pytest.fixture
def disk(tmp_path: FsPath) -> Iterator[FsPath]:
    with small_disk(tmp_path / "disk", 8) as folder:
        yield folder


def _rows() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(ROWS * 8.0).view(ROWS, 8), "b": torch.arange(ROWS), "s": [f"row {i}" for i in range(ROWS)]},
        [ROWS],
    )


def _fill(disk: FsPath, free: int) -> None:
    fd = os.open(disk / "ballast", os.O_CREAT | os.O_WRONLY)
    try:
        room = os.statvfs(disk)
        os.posix_fallocate(fd, 0, room.f_bavail * room.f_frsize - free)
    finally:
        os.close(fd)


def _check(location: FsPath) -> None:
    with tdstore.open(location) as td:
        assert torch.equal(td["a"], _rows()["a"]) and torch.equal(td["b"], _rows()["b"])
        assert list(td["s"]) == list(_rows()["s"])
    assert tdstore.verify(location) == []
    left = [parts for parts, _ in files.walk(files.open_dir(str(location))) if files.is_temp(parts[-1])]
    assert left == []


@pytest.mark.parametrize("free", [0, 8 << 10, 64 << 10])
@pytest.mark.parametrize("change", ["append", "shrink", "grow"])
def test_a_length_that_is_refused(disk: FsPath, change: str, free: int) -> None:
    """The leaf at which the disk is full has its committed length again, too, and a copy made aside is gone."""
    location = disk / "run"
    _rows().save(location).close()

    def body() -> None:
        td: Any = tdstore.open(location, "r+")
        _fill(disk, free)
        with pytest.raises(StoreIOError, match="run"):
            if change == "append":
                td.append(_rows())
            elif change == "shrink":
                td.resize_(ROWS // 2)
            else:
                store = td._binding[0].store
                store.resize({("a",): 64 * ROWS, ("s", "spans"): 64 * ROWS})
        if change == "grow":
            td._binding[0].store.discard()
        assert len(td) == ROWS and torch.equal(td["b"], _rows()["b"])
        td.close()

    assert in_child(body) == 0
    os.unlink(disk / "ballast")
    _check(location)


def test_holes_are_read_without_taking_room(disk: FsPath) -> None:
    """A page of a hole that is read through a mapping of a tmpfs takes room, and without any is a SIGBUS."""
    location = disk / "run"
    schema = {"a": ((8,), "float32"), "one": ((), "int64")}
    options: dict[str, Any] = {"preallocate": False, "durable": "none"}
    td = TensorDict.from_schema(schema, batch_size=[ROWS], location=location, storage="memmap", **options)
    td[10:12] = TensorDict({"a": torch.ones(2, 8), "one": torch.ones(2)}, [2])
    td.close()

    def body(mode: Any) -> None:
        store = tdstore.open(location, mode)._binding[0].store
        if mode == "r+":
            _fill(disk, 0)
        rows = torch.tensor([3000, 11, 3999, 11])
        expected = torch.zeros(ROWS, 8)
        expected[10:12] = 1
        for index in ((), (slice(0, ROWS, 1),), (slice(5, 3000, 7), slice(1, 3, 1)), (rows,), (slice(9, 9, 1),)):
            found = store.read([tdstore.types.Read(("a",), index)])[0]
            assert torch.equal(found, expected[index])
        out = torch.full((4, 8), 9.0)
        store.read([tdstore.types.Read(("a",), (rows,), out)])
        assert torch.equal(out, expected[rows])

    assert in_child(lambda: body("r+")) == 0
    assert in_child(lambda: body("r")) == 0


@pytest.mark.parametrize("free", [0, 64 << 10])
@pytest.mark.parametrize("nested", [False, True])
def test_rows_with_values_that_find_no_room(disk: FsPath, nested: bool, free: int) -> None:
    """Values per row need room for their bytes; where there is none no tensor beside them is written either."""
    location = disk / "run"
    whole = _rows()
    whole["t"] = [f"text {i}" for i in range(ROWS)]
    if nested:
        whole = TensorDict({"first": whole, "second": whole.clone()}, [ROWS])
    whole.save(location).close()
    count = 2000
    rows = whole[:count].clone()
    for part in (rows["first"], rows["second"]) if nested else (rows,):
        part["a"] = part["a"] + 1
        part["b"] = part["b"] + 1
        part["s"] = [f"{i}" for i in range(count)]  # finds room, more or less
        part["t"] = [f"{i}" * 50 for i in range(count)]  # does not

    def same(td: Any) -> bool:
        parts = [(td["first"], whole["first"]), (td["second"], whole["second"])] if nested else [(td, whole)]
        return all(
            torch.equal(got[k], kept[k]) if k in "ab" else list(got[k]) == list(kept[k])
            for got, kept in parts
            for k in ("a", "b", "s", "t")
        )

    def body() -> None:
        td: Any = tdstore.open(location, "r+")
        _fill(disk, free)
        with pytest.raises(StoreIOError, match="run"):
            td[:count] = rows
        assert same(td)
        td.close()

    assert in_child(body) == 0
    os.unlink(disk / "ballast")
    with tdstore.open(location) as td:
        assert same(td)
    assert tdstore.verify(location) == []
