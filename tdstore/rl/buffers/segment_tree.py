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
_FLAT = 10_240
"""So many sums are added up at once faster than another level is looked at."""
_FEW = 32_768
"""So many minima are looked at as fast as few."""
_MANY = 1024
"""From so many changes on, nodes that several of them share are worked off once."""


class SegmentTree:
    """Non-negative weights of slots, their sum, and their smallest one that is not zero.

    Each level is one array; a node is the sum (the minimum) of 32 nodes below it, and above 10,240 nodes or fewer
    there is their running sum. A batch of changes or queries is worked off level by level, so its cost grows with the
    number of levels: 1 for 300,000 slots, 2 for 10 million. A sum is added up anew from all that is below it whenever
    some of that changes, so that errors of rounding do not add up.

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
        self._top = np.zeros(length)
        """Sums of the nodes of the last level."""
        self._running: Floats | None = np.zeros(length)
        """The running sum of these; None after a change."""

    def _sums(self) -> Floats:
        if self._running is None:
            self._running = torch.from_numpy(self._top).cumsum(0).numpy()
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
        nodes = slots
        for level, below in enumerate(self._weights):
            nodes = nodes >> _SHIFT
            if len(nodes) > _MANY:
                nodes = _unique(nodes)
            rows = below.take(nodes, 0)
            above = self._weights[level + 1].reshape(-1) if level + 1 < len(self._weights) else self._top
            above[nodes] = np.einsum("ij->i", rows)
            if not level:
                self._lower(nodes, _smallest(rows))

    def _lower(self, nodes: Ints, lows: Floats) -> None:
        """Set the smallest weights of nodes, and of those above them that may change by it."""
        *inner, top = self._lows
        for held in inner:
            moved = held.take(nodes) != lows
            held[nodes] = lows
            nodes = nodes[moved] >> _SHIFT
            lows = torch.from_numpy(held.reshape(-1, FAN).take(nodes, 0)).amin(1).numpy()
        top[nodes] = lows

    def find(self, masses: Floats) -> Ints:
        """Find, for each mass in [0, total), the slot in which the running sum of weights exceeds it."""
        masses = np.asarray(masses, np.float64)
        order = masses.argsort()  # so that all levels are read forward
        left = masses.take(order)
        sums, starts = self._sums(), np.arange(0, len(left) * FAN, FAN)
        nodes = np.minimum(sums.searchsorted(left, side="right"), len(sums) - 1)
        left -= sums.take(nodes) - self._top.take(nodes)
        for level in reversed(self._weights):
            # "clip": a mass of the very total leads beyond the last node.
            rows = level.take(nodes, 0, None, "clip")
            running = torch.from_numpy(rows).cumsum(1).numpy()
            child = np.minimum(_count(running <= left[:, None]), FAN - 1)
            nodes = (nodes << _SHIFT) + child
            child = child + starts
            found = rows.take(child)
            if level is not self._weights[0]:
                left -= running.take(child) - found
        # Rounding may put a mass at the very end of a node, on a slot without weight.
        if len(nodes) and (not found.all() or nodes[-1] >= self.size):
            empty = np.flatnonzero((found == 0) | (nodes >= self.size))
            nodes[empty] = self._nearest(np.minimum(nodes[empty], self.size - 1))
        slots = np.empty(len(nodes), np.int64)
        slots[order] = nodes
        return slots

    def _nearest(self, slots: Ints) -> Ints:
        """Return the slots with weight at or before others; where there are none, the first one after them."""
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


def _smallest(rows: Floats) -> Floats:
    """Return the smallest number above zero of each row; infinity where there is none."""
    found: Floats = torch.from_numpy(rows).amin(1).numpy()
    if not found.all():
        some = np.flatnonzero(found == 0)
        among = rows[some]
        found[some] = np.where(among > 0, among, np.inf).min(1)
    return found


def _count(marks: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Return how many of the 32 marks of a row are true, of rows that begin with the true ones."""
    # As bits of one number they are a power of two less one, and the exponent of its float is how many they are.
    bits = np.packbits(marks, bitorder="little").view("<u4")
    return np.frexp(bits.astype(np.float64))[1]


def _unique(nodes: Ints) -> Ints:
    if len(nodes) < 2:
        return nodes
    ordered = np.sort(nodes)
    first = np.empty(len(ordered), bool)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]
