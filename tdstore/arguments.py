"""Checks of what callers pass, with one text for each kind of wrong argument."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping
from numbers import Real
from types import NoneType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tdstore.errors import ArgumentKindError, DeviceError, InvalidArgumentError, InvalidTypeError
from tdstore.types import DeviceLike, Number

T = TypeVar("T")


def refuse_type(what: str, wanted: str, value: object) -> InvalidTypeError:
    """Return the error for an argument of a wrong type, with a hint for the types that are passed by mistake.

    Args:
        what: the argument, such as `"out"`, or the method and what it takes.
        wanted: what it should be, with its article.
        value: what it is.
    """
    hint = None
    if wanted == "a TensorDict" and isinstance(value, Mapping):
        hint = "TensorDict(the dict, batch_size) makes one of it"
    elif "tensor" in wanted and isinstance(value, (np.ndarray, list)):
        hint = "torch.as_tensor() makes one of it"
    return InvalidTypeError(f"{what} must be {wanted}, not {_kind(value)}", hint=hint)


def _kind(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"an {name}" if name.startswith(("ndarray", *"aeiouAEIOU")) else f"a {name}"


def as_list(values: Iterable[T], what: str, wanted: str) -> list[T]:
    """List the elements of an argument.

    Raises:
        InvalidTypeError: it is no iterable.
    """
    try:
        return list(values)
    except TypeError:
        if isinstance(values, Iterable):  # raised inside of it
            raise
        raise refuse_type(what, wanted, values) from None


def as_device(device: DeviceLike) -> torch.device:
    """Convert what names a device.

    Raises:
        DeviceError: torch knows no such device.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        if isinstance(device, str):
            why = str(error).partition(" device type at start")[0].partition("\n")[0]
            raise DeviceError(f"{device!r} is no device: {why}", hint="pass 'cpu', 'cuda' or 'cuda:0'") from None
        raise DeviceError(
            f"a device is a string, a number or a torch.device, not {device!r} of type {type(device).__name__}",
            hint="pass 'cpu', 'cuda' or 'cuda:0'",
        ) from None


def check_int(value: object, what: str) -> None:
    """Refuse a number that is no integer.

    Raises:
        InvalidTypeError: it is something else.
    """
    try:
        operator.index(value)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        raise refuse_type(what, "an int", value) from None


def check_flags(**flags: object) -> None:
    """Refuse flags that are neither True nor False, by their names: a string such as "no" is true.

    Raises:
        InvalidTypeError: one is something else.
    """
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise refuse_type(name, "True or False", value)


def check_number(value: object, what: str, least: float = -math.inf) -> None:
    """Refuse what is no finite number, or one that is too small.

    Raises:
        InvalidTypeError: it is no real number.
        InvalidArgumentError: it is infinite, NaN or below `least`.
    """
    single = isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex()
    if not single and not isinstance(value, (Real, np.number)):
        raise refuse_type(what, "a number", value)
    number: Any = value
    if not (number >= least and abs(number) < math.inf):
        limit = "" if least == -math.inf else f" of {least:g} or more"
        raise InvalidArgumentError(f"{what} is a finite number{limit}, not {value}")


def check_batch_dims(batch_dims: object) -> None:
    """Refuse what is no number of batch dimensions.

    Raises:
        InvalidTypeError: it is neither an int nor None. InvalidArgumentError: it is negative.
    """
    if not isinstance(batch_dims, (int, NoneType)):
        raise refuse_type("batch_dims", "an int or None", batch_dims)
    if batch_dims is not None and batch_dims < 0:
        raise InvalidArgumentError(f"batch_dims={batch_dims}: the number of batch dimensions is 0 or more")


def check_prefetch(prefetch: object) -> None:
    """Refuse what is no number of batches to read ahead.

    Raises:
        InvalidTypeError: it is no int. InvalidArgumentError: it is negative, or there would be threads and batches
            without end.
    """
    check_int(prefetch, "prefetch")
    if not 0 <= operator.index(prefetch) <= MOST_AHEAD:  # type: ignore[arg-type]  # it is one
        raise InvalidArgumentError(
            f"prefetch={prefetch}: the number of batches to read ahead is between 0 and {MOST_AHEAD}"
        )


