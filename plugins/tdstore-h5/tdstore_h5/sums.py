"""Which blocks of which leaves were written, and the checksums of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tdstore.checksums import BLOCK, crc32c
from tdstore.types import LeafSpec, Path
from tdstore_h5.document import Crcs, block_count
from tdstore_h5.raw import Bytes, Ints

ReadBytes = Callable[[Path, int, int], Bytes]


class Sums:
    """Checksums by leaf, one per 4 MiB, and a mark on each block that was written since."""

    def __init__(self) -> None:
        self.crcs: dict[Path, Crcs] = {}
        self._stale: dict[Path, np.ndarray[Any, np.dtype[np.bool_]]] = {}

    def put(self, path: Path, crcs: Crcs) -> None:
        """Set the checksums of a leaf."""
        self.crcs[path] = crcs
        self._stale.pop(path, None)

    def drop(self, path: Path) -> None:
        """Forget a leaf."""
        self.crcs.pop(path, None)
        self._stale.pop(path, None)

    def move(self, old: Path, new: Path) -> None:
        """Follow a leaf that was renamed."""
        self.drop(new)
        if old in self.crcs:
            self.crcs[new] = self.crcs.pop(old)
        if old in self._stale:
            self._stale[new] = self._stale.pop(old)

    def touch(self, path: Path, spec: LeafSpec, starts: Ints, size: int) -> None:
        """Blocks of elements were written (`raw.blocks_of`)."""
        if not size or not len(starts):
            return
        stale = self._mask(path, spec)
        itemsize = spec.dtype.itemsize
        first = starts * itemsize // BLOCK
        last = ((starts + size) * itemsize - 1) // BLOCK
        if len(starts) == 1 or (last - first > 1).any():
            for a, b in zip(first.tolist(), last.tolist(), strict=True):
                stale[a : b + 1] = True
        else:
            stale[first] = True
            stale[last] = True

    def resize(self, path: Path, old: LeafSpec, new: LeafSpec) -> None:
        """A leaf changed its length: what follows the common part is stale."""
        keep = min(old.nbytes, new.nbytes) // BLOCK
        before = self._mask(path, old)
        crcs, stale = np.zeros(block_count(new), np.uint32), np.ones(block_count(new), np.bool_)
        if path in self.crcs:
            crcs[:keep] = self.crcs[path][:keep]
            stale[:keep] = before[:keep]
        self.crcs[path] = crcs
        self._stale[path] = stale

    def touch_all(self, path: Path, spec: LeafSpec) -> None:
        """Nothing is known of a leaf."""
        self.crcs[path] = np.zeros(block_count(spec), np.uint32)
        self._stale[path] = np.ones(block_count(spec), np.bool_)

    def refresh(self, path: Path, spec: LeafSpec, read: ReadBytes) -> Crcs:
        """The checksums of a leaf, those of written blocks computed anew."""
        if path not in self.crcs:
            self.touch_all(path, spec)
        stale = self._stale.pop(path, None)
        if stale is not None:
            crcs = self.crcs[path] = self.crcs[path].copy()
            for block, crc in self._hash(path, spec, np.flatnonzero(stale).tolist(), read):
                crcs[block] = crc
        return self.crcs[path]

    def wrong_block(self, path: Path, spec: LeafSpec, read: ReadBytes) -> int | None:
        """The first block whose bytes are not those of the last commit (blocks written since are passed over)."""
        crcs = self.crcs.get(path)
        if crcs is None:
            return None
        stale = self._stale.get(path)
        blocks = range(len(crcs)) if stale is None else np.flatnonzero(~stale).tolist()
        for block, crc in self._hash(path, spec, blocks, read):
            if crc != crcs[block]:
                return block
        return None

    def _hash(self, path: Path, spec: LeafSpec, blocks: Any, read: ReadBytes) -> Iterator[tuple[int, int]]:
        for block in blocks:
            start = block * BLOCK
            yield block, crc32c(np.ascontiguousarray(read(path, start, min(start + BLOCK, spec.nbytes))))

    def _mask(self, path: Path, spec: LeafSpec) -> np.ndarray[Any, np.dtype[np.bool_]]:
        if path not in self._stale:
            self._stale[path] = np.full(block_count(spec), path not in self.crcs)
            self.crcs.setdefault(path, np.zeros(block_count(spec), np.uint32))
        return self._stale[path]
