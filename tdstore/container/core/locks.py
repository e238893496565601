"""Locking: the key set of a tree is frozen; tensor contents may still change in place.

A locked container keeps weak references to the locked containers above it, so that a child cannot be
unlocked behind its parent's back.
"""

from __future__ import annotations

import weakref
from typing import Any, Self

from tdstore.errors import LockedError
from tdstore.index.tracing import traced_setters

LOCKED = 1
BOUND = 2
"""The entries are views of a store (see container/handle.py)."""
MAPPED = 8
"""The tensors are views of a persistent store: `is_memmap()`."""
SHARED = 16
"""The tensors are views of a shared store: `is_shared()`."""
THROUGH = 32
"""Changes of structure go to the store too: the container was opened for writing."""
CONSOLIDATED = 64
"""The tensors are views of one buffer."""
SOURCE_LOCKED = 256
"""What was consolidated was locked: a pickle of it comes locked."""
ALIAS = 128
"""The tensors are `.data` or `detach()` of tensors that require gradients; `share_memory_` moves both."""
READONLY = 4
"""The store was opened for reading: in-place writes are refused."""
_MANY = 16


@traced_setters
class LockMixin:
    """`lock_`, `unlock_`, `is_locked`."""

    __slots__ = ("_facts", "_parents", "_state", "_undo")

    _state: int
    _facts: dict[str, Any] | None
    """What is known of a locked container until an entry, here or below, comes, goes or is replaced; None from then on,
    until it is locked again. Set once it was locked. What is found out goes into the dict that was there before: if
    another thread unlocked meanwhile, nobody sees that dict again."""
    _parents: list[weakref.ref[Any]] | None
    _undo: Any
    """What leaving a `with` of this object undoes: the name of a method ("" for nothing), a function of this
    object, or where this view came from and how to turn it back. While `with` blocks run, a list: what is
    offered to the next one, then theirs."""

    def _offer(self, undo: Any) -> None:
        """Say what leaving a `with` that is entered next undoes; those that run keep theirs."""
        if isinstance(self._undo, list):
            self._undo[0] = undo
        else:
            self._undo = undo

    def _groups(self) -> list[Any]:
        """Return the nested containers one level down."""
        raise NotImplementedError

    @property
    def is_locked(self) -> bool:
        """Whether keys cannot be added, replaced or removed."""
        return self._state & LOCKED != 0

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        if value:
            self.lock_()
        else:
            self.unlock_()

    def lock_(self) -> Self:
        """Freeze the set of keys of this TensorDict and of all nested ones. Data can still be written in place.

        As a context manager, it locks for the body of the `with` block.

        Returns:
            This TensorDict.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2)}, [2])
            >>> with td.lock_():
            ...     td.is_locked, td.set_("a", torch.ones(2))["a"]
            (True, tensor([1., 1.]))
            >>> td.is_locked
            False
        """
        new = not self._state & LOCKED
        if new:
            self._lock(None)
        self._offer("unlock_" if new else "")
        return self

    def _lock(self, parent: weakref.ref[Any] | None) -> None:
        """Lock this and what is below, without recursion: trees may be deeper than Python's stack."""
        waiting = [(self, parent)]
        fresh = []
        while waiting:
            node, above = waiting.pop()
            if above is not None:
                if node._parents is None:
                    node._parents = [above]
                else:
                    if len(node._parents) >= _MANY:  # some were objects for a moment, as `td[key]` of a lazy stack is
                        node._parents = [ref for ref in node._parents if ref() is not None]
                    node._parents.append(above)
            if node._state & LOCKED:
                continue
            node._facts = None
            node._state |= LOCKED
            fresh.append(node)
            groups = node._groups()
            if groups:
                me = weakref.ref(node)
                for group in groups:
                    waiting.append((_bare(group), me))  # a comprehension is a call
        for node in fresh:  # all below know who is above
            node._facts = {}

    def unlock_(self) -> Self:
        """Allow keys to be added, replaced and removed again, here and in all nested TensorDicts.

        As a context manager, it unlocks for the body of the `with` block.

        Returns:
            This TensorDict.

        Raises:
            LockedError: this TensorDict is nested in another one that is locked.

        Example:
            >>> td = TensorDict({"a": torch.zeros(2)}, [2]).lock_()
            >>> with td.unlock_():
            ...     td["b"] = torch.ones(2)
            >>> td.is_locked, list(td.keys())
            (True, ['a', 'b'])
        """
        if not self._state & LOCKED:
            self._offer("")
            return self
        if self._parents and self._locked_parents():
            raise LockedError(
                "cannot unlock a TensorDict that is part of a locked one", hint="unlock the outermost one"
            )
        self._unlock()
        self._offer("lock_")
        return self

    def _locked_parents(self) -> list[Any]:
        parents = [ref() for ref in self._parents or ()]
        return [p for p in parents if p is not None and p._state & LOCKED]

    def _unlock(self) -> None:
        """Unlock this and what is below, all or nothing; a node may be below it twice."""
        nodes = {id(self): self}
        waiting: list[Any] = [self]
        while waiting:
            for group in map(_bare, waiting.pop()._groups()):
                if id(group) not in nodes:
                    nodes[id(group)] = group
                    waiting.append(group)
        for node in nodes.values():
            if node is not self and node._has_parent_outside(nodes):
                raise LockedError(
                    "a nested TensorDict is also part of another locked one", hint="unlock that one first"
                )
        for node in nodes.values():
            node._state &= ~(LOCKED | CONSOLIDATED)
            node._parents = node._facts = None
            if node._state & BOUND:
                node._forget_views()

    def _has_parent_outside(self, nodes: dict[int, Any]) -> bool:
        for ref in self._parents or ():
            parent = ref()
            if parent is not None and id(parent) not in nodes and parent._state & LOCKED:
                return True
        return False

    def _forget_facts(self) -> None:
        """Keep nothing more of this container and of those above it: an entry comes, goes or is replaced."""
        waiting: list[Any] = [self] if self._state & LOCKED else []
        while waiting:
            node = waiting.pop()
            node._facts = None
            waiting += node._locked_parents()

    def _forget_views(self) -> None:
        """Drop cached facts about the structure, which may change now."""

    def _refuse_locked(self, what: str) -> LockedError:
        return LockedError(
            f"cannot {what}: the TensorDict is locked",
            hint="in-place changes (set_, update_, td[index] = ...) are allowed; or call unlock_() or clone() first",
        )


def _bare(group: Any) -> Any:
    """Return the container of a tensorclass, which carries its lock; return any other object as it is."""
    return getattr(group, "_tensordict", group)
