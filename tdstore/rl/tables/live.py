"""Tables whose columns are live leaves of a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdstore import MemoryMappedTensor, StoreHandle
from tdstore.dtypes import to_numpy
from tdstore.rl.tables.columns import Block, Column
from tdstore.rl.tables.row_sets import RowSet, count_rows
from tdstore.rl.tables.state import State, read_state, write_state
from tdstore.rl.tables.table import STATE, UNDO, ArrayTable
from tdstore.storekit.pages import MANY, map_pages, reserve
from tdstore.types import Write

_AHEAD = 1 << 20
"""Bytes that are taken from the disk at once when rows are first written."""
_LARGE = 256 << 10
"""Bytes of a column from which on the pages of its file are created by mapping them."""


class LiveTable(ArrayTable):
    """Columns that are live leaves of a store: memory-mapped files, shared memory."""

    def __init__(
        self, columns: Sequence[Column], capacity: int, inner: tuple[int, ...], handle: StoreHandle, *, saved: int
    ) -> None:
        self.handle = handle
        store = handle.store
        tensors = [store.view(column.path) for column in columns]
        self._state_leaf = store.view(STATE)
        undo = store.view(UNDO) if saved else None
        super().__init__(columns, capacity, inner, tensors, undo, saved)
        self._numbers = to_numpy(self._state_leaf).data
        self._leaves = [*tensors, self._state_leaf, *([] if undo is None else [undo])]
        self._touched = False
        self._reserved = self._beyond = 0
        """Rows below the first have room on the disk; at and above the second nothing was ever written."""
        self._marks = undo is None
        if undo is None:
            self.durable, self.undo_rows = True, capacity
        self._mapped = all(isinstance(tensor, MemoryMappedTensor) for tensor in tensors)
        self._largest = max((size for _, size in self._bytes), default=0)
        self._ahead = max(1, _AHEAD // max(self.row_bytes, 1))

    @property
    def state(self) -> State:
        """The counters as they are committed, by whichever process."""
        return read_state(self._numbers, self.handle.store.url)

    def commit(self, state: State) -> None:
        """Make counters valid, in memory that other processes see."""
        if not self._touched:
            self._touch()
        write_state(self._numbers, state)
        if self.publish is not None:
            self.publish()
            self.publish, self._touched = None, False

    def save(self, rows: RowSet, state: State) -> None:
        """Save rows that are about to be overwritten; without a leaf to save them in, note the first of them."""
        if not self._touched:
            self._touch()
        if self._marks:
            first = rows.start if isinstance(rows, slice) else int(rows.min())
            length, cursor, count, _, scattered, epoch = state
            write_state(self._numbers, (length, cursor, count, -1 - first, scattered, epoch))
        else:
            super().save(rows, state)

    def undo(self) -> State:
        """Put back the rows that a killed writer was overwriting; without saved ones, end the rows before the first."""
        state = self.state
        if state.pending and not self._touched:
            self._touch()
        if state.pending < 0:
            first = -1 - state.pending
            self.commit(state._replace(length=first, cursor=first, pending=0, epoch=state.epoch + 1))
        return super().undo()

    def take_back(self, *, saved: bool) -> None:
        """Restore the committed rows after a failed write."""
        if saved and self._marks:  # the store has written all rows or none
            self.commit(self.state._replace(pending=0))
        else:
            super().take_back(saved=saved)

    def _touch(self) -> None:
        """Notify the store that its leaves change: it checks torch's versions of them, which numpy does not change."""
        self.handle.check_writable()
        store = self.handle.store
        # Room on the disk for the leaves that are always written, and the beginning of a session. It is taken first:
        # on a full file system in memory, a hole that is read ends the process.
        for leaf in self._leaves[len(self.columns) :]:
            reserve(leaf)
        writes = [Write(STATE, (slice(0, len(self._numbers), 1),), self._state_leaf.clone())]
        if not self._marks:
            room = self._leaves[-1]
            writes.append(Write(UNDO, (slice(0, room.shape[0], 1),), room.clone()))
        store.write(writes)
        for leaf in self._leaves:
            leaf[:0].zero_()
        self._touched = True

    def write(self, rows: RowSet, values: Sequence[Any]) -> None:
        """Write rows: those with reserved disk blocks through memory, the others through the store."""
        if not self._touched:
            self._touch()
        last = rows.stop if isinstance(rows, slice) else int(rows.max(initial=-1)) + 1
        state = None
        if last > self._reserved:
            state = self.state
            if not state.scattered:
                self._reserved = max(self._reserved, state.length)
        if state is None or last <= self._reserved:
            ArrayTable.write(self, rows, values)
            return
        store = self.handle.store
        pairs = [
            (c, v if v.ndim == t.ndim else v.unsqueeze(0))
            for c, v, t in zip(self.columns, values, self.tensors, strict=True)
            if v is not None
        ]
        large = count_rows(rows) * self._largest >= _LARGE and self._mapped
        if large and isinstance(rows, slice) and type(values) is Block:
            self._write_new(rows, values)
            if rows.start <= self._reserved and not state.scattered:
                self._reserved = last
            self._beyond = max(self._beyond, last)
            return
        ahead, reserved = 0, self._reserved
        if isinstance(rows, slice) and rows.start <= self._reserved and not state.scattered:
            if rows.stop >= max(state.length, self._beyond) and len(pairs) == len(self.columns):
                ahead = max(0, min(self.capacity, rows.start + self._ahead) - rows.stop)
            reserved = rows.stop + ahead
        if isinstance(rows, slice):
            index = (slice(rows.start, rows.stop + ahead, 1),)
            store.write([Write(c.path, index, _longer(v, ahead)) for c, v in pairs])
        else:
            store.write([Write(c.path, (torch.from_numpy(rows),), v) for c, v in pairs])
        self._reserved, self._beyond = reserved, max(self._beyond, last)
        if isinstance(rows, slice):
            self._map(rows.start, rows.stop + ahead)

    def _write_new(self, rows: slice, values: Block) -> None:
        """Write rows of files for the first time, through memory.

        The system then keeps the file in pages of 4 KiB. It keeps what is written by system calls in larger pieces,
        each of which takes several times as long when it is changed after the system has written it to disk.
        """
        for tensor in self.tensors:
            reserve(tensor[rows])
        self._map(rows.start, rows.stop)
        super().write(rows, values)

    def _map(self, first: int, stop: int) -> None:
        """Map pages of rows whose files have blocks for them: they are written now, or read soon."""
        for start, size in self._bytes:
            if (stop - first) * size >= MANY:
                map_pages(start + first * size, (stop - first) * size)

    def flush(self) -> None:
        """Commit: checksums of what was written, and a sync if the backend is durable."""
        if self._touched:
            self.handle.commit(self.handle.groups)
            self._touched = False

    def close(self) -> None:
        """Commit, and release the leaves."""
        self.handle.close()


def _longer(value: Tensor, rows: int) -> Tensor:
    return value if not rows else torch.cat([value, value.new_zeros((rows, *value.shape[1:]))])
