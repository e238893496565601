"""An engine in this process's memory, with a server's faults on demand, that counts what is asked of it."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tdstore.engine import Blob, Buffer, Engine, EngineCap, Entry
from tdstore.errors import ConflictError, CorruptStoreError, StoreNotFoundError, TransientError
from tdstore.index.ranges import Range

ALL = EngineCap.WRITE | EngineCap.LIST | EngineCap.CONDITIONAL


@dataclass
class Bucket:
    """What is stored: it outlives the engines that reach it."""

    objects: dict[str, tuple[bytes, str, float]] = field(default_factory=dict)
    """Key -> bytes, tag, time."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    tags: Iterator[int] = field(default_factory=itertools.count)

    def put(self, key: str, data: Buffer) -> str:
        tag = f"tag-{next(self.tags)}"
        self.objects[key] = (bytes(data), tag, time.time())
        return tag

    def bytes_of(self, key: str) -> bytes:
        return self.objects[key][0]

    def copy(self) -> Bucket:
        with self.lock:
            return Bucket(dict(self.objects), tags=self.tags)

    def keys(self, prefix: str = "data/") -> list[str]:
        return sorted(k for k in self.objects if k.startswith(prefix))


class MemoryEngine(Engine):
    """Objects of a bucket below a root.

    `fault(verb, key, number)` is called before each request (`number` counts those that write, from 1) and may
    raise, or return "lost" (the put succeeds, its answer does not arrive), "torn" (half of the object is there
    and the put fails), "fail" (nothing happens and the put fails).
    `spoil(key, data)` may change what a get returns.
    """

    def __init__(self, bucket: Bucket | None = None, url: str = "mem://bucket", can: EngineCap = ALL) -> None:
        self.bucket = Bucket() if bucket is None else bucket
        self.url = url
        self._can = can
        self.fault: Callable[[str, str, int], str | None] = lambda verb, key, number: None
        self.spoil: Callable[[str, bytes], bytes] = lambda key, data: data
        self.latency = 0.0
        self.closed = False
        self.reset()

    def reset(self) -> None:
        self.rounds = self.requests = self.bytes_read = self.writes = self.puts_at_once = 0
        self.log: list[tuple[str, str]] = []

    @property
    def can(self) -> EngineCap:
        return self._can

    def get(self, key: str, limit: int | None = None) -> Blob:
        self._round(1)
        data, tag = self._read(key)
        if limit is not None and len(data) > limit:
            raise CorruptStoreError(f"{self.where(key)} is larger than {limit}", url=self.where(key))
        return Blob(data, tag)

    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        if not ranges:
            return []
        self._round(len(ranges))
        return [self._range(r) for r in ranges]

    async def aget_ranges(self, ranges: Sequence[Range]) -> Sequence[Buffer]:
        if EngineCap.ASYNC not in self._can:
            return await super().aget_ranges(ranges)
        await asyncio.sleep(self.latency)
        self.latency, kept = 0.0, self.latency
        try:
            return self.get_ranges(ranges)
        finally:
            self.latency = kept

    def _range(self, r: Range) -> bytes:
        data, _ = self._read(r.key)
        start = max(len(data) + r.start, 0) if r.start < 0 else r.start
        stop = len(data) if r.stop is None else r.stop
        if stop > len(data):
            raise CorruptStoreError(f"{self.where(r.key)} ends at {len(data)}, not {stop}", url=self.where(r.key))
        part = self.spoil(r.key, data[start:stop])
        self.bytes_read += len(part)
        return part

    def _read(self, key: str) -> tuple[bytes, str]:
        self.log.append(("get", key))
        self.fault("get", key, self.writes)
        with self.bucket.lock:
            if key not in self.bucket.objects:
                raise StoreNotFoundError(f"there is no {self.where(key)}", url=self.where(key))
            data, tag, _ = self.bucket.objects[key]
        return data, tag

    def size(self, key: str) -> int:
        self._round(1)
        return len(self._read(key)[0])

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        if EngineCap.WRITE not in self._can or ((if_absent or if_match) and EngineCap.CONDITIONAL not in self._can):
            raise self.unsupported(EngineCap.WRITE if EngineCap.WRITE not in self._can else EngineCap.CONDITIONAL)
        self._round(1)
        self.writes += 1
        self.log.append(("put", key))
        what = self.fault("put", key, self.writes)
        if what == "fail":
            raise TransientError(f"{self.where(key)}: 503", url=self.where(key))
        with self.bucket.lock:
            there = self.bucket.objects.get(key)
            if (if_absent and there) or (if_match is not None and (there is None or there[1] != if_match)):
                raise ConflictError(f"{self.where(key)}: the condition does not hold", url=self.where(key))
            if what == "torn":
                if not (if_absent or if_match):  # a server that knows conditions does not tear
                    self.bucket.put(key, bytes(data)[: len(data) // 2])
                raise TransientError(f"{self.where(key)}: connection reset", url=self.where(key))
            tag = self.bucket.put(key, data)
        if what == "lost":
            raise TransientError(f"{self.where(key)}: the answer was lost", url=self.where(key))
        return tag

    def put_many(self, items: Sequence[tuple[str, Buffer]]) -> None:
        self.puts_at_once = max(self.puts_at_once, len(items))
        super().put_many(items)

    def delete(self, keys: Sequence[str]) -> None:
        self._round(len(keys))
        for key in keys:
            self.writes += 1
            self.log.append(("delete", key))
            if self.fault("delete", key, self.writes):
                raise TransientError(f"{self.where(key)}: 503", url=self.where(key))
            self.bucket.objects.pop(key, None)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        if EngineCap.LIST not in self._can:
            raise self.unsupported(EngineCap.LIST)
        self._round(1)
        for key, (data, _, when) in sorted(self.bucket.objects.items()):
            if key.startswith(prefix):
                yield Entry(key, len(data), when)

    def close(self) -> None:
        self.closed = True

    def _round(self, requests: int) -> None:
        self.rounds += 1
        self.requests += requests
        if self.latency:
            time.sleep(self.latency)
