"""Store objects of zarr-python as locations: the path of one, or an engine over it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, ZipStore

from tdstore.engine import Blob, Buffer, Engine, EngineCap, Entry
from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    OptionError,
    ReadOnlyError,
    StoreIOError,
    StoreNotFoundError,
    TDStoreError,
)
from tdstore.index.ranges import Range
from tdstore.types import Mode

T = TypeVar("T")


def place_of(store: object, mode: Mode) -> tuple[str | Engine, Mode]:
    """Return the location of a store object, and the mode: its path if it has one, otherwise an engine.

    Raises:
        OptionError: it is not a store of zarr.
        ReadOnlyError: it is read-only, and `mode` is not "r".
    """
    if not isinstance(store, Store):
        raise OptionError(
            f"the 'zarr' backend opens a path, a URL or a store of zarr, not a {type(store).__name__}",
            hint="a group of zarr is opened by PersistentTensorDict(group=...)",
        )
    if store.read_only and mode != "r":
        raise ReadOnlyError(
            f"{store} was made for reading only, and mode {mode!r} writes",
            url=str(store),
            hint="pass a store that can be written, or its path",
        )
    if isinstance(store, LocalStore):
        return str(store.root), mode
    if isinstance(store, ZipStore):
        exclusive = mode == "w" and store.__getstate__().get("_zmode") == "x"
        return str(store.path), "x" if exclusive else mode
    return StoreEngine(store), mode


def open_zip(store: object, *, replaced: bool) -> None:
    """Open a `ZipStore` with an existing file, as zarr does at first use: an unopened one cannot be closed.

    One with mode "w" would empty the file when zarr opens it next, and one that is open still has the file that a save
    `replaced`. It continues as one with mode "a" on the current file, by the methods that unpickle it.
    """
    if isinstance(store, ZipStore) and (replaced or not store.__getstate__()["_is_open"]):
        fresh = store if store.read_only else ZipStore(store.path, mode="a", compression=store.compression)
        store.__setstate__(fresh.__getstate__())


def hint_of(store: object) -> str | None:
    """Return the hint for an unreadable file of a store object: its `ZipStore` may have it open for writing."""
    if isinstance(store, ZipStore) and not store.read_only:
        return "close the ZipStore first: its file is complete when it is closed"
    return None


class StoreEngine(Engine):
    """Engine over the objects of a zarr store that is not a local path.

    `MemoryStore` honours the conditions of `put`: its methods never yield to another coroutine of the loop.
    Others may not, so writing to them needs `single_writer=True`.

    Args:
        store: the store; it belongs to the caller, and is not closed.
    """

    def __init__(self, store: Store) -> None:
        self.url = str(store)
        self._store = store

    @property
    def can(self) -> EngineCap:
        """Return the abilities that the store declares."""
        store, found = self._store, EngineCap.NONE
        if store.supports_listing:
            found |= EngineCap.LIST
        if store.supports_writes and store.supports_deletes and not store.read_only:
            found |= EngineCap.WRITE
            if isinstance(store, MemoryStore):
                found |= EngineCap.CONDITIONAL
        return found

    def _run(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        try:
            return sync(coroutine)  # on the event loop of zarr, to which stores of other libraries are bound
        except (TDStoreError, MemoryError):
            raise
        except Exception as error:  # each library behind a store has its own
            raise StoreIOError(f"{what} {self.url} failed: {type(error).__name__}: {error}", url=self.url) from error

    # Coroutines return None for what is missing, and raise nothing that is expected: zarr's `sync` makes a cycle of
    # an exception and the frames that it went through, which would keep the caller's containers alive.
    async def _bytes(self, key: str, wanted: ByteRequest | None = None) -> bytes | None:
        found = await self._store.get(key, default_buffer_prototype(), wanted)
        return None if found is None else found.to_bytes()

    def _missing(self, key: str) -> StoreNotFoundError:
        return StoreNotFoundError(f"{self.where(key)}: there is no such object", url=self.where(key))

    def get(self, key: str, limit: int | None = None) -> Blob:
        """Read an object, as `Engine.get` does; the tag is a digest of the bytes."""
        data = self._run(self._bytes(key), "reading")
        if data is None:
            raise self._missing(key)
        if limit is not None and len(data) > limit:
            raise CorruptStoreError(f"{self.where(key)} has {len(data)} bytes, more than {limit}", url=self.where(key))
        return Blob(data, self._tag(data))

    def _tag(self, data: bytes) -> str | None:
        return _digest(data)

    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Read ranges, as `Engine.get_ranges` does."""
        found: list[Buffer] = []
        for data, (key, start, stop) in zip(self._run(self._gather(ranges), "reading"), ranges, strict=True):
            if data is None:
                raise self._missing(key)
            if stop is not None and len(data) != stop - start:
                raise CorruptStoreError(f"{self.where(key)} ends before byte {stop}", url=self.where(key))
            found.append(data)
        return found

    async def _gather(self, ranges: Sequence[Range]) -> Sequence[bytes | None]:
        return await asyncio.gather(*[self._bytes(r.key, _request(r)) for r in ranges])

    def size(self, key: str) -> int:
        """Return the size of an object, as `Engine.size` does."""
        size = self._run(self._size(key), "asking")
        if size is None:
            raise self._missing(key)
        return size

    async def _size(self, key: str) -> int | None:
        try:
            return await self._store.getsize(key)
        except FileNotFoundError:
            return None

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        """Write an object, as `Engine.put` does."""
        if (if_absent or if_match is not None) and EngineCap.CONDITIONAL not in self.can:
            raise self.unsupported(EngineCap.CONDITIONAL)
        if EngineCap.WRITE not in self.can:
            raise self.unsupported(EngineCap.WRITE)
        tag = self._run(self._put(key, bytes(data), if_absent, if_match), "writing")
        if tag is None:
            raise ConflictError(f"{self.where(key)} was changed by another writer", url=self.where(key))
        return tag

    async def _put(self, key: str, data: bytes, if_absent: bool, if_match: str | None) -> str | None:
        if if_absent or if_match is not None:
            there = await self._bytes(key)
            if there is not None if if_absent else there is None or _digest(there) != if_match:
                return None
        await self._store.set(key, default_buffer_prototype().buffer.from_bytes(data))
        return _digest(data)

    def put_many(self, items: Sequence[tuple[str, Buffer]]) -> None:
        """Write objects, as `Engine.put_many` does."""
        if EngineCap.WRITE not in self.can:
            raise self.unsupported(EngineCap.WRITE)

        async def put_all() -> None:
            await asyncio.gather(*[self._put(key, bytes(data), False, None) for key, data in items])

        self._run(put_all(), "writing")

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, as `Engine.delete` does."""
        if EngineCap.WRITE not in self.can:
            raise self.unsupported(EngineCap.WRITE)

        async def delete_all() -> None:
            await asyncio.gather(*[self._store.delete(key) for key in keys])

        self._run(delete_all(), "deleting in")

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List objects, as `Engine.list` does. Stores do not record when an object was written: all count as new."""
        if EngineCap.LIST not in self.can:
            raise self.unsupported(EngineCap.LIST)
        return iter(self._run(self._list(prefix), "listing"))

    async def _list(self, prefix: str) -> Sequence[Entry]:
        folder = prefix.rpartition("/")[0]
        every = self._store.list_prefix(folder + "/") if folder else self._store.list()
        keys = [key async for key in every if key.startswith(prefix)]
        sizes = await asyncio.gather(*[self._size(key) for key in keys])
        now = time.time()
        return [Entry(key, size, now) for key, size in zip(keys, sizes, strict=True) if size is not None]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _request(wanted: Range) -> ByteRequest | None:
    if wanted.start < 0:
        return SuffixByteRequest(-wanted.start)
    if wanted.stop is None:
        return OffsetByteRequest(wanted.start) if wanted.start else None
    return RangeByteRequest(wanted.start, wanted.stop)
