"""HDF5's writes to a file in place, held in memory until the commit: until then the file has the last commit.

HDF5 accesses the file as a Python file object. Its writes below the end of the last commit go to the overlay, those
beyond it to the file at once: nothing of the last commit is there. HDF5 must never see an error of the storage
(it may crash the process when it closes). Writes that a full storage refuses stay in memory, and `refused` is the
error; the commit tries again. If too much is waiting, or bytes cannot be read, the error is recorded in `failure`,
and everything after it is dropped.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from bisect import bisect_left, bisect_right
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tdstore.storekit import files
from tdstore_h5.file.journal import PROBE, Bytes, Journal, apply, probes_of, read_exact, set_size
from tdstore_h5.file.seekable import SeekableBytes

SPILL = 4 << 20
"""Bytes in memory from which on they are moved to the journal."""
HELD = 64 << 20
"""Bytes that are in memory at most where the journal takes none."""


class Extent(NamedTuple):
    """Bytes that are not in the file yet."""

    start: int
    stop: int
    data: Bytes | None
    """None: they are in the journal."""
    position: int
    """Where, in the journal."""

    def part(self, start: int, stop: int) -> Extent:
        """Return a part of it."""
        data = None if self.data is None else self.data[start - self.start : stop - self.start]
        return Extent(start, stop, data, self.position + start - self.start)


class Overlay(SeekableBytes):
    """A file with an overlay of changes.

    Args:
        fd: the descriptor of the file; it is not closed here.
        journal: receives bytes beyond the memory limit, and the commit.
    """

    def __init__(self, fd: int, journal: Journal) -> None:
        super().__init__()
        self.fd = fd
        self.journal = journal
        self.committed = committed_end(fd)
        """Where the last commit ends: nothing below is written before the next one."""
        self.size = os.fstat(fd).st_size
        self.failure: OSError | None = None
        """The first permanent error of the storage: everything after it is dropped."""
        self.refused: OSError | None = None
        """The error that keeps bytes in memory which belong on the storage."""
        self.sealed = False
        """Whether this is a forked copy: nothing of it reaches the storage."""
        self.complete = False
        """Whether the journal holds a commit that must be applied."""
        self._starts: list[int] = []
        self._extents: list[Extent] = []
        self._in_memory = 0

    # -- for HDF5 ------------------------------------------------------------------------
    def writable(self) -> bool:
        return True

    def _length(self) -> int:
        return self.size

    def readinto(self, buffer: Any) -> int:
        target = np.frombuffer(buffer, np.uint8)
        start, self._at = self._at, self._at + len(target)
        try:
            self._read(target, start)
        except (OSError, MemoryError) as error:
            self._fail(error)
            target[:] = 0
        return len(target)

    def write(self, data: Any) -> int:
        source = np.frombuffer(data, np.uint8)
        start, stop = self._at, self._at + len(source)
        self._at = stop
        self.size = max(self.size, stop)
        if self.failure is not None:
            return len(source)
        below = stop if self.sealed else max(start, min(stop, self.committed))
        try:
            if below > start:
                self._hold(start, below, source[: below - start].copy())
            if stop > below:
                self._beyond(below, source[below - start :])
        except (OSError, MemoryError) as error:
            self._fail(error)
        return len(source)

    def truncate(self, size: int | None = None) -> int:
        self.size = self._at if size is None else size
        if self.failure is None and not self.sealed:
            try:
                end = max(self.size, self.committed)
                if os.fstat(self.fd).st_size != end:
                    files.truncate(self.fd, end)
            except OSError as error:
                self._fail(error)
        return self.size

    def flush(self) -> None:
        """Do nothing: bytes beyond the last commit are written, and the others wait for the commit."""

    def _beyond(self, start: int, data: Bytes) -> None:
        """Write after the end of the last commit."""
        if self.refused is None:
            try:
                files.write_at(self.fd, data.data, start)
                return
            except OSError as error:
                self.refused = error
        self._hold(start, start + len(data), data.copy())

    def try_again(self) -> None:
        """Write the bytes that the storage refused before.

        Raises:
            OSError: it still refuses. Nothing is lost.
        """
        self._clip()
        behind = [e for e in self._extents if e.start >= self.committed]
        for extent in behind:
            files.write_at(self.fd, self._extent_bytes(extent, 0, extent.stop - extent.start).data, extent.start)
        if behind:
            self._extents = [e for e in self._extents if e.start < self.committed]
            self._starts = [e.start for e in self._extents]
            self._in_memory = sum(e.stop - e.start for e in self._extents if e.data is not None)
        if self._in_memory > SPILL:
            self._spill()
        self.refused = None

    # -- commit --------------------------------------------------------------------------
    def commit(self, *, sync: bool) -> None:
        """Write the whole overlay to the journal, then to the file.

        The caller has synced rows that were written without HDF5, and removes the journal afterwards.

        Raises:
            OSError: an error of the storage. If `complete`, the next opener finishes the commit; otherwise the last
                commit stays, and so does the overlay.
        """
        if self.refused is not None:
            self.try_again()
        self._clip()
        self._drop_unchanged()
        if self._extents or self.size < self.committed:
            before = self.journal.size
            try:
                self._reserve()
                for extent in self._extents:
                    if extent.data is not None:
                        self.journal.data(extent.start, extent.data)
                ranges = [(e.start, e.stop) for e in self._extents]
                self.journal.done(self.size, self.fd, probes_of(self.fd, ranges, self._bytes))
            except OSError:
                self.journal.cut(before)
                raise
            self.complete = True
            for extent in self._extents:
                apply(self.fd, extent.start, extent.stop - extent.start, partial(self._extent_bytes, extent))
        set_size(self.fd, self.size, sync=sync)
        self.complete = False
        self._starts.clear()
        self._extents.clear()
        self._in_memory = 0
        self.committed = self.size

    def abandon(self) -> None:
        """Drop uncommitted bytes; later writes of HDF5 have no effect."""
        self.failure = self.failure or OSError(errno.ECANCELED, "what was not committed is dropped")
        self._starts.clear()
        self._extents.clear()
        self._in_memory = 0

    def _reserve(self) -> None:
        """Reserve blocks for extents in holes of the file, so that the commit can be applied."""
        info = os.fstat(self.fd)
        if info.st_blocks * 512 < info.st_size:
            for extent in self._extents:
                files.allocate(self.fd, extent.start, extent.stop - extent.start)

    # -- extents -------------------------------------------------------------------------
    def _hold(self, start: int, stop: int, data: Bytes) -> None:
        """Add bytes to the overlay."""
        low, high = self._range(start, stop)
        before = [e.part(e.start, start) for e in self._extents[low : low + 1] if low < high and e.start < start]
        after = [e.part(stop, e.stop) for e in self._extents[high - 1 : high] if low < high and e.stop > stop]
        gone = sum(e.stop - e.start for e in self._extents[low:high] if e.data is not None)
        fresh = [*before, Extent(start, stop, data, 0), *after]
        self._extents[low:high] = fresh
        self._starts[low:high] = [e.start for e in fresh]
        self._in_memory += sum(e.stop - e.start for e in fresh if e.data is not None) - gone
        if self._in_memory <= SPILL or self.sealed:
            return
        if self.refused is None:
            try:
                self._spill()
            except OSError as error:
                self.refused = error
        if self.refused is not None and self._in_memory > HELD:
            raise self.refused

    def _spill(self) -> None:
        for i, e in enumerate(self._extents):
            if e.data is not None:
                self._extents[i] = Extent(e.start, e.stop, None, self.journal.data(e.start, e.data))
                self._in_memory -= e.stop - e.start

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the positions of the extents that overlap `[start, stop)`."""
        low = bisect_right(self._starts, start)
        if low and self._extents[low - 1].stop > start:
            low -= 1
        return low, bisect_left(self._starts, stop, low)

    def _clip(self) -> None:
        """Drop extents beyond the end."""
        low, high = self._range(self.size, max(self.size, sys.maxsize))
        if low < high:
            first = self._extents[low]
            rest = [first.part(first.start, self.size)] if first.start < self.size else []
            self._extents[low:high] = rest
            self._starts[low:high] = [e.start for e in rest]

    def _drop_unchanged(self) -> None:
        """Drop unchanged bytes, many of which HDF5 rewrites. The first extent must be one that changes the file."""
        changed = [e for e in self._extents if e.stop - e.start > PROBE or self._changes(e)]
        self._extents, self._starts = changed, [e.start for e in changed]

    def _changes(self, extent: Extent) -> bool:
        now = read_exact(self.fd, extent.start, extent.stop - extent.start)
        return bool((now != self._extent_bytes(extent, 0, len(now))).any())

    def _read(self, target: Bytes, start: int) -> None:
        stop = start + len(target)
        low, high = self._range(start, stop)
        found = self._extents[low:high]
        if len(found) != 1 or found[0].start > start or found[0].stop < stop:
            got = 0
            while got < len(target):
                n = os.preadv(self.fd, [target.data[got:]], start + got)
                if not n:
                    target[got:] = 0  # allocated, and not written yet
                    break
                got += n
        for extent in found:
            a, b = max(start, extent.start), min(stop, extent.stop)
            target[a - start : b - start] = self._extent_bytes(extent, a - extent.start, b - a)

    def _bytes(self, start: int, size: int) -> Bytes:
        target = np.empty(size, np.uint8)
        self._read(target, start)
        return target

    def _extent_bytes(self, extent: Extent, at: int, size: int) -> Bytes:
        if extent.data is not None:
            return extent.data[at : at + size]
        return self.journal.read(extent.position + at, size)

    def _fail(self, error: OSError | MemoryError) -> None:
        if self.failure is None:
            self.failure = error if isinstance(error, OSError) else OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def committed_end(fd: int) -> int:
    """Return where a file ends by its superblock, if that is below its length: a dead writer left the rest."""
    size = os.fstat(fd).st_size
    head = os.pread(fd, 48, 0)
    if len(head) < 48 or not head.startswith(b"\x89HDF\r\n\x1a\n"):
        return size
    version = head[8]
    if version in (2, 3) and head[9] == 8:
        base, end = struct.unpack_from("<Q8xQ", head, 12)
    elif version == 0 and head[13] == 8:
        base, end = struct.unpack_from("<Q8xQ", head, 24)
    else:
        return size
    return min(size, int(end)) if base == 0 and end else size
