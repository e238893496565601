"""Give back the pages of a mapped file that a copy has passed: they count as memory of the process until then."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

from tdstore.builtin.mmtensor import MemoryMappedTensor
from tdstore.store import Cap, Store
from tdstore.types import Path, StoreIndex

_DONTNEED = getattr(mmap, "MADV_DONTNEED", 4)
_madvise = ctypes.CDLL(None, use_errno=True).madvise if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def drop_behind(store: Store, path: Path, index: StoreIndex) -> None:
    """Let go of the pages of `leaf[index]`; the file, and its place in the system's cache, stay as they are.

    For stores that nobody but the copy writes through: pages of a private mapping that were changed would be lost.
    Only leaves that are mapped files have such pages; for others nothing happens.
    """
    if _madvise is None or Cap.VIEW not in store.caps:
        return
    leaf = store.view(path)
    if not isinstance(leaf, MemoryMappedTensor) or not leaf.numel():
        return
    part: Tensor = leaf[index] if index else leaf
    if not part.is_contiguous():
        return
    # Whole pages only; the one that the next block shares goes with that.
    start = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        _madvise(start, stop - start, _DONTNEED)  # advice: where the system cannot follow it, nothing is lost
