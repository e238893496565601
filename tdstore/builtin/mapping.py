"""Open files, mapped as plain tensors."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tdstore.storekit.budget import no_room

_PROC = "/proc/self/fd"
Buffer = ctypes.Array[ctypes.c_byte] | mmap.mmap


def map_fd(fd: int, shape: Sequence[int], dtype: torch.dtype, *, shared: bool, path: str = "") -> Tensor:
    """Map an open, checked file as a plain tensor; the mapping outlives the descriptor and keeps none.

    `shared=False` gives private memory: the file is never changed.

    Raises:
        OSError: this process has no room for so many bytes (ENOMEM).
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if not shared and _mmap is not None:
        # torch's own call reserves memory for every page, and so refuses files larger than the RAM.
        flat = torch.frombuffer(map_memory(fd, nbytes, shared=False), dtype=dtype)
    else:
        name = f"{_PROC}/{fd}" if _HAS_PROC else path
        try:
            flat = torch.from_file(name, shared=shared, size=math.prod(shape), dtype=dtype)
        except RuntimeError as error:
            if "Cannot allocate memory" in str(error):
                raise no_room(nbytes) from error
            raise
    return flat if len(shape) == 1 else flat.resize_(shape)  # in place: without a second tensor


def map_memory(fd: int, nbytes: int, *, shared: bool) -> Buffer:
    """Map the first bytes of an open file, as memory that tensors are made over; it is unmapped after the last one."""
    if _mmap is None:
        return mmap.mmap(fd, nbytes, access=mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY)
    flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _MAP_NORESERVE
    address = _mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        if code == errno.ENOMEM:
            raise no_room(nbytes)
        raise OSError(code, os.strerror(code))
    buffer: Any = _array_type(nbytes).from_address(address)
    buffer.mapping = _Mapping((address, nbytes))  # the tensor's memory holds `buffer`
    return buffer  # type: ignore[no-any-return]


def make_private(mapped: Tensor, fd: int) -> None:
    """Have what is written from now on to memory that is mapped from the start of a file stay in this process.

    The memory keeps its contents, and other threads may use it meanwhile.

    Args:
        mapped: a tensor over the mapping, or over a part of it.
        fd: the file, which is not closed.

    Raises:
        OSError: the system has no room for it.
    """
    if _mmap is None:  # there is no call for it
        return
    memory = mapped.untyped_storage()
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED
    if _mmap(memory.data_ptr(), memory.nbytes(), mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != memory.data_ptr():
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@lru_cache(1024)
def _array_type(nbytes: int) -> Any:
    """Make the type of a buffer, in 20 us: ctypes forgets it with the last buffer of that length."""
    return ctypes.c_byte * nbytes


_libc = ctypes.CDLL(None, use_errno=True)
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Mapping(tuple[int, int]):
    """Address and bytes of mapped memory, unmapped when the buffer over it is gone; `weakref.finalize` costs more."""

    # At exit the system unmaps; doing it here could pull it from under a thread.
    def __del__(self, unmap: Any = _libc.munmap, is_ending: Any = sys.is_finalizing) -> None:
        if not is_ending():
            unmap(*self)


_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10  # the `mmap` module of Python 3.11 does not name them
_mmap = _libc.mmap if sys.platform == "linux" else None
if _mmap is not None:
    _mmap.restype = ctypes.c_void_p
    _mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_HAS_PROC = os.path.isdir(_PROC)
