"""Advice to the system about pages of memory: map them at once, or release them.

Advice may be refused, by an older Linux or another system. Nothing but the time of later accesses depends on it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tdstore.index.ranges import index_shape
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


def _system_call() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":  # the numbers of advice mean other things elsewhere
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found


_madvise = _system_call()


def map_pages(address: int, nbytes: int) -> bool:
    """Have all pages of a range mapped for writing, by one call.

    A page that is not mapped costs a fault when it is first read or written: some microseconds for 4 KiB, several
    times as long as the copy of its bytes.

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
    """Map pages as `map_pages` does, but only those wholly in the range: those at its ends may be other memory.

    Args:
        address, nbytes: of memory of this process that will be written whole.
    """
    return _advise(*_whole(address, nbytes), _POPULATE_WRITE)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor that will be written whole; a large one on huge pages, where the system gives them.

    Args:
        shape, dtype: as of `torch.empty`.

    Example:
        >>> import torch
        >>> empty((2, 3), torch.int16).shape
        torch.Size([2, 3])
    """
    made = torch.empty(tuple(shape), dtype=dtype)
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


def _whole(address: int, nbytes: int) -> tuple[int, int]:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE


def _advise(start: int, stop: int, advice: int) -> bool:
    return _madvise is not None and stop > start and _madvise(start, stop - start, advice) == 0
