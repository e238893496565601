"""Contiguous datasets, the default layout, as plain bytes: mapped reads, and writes by `pwrite`, without h5py.

HDF5 caches nothing of a contiguous dataset that it does not read or write itself, and it never
does so here. So a mapping of the file, other processes and a later h5py all read the same bytes.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from errno import ENOMEM, ENXIO
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdstore.dtypes import from_numpy, numpy_dtype, to_numpy
from tdstore.errors import CorruptStoreError
from tdstore.index.ranges import index_shape
from tdstore.index.rows import gather
from tdstore.storekit.checksums import BLOCK, byte_blocks
from tdstore.storekit.files import write_at
from tdstore.storekit.pages import empty, is_in_memory, map_whole_pages
from tdstore.types import LeafSpec, StoreIndex
from tdstore_h5.file.tree import Leaf

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

GROUP = 1 << 20
"""Most bytes read, changed and written back in one go."""
GAP = 4096
"""Blocks nearer than this are written as one."""
PIECE = 1 << 20
"""Bytes of a long stretch that are read or written at once: their checksums find them in the processor's cache."""
Arrived = Callable[[Bytes, int], None]
"""Called with the memory of a byte range, and the number of its bytes that were read, or written."""
LONG = 8 << 20
"""Stretches from here on are read without the mapping."""
SHORT = 64 << 10
"""Stretches of up to so many bytes are copied as bytes: torch's own indexing costs more than the copy."""


def blocks_of(shape: tuple[int, ...], index: StoreIndex) -> tuple[Ints, int]:
    """Return an index as contiguous blocks: their first elements in index order, and the elements of each.

    >>> starts, size = blocks_of((4, 3), (slice(1, 3, 1), slice(0, 2, 1)))
    >>> starts.tolist(), size
    ([3, 6], 2)
    """
    if len(index) == 1 and isinstance(index[0], Tensor):
        row = math.prod(shape[1:])
        return index[0].numpy() * row, row
    strides = [1] * (len(shape) + 1)
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim]
    last = len(index) - 1
    while last >= 0 and _is_full(index[last], shape[last]):
        last -= 1
    if last < 0:
        return np.zeros(1, np.int64), strides[0]
    term = index[last]
    if isinstance(term, slice) and term.step == 1:
        starts, size = np.array([term.start * strides[last + 1]]), (term.stop - term.start) * strides[last + 1]
    else:
        starts, size = _rows(term) * strides[last + 1], strides[last + 1]
    for dim in range(last - 1, -1, -1):
        starts = np.add.outer(_rows(index[dim]) * strides[dim + 1], starts).reshape(-1)
    return starts, size


def block_of(shape: Sequence[int], index: StoreIndex) -> tuple[int, int] | None:
    """Return the first element and the size of an index that is one block with elements; None for other indices.

    >>> block_of((4, 3), (slice(1, 3, 1), slice(0, 3, 1)))
    (3, 6)
    """
    last = len(index) - 1
    while last >= 0 and _is_full(index[last], shape[last]):
        last -= 1
    stride = math.prod(shape[last + 1 :])
    start, size = 0, stride
    for dim in range(last, -1, -1):
        term = index[dim]
        if not isinstance(term, slice) or (count := term.stop - term.start) < 1:
            return None
        if count > 1 and (dim < last or term.step != 1):
            return None
        start += term.start * stride
        size *= count
        stride *= shape[dim]
    return (start, size) if size else None


def _is_full(term: slice | Tensor, size: int) -> bool:
    return isinstance(term, slice) and term.start == 0 and term.stop == size and term.step == 1


def _rows(term: slice | Tensor) -> Ints:
    if isinstance(term, slice):
        return np.arange(term.start, term.stop, term.step, dtype=np.int64)
    return term.numpy()


