"""The engine for a store's own folder: it caches open files, follows no link, and syncs everything at once."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

from tdstore.engine import Blob, Buffer, Engine, EngineCap, Entry
from tdstore.errors import CorruptStoreError, TDStoreError, UntrustedDataError
from tdstore.index.ranges import Range
from tdstore.storekit import files
from tdstore.storekit.local_engine import file_tag, key_parts, read_range
from tdstore.storekit.publish import remove_tree
from tdstore_zarr.place.redo_log import PREFIX

KEEP_OPEN = 128
FOLDERS = 64
"""Folders that a writer leaves open until the end of the commit; a reader leaves few, as many readers may be open."""
_WRITEBACK = 1 << 20
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EXDEV)


def close_quietly(fds: Iterable[int], close: Callable[[int], None]) -> None:
    """Close descriptors of an owner that was dropped; `close` is passed in, as modules are empty at exit."""
    for fd in fds:
        try:
            if fd >= 0:
                close(fd)
        except OSError:
            return  # it is closed


class _File:
    """An open file, closed after its last reader."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, _close: Callable[[int], None] = os.close, _quietly: Any = close_quietly) -> None:
        _quietly([self.fd], _close)


class FolderEngine(Engine):
    """Files below an open folder.

    Args:
        root: descriptor of the folder; the engine closes it.
        url: for messages.
        private: the folder is unpublished, so files are written in place.
    """

    def __init__(self, root: int, url: str, *, writable: bool, private: bool = False) -> None:
        self.root = root
        self.url = url
        self.private = private
        self._writable = writable
        self._lock = threading.Lock()
        self._tree = files.Tree(root, FOLDERS if writable else 4)
        self._open: OrderedDict[str, _File] = OrderedDict()
        self._unsynced: dict[str, None] = {}
        self._changed: set[tuple[str, ...]] = set()
        """Folders in which names were changed."""

    @property
    def can(self) -> EngineCap:
        """Return all abilities but conditions: writers hold the folder's lock instead."""
        return EngineCap.LIST | EngineCap.WRITE if self._writable else EngineCap.LIST

    # -- reading -------------------------------------------------------------------------
    def get(self, key: str, limit: int | None = None) -> Blob:
        """Read an object, as `Engine.get` does; files read whole are not left open."""
        where = self.where(key)
        with files.io_errors(where, writing=False):
            with self._lock:
                fd = self._tree.open(key_parts(key, self.url))
            try:
                size = os.fstat(fd).st_size
                if limit is not None and size > limit:
                    raise CorruptStoreError(f"{where} has {size} bytes, more than the {limit} it may have", url=where)
                data = os.pread(fd, size, 0)
                return Blob(data if len(data) == size else read_range(fd, 0, size, where), file_tag(fd))
            finally:
                os.close(fd)

    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Read ranges, as `Engine.get_ranges` does."""
        answers: list[Buffer] = []
        last, file, pread = None, None, os.pread
        for key, start, stop in ranges:
            if key != last or file is None:
                file, last = self._file(key), key
            if start < 0 or stop is None:
                size = os.fstat(file.fd).st_size
                start, stop = max(size + start, 0) if start < 0 else start, size if stop is None else stop
            try:
                data = pread(file.fd, stop - start, start)
            except OSError as error:
                files.raise_io(error, self.where(key), writing=False)
            whole = len(data) == stop - start
            answers.append(data if whole else read_range(file.fd, start, stop, self.where(key)))
        return answers

    def size(self, key: str) -> int:
        """Return the size of an object, as `Engine.size` does."""
        try:
            with self._lock:
                parts = key_parts(key, self.url)
                folder = self._tree.folder(parts[:-1])
                return os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_size
        except TDStoreError:
            raise
        except OSError as error:
            files.raise_io(error, self.where(key), writing=False)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List objects, as `Engine.list` does; a link is an `UntrustedDataError`."""
        folder = tuple(prefix.split("/")[:-1])
        with files.io_errors(self.where(prefix), writing=False):
            try:
                with self._lock:
                    fd = os.dup(self._tree.folder(folder))
            except FileNotFoundError:
                return
            try:
                yield from self._walk(fd, "/".join(folder), prefix, 0)
            finally:
                os.close(fd)

    def _walk(self, fd: int, above: str, prefix: str, depth: int) -> Iterator[Entry]:
        with os.scandir(fd) as entries:
            found = [
                (e.name, e.is_symlink(), e.is_dir(follow_symlinks=False), e.stat(follow_symlinks=False))
                for e in entries
            ]
        for name, link, is_dir, status in found:
            key = f"{above}/{name}" if above else name
            if not is_dir and not key.startswith(prefix):
                continue
            if link:
                raise UntrustedDataError(
                    f"{self.where(key)} is a link, which is not followed",
                    url=self.url,
                    hint="copy what it leads to into the store",
                )
            if is_dir:
                if depth > 600:
                    raise CorruptStoreError(f"{self.where(key)} is nested too deep", url=self.url)
                sub = os.open(name, files.SAFE_DIR, dir_fd=fd)
                try:
                    yield from self._walk(sub, key, prefix, depth + 1)
                finally:
                    os.close(sub)
            elif not files.is_temp(name):
                yield Entry(key, status.st_size, status.st_mtime)

    def _file(self, key: str) -> _File:
        with self._lock:
            file = self._open.get(key)
            if file is not None:
                self._open.move_to_end(key)
                return file
            try:
                file = self._open[key] = _File(self._tree.open(key_parts(key, self.url)))
            except TDStoreError:
                raise
            except OSError as error:
                files.raise_io(error, self.where(key), writing=False)
            if len(self._open) > KEEP_OPEN:
                self._open.popitem(last=False)
            return file

    # -- writing -------------------------------------------------------------------------
    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        """Write an object, as `Engine.put` does, without conditions."""
        if not self._writable or if_absent or if_match is not None:
            raise self.unsupported(EngineCap.CONDITIONAL if self._writable else EngineCap.WRITE)
        parts = key_parts(key, self.url)
        here = self.private or key.startswith(PREFIX)
        with files.io_errors(self.where(key), "cannot write"):
            with self._lock:  # data is written without it: other threads may put meanwhile
                folder = self._tree.folder(parts[:-1], create=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | files.SAFE
                fd = os.open(parts[-1], flags, 0o666, dir_fd=folder) if here else os.dup(folder)
                self._open.pop(key, None)
                self._unsynced[key] = None
            try:
                if here:
                    files.write_at(fd, memoryview(data).cast("B"), 0)
                    if len(data) >= _WRITEBACK:
                        files.start_writeback(fd)
                else:
                    files.replace_file(parts[-1], fd, bytes(data))
            finally:
                os.close(fd)
        return None

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, as `Engine.delete` does."""
        for key in keys:
            parts = key_parts(key, self.url)
            with files.io_errors(self.where(key), "cannot remove"), self._lock:
                self._open.pop(key, None)
                self._unsynced.pop(key, None)
                self._changed.add(parts[:-1])
                with contextlib.suppress(FileNotFoundError):
                    files.unlink(parts[-1], self._tree.folder(parts[:-1]))

    def move(self, old: str, new: str) -> None:
        """Rename a folder, with its contents."""
        with files.io_errors(self.where(old), "cannot rename"), self._lock:
            self._open.clear()
            source, target = key_parts(old, self.url), key_parts(new, self.url)
            parent = os.dup(self._tree.folder(source[:-1]))
            try:
                self._tree.close()
                files.rename(source[-1], parent, target[-1], self._tree.folder(target[:-1], create=True))
            finally:
                os.close(parent)
                self._tree.close()
            for key in [k for k in self._unsynced if k.startswith(old + "/")]:
                del self._unsynced[key]
                self._unsynced[new + key[len(old) :]] = None

    def remove(self, folder: str) -> None:
        """Remove a folder and its contents; it is not an error if it is missing."""
        with files.io_errors(self.where(folder), "cannot remove"), self._lock:
            self._open.clear()
            parts = key_parts(folder, self.url)
            with contextlib.suppress(FileNotFoundError):
                parent = self._tree.folder(parts[:-1])
                self._tree.close()
                parent = self._tree.folder(parts[:-1])
                remove_tree(parts[-1], parent)
            for key in [k for k in self._unsynced if k.startswith(folder + "/")]:
                del self._unsynced[key]

    def sweep_below(self, prefix: str, keep: Set[str]) -> None:
        """Remove folders of the root that start with `prefix`, and unfinished renames of a writer that ended.

        Folders are closed: until the next change, another program may replace them.
        """
        with files.io_errors(self.url, "tidying"):
            with os.scandir(self.root) as entries:
                found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for name, is_dir in found:
                if is_dir and name.startswith(prefix) and name not in keep:
                    self.remove(name)
                elif not is_dir and files.is_temp(name):
                    files.unlink_if_there(name, self.root)
            with self._lock:
                self._tree.close()

    def link(self, old: str, new: str) -> None:
        """Give a file a second name; if the file system has no links, copy it."""
        source, target = key_parts(old, self.url), key_parts(new, self.url)
        with files.io_errors(self.where(old), "cannot link"):
            with self._lock:
                parent = os.dup(self._tree.folder(source[:-1]))
                try:
                    self._unsynced[new] = None
                    files.link(source[-1], parent, target[-1], self._tree.folder(target[:-1], create=True))
                    return
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                finally:
                    os.close(parent)
            self.put(new, self.get(old).data)

    def rename_files(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Rename files, replacing existing ones; it is not an error if one is missing."""
        with self._lock:
            self._open.clear()
            for old, new in pairs:
                source, target = key_parts(old, self.url), key_parts(new, self.url)
                with files.io_errors(self.where(new), "cannot rename"):
                    try:
                        parent = self._tree.folder(source[:-1])
                    except FileNotFoundError:
                        continue
                    folder = self._tree.folder(target[:-1], create=True)
                    with contextlib.suppress(FileNotFoundError):
                        files.rename(source[-1], parent, target[-1], folder)
                self._unsynced.pop(old, None)
                self._changed.update([target[:depth] for depth in range(len(target))])

    def prune(self, keys: Iterable[str]) -> None:
        """Remove the folders of removed objects, if they are empty."""
        every = [key_parts(key, self.url) for key in keys]
        folders = {parts[:depth] for parts in every for depth in range(1, len(parts))}
        with self._lock:
            for folder in sorted(folders, key=len, reverse=True):
                self._tree.close()
                with contextlib.suppress(OSError):  # it holds something, or went already
                    os.rmdir(folder[-1], dir_fd=self._tree.folder(folder[:-1]))

    def sync(self) -> None:
        """Wait until everything that was put, renamed or removed is on the storage."""
        with self._lock:
            keys = list(self._unsynced)
            folders = set(self._changed)
            with files.io_errors(self.url, "waiting for the medium"):
                for key in keys:
                    parts = key_parts(key, self.url)
                    fd = self._tree.open(parts)
                    try:
                        files.fsync(fd)
                    finally:
                        os.close(fd)
                    for depth in range(len(parts)):
                        folders.add(parts[:depth])
                for folder in sorted(folders):
                    # It was removed, or is a chunk by now; the folder above it shows that.
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                        files.fsync(self._tree.folder(folder))
            self._unsynced.clear()
            self._changed.clear()

    def forget(self) -> None:
        """Close the cached files and folders."""
        with self._lock:
            self._open.clear()
            self._tree.close()

    def close(self) -> None:
        """Close the folder."""
        with self._lock:
            self._open.clear()
            self._tree.close()
            if self.root >= 0:
                os.close(self.root)
                self.root = self._tree.root = -1

    def __del__(self, _close: Callable[[int], None] = os.close, _quietly: Any = close_quietly) -> None:
        _quietly([*self._tree.descriptors(), self.root], _close)
