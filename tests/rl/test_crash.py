"""What a killed writer leaves: a length and a cursor that belong to rows which are wholly there."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import shutil
import signal
import sys
import time
import traceback
from functools import partial

import pytest
import torch

from tdstore import TensorDict
from tdstore.rl.storages import LazyMemmapStorage, LazyStorage
from tdstore.rl.tables import live, table
from tdstore.testing.crash import small_disk
from tdstore.testing.processes.deaths import StoredFiles, at_steps, copies
from tests.rl.places import kinds, maker

CAPACITY = 40


def numbered(start, n):
    """Rows of which each entry tells the number."""
    i = torch.arange(start, start + n)
    return TensorDict(
        {
            "i": i,
            "wide": i.view(-1, 1).expand(n, 300).clone(),
            "next": TensorDict({"small": i.to(torch.int16)}, [n]),
            "text": [f"row {k}" for k in i.tolist()],
        },
        [n],
    )


def check(storage, acknowledged):
    """The visible rows are whole, follow one another, and no acknowledged one is missing; writing goes on."""
    length, count = len(storage), storage.write_count
    assert count >= acknowledged and length == min(count, CAPACITY) and storage.cursor == count % CAPACITY
    if not length:
        return
    rows = storage[:]
    order = [(storage.cursor - length + k) % CAPACITY for k in range(length)]
    assert rows["i"][order].tolist() == list(range(count - length, count))
    assert (rows["wide"] == rows["i"].view(-1, 1)).all() and (rows["next", "small"] == rows["i"]).all()
    assert list(rows["text"]) == [f"row {k}" for k in rows["i"].tolist()]
    storage.append(numbered(count, 3))
    assert storage[(storage.cursor - 1) % CAPACITY]["text"] == f"row {count + 2}"


def write_until_killed(name, place, write_buffer, acknowledged):
    """Write rows for ever, and tell how many are committed."""
    torch.set_num_threads(1)
    storage = LazyStorage(CAPACITY, name or place, path=place if name else None, write_buffer=write_buffer)
    count = 0
    while True:
        n = random.choice([1, 1, 2, 7, 55])
        storage.append(numbered(count, n))
        count += n
        if write_buffer and count % 5 == 0:
            storage.flush()
        if not write_buffer or count % 5 == 0:
            os.write(acknowledged, b"%d\n" % count)


@pytest.mark.parametrize("write_buffer", [0, 25], ids=["each write", "buffered"])
@kinds(["memmap", "h5", "zarr", "remote", "redis"])
def test_a_writer_that_is_killed_at_any_time(kind, write_buffer, request, tmp_path):
    server = request.getfixturevalue("redis") if kind == "redis" else None
    for attempt in range(4):
        if server is not None:
            name, place = None, f"{server.url}/killed{write_buffer}-{attempt}"
        else:
            name, place = kind, str(tmp_path / f"p{attempt}") + {"h5": ".h5", "zarr": ".zarr"}.get(kind, "")
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:  # a child that fails or waits for a lock ends, and says where: it never goes on with other tests
                faulthandler.dump_traceback_later(100, exit=True, file=sys.__stderr__)
                write_until_killed(name, place, write_buffer, write)
            finally:
                with contextlib.suppress(BaseException):
                    traceback.print_exc(file=sys.__stderr__)
                os._exit(1)
        os.close(write)
        with os.fdopen(read, "rb") as acknowledged:
            first = acknowledged.readline()
            assert first
            time.sleep(random.uniform(0.0, 0.25))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            lines = first + acknowledged.read()
        storage = LazyStorage.open(place, storage=name, write_buffer=write_buffer)
        check(storage, int(lines.split()[-1]))
        storage.close()


@pytest.mark.parametrize("begun", [10, 40, 57], ids=["filling", "full", "around the end"])
def test_a_writer_that_dies_at_each_step(begun, tmp_path):
    template, place = tmp_path / "template", tmp_path / "rows"
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=template)
    storage.append(numbered(0, begun))
    storage.close()

    shutil.copytree(template, place)

    def work():
        storage = LazyStorage.open(place)
        storage.append(numbered(begun, 9))
        storage.append(numbered(begun + 9, 1))

    points = [(table, "memmove"), (live, "write_state")]
    died = 0
    for dead in copies(work, partial(at_steps, points), lambda: StoredFiles(place), step=1, least=8):
        storage = LazyStorage.open(place)
        assert storage.write_count in (begun, begun + 9, begun + 10)
        check(storage, begun if dead else begun + 10)
        storage.close()
        died += dead
    assert died > 5


@pytest.mark.parametrize("begun", [10, 40, 57], ids=["filling", "full", "around the end"])
def test_a_temporary_writer_that_dies_at_each_step(begun, tmp_path):
    """Rows that go with their process are not saved before they are overwritten; a kill leaves the ones before them."""
    template, place = tmp_path / "template", tmp_path / "rows"
    first = LazyMemmapStorage(CAPACITY, scratch_dir=template, auto_cleanup=True)
    first.append(numbered(0, begun))
    assert not list(template.glob("_replay_undo*"))

    shutil.copytree(template, place)

    def work():
        storage = LazyStorage.open(place)
        storage.append(numbered(begun, 9))
        storage.append(numbered(begun + 9, 1))

    points, seen = [(table, "memmove"), (live, "write_state")], set()
    for dead in copies(work, partial(at_steps, points), lambda: StoredFiles(place), step=1, least=8):
        storage = LazyStorage.open(place)
        if len(storage) == min(storage.write_count, CAPACITY):
            check(storage, begun if dead else begun + 10)
            seen.add("all")
        else:
            rows = storage[:]
            assert storage.cursor == len(storage) in (begun % CAPACITY, (begun + 9) % CAPACITY, 0)
            assert (rows["wide"] == rows["i"].view(-1, 1)).all() and (rows["next", "small"] == rows["i"]).all()
            assert list(rows["text"] or ()) == [f"row {k}" for k in rows["i"].tolist()]
            storage.append(numbered(100, 3))
            assert storage[storage.cursor - 1]["i"] == 102
            seen.add("those before")
        storage.close()
    assert seen == ({"all"} if begun == 10 else {"all", "those before"})
    assert first.cleanup()
    assert not template.exists()


def test_a_writer_that_dies_while_it_skips_rows(tmp_path):
    """Rows that were appended when a process died, and never became visible, are not there for a later write either."""
    template, place = tmp_path / "template", tmp_path / "rows"
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=template)
    storage.append(numbered(1, 30))
    storage.empty()
    storage.close()
    shutil.copytree(template, place)

    def work():
        storage = LazyStorage.open(place)
        storage.append(numbered(1, 4))
        storage.set([20, 9], numbered(90, 2))

    points, lengths = [(table, "memmove"), (live, "write_state"), (table, "_copy_brief")], set()
    for _ in copies(work, partial(at_steps, points), lambda: StoredFiles(place), step=1, least=6):
        storage = LazyStorage.open(place)
        lengths.add(len(storage))
        storage.set([25], numbered(95, 1))
        first = [1, 2, 3, 4] if lengths and storage[0]["i"] else [0] * 4
        numbers = storage[:]["i"].tolist()
        assert numbers[:4] == first and numbers[25] == 95
        assert {(k, n) for k, n in enumerate(numbers[4:25], 4) if n} in (set(), {(20, 90), (9, 91)})
        assert (storage[:]["wide"] == storage[:]["i"].view(-1, 1)).all()
        storage.close()
    assert lengths == {0, 4, 21}


def test_a_temporary_write_that_fails_leaves_the_rows_as_they_were(tmp_path, monkeypatch):
    storage = LazyMemmapStorage(CAPACITY, auto_cleanup=True)
    storage.append(numbered(0, 45))
    before = storage[:].to_tensordict()

    def failing(*_):
        raise OSError("the medium failed")

    monkeypatch.setattr(table, "memmove", failing)
    with pytest.raises(OSError, match="medium"):
        storage.append(numbered(45, 5))
    monkeypatch.undo()
    assert (storage[:].to_tensordict()["wide"] == before["wide"]).all()
    check(storage, 45)


def test_large_writes_over_old_rows_go_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "UNDO_BYTES", 8000)
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "rows")
    storage.append(numbered(0, 57))
    assert storage._table.undo_rows < 5
    storage.append(numbered(57, 30))
    check(storage, 87)


@pytest.mark.parametrize("written", [0, 2])
def test_rows_that_were_never_written_are_not_visible_between_parts(written, tmp_path, monkeypatch):
    """More rows than there is room for begin in the middle of the ring: the rows before were visible as zeros."""
    monkeypatch.setattr(table, "UNDO_BYTES", 8)
    storage = LazyMemmapStorage(5, scratch_dir=tmp_path / "rows")
    row = TensorDict({"i": torch.arange(1, 20)}, [19])
    if written:
        storage.append(row[:written])
    seen, real = [], live.LiveTable.write

    def failing(self, *arguments):
        seen.append(storage[:]["i"].tolist() if len(storage) else [])
        if len(seen) == fails_at:
            raise OSError("the medium failed")
        real(self, *arguments)

    monkeypatch.setattr(live.LiveTable, "write", failing)
    for fails_at in (2, 3):
        with pytest.raises(OSError, match="medium"):
            storage.append(row[written:8])
        assert len(storage) == storage.cursor == storage.write_count == written
        seen.clear()
    fails_at = 0
    storage.append(row[written:8])
    assert len(seen) >= 3
    assert all(0 not in rows for rows in seen)
    assert storage[:]["i"].tolist() == [6, 7, 8, 4, 5]
    assert (storage.cursor, storage.write_count) == (3, 8)


def test_a_full_disk_changes_nothing(tmp_path):
    with small_disk(tmp_path / "disk", 8) as disk:
        storage = LazyMemmapStorage(100, scratch_dir=disk / "rows", preallocate=False)
        block = TensorDict({"x": torch.ones(2, 1 << 18), "i": torch.arange(2)}, [2])
        written = 0
        with pytest.raises(OSError, match="rows.*x"):
            while True:
                storage.append(block)
                written += 2
        assert written and len(storage) == written == storage.write_count and storage.cursor == written
        assert (storage[:]["x"] == 1).all() and storage[:]["i"].tolist() == [0, 1] * (written // 2)
        storage[0] = TensorDict({"x": torch.zeros(1 << 18), "i": torch.tensor(7)})
        assert storage[0]["i"] == 7
        storage.cleanup()


def test_a_write_that_fails_leaves_the_rows_as_they_were(tmp_path, monkeypatch):
    storage = LazyStorage(CAPACITY, "h5", path=tmp_path / "rows.h5")
    storage.append(numbered(0, 45))
    before = storage[:].to_tensordict()
    real = type(storage._table.handle.store).write
    calls = []

    def failing(store, writes):
        calls.append(len(writes))
        if len(calls) == 3:  # the rows, after those that are saved, and the counters
            real(store, writes[:2])
            raise OSError("the medium failed")
        real(store, writes)

    monkeypatch.setattr(type(storage._table.handle.store), "write", failing)
    with pytest.raises(OSError, match="medium"):
        storage.append(numbered(45, 5))
    monkeypatch.undo()
    assert (storage[:].to_tensordict()["wide"] == before["wide"]).all()
    check(storage, 45)


@kinds(["h5", "zarr", "remote", "redis"])
def test_rows_that_wait_reach_their_place(kind, request):
    storage = maker(kind, request)(CAPACITY, write_buffer=10)
    place, name = storage.place, storage.storage_name
    store = None
    for k in range(57):
        storage.append(numbered(k, 1))
        store = store or storage._table.stored
        assert storage[-1 if k < CAPACITY else k % CAPACITY]["i"] == k, "reads see what waits"
        assert store.state.write_count == (k + 1) // 10 * 10
    storage[3] = numbered(999, 1)[0]
    storage.append(numbered(57, CAPACITY + 5))
    storage.close()
    again = LazyStorage.open(place, storage=name)
    check(again, 57 + CAPACITY + 5)
