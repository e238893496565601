"""Remove and rename entries."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Self

from tdstore import errors
from tdstore.arguments import refuse_type
from tdstore.container.core.container import GROUP, Container
from tdstore.container.core.paths import entry_path
from tdstore.container.core.tensorclasses import Typed, rewrap, unwrap
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.container.values.nontensor import NonTensor
from tdstore.keys import key_text
from tdstore.types import Entry, NestedKey, Path, path_text


class RemovingMixin(Container):
    """del_, pop, popitem, clear, rename_key_, rename_keys."""

    __slots__ = ()

    def del_(self, key: NestedKey) -> Self:
        """Remove an entry.

        Args:
            key: a string, or a tuple of strings for a nested entry.

        Returns:
            This TensorDict.

        Raises:
            KeyNotFoundError: there is no such entry.
            LockedError: the TensorDict that has the entry is locked.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2), "c": torch.ones(2)}}, [2])
            >>> list(td.del_(("n", "b")).keys(True, True))
            ['a', ('n', 'c')]
        """
        found = self._find(key)
        if (self if found is None else found[0]).is_locked:
            raise self._refuse_locked(f"delete {key_text(key)}")
        node, last = found or self._existing(key)
        node._drop([last])
        return self

    def pop(self, key: NestedKey, default: object = NO_DEFAULT) -> Entry:
        """Remove an entry and return it. An entry of a stored TensorDict is read into memory first.

        Args:
            key: a string, or a tuple of strings for a nested entry.
            default: what to return if there is no such entry.

        Returns:
            A tensor, a TensorDict, or a wrapped value, as `get` returns it.

        Raises:
            KeyNotFoundError: there is neither such an entry nor a `default`.
            LockedError: the TensorDict that has the entry is locked.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2), "b": torch.ones(2)}, [2])
            >>> td.pop("b"), td.pop("b", None), list(td.keys())
            (tensor([1., 1.]), None, ['a'])
        """
        found = self._find(key, optional=default is not NO_DEFAULT)
        if found is None:
            if default is NO_DEFAULT:
                raise self._missing(key)
            return default
        node, last = found
        if node.is_locked:
            raise node._refuse_locked(f"pop {key_text(key)}")
        entry: Any = node._raw(last)
        if isinstance(entry, Container):
            entry = entry._detached()  # type: ignore[attr-defined]
        elif isinstance(entry, NonTensor):
            entry = entry.own_copy()  # what it may have in the store goes now
        node._drop([last])
        return entry

    def popitem(self) -> tuple[str, Any]:
        """Remove the last first-level entry and return it with its key.

        Returns:
            `(key, entry)`.

        Raises:
            KeyNotFoundError: there are no entries.
            LockedError: the TensorDict is locked.

        Example:
            >>> TensorDict({"a": torch.zeros(2), "b": torch.ones(2)}, [2]).popitem()
            ('b', tensor([1., 1.]))
        """
        keys = list(self._first_keys())
        if not keys:
            raise errors.KeyNotFoundError("popitem: the TensorDict is empty")
        return keys[-1], self.pop(keys[-1])

    def _detached(self) -> Any:
        """Return what remains of a nested container when it is removed from its parent."""
        return self

    def clear(self) -> Self:
        """Remove all entries. The batch size and the device stay.

        Returns:
            This TensorDict.

        Raises:
            LockedError: the TensorDict is locked.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2)}, [2]).clear()
            >>> td.is_empty(), td.batch_size
            (True, torch.Size([2]))
        """
        if self.is_locked:
            raise self._refuse_locked("clear")
        self._drop(list(self._first_keys()))
        return self

    def rename_key_(self, old_key: NestedKey, new_key: NestedKey, safe: bool = False) -> Self:
        """Move an entry to another (nested) key, in place. Within one TensorDict, no data is copied.

        Args:
            old_key: a string, or a tuple of strings for a nested entry.
            new_key: the new key; missing nested TensorDicts above it are created.
            safe: refuse a new key that exists; otherwise its entry is replaced.

        Returns:
            This TensorDict.

        Raises:
            KeyNotFoundError: there is no entry at `old_key`.
            KeyExistsError: `safe`, and there is an entry at `new_key`.
            InvalidKeyError: `new_key` is below `old_key`: a TensorDict cannot be an entry of itself.
            LockedError: the TensorDict is locked.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2)}, [2])
            >>> list(td.rename_key_("a", ("n", "b")).keys(True, True))
            [('n', 'b')]
        """
        node, last = (self, "") if self.is_locked else self._existing(old_key)
        if node.is_locked:
            raise self._refuse_locked(f"rename {old_key!r}")
        old, new = entry_path(old_key), entry_path(new_key)
        if old == new:
            return self
        if new[: len(old)] == old:
            raise errors.InvalidKeyError(
                f"cannot rename {old_key!r} to {new_key!r}, which is below it",
                hint="rename it to a key of its own, and that one to the key below",
            )
        target: Any = self._node(new[:-1])
        if safe and target is not None and target._kind(new[-1]) is not None:
            raise errors.KeyExistsError(f"cannot rename {old_key!r}: there is an entry {new_key!r} already")
        if target is not None and target is node:
            node._rename(last, new[-1])
            return self
        node._whole("rename entries")
        entry = node._raw(last)
        self.set(new, entry)
        node._drop([last])
        return self

    def rename_keys(self, mapping: Mapping[NestedKey, NestedKey], *, strict: bool = True) -> Self:
        """Return a TensorDict with several entries under other keys. This one is not changed, and shares its entries.

        All old keys are read before a new one is written, so two entries can exchange their names. A nested TensorDict
        that loses all its entries is left out. The entries of a stored TensorDict are read into memory.

        Args:
            mapping: old keys to new keys, both nested or not. An old key of a nested TensorDict moves all of it.
            strict: refuse old keys that do not exist. Otherwise they are ignored.

        Returns:
            An unlocked TensorDict with the batch size, device and names of this one.

        Raises:
            KeyNotFoundError: `strict`, and there is no entry at an old key.
            InvalidArgumentError: an entry stays at a new key, or two old (or new) keys are equal, or one below another.
            NotAGroupError: a new key leads through an entry that is no TensorDict.
            InvalidKeyError: a key is neither a string nor a tuple of strings.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2), "b": torch.ones(2), "n": {"c": torch.ones(2)}}, [2])
            >>> list(td.rename_keys({"a": "b", "b": "a", ("n", "c"): "c"}).keys())
            ['b', 'a', 'c']
        """
        moves = _moves(mapping)
        made = _own_tree(self)
        # Each element of a lazy stack moves its own entries, so that they stay apart.
        parts: list[Any] = list(made.tensordicts) if isinstance(made, self._stack_class) else [made]
        moved = [_take(td, moves, strict) for td in parts]
        emptied = [_emptied(td, entries, moves) for td, entries in zip(parts, moved, strict=True)]
        gone = set(emptied[0]).intersection(*emptied[1:]) if parts else set()
        for td, entries in zip(parts, moved, strict=True):
            for path in sorted(gone, key=len, reverse=True):
                td._node(path[:-1])._drop([path[-1]])
            for old, entry in entries.items():
                _put(td, old, moves[old], entry)
        renamed: Self = made
        return renamed


def _moves(mapping: Mapping[NestedKey, NestedKey]) -> dict[Path, Path]:
    """Return the paths of a mapping of keys, if their order does not matter."""
    if not isinstance(mapping, Mapping):
        raise refuse_type("mapping", "a dict of old keys to new keys", mapping)
    pairs = [(entry_path(old), entry_path(new)) for old, new in mapping.items()]
    for what, paths in (("old", sorted(old for old, _ in pairs)), ("new", sorted(new for _, new in pairs))):
        for path, other in itertools.pairwise(paths):  # a path is sorted just before those below it
            if path == other:
                raise errors.InvalidArgumentError(f"rename_keys: {path_text(path)} is the {what} key of two entries")
            if other[: len(path)] == path:
                raise errors.InvalidArgumentError(
                    f"rename_keys: the {what} key {path_text(other)} is below the {what} key {path_text(path)}",
                    hint="rename one after the other",
                )
    return dict(pairs)


def _own_tree(td: Any) -> Any:
    """Copy the structure of a container around the same entries, in memory; lazy stacks stay stacks."""
    own = unwrap(td)
    if isinstance(own, Container._stack_class):
        made = own._each(_own_tree)
    else:
        own = own._resident()
        entries = {key: _own_tree(v) if isinstance(v, Container) else v for key, v in own._data.items()}
        made = own._new(entries, own._batch_size, own._device, own._names)
    return rewrap(type(td), made) if isinstance(td, Typed) else made


def _take(td: Any, moves: Mapping[Path, Path], strict: bool) -> dict[Path, Any]:
    """Remove the entries that get another path from a TensorDict, and return them."""
    found = {}
    for path in moves:
        node = td._node(path[:-1])
        if node is not None and node._kind(path[-1]) is not None:
            found[path] = node, path[-1]
        elif strict:
            raise td._missing(path)
    found = {path: place for path, place in found.items() if moves[path] != path}
    entries = {path: node._raw(last) for path, (node, last) in found.items()}
    for node, last in found.values():
        node._drop([last])
    return entries


def _emptied(td: Any, moved: Iterable[Path], moves: Mapping[Path, Path]) -> list[Path]:
    """Return the paths of nested TensorDicts that have lost all their entries, and get no others."""
    entered = {moves[old][:i] for old in moved for i in range(1, len(moves[old]))}
    emptied: set[Path] = set()
    for path in sorted({old[:i] for old in moved for i in range(1, len(old))} - entered, key=len, reverse=True):
        node = td._node(path)
        if not isinstance(node, Typed) and {(*path, key) for key in _keys_of(node)} <= emptied:
            emptied.add(path)
    return list(emptied)


def _keys_of(node: Any) -> set[str]:
    """Return the first-level keys of a container, and those that only some elements of a lazy stack have."""
    if isinstance(node, Container._stack_class):
        return set().union(*(_keys_of(td) for td in node.tensordicts))
    return set(node._first_keys())


def _put(td: Any, old: Path, new: Path, entry: Any) -> None:
    """Set an entry of `rename_keys` where none is.

    Raises:
        InvalidArgumentError: there is one.
        NotAGroupError: the path leads through an entry that is no TensorDict.
    """
    node = td
    for i, key in enumerate(new):
        kind = node._kind(key)
        if kind is None:
            break
        if i == len(new) - 1:
            raise errors.InvalidArgumentError(
                f"cannot rename {path_text(old)}: there is an entry {path_text(new)} already",
                hint="give that one another key in the same mapping, or remove it first",
            )
        if kind != GROUP:
            raise errors.NotAGroupError(
                f"cannot rename {path_text(old)} to {path_text(new)}: {path_text(new[: i + 1])} is not a TensorDict"
            )
        node = node._raw(key)
    td.set(new, entry)
