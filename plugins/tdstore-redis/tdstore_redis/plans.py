"""From an index of a leaf to the cells that it touches, and back: pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdstore.dtypes import from_numpy, numpy_dtype, to_numpy
from tdstore.indexing import gather, last_wins, scatter
from tdstore.types import Path, StoreIndex
from tdstore_redis.layout import PIECE, Array, Bytes, Ids

_NONE: Ids = np.empty(0, np.int64)


@dataclass(slots=True)
class Fetch:
    """Cells to get, and what to do with them."""

    path: Path
    array: Array
    ids: Ids
    """Sorted, each once."""
    take: Callable[[Bytes], None]
    """Given the data of these cells, `[n, cell]`."""


@dataclass(slots=True)
class Change:
    """Cells to set."""

    path: Path
    array: Array
    ids: Ids
    needs: Ids
    """Positions in `ids` of the cells that are changed in part: what they hold now must be known."""
    patch: Callable[[Bytes], None]
    """Puts the new values into `[n, cell]`, which holds the old ones where they were needed."""


def raw(tensor: Tensor) -> Bytes:
    """The bytes of a contiguous tensor, as they lie in memory."""
    return to_numpy(tensor).reshape(-1).view(np.uint8)


def shape_of(shape: Sequence[int], index: StoreIndex) -> tuple[int, ...]:
    """The shape of `leaf[index]`."""
    picked = [len(t) if isinstance(t, Tensor) else len(range(t.start, t.stop, t.step)) for t in index]
    return (*picked, *shape[len(index) :])


def _simple(index: StoreIndex, shape: tuple[int, ...]) -> bool:
    """Whether an index selects whole rows."""
    return all(
        isinstance(term, slice) and term.start == 0 and term.stop == n and term.step == 1
        for term, n in zip(index[1:], shape[1:], strict=False)
    )


def _rows(index: StoreIndex, shape: tuple[int, ...]) -> tuple[int, int] | Ids:
    """The rows that an index selects: a range, or one by one."""
    if not index:
        return 0, shape[0] if shape else 1
    term = index[0]
    if isinstance(term, Tensor):
        return term.numpy()
    if term.step == 1 or term.stop - term.start <= 1:
        return term.start, term.stop
    return np.arange(term.start, term.stop, term.step, dtype=np.int64)


# -- reading ------------------------------------------------------------------------------


def plan_read(path: Path, array: Array, index: StoreIndex, out: Tensor) -> tuple[list[Fetch], Callable[[], None]]:
    """What to fetch so that `out` holds `leaf[index]`, and what is left to do then."""
    shape = array.spec.shape
    if not out.numel():
        return [], _nothing
    rows = _rows(index, shape)
    if _simple(index, shape) and out.is_contiguous():
        return list(_fetches(path, array, rows, raw(out))), _nothing
    # Whole rows into memory of our own, and from there what was asked for.
    count = rows[1] - rows[0] if isinstance(rows, tuple) else len(rows)
    held = torch.empty((count, *shape[1:]) if shape else (), dtype=out.dtype)
    rest = (slice(0, count, 1), *index[1:]) if index else ()

    def finish() -> None:
        gather(held, rest, out)

    return list(_fetches(path, array, rows, raw(held))), finish


def _nothing() -> None:
    pass


def _fetches(path: Path, array: Array, rows: tuple[int, int] | Ids, into: Bytes) -> Iterator[Fetch]:
    size = array.row
    if isinstance(rows, tuple):
        yield from _fetch_bytes(path, array, rows[0] * size, rows[1] * size, into)
    elif not array.rows_per_cell:
        for i, row in enumerate(rows.tolist()):
            yield from _fetch_bytes(path, array, row * size, (row + 1) * size, into[i * size : (i + 1) * size])
    else:
        step = max(1, PIECE // array.stride)
        into = into.reshape(len(rows), size)
        for at in range(0, len(rows), step):
            yield _fetch_rows(path, array, rows[at : at + step], into[at : at + step])


def _fetch_bytes(path: Path, array: Array, start: int, stop: int, into: Bytes) -> Iterator[Fetch]:
    cell = array.cell
    step = max(1, PIECE // array.stride) * cell
    for a in range(start - start % cell, stop, step):
        lo, hi = max(a, start), min(a + step, stop)
        yield _fetch_run(path, array, lo, hi, into[lo - start : hi - start])


def _fetch_run(path: Path, array: Array, lo: int, hi: int, into: Bytes) -> Fetch:
    cell = array.cell
    first = lo // cell
    ids = np.arange(first, -(-hi // cell), dtype=np.int64)

    def take(data: Bytes) -> None:
        if lo % cell == 0 and len(into) == len(ids) * cell:
            into.reshape(len(ids), cell)[...] = data
        else:
            into[...] = data.reshape(-1)[lo - first * cell : hi - first * cell]

    return Fetch(path, array, ids, take)


def _fetch_rows(path: Path, array: Array, rows: Ids, into: Bytes) -> Fetch:
    per = array.rows_per_cell
    wanted = rows // per if per > 1 else rows
    if len(wanted) < 2 or bool((wanted[1:] > wanted[:-1]).all()):
        ids, at = wanted, None
    else:
        ids, at = np.unique(wanted, return_inverse=True)

    def take(data: Bytes) -> None:
        if per > 1:
            places = (np.arange(len(rows)) if at is None else at) * per + rows % per
            np.take(np.ascontiguousarray(data).reshape(-1, array.row), places, axis=0, out=into, mode="clip")
        elif at is None:
            into[...] = data
        else:
            np.take(data, at, axis=0, out=into, mode="clip")

    return Fetch(path, array, ids, take)


# -- writing ------------------------------------------------------------------------------


def plan_write(path: Path, array: Array, index: StoreIndex, value: Tensor) -> Iterator[Change]:
    """The changes, of bounded size each, that put `value` at `leaf[index]`."""
    spec = array.spec
    if not value.numel():
        return
    if index and isinstance(index[0], Tensor):
        rows, positions = last_wins(index[0])
        if positions is not None:
            index, value = (rows, *index[1:]), _take(value, positions)
    picked = _rows(index, spec.shape)
    if not _simple(index, spec.shape):
        yield from _mixed(path, array, picked, index, value)
        return
    data = np.ascontiguousarray(to_numpy(value)).reshape(-1).view(np.uint8)
    size = array.row
    if isinstance(picked, tuple):
        yield from _put_bytes(path, array, picked[0] * size, picked[1] * size, data)
    elif not array.rows_per_cell:
        for i, row in enumerate(picked.tolist()):
            yield from _put_bytes(path, array, row * size, (row + 1) * size, data[i * size : (i + 1) * size])
    else:
        order = np.argsort(picked, kind="stable")
        step = max(1, PIECE // array.stride)
        values = data.reshape(len(picked), size)
        for at in range(0, len(picked), step):
            some = order[at : at + step]
            yield _put_rows(path, array, picked[some], values[some])


def _take(value: Tensor, positions: Tensor) -> Tensor:
    return from_numpy(to_numpy(value)[positions.numpy()], value.dtype)


def _put_bytes(path: Path, array: Array, start: int, stop: int, data: Bytes) -> Iterator[Change]:
    cell = array.cell
    step = max(1, PIECE // array.stride) * cell
    for a in range(start - start % cell, stop, step):
        lo, hi = max(a, start), min(a + step, stop)
        yield _put_run(path, array, lo, hi, data[lo - start : hi - start])


def _put_run(path: Path, array: Array, lo: int, hi: int, data: Bytes) -> Change:
    cell, end = array.cell, array.spec.nbytes
    first, last = lo // cell, -(-hi // cell)
    needs = {0} if lo % cell else set()
    # What lies beyond the end is ours to set only while nobody else can have made the leaf longer.
    if hi % cell and (hi != end or array.mine is None):
        needs.add(last - first - 1)

    def patch(cells: Bytes) -> None:
        flat = cells.reshape(-1)
        if hi == end and hi % cell and last - first - 1 not in needs:
            cells[-1] = array.fill_cell()  # what lies beyond the end, should the leaf grow
        flat[lo - first * cell : hi - first * cell] = data

    ids = np.arange(first, last, dtype=np.int64)
    return Change(path, array, ids, np.array(sorted(needs), np.int64) if needs else _NONE, patch)


def _put_rows(path: Path, array: Array, rows: Ids, values: Bytes) -> Change:
    """Sorted rows, each once."""
    per = array.rows_per_cell
    if per == 1:

        def put(cells: Bytes) -> None:
            cells[...] = values

        return Change(path, array, rows, _NONE, put)
    ids, at, counts = np.unique(rows // per, return_inverse=True, return_counts=True)
    total = array.spec.shape[0]
    full = np.minimum(per, total - ids * per) if array.mine is not None else per
    needs = np.flatnonzero(counts < full)

    def patch(cells: Bytes) -> None:
        if ids[-1] * per + per > total and len(ids) - 1 not in needs:
            cells[-1] = array.fill_cell()
        cells.reshape(-1, array.row)[at * per + rows % per] = values

    return Change(path, array, ids, needs, patch)


def _mixed(
    path: Path, array: Array, picked: tuple[int, int] | Ids, index: StoreIndex, value: Tensor
) -> Iterator[Change]:
    """Parts of rows: the rows as they are, with the values put into them."""
    rows = np.arange(*picked, dtype=np.int64) if isinstance(picked, tuple) else picked
    order = np.argsort(rows, kind="stable")
    # Rows that are cut into cells come one by one: the cells between two of them are not to be touched.
    step = max(1, PIECE // array.stride) if array.rows_per_cell else 1
    for at in range(0, len(rows), step):
        some = order[at : at + step]
        yield _mix(path, array, rows[some], index, _take(value, torch.from_numpy(some)))


def _mix(path: Path, array: Array, rows: Ids, index: StoreIndex, value: Tensor) -> Change:
    spec, size, cell = array.spec, array.row, array.cell
    shape = (len(rows), *spec.shape[1:])
    rest = (slice(0, len(rows), 1), *index[1:])
    per = array.rows_per_cell
    first, last = int(rows[0]) * size, (int(rows[-1]) + 1) * size
    ids = np.unique(rows // per) if per else np.arange(first // cell, -(-last // cell), dtype=np.int64)

    def patch(cells: Bytes) -> None:
        if per:
            places = np.searchsorted(ids, rows // per) * per + rows % per
            held = cells.reshape(-1, size)[places]
        else:
            start = first - first // cell * cell
            held = cells.reshape(-1)[start : start + last - first].copy()
        tensor = from_numpy(held.reshape(-1).view(numpy_dtype(spec.dtype)).reshape(shape), spec.dtype)
        scatter(tensor, rest, value)
        new = raw(tensor)
        if per:
            cells.reshape(-1, size)[places] = new.reshape(len(rows), size)
        else:
            cells.reshape(-1)[start : start + last - first] = new

    return Change(path, array, ids, np.arange(len(ids), dtype=np.int64), patch)


def everything(array: Array) -> Any:
    """Pieces of cell ids that cover an array."""
    step = max(1, PIECE // array.stride)
    for at in range(0, array.cells, step):
        yield np.arange(at, min(at + step, array.cells), dtype=np.int64)
