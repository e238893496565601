"""The journal of a file: a second file beside it, with the leaves that a writer changes in place, and the next commit.

It is a sequence of records, each with a checksum. A complete commit is written here, and reaches the file only after
its last record is on the storage: a writer that ends before that leaves the last commit, and one that ends later
leaves a journal that the next opener applies. Rows of contiguous leaves are written in place, without the journal;
it names these leaves.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import google_crc32c
import msgspec
import numpy as np

from tdstore.errors import CorruptStoreError
from tdstore.storekit import files
from tdstore.types import Path

PROBE = 4096
"""Bytes of one extent by which a journal identifies its file."""
MOST_PROBES = 32
BLOCK = 4 << 20
"""Bytes that are copied at a time."""

_MAGIC = b"tdstore-h5-journal-1\n\0\0\0"
_RECORD = struct.Struct("<4sIQQ")
"""Kind, crc32c of the rest, a position in the file, and the number of bytes that follow."""
_FILE = struct.Struct("<QQ")
"""Device and inode."""
_PROBE = struct.Struct("<QI")
"""Position and size; the bytes before and after the commit follow."""
_MARK, _DATA, _DROP, _DONE = b"MARK", b"DATA", b"DROP", b"DONE"
_MOST_MARK = 64 << 20

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def journal_path(path: str) -> str:
    """Return the path of a file's journal: `/runs/a.h5` -> `/runs/.a.h5.tdstore.journal`."""
    folder, name = os.path.split(path)
    raw = os.fsencode(name)
    if len(raw) > 200:  # most file systems take names of 255 bytes
        name = os.fsdecode(raw[:160]) + "-" + sha256(raw).hexdigest()[:16]
    return os.path.join(folder, f".{name}.tdstore.journal")


class Probe(NamedTuple):
    """Some bytes that a commit changes."""

    start: int
    before: Bytes
    after: Bytes


@dataclass
class Found:
    """The contents of a dead writer's journal."""

    marked: set[Path] = field(default_factory=set)
    """Leaves whose rows it changed in place."""
    extents: list[tuple[int, int, int]] = field(default_factory=list)
    """Of a commit: position in the file, position in the journal, bytes."""
    size: int | None = None
    """The length of the file after the commit; None: the commit was not complete."""
    file: tuple[int, int] = (0, 0)
    """Device and inode of the file that the commit is for."""
    probes: list[Probe] = field(default_factory=list)


