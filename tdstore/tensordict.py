"""Containers and functions of several of them, under the path that code imports them from."""

from __future__ import annotations

from tdstore.builtin.memmap.tensor import MemoryMappedTensor
from tdstore.container.functions.broadcast import expand_as_right, expand_right
from tdstore.container.functions.compare import assert_allclose_td
from tdstore.container.functions.merge import merge_tensordicts
from tdstore.container.functions.padding import dense_stack_tds, pad, pad_sequence
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.convert.objects.python import make_tensordict
from tdstore.tensorclass.making import is_tensorclass
from tdstore.tensordicts.base import TensorDictBase
from tdstore.tensordicts.kinds import is_tensor_collection
from tdstore.tensordicts.lazystack.stack import LazyStackedTensorDict
from tdstore.tensordicts.resident.tensordict import TensorDict
from tdstore.types import NestedKey

__all__ = [
    "NO_DEFAULT",
    "LazyStackedTensorDict",
    "MemoryMappedTensor",
    "NestedKey",
    "TensorDict",
    "TensorDictBase",
    "assert_allclose_td",
    "dense_stack_tds",
    "expand_as_right",
    "expand_right",
    "is_tensor_collection",
    "is_tensorclass",
    "make_tensordict",
    "merge_tensordicts",
    "pad",
    "pad_sequence",
]
