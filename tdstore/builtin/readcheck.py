"""Compare mapped leaves with their checksums when rows of them are copied: each block once, by the first read of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from tdstore.builtin.memmap_layout import LeafFile
from tdstore.builtin.tdz_read import as_bytes
from tdstore.checksums import BLOCK, crc32c
from tdstore.errors import CorruptStoreError
from tdstore.types import Path, path_text

SMALL = 64 << 20
"""Leaves of up to so many bytes are compared whole by the first read of any of their rows; larger ones by the blocks
of 4 MiB that a read covers whole."""


class ReadCheck:
    """What one store that was opened for reading has not compared yet.

    Args:
        leaves: those with checksums that must fit.
        on_medium: gives the crc32c of a block as it is on the medium, or None where the checksums are not those of the
            medium any more, since somebody wrote.
    """

    def __init__(self, url: str, leaves: Iterable[LeafFile], on_medium: Callable[[LeafFile, int], int | None]) -> None:
        self.url = url
        self._on_medium = on_medium
        self._left: dict[Path, tuple[LeafFile, np.ndarray[tuple[int], np.dtype[np.bool_]]]] = {
            leaf.path: (leaf, np.ones(-(-leaf.nbytes // BLOCK), np.bool_))
            for leaf in leaves
            if leaf.nbytes and leaf.sums is not None
        }

    def check(self, path: Path, rows: slice | None) -> None:
        """Compare what a read of rows will copy; None: of any rows.

        Raises:
            CorruptStoreError: the medium holds other bytes than were committed.
        """
        found = self._left.get(path)
        if found is None:
            return
        leaf, left = found
        if leaf.probe is None:
            return
        if leaf.nbytes <= SMALL:
            first, last = 0, len(left)
        elif rows is not None and leaf.shape and rows.step in (None, 1):
            row = leaf.nbytes // leaf.shape[0]
            start, stop, _ = rows.indices(leaf.shape[0])
            first, last = -(-start * row // BLOCK), len(left) if stop == leaf.shape[0] else stop * row // BLOCK
        else:
            return
        memory, expected = as_bytes(leaf.probe), np.frombuffer(leaf.sums.crc, "<u4")  # type: ignore[union-attr]
        for block in range(first, last):
            if left[block]:
                if crc32c(memory[block * BLOCK : (block + 1) * BLOCK]) != expected[block]:
                    self._compare_medium(leaf, block, int(expected[block]))
                left[block] = False
        if not left.any():
            self._left.pop(path, None)

    def _compare_medium(self, leaf: LeafFile, block: int, expected: int) -> None:
        """A block differs: this process wrote into its private memory, somebody wrote to the medium, or it is bad."""
        found = self._on_medium(leaf, block)
        if found is None:
            self._left.clear()
        elif found != expected:
            raise CorruptStoreError(
                f"{self.url}: leaf {path_text(leaf.path)} is damaged in 4 MiB block {block}: its crc32c is "
                f"{found:08x}, expected {expected:08x}",
                url=self.url,
                hint="restore it from a copy; verify='none' reads it as it is",
            )
