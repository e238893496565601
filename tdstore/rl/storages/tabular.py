"""Storages whose rows are tensors of fixed shapes, in a table: checks, writes and reads."""

from __future__ import annotations

import contextlib
import math
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tdstore import TensorDict
from tdstore.errors import (
    BatchSizeError,
    InvalidStateError,
    InvalidTypeError,
    KeyNotFoundError,
    OutOfRangeError,
    StoreError,
)
from tdstore.rl.storages.base import Storage
from tdstore.rl.storages.indices import (
    Selection,
    as_ints,
    check,
    goes_into_rows,
    into_rows,
    is_int,
    last_of,
    rows_to_write,
    select,
    skipped_rows,
    visible,
)
from tdstore.rl.storages.lists import leading, stacked
from tdstore.rl.tables.columns import Column, as_dense, fit_dtype, fit_value
from tdstore.rl.tables.conversion import check_lengths, length_of, structure_of
from tdstore.rl.tables.live import LiveTable
from tdstore.rl.tables.row_sets import RowSet, blocks_of, count_rows, part_of_rows
from tdstore.rl.tables.state import Ints, State
from tdstore.rl.tables.structure import Structure
from tdstore.rl.tables.table import ArrayTable, DeviceTable, Table
from tdstore.rl.tables.values import encode_values, pack_values, width_of
from tdstore.rl.types import RowIndex
from tdstore.types import NestedKey, path_text

OnMismatch = Literal["raise", "peer"]


