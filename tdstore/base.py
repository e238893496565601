"""Common base of all containers, under the path that code imports it from."""

from __future__ import annotations

from tdstore.container.core.defaults import get_defaults_to_none, set_get_defaults_to_none
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.tensordicts.base import TensorDictBase
from tdstore.tensordicts.kinds import (
    default_is_leaf,
    is_leaf_nontensor,
    is_tensor_collection,
)
from tdstore.tensordicts.kinds import (
    is_leaf_nontensor as _is_leaf_nontensor,  # noqa: F401 - torchrl imports this name
)
from tdstore.types import NestedKey

__all__ = [
    "NO_DEFAULT",
    "NestedKey",
    "TensorDictBase",
    "default_is_leaf",
    "get_defaults_to_none",
    "is_leaf_nontensor",
    "is_tensor_collection",
    "set_get_defaults_to_none",
]
