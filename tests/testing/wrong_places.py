"""Stores in one SQLite file that are each wrong about housekeeping, a full disk, forks, a stopped commit, or rows."""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from tdstore.dtypes import to_numpy
from tdstore.errors import CorruptStoreError, StoreBusyError, StoreIOError
from tdstore.hookspecs import Backend
from tdstore.store import Cap
from tdstore.storekit import refusals
from tdstore.types import Fault, Mode, Write
from tests.testing.wrong_files import SqliteStore, opening
from tests.testing.wrong_modes import VerifiesFirstRows


# -- housekeeping: the hooks `exists`, `remove` and `list`; what is right first ---------------
class HookedStore(SqliteStore):
    """A right store, whose backend has hooks of its own."""

    @classmethod
    def exists(cls, location: str) -> bool:
        """What the hook `exists` returns."""
        if not os.path.isfile(location):
            return False
        SqliteStore(location, "r").close()
        return True

    @classmethod
    def remove(cls, location: str) -> None:
        """What the hook `remove` does."""
        if not os.path.isfile(location):
            raise refusals.not_found(location)
        cls.check(location)
        cls.wait(location)
        os.unlink(location)

    @classmethod
    def check(cls, location: str) -> None:
        """Refuse what is no dataset."""
        try:
            SqliteStore(location, "r").close()
        except CorruptStoreError as error:
            raise refusals.damaged_place(location, str(error)) from error

    @classmethod
    def wait(cls, location: str) -> None:
        """Wait for a writer."""

    @classmethod
    def list(cls, location: str) -> list[str]:
        """What the hook `list` returns."""
        if os.path.isfile(location):
            return [location]
        if not os.path.isdir(location):
            raise refusals.not_found(location)
        names = (os.path.join(folder, name) for folder, _, names in os.walk(location) for name in names)
        return [name for name in names if cls.is_dataset(name)]

    @classmethod
    def is_dataset(cls, location: str) -> bool:
        """Whether a file is a dataset."""
        with suppress(CorruptStoreError):
            return HookedStore.exists(location)
        return False


class ListsOneFolder(HookedStore):
    """Looks into the folder, and not below it."""

    @classmethod
    def list(cls, location):
        return [
            name
            for name in super().list(location)
            if os.path.dirname(name) in ("", location, os.path.dirname(location))
        ]


class ListsNames(HookedStore):
    """Gives the names without their folder."""

    @classmethod
    def list(cls, location):
        return [os.path.basename(name) for name in super().list(location)]


class ListsDamaged(HookedStore):
    """Lists all files."""

    @classmethod
    def is_dataset(cls, location):
        return True


class ListsTwice(HookedStore):
    """Lists each place twice."""

    @classmethod
    def list(cls, location):
        return super().list(location) * 2


class ListsNothing(HookedStore):
    """Finds nothing where no folder is, and says so by an empty list."""

    @classmethod
    def list(cls, location):
        return super().list(location) if os.path.exists(location) else []


class ListsNoEmptyFolder(HookedStore):
    """Takes a folder without datasets for one that is not there."""

    @classmethod
    def list(cls, location):
        if found := super().list(location):
            return found
        raise refusals.not_found(location)


class ListsFromHere(HookedStore):
    """Gives paths from the folder of the process."""

    @classmethod
    def list(cls, location):
        return [os.path.relpath(name) for name in super().list(location)]


class ExistsChangesIt(HookedStore):
    """Notes in the file that somebody has looked."""

    @classmethod
    def exists(cls, location):
        found = super().exists(location)
        if found:
            sqlite3.connect(location).execute("CREATE TABLE IF NOT EXISTS looks (number)").connection.close()
        return found


class RemovesWhatBeginsAlike(HookedStore):
    """Removes all files whose names begin with that of the place."""

    @classmethod
    def remove(cls, location):
        super().remove(location)
        for entry in os.scandir(os.path.dirname(location)):
            if entry.path.startswith(location):
                os.unlink(entry)


class ExistsMakesIt(HookedStore):
    """Makes the file that it looks for."""

    @classmethod
    def exists(cls, location):
        if not os.path.exists(location):
            sqlite3.connect(location).execute("PRAGMA user_version = 1").connection.close()
            return False
        return super().exists(location)


class DamagedIsNothing(HookedStore):
    """Says that nothing is there where a file cannot be read."""

    @classmethod
    def exists(cls, location):
        return cls.is_dataset(location)


class RemovesFolder(HookedStore):
    """Removes all that is in the folder."""

    @classmethod
    def remove(cls, location):
        super().remove(location)
        for entry in os.scandir(os.path.dirname(location)):
            os.unlink(entry)


class RemovesForeign(HookedStore):
    """Removes whatever is there."""

    @classmethod
    def check(cls, location):
        pass


