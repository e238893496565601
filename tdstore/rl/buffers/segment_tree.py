"""Sums and minima over an array that changes in places, for many queries at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
FAN = 64
"""Children of a node: one level is one look at a few rows of contiguous memory."""


class SegmentTree:
    """Non-negative weights of slots, their sum, and their smallest one that is not zero.

    Each level is one array; a node is the sum (the minimum) of 64 nodes below it. A batch of changes or queries is
    worked off level by level, so its cost grows with the number of levels: 3 for 100,000 slots, 4 for 10 million.

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
        self._weights: list[Tensor] = []
        self._running: list[Tensor] = []
        self._lows: list[Tensor] = []
        length = size
        while True:
            nodes = -(-length // FAN)
            self._weights.append(torch.zeros(nodes, FAN, dtype=torch.float64))
            self._running.append(torch.zeros(nodes, FAN, dtype=torch.float64))
            self._lows.append(torch.full((nodes, FAN), torch.inf, dtype=torch.float64))
            length = nodes
            if nodes == 1:
                break
        self._slots: Floats = self._weights[0].view(-1).numpy()
        self._low_slots: Floats = self._lows[0].view(-1).numpy()

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._running[-1][0, -1])

    @property
    def smallest(self) -> float:
        """Smallest weight above zero; infinity when there is none."""
        return float(self._lows[-1].min())

    @property
    def largest(self) -> float:
        """Largest weight."""
        return float(self._slots.max())

    def __getitem__(self, slots: Ints) -> Floats:
        """Weights of slots."""
        return self._slots[slots]

    def update(self, slots: Ints, weights: Floats | float) -> None:
        """Set weights of slots; of a slot that is named twice, the last one."""
        self._slots[slots] = weights
        self._low_slots[slots] = np.where(np.asarray(weights) > 0, weights, np.inf)
        nodes = slots
        for level, (below, running, lows) in enumerate(zip(self._weights, self._running, self._lows, strict=True)):
            nodes = _unique(nodes // FAN)
            at = torch.from_numpy(nodes)
            sums = below.index_select(0, at).cumsum(1)
            running.index_copy_(0, at, sums)
            if level + 1 < len(self._weights):
                self._weights[level + 1].view(-1).index_copy_(0, at, sums[:, -1])
                self._lows[level + 1].view(-1).index_copy_(0, at, lows.index_select(0, at).amin(1))

    def find(self, masses: Floats) -> Ints:
        """For each mass in [0, total) the slot in which the running sum of weights exceeds it."""
        left = torch.from_numpy(np.ascontiguousarray(masses, np.float64)).view(-1, 1)
        nodes = torch.zeros(len(left), dtype=torch.int64)
        for running in reversed(self._running):
            rows = running.index_select(0, nodes)
            # Rounding may put a mass at the very end of its node: the last child that has weight takes it.
            left = torch.minimum(left, torch.nextafter(rows[:, -1:], rows.new_tensor(-torch.inf)))
            child = torch.searchsorted(rows, left, right=True)
            before = rows.gather(1, (child - 1).clamp_(min=0))
            left = left - before.masked_fill_(child == 0, 0.0)
            nodes = nodes * FAN + child.view(-1)
        return nodes.numpy()

    def clear(self) -> None:
        """Set all weights to zero."""
        for level in (*self._weights, *self._running):
            level.zero_()
        for lows in self._lows:
            lows.fill_(torch.inf)

    def weights(self, length: int) -> Floats:
        """Weights of the first slots, a copy."""
        return self._slots[:length].copy()


def _unique(nodes: Ints) -> Ints:
    if len(nodes) < 2:
        return nodes
    ordered = np.sort(nodes)
    first = np.empty(len(ordered), bool)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]
