"""Writing entries by key and rows by index: generic over the primitives of `Container`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tdstore import errors
from tdstore.arguments import tensor_for
from tdstore.container.core.container import GROUP, LEAF, VALUE, Container, EntrySource
from tdstore.container.core.key_views import IsLeaf, walk
from tdstore.container.core.paths import entry_path
from tdstore.container.core.tensorclasses import class_of, rewrap
from tdstore.container.entries.nested_tensors import leaf_shape
from tdstore.container.functions.uneven_stacks import differs, merged
from tdstore.container.methods.update_source import (
    as_key_list,
    by_first_key,
    check_may_resize,
    flat_pairs,
    pick,
    source_of,
    spread_list,
    stops_at,
    unequal_batches,
)
from tdstore.container.storage.change_plan import Changes
from tdstore.container.values.nontensor import NonTensor, NonTensorData
from tdstore.index.index_terms import as_terms, reaches_past, spelled_out
from tdstore.index.selection import index_shape
from tdstore.keys import key_text
from tdstore.types import Entry, IndexType, NestedKey, Path, is_key, path_text


class WritingMixin(Container):
    """set, update, pop, rename_key_, ... and `td[...] = value`."""

    __slots__ = ()

    # -- writing -----------------------------------------------------------------------------
    def set(
        self, key: NestedKey, item: object, inplace: bool = False, *, non_blocking: bool = False, **kwargs: object
    ) -> Self:
        """Set an entry, creating nested TensorDicts on the way.

        The tensor itself becomes the entry: it is not copied. On a dataset that is open for writing, it is written
        there.

        Args:
            key: a string, or a tuple of strings for a nested entry.
            item: a tensor of shape `[*B, ...]`, a TensorDict or dict, or any other value, which is stored as non-tensor
                data.
            inplace: copy into the entry if there is one, instead of replacing it; a new key is added.
            non_blocking: accepted for compatibility.
            **kwargs: accepted for compatibility.

        Returns:
            This TensorDict.

        Raises:
            LockedError: the TensorDict is locked, and an entry would be added or replaced.
            BatchSizeError: the leading shape of `item` is not the batch size.
            NotAGroupError: a part of the key before the last is not a TensorDict.

        Example:
            >>> td = TensorDict({}, [3]).set(("next", "obs"), torch.ones(3, 4))
            >>> td["next", "obs"].shape
            torch.Size([3, 4])
        """
        path = entry_path(key)
        if item is self:
            raise self._refuse_itself(path)
        node, rest = self._descend(path, item)
        last = rest[-1]
        if inplace and len(rest) == 1 and node._kind(last) is not None:
            node._write({last: node._coerce_existing(last, item, whole=True)})
            return self
        if node.is_locked:
            raise node._refuse_locked(f"set {path_text(path)}")
        value = node._coerce(last, item)
        for part in reversed(rest[1:]):
            value = node._wrapped(part, value)
        node._assign({rest[0]: value})
        if len(rest) == 1 and type(value) is not Tensor:
            node._name_after(value)
        return self

    def _wrapped(self, key: str, value: Any) -> Any:
        """Wrap a coerced entry in a new nested TensorDict of this batch size."""
        made = self._resident_class._new({key: value}, self._batch_size, self._device, self._names)
        made._name_after(value)
        return made

    def _descend(self, path: Path, item: Any) -> tuple[Any, Path]:
        """Find the deepest existing container on a path, and the rest of the path (at least one key)."""
        node: Any = self
        for i, part in enumerate(path[:-1]):
            kind = node._kind(part)
            if kind is None:
                return node, path[i:]
            if kind != GROUP:
                raise errors.NotAGroupError(f"cannot set {path_text(path)}: {part!r} is not a TensorDict")
            node = node._raw(part)
        return node, path[-1:]

    def _coerce_existing(self, key: str, item: Any, *, whole: bool = False) -> Any:
        """Coerce a value for an in-place write: to the entry's own kind and shape.

        `whole` refuses a value that stands for several rows, such as a number.
        """
        kind = self._kind(key)
        if kind == LEAF and isinstance(item, (bool, int, float, complex)):
            value: Any = tensor_for(item, f"entry {key!r}")
        elif isinstance(item, Tensor) and (kind == LEAF or (not whole and kind == VALUE and self._is_unbatched(key))):
            value = item
        else:
            value = self._coerce(key, item)
        if kind == LEAF:
            if isinstance(value, NonTensor):
                value = getattr(value, "wrapped", value)  # of an unbatched tensor
            if not isinstance(value, Tensor):
                raise errors.InvalidArgumentError(
                    f"entry {key!r} is a tensor: cannot write a {type(item).__name__} into it"
                )
            if value.is_nested:
                if leaf_shape(value) != self._leaf_shape(key):
                    raise errors.BatchSizeError(
                        f"cannot write a nested tensor into entry {key!r}, whose rows have other shapes"
                    )
            elif value.shape != self._leaf_shape(key):
                if whole and value.shape[: len(self._batch_size)] != self._batch_size:
                    raise errors.BatchSizeError(
                        f"batch dimension mismatch: shape {list(value.shape)} for entry {key!r} "
                        f"in a batch of {list(self._batch_size)}",
                        hint="to set every row alike: td[:] = value, or fill_",
                    )
                try:
                    value = value.expand(self._leaf_shape(key))
                except RuntimeError:
                    raise errors.BatchSizeError(
                        f"cannot write shape {list(value.shape)} into entry {key!r} "
                        f"of shape {list(self._leaf_shape(key))} in place"
                    ) from None
        elif kind == GROUP and not isinstance(value, Container):
            raise errors.InvalidArgumentError(
                f"entry {key!r} is a TensorDict: cannot write a {type(item).__name__} into it"
            )
        elif kind == VALUE and not isinstance(value, NonTensor):
            value = NonTensorData(item, self._batch_size)
        return value

    def set_(self, key: NestedKey, item: object, *, non_blocking: bool = False) -> Self:
        """Write into an existing entry in place: same shape, cast to its dtype.

        Every view of the entry's memory sees the new values, and a locked TensorDict allows it.

        Args:
            key: a string, or a tuple of strings for a nested entry.
            item: a tensor of the entry's shape, or a value for non-tensor data.
            non_blocking: accepted for compatibility.

        Returns:
            This TensorDict.

        Raises:
            KeyNotFoundError: there is no such entry.
            BatchSizeError: `item` has another shape.
            ReadOnlyError: the dataset was opened in mode "r".

        Example:
            >>> td = TensorDict({"a": torch.zeros(3)}, [3]).lock_()
            >>> td.set_("a", torch.arange(3))["a"]
            tensor([0., 1., 2.])
        """
        node, last = self._existing(key)
        value = node._coerce_existing(last, item, whole=True)
        shape = leaf_shape(item) if isinstance(item, Tensor) and node._kind(last) == LEAF else None
        if shape is not None and shape != node._leaf_shape(last):
            raise errors.BatchSizeError(
                f"cannot write shape {list(shape)} into entry {key_text(key)} of shape {list(node._leaf_shape(last))}"
            )
        node._write({last: value})
        return self

    def set_at_(self, key: NestedKey, value: object, index: IndexType, *, non_blocking: bool = False) -> Self:
        """Write rows of an existing entry in place: `td[key][index] = value`, broadcast and cast as torch does.

        Args:
            key: a string, or a tuple of strings for a nested entry.
            value: a tensor or number that broadcasts to the shape at the index.
            index: an index into the dimensions of the entry, batch dimensions first.
            non_blocking: accepted for compatibility.

        Returns:
            This TensorDict.

        Raises:
            KeyNotFoundError: there is no such entry.
            ReadOnlyError: the dataset was opened in mode "r".

        Example:
            >>> TensorDict({"a": torch.zeros(3)}, [3]).set_at_("a", 5.0, slice(1, None))["a"]
            tensor([0., 5., 5.])
        """
        node, last = self._existing(key)
        if node._kind(last) == LEAF:
            node._write_leaf_at(last, index, value)
        else:
            node._write({last: spread_list(node, last, value, (index,))}, (index,))
        return self

    def set_non_tensor(self, key: NestedKey, value: object) -> Self:
        """Store any object as one value for the whole batch, even one that `set` would convert to a tensor.

        Args:
            key: a string, or a tuple of strings for a nested entry.
            value: the object. `td[key]` returns it, and indexing the batch does not divide it.

        Returns:
            This TensorDict.

        Raises:
            LockedError: the TensorDict is locked.

        Example:
            >>> td = TensorDict({}, [3]).set_non_tensor("bounds", [0.0, 1.0])
            >>> td["bounds"], td[0]["bounds"]
            ([0.0, 1.0], [0.0, 1.0])
        """
        return self.set(key, NonTensorData(value, self._batch_size))

    def setdefault(self, key: NestedKey, default: object, inplace: bool = False) -> Entry:
        """Set an entry if it does not exist, and return the entry.

        Args:
            key: a string, or a tuple of strings for a nested entry.
            default: what to set if there is no such entry.
            inplace: as in `set`.

        Raises:
            LockedError: there is no such entry, and the TensorDict is locked.
            BatchSizeError: the leading shape of `default` is not the batch size.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2)}, [2])
            >>> td.setdefault("a", torch.ones(2)), td.setdefault("b", torch.ones(2))
            (tensor([0., 0.]), tensor([1., 1.]))
        """
        if (found := self.get(key, None)) is None:
            found = self.set(key, default, inplace=inplace).get(key)
        return found

    def update(
        self,
        input_dict_or_td: EntrySource | None = None,
        clone: bool = False,
        inplace: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[NestedKey] | None = None,
        is_leaf: IsLeaf | None = None,
        update_batch_size: bool = False,
        ignore_lock: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Merge entries of another TensorDict or a dict into this one; nothing is set unless everything fits.

        Nested TensorDicts that exist on both sides are merged, not replaced. If the source has a lazy stack whose
        elements differ in keys or shapes, the entry becomes a lazy stack.

        Args:
            input_dict_or_td: a TensorDict, or a dict with (nested) keys.
            clone: store copies of the tensors instead of the tensors themselves.
            inplace: copy into existing entries instead of replacing them; new keys are added.
            non_blocking: accepted for compatibility.
            keys_to_update: only these (nested) keys: a sequence, or one name. `("a", "b")` are two names, and
                `[("a", "b")]` is one nested key.
            is_leaf: called with the type of a nested entry; True replaces the entry instead of merging into it.
            update_batch_size: adopt the batch size of the source.
            ignore_lock: update although this TensorDict is locked.
            **kwargs: more entries, by their keys.

        Returns:
            This TensorDict.

        Raises:
            LockedError: the TensorDict is locked, and its structure or its batch size would change.
            BatchSizeError: the source has another batch size, and `update_batch_size` is False.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2])
            >>> td.update({"n": {"c": torch.ones(2)}})["n"].sorted_keys
            ['b', 'c']
        """
        source = source_of(input_dict_or_td, kwargs)
        if source is self:
            return self
        wanted = None if keys_to_update is None else [entry_path(k) for k in as_key_list(keys_to_update)]
        if update_batch_size or (isinstance(source, Container) and self.is_empty()):
            self._take_batches(source, update_batch_size, inplace, wanted is not None, ignore_lock)
        changes = Changes()
        self._plan_update(changes, source, wanted, How(clone, inplace, is_leaf, ignore_lock))
        changes.run()
        return self

    def _plan_update(self, changes: Changes, source: Any, wanted: list[Path] | None, how: How) -> None:
        """Add the changes of `update` to a plan; `wanted` are the paths to update, None for all."""
        fresh: dict[str, Any] = {}
        writes: dict[str, Any] = {}
        for first, value in by_first_key(source):
            sub = None if wanted is None else [w[1:] for w in wanted if w[0] == first]
            if sub is not None and not sub:
                continue
            kind = self._kind(first)
            nested = not stops_at(how.is_leaf, value) if isinstance(value, Container) else isinstance(value, Mapping)
            part = sub if nested and sub is not None and () not in sub else None
            if kind == GROUP and nested and not how.inplace and differs(value, self._raw(first)):
                fresh[first] = self._coerce(first, merged(self._raw(first), value, part, how.clone))
            elif kind == GROUP and nested:
                self._raw(first)._plan_update(changes, value, part, how.below())
            elif part is not None:
                fresh[first] = self._coerce(first, pick(value, part))
            elif how.inplace and kind is not None:
                writes[first] = self._coerce_existing(first, value, whole=True)
            else:
                made = self._coerce(first, value)
                fresh[first] = made.clone() if how.clone else made
        if fresh and self.is_locked and not how.ignore_lock:
            raise self._refuse_locked(f"update {', '.join(map(repr, fresh))}")
        changes.set(self, fresh)
        if fresh and self._names is None:
            for value in fresh.values():
                if isinstance(value, Container) and value._names is not None:
                    changes.then(partial(self._name_after, value))
        changes.write(self, writes)

    def _take_batches(self, source: Any, wanted: bool, inplace: bool, some_keys: bool, ignore_lock: bool) -> None:
        """Adapt to the entries of a source of another batch size, also nested ones, or refuse all of them.

        Args:
            wanted: adopt the batch sizes; otherwise a difference is an error.
        """
        pairs = unequal_batches(self, source)
        if pairs and not wanted:
            raise errors.BatchSizeError(
                f"update: a TensorDict of batch size {list(source.batch_size)} for one of {list(self.batch_size)}",
                hint="pass update_batch_size=True to adopt the batch size of the source",
            )
        if pairs:
            check_may_resize(self, inplace, some_keys)
        for mine, theirs in pairs:
            if mine.is_locked and not ignore_lock:
                raise mine._refuse_locked("update the batch size")
            new, known = theirs.batch_size, set(theirs._first_keys())
            for key in mine._first_keys():
                kind = mine._kind(key)
                if key not in known and kind != VALUE:
                    shape = mine._leaf_shape(key) if kind == LEAF else mine._raw(key).batch_size
                    if shape[: len(new)] != new:
                        raise errors.BatchSizeError(f"entry {key!r} of shape {list(shape)} does not fit {list(new)}")
        for mine, theirs in pairs:
            known = set(theirs._first_keys())
            mine._drop([key for key in list(mine._first_keys()) if key in known and mine._kind(key) != GROUP])
            mine._set_batch_size(theirs.batch_size)

    def update_(
        self,
        input_dict_or_td: EntrySource | None = None,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[NestedKey] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Write into existing entries in place; nothing is written unless every key exists.

        Unlike `update`, it never adds a key and never replaces a tensor: the memory stays, and a lock has no effect.

        Args:
            input_dict_or_td: a TensorDict, a dict or a list of (key, value) pairs. Values are cast to the dtypes of the
                entries.
            clone: accepted for compatibility.
            non_blocking: accepted for compatibility.
            keys_to_update: only these (nested) keys.
            **kwargs: more entries, by their keys.

        Returns:
            This TensorDict.

        Raises:
            KeyNotFoundError: the source has a key that this TensorDict does not have.
            BatchSizeError: a shape does not fit.
            ReadOnlyError: the dataset was opened in mode "r".

        Example:
            >>> td = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)}, [2]).lock_()
            >>> td.update_({"a": torch.ones(2)})["a"]
            tensor([1., 1.])
        """
        if isinstance(input_dict_or_td, list) and all(isinstance(p, tuple) and len(p) == 2 for p in input_dict_or_td):
            input_dict_or_td = dict(input_dict_or_td)
        return self._update_in_place(source_of(input_dict_or_td, kwargs), None, keys_to_update)

    def copy_(self, tensordict: EntrySource, non_blocking: bool = False) -> Self:
        """Write into existing entries in place: another name of `update_`.

        Args:
            tensordict: a TensorDict or dict whose keys all exist here.
            non_blocking: accepted for compatibility.

        Raises:
            KeyNotFoundError: the source has a key that this TensorDict does not have.
            BatchSizeError: a shape does not fit.
            ReadOnlyError: the dataset was opened in mode "r".

        Example:
            >>> td = TensorDict({"a": torch.zeros(2)}, [2])
            >>> td.copy_(TensorDict({"a": torch.ones(2)}, [2]))["a"]
            tensor([1., 1.])
        """
        return self.update_(tensordict)

    def update_at_(
        self,
        input_dict_or_td: EntrySource,
        idx: IndexType,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[NestedKey] | None = None,
    ) -> Self:
        """Write rows of existing entries in place; entries that the source lacks stay as they are.

        Args:
            input_dict_or_td: a TensorDict or dict, of the batch size of `td[idx]` or one that expands to it.
            idx: an index into the batch dimensions; with terms for more dimensions, into each entry, as in `set_at_`.
            clone: accepted for compatibility.
            non_blocking: accepted for compatibility.
            keys_to_update: only these (nested) keys.

        Returns:
            This TensorDict.

        Raises:
            KeyNotFoundError: the source has a key that this TensorDict does not have.
            ReadOnlyError: the dataset was opened in mode "r".

        Example:
            >>> td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)}, [3])
            >>> td.update_at_({"a": torch.ones(2)}, slice(0, 2))["a"]
            tensor([1., 1., 0.])
        """
        return self._update_in_place(input_dict_or_td, as_terms(idx), keys_to_update)

    def copy_at_(
        self, tensordict: EntrySource, idx: IndexType, non_blocking: bool = False, *, fast: bool = True
    ) -> Self:
        """Call `update_at_`; this is an alias."""
        return self.update_at_(tensordict, idx)

    def _update_in_place(self, source: Any, at: tuple[Any, ...] | None, keys_to_update: Any) -> Self:
        changes = Changes()
        self._plan_in_place(changes, source, at, keys_to_update)
        changes.run()
        return self

    def _plan_in_place(self, changes: Changes, source: Any, at: tuple[Any, ...] | None, keys_to_update: Any) -> None:
        """Add the changes of `update_` and `update_at_` to a plan."""
        wanted = None if keys_to_update is None else [entry_path(k) for k in as_key_list(keys_to_update)]
        if at is not None and not reaches_past(
            at, len(self._batch_size)
        ):  # here, where the ellipsis stands for this batch, and not for a nested one's
            at = spelled_out(at, len(self._batch_size))
        parts: dict[int, tuple[Any, dict[str, Any]]] = {}
        for key, value in flat_pairs(source, stacks=wanted is not None):
            path = entry_path(key)
            if wanted is not None and not any(path[: len(w)] == w for w in wanted):
                continue
            node, last = self._existing(path)
            checked = node._coerce_existing(last, value) if at is None else spread_list(node, last, value, at)
            parts.setdefault(id(node), (node, {}))[1][last] = checked
        for node, entries in parts.values():
            changes.write(node, entries, at)

    # -- subscripts --------------------------------------------------------------------------
    def __setitem__(self, index: Any, value: Any) -> None:
        if is_key(index):
            self.set(index, value)
        else:
            self._set_rows(index, value)

    def __delitem__(self, key: Any) -> None:
        if not is_key(key):
            raise errors.InvalidTypeError(f"del td[...] takes a key, not the index {key!r}")
        self.del_(key)

    def _set_rows(self, index: Any, value: Any) -> None:
        """Write `td[index] = value`. New entries start as zeros in the other rows."""
        self._check_writable()
        changes = Changes()
        made: list[tuple[Any, list[str]]] = []
        try:
            self._plan_rows(changes, index, value, made)
            changes.run(whole=bool(made))
        except BaseException:
            if not changes.done:
                take_back(made)
            raise

    def _plan_rows(self, changes: Changes, index: Any, value: Any, made: list[tuple[Any, list[str]]]) -> None:
        """Add the changes of `td[index] = value` to a plan; new entries are created at once, and recorded in `made`."""
        at = spelled_out(as_terms(index), len(self._batch_size))
        shape = index_shape(self._batch_size, at)
        if value is None:
            raise errors.InvalidArgumentError(
                "td[index] = None is not possible: assign a TensorDict, a dict, a tensor or a number"
            )
        if not isinstance(value, (Container, Mapping)):
            spread = dict.fromkeys(_batched_keys(self), value)
            self._plan_in_place(changes, spread, at, None)
            return
        rows: Mapping[Any, Any] = {}
        if not isinstance(value, Container):
            rows, value = value, self._resident_class._from_mapping(value, None, None, None)
        elif value.batch_size != shape:
            try:
                value = value.expand(shape)
            except errors.BatchSizeError:
                raise errors.BatchSizeError(
                    f"cannot write a TensorDict of batch size {list(value.batch_size)} "
                    f"at an index of batch size {list(shape)}"
                ) from None
        if self._device is not None and value.device not in (None, self._device):
            value = value.to(self._device)
        stacks = [key for key in value._first_keys() if value._kind(key) == GROUP and self._is_stack(key)]
        for key in stacks:  # each element makes room for itself: they need not have the same entries
            self._raw(key)._plan_rows(changes, at, rows.get(key, value._raw(key)), made)
        value = value.exclude(*stacks) if stacks else value
        self._make_room(value, shape, self._batch_size, made)
        self._plan_in_place(changes, value, at, None)

    def _is_stack(self, key: str) -> bool:
        """Return whether an entry of a TensorDict that is not a lazy stack is a lazy stack."""
        own = not isinstance(self, self._stack_class)
        return own and self._kind(key) == GROUP and isinstance(self._raw(key), self._stack_class)

    def _make_room(self, value: Any, shape: torch.Size, batch: torch.Size, made: list[Any]) -> None:
        """Add zero-filled entries for those of `value` that this TensorDict lacks, and record them in `made`."""
        fresh: dict[str, Any] = {}
        for key in value._first_keys():
            kind, mine = value._kind(key), self._kind(key)
            if mine is None:
                if self.is_locked:
                    raise self._refuse_locked(f"add {key!r}")
                fresh[key] = _zeros_for(value._raw(key), batch, len(shape))
            elif kind == GROUP and mine == GROUP:
                self._raw(key)._make_room(value._raw(key), shape, batch, made)
        if fresh:
            entries = {k: self._coerce(k, v) for k, v in fresh.items()}
            made.append((self, list(fresh)))
            self._assign(entries)


def _batched_keys(td: Any) -> list[Any]:
    """List the keys of the tensors that have rows."""
    return [key for key, node, last in walk(td, True, True, None, False, False) if node._kind(last) == LEAF]


def _zeros_for(entry: Any, batch: torch.Size, ndim: int) -> Any:
    if isinstance(entry, NonTensor):
        return NonTensorData(None, batch)
    if isinstance(entry, Container):
        full = torch.Size((*batch, *entry.batch_size[ndim:]))
        entries = {k: _zeros_for(entry._raw(k), batch, ndim) for k in entry._first_keys()}
        zeros = entry._resident_class._new(entries, full, entry.device, None)
        return rewrap(class_of(entry), zeros)
    return torch.zeros((*batch, *entry.shape[ndim:]), dtype=entry.dtype, device=entry.device)


def take_back(made: list[tuple[Any, list[str]]]) -> None:
    """Remove entries that were created for rows that could not be written after all: all or nothing."""
    for node, keys in reversed(made):
        node._take_back([key for key in keys if node._kind(key) is not None])


class How(NamedTuple):
    """The options of an update."""

    clone: bool
    inplace: bool
    is_leaf: IsLeaf | None
    ignore_lock: bool

    def below(self) -> How:
        """Return the options for nested TensorDicts. Their own locks apply."""
        return self._replace(ignore_lock=False)
