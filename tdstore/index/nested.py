"""Nested tensors over elements that are stored one row after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def nested_over(values: Tensor, sizes: Tensor) -> Tensor:
    """Build a nested tensor (strided) over elements stored one row after the other, sharing their memory.

    Args:
        values: the elements `[total]`.
        sizes: the shape of each row, int64 `[rows, dims]`; there are as many elements as that needs.
    """
    if not len(sizes):
        return torch.nested.nested_tensor([], dtype=values.dtype, device=values.device)
    steps = torch.ones_like(sizes)
    for d in range(sizes.shape[1] - 2, -1, -1):
        steps[:, d] = steps[:, d + 1] * sizes[:, d + 1].clamp(min=1)
    counts = sizes.prod(1)
    made: Tensor = torch._nested_view_from_buffer(_alone(values), sizes.clone(), steps, counts.cumsum(0) - counts)
    return made


def _alone(values: Tensor) -> Tensor:
    """Return the elements as the whole of a storage: torch takes the storage of a buffer, wherever the view begins."""
    if values.untyped_storage().nbytes() == values.nbytes:
        return values
    if values.device.type != "cpu":
        return values.clone()
    return torch.from_numpy(values.view(torch.uint8).numpy()).view(values.dtype)
