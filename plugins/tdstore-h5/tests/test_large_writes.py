"""One call that writes more rows than are remembered until the commit: all of them are there, or none."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path as FsPath

import pytest
import torch
from tdstore_h5.rows import contiguous, undo

import tdstore
from tdstore import TensorDict
from tdstore.errors import StoreIOError
from tdstore.testing.crash import small_disk

MIB = 1 << 20


def _refuse(patch: pytest.MonkeyPatch, nth: int) -> None:
    """Let the nth write of rows put half of its bytes, and fail; the others succeed."""
    count, real = [0], contiguous.write_at

    def write_at(fd: int, data: memoryview, at: int) -> None:
        count[0] += 1
        if count[0] == nth:
            real(fd, data[: len(data) // 2], at)
            raise OSError(errno.EIO, "the medium fails")
        real(fd, data, at)

    patch.setattr(contiguous, "write_at", write_at)


def test_80_mib_of_rows_that_the_medium_refuses(tmp_path: FsPath) -> None:
    """More than the real bound, in two leaves, of which the second is refused."""
    file = tmp_path / "t.h5"
    rows = 40
    old = TensorDict({k: torch.full((rows, MIB), i, dtype=torch.uint8) for i, k in enumerate("ab")}, [rows])
    old.save(file).close()
    td = tdstore.open(file, mode="r+")
    td.set_at_("a", torch.full((MIB,), 9, dtype=torch.uint8), 5)  # earlier, and not committed
    new = TensorDict({k: torch.full((rows, MIB), 7, dtype=torch.uint8) for k in "ab"}, [rows])
    assert new.bytes() > undo.MOST
    with pytest.MonkeyPatch.context() as patch:
        _refuse(patch, 2)
        with pytest.raises(StoreIOError) as caught:
            td[:] = new
    assert not getattr(caught.value, "__notes__", [])
    wanted = old["a"].clone()
    wanted[5] = 9
    assert torch.equal(td["a"], wanted) and torch.equal(td["b"], old["b"])
    td.close()
    assert os.listdir(tmp_path) == ["t.h5"]
    with tdstore.open(file, verify="full") as again:
        assert torch.equal(again["a"], wanted) and torch.equal(again["b"], old["b"])


@pytest.fixture
def disk(tmp_path: FsPath) -> Iterator[FsPath]:
    with small_disk(tmp_path / "disk", 6) as folder:
        yield folder


def test_rows_that_nothing_has_room_to_remember(disk: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without room for old rows, and more of them than memory may take: refused before the first is written."""
    monkeypatch.setattr(undo, "MOST", MIB)
    monkeypatch.setattr("tdstore_h5.rows.undo._OF_ONE_CALL", 1000)
    file = disk / "t.h5"
    old = TensorDict({"a": torch.randint(0, 255, (1000, 4000), dtype=torch.uint8), "b": torch.arange(1000)}, [1000])
    old.save(file).close()
    td = tdstore.open(file, mode="r+")
    td.set_at_("b", torch.tensor(-1), 0)
    td.set_at_("a", torch.zeros(4000, dtype=torch.uint8), 0)
    before = td.to_tensordict()
    with pytest.raises(OSError, match="space"), (disk / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    with pytest.raises(StoreIOError, match="keeping old rows") as caught:
        td[:] = TensorDict({"b": torch.zeros(1000).long(), "a": torch.ones(1000, 4000, dtype=torch.uint8)}, [1000])
    assert caught.value.errno == errno.ENOSPC
    assert (td.to_tensordict() == before).all()
    td.set_at_("b", torch.tensor(-2), 0)
    (disk / "filler").unlink()
    td.close()
    with tdstore.open(file, verify="full") as again:
        assert again["b"][:2].tolist() == [-2, 1] and torch.equal(again["a"], before["a"])


@pytest.mark.parametrize("in_memory", [1000, 8 * MIB])
@pytest.mark.parametrize("refused", [False, True])
def test_what_was_remembered_for_a_call_is_let_go(
    tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch, refused: bool, in_memory: int
) -> None:
    """No file stays open after a call, whether it succeeded or not."""
    monkeypatch.setattr(undo, "MOST", MIB)
    monkeypatch.setattr("tdstore_h5.rows.undo._OF_ONE_CALL", in_memory)
    file = tmp_path / "t.h5"
    TensorDict({"a": torch.zeros(100, 40_000, dtype=torch.uint8)}, [100]).save(file).close()
    td = tdstore.open(file, mode="r+")
    value = torch.ones(100, 40_000, dtype=torch.uint8)
    td["a"] = value
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch:
            if refused:
                _refuse(patch, 1)
                with pytest.raises(StoreIOError):
                    td["a"] = value + 1
            else:
                td["a"] = value
    assert len(os.listdir("/proc/self/fd")) == before
    assert (td["a"] == 1).all()
    td.close()
