"""The pages of `CachedEngine` on disk: a local folder of bounded size, shared by any number of processes.

A page is one file, written under a temporary name and renamed, with a checksum before its bytes: a reader finds a
complete page or none. Evicted pages can be fetched again, so no file here is ever the only copy.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import threading
import time
import warnings

import google_crc32c

from tdstore.errors import StoreIOError

_HEAD = struct.Struct("<4sII")
_MAGIC = b"TDP1"
FRESH = 60.0
"""Seconds between two notes that a page was used."""
STEP = 64
"""After so many new pages the folder is measured again."""
ROOM = 0.9
"""What is left of the limit after throwing pages away."""
STALE = 3600.0
"""A file that was begun this long ago has no writer any more."""


class DiskCache:
    """One folder of pages.

    Args:
        folder: created if missing; the pages of all URLs may share it.
        most: bytes that it may take; the least recently used pages are evicted first.
    """

    def __init__(self, folder: str, most: int) -> None:
        self.folder = folder
        self.most = most
        self._new = STEP  # measured at the first write
        self._lock = threading.Lock()
        self._failed = False
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise StoreIOError(
                f"the cache folder {folder} cannot be made: {error.strerror}", url=folder, errno=error.errno
            ) from error

    def get(self, name: str) -> bytes | None:
        """Return the page of that name, or None. A damaged one is removed."""
        path = self._path(name)
        try:
            with open(path, "rb") as file:
                head, data = file.read(_HEAD.size), file.read()
                used = os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        if len(head) == _HEAD.size:
            magic, size, crc = _HEAD.unpack(head)
            if magic == _MAGIC and size == len(data) and google_crc32c.value(data) == crc:
                if time.time() - used > FRESH:
                    self._touch(path)
                return data
        _remove(path)
        return None

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Store a page. A full disk is not an error: the page is then not cached."""
        path = self._path(name)
        data = bytes(data)
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            fd, temporary = tempfile.mkstemp(dir=os.path.dirname(path), suffix=".tmp")
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(_HEAD.pack(_MAGIC, len(data), google_crc32c.value(data)))
                    file.write(data)
                os.replace(temporary, path)
            except BaseException:
                _remove(temporary)
                raise
        except OSError as error:
            if not self._failed:
                self._failed = True
                warnings.warn(f"the cache {self.folder} cannot be written: {error.strerror}", stacklevel=2)
            return
        with self._lock:
            self._new += 1
            full = self._new >= STEP
            if full:
                self._new = 0
        if full:
            self.trim()

    def trim(self) -> None:
        """Evict the least recently used pages, until the folder is small enough."""
        pages = []
        total = 0
        now = time.time()
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    status = os.stat(path)
                except OSError:
                    continue  # another process was faster
                if name.endswith(".tmp"):
                    if now - status.st_mtime > STALE:
                        _remove(path)
                elif name.endswith(".page"):
                    pages.append((status.st_mtime, status.st_size, path))
                    total += status.st_size
        if total <= self.most:
            return
        for _, size, path in sorted(pages):
            _remove(path)
            total -= size
            if total <= self.most * ROOM:
                return

    def _path(self, name: str) -> str:
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
        return os.path.join(self.folder, digest[:2], f"{digest[2:]}.page")

    def _touch(self, path: str) -> None:
        try:
            os.utime(path)
        except OSError:
            return  # removed meanwhile, or not ours


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # another process was faster
