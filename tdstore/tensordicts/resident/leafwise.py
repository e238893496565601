"""Leaf-wise maths and comparisons of in-memory containers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tdstore.arguments import as_operand
from tdstore.container.core.container import Container
from tdstore.container.core.locks import LOCKED
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.entries.unbatched import UnbatchedTensor
from tdstore.container.functions.broadcast import below, check_leaves, tensor_operands, uneven, widened
from tdstore.container.functions.compare import equal_positions, keys_compared
from tdstore.container.values.nontensor import NonTensor
from tdstore.errors import KeyNotFoundError
from tdstore.index.tracing import mapped, one_by_one, traced
from tdstore.ops.arithmetic import NUMBER_AS_TENSOR, InPlace, alike, as_tensors
from tdstore.storekit.pages import HOLES, reserve
from tdstore.tensordicts.resident.locked_facts import LockedTree
from tdstore.tensordicts.resident.write_checks import (
    are_plain,
    check_operands,
    copy_plain,
    have_same_shapes,
    rehearse,
)
from tdstore.types import path_text

_INTEGER_ERRORS = ("Autograd not support dtype", "isDifferentiableType")
"""What torch says of integers beside tensors that require gradients; the second is of torch 2.6."""


class LeafwiseTree(LockedTree):
    """Functions of lists of leaves: one call for all leaves of a tree."""

    __slots__ = ()

    def _foreach(self, fn: Callable[..., Sequence[Tensor]], *operands: Any) -> Self:
        keep_lock = self._state & LOCKED and not any(isinstance(o, Tensor) and o.ndim for o in operands)
        differ = len(operands) > 0 and not _is_number(operands) and uneven(self, operands)
        if differ and (wide := widened(self, operands)) is not None:
            result: Self = wide[0]._foreach(fn, *wide[1])
            return result.lock_() if keep_lock else result
        leaves: list[Tensor] = []
        if not self._collect(leaves):
            return self._mixed(lambda node, *parts: node._foreach(fn, *parts), operands)
        if not leaves:
            return self._with_leaves(iter(()))
        parts = [self._operand(o, leaves) for o in operands]
        if mapped():
            fn = one_by_one(fn)
        elif parts and not is_compiling() and fn in NUMBER_AS_TENSOR:
            parts[0] = as_tensors(parts[0], leaves)
        try:
            made = fn(leaves, *parts)
        except RuntimeError as error:
            if not (_without_rule(error, leaves) or any(said in str(error) for said in _INTEGER_ERRORS)):
                raise
            made = one_by_one(fn)(leaves, *parts)  # or integers beside parameters, as in a batch norm
        if differ:
            check_leaves(made, self._batch_size)
        td = self._with_leaves(iter(made))
        return td.lock_() if keep_lock else td

    def _foreach_(self, fn: Callable[..., object], *operands: Any) -> Self:
        facts = self._tree_facts() if self._state == LOCKED else None
        if facts is None:  # those are of trees without read-only groups
            self._check_all_writable()
        leaves: Any = [] if facts is None else facts.leaves
        if facts is None and (not self._collect(leaves) or self._trains_below(leaves)):
            self._mixed(lambda node, *parts: node._foreach_(fn, *parts), operands, exact=False)
        elif leaves:
            run_in_place(fn, leaves, operands, [self._operand(o, leaves, exact=False) for o in operands])
        return self

    def _copy_alike(self, source: Any) -> bool:
        """Copy all tensors of a locked tree with the same keys. False, and nothing done, if a closer look is needed."""
        if (mine := self._tree_facts()) is None or mine.has_values or not isinstance(source, LeafwiseTree):
            return False
        theirs = source._tree_facts()
        if theirs is None or theirs.keys != mine.keys or not have_same_shapes(mine.leaves, theirs.leaves):
            return False
        if not are_plain(zip(mine.leaves, theirs.leaves, strict=True)):
            return False
        copy_plain(mine.leaves, theirs.leaves)
        return True

    def _trains_below(self, leaves: Sequence[Tensor]) -> bool:
        """Return whether a nested TensorDict has its own way to write leaves that require gradients."""
        if not (torch.is_grad_enabled() and True in [leaf.requires_grad for leaf in leaves]):
            return False
        below = [group for group in map(unwrap, self._groups()) if isinstance(group, LeafwiseTree)]
        return any(type(g)._foreach_ is not LeafwiseTree._foreach_ or g._trains_below(leaves) for g in below)

    def _mixed(self, run: Callable[..., Any], operands: tuple[Any, ...], *, exact: bool = True) -> Self:
        """Level by level, where containers of another kind are below: each does it in its own way."""
        tensors = {k: v for k, v in self._data.items() if isinstance(v, Tensor)}  # unbatched ones too
        data = dict(self._data)
        names = set(self._tensors_only())
        batch = self._batch_size
        for o in operands:
            other_keys = set(o._tensors_only()) if isinstance(o, Container) else names  # type: ignore[attr-defined]
            if mismatched := names ^ other_keys if exact else names - other_keys:
                raise KeyNotFoundError(f"keys {sorted(mismatched)} are in one TensorDict and not in the other")
        parts = [o.select(*tensors) if isinstance(o, Container) else o for o in operands]
        data.update(run(self._new(tensors, self._batch_size, self._device, self._names), *parts).items())
        for key, value in self._data.items():
            if isinstance(value, Container):
                theirs = [o._raw(key) if isinstance(o, Container) else below(o, batch, value) for o in operands]
                data[key] = run(value, *theirs)
        td = self._new(data, self._batch_size, self._device, self._names)
        if self._state & LOCKED and not any(isinstance(o, Tensor) and o.ndim for o in operands):
            td.lock_()
        return td

    def _operand(self, other: Any, leaves: Sequence[Tensor], *, exact: bool = True) -> Any:
        """Return the operand of a leaf-wise function: a list with one per leaf, or a scalar.

        `exact=False` lets a TensorDict have entries that this one lacks: they are left alone.
        """
        kind = type(other)
        if kind is int or kind is float:
            return [other] * len(leaves)
        if isinstance(other, Container):
            source: Any = other._resident()
            theirs = source._tree_facts() if self._state == LOCKED else None
            if theirs is not None and (mine := self._tree_facts()) is not None and mine.keys == theirs.keys:
                return list(theirs.leaves)
            matched: list[Tensor] = []
            self._match(source, matched, (), exact)
            return matched
        if isinstance(other, Tensor) and other.ndim:
            return tensor_operands(other, self._batch_size, [leaf.ndim for leaf in leaves])
        if isinstance(other, Tensor):
            return [other] * len(leaves)
        made = as_operand(other)
        return self._operand(made, leaves) if isinstance(made, Tensor) else made

    def _match(self, other: Any, out: list[Tensor], path: tuple[str, ...], exact: bool) -> None:
        """List the leaves of `other` in the order of this tree's: matched by key, never by position."""
        theirs = other._data
        for key, value in self._data.items():
            if type(value) is Tensor and type(match := theirs.get(key)) is Tensor:
                out.append(match)
                continue
            if isinstance(value, NonTensor) and not isinstance(value, UnbatchedTensor):
                continue
            try:
                match = theirs[key]
            except KeyError:
                raise KeyNotFoundError(f"{path_text((*path, key))} is in one TensorDict and not in the other") from None
            if isinstance(value, Tensor):
                if not isinstance(match, Tensor):
                    raise KeyNotFoundError(f"entry {path_text((*path, key))} is a tensor on one side only")
                out.append(match.wrapped if isinstance(match, UnbatchedTensor) else match)
            elif isinstance(match, Container):
                unwrap(value)._resident()._match(unwrap(match)._resident(), out, (*path, key), exact)
            else:
                raise KeyNotFoundError(f"entry {path_text((*path, key))} is a TensorDict on one side only")
        if exact and len(theirs) != len(self._data):
            extra = next((k for k in theirs if k not in self._data), None)
            if extra is not None:
                raise KeyNotFoundError(f"{path_text((*path, extra))} is in one TensorDict and not in the other")

    def _compared(self, other: Any, op: Callable[..., Tensor]) -> Self:
        """Compare leaf-wise by `op` (eq or ne). Beside numbers and tensors, values are empty TensorDicts."""
        if uneven(self, (other,)) and (wide := widened(self, (other,))) is not None:
            result: Self = wide[0]._compared(wide[1][0], op)
            return result
        data: dict[str, Any] = {}
        nested, other = (True, other._resident()) if isinstance(other, Container) else (False, other)
        for key in keys_compared(self._data, other._data) if nested else self._data:
            value, theirs = self._data.get(key), other._data.get(key) if nested else other
            if type(value) is Tensor and type(theirs) is (Tensor if nested else int):
                data[key] = op(value, theirs)
            elif isinstance(value, Container) and (not nested or isinstance(theirs, Container)):
                value = value if isinstance(value, self._stack_class) else value._resident()  # elements may differ
                data[key] = value._compared(theirs if nested else below(theirs, self._batch_size, value), op)
            elif isinstance(value, UnbatchedTensor) and (isinstance(theirs, Tensor) or not nested):
                data[key] = value.compared(theirs, op)
            elif isinstance(value, UnbatchedTensor):
                same = value.same(theirs if isinstance(theirs, NonTensor) else None)
                data[key] = torch.full(self._batch_size, same == (op is torch.eq))
            elif isinstance(value, NonTensor) and not nested:
                data[key] = self._new({}, value.batch_size, None, None)
            elif value is None or isinstance(value, NonTensor) or isinstance(theirs, NonTensor):
                one, two = (value, theirs) if isinstance(value, NonTensor) else (theirs, value)
                same_at = equal_positions(one, two, self._batch_size)
                data[key] = same_at if op is torch.eq else ~same_at
            elif isinstance(theirs, Tensor) and not nested:
                data[key] = op(value, self._operand(theirs, [value])[0])
            else:
                data[key] = op(value, theirs)
        return self._new(data, self._batch_size, self._device, self._names)


