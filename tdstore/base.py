"""Common base of all containers, under the path that code imports it from."""

from __future__ import annotations

from tdstore.builtin.memmap.tensor import MemoryMappedTensor
from tdstore.container.core.defaults import get_defaults_to_none, set_get_defaults_to_none
from tdstore.container.core.paths import unravel_key, unravel_key_list
from tdstore.container.functions.broadcast import expand_as_right
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.container.values.linked_lists import LinkedList
from tdstore.tensordicts.base import TensorDictBase
from tdstore.tensordicts.kinds import (
    default_is_leaf,
    is_leaf_nontensor,
    is_non_tensor,
    is_tensor_collection,
)
from tdstore.tensordicts.kinds import (
    is_leaf_nontensor as _is_leaf_nontensor,  # noqa: F401 - torchrl imports this name
)
from tdstore.types import NestedKey

__all__ = [
    "NO_DEFAULT",
    "LinkedList",
    "MemoryMappedTensor",
    "NestedKey",
    "TensorDictBase",
    "default_is_leaf",
    "expand_as_right",
    "get_defaults_to_none",
    "is_leaf_nontensor",
    "is_non_tensor",
    "is_tensor_collection",
    "set_get_defaults_to_none",
    "unravel_key",
    "unravel_key_list",
]
