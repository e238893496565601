"""The tables of a byte store: the pieces of objects that a leaf is made of. Pure: no I/O."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from tdstore.bytestore.manifest import (
    MAX_GRAIN,
    SUMS_BLOCK,
    Document,
    LeafRecord,
    ObjectRecord,
    sums_crc,
)
from tdstore.dtypes import NAME_TO_DTYPE, dtype_name, to_numpy
from tdstore.errors import CorruptStoreError
from tdstore.header import Header, without_collection
from tdstore.index.ranges import Ints, cover, distinct
from tdstore.storekit.budget import check_declared
from tdstore.types import LeafSpec, Path, path_text
from tdstore.values import decode_value, encode_value

SMALL_GRAIN = 4096
PER_BLOCK = SUMS_BLOCK // 4
UNCHECKED = -1
"""In place of the first checksum of a piece: it has none."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
OBJECT_BITS = 42
"""Bits for a place in an object, in a number that also holds the object's: objects have less than 4 TiB."""


def place(number: Ints) -> Ints:
    """Return where an object begins in the common address space, in which objects are far apart."""
    return number << OBJECT_BITS


# -- extents ---------------------------------------------------------------------------------
class Extents(NamedTuple):
    """The bytes of a leaf that were written: sorted, disjoint, each from one piece. The rest is fill value.

    A negative piece is in memory, not on the storage yet.
    """

    start: Ints
    stop: Ints
    piece: Ints
    offset: Ints

    def take(self, which: Any) -> Extents:
        """Return some of them, by mask or position."""
        return Extents(self.start[which], self.stop[which], self.piece[which], self.offset[which])


NOTHING = Extents(*(np.empty(0, np.int64) for _ in range(4)))


class Parts(NamedTuple):
    """The parts of ranges of a leaf: part `i` is bytes `[start, stop)` of the leaf, of range `query`, in `extent`."""

    query: Ints
    extent: Ints
    start: Ints
    stop: Ints


def locate(extents: Extents, ranges: Ints) -> Parts:
    """Cut `[n, 2]` ranges of a leaf, in any order, by its extents; bytes outside of every extent are left out.

    Example:
        >>> e = Extents(np.array([0, 10]), np.array([10, 30]), np.array([4, 5]), np.array([0, 0]))
        >>> locate(e, np.array([[25, 40], [8, 12]]))[2:]
        (array([25,  8, 10]), array([30, 10, 12]))
    """
    if not len(extents.start):
        return Parts(*extents)
    low = np.searchsorted(extents.stop, ranges[:, 0], "right")
    high = np.searchsorted(extents.start, ranges[:, 1], "left")
    count = np.maximum(high - low, 0)
    query = np.repeat(np.arange(len(ranges)), count)
    extent = spread(low, count)
    start = np.maximum(extents.start[extent], ranges[query, 0])
    stop = np.minimum(extents.stop[extent], ranges[query, 1])
    return Parts(query, extent, start, stop)


def spread(first: Ints, count: Ints) -> Ints:
    """Concatenate the runs `first[i], first[i] + 1, ...` of `count[i]` numbers."""
    total = int(count.sum())
    found: Ints = np.arange(total) + np.repeat(first - (np.cumsum(count) - count), count)
    return found


def overlay(old: Extents, new: Extents) -> Extents:
    """Return `old` with `new` on top."""
    if not len(old.start):
        return coalesce(new)
    if not len(new.start):
        return old
    if new.start[0] >= old.stop[-1]:  # rows at the end: only the last extent may get longer
        last = len(old.start) - 1
        tail = coalesce(joined(old.take(slice(last, None)), new))
        return joined(old.take(slice(last)), tail)
    # A few rows of many: only their neighbourhood is worked on.
    low = max(int(np.searchsorted(old.stop, new.start[0], "right")) - 1, 0)
    high = int(np.searchsorted(old.start, new.stop[-1], "left")) + 1
    near = old.take(slice(low, high))
    if 2 * len(near.start) < len(old.start):
        return joined(old.take(slice(low)), overlay(near, new), old.take(slice(high, None)))
    edges = np.empty((len(new.start) + 1, 2), np.int64)
    edges[0, 0], edges[-1, 1] = 0, np.iinfo(np.int64).max
    edges[1:, 0], edges[:-1, 1] = new.stop, new.start
    merged = joined(select(old, edges), new)
    return coalesce(merged.take(np.argsort(merged.start, kind="stable")))


def joined(*parts: Extents) -> Extents:
    """Return the extents of all parts, one after another."""
    return Extents(*map(np.concatenate, zip(*parts, strict=True)))


def select(extents: Extents, ranges: Ints) -> Extents:
    """Return the part of the extents inside sorted disjoint ranges."""
    parts = locate(extents, ranges)
    full = parts.stop > parts.start
    at, start, stop = parts.extent[full], parts.start[full], parts.stop[full]
    return Extents(start, stop, extents.piece[at], extents.offset[at] + start - extents.start[at])


