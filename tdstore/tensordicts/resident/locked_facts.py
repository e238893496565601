"""What is true of a locked tree in memory until an entry comes, goes or is replaced: its tensors in order, its keys.

Nothing that a tensor can change by itself is kept: shapes, dtypes and gradients are asked for each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from torch import Tensor
from torch.compiler import is_compiling

from tdstore.container.core.container import Container
from tdstore.container.core.locks import LOCKED
from tdstore.container.core.tensorclasses import Typed
from tdstore.container.entries.unbatched import UnbatchedTensor, is_batched
from tdstore.tensordicts.resident.entries import ResidentTree


class TreeFacts(NamedTuple):
    """Facts about a locked tree of TensorDicts, perhaps in tensorclasses, that are no part of a store."""

    leaves: tuple[Tensor, ...]
    """All tensors, depth first in key order."""
    keys: tuple[str | bool | None, ...]
    """All keys in the same order: None follows the key of a value, True that of a TensorDict, False its last entry."""
    sorted_keys: tuple[str, ...]
    """Those of the first level."""
    depth: int
    """That of the deepest entry; -1 if there is none."""
    has_values: bool
    """Whether there are entries that are no tensors. Their objects are replaced when they are written."""
    flat: dict[str, dict[str, Tensor]]
    """By separator: the tensors, by their flattened keys."""


class LockedTree(ResidentTree):
    """What is asked of the facts about a locked tree."""

    __slots__ = ()

    def _tree_facts(self) -> TreeFacts | None:
        """Return the facts about a locked tree; None of others, and where entries of other kinds are in it.

        Under torch.compile there are none: the graph would depend on what was asked before.
        """
        if self._state != LOCKED or is_compiling() or (known := self._facts) is None:
            return None
        try:
            found: TreeFacts | None = known["tree"]
        except KeyError:
            found = known["tree"] = _gathered(self)
        return found

    def _leaf_list(self) -> list[Tensor]:
        if self._state == LOCKED and (facts := self._tree_facts()) is not None:
            return list(facts.leaves)
        leaves: list[Tensor] = []
        self._collect(leaves)
        return leaves

    def _own_leaves(self) -> list[Tensor] | tuple[Tensor, ...] | None:
        """Return all leaves, unless a container of another kind is below. They are not to be changed."""
        if self._state == LOCKED and (facts := self._tree_facts()) is not None:
            return facts.leaves
        leaves: list[Tensor] = []
        return leaves if self._collect(leaves) else None

    def is_contiguous(self) -> bool:
        leaves = self._own_leaves()
        return super().is_contiguous() if leaves is None else all(map(Tensor.is_contiguous, leaves))

    def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> Self:
        leaves = None if canonical or inplace else self._own_leaves()
        if leaves is None or not all(map(Tensor.is_contiguous, leaves)):
            return super().contiguous(canonical=canonical, inplace=inplace)
        return self._with_leaves(iter(leaves))

    def _leaf_depth(self) -> int:
        if self._state == LOCKED and (facts := self._tree_facts()) is not None:
            return facts.depth
        deepest = -1
        for value in self._data.values():
            if type(value) is not Tensor and isinstance(value, Container):
                below = value._leaf_depth()
                deepest = max(deepest, below + 1 if below >= 0 else -1)
            elif deepest < 0:
                deepest = 0
        return deepest

    @property
    def sorted_keys(self) -> list[str]:
        """First-level keys in alphabetical order."""
        if self._state == LOCKED and (facts := self._tree_facts()) is not None:
            return list(facts.sorted_keys)
        return sorted(self._data)

    def flatten_keys(
        self, separator: str = ".", inplace: bool = False, is_leaf: Callable[[type], bool] | None = None
    ) -> Self:
        facts = self._tree_facts() if self._state == LOCKED else None
        if facts is None or facts.has_values or inplace or is_leaf is not None or type(separator) is not str:
            return super().flatten_keys(separator, inplace, is_leaf)
        if separator not in facts.flat:
            if len(facts.flat) >= _SEPARATORS:
                facts.flat.clear()
            facts.flat[separator] = super().flatten_keys(separator)._data.copy()
        made = self._new(facts.flat[separator].copy(), self._batch_size, self._device, self._names)
        made._undo = (weakref.ref(self), lambda td: td.unflatten_keys(separator))
        return made


_SEPARATORS = 4
"""For how many separators the flattened keys of one tree are kept."""


def _gathered(td: Any) -> TreeFacts | None:
    leaves: list[Tensor] = []
    keys: list[str | bool | None] = []
    depth, has_values = -1, False
    if not may_keep(td):
        return None
    waiting = [iter(td._data.items())]  # no recursion: trees may be deeper than Python's stack
    while waiting:
        for key, value in waiting[-1]:
            keys.append(key)
            if type(value) is Tensor or is_batched(value):
                leaves.append(value)
            elif isinstance(value, Container):
                group: Any = value._tensordict if isinstance(value, Typed) else value
                if not may_keep(group):
                    return None
                keys.append(True)
                waiting.append(iter(group._data.items()))
                break
            elif isinstance(value, UnbatchedTensor):
                return None
            else:
                keys.append(None)
                has_values = True
            depth = max(depth, len(waiting) - 1)
        else:
            waiting.pop()
            keys.append(False)
    return TreeFacts(tuple(leaves), tuple(keys), tuple(sorted(td._data)), depth, has_values, {})


def may_keep(td: Any) -> bool:
    """Check whether a container tells those above it when an entry comes, goes or is replaced."""
    plain = type(td) is Container._resident_class and td._binding is None
    return plain and td._state == LOCKED and td._facts is not None
