"""Remove and rename entries."""

from __future__ import annotations

from typing import Any, Self

from tdstore import errors
from tdstore.container.core.container import Container
from tdstore.container.core.paths import entry_path
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.container.values.nontensor import NonTensor
from tdstore.keys import key_text
from tdstore.types import Entry, NestedKey


class RemovingMixin(Container):
    """del_, pop, popitem, clear, rename_key_."""

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
        found = self._find(key)
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
