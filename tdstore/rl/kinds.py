"""Kinds of data that rows come as."""

from __future__ import annotations

from torch import Tensor

import tdstore
from tdstore import TensorDict, TensorDictBase


# -- the structure of data ---------------------------------------------------------------------
def is_foreign(data: object) -> bool:
    """Check whether data is a TensorDict or tensorclass of the `tensordict` package."""
    if isinstance(data, (TensorDictBase, Tensor, dict, tuple)) or not hasattr(data, "batch_size"):
        return False
    return not tdstore.is_tensor_collection(data)


def is_container(data: object) -> bool:
    """Check whether data is a TensorDict or a tensorclass of this package: not a value in one."""
    return isinstance(data, TensorDictBase) or (tdstore.is_tensor_collection(data) and not tdstore.is_non_tensor(data))


def is_collection(data: object) -> bool:
    """Check whether data is a TensorDict or a tensorclass, of this package or of `tensordict`."""
    return type(data) is TensorDict or is_container(data) or is_foreign(data)
