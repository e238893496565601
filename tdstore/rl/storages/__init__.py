"""Tables of a fixed number of rows, filled by writers and read by samplers, in the memory or in any backend."""

from tdstore.rl.storages.base import Storage
from tdstore.rl.storages.lazy import LazyMemmapStorage, LazyStorage, LazyTensorStorage

__all__ = ["LazyMemmapStorage", "LazyStorage", "LazyTensorStorage", "Storage"]
