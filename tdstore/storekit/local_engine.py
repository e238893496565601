"""The engine for local files: positional reads, atomic puts, conditions checked under a lock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from tdstore.engine import Blob, Buffer, Engine, EngineCap, Entry
from tdstore.errors import ConflictError, CorruptStoreError, StoreNotFoundError, TDStoreError
from tdstore.index.ranges import Range, RangeInto
from tdstore.storekit import files
from tdstore.storekit.documents import is_plain_key, is_plain_name

LOCK_SECONDS = 20.0
"""For another process to put an object: a commit that is refused is tried once more by `close`."""
_IOV_MAX = 1024
"""Parts of one `pwritev`."""


_ABLE = EngineCap.LIST | EngineCap.WRITE | EngineCap.CONDITIONAL


class LocalEngine(Engine):
    """Engine over the files below a folder. No link is followed, and nothing outside of the folder is accessed.

    Args:
        root: the folder. The first `put` creates it; if it is removed, no later one creates it again.
        writable: False refuses `put` and `delete`.
        durable: puts survive a power loss (fsync of the file and of its folder).

    Example:
        >>> engine = LocalEngine(tmp_path)
        >>> tag = engine.put("a/b.bin", b"0123456789")
        >>> engine.get_ranges([Range("a/b.bin", 2, 4), Range("a/b.bin", -1, None)])
        [b'23', b'9']
    """

    def __init__(self, root: str | os.PathLike[str], *, writable: bool = True, durable: bool = True) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.url = self.root
        self._writable = writable
        self._durable = durable
        self._seen = False
        """Whether the folder was there: one that was removed since is not made again."""

    @property
    def can(self) -> EngineCap:
        """Return all abilities except rename; only those for reading if not `writable`."""
        return _ABLE if self._writable else EngineCap.LIST

    @property
    def lanes(self) -> int:
        """One: a disk writes one file as fast as several, and each of them has to be waited for."""
        return 1

    def get(self, key: str, limit: int | None = None) -> Blob:
        """Read an object, as `Engine.get` does."""
        with files.io_errors(self.where(key), writing=False), self._tree() as tree:
            fd = tree.open(key_parts(key, self.url))
            try:
                size = os.fstat(fd).st_size
                if limit is not None and size > limit:
                    raise CorruptStoreError(
                        f"{self.where(key)} has {size} bytes, more than the {limit} it may have", url=self.where(key)
                    )
                return Blob(read_range(fd, 0, size, self.where(key)), file_tag(fd))
            finally:
                os.close(fd)

    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Read ranges, as `Engine.get_ranges` does; each file is opened once."""
        answers: list[Buffer] = [b""] * len(ranges)
        by_key: dict[str, list[int]] = {}
        for at, r in enumerate(ranges):
            by_key.setdefault(r.key, []).append(at)
        if not by_key:
            return answers
        key = next(iter(by_key))
        try:
            with self._tree() as tree:
                for key, places in by_key.items():
                    fd = tree.open(key_parts(key, self.url))
                    try:
                        size = os.fstat(fd).st_size
                        for at in places:
                            _, start, stop = ranges[at]
                            if isinstance(wanted := ranges[at], RangeInto):
                                answers[at] = self._read_into(fd, key, start, wanted.into)
                                continue
                            first = max(size + start, 0) if start < 0 else start
                            answers[at] = read_range(fd, first, size if stop is None else stop, self.where(key))
                    finally:
                        os.close(fd)
        except TDStoreError:
            raise
        except OSError as error:
            files.raise_io(error, self.where(key), writing=False)
        return answers

    def size(self, key: str) -> int:
        """Return the size of an object, as `Engine.size` does."""
        with files.io_errors(self.where(key), writing=False), self._tree() as tree:
            fd = tree.open(key_parts(key, self.url))
            try:
                return os.fstat(fd).st_size
            finally:
                os.close(fd)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        """Write an object, as `Engine.put` does; the tag is inode, time and size."""
        self._check_writable()
        where, parts = self.where(key), key_parts(key, self.url)
        with files.io_errors(where, "cannot write"), self._tree(create=True) as tree:
            folder = tree.folder(parts[:-1], create=True)
            if not (if_absent or if_match is not None):
                files.replace_file(parts[-1], folder, data, sync=self._durable)
            else:
                # Rename is atomic, comparing first is not: a conditional put locks the folder.
                files.lock(folder, exclusive=True, timeout=LOCK_SECONDS, url=where)
                try:
                    self._check_condition(parts[-1], folder, where, if_absent, if_match)
                    files.replace_file(parts[-1], folder, data, sync=self._durable)
                finally:
                    files.unlock(folder)
            if self._durable:
                files.fsync(folder)
            with files.closing(files.open_plain(parts[-1], folder)) as fd:
                return file_tag(fd)

    def put_many(self, items: Sequence[tuple[str, Buffer]]) -> None:
        """Write objects, as `Engine.put_many` does; wait for the storage once all of them are written."""
        self.put_parts([(key, [data]) for key, data in items])

    def put_parts(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> None:
        """Write objects, as `Engine.put_parts` does, without joining their parts."""
        self._check_writable()
        by_folder: dict[tuple[str, ...], list[tuple[str, Sequence[Buffer]]]] = {}
        for key, data in items:
            *folder, name = key_parts(key, self.url)
            by_folder.setdefault(tuple(folder), []).append((name, data))
        with files.io_errors(self.url, "cannot write"), self._tree(create=True) as tree:
            for path, files_of in by_folder.items():
                self._put_all(tree.folder(path, create=True), files_of)

    def _put_all(self, folder: int, items: Sequence[tuple[str, Sequence[Buffer]]]) -> None:
        waiting: dict[str, int] = {}  # descriptors by temporary names
        try:
            for _, parts in items:
                temp = files.temp_name()
                fd = waiting[temp] = files.create_empty(temp, folder)
                _write_all(fd, parts)
                if self._durable and len(items) > 1:
                    files.start_writeback(fd)
            for (temp, fd), (name, _) in zip(list(waiting.items()), items, strict=True):
                if self._durable:
                    files.fsync(fd)
                files.rename(temp, folder, name, folder)
                os.close(waiting.pop(temp))
        finally:
            for temp, fd in waiting.items():
                os.close(fd)
                files.unlink_if_there(temp, folder)
        if self._durable:
            files.fsync(folder)

    def _check_condition(self, name: str, folder: int, where: str, if_absent: bool, if_match: str | None) -> None:
        try:
            fd = files.open_plain(name, folder)
        except FileNotFoundError:
            if if_match is not None:
                raise ConflictError(f"{where} is gone; another writer removed it", url=where) from None
            return
        try:
            if if_absent or file_tag(fd) != if_match:
                raise ConflictError(f"{where} was changed by another writer", url=where)
        finally:
            os.close(fd)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, as `Engine.delete` does."""
        self._check_writable()
        if not os.path.isdir(self.root):
            return
        with files.io_errors(self.url, writing=False), self._tree() as tree:
            for key in keys:
                parts = key_parts(key, self.url)
                with files.io_errors(self.where(key), "cannot remove"), contextlib.suppress(FileNotFoundError):
                    files.unlink(parts[-1], tree.folder(parts[:-1]))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List objects, as `Engine.list` does."""
        if not os.path.isdir(self.root):
            return
        with files.io_errors(self.url, "cannot list", writing=False):
            for folder, _, names in os.walk(self.root):
                below = os.path.relpath(folder, self.root)
                for name in names:
                    key = name if below == "." else f"{below}/{name}"
                    if key.startswith(prefix) and not files.is_temp(name):
                        status = os.stat(os.path.join(folder, name), follow_symlinks=False)
                        yield Entry(key, status.st_size, status.st_mtime)

    # -- inside ------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _tree(self, *, create: bool = False) -> Iterator[files.Tree]:
        if create and not self._seen:
            os.makedirs(self.root, exist_ok=True)
        root = files.open_dir(self.root)
        self._seen = True
        try:
            tree = files.Tree(root)
            try:
                yield tree
            finally:
                tree.close()
        finally:
            os.close(root)

    def _check_writable(self) -> None:
        if not self._writable:
            raise self.unsupported(EngineCap.WRITE)

    def _read_into(self, fd: int, key: str, start: int, into: memoryview) -> memoryview:
        done = 0
        while done < into.nbytes:
            count = os.preadv(fd, [into[done:]], start + done)
            if not count:
                raise _too_short(fd, start + into.nbytes, self.where(key))
            done += count
        return into


def key_parts(key: str, url: str) -> tuple[str, ...]:
    """Split the key of a file below a folder.

    Args:
        key: names with "/" between them.
        url: the folder, for the error.

    Raises:
        StoreNotFoundError: a name is empty, or leads out of the folder.

    Example:
        >>> key_parts("a/b.bin", "runs")
        ('a', 'b.bin')
    """
    parts = tuple(key.split("/"))
    if not is_plain_key(key) and not all(map(is_plain_name, parts)):
        raise StoreNotFoundError(f"{key!r} does not name a file below {url}", url=url)
    return parts


def read_range(fd: int, start: int, stop: int, where: str) -> bytes:
    """Read bytes `start` to `stop` of a file.

    Args:
        fd: the file's descriptor.
        start, stop: offsets in bytes.
        where: the file, for the error.

    Raises:
        CorruptStoreError: the file ends before `stop`.
    """
    data = os.pread(fd, stop - start, start)
    while len(data) < stop - start:  # at most 2 GiB come at once
        more = os.pread(fd, stop - start - len(data), start + len(data))
        if not more:
            raise _too_short(fd, stop, where)
        data += more
    return data


def file_tag(fd: int) -> str:
    """Return a tag that changes with a file: inode, time and size."""
    status = os.fstat(fd)
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def _too_short(fd: int, stop: int, where: str) -> CorruptStoreError:
    return CorruptStoreError(
        f"{where} ends at byte {os.fstat(fd).st_size}, and bytes up to {stop} were expected", url=where
    )


def _write_all(fd: int, parts: Sequence[Buffer]) -> None:
    at = 0
    for first in range(0, len(parts), _IOV_MAX):
        some = [memoryview(part) for part in parts[first : first + _IOV_MAX]]
        files.write_parts(fd, some, at)
        at += sum(part.nbytes for part in some)
