"""Compare mapped leaves with their checksums when rows of them are copied: each block once, by the first read of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tdstore.builtin.tdz_read import as_bytes
from tdstore.checksums import Sums, block_text, crc32c
from tdstore.dtypes import to_numpy
from tdstore.errors import CorruptStoreError
from tdstore.types import Path, path_text

OPENED = 16 << 20
"""Datasets whose leaves take up to so many bytes together are compared whole when they are opened, so that what live
tensors show was compared."""
SMALL = 64 << 20
"""Leaves of up to so many bytes are compared whole by the first read of any of their rows; larger ones by the blocks
that hold the rows."""
COARSE = 1 << 20
"""Blocks longer than this are compared by reads that cover them whole: few rows are not worth one."""

Rows = slice | Tensor | None
"""What a read copies of the first dimension: numbers of rows if a tensor; None for any."""


class Summed(Protocol):
    """A leaf with checksums, as far as a comparison knows it."""

    path: Path
    shape: torch.Size
    nbytes: int
    sums: Sums | None
    probe: Tensor | None
    """Its mapped memory."""


Leaf = TypeVar("Leaf", bound=Summed)


class _Pending:
    """The blocks of one leaf that were not compared yet."""

    __slots__ = ("leaf", "left", "sums")

    def __init__(self, leaf: Summed, sums: Sums) -> None:
        self.leaf = leaf
        self.sums = sums
        self.left = np.ones(-(-leaf.nbytes // sums.block), np.bool_)


class ReadCheck(Generic[Leaf]):
    """What one open store has not compared yet.

    Args:
        leaves: those with checksums that must fit.
        on_medium: gives the crc32c of a leaf's bytes from start to stop as they are on the medium, or None where its
            checksums need not fit any more, since somebody wrote.
    """

    def __init__(self, url: str, leaves: Iterable[Leaf], on_medium: Callable[[Leaf, int, int], int | None]) -> None:
        self.url = url
        self._on_medium = on_medium
        self.pending: dict[Path, _Pending] = {
            leaf.path: _Pending(leaf, leaf.sums) for leaf in leaves if leaf.nbytes and leaf.sums is not None
        }

    def check(self, leaf: Leaf, rows: Rows) -> None:
        """Compare what a read of rows will copy.

        Raises:
            CorruptStoreError: the medium holds other bytes than were committed.
        """
        found = self.pending.get(leaf.path)
        if found is None or leaf.probe is None:
            return
        if found.leaf is not leaf or found.sums is not leaf.sums:  # another leaf of that name, or written since
            self.pending.pop(leaf.path, None)
            return
        blocks = self._touched(leaf, found.sums.block, rows)
        blocks = blocks[found.left[blocks]]
        if not len(blocks):
            return
        blocks = np.unique(blocks)
        size, memory = found.sums.block, as_bytes(leaf.probe)
        expected = np.frombuffer(found.sums.crc, "<u4")
        for block in blocks.tolist():
            piece = memory[block * size : (block + 1) * size]
            if crc32c(piece) != expected[block] and not self._is_sound(leaf, block, size, int(expected[block])):
                return
            found.left[block] = False
        if not found.left.any():
            self.pending.pop(leaf.path, None)

    def _touched(self, leaf: Leaf, size: int, rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The blocks to compare for rows, some perhaps more than once."""
        count = -(-leaf.nbytes // size)
        length = leaf.shape[0] if leaf.shape else 1
        if leaf.nbytes <= SMALL or not leaf.shape or (rows is None and size <= COARSE):
            return np.arange(count)
        row = leaf.nbytes // length
        if isinstance(rows, slice):
            start, stop, step = rows.indices(length)
            if step == 1 and size <= COARSE:
                return np.arange(start * row // size, -(-stop * row // size))
            if step == 1:
                return np.arange(-(-start * row // size), count if stop == length else stop * row // size)
            rows = torch.arange(start, stop, step) if step > 0 else torch.arange(stop + 1, start + 1, -step)
        if rows is None or size > COARSE:
            return np.arange(0)
        at = to_numpy(rows.reshape(-1).to("cpu", torch.int64)) % length * row
        first, last = at // size, (at + (row - 1)) // size
        found = first[:, None] + np.arange(int((last - first).max()) + 1 if len(at) else 0)
        every: np.ndarray[tuple[int], np.dtype[np.int64]] = np.minimum(found, last[:, None]).reshape(-1)
        return every

    def _is_sound(self, leaf: Leaf, block: int, size: int, expected: int) -> bool:
        """A block differs: this process wrote into its private memory, somebody wrote to the medium, or it is bad.

        Returns:
            False where the checksums of the leaf are not those of the medium any more.
        """
        found = self._on_medium(leaf, block * size, min((block + 1) * size, leaf.nbytes))
        if found is None:
            self.pending.pop(leaf.path, None)
        elif found != expected:
            raise CorruptStoreError(
                f"{self.url}: leaf {path_text(leaf.path)} is damaged{block_text(block, size, leaf.nbytes)}: the crc32c "
                f"is {found:08x}, expected {expected:08x}",
                url=self.url,
                hint="restore it from a copy; verify='none' reads it as it is",
            )
        return found is not None
