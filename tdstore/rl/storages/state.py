"""The counters of a storage: whoever reads them finds those of one moment, whenever a writer was killed."""

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
    """What changes with each write; rows are those of the first dimension."""

    length: int = 0
    """Rows that were written: all below this are visible."""
    cursor: int = 0
    """Row that the writer fills next."""
    write_count: int = 0
    """Rows that were ever written."""
    pending: int = 0
    """Rows that a write in progress has saved for its undoing; 0 when none is."""
    scattered: int = 0
    """1 when rows were written at indices beyond the length, with gaps."""
    epoch: int = 0
    """Number of writes other than of a ring: who remembers where episodes begin looks again."""


def read_state(numbers: Ints, url: str) -> State:
    """The valid copy.

    Raises:
        CorruptStoreError: neither copy is.
    """
    valid = int(numbers[0])
    if valid not in (0, 1):
        raise CorruptStoreError(f"the counters of {url} are damaged: {valid} is neither copy", url=url)
    return State(*_COPY.unpack_from(numbers.data, 64 + 64 * valid))


def write_state(numbers: Ints, state: State) -> None:
    """Fill the other copy, then make it the valid one: one store of eight bytes, which no kill divides."""
    other = 1 - int(numbers[0])
    _COPY.pack_into(numbers.data, 64 + 64 * other, *state)
    numbers[0] = other


def new_numbers(state: State) -> Ints:
    """Numbers for a leaf whose valid copy is `state`."""
    numbers = np.zeros(LENGTH, np.int64)
    write_state(numbers, state)
    return numbers
