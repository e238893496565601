"""Choose, split and rename entries: the methods that change which keys a TensorDict has."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from tdstore.arguments import as_list, check_callable, check_separator
from tdstore.container.core.container import GROUP, VALUE, Container
from tdstore.container.core.locks import READONLY
from tdstore.container.core.paths import entry_path
from tdstore.container.functions.broadcast import uneven, widened
from tdstore.container.functions.merge import unlocked_copy
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.container.values.nontensor import NonTensor
from tdstore.errors import InvalidArgumentError, KeyExistsError, OptionError
from tdstore.types import NestedKey, Path, path_text

if TYPE_CHECKING:
    pass


class KeySelectionMixin(Container):
    """select, exclude, split_keys, flatten_keys, ..."""

    __slots__ = ()

    # -- choosing ----------------------------------------------------------------------------
    def select(self, *keys: NestedKey, inplace: bool = False, strict: bool = True, as_tensordict: bool = False) -> Self:
        """Return a TensorDict with only these (nested) entries, in this order. It shares them.

        Args:
            *keys: keys, or one list of them. If a key and one below it are passed, only the one below is selected.
            inplace: remove the other entries from this TensorDict, and return it.
            strict: refuse keys that do not exist. Otherwise they are ignored.
            as_tensordict: return a plain TensorDict for a tensorclass.

        Raises:
            KeyNotFoundError: `strict`, and a key does not exist.
            LockedError: `inplace`, and this TensorDict is locked.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3), "c": torch.zeros(3)}}, [3])
            >>> list(td.select(("n", "b")).keys(True, True))
            [('n', 'b')]
        """
        if len(keys) == 1 and isinstance(keys[0], (list, set)):
            keys = tuple(keys[0])
        wanted: dict[str, Any] = {}
        for key in keys:
            if type(key) is str and self._kind(key) is not None:
                wanted.setdefault(key, None)
                continue
            if strict:
                self._existing(key)
            self._want(wanted, entry_path(key))
        return self._keep(wanted, inplace, "select")

    def _want(self, tree: dict[str, Any], path: Path) -> None:
        """Add a path to a tree of keys (None: the whole entry), as far as there are entries."""
        first, below = path[0], path[1:]
        kind = self._kind(first)
        if kind is None or (below and kind != GROUP):
            return
        if not below:
            tree.setdefault(first, None)
            return
        if tree.get(first) is None:
            tree[first] = {}
        self._raw(first)._want(tree[first], below)

    def exclude(self, *keys: NestedKey, inplace: bool = False) -> Self:
        """Return a TensorDict without these (nested) entries. It shares the others. Keys that do not exist are ignored.

        Args:
            *keys: keys, or one list of them.
            inplace: remove the entries from this TensorDict, and return it.

        Raises:
            InvalidKeyError: a key is neither a string nor a tuple of strings.
            LockedError: `inplace`, and this TensorDict is locked.

        Example:
            >>> list(TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)}, [3]).exclude("a").keys())
            ['b']
        """
        if len(keys) == 1 and isinstance(keys[0], (list, set)):
            keys = tuple(keys[0])
        return self._keep(self._all_but([entry_path(k) for k in keys]), inplace, "exclude")

    def _all_but(self, gone: list[Path]) -> dict[str, Any]:
        remaining: dict[str, Any] = {}
        first = {path[0] for path in gone}
        for key in self._first_keys():
            below = [path[1:] for path in gone if path[0] == key] if key in first else []
            if not below:
                remaining[key] = None
            elif () not in below:
                remaining[key] = self._raw(key)._all_but(below) if self._kind(key) == GROUP else None
        return remaining

    def _keep(self, wanted: dict[str, Any], inplace: bool, what: str) -> Self:
        """Keep the entries of a tree of keys (None: the whole entry)."""
        if inplace:
            if self.is_locked:
                raise self._refuse_locked(what)
            self._drop([k for k in self._first_keys() if k not in wanted])
            if list(self._first_keys()) != list(wanted):
                self._reorder(list(wanted))
            for key, sub in wanted.items():
                if sub is not None:
                    self._raw(key)._keep(sub, True, what)
            return self
        return self._selected(wanted)

    def _selected(self, wanted: dict[str, Any]) -> Self:
        td = self._resident()
        data = {k: td._data[k] if sub is None else td._data[k]._selected(sub) for k, sub in wanted.items()}
        made: Self = td._new(data, td._batch_size, td._device, td._names, td._state & READONLY)
        return made

    def split_keys(
        self,
        *key_sets: Iterable[NestedKey] | dict[NestedKey, NestedKey],
        inplace: bool = False,
        default: object = NO_DEFAULT,
        strict: bool = True,
        reproduce_struct: bool = False,
    ) -> tuple[Self, ...]:
        """Split into one TensorDict per set of keys, and a last one with all other keys.

        Args:
            key_sets: iterables of (nested) keys, or dicts that give each of these keys its name in the result.
            inplace: remove the keys from this TensorDict, which is the last one of the result.
            default: used for keys that do not exist; None leaves them out.
            strict: without `default`, refuse keys that do not exist.
            reproduce_struct: keep nested TensorDicts that are empty, in each of the results.

        Raises:
            KeyNotFoundError: a key does not exist, or was used already by itself or as part of another.
            OptionError: a dict gives two keys one name.

        Example:
            >>> td = TensorDict({"obs": torch.zeros(2), "action": torch.ones(2)}, [2])
            >>> renamed, rest = td.split_keys({"obs": "observation"})
            >>> sorted(renamed.keys()), sorted(rest.keys())
            (['observation'], ['action'])
        """
        parts = []
        used: list[Path] = []
        td: Any = self
        for key_set in key_sets:
            part = td._without_values() if reproduce_struct else td.empty()
            for path, name in _names_of(key_set).items():
                found = self._find(path, optional=not strict)
                if found is not None and not any(path[: len(t)] == t for t in used):
                    entry: Any = found[0]._raw(found[1])
                    if isinstance(entry, Container):
                        node: Any = entry
                        entry = node._selected(node._all_but([t[len(path) :] for t in used if t[: len(path)] == path]))
                    part.set(name, entry)
                    used.append(path)
                elif default is NO_DEFAULT and strict:
                    raise self._missing(path[0] if len(path) == 1 else path)
                elif default is not NO_DEFAULT and default is not None:
                    part.set(name, default)
            parts.append(part)
        remaining = self._all_but(used)
        if inplace:
            rest = self._keep(remaining, True, "exclude")
            return (*parts, rest if reproduce_struct else rest.filter_empty_())
        # Nested ones are left out here, not dropped by filter_empty_: they are those of this TensorDict.
        rest = self._selected(remaining if reproduce_struct else self._nonempty(remaining))
        if self.is_locked:
            rest = rest.clone(recurse=False)  # the nested ones can be changed, too
        return (*parts, rest)

    def _nonempty(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Leave out of a tree of keys what has no leaf; nested TensorDicts are named key by key."""
        remaining: dict[str, Any] = {}
        for key, sub in wanted.items():
            if self._kind(key) != GROUP:
                remaining[key] = None
                continue
            node = self._raw(key)
            if below := node._nonempty(dict.fromkeys(node._first_keys()) if sub is None else sub):
                remaining[key] = below
        return remaining

    def _without_values(self) -> Any:
        """Return the nested TensorDicts alone, empty."""
        td: Any = self
        td = td.empty()
        for key in self._first_keys():
            if self._kind(key) == GROUP:
                td._data[key] = self._raw(key)._without_values()
        return td

    def _aligned(self, other: Any, default: Any) -> tuple[Any, Any]:
        """Give both the keys that both have (`default="intersection"`), or the keys that either has."""
        mine, theirs = self._resident(), other._resident()
        if uneven(mine, (theirs,)) and (wide := widened(mine, (theirs,))) is not None:
            mine, (theirs,) = wide
        out: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for key in dict.fromkeys([*mine._data, *theirs._data]):
            a, b = mine._data.get(key), theirs._data.get(key)
            if a is None or b is None:
                if isinstance(default, str):
                    if default != "intersection":
                        raise InvalidArgumentError(f"default is a number, a tensor or 'intersection', not {default!r}")
                    continue
                a, b = (_filled(b, default), b) if a is None else (a, _filled(a, default))
            elif isinstance(a, Container) and isinstance(b, Container):
                a, b = a._aligned(b, default)
            out[0][key], out[1][key] = a, b
        made = [
            td._new(data, td._batch_size, td._device, td._names) for td, data in zip((mine, theirs), out, strict=True)
        ]
        if self.is_locked:
            made[0].lock_()
        return made[0], made[1]

    def filter_non_tensor_data(self) -> Self:
        """Return a TensorDict without the entries that are not tensors. It shares the tensors."""
        return self._selected(self._tensors_only())

    def _tensors_only(self) -> dict[str, Any]:
        kinds = {key: self._kind(key) for key in self._first_keys()}
        return {
            k: self._raw(k)._tensors_only() if kind == GROUP else None
            for k, kind in kinds.items()
            if kind != VALUE or self._is_unbatched(k)
        }

    def filter_empty_(self) -> Self:
        """Remove nested TensorDicts without any leaf, in place."""
        for key in [k for k in self._first_keys() if self._kind(k) == GROUP]:
            self._raw(key).filter_empty_()
            if not list(self._raw(key)._first_keys()):
                self._drop([key])
        return self

    # -- key structure -----------------------------------------------------------------------
    def flatten_keys(
        self, separator: str = ".", inplace: bool = False, is_leaf: Callable[[type], bool] | None = None
    ) -> Self:
        """Join nested keys with a separator: `("a", "b")` becomes `"a.b"`. The result shares the tensors.

        Args:
            separator: the string between the parts of a key.
            inplace: change this TensorDict, and return it.
            is_leaf: called with the type of a nested entry; True keeps the entry as it is.

        Raises:
            KeyExistsError: two keys would become one.
            LockedError: `inplace`, and this TensorDict is locked.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2])
            >>> list(td.flatten_keys("/").keys())
            ['a', 'n/b']
        """
        check_separator(separator)
        if is_leaf is not None:
            check_callable(is_leaf, "is_leaf")
        td = self._resident()
        flat: dict[str, Any] = {}
        for path, value in td._flat_entries((), is_leaf):
            key = separator.join(path)
            if key in flat:
                raise KeyExistsError(f"flattening with {separator!r} makes the key {key!r} twice")
            flat[key] = value
        return self._restructured(flat, inplace, lambda v: v.unflatten_keys(separator))

    def _flat_entries(self, prefix: Path, is_leaf: Callable[[type], bool] | None) -> list[tuple[Path, Any]]:
        out: list[tuple[Path, Any]] = []
        for key in self._first_keys():
            value = self._raw(key)
            path = (*prefix, key)
            if isinstance(value, Container) and not (is_leaf is not None and is_leaf(type(value))):
                nested: Any = value
                out += nested._flat_entries(path, is_leaf)
            else:
                out.append((path, value))
        return out

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Self:
        """Split keys at a separator into nested TensorDicts, the inverse of `flatten_keys`. Shares the tensors.

        Args:
            separator: where keys are split.
            inplace: change this TensorDict, and return it.

        Raises:
            KeyExistsError: a key is both an entry and the start of another.
            LockedError: `inplace`, and this TensorDict is locked.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2), "n/b": torch.zeros(2)}, [2])
            >>> list(td.unflatten_keys("/").keys(True, True))
            ['a', ('n', 'b')]
        """
        check_separator(separator)
        td = self._resident()
        tree: dict[str, Any] = {}
        split: list[tuple[list[str], Any]] = []
        for key, value in td._data.items():
            parts = key.split(separator)
            if len(parts) > 1:
                split.append((parts, value))
            else:
                tree[key] = unlocked_copy(value)
        mine: set[int] = set()  # the nested TensorDicts made here; those of others are copied before they change
        for parts, value in split:
            node = tree
            for part in parts[:-1]:
                inner: Any = node.get(part)
                if inner is None or id(inner) not in mine:
                    if inner is None:
                        inner = td._new({}, td._batch_size, td._device, td._names)
                    elif isinstance(inner, Container):
                        inner = inner._resident()._shallow()
                    else:
                        raise KeyExistsError(f"unflattening {separator.join(parts)!r}: {part!r} is already an entry")
                    mine.add(id(inner))
                    node[part] = inner
                node = inner._data
            if parts[-1] in node:
                raise KeyExistsError(f"unflattening {separator.join(parts)!r}: {parts[-1]!r} is already there")
            node[parts[-1]] = value
        return self._restructured(tree, inplace, lambda v: v.flatten_keys(separator))

    def _restructured(self, data: dict[str, Any], inplace: bool, undo: Callable[[Any], Any]) -> Self:
        if inplace:
            if self.is_locked:
                raise self._refuse_locked("change the key structure")
            self._whole("change the key structure")
            self._drop(list(self._first_keys()))
            self._assign(data)
            return self
        td = self._resident()
        out = td._new(data, td._batch_size, td._device, td._names, td._state & READONLY)
        out._undo = (weakref.ref(self), undo)
        return out  # type: ignore[no-any-return]

    def _write_replaced(self, made: Any) -> None:
        """Write entries that differ in a restructured copy into the existing entries, locked or not.

        Raises:
            LockedError: the copy has an entry that does not exist here.
        """
        if isinstance(made, self._stack_class) and isinstance(self, self._stack_class):
            for mine, theirs in zip(self.tensordicts, made.tensordicts, strict=True):
                mine._write_replaced(theirs)
            return
        changed: dict[Path, Any] = {}
        for path, value in made._resident()._flat_entries((), None):
            node = self._node(path[:-1])
            if node is None or node._kind(path[-1]) is None:
                raise self._refuse_locked(f"set {path_text(path)}")
            if not _alike(node._raw(path[-1]), value):
                changed[path] = value
        self._update_in_place(changed, None, None)

    def create_nested(self, key: NestedKey) -> Self:
        """Set an empty nested TensorDict of this batch size and device at a key. It replaces an existing entry.

        Args:
            key: a string, or a tuple of strings.

        Returns:
            This TensorDict.

        Raises:
            LockedError: the TensorDict is locked.

        Example:
            >>> td = TensorDict({}, [3]).create_nested(("a", "b"))
            >>> td["a", "b"].batch_size
            torch.Size([3])
        """
        return self.set(key, self._resident_class._new({}, self._batch_size, self._device, self._names))


