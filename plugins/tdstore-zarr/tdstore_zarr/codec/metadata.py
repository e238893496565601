"""An array's `zarr.json`: strict parsing, and encoding."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import floordiv, neg
from typing import Any

import numpy as np
import torch

from tdstore.dtypes import DTYPE_TO_NAME, NAME_TO_DTYPE, is_bit_pattern, numpy_dtype
from tdstore.errors import CorruptStoreError, InvalidArgumentError, StoreError, UnsupportedError
from tdstore.types import LeafSpec
from tdstore_zarr.codec.codecs import ChunkError, Pipeline, configuration, parse_pipeline

DTYPE_ATTRIBUTE = "tdstore_dtype"
MAX_DIMS = 32
MAX_TEXT = 300
"""Letters of a message that may be those of a file."""
MAX_CHUNK = 1 << 31
"""Bytes of a chunk that is decoded at once."""
MAX_INNER = 1 << 24
"""Inner chunks of one shard."""
FREE, RATIO = 64 << 20, 1100
"""Limits for arrays of other programs: declared bytes without stored ones, and the ratio of declared to stored."""
KEY_ENCODINGS = (("default", "/"), ("default", "."), ("v2", "."), ("v2", "/"))
SAFE_CODECS = frozenset(
    "bytes transpose sharding_indexed crc32c gzip zstd blosc numcodecs.blosc numcodecs.lz4 numcodecs.zstd "
    "numcodecs.zlib numcodecs.gzip numcodecs.bz2 numcodecs.lzma numcodecs.shuffle numcodecs.delta numcodecs.bitround "
    "numcodecs.fixedscaleoffset numcodecs.quantize numcodecs.packbits numcodecs.astype numcodecs.crc32 "
    "numcodecs.crc32c numcodecs.adler32 numcodecs.fletcher32 numcodecs.jenkins_lookup3".split()
)
"""Codecs of zarr-python that read numbers and run no code of the file's choosing."""

_NAMES = {str, type(None)}
"""Types of the names of dimensions."""
_HEX = re.compile(r"0x[0-9a-fA-F]{1,32}")


@dataclass(slots=True)
class ArrayMeta:
    """One array, as described by its metadata."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    data_type: str
    """Its name in zarr: the dtype's, or `uint8`... for dtypes that travel as bit patterns."""
    fill: bytes
    """One element that was never written, little-endian."""
    chunks: tuple[int, ...]
    """Shape of one object: a chunk, or a shard of many."""
    inner: tuple[int, ...]
    """Shape of one encoded chunk: equal to `chunks` when there are no shards."""
    sharded: bool = False
    pipeline: Pipeline | None = field(default_factory=Pipeline)
    """None: only zarr-python can decode it."""
    codecs: list[dict[str, Any]] = field(default_factory=list)
    """All of the array's codecs, as metadata."""
    index_at_end: bool = True
    index_crc: bool = True
    keys: tuple[str, str] = ("default", "/")
    attributes: dict[str, Any] = field(default_factory=dict)
    names: tuple[str | None, ...] | None = None

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the number of objects along each dimension."""
        return tuple(map(neg, map(floordiv, map(neg, self.shape), self.chunks)))  # rounded up

    @property
    def per_object(self) -> tuple[int, ...]:
        """Return the number of inner chunks of an object along each dimension."""
        return tuple(map(floordiv, self.chunks, self.inner))

    @property
    def inner_bytes(self) -> int:
        """Return the decoded size of an inner chunk."""
        return math.prod(self.inner) * self.dtype.itemsize

    @property
    def index_bytes(self) -> int:
        """Return the size of a shard's index."""
        return 16 * math.prod(self.per_object) + (4 if self.index_crc else 0)

    def spec(self) -> LeafSpec:
        """Return the spec of the leaf."""
        return LeafSpec(self.shape, self.dtype, fill_value=fill_of(self.fill, self.dtype))

    def named(self, names: tuple[str | None, ...] | None) -> ArrayMeta:
        """Return the same array with other dimension names."""
        return ArrayMeta(
            self.shape, self.dtype, self.data_type, self.fill, self.chunks, self.inner, self.sharded, self.pipeline,
            self.codecs, self.index_at_end, self.index_crc, self.keys, self.attributes, names,
        )  # fmt: skip

    def chunk_key(self, number: int, grid: tuple[int, ...] | None = None) -> str:
        """Return the key of an object below its node, by its number in C order. `grid` is that of `self`, if known."""
        place = []
        for size in reversed(self.grid if grid is None else grid):
            number, rest = divmod(number, size)
            place.append(rest)
        kind, sep = self.keys
        parts = map(str, reversed(place))
        if kind == "v2":
            return sep.join(parts) or "0"
        return sep.join(["c", *parts])

    def number_of(self, key: str) -> int | None:
        """Return the number of the object with that key below its node; None for a key of no object."""
        kind, sep = self.keys
        parts = key.split(sep)
        if kind == "default":
            if parts[0] != "c":
                return None
            parts = parts[1:]
        elif not self.shape:
            return 0 if key == "0" else None
        grid = self.grid
        if len(parts) != len(grid):
            return None
        number = 0
        for part, size in zip(parts, grid, strict=True):
            # (A number of any other form would be a second key of the same chunk.)
            if not part.isascii() or not part.isdigit() or str(int(part[:20])) != part or int(part) >= size:
                return None
            number = number * size + int(part)
        return number

    def to_json(self) -> dict[str, Any]:
        """Return the content of its `zarr.json`."""
        found: dict[str, Any] = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.data_type,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunks)}},
            "chunk_key_encoding": {"name": self.keys[0], "configuration": {"separator": self.keys[1]}},
            "fill_value": _fill_json(self.fill, self.data_type),
            "codecs": self.codecs,
            "attributes": self.attributes,
            "storage_transformers": [],
        }
        if self.names is not None:
            found["dimension_names"] = list(self.names)
        return found


