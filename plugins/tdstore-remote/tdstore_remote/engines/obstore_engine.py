"""The engine for s3, gs, az and http: obstore, one request for each range, all at once."""

from __future__ import annotations

import asyncio
import builtins
import functools
import math
from collections.abc import Awaitable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from tdstore.engine import Blob, Buffer, Ends, Engine, EngineCap, Entry, expected_ranges
from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    InvalidTypeError,
    ReadOnlyError,
    StoreNotFoundError,
    TDStoreError,
    UnsupportedError,
)
from tdstore.index.ranges import Range
from tdstore_remote.engines import clients, loop
from tdstore_remote.engines import conditional_puts as conditions_of
from tdstore_remote.engines.clients import Client
from tdstore_remote.engines.gate import Gate
from tdstore_remote.engines.pins import Pins
from tdstore_remote.engines.preconnect import Preconnect
from tdstore_remote.faults import Again, BucketNotFoundError, Call, NoRangesError, TooShort, of_obstore, short
from tdstore_remote.libraries import load_obstore
from tdstore_remote.options import AZURE, HTTP, S3, Settings, Target
from tdstore_remote.retry import Patience
from tdstore_remote.urls import Place, shown

T = TypeVar("T")

GROUP = 8
"""Ranges handed to obstore in one call, which fetches up to ten at a time: a third of the CPU of one call each."""
IN_FLIGHT = 256 << 20
"""Bytes requested at a time: more would only queue for the connection, and exceed their deadlines."""
PUT_IN_FLIGHT = 128 << 20
MULTIPART = 64 << 20
"""Larger objects go up in parts of `PART`."""
PART = 16 << 20
WHOLE = 64 << 20
"""Objects of a server without ranges are fetched whole up to this size, and cached."""
BULK = 1000
"""Objects that one request removes."""
DELETED = 50
"""Objects a second that a server removes at least."""


class Version(NamedTuple):
    """Size and tag of the current bytes of an object."""

    size: int
    tag: str | None


