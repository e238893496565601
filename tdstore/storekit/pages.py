"""Pages of mapped memory: advice about them to the system, and disk space for those that have none.

Advice may be refused, by an older Linux or another system. Only the time of later accesses depends on it.

A write into a hole of a sparse file needs a free block at that moment; without one the system kills the process with
SIGBUS. So code that writes into a tensor of the caller reserves blocks first. This costs one test while no such file
is mapped:

    if HOLES:
        reserve(leaf, index)
    leaf[index] = value
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdstore.index.ranges import distinct, index_shape
from tdstore.index.rows import gather
from tdstore.index.tracing import traced
from tdstore.types import StoreIndex

MANY = 1 << 16
"""Bytes from which on one call of the system costs less than a fault for each page."""
LARGE = 4 << 20
"""Bytes from which on new memory is requested as huge pages, as numpy does: one fault for 2 MiB, not 512."""
_DONTNEED = getattr(mmap, "MADV_DONTNEED", 4)
_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: the mmap module has no name for it."""
_ENTRY = 8
"""Bytes of an entry of `/proc/self/pagemap` (`man 5 proc_pid_pagemap`); its highest bit: the page is mapped."""
CHUNK = 64 << 10
"""Blocks of sparse files are reserved, and recorded, in pieces of this many bytes."""
_MANY = 1 << 20
_UNRESERVED, _RESERVED = b"\0", b"\1"


# -- advice --------------------------------------------------------------------------------
def _system_call() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":  # the numbers of advice mean other things elsewhere
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found


_madvise = _system_call()
_mincore = None if _madvise is None else ctypes.CDLL(None).mincore
if _mincore is not None:
    _mincore.argtypes, _mincore.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p), ctypes.c_int
_fstatfs = ctypes.CDLL(None).fstatfs if sys.platform == "linux" else None
_IN_MEMORY = (0x01021994, 0x858458F6, 0x958458F6)
"""The types of tmpfs, ramfs and hugetlbfs (`man 2 statfs`)."""


def map_pages(address: int, nbytes: int) -> bool:
    """Have all pages of a range mapped for writing, by one call.

    A page that is not mapped costs a page fault when it is first read or written: some microseconds for 4 KiB,
    several times as long as copying its bytes.

    Args:
        address: of the first byte.
        nbytes: number of bytes, all of them in one mapping. The first and the last page may be mapped only in part.

    Returns:
        Whether the system did so.

    Example:
        >>> import torch
        >>> room = torch.empty(1 << 20, dtype=torch.uint8)
        >>> map_pages(room.data_ptr(), room.nbytes) in (True, False)
        True
    """
    start = address - address % mmap.PAGESIZE
    return _advise(start, address + nbytes, _POPULATE_WRITE)


def map_whole_pages(address: int, nbytes: int) -> bool:
    """Map pages as `map_pages` does, but only those wholly in the range: pages at its ends may contain other memory.

    Args:
        address, nbytes: of memory of this process, all of which will be written.
    """
    return _advise(*_whole(address, nbytes), _POPULATE_WRITE)


