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

        Raises:
            KeyNotFoundError, LockedError.
        """
        found = self._find(key)
        if (self if found is None else found[0]).is_locked:
            raise self._refuse_locked(f"delete {key_text(key)}")
        node, last = found or self._existing(key)
        node._drop([last])
        return self

    def pop(self, key: NestedKey, default: Any = NO_DEFAULT) -> Entry:
        """Remove an entry and return it (non-tensor values wrapped, as `get` gives them), or `default`."""
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
        """Remove the last first-level entry and return `(key, entry)`."""
        keys = list(self._first_keys())
        if not keys:
            raise errors.KeyNotFoundError("popitem: the TensorDict is empty")
        return keys[-1], self.pop(keys[-1])

    def _detached(self) -> Any:
        """Return what remains of a nested container when its place is removed."""
        return self

    def clear(self) -> Self:
        """Remove every entry."""
        if self.is_locked:
            raise self._refuse_locked("clear")
        self._drop(list(self._first_keys()))
        return self

    def rename_key_(self, old_key: NestedKey, new_key: NestedKey, safe: bool = False) -> Self:
        """Move an entry to another (nested) key.

        Args:
            safe: raise `KeyError` if the new key exists; otherwise it is replaced.
        """
        node, last = (self, "") if self.is_locked else self._existing(old_key)
        if node.is_locked:
            raise self._refuse_locked(f"rename {old_key!r}")
        old, new = entry_path(old_key), entry_path(new_key)
        if old == new:
            return self
        target: Any = self._node(new[:-1])
        if safe and target is not None and target._kind(new[-1]) is not None:
            raise errors.KeyExistsError(f"key {new_key!r} is already there")
        if target is not None and target is node:
            node._rename(last, new[-1])
            return self
        node._whole("rename entries")
        entry = node._raw(last)
        self.set(new, entry)
        node._drop([last])
        return self
