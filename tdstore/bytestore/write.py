"""The write buffer of a byte store, and the packing of its bytes into objects."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from torch import Tensor

from tdstore.bytestore.manifest import SUMS_BLOCK
from tdstore.bytestore.table import (
    NOTHING,
    Bytes,
    Extents,
    Leaf,
    Parts,
    StoredObject,
    Table,
    coalesce,
    locate,
    overlay,
)
from tdstore.dtypes import to_numpy
from tdstore.index.ranges import Ints, byte_ranges
from tdstore.storekit.checksums import crcs_of
from tdstore.types import Path, StoreIndex

ALIGN = 64
MIN_OBJECT = 8 << 20
"""Objects are not made smaller than this to put more of them at once."""
_OVERHEAD = 512
"""Bytes of memory that a buffered write takes beside its value."""


def flat_bytes(value: Tensor) -> Bytes:
    """Return the bytes of a tensor in C order, without a copy where it is contiguous."""
    return np.ascontiguousarray(to_numpy(value)).reshape(-1).view(np.uint8)


class Buffer:
    """Written bytes that are not on the storage yet, as pieces with negative numbers."""

    def __init__(self) -> None:
        self.pieces: dict[int, Bytes] = {}
        self.nbytes = 0
        self._last = 0

    def add(self, data: Bytes) -> int:
        """Add bytes, which must not change any more; returns the number of the piece."""
        self._last -= 1
        self.pieces[self._last] = data
        self.nbytes += len(data) + _OVERHEAD
        return self._last

    def clear(self) -> None:
        """Drop all bytes: they are on the storage."""
        self.pieces.clear()
        self.nbytes = 0


def placed(spec_shape: Sequence[int], itemsize: int, index: StoreIndex, value: Tensor) -> tuple[Ints, Ints, Bytes]:
    """Return sorted disjoint byte ranges of the leaf, where each begins in the value, and the bytes of the value.

    No row is named twice.
    """
    ranges = byte_ranges(spec_shape, itemsize, index)
    sizes = ranges[:, 1] - ranges[:, 0]
    source = np.cumsum(sizes) - sizes
    if len(ranges) > 1 and not bool((ranges[1:, 0] > ranges[:-1, 0]).all()):
        order = np.argsort(ranges[:, 0], kind="stable")
        ranges, source = ranges[order], source[order]
    return ranges, source, flat_bytes(value)


def portions(ranges: Ints, source: Ints, limit: int, grain: int) -> Iterator[tuple[Ints, Ints]]:
    """Cut the ranges of a large value into lots of about `limit` bytes."""
    sizes = ranges[:, 1] - ranges[:, 0]
    if int(sizes.sum()) <= limit:
        yield ranges, source
        return
    step = max(limit // grain, 1) * grain
    cut, begins = [], []
    for (start, stop), origin in zip(ranges.tolist(), source.tolist(), strict=True):
        for a in range(start, stop, step):
            cut.append((a, min(a + step, stop)))
            begins.append(origin + a - start)
    ranges, source = np.array(cut, np.int64), np.array(begins, np.int64)
    lot = (np.cumsum(ranges[:, 1] - ranges[:, 0]) - 1) // limit
    edges = np.flatnonzero(np.diff(lot)) + 1
    yield from zip(np.split(ranges, edges), np.split(source, edges), strict=True)


def store_in_memory(
    leaf: Leaf, ranges: Ints, source: Ints, data: Bytes, buffer: Buffer, *, borrow: bool = False
) -> Leaf:
    """Buffer sorted disjoint ranges of a value; returns the leaf that refers to them.

    Args:
        leaf: the leaf, as it is.
        ranges: of its bytes.
        source: where each range begins in the value.
        data: the bytes of the value.
        buffer: takes the bytes.
        borrow: keep a view of the value, where it is one range: the buffer is put before the value may change.
    """
    old = leaf.extents
    beyond = not len(old.stop) or ranges[0, 0] >= old.stop[-1]  # as rows that are appended are
    parts = Parts(*NOTHING) if beyond else locate(old, ranges)
    sizes = ranges[:, 1] - ranges[:, 0]
    view = memoryview(np.ascontiguousarray(data))  # type: ignore[arg-type]
    if len(parts.query) and bool((old.piece[parts.extent] < 0).all()):
        lengths = parts.stop - parts.start
        if int(lengths.sum()) == int(sizes.sum()):
            # All of it is in memory already: write over it.
            to = old.offset[parts.extent] + parts.start - old.start[parts.extent]
            begin = source[parts.query] + parts.start - ranges[parts.query, 0]
            for piece, a, n, b in zip(
                *(v.tolist() for v in (old.piece[parts.extent], to, lengths, begin)), strict=True
            ):
                memoryview(buffer.pieces[piece])[a : a + n] = view[b : b + n]  # type: ignore[arg-type]
            return leaf
    begins = np.cumsum(sizes) - sizes
    if len(ranges) == 1:
        copied = data[int(source[0]) : int(source[0] + sizes[0])]
        copied = copied if borrow else np.array(copied)
    else:
        copied = np.empty(int(sizes.sum()), np.uint8)
        out = memoryview(copied)  # type: ignore[arg-type]
        for a, n, b in zip(source.tolist(), sizes.tolist(), begins.tolist(), strict=True):
            out[b : b + n] = view[a : a + n]
    piece = buffer.add(copied)
    new = Extents(ranges[:, 0], ranges[:, 1], np.full(len(ranges), piece), begins)
    return Leaf(leaf.spec, overlay(old, coalesce(new)))


# -- packing -----------------------------------------------------------------------------------
class Draft(msgspec.Struct):
    """An object under construction."""

    name: str
    chunks: list[Bytes] = msgspec.field(default_factory=list)
    size: int = 0
    sums: list[int] = msgspec.field(default_factory=list)

    def add(self, data: Bytes, grain: int) -> tuple[int, int]:
        """Append the bytes of a piece; returns its offset and its first checksum."""
        self._pad(ALIGN)
        place = self.size, len(self.sums)
        self.chunks.append(data)
        self.size += len(data)
        self.sums += crcs_of(data, grain)
        return place

    def _pad(self, align: int) -> None:
        if lacking := -self.size % align:
            self.chunks.append(np.zeros(lacking, np.uint8))
            self.size += lacking

    def finish(self) -> tuple[StoredObject, list[memoryview]]:
        """Return the object for the table, and its bytes in parts."""
        self._pad(4)
        sums = np.array(self.sums, "<u4")
        blocks = crcs_of(sums.view(np.uint8), SUMS_BLOCK)
        parts = [chunk.data for chunk in self.chunks if len(chunk)] + ([sums.view(np.uint8).data] if len(sums) else [])
        return StoredObject.known(self.name, self.size + sums.nbytes, sums, np.array(blocks, np.uint32)), parts


DATA = "data"
"""The folder of the objects."""


class Names:
    """Unique names for the objects of one writer."""

    def __init__(self) -> None:
        self._prefix = uuid.uuid4().hex
        self._count = 0

    def fresh(self) -> str:
        """Return an unused name."""
        self._count += 1
        return f"{DATA}/{self._prefix}-{self._count}.bin"


class Packed(msgspec.Struct):
    """Objects to put, and the resulting table entries."""

    objects: list[tuple[StoredObject, list[memoryview]]]
    pieces: list[tuple[int, int, int, int, int]]
    leaves: dict[Path, Leaf]

    def install(self, table: Table) -> None:
        """Enter the objects into the table, once they are on the storage."""
        table.objects += [o for o, _ in self.objects]
        table.pieces.extend(self.pieces)
        table.leaves.update(self.leaves)


def pack(table: Table, memory: Mapping[int, Bytes], names: Names, limit: int, lanes: int) -> Packed:
    """Pack the buffered bytes of all leaves into objects of at most `limit` bytes (or one grain).

    Args:
        table: with the leaves.
        memory: the buffered pieces.
        names: gives each object its name.
        limit: bytes of an object.
        lanes: into how many objects to split them, if these are large enough.
    """
    waiting = {path: leaf for path, leaf in table.leaves.items() if bool((leaf.extents.piece < 0).any())}
    total = sum(int((e.stop - e.start)[e.piece < 0].sum()) for e in (leaf.extents for leaf in waiting.values()))
    target = min(max(-(-total // lanes), MIN_OBJECT), limit)
    packer = _Packer(table, memory, names, target)
    for path, leaf in waiting.items():
        packer.leaf(path, leaf)
    return packer.finish()


class _Stream:
    """The buffered bytes of a leaf, strung together."""

    def __init__(self, here: Extents, memory: Mapping[int, Bytes]) -> None:
        ends = np.cumsum(here.stop - here.start)
        self.nbytes = int(ends[-1])
        self._here, self._memory = here, memory
        self._extents = Extents(ends - (here.stop - here.start), ends, here.piece, here.offset)

    def read(self, start: int, stop: int) -> Bytes:
        """Return a range of the bytes; without a copy, if they are of one piece."""
        extents, here = self._extents, self._here
        if len(here.start) == 1:
            offset = int(here.offset[0])
            return self._memory[int(here.piece[0])][offset + start : offset + stop]
        parts = locate(extents, np.array([[start, stop]]))
        begin = extents.offset[parts.extent] + parts.start - extents.start[parts.extent]
        columns = (extents.piece[parts.extent], begin, parts.stop - parts.start)
        chunks = [self._memory[p][a : a + n] for p, a, n in zip(*(v.tolist() for v in columns), strict=True)]
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    def moved(self, cuts: Ints, pieces: Ints) -> Extents:
        """Return the extents of the leaf once each range `cuts[i]` of the bytes is the piece `pieces[i]`."""
        here = self._here
        if len(here.start) == 1:
            return Extents(here.start[0] + cuts[:, 0], here.start[0] + cuts[:, 1], pieces, np.zeros_like(pieces))
        parts = locate(self._extents, cuts)
        start = here.start[parts.extent] + parts.start - self._extents.start[parts.extent]
        offset = parts.start - cuts[parts.query, 0]
        return coalesce(Extents(start, start + parts.stop - parts.start, pieces[parts.query], offset))


class _Packer:
    """The state of `pack`: the draft in progress and the finished objects."""

    def __init__(self, table: Table, memory: Mapping[int, Bytes], names: Names, target: int) -> None:
        self.memory = memory
        self.names = names
        self.target = target
        self.next_object = len(table.objects)
        self.next_piece = len(table.pieces.rows)
        self.draft: Draft | None = None
        self.packed = Packed([], [], {})

    def leaf(self, path: Path, leaf: Leaf) -> None:
        """Cut the buffered bytes of a leaf, strung together, into pieces, one per object."""
        extents = leaf.extents
        here = extents.take(extents.piece < 0)
        stream = _Stream(here, self.memory)
        grain = leaf.grain
        cuts = []
        at, end = 0, stream.nbytes
        pieces = []
        while at < end:
            size = self._room(end - at, grain)
            assert self.draft is not None
            begin, first = self.draft.add(stream.read(at, at + size), grain)
            pieces.append(self.next_piece)
            self.packed.pieces.append((self.next_object, begin, size, grain, first))
            self.next_piece += 1
            cuts.append((at, at + size))
            at += size
        new = stream.moved(np.array(cuts, np.int64), np.array(pieces, np.int64))
        stays = extents.piece >= 0
        if stays.any():
            new = overlay(extents.take(stays), new)
        self.packed.leaves[path] = Leaf(leaf.spec, new)

    def _room(self, wanted: int, grain: int) -> int:
        """Return how many bytes of a piece fit into the present object; begins a new object when it is full."""
        if self.draft is not None:
            left = self.target - self.draft.size - ALIGN
            if wanted <= left:
                return wanted
            # A piece that fits into one object is not spread over two.
            if wanted > self.target // 4 and left >= max(grain, self.target // 4):
                return left // grain * grain
            self._close()
        self.draft = Draft(self.names.fresh())
        return min(wanted, max(self.target // grain, 1) * grain)

    def _close(self) -> None:
        if self.draft is not None:
            self.packed.objects.append(self.draft.finish())
            self.next_object += 1
            self.draft = None

    def finish(self) -> Packed:
        """Finish the last object and return the result."""
        self._close()
        return self.packed
