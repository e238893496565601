"""A read-through cache around an engine: pages of objects in RAM, on disk, or both."""

from __future__ import annotations

import builtins
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from tdstore.engine import Buffer, Engine
from tdstore.errors import CorruptStoreError
from tdstore.index.ranges import Range
from tdstore_remote.cache.disk import DiskCache
from tdstore_remote.engines.delegating import DelegatingEngine

PAGE = 256 << 10


class _Known(NamedTuple):
    """The size and the version of an object."""

    size: int
    tag: str | None


@runtime_checkable
class _Versions(Protocol):
    """An engine that reports versions of objects."""

    pins: bool
    """Whether reads of pinned objects return that version, or raise an error."""

    def versions(self, keys: Sequence[str], *, pin: bool = False) -> Sequence[tuple[int, str | None]]: ...


class CachedEngine(DelegatingEngine):
    """An engine whose ranges come from pages cached under URL, tag and size of the object: a new version has new pages.

    On the first access to an object the engine requests its size and tag, in one round for all new objects of
    a batch. `get` is never answered from the cache, so manifests are always current.

    Args:
        engine: the engine below.
        folder: the folder of the cache on disk; None for no such cache.
        most: bytes that the cache on disk may take.
        ram: bytes of the cache in memory.
    """

    def __init__(
        self, inner: Engine, *, folder: str | None = None, most: int = 10 << 30, ram: int = 0, page: int = PAGE
    ) -> None:
        self._inner = inner
        self.url = inner.url
        self.page = page
        self._disk = DiskCache(folder, most) if folder is not None else None
        self._ram: OrderedDict[str, bytes] = OrderedDict()
        self._ram_most, self._ram_used = ram, 0
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()

    @property
    def inner(self) -> Engine:
        """The engine below. `get` and `size` call it each time."""
        return self._inner

    def __repr__(self) -> str:
        return f"CachedEngine({self.inner!r})"

    # -- reading -------------------------------------------------------------------------
    aget_ranges = Engine.aget_ranges
    pin_ends = Engine.pin_ends

    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Read ranges, as `Engine.get_ranges` does: missing pages are fetched in one round, neighbours together."""
        self._meet({r.key for r in ranges if r.stop is None or r.stop > r.start})
        pages: dict[str, bytes] = {}
        plans = [self._plan(r) for r in ranges]
        wanted = {
            (r.key, n): None for r, (first, stop) in zip(ranges, plans, strict=True) for n in self._pages(first, stop)
        }
        missing: dict[str, list[int]] = {}
        for key, n in wanted:
            name = self._name(key, n)
            if (data := self._look(name)) is not None:
                pages[name] = data
            else:
                missing.setdefault(key, []).append(n)
        self._fetch(missing, pages)
        return [self._cut(r.key, first, stop, pages) for r, (first, stop) in zip(ranges, plans, strict=True)]

    def _meet(self, keys: set[str]) -> None:
        new = sorted(keys - self._known.keys())
        if not new:
            return
        self._known.update(zip(new, self._versions(new), strict=True))

    def _versions(self, keys: Sequence[str]) -> list[_Known]:
        if isinstance(self.inner, _Versions):
            return [_Known(*v) for v in self.inner.versions(keys, pin=True)]
        return [_Known(size, None) for size in self.inner.pin(keys)]

    def pin(self, keys: Sequence[str]) -> builtins.list[int]:
        """Pin objects, as `Engine.pin` does: an object stays at the version of its first read."""
        self._meet(set(keys))
        return [self._known[key].size for key in keys]

    def _plan(self, r: Range) -> tuple[int, int]:
        if r.stop is not None and r.stop <= r.start:
            return 0, 0
        size = self._known[r.key].size
        first = max(size + r.start, 0) if r.start < 0 else r.start
        stop = size if r.stop is None else r.stop
        if stop > size:
            where = self.where(r.key)
            raise CorruptStoreError(f"{where} ends at byte {size}, and bytes up to {stop} were expected", url=where)
        return first, stop

    def _pages(self, first: int, stop: int) -> range:
        return range(first // self.page, -(-stop // self.page)) if stop > first else range(0)

    def _name(self, key: str, n: int) -> str:
        known = self._known[key]
        return "\0".join((self.where(key), known.tag or "", str(known.size), str(self.page), str(n)))

    def _look(self, name: str) -> bytes | None:
        with self._lock:
            if (data := self._ram.get(name)) is not None:
                self._ram.move_to_end(name)
                return data
        if self._disk is not None and (data := self._disk.get(name)) is not None:
            self._remember(name, data)
            return data
        return None

    def _fetch(self, missing: dict[str, list[int]], pages: dict[str, bytes]) -> None:
        asked: list[Range] = []
        for key, numbers in missing.items():
            size = self._known[key].size
            first = last = None
            for n in sorted(numbers):
                if last is not None and n == last + 1 and (n + 1 - (first or 0)) * self.page <= 8 << 20:
                    asked[-1] = Range(key, asked[-1].start, min((n + 1) * self.page, size))
                else:
                    first = n
                    asked.append(Range(key, n * self.page, min((n + 1) * self.page, size)))
                last = n
        if not asked:
            return
        answers = self.inner.get_ranges(asked)
        self._check_versions(sorted(missing))
        for r, data in zip(asked, answers, strict=True):
            view = memoryview(data).cast("B")
            for at in range(0, len(view), self.page):
                name = self._name(r.key, (r.start + at) // self.page)
                page = pages[name] = bytes(view[at : at + self.page])
                self._remember(name, page)
                if self._disk is not None:
                    self._disk.put(name, page)

    def _check_versions(self, keys: Sequence[str]) -> None:
        """Check that fetched pages are of the version under which they will be cached."""
        if isinstance(self.inner, _Versions) and self.inner.pins:
            return
        for key, now in zip(keys, self._versions(keys), strict=True):
            if now != self._known[key]:
                where = self.where(key)
                raise CorruptStoreError(f"{where} was replaced since it was opened", url=where, hint="open it again")

    def _remember(self, name: str, data: bytes) -> None:
        if len(data) > self._ram_most:
            return
        with self._lock:
            if name not in self._ram:
                self._ram[name] = data
                self._ram_used += len(data)
            while self._ram_used > self._ram_most:
                self._ram_used -= len(self._ram.popitem(last=False)[1])

    def _cut(self, key: str, first: int, stop: int, pages: dict[str, bytes]) -> Buffer:
        numbers = self._pages(first, stop)
        if not numbers:
            return b""
        start = numbers[0] * self.page
        if len(numbers) == 1:
            return memoryview(pages[self._name(key, numbers[0])])[first - start : stop - start]
        views = [memoryview(pages[self._name(key, n)]) for n in numbers]
        views[0] = views[0][first - start :]
        views[-1] = views[-1][: stop - numbers[-1] * self.page]
        return b"".join(views)

    # -- handed on -----------------------------------------------------------------------
    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        """Write an object, as `Engine.put` does."""
        self._known.pop(key, None)
        return self.inner.put(key, data, if_absent=if_absent, if_match=if_match)

    def put_many(self, items: Sequence[tuple[str, Buffer]]) -> None:
        """Write objects, as `Engine.put_many` does."""
        for key, _ in items:
            self._known.pop(key, None)
        self.inner.put_many(items)

    def put_parts(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> None:
        """Write objects, as `Engine.put_parts` does."""
        for key, _ in items:
            self._known.pop(key, None)
        self.inner.put_parts(items)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, as `Engine.delete` does."""
        for key in keys:
            self._known.pop(key, None)
        self.inner.delete(keys)

    def close(self) -> None:
        """Close the engine below; pages on disk stay."""
        with self._lock:
            self._ram.clear()
            self._ram_used = 0
        self.inner.close()
