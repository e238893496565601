"""Translation of an index of a leaf to the cells that it touches, and back. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tdstore.dtypes import from_numpy, numpy_dtype, to_numpy
from tdstore.index.rows import gather, last_wins, scatter
from tdstore.types import Path, StoreIndex
from tdstore_redis.cells.layout import PIECE, Array, Bytes, Ids


@dataclass(slots=True)
class Run:
    """Neighbouring cells to get, and the requested bytes of them."""

    path: Path
    array: Array
    first: int
    stop: int
    into: Bytes
    """Flat. May be empty: then the cells are only checked."""
    skip: int = 0
    """Bytes at the start of the first cell that are outside of the request."""

    @property
    def size(self) -> int:
        """Return the bytes of the reply."""
        return (self.stop - self.first) * self.array.stride

    def put(self, first: int, stop: int, cells: Bytes) -> None:
        """Copy the requested bytes of some of the cells, `[n, cell or more]`."""
        cell = self.array.cell
        at = (first - self.first) * cell - self.skip
        skip = -at if at < 0 else 0
        into = self.into[at + skip : (stop - self.first) * cell - self.skip]
        for flat, part in _aligned(into, skip, cells[:, :cell]):
            flat[...] = part


def _aligned(flat: Bytes, skip: int, cells: Bytes) -> list[tuple[Bytes, Bytes]]:
    """Pair bytes that begin `skip` after the first of some cells `[n, cell]` with the parts of the cells they fill."""
    count, cell = cells.shape
    if not skip and len(flat) == count * cell:
        return [(flat.reshape(count, cell), cells)]
    start = min(cell - skip, len(flat))  # bytes in the first cell
    whole = (len(flat) - start) // cell
    stop = start + whole * cell
    parts = [(flat[:start], cells[0, skip : skip + start])]
    if whole:
        parts.append((flat[start:stop].reshape(whole, cell), cells[1 : 1 + whole]))
    if stop < len(flat):
        parts.append((flat[stop:], cells[1 + whole, : len(flat) - stop]))
    return parts


@dataclass(slots=True)
class Rows:
    """Cells to get one by one, and the target of each."""

    path: Path
    array: Array
    ids: Ids
    """Sorted, each once."""
    take: Callable[[Bytes], None]
    """Called with the data of these cells, `[n, cell]`."""

    @property
    def size(self) -> int:
        """Return the bytes of the reply, at least."""
        return len(self.ids) * self.array.stride


Fetch = Run | Rows


@dataclass(slots=True)
class Change:
    """Cells to set."""

    path: Path
    array: Array
    ids: range | Ids
    """Sorted, each once."""
    needs: Sequence[int]
    """Positions in `ids` of the cells that are changed in part: their present content must be known."""
    patch: Callable[[Bytes], None]
    """Puts the new values into `[n, cell]` (each cell contiguous), which has the old ones where they were needed."""
    repeated: bool = False
    """Whether the same call writes to this leaf again, or did before."""

    def blocks(self) -> list[int]:
        """Return the blocks of its cells, sorted."""
        per = self.array.per_block
        if isinstance(self.ids, range):
            return list(range(self.ids.start // per, (self.ids.stop - 1) // per + 1))
        return list(map(int, np.unique(self.ids // per)))

    @property
    def needed(self) -> list[int]:
        """Return the cells of `needs`."""
        return [int(self.ids[at]) for at in self.needs]


def raw(tensor: Tensor) -> Bytes:
    """Return the bytes of a contiguous tensor in its memory layout."""
    return to_numpy(tensor).reshape(-1).view(np.uint8)


def is_whole_rows(index: StoreIndex, shape: tuple[int, ...]) -> bool:
    """Check whether an index selects whole rows."""
    return len(index) < 2 or all(
        isinstance(term, slice) and term.start == 0 and term.stop == n and term.step == 1
        for term, n in zip(index[1:], shape[1:], strict=False)
    )


def _rows(index: StoreIndex, shape: tuple[int, ...]) -> tuple[int, int] | Ids:
    """Return the rows that an index selects: a range, or one by one."""
    if not index:
        return 0, shape[0] if shape else 1
    term = index[0]
    if isinstance(term, Tensor):
        return term.numpy()
    if term.step == 1 or term.stop - term.start <= 1:
        return term.start, term.stop
    return np.arange(term.start, term.stop, term.step, dtype=np.int64)


# -- reading ------------------------------------------------------------------------------


def plan_read(
    path: Path, array: Array, index: StoreIndex, out: Tensor
) -> tuple[list[Fetch], Callable[[], None] | None]:
    """Plan the fetches for `out = leaf[index]`, and a function to call after them, if any is needed.

    Args:
        path: the leaf.
        array: its layout.
        index: the rows.
        out: the target.
    """
    shape = array.spec.shape
    if not out.numel():
        return [], None
    rows = _rows(index, shape)
    if is_whole_rows(index, shape) and out.is_contiguous():
        return _fetches(path, array, rows, raw(out)), None
    # Whole rows into memory of our own, and from there the selection.
    count = rows[1] - rows[0] if isinstance(rows, tuple) else len(rows)
    held = torch.empty((count, *shape[1:]) if shape else (), dtype=out.dtype, device="cpu")
    rest = (slice(0, count, 1), *index[1:]) if index else ()

    def finish() -> None:
        gather(held, rest, out)

    return _fetches(path, array, rows, raw(held)), finish


def _fetches(path: Path, array: Array, rows: tuple[int, int] | Ids, into: Bytes) -> list[Fetch]:
    size = array.row
    if isinstance(rows, tuple):
        return [*_fetch_bytes(path, array, rows[0] * size, rows[1] * size, into)]
    if not array.rows_per_cell:
        return [
            piece
            for i, row in enumerate(rows.tolist())
            for piece in _fetch_bytes(path, array, row * size, (row + 1) * size, into[i * size : (i + 1) * size])
        ]
    step = max(1, PIECE // array.stride)
    into = into.reshape(len(rows), size)
    return [_fetch_rows(path, array, rows[at : at + step], into[at : at + step]) for at in range(0, len(rows), step)]


def _fetch_bytes(path: Path, array: Array, start: int, stop: int, into: Bytes) -> list[Run]:
    cell = array.cell
    step = max(1, PIECE // array.stride)
    first, end = start // cell, -(-stop // cell)
    skip = start - first * cell
    if end - first <= step:
        return [Run(path, array, first, end, into, skip)]
    pieces = []
    for a in range(first, end, step):
        lo, hi = max(a * cell, start), min((a + step) * cell, stop)
        pieces.append(Run(path, array, a, min(a + step, end), into[lo - start : hi - start], lo - a * cell))
    return pieces


def _fetch_rows(path: Path, array: Array, rows: Ids, into: Bytes) -> Rows:
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

    return Rows(path, array, ids, take)


# -- writing ------------------------------------------------------------------------------


def plan_write(
    path: Path, array: Array, index: StoreIndex, value: Tensor, *, whole_blocks: bool | None = None
) -> Iterable[Change]:
    """Plan the changes, of bounded size each, for `leaf[index] = value`.

    Args:
        path: the leaf.
        array: its layout.
        index: the rows.
        value: their values.
        whole_blocks: True for only those changes that write all cells of a block, False for the others.
    """
    spec = array.spec
    if not value.numel():
        return ()
    if index and isinstance(index[0], Tensor):
        rows, positions = last_wins(index[0])
        if positions is not None:
            index, value = (rows, *index[1:]), _take(value, positions)
    picked = _rows(index, spec.shape)
    if not is_whole_rows(index, spec.shape):
        return () if whole_blocks else _mixed(path, array, picked, index, value)
    data = raw(value) if value.is_contiguous() else raw(value.contiguous())
    size = array.row
    if isinstance(picked, tuple):
        return _put_span(path, array, picked[0] * size, picked[1] * size, data, whole_blocks)
    if not array.rows_per_cell:
        return (
            change
            for i, row in enumerate(picked.tolist())
            for change in _put_span(
                path, array, row * size, (row + 1) * size, data[i * size : (i + 1) * size], whole_blocks
            )
        )
    order = np.argsort(picked, kind="stable")
    step = max(1, PIECE // array.stride)
    if whole_blocks is not None:
        per_block = array.rows_per_cell * array.per_block
        block = picked[order] // per_block
        _, at, counts = np.unique(block, return_inverse=True, return_counts=True)
        order = order[(counts[at] == per_block) == whole_blocks]
        if whole_blocks:
            step = array.rows_per_cell * _piece_of_blocks(array)
    values = data.reshape(len(picked), size)
    parts = (order[at : at + step] for at in range(0, len(order), step))
    return (_put_rows(path, array, picked[some], values[some]) for some in parts)


def _piece_of_blocks(array: Array) -> int:
    """Return the cells of as many whole blocks as make a piece."""
    return max(1, PIECE // (array.per_block * array.stride)) * array.per_block


def _put_span(path: Path, array: Array, start: int, stop: int, data: Bytes, whole_blocks: bool | None) -> list[Change]:
    if whole_blocks is None:
        return _put_bytes(path, array, start, stop, data)
    block = array.per_block * array.cell
    first, last = -(-start // block) * block, stop // block * block
    if first >= last:
        return [] if whole_blocks else _put_bytes(path, array, start, stop, data)
    if whole_blocks:
        cells = _piece_of_blocks(array)
        return _put_bytes(path, array, first, last, data[first - start : last - start], cells)
    return [
        *_put_bytes(path, array, start, first, data[: first - start]),
        *_put_bytes(path, array, last, stop, data[last - start :]),
    ]


def _take(value: Tensor, positions: Tensor) -> Tensor:
    return from_numpy(to_numpy(value)[positions.numpy()], value.dtype)


def _put_bytes(path: Path, array: Array, start: int, stop: int, data: Bytes, cells: int | None = None) -> list[Change]:
    """Plan changes of so many cells each."""
    cell = array.cell
    step = (cells or max(1, PIECE // array.stride)) * cell
    cuts = [(max(a, start), min(a + step, stop)) for a in range(start - start % cell, stop, step)]
    return [_put_run(path, array, lo, hi, data[lo - start : hi - start]) for lo, hi in cuts]


def _put_run(path: Path, array: Array, lo: int, hi: int, data: Bytes) -> Change:
    cell, end = array.cell, array.spec.nbytes
    first, last = lo // cell, -(-hi // cell)
    needs = {0} if lo % cell else set()
    # Cells beyond the end may be set only while no other writer can have extended the leaf.
    if hi % cell and (hi != end or array.mine is None):
        needs.add(last - first - 1)

    def patch(cells: Bytes) -> None:
        if hi == end and hi % cell and last - first - 1 not in needs:
            cells[-1] = array.fill_cell()  # rows beyond the end, should the leaf grow
        for new, part in _aligned(data, lo - first * cell, cells):
            part[...] = new

    return Change(path, array, range(first, last), sorted(needs), patch)


def _put_rows(path: Path, array: Array, rows: Ids, values: Bytes) -> Change:
    """Plan the change of sorted rows, each once."""
    per = array.rows_per_cell
    if per == 1:

        def put(cells: Bytes) -> None:
            cells[...] = values

        return Change(path, array, rows, (), put)
    ids, at, counts = np.unique(rows // per, return_inverse=True, return_counts=True)
    total = array.spec.shape[0]
    full = np.minimum(per, total - ids * per) if array.mine is not None else per
    needs = np.flatnonzero(counts < full).tolist()

    def patch(cells: Bytes) -> None:
        if ids[-1] * per + per > total and len(ids) - 1 not in needs:
            cells[-1] = array.fill_cell()
        cells.reshape(len(ids), per, array.row)[at, rows % per] = values

    return Change(path, array, ids, needs, patch)


def _mixed(
    path: Path, array: Array, picked: tuple[int, int] | Ids, index: StoreIndex, value: Tensor
) -> Iterator[Change]:
    """Plan changes of parts of rows: the present rows, with the values put into them."""
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
            several = cells.reshape(len(ids), per, size)
            places = np.searchsorted(ids, rows // per), rows % per
            held = several[places]
        else:
            held = np.empty(last - first, np.uint8)
            parts = _aligned(held, first % cell, cells)
            for flat, part in parts:
                flat[...] = part
        tensor = from_numpy(held.reshape(-1).view(numpy_dtype(spec.dtype)).reshape(shape), spec.dtype)
        scatter(tensor, rest, value)
        new = raw(tensor)
        if per:
            several[places] = new.reshape(len(rows), size)
        else:
            held[...] = new
            for flat, part in parts:
                part[...] = flat

    return Change(path, array, ids, range(len(ids)), patch)


def everything(path: Path, array: Array) -> Iterator[Run]:
    """Yield pieces that cover an array, to be checked only."""
    step = max(1, PIECE // array.stride)
    nothing = np.empty(0, np.uint8)
    for at in range(0, array.cells, step):
        yield Run(path, array, at, min(at + step, array.cells), nothing)
