"""Sizes of memory-mapped tensors, dense and nested. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdstore.errors import InvalidArgumentError, InvalidTypeError
from tdstore.index.nested import nested_over


def parse_size(shape: tuple[Any, ...], named: Any, fill_value: Any) -> tuple[Any, Any]:
    """Return the size and the fill value of a constructor, whose arguments are those of `full`.

    Args:
        shape: positional arguments: a size in one or several, followed by the fill value where that is None.
        named: the argument `shape=`.
        fill_value: the argument `fill_value=`.

    Raises:
        InvalidTypeError: there is no size, or no fill value.
    """
    if fill_value is None:
        if len(shape) != (2 if named is None else 1):
            raise InvalidTypeError("full() needs a shape and a fill_value")
        *rest, fill_value = shape
        if fill_value is None:
            raise InvalidTypeError("full() needs a fill_value that is a number, not None")
        shape = tuple(rest)
    if named is not None:
        return named, fill_value
    if not shape:
        raise InvalidTypeError("a memory-mapped tensor needs a size: (3, 4) or shape=(3, 4)")
    return (shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape), fill_value


def storage_size(shape: Sequence[int] | Tensor) -> torch.Size:
    """Return the shape of a dense tensor, or that of all elements of a nested one, from the shapes of its rows."""
    if not isinstance(shape, Tensor):
        return torch.Size(shape)
    if shape.ndim != 2 or shape.dtype is not torch.int64 or bool((shape < 0).any()):
        raise InvalidArgumentError(
            "the shapes of the rows of a nested tensor are an int64 tensor [rows, dims], none negative"
        )
    return torch.Size((int(shape.prod(1).sum()),))


def as_rows(flat: Tensor, shape: Sequence[int] | Tensor) -> Tensor:
    """Give flat elements a shape, or split them into the rows of a nested tensor."""
    return nested_over(flat, shape) if isinstance(shape, Tensor) else flat.view(torch.Size(shape))


def shape_text(shape: Sequence[int] | Tensor) -> str:
    """Format a shape for messages."""
    return f"{shape.tolist()} of rows" if isinstance(shape, Tensor) else str(list(shape))
