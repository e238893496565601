"""Sums and minima over an array of which some elements change, for many queries at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
FAN = 32
"""Children of a node: one level reads four cache lines for each query."""
_SHIFT = FAN.bit_length() - 1
_FLAT = 10_240
"""Up to this many sums are added up at once faster than another level is read."""
_FEW = 32_768
"""Up to this many minima are compared as fast as a few."""
_MANY = 1024
"""From this many changes on, nodes that several of them share are updated once."""
_STALE = 16_384
"""This many changes of nodes may wait for their minima, and 16 times as many if they soon concern the same nodes."""


class SegmentTree:
    """Non-negative weights of slots, their sum, and their smallest one that is not zero.

    Each level is one array; a node is the sum (the minimum) of 32 nodes below it, and above 10,240 nodes or fewer
    there is their running sum. A batch of changes or queries is processed level by level, so its cost grows with the
    number of levels: 1 for 300,000 slots, 2 for 10 million. A sum is computed again from everything below it whenever
    some of that changes, so that rounding errors do not accumulate. The smallest weight is known without the minima of
    nodes until one as small is overwritten; only then are the minima brought up to date.

    Args:
        size: number of slots.

    Example:
        >>> tree = SegmentTree(4)
        >>> tree.update(np.arange(4), np.array([1.0, 2.0, 3.0, 4.0]))
        >>> tree.total, tree.smallest, tree.find(np.array([0.5, 2.9, 9.9]))
        (10.0, 1.0, array([0, 1, 3]))
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._weights: list[Floats] = []
        self._lows: list[Floats] = []
        """Smallest weights of the nodes above the slots; then smallest ones of 32 of these, where there are many."""
        length = size
        while not self._weights or length > _FLAT:
            length = -(-length // FAN)
            self._weights.append(np.zeros((length, FAN)))
            if not self._lows or self._lows[-1].size > _FEW:
                self._lows.append(np.full(-(-length // FAN) * FAN, np.inf))
        self._flat = self._weights[0].reshape(-1)
        """Weights of the slots."""
        self._top = np.zeros(length)
        """Sums of the nodes of the last level."""
        self._running = np.zeros(length + 1)
        """Sums of the nodes of the last level before each one; behind the last one infinity, which no mass reaches."""
        self._ends = self._running[1:]
        self._cumsum = torch.from_numpy(self._top), torch.from_numpy(self._ends)
        self._total: float | None = 0.0
        """Sum of all weights; None after a change, and then the running sums are old, too."""
        self._running[-1] = np.inf
        self._smallest: float | None = np.inf
        """The smallest weight; None: it is looked for in the minima."""
        self._stale: list[Ints] = []
        """Nodes above the slots whose minima are old."""
        self._waiting = 0
        """How many these are, counted once for each change."""
        self._most = 16 * _STALE if len(self._weights[0]) <= 4 * _STALE else _STALE
        """How many may wait."""

    @property
    def total(self) -> float:
        """Sum of all weights."""
        if self._total is None:
            top, ends = self._cumsum
            torch.cumsum(top, 0, out=ends)
            self._total = float(self._running[-1])
            self._running[-1] = np.inf
        return self._total

    @property
    def smallest(self) -> float:
        """Smallest weight above zero; infinity when there is none."""
        if self._smallest is None:
            self._refresh()
            self._smallest = float(self._lows[-1].min())
        return self._smallest

    @property
    def largest(self) -> float:
        """Largest weight."""
        return float(self._flat.max())

    def __getitem__(self, slots: Ints) -> Floats:
        """Return the weights of slots."""
        return self._flat.take(slots)

    def update(self, slots: Ints, weights: Floats | float) -> None:
        """Set weights of slots; a slot that is named twice gets the last one."""
        if not len(slots):
            return
        before = self._flat.take(slots)
        self._flat[slots] = weights
        self._total = None
        nodes = slots >> _SHIFT
        if len(nodes) > _MANY:
            nodes = _unique(nodes)
        self._lower(nodes, before, self._flat.take(slots))
        for level, below in enumerate(self._weights):
            if level:
                nodes = nodes >> _SHIFT
                if len(nodes) > _MANY:
                    nodes = _unique(nodes)
            above = self._weights[level + 1].reshape(-1) if level + 1 < len(self._weights) else self._top
            above[nodes] = np.einsum("ij->i", below.take(nodes, 0, None, "clip"))

    def _lower(self, nodes: Ints, before: Floats, now: Floats) -> None:
        """Follow the smallest weight through a change of slots below nodes."""
        self._stale.append(nodes)
        self._waiting += len(nodes)
        if self._waiting > self._most:
            self._refresh()
        if self._smallest is None:
            return
        low = np.minimum.reduce(now)
        if not low:
            low = np.where(now > 0, now, np.inf).min()
        if low <= self._smallest:
            self._smallest = float(low)
        elif (before == self._smallest).any():
            self._smallest = None

    def _refresh(self) -> None:
        """Bring the minima of nodes up to date."""
        if not self._stale:
            return
        count = len(self._weights[0])
        nodes = np.arange(count) if self._waiting >= count else _unique(np.concatenate(self._stale))
        self._stale, self._waiting = [], 0
        lows = _smallest(self._weights[0].take(nodes, 0, None, "clip"))
        *inner, top = self._lows
        for held in inner:
            moved = held.take(nodes) != lows
            held[nodes] = lows
            nodes = nodes[moved] >> _SHIFT
            lows = torch.from_numpy(held.reshape(-1, FAN).take(nodes, 0)).amin(1).numpy()
        top[nodes] = lows

    def find(self, masses: Floats) -> Ints:
        """Find, for each mass in [0, total), the slot in which the running sum of weights exceeds it."""
        return self.draw(np.asarray(masses, np.float64))[0]

    def draw(self, masses: Floats) -> tuple[Ints, Floats]:
        """Find the slots of masses, as `find`, and return them with their weights."""
        _ = self.total
        order = masses.argsort()  # so that all levels are read forward
        left = masses.take(order)
        nodes: Ints = self._ends.searchsorted(left, "right")
        left -= self._running.take(nodes)
        for level in reversed(self._weights):
            if level is not self._weights[-1]:
                np.minimum(nodes, len(level) - 1, out=nodes)  # where rounding put a mass behind the last node
            rows = level.take(nodes, 0)
            first = rows[:, 0]
            first -= left  # so that the first sum above zero is that of the child
            torch.from_numpy(rows).cumsum_(1)
            above = rows > 0
            above[:, -1] = True  # where rounding put a mass beyond the node
            child = above.argmax(1)
            nodes <<= _SHIFT
            nodes += child
            if level is not self._weights[0]:
                ends = rows.reshape(-1).take(child + np.arange(0, len(child) * FAN, FAN))
                left = level.reshape(-1).take(nodes) - ends
        slots = np.empty(len(nodes), np.int64)
        slots[order] = nodes
        weights = self._flat.take(slots)
        if not np.minimum.reduce(weights, initial=np.inf):  # rounding put a mass on a slot without weight
            empty = np.flatnonzero(weights == 0)
            slots[empty] = self._nearest(slots[empty])
            weights = self._flat.take(slots)
        return slots, weights

    def _nearest(self, slots: Ints) -> Ints:
        """Return the slots with weight at or before others; if there is none, the first one after them."""
        weighted = np.flatnonzero(self._flat)
        at = weighted.searchsorted(slots, side="right") - 1
        found: Ints = weighted[np.maximum(at, 0)]
        return found

    def clear(self) -> None:
        """Set all weights to zero."""
        for level in (*self._weights, self._top):
            level.fill(0.0)
        for lows in self._lows:
            lows.fill(np.inf)
        self._total, self._smallest = None, np.inf
        self._stale, self._waiting = [], 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the size and the weights: everything else is views and sums of them."""
        return {"size": self.size, "weights": self.weights(self.size)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Sum up the weights again."""
        SegmentTree.__init__(self, state["size"])
        self.update(np.arange(self.size), state["weights"])

    def weights(self, length: int) -> Floats:
        """Return the weights of the first slots, a copy."""
        return self._flat[:length].copy()


def _smallest(rows: Floats) -> Floats:
    """Return the smallest number above zero of each row; infinity where there is none."""
    found: Floats = torch.from_numpy(rows).amin(1).numpy()
    if not found.all():
        some = np.flatnonzero(found == 0)
        among = rows[some]
        found[some] = np.where(among > 0, among, np.inf).min(1)
    return found


def _unique(nodes: Ints) -> Ints:
    if len(nodes) < 2:
        return nodes
    ordered = np.sort(nodes)
    first = np.empty(len(ordered), bool)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]
