"""Checksums of new leaves, computed while their bytes are written: they need not be read again."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from tdstore.storekit.checksums import Memory, Summer, Sums


class WrittenSums:
    """The checksums of a new leaf while its bytes are written in order."""

    __slots__ = ("_summer", "at", "crc")

    def __init__(self, nbytes: int) -> None:
        self._summer = Summer(nbytes)
        self.crc = 0
        self.at = 0
        """How many bytes were written."""

    def add(self, block: Memory) -> None:
        """Add the bytes that were written next."""
        self.add_crc(block)
        self.add_blocks(block)

    def add_crc(self, block: Memory) -> None:
        """Add the next bytes to the CRC-32 only."""
        self.crc = zlib.crc32(block.data, self.crc)

    def add_blocks(self, block: Memory) -> None:
        """Add the next bytes to the checksums of the manifest only."""
        self._summer.add(block)
        self.at += len(block)

    def sums(self) -> Sums:
        """Return the checksums of a manifest, once all bytes were written."""
        return self._summer.sums()


def add_crcs(values: Iterable[tuple[WrittenSums, Memory]]) -> None:
    """Add bytes to the CRC-32 of their leaves: as a task of a thread, since that takes as long as to write them."""
    for sums, memory in values:
        sums.add_crc(memory)