def are_mapped(address: int, nbytes: int) -> bool:
    """Check whether the system has mapped all pages of a range for this process, so that none costs a fault.

    False where the system does not say. A page of a file that is mapped may still fault once when it is written to
    first, for the file system to note that.

    Args:
        address, nbytes: of memory of this process.

    Example:
        >>> import torch
        >>> room = torch.ones(1 << 20, dtype=torch.uint8)
        >>> are_mapped(room.data_ptr(), room.nbytes) in (True, False)
        True
    """
    first = address // mmap.PAGESIZE
    count = -(-(address + nbytes) // mmap.PAGESIZE) - first
    try:
        entries = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not _present(os.pread(entries, _ENTRY, first * _ENTRY)):  # the rest need not be asked for
            return False
        return _present(os.pread(entries, count * _ENTRY, first * _ENTRY))
    except OSError:
        return False
    finally:
        os.close(entries)


def map_cached_pages(address: int, nbytes: int) -> bool:
    """Map all pages of a range for writing, as `map_pages` does, if the system has them in memory.

    Args:
        address, nbytes: of memory that is mapped from a file.

    Returns:
        Whether they are mapped now; nothing is read from a disk for that.
    """
    start = address - address % mmap.PAGESIZE
    size = address + nbytes - start
    if _mincore is None:
        return False
    there = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    if _mincore(start, size, there) != 0 or 0 in there.raw:
        return False
    return map_pages(address, nbytes)


def _present(entries: bytes) -> bool:
    return bool(entries) and min(entries[_ENTRY - 1 :: _ENTRY]) >= 0x80


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor, all of which will be written; a large one on huge pages, if the system has them.

    Args:
        shape, dtype: as of `torch.empty`.

    Example:
        >>> import torch
        >>> empty((2, 3), torch.int16).shape
        torch.Size([2, 3])
    """
    made = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if made.nbytes >= LARGE:
        _advise(*_whole(made.data_ptr(), made.nbytes), _HUGEPAGE)
    return made


def copy_rows(leaf: Tensor, index: StoreIndex, out: Tensor | None = None) -> Tensor:
    """Copy rows of a tensor, as `rows.gather` does; a large result is allocated by `empty`.

    Args:
        leaf: the tensor.
        index: an index of the storage protocol.
        out: memory for the result.
    """
    if out is None and leaf.device.type == "cpu" and not (leaf.requires_grad or traced()):
        shape = index_shape(leaf.shape, index)
        if math.prod(shape) * leaf.dtype.itemsize >= LARGE:
            out = empty(shape, leaf.dtype)
    return gather(leaf, index, out)


def drop_whole_pages(address: int, nbytes: int) -> bool:
    """Release the pages that are wholly in a range of a mapped file. The file and its cache stay as they are.

    Pages of a private mapping that were changed lose their changes.

    Args:
        address, nbytes: of memory that is mapped from a file.
    """
    return _advise(*_whole(address, nbytes), _DONTNEED)


def is_in_memory(fd: int) -> bool:
    """Check whether a file is on a tmpfs or the like, where a read of a hole through a mapping takes a page."""
    if _fstatfs is None:
        return False
    found = ctypes.create_string_buffer(256)  # a `struct statfs`, which begins with the type
    return _fstatfs(fd, found) == 0 and ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF in _IN_MEMORY


def _whole(address: int, nbytes: int) -> tuple[int, int]:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE


def _advise(start: int, stop: int, advice: int) -> bool:
    return _madvise is not None and stop > start and _madvise(start, stop - start, advice) == 0


# -- holes of sparse files -----------------------------------------------------------------
HOLES: dict[int, weakref.ref[Holes]] = {}
"""By the address of each writable mapping that may have holes."""


class Holes:
    """The parts of one mapped file that may lack blocks. The owner keeps this object as long as the mapping.

    Args:
        nbytes: length of the file.
        allocate: reserves blocks for the bytes from `start` to `stop`, or raises a `StoreError` that names the leaf.
    """

    __slots__ = ("__weakref__", "_address", "_allocate", "_chunks", "_left", "nbytes")

    def __init__(self, nbytes: int, allocate: Callable[[int, int], None]) -> None:
        self.nbytes = nbytes
        self._allocate = allocate
        # Pages of a long bytearray are allocated when touched: a terabyte of holes costs nothing.
        self._chunks = bytearray(-(-nbytes // CHUNK))
        self._left = len(self._chunks)
        self._address = 0

    @property
    def left(self) -> bool:
        """Check whether any part may still lack its blocks."""
        return self._left > 0

    def guard(self, mapped: Tensor) -> None:
        """Register the mapping, which begins where the file does: `reserve` then covers tensors over it."""
        address = self._address = mapped.untyped_storage().data_ptr()

        def forget(ref: weakref.ref[Holes]) -> None:
            if HOLES.get(address) is ref:
                del HOLES[address]

        HOLES[address] = weakref.ref(self, forget)

    def filled(self) -> None:
        """Record that every part has its blocks."""
        self._left = 0
        self._chunks = bytearray()
        ref = HOLES.get(self._address)
        if ref is not None and ref() is self:
            del HOLES[self._address]

    def span(self, start: int, stop: int) -> None:
        """Reserve blocks for the bytes from `start` to `stop`.

        Args:
            start: the first byte.
            stop: the byte after the last one.
        """
        chunks = self._chunks
        end = min(-(-stop // CHUNK), len(chunks))
        first = chunks.find(_UNRESERVED, start // CHUNK, end)
        while first >= 0:
            last = chunks.find(_RESERVED, first, end)
            last = end if last < 0 else last
            self._allocate(first * CHUNK, min(last * CHUNK, self.nbytes))
            chunks[first:last] = _RESERVED * (last - first)
            self._left -= last - first
            first = chunks.find(_UNRESERVED, last, end)
        if not self._left and chunks:
            self.filled()

    def runs(self, starts: np.ndarray[Any, Any], length: int) -> None:
        """Reserve blocks for `length` bytes from each of `starts`.

        Args:
            starts: positions in bytes.
            length: bytes from each of them.
        """
        if len(starts) > 1 and 0 < length <= CHUNK and self._left:
            # Each is in two chunks at most: those that still lack blocks, once each.
            touched = distinct(np.concatenate([starts, starts + (length - 1)]) // CHUNK)
            touched = touched[np.frombuffer(self._chunks, np.uint8)[touched] == 0]
            starts, length = touched * CHUNK, CHUNK
        for start in starts.tolist():
            self.span(start, start + length)


def reserve(tensor: Tensor, terms: Sequence[Any] = ()) -> None:
    """Reserve blocks for the elements that `tensor[terms] = value` writes, if the tensor lies in a sparse file.

    Args:
        tensor: the target.
        terms: ints, slices, None, Ellipsis and tensors, already checked against the tensor.

    Raises:
        StoreIOError: the storage is full; nothing was written.
    """
    try:
        ref = HOLES.get(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return  # sparse, fake, ...: no memory of its own
    holes = None if ref is None else ref()
    if holes is None or not holes.left:
        return
    target, rows = _narrowed(tensor, terms)
    if target.numel():
        starts, depth = _blocks(target, rows)
        item = target.itemsize
        holes.runs((starts + int(target.storage_offset())) * item, _extent(target, depth) * item)


def _blocks(target: Tensor, rows: Tensor | None) -> tuple[np.ndarray[Any, Any], int]:
    """Return the offsets of contiguous blocks of the elements, and the first dimension that lies within a block."""
    columns: list[np.ndarray[Any, Any]]
    if rows is None:
        depth = next(d for d in range(target.ndim + 1) if _is_dense(target, d))
        if math.prod(target.shape[:depth]) > _MANY:
            depth = 0
        sizes = [n if target.stride(i) else 1 for i, n in enumerate(target.shape[:depth])]
        columns = list(np.indices(sizes).reshape(depth, math.prod(sizes)))
    else:
        picked = rows.cpu().nonzero().T if rows.dtype is torch.bool else rows.cpu().reshape(1, -1)
        columns = [column.numpy() % target.shape[i] for i, column in enumerate(picked)]
    starts = np.zeros(len(columns[0]) if columns else 1, np.int64)
    for i, column in enumerate(columns):
        starts += column * target.stride(i)
    return starts, len(columns)


def _narrowed(tensor: Tensor, terms: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Return the part that terms select, or a larger one: a view, and leading rows (or a mask) of it."""
    for at, term in enumerate(terms):
        if type(term) is int:
            continue
        tensor = tensor[tuple(terms[:at])]
        plain = all(t is None or t is Ellipsis or isinstance(t, (int, slice)) for t in terms[at:])
        if plain and not any(isinstance(t, bool) for t in terms[at:]):
            return tensor[tuple(terms[at:])], None
        is_rows = isinstance(term, Tensor) and (term.dtype is torch.bool or not term.dtype.is_floating_point)
        return tensor, term if is_rows and term.ndim else None
    return tensor[tuple(terms)], None


def _extent(tensor: Tensor, first: int = 0) -> int:
    """Return the elements from the first one to the end of the last one, along the dimensions from `first` on."""
    sizes, strides = tensor.shape[first:], tensor.stride()[first:]
    return 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))


def _is_dense(tensor: Tensor, first: int) -> bool:
    """Check whether these dimensions fill at least half of the memory that they span."""
    return _extent(tensor, first) <= 2 * math.prod(tensor.shape[first:])
