"""Codecs of the pipelines that this plugin decodes itself: bytes, one compressor, crc32c.

Sizes are checked before anything is decompressed: a chunk declares its size, and the array's
metadata the size that it must have.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc, zstd  # type: ignore[import-untyped]

from tdstore.storekit.checksums import crc32c

# As zarr-python does: its worker threads do not survive a fork.
blosc.use_threads = False
# Its first call makes a lock of multiprocessing. A commit at the end of a spawned process is too late for that: the
# lock would not be released.
blosc.compress(b"\0", b"lz4", 0)

Memory = np.ndarray[Any, np.dtype[np.uint8]]
Bytes = bytes | bytearray | memoryview

_CNAMES = ("lz4", "lz4hc", "blosclz", "zstd", "zlib")
_SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
_ZSTD_MAGIC = 0xFD2FB528
_BY_COPY = 65536
"""From here on a checksum that takes a memoryview is the faster one."""
_OTHER = "its bytes have another checksum than when they were written"


class ChunkError(ValueError):
    """A chunk that differs from its array's metadata; the message describes how."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Codecs between an array's elements and a chunk's bytes."""

    big: bool = False
    """Whether elements are big-endian."""
    compressor: Mapping[str, Any] | None = None
    """The codec's metadata: `{"name": "blosc", "configuration": {...}}`."""
    crc: bool = False

    def codecs(self, itemsize: int) -> list[dict[str, Any]]:
        """Return the zarr metadata of these codecs."""
        found: list[dict[str, Any]] = [{"name": "bytes"}]
        if itemsize > 1:
            found = [{"name": "bytes", "configuration": {"endian": "big" if self.big else "little"}}]
        if self.compressor is not None:
            found.append(dict(self.compressor))
        if self.crc:
            found.append({"name": "crc32c"})
        return found

    def encoder(self) -> Callable[[Memory], Bytes]:
        """Return a function from a contiguous chunk to its encoded bytes."""
        compress = _compressor(self.compressor)
        if not self.crc:
            return compress
        value, pack = google_crc32c.value, struct.Struct("<I").pack

        def encode(chunk: Memory) -> Bytes:
            data = bytes(compress(chunk))
            return data + pack(value(data))

        return encode

    def decoder(self, nbytes: int) -> Callable[[Bytes, Memory], None]:
        """Return a function that decodes a chunk of `nbytes` bytes into contiguous memory of that size.

        It raises `ChunkError` for anything that is not such a chunk.
        """
        decompress = _decompressor(self.compressor, nbytes)
        if not self.crc:
            return decompress
        value, unpack = google_crc32c.value, struct.Struct("<I").unpack_from

        def plain(data: Bytes, out: Memory) -> None:
            if len(data) != nbytes + 4:
                raise ChunkError(f"it has {len(data)} bytes instead of {nbytes + 4}")
            body = bytes(data[:nbytes])
            if unpack(data, nbytes)[0] != value(body):
                raise ChunkError(_OTHER)
            out[:] = np.frombuffer(body, np.uint8)

        def decode(data: Bytes, out: Memory) -> None:
            end = len(data) - 4
            if end < 0:
                raise ChunkError(f"it has {len(data)} bytes, too few for a checksum")
            # (google_crc32c refuses memoryviews.)
            body: Bytes = bytes(data[:end]) if end < _BY_COPY else memoryview(data)[:end]
            found = value(body) if end < _BY_COPY else crc32c(np.frombuffer(body, np.uint8))
            if unpack(data, end)[0] != found:
                raise ChunkError(_OTHER)
            decompress(body, out)

        return plain if self.compressor is None and nbytes < _BY_COPY else decode


def parse_pipeline(codecs: Sequence[Mapping[str, Any]]) -> Pipeline | None:
    """Return the pipeline of these codecs, or None if only zarr-python can apply them.

    Raises:
        ChunkError: the metadata of a codec is malformed.
    """
    left = list(codecs)
    if not left or left[0].get("name") != "bytes":
        return None
    endian = configuration(left.pop(0)).get("endian", "little")
    if endian not in ("little", "big"):
        raise ChunkError(f"the byte order {endian!r} is neither little nor big")
    crc = bool(left) and left[-1].get("name") == "crc32c"
    if crc:
        left.pop()
    if len(left) > 1 or (left and not _is_ours(left[0])):
        return None
    return Pipeline(endian == "big", dict(left[0]) if left else None, crc)


