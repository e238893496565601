"""Pickles of TensorDicts whose leaves are plain tensors: their bytes, and their shapes.

torch pickles each storage as a file of its own inside the pickle, which takes some 50 times as long as to copy the
bytes of a small tensor.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.storage import TypedStorage

from tdstore.container.core.container import Container
from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.errors import CorruptStoreError
from tdstore.pickling import rebuild
from tdstore.types import Names

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict

_NAMES = {
    NAME_TO_DTYPE[name]: name
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}
"""Dtypes of the storages that every version of torch knows."""
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class LeafStorage(TypedStorage):
    """Storage of a leaf. `torch.save` takes it as any storage, with `map_location` and `mmap`; a pickle has its bytes.

    Args:
        leaf: a contiguous tensor that fills its storage.
    """

    leaf: Tensor

    def __new__(cls, leaf: Tensor) -> LeafStorage:
        made: LeafStorage = object.__new__(cls)
        made.leaf, made.dtype, made._untyped_storage = leaf, leaf.dtype, leaf.untyped_storage()
        return made

    def __init__(self, leaf: Tensor) -> None:
        """Make nothing more: the base class would copy."""

    def __reduce__(self) -> tuple[Any, ...]:
        # With numpy, the storage could not be resized any more.
        return rebuild, ("bytes", _NAMES[self.dtype], ctypes.string_at(self.leaf.data_ptr(), self.leaf.nbytes))


def from_bytes(name: str, data: bytes) -> Tensor:
    """Rebuild the elements of a leaf, in memory of their own.

    Raises:
        CorruptStoreError: these are no elements of that dtype.
    """
    dtype = _DTYPES.get(name)
    if dtype is None or type(data) is not bytes or len(data) % dtype.itemsize:
        raise CorruptStoreError(f"the pickle has elements of the dtype {name!r:.80} that are none")
    made = torch.empty(len(data) // dtype.itemsize, dtype=dtype, device="cpu")
    ctypes.memmove(made.data_ptr(), data, len(data))
    return made


def reduced(td: Any) -> tuple[Any, ...]:
    """Reduce a TensorDict in memory to what a pickle holds."""
    counts = _references(td._data.values())  # before anything here refers to them
    data: dict[str, Any] = dict(td._data)
    shapes: dict[str, tuple[int, ...]] = {}
    for (key, leaf), count in zip(td._data.items(), counts, strict=True):
        if count == _ALONE and _is_plain(leaf):
            data[key] = LeafStorage(leaf)
            shapes[key] = tuple(leaf.shape)
    return rebuild, ("TensorDict.leaves", data, shapes, tuple(td._batch_size), td._device, td._names, td.is_locked)


def rebuilt(
    data: dict[str, Any],
    shapes: Mapping[str, Sequence[int]],
    batch: Sequence[int],
    device: torch.device | None,
    names: Names,
    locked: bool,
) -> TensorDict:
    """Rebuild a TensorDict from its pickle, or from a file of `torch.save`."""
    for key, shape in shapes.items():
        found: Any = data[key]
        if isinstance(found, TypedStorage):
            stride = torch.empty(tuple(shape), device="meta").stride()
            data[key] = torch._utils._rebuild_tensor(found, 0, tuple(shape), stride)
        else:
            data[key] = found.view(shape)
    td = Container._resident_class._new(data, torch.Size(batch), device, names)
    return td.lock_() if locked else td


def _references(entries: Iterable[Any]) -> list[int]:
    return [sys.getrefcount(entry) for entry in entries]


_ALONE = _references({"entry": object()}.values())[0]
"""Of an entry that nothing but its TensorDict refers to. Others may be in the same pickle twice, and are one object
when it is read: pickle sees to that, if the tensor itself is given to it."""


def _is_plain(leaf: Any) -> bool:
    """Check whether a leaf is its bytes and its shape, and nothing more."""
    if type(leaf) is not Tensor or leaf.dtype not in _NAMES or leaf.layout is not torch.strided or not leaf.is_cpu:
        return False
    if leaf.is_nested or leaf.requires_grad or leaf.is_neg() or leaf.__dict__ or not leaf.is_contiguous():
        return False
    storage = leaf.untyped_storage()
    return storage.nbytes() == leaf.nbytes and getattr(storage, "tdstore_file", None) is None
