"""Lazy gathers from a list, materialised on first access or before the source changes.

Indexing a batch with text moves no text: a million strings lie all over the memory, and to take 256 of them costs more
than to take all the tensors beside them (256 of 300,000 rows: 2.6 times as long without). What was taken is settled
before a row of the source is written, and when nobody has the source any longer, so nobody can tell.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

MANY = 16
"""From so many values on it pays."""
_PRUNE = 64
_SHARED = 4096


def counted(n: int) -> Tensor:
    """Return the positions of values that lie in order; those of a batch are one shared tensor, which is never written.

    More of them are not kept: 64 lengths of a million would hold half a gigabyte.
    """
    return _shared(n) if n <= _SHARED else _positions(n)


def _positions(n: int) -> Tensor:
    return torch.from_numpy(np.arange(n))  # on the CPU, and real, whatever mode torch is in


_shared = functools.lru_cache(64)(_positions)


class LazyGather:
    """Values of a list at some positions, int64 `[n]`. Read like a list; the lock is that of the list."""

    __slots__ = ("__weakref__", "_at", "_lock", "_source", "_values")

    def __init__(self, source: list[Any], at: Tensor, lock: Any) -> None:
        self._source, self._at, self._lock = source, at, lock
        self._values: list[Any] | None = None

    def values(self) -> list[Any]:
        """Return the values, as a list that no longer depends on the source."""
        if self._values is None:
            with self._lock:  # they are fetched once, though several look
                if self._values is None:
                    self._values = list(map(self._source.__getitem__, self._at.tolist()))
                    self._source = self._values
        return self._values

    def __getitem__(self, i: int) -> Any:
        return self.values()[i]

    def __setitem__(self, i: int, value: Any) -> None:
        self.values()[i] = value

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __len__(self) -> int:
        return len(self._at)


class GatherRegistry:
    """All gathers from one list, shared by the stacks over it."""

    __slots__ = ("_lock", "_pending", "_prune_at")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what is missing from the list is never settled
        self._pending: list[weakref.ref[LazyGather]] = []
        self._prune_at = _PRUNE

    def gather(self, source: list[Any], at: Tensor) -> LazyGather:
        """Gather values of that list lazily."""
        made = LazyGather(source, at, self._lock)
        with self._lock:
            if len(self._pending) >= self._prune_at:  # most are gone
                self._pending = [ref for ref in self._pending if ref() is not None]
                self._prune_at = max(_PRUNE, 2 * len(self._pending))
            self._pending.append(weakref.ref(made))
        return made

    def materialize(self) -> None:
        """Fetch what is not fetched yet: the list is about to change, or to go."""
        with self._lock:
            for ref in self._pending:
                if (made := ref()) is not None:
                    made.values()
            self._pending.clear()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Else a few rows that are kept would keep all the others. (At the end, the interpreter empties this module.)
        if self._pending and not is_finalizing():
            self.materialize()


def repeats(at: Tensor) -> bool:
    """Check whether positions were expanded: one value at several of them."""
    return any(n > 1 and step == 0 for n, step in zip(at.shape, at.stride(), strict=True))


class PartValues(list[Any]):
    """The values of stacked entries that are one value each: a part that is taken out again is one value."""


def stacked_positions(sizes: Sequence[torch.Size], fn: Callable[[list[Tensor]], Tensor]) -> Tensor | None:
    """Return the number of its part at each position of what `fn` stacks; None if it joins them in another way.

    The steps of the dimensions of the parts are zero, also where they have one row.
    """
    count, size = len(sizes), sizes[0]
    if count < 2 or not size.numel() or any(other != size for other in sizes) or torch.compiler.is_compiling():
        return None
    shape = fn([torch.empty((0,) * len(size), device="cpu")] * count).shape
    if len(shape) != len(size) + 1 or shape.count(count) != 1:
        return None
    at = shape.index(count)
    whole = [*size[:at], count, *size[at:]]
    return counted(count).as_strided(whole, [int(d == at) for d in range(len(whole))])