class RemoveWaits(HookedStore):
    """Waits for the writer of a place, however long that takes."""

    holds = False

    def write(self, writes: Sequence[Write]) -> None:
        if self.writable and not self._new:
            self.holds = True
            with open(f"{self.url}.held", "w"):
                super().write(writes)
        else:
            super().write(writes)

    def close(self):
        if self.holds:
            with suppress(FileNotFoundError):
                os.unlink(f"{self.url}.held")
        super().close()

    @classmethod
    def wait(cls, location):
        until = time.monotonic() + 20  # the kit is to notice it long before
        while os.path.exists(f"{location}.held") and time.monotonic() < until:
            time.sleep(0.05)
        if os.path.exists(f"{location}.held"):
            raise StoreBusyError(f"{location} is written", url=location)


# -- commits -----------------------------------------------------------------------------------
class WaitsInCommit(SqliteStore):
    """Takes its lock in the commit alone, and waits for it for an hour."""

    timeout = 3600.0


class WritesIntoTheOld(SqliteStore):
    """Commits into the file that it opened, which another one may have replaced."""

    def _load(self):
        super()._load()
        self._file = os.stat(self.url).st_ino

    def _publish(self, leaves, header):
        if self._new or os.stat(self.url).st_ino == self._file:
            super()._publish(leaves, header)


class LogFirst(SqliteStore):
    """Tells each commit to a log, which is the largest of its files; without the log there is no commit."""

    def _publish(self, leaves, header):
        if not self._tell():
            return
        super()._publish(leaves, header)

    def _tell(self):
        with open(f"{self.url}.log", "ab", buffering=0) as log:
            log.write(bytes(1 << 15 if self._new else 1 << 10))
        return True


class LogFirstBare(LogFirst):
    """Lets errors of its log out."""


class LogFirstSilent(LogFirst):
    """Takes no notice of errors of its log."""

    def _tell(self):
        with suppress(OSError):
            return super()._tell()
        return False


class HeaderTooEarly(LogFirst):
    """Takes a header before it is committed."""

    def _tell(self):
        try:
            return super()._tell()
        except OSError as error:
            raise StoreIOError(f"{self.url}: {error}", url=self.url, errno=error.errno) from error

    def save_header(self, header):
        self._header = header
        super().save_header(header)


class UndoesForwards(SqliteStore):
    """Takes back a refused `write` from its beginning: of a leaf that it wrote twice, the first value stays."""

    def write(self, writes):
        before = list[tuple[Any, Any]]()
        try:
            for w in writes:
                before.append((w.path, self._leaves[w.path]))
                super().write([w])
                with tempfile.TemporaryFile(dir=os.path.dirname(self.url)) as spilled:
                    spilled.write(to_numpy(w.value.contiguous()).tobytes())
        except OSError as error:
            self._leaves.update(before)
            raise StoreIOError(f"{self.url}: {error}", url=self.url, errno=error.errno) from error


class ChildCleansUp(SqliteStore):
    """Has a temporary file up to its first commit, and removes it when it is closed, in any process."""

    def create(self, leaves):
        super().create(leaves)
        if self._new:
            os.makedirs(os.path.dirname(self.url), exist_ok=True)
            with open(f"{self.url}.part", "w"):
                pass

    def _publish(self, leaves, header):
        if self._new and not os.path.exists(f"{self.url}.part"):
            raise StoreIOError(f"{self.url}.part is gone", url=self.url)
        new, _ = self._new, super()._publish(leaves, header)
        if new:
            os.unlink(f"{self.url}.part")

    def close(self):
        if self._new:
            with suppress(FileNotFoundError):
                os.unlink(f"{self.url}.part")
        super().close()


class TokenWipes(SqliteStore):
    """Tells others to open it as it was opened."""

    def reopen_token(self):
        return self.url, "w" if self.writable else "r", {}


class Talks(SqliteStore):
    """Says farewell when it is closed."""

    def close(self):
        if not self._closed:
            print(f"{os.path.basename(self.url)} is closed", file=sys.stderr)
        super().close()


class Verifies(VerifiesFirstRows):
    """Compares checksums, as it should."""

    def _sum(self, value):
        return zlib.crc32(to_numpy(value.contiguous()).tobytes())

    def verify(self, paths=None):
        try:
            return super().verify(paths)
        except sqlite3.Error as error:
            raise CorruptStoreError(f"{self.url} is damaged: {error}", url=self.url) from error


class VerifiesAll(Verifies):
    """Compares all leaves, whichever are asked for."""

    def verify(self, paths=None):
        return super().verify()


class VerifiesToFirst(Verifies):
    """Stops at the first damaged leaf."""

    def verify(self, paths=None):
        return super().verify(paths)[:1]


