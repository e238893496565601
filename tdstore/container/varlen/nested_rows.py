"""Rows of nested tensors in memory, taken, joined and added: torch itself gives one row, and no several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tdstore.container.entries.nested_tensors import leaf_shape, ragged_dim
from tdstore.container.varlen.nested_leaves import jagged_parts
from tdstore.errors import BatchSizeError, UnsupportedError
from tdstore.index.index_terms import as_terms, on_cpu
from tdstore.index.masks import masks_as_rows
from tdstore.index.rows import at_rows, check_rows
from tdstore.index.tracing import traced

_ALL = slice(None)


def rows_at(tensor: Tensor, index: Any) -> Tensor:
    """Return `tensor[index]` for an index of rows: a nested tensor of the same layout, or the one row.

    Args:
        tensor: any; one that is not nested is indexed as torch does.

    Raises:
        UnsupportedError: the index makes new dimensions, or takes several dimensions together.
    """
    if not tensor.is_nested:
        if type(index) is tuple and len(index) > 1:
            index = masks_as_rows(index)
        try:
            return tensor[index]
        except RuntimeError:
            if not tensor.is_cpu or traced():
                raise
        # of a dtype that torch lacks a kernel for, or positions of values, which are on the CPU, by rows on a GPU
        return at_rows(tensor, on_cpu(index))
    first, *rest = as_terms(index) or (_ALL,)
    if first is None or first is Ellipsis or type(first) is bool:
        raise _refused("with new dimensions")
    try:
        # numpy's, since torch starts threads for numbers that are counted in microseconds
        chosen = torch.from_numpy(np.arange(tensor.size(0)))[first if not isinstance(first, Tensor) else first.cpu()]
    except IndexError:
        if isinstance(first, Tensor) and first.dtype is torch.int64:
            check_rows(first, tensor.size(0))  # tells which row it is
        raise
    together = not isinstance(first, (int, slice)) and any(not isinstance(term, (int, slice)) for term in rest)
    if chosen.ndim > 1 or together or any(term is None for term in rest):
        raise _refused("with several dimensions together")
    further = tuple(rest) if any(term != _ALL for term in rest) else ()
    if not further and tensor.layout is torch.jagged:
        return _jagged_rows(tensor, chosen) if chosen.ndim else _jagged_row(tensor, int(chosen))
    rows = tensor.unbind()
    if not chosen.ndim:
        return rows[int(chosen)][further] if further else rows[int(chosen)]
    picked = [rows[i][further] if further else rows[i] for i in chosen.tolist()]
    return _joined(tensor, picked)


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


def _joined(like: Tensor, rows: list[Tensor]) -> Tensor:
    """Join rows into a nested tensor of the layout of another."""
    if not rows and like.layout is not torch.jagged:
        return torch.nested.nested_tensor([], dtype=like.dtype, device=like.device)
    return (
        torch.nested.as_nested_tensor(rows, layout=like.layout)
        if rows
        else _jagged_rows(like, torch.arange(0, device="cpu"))
    )


def _jagged_row(tensor: Tensor, row: int) -> Tensor:
    """Return one row of a jagged tensor, as a view."""
    dim, offsets, lengths = ragged_dim(tensor), tensor.offsets(), tensor.lengths()  # type: ignore[attr-defined]
    begin = int(offsets[row])
    size = int(offsets[row + 1]) - begin if lengths is None else int(lengths[row])
    values: Tensor = tensor.values()
    return values.narrow(dim - 1, begin, size)


def _jagged_rows(tensor: Tensor, chosen: Tensor) -> Tensor:
    """Return some rows of a jagged tensor, in one copy."""
    dim = ragged_dim(tensor)
    values, offsets = jagged_parts(tensor)
    at, rows = offsets.numpy(), chosen.numpy()
    sizes = at[rows + 1] - at[rows]
    new = np.concatenate(([0], sizes.cumsum()))
    # The element that comes to place p of row r was at at[r] + (p - new[r]).
    places = torch.from_numpy(np.arange(new[-1]) + np.repeat(at[rows] - new[:-1], sizes))
    return _jagged(values.index_select(0, places.to(values.device)), torch.from_numpy(new), dim)


def _jagged(values: Tensor, offsets: Tensor, dim: int) -> Tensor:
    """Build a jagged tensor from values whose first dimension is the ragged one."""
    offsets = offsets.to(values.device)
    return torch.nested.nested_tensor_from_jagged(values.movedim(0, dim - 1), offsets, jagged_dim=dim)


def as_nested_rows(rows: Tensor, layout: torch.layout, dim: int) -> Tensor:
    """Build a nested tensor from rows of one shape.

    Args:
        rows: a plain tensor `[n, ...]`.
        layout: `torch.jagged` or `torch.strided`.
        dim: the ragged dimension of a jagged one, counted with the rows in front.
    """
    if rows.ndim <= dim or layout is not torch.jagged:
        return torch.nested.as_nested_tensor(list(rows.unbind()), layout=torch.strided)
    return _jagged(*jagged_parts(rows, dim), dim)


# -- joining and adding --------------------------------------------------------------------------
def concat_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate nested tensors along their first dimension.

    Args:
        parts: tensors, of which one at least is nested: the result has the layout of the first of these. A plain
            tensor `[n, ...]` stands for `n` rows of one shape.

    Raises:
        BatchSizeError: the shapes of rows differ where the result is not ragged.

    Example:
        >>> a = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
        >>> [len(row) for row in concat_rows([a, torch.ones(1, 5)]).unbind()]
        [2, 1, 5]
    """
    like = next(part for part in parts if part.is_nested)
    shape = _row_shape(like)
    for part in parts:
        check_row_shapes(shape, leaf_shape(part), "the nested tensor")
    if like.layout is not torch.jagged:
        return torch.nested.as_nested_tensor([row for part in parts for row in part.unbind()], layout=torch.strided)
    dim = ragged_dim(like)
    found = [jagged_parts(part, dim) for part in parts]
    sizes = torch.cat([offsets.diff() for _, offsets in found])
    values = torch.cat([values for values, _ in found])
    return _jagged(values, torch.cat((sizes.new_zeros(1), sizes.cumsum(0))), dim)


