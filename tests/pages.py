"""Large pages for a process that has collected all tests: its forks then cost a quarter.

A fork copies the page tables of its parent, and frees its own when it ends. Of a process of a gigabyte that takes 96 ms
of CPU, and 26 ms where most of it is in pages of 2 MiB.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

MUCH = 512 << 20
"""From so many bytes on it is worth its second: a run of some folders has less."""
SIZE = 1 << 21
COLLAPSE = 25
"""`MADV_COLLAPSE`, of Linux 6.1 and later; where it is missing the call is an error, and the pages stay small."""


def occupied() -> int:
    """Return the bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def use_large_pages() -> None:
    """Gather the memory of this process in large pages: a second of CPU for a gigabyte."""
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        limits, access, _, _, _, *name = line.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(limit, 16) for limit in limits.split("-"))
            for at in range(-(-start // SIZE) * SIZE, end - SIZE + 1, SIZE):
                advise(at, SIZE, COLLAPSE)
