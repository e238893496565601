"""Orders of the items of an epoch: the item at any place, in constant time and memory."""

import functools
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tdstore.errors import InvalidArgumentError
from tdstore.index.ranges import distinct

from .permutation import Permutation, mix

Items: TypeAlias = NDArray[np.int64]
Order: TypeAlias = Callable[[Items], Items]
Shuffle: TypeAlias = bool | Literal["blocks"]
_ROWS, _BLOCKS, _TAIL = 1, 2, 3  # what a key is for


def in_order(places: Items) -> Items:
    """Return the places: items in their own order."""
    return places


class BlockOrder:
    """Permute blocks of neighbouring items, and the items within a window of blocks.

    A batch reads items of about `window_blocks` blocks, and a window reads each of its blocks whole. The last block
    may be short; it is at a place of its own in every epoch.

    Args:
        size: the number of items.
        block: the number of items of a block.
        window_blocks: the number of blocks whose items are permuted together.
        seed: chooses the order, with `epoch`.
        epoch: the number of the epoch.
    """

    def __init__(self, size: int, block: int, window_blocks: int, seed: int, epoch: int) -> None:
        self.size, self.block, self.window_blocks = size, block, window_blocks
        self._key = (seed, epoch)
        self._full, self._rest = divmod(size, block)
        self._blocks = Permutation(self._full, (seed, epoch, _BLOCKS))
        hashed = mix(mix(np.array([seed % 2**64], np.uint64)) ^ np.array([epoch * 4 + _TAIL], np.uint64))
        self._tail = int(hashed[0]) % (self._full + 1) if self._rest else self._full + 1  # its place among the blocks
        self._window = functools.lru_cache(4)(self._permutation)

    def __call__(self, places: Items) -> Items:
        """Return the items at places of the order.

        Args:
            places: int64, one dimension, each in `range(size)`.
        """
        ranks = self._block_places(places)
        windows = ranks // self.window_blocks
        moved = np.empty_like(places)
        for window in distinct(windows).tolist():
            mask = windows == window
            first, permutation = self._window(window)
            moved[mask] = first + permutation(places[mask] - first)
        ranks = self._block_places(moved)
        offsets = moved - self._starts(ranks)
        numbers = np.full_like(ranks, self._full)  # the short block is the last one of the dataset
        others = ranks != self._tail
        if self._full:
            numbers[others] = self._blocks((ranks - (ranks > self._tail))[others])
        return numbers * self.block + offsets

    def _starts(self, ranks: Items) -> Items:
        """Return the places at which blocks begin."""
        return ranks * self.block - (ranks > self._tail) * (self.block - self._rest)

    def _block_places(self, places: Items) -> Items:
        """Return which block of the permuted order each place is in."""
        after = places >= self._tail * self.block + self._rest
        return np.where(
            after & (self._rest > 0),
            (places - self._rest) // self.block + 1,
            np.minimum(places // self.block, self._tail),
        )

    def _permutation(self, window: int) -> tuple[int, Permutation]:
        bounds = np.array([window * self.window_blocks, (window + 1) * self.window_blocks])
        first, last = np.minimum(self._starts(bounds), self.size).tolist()
        return first, Permutation(last - first, (*self._key, _ROWS, window))


def order_of(size: int, shuffle: Shuffle, seed: int, epoch: int, block: int, window_blocks: int) -> Order:
    """Return the order of one epoch.

    Args:
        size: the number of items.
        shuffle: True for a full shuffle, "blocks" for one within windows of blocks, False for none.
        seed: chooses the order, with `epoch`.
        epoch: the number of the epoch.
        block: the number of items of a block.
        window_blocks: the number of blocks of a window.

    Raises:
        InvalidArgumentError: `shuffle` is something else.
    """
    if shuffle is True:
        return Permutation(size, (seed, epoch))
    if shuffle is False:
        return in_order
    if shuffle == "blocks":
        return BlockOrder(size, block, window_blocks, seed, epoch)
    raise InvalidArgumentError(f"shuffle={shuffle!r}: it is True, False or 'blocks'")
