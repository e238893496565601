"""Batch sizes of the operands of arithmetic and comparisons: as tensors do, TensorDicts broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tdstore.container.core import Container
from tdstore.errors import BatchSizeError

T = TypeVar("T", Tensor, Container)


def uneven(td: Container, operands: Sequence[Any]) -> bool:
    """Whether an operand is a TensorDict of another batch size."""
    batch = td.batch_size
    return any(isinstance(o, Container) and o.batch_size != batch for o in operands)


def widened(td: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]] | None:
    """A TensorDict and its operands, expanded to the batch size of the result.

    Returns None where that is the batch size of `td`, or where there is none: then the leaves say what does not fit.
    """
    try:
        wide = torch.broadcast_shapes(td.batch_size, *[o.batch_size for o in operands if isinstance(o, Container)])
    except RuntimeError:
        return None
    if wide == td.batch_size:
        return None
    return td.expand(wide), [o.expand(wide) if isinstance(o, Container) else o for o in operands]


def check_leaves(results: Sequence[Tensor], batch_size: torch.Size) -> None:
    """Refuse results that do not start with the batch size of their TensorDict.

    Raises:
        BatchSizeError: a leaf of an operand is larger than its place in the result.
    """
    for leaf in results:
        if leaf.shape[: len(batch_size)] != batch_size:
            raise BatchSizeError(
                f"a result of shape {list(leaf.shape)} does not start with the batch size {list(batch_size)}",
                hint="give both TensorDicts the batch size of the result",
            )


def expand_right(tensor: T, shape: Sequence[int]) -> T:
    """Expand a tensor or a TensorDict to a shape that begins with its own.

    Args:
        tensor: of shape `[*s]`.
        shape: `[*s, *more]`, where a dimension of one in `s` may be longer.

    Returns:
        A view of shape `shape`: values repeat along the new dimensions at the right.

    Raises:
        RuntimeError: `shape` does not begin with the shape of `tensor`.

    Example:
        >>> expand_right(torch.arange(2), (2, 3)).tolist()
        [[0, 0, 0], [1, 1, 1]]
    """
    own = tensor.shape
    if len(shape) < len(own):
        raise BatchSizeError(f"a shape of {list(own)} cannot be expanded to the shorter {list(shape)}")
    wide: T = tensor.reshape(own + (1,) * (len(shape) - len(own))).expand(tuple(shape))
    return wide


def expand_as_right(tensor: T, dest: Tensor | Container) -> T:
    """Expand a tensor or a TensorDict to the shape of another, which begins with its own.

    Args:
        tensor: of shape `[*s]`.
        dest: of shape `[*s, *more]`; of a TensorDict, its batch size counts.

    Raises:
        RuntimeError: `dest` does not begin with the shape of `tensor`.

    Example:
        >>> expand_as_right(torch.arange(2), torch.zeros(2, 3)).tolist()
        [[0, 0, 0], [1, 1, 1]]
    """
    return expand_right(tensor, dest.shape)
