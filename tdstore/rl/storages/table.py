"""Rows of columns, and the counters beside them: in memory, on a device, in live leaves of a store, or in a store.

A table knows slots and columns. If the table outlives the process, a write of rows that are already visible first saves
the old ones: whoever opens it after a kill puts them back (`undo`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import PYFUNCTYPE, c_size_t, c_void_p, cast, memmove
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import tdstore
from tdstore import MemoryMappedTensor, StoreHandle
from tdstore.dtypes import dtype_name, from_numpy, is_bit_pattern, to_numpy
from tdstore.errors import BatchSizeError, InvalidTypeError
from tdstore.rl.storages.state import Ints, State, read_state, write_state
from tdstore.rl.storages.structure import Column, is_container
from tdstore.storekit.pages import MANY, map_pages, reserve
from tdstore.types import Path, Write, path_text

STATE: Path = ("_replay_state", "data")
UNDO: Path = ("_replay_undo", "data")
UNDO_BYTES = 2 << 20
"""Room for rows that are being overwritten; a write of more of them is done in parts."""
FIRST_UNDO_BYTES = 1 << 20
"""The same, for places whose header does not state the number of rows."""
_AHEAD = 1 << 20
"""Bytes that are taken from the disk at once when rows are first written."""
_LARGE = 256 << 10
"""Bytes of a column from which on the pages of its file are created by mapping them."""

_BRIEF = 1 << 20
"""Fewer bytes are copied without letting other threads run meanwhile, which takes longer than a short copy."""
_copy_brief = PYFUNCTYPE(None, c_void_p, c_void_p, c_size_t)(cast(memmove, c_void_p).value or 0)

Array = npt.NDArray[Any]
Rows = slice | Ints
"""Rows of the first dimension: a slice of step 1, or row numbers without repetition."""


def count_of(rows: Rows) -> int:
    """Count the rows of an index."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def part_of(rows: Rows, start: int, stop: int) -> Rows:
    """Return some of the rows of an index."""
    if isinstance(rows, slice):
        return slice(rows.start + start, rows.start + stop)
    return rows[start:stop]


def dense(value: Any, column: Column) -> Tensor:
    """Return the value of an entry as a tensor whose rows can be copied into a column of tensors.

    Raises:
        TypeError: it is neither a number, nor an array, nor a dense tensor with data.
    """
    where, held = path_text(column.path) if column.path else "the data", dtype_name(column.dtype)
    if not isinstance(value, Tensor):
        if tdstore.is_non_tensor(value) or is_container(value) or isinstance(value, (str, bytes, Mapping)):
            raise InvalidTypeError(
                f"{where} is a {type(value).__name__}, and the storage holds tensors of {held} there"
            )
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidTypeError(f"{where} cannot be made a tensor of {held}: {error}") from error
    if value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise InvalidTypeError(
            f"{where} is a {kind} tensor, and the rows of a storage are dense", hint="pass value.to_dense()"
        )
    if value.is_meta:
        raise InvalidTypeError(f"{where} is a meta tensor, which has no data to store")
    return value


def fitting(value: Any, column: Column, shape: tuple[int, ...], *, lenient: bool) -> Tensor:
    """Return the value of an entry as a tensor that a column accepts.

    Raises:
        TypeError: it is not a dense tensor, or its dtype does not fit. RuntimeError: it has another shape.
    """
    received = fitting_dtype(dense(value, column), column, lenient=lenient)
    if received.shape != shape:
        raise BatchSizeError(
            f"{path_text(column.path)} has shape {list(received.shape)}, and the storage takes {list(shape)}",
            hint="a list is a batch of separate items; rows are along the first dimension",
        )
    return received


def fitting_dtype(value: Tensor, column: Column, *, lenient: bool) -> Tensor:
    """Return a tensor in the dtype of a column, which cuts values only if it is lenient."""
    if value.dtype is column.dtype:
        return value
    if lenient or torch.promote_types(value.dtype, column.dtype) == column.dtype:
        return value.to(column.dtype)
    raise InvalidTypeError(
        f"{path_text(column.path)} is {dtype_name(value.dtype)}, and the storage holds {dtype_name(column.dtype)}: "
        "values would be cut"
    )


class Block(Sequence[Any]):
    """Values of all columns, each a dense tensor of the CPU of the very dtype and shape: bytes that can be copied.

    Args:
        values: the tensors.
        addresses: the address of the first row of each.
        rows: those of the tensors that the block has; None: all.
    """

    __slots__ = ("_rows", "_values", "addresses")

    def __init__(self, values: Sequence[Any], addresses: list[int], rows: tuple[int, int] | None = None) -> None:
        self._values, self.addresses, self._rows = values, addresses, rows

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self._values)

    def __getitem__(self, number: Any) -> Any:
        """Return the tensor of a column."""
        value = self._values[number]
        return value if self._rows is None else value[self._rows[0] : self._rows[1]]

    def cut(self, start: int, stop: int, sizes: Iterable[int]) -> Block:
        """Return some of the rows of a whole block, whose rows have these sizes in bytes; no tensor is made."""
        addresses = [address + start * size for address, size in zip(self.addresses, sizes, strict=True)]
        return Block(self._values, addresses, (start, stop))


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
    def write(self, rows: Rows, values: Sequence[Any]) -> None:
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

    def save(self, rows: Rows, state: State) -> None:
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

    def write(self, rows: Rows, values: Sequence[Any]) -> None:
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

    def save(self, rows: Rows, state: State) -> None:
        """Save rows that are about to be overwritten."""
        n = count_of(rows)
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

    def write(self, rows: Rows, values: Sequence[Any]) -> None:
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

    def save(self, rows: Rows, state: State) -> None:
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

    def write(self, rows: Rows, values: Sequence[Any]) -> None:
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
        large = count_of(rows) * self._largest >= _LARGE and self._mapped
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
