"""What kind of thing a value is: a TensorDict, a value that is no tensor, a leaf."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdstore.container.core.tensorclasses import Typed
from tdstore.container.values.nontensor import NonTensor
from tdstore.tensordicts.base import TensorDictBase


def is_tensor_collection(value: Any) -> bool:
    """Whether a value, or a class, is a TensorDict of any kind."""
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, (TensorDictBase, Typed, NonTensor)) and not issubclass(kind, Tensor)


def is_non_tensor(value: Any) -> bool:
    """Whether a value, or a class, is a wrapped non-tensor entry."""
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, NonTensor) and not issubclass(kind, Tensor)


def default_is_leaf(kind: type) -> bool:
    """What `is_leaf=` is by default: tensors are leaves, TensorDicts and non-tensor entries are not."""
    return not is_tensor_collection(kind)


def is_batchedtensor(value: Any) -> bool:
    """Whether a tensor is what `torch.vmap` gives the function that it maps: one row, standing for all."""
    return bool(torch._C._functorch.is_batchedtensor(value))


def is_leaf_nontensor(kind: type) -> bool:
    """For `is_leaf=`: tensors and non-tensor entries are leaves."""
    return not issubclass(kind, (TensorDictBase, Typed))