class TabularStorage(Storage):
    """Rows of tensors of fixed shapes in a table."""

    on_mismatch: OnMismatch = "raise"

    @property
    def _lenient(self) -> bool:
        return self.on_mismatch == "peer"

    def __init__(self, max_size: int, ndim: int) -> None:
        super().__init__()
        self.max_size = self._asked = max_size
        self.ndim = ndim
        self._lock = threading.RLock()
        self._table: Table | None = None
        self._structure = Structure(0)
        self._known: State | None = None
        """The counters, where no other process changes them."""

    # -- what differs --------------------------------------------------------------------------
    @abstractmethod
    def _make(self, structure: Structure) -> None:
        """Allocate the table for rows of that structure."""

    def _alone(self) -> AbstractContextManager[Any]:
        """Keep other threads and other processes from writing meanwhile."""
        return self._lock

    def _ready(self) -> Table:
        """Return the table.

        Raises:
            RuntimeError: nothing was ever written.
        """
        if self._table is None:
            raise InvalidStateError(f"nothing was written into this {type(self).__name__} yet: it has no rows to read")
        return self._table

    def _widen(self, columns: list[Column]) -> None:
        """Widen columns for longer values."""
        raise NotImplementedError

    def _uses(self, table: Table, structure: Structure) -> None:
        self._structure = structure
        self._table = table
        self._known = table.state
        self.initialized = True
        self._tails = [(*structure.inner, *column.shape) for column in structure.columns]
        self._shapes: tuple[tuple[int, ...] | None, list[tuple[int, ...]]] = (None, [])
        """What the columns of rows with the last leading dimensions look like."""
        self.max_size = table.capacity * table.slots_per_row

    @property
    def entries(self) -> set[Any]:
        """Keys of a row, as `td.keys(True, True)` returns them; none before the first write."""
        paths = [column.path for column in self._structure.columns]
        return {path[0] if len(path) == 1 else path for path in paths}

    # -- counters --------------------------------------------------------------------------------
    @property
    def _state(self) -> State:
        if self._known is not None:
            return self._known
        return State() if self._table is None else self._table.state

    def __len__(self) -> int:
        """Return the number of visible slots."""
        table, known = self._table, self._known
        if table is None:
            return 0
        return (table.state if known is None else known).length * table.slots_per_row

    @property
    def shape(self) -> torch.Size | None:
        """Visible rows, and the other dimensions of slots; None before the first write."""
        return None if self._table is None else torch.Size((self._state.length, *self._table.inner))

    @property
    def cursor(self) -> int:
        """Row of the first dimension that a round-robin writer fills next."""
        return self._state.cursor

    @property
    def write_count(self) -> int:
        """Rows of the first dimension that were ever written."""
        return self._state.write_count

    @property
    def counters(self) -> State:
        """All counters, as they are committed."""
        return self._state

    @property
    def others_write(self) -> bool:
        """Whether other processes may write rows."""
        return False

    @property
    def by_request(self) -> bool:
        """Whether each write is a request to a store, not a write in memory."""
        return self._table is not None and self._table.by_request

    @property
    def epoch(self) -> int:
        """Number of changes other than rows appended to the ring."""
        return self._state.epoch

    @property
    def capacity(self) -> int:
        """Capacity, in rows of the first dimension."""
        return self.max_size if self._table is None else self._table.capacity

    def _commit(self, table: Table, state: State) -> None:
        table.commit(state)
        if self._known is not None:
            self._known = state

    def set_counters(self, cursor: int, write_count: int) -> None:
        """Set where the writer continues, and how many rows it has written."""
        with self._alone():
            self.filled_directly = False
            if self._table is not None:
                state = self._state
                self._commit(self._table, state._replace(cursor=cursor, write_count=write_count))

    def empty(self) -> None:
        """Forget all rows; their space stays allocated."""
        with self._alone():
            if self._table is not None:
                self._commit(self._table, State(scattered=self._state.scattered, epoch=self._state.epoch + 1))

    # -- data in ---------------------------------------------------------------------------------
    def check_rows(self, data: Any) -> None:
        """Check that `append` accepts rows, without writing them. Columns of strings are widened for longer ones."""
        with self._alone():
            lead = leading(data, self.ndim)
            if self._table is None:
                self._structure_of(data, lead)
            else:
                self._table.check_writable()
                self._prepare(data, lead)

    def _structure_of(self, data: Any, lead: tuple[int, ...]) -> Structure:
        """Return the structure of the first rows, or of a first row where `lead` has one dimension less."""
        structure = structure_of(data, len(lead), lead[1:] if len(lead) == self.ndim else lead)
        check_lengths(structure, data, lead)
        return structure

    def _prepare(self, data: Any, lead: tuple[int, ...]) -> Sequence[Any]:
        """Return the columns of data whose first dimensions are `lead`, each a tensor of the right shape and dtype."""
        table = self._table
        if table is None:
            self._make(self._structure_of(data, lead))
            table = self._ready()
        structure = self._structure
        columns = structure.take(data, lenient=self._lenient)
        single = len(lead) < self.ndim
        if isinstance(table, ArrayTable):
            if self._shapes[0] != lead:
                self._shapes = (lead, self._tails if single else [(lead[0], *tail) for tail in self._tails])
            block = table.block(columns, self._shapes[1])
            if block is not None:
                return block
        for i, column in enumerate(structure.columns):
            value = columns[i]
            if column.values:
                columns[i] = self._packed_values(i, value, lead, single=single)
                continue
            if value is None:
                continue
            tail = self._tails[i]
            value = fit_value(value, column, tail if single else (lead[0], *tail), lenient=self._lenient)
            columns[i] = table.for_write(value)
        if single and (not isinstance(table, ArrayTable) or isinstance(table, LiveTable)):
            columns = [None if value is None else value.unsqueeze(0) for value in columns]
        return columns

    def _packed_values(self, number: int, value: Any, lead: tuple[int, ...], *, single: bool) -> Tensor:
        column = self._structure.columns[number]
        shape = (*self._tails[number][:-1],) if single else (lead[0], *self._tails[number][:-1])
        if isinstance(value, Tensor):
            raise InvalidTypeError(
                f"{path_text(column.path)} is a tensor, and the storage holds values there that are none"
            )
        values = encode_values(value)
        count = math.prod(shape)
        if len(values) == 1 and count != 1:
            values = values * count
        if len(values) != count:
            raise BatchSizeError(f"{path_text(column.path)} has {len(values)} values for {list(shape)} rows")
        width = column.shape[-1]
        if any(len(v) + 4 > width for v in values):
            columns = list(self._structure.columns)
            columns[number] = column.wider(width_of(values))
            self._widen(columns)
            width = self._structure.columns[number].shape[-1]
        return pack_values(values, shape, width)

    def _transact(
        self,
        table: Table,
        pieces: Sequence[tuple[RowSet, Sequence[Any]]],
        before: State,
        after: State,
        skipped: slice | None = None,
    ) -> None:
        """Write rows and commit the counters. After an error the previous rows are restored.

        Args:
            skipped: rows that become visible without being among those that are written.
        """
        saved = False
        if table.durable and before.length:
            rows = visible([rows for rows, _ in pieces], before.length)
            if rows is not None:
                table.save(rows, before)
                saved = True
        try:
            if skipped is not None:
                clear(table, skipped)
            for rows, values in pieces:
                table.write(rows, values)
            self._commit(table, after)
        except BaseException:
            if table.publish is None:
                table.take_back(saved=saved)
            raise

    def _give_up(self, fresh: bool) -> None:
        """Release a place that was to be made, after a write failed."""
        table = self._table
        if not fresh or table is None or self._state.length:
            return
        if table.publish is not None:
            with contextlib.suppress(StoreError, OSError):
                table.abandon()
        elif not isinstance(table, (ArrayTable, DeviceTable)) or isinstance(table, LiveTable):
            return
        self._table, self._known, self.initialized = None, None, False
        self._structure, self.max_size = Structure(0), self._asked

    # -- a ring ------------------------------------------------------------------------------------
    def append(self, data: Any) -> Ints:
        """Write rows at the cursor, which wraps at the capacity, and move the cursor past them.

        The rows, the length and the cursor change together: a process that is killed during this leaves the old state
        or the new one.

        Args:
            data: rows along the first dimension. If there are more than fit, the last ones are kept.

        Returns:
            The rows of the first dimension that were written, int64.
        """
        if isinstance(data, list):
            data = stacked(data)
        lead = leading(data, self.ndim)
        with self._alone():
            fresh = self._table is None
            try:
                values = self._prepare(data, lead)
                return self._ring(self._table or self._ready(), values, lead[0])
            except BaseException:
                self._give_up(fresh)
                raise

    def append_one(self, data: Any) -> int:
        """Write one row at the cursor, and move the cursor past it; return its number."""
        with self._alone():
            fresh = self._table is None
            try:
                values = self._prepare(data, length_of(data, self.ndim - 1) if self.ndim > 1 else ())
                return int(self._ring(self._ready(), values, 1)[0])
            except BaseException:
                self._give_up(fresh)
                raise

    def _ring(self, table: Table, values: Sequence[Any], n: int) -> Ints:
        state, capacity = self._state, table.capacity
        self.filled_directly = False
        start, counted = state.cursor, state.write_count
        if start + n < capacity and start <= state.length and (not table.durable or n <= table.undo_rows):
            end = start + n
            after = State(max(state.length, end), end, counted + n, 0, state.scattered, state.epoch)
            self._transact(table, ((slice(start, end), values),), state, after)
            return np.arange(start, end)
        at, done = start, 0
        if n > capacity:
            done = n - capacity
            at = (start + done) % capacity
        gap = n > capacity and at > state.length  # the rows below come after those of the first part
        skipped = slice(state.length, at) if at > state.length and not gap else None
        while done < n:
            count = n - done
            if table.durable and count > 1 and (at < state.length or at + count > capacity):
                count = min(count, table.undo_rows)
            end = at + count
            first = count if end <= capacity else capacity - at
            pieces = [(slice(at, at + first), values if first == n else table.cut(values, done, done + first))]
            if count > first:
                pieces.append((slice(0, count - first), table.cut(values, done + first, done + count)))
            length = capacity if gap else max(state.length, min(capacity, end))
            after = State(length, end % capacity, counted + done + count, 0, state.scattered, state.epoch)
            if gap and done + count < n:
                after = state
            self._transact(table, pieces, state, after, skipped)
            state, at, done, skipped = after, end % capacity, done + count, None
        return np.arange(start, start + n) % capacity

    # -- any rows ----------------------------------------------------------------------------------
    def set(self, cursor: RowIndex, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows at an int, a slice, a range, a list or a tensor of rows.

        Everything is checked before anything is written. A row that is named twice gets the last value. If the length
        grows past rows that the cursor leaves out, these are zeros (strings are None), whatever was in them before
        `empty()`.

        Args:
            cursor: rows of the first dimension; an int means that `data` is one row. Negative ones count from the
                length. With several dimensions of slots a tuple of as many indices names slots.
            data: rows, or a list of separate items.
            set_cursor: whether the length and the cursor are updated.

        Raises:
            IndexError: a row is beyond `max_size`. KeyError: the keys differ. TypeError: a cast would cut values.
                RuntimeError: the shape differs.
        """
        if isinstance(data, list):
            data = stacked(data)
        if isinstance(cursor, tuple) and len(cursor) == 1:
            cursor = cursor[0]
        single = is_int(cursor)
        with self._alone():
            if isinstance(cursor, tuple) or (isinstance(cursor, Tensor) and cursor.ndim == 2 and self.ndim > 1):
                self._set_slots(cursor, data)
                return
            fresh = self._table is None
            try:
                self._set_rows(cursor, data, single=single, set_cursor=set_cursor)
            except BaseException:
                self._give_up(fresh)
                raise

    def _set_rows(self, cursor: Any, data: Any, *, single: bool, set_cursor: bool) -> None:
        lead = length_of(data, self.ndim - single) if self.ndim > single else ()
        count, name = lead[0] if lead else 0, type(self).__name__
        rows = rows_to_write(cursor, count, self._state.length, self._limit(lead), name)
        if not single and (len(lead) < self.ndim or len(rows) != lead[0]):
            raise BatchSizeError(f"{len(rows)} rows are to be written, and the data has {list(lead)}")
        values = self._prepare(data, lead)
        table, state = self._ready(), self._state
        if single:
            values = [
                v if v is None or v.ndim == len(t) + 1 else v.unsqueeze(0)
                for v, t in zip(values, self._tails, strict=True)
            ]
        if not len(rows):
            return
        last = int(rows[-1])
        high = max(state.length, int(rows.max()) + 1) if set_cursor else state.length
        keep = last_of(rows)
        if keep is not None:
            rows = rows[keep]
            values = [None if v is None else v[torch.from_numpy(keep)] for v in values]
        slots: RowSet = rows
        if len(rows) == int(rows[-1]) - int(rows[0]) + 1 and (len(rows) == 1 or bool((np.diff(rows) == 1).all())):
            slots = slice(int(rows[0]), int(rows[-1]) + 1)
        ring = set_cursor and isinstance(slots, slice) and slots.start == state.cursor and slots.stop <= table.capacity
        after = state._replace(
            length=high,
            cursor=(last + 1) % table.capacity if set_cursor else state.cursor,
            write_count=state.write_count + (len(rows) if set_cursor else 0),
            epoch=state.epoch + (not ring),
        )
        self._in_parts(table, slots, values, state, after)
        self.filled_directly = self.filled_directly or set_cursor

    def _in_parts(self, table: Table, rows: RowSet, values: Sequence[Any], state: State, after: State) -> None:
        """Write any rows, no more at once than can be undone, and zeros into those between them and the length."""
        n, step = count_rows(rows), table.undo_rows if table.durable else count_rows(rows)
        skipped = skipped_rows(rows, state.length, after.length)
        for start in range(0, n, step):
            stop = min(n, start + step)
            part = part_of_rows(rows, start, stop)
            cut = values if stop - start == n else table.cut(values, start, stop)
            self._transact(table, [(part, cut)], state, after if stop == n else state, skipped if not start else None)

    def _limit(self, lead: tuple[int, ...]) -> int:
        if self._table is not None:
            return self._table.capacity
        inner = lead[1:] if len(lead) == self.ndim else lead
        return -(-self.max_size // max(1, math.prod(inner)))

    def _set_slots(self, index: Any, data: Any) -> None:
        """Write individual slots of several dimensions: their rows are read, changed and written."""
        table = self._ready()
        if isinstance(index, Tensor):
            index = tuple(index.unbind(-1))
        state = self._state
        found = select(index, state.length, table.inner, self._what())
        slots = found.slots
        if slots is None:
            raise OutOfRangeError("slots of several dimensions are named by a tuple of as many tensors, slices or ints")
        columns = self._structure.take(data, lenient=self._lenient)
        unique, inverse = np.unique(slots // table.slots_per_row, return_inverse=True)
        whole = (unique.reshape(-1, 1) * table.slots_per_row + np.arange(table.slots_per_row)).reshape(-1)
        places = torch.from_numpy(inverse.reshape(-1) * table.slots_per_row + slots % table.slots_per_row)
        values = []
        for column, old, new in zip(self._structure.columns, table.gather(whole), columns, strict=True):
            if new is not None:
                received = fit_dtype(as_dense(new, column), column, lenient=self._lenient)
                old[places] = received.expand(*found.shape, *column.shape).reshape(len(slots), *column.shape)
            values.append(old.view(len(unique), *table.inner, *column.shape))
        self._in_parts(table, unique, values, state, state._replace(epoch=state.epoch + 1))

    # -- data out ------------------------------------------------------------------------------------
    def _what(self) -> str:
        return f"{len(self)} of {self.max_size} slots of this {type(self).__name__} are written"

    def get(self, index: RowIndex) -> Any:
        """Read rows, or the entry of all rows that a key names. Ints and slices return views of live tensors.

        Terms of a tuple beyond the dimensions of slots index those of a row.
        """
        with self._lock:
            table = self._ready()
            if goes_into_rows(index, self.ndim):
                return into_rows(self.get, index, self.ndim, self._what())
            return self._picked(table, select(index, self._state.length, table.inner, self._what()))

    def _picked(self, table: Table, found: Selection) -> Any:
        if found.rows is not None:
            columns = table.look(found.rows)
            if found.single:
                columns = [column[0] for column in columns]
        else:
            assert found.slots is not None
            columns = table.gather(found.slots)
            if len(found.shape) != 1:
                columns = [c.view((*found.shape, *c.shape[1:])) for c in columns]
        return self._structure.build(columns, found.shape)

    def take_slots(self, slots: Ints) -> Any:
        """Return copies of slots, counted over all dimensions, checked by the caller: one gather per column."""
        with self._lock:
            return self._structure.build(self._ready().gather(slots), (len(slots),))

    def column(self, key: NestedKey, slots: Ints) -> Tensor | None:
        """Return copies of slots of one entry; None if there is none of that name."""
        path = (key,) if isinstance(key, str) else tuple(key)
        for number, column in enumerate(self._structure.columns):
            if column.path == path:
                with self._lock:
                    return self._ready().column(number, slots)
        return None

    def put_columns(self, entries: Mapping[Any, Any]) -> None:
        """Write entries of all visible rows, by their keys.

        Raises:
            KeyError: no such entry.
        """
        with self._alone():
            table = self._ready()
            state = self._state
            if self._structure.is_pytree or self._structure.is_tensor:
                raise InvalidTypeError("the rows of this storage are no TensorDicts: there is no entry to set")
            made: Any = TensorDict({}, batch_size=self.shape)
            numbers = {column.path: number for number, column in enumerate(self._structure.columns)}
            values: list[Any] = [None] * len(numbers)
            for key, value in entries.items():
                path = (key,) if isinstance(key, str) else tuple(key)
                if (number := numbers.get(path)) is None:
                    raise KeyNotFoundError(f"no entry {path_text(path)} in this {type(self).__name__}")
                received, column = made.set(key, value).get(key), self._structure.columns[number]
                lead = (state.length,)
                if column.values:
                    values[number] = self._packed_values(number, received, lead, single=False)
                else:
                    value = fit_value(received, column, lead + self._tails[number], lenient=self._lenient)
                    values[number] = table.for_write(value)
            if state.length:
                after = state._replace(epoch=state.epoch + 1)
                self._in_parts(table, slice(0, state.length), values, state, after)

    def put_values(self, key: str, slots: Ints, values: Tensor) -> None:
        """Write one entry of rows that are visible; a kill may leave part of them.

        Where each write is a request, the next write of rows or `flush` commits them.

        Args:
            key: an entry whose rows are single numbers.
            slots: rows that were checked, `[n]`; of a row that is named twice, the last value counts.
            values: `[n]`, of the dtype of the entry.
        """
        with self._alone():
            table = self._ready()
            keep = None if isinstance(table, ArrayTable) else last_of(slots)
            if keep is not None:
                slots, values = slots[keep], values[torch.from_numpy(keep)]
            received: list[Any] = [values if c.path == (key,) else None for c in self._structure.columns]
            table.write(slots, received)
            if not table.by_request:
                self._commit(table, self._state)

    def check_slots(self, index: RowIndex) -> Ints:
        """Return visible slots, as int64.

        Raises:
            IndexError: one is not.
        """
        return check(as_ints(index), len(self), self._what())


def clear(table: Table, rows: slice) -> None:
    """Write zeros into rows, block by block."""
    for block in blocks_of(rows, table.row_bytes):
        # Memory that was never written is zeros that take no room: it stays so.
        if not table.durable and not any(t.reshape(-1).view(torch.uint8).any() for t in table.look(block)):
            continue
        lead = (count_rows(block), *table.inner)
        table.write(block, [torch.zeros((*lead, *c.shape), dtype=c.dtype, device="cpu") for c in table.columns])
