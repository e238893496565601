"""Stores in one SQLite file that are each wrong about locks, removed places, permissions, links or many writes."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import tempfile
from collections import Counter
from contextlib import suppress
from typing import Any

from tdstore.dtypes import to_numpy
from tdstore.errors import CorruptStoreError, StoreBusyError, StoreIOError
from tdstore.hookspecs import Backend
from tdstore.types import Mode
from tests.testing.wrong_files import SqliteStore, opening
from tests.testing.wrong_places import HookedStore


# -- many writes -----------------------------------------------------------------------------
class SixtyFourBlocks(SqliteStore):
    """Has a table of 64 blocks for a leaf, and drops what is written beyond."""

    def write(self, writes):
        self._blocks = getattr(self, "_blocks", Counter())
        for w in writes:
            self._blocks[w.path] += 1
            if self._blocks[w.path] <= 64:
                super().write([w])


class SixtyFourBlocksOfACommit(SqliteStore):
    """Reads all that was written, and commits 64 blocks of a leaf."""

    def write(self, writes):
        self._blocks, self._stored = getattr(self, "_blocks", Counter()), getattr(self, "_stored", {})
        for w in writes:
            super().write([w])
            self._blocks[w.path] += 1
            if self._blocks[w.path] <= 64:
                self._stored[w.path] = self._leaves[w.path]

    def _put_leaves(self, connection, leaves):
        super()._put_leaves(connection, {**leaves, **getattr(self, "_stored", {})})


# -- removed places --------------------------------------------------------------------------
class MakesItAnew(SqliteStore):
    """Makes a file where its file was removed."""

    def _publish(self, leaves, header):
        self._new = self._new or not os.path.exists(self.url)
        super()._publish(leaves, header)


class MakesItAnewInClose(SqliteStore):
    """Looks for its file in `save_header`, and makes it again in `close`."""

    def close(self):
        self._new = self._new or not os.path.exists(self.url)
        super().close()


# -- locks -----------------------------------------------------------------------------------
class LockingStore(SqliteStore):
    """Locks its file from the first change to the commit: what the others are wrong versions of."""

    _lock = -1

    def _check(self, *, writing=False):
        super()._check(writing=writing)
        if writing and self._lock < 0 and not self._new:
            self._lock = os.open(self.url, os.O_RDONLY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._let_go()
                raise StoreBusyError(f"{self.url} is written by another process", url=self.url) from None

    def _let_go(self):
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def save_header(self, header):
        super().save_header(header)
        self._let_go()

    def discard(self):
        super().discard()
        self._let_go()

    def close(self):
        super().close()
        self._let_go()


class LockAfterCommit(LockingStore):
    """Keeps its lock to the end."""

    save_header = SqliteStore.save_header


class LockAfterDiscard(LockingStore):
    """Keeps its lock where it has nothing to commit."""

    discard = SqliteStore.discard


class UnlocksInFork(LockingStore):
    """Releases its lock in any process that closes it."""

    def _let_go(self):
        if self._lock >= 0:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        super()._let_go()


class DiscardsNoRows(SqliteStore):
    """Forgets what was written, and commits it with the rows that `close` finds later."""

    def discard(self):
        kept = dict(self._kept)
        super().discard()
        self._kept = kept

    def write(self, writes):
        for w in writes:
            before = self._leaves.get(w.path)
            super().write([w])
            if w.path in self._saved and before is self._saved[w.path]:
                self._kept[w.path], self._written = self._leaves[w.path], True


class SweepsLiving(SqliteStore):
    """Builds its file beside the place from the beginning, and removes those that others build."""

    def create(self, leaves):
        super().create(leaves)
        if self._new and not hasattr(self, "_built"):
            os.makedirs(folder := os.path.dirname(self.url), exist_ok=True)
            for entry in os.scandir(folder):
                if entry.name.endswith(".part"):
                    os.unlink(entry)
            self._built, name = tempfile.mkstemp(".part", dir=folder)
            self._part = name

    def _publish(self, leaves, header):
        if self._new and not os.path.exists(self._part):
            raise StoreIOError(f"{self._part} is gone", url=self.url)
        super()._publish(leaves, header)

    def close(self):
        if hasattr(self, "_built"):
            os.close(self.__dict__.pop("_built"))
            with suppress(FileNotFoundError):
                os.unlink(self._part)
        super().close()


class RemovesLocked(LockingStore, HookedStore):
    """Its hook `remove` does not ask for the lock."""


# -- permissions and links -------------------------------------------------------------------
class LosesPermissions(SqliteStore):
    """Gives the new file the permissions of any new file."""

    def _take(self, path):
        os.replace(path, self.url)


class PrivateTemporary(SqliteStore):
    """Leaves the new file as private as a temporary one."""

    def _take(self, path):
        os.chmod(path, 0o600)
        os.replace(path, self.url)


class ReplacesLinks(SqliteStore):
    """Puts its file where the link was."""

    @classmethod
    def place(cls, location):
        return os.path.abspath(location)


# -- readers beside commits -------------------------------------------------------------------
class DamagedForReaders(SqliteStore):
    """Says that the file is damaged where another one has committed."""

    def read(self, reads):
        if not self.writable and os.path.exists(self.url):
            connection = sqlite3.connect(self.url)
            (number,) = connection.execute("PRAGMA user_version").fetchone()
            connection.close()
            if number != self._number:
                raise CorruptStoreError(f"{self.url}: a checksum is wrong", url=self.url)
        return super().read(reads)


# -- refused growth --------------------------------------------------------------------------
class KeepsRefusedLength(SqliteStore):
    """Grows one leaf after the other, and does not take back those before the one that was refused."""

    def resize(self, lengths):
        for path, length in lengths.items():
            try:
                with tempfile.TemporaryFile(dir=os.path.dirname(self.url)) as room:
                    os.posix_fallocate(room.fileno(), 0, max(1, length * self._leaf(path)[0].nbytes))
            except OSError as error:
                raise StoreIOError(f"{self.url}: {error}", url=self.url, errno=error.errno) from error
            super().resize({path: length})
            self._saved[path] = self._leaves[path]


class UndoesCommittedRows(SqliteStore):
    """Takes back a refused `write` of leaves that were as of the last commit, and forgets those that were not."""

    def write(self, writes):
        before = dict(self._leaves)
        for w in writes:
            try:
                with tempfile.TemporaryFile(dir=os.path.dirname(self.url)) as spilled:
                    spilled.write(to_numpy(w.value.contiguous()).tobytes())
            except OSError as error:
                self._leaves |= {path: leaf for path, leaf in before.items() if self._saved.get(path) is leaf}
                raise StoreIOError(f"{self.url}: {error}", url=self.url, errno=error.errno) from error
            super().write([w])


def _opener(cls: type[SqliteStore]) -> Any:
    def open_it(location: str, *, mode: Mode = "r") -> SqliteStore:
        return opening(cls, location, mode)

    open_it.__qualname__ = open_it.__name__ = f"open_{cls.__name__}"
    globals()[open_it.__name__] = open_it
    return open_it


LOCKS: tuple[type[SqliteStore], ...] = (
    SixtyFourBlocks, SixtyFourBlocksOfACommit, MakesItAnew, MakesItAnewInClose, LockAfterCommit, LockAfterDiscard,
    UnlocksInFork, DiscardsNoRows, SweepsLiving, RemovesLocked, LosesPermissions, PrivateTemporary,
    ReplacesLinks, KeepsRefusedLength, DamagedForReaders, UndoesCommittedRows,
)  # fmt: skip
OPENERS = {cls.__name__: _opener(cls) for cls in (LockingStore, *LOCKS)}
remove_RemovesLocked = RemovesLocked.remove  # noqa: N816 - as the hooks of wrong_places.py
BACKENDS = {
    "RemovesLocked": Backend(
        name="removeslocked",
        opener=f"{__name__}:open_RemovesLocked",
        summary="one SQLite file",
        suffixes=(".removeslocked",),
        caps=SqliteStore.caps,
        remove=f"{__name__}:remove_RemovesLocked",
    )
}
