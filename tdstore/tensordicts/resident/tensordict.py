"""TensorDict: a tree of live tensors.

The fast lanes come first in each method: the commonest call pays for no other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self, overload

import torch
from torch import Tensor

from tdstore.arguments import as_device
from tdstore.container.core.container import Container, EntrySource
from tdstore.container.core.dim_names import as_names
from tdstore.container.core.key_views import FirstKeys, IsLeaf, LeafKeys, NestedKeys, SortedKeys, signature_of
from tdstore.container.core.locks import LOCKED, READONLY
from tdstore.container.core.paths import entry_path
from tdstore.container.core.tensorclasses import Typed, unwrap
from tdstore.container.entries.unbatched import is_batched
from tdstore.container.methods.access import AS_SET, NO_DEFAULT, AccessMixin
from tdstore.container.methods.apply import starts_with
from tdstore.container.methods.update_source import UPDATE_OPTIONS
from tdstore.container.values.nontensor import NonTensor, NonTensorData
from tdstore.errors import ArgumentKindError, InvalidArgumentError, KeyNotFoundError
from tdstore.index.shapes import as_size
from tdstore.tensordicts.resident.entry_access import EntryTree
from tdstore.tensordicts.resident.write_checks import check_copies, copy_all, same_value
from tdstore.types import DeviceLike, Entry, IndexType, Names, NamesLike, NestedKey, SizeLike, is_key


class TensorDict(EntryTree):
    """A dictionary of tensors that share leading batch dimensions, nested at will.

    Args:
        source: a dict (nested dicts become nested TensorDicts) or a TensorDict.
        batch_size: the leading shape `[*B]` that all entries share; default `[]`.
        device: move entries there; default: leave each where it is.
        names: one name (or None) per batch dimension.
        lock: lock it once built.
        **kwargs: the entries, where there is no `source`.

    Raises:
        BatchSizeError: an entry does not start with the batch size. InvalidArgumentError: a source and keywords: a
            typing error.

    Example:
        >>> td = TensorDict({"obs": torch.zeros(3, 4), "next": {"obs": torch.ones(3, 4)}}, batch_size=[3])
        >>> td[1:]["next", "obs"].shape
        torch.Size([2, 4])
    """

    __slots__ = ()

    def __init__(
        self,
        source: EntrySource | None = None,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = None,
        names: NamesLike = None,
        non_blocking: bool | None = None,
        lock: bool = False,
        **kwargs: Any,
    ) -> None:
        batch = _NO_BATCH if batch_size is None else as_size(batch_size)
        self._batch_size = batch
        self._device = None if device is None else _as_device(device)
        self._names = None if names is None else as_names(names, len(batch))
        self._parents = self._undo = self._binding = None
        self._state = 0
        self._data = {}
        if source is not None:
            if kwargs:
                raise InvalidArgumentError(
                    f"a TensorDict is made of a mapping, or of keywords: {next(iter(kwargs))!r} is neither in "
                    "the mapping nor an argument (batch_size, device, names, non_blocking, lock)"
                )
            if type(source) is not dict or source:
                self._fill(source)
        elif kwargs:
            self._fill(kwargs)
        if lock:
            self.lock_()

    def _fill(self, source: Any) -> None:
        data, batch, n = self._data, self._batch_size, len(self._batch_size)
        rows = batch[0] if n else 0
        # Nothing is to be moved: no device is named, or the CPU is and the tensor lies there.
        free = self._device is None
        on_cpu = not free and self._device == _CPU
        try:
            items = source.items()
        except AttributeError:
            raise ArgumentKindError(
                f"a TensorDict is made from a dict or a TensorDict, not a {type(source).__name__}",
                hint="tdstore.from_any() converts tables and other objects",
            ) from None
        for key, value in items:
            if type(key) is not str:
                self.set(key, value)
            elif type(value) is Tensor and (free or (on_cpu and value.is_cpu)):
                # The commonest batch has one dimension; comparing slices of shapes takes ten times longer.
                try:
                    shape = value.shape
                except RuntimeError:  # a nested tensor has none: `_coerce` knows what to ask it
                    data[key] = self._coerce(key, value)
                    continue
                if (n == 1 and shape and shape[0] == rows) or not n or shape[:n] == batch:
                    data[key] = value
                else:
                    data[key] = self._coerce(key, value)
            elif type(value) is dict:
                data[key] = nested = self._from_mapping(value, batch, self._device, self._names)
                self._name_after(nested)
            else:
                group = isinstance(value, Container)
                data[key] = made = self._adopt(key, value, new=True) if group else self._coerce(key, value)
                self._name_after(made)

    @classmethod
    def _from_mapping(cls, source: Mapping[Any, Any], batch: Any, device: Any, names: Names) -> Self:
        td = cls._new({}, as_size(batch), device, names)
        td._fill(source)
        return td

    # -- fast access by key --------------------------------------------------------------------
    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> Entry: ...
    @overload
    def __getitem__(self, index: IndexType) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        if type(index) is str:
            try:
                found = self._data[index]
            except KeyError:
                raise self._missing(index) from None
            if type(found) is Tensor or not isinstance(found, NonTensor):
                return found
            return found.plain()
        if index is Ellipsis:
            return self
        if type(index) is not tuple:
            return super().__getitem__(index) if isinstance(index, str) else self._at(index)
        if index and type(index[0]) is str:
            value: Any = self
            try:
                for key in index:
                    value = value._data[key]
            except (KeyError, AttributeError, TypeError):
                return super().__getitem__(index)
            if type(value) is Tensor or not isinstance(value, NonTensor):
                return value
            return value.plain()
        return super().__getitem__(index)

    def select(self, *keys: NestedKey, inplace: bool = False, strict: bool = True, as_tensordict: bool = False) -> Self:
        if not inplace:
            source = self._data
            data: dict[str, Any] = {}
            for key in keys:
                if type(key) is not str or key not in source:
                    break
                data[key] = source[key]
            else:
                return self._new(data, self._batch_size, self._device, self._names, self._state & READONLY)
        return super().select(*keys, inplace=inplace, strict=strict, as_tensordict=as_tensordict)

    def exclude(self, *keys: NestedKey, inplace: bool = False) -> Self:
        if inplace:
            return super().exclude(*keys, inplace=inplace)
        data = self._data.copy()
        for key in keys:
            if type(key) is str:
                data.pop(key, None)
            elif type(key) is not tuple or set(map(type, key)) != {str} or key[0] in data:
                return super().exclude(*keys)
        return self._new(data, self._batch_size, self._device, self._names, self._state & READONLY)

    def get(self, key: NestedKey, default: object = AS_SET, **kwargs: object) -> Entry:
        if type(key) is str:
            value = self._data.get(key)
            if value is not None:
                return value if self._names is None else self._with_names(value)
        elif type(key) is tuple and not kwargs:
            node: Any = self
            try:
                for part in key[:-1]:
                    node = node._data[part]
                value = node._data[key[-1]]
            except (KeyError, AttributeError, TypeError, IndexError):
                return super().get(key, default)
            return value if node._names is None else node._with_names(value)
        return super().get(key, default, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        if type(index) is str:
            if (
                not self._state
                and type(value) is Tensor
                and (self._device is None or (value.is_cpu and self._device == _CPU))
            ):
                try:
                    shape, batch = value.shape, self._batch_size
                except RuntimeError:  # a nested tensor
                    self._data[index] = self._coerce(index, value)
                    return
                n = len(batch)
                if not n or (n == 1 and shape and shape[0] == batch[0]) or shape[:n] == batch:
                    self._data[index] = value
                    return
            self.set(index, value)
        elif isinstance(index, (str, tuple)) and is_key(index):
            self.set(index, value)
        else:
            self._set_rows(index, value)

    def update(
        self, input_dict_or_td: EntrySource | None = None, clone: bool = False, inplace: bool = False, **kwargs: Any
    ) -> Self:
        source = input_dict_or_td
        if kwargs:
            if source is None and UPDATE_OPTIONS.isdisjoint(kwargs):
                source = kwargs
            else:
                some = kwargs.keys() == {"keys_to_update"}
                source = self._some_of(source, kwargs["keys_to_update"]) if some else None
        plain = type(source) is dict or type(source) is TensorDict
        if not plain or not (self._copy_over(source) if inplace else not self._state and self._merge(source, clone)):
            super().update(input_dict_or_td, clone, inplace, **kwargs)
        return self

    def _some_of(self, source: Any, keys: Any) -> TensorDict | None:
        """Return those first-level entries of a TensorDict that some keys name; None for other keys or sources."""
        if type(source) is not TensorDict or not self._data or (type(keys) is not list and type(keys) is not tuple):
            return None
        entries = source._data
        some = {key: entries[key] for key in keys if type(key) is str and key in entries}
        whole = len(some) == len(keys) and len(some) > 0
        return source._new(some, source._batch_size, source._device, source._names) if whole else None

    def _copy_over(self, source: Any) -> bool:
        """Copy plain tensors into those that are there; False, with nothing done, if anything else is in the way."""
        pairs: list[tuple[Tensor, Tensor]] = []
        if self._state & READONLY or not (source if type(source) is dict else source._data):
            return False
        if self._state == LOCKED and self._copy_alike(source):
            return True
        if not self._pair_existing(source, pairs, False):
            return False
        copy_all(pairs)
        return True

    def _merge(self, source: Any, clone: bool) -> bool:
        """Take over plain tensors that fit; False, with nothing taken, if anything else is in the way."""
        into: list[tuple[dict[str, Any], dict[str, Any]]] = []
        if not self._mergeable(source, into):
            return False
        if clone:
            into = [(data, {key: value.clone() for key, value in accepted.items()}) for data, accepted in into]
        _take(into)
        return True

    def _mergeable(self, source: Any, into: list[tuple[dict[str, Any], dict[str, Any]]]) -> bool:
        device = self._device
        if device is not None and device != _CPU:
            return False
        batch, data = self._batch_size, self._data
        n = len(batch)
        rows = batch[0] if n else 0
        entries = source if type(source) is dict else source._data
        below = []
        for key, value in entries.items():
            if type(key) is not str:
                return False
            if type(value) is Tensor:
                try:
                    shape = value.shape
                except RuntimeError:  # a nested tensor
                    return False
                if n and not (n == 1 and shape and shape[0] == rows) and shape[:n] != batch:
                    return False
                if device is not None and not value.is_cpu:
                    return False
            else:
                mine: Any = data.get(key)
                if isinstance(mine, Typed) and type(mine) is type(value) and not mine._converts:
                    mine, value = mine._tensordict, value._tensordict
                if type(mine) is not TensorDict or mine._state or type(value) not in (TensorDict, dict):
                    return False
                below.append((mine, value))
        for mine, theirs in below:
            if not mine._mergeable(theirs, into):
                return False
        if not entries and not data and type(source) is TensorDict and source._batch_size != batch:
            return False
        into.append((data, {k: v for k, v in entries.items() if type(v) is Tensor} if below else entries))
        return True

    def _plan_update(self, changes: Any, source: Any, wanted: Any, how: Any) -> None:
        into: list[tuple[dict[str, Any], dict[str, Any]]] = []
        some = source if wanted is None else self._some_of(source, [w[0] if len(w) == 1 else w for w in wanted])
        plain = type(some) is dict or type(some) is TensorDict
        if plain and not (how.clone or how.inplace or self._state) and self._mergeable(some, into):
            changes.then(partial(_take, into))
        else:
            super()._plan_update(changes, source, wanted, how)

    def update_(
        self,
        input_dict_or_td: EntrySource | None = None,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[NestedKey] | None = None,
        **kwargs: Any,
    ) -> Self:
        if type(input_dict_or_td) is TensorDict and not kwargs:
            if self._state == LOCKED and keys_to_update is None and self._copy_alike(input_dict_or_td):
                return self
            some = input_dict_or_td if keys_to_update is None else self._some_of(input_dict_or_td, keys_to_update)
            pairs = self._pairs(some)
            if pairs is not None:
                copy_all(pairs)
                return self
        return super().update_(input_dict_or_td, clone, keys_to_update=keys_to_update, **kwargs)

    def _update_in_place(self, source: Any, at: tuple[Any] | None, keys_to_update: Any) -> Self:
        if keys_to_update is None:
            if at is None:
                if self._state == LOCKED and self._copy_alike(source):
                    return self
                if (pairs := self._pairs(source)) is not None:
                    copy_all(pairs)
                    return self
            elif len(at) == 1:
                if self._write_views(at[0], source):
                    return self
                if (same := self._same_at(at[0], source)) is not None:
                    self._write_same(*same)
                    return self
        return super()._update_in_place(source, at, keys_to_update)

    def _plan_in_place(self, changes: Any, source: Any, at: tuple[Any, ...] | None, keys_to_update: Any) -> None:
        if at is None and keys_to_update is None and (pairs := self._pairs(source)) is not None:
            check_copies(pairs)
            changes.then(partial(copy_all, pairs))
        else:
            super()._plan_in_place(changes, source, at, keys_to_update)

    def _pairs(self, source: Any) -> list[tuple[Tensor, Tensor]] | None:
        """Pair the tensors of another TensorDict, or of a dict, with those of this one that they are written into."""
        pairs: list[tuple[Tensor, Tensor]] = []
        loose = type(source) is dict  # whose keys may be paths
        if not (loose or type(source) is TensorDict) or self._state & READONLY:
            return None
        return pairs if self._pair_existing(source, pairs, not loose) else None

    def _pair_existing(self, source: Any, pairs: list[tuple[Tensor, Tensor]], strict: bool = True) -> bool:
        """Pair tensors as `_pairs`. False if anything else is there, or a key is not and `strict` is False.

        Raises:
            KeyNotFoundError: `strict`, and a key is not there.
        """
        data = self._data
        entries = source if type(source) is dict else source._data
        for key, value in entries.items():
            mine = data.get(key)
            if type(mine) is Tensor is type(value):
                if mine.is_nested or mine.shape != value.shape:
                    return False
                if mine is not value:
                    pairs.append((mine, value))
            elif mine is None:
                if not strict:
                    return False
                raise KeyNotFoundError(f"update_: key {key!r} not found in a TensorDict with keys {list(self._data)}")
            elif isinstance(mine, Typed) and type(mine) is type(value) and type(mine._tensordict) is TensorDict:
                if type(value._tensordict) is not TensorDict or mine._tensordict._state & READONLY:
                    return False
                if not mine._tensordict._pair_existing(value._tensordict, pairs, strict):
                    return False
            elif type(mine) is TensorDict and (type(value) is TensorDict or type(value) is dict):
                if mine._state & READONLY or not mine._pair_existing(value, pairs, strict):
                    return False
            elif is_batched(mine) and is_batched(value):
                if mine.is_nested or mine.shape != value.shape:
                    return False
                if mine is not value:
                    pairs.append((mine, value))
            elif not (type(mine) is NonTensorData and type(value) is NonTensorData and same_value(mine, value)):
                return False
        return True

    def _is_plain_tree(self) -> bool:
        if self._device is not None or self._names is not None or type(self) is not TensorDict:
            return False
        n = len(self._batch_size)
        for value in self._data.values():
            kind = type(value)
            if kind is not Tensor and not (
                kind is TensorDict and len(value._batch_size) == n and value._is_plain_tree()
            ):
                return False
        return True

    def _map_plain(self, fn: Callable[..., Any]) -> Any:
        batch = self._batch_size
        data: dict[str, Any] = {}
        dropped = False
        for key, value in self._data.items():
            if type(value) is not Tensor:
                made = value._map_plain(fn)
                if made is not None:
                    data[key] = made
                    continue
            else:
                made = fn(value)
                if type(made) is Tensor and not made.is_nested and starts_with(made.shape, batch):
                    data[key] = made
                    continue
            if made is None:
                dropped = True
            else:
                data[key] = self._coerce(key, made)
        if dropped and not data:
            return None
        return self._new(data, batch, None, None)

    @signature_of(AccessMixin.keys)
    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        if not (include_nested or leaves_only):
            return SortedKeys(self._data) if sort else FirstKeys(self._data)
        if include_nested and is_leaf is None:
            if not leaves_only:
                return NestedKeys(self, True, False, None, sort)
            out: list[Any] = []
            self._list_keys((), out, True, sort)
            return LeafKeys(out)
        return super().keys(include_nested, leaves_only, is_leaf, sort=sort)

    def _list_keys(self, prefix: tuple[str, ...], out: list[Any], leaves_only: bool, sort: bool) -> None:
        """List nested keys, a group after its entries; with `sort` in alphabetical order, a group before them."""
        data = self._data
        for key in sorted(data) if sort else data:
            value = data[key]
            path = (*prefix, key) if prefix else key
            if type(value) is Tensor:
                out.append(path)
            elif not isinstance(value, Container):
                if not leaves_only or isinstance(value, Tensor):
                    out.append(path)
            else:
                if sort and not leaves_only:
                    out.append(path)
                below: Any = unwrap(value)  # of a tensorclass
                full: Any = path if prefix else (key,)
                if isinstance(below, TensorDict):
                    below._list_keys(full, out, leaves_only, sort)
                else:  # a lazy stack
                    out += [(*full, *entry_path(k)) for k in below.keys(True, leaves_only, sort=sort)]
                if not (sort or leaves_only):
                    out.append(path)

    def _list_entries(self, prefix: tuple[str, ...], out: list[tuple[Any, Any]], leaves_only: bool) -> bool:
        """List keys and entries, nested TensorDicts before theirs. False if another container or names are there."""
        if self._names is not None and not leaves_only:
            return False
        for key, value in self._data.items():
            path = (*prefix, key) if prefix else key
            if type(value) is Tensor:
                out.append((path, value))
            elif not isinstance(value, Container):
                if not leaves_only or isinstance(value, Tensor):
                    out.append((path, value))
            else:
                if not leaves_only:
                    out.append((path, value))
                group = value._tensordict if isinstance(value, Typed) else value
                full: Any = path if prefix else (key,)
                if type(group) is not TensorDict or not group._list_entries(full, out, leaves_only):
                    return False
        return True

    def is_empty(self) -> bool:
        for value in self._data.values():
            if type(value) is Tensor:
                return False
        return super().is_empty()

    def non_tensor_items(self, include_nested: bool = False) -> Sequence[tuple[Any, NonTensor]]:
        if include_nested:
            return super().non_tensor_items(True)
        return tuple(
            (key, value)
            for key, value in self._data.items()
            if type(value) is not Tensor and isinstance(value, NonTensor) and not isinstance(value, Tensor)
        )

    def empty(
        self,
        recurse: bool = False,
        *,
        batch_size: SizeLike | None = None,
        device: DeviceLike | None = NO_DEFAULT,
        names: NamesLike = None,
    ) -> Self:
        if type(self) is not TensorDict or batch_size is not None or names is not None or device is not NO_DEFAULT:
            return super().empty(recurse, batch_size=batch_size, device=device, names=names)
        return self._emptied(recurse, self._device)

    def _emptied(self, recurse: bool, device: torch.device | None) -> Self:
        made = self._new({}, self._batch_size, device, self._names)
        if recurse:
            data = made._data
            for key, value in self._data.items():
                if type(value) is TensorDict:
                    data[key] = value._emptied(True, device)
                elif isinstance(value, NonTensor):
                    data[key] = made._coerce(key, value)
                elif not isinstance(value, Tensor):
                    data[key] = value.empty(recurse=True, device=device)
        return made

    def _data_with_names(self) -> dict[str, Any]:
        """Return the entries. Values get the names of the dimensions."""
        if self._names is not None:
            for value in self._data.values():
                if type(value) is not Tensor:
                    self._with_names(value)
        return self._data

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Collection[Entry]:
        if not (include_nested or leaves_only or sort):
            return self._data.values() if self._names is None else self._data_with_names().values()
        if include_nested and leaves_only and is_leaf is None and not sort:
            leaves: list[Tensor] = []
            if self._collect(leaves, plain=False):
                return leaves  # a lazy stack's would be those of each element
        if include_nested and not leaves_only and is_leaf is None and not sort:
            entries: list[tuple[Any, Any]] = []
            if self._list_entries((), entries, False):
                return [entry for _, entry in entries]
        return super().values(include_nested, leaves_only, is_leaf, sort=sort)

    @signature_of(AccessMixin.items)
    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> Any:
        if not (include_nested or leaves_only or sort):
            return self._data.items() if self._names is None else self._data_with_names().items()
        if leaves_only and not include_nested and is_leaf is None and not sort and self._names is None:
            return [(key, value) for key, value in self._data.items() if isinstance(value, Tensor)]
        if include_nested and is_leaf is None and not sort:
            entries: list[tuple[Any, Any]] = []
            if self._list_entries((), entries, leaves_only):
                return entries
        return super().items(include_nested, leaves_only, is_leaf, sort=sort)


Container._resident_class = NonTensor._container = TensorDict
ForkingPickler.register(TensorDict, TensorDict._to_process)
_NO_BATCH = torch.Size(())
_CPU = torch.device("cpu")


def _take(into: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for data, accepted in into:
        data.update(accepted)


def _as_device(device: Any) -> torch.device:
    if type(device) is torch.device and device == _CPU:
        return device
    found = as_device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
