"""Stores in one SQLite file that are each wrong about modes, commits, locks and rivals."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
import zlib
from contextlib import suppress
from typing import Any

from tdstore.dtypes import to_numpy
from tdstore.errors import StoreBusyError, StoreIOError
from tdstore.header import Header, decode_header, encode_header
from tdstore.testing.samples import assign
from tdstore.types import Fault, Mode
from tests.testing.wrong_files import SqliteStore, opening, tensor_of


class ForgetsRows(SqliteStore):
    """`close` commits nothing."""

    def close(self):
        self._written = False
        super().close()


class IgnoresWrites(SqliteStore):
    """In mode "r", changes the copy in memory and says nothing."""

    def _check(self, *, writing=False):
        super()._check()

    def close(self):
        self._written = self._written and self.writable
        super().close()


class XOverwrites(SqliteStore):
    """Mode "x" replaces what is there."""


class XLooksOnce(SqliteStore):
    """Mode "x" looks when it opens, and replaces what has come since."""

    def _take(self, path):
        os.replace(path, self.url)


class RPlusCreates(SqliteStore):
    """Mode "r+" makes a store where none is."""


class WIsA(SqliteStore):
    """Mode "w" opens what is there."""


class BareErrors(SqliteStore):
    """Lets errors of sqlite3 out where a file is damaged."""

    def _load(self):
        connection = sqlite3.connect(self.url)
        try:
            connection.execute("SELECT data FROM leaves").fetchall()
        finally:
            connection.close()
        super()._load()


class BareBusy(SqliteStore):
    """Takes the write lock of the file at the first change; who comes later hears "database is locked" of sqlite3."""

    lock: sqlite3.Connection | None = None

    def write(self, writes):
        if not self._new and self.lock is None:
            self.lock = sqlite3.connect(self.url, isolation_level=None, timeout=0.1, check_same_thread=False)
            self.lock.execute("BEGIN IMMEDIATE")
        super().write(writes)

    def _put(self, connection, leaves, header):
        self._unlock()
        super()._put(connection, leaves, header)

    def _unlock(self):
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    def close(self):
        self._unlock()
        super().close()


class WaitsForEver(BareBusy):
    """Asks for the lock again and again, however long another process has it."""

    def write(self, writes):
        while not self._new and self.lock is None:
            try:
                super().write(writes)
            except sqlite3.OperationalError:
                self._unlock()
                time.sleep(0.05)
        super().write(writes)


class ReaderLocks(SqliteStore):
    """A reader keeps writers out."""

    held: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, path, mode):
        super().__init__(path, mode)
        self._reader = mode == "r"
        if self._reader:
            self.held[path] = self.held.get(path, 0) + 1

    def _publish(self, leaves, header):
        if self.held.get(self.url):
            raise StoreBusyError(f"{self.url} is read by {self.held[self.url]} others", url=self.url)
        super()._publish(leaves, header)

    def close(self):
        if self._reader and not self._closed:
            self.held[self.url] -= 1
        super().close()


class ReadsByName(SqliteStore):
    """Opens the file for each read, and takes its own catalogue for that of the file."""

    def read(self, reads):
        if not self.writable and os.path.exists(self.url):
            fresh = SqliteStore(self.url, "r")
            for path, (spec, _) in self._leaves.items():
                if path in fresh._leaves:
                    value = fresh._leaves[path][1].reshape(-1)
                    self._leaves[path] = spec, value[: spec.numel].reshape(spec.shape).clone()
            fresh.close()
        return super().read(reads)


class CreateCommits(SqliteStore):
    """Each `create` and `resize` is a commit."""

    def create(self, leaves):
        super().create(leaves)
        self._commit_now()

    def resize(self, lengths):
        super().resize(lengths)
        self._commit_now()

    def _commit_now(self):
        if self.writable and not self._new:
            self._publish(self._leaves, self._header)
            self._kept = dict(self._leaves)


class WriteCommits(SqliteStore):
    """Each leaf of a `write` is a commit."""

    def write(self, writes):
        for w in writes:
            super().write([w])
            if not self._new:
                self._publish(self._kept, self._header)


class SameTemporary(SqliteStore):
    """All processes build the new file under one name."""

    def _publish(self, leaves, header):
        if not self._new:
            return super()._publish(leaves, header)
        path = f"{self.url}.tmp"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        connection = self._connect(path)
        try:
            self._put_leaves(connection, leaves)
            self._put_header(connection, header)
        finally:
            connection.close()
        time.sleep(0.05)  # the other one comes
        os.replace(path, self.url)
        self._new = False
        return None


class CopiesToPublish(SqliteStore):
    """Copies the new file over the old one, instead of renaming it."""

    def _publish(self, leaves, header):
        if not self._new:
            return super()._publish(leaves, header)
        url, self.url = self.url, f"{self.url}.new.{os.getpid()}"
        try:
            super()._publish(leaves, header)
            shutil.copyfile(self.url, url)
            os.unlink(self.url)
        finally:
            self.url = url
        return None


class IgnoresFailedSync(SqliteStore):
    """Syncs the file itself after each commit, and takes no notice when that fails."""

    pragmas = "PRAGMA synchronous=OFF"

    def _put(self, connection, leaves, header):
        super()._put(connection, leaves, header)
        (file,) = (row[2] for row in connection.execute("PRAGMA database_list"))
        with open(file, "rb+") as opened, suppress(OSError):
            os.fsync(opened.fileno())


class SyncsAgain(SqliteStore):
    """Tries again when a sync fails; the system has reported the error, and says now that all is well."""

    pragmas = IgnoresFailedSync.pragmas

    def _put(self, connection, leaves, header):
        super()._put(connection, leaves, header)
        (file,) = (row[2] for row in connection.execute("PRAGMA database_list"))
        with open(file, "rb+") as opened:
            try:
                os.fsync(opened.fileno())
            except OSError:
                os.fsync(opened.fileno())


class ClosureOpener(SqliteStore):
    """Its opener is a function inside of a function."""


class TimeOfFile(SqliteStore):
    """Tells its generation by the time of the file, in whole seconds."""

    def generation(self):
        return int(os.stat(self.url).st_mtime) // 1_000_000


class OwnCounter(SqliteStore):
    """Counts its own commits only."""

    commits = 0

    def save_header(self, header):
        super().save_header(header)
        self.commits += 1

    def generation(self):
        return self.commits


class NewEachTime(SqliteStore):
    """Gives another generation at each call."""

    def generation(self):
        return object()


class SameAfterClose(SqliteStore):
    """Numbers the commits of `save_header`, and not those of `close`."""

    def close(self):
        self._closing = True
        super().close()

    def _number_commit(self, connection):
        if not getattr(self, "_closing", False):
            super()._number_commit(connection)


class LostUpdate(SqliteStore):
    """Commits what it holds over whatever another writer committed."""

    def _number_commit(self, connection):
        connection.execute(f"PRAGMA user_version = {secrets.randbits(31)}")


class TwoCommitsInARead(SqliteStore):
    """Looks into the file for each leaf of a `read` anew."""

    def read(self, reads):
        return [value for r in reads for value in self._latest().read([r])]

    def _latest(self):
        if self.writable or not os.path.exists(self.url):
            return super()
        return SqliteStore(self.url, "r")


class LeafTransactions(SqliteStore):
    """Reads each leaf of a `read` in a transaction of its own, which takes nearly all of the time."""

    timeout = 0.0

    def read(self, reads):
        if self.writable or not os.path.exists(self.url):
            return super().read(reads)
        connection = sqlite3.connect(self.url, isolation_level=None)
        values = []
        for r in reads:
            spec = self._leaf(r.path)[0]
            connection.execute("BEGIN")
            row = connection.execute("SELECT data FROM leaves WHERE path = ?", (json.dumps(r.path),)).fetchone()
            if row is not None:
                self._leaves[r.path] = spec, tensor_of(spec, row[0])
            values += super().read([r])
            connection.execute("COMMIT")
        connection.close()
        return values


class KeepsUntilCommit(SqliteStore):
    """Reads a copy of what was written, and commits the value itself."""

    def __init__(self, path, mode):
        super().__init__(path, mode)
        self._late = []

    def write(self, writes):
        super().write(writes)
        self._late += writes

    def _publish(self, leaves, header):
        leaves = dict(leaves)
        for w in self._late:
            if w.path in leaves:
                leaves[w.path] = leaves[w.path][0], assign(leaves[w.path][1], w.index, w.value)
        self._late = []
        super()._publish(leaves, header)


class SwallowsInWrite(SqliteStore):
    """Spills large values to the disk at once, and forgets those that it refuses."""

    def write(self, writes):
        for w in writes:
            with suppress(OSError):
                if w.value.nbytes > 4 << 20:
                    with tempfile.TemporaryFile(dir=os.path.dirname(self.url)) as spilled:
                        spilled.write(to_numpy(w.value.contiguous()).tobytes())
                super().write([w])


class SwallowsInClose(SqliteStore):
    """Takes no notice of an error of the commit that `close` makes."""

    def close(self):
        with suppress(StoreIOError):
            super().close()


class StaleSpecs(SqliteStore):
    """Tells the shapes of the last commit."""

    def specs(self, paths):
        return [self._saved.get(path, self._leaf(path))[0] for path in paths]


class MainThreadOnly(SqliteStore):
    """Commits in the main thread only, and says nothing elsewhere."""

    def close(self):
        self._written = self._written and threading.current_thread() is threading.main_thread()
        super().close()


class RelativePath(SqliteStore):
    """Keeps the location as it was given."""

    @classmethod
    def place(cls, location):
        return location


class SwallowsErrors(SqliteStore):
    """Takes no notice of an error of the storage."""

    def _publish(self, leaves, header):
        with suppress(StoreIOError):
            super()._publish(leaves, header)


class HeaderInLines(SqliteStore):
    """Keeps the header in a file of lines beside the other one, and reads those that it understands."""

    def _put_header(self, connection, header):
        super()._put_header(connection, Header())
        records = [json.loads(encode_header(Header({path: group}))) for path, group in header.groups.items()]
        with open(f"{self.url}.header", "w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def _load(self):
        super()._load()
        groups = {}
        with open(f"{self.url}.header") as file, suppress(ValueError):
            for line in file:
                json.loads(line)
                groups |= decode_header(line.encode(), url=self.url).groups
        self._header = Header(groups)


class HalfWrite(SqliteStore):
    """Spills each value of a `write` to the disk in its turn, and leaves those before a refusal in the transaction."""

    def write(self, writes):
        for w in writes:
            try:
                with tempfile.TemporaryFile(dir=os.path.dirname(self.url)) as spilled:
                    spilled.write(to_numpy(w.value.contiguous()).tobytes())
            except OSError as error:
                raise StoreIOError(f"{self.url}: {error}", url=self.url, errno=error.errno) from error
            super().write([w])


class NoTransaction(SqliteStore):
    """Commits each write, and writes the old rows again to discard it."""

    def write(self, writes):
        super().write(writes)
        if not self._new:
            self._publish(self._kept, self._header)

    def discard(self):
        super().discard()
        if not self._new:
            self._publish(self._saved, self._header)


class VerifiesFirstRows(SqliteStore):
    """Compares the first nine tenths of a leaf with their checksum."""

    def _put_leaves(self, connection, leaves):
        super()._put_leaves(connection, leaves)
        connection.execute("DROP TABLE IF EXISTS sums")
        connection.execute("CREATE TABLE sums (path TEXT, crc INTEGER)")
        sums = [(json.dumps(path), self._sum(value)) for path, (_, value) in leaves.items()]
        connection.executemany("INSERT INTO sums VALUES (?, ?)", sums)

    def _sum(self, value):
        data = to_numpy(value.contiguous()).tobytes()
        return zlib.crc32(data[: len(data) * 9 // 10])

    def verify(self, paths=None):
        connection = sqlite3.connect(self.url)
        try:
            sums = {tuple(json.loads(path)): crc for path, crc in connection.execute("SELECT path, crc FROM sums")}
        finally:
            connection.close()
        wanted = self.paths() if paths is None else paths
        return [Fault(path, "its checksum is wrong") for path in wanted if sums[path] != self._sum(self._leaf(path)[1])]


def opening_wrongly(cls: type[SqliteStore], location: str, mode: Mode) -> SqliteStore:
    """What the openers of this module do."""
    path = os.path.realpath(location)
    if cls is XOverwrites and mode == "x":
        return cls(path, "w")
    if cls is RPlusCreates and mode == "r+" and not os.path.exists(path):
        return cls(path, "w")
    if cls is WIsA and mode == "w" and os.path.exists(path):
        return cls(path, "r+")
    return opening(cls, location, mode)


def _opener(cls: type[SqliteStore]) -> Any:
    def open_it(location: str, *, mode: Mode = "r") -> SqliteStore:
        return opening_wrongly(cls, location, mode)

    if cls is not ClosureOpener:
        open_it.__qualname__ = open_it.__name__ = f"open_{cls.__name__}"
        globals()[open_it.__name__] = open_it
    return open_it


MODES: tuple[type[SqliteStore], ...] = (
    ForgetsRows, IgnoresWrites, XOverwrites, XLooksOnce, RPlusCreates, WIsA, BareErrors, BareBusy, WaitsForEver,
    ReaderLocks, ReadsByName, CreateCommits, SameTemporary, ClosureOpener, TimeOfFile, OwnCounter, NewEachTime,
    SameAfterClose, LostUpdate, TwoCommitsInARead, RelativePath, SwallowsErrors, HeaderInLines, HalfWrite,
    NoTransaction, VerifiesFirstRows, LeafTransactions, KeepsUntilCommit, SwallowsInWrite, SwallowsInClose,
    StaleSpecs, MainThreadOnly,
)  # fmt: skip
OPENERS = {cls.__name__: _opener(cls) for cls in (*MODES, WriteCommits, CopiesToPublish, IgnoresFailedSync, SyncsAgain)}
