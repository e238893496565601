"""Pages of memory-mapped files, mapped many at a time."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

MANY = 1 << 16
"""From so many bytes on, one call of the system costs less than a fault for each page."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: the mmap module has no name for it."""


def _system_call() -> Callable[[int, int, int], int] | None:
    try:
        found = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):  # another system
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found


_madvise = _system_call()


def map_pages(address: int, nbytes: int) -> bool:
    """Map pages of a file whose bytes are in the memory already, for reading and writing, where the system can.

    A page that is not mapped costs a fault when it is first read or written: some microseconds for 4 KiB, several
    times as long as the copy of its bytes. Where the system cannot, each page has its fault, and nothing else differs.

    Args:
        address: of the first byte.
        nbytes: number of bytes, all of them in one mapping.

    Returns:
        Whether the pages are mapped.
    """
    start = address - address % mmap.PAGESIZE
    return _madvise is not None and _madvise(start, address + nbytes - start, _POPULATE_WRITE) == 0
