"""Sums and minima over an array that changes in places, for many queries at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
FAN = 32
"""Children of a node: one level is one look at four cache lines for each query."""
_SHIFT = FAN.bit_length() - 1
_FLAT = 4096
"""So many sums are added up at once faster than another level is looked at."""
_FEW = 16_384
"""So many minima are looked at as fast as few."""
_MANY = 1024
"""From so many changes on, nodes that several of them share are worked off once."""


class SegmentTree:
    """Non-negative weights of slots, their sum, and their smallest one that is not zero.

    Each level is one array; a node is the sum (the minimum) of 32 nodes below it, and above 4096 nodes or fewer there
    is their running sum. A batch of changes or queries is worked off level by level, so its cost grows with the number
    of levels: 1 for 100,000 slots, 3 for 10 million.

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
        length = size
        while not self._weights or length > _FLAT:
            length = -(-length // FAN)
            self._weights.append(np.zeros((length, FAN)))
            if not self._lows or self._lows[-1].size > _FEW:
                self._lows.append(np.full((length, FAN), np.inf))
        self._top = np.zeros(length)
        """Sums of the nodes of the last level."""
        self._running: Floats | None = np.zeros(length)
        """The running sum of these; None after a change."""

    def _sums(self) -> Floats:
        if self._running is None:
            self._running = self._top.cumsum()
        return self._running

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._sums()[-1])

    @property
    def smallest(self) -> float:
        """Smallest weight above zero; infinity when there is none."""
        return float(self._lows[-1].min())

    @property
    def largest(self) -> float:
        """Largest weight."""
        return float(self._weights[0].max())

    def __getitem__(self, slots: Ints) -> Floats:
        """Return the weights of slots."""
        return self._weights[0].reshape(-1).take(slots)

    def update(self, slots: Ints, weights: Floats | float) -> None:
        """Set weights of slots; of a slot that is named twice, the last one."""
        self._running = None
        self._weights[0].reshape(-1)[slots] = weights
        self._lows[0].reshape(-1)[slots] = np.where(np.asarray(weights) > 0, weights, np.inf)
        nodes = slots
        for level, below in enumerate(self._weights, 1):
            nodes = nodes >> _SHIFT
            if len(nodes) > _MANY:
                nodes = _unique(nodes)
            above = self._weights[level].reshape(-1) if level < len(self._weights) else self._top
            above[nodes] = torch.from_numpy(below.take(nodes, 0)).sum(1).numpy()
            if level < len(self._lows):
                lows = torch.from_numpy(self._lows[level - 1].take(nodes, 0))
                self._lows[level].reshape(-1)[nodes] = lows.amin(1).numpy()

    def find(self, masses: Floats) -> Ints:
        """Find, for each mass in [0, total), the slot in which the running sum of weights exceeds it."""
        left = np.asarray(masses, np.float64)
        sums, starts = self._sums(), np.arange(0, len(left) * FAN, FAN)
        nodes = np.minimum(sums.searchsorted(left, side="right"), len(sums) - 1)
        left = left - (sums.take(nodes) - self._top.take(nodes))
        for level in reversed(self._weights):
            # "clip": a mass of the very total leads beyond the last node.
            rows = level.take(nodes, 0, None, "clip")
            running = torch.from_numpy(rows).cumsum(1)
            child = torch.searchsorted(running, torch.from_numpy(left).view(-1, 1), right=True).view(-1).numpy()
            np.minimum(child, FAN - 1, out=child)
            nodes = (nodes << _SHIFT) + child
            child += starts
            found = rows.take(child)
            left = left - (running.numpy().take(child) - found)
        # Rounding may put a mass at the very end of a node, on a slot without weight.
        empty = np.flatnonzero((found == 0) | (nodes >= self.size))
        if len(empty):
            nodes[empty] = self._nearest(np.minimum(nodes[empty], self.size - 1))
        return np.asarray(nodes, np.int64)

    def _nearest(self, slots: Ints) -> Ints:
        """Return the slots with weight at or before the given ones; where there are none, the first one after them."""
        weighted = np.flatnonzero(self._weights[0].reshape(-1))
        at = weighted.searchsorted(slots, side="right") - 1
        found: Ints = weighted[np.maximum(at, 0)]
        return found

    def clear(self) -> None:
        """Set all weights to zero."""
        for level in (*self._weights, self._top):
            level.fill(0.0)
        self._running = None
        for lows in self._lows:
            lows.fill(np.inf)

    def weights(self, length: int) -> Floats:
        """Return the weights of the first slots, a copy."""
        return self._weights[0].reshape(-1)[:length].copy()


def _unique(nodes: Ints) -> Ints:
    if len(nodes) < 2:
        return nodes
    ordered = np.sort(nodes)
    first = np.empty(len(ordered), bool)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]
