"""Connections to SQLite files, and the errors of SQLite as those of tdstore."""

from __future__ import annotations

import ctypes
import errno
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from tdstore.errors import CorruptStoreError, StoreError, StoreIOError, UnsupportedError
from tdstore.storekit import io_errors, refusals

APPLICATION_ID = 0x54447371
"""The number in the file header by which a program knows its own SQLite files."""
_LIVE: weakref.WeakSet[Database] = weakref.WeakSet()


class Database:
    """A connection of this process, which its threads use in turn."""

    def __init__(self, path: str, url: str, *, writable: bool, timeout: float) -> None:
        self.url, self.pid, self.lock = url, os.getpid(), threading.RLock()
        with sqlite_errors(url):
            # SQLite's own transactions (isolation_level=None), not those that Python begins by itself.
            self.sql = sqlite3.connect(
                f"file:{_quoted(path)}?mode={'rw' if writable else 'ro'}" if path else "",
                uri=bool(path),
                timeout=timeout,
                isolation_level=None,
                check_same_thread=False,
            )
        _LIVE.add(self)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Give the connection, with one state of the data for all that the block reads."""
        with self.lock, sqlite_errors(self.url):
            if self.sql.in_transaction:  # the reads of a writer see what it wrote
                yield self.sql
                return
            self.sql.execute("BEGIN")
            try:
                yield self.sql
            finally:
                if self.sql.in_transaction:
                    self.sql.execute("ROLLBACK")  # nothing was changed: this ends the read lock

    def close(self) -> None:
        """Take back what was not committed, and let go of the file."""
        if self.pid == os.getpid():
            with self.lock:
                self.sql.close()


def _leave_to_parent() -> None:
    # In a forked child: to close a connection of the parent would take back the parent's transaction, in the file.
    # Python does that when it frees the object, so here these live as long as the process.
    for database in _LIVE:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(database.sql))


os.register_at_fork(after_in_child=_leave_to_parent)


@contextmanager
def sqlite_errors(url: str) -> Iterator[None]:
    """Raise the errors of tdstore for those of SQLite."""
    try:
        yield
    except sqlite3.Error as error:
        raise _named(error, url) from error


def _named(error: sqlite3.Error, url: str) -> StoreError:
    # The low eight bits are the kind of the error; the others say more.
    kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return refusals.busy(url, "another process or connection")
    if "no such table: rows_" in str(error):
        return refusals.removed(url)
    if kind == sqlite3.SQLITE_TOOBIG:
        return UnsupportedError(f"{url}: {error}: a row has at most 1,000,000,000 bytes", url=url)
    if kind in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
        full = errno.ENOSPC if kind == sqlite3.SQLITE_FULL else None
        return StoreIOError(f"SQLite cannot use {url}: {error}", url=url, errno=full)
    return CorruptStoreError(f"{url} is damaged, or no database of this backend: {error}", url=url)


def recover(path: str, timeout: float) -> None:
    """Take back what a writer that died was about to commit. A connection that only reads may not do that."""
    if os.path.exists(f"{path}-journal") and os.access(path, os.W_OK):
        database = Database(path, path, writable=True, timeout=timeout)
        try:
            with database.reading() as sql:
                sql.execute("SELECT 1 FROM sqlite_master").fetchone()
        finally:
            database.close()


def claim(path: str, *, exclusive: bool) -> bool:
    """Make an empty file, and its folders, unless one is there. Return whether this call made it.

    An empty file is no dataset, so a process that dies now leaves nothing that would open.
    """
    with io_errors(path, "saving"):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            if exclusive and os.path.getsize(path):
                raise refusals.place_exists(path) from None
            return False
    return True


def copy_database(source: Database, target: Database, timeout: float) -> None:
    """Replace the contents of a database by those of another, in one transaction."""
    until = time.monotonic() + timeout

    def wait(status: int, remaining: int, total: int) -> None:
        if status not in (sqlite3.SQLITE_OK, sqlite3.SQLITE_DONE) and time.monotonic() > until:
            raise refusals.busy(target.url, "another process", timeout, why="to replace it")

    with source.lock, target.lock, sqlite_errors(target.url):
        source.sql.backup(target.sql, progress=wait, sleep=0.05)


def _quoted(path: str) -> str:
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
