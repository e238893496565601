"""What can be written into what, found out before the first of many entries is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from tdstore.container.core.locks import READONLY
from tdstore.container.entries.unbatched import is_batched
from tdstore.container.methods.writing import take_back
from tdstore.container.storage.change_plan import Changes
from tdstore.container.storage.describe import check_value
from tdstore.container.storage.inline_values import InlineStack
from tdstore.container.values.codecs import pickling
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.container.varlen.columns import PackedStack
from tdstore.errors import BatchSizeError, GradientError, InvalidStateError
from tdstore.index.tracing import one_by_one, traced
from tdstore.storekit.pages import HOLES, reserve
from tdstore.tensordicts.resident.leaf_writes import copy_each

Tensors = tuple[Tensor, ...] | list[Tensor]

_DENSE = torch.strided
_REQUIRES_GRAD = attrgetter("requires_grad")
_REHEARSED: set[tuple[Any, ...]] = set()
"""Functions, dtypes and numbers that were rehearsed without an error."""
_MOST_REHEARSED = 256


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write tensors into others of the same shape, all or none."""
    if len(pairs) > 1 and not are_plain(pairs):
        check_copies(pairs)
    if pairs:
        try:
            copy_plain(*zip(*pairs, strict=True))
        except RuntimeError:  # of the only pair: our error says what to do
            check_copies(pairs)
            raise


def copy_plain(mine: Tensors, theirs: Tensors) -> None:
    """Write tensors into others of the same shape, where none can fail but for want of disk space.

    All are written though Ctrl-C comes, or none: torch writes them by one call.
    """
    if HOLES:
        for target in mine:
            reserve(target)
    if len(mine) < 2 or traced():
        for target, source in zip(mine, theirs, strict=True):
            target.copy_(source)
    elif torch.is_grad_enabled() and True in map(_REQUIRES_GRAD, theirs):
        copy_each(tuple(zip(mine, theirs, strict=True)))  # the call for all has no rule for gradients
    else:
        torch._foreach_copy_(mine, theirs)


