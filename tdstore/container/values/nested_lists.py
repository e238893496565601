"""Conversion of one value per row to nested lists and text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tdstore.arguments import as_list
from tdstore.errors import InvalidArgumentError


def nested(values: list[Any], shape: Sequence[int]) -> Any:
    """Reshape a flat list to nested lists; return its one value if the shape is empty."""
    if not shape:
        return values[0]
    for dim in range(len(shape) - 1, 0, -1):
        n, rows = shape[dim], torch.Size(shape[:dim]).numel()
        values = [values[i * n : (i + 1) * n] for i in range(rows)]
    return values


def levels_of(values: list[Any], most: int) -> int:
    """Count the levels of lists, up to `most`."""
    levels = 1
    while levels < most and values and all(isinstance(part, list) for part in values):
        levels, values = levels + 1, [v for part in values for v in part]
    return levels


def stack_text(first: list[Any], size: torch.Size) -> str:
    """Return the text of a stack of many values, of which these are the first."""
    return as_text(f"{repr(first)[:-1]}, ... {size.numel()} values]", size)


def as_text(values: str, size: torch.Size) -> str:
    """Return the text of a stack of values."""
    return f"NonTensorStack(\n    {values},\n    batch_size={size},\n    device=None)"


def levels(values: list[Any], ndim: int | None) -> tuple[list[int], list[Any]]:
    """Return the shape of nested lists, and all of their values in C order.

    Args:
        ndim: how many levels there are; by default as many as there are lists of one length.

    Raises:
        InvalidArgumentError: fewer levels of lists of equal length than asked for.
    """
    pool = as_list(values, "the values", "a list")
    shape = [len(pool)]
    while ndim is None or len(shape) < ndim:
        width = len(pool[0]) if pool and isinstance(pool[0], list) else 0
        if any(not isinstance(part, list) or len(part) != width for part in pool) or (ndim is None and not width):
            if ndim is None:
                break
            raise InvalidArgumentError(f"expected {ndim} levels of lists of equal length")
        shape.append(width)
        pool = [v for part in pool for v in part]
    return shape, pool
