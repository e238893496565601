"""Datasets that h5py must decode: chunked, compressed, of another byte order. Any index, memory O(batch)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import h5py
import numpy as np
import torch
from h5py import h5s
from torch import Tensor

from tdstore.dtypes import to_numpy
from tdstore.index.ranges import distinct, index_shape
from tdstore.index.rows import sorted_unique
from tdstore.index.rows import take as take_rows
from tdstore.storekit.pages import empty
from tdstore.types import LeafSpec, StoreIndex
from tdstore_h5.rows.contiguous import Bytes

PIECE = 1024
"""Rows of one HDF5 selection: building it takes time that grows faster than the number of rows."""
BLOCK_BYTES = 8 << 20


def read(dataset: h5py.Dataset, spec: LeafSpec, index: StoreIndex, out: Tensor | None) -> Tensor:
    """Read `leaf[index]` into new memory, or into `out`."""
    index = _within(dataset, spec, index)
    shape = index_shape(spec.shape, index)
    at = next((i for i, term in enumerate(index) if isinstance(term, Tensor)), None)
    inverse = None
    if at is not None:
        rows, inverse = sorted_unique(index[at])  # type: ignore[arg-type]
        part = torch.empty((*shape[:at], len(rows), *shape[at + 1 :]), dtype=spec.dtype, device="cpu")
        _read_rows(dataset, index, at, rows.numpy(), to_numpy(part))
    else:
        part = out if out is not None and out.is_contiguous() and out.shape == shape else empty(shape, spec.dtype)
        _read_block(dataset, _slices(index), to_numpy(part))
        if part is out:
            return part
    if inverse is not None:
        assert at is not None
        part = take_rows(part, at, inverse)
    return part if out is None else out.copy_(part)


def need_memory(dataset: h5py.Dataset) -> None:
    """Distinguish a filter out of memory from a damaged chunk: HDF5 reports only a failure.

    Raises:
        MemoryError: there is no memory to decode a chunk.
    """
    chunk = math.prod(dataset.chunks or dataset.shape) * dataset.dtype.itemsize
    np.empty(2 * chunk, np.uint8)  # the chunk as it is stored, and decoded; untouched, it takes address space only


def unreadable_rows(dataset: h5py.Dataset, spec: LeafSpec, index: StoreIndex) -> list[tuple[int, int]]:
    """Return the rows of an index in chunks that cannot be decoded: `[start, stop)` along the first dimension."""
    if not spec.shape:
        return []
    term = index[0] if index else slice(0, spec.shape[0], 1)
    rows = term.numpy() if isinstance(term, Tensor) else np.arange(term.start, term.stop, term.step)
    chunk = dataset.chunks[0] if dataset.chunks else max(1, spec.shape[0])
    block, bad = _Block(dataset), []
    for number in distinct(rows // chunk).tolist():
        first, last = number * chunk, min((number + 1) * chunk, spec.shape[0])
        try:
            block.read((slice(first, last, 1),), np.empty((last - first, *spec.shape[1:]), dataset.dtype))
        except (OSError, RuntimeError, ValueError):
            bad.append((first, last))
    return bad


def write(dataset: h5py.Dataset, spec: LeafSpec, index: StoreIndex, value: Tensor) -> None:
    """Write `value` to `leaf[index]`, where no row is named twice."""
    if not value.numel():
        return
    index = _within(dataset, spec, index)
    at = next((i for i, term in enumerate(index) if isinstance(term, Tensor)), None)
    if at is None:
        _Block(dataset).write(_slices(index), to_numpy(value.contiguous()))
        return
    rows = index[at].numpy()  # type: ignore[union-attr]
    order = np.argsort(rows, kind="stable")
    for where, piece in _pieces(rows[order]):
        target = (*_slices(index[:at]), piece, *_slices(index[at + 1 :]))
        dataset[target] = to_numpy(take_rows(value, at, torch.from_numpy(order)[where]))


def _within(dataset: h5py.Dataset, spec: LeafSpec, index: StoreIndex) -> StoreIndex:
    """Return the index of the whole leaf, if its dataset is longer: a dead writer had begun to extend it."""
    if index or dataset.shape == spec.shape:
        return index
    return tuple(slice(0, n, 1) for n in spec.shape)


def read_bytes(dataset: h5py.Dataset, spec: LeafSpec, start: int, stop: int) -> Bytes:
    """Read bytes of the leaf in its memory layout, C order."""
    if not spec.shape:
        whole = read(dataset, spec, (), None)
        return to_numpy(whole.reshape(1)).view(np.uint8)[start:stop]
    row = spec.nbytes // spec.shape[0]
    first, last = start // row, -(-stop // row)
    if row > 2 * BLOCK_BYTES and len(spec.shape) > 1:
        return _read_within(dataset, spec, start, stop)
    rows = read(dataset, spec, (slice(first, last, 1),), None)
    return to_numpy(rows.reshape(-1)).view(np.uint8)[start - first * row : stop - first * row]


def _read_within(dataset: h5py.Dataset, spec: LeafSpec, start: int, stop: int) -> Bytes:
    """Read bytes of a leaf whose rows are huge: row by row, by ranges of the next dimension that is small enough."""
    shape, itemsize = spec.shape, spec.dtype.itemsize
    dim = next((d for d in range(len(shape)) if math.prod(shape[d + 1 :]) * itemsize <= BLOCK_BYTES), len(shape) - 1)
    unit = math.prod(shape[dim + 1 :]) * itemsize
    out = np.empty(stop - start, np.uint8)
    at = start
    while at < stop:
        position, place = at // unit, []
        for size in reversed(shape[: dim + 1]):
            position, rest = divmod(position, size)
            place.append(rest)
        *lead, first = reversed(place)
        skip = at % unit
        last = min(shape[dim], first + -(-(skip + stop - at) // unit))
        index = (*(slice(i, i + 1, 1) for i in lead), slice(first, last, 1))
        part = to_numpy(read(dataset, spec, index, None).reshape(-1)).view(np.uint8)[skip:][: stop - at]
        out[at - start : at - start + len(part)] = part
        at += len(part)
    return out


def block_rows(dataset: h5py.Dataset, spec: LeafSpec) -> int:
    """Return the number of rows to move at a time: some MiB, in whole chunks."""
    row = max(1, spec.nbytes // max(1, spec.shape[0]))
    rows = max(1, BLOCK_BYTES // row)
    chunk = dataset.chunks[0] if dataset.chunks else 1
    return int(max(1, rows // chunk) * chunk)


def _read_rows(dataset: h5py.Dataset, index: StoreIndex, at: int, rows: np.ndarray[Any, Any], out: Any) -> None:
    """Read increasing rows, chunk by chunk: HDF5 takes several times longer to select a list than to decode it."""
    if not out.size:
        return
    block = _Block(dataset)
    before, after = _slices(index[:at]), _slices(index[at + 1 :])
    head = (slice(None),) * at
    scratch: Any = None
    chunk = dataset.chunks[at] if dataset.chunks else 1
    edges = np.flatnonzero(np.diff(rows // chunk)) + 1
    for first, last in itertools.pairwise([0, *edges.tolist(), len(rows)]):
        low, high = int(rows[first]), int(rows[last - 1]) + 1
        target = out[(*head, slice(first, last))]
        where = (*before, slice(low, high), *after)
        if high - low == last - first:
            block.read(where, target)
            continue
        if scratch is None or scratch.shape[at] < high - low:
            scratch = np.empty((*out.shape[:at], chunk, *out.shape[at + 1 :]), out.dtype)
        part = scratch[(*head, slice(0, high - low))]
        block.read(where, part)
        target[...] = part[(*head, rows[first:last] - low)]


class _Block:
    """Access to blocks of one dataset, without h5py's handling of all kinds of indices, slower than a small chunk."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._id = dataset.id
        self._space = dataset.id.get_space()
        self._shape = dataset.shape

    def read(self, slices: tuple[slice, ...], out: Any) -> None:
        """Fill `out` with the selection of slices of the leading dimensions."""
        if not out.size:
            return
        if not out.flags.c_contiguous:
            whole = np.empty(out.shape, out.dtype)
            self.read(slices, whole)
            out[...] = whole
            return
        self._id.read(*self._spaces(slices, out.shape), out)

    def write(self, slices: tuple[slice, ...], value: Any) -> None:
        """Set the selection of slices of the leading dimensions to a contiguous value."""
        self._id.write(*self._spaces(slices, value.shape), value)

    def _spaces(self, slices: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Return the selection in memory, and in the file."""
        if not self._shape:
            return h5s.ALL, h5s.ALL
        terms = (*slices, *(slice(0, n, 1) for n in self._shape[len(slices) :]))
        self._space.select_hyperslab(tuple(t.start for t in terms), shape, stride=tuple(t.step or 1 for t in terms))
        return h5s.create_simple(shape), self._space


def _read_block(dataset: h5py.Dataset, slices: tuple[slice, ...], out: Any) -> None:
    _Block(dataset).read(slices, out)


def _pieces(rows: np.ndarray[Any, Any]) -> list[tuple[slice, slice | np.ndarray[Any, Any]]]:
    """Cut increasing rows into pieces that HDF5 selects quickly, each with its position among the rows."""
    if not len(rows):
        return []
    if int(rows[-1]) - int(rows[0]) + 1 == len(rows):
        return [(slice(0, len(rows)), slice(int(rows[0]), int(rows[-1]) + 1))]
    return [(slice(i, min(i + PIECE, len(rows))), rows[i : i + PIECE]) for i in range(0, len(rows), PIECE)]


def _slices(index: StoreIndex) -> tuple[slice, ...]:
    return tuple(term for term in index if isinstance(term, slice))