def are_plain(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Return whether `mine.copy_(theirs)` cannot fail for pairs of the same shape: dense, of one dtype."""
    try:
        for mine, theirs in pairs:
            if (
                mine.requires_grad
                or theirs.dtype is not mine.dtype
                or theirs.layout is not _DENSE
                or theirs.is_meta
                or not is_unexpanded(mine)
            ):
                return False
    except RuntimeError:  # what torch.vmap hands out does not tell
        return False
    return True


def is_unexpanded(leaf: Tensor) -> bool:
    """Return whether no dimension is expanded: torch refuses to write elements that are several at once."""
    return leaf.is_contiguous() or (leaf.layout is _DENSE and 0 not in leaf.stride())


def have_same_shapes(mine: Tensors, theirs: Tensors) -> bool:
    """Return whether all are pairs of different tensors of one shape. Nested tensors of layout strided have none."""
    try:
        return [leaf.shape for leaf in mine] == [leaf.shape for leaf in theirs] and True not in map(is_, mine, theirs)
    except RuntimeError:
        return False


def check_copies(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Raise what `mine.copy_(theirs)` would, for pairs of the same shape.

    Raises:
        RuntimeError: a leaf of autograd, memory that several elements share, no data, a layout or dtype that torch
            cannot copy from.
    """
    if traced():
        return
    for mine, theirs in pairs:
        dtype = theirs.dtype
        if mine.requires_grad:
            _check_grad(mine)
        if not mine.is_contiguous() and mine.layout is torch.strided:
            check_no_overlap(mine)
        if theirs.layout is not mine.layout or theirs.is_meta:
            if not mine.is_meta:
                torch.empty_like(mine, requires_grad=False).copy_(theirs)  # torch tells
        elif dtype is not mine.dtype:
            theirs = theirs if theirs.is_quantized else theirs.new_empty(1)
            mine.new_empty(theirs.shape).copy_(theirs.detach())


def _check_grad(leaf: Tensor) -> None:
    base = leaf._base if leaf._is_view() else leaf
    if torch.is_grad_enabled() and base is not None and base.is_leaf and base.requires_grad:
        raise GradientError(
            "a leaf that requires grad cannot be written in place: do it under torch.no_grad(), or detach() it first"
        )


def check_no_overlap(leaf: Tensor) -> None:
    """Refuse to write into memory that several elements share."""
    if any(step == 0 and size > 1 for step, size in zip(leaf.stride(), leaf.shape, strict=True)):
        raise InvalidStateError(
            "an expanded tensor cannot be written in place, since its elements share memory: contiguous() it first"
        )


def fits(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Return whether a value of that shape can be broadcast to a target."""
    # Not by torch.broadcast_shapes: it takes 10 us of Python.
    if shape == target:
        return True
    lead = len(target) - len(shape)
    return lead >= 0 and all(n in (1, m) for n, m in zip(shape, target[lead:], strict=True))


def same_value(mine: NonTensorData, other: NonTensorData) -> bool:
    """Return whether two entries hold one object or equal strings, so that there is nothing to write."""
    return mine.data is other.data or (type(mine.data) is str and mine.data == other.data)


def check_rows_of_values(key: str, old: NonTensor, value: Any, index: Any) -> None:
    """Look whether values can be written at an index of an entry of values, and kept where that lies.

    Raises:
        BatchSizeError: another shape. UntrustedDataError: they cannot be stored.
    """
    part = value if isinstance(value, NonTensor) else NonTensorData(value)
    if isinstance(part, NonTensorStack):
        shape = old.batch_size if index is None else old[index].batch_size
        if not fits(part.batch_size, shape):
            raise BatchSizeError(
                f"cannot write values of shape {list(part.batch_size)} at an index of shape {list(shape)} "
                f"in entry {key!r}"
            )
    pool = old._pool if isinstance(old, (InlineStack, PackedStack)) else None
    handle = getattr(pool, "_handle", None) or getattr(pool, "handle", None)  # of a column, of what a header holds
    if handle is not None:
        handle.check_writable()
        with pickling(handle.trusted):
            check_value(part, (key,))


def planned_below(group: Any, value: Any, index: Any) -> Changes:
    """Plan a write into a whole nested TensorDict, or into its rows."""
    changes = Changes()
    if index is None:
        group._plan_in_place(changes, value, None, None)
        return changes
    made: list[tuple[Any, list[str]]] = []
    try:
        group._plan_rows(changes, index, value, made)
    except BaseException:
        take_back(made)
        raise
    return changes


def rehearse(fn: Callable[..., object], leaves: Sequence[Tensor], parts: Sequence[Any]) -> None:
    """Run once on empty tensors where dtypes differ, so that a refused dtype does not stop the run halfway."""
    if len(leaves) == 1 or (not parts and len({leaf.dtype for leaf in leaves}) == 1):
        return
    columns = [_kinds(p) for p in parts if isinstance(p, list)]
    kinds = zip([leaf.dtype for leaf in leaves], *columns, strict=True)
    seen: dict[tuple[Any, ...], int] = {kind: i for i, kind in enumerate(kinds)}
    if len(seen) < 2:
        return
    chosen = list(seen.values())
    # Of the same dtypes and numbers torch says the same again, and its functions of lists are not many.
    repeats = one_by_one(fn) is not fn and not traced()
    listed = [p if isinstance(p, list) else [p] * len(leaves) for p in parts] if repeats else []
    known = (fn, tuple(seen), *[_facts(column[i]) for i in chosen for column in (leaves, *listed)]) if repeats else ()
    if known in _REHEARSED:
        return
    empty = [torch.empty(0, dtype=leaves[i].dtype, device=leaves[i].device) for i in chosen]
    fn(empty, *[[_emptied(p[i]) for i in chosen] if isinstance(p, list) else p for p in parts])
    if repeats:
        if len(_REHEARSED) >= _MOST_REHEARSED:
            _REHEARSED.clear()
        _REHEARSED.add(known)


def _kinds(part: list[Any]) -> list[Any]:
    """Return what decides about the dtype of a result: the dtype of each tensor, and the type of each number."""
    if type(part[0]) in (int, float) and part.count(part[0]) == len(part):
        return [type(part[0])] * len(part)
    return [getattr(operand, "dtype", type(operand)) for operand in part]


def _facts(operand: Any) -> Any:
    """Return what else decides: whether a tensor has dimensions, and where it is; or the number."""
    return (operand.ndim > 0, operand.device.type) if isinstance(operand, Tensor) else operand


def _emptied(operand: Any) -> Any:
    return operand.new_empty(0) if isinstance(operand, Tensor) and operand.ndim else operand


def check_operands(leaves: Sequence[Tensor], operands: Sequence[Tensor]) -> None:
    """Refuse an operand that an in-place operation could not broadcast, before any leaf has changed."""
    for leaf, operand in zip(leaves, operands, strict=True):
        if not fits(operand.shape, leaf.shape):
            raise BatchSizeError(f"an operand of shape {list(operand.shape)} does not fit a leaf of {list(leaf.shape)}")


def flags_of_moved(td: Any, data: dict[str, Any]) -> int:
    """Return `READONLY` where entries that were computed from those of a read-only TensorDict share their memory."""
    if not td._state & READONLY:
        return 0
    for key, value in td._data.items():
        moved = data[key]
        if is_batched(value) and is_batched(moved) and value.layout is _DENSE and not traced():
            return READONLY if moved.untyped_storage()._cdata == value.untyped_storage()._cdata else 0
    return READONLY
