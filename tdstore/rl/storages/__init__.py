"""Tables of a fixed number of rows, filled by writers and read by samplers, in memory or on any backend."""

from tdstore.rl.storages.base import Storage
from tdstore.rl.storages.lazy import LazyStorage
from tdstore.rl.storages.lazy_kinds import LazyMemmapStorage, LazyTensorStorage
from tdstore.rl.storages.lists import LazyStackStorage, ListStorage
from tdstore.rl.storages.tensors import TensorStorage
from tdstore.rl.torchrl import torchrl_storage

__all__ = [
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyStorage",
    "LazyTensorStorage",
    "ListStorage",
    "Storage",
    "TensorStorage",
    "torchrl_storage",
]
