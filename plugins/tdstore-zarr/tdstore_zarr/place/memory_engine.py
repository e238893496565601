"""Named stores of this process as an engine, and the engine of a URL."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tdstore.engine import Blob, Buffer, Engine, EngineCap, Entry
from tdstore.errors import ConflictError, CorruptStoreError, MissingDependencyError, StoreNotFoundError
from tdstore.index.ranges import Range
from tdstore.registry import registry, split_scheme


class MemoryEngine(Engine):
    """Objects in a dict of this process."""

    def __init__(self, url: str, objects: dict[str, tuple[bytes, int]] | None = None) -> None:
        self.url = url
        self.objects: dict[str, tuple[bytes, int]] = {} if objects is None else objects

    @property
    def can(self) -> EngineCap:
        """Return all abilities."""
        return EngineCap.WRITE | EngineCap.LIST | EngineCap.CONDITIONAL

    def _get(self, key: str) -> tuple[bytes, int]:
        try:
            return self.objects[key]
        except KeyError:
            raise StoreNotFoundError(f"{self.where(key)}: there is no such object", url=self.where(key)) from None

    def get(self, key: str, limit: int | None = None) -> Blob:
        """Read an object, as `Engine.get` does."""
        data, tag = self._get(key)
        if limit is not None and len(data) > limit:
            raise CorruptStoreError(f"{self.where(key)} has {len(data)} bytes, more than {limit}", url=self.where(key))
        return Blob(data, str(tag))

    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Read ranges, as `Engine.get_ranges` does."""
        found: list[Buffer] = []
        for key, start, stop in ranges:
            data = memoryview(self._get(key)[0])
            part = data[start:] if stop is None else data[start:stop]
            if stop is not None and len(part) != stop - start:
                raise CorruptStoreError(f"{self.where(key)} ends before byte {stop}", url=self.where(key))
            found.append(part)
        return found

    def size(self, key: str) -> int:
        """Return the size of an object, as `Engine.size` does."""
        return len(self._get(key)[0])

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        """Write an object, as `Engine.put` does."""
        with _LOCK:
            there = self.objects.get(key)
            if (if_absent and there) or (if_match is not None and (there is None or str(there[1]) != if_match)):
                raise ConflictError(f"{self.where(key)} was changed by another writer", url=self.where(key))
            tag = there[1] + 1 if there else 1
            self.objects[key] = (bytes(data), tag)
            return str(tag)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, as `Engine.delete` does."""
        for key in keys:
            self.objects.pop(key, None)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List objects, as `Engine.list` does."""
        now = time.time()
        return iter([Entry(k, len(v[0]), now) for k, v in list(self.objects.items()) if k.startswith(prefix)])


_LOCK = threading.Lock()
_NAMED: dict[str, dict[str, tuple[bytes, int]]] = {}


def memory_engine(name: str) -> MemoryEngine:
    """Return the store of that name in this process."""
    return MemoryEngine(f"memory://{name}", _NAMED.setdefault(name, {}))


def engine_of(text: str, options: Mapping[str, Any] | None) -> Engine:
    """Return the engine of a URL: a plugin's, or for `memory://` one of this process."""
    scheme, rest = split_scheme(text)
    try:
        return registry().engine(text, options)
    except MissingDependencyError:
        if scheme != "memory":
            raise
        return memory_engine(rest)
