"""crc32c sums of leaves: one per 4 MiB block, and the tips, which notice a swapped file for the price of one read.

A hole of a sparse file costs nothing: its blocks have the sum of zeros.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import google_crc32c
import numpy as np

BLOCK = 4 << 20
TIP = 4096

Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Sums(NamedTuple):
    """Checksums of one leaf."""

    crc: bytes
    """Little-endian uint32 crc32c of each 4 MiB block."""
    tips: int
    """crc32c of the first, middle and last 4 KiB together (of all bytes if there are at most 12 KiB)."""


EMPTY = Sums(b"", 0)


def crc32c(data: bytes | Memory) -> int:
    """crc32c of bytes or of a contiguous uint8 array."""
    return int(google_crc32c.value(data))


class Summer:
    """Sums of a leaf that comes in order, in whole blocks (the last may be short)."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._crc: list[int] = []
        self._wanted = tip_ranges(nbytes)
        self._tips = bytearray()
        self._at = 0

    def add(self, block: Memory) -> None:
        """The next bytes: `BLOCK` of them, or the rest."""
        self._crc.append(crc32c(block))
        start, stop = self._at, self._at + len(block)
        for a, b in self._wanted:
            if a < stop and b > start:
                self._tips += block[max(a - start, 0) : b - start].tobytes()
        self._at = stop

    def add_zeros(self, size: int) -> None:
        """The next bytes are `size` zeros, whole blocks or the rest."""
        self._crc += [_crc_of_zeros(BLOCK)] * (size // BLOCK)
        if size % BLOCK:
            self._crc.append(_crc_of_zeros(size % BLOCK))
        start, stop = self._at, self._at + size
        for a, b in self._wanted:
            if a < stop and b > start:
                self._tips += bytes(min(b, stop) - max(a, start))
        self._at = stop

    def sums(self) -> Sums:
        """What was summed."""
        if not self.nbytes:
            return EMPTY
        return Sums(np.array(self._crc, "<u4").tobytes(), crc32c(bytes(self._tips)))


def tip_ranges(nbytes: int) -> list[tuple[int, int]]:
    """The byte ranges that make the tips."""
    if nbytes <= 3 * TIP:
        return [(0, nbytes)]
    middle = nbytes // 2 // TIP * TIP
    last = max(nbytes - TIP, middle + TIP)
    return [(0, TIP), (middle, middle + TIP), (last, nbytes)]


def tips_of_file(fd: int, nbytes: int) -> int:
    """The tips of a file, by up to three small reads."""
    if nbytes <= 3 * TIP:
        return int(google_crc32c.value(os.pread(fd, nbytes, 0)))
    return crc32c(b"".join(os.pread(fd, b - a, a) for a, b in tip_ranges(nbytes)))


def sums_of_memory(memory: Memory) -> Sums:
    """The sums of a contiguous uint8 array."""
    summer = Summer(len(memory))
    for start in range(0, len(memory), BLOCK):
        summer.add(memory[start : start + BLOCK])
    return summer.sums()


@lru_cache(256)
def sums_of_zeros(nbytes: int) -> Sums:
    """The sums of a leaf that was never written."""
    summer = Summer(nbytes)
    summer.add_zeros(nbytes)
    return summer.sums()


def sums_of_file(fd: int, nbytes: int, known: bytes = b"") -> Sums:
    """The sums of the first `nbytes` of a file; holes are not read, nor blocks at the start whose crc is `known`.

    Raises:
        EOFError: the file is shorter.
    """
    summer = Summer(nbytes)
    buffer = np.empty(min(BLOCK, nbytes), np.uint8)
    at = len(known) // 4 * BLOCK
    data_until = 0  # [at, data_until) is known to hold data
    while at < nbytes:
        size = min(BLOCK, nbytes - at)
        if at >= data_until:
            at_data, data_until = next_data(fd, at, nbytes)
            whole = (nbytes if at_data >= nbytes else at_data // BLOCK * BLOCK) - at
            if whole > 0:
                if os.fstat(fd).st_size < at + whole:
                    raise EOFError
                summer.add_zeros(whole)
                at += whole
                continue
        block = buffer[:size]
        got = 0
        while got < size:
            n = os.preadv(fd, [block[got:].data], at + got)
            if not n:
                raise EOFError
            got += n
        summer.add(block)
        at += size
    if known:
        return Sums(known + summer.sums().crc, tips_of_file(fd, nbytes))
    return summer.sums()


def next_data(fd: int, at: int, nbytes: int) -> tuple[int, int]:
    """Start and end of the next extent at or after `at`; a file system that cannot tell has data everywhere."""
    try:
        start = os.lseek(fd, at, os.SEEK_DATA)
        return start, os.lseek(fd, start, os.SEEK_HOLE)
    except OSError as error:
        # ENXIO: no data after `at`.
        return (nbytes, nbytes) if error.errno == 6 else (at, nbytes)


@lru_cache(64)
def _crc_of_zeros(size: int) -> int:
    return crc32c(bytes(size))
