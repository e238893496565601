"""Access with h5py beside a store: a read-only `h5py.File` of the last commit."""

from __future__ import annotations

import os
import weakref

import h5py
from h5py import h5f, h5fd, h5p

from tdstore.errors import StoreIOError
from tdstore_h5.faults import h5_errors
from tdstore_h5.file.handle import Handle
from tdstore_h5.file.seekable import SeekableBytes


class CommittedBytes(SeekableBytes):
    """The bytes of a file until its next change. The lock of the file is held as long as this object is open.

    Args:
        fd: the descriptor of the file. It is duplicated, and the lock belongs to both descriptors.
        url: the location of the store, for messages.
        owner: an object to hold for as long as HDF5 reads here.
    """

    def __init__(self, fd: int, url: str, owner: object) -> None:
        super().__init__()
        self._fd = os.dup(fd)
        self._url = url
        self._owner: object = owner

    def _length(self) -> int:
        return os.fstat(self._open()).st_size

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # h5py passes nothing else
        count = os.preadv(self._open(), [buffer], self._at)
        self._at += count
        return count

    def _open(self) -> int:
        if self._fd < 0:
            raise StoreIOError(
                f"{self._url} was closed or is being changed since this h5py.File was opened: open another",
                url=self._url,
            )
        return self._fd

    def end(self) -> None:
        """Refuse further reads: HDF5's knowledge of the file may be wrong from now on."""
        fd, self._fd, self._owner = self._fd, -1, None
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        self.end()
        super().close()


class ReadOnlyFile:
    """The last `h5py.File` of a store, held weakly."""

    def __init__(self) -> None:
        self._bytes: weakref.ref[CommittedBytes] | None = None
        self._file: weakref.ref[h5py.File] | None = None

    def open(self, handle: Handle, owner: object) -> h5py.File:
        """Return the current file if it is still open; otherwise open another."""
        found = None if self._file is None else self._file()
        if found is not None and found:
            return found
        self.end()
        content = CommittedBytes(handle.fd, handle.url, owner)
        access = h5p.create(h5p.FILE_ACCESS)
        access.set_fileobj_driver(h5fd.fileobj_driver, content)
        with h5_errors(handle.url, "opening"):
            found = h5py.File(h5f.open(os.fsencode(handle.path), h5f.ACC_RDONLY, fapl=access))
        self._bytes, self._file = weakref.ref(content), weakref.ref(found)
        return found

    def end(self) -> None:
        """Close the current file, before its bytes change."""
        content = None if self._bytes is None else self._bytes()
        self._bytes = self._file = None
        if content is not None:
            content.end()
