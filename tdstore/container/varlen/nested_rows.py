"""Rows of nested tensors in memory: torch itself gives one, and no several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdstore.container.varlen.nested_leaves import ragged_dim
from tdstore.errors import UnsupportedError
from tdstore.index.index_terms import as_terms
from tdstore.index.rows import check_rows

_ALL = slice(None)


def rows_at(tensor: Tensor, index: Any) -> Tensor:
    """Return `tensor[index]` for an index of rows: a nested tensor of the same layout, or the one row.

    Args:
        tensor: any; one that is not nested is indexed as torch does.

    Raises:
        UnsupportedError: the index makes new dimensions, or takes several dimensions together.
    """
    if not tensor.is_nested:
        return tensor[index]
    first, *rest = as_terms(index) or (_ALL,)
    if first is None or first is Ellipsis or type(first) is bool:
        raise _refused("with new dimensions")
    try:
        chosen = torch.arange(tensor.size(0))[first if not isinstance(first, Tensor) else first.cpu()]
    except IndexError:
        if isinstance(first, Tensor) and first.dtype is torch.int64:
            check_rows(first, tensor.size(0))  # tells which row it is
        raise
    together = not isinstance(first, (int, slice)) and any(not isinstance(term, (int, slice)) for term in rest)
    if chosen.ndim > 1 or together or any(term is None for term in rest):
        raise _refused("with several dimensions together")
    rows = tensor.unbind()
    further = tuple(rest) if any(term != _ALL for term in rest) else ()
    if not chosen.ndim:
        return rows[int(chosen)][further] if further else rows[int(chosen)]
    picked = [rows[i][further] if further else rows[i] for i in chosen.tolist()]
    return _joined(tensor, picked, ragged=not further)


def row_of(key: str, tensor: Tensor, index: Any) -> Tensor:
    """Return the row of a nested tensor that is written at an index, as a view.

    Raises:
        UnsupportedError: the index is not about one row.
    """
    terms = as_terms(index)
    if not terms or not isinstance(terms[0], int):
        raise UnsupportedError(
            f"several rows of the nested tensor {key!r} cannot be written: each has its own shape",
            hint="set the whole entry: td.set(key, nested); or store rows that change as td.to_lazystack(0)",
        )
    row: Tensor = tensor[terms[0]]
    return row[terms[1:]] if terms[1:] else row


def _joined(like: Tensor, rows: list[Tensor], *, ragged: bool) -> Tensor:
    """Join rows into a nested tensor of the layout of another, ragged along the same dimension."""
    if like.layout is not torch.jagged:
        if not rows:
            return torch.nested.nested_tensor([], dtype=like.dtype, device=like.device)
        return torch.nested.as_nested_tensor(rows, layout=torch.strided)
    if rows and not ragged:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    dim = ragged_dim(like)
    parts = [row.movedim(dim - 1, 0) for row in rows]
    values = torch.cat(parts) if parts else like.values().movedim(dim - 1, 0)[:0]
    offsets = torch.tensor([0, *map(len, parts)], device=like.device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values.movedim(0, dim - 1), offsets, jagged_dim=dim)


def _refused(how: str) -> UnsupportedError:
    return UnsupportedError(
        f"a nested tensor cannot be indexed {how}", hint="index its rows only: td[rows]; or keep it as a lazy stack"
    )
