"""Lazy stacks as lists of elements: facts, shapes and writes that need no plan for what is in the elements."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, Container, EntrySource
from tdstore.container.core.locks import LOCKED, READONLY
from tdstore.container.methods.update_source import as_key_list
from tdstore.container.storage.change_plan import Changes
from tdstore.container.values.nontensor import NonTensor
from tdstore.index.index_terms import as_row
from tdstore.index.shapes import as_dim, as_size, split_sizes, view_shape
from tdstore.index.tracing import traced
from tdstore.storekit.pages import HOLES
from tdstore.tensordicts.lazystack.ops import LazyOps
from tdstore.tensordicts.lazystack.parts import unshared
from tdstore.tensordicts.lazystack.reading import LazyTree
from tdstore.tensordicts.lazystack.writing import Parts
from tdstore.tensordicts.resident.entries import ResidentTree, walk_plain
from tdstore.tensordicts.resident.entry_access import EntryTree
from tdstore.tensordicts.resident.indexing import IndexedTree
from tdstore.tensordicts.resident.leafwise import LeafwiseTree, run_in_place
from tdstore.tensordicts.resident.write_checks import are_plain, copy_plain, have_same_shapes
from tdstore.types import IndexType, NestedKey, Number, SizeLike

_ALL = slice(None)


class ElementTree(LazyOps):
    """What follows from the list of elements, and rows that are whole elements.

    Rows take these ways where the first dimension is stacked and the elements are in memory, others the general ones.
    """

    __slots__ = ()

    # -- facts -------------------------------------------------------------------------------
    @property
    def batch_dims(self) -> int:
        """Number of batch dimensions."""
        return len(self._tds[0]._batch_size if self._tds else self._empty_batch_size) + 1

    ndim = batch_dims

    def dim(self) -> int:
        return len(self._tds[0]._batch_size if self._tds else self._empty_batch_size) + 1

    ndimension = dim

    def __len__(self) -> int:
        return self._batch_size[0] if self._stack_dim else len(self._tds)

    def _resize_plain(self, batch_size: torch.Size) -> bool:
        return batch_size == self._batch_size

    def _walk_plain(self) -> Iterator[Tensor | None]:
        return walk_plain(self._tds)

    def entry_class(self, key: NestedKey) -> type:
        return Tensor if type(key) is str and self._tensors(key) else super().entry_class(key)

    def non_tensor_items(self, include_nested: bool = False) -> Sequence[tuple[Any, NonTensor]]:
        first = self._tds[0] if self._tds and not include_nested else None
        if isinstance(first, ResidentTree) and not any(  # an entry of the stack is one of each element
            type(value) is not Tensor and isinstance(value, NonTensor) for value in first._data.values()
        ):
            return ()
        return super().non_tensor_items(include_nested)

    @property
    def is_locked(self) -> bool:
        """Whether the key set is frozen: the stack's own lock, or those of all elements."""
        if self._state & LOCKED:
            return True
        for td in self._tds:
            if not td.is_locked:
                return False
        return bool(self._tds)

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        if value:
            self.lock_()
        else:
            self.unlock_()

    def unlock_(self) -> Self:
        if self._state & LOCKED:
            return super().unlock_()
        if not self.is_locked:
            return self._return_unchanged()
        for td in self._tds:
            td.unlock_()
        self._offer("lock_")
        return self

    # -- shapes ------------------------------------------------------------------------------
    def _permuted(self, order: list[int]) -> Self:
        d = self._stack_dim
        inner = [dim - (dim > d) for dim in order if dim != d]
        tds = self._tds
        if inner != sorted(inner):
            tds = [td.permute(*inner) for td in tds]
            for td in tds:
                td._undo = None
        empty = [self._empty_batch_size[dim] for dim in inner] if not tds else ()
        made = self._of(tds, order.index(d), self._dim_name, empty)
        back = sorted(range(len(order)), key=order.__getitem__)
        made._undo = (weakref.ref(self), lambda v: v.permute(*back))
        return made.lock_() if self._state & LOCKED else made

    def unflatten(self, dim: int, unflattened_size: Sequence[int], *, inplace: bool = False) -> Self:
        old = self._batch_size
        at = as_dim(dim, len(old))
        if at != self._stack_dim or not self._tds:
            return super().unflatten(dim, unflattened_size, inplace=inplace)
        sizes = view_shape(old[at : at + 1], as_size(unflattened_size))
        made: Self = self._nest(list(self._tds), sizes, at)
        made._undo = (weakref.ref(self), lambda v: v.reshape(old))
        return self._apply_inplace_result(made.lock_() if self._state & LOCKED else made, "unflatten", inplace)

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        at = as_dim(dim, self.batch_dims)
        if at == self._stack_dim:
            return self._cut_at(split_sizes(len(self._tds), split_size))
        out, start = [], 0
        for size in split_sizes(self._batch_size[at], split_size):
            piece = self._at((*(_ALL,) * at, slice(start, start + size)))
            out.append(self._of(self._tds, self._stack_dim, self._dim_name) if piece is self else piece)
            start += size
        return tuple(out)

    def tensor_split(self, indices_or_sections: SizeLike | Tensor, dim: int = 0) -> tuple[Self, ...]:
        n = indices_or_sections
        if type(n) is not int or n < 1 or as_dim(dim, self.batch_dims) != self._stack_dim:
            return super().tensor_split(n, dim)
        least, more = divmod(len(self._tds), n)
        return self._cut_at([least + (i < more) for i in range(n)])

    def _cut_at(self, sizes: Sequence[int]) -> tuple[Self, ...]:
        """Cut the stack dimension into stacks of some elements each."""
        tds, d, name, inner = self._tds, self._stack_dim, self._dim_name, self._inner
        out, start = [], 0
        for size in sizes:
            out.append(self._of(tds[start : start + size], d, name, inner))
            start += size
        return tuple(out)

    # -- one entry ---------------------------------------------------------------------------
    def _tensors(self, key: NestedKey, *, to_write: bool = False) -> list[Tensor] | None:
        """List the plain tensors that the elements have in memory; None if one has something else, or is read-only."""
        parts = []
        plain = type(key) is str
        node: Any
        for node in self._tds:
            if not isinstance(node, EntryTree):
                return None
            if plain:
                part = node._data.get(key)  # type: ignore[arg-type]
            else:
                node, part = node._found(key)
            if type(part) is not Tensor or (to_write and node._state & READONLY):
                return None
            parts.append(part)
        return parts

    def _row_at(self, key: NestedKey, index: Any) -> Tensor | None:
        rows = self._element_rows(index)
        if rows is None or (parts := self._tensors(key)) is None:
            return None
        try:
            return parts[rows[0]] if type(index) is int else torch.stack([parts[row] for row in rows])
        except RuntimeError:  # told by the general way
            return None

    def set_(self, key: NestedKey, item: object, *, non_blocking: bool = False) -> Self:
        d = self._stack_dim
        if type(item) is Tensor and not item.is_nested and item.ndim > d and item.shape[d] == len(self._tds):
            mine, theirs = self._tensors(key, to_write=True), item.unbind(d)
            if mine is not None and have_same_shapes(mine, theirs) and are_plain(zip(mine, theirs, strict=True)):
                own = unshared(mine, item)
                copy_plain(mine, theirs if own is item else own.unbind(d))
                return self
        return super().set_(key, item)

    def set_at_(self, key: NestedKey, value: Any, index: IndexType, *, non_blocking: bool = False) -> Self:
        dense = type(value) is Tensor and not value.is_nested
        rows = self._element_rows(index) if dense else None
        parts = self._tensors(key, to_write=True) if dense and (rows or rows is None) else None
        if parts is not None and type(index) is not int:
            value = unshared(parts, value)
        if rows is None or parts is None or not self._copy_rows(rows, [parts[row] for row in rows], value, index):
            super().set_at_(key, value, index, non_blocking=non_blocking)
        return self

    def _copy_rows(self, rows: Sequence[int], mine: list[Tensor], value: Tensor, index: Any) -> bool:
        """Write rows of one entry. False, and nothing done, if anything needs a closer look."""
        one = type(index) is int
        if not one and (not value.ndim or len(value) != len(rows)):
            return False
        theirs = (value,) if one else value.unbind()
        for target, source in zip(mine, theirs, strict=True):
            if target.is_nested or target.shape != source.shape:
                return False
        if not are_plain(zip(mine, theirs, strict=True)):
            return False
        copy_plain(mine, theirs)
        return True

    # -- all leaves at once ------------------------------------------------------------------
    def _foreach_(self, fn: Callable[..., object], *operands: Any) -> Self:
        self._check_all_writable()
        columns = [self._operands(o, to_write=True) for o in operands]
        if not self._all_in_place(fn, operands, columns):
            for i, td in enumerate(self._tds):
                td._foreach_(fn, *[c[i] for c in columns])
        return self

    def _all_in_place(self, fn: Callable[..., object], operands: tuple[Any, ...], columns: list[list[Any]]) -> bool:
        """Call once for the leaves of all elements. False, and nothing done, unless all are locked trees in memory."""
        leaves: list[Tensor] = []
        parts: list[Any] = [[] for _ in columns]
        for i, td in enumerate(self._tds):
            facts = td._tree_facts() if isinstance(td, LeafwiseTree) else None
            if facts is None:
                return False
            for into, column in zip(parts, columns, strict=True):
                part = td._operand(column[i], facts.leaves, exact=False)
                if not isinstance(part, list):
                    return False
                into += part
            leaves += facts.leaves
        if leaves:
            run_in_place(fn, leaves, operands, parts)
        return True

    def _copy_whole(self, source: Any, keys: Any) -> bool:
        """Copy the tensors of another stack. False, and nothing done, if anything needs a closer look."""
        mine: list[Tensor] = []
        theirs: list[Tensor] = []
        if traced() or not isinstance(source, LazyTree) or source._stack_dim != self._stack_dim:
            return False  # torch.compile cannot tell what shares memory
        if len(source._tds) != len(self._tds) or not (
            self._pair_elements(source, mine, theirs)
            if keys is None
            else self._pair_entries(source, keys, mine, theirs)
        ):
            return False
        if not mine or not are_plain(zip(mine, theirs, strict=True)):
            return False
        copy_plain(mine, _clones(theirs) if _share(mine, theirs) else theirs)
        return True

    def _pair_elements(self, source: Any, mine: list[Tensor], theirs: list[Tensor]) -> bool:
        """Pair the tensors of the elements with those of another stack's. False if anything else is there."""
        plain = self._resident_class
        for td, part in zip(self._tds, source._tds, strict=True):
            if type(td) is not plain or type(part) is not plain or td._state & READONLY:
                return False
            facts, others = td._tree_facts(), part._tree_facts()
            if facts is None or facts.has_values or others is None or facts.keys != others.keys:
                pairs: list[tuple[Tensor, Tensor]] = []
                if not td._pair_existing(part, pairs, False):
                    return False
                mine += [pair[0] for pair in pairs]
                theirs += [pair[1] for pair in pairs]
            elif have_same_shapes(facts.leaves, others.leaves):
                mine += facts.leaves
                theirs += others.leaves
            else:
                return False
        return True

    def _pair_entries(self, source: Any, keys: list[Any], mine: list[Tensor], theirs: list[Tensor]) -> bool:
        """Pair tensors as `_pair_elements`, those of some keys."""
        for key in keys:
            targets, parts = self._tensors(key, to_write=True), source._tensors(key)
            if targets is None or parts is None or not have_same_shapes(targets, parts):
                return False
            mine += targets
            theirs += parts
        return True

    def _prepared(self, entries: Mapping[str, Any], at: tuple[Any, ...] | None = None) -> Callable[[], None]:
        if at is not None:
            own = {k: unshared(self._tensors(k) or (), v) if type(v) is Tensor else v for k, v in entries.items()}
            return super()._prepared(own, at)
        columns = {key: Parts(self._split(key, value)) for key, value in entries.items()}
        mine: list[Tensor] = []
        theirs: list[Any] = []
        for key, parts in columns.items():
            targets = self._tensors(key, to_write=True)
            if targets is None or set(map(type, parts)) != {Tensor} or not have_same_shapes(targets, parts):
                return super()._prepared(columns)
            mine += targets
            theirs += parts
        plain = are_plain(zip(mine, theirs, strict=True))
        return partial(copy_plain, mine, theirs) if plain else super()._prepared(columns)

    # -- rows --------------------------------------------------------------------------------
    def _element_rows(self, index: Any) -> Sequence[int] | None:
        """Return the numbers of the elements that an index takes whole; None for other indices, and repeated ones."""
        n, kind = len(self._tds), type(index)
        if self._stack_dim or not n or traced():
            return None
        if kind is int:
            return (index % n,) if -n <= index < n else None
        if index is Ellipsis:
            return range(n)
        if kind is slice:
            return range(n)[index] if index.step is None or index.step > 0 else None
        if kind is Tensor and index.ndim == 1 and index.layout is torch.strided:
            if index.dtype is torch.bool:
                index = index.nonzero().squeeze(1) if len(index) == n else index
            numbers = index.tolist() if index.dtype is torch.int64 else None
        else:
            numbers = index if kind is list and set(map(type, index)) == {int} else None
        if not numbers or min(numbers) < -n or max(numbers) >= n:
            return None
        rows = [number % n for number in numbers]
        return rows if len(set(rows)) == len(rows) else None

    def _set_rows(self, index: Any, value: Any) -> None:
        index = as_row(index)
        if not self._write_elements(index, value):
            super()._set_rows(index, value)

    def _update_in_place(self, source: Any, at: tuple[Any, ...] | None, keys_to_update: Any) -> Self:
        keys_to_update = None if keys_to_update is None else as_key_list(keys_to_update)
        if at is None:
            if self._copy_whole(source, keys_to_update):
                return self
        elif keys_to_update is None and len(at) == 1 and self._write_elements(at[0], source):
            return self
        return super()._update_in_place(source, at, keys_to_update)

    def update(
        self, input_dict_or_td: EntrySource | None = None, clone: bool = False, inplace: bool = False, **kwargs: Any
    ) -> Self:
        if inplace and not kwargs and self._copy_whole(input_dict_or_td, None):
            return self
        return super().update(input_dict_or_td, clone, inplace, **kwargs)

    def masked_fill_(self, mask: Tensor, value: EntrySource | Tensor | Number) -> Self:
        self._check_mask(mask)
        if self._write_elements(mask, value):
            return self
        if isinstance(value, (Container, Mapping)):
            return super().masked_fill_(mask, value)
        self._check_writable()
        n, d = len(self._tds), self._stack_dim
        changes = Changes()  # entries that some elements lack have no rows in the stack
        for td, part in zip(self._tds, mask.unbind(d) if d < mask.ndim else (mask,) * n, strict=True):
            if type(value) in (int, float, bool):
                td.masked_fill_(part, value)
            else:  # may fit some elements only
                td._plan_rows(changes, part, value, [])
        changes.run()
        return self

    def _write_elements(self, index: Any, value: Any) -> bool:
        """Write whole elements, or one place in each. False, and nothing done, if anything needs a closer look.

        The general way makes a plan for each element.
        """
        inner: Any = ...
        if type(index) is tuple and len(index) > 1 and type(index[0]) is slice:
            index, inner = index[0], index[1:]
        rows = self._element_rows(index)
        if not rows:
            return False
        tds = [self._tds[row] for row in rows]
        parts: Sequence[Any]
        if type(value) in (int, float, bool):
            return inner is Ellipsis and self._fill_elements(tds, value)
        if isinstance(value, LazyTree):
            parts = [value] if type(index) is int else value._tds if not value._stack_dim else []
        elif type(value) is self._resident_class:
            parts = [value] if type(index) is int else value.unbind(0) if value._batch_size else []
        else:
            return False
        views: list[Tensor] = []
        sources: list[Tensor] = []
        if len(parts) != len(tds):
            return False
        for td, part in zip(tds, parts, strict=True):
            if not isinstance(td, IndexedTree) or not td._views_to_write(inner, part, views, sources):
                return False
        copy_plain(views, _clones(sources) if len(tds) > 1 and _share(views, sources) else sources)
        return True

    def _fill_elements(self, tds: Sequence[Any], value: float) -> bool:
        """Fill all entries with a number. False, and nothing done, if anything needs a closer look."""
        leaves: list[Tensor] = []
        for td in () if HOLES else tds:
            if not isinstance(td, IndexedTree) or not td._takes_number(value, leaves):
                return False
        if not leaves or not _have_same_keys(self._tds):  # what only some elements have is no entry of the stack
            return False
        for leaf in leaves:
            leaf.fill_(value)
        return True


def _have_same_keys(tds: Sequence[Any]) -> bool:
    """Check whether TensorDicts have the same keys, nested ones too."""
    first, *others = [{key: td._kind(key) for key in td._first_keys()} for td in tds]
    groups = [key for key, kind in first.items() if kind == GROUP]
    return all(kinds == first for kinds in others) and all(_have_same_keys([td._raw(k) for td in tds]) for k in groups)


def _clones(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _share(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> bool:
    """Return whether a source lies in memory that is written, perhaps before it is read."""
    written = {target.untyped_storage()._cdata for target in targets}
    return any(source.untyped_storage()._cdata in written for source in sources)
