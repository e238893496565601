"""Places without room, and first writes that fail: what was there before is there after."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from tdstore import TensorDict
from tdstore.errors import StoreError, StoreExistsError, StoreNotFoundError
from tdstore.rl.buffers import ReplayBuffer
from tdstore.rl.storages import LazyStorage
from tdstore.testing.crash import small_disk
from tests.rl.places import kinds, maker, rows
from tests.servers import redis_server

DISKS = ["memmap", "h5", "zarr", "tdz", "remote"]
SUFFIXES = {"h5": ".h5", "zarr": ".zarr", "tdz": ".tdz"}


def wide(first, n):
    """Rows of a quarter of a mebibyte."""
    i = torch.arange(first, first + n)
    return TensorDict({"x": torch.stack([noise(k) for k in i]), "i": i, "t": [f"row {k}" for k in i.tolist()]}, [n])


def noise(number):
    """What no codec makes smaller."""
    return torch.rand(1 << 16, generator=torch.Generator().manual_seed(int(number)))


def fill(buffer, n=2):
    """Extend until the place is full; the number of rows before that."""
    written = 0
    with pytest.raises((OSError, StoreError)):
        while written < 400:
            buffer.extend(wide(written, n))
            written += n
    return written


def check(storage, written):
    """The rows that were written before are there, and no others."""
    assert len(storage) == storage.write_count == storage.cursor == written
    seen = storage[:]
    assert seen["i"].tolist() == list(range(written)) and all(torch.equal(x, noise(k)) for k, x in enumerate(seen["x"]))
    assert list(seen["t"]) == [f"row {k}" for k in range(written)]


@pytest.mark.parametrize("kind", DISKS)
def test_a_full_disk_in_the_middle_of_extend(kind, tmp_path):
    with small_disk(tmp_path / "disk", 12) as disk:
        place = disk / f"rows{SUFFIXES.get(kind, '')}"
        options = {"preallocate": False} if kind == "memmap" else {}
        storage = LazyStorage(400, kind, path=place, **options)
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        written = fill(buffer)
        assert written
        check(storage, written)
        assert buffer.write_count == len(buffer) == written
        assert buffer.sample()["i"].max() < written
        before = os.statvfs(disk).f_bavail
        for _ in range(3):
            with pytest.raises((OSError, StoreError)):
                buffer.extend(wide(written, 40))
        assert os.statvfs(disk).f_bavail >= before - 256, "rows that did not fit take no room"
        check(storage, written)
        with contextlib.suppress(StoreError):  # some stores note on the disk that they were closed
            buffer.close()
        again = LazyStorage.open(place, storage=kind)
        check(again, written)
        again.close()


def test_a_full_server_in_the_middle_of_extend():
    with redis_server(maxmemory="12mb", maxmemory_policy="noeviction") as server:
        storage = LazyStorage(400, f"{server.url}/rows")
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        written = fill(buffer)
        assert written
        check(storage, written)
        server._ask(b"CONFIG SET maxmemory 64mb\r\n")
        assert buffer.extend(wide(written, 2)).tolist() == [written, written + 1]
        check(storage, written + 2)
        again = LazyStorage.open(f"{server.url}/rows")
        check(again, written + 2)


@pytest.mark.parametrize("kind", DISKS)
def test_a_disk_without_room_for_the_first_rows(kind, tmp_path):
    with small_disk(tmp_path / "disk", 1) as disk:
        place = disk / f"rows{SUFFIXES.get(kind, '')}"
        options = {"preallocate": False} if kind == "memmap" else {}
        storage = LazyStorage(400, kind, path=place, **options)
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        with pytest.raises((OSError, StoreError)):
            buffer.extend(wide(0, 40))
        assert not storage.initialized and len(buffer) == 0
        with pytest.raises(StoreNotFoundError):
            LazyStorage.open(place, storage=kind)
        assert not [found for found in disk.rglob("*") if found.is_file()], "nothing is left"
        buffer.extend(rows(1, 2))
        assert buffer[:]["a"].tolist() == [1, 2]
        buffer.close()


FIRST = {
    "lengths": lambda: {"a": torch.zeros(3), "b": torch.zeros(2)},
    "no entries": lambda: TensorDict({}, [3]),
    "no rows": lambda: TensorDict({"a": torch.zeros(0)}, [0]),
    "no batch": lambda: TensorDict({"a": torch.zeros(3)}, []),
    "an object": lambda: TensorDict({"a": torch.zeros(3), "o": object()}, [3]),
    "sparse": lambda: {"a": torch.zeros(3, 2).to_sparse()},
    "meta": lambda: {"a": torch.zeros(3, 2, device="meta")},
    "jagged": lambda: TensorDict(
        {"a": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)}, [2]
    ),
    "a taken name": lambda: TensorDict({"_replay_state": torch.zeros(3)}, [3]),
}


@kinds(["memory", "memmap", "h5", "zarr", "remote", "redis"])
@pytest.mark.parametrize("what", FIRST)
def test_a_bad_first_batch_leaves_nothing(kind, what, request, tmp_path):
    storage = maker(kind, request)(20)
    before = sorted(tmp_path.rglob("*"))
    buffer = ReplayBuffer(storage=storage)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        buffer.extend(FIRST[what]())
    assert sorted(tmp_path.rglob("*")) == before
    assert not storage.initialized and len(buffer) == 0 and storage.max_size == 20
    if kind != "memory":
        with pytest.raises(StoreNotFoundError):
            LazyStorage.open(storage.place, storage=storage.storage_name)
    assert buffer.extend(rows(1, 2, 3)).tolist() == [0, 1, 2]
    assert buffer[:]["a"].tolist() == [1, 2, 3]


def test_a_first_write_that_the_medium_refuses_leaves_what_was_there(tmp_path, monkeypatch):
    old = LazyStorage(20, "h5", path=tmp_path / "rows.h5")
    old.append(rows(1, 2))
    old.close()
    storage = LazyStorage(20, "h5", path=tmp_path / "rows.h5")
    with pytest.raises(StoreExistsError):
        storage.append(rows(3))
    found = LazyStorage.open(tmp_path / "rows.h5")
    assert found[:]["a"].tolist() == [1, 2]
    found.close()
    taken = LazyStorage(20, "h5", path=tmp_path / "rows.h5", existsok=True)
    with pytest.raises(RuntimeError):
        taken.append({"a": torch.zeros(3), "b": torch.zeros(2)})
    with pytest.raises(RuntimeError, match="rows in .* are others"):
        taken.append(TensorDict({"b": torch.zeros(3)}, [3]))
    assert LazyStorage.open(tmp_path / "rows.h5")[:]["a"].tolist() == [1, 2]


def test_rows_that_wait_go_on_waiting_when_the_disk_is_full(tmp_path):
    with small_disk(tmp_path / "disk", 12) as disk:
        filler = disk / "filler"
        filler.write_bytes(bytes(6 << 20))
        storage = LazyStorage(400, "h5", path=disk / "rows.h5", write_buffer=6)
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        written = fill(buffer)
        check(storage, written)
        filler.unlink()
        buffer.extend(wide(written, 4))
        check(storage, written + 4)
        buffer.close()
        check(LazyStorage.open(disk / "rows.h5"), written + 4)


def test_rows_that_wait_over_old_ones_are_taken_back(tmp_path, monkeypatch):
    storage = LazyStorage(6, "h5", path=tmp_path / "rows.h5", write_buffer=4)
    storage.append(rows(0, 1, 2, 3, 4, 5))
    storage.append(rows(6, 7, 8))

    def refuse(store, writes):
        raise OSError("the medium failed")

    with monkeypatch.context() as patched:
        patched.setattr(type(storage._table.handle.store), "write", refuse)
        with pytest.raises(OSError, match="medium"):
            storage.append(rows(9, 10))
        with pytest.raises(OSError, match="medium"):
            storage.append(rows(9, 10, 11, 12))
        assert storage[:]["a"].tolist() == [6, 7, 8, 3, 4, 5] and storage.cursor == 3 and storage.write_count == 9
    storage.append(rows(9, 10))
    storage.close()
    found = LazyStorage.open(tmp_path / "rows.h5")
    assert found[:]["a"].tolist() == [6, 7, 8, 9, 10, 5] and found.write_count == 11