def configuration(codec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a codec's settings."""
    found = codec.get("configuration", {})
    if not isinstance(found, dict):
        raise ChunkError(f"the configuration of codec {codec.get('name')!r} is not an object")
    return found


def _is_ours(codec: Mapping[str, Any]) -> bool:
    settings = configuration(codec)
    name = codec.get("name")
    if name == "blosc":
        size = settings.get("typesize", 1)
        level, block = settings.get("clevel", 5), settings.get("blocksize", 0)
        numbers = type(size) is type(level) is type(block) is int and size > 0 and 0 <= level <= 9 and block >= 0
        return numbers and settings.get("cname") in _CNAMES and settings.get("shuffle", "noshuffle") in _SHUFFLES
    if name == "zstd":
        return type(settings.get("level", 0)) is int and type(settings.get("checksum", False)) is bool
    return name == "gzip" and settings.get("level", 5) in range(10)


def _compressor(codec: Mapping[str, Any] | None) -> Callable[[Memory], Bytes]:
    if codec is None:
        return bytes
    settings = configuration(codec)
    if codec["name"] == "zstd":
        level, checksum = settings.get("level", 0), settings.get("checksum", False)
        return lambda chunk: bytes(zstd.compress(chunk, level, checksum))
    if codec["name"] == "gzip":
        level = settings.get("level", 5)

        def pack(chunk: Memory) -> bytes:
            deflate = zlib.compressobj(level, wbits=31)
            return deflate.compress(chunk.data) + deflate.flush()

        return pack
    cname, clevel = settings["cname"].encode(), settings.get("clevel", 5)
    shuffle, block = _SHUFFLES[settings.get("shuffle", "noshuffle")], settings.get("blocksize", 0)
    typesize = settings.get("typesize", 1)
    # numcodecs takes the size of an element from the buffer.
    kind = np.dtype({1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}.get(typesize, f"V{typesize}"))
    compress = blosc.compress

    def squeeze(chunk: Memory) -> bytes:
        return bytes(compress(chunk.view(kind) if chunk.size % typesize == 0 else chunk, cname, clevel, shuffle, block))

    return squeeze


def _decompressor(codec: Mapping[str, Any] | None, nbytes: int) -> Callable[[Bytes, Memory], None]:
    if codec is None:
        return partial(_copy, nbytes)
    if codec["name"] == "blosc":
        return partial(_unblosc, nbytes)
    return partial(_unzstd if codec["name"] == "zstd" else _gunzip, nbytes)


def _copy(nbytes: int, data: Bytes, out: Memory) -> None:
    if len(data) != nbytes:
        raise ChunkError(f"it has {len(data)} bytes instead of {nbytes}")
    out[:] = np.frombuffer(data, np.uint8)


_blosc_head = struct.Struct("<4xIII").unpack_from


def _unblosc(nbytes: int, data: Bytes, out: Memory) -> None:
    if len(data) < 16:
        raise ChunkError(f"it has {len(data)} bytes, too few for blosc")
    declared, _, stored = _blosc_head(data)
    if declared != nbytes or stored != len(data):
        raise ChunkError(f"it declares {declared} bytes in {stored}, and has {nbytes} in {len(data)}")
    try:
        if nbytes < _BY_COPY:  # numcodecs takes longer to look at the target than to copy so few bytes
            out[:] = np.frombuffer(blosc.decompress(data), np.uint8)
        else:
            blosc.decompress(data, out)
    except (RuntimeError, ValueError) as error:
        raise ChunkError(f"blosc cannot decompress it: {error}") from None


def _unzstd(nbytes: int, data: Bytes, out: Memory) -> None:
    declared = zstd_size(data)
    if declared is not None and declared != nbytes:
        raise ChunkError(f"it declares {declared} bytes and should have {nbytes}")
    try:
        # The length of the buffer is the limit, also where the frame does not declare its size.
        zstd.decompress(data, out)
    except (RuntimeError, ValueError) as error:
        raise ChunkError(f"zstd cannot decompress it: {error}") from None


def zstd_size(data: Bytes) -> int | None:
    """Return the content size that a zstd frame declares; None if it declares none."""
    if len(data) < 6 or struct.unpack_from("<I", data)[0] != _ZSTD_MAGIC:
        raise ChunkError("it does not start as zstd")
    flags = data[4]
    single, kind = flags >> 5 & 1, flags >> 6
    at = 5 + (0 if single else 1) + (0, 1, 2, 4)[flags & 3]
    width = (single, 2, 4, 8)[kind]
    if not width:
        return None
    if len(data) < at + width:
        raise ChunkError("it ends within its zstd header")
    return int.from_bytes(data[at : at + width], "little") + (256 if width == 2 else 0)


def _gunzip(nbytes: int, data: Bytes, out: Memory) -> None:
    inflate = zlib.decompressobj(wbits=31)
    try:
        found = inflate.decompress(data, nbytes + 1)
    except zlib.error as error:
        raise ChunkError(f"gzip cannot decompress it: {error}") from None
    if len(found) != nbytes or not inflate.eof or inflate.unused_data:
        raise ChunkError(f"it does not hold {nbytes} bytes")
    out[:] = np.frombuffer(found, np.uint8)
