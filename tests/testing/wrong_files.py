"""Stores in one SQLite file: one that is right, and others that each break a promise about ends, forks or files."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import mmap
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdstore import lifetime
from tdstore.dtypes import dtype_name, from_numpy, numpy_dtype, to_numpy
from tdstore.errors import (
    CorruptStoreError,
    KeyNotFoundError,
    OptionError,
    ReadOnlyError,
    StoreClosedError,
    StoreExistsError,
    StoreIOError,
    StoreNotFoundError,
)
from tdstore.header import Header, decode_header, encode_header
from tdstore.hookspecs import Backend
from tdstore.store import Cap, Store, check_indices, check_writes
from tdstore.storekit import refusals
from tdstore.testing.samples import assign, pick
from tdstore.types import LeafSpec, Mode, Path, Read, Write, path_text
from tdstore.values import decode_value, encode_value

Leaf = tuple[LeafSpec, Tensor]


class SqliteStore(Store):
    """Leaves in memory, all of them written in one transaction at each commit."""

    caps = (
        Cap.WRITE
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.PERSISTENT
        | Cap.CONCURRENT_READ
        | Cap.DISCARD
    )
    pragmas = "PRAGMA synchronous=FULL"
    timeout = 2.0

    def __init__(self, path: str, mode: Mode) -> None:
        self.url, self.writable = path, mode != "r"
        self._new, self._closed, self._written = mode in ("w", "x"), False, False
        self._exclusive, self._pid = mode == "x", os.getpid()
        self._header, self._leaves, self._number = Header(), dict[Path, Leaf](), 0
        if not self._new:
            self._load()
        self._saved, self._kept, self._saved_header = dict(self._leaves), dict(self._leaves), self._header

    # -- the file ------------------------------------------------------------------------
    @classmethod
    def place(cls, location: str) -> str:
        """Return the path of a location, whatever folder the process goes to."""
        return os.path.realpath(location)

    def _connect(self, path: str) -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None, timeout=self.timeout)
        for pragma in self.pragmas.split(";"):
            connection.execute(pragma).fetchall()
        connection.execute("CREATE TABLE IF NOT EXISTS leaves (path TEXT PRIMARY KEY, spec TEXT, data BLOB)")
        connection.execute("CREATE TABLE IF NOT EXISTS header (text BLOB)")
        return connection

    def _load(self) -> None:
        connection = sqlite3.connect(self.url)
        try:
            self._number = _number(connection)
            (text,) = connection.execute("SELECT text FROM header").fetchone()
            rows = connection.execute("SELECT path, spec, data FROM leaves").fetchall()
            for path, facts, data in rows:
                shape, dtype, fill = json.loads(facts)
                spec = LeafSpec(shape, dtype, fill_value=decode_value(fill))
                self._leaves[tuple(json.loads(path))] = spec, tensor_of(spec, data)
            self._header = decode_header(text, url=self.url)
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise CorruptStoreError(f"{self.url} is damaged: {error}", url=self.url) from error
        finally:
            connection.close()

    def _publish(self, leaves: Mapping[Path, Leaf], header: Header) -> None:
        path = f"{self.url}.{os.getpid()}.tmp" if self._new else self.url
        if not self._new and not os.path.exists(path):
            raise refusals.replaced(self.url)  # sqlite would make an empty file
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            connection = self._connect(path)
            try:
                self._put(connection, leaves, header)
            finally:
                connection.close()
            if self._new:
                self._take(path)
        except (OSError, sqlite3.Error) as error:
            if self._new and os.path.exists(path):
                os.unlink(path)
            raise StoreIOError(f"{self.url}: saving: {error}", url=self.url) from error
        self._new = False

    def _take(self, path: str) -> None:
        """Give a new file the name of the store, and the permissions of the one that had it."""
        if not self._exclusive:
            if os.path.exists(self.url):
                shutil.copymode(self.url, path)
            return os.replace(path, self.url)
        try:
            os.link(path, self.url)
        except FileExistsError:
            raise refusals.place_exists(self.url) from None
        finally:
            os.unlink(path)

    def _put(self, connection: sqlite3.Connection, leaves: Mapping[Path, Leaf], header: Header) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._number_commit(connection)
            self._put_leaves(connection, leaves)
            self._put_header(connection, header)
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    def _number_commit(self, connection: sqlite3.Connection) -> None:
        if not self._new and _number(connection) != self._number:
            raise refusals.overtaken(self.url)
        self._number = secrets.randbits(31)
        connection.execute(f"PRAGMA user_version = {self._number}")

    def _put_leaves(self, connection: sqlite3.Connection, leaves: Mapping[Path, Leaf]) -> None:
        connection.execute("DELETE FROM leaves")
        for path, (spec, value) in leaves.items():
            facts = json.dumps([spec.shape, dtype_name(spec.dtype), encode_value(spec.fill_value)])
            unwritten = value.numel() > 1 and not any(value.stride())
            data = None if unwritten else np.ascontiguousarray(to_numpy(value)).tobytes()
            row = json.dumps(path), facts, data
            connection.execute("INSERT INTO leaves VALUES (?, ?, ?)", row)

    def _put_header(self, connection: sqlite3.Connection, header: Header) -> None:
        connection.execute("DELETE FROM header")
        connection.execute("INSERT INTO header VALUES (?)", (encode_header(header),))

    # -- the protocol --------------------------------------------------------------------
    def _check(self, *, writing: bool = False) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.url} was closed", url=self.url)
        if writing and not self.writable:
            raise ReadOnlyError(f"{self.url} was opened for reading", url=self.url)

    def _leaf(self, path: Path) -> Leaf:
        self._check()
        if path not in self._leaves:
            raise KeyNotFoundError(f"no leaf {path_text(path)} in {self.url}")
        return self._leaves[path]

    def paths(self) -> Iterator[Path]:
        self._check()
        return iter(list(self._leaves))

    def specs(self, paths: Sequence[Path]) -> list[LeafSpec]:
        return [self._leaf(path)[0] for path in paths]

    def load_header(self) -> Header:
        self._check()
        return self._header

    def save_header(self, header: Header) -> None:
        self._check(writing=True)
        self._publish(self._leaves, header)
        self._header = self._saved_header = header
        self._saved, self._kept, self._written = dict(self._leaves), dict(self._leaves), False

    def create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        self._check(writing=True)
        for option in (name for spec in leaves.values() for name in spec.options):
            raise OptionError(f"{self.url} has no leaf option {option!r}", url=self.url)
        for path, spec in leaves.items():
            self._leaves[path] = spec, torch.full((), spec.fill_value, dtype=spec.dtype).expand(spec.shape)

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        leaves = [self._leaf(r.path) for r in reads]
        check_indices((r.index, spec.shape) for r, (spec, _) in zip(reads, leaves, strict=True))
        values = [pick(value, r.index) for r, (_, value) in zip(reads, leaves, strict=True)]
        return [v if r.out is None else r.out.copy_(v) for r, v in zip(reads, values, strict=True)]

    def write(self, writes: Sequence[Write]) -> None:
        self._check(writing=True)
        check_writes((w, self._leaf(w.path)[0].shape, self._leaf(w.path)[0].dtype) for w in writes)
        for w in writes:
            old = self._leaves[w.path]
            new = old[0], assign(old[1], w.index, w.value)
            if self._kept.get(w.path) is old:
                self._kept[w.path], self._written = new, True
            self._leaves[w.path] = new

    def delete(self, paths: Sequence[Path]) -> None:
        self._check(writing=True)
        for path in [path for path in paths if self._leaf(path)]:
            self._leaves.pop(path, None)

    def resize(self, lengths: Mapping[Path, int]) -> None:
        self._check(writing=True)
        old = {path: self._leaf(path) for path in lengths}
        for path, (spec, value) in old.items():
            new = spec.replace(shape=(lengths[path], *spec.shape[1:]))
            whole = torch.full(new.shape, new.fill_value, dtype=new.dtype)
            keep = min(lengths[path], spec.shape[0])
            whole[:keep] = value[:keep]
            self._leaves[path] = new, whole

    def discard(self) -> None:
        self._check(writing=True)
        self._leaves, self._kept, self._written = dict(self._saved), dict(self._saved), False
        self._header = self._saved_header

    def generation(self) -> object:
        self._check()
        if not os.path.exists(self.url):
            return None
        connection = sqlite3.connect(self.url)
        try:
            return _number(connection)
        finally:
            connection.close()

    def close(self) -> None:
        try:
            if self._written and not self._closed and self._pid == os.getpid():
                self._publish(self._kept, self._header)
        finally:
            self._closed = True


def tensor_of(spec: LeafSpec, data: bytes | None) -> Tensor:
    """Return the value of a leaf; without data it was never written."""
    if data is None:
        return torch.full((), spec.fill_value, dtype=spec.dtype).expand(spec.shape)
    return from_numpy(np.frombuffer(bytearray(data), numpy_dtype(spec.dtype)).reshape(spec.shape), spec.dtype)


def _number(connection: sqlite3.Connection) -> int:
    number: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return number


def opening(cls: type[SqliteStore], location: str, mode: Mode) -> SqliteStore:
    """What every opener here does."""
    path = cls.place(location)
    if mode == "a":
        mode = "r+" if os.path.exists(path) else "x"
    if mode in ("r", "r+") and not os.path.isfile(path):
        raise StoreNotFoundError(f"there is no file {location}", url=path)
    if mode == "x" and os.path.exists(path):
        raise StoreExistsError(f"{location} exists", url=path)
    return cls(path, mode)


# -- one promise broken, each -----------------------------------------------------------------
class TwoCommits(SqliteStore):
    """The leaves in one transaction, the header in the next."""

    def _put(self, connection, leaves, header):
        super()._put(connection, leaves, self._header)
        super()._put(connection, leaves, header)


class NoJournal(SqliteStore):
    """Pages are written over the old ones, and what they held is nowhere."""

    pragmas = "PRAGMA synchronous=FULL; PRAGMA journal_mode=OFF"


class NoSync(SqliteStore):
    """Nothing waits for the disk."""

    pragmas = "PRAGMA synchronous=OFF"


class LostUnclosed(SqliteStore):
    """Takes itself off the list of stores that are closed at the end."""

    def write(self, writes):
        super().write(writes)
        lifetime.unregister(self)


class CommitsInFork(SqliteStore):
    """Closes itself at the end of any process, of a forked child too."""

    def __init__(self, path, mode):
        super().__init__(path, mode)
        atexit.register(self._end)

    def _end(self):
        self._pid = os.getpid()
        self.close()


class ClosesInFork(SqliteStore):
    """Commits when it is closed, in a forked child too."""

    def close(self):
        self._pid = os.getpid()
        super().close()


class InheritedConnection(SqliteStore):
    """Has a transaction open from a write to the commit, which a forked child takes back when it frees its copy."""

    _pending: sqlite3.Connection | None = None

    def write(self, writes):
        super().write(writes)
        if not self._new and self._pending is None and sum(w.value.nbytes for w in writes) > 1 << 20:
            self._pending = sqlite3.connect(self.url, isolation_level=None)
            self._pending.execute("BEGIN IMMEDIATE")
            self._pending.execute("CREATE TABLE pending (data BLOB)")
            self._pending.execute("INSERT INTO pending VALUES (zeroblob(8000000))")

    def close(self):
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.execute("DROP TABLE pending")
            pending.execute("COMMIT")
            pending.close()
        super().close()


class SharedPosition(SqliteStore):
    """Reads through one open file, whose position a forked child moves too."""

    def read(self, reads):
        if not hasattr(self, "_file"):
            self._file = open(__file__, "rb", buffering=0)
            self._size = os.path.getsize(__file__)
        self._file.seek(0)
        done = 0
        while part := self._file.read(1 << 10):
            done += len(part)
            time.sleep(0)
        values = super().read(reads)
        return [value + (done != self._size) for value in values]


class WaitingDel(SqliteStore):
    """Its finalizer waits for a thread that never comes."""

    def __init__(self, path, mode):
        super().__init__(path, mode)
        self._waits = mode == "r+"  # not in the process of the tests, which makes it with "w"

    def __del__(self):
        if getattr(self, "_waits", False):
            threading.Event().wait()


class CommitsStructure(SqliteStore):
    """`close` commits all that was changed."""

    def close(self):
        if not self._closed and self.writable and self._saved_header:
            self._publish(self._leaves, self._header)
        super().close()


class BlindDiscard(SqliteStore):
    """`discard` forgets what is new, and keeps what was overwritten."""

    def discard(self):
        self._check(writing=True)
        self._leaves = {path: leaf for path, leaf in self._leaves.items() if path in self._saved}


class ReadOnlyMemory(SqliteStore):
    """Gives tensors over bytes, which must not be written."""

    def read(self, reads):
        values = super().read([Read(r.path, r.index) for r in reads])
        frozen = [torch.from_numpy(np.frombuffer(to_numpy(v).tobytes() or b"\0", numpy_dtype(v.dtype))) for v in values]
        shaped = [
            f.view(v.dtype)[: v.numel()].reshape(v.shape) if v.dtype is not torch.bool else v
            for f, v in zip(frozen, values)
        ]
        return [v if r.out is None else r.out.copy_(v) for r, v in zip(reads, shaped, strict=True)]


class ReadOnlyMap(SqliteStore):
    """Gives tensors over a map that is read-only; torch is not told, so it does not warn."""

    def read(self, reads):
        values = super().read(reads)
        return [v if r.out is not None or v.dtype is torch.bool else self._mapped(v) for r, v in zip(reads, values)]

    def _mapped(self, value):
        size = value.numel() * value.element_size()
        if not size:
            return value
        whole = mmap.mmap(-1, size)
        whole[:] = to_numpy(value).tobytes()
        array = np.frombuffer(whole, numpy_dtype(value.dtype))
        _protect(array.ctypes.data, size)
        return torch.from_numpy(array).view(value.dtype).reshape(value.shape)


def _protect(address: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ) == 0


class AnswersGoWithIt(SqliteStore):
    """Gives tensors over memory that `close` gives back to the system."""

    def __init__(self, path, mode):
        super().__init__(path, mode)
        self._maps: list[tuple[int, int]] = []

    def read(self, reads):
        values = super().read(reads)
        return [v if r.out is not None or not v.numel() else self._mapped(v) for r, v in zip(reads, values)]

    def _mapped(self, value):
        _die_quietly()
        array = np.ascontiguousarray(to_numpy(value))
        address = _libc().mmap(None, array.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, PRIVATE, -1, 0)
        self._maps.append((address, array.nbytes))
        memory = (ctypes.c_char * array.nbytes).from_address(address)
        memory[:] = array.tobytes()
        return from_numpy(np.frombuffer(memory, array.dtype).reshape(array.shape), value.dtype)

    def close(self):
        for address, size in self._maps:
            _libc().munmap(address, size)
        self._maps.clear()
        super().close()


class MapsWithoutLooking(SqliteStore):
    """Maps a file beside the database as long as it was written, and looks at its end."""

    def _put_header(self, connection, header):
        super()._put_header(connection, header)
        with open(f"{self.url}.map", "wb") as file:
            file.write(bytes(MAPPED))

    def _load(self):
        super()._load()
        _die_quietly()
        fd = os.open(f"{self.url}.map", os.O_RDONLY)
        address = _libc().mmap(None, MAPPED, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        os.close(fd)
        end = (ctypes.c_char * MAPPED).from_address(address)[MAPPED - 1]
        _libc().munmap(address, MAPPED)
        if end != b"\0":
            raise CorruptStoreError(f"{self.url} is damaged", url=self.url)


MAPPED = 1 << 16
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def _die_quietly() -> None:
    """Let a forked child be ended by a signal without a traceback, which nobody wants to see."""
    if os.getpid() != _OWN:
        faulthandler.disable()


_OWN = os.getpid()


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class MergesCases(SqliteStore):
    """Stores keys of the same letters, in upper case or in lower case, at one place."""

    def _put_leaves(self, connection, leaves):
        places = {tuple(map(str.lower, path)): path for path in leaves}
        super()._put_leaves(connection, {path: leaves[path] for path in places.values()})


class NoHeaderYet(SqliteStore):
    """Has no header before one was saved."""

    def load_header(self):
        return super().load_header() or None


class KeepsFilesOpen(SqliteStore):
    """Never closes a file that it has read."""

    def read(self, reads):
        if os.path.exists(self.url):
            HELD.append(open(self.url, "rb"))
        return super().read(reads)


HELD: list[Any] = []


class CutRowsStay(SqliteStore):
    """Cuts rows off the catalogue, and not off the file: a leaf that grows over them again has them."""

    def resize(self, lengths):
        super().resize(lengths)
        for path in lengths:
            stored = ON_DISK.get((self.url, path))
            spec, value = self._leaves[path]
            if stored is not None and path in self._saved and len(self._saved[path][1]) < len(value):
                start, stop = len(self._saved[path][1]), min(len(stored), len(value))
                value[start:stop] = stored[start:stop]

    def _put_leaves(self, connection, leaves):
        super()._put_leaves(connection, leaves)
        for path, (_, value) in leaves.items():
            if value.ndim:
                ON_DISK[self.url, path] = max(value, ON_DISK.get((self.url, path), value), key=len)


ON_DISK: dict[tuple[str, Path], Tensor] = {}


class ReadsWrittenWhole(SqliteStore):
    """Copies a leaf for each read of some of its rows, if it was ever written."""

    def read(self, reads):
        whole = [self._leaf(r.path)[1] for r in reads]
        copies = [value.clone() if any(value.stride()) else value for value in whole]
        return super().read(reads) if len(copies) == len(whole) else []


class ReplacesForeign(SqliteStore):
    """Says that it looks at its target, and does not."""


class DeclaredCaps(SqliteStore):
    """Its declaration promises what it cannot do."""


WRONG: tuple[type[SqliteStore], ...] = (
    LostUnclosed, CommitsInFork, ClosesInFork, InheritedConnection, SharedPosition, WaitingDel, CommitsStructure,
    BlindDiscard, ReadOnlyMemory, ReadOnlyMap, ReplacesForeign, DeclaredCaps, AnswersGoWithIt, MapsWithoutLooking,
    MergesCases, NoHeaderYet, KeepsFilesOpen, ReadsWrittenWhole, CutRowsStay,
)  # fmt: skip


def _opener(cls: type[SqliteStore]) -> Any:
    def open_it(location: str, *, mode: Mode = "r") -> SqliteStore:
        return opening(cls, location, mode)

    open_it.__qualname__ = open_it.__name__ = f"open_{cls.__name__}"
    globals()[open_it.__name__] = open_it
    return open_it


OPENERS = {cls.__name__: _opener(cls) for cls in (SqliteStore, TwoCommits, NoJournal, NoSync, *WRONG)}
BACKENDS = {
    name: Backend(
        name=name.lower(),
        opener=f"{__name__}:open_{name}",
        summary="one SQLite file",
        suffixes=(f".{name.lower()}",),
        caps=SqliteStore.caps ^ (Cap.VIEW | Cap.RESIZE) if name == "DeclaredCaps" else SqliteStore.caps,
        checks_target=name == "ReplacesForeign",
    )
    for name in OPENERS
}
