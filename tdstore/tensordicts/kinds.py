"""What kind of thing a value is: a TensorDict, a value that is no tensor, a leaf."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdstore.container.core.tensorclasses import Typed
from tdstore.container.values.nontensor import NonTensor
from tdstore.errors import InvalidArgumentError
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


# -- predicates of dtypes: of the last argument, so that they serve as f(value) and as f(key, value) ------
def is_bool(*args: object) -> bool:
    """Return whether the last argument is a bool tensor; a key may come first, as in a `cast_filter`.

    Raises:
        InvalidArgumentError: without an argument.

    Example:
        >>> is_bool(torch.tensor(True)), is_bool("key", torch.tensor(1.0))
        (True, False)
    """
    return _last_dtype(args) is torch.bool


def is_floating(*args: object) -> bool:
    """Return whether the last argument is a tensor of floating-point numbers, as `is_bool`. Complex ones are none."""
    kind = _last_dtype(args)
    return kind is not None and kind.is_floating_point


def is_inexact(*args: object) -> bool:
    """Return whether the last argument is a tensor of floating-point or complex numbers, as `is_bool`."""
    kind = _last_dtype(args)
    return kind is not None and (kind.is_floating_point or kind.is_complex)


def is_integer(*args: object) -> bool:
    """Return whether the last argument is a tensor of integers, signed or not, as `is_bool`. Booleans are none."""
    kind = _last_dtype(args)
    return kind is not None and not (kind.is_floating_point or kind.is_complex or kind is torch.bool)


def _last_dtype(args: tuple[object, ...]) -> torch.dtype | None:
    if not args:
        raise InvalidArgumentError("a value is missing, which may follow its key")
    return args[-1].dtype if isinstance(args[-1], Tensor) else None