KEY_SET = "a sequence of keys or a dict"


def _names_of(key_set: Any) -> dict[Path, Path]:
    """Map each key of one of the sets of `split_keys` to its path in the result."""
    if not isinstance(key_set, dict):
        keys = [key_set] if isinstance(key_set, str) else as_list(key_set, "key_set", KEY_SET)
        return {path: path for path in map(entry_path, keys)}
    names = {entry_path(key): entry_path(name) for key, name in key_set.items()}
    for name in set(names.values()):
        if len(keys := [path_text(key) for key, other in names.items() if other == name]) > 1:
            raise OptionError(f"split_keys: {' and '.join(keys)} cannot both be {path_text(name)}")
    return names


def _filled(entry: Any, value: Any) -> Any:
    """Build the tree of `entry` with `value` in every leaf."""
    if isinstance(entry, NonTensor):
        return entry.own_copy()
    if isinstance(entry, Container):
        td = entry._resident()
        return td._new({k: _filled(v, value) for k, v in td._data.items()}, td._batch_size, td._device, td._names)
    return torch.as_tensor(value, dtype=entry.dtype, device=entry.device).expand(entry.shape)


def _alike(old: Any, new: Any) -> bool:
    """Check whether an entry would be the same after a write."""
    if old is new:
        return True
    if isinstance(old, Tensor) and isinstance(new, Tensor) and not (old.is_nested or new.is_nested):
        return old.dtype == new.dtype and torch.equal(old, new)
    return isinstance(old, NonTensor) and isinstance(new, NonTensor) and old.same(new)