class VerifyRaises(Verifies):
    """Raises an error for a damaged leaf."""

    def verify(self, paths=None):
        for fault in super().verify(paths):
            raise CorruptStoreError(f"{fault.path} of {self.url}: {fault.reason}", url=self.url)
        return []


class BlamesAnother(Verifies):
    """Names another leaf than the one that is damaged."""

    def verify(self, paths=None):
        return [Fault(next(path for path in self.paths() if path != f.path), "") for f in super().verify(paths)]


class BareErrorsOfDamage(Verifies):
    """Compares checksums, and lets the errors of sqlite3 out."""

    def _load(self):
        connection = sqlite3.connect(self.url)
        try:
            connection.execute("SELECT data FROM leaves").fetchall()
        finally:
            connection.close()
        super()._load()


# -- rows --------------------------------------------------------------------------------------
class RowsInMemoryOrder(SqliteStore):
    """Writes the elements of rows in the order in which they lie in memory."""

    def write(self, writes):
        super().write([Write(w.path, w.index, in_memory_order(w.value)) if w.index else w for w in writes])


def in_memory_order(value: torch.Tensor) -> torch.Tensor:
    """Return the elements as they lie in memory, in the shape of the value."""
    order = sorted(range(value.ndim), key=lambda d: -value.stride(d))
    return value.permute(order).reshape(value.shape)


class FirstThousand(SqliteStore):
    """Writes the first thousand rows of an index."""

    def write(self, writes):
        super().write(
            [
                Write(w.path, (w.index[0][:1000],), w.value[:1000])
                if w.index and isinstance(w.index[0], torch.Tensor)
                else w
                for w in writes
            ]
        )


# -- facts -------------------------------------------------------------------------------------
class CountsWhenClosed(SqliteStore):
    """Tells its size after it was closed."""

    def nbytes_stored(self):
        return os.path.getsize(self.url) if os.path.exists(self.url) else 1


class TakesNoRoom(SqliteStore):
    """Says that it takes no bytes."""

    def nbytes_stored(self):
        self._check()
        return 0


class NoLayout(SqliteStore):
    """Has no layout of leaves without options."""

    def layout(self, path):
        raise KeyError(path)


class AsyncByName(SqliteStore):
    """Declares ASYNC, and has the `aread` that every store has."""

    caps = SqliteStore.caps | Cap.ASYNC


class NormalisedDouble(SqliteStore):
    """Has one zero of double precision."""

    def read(self, reads):
        return [t.add_(0) if t.dtype is torch.float64 else t for t in super().read(reads)]


def _opener(cls: type[SqliteStore]) -> Any:
    def open_it(location: str, *, mode: Mode = "r") -> SqliteStore:
        return opening(cls, location, mode)

    open_it.__qualname__ = open_it.__name__ = f"open_{cls.__name__}"
    globals()[open_it.__name__] = open_it
    return open_it


HOOKED: tuple[type[HookedStore], ...] = (
    ListsOneFolder, ListsNames, ListsDamaged, ListsTwice, ListsNothing, ExistsMakesIt, DamagedIsNothing,
    RemovesFolder, RemovesForeign, RemoveWaits, ListsNoEmptyFolder, ListsFromHere, ExistsChangesIt,
    RemovesWhatBeginsAlike,
)  # fmt: skip
PLACES: tuple[type[SqliteStore], ...] = (
    *HOOKED, WaitsInCommit, WritesIntoTheOld, LogFirstBare, LogFirstSilent, ChildCleansUp, Talks, BareErrorsOfDamage,
    VerifiesAll, VerifiesToFirst, VerifyRaises, BlamesAnother, RowsInMemoryOrder, FirstThousand, AsyncByName,
    CountsWhenClosed, TakesNoRoom, NoLayout,
    NormalisedDouble, TokenWipes, HeaderTooEarly, UndoesForwards,
)  # fmt: skip
OPENERS = {cls.__name__: _opener(cls) for cls in (HookedStore, *PLACES)}
for _cls in (HookedStore, *HOOKED):
    for _hook in ("exists", "remove", "list"):
        globals()[f"{_hook}_{_cls.__name__}"] = getattr(_cls, _hook)
BACKENDS = {
    cls.__name__: Backend(
        name=cls.__name__.lower(),
        opener=f"{__name__}:open_{cls.__name__}",
        summary="one SQLite file",
        suffixes=(f".{cls.__name__.lower()}",),
        caps=cls.caps,
        exists=f"{__name__}:exists_{cls.__name__}",
        remove=f"{__name__}:remove_{cls.__name__}",
        list=f"{__name__}:list_{cls.__name__}",
    )
    for cls in (HookedStore, *HOOKED)
}
