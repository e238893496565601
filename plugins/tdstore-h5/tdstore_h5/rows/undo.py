"""Old bytes of rows that were written in place: they restore the last commit, or the state before one write."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import NamedTuple

import numpy as np

from tdstore.storekit.files import allocate, write_at
from tdstore.types import LeafSpec
from tdstore_h5.file.journal import read_exact
from tdstore_h5.rows.contiguous import Bytes, Ints, RawFile, groups_of

IN_MEMORY = 1 << 20
"""Bytes from which on they are in a temporary file; also the bytes that are copied at a time."""
_OF_ONE_CALL = 1 << 20
"""The same, for bytes that are not needed after a call."""
MOST = 64 << 20
"""Bytes that are remembered until the commit, outside of a change of structure: one call, and a change of structure,
can be taken back whatever its size. Also bytes in memory where the disk has no room for a temporary file."""


class _Stretch(NamedTuple):
    """One stretch of old bytes."""

    start: int
    size: int
    data: Bytes | None
    """None: they are in the temporary file, or were a hole."""
    position: int
    """In the temporary file; negative: it was a hole."""


class Undo:
    """Old bytes of one file, in the order in which they were overwritten.

    Args:
        folder: the folder for a temporary file.
        in_memory: the number of bytes from which on the temporary file is used.
        memory: room for the first of these bytes.
    """

    def __init__(self, raw: RawFile, folder: str, *, in_memory: int = IN_MEMORY, memory: Bytes | None = None) -> None:
        self.raw = raw
        self.folder = folder
        self.in_memory = in_memory
        self._memory = memory
        self._memory_of_calls: Bytes | None = None
        self.complete = True
        """Whether nothing was left out."""
        self._stretches: list[_Stretch] = []
        self._file = -1
        self._file_size = 0
        self._held = 0
        """Bytes in memory."""

    def of_one_call(self) -> Undo:
        """Return one for a single call, whose memory the next one uses again."""
        if self._memory_of_calls is None:
            self._memory_of_calls = np.empty(_OF_ONE_CALL, np.uint8)
        return Undo(self.raw, self.folder, in_memory=_OF_ONE_CALL, memory=self._memory_of_calls)

    def remember(self, offset: int, spec: LeafSpec, starts: Ints, size: int, *, bounded: bool) -> None:
        """Save the bytes of blocks of a leaf that are about to be overwritten; reserve blocks where they are holes.

        Args:
            offset: the first byte of the leaf in the file.
            spec: its spec.
            starts, size: the blocks, as `contiguous.blocks_of` returns them.
            bounded: give up above a limit, and set `complete` to False.

        Raises:
            OSError: the storage has no space for the new bytes, or for the old ones. Nothing was changed.
        """
        itemsize = spec.dtype.itemsize
        ordered = starts if len(starts) == 1 else np.sort(starts)
        if bounded and self._held + self._file_size + len(ordered) * size * itemsize > MOST:
            self.forget()
            self.complete = False
        hole = sys.maxsize if self.raw.on_tmpfs and self.raw.has_all_pages() else -1
        for i, j, _ in groups_of(ordered, size, itemsize):
            count = (int(ordered[j - 1] - ordered[i]) + size) * itemsize
            begin = offset + int(ordered[i]) * itemsize
            for start in range(begin, begin + count, IN_MEMORY):
                part = min(IN_MEMORY, begin + count - start)
                if hole < start:
                    hole = self.raw.next_hole(start)
                self._add(start, part, holed=hole < start + part)

    def _add(self, start: int, size: int, *, holed: bool) -> None:
        if holed:
            new = self.raw.is_hole(start, size)  # else beside its neighbour's bytes in one block
            allocate(self.raw.fd, start, size)
            if new:
                if self.complete:
                    self._stretches.append(_Stretch(start, size, None, -1))
                return
        if self.complete:
            self._stretches.append(self._saved(start, self._read(start, size)))

    def _read(self, start: int, size: int) -> Bytes:
        if self._memory is None or self._held + size > len(self._memory):
            return self.raw.bytes_at(start, size)
        data = self._memory[self._held : self._held + size]
        self.raw.read_into(data, start)
        return data

    def _saved(self, start: int, data: Bytes) -> _Stretch:
        if self._held + len(data) > self.in_memory:
            try:
                return _Stretch(start, len(data), None, self._put(data))
            except OSError:
                if self._held + len(data) > MOST:
                    raise
        self._held += len(data)
        return _Stretch(start, len(data), data, -1)

    def _put(self, data: Bytes) -> int:
        if self._file < 0:
            self._file, name = tempfile.mkstemp(dir=self.folder)
            os.unlink(name)
        write_at(self._file, data.data, self._file_size)
        self._file_size += len(data)
        return self._file_size - len(data)

    def now(self) -> int:
        """Return a position for `back_to`."""
        return len(self._stretches)

    def back_to(self, moment: int) -> None:
        """Restore all bytes that were overwritten since then, the last ones first.

        Raises:
            OSError: the storage refused some of them, which are kept; all others were restored.
        """
        refused: list[_Stretch] = []
        first: OSError | None = None
        for stretch in reversed(self._stretches[moment:]):
            try:
                write_at(self.raw.fd, self._old(stretch).data, stretch.start)
            except OSError as error:
                refused.append(stretch)
                first = first or error
        self._stretches[moment:] = reversed(refused)
        if first is not None:
            raise first

    def restore(self) -> None:
        """Restore all bytes."""
        self.back_to(0)
        self.forget()

    def _old(self, stretch: _Stretch) -> Bytes:
        if stretch.data is not None:
            return stretch.data
        if stretch.position < 0:
            return np.zeros(stretch.size, np.uint8)
        return read_exact(self._file, stretch.position, stretch.size)

    def forget(self) -> None:
        """Drop everything, after a commit."""
        fd, self._file = self._file, -1
        if fd >= 0:
            os.close(fd)
        self._stretches.clear()
        self._held = self._file_size = 0
        self.complete = True
