"""What kind of thing a value is: a TensorDict, a value that is no tensor, a leaf."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdstore.container.core.tensorclasses import Typed
from tdstore.container.values.nontensor import NonTensor
from tdstore.tensordicts.base import TensorDictBase


def is_tensor_collection(value: Any) -> bool:
    """Return whether a value, or a class, is a TensorDict of any kind."""
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, (TensorDictBase, Typed, NonTensor)) and not issubclass(kind, Tensor)


def is_non_tensor(value: Any) -> bool:
    """Return whether a value, or a class, is a wrapped non-tensor entry."""
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, NonTensor) and not issubclass(kind, Tensor)


def default_is_leaf(kind: type) -> bool:
    """Return whether a class is a leaf by default: tensors are, TensorDicts and non-tensor entries are not."""
    return not is_tensor_collection(kind)


def is_batchedtensor(value: Any) -> bool:
    """Return whether a tensor is what `torch.vmap` passes to the mapped function: one row, standing for all."""
    return bool(torch._C._functorch.is_batchedtensor(value))


def is_leaf_nontensor(kind: type) -> bool:
    """Return whether a class is a tensor or a non-tensor entry: a rule for `is_leaf=`."""
    return not issubclass(kind, (TensorDictBase, Typed))