class ObstoreEngine(Engine):
    """Engine over the objects below a URL of S3, GCS, Azure or a web server; `opening.open_engine` creates it."""

    pins = True
    """Ranges of a version, or an error: see `versions`."""

    def __init__(self, url: str, place: Place, target: Target, settings: Settings) -> None:
        self.url = shown(url).rstrip("/")
        self.settings = settings
        self._place = place
        self._patience = Patience(settings)
        self._obstore = load_obstore()
        self._target = target
        self._client = clients.reading_client(place, target, settings, self._build)
        self._reader = self._client.store
        self._whole: dict[str, bytes] = {}
        self._gates: dict[str, asyncio.Lock] = {}
        self._gate = Gate(settings.concurrency, IN_FLIGHT)
        more = expected_ranges() if settings.preconnect is None else settings.preconnect
        self._preconnect = Preconnect(self._client, min(more, settings.concurrency - 1), self._head, self._errors())
        self._pins = Pins(self._obstore, None if place.scheme in AZURE else self._build)
        self._probe_id = (place.scheme, str(target.config.get("endpoint")), place.bucket)
        self._read_only = place.scheme in HTTP

    def __repr__(self) -> str:
        return f"ObstoreEngine({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise InvalidTypeError("an engine is not pickled: open it again from its URL")

    @functools.cached_property
    def _writer(self) -> Any:
        """The client for writes; readers need none."""
        return self._build(reading=False).store

    def _build(self, headers: Mapping[str, str] | None = None, *, reading: bool = True) -> Client:
        place, target, settings = self._place, self._target, self.settings
        call = Call(self.url, "opening")
        try:
            return clients.build(self._obstore, self.url, place, target, settings, reading=reading, headers=headers)
        except self._errors() as error:
            raise _final(of_obstore(error, call), call) from error

    def _errors(self) -> tuple[type[BaseException], ...]:
        # A stream that is cut off can surface as any of the built-in ones.
        return (self._obstore.exceptions.BaseError, OSError, ValueError, TypeError, NotImplementedError, RuntimeError)

    # -- abilities ------------------------------------------------------------------
    @property
    def can(self) -> EngineCap:
        """Return its abilities; CONDITIONAL is determined by `conditional`, because it depends on the server."""
        return EngineCap.ASYNC if self._read_only else EngineCap.ASYNC | EngineCap.LIST | EngineCap.WRITE

    def conditional(self) -> bool:
        """Probe conditional puts, once for each bucket, with a small object that is removed again."""
        return not self._read_only and self._conditions().works

    def probed(self) -> tuple[bool, ...] | None:
        """Return the result of the probe, as `Engine.probed` does."""
        return None if self._read_only else tuple(self._conditions())

    def accept_probed(self, found: tuple[bool, ...]) -> None:
        """Accept the result of another process's probe, as `Engine.accept_probed` does."""
        conditions_of.accept(self._probe_id, conditions_of.Conditions(*found))

    def sweep(self) -> None:
        """Remove the objects of probes, as `Engine.sweep` does."""
        if not self._read_only:
            conditions_of.sweep(self.delete, self.list, 0.0)

    def _conditions(self) -> conditions_of.Conditions:
        return conditions_of.of(self._probe_id, self._plain_put, self.delete, self.list)

    def _check_writable(self) -> None:
        if self._read_only:
            raise ReadOnlyError(
                f"{self.url} is read only: a web server takes no writes",
                url=self.url,
                hint="write to s3://, gs://, az:// or a local path",
            )

    # -- reading -------------------------------------------------------------------------
    def get(self, key: str, limit: int | None = None) -> Blob:
        """Read an object, as `Engine.get` does."""
        return loop.run(self._get(key, limit))

    async def _get(self, key: str, limit: int | None) -> Blob:
        call = self._call(key, "reading")
        self._preconnect.beside(key)
        return await self._patience.attempt(call, lambda: self._get_once(call, key, limit))

    async def _get_once(self, call: Call, key: str, limit: int | None) -> Blob:
        async def work() -> Blob:
            found = await self._obstore.get_async(self._reader, key)
            size = int(found.meta["size"])
            if limit is not None and size > limit:
                raise CorruptStoreError(f"{call.url} has {size} bytes, more than the {limit} it may have", url=call.url)
            async with asyncio.timeout(self._patience.deadline(size)):
                data = memoryview(await found.bytes_async())
            if len(data) != size:
                raise Again(f"got {len(data)} of {size} bytes")
            return Blob(data, found.meta["e_tag"])

        return await self._mapped(call, work())

    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Read ranges, as `Engine.get_ranges` does. An object that is not found is requested again, for a second."""
        return loop.run(self._get_ranges(ranges))

    async def aget_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Read ranges as `get_ranges` does, without blocking the event loop."""
        return await asyncio.wrap_future(loop.submit(self._get_ranges(ranges)))

    async def _get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        answers: list[Buffer] = [b""] * len(ranges)
        plain: dict[str, list[int]] = {}
        suffix_reads: list[int] = []
        total = 0
        for at, (key, start, stop) in enumerate(ranges):
            if stop is None:
                suffix_reads.append(at)
            elif stop > start:
                plain.setdefault(key, []).append(at)
                total += stop - start
        under_way = min(total, IN_FLIGHT)
        # Few ranges each travel alone; many go in groups, which cost less.
        size = min(GROUP, max(1, math.ceil(len(ranges) / self.settings.concurrency), len(ranges) // 16))
        jobs: list[Coroutine[Any, Any, None]] = [self._one_end(ranges[at], at, answers) for at in suffix_reads]
        for key, places in plain.items():
            client = await self._pins.client(key, len(places)) if key in self._pins else None
            jobs += [
                self._one_group(ranges, places[i : i + size], answers, under_way, client)
                for i in range(0, len(places), size)
            ]
        await loop.gather_all(jobs)
        return answers

    async def _one_end(self, asked: Range, at: int, answers: list[Buffer]) -> None:
        key, start, _ = asked
        call = self._call(key, f"reading {f'the last {-start} bytes' if start < 0 else f'from byte {start}'}")

        async def work() -> memoryview:
            wanted = {"suffix": -start} if start < 0 else {"offset": start}
            found = await self._obstore.get_async(self._reader, key, options={"range": wanted} if start else None)
            data = memoryview(await found.bytes_async())
            first, last = found.range
            if len(data) != last - first:
                raise Again(f"got {len(data)} of {last - first} bytes")
            return data

        try:
            async with self._gate.pass_(1, max(-start, 0)):
                answers[at] = await self._patience.attempt(call, lambda: self._mapped(call, work()), patient=True)
        except NoRangesError:
            whole = await self._get_whole(key)
            answers[at] = whole[max(len(whole) + start, 0) :] if start < 0 else whole[start:]
        except UnsupportedError:  # Azure has no suffix ranges
            size = (await self._version(key, patient=True)).size
            first = max(size + start, 0) if start < 0 else start
            if first < size:
                await self._one_group([Range(key, first, size)], [0], end := [b""], 0)
                answers[at] = end[0]

    async def _one_group(
        self,
        ranges: Sequence[Range],
        places: Sequence[int],
        answers: list[Any],
        under_way: int,
        client: Client | None = None,
    ) -> None:
        """Fetch ranges of one object; short answers are requested again."""
        key = ranges[places[0]].key
        left = list(places)
        call = self._call(key, f"reading {_bytes_of(ranges, left)}")

        async def work() -> None:
            starts, ends = [ranges[at].start for at in left], [ranges[at].stop for at in left]
            if key in self._pins:
                found = await self._pinned(client, key, starts, ends)
            elif len(left) == 1:
                found = [await self._obstore.get_range_async(self._reader, key, start=starts[0], end=ends[0])]
            else:
                found = await self._obstore.get_ranges_async(self._reader, key, starts=starts, ends=ends, coalesce=0)
            short_ones = []
            for at, data in zip(left, found, strict=True):
                view = memoryview(data)
                if len(view) == (ranges[at].stop or 0) - ranges[at].start:
                    answers[at] = view
                else:
                    short_ones.append((at, len(view)))
            if short_ones:
                left[:] = [at for at, _ in short_ones]
                at, got = short_ones[0]
                raise TooShort(f"got {got} bytes of {ranges[at].start} to {ranges[at].stop}")

        async def once() -> None:
            if key in self._whole:
                raise NoRangesError(key)
            try:
                await self._mapped(call, work())
            except TooShort:
                # The answer was truncated, or the object ends there: compare its size.
                size = (await self._version_once(call, key)).size
                if ends := [at for at in left if (ranges[at].stop or 0) > size]:
                    raise _ends(call.url, size, ranges[ends[0]]) from None
                raise

        nbytes = sum((ranges[at].stop or 0) - ranges[at].start for at in places)
        try:
            async with self._gate.pass_(len(places), nbytes):
                under_way = max(under_way, self._gate.nbytes)  # reads of other threads share the wire
                await self._patience.attempt(call, once, nbytes=under_way, patient=True)
        except NoRangesError:
            whole = await self._get_whole(key)
            for at in left:
                _, start, stop = ranges[at]
                if stop is not None and stop > len(whole):
                    raise _ends(call.url, len(whole), ranges[at]) from None
                answers[at] = whole[start:stop]

    async def _pinned(
        self, client: Client | None, key: str, starts: Sequence[int], ends: Sequence[Any]
    ) -> Sequence[Buffer]:
        try:
            return await self._pins.read(self._reader, client, key, starts, ends)
        except self._obstore.exceptions.PreconditionError:
            where = self.where(key)
            raise CorruptStoreError(
                f"{where} was replaced since it was opened", url=where, hint="open it again"
            ) from None

    async def _get_whole(self, key: str) -> memoryview:
        """Fetch an object from a server that ignores ranges and sends the whole object."""
        async with self._gates.setdefault(key, asyncio.Lock()):
            return await self._fetch_whole(key)

    async def _fetch_whole(self, key: str) -> memoryview:
        if key not in self._whole:
            where = self.where(key)
            try:
                blob = await self._get(key, WHOLE)
            except CorruptStoreError:
                raise UnsupportedError(
                    f"{where}: the server cannot send parts of objects, and this one has more than {WHOLE} bytes",
                    url=where,
                    hint=f"simplecache::{where} downloads it whole first",
                ) from None
            while self._whole and sum(map(len, self._whole.values())) + len(blob.data) > WHOLE:
                self._whole.pop(next(iter(self._whole)))
            self._whole[key] = bytes(blob.data)
        return memoryview(self._whole[key])

    def size(self, key: str) -> int:
        """Return the size of an object, as `Engine.size` does."""
        return loop.run(self._version(key)).size

    def versions(self, keys: Sequence[str], *, pin: bool = False) -> builtins.list[Version]:
        """Return size and tag of each, requested at once; with `pin` later reads carry `If-Match`."""

        async def work() -> builtins.list[Version]:
            return await loop.gather_all([self._version(key, patient=True) for key in keys])

        found = loop.run(work())
        if pin:
            self._pins.pin({key: version.tag for key, version in zip(keys, found, strict=True)})
        return found

    def pin(self, keys: Sequence[str]) -> builtins.list[int]:
        """Pin objects, as `Engine.pin` does."""
        return [v.size for v in self.versions(keys, pin=True)]

    def pin_ends(self, key: str, nbytes: int) -> Ends:
        """Pin an object and read its ends, as `Engine.pin_ends` does: in one round, as answers tell size and tag."""
        try:
            return loop.run(self._pin_ends(key, nbytes))
        except (NoRangesError, TooShort, UnsupportedError):  # no ranges, no bytes, or no suffix ranges
            return super().pin_ends(key, nbytes)

    async def _pin_ends(self, key: str, nbytes: int) -> Ends:
        call = self._call(key, "reading its ends")
        self._preconnect.beside(key)

        async def one(wanted: Any) -> tuple[Version, memoryview]:
            found = await self._obstore.get_async(self._reader, key, options={"range": wanted})
            data = memoryview(await found.bytes_async())
            first, last = found.range
            if len(data) != last - first:
                raise Again(f"got {len(data)} of {last - first} bytes")
            return Version(int(found.meta["size"]), found.meta["e_tag"]), data

        async def attempt(wanted: Any) -> tuple[Version, memoryview]:
            async with self._gate.pass_(1, nbytes):
                return await self._patience.attempt(call, lambda: self._mapped(call, one(wanted)), patient=True)

        (version, first), (other, last) = await loop.gather_all([attempt((0, nbytes)), attempt({"suffix": nbytes})])
        if version != other or len(first) != min(nbytes, version.size) or len(last) != len(first):
            raise self.replaced(key)
        self._pins.pin({key: version.tag})
        return Ends(version.size, first, last)

    async def _version(self, key: str, *, patient: bool = False) -> Version:
        call = self._call(key, "asking for its size")
        self._preconnect.beside(key)
        return await self._patience.attempt(call, lambda: self._version_once(call, key), patient=patient)

    async def _head(self, key: str) -> Any:
        return await self._obstore.head_async(self._reader, key)

    async def _version_once(self, call: Call, key: str) -> Version:
        async def work() -> Version:
            meta = await self._head(key)
            return Version(int(meta["size"]), meta["e_tag"])

        return await self._mapped(call, work())

    # -- writing -------------------------------------------------------------------------
    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        """Write an object, as `Engine.put` does."""
        self._check_writable()
        self._pins.drop(key)
        if not (if_absent or if_match is not None):
            return loop.run(self._put(key, data, None))
        conditions = self._conditions()
        if not conditions.works:
            raise self.unsupported(EngineCap.CONDITIONAL)
        return self._plain_put(key, data, "create" if if_absent else conditions.match(if_match or ""))

    def _plain_put(self, key: str, data: Buffer, mode: Any) -> str | None:
        return loop.run(self._put(key, data, mode))

    async def _put(self, key: str, data: Buffer, mode: Any, *, under_way: int = 0) -> str | None:
        call = self._call(key, "writing", writing=True)
        view = memoryview(data).cast("B")
        multipart = mode is None and len(view) > MULTIPART

        async def work() -> str | None:
            try:
                done = await self._obstore.put_async(
                    self._writer, key, view, mode=mode, use_multipart=multipart, chunk_size=PART
                )
            except FileNotFoundError:
                if isinstance(mode, dict):  # there is nothing that could match
                    raise ConflictError(f"{call.url} is gone; another writer removed it", url=call.url) from None
                raise
            tag: str | None = done["e_tag"]
            return tag

        nbytes = max(under_way, len(view))
        try:
            return await self._patience.attempt(
                call, lambda: self._mapped(call, work()), nbytes=nbytes, each=self._patience.one_try(nbytes)
            )
        except BucketNotFoundError:
            raise
        except StoreNotFoundError as error:
            if isinstance(mode, dict):
                raise ConflictError(f"{call.url} is gone; another writer removed it", url=call.url) from None
            raise BucketNotFoundError(error.message, url=call.url) from error

    def put_many(self, items: Sequence[tuple[str, Buffer]]) -> None:
        """Write objects, as `Engine.put_many` does, concurrently."""
        self._check_writable()
        loop.run(self._put_many(items))

    async def _put_many(self, items: Sequence[tuple[str, Buffer]]) -> None:
        sizes = [memoryview(data).nbytes for _, data in items]
        largest = max(sizes, default=0)
        slots = max(4, min(self.settings.concurrency, PUT_IN_FLIGHT // max(1, largest)))
        gate = asyncio.Semaphore(slots)

        async def one(key: str, data: Buffer) -> None:
            async with gate:
                await self._put(key, data, None, under_way=min(sum(sizes), slots * largest))

        await loop.gather_all([one(key, data) for key, data in items])

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, as `Engine.delete` does, in bulk if the store can."""
        self._check_writable()
        if keys:
            loop.run(self._delete(list(keys)))

    async def _delete(self, keys: builtins.list[str]) -> None:
        gate = asyncio.Semaphore(64)

        async def several(some: builtins.list[str]) -> None:
            call = self._call(some[0], "removing", writing=True)

            async def work() -> None:
                await self._obstore.delete_async(self._writer, some if len(some) > 1 else some[0])

            async with gate:
                try:
                    each = self._patience.one_try() + len(some) / DELETED
                    await self._patience.attempt(call, lambda: self._mapped(call, work()), each=each)
                except BucketNotFoundError:
                    raise
                except StoreNotFoundError:
                    return  # removed already

        if self._place.scheme in S3 and len(keys) > 1:
            try:
                await loop.gather_all([several(keys[i : i + BULK]) for i in range(0, len(keys), BULK)])
            except (UnsupportedError, ReadOnlyError):
                await loop.gather_all([several([key]) for key in keys])  # no bulk deletion there
        else:
            await loop.gather_all([several([key]) for key in keys])

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List objects, as `Engine.list` does."""
        if self._read_only:
            raise self.unsupported(EngineCap.LIST)
        folder = prefix.rpartition("/")[0]
        last: str | None = None
        stream: Any = None
        call = self._call(prefix, "listing")

        async def more() -> Any:
            nonlocal stream
            if stream is None:  # (again) from the last received byte
                stream = self._obstore.list(self._reader, prefix=folder or None, offset=last, chunk_size=1000)
            try:
                return await anext(stream, None)
            except BaseException:
                stream = None
                raise

        while True:
            batch = loop.run(self._patience.attempt(call, lambda: self._mapped(call, more())))
            if batch is None:
                return
            for meta in batch:
                last = key = meta["path"]
                if key.startswith(prefix):
                    yield Entry(key, int(meta["size"]), meta["last_modified"].timestamp())

    # -- inside --------------------------------------------------------------------------
    def _call(self, key: str, doing: str, *, writing: bool = False) -> Call:
        return Call(self.where(key), doing, writing)

    async def _mapped(self, call: Call, work: Awaitable[T]) -> T:
        try:
            return await work
        except (TDStoreError, Again, NoRangesError, TimeoutError):
            raise
        except self._errors() as error:
            raise of_obstore(error, call) from error

    def close(self) -> None:
        """Do nothing: connections end with the last engine that uses them."""
        self._whole.clear()


def _final(error: Exception, call: Call) -> Exception:
    """Translate an error of opening, where nothing is retried."""
    return StoreNotFoundError(f"{call.url}: {short(error)}", url=call.url) if isinstance(error, Again) else error


def _ends(url: str, size: int, wanted: Range) -> CorruptStoreError:
    return CorruptStoreError(f"{url} ends at byte {size}, and bytes up to {wanted.stop} were expected", url=url)


def _bytes_of(ranges: Sequence[Range], places: Sequence[int]) -> str:
    _, start, stop = ranges[places[0]]
    more = f" and {len(places) - 1} more ranges" if len(places) > 1 else ""
    return f"bytes {start} to {stop}{more}"