def coalesce(extents: Extents) -> Extents:
    """Join neighbours that are one run of bytes of one piece."""
    start, stop, piece, offset = extents
    if len(start) < 2:
        return extents
    separate = (start[1:] != stop[:-1]) | (piece[1:] != piece[:-1]) | (offset[1:] != offset[:-1] + (stop - start)[:-1])
    if bool(separate.all()):
        return extents
    first = np.concatenate([[0], np.flatnonzero(separate) + 1])
    last = np.concatenate([first[1:], [len(start)]]) - 1
    return Extents(start[first], stop[last], piece[first], offset[first])


# -- leaves and objects ----------------------------------------------------------------------
class Leaf(msgspec.Struct, frozen=True):
    """One leaf: immutable, replaced as a whole."""

    spec: LeafSpec
    extents: Extents = NOTHING

    @property
    def row(self) -> int:
        """Return the bytes of one row (of the whole leaf when it has no dimensions)."""
        return self.spec.dtype.itemsize * math.prod(self.spec.shape[1:])

    @property
    def grain(self) -> int:
        """Return how many bytes of new pieces share a checksum: whole rows, of 4 KiB to 4 MiB."""
        row = self.row or 1
        return min(row, MAX_GRAIN) if row >= SMALL_GRAIN else SMALL_GRAIN // row * row

    def filled(self, piece: int) -> Leaf:
        """Return the leaf with all of its bytes from one piece."""
        return Leaf(self.spec, Extents(*(np.array([n], np.int64) for n in (0, self.spec.nbytes, piece, 0))))

    def resized(self, length: int) -> Leaf:
        """Return the leaf with another first dimension."""
        spec = self.spec.replace(shape=(length, *self.spec.shape[1:]))
        longer = length >= self.spec.shape[0]
        return Leaf(spec, self.extents if longer else select(self.extents, np.array([[0, spec.nbytes]])))


def fill_bytes(spec: LeafSpec) -> Bytes | None:
    """Return one element of the fill value as bytes; None for zeros.

    Raises:
        TypeError, ValueError, RuntimeError, OverflowError: the dtype cannot hold it.
    """
    if not spec.fill_value and repr(spec.fill_value) in ("0", "0.0", "False"):
        return None
    raw = to_numpy(torch.full((1,), spec.fill_value, dtype=spec.dtype, device="cpu")).view(np.uint8)
    return raw if raw.any() else None