def groups_of(starts: Ints, size: int, itemsize: int) -> Iterator[tuple[int, int, bool]]:
    """Cut sorted blocks into `(i, j, solid)`: blocks i to j are one stretch, without gaps if `solid`."""
    if len(starts) == 1:
        yield 0, 1, True
        return
    step = np.diff(starts)
    solid = step == size
    # Small blocks near each other: one read, one write, instead of thousands of either.
    near = solid | ((step - size) * itemsize <= min(GAP, 64 * size * itemsize)) if size * itemsize < GAP else solid
    cuts = np.concatenate(([0], np.flatnonzero(~near) + 1, [len(starts)]))
    gaps = np.concatenate(([0], np.cumsum(~solid)))  # before each block
    # A stretch with gaps is read and written whole, at most GAP bytes of gap to a block.
    most = max(1, GROUP // (size * itemsize))
    gapless = (gaps[cuts[:-1]] == gaps[cuts[1:] - 1]).tolist()
    for (a, b), whole in zip(pairwise(cuts.tolist()), gapless, strict=True):
        if whole:
            yield a, b, True
        else:
            for i in range(a, b, most):
                j = min(i + most, b)
                yield i, j, bool(solid[i : j - 1].all())


class RawFile:
    """The bytes of one file, by a descriptor that the store owns."""

    def __init__(self, fd: int, url: str) -> None:
        self.fd = fd
        self.url = url
        self._map: Bytes = np.empty(0, np.uint8)
        self._rows: dict[int, tuple[LeafSpec | None, np.ndarray[Any, Any]]] = {}
        """Mapped leaves by their offsets, as `row` copies from them."""
        self.on_tmpfs = is_in_memory(fd)
        """Each page of a hole that is read through a mapping takes memory then."""

    def forget(self) -> None:
        """Drop the mapping."""
        self._map = np.empty(0, np.uint8)
        self._rows.clear()

    def size(self) -> int:
        """Return the length of the file."""
        return os.fstat(self.fd).st_size

    def stored(self) -> int:
        """Return the bytes of the file on the storage: all but its holes."""
        return os.fstat(self.fd).st_blocks * 512

    def need(self, end: int) -> None:
        """Check that the file has `end` bytes: a mapping beyond its end would kill the process."""
        if (size := os.fstat(self.fd).st_size) < end:
            raise CorruptStoreError(
                f"{self.url} has {size} bytes, its datasets need {end}", url=self.url, hint="the file was cut short"
            )

    def read(
        self, offset: int, spec: LeafSpec, index: StoreIndex, out: Tensor | None, arrived: Arrived | None = None
    ) -> Tensor:
        """Read `leaf[index]` of the leaf at `offset`.

        Args:
            offset: the first byte of the leaf in the file.
            spec: its spec.
            index: the rows.
            out: the target; None for a new tensor.
            arrived: called for each piece of a long stretch; not called for other reads.
        """
        if spec.nbytes >= LONG and (whole := self._read_long(offset, spec, index, out, arrived)) is not None:
            return whole
        end = offset + spec.nbytes
        if (self.on_tmpfs and not self.has_all_pages()) or (end > len(self._map) and self._lacks_room(end)):
            return self._read_by_call(offset, spec, index, out)
        if out is None and len(index) == 1 and isinstance(index[0], Tensor) and spec.nbytes:
            numbers, length = index[0].numpy(), spec.shape[0]  # they are in range
            row = spec.nbytes // length
            if 0 < len(numbers) * row <= SHORT:
                found = self._map[offset:end].reshape(length, row).take(numbers, 0, None, "clip")
                return torch.from_numpy(found).view(spec.dtype).view(len(numbers), *spec.shape[1:])
        if out is None and (block := block_of(spec.shape, index)) is not None:
            itemsize = spec.dtype.itemsize
            low, nbytes = offset + block[0] * itemsize, block[1] * itemsize
            if nbytes <= SHORT:
                data = self._mapped(low, nbytes).copy().view(numpy_dtype(spec.dtype))
                return from_numpy(data.reshape(index_shape(spec.shape, index)), spec.dtype)
        memory = self._mapped(offset, spec.nbytes)
        if offset % spec.dtype.itemsize == 0:
            return gather(from_numpy(memory.view(numpy_dtype(spec.dtype)).reshape(spec.shape), spec.dtype), index, out)
        # Misaligned (another program's file): move bytes, at any offset.
        rows = gather(torch.from_numpy(memory.reshape(*spec.shape, spec.dtype.itemsize)), index, None)
        value = rows.reshape(-1).view(spec.dtype).reshape(rows.shape[:-1])
        return value if out is None else out.copy_(value)

    def row(self, offset: int, spec: LeafSpec, number: int) -> Tensor | None:
        """Copy one row, `[1, *feature]`, of a mapped leaf; return None if it is long, empty, misaligned, or not mapped.

        Args:
            offset: the first byte of the leaf in the file.
            spec: its spec.
            number: the row; it is in range.
        """
        known, rows = self._rows.get(offset, _NO_ROWS)
        if known is not spec:
            size = spec.nbytes // spec.shape[0]
            if not 0 < size <= SHORT or offset + spec.nbytes > len(self._map):
                return None
            if self.on_tmpfs and not self.has_all_pages():
                return None
            if offset % spec.dtype.itemsize:  # another program's file
                return None
            rows = self._map[offset : offset + spec.nbytes].view(numpy_dtype(spec.dtype)).reshape(spec.shape)
            self._rows[offset] = spec, rows
        row = torch.from_numpy(rows[number : number + 1].copy())
        return row if row.dtype is spec.dtype else row.view(spec.dtype)

    def write(
        self, offset: int, spec: LeafSpec, starts: Ints, size: int, value: Tensor, arrived: Arrived | None = None
    ) -> None:
        """Write the blocks of `blocks_of` (each start once) from `value`, in their order.

        Args:
            offset: the first byte of the leaf in the file.
            spec: its spec.
            starts, size: the blocks.
            value: their elements.
            arrived: called with the bytes of one block that is contiguous, after each part that was written.
        """
        if not value.numel():
            return
        itemsize = spec.dtype.itemsize
        if len(starts) == 1 and not value.is_contiguous():  # an expanded row may stand for more than fits in memory
            at = offset + int(starts[0]) * itemsize
            for block in byte_blocks(value):
                write_at(self.fd, block.data, at)
                at += len(block)
            return
        data = to_numpy(value.contiguous()).reshape(len(starts), size)
        if len(starts) == 1:
            flat, at = data.reshape(-1).view(np.uint8), offset + int(starts[0]) * itemsize
            step = PIECE if arrived is not None else len(flat)
            for begin in range(0, len(flat), step):
                write_at(self.fd, flat[begin : begin + step].data, at + begin)
                if arrived is not None:
                    arrived(flat, min(begin + step, len(flat)))
            return
        if (np.diff(starts) < 0).any():
            order = np.argsort(starts)
            starts, data = starts[order], data[order]
        for i, j, solid in groups_of(starts, size, itemsize):
            at = offset + int(starts[i]) * itemsize
            if solid:
                write_at(self.fd, data[i:j].reshape(-1).view(np.uint8).data, at)
                continue
            count = int(starts[j - 1] - starts[i]) + size
            stretch = self.bytes_at(at, count * itemsize)
            where = starts[i:j] - starts[i]
            if not (where % size).any():  # rows, which move as a whole
                stretch.view(f"V{itemsize * size}")[where // size] = data[i:j].view(f"V{itemsize * size}").reshape(-1)
            else:
                stretch.view(f"V{itemsize}")[where[:, None] + np.arange(size)] = data[i:j].view(f"V{itemsize}")
            write_at(self.fd, stretch.data, at)

    def fill(self, offset: int, pattern: bytes, nbytes: int) -> None:
        """Write a repeated pattern, in blocks."""
        block = memoryview(pattern * max(1, BLOCK // len(pattern)))
        for start in range(0, nbytes, len(block)):
            write_at(self.fd, block[: nbytes - start], offset + start)

    def _read_long(
        self, offset: int, spec: LeafSpec, index: StoreIndex, out: Tensor | None, arrived: Arrived | None
    ) -> Tensor | None:
        """Read one long stretch, by `pread`: through the mapping all its pages would count as memory of the process."""
        if any(isinstance(term, Tensor) or term.step != 1 for term in index):
            return None
        shape = index_shape(spec.shape, index)
        if math.prod(shape) * spec.dtype.itemsize < LONG:
            return None
        cut = max((dim for dim, size in enumerate(shape) if size < spec.shape[dim]), default=0)
        if math.prod(shape[:cut]) != 1:
            return None  # several stretches
        if out is not None and not (tuple(out.shape) == shape and out.dtype == spec.dtype and out.is_contiguous()):
            return None
        if out is not None and (out.is_conj() or out.is_neg()):
            return None  # numpy would fill a copy
        starts, _ = blocks_of(spec.shape, index)
        value = empty(shape, spec.dtype) if out is None else out
        buffer = to_numpy(value).reshape(-1).view(np.uint8)
        at = offset + int(starts[0]) * spec.dtype.itemsize
        address = buffer.ctypes.data
        for start in range(0, len(buffer), PIECE):
            piece = buffer[start : start + PIECE]
            if out is None:
                map_whole_pages(address + start, len(piece))
            self.read_into(piece, at + start)
            if arrived is not None:
                arrived(buffer, start + len(piece))
        return value

    def look_at(self, leaf: Leaf) -> Bytes | None:
        """Return the mapped bytes of a leaf, for immediate use; None if it has none, or if that could take memory.

        The latter applies to holes on a tmpfs, and to a file for which this process has no address space.
        """
        if not leaf.plain or leaf.offset is None:
            return None
        end = leaf.offset + leaf.spec.nbytes
        if self.on_tmpfs and not self.has_all_pages() and self.has_hole(leaf.offset, leaf.spec.nbytes):
            return None
        return None if end > len(self._map) and self._lacks_room(end) else self._map[leaf.offset : end]

    def bytes_at(self, offset: int, size: int) -> Bytes:
        """Read bytes of the file by `pread`."""
        buffer = np.empty(size, np.uint8)
        self.read_into(buffer, offset)
        return buffer

    def read_into(self, buffer: Bytes, offset: int) -> None:
        """Read bytes of the file as `bytes_at` does, into memory of the caller."""
        size = len(buffer)
        view, got = buffer.data, 0
        while got < size:
            n = os.preadv(self.fd, [view[got:]], offset + got)
            if not n:
                self.need(offset + size)
                raise CorruptStoreError(f"{self.url} ends at {offset + got}", url=self.url)
            got += n

    def is_hole(self, offset: int, size: int) -> bool:
        """Check whether these bytes are a hole of the file: they were never written."""
        try:
            return os.lseek(self.fd, offset, os.SEEK_DATA) >= offset + size
        except OSError as error:
            return error.errno == ENXIO and offset + size <= self.size()  # no data after `offset`

    def has_all_pages(self) -> bool:
        """Check whether a file on a tmpfs has no hole, by its size; the blocks of a disk do not tell.

        Looking for the next hole takes a tmpfs milliseconds where there is none: it looks at every page.
        """
        found = os.fstat(self.fd)
        return 0 <= found.st_blocks * 512 - found.st_size < mmap.PAGESIZE

    def _lacks_room(self, end: int) -> bool:
        """Check whether this process may not map the file up to `end` (ulimit -v): it is then read by `pread`."""
        try:
            self._mapped(0, end)
        except OSError as error:
            if error.errno != ENOMEM:
                raise
            return True
        return False

    def _mapped(self, offset: int, size: int) -> Bytes:
        if offset + size > len(self._map):
            self.need(offset + size)
            self._map = _map(self.fd, os.fstat(self.fd).st_size)
            self._rows.clear()
        return self._map[offset : offset + size]

    def has_hole(self, offset: int, size: int) -> bool:
        """Check whether some of these bytes are a hole of the file."""
        return size > 0 and self.next_hole(offset) < offset + size

    def next_hole(self, offset: int) -> int:
        """Return where the first hole at or behind `offset` begins, in the file or at its end.

        A tmpfs looks at every page up to there: ask once for many blocks.
        """
        try:
            return os.lseek(self.fd, offset, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == ENXIO:  # behind the end of the file
                return sys.maxsize
            raise

    def _read_by_call(self, offset: int, spec: LeafSpec, index: StoreIndex, out: Tensor | None) -> Tensor:
        starts, size = blocks_of(spec.shape, index)
        order = np.argsort(starts, kind="stable")
        ordered = starts[order]
        itemsize = spec.dtype.itemsize
        data = np.empty((len(starts), size), f"V{itemsize}")
        unique, first = np.unique(ordered, return_index=True)
        bounds = [*first.tolist(), len(ordered)]
        for i, j, _ in groups_of(unique, size, itemsize) if size and len(starts) else ():
            count = int(unique[j - 1] - unique[i]) + size
            stretch = self.bytes_at(offset + int(unique[i]) * itemsize, count * itemsize).view(f"V{itemsize}")
            mine = slice(bounds[i], bounds[j])
            data[order[mine]] = stretch[(ordered[mine] - unique[i])[:, None] + np.arange(size)]
        shape = index_shape(spec.shape, index)
        value = from_numpy(data.view(numpy_dtype(spec.dtype)).reshape(shape), spec.dtype)
        return value if out is None else out.copy_(value)


_NO_ROWS = None, np.empty(0, np.uint8)


class _Address:
    """Memory of a read-only mapping that claims to be writable: torch warns about the other kind.

    No code outside this module gets a tensor over it.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        address = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {"shape": (len(mapping),), "typestr": "|u1", "data": (address, False), "version": 3}


def _map(fd: int, size: int) -> Bytes:
    # A Python mapping keeps a copy of its descriptor, and a copy keeps the lock: map another opening of the file.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC) if os.path.isdir("/proc/self/fd") else os.dup(fd)
    try:
        return np.asarray(_Address(mmap.mmap(own, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)))
    finally:
        os.close(own)
