"""Chunks of whole rows, decoded by zlib and numpy: HDF5 decodes one after the other, and takes longer to select rows.

Datasets of other shapes, types or filters are read by h5py, and so are chunks that this does not understand: HDF5
tells what is wrong with them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping

import h5py
import numpy as np
import torch
from h5py import h5t, h5z
from torch import Tensor

from tdstore.dtypes import numpy_dtype, to_numpy
from tdstore.engine import Buffer
from tdstore.index.ranges import Ints, distinct
from tdstore.threads import ThreadPool
from tdstore.types import LeafSpec, StoreIndex

TOGETHER = 4 << 20
"""Bytes of decoded chunks from which rows are taken at a time."""
THREADS_PAY = 1 << 20
"""Bytes of decoded chunks from which threads decode them."""
MOST_THREADS = 8
_ABSENT = -1

Take = Callable[[int, int], memoryview]
"""Returns the bytes `[start, stop)` of the file."""


class RowChunks:
    """The chunks of a dataset that is cut along its first dimension only.

    Args:
        spec: shape and type of the leaf.
        chunk: rows of a chunk.
        filters: codes of the filters, in the order in which a chunk was encoded.
        places: begin and end of each chunk in the file, by its first row.
        skipped: bits of the filters that were not applied to a chunk, by its first row, where there are any.
    """

    def __init__(
        self,
        spec: LeafSpec,
        chunk: int,
        filters: list[int],
        places: Mapping[tuple[int, ...], tuple[int, int]],
        skipped: Mapping[tuple[int, ...], int],
    ) -> None:
        self.chunk = chunk
        self._filters = filters
        self._row_shape = spec.shape[1:]
        self._dtype = numpy_dtype(spec.dtype)
        self._torch_dtype = spec.dtype
        self._length = spec.shape[0]
        self._nbytes = chunk * math.prod(self._row_shape) * self._dtype.itemsize
        count = -(-spec.shape[0] // chunk)
        self._places = np.full((count, 2), _ABSENT, np.int64)
        for at, place in places.items():
            if at[0] // chunk < count:
                self._places[at[0] // chunk] = place
        self._skipped = {at[0] // chunk: bits for at, bits in skipped.items()}

    @classmethod
    def of(
        cls,
        dataset: h5py.Dataset,
        spec: LeafSpec,
        places: Mapping[tuple[int, ...], tuple[int, int]],
        skipped: Mapping[tuple[int, ...], int],
    ) -> RowChunks | None:
        """Return the chunks of a dataset; None if it is one for h5py."""
        shape, chunks = dataset.shape, dataset.chunks
        if not spec.nbytes or chunks is None or chunks[1:] != shape[1:] or shape[1:] != tuple(spec.shape[1:]):
            return None
        plist = dataset.id.get_create_plist()
        filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
        kind, dtype = dataset.id.get_type(), numpy_dtype(spec.dtype)
        native = dataset.dtype.isnative and kind.equal(h5t.py_create(dataset.dtype, logical=True))
        if (
            not native
            or kind.get_size() != dtype.itemsize
            or not {h5z.FILTER_DEFLATE, h5z.FILTER_SHUFFLE} >= {*filters}
        ):
            return None
        return cls(spec, chunks[0], filters, places, skipped)

    def rows(self, index: StoreIndex) -> Ints | None:
        """Return the rows that an index names; None if it selects within rows."""
        for term, length in zip(index[1:], self._row_shape, strict=False):
            if isinstance(term, Tensor) or (term.start, term.stop, term.step) != (0, length, 1):
                return None
        term = index[0] if index else slice(0, self._length, 1)
        rows: Ints = term.numpy() if isinstance(term, Tensor) else np.arange(term.start, term.stop, term.step)
        return rows

    def ranges(self, rows: Ints) -> Ints:
        """Return the bytes of the file that rows need."""
        found: Ints = self._places[distinct(rows // self.chunk)]
        there: Ints = found[found[:, 0] != _ABSENT]
        return there

    def read(self, index: StoreIndex, take: Take) -> Tensor | None:
        """Read rows of the leaf.

        Args:
            index: of rows.
            take: returns bytes of the file that were fetched.

        Returns:
            the rows; None if they must be read by h5py.
        """
        rows = self.rows(index)
        if rows is None:
            return None
        order = np.argsort(rows // self.chunk, kind="stable")
        numbers, counts = np.unique(rows[order] // self.chunk, return_counts=True)
        if (self._places[numbers] == _ABSENT).any():  # they hold the fill value
            return None
        value = torch.empty((len(rows), *self._row_shape), dtype=self._torch_dtype)
        out = to_numpy(value)
        edges = np.concatenate([[0], np.cumsum(counts)])
        each = max(1, TOGETHER // self._nbytes)

        def work(first: int) -> bool:
            some = numbers[first : first + each]
            block = np.empty((len(some), self._nbytes), np.uint8)
            for slot, number in enumerate(some.tolist()):
                data = self._decode(number, take(*self._places[number].tolist()))
                if data is None or len(data) != self._nbytes:
                    return False
                block[slot] = np.frombuffer(data, np.uint8)
            at = order[edges[first] : edges[first + len(some)]]
            slots = np.repeat(np.arange(len(some)), counts[first : first + each])
            decoded = block.view(self._dtype).reshape(-1, *self._row_shape)
            out[at] = decoded[slots * self.chunk + rows[at] % self.chunk]
            return True

        return value if all(spread(work, range(0, len(numbers), each), len(numbers) * self._nbytes)) else None

    def _decode(self, number: int, data: Buffer) -> Buffer | None:
        """Undo the filters of a chunk, the last one first; None if that fails."""
        skipped = self._skipped.get(number, 0)
        for at in range(len(self._filters) - 1, -1, -1):
            if skipped >> at & 1:
                continue
            if self._filters[at] == h5z.FILTER_DEFLATE:
                stream = zlib.decompressobj()
                try:
                    data = stream.decompress(data, self._nbytes + 1)  # a damaged chunk may claim to be far larger
                except zlib.error:
                    return None
                if not stream.eof:
                    return None
            elif len(data) != self._nbytes:
                return None
            elif self._dtype.itemsize > 1:
                data = np.frombuffer(data, np.uint8).reshape(self._dtype.itemsize, -1).T.tobytes()
        return data


def spread(work: Callable[[int], bool], items: range, nbytes: int) -> list[bool]:
    """Work on items, in threads if that pays.

    Args:
        work: what is done for each item.
        items: the items.
        nbytes: the bytes that are decoded in all.
    """
    workers = min(MOST_THREADS, torch.get_num_threads())  # one in the workers of a loader
    if nbytes < THREADS_PAY or workers < 2 or len(items) < 2:
        return list(map(work, items))
    with ThreadPool(workers) as pool:
        return list(pool.map(work, items))
