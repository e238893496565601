"""Memory-mapped tensors, under the path that code imports them from."""

from __future__ import annotations

from tdstore.builtin.mmtensor import MemoryMappedTensor

__all__ = [
    "MemoryMappedTensor",
]
