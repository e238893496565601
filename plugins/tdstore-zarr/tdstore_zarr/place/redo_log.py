"""The redo log: changes of a published store are put beside it, named by the commit, and then moved to their places.

Zarr gives every chunk one fixed name, so a chunk written in place would belong to neither the old nor the new store. An
object of a published store is therefore put under a name of its own (`tdstore.log-<hex>/<number>`). The commit is the
root that lists these objects (`RedoLog`, in the root's attribute `tdstore_log`): from then on readers find them there.
After the commit they are moved to the names that zarr gives them, and the root is put again without the list. A crash
before the commit leaves the old store; a crash after it leaves the list, which readers follow and the next writer
carries out.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from tdstore.engine import Blob, Buffer, Engine, EngineCap, Entry
from tdstore.errors import CorruptStoreError, StoreError, StoreNotFoundError
from tdstore.index.ranges import Range
from tdstore.storekit.documents import SealedDocument, is_plain_name
from tdstore.threads import ThreadPool

PREFIX = "tdstore.log-"
LOG = "tdstore_log"
AT_ONCE = 64 << 20
"""Bytes that are in memory while objects are moved by reading and writing them."""
_LOG_KEY = re.compile(r"tdstore\.log-[0-9a-f]{16}/\d{1,9}")
E = TypeVar("E", bound=Engine)


class Put(NamedTuple):
    """The temporary place of an object until it is moved to its own."""

    key: str
    """Its name in the log."""
    size: int


class RedoLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The changes of a commit."""

    puts: list[tuple[str, str, int]] = []
    """Key of an object in the store, its key in the log, its size."""
    gone: list[str] = []
    """Keys of objects that are to be removed."""


def with_attribute(root: bytes, name: str, value: str | None) -> bytes:
    """Return the same root with one attribute replaced or removed; the rest of the root is not decoded."""
    top = msgspec.json.decode(root, type=dict[str, msgspec.Raw])
    attributes = msgspec.json.decode(top.get("attributes", msgspec.Raw(b"{}")), type=dict[str, msgspec.Raw])
    attributes.pop(name, None)
    if value is not None:
        attributes[name] = msgspec.Raw(msgspec.json.encode(value))
    top["attributes"] = msgspec.Raw(msgspec.json.encode(attributes))
    return msgspec.json.encode(top)


_LOG = SealedDocument(RedoLog, {}, what=f"the root attribute {LOG!r}", hint="restore the store from a copy")


def encode_logged(root: bytes, log: RedoLog) -> bytes:
    """Return the same root, with a log."""
    return with_attribute(root, LOG, _LOG.encode(log, (), url="the redo log").decode())


def without_log(root: bytes) -> bytes:
    """Return the same root, without a log."""
    return with_attribute(root, LOG, None)


def decode_log(text: Any, url: str) -> RedoLog:
    """Parse the attribute of a root.

    Raises:
        CorruptStoreError: damaged, or naming an object that no store has.
    """
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else b""
    log = _LOG.decode(raw, url=url)
    keys = [key for key, _, _ in log.puts]
    sound = all(_is_object(key) for key in (*keys, *log.gone)) and len(set(keys)) == len(keys)
    if not sound or not all(_LOG_KEY.fullmatch(at) and 0 <= size < 2**62 for _, at, size in log.puts):
        raise CorruptStoreError(f"{url}: the root attribute {LOG!r} names what is no object of a store", url=url)
    return log


def _is_object(key: str) -> bool:
    parts = key.split("/")
    return len(parts) > 1 and not parts[0].startswith(PREFIX) and all(map(is_plain_name, parts))