MOST_AHEAD = 1024
"""The most batches that are read ahead: each may have a thread, and the memory of a batch."""


def check_callable(value: object, what: str) -> None:
    """Refuse what cannot be called.

    Raises:
        InvalidTypeError: it is something else.
    """
    if not callable(value):
        raise refuse_type(what, "a function", value)


def check_mask(mask: object, what: str) -> None:
    """Refuse a mask that is no tensor.

    Raises:
        InvalidTypeError: it is something else.
    """
    if not isinstance(mask, Tensor):
        raise refuse_type(f"the {what}", "a bool tensor", mask)


def check_separator(separator: object) -> None:
    """Refuse what cannot split or join keys.

    Raises:
        InvalidTypeError: it is no string. InvalidArgumentError: it is empty.
    """
    if not isinstance(separator, str):
        raise refuse_type("separator", "a string", separator)
    if not separator:
        raise InvalidArgumentError("separator must not be empty: it could not be found again in a key")


def check_path(path: object, what: str) -> None:
    """Refuse what names no file.

    Raises:
        InvalidTypeError: it is neither a string nor a path. InvalidArgumentError: no path can have its characters.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise refuse_type(what, "a path", path)
    if "\0" in str(path):
        raise InvalidArgumentError(f"{what} must be a path, not {str(path)!r:.80}: no name of a file has a NUL")


def as_operand(operand: object) -> Tensor | Number | np.generic | torch.SymInt | torch.SymFloat | torch.SymBool:
    """Return an operand of leaf-wise maths that is neither a TensorDict nor a tensor: an array as a tensor.

    Raises:
        InvalidTypeError: it is neither an array nor anything that acts as a number.
    """
    if isinstance(operand, np.ndarray):
        return tensor_for(operand, "the leaves")
    if not isinstance(operand, _NUMBERS):
        raise InvalidTypeError(
            f"a TensorDict cannot be combined with {_kind(operand)}: "
            "pass a number, a tensor or an array that broadcasts with the batch, or a TensorDict"
        )
    return operand


_NUMBERS = (int, float, complex, np.number, np.bool_, torch.SymInt, torch.SymFloat, torch.SymBool)


def tensor_for(value: Any, what: str, dtype: torch.dtype | None = None) -> Tensor:
    """Convert a value that is written into an entry, or combined with it, to a tensor.

    Args:
        value: a tensor, a number, a list or an array.
        what: the entry, for the message.
        dtype: of the entry, for what is no tensor yet.

    Raises:
        ArgumentKindError: no tensor can be made of it, or a number is none of the dtype, as NaN is no integer.
    """
    try:
        if isinstance(value, Tensor):
            return value
        if dtype is not None and isinstance(value, (bool, int, float, complex)):
            return torch.full((), value, dtype=dtype)  # `as_tensor` would wrap a number that is too large
        return torch.as_tensor(value, dtype=dtype)
    except NO_NUMBER as error:
        raise refuse_value(value, what, error) from None


def number_like(value: Any, what: str, like: Tensor) -> Tensor:
    """Convert a number that fills a tensor to one of its dtype, on its device.

    Raises:
        ArgumentKindError: it is no number, or none of the dtype, as NaN is no integer.
    """
    try:
        return torch.full((), value, dtype=like.dtype, device=like.device)
    except NO_NUMBER as error:
        raise refuse_value(value, what, error) from None


NO_NUMBER = (TypeError, ValueError, RuntimeError, OverflowError)
"""What torch raises for a value that it cannot convert."""


def refuse_value(value: object, what: str, error: Exception) -> ArgumentKindError:
    """Return the error for a value that torch cannot convert, with torch's reason."""
    why = str(error).partition("\n")[0]
    return ArgumentKindError(f"{value!r:.80} is no tensor or number for {what}: {why}")
