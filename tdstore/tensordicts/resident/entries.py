"""The tree inside an in-memory container: the primitives, and the walks that apply a function to every entry."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Parameter

from tdstore.arguments import tensor_for
from tdstore.container.core.container import GROUP, LEAF, VALUE, Container
from tdstore.container.core.dim_names import extend_names, names_below, names_moved, names_or_none
from tdstore.container.core.locks import BOUND, CONSOLIDATED, LOCKED, MAPPED, READONLY, SHARED
from tdstore.container.core.tensorclasses import Typed, unwrap
from tdstore.container.entries.nested_tensors import leaf_shape
from tdstore.container.entries.unbatched import UnbatchedTensor, is_batched
from tdstore.container.methods.apply import starts_with
from tdstore.container.storage.change_plan import Prepared, Undo
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack, assign
from tdstore.container.values.shapes import constant
from tdstore.container.varlen.nested_rows import row_of
from tdstore.errors import BatchSizeError, InvalidTypeError, KeyNotFoundError
from tdstore.index.index_terms import as_terms, torch_terms
from tdstore.index.rows import put
from tdstore.index.selection import checked_terms, index_shape
from tdstore.ops.block_reductions import Reduction
from tdstore.ops.rearrange import Padding
from tdstore.ops.reduce import Over
from tdstore.storekit.pages import HOLES, reserve
from tdstore.tensordicts.base import TensorDictBase
from tdstore.tensordicts.resident.write_checks import (
    check_copies,
    check_no_overlap,
    check_rows_of_values,
    fits,
    flags_of_moved,
    planned_below,
)
from tdstore.types import Names

VIEW_FLAGS = READONLY | MAPPED | SHARED
"""What a view of the entries inherits."""
_DENSE = torch.strided


def _lists_rows(index: Any) -> bool:
    return any(isinstance(term, Tensor) for term in as_terms(index))


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
        td: Self = object.__new__(cls)
        td._data = data
        td._batch_size = batch
        td._device = device
        td._names = names or None
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

    def _stored_groups(self) -> list[tuple[str, Any]]:
        return [(k, v) for k, v in self._data.items() if type(v) is not Tensor and self._kind(k) == GROUP]

    def _leaf_shape(self, key: str) -> torch.Size:
        return leaf_shape(self._data[key])

    def _resident(self) -> Self:
        return self

    def _groups(self) -> list[Any]:
        found = []
        for value in self._data.values():  # a comprehension is a call
            if type(value) is not Tensor and isinstance(value, Container):
                found.append(value)
        return found

    def _drop_binding(self) -> None:
        """Drop the binding, because the structure changes: the entries are no longer exactly the store's."""
        self._forget_facts()
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
        value = self._data[old]  # and no call until it has its new name: Ctrl-C comes at calls
        del self._data[old]
        self._data[new] = value

    def _reorder(self, keys: list[str]) -> None:
        self._forget_facts()
        data = self._data  # changed in place: views of the keys hold on to it
        for key in keys:
            value = data[key]
            del data[key]
            data[key] = value

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
            return Prepared(finish) if len(ready) > 1 else finish

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

        return Prepared(finish, begin)

    def _leaf_at(self, key: str, index: Any) -> Tensor:
        leaf: Tensor = self._data[key]
        try:
            return leaf[torch_terms(as_terms(index))]
        except (TypeError, ValueError, RuntimeError):
            index_shape(leaf.shape, index)  # raises the error that names the index
            raise

    def _write_leaf_at(self, key: str, index: Any, value: Any) -> None:
        if self._state & READONLY:
            self._check_writable()
        at = torch_terms(as_terms(index))
        leaf = self._data[key]
        try:
            value = self._writable_value(key, value, at)
            if HOLES:
                reserve(leaf, at)
            if leaf.is_nested:
                row_of(key, leaf, at).copy_(value)
            else:
                put(leaf, at, value)
        except (TypeError, ValueError):
            if not leaf.is_nested:
                index_shape(leaf.shape, at)  # raises the error that names the index
            raise

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
            value = tensor_for(value, f"entry {key!r}", old.dtype)
        if value.dtype != old.dtype or (value.device != old.device and value.ndim):
            value = value.to(old.device, old.dtype)
        if old.is_nested:
            old, index = row_of(key, old, index), ()
        if value.layout is not old.layout or value.is_meta or old.requires_grad:
            check_copies(((old, value),))
        if not value.ndim:
            if not old.is_contiguous() and old.layout is torch.strided and not _lists_rows(index):
                check_no_overlap(old[index])
            return value
        # Views are faster than index_shape; rows would be read, on a full tmpfs no better than to write them.
        target = index_shape(old.shape, index) if HOLES or _lists_rows(index) else old[index].shape
        while value.ndim > len(target) and value.shape[0] == 1:
            value = value[0]  # as torch does
        if not fits(value.shape, target):
            raise BatchSizeError(
                f"cannot write shape {list(value.shape)} at an index of shape {list(target)} in entry {key!r}"
            )
        return value

    def _resize_plain(self, batch_size: torch.Size) -> bool:
        if batch_size == self._batch_size and self._all_start_with(batch_size):
            return True
        nodes: list[ResidentTree] = []
        if not self._plan_resize(batch_size, nodes):
            return False
        for node in nodes:
            node._batch_size = batch_size
        return True

    def _all_start_with(self, batch_size: torch.Size) -> bool:
        """Check whether the batch sizes of all nested TensorDicts start with one that this TensorDict has."""
        n = len(batch_size)
        for value in self._data.values():
            if type(value) is not Tensor and isinstance(value, Container) and value.batch_size[:n] != batch_size:
                return False
        return True

    def _plan_resize(self, batch_size: torch.Size, nodes: list[ResidentTree]) -> bool:
        """Collect this and the nested TensorDicts to resize. False if anything needs a closer look."""
        if self._state or self._names is not None or self._binding is not None:
            return False
        nodes.append(self)
        n, same = len(batch_size), batch_size == self._batch_size
        for value in self._data.values():
            if type(value) is Tensor:
                if not same and (value.is_nested or not starts_with(value.shape, batch_size)):
                    return False
                continue
            group = value._tensordict if isinstance(value, Typed) else value
            if type(group) is not self._resident_class or (
                group._batch_size[:n] != batch_size and not group._plan_resize(batch_size, nodes)
            ):
                return False
        return True

    def _check_batch(self, new: torch.Size, path: tuple[str, ...]) -> None:
        for key, value in self._data.items():
            if type(value) is Tensor and not value.is_nested and starts_with(value.shape, new):
                continue
            if not isinstance(value, ResidentTree):
                super()._check_batch(new, path)
                return
            value._check_batch(new, (*path, key))

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        n = len(batch_size)
        if self._names is not None:
            leading = self._names[:n]
            names: Names = extend_names(leading, n)
            self._names = names if names and any(names) else None
        self._batch_size = batch_size
        for key, value in self._data.items():
            if type(value) is Tensor:
                continue
            if isinstance(value, Container):
                if value.batch_size[:n] != batch_size:
                    value._set_batch_size(batch_size)
            elif isinstance(value, (NonTensorData, UnbatchedTensor)):
                self._data[key] = value.for_batch(batch_size)
            elif isinstance(value, NonTensor) and value.ndim <= n:
                self._data[key] = self._coerce(key, value)

    def _clear_names(self) -> bool:
        """Clear the names of a tree that is no part of a store; False, with nothing done, for others."""
        plain = self._resident_class
        nodes: list[Any] = [self]
        for node in nodes:  # which grows
            if node._binding is not None or node._state & ~LOCKED:
                return False
            for value in node._data.values():
                if type(value) is plain:
                    nodes.append(value)
                elif type(value) is not Tensor and isinstance(value, Container):
                    if type(group := unwrap(value)) is not plain:
                        return False
                    nodes.append(group)
        for node in nodes:
            node._names = None
        return True

    def _set_names(self, names: Names) -> None:
        plain = self._resident_class
        waiting = [(self, names)]
        while waiting:
            node, names = waiting.pop()
            node._names = names_or_none(names)
            for value in node._data.values():
                if type(value) is plain:
                    waiting.append((value, names_below(names, value._names, len(value._batch_size))))
                elif type(value) is not Tensor and isinstance(value, Container):
                    group = unwrap(value)
                    group._set_names(names_below(names, group._names, group.batch_dims))

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
            elif isinstance(value, UnbatchedTensor) and not isinstance(fn, Padding):
                data[key] = value.for_batch(new)  # `pad` gave the same object as here: it may have another batch
            elif isinstance(value, NonTensor):
                data[key] = value.move(fn)
            else:
                below = self._fitting(value).batch_size
                wide = new if len(below) == n else torch.Size((*new, *below[n:]))
                data[key] = value._walkable()._move_tree(fn, wide, names_moved(names, value, n, len(wide)), len(below))
        return self._new(data, new, self._device, names, self._state and flags_of_moved(self, data))

    def _fan_out(
        self,
        fn: Callable[[Tensor], Sequence[Tensor]],
        batch_sizes: Sequence[torch.Size],
        names: Names,
        *,
        keep_lock: bool = False,
    ) -> tuple[Self, ...]:
        parts = self._fan_tree(fn, batch_sizes, names)
        flagged = self._state & (MAPPED | SHARED)
        if self._state:
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
        plain, n = self._resident_class, len(self._batch_size)
        for value in self._data.values():
            if type(value) is Tensor:
                columns.append(fn(value))
            elif type(value) is plain and len(value._batch_size) == n:
                columns.append(value._fan_tree(fn, batch_sizes, names))
            elif is_batched(value):
                columns.append(fn(value))
            elif isinstance(value, UnbatchedTensor) or (
                isinstance(value, NonTensorData) and value.batch_size == self._batch_size
            ):
                columns.append([value.for_batch(b) for b in batch_sizes])
            elif isinstance(value, NonTensor):
                columns.append(value.spread(fn))
            else:
                more = self._fitting(value).batch_size[n:]
                wide = [torch.Size((*b, *more)) for b in batch_sizes] if more else batch_sizes
                deeper = names_moved(names, value, n, len(wide[0])) if wide else None
                columns.append(value._walkable()._fan_tree(fn, wide, deeper))
        cls = type(self._new({}, self._batch_size, None, None))  # parts of parameters are no parameters
        state, device = self._state & READONLY, self._device
        parts: list[Self] = []
        for batch in batch_sizes:
            td: Self = object.__new__(cls)  # `_new`, without a call for each
            td._data = {}
            td._batch_size = batch
            td._device = device
            td._names = names
            td._state = state
            td._parents = td._undo = td._binding = None
            parts.append(td)
        for key, column in zip(self._data, columns, strict=True):
            for td, part in zip(parts, column, strict=True):
                td._data[key] = part
        return tuple(parts)  # a list would not get the class of a nested tensorclass again

    def _leaf_list(self) -> list[Tensor]:
        out: list[Tensor] = []
        self._collect(out)
        return out

    def _collect(self, out: list[Tensor], *, plain: bool = True) -> bool:
        """Add the leaves of this tree; whether all of them are its own, and none those of another kind of container.

        Args:
            plain: give the plain tensor inside of an unbatched one.
        """
        own, cls = True, self._resident_class
        for value in self._data.values():
            kind = type(value)
            if kind is Tensor:
                out.append(value)
            elif kind is cls:
                own &= value._collect(out, plain=plain)
            elif is_batched(value):
                out.append(value)
            elif isinstance(value, UnbatchedTensor):
                out.append(value.wrapped if plain else value)
            elif isinstance(value, Container):
                group = value._tensordict if isinstance(value, Typed) else value
                if isinstance(group, ResidentTree):
                    own &= group._collect(out, plain=plain)
                else:
                    out += value._leaf_list()
                    own = False
        return own

    def _walk_plain(self) -> Iterator[Tensor | None]:
        return walk_plain((self,))

    def _plain_leaves(self) -> list[Tensor] | None:
        return self._memory_leaves()

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
                    wide = torch.Size((*batch_size, *value.batch_size[len(self._batch_size) :]))
                    data[key] = one.move(partial(torch.reshape, shape=wide))
        return self._new(data, batch_size, self._device, names)


def walk_plain(tds: Iterable[Any]) -> Iterator[Tensor | None]:
    """Yield the leaves of containers as `_walk_plain` does."""
    waiting = [iter(tds)]
    while waiting:
        for value in waiting[-1]:
            if type(value) is Tensor or type(value) is Parameter:
                yield None if value.layout is not _DENSE or value.is_nested else value
            elif type(value) is not NonTensorData:
                group = value._tensordict if isinstance(value, Typed) else value
                if not isinstance(group, ResidentTree):
                    yield None
                    return
                waiting.append(iter(group._data.values()))
                break
        else:
            waiting.pop()
