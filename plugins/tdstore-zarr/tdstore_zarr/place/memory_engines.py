"""Engines without storage of their own: named stores of this process, and the members of a zip file."""

from __future__ import annotations

import os
import struct
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tdstore.engine import Blob, Buffer, Engine, EngineCap, Entry
from tdstore.errors import ConflictError, CorruptStoreError, MissingDependencyError, StoreNotFoundError
from tdstore.index.ranges import Range
from tdstore.registry import registry, split_scheme
from tdstore.storekit import files
from tdstore_zarr.place.folder_engine import close_quietly


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


class ZipEngine(Engine):
    """Members of a zip file, read only. Stored members are read by ranges, deflated ones as a whole."""

    def __init__(self, path: str, url: str) -> None:
        self.url = url
        self._fd = -1
        self._lock = threading.Lock()
        with files.io_errors(url, "opening", writing=False):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._size = os.fstat(self._fd).st_size
            with open(self._fd, "rb", closefd=False) as file, zipfile.ZipFile(file) as found:
                infos = found.infolist()
        except (OSError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile, struct.error) as error:
            self.close()
            raise CorruptStoreError(f"{url} is not a readable zip file: {error}", url=url) from error
        self._members = {info.filename: info for info in infos if not info.is_dir()}
        self._starts: dict[str, int] = {}

    @property
    def can(self) -> EngineCap:
        """Return the ability to list."""
        return EngineCap.LIST

    def _member(self, key: str) -> zipfile.ZipInfo:
        info = self._members.get(key)
        if info is None:
            raise StoreNotFoundError(f"{self.where(key)}: the zip file has no such member", url=self.where(key))
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise CorruptStoreError(
                f"{self.where(key)} is encrypted, or compressed with method {info.compress_type}",
                url=self.url,
                hint="zip it again without: zarr compresses chunks itself",
            )
        return info

    def _start(self, info: zipfile.ZipInfo) -> int:
        start = self._starts.get(info.filename)
        if start is None:
            head = os.pread(self._fd, 30, info.header_offset)
            if len(head) < 30 or head[:4] != b"PK\x03\x04":
                raise CorruptStoreError(f"{self.where(info.filename)} has no local header", url=self.url)
            name, extra = struct.unpack_from("<HH", head, 26)
            start = self._starts[info.filename] = info.header_offset + 30 + name + extra
        if start + info.compress_size > self._size:
            raise CorruptStoreError(f"{self.where(info.filename)} ends behind the zip file's end", url=self.url)
        return start

    def get(self, key: str, limit: int | None = None) -> Blob:
        """Read a member, as `Engine.get` does, and compare its checksum."""
        info = self._member(key)
        if limit is not None and info.file_size > limit:
            raise CorruptStoreError(
                f"{self.where(key)} has {info.file_size} bytes, more than {limit}", url=self.where(key)
            )
        start = self._start(info)
        data = os.pread(self._fd, info.compress_size, start)
        if info.compress_type == zipfile.ZIP_DEFLATED:
            inflate = zlib.decompressobj(-15)
            try:
                data = inflate.decompress(data, info.file_size + 1)
            except zlib.error as error:
                raise CorruptStoreError(f"{self.where(key)} cannot be inflated: {error}", url=self.url) from error
        if len(data) != info.file_size or zlib.crc32(data) != info.CRC:
            raise CorruptStoreError(f"{self.where(key)} has another checksum than the zip file says", url=self.url)
        return Blob(data, f"{info.CRC:08x}")

    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Read ranges, as `Engine.get_ranges` does."""
        found: list[Buffer] = []
        whole: dict[str, Buffer] = {}
        for key, start, stop in ranges:
            info = self._member(key)
            first = max(info.file_size + start, 0) if start < 0 else start
            last = info.file_size if stop is None else stop
            if info.compress_type == zipfile.ZIP_DEFLATED:
                if key not in whole:
                    whole[key] = self.get(key).data
                part: Buffer = memoryview(whole[key])[first:last]
            else:
                at = self._start(info)
                part = os.pread(self._fd, min(last, info.file_size) - first, at + first)
            if len(part) != last - first:
                raise CorruptStoreError(f"{self.where(key)} ends before byte {last}", url=self.where(key))
            found.append(part)
        return found

    def size(self, key: str) -> int:
        """Return the size of a member, as `Engine.size` does."""
        return self._member(key).file_size

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List members, as `Engine.list` does."""
        return iter([Entry(k, i.file_size, 0.0) for k, i in self._members.items() if k.startswith(prefix)])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __del__(self, _close: Callable[[int], None] = os.close, _quietly: Any = close_quietly) -> None:
        _quietly([self._fd], _close)