class NestedRoom(NamedTuple):
    """A jagged tensor with spare memory after its values. It counts only while it is the very tensor of the entry."""

    leaf: Tensor
    buffer: Tensor
    """The values and the spare memory, the ragged dimension first."""


def lengthened(
    tensor: Tensor, rows: Tensor | None, length: int, room: NestedRoom | None
) -> tuple[Tensor, NestedRoom | None]:
    """Give a nested tensor another number of rows, in memory.

    Args:
        tensor: the nested tensor. It stays as it is.
        rows: what comes after the old rows, as `concat_rows` takes it. None: empty rows.
        length: the number of rows afterwards.
        room: the memory that an earlier call left.

    Returns:
        The tensor, and the memory that the next call may use.

    Raises:
        UnsupportedError: empty rows of a tensor that is not ragged. Others as `concat_rows`.
    """
    old = tensor.size(0)
    if length <= old:
        return rows_at(tensor, slice(0, length)), None
    if rows is None:
        jagged = tensor.layout is torch.jagged
        form = NestedForm(tensor.layout, ragged_dim(tensor) if jagged else 1, leaf_shape(tensor)[1:], tensor.dtype)
        rows = empty_rows(form, length - old)
    rows = rows.to(tensor.device, tensor.dtype)
    grad = torch.is_grad_enabled() and (tensor.requires_grad or rows.requires_grad)
    if tensor.layout is not torch.jagged or grad:
        return concat_rows([tensor, rows]), None
    check_row_shapes(_row_shape(tensor), leaf_shape(rows), "the nested tensor")
    dim = ragged_dim(tensor)
    (values, offsets), (more, ends) = jagged_parts(tensor.detach()), jagged_parts(rows.detach(), dim)
    total = len(values) + len(more)
    again = room is not None and room.leaf is tensor
    if again and room is not None and len(room.buffer) >= total:
        buffer = room.buffer
    else:  # a tensor that grows again gets twice its size, and the rest is for the next rows
        buffer = values.new_empty((max(total, 2 * len(values)) if again else total, *values.shape[1:]))
        buffer[: len(values)].copy_(values)
    buffer[len(values) : total].copy_(more)
    places = torch.from_numpy(np.concatenate((offsets.numpy(), (ends[1:] + offsets[-1]).numpy())))
    longer = _jagged(buffer[:total], places, dim)
    return longer, NestedRoom(longer, buffer)


class NestedForm(NamedTuple):
    """The form of the rows of a nested tensor."""

    layout: torch.layout
    dim: int
    """The ragged dimension of a jagged one, counted with the rows in front."""
    row: Sequence[int]
    """The shape of a row; -1 where rows differ."""
    dtype: torch.dtype


def empty_rows(like: NestedForm, count: int) -> Tensor:
    """Make rows without elements.

    Args:
        like: the nested tensor that they are for.
        count: the number of rows.

    Raises:
        UnsupportedError: all its rows have one shape.
    """
    row, dim = [0 if n == -1 else n for n in like.row], like.dim
    if like.layout is torch.jagged:
        offsets = torch.zeros(count + 1, dtype=torch.int64, device="cpu")
        return _jagged(torch.empty((0, *row[: dim - 1], *row[dim:]), dtype=like.dtype, device="cpu"), offsets, dim)
    if 0 not in row:
        raise UnsupportedError(
            "no empty rows can be made for a nested tensor whose rows all have one shape", hint="append() rows instead"
        )
    return torch.nested.as_nested_tensor([torch.empty(row, dtype=like.dtype, device="cpu") for _ in range(count)])


def _row_shape(like: Tensor) -> Sequence[int]:
    """Return the shape that rows of a nested tensor need, with any number in front. Strided ones leave sizes free."""
    return leaf_shape(like) if like.layout is torch.jagged else (-1,) * like.dim()


def check_row_shapes(mine: Sequence[int], theirs: Sequence[int], what: str) -> None:
    """Refuse rows whose shape does not fit into a nested tensor.

    Args:
        mine: the shape of the nested tensor, -1 where it is ragged.
        theirs: the shape of the rows, with their number in front.
        what: the entry, for messages.

    Raises:
        BatchSizeError: another rank, or another size where the nested tensor is not ragged.
    """
    if len(mine) != len(theirs) or any(m not in (-1, n) for m, n in zip(mine[1:], theirs[1:], strict=True)):
        raise BatchSizeError(f"rows of {what} have the shape {list(mine[1:])}, those given {list(theirs[1:])}")


def _refused(how: str) -> UnsupportedError:
    return UnsupportedError(
        f"a nested tensor cannot be indexed {how}", hint="index its rows only: td[rows]; or keep it as a lazy stack"
    )
