"""The write buffer of a byte store, and the packing of its bytes into objects."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tdstore.bytestore.table import (
    PER_BLOCK,
    Bytes,
    Extents,
    Leaf,
    StoredObject,
    Table,
    coalesce,
    locate,
    overlay,
)
from tdstore.dtypes import to_numpy
from tdstore.index.ranges import Ints, byte_ranges
from tdstore.storekit.checksums import crc32c
from tdstore.types import Path, StoreIndex

ALIGN = 64
MIN_OBJECT = 8 << 20
"""Objects are not made smaller than this to put more of them at once."""
LANES = 8
"""Into how many objects a full buffer is split, so that they travel side by side."""
_OVERHEAD = 512
"""What a buffered write costs beside its bytes."""


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


def store_in_memory(leaf: Leaf, ranges: Ints, source: Ints, data: Bytes, buffer: Buffer) -> Leaf:
    """Buffer sorted disjoint ranges of a value; returns the leaf that refers to them."""
    old = leaf.extents
    parts = locate(old, ranges)
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
        copied = np.array(data[int(source[0]) : int(source[0] + sizes[0])])
    else:
        copied = np.empty(int(sizes.sum()), np.uint8)
        out = memoryview(copied)  # type: ignore[arg-type]
        for a, n, b in zip(source.tolist(), sizes.tolist(), begins.tolist(), strict=True):
            out[b : b + n] = view[a : a + n]
    piece = buffer.add(copied)
    new = Extents(ranges[:, 0], ranges[:, 1], np.full(len(ranges), piece), begins)
    return Leaf(leaf.spec, overlay(old, coalesce(new)))


# -- packing -----------------------------------------------------------------------------------
@dataclass(slots=True)
class Draft:
    """An object under construction."""

    name: str
    chunks: list[Bytes] = field(default_factory=list)
    size: int = 0
    sums: list[int] = field(default_factory=list)

    def add(self, data: Bytes, grain: int) -> tuple[int, int]:
        """Append the bytes of a piece; returns its offset and its first checksum."""
        self._pad(ALIGN)
        place = self.size, len(self.sums)
        self.chunks.append(data)
        self.size += len(data)
        self.sums += [crc32c(data[at : at + grain]) for at in range(0, len(data), grain)]
        return place

    def _pad(self, align: int) -> None:
        if lacking := -self.size % align:
            self.chunks.append(np.zeros(lacking, np.uint8))
            self.size += lacking

    def finish(self) -> tuple[StoredObject, bytes]:
        """Return the object for the table, and its bytes."""
        self._pad(4)
        sums = np.array(self.sums, "<u4")
        blocks = [crc32c(sums[at : at + PER_BLOCK].tobytes()) for at in range(0, len(sums), PER_BLOCK)]
        data = b"".join([*(chunk.data for chunk in self.chunks), sums.tobytes()])
        return StoredObject.known(self.name, len(data), sums, np.array(blocks, np.uint32)), data


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


@dataclass(slots=True)
class Packed:
    """Objects to put, and the resulting table entries."""

    objects: list[tuple[StoredObject, bytes]]
    pieces: list[tuple[int, int, int, int, int]]
    leaves: dict[Path, Leaf]

    def install(self, table: Table) -> None:
        """Enter the objects into the table, once they are on the storage."""
        table.objects += [o for o, _ in self.objects]
        table.pieces.extend(self.pieces)
        table.leaves.update(self.leaves)


def pack(table: Table, memory: Mapping[int, Bytes], names: Names, limit: int) -> Packed:
    """Pack the buffered bytes of all leaves into objects of at most `limit` bytes (or one grain)."""
    waiting = {path: leaf for path, leaf in table.leaves.items() if bool((leaf.extents.piece < 0).any())}
    total = sum(int((e.stop - e.start)[e.piece < 0].sum()) for e in (leaf.extents for leaf in waiting.values()))
    target = min(max(-(-total // LANES), MIN_OBJECT), limit)
    packer = _Packer(table, memory, names, target)
    for path, leaf in waiting.items():
        packer.leaf(path, leaf)
    return packer.finish()


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
        ends = np.cumsum(here.stop - here.start)
        stream = Extents(ends - (here.stop - here.start), ends, here.piece, here.offset)
        grain = leaf.grain
        cuts = []
        at, end = 0, int(ends[-1])
        pieces = []
        while at < end:
            size = self._room(end - at, grain)
            parts = locate(stream, np.array([[at, at + size]]))
            offset = stream.offset[parts.extent] + parts.start - stream.start[parts.extent]
            chunks = [
                self.memory[p][a : a + n]
                for p, a, n in zip(
                    *(v.tolist() for v in (stream.piece[parts.extent], offset, parts.stop - parts.start)), strict=True
                )
            ]
            assert self.draft is not None
            data = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
            begin, first = self.draft.add(data, grain)
            pieces.append(self.next_piece)
            self.packed.pieces.append((self.next_object, begin, size, grain, first))
            self.next_piece += 1
            cuts.append((at, at + size))
            at += size
        edges = np.array(cuts, np.int64)
        parts = locate(stream, edges)
        start = here.start[parts.extent] + parts.start - stream.start[parts.extent]
        new = Extents(
            start,
            start + parts.stop - parts.start,
            np.array(pieces, np.int64)[parts.query],
            parts.start - edges[parts.query, 0],
        )
        self.packed.leaves[path] = Leaf(leaf.spec, overlay(extents.take(extents.piece >= 0), coalesce(new)))

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
