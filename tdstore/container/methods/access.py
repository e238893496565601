"""Reading entries by key: generic over the primitives of `Container`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from collections.abc import KeysView as Keys
from enum import Enum
from typing import Any, Literal, Self, overload

import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, LEAF, VALUE, Container
from tdstore.container.core.defaults import get_defaults_to_none
from tdstore.container.core.key_views import IsLeaf, ItemsView, KeysView, ValuesView, walk
from tdstore.container.core.paths import entry_path
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.errors import NoRowsError, NotAGroupError, NotAKeyError
from tdstore.types import Entry, IndexType, NestedKey, Path, is_key, path_text


class _NoDefault(Enum):  # torch.compile takes the members of an enum for constants
    NO_DEFAULT = "nothing was given"
    AS_SET = "None, or nothing"

    def __repr__(self) -> str:
        return self.name


NO_DEFAULT: Any = _NoDefault.NO_DEFAULT
AS_SET: Any = _NoDefault.AS_SET
"""The default of `get`: None, or as `set_get_defaults_to_none` has it."""


class AccessMixin(Container):
    """get, keys, items, ... and reading by `td[...]`."""

    __slots__ = ()

    # -- walking -----------------------------------------------------------------------------
    def _node(self, path: Path) -> Container | None:
        """Return the container at a path of groups, or None."""
        node: Container = self
        for part in path:
            if node._kind(part) != GROUP:
                return None
            node = node._raw(part)
        return node

    def _existing(self, key: Any) -> tuple[Any, str]:
        """Return the container that holds an entry, and its first-level key there."""
        path = entry_path(key)
        node: Any = self
        for i, part in enumerate(path[:-1]):
            kind = node._kind(part)
            if kind is None:
                raise self._missing(key)
            if kind != GROUP:
                raise NotAGroupError(f"key {path_text(path)}: {path_text(path[: i + 1])} is not a TensorDict")
            node = node._raw(part)
        if node._kind(path[-1]) is None:
            raise self._missing(key)
        return node, path[-1]

    # -- reading -----------------------------------------------------------------------------
    def get(self, key: NestedKey, default: object = AS_SET, **kwargs: object) -> Entry:
        """Return the entry, or `default`. Non-tensor values come wrapped; `td[key]` unwraps them.

        Args:
            key: a string, or a tuple of strings for a nested entry.
            default: what to return if there is no such entry. Without it, a missing entry is None or an error, as
                `tdstore.set_get_defaults_to_none` has it.
            kwargs: `as_list=` and similar ones, for entries of lazy stacks: see `LazyStackedTensorDict.get`.

        Returns:
            A tensor `[*batch_size, ...]`, a nested TensorDict or a wrapped value.

        Raises:
            KeyNotFoundError: there is no such entry, and missing entries are errors.
            NotAGroupError: a part of the key before the last is not a TensorDict, and there is no `default`.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3, 2), "next": {"a": torch.ones(3)}}, [3])
            >>> td.get(("next", "a"))
            tensor([1., 1., 1.])
            >>> td.get("b", "missing")
            'missing'
        """
        found = self._find(key, optional=default is not AS_SET and default is not NO_DEFAULT)
        if found is None:
            return self._default(key, default)
        node, last = found
        return node._raw_as(last, **kwargs) if kwargs else node._named(last)

    def _named(self, key: str) -> Any:
        """Return the entry of a key. A value gets the names of the dimensions."""
        return self._with_names(self._raw(key))

    def _with_names(self, entry: Any) -> Any:
        """Return an entry. A value gets the names of the dimensions."""
        if self._names is not None and isinstance(entry, (NonTensorData, NonTensorStack)):
            entry._names = self._names
        return entry

    def _default(self, key: NestedKey, default: Any) -> Any:
        if default is NO_DEFAULT or (default is AS_SET and not get_defaults_to_none()):
            raise self._missing(key)
        return None if default is AS_SET else default

    def _raw_as(self, key: str, **form: Any) -> Any:
        """Return the entry in the form that the caller requests of a lazy stack. Here there is only one form."""
        return self._raw(key)

    def _find(self, key: NestedKey, *, optional: bool = False) -> tuple[Any, str] | None:
        """Find the parent and the last key as `_existing` does, or return None if a part of the key is missing.

        `optional` counts what is below an entry that is no TensorDict as missing, too.
        """
        path = entry_path(key)
        node: Any = self
        for i, part in enumerate(path[:-1]):
            kind = node._kind(part)
            if kind is None:
                return None
            if kind != GROUP:
                if optional:
                    return None
                raise NotAGroupError(f"key {path_text(path)}: {path_text(path[: i + 1])} is not a TensorDict")
            node = node._raw(part)
        return None if node._kind(path[-1]) is None else (node, path[-1])

    def get_at(self, key: NestedKey, index: IndexType, default: object = AS_SET) -> Entry:
        """Return `td.get(key)[index]` without reading any more than that. If there is no such entry, return `default`.

        Args:
            key: a string, or a tuple of strings for a nested entry.
            index: an index into the batch dimensions and the feature dimensions behind them, as tensors take it.
            default: what to return if there is no such entry; see `get`.

        Returns:
            A tensor, a TensorDict or a wrapped value.

        Raises:
            KeyNotFoundError: there is no such entry, and missing entries are errors.
            NotAGroupError: a part of the key before the last is not a TensorDict.

        Example:
            >>> td = TensorDict({"a": torch.arange(6).reshape(3, 2)}, [3])
            >>> td.get_at("a", 1)
            tensor([2, 3])
        """
        row = self._row_at(key, index)
        if row is not None:
            return row
        place = self._find(key)
        if place is None:
            return self._default(key, default)
        node, last = place
        return node._leaf_at(last, index) if node._kind(last) == LEAF else node._raw(last)[index]

    def _row_at(self, key: NestedKey, index: Any) -> Tensor | None:
        """Return a row of a leaf that is a plain tensor in memory; None where it takes a closer look."""
        return None

    def get_non_tensor(self, key: NestedKey, default: object = NO_DEFAULT) -> Entry:
        """Return the unwrapped value of a non-tensor entry (or the entry itself), or `default`."""
        found = self.get(key, default)
        return found.plain() if isinstance(found, NonTensor) else found

    def entry_class(self, key: NestedKey) -> type:
        """Return the class of an entry without reading its data: `Tensor` for tensors that are stored or stacked.

        Args:
            key: a string, or a tuple of strings for a nested entry.

        Raises:
            KeyNotFoundError: there is no such entry.

        Example:
            >>> TensorDict({"a": torch.zeros(2)}, [2]).entry_class("a").__name__
            'Tensor'
        """
        node, last = self._existing(key)
        return node._leaf_class(last) if node._kind(last) == LEAF else type(node._raw(last))

    def _leaf_class(self, key: str) -> type:
        return Tensor

    def get_item_shape(self, key: NestedKey) -> torch.Size:
        """Return the shape of the entry without reading its data."""
        node, last = self._existing(key)
        if node._kind(last) == LEAF:
            shape: torch.Size = node._leaf_shape(last)
            return shape
        if node._kind(last) == VALUE and node._is_unbatched(last):
            return torch.Size(node._leaf_facts(last).shape)
        return torch.Size(node._value_size(last) if node._kind(last) == VALUE else node._raw(last).batch_size)

    @overload
    def keys(
        self,
        include_nested: Literal[False] = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Keys[str]: ...
    @overload
    def keys(
        self, include_nested: bool, leaves_only: bool = False, is_leaf: IsLeaf | None = None, *, sort: bool = False
    ) -> Collection[str | Path]: ...
    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        """Return a view of the keys, in insertion order. Nested keys are tuples.

        Args:
            include_nested: go into nested TensorDicts.
            leaves_only: tensors only; nested TensorDicts and non-tensor values are left out.
            is_leaf: classes to treat as leaves, such as `is_leaf_nontensor`.
            sort: alphabetical order.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, [3])
            >>> list(td.keys())
            ['a', 'n']
            >>> list(td.keys(True, True))
            ['a', ('n', 'b')]
        """
        return KeysView(self, include_nested, leaves_only, is_leaf, sort)

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Collection[Entry]:
        """Return a view of the entries, in the order of the keys.

        Args:
            include_nested: go into nested TensorDicts.
            leaves_only: tensors only; nested TensorDicts and non-tensor values are left out.
            is_leaf: classes to treat as leaves, such as `is_leaf_nontensor`.
            sort: alphabetical order of the keys.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3)}}, [3])
            >>> [leaf.sum().item() for leaf in td.values(True, True)]
            [0.0, 3.0]
        """
        return ValuesView(self, include_nested, leaves_only, is_leaf, sort)

    @overload
    def items(
        self,
        include_nested: Literal[False] = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Collection[tuple[str, Entry]]: ...
    @overload
    def items(
        self, include_nested: bool, leaves_only: bool = False, is_leaf: IsLeaf | None = None, *, sort: bool = False
    ) -> Collection[tuple[str | Path, Entry]]: ...
    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        """Return a view of `(key, entry)` pairs, in the order of the keys. Nested keys are tuples.

        Args:
            include_nested: go into nested TensorDicts.
            leaves_only: tensors only; nested TensorDicts and non-tensor values are left out.
            is_leaf: classes to treat as leaves, such as `is_leaf_nontensor`.
            sort: alphabetical order of the keys.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3)}}, [3])
            >>> [(key, leaf.sum().item()) for key, leaf in td.items(True, True)]
            [('a', 0.0), (('n', 'b'), 3.0)]
        """
        return ItemsView(self, include_nested, leaves_only, is_leaf, sort)

    @property
    def sorted_keys(self) -> list[str]:
        """First-level keys in alphabetical order."""
        return sorted(self._first_keys())

    def non_tensor_items(self, include_nested: bool = False) -> Sequence[tuple[Any, NonTensor]]:
        """Return `(key, wrapped value)` pairs of the non-tensor entries: a tuple, or a list with `include_nested`."""
        found = walk(self, include_nested, False, None, False, True)  # by kind: a stored leaf is not read for this
        items = [
            (key, node._raw(last))
            for key, node, last in found
            if node._kind(last) == VALUE and not node._is_unbatched(last)
        ]
        return items if include_nested else tuple(items)

    def is_empty(self) -> bool:
        """Return whether there is no leaf at any level."""
        return all(self._kind(k) == GROUP and self._raw(k).is_empty() for k in self._first_keys())

    # -- subscripts --------------------------------------------------------------------------
    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> Entry: ...
    @overload
    def __getitem__(self, index: IndexType) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        if not is_key(index):
            return self if type(index) is tuple and not index else self._at(index)
        node, last = self._existing(index)
        return node._unwrapped(last, node._raw(last))

    def __getitems__(self, indices: list[int]) -> Any:
        """Read a batch of rows at once, as `torch.utils.data.DataLoader` asks of a dataset."""
        return self._at(indices)._resident()

    def __contains__(self, key: object) -> bool:
        if not is_key(key):
            raise NotAKeyError("`in` takes a key (a string or a tuple of strings)")
        path = entry_path(key)  # type: ignore[arg-type]
        node = self._node(path[:-1])
        return node is not None and node._kind(path[-1]) is not None

    def __iter__(self) -> Iterator[Any]:
        if not self._batch_size:
            raise NoRowsError("iteration over a TensorDict without batch dimensions; use td.keys()")
        return iter(self.unbind(0))
