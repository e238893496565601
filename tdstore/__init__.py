"""TensorDicts whose data can live anywhere.

A `TensorDict` is a dictionary of tensors that share leading batch dimensions, nested at will. Where the
tensors live (memory, CUDA, shared memory, files, HDF5, ...) is one argument; nothing else changes.
"""

from __future__ import annotations

from typing import Any

from tdstore import errors
from tdstore.builtin.mmtensor import MemoryMappedTensor
from tdstore.container.base import TensorDictBase
from tdstore.container.copying import copy_dataset as copy
from tdstore.container.handle import StoreHandle
from tdstore.container.lazy import LazyStackedTensorDict
from tdstore.container.making import cat, lazy_legacy, lazy_stack, maybe_dense_stack, set_lazy_legacy, stack
from tdstore.container.nontensor import NonTensorData, NonTensorStack
from tdstore.container.opening import open_container
from tdstore.container.persistent import PersistentTensorDict
from tdstore.container.tensordict import TensorDict
from tdstore.header import Header
from tdstore.hookspecs import Backend, Codec, hookimpl
from tdstore.registry import BackendStatus, registry
from tdstore.store import Cap, Store
from tdstore.types import Fault, LeafSpec, Mode, Read, Write

__version__ = "0.1.0"


def open(location: Any = None, mode: Mode = "r", *, storage: Any = None, **options: Any) -> Any:
    """Open a dataset: a `TensorDict` over live tensors where its store has them, else a `PersistentTensorDict`.

    Args:
        location: a path or URL.
        mode: "r" must exist and is never changed; "r+" must exist, changed in place; "w" new, replacing
            what is there; "x" new, `StoreExistsError` if anything is there; "a" as "r+", or new.
        storage: name of the backend; default: found from the location.
        **options: of the backend.

    Raises:
        StoreNotFoundError, StoreExistsError, CorruptStoreError, DirtyStoreError, PluginError, OptionError.

    Example:
        >>> with tdstore.open("runs/1") as td:  # doctest: +SKIP
        ...     print(td)
    """
    return open_container(location, storage=storage, mode=mode, **options)


def save(td: TensorDictBase, location: Any, **kwargs: Any) -> Any:
    """`td.save(location, ...)`."""
    return td.save(location, **kwargs)


memmap = save


def load(location: Any, **kwargs: Any) -> Any:
    """`TensorDict.load(location, ...)`."""
    return TensorDict.load(location, **kwargs)


load_memmap = load


def from_h5(filename: Any, **kwargs: Any) -> Any:
    """`TensorDict.from_h5(filename, ...)`."""
    return TensorDict.from_h5(filename, **kwargs)


def backends() -> list[BackendStatus]:
    """What is installed, what each backend is for, and what failed to load and why."""
    return registry().status()


def register_backend(backend: Backend) -> None:
    """Declare a backend from this process, for notebooks and tests."""
    registry().register(backend)


def unregister_backend(name: str) -> None:
    """Forget a backend that `register_backend` declared."""
    registry().unregister(name)


def is_tensor_collection(value: Any) -> bool:
    """Whether a value, or a class, is a TensorDict of any kind."""
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, (TensorDictBase, NonTensorData, NonTensorStack))


def is_non_tensor(value: Any) -> bool:
    """Whether a value, or a class, is a wrapped non-tensor entry."""
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, (NonTensorData, NonTensorStack))


def is_leaf_nontensor(kind: type) -> bool:
    """For `is_leaf=`: tensors and non-tensor entries are leaves."""
    return not issubclass(kind, TensorDictBase)


__all__ = [
    "Backend",
    "BackendStatus",
    "Cap",
    "Codec",
    "Fault",
    "Header",
    "LazyStackedTensorDict",
    "LeafSpec",
    "MemoryMappedTensor",
    "Mode",
    "NonTensorData",
    "NonTensorStack",
    "PersistentTensorDict",
    "Read",
    "Store",
    "StoreHandle",
    "TensorDict",
    "TensorDictBase",
    "Write",
    "backends",
    "cat",
    "copy",
    "errors",
    "from_h5",
    "hookimpl",
    "is_leaf_nontensor",
    "is_non_tensor",
    "is_tensor_collection",
    "lazy_legacy",
    "lazy_stack",
    "load",
    "load_memmap",
    "maybe_dense_stack",
    "memmap",
    "open",
    "register_backend",
    "save",
    "set_lazy_legacy",
    "stack",
    "unregister_backend",
]
