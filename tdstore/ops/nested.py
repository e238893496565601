"""Pieces of nested tensors, which torch splits along few dimensions only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


def split(tensor: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    """Call `tensor.split(sizes, dim)`, for nested tensors along their rows too. The pieces share memory with the
    tensor.

    Args:
        tensor: any. Of a nested one, dimension 0 counts the rows.
        sizes: lengths of the pieces. They add up to the length of `dim`.
        dim: a dimension that is not negative.
    """
    if not tensor.is_nested or dim:
        return tensor.split(sizes, dim)  # type: ignore[no-any-return]  # torch leaves it without annotations
    ends = [*accumulate(sizes)]
    if tensor.layout is not torch.jagged:
        return [tensor.narrow(0, end - size, size) for size, end in zip(sizes, ends, strict=True)]
    jagged: Any = tensor  # its methods are not those of every tensor
    ragged, values, offsets, lengths = jagged._ragged_idx, jagged.values(), jagged.offsets(), jagged.lengths()
    bounds = offsets.tolist()
    pieces = []
    for size, end in zip(sizes, ends, strict=True):
        first, last = bounds[end - size], bounds[end]
        pieces.append(
            torch.nested.nested_tensor_from_jagged(
                values.narrow(ragged - 1, first, last - first),
                offsets[end - size : end + 1] - first,
                None if lengths is None else lengths[end - size : end],
                jagged_dim=ragged,
            )
        )
    return pieces


def narrow(tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Call `tensor.narrow(dim, start, length)`, for the rows of nested tensors too. The result shares memory.

    Args:
        tensor: any. Of a nested one, dimension 0 counts the rows.
        dim: a dimension that is not negative.
        start: the first position.
        length: the number of positions.
    """
    if not tensor.is_nested or dim:
        return tensor.narrow(dim, start, length)
    if not length:  # of a strided one, torch makes no empty piece
        start = 0
    return split(tensor, [start, length, tensor.size(0) - start - length], 0)[1]