class Journal:
    """The journal of one writer.

    Args:
        path: path of the file.
        url: the location, for messages.
        sync: wait for the storage, so that a power cut loses nothing.
    """

    def __init__(self, path: str, url: str, *, sync: bool) -> None:
        self.path = journal_path(path)
        self.url = url
        self.sync = sync
        self.size = 0
        """Bytes written so far."""
        self._fd = -1

    @property
    def begun(self) -> bool:
        """Check whether it has records of this writer."""
        return self._fd >= 0

    def mark(self, paths: Iterable[Path]) -> None:
        """Record leaves that are about to change in place."""
        text = msgspec.json.encode([list(path) for path in paths])
        before = self.size
        try:
            self._add(_MARK, 0, np.frombuffer(text, np.uint8))
            self._wait()
        except OSError:
            self.cut(before)
            raise

    def data(self, start: int, data: Bytes) -> int:
        """Add bytes of a commit; return their position in the journal."""
        return self._add(_DATA, start, data)

    def drop(self) -> None:
        """Remove the added bytes: they belong to no commit."""
        self._add(_DROP, 0, np.empty(0, np.uint8))

    def done(self, size: int, fd: int, probes: Iterable[Probe]) -> None:
        """Complete a commit to the file `fd`: it is valid from then on."""
        info = os.fstat(fd)
        table = _FILE.pack(info.st_dev, info.st_ino) + b"".join(
            _PROBE.pack(p.start, len(p.before)) + p.before.tobytes() + p.after.tobytes() for p in probes
        )
        self._add(_DONE, size, np.frombuffer(table, np.uint8))
        self._wait()

    def read(self, position: int, size: int) -> Bytes:
        """Read bytes that were added."""
        return read_exact(self._fd, position, size)

    def cut(self, size: int) -> None:
        """Drop everything after the first `size` bytes: records that could not be written. 0 removes the journal."""
        if self._fd < 0 or self.size <= size:
            return
        if size:
            files.truncate(self._fd, size)
            self.size = size
        else:  # the next record begins it again
            self.close()
            with contextlib.suppress(OSError):  # without records it means nothing to the next opener
                os.unlink(self.path)

    def remove(self) -> None:
        """Remove the journal: its commit is in the file, or was dropped."""
        self.close()
        unlink_journal(self.path, self.url)

    def close(self) -> None:
        """Close the descriptor; the journal stays."""
        fd, self._fd, self.size = self._fd, -1, 0
        if fd >= 0:
            os.close(fd)

    def _add(self, kind: bytes, at: int, data: Bytes) -> int:
        if self._fd < 0:
            self._begin()
        head = _RECORD.pack(kind, 0, at, len(data))[8:]
        crc = google_crc32c.extend(google_crc32c.value(kind + head), data)
        start = self.size
        if len(data) < BLOCK:
            files.write_at(self._fd, memoryview(_RECORD.pack(kind, crc, at, len(data)) + data.tobytes()), start)
        else:
            files.write_at(self._fd, memoryview(_RECORD.pack(kind, crc, at, len(data))), start)
            files.write_at(self._fd, data.data, start + _RECORD.size)
        self.size = start + _RECORD.size + len(data)
        return start + _RECORD.size

    def _begin(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | files.SAFE
        fd = os.open(self.path, flags, 0o666)
        try:
            files.write_at(fd, memoryview(_MAGIC), 0)
            if self.sync:
                folder = files.open_dir(os.path.dirname(self.path))
                try:
                    files.fsync(folder)
                finally:
                    os.close(folder)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            raise
        self._fd, self.size = fd, len(_MAGIC)

    def _wait(self) -> None:
        if self.sync:
            files.fsync(self._fd)


def unlink_journal(path: str, url: str) -> None:
    """Remove a journal that may not exist."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        files.raise_io(error, url, "removing its journal")


# -- reading and applying ---------------------------------------------------------------------------
def look(path: str, url: str, fd: int) -> Found | None:
    """Read the journal beside a file; None if there is none, or it belongs to another file.

    Args:
        path: path of the file.
        url: the location, for messages.
        fd: the file.
    """
    try:
        journal = os.open(journal_path(path), os.O_RDONLY | files.SAFE)
    except FileNotFoundError:
        return None
    except OSError as error:
        files.raise_io(error, url, "opening its journal", writing=False)
    try:
        info = os.fstat(journal)
        if not stat.S_ISREG(info.st_mode):
            raise CorruptStoreError(f"{url}: its journal is not a plain file", url=url)
        with files.io_errors(url, "reading its journal", writing=False):
            found = _parse(journal, info.st_size)
            if found.size is not None and not _belongs(found, fd):
                return None
            return found
    finally:
        os.close(journal)


def finish(path: str, url: str, fd: int, found: Found, *, sync: bool) -> None:
    """Apply the complete commit of a journal to its file, and remove the journal. May be repeated."""
    assert found.size is not None
    name = journal_path(path)
    with files.io_errors(url, "finishing a commit that a writer which died had begun"):
        journal = os.open(name, os.O_RDONLY | files.SAFE)
        try:
            for start, position, count in found.extents:
                apply(fd, start, count, partial(_from, journal, position))
            set_size(fd, found.size, sync=sync)
        finally:
            os.close(journal)
    unlink_journal(name, url)


def _from(journal: int, position: int, at: int, size: int) -> Bytes:
    return read_exact(journal, position + at, size)


def apply(fd: int, start: int, count: int, read: Callable[[int, int], Bytes]) -> None:
    """Write one extent of a commit to the file; `read(at, size)` returns its bytes."""
    for at in range(0, count, BLOCK):
        files.write_at(fd, read(at, min(BLOCK, count - at)).data, start + at)


def set_size(fd: int, size: int, *, sync: bool) -> None:
    """End the application of a commit: set the length of the file, and wait for the storage."""
    if os.fstat(fd).st_size != size:
        files.truncate(fd, size)
    if sync:
        files.fsync(fd)


def probes_of(fd: int, extents: Iterable[tuple[int, int]], read: Callable[[int, int], Bytes]) -> Iterator[Probe]:
    """Yield samples of the bytes that a commit changes, before and after it.

    Args:
        fd: the file.
        extents: start and stop.
        read: returns the bytes after the commit.
    """
    every = list(extents)
    for start, stop in every[:: max(1, -(-len(every) // MOST_PROBES))]:
        size = min(stop - start, PROBE)
        yield Probe(start, read_exact(fd, start, size), read(start, size))


def _belongs(found: Found, fd: int) -> bool:
    """Check whether the commit is for this file: each sampled byte is as before the commit or as after it.

    A file with another inode may be a copy, or one that replaced the original: it must have bytes of the commit.
    """
    info = os.fstat(fd)
    begun = found.file == (info.st_dev, info.st_ino)
    for start, before, after in found.probes:
        try:
            now = read_exact(fd, start, len(before))
        except EOFError:
            return False
        if not ((now == before) | (now == after)).all():
            return False
        begun = begun or bool((now != before).any())
    return begun and bool(found.probes)


def _probes(table: Bytes) -> list[Probe]:
    found, at = [], 0
    while at + _PROBE.size <= len(table):
        start, size = _PROBE.unpack(table[at : at + _PROBE.size].tobytes())
        at += _PROBE.size
        found.append(Probe(start, table[at : at + size], table[at + size : at + 2 * size]))
        at += 2 * size
    return found


def _parse(fd: int, size: int) -> Found:
    found = Found()
    at = len(_MAGIC)
    if size < at or read_exact(fd, 0, at).tobytes() != _MAGIC:
        return found
    while at + _RECORD.size <= size:
        kind, crc, start, count = _RECORD.unpack(read_exact(fd, at, _RECORD.size).tobytes())
        body = at + _RECORD.size
        if count > size - body or _crc(fd, kind, start, body, count) != crc:
            break  # the writer ended here
        at = body + count
        if kind == _DATA:
            found.extents.append((start, body, count))
        elif kind == _MARK and count <= _MOST_MARK:
            text = read_exact(fd, body, count).tobytes()
            try:
                found.marked |= set(msgspec.json.decode(text, type=list[tuple[str, ...]]))
            except (msgspec.DecodeError, UnicodeDecodeError):
                break
        elif kind == _DROP:
            found.extents.clear()
        elif kind == _DONE and _FILE.size <= count <= _FILE.size + MOST_PROBES * (_PROBE.size + 2 * PROBE):
            table = read_exact(fd, body, count)
            found.file = _FILE.unpack(table[: _FILE.size].tobytes())
            found.probes = _probes(table[_FILE.size :])
            found.size = start
            break
        else:
            break
    return found


def _crc(fd: int, kind: bytes, start: int, body: int, count: int) -> int:
    crc = google_crc32c.value(kind + _RECORD.pack(kind, 0, start, count)[8:])
    for at in range(body, body + count, BLOCK):
        crc = google_crc32c.extend(crc, read_exact(fd, at, min(BLOCK, body + count - at)))
    return int(crc)


def read_exact(fd: int, position: int, size: int) -> Bytes:
    """Read bytes of a file; raise `EOFError` if it is shorter."""
    buffer = np.empty(size, np.uint8)
    got = 0
    while got < size:
        n = os.preadv(fd, [buffer.data[got:]], position + got)
        if not n:
            raise EOFError(f"the file ends at {position + got}")
        got += n
    return buffer
