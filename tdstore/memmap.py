"""Memory-mapped tensors, under the path that code imports them from."""

from __future__ import annotations

from tdstore.builtin.memmap.tensor import MemoryMappedTensor

__all__ = [
    "MemoryMappedTensor",
]