class LoggedEngine(Engine, Generic[E]):
    """An engine whose changes are held in a log until they are committed.

    Args:
        base: the engine below; it is closed with this one.

    Attributes:
        active: whether changes are logged. False while an unpublished store is built.
    """

    def __init__(self, base: E) -> None:
        self.base = base
        self.url = base.url
        self.active = False
        self.puts: dict[str, Put] = {}
        self.gone: set[str] = set()
        self.committed = RedoLog()
        """What the root names: it stays where it is until it is moved to its place."""
        self._held: set[str] = set()
        self._before: dict[str, tuple[Put | None, bool]] | None = None
        """Since `begin`: where each changed object was, and whether it had been removed."""
        self._folder = f"{PREFIX}{secrets.token_hex(8)}"
        self._count = 0
        self._lock = threading.Lock()

    @property
    def can(self) -> EngineCap:
        """Return the abilities of the engine below."""
        return self.base.can

    def conditional(self) -> bool:
        """Check whether the engine below has conditional puts."""
        return self.base.conditional()

    def __bool__(self) -> bool:
        return bool(self.puts or self.gone)

    # -- reading -------------------------------------------------------------------------
    def get(self, key: str, limit: int | None = None) -> Blob:
        """Read an object, as `Engine.get` does."""
        put = self._found(key)
        if put is not None:
            try:
                return self.base.get(put.key, limit)
            except StoreNotFoundError:
                pass  # it was moved to its place meanwhile
        return self.base.get(key, limit)

    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Read ranges, as `Engine.get_ranges` does."""
        if not (self.puts or self.gone):
            return self.base.get_ranges(ranges)
        moved = [self._moved(r) for r in ranges]
        try:
            return self.base.get_ranges(moved)
        except StoreNotFoundError:
            return [self._one(r, there) for r, there in zip(ranges, moved, strict=True)]

    def _moved(self, wanted: Range) -> Range:
        put = self._found(wanted.key)
        return wanted if put is None else Range(put.key, wanted.start, wanted.stop)

    def _one(self, wanted: Range, there: Range) -> Buffer:
        try:
            return self.base.get_ranges([there])[0]
        except StoreNotFoundError:
            return self.base.get_ranges([wanted])[0]

    def size(self, key: str) -> int:
        """Return the size of an object, as `Engine.size` does."""
        put = self._found(key) if self.puts or self.gone else None
        if put is not None:
            try:
                return self.base.size(put.key)
            except StoreNotFoundError:
                pass  # as in `get`
        return self.base.size(key)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List objects, as `Engine.list` does, under the names that they will have."""
        puts, gone = dict(self.puts), set(self.gone)
        for entry in self.base.list(prefix):
            if not entry.key.startswith(PREFIX) and entry.key not in puts and entry.key not in gone:
                yield entry
        for key, put in puts.items():
            if key.startswith(prefix):
                yield Entry(key, put.size, 0.0)

    def _found(self, key: str) -> Put | None:
        put = self.puts.get(key)
        if put is None and key in self.gone:
            raise StoreNotFoundError(f"{self.where(key)}: there is no such object", url=self.where(key))
        return put

    # -- changes -------------------------------------------------------------------------
    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        """Write an object, as `Engine.put` does; without conditions into the log."""
        if not self.active or if_absent or if_match is not None:
            return self.base.put(key, data, if_absent=if_absent, if_match=if_match)
        # A put that fails half-way must not damage an earlier one: each has a name of its own.
        to = self._next()
        self.base.put(to, data)
        self._note(key, Put(to, len(data)))
        return None

    def put_many(self, items: Sequence[tuple[str, Buffer]]) -> None:
        """Write objects, as `Engine.put_many` does."""
        if not self.active:
            self.base.put_many(items)
            return
        named = [(key, self._next(), data) for key, data in items]
        self.base.put_many([(to, data) for _, to, data in named])
        for key, to, data in named:
            self._note(key, Put(to, len(data)))

    def _next(self) -> str:
        with self._lock:
            self._count += 1
            return f"{self._folder}/{self._count - 1}"

    def _note(self, key: str, put: Put) -> None:
        with self._lock:
            old = self._remembered(key, self.puts.get(key))
            self.puts[key] = put
            self.gone.discard(key)
        if old is not None:
            self._replaced(old.key)

    def _remembered(self, key: str, old: Put | None) -> Put | None:
        """Record the place of an object for `end`; return the log object that is no longer needed."""
        if self._before is None:
            return old
        if key in self._before:
            return old
        self._before[key] = old, key in self.gone
        return None

    def _replaced(self, key: str) -> None:
        """Release an object of the log, unless a savepoint or the root names it."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, as `Engine.delete` does."""
        if not self.active:
            self.base.delete(keys)
            return
        for key in keys:
            with self._lock:
                old = self._remembered(key, self.puts.get(key))
                self.puts.pop(key, None)
                self.gone.add(key)
            if old is not None:
                self._replaced(old.key)

    def move(self, moves: Mapping[str, str]) -> None:
        """Rename objects, all at once: names may be exchanged."""
        sizes = {old: self._size_of_copy(old) for old in moves if old not in self.puts}
        copied = self._copied(list(sizes))
        with self._lock:
            used = [self.puts.pop(old) if old in self.puts else Put(copied[old], sizes[old]) for old in moves]
            self.gone.update(moves)
            for new, put in zip(moves.values(), used, strict=True):
                self.puts[new] = put
                self.gone.discard(new)

    def _size_of_copy(self, key: str) -> int:
        self._found(key)
        return self.base.size(key)

    def _copied(self, keys: Sequence[str]) -> dict[str, str]:
        """Copy objects of the store to new names in the log."""
        names = {key: self._next() for key in keys}
        self._copy(list(names.items()))
        return names

    def _copy(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Copy objects of the engine below. The default reads and writes them."""
        for lot in self._lots(pairs):
            with ThreadPool(16, "tdstore-zarr") as pool:
                found = list(pool.map(lambda pair: self.base.get(pair[0]).data, lot))
            self.base.put_many([(new, data) for (_, new), data in zip(lot, found, strict=True)])

    def _lots(self, pairs: Sequence[tuple[str, str]]) -> Iterator[Sequence[tuple[str, str]]]:
        sizes = {put.key: put.size for put in self.puts.values()}
        lot: list[tuple[str, str]] = []
        total = 0
        for old, new in pairs:
            size = sizes[old] if old in sizes else self.base.size(old)
            if lot and total + size > AT_ONCE:
                yield lot
                lot, total = [], 0
            lot.append((old, new))
            total += size
        if lot:
            yield lot

    # -- the way back ---------------------------------------------------------------------
    def begin(self) -> None:
        """Begin to record changes until `end`. Changes that are not logged cannot be undone."""
        self._before = {} if self.active else None

    @property
    def revocable(self) -> bool:
        """Check whether `end` can undo the changes since `begin`."""
        return self._before is not None

    def end(self, *, keep: bool) -> None:
        """Keep the puts and deletions since `begin`, or undo them."""
        before, self._before = self._before or {}, None
        with self._lock:
            if keep:
                useless = [old for old, _ in before.values()]
            else:
                useless = [self.puts.pop(key, None) for key in before]
                self.puts.update((key, old) for key, (old, _) in before.items() if old is not None)
                self.gone.difference_update(before)
                self.gone.update(key for key, (_, gone) in before.items() if gone)
        with contextlib.suppress(StoreError):  # the next commit removes the remains
            for put in useless:
                if put is not None:
                    self._replaced(put.key)

    def hold(self, keys: Iterable[str]) -> dict[str, Put]:
        """Return the places of these objects in the log, which retains them from now on."""
        found = {key: self.puts[key] for key in keys if key in self.puts}
        self._held.update(put.key for put in found.values())
        return found

    def restore(self, puts: Mapping[str, Put], gone: Iterable[str]) -> None:
        """Return to the last commit, with these changes applied."""
        with self._lock:
            self.puts = {key: Put(at, size) for key, at, size in self.committed.puts}
            self.gone = set(self.committed.gone)
            self.puts.update(puts)
            self.gone -= puts.keys()
            for key in gone:
                self.puts.pop(key, None)
                self.gone.add(key)
            self._held.clear()
            self._held.update(put.key for put in self.puts.values())

    # -- commit ----------------------------------------------------------------------------
    def record(self) -> RedoLog | None:
        """Return the log to commit; None if it is empty."""
        if not self:
            return None
        return RedoLog([(key, *put) for key, put in sorted(self.puts.items())], sorted(self.gone))

    def follow(self, log: RedoLog | None) -> None:
        """Adopt the log of a root that was read or put."""
        self.committed = log or RedoLog()
        if log or self.puts or self.gone or self._held:
            self.restore({}, ())

    def apply(self) -> None:
        """Move committed objects to their places. A further call after a failure or a crash moves the rest."""
        self._remove(sorted(self.gone))  # first: in a folder, `a/c/0` may have been a folder
        self._place([(put.key, key) for key, put in self.puts.items()])

    def _remove(self, keys: Sequence[str]) -> None:
        self.base.delete(keys)

    def _place(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Move objects of the log to their places. (Those of an object store stay in the log until `clean`.)"""
        self._copy(pairs)

    def applied(self) -> None:
        """Record that the root no longer names a log."""
        self.follow(None)

    def clean(self) -> None:
        """Remove unused log objects, of this writer and of writers that ended. Only after a commit of this one."""
        named = {put.key for put in self.puts.values()} | {at for _, at, _ in self.committed.puts}
        if EngineCap.LIST in self.base.can:
            found = [entry.key for entry in self.base.list(PREFIX)]
        else:
            found = [f"{self._folder}/{number}" for number in range(self._count)]
        self.base.delete([key for key in found if key not in named])
        self._held.clear()

    def abandon(self) -> None:
        """Return to the last commit, and remove uncommitted log objects.

        Raises:
            StoreError: some objects could not be removed. A further call, or the next commit, removes them.
        """
        self.restore({}, ())  # first: the storage may refuse the rest
        named = {at for _, at, _ in self.committed.puts}
        keys = [f"{self._folder}/{number}" for number in range(self._count)]
        self.base.delete([key for key in keys if key not in named])
        self._count = 0
        self._folder = f"{PREFIX}{secrets.token_hex(8)}"

    def close(self) -> None:
        """Close the engine below."""
        self.base.close()
