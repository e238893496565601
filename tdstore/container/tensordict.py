"""TensorDict: a tree of live tensors. The fast lanes come first in each method: the commonest call pays for no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tdstore.container.base import TensorDictBase
from tdstore.container.core import Container
from tdstore.container.home import HomeMixin
from tdstore.container.keysview import IsLeaf
from tdstore.container.locks import LOCKED
from tdstore.container.names import as_names, indexed_names
from tdstore.container.nontensor import NonTensor
from tdstore.container.tree import VIEW_FLAGS
from tdstore.indexing import as_rows, index_shape
from tdstore.keys import unravel
from tdstore.ops.base import Names
from tdstore.shapes import as_size
from tdstore.types import NestedKey


class TensorDict(HomeMixin):
    """A dictionary of tensors that share leading batch dimensions, nested at will.

    Args:
        source: a dict (nested dicts become nested TensorDicts) or a TensorDict.
        batch_size: the leading shape `[*B]` that all entries share; default `[]`.
        device: move entries there; default: leave each where it is.
        names: one name (or None) per batch dimension.
        lock: lock it once built.
        **kwargs: further entries.

    Raises:
        BatchSizeError: an entry does not start with the batch size.

    Example:
        >>> td = TensorDict({"obs": torch.zeros(3, 4), "next": {"obs": torch.ones(3, 4)}}, batch_size=[3])
        >>> td[1:]["next", "obs"].shape
        torch.Size([2, 4])
    """

    __slots__ = ()

    def __init__(
        self,
        source: Any = None,
        batch_size: Any = None,
        device: Any = None,
        names: Sequence[str | None] | None = None,
        non_blocking: bool | None = None,
        lock: bool = False,
        **kwargs: Any,
    ) -> None:
        if batch_size is None and isinstance(source, Container):
            batch_size = source.batch_size
        batch = self._batch_size = as_size(batch_size)
        self._device = None if device is None else _as_device(device)
        self._names = None if names is None else as_names(names, len(batch))
        self._parents = self._undo = self._home = None
        self._state = 0
        data = self._data = {}
        if source:
            self._fill(data, source)
        elif source is not None and not isinstance(source, Mapping):
            raise TypeError(f"a TensorDict is made from a dict or a TensorDict, not a {type(source).__name__}")
        if kwargs:
            self._fill(data, kwargs)
        if lock:
            self.lock_()

    def _fill(self, data: dict[str, Any], source: Any) -> None:
        batch, n = self._batch_size, len(self._batch_size)
        free = self._device is None
        try:
            items = source.items()
        except AttributeError:
            raise TypeError(
                f"a TensorDict is made from a dict or a TensorDict, not a {type(source).__name__}"
            ) from None
        for key, value in items:
            if type(value) is Tensor and free and type(key) is str and (not n or value.shape[:n] == batch):
                data[key] = value
            elif type(key) is str:
                data[key] = self._coerce(key, value)
            else:
                self.set(key, value)

    @classmethod
    def _from_mapping(
        cls, source: Mapping[Any, Any], batch: Any, device: Any, names: Names, loose: bool = False
    ) -> Self:
        td = cls._new({}, as_size(batch), device, names)
        for key, value in source.items():
            td.set(key, value)
        return td

    # -- fast access by key --------------------------------------------------------------------
    def __getitem__(self, index: Any) -> Any:
        if type(index) is str:
            try:
                value = self._data[index]
            except KeyError:
                raise self._missing(index) from None
            if type(value) is Tensor or not isinstance(value, NonTensor):
                return value
            return value.tolist()
        if type(index) is int or type(index) is slice:
            return self._at(index)
        if type(index) is tuple and index and type(index[0]) is str:
            node: Any = self
            try:
                for key in index[:-1]:
                    node = node._data[key]
                value = node._data[index[-1]]
            except (KeyError, AttributeError, TypeError):
                return super().__getitem__(index)
            if type(value) is Tensor or not isinstance(value, NonTensor):
                return value
            return value.tolist()
        return super().__getitem__(index)

    def get(self, key: NestedKey, default: Any = None, **kwargs: Any) -> Any:
        if type(key) is str:
            value = self._data.get(key)
            if value is not None:
                return value
        return super().get(key, default, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        if type(index) is str:
            self.set(index, value)
        else:
            super().__setitem__(index, value)

    def set(
        self, key: NestedKey, item: Any, inplace: bool = False, *, non_blocking: bool = False, **kwargs: Any
    ) -> Self:
        if not inplace and type(key) is str and not self._state:
            batch = self._batch_size
            if type(item) is Tensor and item.shape[: len(batch)] == batch and self._device in (None, item.device):
                self._data[key] = item
            else:
                self._data[key] = self._coerce(key, item)
            return self
        return super().set(key, item, inplace)

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        if not (include_nested or leaves_only or sort):
            return self._data.keys()
        if include_nested and leaves_only and is_leaf is None and not sort:
            out: list[Any] = []
            self._leaf_keys((), out)
            return _LeafKeys(self, out)
        return super().keys(include_nested, leaves_only, is_leaf, sort=sort)

    def _leaf_keys(self, prefix: tuple[str, ...], out: list[Any]) -> None:
        for key, value in self._data.items():
            if isinstance(value, Tensor):
                out.append((*prefix, key) if prefix else key)
            elif isinstance(value, TensorDict):
                value._leaf_keys((*prefix, key), out)
            elif isinstance(value, Container):
                out += [(*prefix, *unravel(k)) if prefix else (key, *unravel(k)) for k in value.keys(True, True)]

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        if not (include_nested or leaves_only or sort):
            return self._data.values()
        if include_nested and leaves_only and is_leaf is None and not sort:
            return self._leaf_list()
        return super().values(include_nested, leaves_only, is_leaf, sort=sort)

    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        if not (include_nested or leaves_only or sort):
            return self._data.items()
        if include_nested and leaves_only and is_leaf is None and not sort:
            out: list[Any] = []
            self._leaf_keys((), out)
            return list(zip(out, self._leaf_list(), strict=True))
        return super().items(include_nested, leaves_only, is_leaf, sort=sort)

    def _rows_of(self, index: Any) -> Tensor | None:
        if isinstance(index, (tuple, slice, int)) or index is None or index is Ellipsis:
            return None
        rows = as_rows(index, self._batch_size[0])
        return rows if isinstance(rows, Tensor) else None

    # -- batch index ---------------------------------------------------------------------------
    def _at(self, index: Any) -> Any:
        batch = self._batch_size
        kind = type(index)
        if batch:
            n = batch[0]
            if kind is int:
                if not -n <= index < n:
                    raise IndexError(f"index {index} is out of bounds for dimension 0 with size {n}")
                return self._view_at(index, batch[1:], self._names and self._names[1:], len(batch))
            if kind is slice:
                start, stop, step = index.indices(n)
                if step <= 0:
                    raise ValueError("slice step must be positive")
                if start == 0 and stop == n and step == 1:
                    return self
                new = torch.Size((max(0, -(-(stop - start) // step)), *batch[1:]))
                return self._view_at(index, new, self._names, len(batch))
            if kind is not tuple and index is not None and index is not Ellipsis and kind is not bool:
                rows = as_rows(index, n)
                if isinstance(rows, Tensor):
                    new = torch.Size((rows.shape[0], *batch[1:]))
                    return self._take(rows, new, self._names, len(batch))
        elif index is not None and index is not True and index is not Ellipsis and index not in ((), False):
            raise IndexError(f"a TensorDict without batch dimensions cannot be indexed with {index!r}")
        return self._at_any(index)

    def _view_at(self, index: Any, new: torch.Size, names: Names, n: int) -> Self:
        """For an int or slice: entries are views; the batch size is known."""
        data = {}
        for key, value in self._data.items():
            if type(value) is Tensor:
                data[key] = value[index]
            elif isinstance(value, TensorDict):
                below = value._batch_size
                wide = new if len(below) == n else torch.Size((*new, *below[n:]))
                value_names = value._names
                if value_names is not None and len(new) < n:
                    value_names = value_names[1:]
                data[key] = value._view_at(index, wide, value_names, n)
            else:
                data[key] = value[index]
        td = self._new(data, new, self._device, names and (names if any(names) else None))
        if self._state & VIEW_FLAGS:
            td._state = self._state & VIEW_FLAGS
            if self._state & LOCKED:
                td.lock_()
        return td

    def _take(self, rows: Tensor, new: torch.Size, names: Names, n: int) -> Self:
        """Rows of the first dimension, copied row by row (several times faster than elementwise indexing)."""
        data: dict[str, Any] = {}
        for key, value in self._data.items():
            if isinstance(value, Tensor):
                data[key] = _take_rows(value, rows)
            elif isinstance(value, TensorDict):
                below = value._batch_size
                wide = new if len(below) == n else torch.Size((*new, *below[n:]))
                data[key] = value._take(rows, wide, value._names, n)
            else:
                data[key] = value[rows]
        return self._new(data, new, self._device, names)

    def _at_any(self, index: Any) -> Any:
        batch = self._batch_size
        new = index_shape(batch, index)  # raises for too many terms, masks that do not fit, ...
        terms = index if isinstance(index, tuple) else (index,)
        if any(t is Ellipsis for t in terms):
            # An ellipsis must not reach into the feature dimensions of the leaves.
            used = sum(_dims_of(t) for t in terms if t is not Ellipsis)
            at = next(i for i, t in enumerate(terms) if t is Ellipsis)
            terms = (*terms[:at], *(slice(None),) * (len(batch) - used), *terms[at + 1 :])
        if all(type(t) is slice and t == slice(None) for t in terms):
            return self
        views = all(t is None or type(t) in (int, slice) for t in terms)
        names = indexed_names(self._names, index, len(batch))
        index = tuple(torch.as_tensor(t) if isinstance(t, range) else t for t in terms)
        n = len(batch)
        td = self._move_tree(lambda t: t[index], new, names, n)
        if views and self._state & VIEW_FLAGS:
            td._state = self._state & VIEW_FLAGS
            if self._state & LOCKED:
                td.lock_()
        return td


TensorDictBase._resident_class = TensorDict


class _LeafKeys(list[Any]):
    """Leaf keys, listed at once; membership asks the container."""

    __slots__ = ("_td",)

    def __init__(self, td: TensorDict, keys: list[Any]) -> None:
        super().__init__(keys)
        self._td = td

    def __contains__(self, key: object) -> bool:
        path = unravel(key)
        return list.__contains__(self, path[0] if len(path) == 1 else path)


def _as_device(device: Any) -> torch.device:
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _dims_of(term: Any) -> int:
    if term is None or isinstance(term, bool):
        return 0
    if getattr(term, "dtype", None) in (torch.bool, bool):
        return int(term.ndim)
    return 1


def _take_rows(leaf: Tensor, rows: Tensor) -> Tensor:
    if leaf.device != rows.device:
        rows = rows.to(leaf.device)
    try:
        return leaf.index_select(0, rows)
    except (NotImplementedError, RuntimeError):
        return leaf[rows]  # dtypes that index_select lacks
