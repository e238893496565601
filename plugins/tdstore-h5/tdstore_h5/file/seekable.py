"""A file object with a position, over bytes that HDF5 reads by offset."""

from __future__ import annotations

import io
from abc import abstractmethod


class SeekableBytes(io.RawIOBase):
    """A readable file object for h5py; a subclass implements `_length` and `readinto`, from position `_at`."""

    _at = 0

    @abstractmethod
    def _length(self) -> int:
        """Return the number of bytes."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = self._length() if whence == io.SEEK_END else self._at if whence == io.SEEK_CUR else 0
        self._at = base + offset
        return self._at
