"""The tree inside an in-memory container: the primitives, and the walks that apply a function to every entry."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, LEAF, VALUE, Container
from tdstore.container.core.dim_names import extend_names, names_below, names_moved
from tdstore.container.core.locks import BOUND, CONSOLIDATED, LOCKED, MAPPED, READONLY, SHARED
from tdstore.container.entries.nested_tensors import leaf_shape
from tdstore.container.entries.unbatched import UnbatchedTensor, is_batched
from tdstore.container.functions.broadcast import below, check_leaves, tensor_operands, uneven, widened
from tdstore.container.functions.compare import equal_positions, keys_compared
from tdstore.container.storage.change_plan import Prepared, Undo
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack, assign
from tdstore.container.values.shapes import constant
from tdstore.container.varlen.nested_rows import row_of
from tdstore.errors import BatchSizeError, InvalidTypeError, KeyNotFoundError
from tdstore.index.index_terms import as_terms, torch_terms
from tdstore.index.rows import put
from tdstore.index.selection import checked_terms, index_shape
from tdstore.index.tracing import mapped, one_by_one
from tdstore.ops.reduce import Over
from tdstore.ops.reductions import Reduction
from tdstore.storekit.pages import HOLES, reserve
from tdstore.tensordicts.base import TensorDictBase
from tdstore.tensordicts.resident.write_checks import (
    check_copies,
    check_operands,
    check_rows_of_values,
    fits,
    planned_below,
    rehearse,
)
from tdstore.types import Names, path_text

VIEW_FLAGS = READONLY | MAPPED | SHARED
"""What a view of the entries inherits."""


_allocate: Any = object.__new__


class ResidentTree(TensorDictBase):
    """Entries in a plain dict; nested containers are entries too."""

    __slots__ = ("_binding", "_data", "_rooms")

    _data: dict[str, Any]
    _rooms: dict[str, Any]
    """Spare memory behind leaves, once this TensorDict has grown (`growth.Room`); not set before."""
    _binding: Any
    """`(handle, path)` when the entries are exactly those of a store."""

    @classmethod
    def _new(
        cls, data: dict[str, Any], batch: torch.Size, device: torch.device | None, names: Names, state: int = 0
    ) -> Self:
        """Build from checked parts, without `__init__`."""
        td: Self = _allocate(cls)
        td._data = data
        td._batch_size = batch
        td._device = device
        td._names = names
        td._state = state
        td._parents = td._undo = td._binding = None
        return td

    # -- primitives --------------------------------------------------------------------------
    def _first_keys(self) -> Iterable[str]:
        return self._data

    def _kind(self, key: str) -> str | None:
        value = self._data.get(key)
        if type(value) is Tensor:
            return LEAF
        if value is None:
            return None
        if isinstance(value, NonTensor):
            return VALUE
        return LEAF if isinstance(value, Tensor) else GROUP

    def _raw(self, key: str) -> Any:
        return self._data[key]

    def _leaf_shape(self, key: str) -> torch.Size:
        return leaf_shape(self._data[key])

    def _resident(self) -> Self:
        return self

    def _groups(self) -> list[Any]:
        return [v for v in self._data.values() if type(v) is not Tensor and isinstance(v, Container)]

    def _drop_binding(self) -> None:
        """Drop the binding, because the structure changes: the entries are no longer exactly the store's."""
        self._state &= ~(BOUND | MAPPED | SHARED | CONSOLIDATED)
        self._binding = None

    def _assign(self, entries: Mapping[str, Any]) -> None:
        if self._state:
            self._drop_binding()
        self._data.update(entries)

    def _drop(self, keys: Iterable[str]) -> None:
        if self._state:
            self._drop_binding()
        for key in list(keys):
            del self._data[key]

    def _rename(self, old: str, new: str) -> None:
        if self._state:
            self._drop_binding()
        self._data[new] = self._data.pop(old)

    def _reorder(self, keys: list[str]) -> None:
        entries = {key: self._data[key] for key in keys}
        self._data.clear()  # and filled again: views of the keys hold on to this dict
        self._data.update(entries)

    def _prepared(self, entries: Mapping[str, Any], at: tuple[Any, ...] | None = None) -> Callable[[], None]:
        if self._state & READONLY:
            self._check_writable()
        data = self._data
        if at is not None:
            at = checked_terms(at, self._batch_size, [data[k] for k in entries])
        ready = [(k, data[k], self._writable_value(k, v, at)) for k, v in entries.items() if at or v is not data[k]]
        if HOLES:
            for _, old, _ in ready:
                if isinstance(old, UnbatchedTensor):
                    reserve(old.wrapped)
                elif isinstance(old, Tensor):
                    reserve(old, at or ())

        def finish() -> None:
            for key, old, value in ready:
                if isinstance(old, UnbatchedTensor):
                    if value is not None:
                        old.wrapped.copy_(value)
                elif isinstance(old, Tensor):
                    if at is None:
                        old.copy_(value)
                    elif old.is_nested:
                        row_of(key, old, at).copy_(value)
                    else:
                        put(old, at, value)
                elif isinstance(old, Container):
                    value.finish()

        if all(isinstance(old, Tensor) for _, old, _ in ready):
            return finish

        def begin(back: list[Undo]) -> None:
            for key, old, value in ready:
                if isinstance(old, NonTensor) and not isinstance(old, (UnbatchedTensor, Tensor)):
                    whole = at is None and not isinstance(old, NonTensorStack)
                    index = ... if at is None else at
                    undo = old.way_back(index)
                    new: Any = value if undo is None or not whole else old.update(value)  # type: ignore[attr-defined]
                    data[key] = new if whole else assign(old, index, value)
                    if undo is not None:
                        back.append(undo)
                elif isinstance(old, Container):
                    value.begin(back)

        return Prepared(begin, finish)

    def _leaf_at(self, key: str, index: Any) -> Tensor:
        found: Tensor = self._data[key][torch_terms(as_terms(index))]
        return found

    def _write_leaf_at(self, key: str, index: Any, value: Any) -> None:
        if self._state & READONLY:
            self._check_writable()
        at = torch_terms(as_terms(index))
        value = self._writable_value(key, value, at)
        if HOLES:
            reserve(self._data[key], at)
        leaf = self._data[key]
        if leaf.is_nested:
            row_of(key, leaf, at).copy_(value)
        else:
            put(leaf, at, value)

    def _writable_value(self, key: str, value: Any, index: Any) -> Any:
        """Check before anything is written that `entry[index] = value` will work."""
        old = self._data[key]
        if isinstance(old, UnbatchedTensor):
            return old.tensor_to_copy(key, value, index is None)
        if isinstance(old, NonTensorStack) or (isinstance(old, NonTensorData) and index is not None):
            check_rows_of_values(key, old, value, index)
        if isinstance(old, Container):
            return planned_below(old, value, index)
        if index is None or not isinstance(old, Tensor):
            if index is None and isinstance(old, Tensor) and not old.is_nested:
                check_copies(((old, value),))
            return value
        if not isinstance(value, Tensor):
            value = torch.as_tensor(value, dtype=None if isinstance(value, (bool, int, float)) else old.dtype)
        if value.dtype != old.dtype or (value.device != old.device and value.ndim):
            value = value.to(old.device, old.dtype)
        if old.is_nested:
            old, index = row_of(key, old, index), ()
        if value.layout is not old.layout or value.is_meta or old.requires_grad:
            check_copies(((old, value),))
        if not value.ndim:
            return value
        # Faster than index_shape, but it reads rows: on a full tmpfs that is no better than to write them.
        target = index_shape(old.shape, index) if HOLES else old[index].shape
        while value.ndim > len(target) and value.shape[0] == 1:
            value = value[0]  # as torch does
        if not fits(value.shape, target):
            raise BatchSizeError(
                f"cannot write shape {list(value.shape)} at an index of shape {list(target)} in entry {key!r}"
            )
        return value

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        n = len(batch_size)
        if self._names is not None:
            leading = self._names[:n]
            names: Names = extend_names(leading, n)
            self._names = names if names and any(names) else None
        self._batch_size = batch_size
        for key, value in self._data.items():
            if isinstance(value, Container):
                if value.batch_size[:n] != batch_size:
                    value._set_batch_size(batch_size)
            elif isinstance(value, (NonTensorData, UnbatchedTensor)):
                self._data[key] = value.for_batch(batch_size)
            elif isinstance(value, NonTensor) and value.ndim <= n:
                self._data[key] = self._coerce(key, value)

    def _set_names(self, names: Names) -> None:
        self._names = names
        for value in self._groups():
            value._set_names(names_below(names, value._names, value.batch_dims))

    # -- trees -------------------------------------------------------------------------------
    def _move(
        self,
        fn: Callable[[Tensor], Tensor],
        batch_size: torch.Size,
        names: Names,
        undo: Callable[[Any], Any] | None = None,
        *,
        keep_lock: bool = True,
        views: bool = False,
    ) -> Self:
        td = self._move_tree(fn, batch_size, names, len(self._batch_size))
        if undo is not None:
            td._undo = (weakref.ref(self), undo)
        if self._state:
            td._state = self._state & READONLY
            if views and self._state & (MAPPED | SHARED):
                td._mark(self._state & VIEW_FLAGS)
            if keep_lock and self._state & LOCKED:
                td.lock_()
        return td

    def _mark(self, flags: int) -> None:
        """Take over what is true of the memory that the entries, nested ones too, are views of."""
        self._state |= flags
        for group in self._groups():
            if isinstance(group, ResidentTree):
                group._mark(flags)

    def _fitting(self, value: Any) -> Any:
        """Restore this batch size in a nested TensorDict that was assigned a smaller one directly."""
        if len(value.batch_size) < len(self._batch_size):
            value.batch_size = self._batch_size
        return value

    def _move_tree(self, fn: Callable[[Tensor], Tensor], new: torch.Size, names: Names, n: int) -> Self:
        data: dict[str, Any] = {}
        plain = self._resident_class
        for key, value in self._data.items():
            if type(value) is Tensor:
                data[key] = fn(value)
            elif type(value) is plain and len(value._batch_size) == n:
                data[key] = value._move_tree(fn, new, names, n)
            elif is_batched(value):
                data[key] = fn(value)
            elif isinstance(value, NonTensor):
                data[key] = value.move(fn)
            else:
                below = self._fitting(value).batch_size
                wide = new if len(below) == n else torch.Size((*new, *below[n:]))
                data[key] = value._walkable()._move_tree(fn, wide, names_moved(names, value, n, len(wide)), len(below))
        return self._new(data, new, self._device, names)

    def _fan_out(
        self,
        fn: Callable[[Tensor], Sequence[Tensor]],
        batch_sizes: Sequence[torch.Size],
        names: Names,
        *,
        keep_lock: bool = False,
    ) -> tuple[Self, ...]:
        parts = self._fan_tree(fn, batch_sizes, names)
        if not self._state:
            return parts
        flagged = self._state & (MAPPED | SHARED)
        for part in parts:
            if flagged:
                part._mark(self._state & VIEW_FLAGS)
            if (keep_lock or flagged) and self._state & LOCKED:
                part.lock_()
        return parts

    def _fan_tree(
        self, fn: Callable[[Tensor], Sequence[Tensor]], batch_sizes: Sequence[torch.Size], names: Names
    ) -> tuple[Self, ...]:
        columns: list[Sequence[Any]] = []
        for value in self._data.values():
            if type(value) is Tensor or is_batched(value):
                columns.append(fn(value))
            elif type(value) is self._resident_class and len(value._batch_size) == len(self._batch_size):
                columns.append(value._fan_tree(fn, batch_sizes, names))
            elif isinstance(value, UnbatchedTensor):
                columns.append([value.for_batch(b) for b in batch_sizes])
            elif isinstance(value, NonTensor):
                columns.append(value.spread(fn))
            else:
                more = self._fitting(value).batch_size[len(self._batch_size) :]
                wide = [torch.Size((*b, *more)) for b in batch_sizes] if more else batch_sizes
                deeper = names_moved(names, value, len(self._batch_size), len(wide[0])) if wide else None
                columns.append(value._walkable()._fan_tree(fn, wide, deeper))
        keys = tuple(self._data)
        state, device, new = self._state & READONLY, self._device, self._new
        if not columns:
            return tuple(new({}, b, device, names, state) for b in batch_sizes)
        return tuple(
            new(dict(zip(keys, row)), b, device, names, state)  # noqa: B905  # a column for each key
            for b, row in zip(batch_sizes, zip(*columns, strict=True), strict=True)
        )

    def _leaf_list(self) -> list[Tensor]:
        out: list[Tensor] = []
        self._collect(out)
        return out

    def _collect(self, out: list[Tensor], *, plain: bool = True) -> bool:
        """Add the leaves of this tree; whether all of them are its own, and none those of another kind of container.

        Args:
            plain: give the plain tensor inside of an unbatched one.
        """
        own = True
        for value in self._data.values():
            if type(value) is Tensor or is_batched(value):
                out.append(value)
            elif isinstance(value, UnbatchedTensor):
                out.append(value.wrapped if plain else value)
            elif isinstance(value, ResidentTree):
                own &= value._collect(out, plain=plain)
            elif isinstance(value, Container):
                out += value._leaf_list()
                own = False
        return own

    def _with_leaves(self, leaves: Iterator[Tensor]) -> Self:
        """Build the same tree around other leaves, in the order of `_leaf_list`."""
        data: dict[str, Any] = {}
        for key, value in self._data.items():
            if type(value) is Tensor or is_batched(value):
                data[key] = next(leaves)
            elif type(value) is self._resident_class:
                data[key] = value._with_leaves(leaves)
            elif isinstance(value, NonTensor):
                data[key] = value.holding(next(leaves)) if isinstance(value, UnbatchedTensor) else value.own_copy()
            else:
                data[key] = value._walkable()._with_leaves(leaves)
        return self._new(data, self._batch_size, self._device, self._names)

    def _foreach(self, fn: Callable[..., Sequence[Tensor]], *operands: Any) -> Self:
        keep_lock = self._state & LOCKED and not any(isinstance(o, Tensor) and o.ndim for o in operands)
        if (differ := uneven(self, operands)) and (wide := widened(self, operands)) is not None:
            result: Self = wide[0]._foreach(fn, *wide[1])
            return result.lock_() if keep_lock else result
        leaves: list[Tensor] = []
        if not self._collect(leaves):
            return self._mixed(lambda node, *parts: node._foreach(fn, *parts), operands)
        if not leaves:
            return self._with_leaves(iter(()))
        if mapped():
            fn = one_by_one(fn)
        parts = [self._operand(o, leaves) for o in operands]
        try:
            made = fn(leaves, *parts)
        except RuntimeError as error:
            if "Autograd not support dtype" not in str(error):
                raise
            made = one_by_one(fn)(leaves, *parts)  # integers beside parameters, as in a batch norm
        if differ:
            check_leaves(made, self._batch_size)
        td = self._with_leaves(iter(made))
        return td.lock_() if keep_lock else td

    def _foreach_(self, fn: Callable[..., object], *operands: Any) -> Self:
        if self._state & READONLY:
            self._check_writable()
        leaves: list[Tensor] = []
        if not self._collect(leaves) or self._trains_below(leaves):
            self._mixed(lambda node, *parts: node._foreach_(fn, *parts), operands, exact=False)
        elif leaves:
            parts = [self._operand(o, leaves, exact=False) for o in operands]
            for part in parts:
                if isinstance(part, list) and isinstance(part[0], Tensor):
                    check_operands(leaves, part)
            rehearse(fn, leaves, parts)
            if HOLES:
                for leaf in leaves:
                    reserve(leaf)
            if mapped():
                fn = one_by_one(fn)
            fn(leaves, *parts)
        return self

    def _trains_below(self, leaves: list[Tensor]) -> bool:
        """Return whether a nested TensorDict has its own way to write leaves that require gradients."""
        if not (torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)):
            return False
        below = [group for group in self._groups() if isinstance(group, ResidentTree)]
        return any(type(g)._foreach_ is not ResidentTree._foreach_ or g._trains_below(leaves) for g in below)

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

    def _in_rows(self) -> Self:
        if self._collect([]):
            return self
        return self._new(
            {k: v._resident()._in_rows() if isinstance(v, Container) else v for k, v in self._data.items()},
            self._batch_size,
            self._device,
            self._names,
        )

    def _map_leaves(self, *args: Any, inplace: bool = False, **kwargs: Any) -> Self:
        if HOLES and inplace:  # the function may write into what it is given
            for leaf in self._leaf_list():
                reserve(leaf)
        made: Self = super()._map_leaves(*args, inplace=inplace, **kwargs)
        return made

    def _operand(self, other: Any, leaves: list[Tensor], *, exact: bool = True) -> Any:
        """Return the operand of a leaf-wise function: a list with one per leaf, or a scalar.

        `exact=False` lets a TensorDict have entries that this one lacks: they are left alone.
        """
        kind = type(other)
        if kind is int or kind is float:
            return [other] * len(leaves)
        if isinstance(other, Container):
            matched: list[Tensor] = []
            self._match(other._resident(), matched, (), exact)
            return matched
        if isinstance(other, Tensor) and other.ndim:
            return tensor_operands(other, self._batch_size, [leaf.ndim for leaf in leaves])
        if isinstance(other, Tensor):
            return [other] * len(leaves)
        if isinstance(other, (list, tuple, dict, str)):
            raise InvalidTypeError(f"a TensorDict cannot be combined with a {type(other).__name__}")
        return other

    def _match(self, other: Any, out: list[Tensor], path: tuple[str, ...], exact: bool) -> None:
        """List the leaves of `other` in the order of this tree's: matched by key, never by position."""
        theirs = other._data
        for key, value in self._data.items():
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
                value._resident()._match(match._resident(), out, (*path, key), exact)
            else:
                raise KeyNotFoundError(f"entry {path_text((*path, key))} is a TensorDict on one side only")
        if exact and len(theirs) != len(self._data):
            extra = next((k for k in theirs if k not in self._data), None)
            if extra is not None:
                raise KeyNotFoundError(f"{path_text((*path, extra))} is in one TensorDict and not in the other")

    def _reduced(self, kind: Reduction, over: Over, keepdim: bool, batch_size: torch.Size, names: Names) -> Self:
        def stack(value: Any, batch: torch.Size, deeper: Names) -> Any:
            if not over.features:
                return value._reduced(kind, over, keepdim, batch, deeper)
            n = len(value._batch_size)  # the features below are those right of its own batch
            return value._reduced(kind, Over(None, True, n), keepdim, value._batch_size, extend_names(names, n))

        return self._over_leaves_of(lambda leaf: kind.whole(*over.of(leaf), keepdim), over, batch_size, names, stack)

    def _with_keys(self, rename: Callable[[str], str]) -> Self:
        """Rename the keys of all entries, level by level."""
        data: dict[str, Any] = {}
        for key, value in self._data.items():
            new = rename(key)
            if not isinstance(new, str):
                raise InvalidTypeError(f"key_transform gave {new!r} for key {key!r}; keys are strings")
            if new in data:
                raise KeyNotFoundError(f"key_transform gives two entries the key {new!r}")
            data[new] = value._resident()._with_keys(rename) if isinstance(value, Container) else value
        return self._new(data, self._batch_size, self._device, self._names)

    def _over_leaves_of(
        self,
        fn: Callable[[Tensor], Tensor],
        over: Over,
        batch_size: torch.Size,
        names: Names,
        stack: Callable[[Any, torch.Size, Names], Any] | None = None,
    ) -> Self:
        """Build a tree of `fn(leaf)` with the batch of a reduction. `stack` handles lazy stacks.

        Values that differ along what is reduced go with the rows.
        """
        data: dict[str, Any] = {}
        for key, value in self._data.items():
            if type(value) is Tensor or is_batched(value):
                data[key] = fn(value)
            elif isinstance(value, Container):
                further = value._batch_size[len(self._batch_size) :]
                wide = batch_size if over.dims is None else torch.Size((*batch_size, *further))
                deeper = names_moved(names, value if over.dims else None, len(self._batch_size), len(wide))
                if stack is not None and isinstance(value, self._stack_class):
                    data[key] = stack(value, wide, deeper)
                elif stack is not None and over.features and further:
                    data[key] = stack(value._resident(), wide, deeper)
                else:
                    data[key] = value._resident()._over_leaves_of(fn, over, wide, deeper, stack)
            elif isinstance(value, NonTensor) and (made := value.for_batch(batch_size)) is not None:
                data[key] = made
            elif over.features:
                data[key] = value
            elif over.dims is not None and isinstance(value, NonTensor):
                at = tuple(0 if d in over.dims else slice(None) for d in range(len(self._batch_size)))
                if (one := constant(value, at)) is not None:
                    data[key] = one.move(lambda t: t.reshape(batch_size))
        return self._new(data, batch_size, self._device, names)

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
