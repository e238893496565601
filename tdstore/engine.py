"""Engines: access to bytes. A backend is a format; an engine transfers its bytes.

An engine is rooted at one URL; keys are relative, their parts separated by `/`. Objects are read by
ranges, many at a time, and written whole.
"""

from __future__ import annotations

import asyncio
import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Self

from tdstore.errors import CorruptStoreError, OptionError, StoreNotFoundError, UnsupportedError
from tdstore.index.ranges import Range
from tdstore.threads import ThreadPool

_LOGIN = re.compile(r"//[^/@]*@")

Buffer = bytes | bytearray | memoryview


class EngineCap(enum.Flag):
    """Abilities of an engine at its URL."""

    NONE = 0
    WRITE = enum.auto()
    """`put` and `delete`."""
    LIST = enum.auto()
    """`list`. Plain http has none."""
    CONDITIONAL = enum.auto()
    """`put` honours `if_absent` and `if_match`, atomically against every other writer."""
    ASYNC = enum.auto()
    """`aget_ranges` is native, not a thread."""


_expected: ContextVar[int] = ContextVar("tdstore_expected_ranges", default=0)


@contextmanager
def expect_ranges(count: int) -> Iterator[None]:
    """Tell the engines that are created inside that about so many ranges are read as soon as they are open.

    An engine may open connections for them while it reads its first object; it may also ignore it.

    Args:
        count: how many ranges, of one round.

    Example:
        >>> with expect_ranges(8):
        ...     expected_ranges()
        8
    """
    token = _expected.set(count)
    try:
        yield
    finally:
        _expected.reset(token)


def expected_ranges() -> int:
    """Return what `expect_ranges` says in this context; 0 outside one."""
    return _expected.get()


class Blob(NamedTuple):
    """A whole object, with the tag (ETag, generation) of the version that was read."""

    data: Buffer
    tag: str | None


class Entry(NamedTuple):
    """One object of a listing."""

    key: str
    size: int
    modified: float
    """Seconds since the epoch, by the server's clock."""


class Ends(NamedTuple):
    """The size of an object, and its first and last bytes, which may overlap."""

    size: int
    first: Buffer
    last: Buffer


