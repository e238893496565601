"""Tables whose rows stay in a store: read there, or cached in memory and written in groups."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdstore import StoreHandle, lifetime
from tdstore.dtypes import to_numpy
from tdstore.rl.tables.columns import Column
from tdstore.rl.tables.row_sets import RowSet, blocks_of, count_rows
from tdstore.rl.tables.state import LENGTH, Ints, State, read_state, write_state
from tdstore.rl.tables.table import STATE, UNDO, ArrayTable, Table
from tdstore.store import Cap
from tdstore.types import Read, Write


class StoredTable(Table):
    """Columns that stay in a store; each write and each read is one request for all of them."""

    durable = True
    by_request = True

    def __init__(
        self, columns: Sequence[Column], capacity: int, inner: tuple[int, ...], handle: StoreHandle, *, saved: int
    ) -> None:
        super().__init__(columns, capacity, inner)
        self.undo_rows = saved
        self.handle = handle

    @property
    def state(self) -> State:
        """The counters, read from the store."""
        return read_state(to_numpy(self.handle.store.read([Read(STATE)])[0]).data, self.handle.store.url)

    def commit(self, state: State) -> None:
        """Write the counters once the rows are there, and commit both if nothing else preserves them after a death."""
        self._count(state)
        if self.publish is not None:
            self.publish()
            self.publish = None
        elif Cap.SHARED not in self.handle.store.caps:
            self.handle.commit(self.handle.groups)

    def _count(self, state: State) -> None:
        """Write the counters: what is written before a flush is on the disk before what follows."""
        store = self.handle.store
        store.flush()
        numbers = np.zeros(LENGTH, np.int64)
        write_state(numbers.data, state)
        store.write([Write(STATE, (), torch.from_numpy(numbers))])
        store.flush()

    def write(self, rows: RowSet, values: Sequence[Any]) -> None:
        """Write rows of all columns."""
        index = (slice(rows.start, rows.stop, 1) if isinstance(rows, slice) else torch.from_numpy(rows),)
        pairs = zip(self.columns, values, strict=True)
        self.handle.store.write([Write(c.path, index, v.cpu()) for c, v in pairs if v is not None])

    def gather(self, slots: Ints) -> list[Tensor]:
        """Return copies of slots."""
        return self._read(range(len(self.columns)), slots)

    def column(self, number: int, slots: Ints) -> Tensor:
        """Return copies of slots of one column."""
        return self._read([number], slots)[0]

    def _read(self, numbers: Sequence[int], slots: Ints) -> list[Tensor]:
        paths = [self.columns[k].path for k in numbers]
        store = self.handle.store
        if not self.inner:
            rows = torch.from_numpy(slots)
            return store.read([Read(path, (rows,)) for path in paths])
        # A store takes rows of one dimension: whole rows are read, each once, and their slots picked.
        unique, inverse = np.unique(slots // self.slots_per_row, return_inverse=True)
        found = store.read([Read(path, (torch.from_numpy(unique),)) for path in paths])
        picked = torch.from_numpy(inverse.reshape(-1) * self.slots_per_row + slots % self.slots_per_row)
        dims = 1 + len(self.inner)
        return [t.reshape(len(unique) * self.slots_per_row, *t.shape[dims:]).index_select(0, picked) for t in found]

    def look(self, rows: slice) -> list[Tensor]:
        """Return copies of rows."""
        index = (slice(rows.start, rows.stop, 1),)
        return self.handle.store.read([Read(column.path, index) for column in self.columns])

    def save(self, rows: RowSet, state: State) -> None:
        """Save rows that are about to be overwritten."""
        store = self.handle.store
        index = (slice(rows.start, rows.stop, 1) if isinstance(rows, slice) else torch.from_numpy(rows),)
        old = store.read([Read(column.path, index) for column in self.columns])
        slots = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        parts = [
            slots.astype("<i8").view(np.uint8),
            *(to_numpy(t.contiguous()).reshape(-1).view(np.uint8) for t in old),
        ]
        room = torch.from_numpy(np.concatenate(parts))
        store.write([Write(UNDO, (slice(0, len(room), 1),), room)])
        self._count(state._replace(pending=count_rows(rows)))

    def undo(self) -> State:
        """Put back the rows that a killed writer was overwriting."""
        state = self.state
        n = state.pending
        if n:
            store = self.handle.store
            size = n * (8 + sum(c.nbytes for c in self.columns) * self.slots_per_row)
            room = to_numpy(store.read([Read(UNDO, (slice(0, size, 1),))])[0])
            slots, at, values = room[: 8 * n].view("<i8").astype(np.int64), 8 * n, []
            for column in self.columns:
                nbytes = n * column.nbytes * self.slots_per_row
                flat = torch.from_numpy(room[at : at + nbytes].copy()).view(column.dtype)
                values.append(flat.view(n, *self.inner, *column.shape))
                at += nbytes
            self.write(slots, values)
            self.commit(state._replace(pending=0))
        return self.state

    def take_back(self, *, saved: bool) -> None:
        """Restore the committed rows after a failed write, including those that the store holds back."""
        store = self.handle.store
        if Cap.DISCARD in store.caps and Cap.SHARED not in store.caps:
            store.discard()  # rows that were flushed may stay, where others see them at once
        if saved:
            self.undo()

    def flush(self) -> None:
        """Commit."""
        if self.handle.store.writable:
            self.handle.commit(self.handle.groups)

    def close(self) -> None:
        """Commit, and close the store."""
        self.handle.close()


class CachedTable(Table):
    """Rows of a store that is slow to reach, with all of them in memory: reads never access the store.

    Writes are done in memory, and go to the store in one commit once `limit` rows are waiting, at `flush`, and at the
    end.

    Args:
        stored: the rows in their place; those that are visible are read into memory now.
        limit: number of rows that may wait.
    """

    durable = True
    on_cpu = True

    def __init__(self, stored: StoredTable, limit: int) -> None:
        super().__init__(stored.columns, stored.capacity, stored.inner)
        self.handle, self.undo_rows = stored.handle, stored.undo_rows
        self._mirror = _mirror(stored)
        self._waiting = _Waiting(stored, self._mirror, min(limit, stored.capacity))
        self._end = lifetime.Ending(self, self._waiting.drain, stored.handle.store.url, commit=self._waiting.drain)
        self._written: list[RowSet] = []
        self._old: tuple[RowSet, list[Tensor]] | None = None
        self.publish = stored.publish

    @property
    def state(self) -> State:
        """The counters, with the rows that wait."""
        return self._mirror.state

    def commit(self, state: State) -> None:
        """Make counters valid; rows and counters go to the store together, now or later."""
        before = self._mirror.state
        self._mirror.commit(state)
        written, self._written = self._written, []
        try:
            self._waiting.add(written, state)
            if self.stored.publish is not None:  # the place is there, before its rows are
                self.stored.commit(before)
            self.publish = None
        except BaseException:  # the place has no room: these rows do not wait, older ones still do
            self._waiting.take_back(written)
            self._mirror.commit(before)
            raise

    def save(self, rows: RowSet, state: State) -> None:
        """Keep the rows that are about to be overwritten, until they wait."""
        index = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        self._old = rows, [tensor[index].clone() for tensor in self._mirror.tensors]

    def undo(self) -> State:
        """Put back the rows that were being overwritten."""
        if self._old is not None:
            self._mirror.write(*self._old)
        self._old, self._written = None, []
        return self.state

    def write(self, rows: RowSet, values: Sequence[Any]) -> None:
        """Write rows in memory."""
        # A row waits once: its older value goes first, with the counters that belong to it.
        self._waiting.make_room(rows)
        self._mirror.write(rows, values)
        self._written.append(rows)

    def gather(self, slots: Ints) -> list[Tensor]:
        """Return copies of slots, from memory."""
        return self._mirror.gather(slots)

    def column(self, number: int, slots: Ints) -> Tensor:
        """Return copies of slots of one column, from memory."""
        return self._mirror.column(number, slots)

    def look(self, rows: slice) -> list[Tensor]:
        """Return copies of rows: a change of a view would not reach the store."""
        return [tensor.clone() for tensor in self._mirror.look(rows)]

    @property
    def stored(self) -> StoredTable:
        """The rows in their place, without those that wait."""
        return self._waiting.stored

    def flush(self) -> None:
        """Send what waits, and commit."""
        self._waiting.drain()
        self._waiting.stored.flush()

    def close(self) -> None:
        """Send what waits, and close the store."""
        self._end()
        self._waiting.stored.close()

    def abandon(self) -> None:
        """Release a place whose first rows were not committed: it is as it was before."""
        self._end.cancel()
        self._waiting.stored.close()


def _mirror(stored: StoredTable) -> ArrayTable:
    shapes = [(stored.capacity, *stored.inner, *column.shape) for column in stored.columns]
    tensors = [torch.zeros(shape, dtype=c.dtype, device="cpu") for shape, c in zip(shapes, stored.columns, strict=True)]
    made = ArrayTable(stored.columns, stored.capacity, stored.inner, tensors)
    state = stored.state
    for rows in blocks_of(slice(0, state.length), stored.row_bytes):
        made.write(rows, stored.look(rows))
    made.commit(state)
    return made


class _Waiting:
    """Rows that are in memory and not in their place yet."""

    def __init__(self, stored: StoredTable, mirror: ArrayTable, limit: int) -> None:
        self.stored, self.mirror, self.limit = stored, mirror, limit
        self._lock = threading.RLock()
        self._marks = np.zeros(stored.capacity, bool)
        self._log: list[tuple[list[RowSet], State]] = []
        self._rows = 0
        self._state = stored.state
        """The counters in the store."""

    def make_room(self, rows: RowSet) -> None:
        """Send the rows that wait if any of these is among them."""
        if self._marks[rows].any():
            self.drain()

    def add(self, written: list[RowSet], state: State) -> None:
        """Let rows wait, with the counters after them."""
        with self._lock:
            for rows in written:
                self._marks[rows] = True
                self._rows += count_rows(rows)
            self._log.append((written, state))
            if self._rows >= self.limit:
                self.drain()

    def take_back(self, written: list[RowSet]) -> None:
        """Forget the rows that were added last, unless they were sent."""
        with self._lock:
            if self._log and self._log[-1][0] is written:
                self._log.pop()
                for rows in written:
                    self._marks[rows] = False
                    self._rows -= count_rows(rows)

    def drain(self) -> None:
        """Send all pending rows: as many writes at once as can be undone."""
        with self._lock:
            while self._log:
                most, count, sent = self.stored.undo_rows, 0, 0
                for written, _ in self._log:
                    more = sum(map(count_rows, written))
                    if sent and count + more > most:
                        break
                    count, sent = count + more, sent + 1
                self._send([rows for written, _ in self._log[:sent] for rows in written], self._log[sent - 1][1])
                del self._log[:sent]
            self._marks[:] = False
            self._rows = 0

    def _send(self, written: list[RowSet], after: State) -> None:
        parts = [np.arange(r.start, r.stop) if isinstance(r, slice) else r for r in written]
        rows = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
        old = rows[rows < self._state.length]
        if len(old):
            self.stored.save(_as_slice(old), self._state)
        try:
            for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if _few_runs(rows) else [rows]:
                if len(run):
                    place = _as_slice(run)
                    self.stored.write(place, [tensor[place] for tensor in self.mirror.tensors])
            self.stored.commit(after)
        except BaseException:
            if self.stored.publish is None:
                self.stored.take_back(saved=len(old) > 0)
            raise
        self._state = after


def _few_runs(rows: Ints) -> bool:
    return len(rows) > 0 and int((np.diff(rows) != 1).sum()) < 4


def _as_slice(rows: Ints) -> Any:
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows
