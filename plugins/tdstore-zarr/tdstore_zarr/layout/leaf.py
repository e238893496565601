"""One array of a store: its metadata, and its written objects (chunks or shards)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import floordiv
from typing import NamedTuple

import numpy as np

from tdstore.errors import InvalidArgumentError
from tdstore.types import LeafSpec, Path
from tdstore_zarr.codec.codecs import Pipeline
from tdstore_zarr.codec.metadata import RATIO, ArrayMeta

UNKNOWN = -1
TAIL = 4
"""The checksum before a shard's index covers all bytes before it: reading the index also identifies the shard."""
_UNIT = 4096


seal: Callable[..., int] = zlib.crc32
"""Compute the checksum of an object as a whole.

Not crc32c: chunks end in their own crc32c, and the crc32c of such a string of bytes is always the same.
"""


class Stored(NamedTuple):
    """One object that was written."""

    size: int
    crc: int
    """`seal` of a chunk, or of a shard up to its tail; -1 when another program wrote it."""


@dataclass(eq=False, slots=True)
class Leaf:
    """One array that is a leaf."""

    path: Path
    node: str
    meta: ArrayMeta
    objects: dict[int, Stored] = field(default_factory=dict)
    """By number. What is not here was never written and reads as the fill value."""
    complete: bool = True
    """Whether `objects` is complete. False if it is unknown: an object is then requested by name."""
    spec: LeafSpec = None  # type: ignore[assignment]
    """Its spec; like `cut`, derived from `meta`."""
    cut: Cut = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.spec is None:
            self.renew()

    def renew(self) -> None:
        """Update values derived from `meta`."""
        self.spec = self.meta.spec()
        self.cut = Cut.of(self.meta)

    def key(self, number: int) -> str:
        """Return the key of one object."""
        name = self.meta.chunk_key(number, self.cut.grid)
        return f"{self.node}/{name}" if self.node else name

    @property
    def stored(self) -> int:
        """Return the bytes that the leaf takes on the storage."""
        return sum(o.size for o in self.objects.values())

    @property
    def believed(self) -> int:
        """Return the bytes that its objects may plausibly hold: whole chunks, unless no codec compresses so well."""
        whole = math.prod(self.meta.chunks) * self.meta.itemsize
        return sum(min(whole, RATIO * o.size) for o in self.objects.values())


@dataclass(frozen=True, slots=True)
class Cut:
    """The pieces in which objects are read: inner chunks of a shard, a whole chunk, or rows of a raw chunk."""

    inner: tuple[int, ...]
    per_object: tuple[int, ...]
    grid: tuple[int, ...]
    nbytes: int
    """Of one piece, decoded."""
    raw: bool
    """Pieces of plain bytes at known places: no index is read, and nothing but the request."""
    pipeline: Pipeline | None

    @staticmethod
    def of(meta: ArrayMeta) -> Cut:
        """Return the cut of an array."""
        inner, pipeline = meta.inner, meta.pipeline
        raw = pipeline is not None and not meta.sharded and pipeline.compressor is None and not pipeline.crc
        if raw and inner and meta.inner_bytes > 2 * _UNIT:
            row = max(1, meta.inner_bytes // inner[0])
            rows = next(n for n in range(max(1, min(inner[0], _UNIT // row)), 0, -1) if inner[0] % n == 0)
            inner = (rows, *inner[1:])
        else:
            raw = False
        per_object = tuple(map(floordiv, meta.chunks, inner))
        return Cut(inner, per_object, meta.grid, math.prod(inner) * meta.dtype.itemsize, raw, pipeline)


def parse_index(data: memoryview | bytes, leaf: Leaf, size: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Parse the index of a shard (checked already): `[n, 2]` start and stop of each inner chunk, -1 where it is absent.

    Raises:
        InvalidArgumentError: the index points outside of the object.
    """
    pairs = np.frombuffer(data, "<u8").reshape(-1, 2)
    absent = (pairs == np.uint64(2**64 - 1)).all(1)
    if (pairs[~absent] >= np.uint64(2**62)).any():
        raise InvalidArgumentError("its index points outside of it")
    found = pairs.astype(np.int64)
    found[:, 1] += found[:, 0]
    found[absent] = -1
    if len(found) and found[:, 1].max(initial=-1) > size:
        raise InvalidArgumentError("its index points outside of it")
    return found