class Engine(ABC):
    """Objects below one URL, as bytes.

    Every method may be called from several threads. Errors are those of `tdstore.errors`, with the
    URL of the object: `StoreNotFoundError` (no such object: never zeros), `ReadOnlyError` (not
    allowed to write), `StoreIOError`, and `TransientError` once retries and the deadline are spent.
    """

    url: str
    """The root, without credentials; for messages."""

    @property
    @abstractmethod
    def can(self) -> EngineCap:
        """Abilities of the engine. No request is made: `conditional` probes the server for conditions."""

    @property
    def lanes(self) -> int:
        """The number of objects that `put_many` sends at once; a writer splits its bytes into as many objects."""
        return 8

    def conditional(self) -> bool:
        """Return whether `put` honours its conditions here. The first call may probe it with a small object."""
        return EngineCap.CONDITIONAL in self.can

    def probed(self) -> tuple[bool, ...] | None:
        """Return what `conditional` found out about the server, for `accept_probed` in other processes.

        Returns:
            plain values, known to this kind of engine; None, as of this default, where nothing is probed.
        """
        return None

    def accept_probed(self, found: tuple[bool, ...]) -> None:
        """Accept what another process found out about the same server; then `conditional` requests nothing.

        Args:
            found: what `probed` of an engine for the same URL returned. Another kind of engine ignores it.
        """

    def sweep(self) -> None:
        """Remove the engine's own objects that killed processes left below its root. This default has none."""

    @abstractmethod
    def get(self, key: str, limit: int | None = None) -> Blob:
        """Return a whole object and its tag, in one request.

        Args:
            key: the object.
            limit: how many bytes it may have; default: any number.

        Raises:
            StoreNotFoundError: no such object. CorruptStoreError: it is larger than `limit` bytes.
        """

    @abstractmethod
    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Return the bytes of each range, in order, fetched concurrently: one round, however many there are.

        Ranges are fetched as they are requested (`tdstore.index.ranges.Batch` merges and splits them); each result is
        as long as its range; an object that ends earlier is a `CorruptStoreError`.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""

    def pin(self, keys: Sequence[str]) -> list[int]:
        """Return the sizes of objects, fetched at once; later reads of ranges return the versions present now.

        For objects that others may replace while they are read: a replacement is then a `CorruptStoreError`.
        Engines that cannot request a version return the sizes only, as this default does.
        """
        return [self.size(key) for key in keys]

    def pin_ends(self, key: str, nbytes: int) -> Ends:
        """Pin an object, as `pin` does, and return its size and its ends; by this default in two rounds.

        Args:
            key: the object.
            nbytes: the bytes of each end, fewer if the object is smaller.

        Raises:
            CorruptStoreError: the object was replaced meanwhile.
        """
        with ThreadPool(2) as pool:
            sizes = pool.submit(self.pin, [key])
            tail = pool.submit(self.get_ranges, [Range(key, -nbytes, None)])
            size, last = sizes.result()[0], tail.result()[0]
        if len(last) != min(nbytes, size):
            raise self.replaced(key)
        return Ends(size, last if size <= nbytes else self.get_ranges([Range(key, 0, nbytes)])[0], last)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        """Write a whole object, atomically; returns its new tag, where the storage has tags.

        Args:
            key: the object.
            data: its contents.
            if_absent: write only if there is no object of that name.
            if_match: write only if the object still has this tag.

        Raises:
            ConflictError: the condition does not hold; nothing was written. If an answer was lost, the object may be
                there although this is raised: read it back to find out.
            UnsupportedError: read-only, or a condition where the storage has none (CONDITIONAL).
        """
        raise self.unsupported(EngineCap.WRITE)

    def put_many(self, items: Sequence[tuple[str, Buffer]]) -> None:
        """Write several objects concurrently; if this raises, some of them may be there."""
        for key, data in items:
            self.put(key, data)

    def put_parts(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> None:
        """Write several objects, each from consecutive parts, as `put_many` does; this default joins the parts."""
        self.put_many([(key, b"".join(parts)) for key, parts in items])

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; a missing one is no error."""
        raise self.unsupported(EngineCap.WRITE)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List all objects whose keys start with `prefix`, at any depth, in any order."""
        raise self.unsupported(EngineCap.LIST)

    async def aget_ranges(self, ranges: Sequence[Range]) -> Sequence[Buffer]:
        """Fetch as `get_ranges`, without blocking the event loop."""
        return await asyncio.to_thread(self.get_ranges, ranges)

    def close(self) -> None:
        """Release connections and files. A second call does nothing."""

    def where(self, key: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.url.rstrip('/')}/{key}" if key else self.url

    def unsupported(self, cap: EngineCap) -> UnsupportedError:
        """Create the error for an ability that this engine lacks."""
        what = {
            EngineCap.WRITE: "be written to",
            EngineCap.LIST: "list what it holds",
            EngineCap.CONDITIONAL: "put an object only if nobody else has (conditional put)",
        }.get(cap, cap.name)
        return UnsupportedError(f"{self.url} cannot {what}", url=self.url)

    def replaced(self, key: str) -> CorruptStoreError:
        """Create the error for an object that was replaced while it was opened."""
        where = self.where(key)
        return CorruptStoreError(f"{where} was replaced while it was opened", url=where, hint="try again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def parent_and_name(url: str) -> tuple[str, str]:
    """Split `s3://bucket/d/x.h5` into `s3://bucket/d` and `x.h5`; in a chain, the first link that has a path.

    Raises:
        OptionError: the URL names no file.

    Example:
        >>> parent_and_name("simplecache::s3://bucket/d/x.h5")
        ('simplecache::s3://bucket/d', 'x.h5')
        >>> parent_and_name("zip://x.h5::s3://bucket/d.zip")
        ('zip://::s3://bucket/d.zip', 'x.h5')
    """
    chain = url.split("::")
    at = next((i for i, link in enumerate(chain) if link.partition("://")[2].strip("/")), None)
    head, _, name = chain[at].rstrip("/").rpartition("/") if at is not None else ("", "", "")
    if at is not None and len(chain) > at + 1 and name and head.endswith(":/"):
        head += "/"  # the root of an archive, which the next link names
    elif at is None or not name or head.endswith(":/"):
        raise OptionError(
            f"{_LOGIN.sub('//', url.partition('?')[0])} names no file", hint="a URL such as 's3://bucket/data.h5'"
        )
    return "::".join([*chain[:at], head, *chain[at + 1 :]]), name


def get_and_look(engine: Engine, key: str, limit: int, others: Sequence[str]) -> tuple[Blob | None, list[str]]:
    """Fetch an object, and find which others exist, all of them at once: one round.

    Args:
        engine: the engine.
        key: the object to fetch.
        limit: how many bytes it may have.
        others: keys of objects to look for.

    Returns:
        the object, None if there is none, and those of `others` that exist.

    Raises:
        CorruptStoreError: the object is larger than `limit` bytes. StoreError: of the engine.

    Example:
        >>> with LocalEngine(tmp_path) as engine:
        ...     _ = engine.put("zarr.json", b"{}")
        ...     get_and_look(engine, "tdstore.json", 1 << 20, ["zarr.json", ".zgroup"])
        (None, ['zarr.json'])
    """

    def get() -> Blob | None:
        try:
            return engine.get(key, limit)
        except StoreNotFoundError:
            return None

    def is_there(other: str) -> bool:
        try:
            engine.size(other)
        except StoreNotFoundError:
            return False
        return True

    with ThreadPool(len(others) + 1) as pool:
        blob = pool.submit(get)
        found = [pool.submit(is_there, other) for other in others]
        return blob.result(), [other for other, there in zip(others, found, strict=True) if there.result()]
