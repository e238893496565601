"""A SQLite file as a store: rows are read and written in place, and a commit is a commit of SQLite."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tdstore.dtypes import from_numpy, to_numpy
from tdstore.errors import OptionError, StoreIOError, UnsupportedError
from tdstore.header import Header
from tdstore.store import Cap
from tdstore.storekit import CheckedStore, allocating, refusals
from tdstore.types import Fault, LeafSpec, Mode, Path, Read, Write, path_text
from torch import Tensor

from tdstore_sqlite import catalogue
from tdstore_sqlite.database import Database, claim, copy_database, recover, sqlite_errors
from tdstore_sqlite.leaf import Leaf

MAX_ROW = 1_000_000_000


class SqliteStore(CheckedStore[Leaf]):
    """The leaves of one database. Made by `open_sqlite`."""

    caps = (
        Cap.WRITE
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.PERSISTENT
        | Cap.CONCURRENT_READ
        | Cap.DISCARD
    )

    def __init__(self, path: str, mode: Mode, timeout: float) -> None:
        super().__init__(path, writable=mode != "r")
        self._timeout, self._exclusive = timeout, mode == "x"
        self._new = mode in ("w", "x")  # until the first commit, in a database that has no name
        self._saved: dict[Path, Leaf] = {}
        self._structure = ""
        self._database = Database("" if self._new else path, path, writable=self.writable, timeout=timeout)
        try:
            with self._database.reading() as sql:
                if self._new:
                    catalogue.make(sql)
                    sql.execute("COMMIT")
                else:
                    found = catalogue.load(sql, path)
                    if found is None:
                        raise refusals.not_found(path)
                    self._header, self._saved = found
                    self._structure, _ = catalogue.marks(sql)
        except BaseException:
            self._database.close()
            raise
        self._leaves = dict(self._saved)

    def _catalogue(self) -> Mapping[Path, Leaf]:
        return self._leaves

    # -- reading -----------------------------------------------------------------------------
    def _own(self) -> Database:
        """Return a connection of this process: a forked child makes one of its own, and sees the last commit."""
        if self._forked and self._database.pid != os.getpid():
            if self._new:
                raise refusals.not_saved(self.url)
            self._database = Database(self.url, self.url, writable=False, timeout=self._timeout)
        return self._database

    def _read(self, wanted: Sequence[tuple[Leaf, Read]]) -> list[Tensor]:
        values = []
        with self._own().reading() as sql:
            for leaf, r in wanted:
                with allocating(r.path, leaf.selected(r.index), leaf.spec.dtype, self.url):
                    values.append(from_numpy(leaf.read(sql, r.index, self._where(r.path)), leaf.spec.dtype))
        return values

    def _where(self, path: Path) -> str:
        return f"{path_text(path)} of {self.url}"

    def generation(self) -> object:
        """Return what differs after each commit, as `Store.generation` does."""
        self._check_open()
        if self._new:
            return None
        with self._own().reading() as sql:
            return catalogue.marks(sql)

    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        """Compare all rows with their checksums, as `Store.verify` does."""
        self._check_open()
        chosen = list(self._leaves if paths is None else paths)
        self._check_all(chosen)
        with self._own().reading() as sql:
            faults = [(path, self._leaves[path].fault(sql)) for path in chosen]
        return [Fault(path, reason) for path, reason in faults if reason]

    # -- changing: one transaction of SQLite, from the first change to the commit -------------
    @contextmanager
    def _changing(self, *, commit: bool = False) -> Iterator[sqlite3.Connection]:
        """Give the connection to one change, which is made wholly or not at all."""
        sql = self._database.sql
        with self._database.lock, sqlite_errors(self.url):
            if not sql.in_transaction:
                sql.execute("BEGIN IMMEDIATE")  # no other process can write from here to the commit
                if catalogue.marks(sql)[0] != self._structure:
                    sql.execute("ROLLBACK")
                    raise refusals.overtaken(self.url)
            sql.execute("SAVEPOINT change")
            try:
                yield sql
                if commit:
                    catalogue.mark(sql)
                sql.execute("COMMIT" if commit else "RELEASE change")
            except BaseException as error:
                if sql.in_transaction:
                    sql.execute("ROLLBACK TO change")
                    sql.execute("RELEASE change")
                    raise
                self._leaves = dict(self._saved)
                lost = f"{self.url}: {error}; SQLite took back all changes since the last commit"
                raise StoreIOError(lost, url=self.url, errno=errno.ENOSPC) from error

    def _create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        made = {path: catalogue.new_leaf(spec) for path, spec in leaves.items()}
        with self._changing() as sql:
            for path, leaf in made.items():
                if leaf.row_bytes > MAX_ROW:
                    raise UnsupportedError(f"a row of {self._where(path)} has more than {MAX_ROW} bytes", url=self.url)
                leaf.make(sql)
        self._leaves.update(made)

    def _write(self, wanted: Sequence[tuple[Leaf, Write]]) -> None:
        with self._changing() as sql:
            for leaf, w in wanted:
                leaf.write(sql, w.index, to_numpy(w.value), self._where(w.path))

    def _resize(self, lengths: Mapping[Path, int]) -> None:
        changed = dict[Path, Leaf]()
        with self._changing() as sql:
            for path, length in lengths.items():
                leaf = self._leaves[path]
                spec = leaf.spec.replace(shape=(length, *leaf.spec.shape[1:]))
                changed[path] = leaf._replace(spec=spec)
                if length < leaf.rows:  # the rows that go may be wanted again, by `close` or by a reader
                    changed[path] = catalogue.new_leaf(spec)
                    changed[path].make(sql)
                    copy = f"INSERT INTO {changed[path].table} SELECT * FROM {leaf.table} WHERE row < ?"
                    sql.execute(copy, (length,))
        self._leaves.update(changed)

    def _rename(self, moves: Mapping[Path, Path]) -> None:
        with self._changing():
            moved = {new: self._leaves[old] for old, new in moves.items()}
            self._leaves = {path: leaf for path, leaf in self._leaves.items() if path not in moves} | moved

    def _delete(self, paths: Sequence[Path]) -> None:
        with self._changing():
            for path in paths:
                del self._leaves[path]

    def _discard(self) -> None:
        with self._database.lock, sqlite_errors(self.url):
            if self._database.sql.in_transaction:
                self._database.sql.execute("ROLLBACK")
            self._leaves = dict(self._saved)

    # -- committing --------------------------------------------------------------------------
    def _save(self, header: Header) -> None:
        if not self._new and not os.path.exists(self.url):
            raise refusals.removed(self.url)
        with self._changing(commit=True) as sql:
            catalogue.save(sql, header, self._leaves)
            catalogue.drop_others(sql, self._leaves)
            structure, _ = catalogue.marks(sql)
        self._structure = structure
        if self._new:
            self._publish()
        self._header, self._saved = header, dict(self._leaves)

    def _publish(self) -> None:
        """Copy the new database over what is at the location, in one transaction there."""
        claimed = claim(self.url, exclusive=self._exclusive)
        target = Database(self.url, self.url, writable=True, timeout=self._timeout)
        try:
            copy_database(self._database, target, self._timeout)
        except BaseException:
            target.close()
            recover(self.url, self._timeout)  # a full disk: SQLite leaves the rollback to the next connection
            if claimed:
                os.unlink(self.url)
            raise
        self._database.close()
        self._database, self._new = target, False

    def _close(self) -> None:
        try:
            sql = self._database.sql
            if not self._forked and not self._new and sql.in_transaction:
                with self._changing(commit=True):  # rows of committed leaves stay; structure that is not committed goes
                    catalogue.drop_others(sql, self._saved)
                    for leaf in self._saved.values() if self._leaves != self._saved else ():
                        sql.execute(f"DELETE FROM {leaf.table} WHERE row >= ?", (leaf.rows,))
        finally:
            self._database.close()


def open_sqlite(location: str, *, mode: Mode = "r", lock_timeout: float = 5.0) -> SqliteStore:
    """Open one database.

    Args:
        location: name of the file.
        mode: "r", "r+", "w", "x" or "a".
        lock_timeout: seconds to wait for other processes.
    """
    if not location:
        raise OptionError("the sqlite backend needs a location", hint="the name of a file, 'x.sqlite'")
    path = os.path.realpath(location)
    if os.path.isfile(path):
        recover(path, lock_timeout)
    there = os.path.exists(path) and not (os.path.isfile(path) and os.path.getsize(path) == 0)
    if mode == "a":
        mode = "r+" if there else "x"
    if mode in ("r", "r+") and not there:
        raise refusals.not_found(path)
    if there and (mode == "x" or not os.path.isfile(path)):
        raise refusals.place_exists(path)
    return SqliteStore(path, mode, lock_timeout)
