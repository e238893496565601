"""Indices of a storage: the rows or slots of an index, checked against those that are visible."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from tdstore.errors import OutOfRangeError
from tdstore.rl.tables.row_sets import RowSet
from tdstore.rl.tables.state import Ints
from tdstore.rl.types import RowIndex

D = TypeVar("D")


class Selection(NamedTuple):
    """Rows of the first dimension, or slots of all dimensions."""

    rows: slice | None
    """Rows that follow one another; None where there are `slots`."""
    slots: Ints | None
    """Numbers of slots, counted over all dimensions."""
    shape: tuple[int, ...]
    """Leading dimensions of the result."""
    single: bool = False
    """Whether the first dimension of `rows` is dropped: the index was an int."""


def as_ints(index: RowIndex) -> Ints:
    """Return row numbers as int64.

    Raises:
        IndexError: they are not integers, or are a mask.
    """
    if isinstance(index, Tensor):
        index = index.detach().cpu().numpy()
    array = np.asarray(index)
    if array.dtype == np.int64:
        return array
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise OutOfRangeError(f"rows are integers, not {array.dtype}")
    return array.astype(np.int64)


def is_int(index: object) -> bool:
    """Check whether an index names one row."""
    if isinstance(index, (bool, np.bool_, slice, tuple, list, range)) or index is None:
        return False
    if isinstance(index, (int, np.integer)):
        return True
    return isinstance(index, (Tensor, np.ndarray)) and index.ndim == 0 and not _is_mask(index)


def _is_mask(index: Any) -> bool:
    return bool(index.dtype in (torch.bool, np.bool_))


def check(index: Ints, size: int, what: str) -> Ints:
    """Return row numbers in `[0, size)`; negative ones count from the end.

    Raises:
        IndexError: one is out of range; the message names it.
    """
    if not index.size or index.view(np.uint64).max() < size:  # negative ones are the largest of all here
        return index
    low, high = int(index.min()), int(index.max())
    if low < -size or high >= size:
        raise OutOfRangeError(f"index {low if low < -size else high} is out of range: {what}")
    return np.where(index < 0, index + size, index)


def select(index: Any, length: int, inner: tuple[int, ...], what: str) -> Selection:
    """Return the rows that an index selects among `length` visible ones, each of `inner` slots.

    Raises:
        IndexError: out of range, a mask of another length, or no index of rows.
    """
    if isinstance(index, tuple):
        if len(index) == 1:
            return select(index[0], length, inner, what)
        return _over_dimensions(index, length, inner, what)
    if is_int(index):
        number = operator.index(int(index))
        if not -length <= number < length:  # before numpy gets it: it may not fit an int64
            raise OutOfRangeError(f"index {number} is out of range: {what}")
        row = number % length
        return Selection(slice(row, row + 1), None, inner, single=True)
    if index is None:
        return _over_dimensions((None,), length, inner, what)
    if index is Ellipsis:
        index = slice(None)
    if isinstance(index, slice):
        start, stop, step = index.indices(length)
        if step == 1:
            return Selection(slice(start, max(start, stop)), None, (max(0, stop - start), *inner))
        rows = np.arange(start, stop, step)
    elif isinstance(index, range) and index.step == 1 and index.start >= 0 and index.stop <= length:
        return Selection(slice(index.start, max(index) + 1 if index else index.start), None, (len(index), *inner))
    else:
        array = np.asarray(index.cpu() if isinstance(index, Tensor) else index)
        if array.dtype == np.bool_:
            return _masked(array, length, inner, what)
        rows = check(as_ints(array), length, what)
    if not inner:
        return Selection(None, rows.reshape(-1), rows.shape)
    per_row = math.prod(inner)
    slots = (rows.reshape(-1, 1) * per_row + np.arange(per_row)).reshape(-1)
    return Selection(None, slots, (*rows.shape, *inner))


def _masked(mask: Any, length: int, inner: tuple[int, ...], what: str) -> Selection:
    visible = (length, *inner)
    if mask.shape != visible[: mask.ndim]:
        raise OutOfRangeError(f"a mask of shape {list(mask.shape)} does not fit the slots {list(visible)}: {what}")
    if mask.ndim < len(visible):
        return select(np.nonzero(mask)[0], length, inner, what) if mask.ndim == 1 else _masked_rest(mask, inner)
    slots = np.flatnonzero(mask)
    return Selection(None, slots, (len(slots),))


def _masked_rest(mask: Any, inner: tuple[int, ...]) -> Selection:
    rest = inner[mask.ndim - 1 :]
    per = math.prod(rest)
    first = np.flatnonzero(mask)
    slots = (first.reshape(-1, 1) * per + np.arange(per)).reshape(-1)
    return Selection(None, slots, (len(first), *rest))


def _over_dimensions(index: tuple[Any, ...], length: int, inner: tuple[int, ...], what: str) -> Selection:
    sizes = (length, *inner)
    if len(index) == len(sizes) and all(isinstance(term, (Tensor, np.ndarray, list)) for term in index):
        terms = np.broadcast_arrays(*(as_ints(term) for term in index))
        checked = [check(term, size, what) for term, size in zip(terms, sizes, strict=True)]
        slots = np.ravel_multi_index(tuple(checked), sizes) if terms[0].size else np.zeros(0, np.int64)
        return Selection(None, np.asarray(slots, np.int64).reshape(-1), terms[0].shape)
    if sum(term is not Ellipsis and term is not None for term in index) > len(sizes):
        raise OutOfRangeError(f"an index of {len(index)} terms for slots of {len(sizes)} dimensions: {what}")
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    terms = tuple(term.cpu().numpy() if isinstance(term, Tensor) else term for term in index)
    try:
        picked = np.asarray(grid[terms])
    except IndexError as error:
        raise OutOfRangeError(f"{error}: {what}") from None
    return Selection(None, picked.reshape(-1), picked.shape)


def is_key(index: object) -> bool:
    """Check whether an index names an entry."""
    return isinstance(index, str) or (
        isinstance(index, tuple) and bool(index) and all(isinstance(part, str) for part in index)
    )


def goes_into_rows(index: RowIndex, ndim: int) -> bool:
    """Check whether an index names an entry, or has more terms than there are dimensions of slots."""
    if not isinstance(index, tuple):
        return isinstance(index, str)
    return is_key(index) or (len(index) > ndim and not any(term is Ellipsis or term is None for term in index))


def into_rows(get: Callable[[Any], D], index: Any, ndim: int, what: str) -> D:
    """Read rows by the first terms of an index, and apply the others to each row; or the entry of all rows, by a key.

    Raises:
        IndexError: the rows have fewer dimensions.
    """
    if is_key(index):
        entry: D = get(slice(None))[index]  # type: ignore[index]
        return entry
    first, rest = index[:ndim], index[ndim:]
    plain = all(isinstance(term, slice) or is_int(term) for term in first)
    found = get(first[0] if ndim == 1 else first) if plain else get(slice(None))
    lead = (slice(None),) * sum(isinstance(term, slice) for term in first) if plain else first
    try:
        made: D = _indexed(found, (*lead, *rest))
    except (IndexError, RuntimeError) as error:
        raise OutOfRangeError(
            f"an index of {len(index)} terms for slots of {ndim} dimensions: {error}: {what}"
        ) from None
    return made


def _indexed(data: Any, index: tuple[Any, ...]) -> Any:
    """Index a batch, or each part of a dict or a tuple."""
    if type(data) is dict:
        return {key: _indexed(value, index) for key, value in data.items()}
    if isinstance(data, tuple):
        parts = [_indexed(value, index) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    return data[index]


def rows_to_write(cursor: RowIndex, count: int, length: int, limit: int, name: str) -> Ints:
    """Return the rows that a write names.

    Args:
        cursor: an int, a slice, a range, a list or a tensor; negative rows count from the length.
        count: rows of the data, where a slice has no end.
        length: visible rows.
        limit: rows for which there is room.
        name: class of the storage, for errors.

    Raises:
        IndexError: a row is out of range.
    """
    if isinstance(cursor, slice):
        stop = cursor.stop if cursor.stop is not None else max(length, (cursor.start or 0) + count)
        start, stop, step = slice(cursor.start, stop, cursor.step).indices(max(length, limit))
        rows = np.arange(start, stop, step)
    else:
        rows = as_ints(list(cursor) if isinstance(cursor, range) else cursor).reshape(-1)
        if len(rows) and rows.min() < -length:
            raise OutOfRangeError(f"index {int(rows.min())} is out of range: {length} rows of this {name} are written")
        if len(rows) and rows.min() < 0:
            rows = np.where(rows < 0, rows + length, rows)
    if len(rows) and rows.max() >= limit:
        raise OutOfRangeError(
            f"index {int(rows.max())} is out of range: this {name} has room for {limit} rows, "
            f"of which {length} are written"
        )
    return rows


def skipped_rows(rows: RowSet, before: int, after: int) -> slice | None:
    """Return a slice with all rows that become visible as the length grows, and are not written; None without any.

    Rows that are written may lie between them.
    """
    if isinstance(rows, slice):
        return slice(before, rows.start) if before < min(rows.start, after) else None
    missing = np.ones(max(0, after - before), bool)
    missing[rows[(rows >= before) & (rows < after)] - before] = False
    found = np.flatnonzero(missing)
    return slice(before + int(found[0]), before + int(found[-1]) + 1) if len(found) else None


def visible(places: Sequence[RowSet], length: int) -> RowSet | None:
    """Return the rows that are below a length; None if there are none."""
    rows = places[0]
    if len(places) == 1 and isinstance(rows, slice):
        if rows.stop <= length:
            return rows
        return slice(rows.start, length) if rows.start < length else None
    found: list[RowSet] = []
    for rows in places:
        if isinstance(rows, slice):
            if rows.start < length:
                found.append(slice(rows.start, min(rows.stop, length)))
        else:
            seen = rows[rows < length]
            if len(seen):
                found.append(seen)
    if len(found) < 2:
        return found[0] if found else None
    return np.concatenate([np.arange(r.start, r.stop) if isinstance(r, slice) else r for r in found])


def last_of(rows: Ints) -> Ints | None:
    """Return the positions of the last mention of each row, in order; None when no row repeats."""
    if len(rows) < 2:
        return None
    unique, first = np.unique(rows[::-1], return_index=True)
    if len(unique) == len(rows):
        return None
    return np.sort(len(rows) - 1 - first)
