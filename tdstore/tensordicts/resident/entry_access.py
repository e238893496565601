"""Entries by their keys, in memory: the short ways to set, fill and write one."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tdstore.arguments import NO_NUMBER, number_like
from tdstore.container.core.locks import READONLY
from tdstore.container.core.paths import entry_path
from tdstore.index.index_terms import as_row
from tdstore.index.rows import FEW, ONE_THREAD, check_rows, put_rows
from tdstore.index.tracing import traced
from tdstore.storekit.pages import HOLES, reserve
from tdstore.tensordicts.resident.indexing import IndexedTree
from tdstore.tensordicts.resident.write_checks import copy_all, is_unexpanded
from tdstore.types import IndexType, NestedKey, Number

_CPU = torch.device("cpu")
_SIMPLE = frozenset({int, slice, Tensor})


class EntryTree(IndexedTree):
    """set, set_, set_at_, fill_, and rows of one entry."""

    __slots__ = ()

    def set(
        self, key: NestedKey, item: Any, inplace: bool = False, *, non_blocking: bool = False, **kwargs: object
    ) -> Self:
        if inplace:
            if type(item) is Tensor and not self._state & READONLY:
                old = self._data.get(key) if type(key) is str else self._plain_leaf(key)
                if type(old) is Tensor and old.shape == item.shape and not old.requires_grad:
                    if HOLES:
                        reserve(old)
                    old.copy_(item)
                    return self
            return super().set(key, item, inplace)
        node: Any = self
        plain = self._resident_class
        full = key
        if type(key) is tuple:
            for part in key[:-1]:
                node = node._data.get(part) if type(part) is str else None
                if type(node) is not plain:
                    return super().set(key, item)
            key = key[-1] if key else key
        if type(key) is not str or node._state:
            return super().set(full, item)
        if type(item) is Tensor and (node._device is None or (item.is_cpu and node._device == _CPU)):
            try:
                shape, batch = item.shape, node._batch_size
            except RuntimeError:  # a nested tensor
                node._data[key] = node._coerce(key, item)
                return self
            n = len(batch)
            if not n or (n == 1 and shape and shape[0] == batch[0]) or shape[:n] == batch:
                node._data[key] = item
                return self
        if item is self:
            raise self._refuse_itself(entry_path(full))
        made = node._adopt(key, item) if type(item) is plain else node._coerce(key, item)
        node._data[key] = made
        if type(made) is not Tensor:
            node._name_after(made)
        return self

    def set_(self, key: NestedKey, item: Any, *, non_blocking: bool = False) -> Self:
        mine = self._plain_leaf(key) if type(item) is Tensor and not item.is_nested else None
        if mine is None or mine.shape != item.shape:
            group: Any = self._data.get(key) if type(key) is str and type(item) is not Tensor else None
            pairs = group._pairs(item) if isinstance(group, EntryTree) else None  # type: ignore[attr-defined]
            if pairs is None:
                return super().set_(key, item)
            copy_all(pairs)
            return self
        if HOLES:
            reserve(mine)
        mine.copy_(item)
        return self

    def set_at_(self, key: NestedKey, value: Any, index: IndexType, *, non_blocking: bool = False) -> Self:
        index = as_row(index)
        kind = type(index)
        mine = self._plain_leaf(key) if type(value) is Tensor and kind in _SIMPLE and not HOLES else None
        if mine is None or not (_put_at if kind is Tensor else _put_part)(mine, index, value):
            super().set_at_(key, value, index)
        return self

    def _plain_leaf(self, key: NestedKey) -> Tensor | None:
        """Return the tensor at a key, if it and all on the way to it are plain and can be written."""
        node, mine = (self, self._data.get(key)) if type(key) is str else self._found(key)
        if type(mine) is not Tensor or node._state & READONLY or mine.requires_grad or mine.is_nested:
            return None
        try:
            return mine if is_unexpanded(mine) else None
        except RuntimeError:  # what torch.vmap hands out does not tell
            return None

    def _found(self, key: NestedKey) -> tuple[Any, Tensor | None]:
        """Return the TensorDict that holds a key, and the tensor there; None unless all on the way is plain."""
        node: Any = self
        if type(key) is tuple and key:
            for part in key[:-1]:
                node = node._data.get(part) if type(part) is str else None
                if type(node) is not self._resident_class:
                    return None, None
            key = key[-1]
        leaf = node._data.get(key) if type(key) is str else None
        return node, leaf if type(leaf) is Tensor else None

    def fill_(self, key: NestedKey, value: Number) -> Self:
        mine = self._plain_leaf(key)
        if mine is None or type(value) not in (int, float, bool):
            return super().fill_(key, value)
        if HOLES:
            reserve(mine)
        try:
            mine.fill_(value)
        except NO_NUMBER:
            number_like(value, f"entry {key!r}", mine)  # raises the error that names the entry
            raise
        return self

    def is_non_tensor(self, key: NestedKey) -> bool:
        if type(key) is str and type(self._data.get(key)) is Tensor:
            return False
        return super().is_non_tensor(key)

    def _row_at(self, key: NestedKey, index: Any) -> Tensor | None:
        index = as_row(index)
        leaf = self._found(key)[1] if type(index) is int or type(index) is Tensor else None
        if leaf is None or leaf.is_nested:
            return None
        try:
            return leaf[index]
        except (IndexError, ValueError, RuntimeError):  # told by the general way
            return None


def _put_at(leaf: Tensor, rows: Any, value: Tensor) -> bool:
    """Write `leaf[rows] = value`. False, and nothing done, if anything needs a closer look.

    Args:
        leaf: of class Tensor as the others, not expanded.
        rows: unchecked.
        value: what is written.
    """
    if rows.dtype is not torch.int64 or rows.ndim != 1 or not (rows.is_cpu and leaf.is_cpu) or is_compiling():
        return False
    if rows.numel() <= FEW and _put_few(leaf, rows, value):
        return True
    shape = leaf.shape
    if (
        not shape
        or value.dtype is not leaf.dtype
        or value.shape != rows.shape + shape[1:]
        or value.layout is not torch.strided
        or not value.is_cpu
        or traced()
    ):
        return False
    put_rows(leaf, check_rows(rows, shape[0]), value)
    return True


def _put_few(leaf: Tensor, rows: Tensor, value: Tensor) -> bool:
    """Write at few rows by one call.

    It looks at dtypes, shapes and whether memory is shared before it writes, and at the rows as it writes.
    """
    try:
        if not (value.is_contiguous() and leaf.is_contiguous()) or value.numel() > ONE_THREAD:
            return False  # the first, or torch could not tell whether the value lies in memory that is written
        numbers = rows.tolist()
        if not numbers or min(numbers) < 0 or max(numbers) >= leaf.size(0):
            return False
        leaf.index_copy_(0, rows, value)  # in order
    except (RuntimeError, IndexError):
        return False
    return True


def _put_part(leaf: Tensor, index: Any, value: Tensor) -> bool:
    """Write `leaf[index] = value` at an int or a slice. False, and nothing done, if anything needs a closer look."""
    try:
        leaf[index] = value
    except (IndexError, ValueError, RuntimeError):
        return False  # told by the general way
    return True
