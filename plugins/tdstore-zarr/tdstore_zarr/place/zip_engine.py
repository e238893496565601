"""The members of a zip file as a read-only engine; `zipfile` writes a new one."""

from __future__ import annotations

import os
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tdstore.engine import Blob, Buffer, Engine, EngineCap, Entry
from tdstore.errors import CorruptStoreError, StoreNotFoundError
from tdstore.index.ranges import Range
from tdstore.storekit import files
from tdstore_zarr.place.folder_engine import close_quietly


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
