"""Nested tensors as leaves: their shape, and how uneven tensors become one tensor, nested or padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdstore.errors import InvalidArgumentError, UnevenError


def leaf_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor, with -1 for ragged dimensions.

    Example:
        >>> leaf_shape(torch.nested.nested_tensor([torch.ones(2), torch.ones(4)], layout=torch.jagged))
        torch.Size([2, -1])
    """
    if not tensor.is_nested:
        return tensor.shape
    if tensor.layout is torch.jagged:
        dim, values = ragged_dim(tensor), tensor.values()
        return torch.Size((tensor.size(0), *values.shape[: dim - 1], -1, *values.shape[dim:]))
    parts = [part.shape for part in tensor.unbind()]
    return torch.Size((len(parts), *(n[0] if len(set(n)) == 1 else -1 for n in zip(*parts, strict=True))))


def ragged_dim(tensor: Tensor) -> int:
    """Return the dimension of a jagged tensor whose length differs."""
    found: int = tensor._ragged_idx  # type: ignore[attr-defined]
    return found


def forms(parts: Sequence[Any]) -> str:
    """Return the shapes of tensors and the types of all other parts, for messages."""
    forms = [list(p.shape) if isinstance(p, Tensor) else type(p).__name__ for p in parts]
    return ", ".join(map(str, dict.fromkeys(map(str, forms))))


def nested(parts: list[Tensor], layout: torch.layout) -> Tensor:
    """Build a nested tensor from its components.

    Raises:
        UnevenError: a component is a nested tensor itself.
    """
    if any(part.is_nested for part in parts):
        raise UnevenError(
            f"nested tensors cannot be the components of one: {forms(parts)}",
            hint="get(key, as_padded_tensor=True) or as_list=True; torch.cat(td.tensordicts) joins their rows",
        )
    return torch.nested.as_nested_tensor(parts, layout=layout)


def _dense(tensor: Tensor, side: str, value: float) -> Tensor:
    """Pad the rows of a nested tensor to the longest."""
    rows = list(tensor.unbind())
    if not rows:
        shape = [max(n, 0) for n in leaf_shape(tensor)]
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return torch.stack(padded(rows, side, value))


def padded(parts: list[Tensor], side: str, value: float) -> list[Tensor]:
    """Pad tensors to the longest of each dimension.

    Raises:
        InvalidArgumentError: no such side. UnevenError: they differ in rank.
    """
    if side not in ("right", "left"):
        raise InvalidArgumentError(f"padding_side is 'right' or 'left', not {side!r}")
    if len({p.ndim for p in parts}) > 1:
        raise UnevenError(f"tensors of different rank cannot be padded: {forms(parts)}")
    if any(p.is_nested for p in parts):
        parts = [_dense(p, side, value) if p.is_nested else p for p in parts]
    size = [max(c) for c in zip(*(p.shape for p in parts), strict=True)]
    out = []
    for part in parts:
        if list(part.shape) != size:
            full = part.new_full(size, value)
            at = tuple(
                slice(0, n) if side == "right" else slice(m - n, m) for n, m in zip(part.shape, size, strict=True)
            )
            full[at] = part
            part = full
        out.append(part)
    return out
