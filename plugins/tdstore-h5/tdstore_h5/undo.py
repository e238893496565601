"""What rows were before they were written in place: the way back to the last commit."""

from __future__ import annotations

import tempfile
from typing import IO, NamedTuple

import numpy as np

from tdstore.dtypes import numpy_dtype
from tdstore.files import write_at
from tdstore.types import LeafSpec
from tdstore_h5.raw import Ints, RawFile, groups_of

IN_MEMORY = 1 << 20
"""Bytes from which on they are in a temporary file; also the bytes that are copied at a time."""
MOST = 64 << 20
"""Bytes that are remembered outside of a change of structure, which can always be taken back."""


class _Stretch(NamedTuple):
    start: int
    size: int
    position: int
    """In the file of old bytes; negative: it was a hole."""


class Undo:
    """Old bytes of one file, in the order in which they were overwritten.

    Args:
        folder: where a temporary file goes.
    """

    def __init__(self, raw: RawFile, folder: str) -> None:
        self.raw = raw
        self.folder = folder
        self.complete = True
        """Whether nothing was left out."""
        self._stretches: list[_Stretch] = []
        self._bytes: IO[bytes] | None = None
        self._size = 0

    def remember(self, offset: int, spec: LeafSpec, starts: Ints, size: int, *, bounded: bool) -> None:
        """Keep the bytes of blocks of a leaf that are about to be overwritten.

        Args:
            bounded: give up when it becomes too much; `complete` says so then.
        """
        if not self.complete:
            return
        itemsize = numpy_dtype(spec.dtype).itemsize
        ordered = np.sort(starts)
        if bounded and self._size + len(ordered) * size * itemsize > MOST:
            self.forget()
            self.complete = False
            return
        for i, j, _ in groups_of(ordered, size, itemsize):
            count = (int(ordered[j - 1] - ordered[i]) + size) * itemsize
            start = offset + int(ordered[i]) * itemsize
            for at in range(0, count, IN_MEMORY):
                self._add(start + at, min(IN_MEMORY, count - at))

    def _add(self, start: int, size: int) -> None:
        if self.raw.is_hole(start, size):
            self._stretches.append(_Stretch(start, size, -1))
            return
        if self._bytes is None:
            self._bytes = tempfile.SpooledTemporaryFile(IN_MEMORY, dir=self.folder)  # noqa: SIM115 - `forget` closes it
        self._bytes.seek(self._size)
        self._bytes.write(self.raw.bytes_at(start, size).data)
        self._stretches.append(_Stretch(start, size, self._size))
        self._size += size

    def restore(self) -> None:
        """Put everything back, the last first."""
        for stretch in reversed(self._stretches):
            write_at(self.raw.fd, memoryview(self._old(stretch)), stretch.start)
        self.forget()

    def _old(self, stretch: _Stretch) -> bytes:
        if stretch.position < 0 or self._bytes is None:
            return bytes(stretch.size)
        self._bytes.seek(stretch.position)
        return self._bytes.read(stretch.size)

    def forget(self) -> None:
        """What was written is committed."""
        file, self._bytes = self._bytes, None
        if file is not None:
            file.close()
        self._stretches.clear()
        self._size = 0
        self.complete = True
