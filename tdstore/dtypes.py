"""One table of element types: torch dtype <-> name <-> numpy dtype.

numpy has no bfloat16, float8 or complex32: such leaves travel through numpy as
unsigned integers of the same width (their bit patterns), see `to_numpy` and `from_numpy`.
"""

from __future__ import annotations

import difflib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdstore.errors import InvalidTypeError

_NUMPY_NAMES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 complex64 complex128".split()
)
_BITS_NAMES = ("bfloat16 complex32 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu").split()

NAME_TO_DTYPE: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _NUMPY_NAMES + _BITS_NAMES if hasattr(torch, name)
}
DTYPE_TO_NAME: dict[torch.dtype, str] = {dtype: name for name, dtype in NAME_TO_DTYPE.items()}

_ALIASES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "int": "int32",
    "long": "int64",
    "short": "int16",
}
_UINT = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}

_TO_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    dtype: np.dtype(name if name in _NUMPY_NAMES else f"uint{8 * dtype.itemsize}")
    for name, dtype in NAME_TO_DTYPE.items()
}
_REAL = frozenset(NAME_TO_DTYPE[name] for name in _NUMPY_NAMES if not name.startswith("complex"))
_FROM_NUMPY: dict[np.dtype[Any], torch.dtype] = {np.dtype(name): NAME_TO_DTYPE[name] for name in _NUMPY_NAMES}
_IN_NUMPY = frozenset(_FROM_NUMPY.values())


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as it is written on disk: `torch.float32` -> `"float32"`.

    Raises:
        InvalidTypeError: no store can hold this dtype (quantized types, for example).
    """
    try:
        return DTYPE_TO_NAME[dtype]
    except KeyError:
        raise InvalidTypeError(
            f"{dtype} cannot be stored; the dtypes that can are {', '.join(NAME_TO_DTYPE)}"
        ) from None


def as_dtype(value: object) -> torch.dtype:
    """Accept a torch dtype, its name (`"float32"`, `"torch.float32"`), a numpy dtype or a python scalar type.

    Raises:
        InvalidTypeError: not the name of a dtype; the message suggests the nearest one.
    """
    if isinstance(value, torch.dtype):
        if value not in DTYPE_TO_NAME:
            dtype_name(value)  # raises
        return value
    if isinstance(value, str):
        name = value.removeprefix("torch.")
        name = _ALIASES.get(name, name)
        if name in NAME_TO_DTYPE:
            return NAME_TO_DTYPE[name]
        near = difflib.get_close_matches(name, NAME_TO_DTYPE, 1)
        raise InvalidTypeError(f"unknown dtype {value!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if value is bool:
        return torch.bool
    if value is int:
        return torch.int64
    if value is float:
        return torch.get_default_dtype()
    if isinstance(value, (np.dtype, type)):
        try:
            return _FROM_NUMPY[np.dtype(value).newbyteorder("=")]
        except (KeyError, TypeError):
            pass
    raise InvalidTypeError(f"{value!r} is not a dtype that can be stored")


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the numpy dtype that carries `dtype`: the same type, or unsigned integers of its width."""
    return _TO_NUMPY[dtype] if dtype in _TO_NUMPY else _TO_NUMPY[NAME_TO_DTYPE[dtype_name(dtype)]]


def is_bit_pattern(dtype: torch.dtype) -> bool:
    """Check whether numpy lacks `dtype`, so that it is stored as unsigned integers."""
    return dtype not in _IN_NUMPY


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a numpy array over the memory of a CPU tensor, of dtype `numpy_dtype(tensor.dtype)`; no copy."""
    if tensor.dtype in _REAL and not tensor.requires_grad and not tensor.is_neg():
        return tensor.numpy()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if is_bit_pattern(tensor.dtype):
        tensor = tensor.view(_UINT[tensor.dtype.itemsize])
    return tensor.numpy()


def torch_ready(array: Any) -> Any:
    """Return a numpy array that torch accepts: itself, or a copy in native byte order with usual strides."""
    if not isinstance(array, np.ndarray) or array.dtype.char not in "?bhilqBHILQefdFDpP":
        return array
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array.copy() if any(step < 0 or step % array.itemsize for step in array.strides) else array


def from_numpy(array: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    """Return a tensor of `dtype` over the memory of `array` (made as by `to_numpy`); copies only read-only memory."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable:
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if is_bit_pattern(dtype) else tensor


def repair_bools(value: Tensor) -> None:
    """Make every byte of a bool tensor 0 or 1, in place: operations of torch assume it. Other dtypes are unchanged.

    Args:
        value: a tensor whose bytes come from a file or a server.

    Example:
        >>> value = torch.tensor([0, 2, 1], dtype=torch.uint8).view(torch.bool)
        >>> repair_bools(value)
        >>> value.view(torch.uint8)
        tensor([0, 1, 1], dtype=torch.uint8)
    """
    if value.dtype is torch.bool and value.numel():
        value.view(torch.uint8).clamp_(max=1)
