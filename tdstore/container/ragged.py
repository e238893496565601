"""Nested tensors as leaves: what their shape is where one looks for a shape."""

from __future__ import annotations

import torch
from torch import Tensor


def leaf_shape(tensor: Tensor) -> torch.Size:
    """The shape of a tensor, with -1 for what is ragged.

    Example:
        >>> leaf_shape(torch.nested.nested_tensor([torch.ones(2), torch.ones(4)], layout=torch.jagged))
        torch.Size([2, -1])
    """
    if not tensor.is_nested:
        return tensor.shape
    parts = [part.shape for part in tensor.unbind()]
    rest = [n[0] if len(set(n)) == 1 and not _ragged(tensor, d) else -1 for d, n in enumerate(zip(*parts, strict=True))]
    return torch.Size((len(parts), *rest))


def _ragged(tensor: Tensor, dim: int) -> bool:
    """Whether a jagged tensor may differ along a dimension of its parts, even if these happen not to."""
    return tensor.layout is torch.jagged and tensor._ragged_idx == dim + 1  # type: ignore[attr-defined]
