"""Checksums of leaves: one per grain, compared when a grain is first read, and recomputed after a write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import google_crc32c
import numpy as np

from tdstore.errors import CorruptStoreError, StoreError
from tdstore.storekit.checksums import BLOCK, crc32c, crcs_of
from tdstore.types import LeafSpec, Path, Read
from tdstore_h5.rows.contiguous import Bytes, Ints

LOOKED_AT = 32 << 20
"""Grains of up to so many bytes are compared in a mapping, where they count as memory of the process."""
ReadBytes = Callable[[Path, int, int], Bytes]
_MANY = 8
"""From so many new grains on their checksums are computed once, not read."""
Crcs = np.ndarray[Any, np.dtype[np.uint32]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

SMALLEST = 16 << 10
MOST = 32768
"""Checksums of one leaf: they are in the manifest, which every commit writes. A first read of a row reads a grain."""


@dataclass
class LeafSums:
    """The checksums of one leaf."""

    grain: int
    """Bytes to a checksum."""
    crcs: Crcs

    def span(self, grain: int, spec: LeafSpec) -> tuple[int, int]:
        """Return the bytes of a grain."""
        return grain * self.grain, min((grain + 1) * self.grain, spec.nbytes)

    def rows(self, grain: int, spec: LeafSpec) -> str:
        """Describe the rows of which a grain has a part, for messages."""
        row = spec.nbytes // max(1, spec.shape[0]) if spec.shape else spec.nbytes
        start, stop = self.span(grain, spec)
        first, last = start // row, (stop - 1) // row
        return f"row {first}" if first == last else f"rows {first} to {last}"


def grain_of(spec: LeafSpec) -> int:
    """Return the bytes per checksum of a new leaf: whole rows, of 16 KiB to 4 MiB (or parts of longer rows).

    Example:
        >>> grain_of(LeafSpec((100, 84, 84), "uint8"))
        21168
    """
    row = spec.dtype.itemsize * math.prod(spec.shape[1:])
    wanted = min(BLOCK, max(SMALLEST, -(-spec.nbytes // MOST)))
    return BLOCK if row >= BLOCK else -(-wanted // max(1, row)) * max(1, row)


def count_of(spec: LeafSpec, grain: int) -> int:
    """Return the number of checksums of a leaf."""
    return -(-spec.nbytes // grain)


def constant_sums(spec: LeafSpec, pattern: bytes, grain: int) -> LeafSums:
    """Return the checksums of a leaf that repeats one element's bytes."""
    crcs = np.full(count_of(spec, grain), crc32c(pattern * (min(grain, spec.nbytes) // len(pattern))), np.uint32)
    if rest := spec.nbytes % grain:
        crcs[-1] = crc32c(pattern * (rest // len(pattern)))
    return LeafSums(grain, crcs)


def hashed(
    sums: LeafSums, path: Path, spec: LeafSpec, grains: Ints, read: ReadBytes, most: int = BLOCK
) -> Iterator[tuple[int, int]]:
    """Yield grains, ascending, with the current checksums of their bytes.

    Args:
        sums: the checksums of the leaf.
        path: the leaf.
        spec: its spec.
        grains: which grains.
        read: reads bytes of the leaf.
        most: bytes that are read at a time, about.
    """
    limit = max(1, most // sums.grain)
    bounds = [0, *(np.flatnonzero(np.diff(grains) != 1) + 1).tolist(), len(grains)]
    numbers = grains.tolist()
    for begin, end in pairwise(bounds):
        for at in range(begin, end, limit):
            run = numbers[at : min(at + limit, end)]
            data = np.ascontiguousarray(read(path, run[0] * sums.grain, sums.span(run[-1], spec)[1]))
            yield from zip(run, crcs_of(data, sums.grain), strict=True)
            del data  # the next block is read without this one in memory


class BlockSums:
    """One block of a leaf that is read or written: the checksums of its whole grains are computed on the way.

    Args:
        low: the first byte of the block in the leaf.
    """

    def __init__(self, sums: LeafSums, spec: LeafSpec, low: int) -> None:
        self.sums = sums
        self.first = -(-low // sums.grain)
        """The first grain."""
        self.crcs: list[int] = []
        """Those of the grains that arrived; `add` need not have been called for all."""
        self.data: Bytes = np.empty(0, np.uint8)
        self._nbytes, self._low = spec.nbytes, low
        self._at = self.first * sums.grain - low

    def add(self, data: Bytes, got: int) -> None:
        """Compute the checksums of grains that are complete.

        Args:
            data: memory for the block, whose first `got` bytes are valid.
            got: number of valid bytes.
        """
        grain = self.sums.grain
        until = got if self._low + got == self._nbytes else self._at + (got - self._at) // grain * grain
        if until > self._at:
            self.crcs += crcs_of(data[self._at : until], grain)
            self._at = until


def _slice(data: Bytes, low: int, path: Path, start: int, stop: int) -> Bytes:
    return data[start - low : stop - low]


class Sums:
    """Checksums by leaf, and a flag on each grain that was written since the commit, or compared since the opening."""

    def __init__(self, leaves: Mapping[Path, LeafSums] | None = None) -> None:
        self.leaves: dict[Path, LeafSums] = dict(leaves or {})
        self._stale: dict[Path, Mask] = {}
        self._fine: dict[Path, Mask] = {}
        self._all_fine: set[Path] = set()
        """Leaves of which nothing is left to compare."""
        self._own: set[Path] = set()
        """Leaves whose checksums were copied since the commit, whose manifest keeps its own."""

    def put(self, path: Path, sums: LeafSums) -> None:
        """Set the checksums of a leaf."""
        self.drop(path)
        self.leaves[path] = sums

    def drop(self, path: Path) -> None:
        """Drop the checksums of a leaf."""
        self.leaves.pop(path, None)
        self._stale.pop(path, None)
        self._fine.pop(path, None)
        self._all_fine.discard(path)
        self._own.discard(path)

    def move(self, old: Path, new: Path) -> None:
        """Follow a leaf that was renamed."""
        self.drop(new)
        for table in (self.leaves, self._stale, self._fine):
            if old in table:
                table[new] = table.pop(old)  # type: ignore[assignment]
        self._own.discard(old)
        if old in self._all_fine:
            self._all_fine.remove(old)
            self._all_fine.add(new)

    # -- writing -------------------------------------------------------------------------
    def touch(self, path: Path, spec: LeafSpec, starts: Ints, size: int) -> None:
        """Record that blocks of elements were written (`contiguous.blocks_of`)."""
        if not size or not len(starts):
            return
        mask = self._mask(path, spec)
        if len(starts) == 1:
            grain, itemsize, start = self.leaves[path].grain, spec.dtype.itemsize, int(starts[0])
            mask[start * itemsize // grain : ((start + size) * itemsize - 1) // grain + 1] = True
        else:
            mask[self._grains(path, spec, starts, size)] = True

    def know(self, path: Path, spec: LeafSpec, block: BlockSums) -> None:
        """Take the checksums of a block that was written since `touch`, so that the commit need not read it.

        Args:
            path, spec: the leaf.
            block: its bytes, as they were written.
        """
        grains = slice(block.first, block.first + len(block.crcs))
        if not block.crcs:
            return
        if path not in self._own:
            self.leaves[path] = LeafSums(self.leaves[path].grain, self.leaves[path].crcs.copy())
            self._own.add(path)
        self.leaves[path].crcs[grains] = block.crcs
        self._mask(path, spec)[grains] = False
        self._fine.setdefault(path, np.zeros(len(self.leaves[path].crcs), np.bool_))[grains] = True

    def resize(self, path: Path, old: LeafSpec, new: LeafSpec, fill: Callable[[], bytes]) -> None:
        """Record a new length of a leaf: checksums after the common part are stale, or those of rows never written.

        Args:
            path: the leaf.
            old, new: its specs.
            fill: returns the bytes of an element that was never written.
        """
        before = self.leaves.get(path)
        if before is None:
            self.touch_all(path, new)
            return
        anew = count_of(new, before.grain) > 4 * MOST
        grain = grain_of(new) if anew else before.grain
        count, common = count_of(new, grain), min(old.nbytes, new.nbytes)
        keep, first = 0 if anew else common // grain, count_of(old, grain)
        crcs, stale = np.zeros(count, np.uint32), np.ones(count, np.bool_)
        crcs[:keep] = before.crcs[:keep]
        stale[:keep] = self._mask(path, old)[:keep]
        if count - first >= _MANY:
            crcs[first:] = constant_sums(new, fill(), grain).crcs[first:]
            stale[first:] = False
        self.put(path, LeafSums(grain, crcs))
        self._stale[path] = stale

    def touch_all(self, path: Path, spec: LeafSpec) -> None:
        """Record that a leaf may differ everywhere."""
        grain = grain_of(spec)
        self.put(path, LeafSums(grain, np.zeros(count_of(spec, grain), np.uint32)))
        self._stale[path] = np.ones(count_of(spec, grain), np.bool_)

    def doubt(self, path: Path, spec: LeafSpec) -> None:
        """Accept a leaf as it is, whatever its checksums."""
        if path not in self.leaves:
            self.touch_all(path, spec)
        self._stale[path] = np.ones(len(self.leaves[path].crcs), np.bool_)

    def refresh(self, path: Path, spec: LeafSpec, read: ReadBytes, broken: Callable[[], bool]) -> LeafSums:
        """Return the checksums of a leaf, recomputed for written grains.

        Args:
            path: the leaf.
            spec: its spec.
            read: reads bytes of the leaf.
            broken: called when grains cannot be read: True leaves them their old checksums.
        """
        if path not in self.leaves:
            self.touch_all(path, spec)
        stale = self._stale.pop(path, None)
        sums = self.leaves[path]
        own = path in self._own
        self._own.discard(path)
        if stale is not None and stale.any():
            sums = sums if own else LeafSums(sums.grain, sums.crcs.copy())
            fine = self._fine.setdefault(path, np.zeros(len(sums.crcs), np.bool_))
            for grain, crc in self._readable(sums, path, spec, np.flatnonzero(stale), read, broken):
                sums.crcs[grain] = crc
                fine[grain] = True
            self.leaves[path] = sums
        return sums

    def _readable(
        self, sums: LeafSums, path: Path, spec: LeafSpec, grains: Ints, read: ReadBytes, broken: Callable[[], bool]
    ) -> Iterator[tuple[int, int]]:
        try:
            yield from hashed(sums, path, spec, grains, read)
        except StoreError:
            if not broken():
                raise
            if len(grains) > 1:  # one alone keeps its old checksum, and reading it raises the error
                half = len(grains) // 2
                yield from self._readable(sums, path, spec, grains[:half], read, broken)
                yield from self._readable(sums, path, spec, grains[half:], read, broken)

    def written(self, path: Path, spec: LeafSpec) -> list[tuple[int, int]]:
        """Return rows with parts in grains written since the commit, some MiB at a time (one row if 0-d)."""
        stale = self._stale.get(path)
        if stale is None or not stale.any():
            return []
        if not spec.shape:
            return [(0, 1)]
        row, grain = spec.nbytes // spec.shape[0], self.leaves[path].grain
        runs: list[tuple[int, int]] = []
        for number in np.flatnonzero(stale).tolist():
            first, last = number * grain // row, min(-(-(number + 1) * grain // row), spec.shape[0])
            if runs and runs[-1][1] >= first and (last - runs[-1][0]) * row <= max(BLOCK, row):
                runs[-1] = runs[-1][0], last
            else:
                runs.append((first, last))
        return runs

    # -- reading -------------------------------------------------------------------------
    def some_unseen(self, path: Path) -> bool:
        """Check whether a part of a leaf was not compared yet."""
        return path in self.leaves and path not in self._all_fine

    def unseen_leaves(self, reads: Iterable[tuple[object, Read]]) -> set[Path]:
        """Return the leaves of these reads of which a part was not compared yet."""
        return {r.path for _, r in reads if r.path not in self._all_fine and r.path in self.leaves}

    def is_row_seen(self, path: Path, spec: LeafSpec, number: int) -> bool:
        """Check whether a row has nothing left to compare; its leaf has at least one."""
        if path in self._all_fine or path not in self.leaves:
            return True
        row = spec.nbytes // spec.shape[0]
        return row > 0 and self.is_seen(path, number * row, (number + 1) * row)

    def is_seen(self, path: Path, start: int, stop: int) -> bool:
        """Check whether all grains of some bytes were compared; False also if finding out would take long."""
        fine = self._fine.get(path)
        if fine is None:
            return False
        grain = self.leaves[path].grain
        first, last = start // grain, (stop - 1) // grain
        return bool(fine[first] if first == last else fine[first : last + 1].all())

    def unseen(self, path: Path, spec: LeafSpec, starts: Ints, size: int) -> Ints:
        """Return the grains of some blocks that were not compared yet, without those written since."""
        if path in self._all_fine or not size or not len(starts) or path not in self.leaves:
            return _NOTHING
        fine = self._fine.get(path)
        if fine is None:
            fine = self._fine[path] = np.zeros(len(self.leaves[path].crcs), np.bool_)
        grains = self._grains(path, spec, starts, size)
        grains = np.unique(grains[~fine[grains]])
        stale = self._stale.get(path)
        return grains if stale is None else grains[~stale[grains]]

    def partly(self, path: Path, spec: LeafSpec, starts: Ints, size: int) -> Ints:
        """Return the grains that blocks cover in part, but not whole, of those not compared and not written yet."""
        if not size or not len(starts) or path not in self.leaves:
            return _NOTHING
        grain, itemsize = self.leaves[path].grain, spec.dtype.itemsize
        if len(starts) == 1:
            begin = int(starts[0]) * itemsize
            end = begin + size * itemsize
            ends = [begin // grain] if begin % grain else []
            if end % grain and end != spec.nbytes and (end // grain not in ends):
                ends.append(end // grain)
            for known in (self._fine.get(path), self._stale.get(path)) if ends else ():
                if known is not None:
                    ends = [at for at in ends if not known[at]]
            return np.array(ends, np.int64) if ends else _NOTHING
        low = np.unique(starts) * itemsize
        high = low + size * itemsize
        first, last = low // grain, (high - 1) // grain
        further = last > first
        grains, inverse = np.unique(np.concatenate((first, last[further])), return_inverse=True)
        nbytes = np.concatenate((np.minimum(high, (first + 1) * grain) - low, (high - last * grain)[further]))
        covered = np.bincount(inverse, nbytes, len(grains))
        return self._not_compared(
            path, grains[covered < np.minimum((grains + 1) * grain, spec.nbytes) - grains * grain]
        )

    def _not_compared(self, path: Path, grains: Ints) -> Ints:
        fine = self._fine.get(path)
        return grains if fine is None else grains[~fine[grains]]

    def verify(
        self,
        path: Path,
        spec: LeafSpec,
        starts: Ints,
        size: int,
        read: ReadBytes,
        copy: BlockSums | None,
        look: Callable[[], Bytes | None],
    ) -> str | None:
        """Compare the grains of a read, before or after it, unless done before. Returns wrong rows, or None.

        Args:
            path: the leaf.
            spec: its spec.
            starts, size: the elements, as of `contiguous.blocks_of`.
            read: reads bytes of the leaf.
            copy: the bytes that were read, if that is one block: its whole grains are not read again.
            look: returns the memory of the leaf if it can be read without a copy, or None.
        """
        sums = self.leaves.get(path)
        if (
            sums is not None
            and len(sums.crcs) == 1 <= sums.grain <= LOOKED_AT
            and (copy is None and size and len(starts) and path not in self._stale)
            and (memory := look()) is not None
        ):  # a small leaf is compared whole, with no arithmetic on grains
            if google_crc32c.value(memory) != sums.crcs[0]:
                return sums.rows(0, spec)
            self._fine[path] = np.ones(1, np.bool_)
            self._all_fine.add(path)
            return None
        grains = self.unseen(path, spec, starts, size)
        if sums is None or not len(grains):
            return None
        low = int(starts[0]) * spec.dtype.itemsize
        inside = np.zeros(len(grains), np.bool_)
        wrong = None
        if copy is not None:
            high = low + len(copy.data)
            inside = (grains * sums.grain >= low) & (np.minimum((grains + 1) * sums.grain, spec.nbytes) <= high)
            whole = grains[inside]
            if copy.crcs and copy.sums is sums:
                crcs = np.array(copy.crcs, np.uint32)[whole - copy.first]
                bad = whole[crcs != sums.crcs[whole]]
                if len(bad):
                    wrong = int(bad[0])
                else:
                    self._mark_compared(path, whole)
            else:
                wrong = self.compare(path, spec, whole, partial(_slice, copy.data, low))
        if wrong is None:
            rest = grains[~inside]
            memory = look() if 0 < len(rest) * sums.grain <= LOOKED_AT else None
            if memory is None:
                wrong = self._compare_readable(path, spec, rest, read)
            else:
                wrong = self._compare_memory(path, rest, memory)
        return None if wrong is None else sums.rows(wrong, spec)

    def _compare_readable(self, path: Path, spec: LeafSpec, grains: Ints, read: ReadBytes) -> int | None:
        """Compare as `compare` does, without grains that cannot be decoded: those have rows outside of the read."""
        try:
            return self.compare(path, spec, grains, read)
        except CorruptStoreError:
            if len(grains) < 2:
                return None
            half = len(grains) // 2
            wrong = self._compare_readable(path, spec, grains[:half], read)
            return self._compare_readable(path, spec, grains[half:], read) if wrong is None else wrong

    def _compare_memory(self, path: Path, grains: Ints, memory: Bytes) -> int | None:
        """Compare as `compare` does, in the memory of the whole leaf."""
        sums = self.leaves[path]
        value, grain, found = google_crc32c.value, sums.grain, []
        for at in (grains * grain).tolist():
            found.append(value(memory[at : at + grain]))
        wrong = grains[np.array(found, np.uint32) != sums.crcs[grains]]
        if len(wrong):
            return int(wrong[0])
        self._mark_compared(path, grains)
        return None

    def compare(self, path: Path, spec: LeafSpec, grains: Ints, read: ReadBytes, most: int = BLOCK) -> int | None:
        """Compare grains, about `most` bytes at a time; return the first one that is wrong, or None."""
        sums = self.leaves[path]
        found = hashed(sums, path, spec, grains, read, most)
        for (grain, crc), expected in zip(found, sums.crcs[grains].tolist(), strict=True):
            if crc != expected:
                return grain
        self._mark_compared(path, grains)
        return None

    def _mark_compared(self, path: Path, grains: Ints) -> None:
        fine = self._fine.setdefault(path, np.zeros(len(self.leaves[path].crcs), np.bool_))
        fine[grains] = True
        if path not in self._stale and fine.all():
            self._all_fine.add(path)

    def wrong_grain(self, path: Path, spec: LeafSpec, read: ReadBytes) -> int | None:
        """Return the first grain whose bytes differ from the last commit (grains written since are skipped)."""
        sums = self.leaves.get(path)
        if sums is None:
            return None
        stale = self._stale.get(path)
        return self.compare(path, spec, np.arange(len(sums.crcs)) if stale is None else np.flatnonzero(~stale), read)

    def _grains(self, path: Path, spec: LeafSpec, starts: Ints, size: int) -> Ints:
        grain, itemsize = self.leaves[path].grain, spec.dtype.itemsize
        first = starts * itemsize // grain
        last = ((starts + size) * itemsize - 1) // grain
        if len(starts) == 1:
            return np.arange(first[0], last[0] + 1)
        most = int((last - first).max()) + 1
        if most == 1:
            return first
        every = first[:, None] + np.arange(most)
        return every[every <= last[:, None]]

    def _mask(self, path: Path, spec: LeafSpec) -> Mask:
        if path not in self.leaves:
            self.touch_all(path, spec)
        if path not in self._stale:
            self._stale[path] = np.zeros(len(self.leaves[path].crcs), np.bool_)
            self._all_fine.discard(path)
        return self._stale[path]


_NOTHING: Ints = np.empty(0, np.int64)
