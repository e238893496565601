"""Arrays of strings of other programs: of variable length (zarr's `string`), or all of one length."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from tdstore.engine import Engine
from tdstore.errors import InvalidArgumentError, StoreError
from tdstore.index.ranges import Range
from tdstore.storekit.foreign_strings import MOST, Strings, blocks, entry, refused
from tdstore.types import Path, path_text
from tdstore_zarr.codec.codecs import Pipeline, configuration, zstd_size
from tdstore_zarr.codec.metadata import FREE, RATIO, parse_array
from tdstore_zarr.layout.grid import region
from tdstore_zarr.layout.leaf import Leaf

VARIABLE = "string"
FIXED = {"fixed_length_utf32": 4, "null_terminated_bytes": 1}
"""Types of which every element takes as many bytes, and the bytes of a letter."""
KINDS = frozenset({VARIABLE, *FIXED, "variable_length_bytes", "bytes"})
MOST_REMOTE = 64 << 20
"""Stored bytes that are fetched when a store is opened over a wire."""
_SPAN = 16
_AT_ONCE = 16
"""Chunks that are in memory at once."""
_READ = "read it with zarr; td.exclude(...) has the other keys"


def kind_of(data: Mapping[str, Any]) -> str | None:
    """Return the type of an array that holds strings; None for any other array."""
    kind = data.get("data_type")
    name = kind.get("name") if isinstance(kind, dict) else kind
    return name if isinstance(name, str) and name in KINDS else None


class StringArray:
    """One array of strings."""

    def __init__(self, path: Path, node: str, data: Mapping[str, Any], url: str) -> None:
        self.path = path
        self.url = url
        self.kind = kind_of(data)
        kind = data["data_type"]
        settings = kind.get("configuration", {}) if isinstance(kind, dict) else {}
        self.width: Any = settings.get("length_bytes", 0) if isinstance(settings, dict) else 0
        declared = data.get("codecs")
        declared = declared if isinstance(declared, list) else []
        codecs = [{"name": c} if isinstance(c, str) else c for c in declared if isinstance(c, str | dict)]
        self.first = codecs[0] if codecs else {}
        self.fill = data.get("fill_value")
        # Everything but the elements is as in an array of bytes.
        plain = {**data, "data_type": "uint8", "fill_value": 0, "codecs": [{"name": "bytes"}, *codecs[1:]]}
        self.leaf = Leaf(path, node, parse_array(plain, path_text(path), url))

    def read(self, engine: Engine, *, local: bool, leaves: bool) -> tuple[dict[str, Any], dict[Path, Tensor]]:
        """Return the value record of the array, and its leaves if there are many and `leaves` allows them.

        An unreadable array, or one that declares more than it holds, becomes an entry that raises an error when read.

        Args:
            engine: the engine of the store.
            local: whether the engine reads local files.
            leaves: whether a long array becomes leaves.
        """
        try:
            self._check(local)
            strings, meta = Strings(), self.leaf.meta
            offsets = np.empty((*meta.shape, 2), np.int64)
            offsets[...] = strings.add([self._fill()])[0]
            for number, data in self._objects(engine):
                part = strings.add(self._values(data)).reshape(*meta.chunks, 2)
                target = offsets[region(number, meta.grid, meta.chunks)]
                target[...] = part[tuple(slice(0, n) for n in target.shape[:-1])]
            return entry(self.path, strings, offsets, leaves=leaves)
        except (ValueError, StoreError) as error:
            return refuse(self.path, self.url, error), {}

    def _check(self, local: bool) -> None:
        leaf, meta = self.leaf, self.leaf.meta
        wanted = "vlen-utf8" if self.kind == VARIABLE else "bytes"
        if self.kind not in (VARIABLE, *FIXED) or self.first.get("name") != wanted or meta.pipeline is None:
            raise InvalidArgumentError(f"holds elements of type {self.kind!r} in a form that is not read here")
        if not meta.shape or not leaf.complete:
            raise InvalidArgumentError("of strings has no dimension, or is in a place that cannot be listed")
        stored = leaf.stored
        if not local and stored > MOST_REMOTE:
            raise InvalidArgumentError(
                f"has {stored} bytes of strings, more than {MOST_REMOTE}: copy the store here first"
            )
        sizes = [_SPAN * math.prod(meta.shape), _SPAN * math.prod(meta.chunks)]
        if self.kind != VARIABLE:
            letter = FIXED[self.kind]
            if type(self.width) is not int or self.width < letter or self.width % letter:
                raise InvalidArgumentError(f"has strings of {self.width!r} bytes")
            sizes += [self.width * math.prod(meta.shape), self.width * math.prod(meta.chunks)]
        if max(sizes) > max(FREE, RATIO * stored):
            raise InvalidArgumentError(f"declares {max(sizes)} bytes of strings, of which {stored} are stored")

    def _fill(self) -> bytes:
        if not isinstance(self.fill, str):
            return b""
        return base64.b64decode(self.fill) if self.kind == "null_terminated_bytes" else self.fill.encode()

    def _objects(self, engine: Engine) -> Iterator[tuple[int, memoryview]]:
        numbers = sorted(self.leaf.objects)
        for first, last in blocks(len(numbers), _AT_ONCE):
            asked = [Range(self.leaf.key(n), 0, self.leaf.objects[n].size) for n in numbers[first:last]]
            for number, data in zip(numbers[first:last], engine.get_ranges(asked), strict=True):
                yield number, memoryview(data).cast("B")

    def _values(self, data: memoryview) -> list[bytes]:
        """Return the strings of one chunk."""
        pipeline, count = self.leaf.meta.pipeline, math.prod(self.leaf.meta.chunks)
        assert pipeline is not None
        size = _declared(pipeline, data) if self.kind == VARIABLE else count * self.width
        if size > max(FREE, RATIO * len(data)) or size > MOST:
            raise InvalidArgumentError(f"has a chunk that declares {size} bytes in {len(data)}")
        out = np.empty(size, np.uint8)
        pipeline.decoder(size)(data, out)
        if self.kind == VARIABLE:
            return _variable(out.tobytes(), count)
        if self.kind == "null_terminated_bytes":
            return list(out.view(f"S{self.width}").tolist())
        big = configuration(self.first).get("endian") == "big"
        letters = out.view(">u4" if big else "<u4").astype("=u4").view(f"=U{self.width // 4}")
        return [text.encode() for text in letters.tolist()]


def refuse(path: Path, url: str, error: Exception) -> dict[str, Any]:
    """Return the value record of an array of strings that cannot be read."""
    text = error.message if isinstance(error, StoreError) else str(error)
    return refused(f"{url}: the array {path_text(path)} {text}", _READ)


def _declared(pipeline: Pipeline, data: memoryview) -> int:
    """Return the number of bytes that a chunk declares."""
    body = data[:-4] if pipeline.crc else data
    name = None if pipeline.compressor is None else pipeline.compressor["name"]
    if name is None:
        return len(body)
    if len(body) < 16:
        raise InvalidArgumentError(f"has a chunk of {len(body)} bytes, too few for {name}")
    if name == "blosc":
        return int.from_bytes(body[4:8], "little")
    if name == "gzip":
        return int.from_bytes(body[-4:], "little")
    size = zstd_size(body)
    if size is None:
        raise InvalidArgumentError("has a chunk that does not say how much it holds")
    return size


def _variable(data: bytes, count: int) -> list[bytes]:
    """Decode strings, each after its length, all after their number."""
    if len(data) < 4 + 4 * count or int.from_bytes(data[:4], "little") != count:
        raise InvalidArgumentError(f"has a chunk that does not hold {count} strings")
    found = []
    at, take = 4, struct.Struct("<I").unpack_from
    for _ in range(count):
        end = at + 4 + take(data, at)[0] if at + 4 <= len(data) else len(data) + 1
        if end > len(data):
            raise InvalidArgumentError("has a string that reaches beyond its chunk")
        found.append(data[at + 4 : end])
        at = end
    return found