def run_in_place(
    fn: Callable[..., object], leaves: Sequence[Tensor], operands: tuple[Any, ...], parts: list[Any]
) -> None:
    """Change tensors in place, all or none.

    Args:
        fn: takes the tensors and the parts.
        leaves: the tensors.
        operands: what the caller gave, a number or one of its kind.
        parts: for each operand a list with one part per leaf, or what fits all.
    """
    in_place = fn if isinstance(fn, InPlace) else None
    plain = not traced() and len(parts) > 0 and alike(leaves, parts, in_place is None or in_place.numbers)
    if not plain:
        for part in parts:
            if isinstance(part, list) and isinstance(part[0], Tensor):
                check_operands(leaves, part)
        rehearse(fn, leaves, parts)
    elif in_place is not None:
        fn = in_place.at_once
        if type(operands[-1]) is int or type(operands[-1]) is float:
            parts[-1] = operands[-1]  # by one number for all; less than by a list of it
    if HOLES:
        for leaf in leaves:
            reserve(leaf)
    if mapped():
        fn = one_by_one(fn)
    elif plain and fn in NUMBER_AS_TENSOR:
        parts[0] = as_tensors(parts[0], leaves, plain=plain)
    elif _is_number(operands) and not is_compiling() and one_by_one(fn) is not fn:
        parts[0] = operands[0]  # less than a list of it
    try:
        fn(leaves, *parts)
    except NotImplementedError as error:
        if not _without_rule(error, leaves):
            raise
        one_by_one(fn)(leaves, *parts)


def _without_rule(error: Exception, leaves: Sequence[Tensor]) -> bool:
    """Return whether torch refused a list, before it looked at any of it, for the nested tensors in it."""
    return isinstance(error, NotImplementedError) and any(leaf.is_nested for leaf in leaves)


def _is_number(operands: tuple[Any, ...]) -> bool:
    return len(operands) == 1 and (type(operands[0]) is int or type(operands[0]) is float)