class StoredObject:
    """A data object and its known checksums, which are loaded by blocks, when needed."""

    __slots__ = ("_record", "block_crc", "count", "name", "size", "sums")

    sums: dict[int, np.ndarray[Any, np.dtype[np.uint32]]]
    """The blocks that are loaded, by number: 1,024 checksums each."""

    def __init__(self, name: str, size: int, *, count: int = 0, block_crc: Any = None) -> None:
        self.name = name
        self.size = size
        self.count = count
        self.block_crc = block_crc
        self.sums = {}
        self._record: ObjectRecord | None = None

    @classmethod
    def known(cls, name: str, size: int, sums: Any, block_crc: Any = None) -> StoredObject:
        """Build an object whose checksums are all known."""
        made = cls(name, size, count=len(sums), block_crc=block_crc)
        made.sums = {at // PER_BLOCK: sums[at : at + PER_BLOCK] for at in range(0, len(sums), PER_BLOCK)}
        return made

    @classmethod
    def from_record(cls, record: ObjectRecord) -> StoredObject:
        """Build an object from its record in the manifest, without checksums."""
        crc = np.frombuffer(base64.b64decode(record.crc), "<u4")
        return cls(record.name, record.size, count=record.sums, block_crc=crc)

    def record(self) -> ObjectRecord:
        """Return the record for the manifest."""
        if self._record is None:
            self._record = ObjectRecord(self.name, self.size, self.count, sums_crc(self.block_crc))
        return self._record

    @property
    def blocks(self) -> int:
        """Return the number of blocks of checksums."""
        return -(-self.count // PER_BLOCK)

    def sums_range(self, block: int) -> tuple[int, int]:
        """Return the byte range of a block of checksums in the object."""
        start = self.size - 4 * self.count + block * SUMS_BLOCK
        return start, min(start + SUMS_BLOCK, self.size)


class Pieces:
    """A growing table of pieces: object, offset, bytes, grain, first checksum."""

    def __init__(self, rows: Ints | None = None) -> None:
        self._rows = np.empty((0, 5), np.int64) if rows is None else rows
        self._count = len(self._rows)

    @property
    def rows(self) -> Ints:
        """Return the table, `[n, 5]`."""
        return self._rows[: self._count]

    def extend(self, rows: list[tuple[int, int, int, int, int]]) -> None:
        """Add pieces at the end."""
        need = self._count + len(rows)
        if need > len(self._rows):
            grown = np.empty((max(need, 2 * len(self._rows), 64), 5), np.int64)
            grown[: self._count] = self.rows
            self._rows = grown
        if rows:
            self._rows[self._count : need] = rows
        self._count = need


class Table:
    """Objects, pieces and leaves of one generation, and of later additions."""

    def __init__(self, objects: list[StoredObject], pieces: Pieces, leaves: dict[Path, Leaf]) -> None:
        self.objects = objects
        self.pieces = pieces
        self.leaves = leaves

    @classmethod
    def empty(cls) -> Table:
        """Build the table of a new store."""
        return cls([], Pieces(), {})

    @classmethod
    def from_document(cls, document: Document) -> Table:
        """Build the table of a checked manifest."""
        leaves = {}
        with without_collection():
            for record, extents in zip(document.leaves, _extents_of(document), strict=True):
                fill = decode_value(record.fill) if record.fill else 0
                spec = LeafSpec(record.shape, NAME_TO_DTYPE[record.dtype], fill_value=fill)
                leaves[record.path] = Leaf(spec, extents)
        return cls([StoredObject.from_record(o) for o in document.objects], Pieces(document.pieces), leaves)

    def used_pieces(self) -> Ints:
        """Return the positions of the stored pieces that leaves are made of, ascending."""
        columns = [leaf.extents.piece for leaf in self.leaves.values() if len(leaf.extents.piece)]
        used = distinct(np.concatenate(columns)) if columns else np.empty(0, np.int64)
        return used[used >= 0]

    def compacted(self, document: Document, which: list[int]) -> Table:
        """Return the same leaves over the objects and pieces of a manifest that `to_document` made of this table."""
        leaves = {
            path: Leaf(leaf.spec, extents)
            for (path, leaf), extents in zip(self.leaves.items(), _extents_of(document), strict=True)
        }
        return Table([self.objects[at] for at in which], Pieces(document.pieces), leaves)


def _extents_of(document: Document) -> Iterator[Extents]:
    """Yield the extents of each leaf of a manifest, in its order."""
    start, nbytes, piece, offset = document.extents.T.reshape(4, -1)
    columns = Extents(start, start + nbytes, piece, offset)
    at = 0
    for record in document.leaves:
        end = at + record.extents
        yield columns.take(slice(at, end)) if record.extents else NOTHING
        at = end


def to_document(table: Table, generation: str, header: Header) -> tuple[Document, list[int]]:
    """Build the manifest of a table without buffered pieces; also returns the positions of its objects in use."""
    used = table.used_pieces()
    rows = table.pieces.rows[used].copy()
    objects, rows[:, 0] = np.unique(rows[:, 0], return_inverse=True)
    rows = rows[order := np.lexsort((rows[:, 1], rows[:, 0]))]
    place = np.empty(len(used), np.int64)
    place[order] = np.arange(len(used))
    leaves, tables = [], [np.empty((0, 4), np.int64)]
    for path, leaf in table.leaves.items():
        start, stop, piece, offset = leaf.extents
        if len(start):
            tables.append(np.stack([start, stop - start, place[np.searchsorted(used, piece)], offset], 1))
        spec = leaf.spec
        fill = 0 if repr(spec.fill_value) in ("0", "0.0", "False") else encode_value(_plain(spec.fill_value))
        leaves.append(LeafRecord(path, dtype_name(spec.dtype), spec.shape, len(start), fill))
    which = objects.tolist()
    records = [table.objects[at].record() for at in which]
    return Document(generation, header, records, rows, leaves, np.concatenate(tables)), which


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, (torch.Tensor, np.generic)) else value


def check_table(table: Table, max_bytes: int | None, url: str) -> None:
    """Refuse fill values that their dtype cannot hold, and more data than the caller allows.

    Raises:
        CorruptStoreError: names the location and the leaf.
    """
    for path, leaf in table.leaves.items():
        try:
            if leaf.spec.fill_value:
                fill_bytes(leaf.spec)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise CorruptStoreError(f"{url}: {path_text(path)} cannot be filled: {error}", url=url) from error
    if max_bytes is not None:
        check_declared(sum(leaf.spec.nbytes for leaf in table.leaves.values()), max_bytes, url)


def stored_bytes(leaves: Iterable[Leaf], pieces: Pieces) -> int:
    """Count the distinct bytes that leaves are made of: shared bytes count once."""
    ranges = [np.empty((0, 2), np.int64)]
    total = 0
    for leaf in leaves:
        start, stop, piece, offset = leaf.extents
        is_stored = piece >= 0
        total += int((stop - start)[~is_stored].sum())
        rows = pieces.rows[piece[is_stored]]
        begin = place(rows[:, 0]) + rows[:, 1] + offset[is_stored]
        ranges.append(np.stack([begin, begin + (stop - start)[is_stored]], 1))
    different = cover(np.concatenate(ranges), 0)
    return total + int((different[:, 1] - different[:, 0]).sum())
