"""Writing into a lazy stack: values are taken apart along the stack dimension, and each element gets its part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from tdstore.arguments import as_list, check_batch_dims, check_int, tensor_for
from tdstore.container.core.container import GROUP, LEAF, VALUE, Container, _as_tensor, _as_value, _fit_value
from tdstore.container.core.dim_names import as_names, extend_names
from tdstore.container.core.locks import LOCKED, READONLY, THROUGH
from tdstore.container.core.paths import entry_path
from tdstore.container.core.primitives import EntrySource
from tdstore.container.entries.unbatched import is_batched
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.container.methods.update_source import UPDATE_OPTIONS, check_may_resize, pairs_of, source_of
from tdstore.container.storage.change_plan import Changes, together
from tdstore.container.storage.growth import Growth, check_owner, step_of
from tdstore.container.storage.open_and_save import over
from tdstore.container.values.nontensor import NonTensor, NonTensorData
from tdstore.errors import BatchSizeError, KeyExistsError, UnsupportedError
from tdstore.index.index_terms import as_terms, spelled_out
from tdstore.index.rows import put
from tdstore.index.selection import index_shape
from tdstore.keys import key_text
from tdstore.store import Cap
from tdstore.tensordicts.base import TensorDictBase
from tdstore.tensordicts.lazystack.parts import (
    are_entries,
    flat_part,
    lifted,
    may_share,
    one_value,
    own_copies,
    part_at,
    reshapes,
    result_ndim,
    row_parts,
    size_without,
    unshared,
    write_values,
)
from tdstore.tensordicts.lazystack.reading import LazyTree, check_elements, check_same_names
from tdstore.tensordicts.lazystack.routing import pick, positions, route, unravel
from tdstore.tensordicts.resident.entries import ResidentTree
from tdstore.types import Entry, Names, NestedKey, Number, Path, path_text

_ALL = slice(None)


class Parts(list[Any]):
    """A value taken apart: one part for each element."""

    __slots__ = ()


class LazyWrites(LazyTree):
    """The primitives that write, and what is written with whole elements."""

    __slots__ = ()

    # -- taking values apart -----------------------------------------------------------------
    def _split(self, key: Any, value: Any) -> list[Any]:
        """Split a value into one part for each element."""
        tds, d = self._tds, self._stack_dim
        if isinstance(value, Parts):
            return value
        if is_batched(value):
            return self._split_tensor(key, value)
        if isinstance(value, Container):
            return self._split_container(key, value)
        if isinstance(value, Mapping):
            parts: list[dict[Any, Any]] = [{} for _ in tds]
            for name, entry in value.items():
                for part, piece in zip(parts, self._split(name, entry), strict=True):
                    part[name] = piece
            return list(parts)
        if isinstance(value, NonTensorData):
            return [NonTensorData(value.data, td._batch_size) for td in tds]
        if isinstance(value, NonTensor):
            return _fit_value(key, value, self._batch_size).spread(lambda t: t.unbind(d))
        if isinstance(value, (bool, int, float, complex, np.ndarray, np.generic, list, tuple)):
            made = _as_tensor(value, None)
            if made is not None:
                return self._split_tensor(key, made)
            if isinstance(value, (list, tuple)) and len(value) == len(tds):
                flat = not self._stack_dim and not any(isinstance(part, (list, tuple)) for part in value)
                if self._ragged or flat or are_entries(value):
                    return list(value)
            return self._split(key, _as_value(key, value, self._batch_size))
        return [NonTensorData(value, td._batch_size) for td in tds]

    def _split_tensor(self, key: Any, value: Tensor) -> list[Any]:
        batch, d = self._batch_size, self._stack_dim
        if value.is_nested:
            if d or value.size(0) != len(self._tds):
                raise BatchSizeError(f"a nested tensor of {value.size(0)} tensors for {key!r} in {list(batch)}")
            return list(value.unbind())
        fits = value.ndim >= len(batch) and all(b in (-1, n) for b, n in zip(batch, value.shape, strict=False))
        if not fits:
            raise BatchSizeError(
                f"batch dimension mismatch: entry {key!r} has shape {list(value.shape)}, "
                f"which does not start with the batch size {list(batch)}"
            )
        return list(value.unbind(d))

    def _split_container(self, key: Any, value: Any) -> list[Any]:
        return list(self._with_batch_of(key, value).unbind(self._stack_dim))

    def _coerce(self, key: str, value: Any) -> Any:
        parts = self._split(key, value)
        return Parts(td._coerce(key, part) for td, part in zip(self._tds, parts, strict=True))

    def _coerce_existing(self, key: str, item: Any, *, whole: bool = False) -> Any:
        """Coerce a part for each element, to its entry's own kind and shape."""
        if type(item) is Tensor and self._alike(key, item):
            return Parts(unshared([td._data[key] for td in self._tds], item).unbind(self._stack_dim))
        if self._kind(key) == LEAF and isinstance(item, (bool, int, float, complex)):
            item = tensor_for(item, f"entry {key!r}")
        if isinstance(item, Tensor) and not item.is_nested and self._kind(key) == LEAF:
            shape, batch = self._leaf_shape(key), self._batch_size
            if item.shape[: len(batch)] != batch and -1 not in shape:
                if whole:
                    raise BatchSizeError(
                        f"batch dimension mismatch: shape {list(item.shape)} for entry {key!r} "
                        f"in a batch of {list(batch)}",
                        hint="to set every row alike: td[:] = value, or fill_",
                    )
                try:
                    item = item.expand(shape)
                except RuntimeError:
                    raise BatchSizeError(
                        f"cannot write shape {list(item.shape)} into entry {key!r} of shape {list(shape)} in place"
                    ) from None
        parts = [one_value(td, key, part) for td, part in zip(self._tds, self._split(key, item), strict=True)]
        return Parts(td._coerce_existing(key, part, whole=whole) for td, part in zip(self._tds, parts, strict=True))

    def _wrapped(self, key: str, value: Any) -> Any:
        return Parts(td._wrapped(key, part) for td, part in zip(self._tds, value, strict=True))

    # -- primitives --------------------------------------------------------------------------
    def _check_writable(self) -> None:
        for td in self._tds:
            td._check_writable()

    def _free(self, what: str) -> None:
        """Refuse before anything has changed: a locked element would."""
        if self._state & LOCKED or any(td.is_locked for td in self._tds):
            raise self._refuse_locked(what)

    def _assign(self, entries: Mapping[str, Any]) -> None:
        changes = Changes()
        self._plan_set(changes, entries)
        changes.run()

    def _plan_set(self, changes: Any, entries: Mapping[str, Any]) -> None:
        self._free(f"set {', '.join(map(repr, entries))}")
        columns = {k: v if isinstance(v, Parts) else self._coerce(k, v) for k, v in entries.items()}
        for i, td in enumerate(self._tds):
            changes.set(td, {key: parts[i] for key, parts in columns.items()})

    def _drop(self, keys: Iterable[str]) -> None:
        self._free("remove entries")
        gone = list(keys)
        for td in self._tds:
            td._drop(gone)

    def _rename(self, old: str, new: str) -> None:
        self._free(f"rename {old!r}")
        for td in self._tds:
            td._rename(old, new)

    def _reorder(self, keys: list[str]) -> None:
        for td in self._tds:
            td._reorder([*keys, *(k for k in td._first_keys() if k not in keys)])

    def _prepared(self, entries: Mapping[str, Any], at: tuple[Any, ...] | None = None) -> Callable[[], None]:
        self._check_writable()
        if at is None:
            columns = {k: self._split(k, v) for k, v in entries.items()}
            ready = [td._prepared({k: parts[i] for k, parts in columns.items()}) for i, td in enumerate(self._tds)]
            return together(ready)
        ndim = len(self._inner) + 1
        terms = spelled_out(at, ndim)
        found = route(terms, self._stack_dim, len(self._tds), ndim)
        below = {k: v for k, v in entries.items() if self._kind(k) == GROUP}
        ready = [self._raw(k)._prepared(dict(pairs_of(v)), terms) for k, v in below.items()]
        flat = {k: v for k, v in entries.items() if k not in below}
        if found is None:
            ready += self._scatter(flat, terms)
        else:
            wide = result_ndim(self._inner, found)
            rows = [found.rows] if isinstance(found.rows, int) else found.rows.flatten().tolist()
            for number, row in enumerate(rows):
                td = self._tds[row]
                ready.append(
                    td._prepared({k: part_at(td, k, v, found, number, wide) for k, v in flat.items()}, found.rest)
                )
        return together(ready)

    def _scatter(self, entries: Mapping[str, Any], terms: tuple[Any, ...]) -> list[Callable[[], None]]:
        """Prepare writes at positions that no route leads to."""
        self._even("this index")
        places = positions(self._batch_size, terms)
        numbers, inner = unravel(places.flatten(), self._batch_size, self._stack_dim)
        ready = []
        for number in numbers.unique().tolist():
            mine = (numbers == number).nonzero().flatten()
            td = self._tds[number]
            at = tuple(i[mine] for i in inner)
            element_parts = {k: flat_part(td, k, v, places.shape, mine, bool(at)) for k, v in entries.items()}
            ready.append(td._prepared(element_parts, at))
        return ready

    def _write_leaf_at(self, key: str, index: Any, value: Any) -> None:
        self._check_writable()
        shape = self._leaf_shape(key)
        terms = spelled_out(as_terms(index), len(shape))
        found = self._leaf_route(key, terms)
        if found is None:
            whole = self._raw(key)
            value = tensor_for(value, f"entry {key!r}", whole.dtype)
            put(whole, terms, value.to(whole.dtype))
            self._write({key: whole})
            return
        tensor = None if isinstance(value, (bool, int, float, complex)) else tensor_for(value, f"entry {key!r}")
        inner = torch.Size((*shape[: self._stack_dim], *shape[self._stack_dim + 1 :]))
        wide = result_ndim(inner, found)
        rows = [found.rows] if isinstance(found.rows, int) else found.rows.flatten().tolist()
        block = () if isinstance(found.rows, int) else found.rows.shape
        for number, row in enumerate(rows):
            if tensor is not None:
                value = lifted(pick(tensor, found.place, block, number, wide), found, wide - len(block))
            self._tds[row]._write_leaf_at(key, found.rest, value)

    def set(self, key: NestedKey, item: object, inplace: bool = False, **kwargs: Any) -> Self:
        if type(key) is str and type(item) is Tensor and not item.is_nested and not self._ragged:
            if not inplace:
                self._free(f"set {key!r}")
            if not inplace or self._alike(key, item):
                item = unshared([td._data[key] for td in self._tds], item) if inplace else item
                for td, part in zip(self._tds, self._split_tensor(key, item), strict=True):
                    if isinstance(td, ResidentTree) and not (inplace or td._state) and td._device is None:
                        td._data[key] = part
                    else:
                        td.set(key, part, inplace)
                return self
        super().set(key, item, inplace, **kwargs)
        if isinstance(item, Container):
            if len(entry_path(key)) == 1:
                self._name_after(item)
            elif item._names is not None and not any(self.names) and len(item._names) >= self.ndim:
                self._set_names(as_names(item._names[: self.ndim], self.ndim))
        return self

    def set_(self, key: NestedKey, item: object, *, non_blocking: bool = False) -> Self:
        if type(key) is str and type(item) is Tensor and self._alike(key, item):
            return self.set(key, item, True)
        return super().set_(key, item)

    def _alike(self, key: str, item: Tensor) -> bool:
        """Return whether all elements hold a tensor in memory that has the shape of its part."""
        d = self._stack_dim
        shape = torch.Size((*item.shape[:d], *item.shape[d + 1 :]))
        for td in self._tds:
            old = td._data.get(key) if isinstance(td, ResidentTree) and not td._state & READONLY else None
            if type(old) is not Tensor or old.shape != shape:
                return False
        return item.ndim > d and item.shape[d] == len(self._tds)

    # -- rows --------------------------------------------------------------------------------
    def _set_rows(self, index: Any, value: Any) -> None:
        if type(index) is int and not self._stack_dim and isinstance(value, Container):
            td = self._at(index)
            values = any(value._kind(key) == VALUE for key in value._first_keys())
            if value._batch_size == td._batch_size and not values:
                td._set_rows(_ALL if td._batch_size else ..., value)
                return
        super()._set_rows(index, value)

    def _plan_rows(self, changes: Any, index: Any, value: Any, made: list[tuple[Any, list[str]]]) -> None:
        ndim = len(self._inner) + 1
        terms = spelled_out(as_terms(index), ndim)
        found = route(terms, self._stack_dim, len(self._tds), ndim)
        single = not isinstance(value, (Container, Mapping, Tensor)) and self._ragged
        if found is None or not (isinstance(value, Container) or single):
            super()._plan_rows(changes, terms, value, made)
            return
        if not self._ragged and isinstance(value, Container):
            shape = index_shape(self._batch_size, terms)
            if value.batch_size != shape:
                try:
                    value = value.expand(shape)
                except BatchSizeError:
                    raise BatchSizeError(
                        f"cannot write a TensorDict of batch size {list(value.batch_size)} "
                        f"at an index of batch size {list(shape)}"
                    ) from None
        parts = row_parts(value, found, single)
        listed = not single and found.whole and any(isinstance(term, Tensor) for term in terms)
        if len(parts) > 1 and isinstance(value, Container):
            rows, pieces = zip(*parts, strict=True)
            parts = list(zip(rows, own_copies([self._tds[row] for row in rows], pieces), strict=True))
        for row, part in parts:
            td = self._tds[row]
            if listed and isinstance(td, ResidentTree) and not td.is_locked and reshapes(td, part):
                changes.then(partial(td.update, part.clone()))
                continue
            if found.whole and isinstance(part, Container) and part.batch_size == td.batch_size:
                part = write_values(changes, td, part)
            if found.lift and isinstance(part, Container):
                part = part.unsqueeze(found.place)
            td._plan_rows(changes, _ALL if found.whole and td.batch_dims else found.rest, part, made)

    # -- many entries ------------------------------------------------------------------------
    def _per_element(self, source: Any, *, to_write: bool = False) -> list[Any]:
        """Split a TensorDict or a dict into one for each element; `to_write` copies what changes before it is read."""
        if isinstance(source, LazyTree) and source._stack_dim == self._stack_dim:
            parts = source._tds
        elif not isinstance(source, Container):
            return self._split("", dict(pairs_of(source)))
        else:
            parts = list(source.unbind(self._stack_dim)) if self._stack_dim < len(source.batch_size) else []
        if len(parts) != len(self._tds):
            raise BatchSizeError(f"a TensorDict of batch size {list(source.batch_size)} for {list(self._batch_size)}")
        return own_copies(self._tds, parts) if to_write and may_share(self._tds, source, parts) else parts

    def update(
        self, input_dict_or_td: EntrySource | None = None, clone: bool = False, inplace: bool = False, **kwargs: Any
    ) -> Self:
        options = {name: kwargs.pop(name) for name in UPDATE_OPTIONS & kwargs.keys()}
        source = source_of(input_dict_or_td, kwargs)
        if source is self:
            return self
        separate = (
            isinstance(source, LazyTree) and source._stack_dim == self._stack_dim and len(source._tds) == len(self._tds)
        )
        if options.get("update_batch_size") and isinstance(source, Container) and not separate:
            if source.batch_size != self._batch_size:
                check_may_resize(self, inplace, options.get("keys_to_update") is not None)
            self._free("change the batch size")
            before, self._tds = self._tds, self._resized(source)
            try:
                return super().update(source, clone, inplace, **{**options, "update_batch_size": False})
            except BaseException:
                self._tds = before
                raise
        return super().update(source, clone, inplace, **options)

    def _plan_update(self, changes: Any, source: Any, wanted: list[Path] | None, how: Any) -> None:
        own = {id(td) for td in self._tds} if isinstance(source, LazyTree) else set()
        for td, part in zip(self._tds, self._per_element(source, to_write=how.inplace), strict=True):
            moved = part is not td and id(part) in own  # it is changed itself before it is read
            td._plan_update(changes, part.clone(how.inplace) if moved else part, wanted, how)

    def _differ(self) -> bool:
        """Return whether some elements have entries that others lack."""
        return any(set(td._first_keys()) != set(self._tds[0]._first_keys()) for td in self._tds[1:])

    def _resized(self, source: Any) -> list[Any]:
        lost = [key for key in self.keys(True, True) if key not in source.keys(True, True)]
        if lost and source.batch_size != self._batch_size:
            raise BatchSizeError(f"entry {key_text(lost[0])} does not fit the batch size {list(source.batch_size)}")
        if len(source.batch_size) <= self._stack_dim:
            raise BatchSizeError(
                f"a lazy stack along dimension {self._stack_dim} cannot have the batch size {list(source.batch_size)}"
            )
        more = source.unbind(self._stack_dim)[len(self._tds) :]
        return [*self._tds[: source.batch_size[self._stack_dim]], *(td.empty() for td in more)]

    def _plan_in_place(self, changes: Any, source: Any, at: tuple[Any, ...] | None, keys_to_update: Any) -> None:
        if source is self and at is None:
            return
        if not isinstance(source, Container):
            super()._plan_in_place(changes, source, at, keys_to_update)
            return
        if at is not None:
            ndim = len(self._inner) + 1
            found = route(spelled_out(at, ndim), self._stack_dim, len(self._tds), ndim)
            if found is None or found.lift or not found.whole or self._ragged or not self._differ():
                super()._plan_in_place(changes, source, at, keys_to_update)
                return
            for row, part in row_parts(source, found, False):
                self._tds[row]._plan_in_place(changes, part, None, keys_to_update)
            return
        for td, part in zip(self._tds, self._per_element(source, to_write=True), strict=True):
            td._plan_in_place(changes, part, None, keys_to_update)

    def fill_(self, key: NestedKey, value: Number) -> Self:
        self._existing(key)
        for td in self._tds:
            td.fill_(key, value)
        return self

    def create_nested(self, key: NestedKey) -> Self:
        return self.set(key, {})

    # -- keys that some elements have --------------------------------------------------------
    def del_(self, key: NestedKey) -> Self:
        path = entry_path(key)
        having = [td for td in self._tds if td._find(path) is not None]
        self._free(f"delete {path_text(path)}")
        if not having:
            raise self._missing(key)
        for td in having:
            td.del_(path)
        return self

    def pop(self, key: NestedKey, default: object = NO_DEFAULT) -> Entry:
        entry = self.get(key, default)  # before anything is removed: it may be that it cannot be stacked
        if self._find(key) is None:
            return entry
        self.del_(key)
        return entry

    def clear(self) -> Self:
        self._free("clear")
        for td in self._tds:
            td.clear()
        return self

    def rename_key_(self, old_key: NestedKey, new_key: NestedKey, safe: bool = False) -> Self:
        self._free(f"rename {old_key!r}")
        self._existing(old_key)
        if safe and self._find(entry_path(new_key)) is not None:
            raise KeyExistsError(f"cannot rename {old_key!r}: there is an entry {new_key!r} already")
        for td in self._tds:
            td.rename_key_(old_key, new_key, safe)
        return self

    # -- elements ----------------------------------------------------------------------------
    def append(self, tensordict: EntrySource) -> None:
        """Add an element at the end of the stack dimension.

        Raises:
            TypeError: not a TensorDict. BatchSizeError: it does not fit the others. LockedError.
        """
        self.insert(len(self._tds), tensordict)

    def insert(self, index: int, tensordict: EntrySource) -> None:
        """Add an element before position `index` of the stack dimension, as `list.insert`; errors as `append`."""
        self._take_in([tensordict], index)

    def extend(self, tensordict: EntrySource | Sequence[EntrySource]) -> None:
        """Add the elements of a list, or those of a TensorDict along the stack dimension; errors as `append`."""
        elements: Any = tensordict.unbind(self._stack_dim) if isinstance(tensordict, TensorDictBase) else tensordict
        self._take_in(as_list(elements, "what extend() takes", "a TensorDict or a list of them"), len(self._tds))

    def _take_in(self, tds: list[Any], index: int) -> None:
        check_int(index, "index")
        check_elements(tds, 0, False)
        check_same_names([*self._tds[:1], *tds])
        if self.is_locked:
            raise self._refuse_locked("add elements")
        for i, td in enumerate(tds):
            if self._is_in(td):
                raise self._refuse_itself((str(index + i),))
        inner = self._inner
        for td in tds if self._tds else ():
            if len(td.batch_size) != len(inner) or (td.batch_size != inner and -1 not in inner):
                raise BatchSizeError(
                    f"the elements of this stack have batch size {list(inner)}, the new one {list(td.batch_size)}"
                )
        if self._is_through():
            self._store_elements(tds, index)
            return
        device = self._device
        self._binding = None  # the elements are no longer exactly those of a store
        self._tds[index:index] = [td if device is None or td.device == device else td.to(device) for td in tds]

    def _store_elements(self, tds: list[Any], index: int) -> None:
        if index < len(self._tds):
            raise UnsupportedError(
                "elements can be added at the end of a lazy stack that is stored, not between others",
                hint="td.clone(False) is a stack in memory over the same elements: insert there, and save() it",
            )
        check_owner(self, "more elements")
        growth = Growth.of_elements(self, tds)
        step_of(self, growth).do()

    def _follow_elements(self, count: int) -> None:
        """Have `count` elements, those that are new as the store has them."""
        del self._tds[count:]
        if self._binding is not None:
            handle, path = self._binding
            self._tds += [over(handle, (*path, str(i)), self._state & THROUGH) for i in range(len(self._tds), count)]

    def _catch_up(self) -> None:
        for td in self._tds:
            td._catch_up()

    def _refuse_part(self, what: str) -> None:
        if self._binding is None:
            for td in self._tds:
                td._refuse_part(what)

    # -- shape and names ---------------------------------------------------------------------
    def _check_batch(self, new: torch.Size, path: tuple[str, ...]) -> None:
        d = self._stack_dim
        if self._batch_size[: len(new)] == new and path:
            return
        if len(new) <= d or new[d] != len(self._tds):
            raise BatchSizeError(
                f"a lazy stack of {len(self._tds)} elements along dimension {d} cannot have the batch size {list(new)}",
                hint="td.to_tensordict() is a dense copy, which can have any batch size",
            )
        for td in self._tds:
            td._check_batch(size_without(new, d), path)

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        for td in self._tds:
            td._set_batch_size(size_without(batch_size, self._stack_dim))

    def auto_batch_size_(self, batch_dims: int | None = None, keep_compliant_size: bool = False) -> Self:
        """Give the elements the largest batch size that all entries share, of at most `batch_dims - 1` dimensions."""
        check_batch_dims(batch_dims)
        d = self._stack_dim
        old = [td._batch_size for td in self._tds]
        for td in self._tds:
            td.auto_batch_size_(None if batch_dims is None else max(batch_dims - 1, d), keep_compliant_size)
        sizes = [td._batch_size for td in self._tds]
        shared = sum(1 for _ in itertools.takewhile(lambda lengths: len({*lengths}) == 1, zip(*sizes, strict=False)))
        if sizes and shared < d:
            for td, size in zip(self._tds, old, strict=True):
                td._set_batch_size(size)
            raise BatchSizeError(f"the entries share no batch size of the {d + 1} dimensions that this stack needs")
        for td, size in zip(self._tds, sizes, strict=True):
            if len(size) > shared:
                td._set_batch_size(size[:shared])
        return self

    def _name_after(self, value: Any) -> None:
        if isinstance(value, Parts):
            for td, part in zip(self._tds, value, strict=True):
                td._name_after(part)
        elif self._dim_name is None and value._names is not None and len(value._names) > self._stack_dim:
            self._dim_name = value._names[self._stack_dim]

    def _check_names(self, names: Names) -> None:
        if names is not None:
            for td in self._tds:
                td._refuse_names(names, td.batch_dims, ())

    def _set_names(self, names: Names) -> None:
        for td in self._tds:
            td._set_names(self._names_below(names, td))
        self._dim_name = names[self._stack_dim] if names else None
        if self._is_through():
            handle, path = self._binding
            groups = {
                **handle.groups,
                path: msgspec.structs.replace(handle.groups[path], extra=self._own_record().extra),
            }
            if handle.store.writable:
                handle.commit(groups)
            else:
                handle.overlay(groups)

    def _is_through(self) -> bool:
        """Return whether a change of the stack is a change of the store that it was read from."""
        return self._binding is not None and bool(self._state & THROUGH or Cap.VIEW not in self._binding[0].store.caps)

    def _copy_with_names(self, names: Names) -> Any:
        made = self._each(lambda td: td._copy_with_names(self._names_below(names, td)))
        made._dim_name = names[self._stack_dim] if names else None
        return made

    def _names_below(self, names: Names, td: Any) -> Names:
        below = (*names[: self._stack_dim], *names[self._stack_dim + 1 :]) if names else ()
        return extend_names(below, td.batch_dims) if names else None

    def _set_device(self, device: torch.device | None) -> None:
        for td in self._tds:
            td._set_device(device)

    def _become(self, other: Any) -> Self:
        parts = other._tds if isinstance(other, LazyTree) and other._stack_dim == self._stack_dim else None
        parts = parts if parts is not None else list(other.unbind(self._stack_dim))
        if len(parts) == len(self._tds) and all(type(a) is type(b) for a, b in zip(self._tds, parts, strict=True)):
            parts = [mine._become(theirs) for mine, theirs in zip(self._tds, parts, strict=True)]
        locked = other.is_locked
        self._tds = list(parts)
        self._binding = getattr(other, "_binding", None)
        self._state, self._parents = other._state & ~LOCKED, None
        return self.lock_() if locked else self

    # -- plans of a store over elements of it --------------------------------------------------
    def _plan_writes(self, entries: Mapping[str, Any], writes: list[Any], values: dict[Any, Any]) -> None:
        columns = {k: self._split(k, v) for k, v in entries.items()}
        for i, td in enumerate(self._tds):
            td._plan_writes({k: parts[i] for k, parts in columns.items()}, writes, values)
