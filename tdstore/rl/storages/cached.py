"""A table whose rows are all in memory too, and reach their place some at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdstore import lifetime
from tdstore.rl.storages.table import ArrayTable, Ints, Rows, State, StoredTable, Table, count_of

_BLOCK = 8 << 20


class CachedTable(Table):
    """Rows of a store that is slow to reach, with all of them in memory: reads never ask the store.

    Writes are done in memory, and go to the store in one commit once `limit` rows wait, at `flush`, and at the end.

    Args:
        stored: the rows in their place; those that are visible are read into memory now.
        limit: number of rows that may wait.
    """

    durable = True

    def __init__(self, stored: StoredTable, limit: int) -> None:
        super().__init__(stored.columns, stored.capacity, stored.inner)
        self.handle, self.undo_rows = stored.handle, stored.undo_rows
        self._mirror = _mirror(stored)
        self._waiting = _Waiting(stored, self._mirror, min(limit, stored.capacity))
        self._end = lifetime.Ending(self, self._waiting.drain, stored.handle.store.url)
        self._written: list[Rows] = []
        self._old: tuple[Rows, list[Tensor]] | None = None
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
        except BaseException:  # the place has no room: these rows do not wait, older ones go on waiting
            self._waiting.take_back(written)
            self._mirror.commit(before)
            raise

    def save(self, rows: Rows, state: State) -> None:
        """Keep the rows that are about to be overwritten, until they wait."""
        index = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        self._old = rows, [tensor[index].clone() for tensor in self._mirror.tensors]

    def undo(self) -> State:
        """Put back the rows that were being overwritten."""
        if self._old is not None:
            self._mirror.write(*self._old)
        self._old, self._written = None, []
        return self.state

    def write(self, rows: Rows, values: Sequence[Any]) -> None:
        """Write rows in memory."""
        # A row waits once: its older value goes first, with the counters that belong to it.
        self._waiting.make_room(rows)
        self._mirror.write(rows, values)
        self._written.append(rows)

    def gather(self, slots: Ints) -> list[Tensor]:
        """Copies of slots, from memory."""
        return self._mirror.gather(slots)

    def column(self, number: int, slots: Ints) -> Tensor:
        """Copies of slots of one column, from memory."""
        return self._mirror.column(number, slots)

    def look(self, rows: slice) -> list[Tensor]:
        """Copies of rows: what is changed in a view would not reach the store."""
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
        """Let go of a place whose first rows were not committed: it is as it was before."""
        self._end.cancel()
        self._waiting.stored.close()


def _mirror(stored: StoredTable) -> ArrayTable:
    shapes = [(stored.capacity, *stored.inner, *column.shape) for column in stored.columns]
    tensors = [torch.zeros(shape, dtype=c.dtype) for shape, c in zip(shapes, stored.columns, strict=True)]
    made = ArrayTable(stored.columns, stored.capacity, stored.inner, tensors)
    state = stored.state
    step = max(1, _BLOCK // max(1, sum(c.nbytes for c in stored.columns) * stored.slots_per_row))
    for start in range(0, state.length, step):
        rows = slice(start, min(state.length, start + step))
        made.write(rows, stored.look(rows))
    made.commit(state)
    return made


class _Waiting:
    """Rows that are in memory and not in their place yet."""

    def __init__(self, stored: StoredTable, mirror: ArrayTable, limit: int) -> None:
        self.stored, self.mirror, self.limit = stored, mirror, limit
        self._lock = threading.RLock()
        self._marks = np.zeros(stored.capacity, bool)
        self._log: list[tuple[list[Rows], State]] = []
        self._rows = 0
        self._state = stored.state
        """The counters in the store."""

    def make_room(self, rows: Rows) -> None:
        """Send what waits if one of these rows does."""
        if self._marks[rows].any():
            self.drain()

    def add(self, written: list[Rows], state: State) -> None:
        """Have rows and the counters after them wait."""
        with self._lock:
            for rows in written:
                self._marks[rows] = True
                self._rows += count_of(rows)
            self._log.append((written, state))
            if self._rows >= self.limit:
                self.drain()

    def take_back(self, written: list[Rows]) -> None:
        """Forget the rows that were added last, unless they were sent."""
        with self._lock:
            if self._log and self._log[-1][0] is written:
                self._log.pop()
                for rows in written:
                    self._marks[rows] = False
                    self._rows -= count_of(rows)

    def drain(self) -> None:
        """Send all that waits: as many writes at once as can be taken back."""
        with self._lock:
            while self._log:
                most, count, taken = self.stored.undo_rows, 0, 0
                for written, _ in self._log:
                    more = sum(map(count_of, written))
                    if taken and count + more > most:
                        break
                    count, taken = count + more, taken + 1
                self._send([rows for written, _ in self._log[:taken] for rows in written], self._log[taken - 1][1])
                del self._log[:taken]
            self._marks[:] = False
            self._rows = 0

    def _send(self, written: list[Rows], after: State) -> None:
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
