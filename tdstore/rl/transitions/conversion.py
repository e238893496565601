"""Conversion of the results of environments to tensors and TensorDicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import tdstore
from tdstore.errors import InvalidTypeError

if TYPE_CHECKING:
    from tdstore import TensorDictBase

_NUMBERS = (bool, int, float)


def to_torch_tensor(data: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert numbers to a tensor of a dtype.

    Args:
        data: a tensor, which is cast, and is returned as it is if it already has the dtype; or an array, a number or
            nested lists and tuples of numbers, which are copied.
        dtype: of the result.

    Raises:
        TypeError: `data` is none of these.

    Example:
        >>> to_torch_tensor([1, 2])
        tensor([1., 2.])
    """
    if isinstance(data, Tensor):
        return data.to(dtype)
    if isinstance(data, (np.ndarray, np.generic)) and np.asarray(data).dtype.kind in "biuf":
        return torch.from_numpy(np.array(data)).to(dtype)
    if isinstance(data, _NUMBERS):
        return torch.tensor(data, dtype=dtype, device="cpu")
    if isinstance(data, (list, tuple)):
        try:
            return _of_sequence(data, dtype)
        except (TypeError, ValueError) as error:
            raise InvalidTypeError(f"Cannot convert data of type {type(data).__name__} to a tensor: {error}") from error
    raise InvalidTypeError(f"Cannot convert data of type {type(data).__name__} to a tensor")


def _of_sequence(data: Sequence[Any], dtype: torch.dtype) -> Tensor:
    if any(isinstance(item, (Tensor, np.ndarray, list, tuple)) for item in data):
        return torch.stack([to_torch_tensor(item, dtype) for item in data])
    return torch.tensor(data, dtype=dtype, device="cpu")


def to_tensordict(data: Any, dtype: torch.dtype = torch.float32) -> TensorDictBase:
    """Convert an observation with several parts to a TensorDict of batch size `[]`; a TensorDict keeps its own.

    Args:
        data: a tuple, whose parts get the names `tuple_obs_0`, `tuple_obs_1` and so on; a dict with its own names; both
            nested to any depth; or a TensorDict, which is cast. A dict with `input_ids` is the prompt of a language
            model: integers keep their dtype, strings become values, None is left out. A list of prompts becomes a lazy
            stack, as they may have different lengths.
        dtype: of all tensors.

    Raises:
        TypeError: `data` is none of these, or a key is not a string.

    Example:
        >>> td = to_tensordict((torch.zeros(3), 5))
        >>> td["tuple_obs_0"].shape, td["tuple_obs_1"].shape
        (torch.Size([3]), torch.Size([]))
    """
    if isinstance(data, tdstore.TensorDictBase):
        return data.to(dtype)
    if isinstance(data, tuple):
        data = {f"tuple_obs_{i}": part for i, part in enumerate(data)}
    if isinstance(data, list) and data and all(_is_prompt(part) for part in data):
        result: TensorDictBase = tdstore.lazy_stack([to_tensordict(part, dtype) for part in data])
        return result
    if not isinstance(data, Mapping):
        raise InvalidTypeError(
            f"Cannot convert data of type {type(data).__name__} to a TensorDict: it is no dict or tuple"
        )
    convert = _of_prompt if _is_prompt(data) else _part
    made = tdstore.TensorDict({})
    for key, value in data.items():
        if not isinstance(key, str):
            raise InvalidTypeError(
                f"Cannot convert data of type {type(data).__name__} with the key {key!r}: keys are strings"
            )
        found = convert(value, dtype)
        if found is not None:
            made[key] = found
    return made


def _part(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (Mapping, tuple, tdstore.TensorDictBase)):
        return to_tensordict(value, dtype)
    return to_torch_tensor(value, dtype)


def _is_prompt(data: Any) -> bool:
    return isinstance(data, Mapping) and "input_ids" in data


def _of_prompt(value: Any, dtype: torch.dtype) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, str) for item in value):
        return list(value)
    if isinstance(value, Mapping):
        return to_tensordict(value, dtype)
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(np.array(value))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
