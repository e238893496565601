"""Stores in one SQLite file that are each wrong about modes, commits, locks and rivals."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from typing import Any

from tdstore.errors import StoreBusyError
from tdstore.types import Mode
from tests.testing.wrong_files import SqliteStore, opening


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


def opening_wrongly(cls: type[SqliteStore], location: str, mode: Mode) -> SqliteStore:
    """What the openers of `XOverwrites`, `RPlusCreates` and `WIsA` do."""
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
    ForgetsRows, IgnoresWrites, XOverwrites, RPlusCreates, WIsA, BareErrors, BareBusy, WaitsForEver, ReaderLocks,
    ReadsByName, CreateCommits, SameTemporary, ClosureOpener, TimeOfFile, OwnCounter, NewEachTime,
)  # fmt: skip
OPENERS = {cls.__name__: _opener(cls) for cls in (*MODES, WriteCommits, CopiesToPublish)}
