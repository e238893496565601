"""Rows of columns, and the counters beside them, in tensors of the CPU or of another device.

A table knows slots and columns. If the table outlives the process, a write of rows that are already visible first saves
the old ones: whoever opens it after a kill puts them back (`undo`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from ctypes import PYFUNCTYPE, c_size_t, c_void_p, cast, memmove
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tdstore.dtypes import from_numpy, is_bit_pattern, to_numpy
from tdstore.errors import BatchSizeError
from tdstore.rl.tables.columns import Block, Column
from tdstore.rl.tables.row_sets import RowSet, count_rows
from tdstore.rl.tables.state import Ints, State
from tdstore.types import Path

STATE: Path = ("_replay_state", "data")
UNDO: Path = ("_replay_undo", "data")
UNDO_BYTES = 2 << 20
"""Room for rows that are being overwritten; a write of more of them is done in parts."""
FIRST_UNDO_BYTES = 1 << 20
"""The same, for places whose header does not state the number of rows."""

_BRIEF = 1 << 20
"""Fewer bytes are copied without letting other threads run meanwhile, which takes longer than a short copy."""
_copy_brief = PYFUNCTYPE(None, c_void_p, c_void_p, c_size_t)(cast(memmove, c_void_p).value or 0)

Array = npt.NDArray[Any]


class Table(ABC):
    """Columns of `capacity` rows, each of them `inner` slots."""

    def __init__(self, columns: Sequence[Column], capacity: int, inner: tuple[int, ...]) -> None:
        self.columns = list(columns)
        self.capacity = capacity
        self.inner = inner
        self.slots_per_row = math.prod(inner)
        self.row_bytes = sum(column.nbytes for column in columns) * self.slots_per_row
        self.undo_rows = undo_rows(columns, capacity, self.slots_per_row)
        """How many rows can be saved for undoing."""

    durable = False
    """Whether rows outlive this process, so that what is overwritten is saved first."""
    on_cpu = False
    """Whether writes take no other tensors."""
    by_request = False
    """Whether each write is a request to a store, not a write in memory."""
    publish: Callable[[], None] | None = None
    """Commits a new place with its first rows; None once it was committed."""

    def check_writable(self) -> None:
        """Raise ReadOnlyError if the rows are in a store that was opened for reading only."""
        if (handle := getattr(self, "handle", None)) is not None:
            handle.check_writable()

    @property
    @abstractmethod
    def state(self) -> State:
        """The counters as they are committed."""

    @abstractmethod
    def commit(self, state: State) -> None:
        """Make counters valid, after the rows that were written before."""

    def for_write(self, value: Tensor) -> Tensor:
        """Return a tensor without gradients, and on the CPU if `write` takes no others."""
        value = value.detach() if value.requires_grad else value
        return value.cpu() if self.on_cpu and not value.is_cpu else value

    @abstractmethod
    def write(self, rows: RowSet, values: Sequence[Any]) -> None:
        """Write rows of all columns; a column whose value is None keeps its own."""

    def cut(self, values: Sequence[Any], start: int, stop: int) -> Sequence[Any]:
        """Return some of the rows of values, for `write`."""
        return [None if value is None else value[start:stop] for value in values]

    @abstractmethod
    def gather(self, slots: Ints) -> list[Tensor]:
        """Return copies of slots, counted over all dimensions of slots, in any order, repeated or not."""

    @abstractmethod
    def look(self, rows: slice) -> list[Tensor]:
        """Return rows, as views where the table has live tensors."""

    def column(self, number: int, slots: Ints) -> Tensor:
        """Return copies of slots of one column."""
        return self.gather(slots)[number]

    def save(self, rows: RowSet, state: State) -> None:
        """Save rows that are about to be overwritten (durable tables)."""

    def undo(self) -> State:
        """Restore the rows that a killed writer was overwriting; return the counters after that."""
        return self.state

    def take_back(self, *, saved: bool) -> None:
        """Restore the committed rows after a failed write.

        Args:
            saved: whether rows that are visible were saved before it.
        """
        if saved:
            self.undo()

    def flush(self) -> None:
        """Make what was written visible to others, and durable where the backend is."""

    def close(self) -> None:
        """Release the rows."""

    def abandon(self) -> None:
        """Release a place whose first rows were not committed: it is as it was before."""
        self.close()


def undo_rows(columns: Sequence[Column], capacity: int, slots_per_row: int, undo_bytes: int | None = None) -> int:
    """Return how many rows an undo leaf of that size can hold."""
    row = sum(column.nbytes for column in columns) * slots_per_row + 8
    return min(capacity, max(1, (UNDO_BYTES if undo_bytes is None else undo_bytes) // row))


def undo_bytes(columns: Sequence[Column], capacity: int, slots_per_row: int) -> int:
    """Return the size of the leaf for rows that are being overwritten."""
    rows = undo_rows(columns, capacity, slots_per_row)
    return sum(_padded(rows * column.nbytes * slots_per_row) for column in columns) + _padded(8 * rows)


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class ArrayTable(Table):
    """Columns that are tensors of the CPU: of this process, or live leaves of a store.

    All work is numpy's on the memory of the tensors: a write of one row is a copy of a few bytes, for which torch takes
    several times as long, and a gather of rows is one copy per row.
    """

    on_cpu = True

    def __init__(
        self,
        columns: Sequence[Column],
        capacity: int,
        inner: tuple[int, ...],
        tensors: Sequence[Tensor],
        undo: Tensor | None = None,
        saved: int = 0,
    ) -> None:
        super().__init__(columns, capacity, inner)
        self.undo_rows = saved or self.undo_rows
        self.tensors = list(tensors)
        self._arrays = [to_numpy(tensor.detach()) for tensor in tensors]
        rows = capacity * self.slots_per_row
        self._flat = [array.reshape(rows, *array.shape[1 + len(inner) :]) for array in self._arrays]
        self._bits = [is_bit_pattern(column.dtype) for column in columns]
        sizes = [math.prod(array.shape[1:]) * array.itemsize for array in self._arrays]
        starts = [array.ctypes.data for array in self._arrays]
        self._places = list(zip(starts, sizes, (c.dtype for c in columns), self._arrays, strict=True))
        """Address of the first row, bytes of a row, dtype, and the array, of each column."""
        self._bytes = list(zip(starts, sizes, strict=True))
        self._sizes, self._row_bytes = sizes, sum(sizes)
        # The bytes of a complex tensor may be those of its conjugate: they are not copied as they are.
        self._dtypes = [None if c.values or c.dtype.is_complex else c.dtype for c in columns]
        self._state = State()
        self._undo_slots, self._undo_rows = self._undo_views(undo)
        self._undo_places = [view.ctypes.data for view in self._undo_rows]
        self.durable = undo is not None

    def _undo_views(self, undo: Tensor | None) -> tuple[Ints, list[Array]]:
        if undo is None:
            return np.zeros(0, np.int64), []
        rows = self.undo_rows
        room = to_numpy(undo)
        at = _padded(8 * rows)
        slots = room[: 8 * rows].view(np.int64)
        views = []
        for array in self._arrays:
            nbytes = rows * math.prod(array.shape[1:]) * array.itemsize
            views.append(room[at : at + nbytes].view(array.dtype).reshape(rows, *array.shape[1:]))
            at += _padded(nbytes)
        return slots, views

    @property
    def state(self) -> State:
        """The counters as they are committed."""
        return self._state

    def commit(self, state: State) -> None:
        """Make counters valid."""
        self._state = state

    def block(self, values: list[Any], shapes: list[tuple[int, ...]]) -> Block | None:
        """Return values as a block that `write` copies without further checks, if all are dense and of these shapes."""
        addresses = []
        for value, dtype, shape in zip(values, self._dtypes, shapes, strict=True):
            if (
                type(value) is not Tensor
                or value.dtype is not dtype
                or value.shape != shape
                or not value.is_cpu
                or not value.is_contiguous()
                or value.is_neg()
                or value.requires_grad
            ):
                return None
            addresses.append(value.data_ptr())
        return Block(values, addresses)

    def cut(self, values: Sequence[Any], start: int, stop: int) -> Sequence[Any]:
        """Return some of the rows of values."""
        return values.cut(start, stop, self._sizes) if type(values) is Block else super().cut(values, start, stop)

    def write(self, rows: RowSet, values: Sequence[Any]) -> None:
        """Write rows of all columns."""
        if not isinstance(rows, slice):
            received = [None if value is None else to_numpy(value) for value in values]
            for array, source in zip(self._arrays, received, strict=True):
                if source is not None:
                    array[rows] = source
            return
        first, count = rows.start, rows.stop - rows.start
        if type(values) is Block:
            copy = _copy_brief if count * self._row_bytes < _BRIEF else memmove
            for (start, size), address in zip(self._bytes, values.addresses, strict=True):
                copy(start + first * size, address, count * size)
            return
        copies: list[tuple[int, int, int]] = []
        casts: list[tuple[Array, Array]] = []
        for (start, size, dtype, array), value in zip(self._places, values, strict=True):
            if value is None:
                continue
            if value.dtype is not dtype or value.nbytes != count * size:
                raise BatchSizeError(f"{count} rows of {size} bytes and {dtype} do not take {list(value.shape)}")
            if value.is_contiguous() and not dtype.is_complex and not value.is_neg():
                copies.append((start + first * size, value.data_ptr(), count * size))
            else:
                casts.append((array, to_numpy(value)))
        # Tensors in memory have no other copy of the old rows: nothing is written before everything can be.
        for target, origin, nbytes in copies:
            memmove(target, origin, nbytes)
        for array, numbers in casts:
            array[rows] = numbers

    def gather(self, slots: Ints) -> list[Tensor]:
        """Return copies of slots: one allocation and one copy of each column."""
        # "clip" spares numpy a buffer of its own: the caller has checked the slots.
        return [
            from_numpy(flat.take(slots, 0, None, "clip"), column.dtype)
            if bits
            else torch.from_numpy(flat.take(slots, 0, None, "clip"))
            for flat, bits, column in zip(self._flat, self._bits, self.columns, strict=True)
        ]

    def column(self, number: int, slots: Ints) -> Tensor:
        """Return copies of slots of one column."""
        return from_numpy(self._flat[number].take(slots, 0, None, "clip"), self.columns[number].dtype)

    def look(self, rows: slice) -> list[Tensor]:
        """Return views of rows."""
        return [tensor[rows] for tensor in self.tensors]

    def save(self, rows: RowSet, state: State) -> None:
        """Save rows that are about to be overwritten."""
        n = count_rows(rows)
        if isinstance(rows, slice):
            first = rows.start
            slots = self._undo_slots[:n]
            if n > 1:
                slots[:] = np.arange(first, first + n)
            else:
                slots[0] = first
            for address, (start, size) in zip(self._undo_places, self._bytes, strict=True):
                memmove(address, start + first * size, n * size)
        else:
            self._undo_slots[:n] = rows
            for view, array in zip(self._undo_rows, self._arrays, strict=True):
                view[:n] = array[rows]
        self.commit(State(state.length, state.cursor, state.write_count, n, state.scattered, state.epoch))

    def undo(self) -> State:
        """Put back the rows that a killed writer was overwriting."""
        state = self.state
        if state.pending and self._undo_rows:
            n = state.pending
            for view, array in zip(self._undo_rows, self._arrays, strict=True):
                array[self._undo_slots[:n]] = view[:n]
            self.commit(state._replace(pending=0))
        return self.state


class DeviceTable(Table):
    """Columns that are tensors of another device."""

    def __init__(
        self, columns: Sequence[Column], capacity: int, inner: tuple[int, ...], tensors: Sequence[Tensor]
    ) -> None:
        super().__init__(columns, capacity, inner)
        self.tensors = list(tensors)
        self._flat = [t.view(capacity * self.slots_per_row, *t.shape[1 + len(inner) :]) for t in tensors]
        self._state = State()

    @property
    def state(self) -> State:
        """The counters."""
        return self._state

    def commit(self, state: State) -> None:
        """Make counters valid."""
        self._state = state

    def write(self, rows: RowSet, values: Sequence[Any]) -> None:
        """Write rows of all columns."""
        for tensor, value in zip(self.tensors, values, strict=True):
            if value is None:
                continue
            if isinstance(rows, slice):
                tensor[rows].copy_(value)
            else:
                tensor[torch.from_numpy(rows).to(tensor.device)] = value.to(tensor.device)

    def gather(self, slots: Ints) -> list[Tensor]:
        """Return copies of slots, on the device."""
        if not self._flat:
            return []
        index = torch.from_numpy(slots).to(self._flat[0].device)
        return [flat.index_select(0, index) for flat in self._flat]

    def look(self, rows: slice) -> list[Tensor]:
        """Return views of rows."""
        return [tensor[rows] for tensor in self.tensors]