# -- fill values -----------------------------------------------------------------------------


def fill_of(pattern: bytes, dtype: torch.dtype) -> Any:
    """Return the fill value as a Python number."""
    if not any(pattern):
        return 0
    array = np.frombuffer(bytearray(pattern), numpy_dtype(dtype))
    if not is_bit_pattern(dtype):
        return array[0].item()
    number = torch.from_numpy(array).view(dtype)
    return complex(number.to(torch.complex64)) if dtype.is_complex else float(number.to(torch.float32))


def _fill_json(pattern: bytes, data_type: str) -> Any:
    value = np.frombuffer(pattern, np.dtype(data_type))[0]
    if value.dtype.kind == "c":
        return [_float_json(value.real), _float_json(value.imag)]
    return _float_json(value) if value.dtype.kind == "f" else value.item()


def _float_json(value: Any) -> Any:
    number = float(value)
    if math.isfinite(number):
        return number
    # The one NaN that has a name is numpy's; others would lose their bits.
    if math.isnan(number) and value.tobytes() != np.array(np.nan, value.dtype).tobytes():
        return "0x" + value.tobytes()[::-1].hex()
    return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(number, "NaN")


def _fill_bytes(value: Any, data_type: np.dtype[Any]) -> bytes:
    if value is None:
        return bytes(data_type.itemsize)
    kind, size = data_type.kind, data_type.itemsize
    if kind == "c":
        if not isinstance(value, list) or len(value) != 2:
            raise InvalidArgumentError("a complex fill value is a list of two")
        part = np.dtype(f"f{size // 2}")
        return _fill_bytes(value[0], part) + _fill_bytes(value[1], part)
    if kind == "f":
        if isinstance(value, str):
            if _HEX.fullmatch(value):
                return int(value, 16).to_bytes(size, "little")
            value = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
        if type(value) not in (int, float):
            raise InvalidArgumentError("not a number")
    elif type(value) is not (bool if kind == "b" else int):
        raise InvalidArgumentError("not an integer")
    return np.array(value, data_type).tobytes()


# -- parsing -----------------------------------------------------------------------------------


def parse_array(data: Any, where: str, url: str, *, trust: bool = False) -> ArrayMeta:
    """Check the metadata of an array.

    Args:
        data: the content of its `zarr.json`.
        where: the location and the node, for messages.
        url: the location.
        trust: allow codecs outside of the list of safe ones.

    Raises:
        CorruptStoreError: the metadata is not as zarr writes it, or is impossible.
        UnsupportedError: a type that no tensor has, or an unknown extension of the format.
    """
    try:
        return _parse(data, where, url, trust)
    except StoreError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError, struct.error) as error:
        text = str(error)[:MAX_TEXT]
        what = f"lacks {text}" if isinstance(error, KeyError) else f"is malformed: {text}"
        raise CorruptStoreError(f"{url}: the metadata of {where} {what}", url=url) from error


def _parse(data: Any, where: str, url: str, trust: bool) -> ArrayMeta:
    shape = _ints(data["shape"], 0)
    if len(shape) > MAX_DIMS or math.prod(shape) >= 2**60:
        raise InvalidArgumentError(f"the shape {shape[:8]} is impossible")
    if data.get("storage_transformers"):
        raise UnsupportedError(f"{url}: {where} has storage transformers, which are not supported", url=url)
    attributes = data.get("attributes", {})
    if not isinstance(attributes, dict):
        raise InvalidArgumentError("its attributes are not an object")
    dtype, data_type = _types(data["data_type"], attributes, where, url)
    grid, keys = data["chunk_grid"], data["chunk_key_encoding"]
    if grid["name"] != "regular":
        raise UnsupportedError(f"{url}: {where} has a chunk grid of kind {grid['name']!r:.100}", url=url)
    chunks = _ints(configuration(grid)["chunk_shape"], 1)
    if len(chunks) != len(shape):
        raise InvalidArgumentError(f"chunks {chunks[:8]} do not fit the shape {shape}")
    encoding = (keys["name"], configuration(keys).get("separator", "/" if keys["name"] == "default" else "."))
    if encoding not in KEY_ENCODINGS:
        raise InvalidArgumentError(f"its chunk keys are encoded as {encoding}")
    codecs = data["codecs"]
    if not isinstance(codecs, list) or not codecs or len(codecs) > 32:
        raise InvalidArgumentError("its codecs are not a list")
    codecs = [{"name": c} if isinstance(c, str) else dict(c) for c in codecs]
    names = data.get("dimension_names")
    if names is not None and (len(names) != len(shape) or not {*map(type, names)} <= _NAMES):
        raise InvalidArgumentError("its dimension names do not fit its shape")
    stored = numpy_dtype(dtype)
    meta = ArrayMeta(
        shape, dtype, data_type, _fill_bytes(data["fill_value"], np.dtype(data_type)), chunks, chunks,
        codecs=codecs, keys=encoding, attributes=attributes, names=None if names is None else tuple(names),
    )  # fmt: skip
    if len(meta.fill) != stored.itemsize:
        raise InvalidArgumentError(f"the fill value {data['fill_value']!r} has the wrong size")
    _parse_codecs(meta, where, url, trust)
    if meta.inner_bytes > MAX_CHUNK:
        raise InvalidArgumentError(
            f"a chunk of shape {meta.inner} has {meta.inner_bytes} bytes; the limit is {MAX_CHUNK}"
        )
    return meta


