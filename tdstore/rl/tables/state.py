"""Counters of a storage: two copies in one leaf, so that a kill leaves one of them whole."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tdstore.errors import CorruptStoreError

Ints = npt.NDArray[np.int64]
LENGTH = 32
"""Numbers in the leaf: which of two copies is valid, at 0, and the copies, at 8 and 16."""
_COPY = struct.Struct("<6q")


class State(NamedTuple):
    """State that changes with each write; rows are those of the first dimension."""

    length: int = 0
    """Rows that were written: all below this are visible."""
    cursor: int = 0
    """Row that the writer fills next."""
    write_count: int = 0
    """Rows that were ever written."""
    pending: int = 0
    """Rows that a write in progress has saved in order to undo it; 0 when none is in progress. If rows are not saved:
    -1 less the first row that the write overwrites."""
    scattered: int = 0
    """1 when rows below the length may have no blocks on the disk, as in a place that was taken over."""
    epoch: int = 0
    """Number of writes other than of a ring: whoever remembers where episodes begin must look again."""

    def rows_since(self, before: State | None, capacity: int) -> Ints | None:
        """Return the rows that were written to a ring of that capacity between two states; None if there were other
        writes."""
        if before is None or before.epoch != self.epoch or before.write_count > self.write_count:
            return None
        first = max(before.write_count, self.write_count - capacity)
        behind = self.write_count - np.arange(first, self.write_count)
        return np.asarray((self.cursor - behind) % capacity, np.int64)


def read_state(numbers: memoryview, url: str) -> State:
    """Return the valid copy.

    Raises:
        CorruptStoreError: neither copy is valid.
    """
    valid = int(numbers[0])
    if valid not in (0, 1):
        raise CorruptStoreError(f"the counters of {url} are damaged: {valid} is neither copy", url=url)
    return State(*_COPY.unpack_from(numbers, 64 + 64 * valid))


def write_state(numbers: memoryview, state: tuple[int, ...]) -> None:
    """Fill the other copy, then make it the valid one: one write of eight bytes, which no kill can divide."""
    other = 1 - numbers[0]
    _COPY.pack_into(numbers, 64 + 64 * other, *state)
    numbers[0] = other


def new_numbers(state: State) -> Ints:
    """Return the numbers for a leaf whose valid copy is `state`."""
    numbers = np.zeros(LENGTH, np.int64)
    write_state(numbers.data, state)
    return numbers
