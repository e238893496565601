"""Mapped parts of a file, at any offset, that can move to another file with the same bytes."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref

import numpy as np
import torch
from torch import Tensor

from tdstore.storekit.checksums import next_data

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED = 0x10
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_ANONYMOUS = mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
_MOST_HOLES = 4096
"""Holes of a file that are covered, the largest first: the system limits how many mappings a process has."""
_PAGES = 1 << 18
"""Entries of the page table that are looked at in one step."""


class Window:
    """The bytes of a file from `start` to `stop`, mapped. Holds no descriptor; tensors over it keep it alive.

    Args:
        fd: the file.
        start, stop: the range, in bytes.
        shared: writes go to the file; else they stay in this process.
    """

    __slots__ = ("_address", "_buffer", "_length", "_offset", "shared", "start", "stop")

    def __init__(self, fd: int, start: int, stop: int, *, shared: bool) -> None:
        self.start, self.stop, self.shared = start, stop, shared
        self._offset = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._length = stop - self._offset
        self._address = self._map(fd, None, 0)
        self._cover_holes(fd)
        self._buffer = (ctypes.c_byte * self._length).from_address(self._address)
        # At exit the system unmaps; doing it here could pull it from under a thread.
        weakref.finalize(self._buffer, _libc.munmap, self._address, self._length).atexit = False

    def _map(self, fd: int, at: int | None, flags: int) -> int:
        kind = mmap.MAP_SHARED if self.shared else mmap.MAP_PRIVATE | _NORESERVE
        return self._call(self._length, at, kind | flags, fd, self._offset)

    @staticmethod
    def _call(length: int, at: int | None, flags: int, fd: int, offset: int) -> int:
        address: int | None = _libc.mmap(at, length, _PROTECTION, flags, fd, offset)
        if address is None or address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return address

    def move_to(self, fd: int) -> None:
        """Map another file, with the same bytes there, privately under the existing tensors."""
        self.shared = False
        self._map(fd, self._address, _FIXED)
        self._cover_holes(fd)

    def _cover_holes(self, fd: int) -> None:
        """Map plain memory over the holes of a file that is mapped privately.

        A file system in memory allocates a page for a hole that is read; a full one ends the process.
        """
        info, end = os.fstat(fd), self._offset + self._length
        if self.shared or info.st_blocks * 512 >= info.st_size:
            return
        holes, at = [], self._offset
        while at < end:
            data, stop = next_data(fd, at, end)
            first, last = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE, data // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                holes.append((last - first, first))
            at = stop
        for length, start in sorted(holes, reverse=True)[:_MOST_HOLES]:
            self._call(length, self._address + start - self._offset, mmap.MAP_PRIVATE | _ANONYMOUS, -1, 0)

    def changed_ranges(self, start: int, stop: int) -> list[tuple[int, int]] | None:
        """Return the byte ranges of the file into which this process may have written; None if the system cannot tell.

        The first write to a page of a private window makes it memory of the process, which the page table shows.

        Args:
            start, stop: the bytes of the file to look at.
        """
        first = (self._address + start - self._offset) // mmap.PAGESIZE
        last = -(-(self._address + stop - self._offset) // mmap.PAGESIZE)
        found: list[tuple[int, int]] = []
        try:
            table = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            while first < last:
                raw = os.pread(table, 8 * min(last - first, _PAGES), 8 * first)
                if not raw:
                    return None
                kind = np.frombuffer(raw, "<u8") >> np.uint64(61)  # bits: 4 in memory, 2 swapped out, 1 of the file
                own = np.concatenate(([False], (kind & 6 != 0) & (kind & 1 == 0), [False]))
                at = first * mmap.PAGESIZE - self._address + self._offset
                for begin, end in np.flatnonzero(own[1:] != own[:-1]).reshape(-1, 2).tolist():
                    low, high = at + begin * mmap.PAGESIZE, at + end * mmap.PAGESIZE
                    found.append((max(low, start), min(high, stop)))
                first += len(kind)
        except OSError:
            return None
        finally:
            os.close(table)
        return found

    def tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor that begins at a byte of the file."""
        offset = start - self._offset
        flat = torch.frombuffer(self._buffer, dtype=dtype, count=math.prod(shape), offset=offset)
        return flat if len(shape) == 1 else flat.resize_(shape)  # in place: without a second tensor

    def keep(self, companion: object) -> None:
        """Keep an object alive as long as there are tensors over this memory."""
        weakref.finalize(self._buffer, id, companion).atexit = False