def _types(data_type: Any, attributes: Mapping[str, Any], where: str, url: str) -> tuple[torch.dtype, str]:
    name = data_type.get("name") if isinstance(data_type, dict) else data_type
    found = NAME_TO_DTYPE.get(name) if isinstance(name, str) else None
    if found is None:
        raise UnsupportedError(
            f"{url}: {where} has elements of type {name!r:.100}, which no tensor has",
            url=url,
            hint="delete that array from a copy of the store, with zarr",
        )
    claimed = attributes.get(DTYPE_ATTRIBUTE)
    if claimed is not None:
        wanted = NAME_TO_DTYPE.get(claimed) if isinstance(claimed, str) else None
        if wanted is None or not is_bit_pattern(wanted) or numpy_dtype(wanted) != np.dtype(DTYPE_TO_NAME[found]):
            raise InvalidArgumentError(f"elements of type {name!r} claim to be {claimed!r}")
        found = wanted
    return found, str(numpy_dtype(found))


def _parse_codecs(meta: ArrayMeta, where: str, url: str, trust: bool) -> None:
    flat = list(meta.codecs)
    if len(meta.codecs) == 1 and meta.codecs[0].get("name") == "sharding_indexed":
        settings = configuration(meta.codecs[0])
        inner = _ints(settings["chunk_shape"], 1)
        if len(inner) != len(meta.chunks) or any(c % i for c, i in zip(meta.chunks, inner, strict=True)):
            raise InvalidArgumentError(f"inner chunks {inner[:8]} do not divide shards {meta.chunks}")
        flat = [{"name": c} if isinstance(c, str) else dict(c) for c in settings["codecs"]]
        index = [c if isinstance(c, str) else c.get("name") for c in settings.get("index_codecs", ["bytes", "crc32c"])]
        where_index = settings.get("index_location", "end")
        if where_index not in ("start", "end"):
            raise InvalidArgumentError(f"its shards' index is at {where_index!r}")
        endian = [
            configuration(c).get("endian", "little") for c in settings.get("index_codecs", []) if isinstance(c, dict)
        ]
        meta.inner, meta.sharded = inner, True
        meta.index_at_end, meta.index_crc = where_index == "end", "crc32c" in index
        plain_index = index in (["bytes"], ["bytes", "crc32c"]) and "big" not in endian
        meta.pipeline = parse_pipeline(flat) if plain_index else None
        if math.prod(meta.per_object) > MAX_INNER:
            raise InvalidArgumentError(
                f"a shard has {math.prod(meta.per_object)} inner chunks; the limit is {MAX_INNER}"
            )
    else:
        meta.pipeline = parse_pipeline(flat)
    if meta.pipeline is None:
        _check_codecs(flat, where, url, trust)
        meta.inner, meta.sharded = meta.chunks, False


def _check_codecs(codecs: Sequence[Mapping[str, Any]], where: str, url: str, trust: bool, depth: int = 0) -> None:
    for codec in codecs:
        name = codec.get("name") if isinstance(codec, dict) else codec
        if depth > 4 or not isinstance(name, str) or (name not in SAFE_CODECS and not trust):
            raise UnsupportedError(
                f"{url}: {where} is encoded with {name!r:.100}, which is not a codec that is known to be safe",
                url=url,
                hint="if you trust the store, open it with trust='zarr'",
            )
        if name == "sharding_indexed":
            settings = configuration(codec)
            _check_codecs(list(settings.get("codecs", [])), where, url, trust, depth + 1)
            _check_codecs(list(settings.get("index_codecs", [])), where, url, trust, depth + 1)


def _ints(value: Any, least: int) -> tuple[int, ...]:
    sound = isinstance(value, list)
    for n in value if sound else ():
        sound = sound and type(n) is int and least <= n < 2**60
    if not sound:
        raise InvalidArgumentError(f"{str(value)[:60]} is not a list of integers >= {least}")
    return tuple(value)


__all__ = ["ArrayMeta", "ChunkError", "fill_of", "parse_array"]
