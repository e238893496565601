"""Parts of a file as memory, at any offset; and the same memory over another file that has the same bytes there."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref

import torch
from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED = 0x10
_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class Window:
    """The bytes of a file from `start` to `stop`, mapped. Keeps no descriptor; tensors over it keep it.

    Args:
        shared: writes go to the file; else they stay in this process.
    """

    __slots__ = ("_address", "_buffer", "_length", "_offset", "shared", "start", "stop")

    def __init__(self, fd: int, start: int, stop: int, *, shared: bool) -> None:
        self.start, self.stop, self.shared = start, stop, shared
        self._offset = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._length = stop - self._offset
        self._address = self._map(fd, None, 0)
        self._buffer = (ctypes.c_byte * self._length).from_address(self._address)
        # At exit the system unmaps; doing it here could pull it from under a thread.
        weakref.finalize(self._buffer, _libc.munmap, self._address, self._length).atexit = False

    def _map(self, fd: int, at: int | None, flags: int) -> int:
        kind = mmap.MAP_SHARED if self.shared else mmap.MAP_PRIVATE | _NORESERVE
        address: int | None = _libc.mmap(at, self._length, _PROTECTION, kind | flags, fd, self._offset)
        if address is None or address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return address

    def move_to(self, fd: int) -> None:
        """Put another file, with the same bytes there, under the tensors that were handed out."""
        self._map(fd, self._address, _FIXED)

    def tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor that begins at a byte of the file."""
        count = torch.Size(shape).numel()
        flat = torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=start - self._offset)
        return flat.view(shape)

    def keep(self, companion: object) -> None:
        """Keep an object for as long as there are tensors over this memory."""
        weakref.finalize(self._buffer, id, companion).atexit = False
