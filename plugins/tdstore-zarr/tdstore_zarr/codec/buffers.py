"""The write buffer: rows are gathered into whole chunks and shards before they go to the storage.

An object is written once it is complete, or when the buffer is full, or at the commit. Of an existing
object, untouched inner chunks are copied in their encoded form.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tdstore.errors import CorruptStoreError, StoreNotFoundError
from tdstore.index.ranges import Range
from tdstore.storekit.budget import allocating
from tdstore.storekit.checksums import crc32c
from tdstore.threads import ThreadPool
from tdstore.types import StoreIndex
from tdstore_zarr.codec.codecs import Bytes, ChunkError
from tdstore_zarr.layout.grid import Part, parts, region, strides
from tdstore_zarr.layout.leaf import TAIL, UNKNOWN, Leaf, Stored, seal
from tdstore_zarr.place.redo_log import LoggedEngine
from tdstore_zarr.reading.reader import Array, Index, Pending, Reader, _workers

LIMIT = 64 << 20
"""Bytes that wait to be written, decoded, without `buffer_bytes=`."""
ALONE = 1 << 20
"""Bytes that one thread encodes before starting others pays."""
_ANOTHER = "is not the one that was committed"


class _Cell:
    """One object in the buffer."""

    __slots__ = ("leaf", "loaded", "number", "patched", "per_object", "raw")

    def __init__(self, leaf: Leaf, number: int, url: str) -> None:
        meta = leaf.meta
        self.leaf = leaf
        self.number = number
        with allocating(leaf.path, meta.chunks, meta.dtype, url):
            self.raw = np.empty(meta.chunks, _dtype(leaf))
        self.per_object = meta.per_object
        self.loaded = np.zeros(self.per_object, np.bool_)
        self.patched = False
        """Whether some of it was written in part: more of that is likely to come."""

    def chunk(self, position: int) -> Array:
        """Return the elements of one inner chunk."""
        return self.raw[region(position, self.per_object, self.leaf.meta.inner)]

    @property
    def fresh(self) -> int:
        """Return the bytes of inner chunks that are to be encoded."""
        return int(np.count_nonzero(self.loaded)) * self.leaf.meta.inner_bytes


class Step(NamedTuple):
    """The part of a write for one object."""

    leaf: Leaf
    number: int
    part: Part
    value: Array


Mask = np.ndarray[Any, np.dtype[np.bool_]]
Marks = dict[int, int]
"""Checksums of the first bytes of a shard, by their number."""
_Saved = tuple[Array, Mask]
"""`raw` and `loaded` of a cell."""


class Buffers(Pending):
    """The writes of one store that are not on its storage yet."""

    def __init__(self, engine: LoggedEngine[Any], reader: Reader, limit: int) -> None:
        self.engine = engine
        self.reader = reader
        self.limit = limit
        self._cells: dict[tuple[str, int], _Cell] = {}
        self._bytes = 0
        self._marks: dict[str, tuple[int, Stored, Marks]] = {}
        """Of each leaf, the shard that was put last: the next one most often begins with the same bytes."""
        self.replaced: list[tuple[Leaf, int, Stored | None]] = []
        """Objects that were put since `write` began, and the ones they replaced."""
        self.before: dict[tuple[str, int], tuple[_Cell, _Saved] | None] = {}
        """Since `write` began: what was buffered of the objects that it changed."""

    def __bool__(self) -> bool:
        return bool(self._cells)

    def chunk(self, leaf: Leaf, number: int, position: int) -> Array | None:
        """Return a buffered inner chunk, as `Pending.chunk` does."""
        cell = self._cells.get((leaf.node, number))
        if cell is None or not cell.loaded.reshape(-1)[position]:
            return None
        return cell.chunk(position)

    def steps(self, jobs: Iterable[tuple[Leaf, StoreIndex, Array]]) -> list[Step]:
        """Plan the parts of objects for values (of the leaf's numpy dtype) at indices without repeated rows."""
        return [
            Step(leaf, sum(map(operator.mul, part.place, steps)), part, value)
            for leaf, index, value in jobs
            if value.size
            for steps in (strides(leaf.meta.grid),)
            for part in parts(leaf.meta.shape, leaf.meta.chunks, index)
        ]

    def make_room(self, steps: Iterable[Step]) -> bool:
        """Flush the buffer if these steps do not fit beside it; return whether they fit into memory at all."""
        places = {(s.leaf.node, s.number): math.prod(s.leaf.meta.chunks) * s.leaf.meta.dtype.itemsize for s in steps}
        size = sum(nbytes for place, nbytes in places.items() if place not in self._cells)
        if self._bytes + size > self.limit:
            self.flush()
            size = sum(places.values())
        return size <= self.limit

    def write(self, steps: Sequence[Step], *, fits: bool) -> None:
        """Execute steps. After it, the caller calls `roll_back`, or empties `before` and `replaced`.

        Args:
            steps: the steps.
            fits: the result of `make_room`, which is called first.
        """
        if fits:
            self._write_at_once(steps)
            return
        try:
            self._write_in_lots(steps)
        except BaseException:
            self.clear()  # nothing but this was in memory
            raise

    def _write_at_once(self, steps: Sequence[Step]) -> None:
        before = self.before
        work: list[tuple[_Cell, Step, Any]] = []
        for step in steps:  # reads, which may fail, come before changes
            place = (step.leaf.node, step.number)
            cell = self._cells.get(place)
            if cell is None:
                cell, before[place] = self._new_cell(step), None
            work.append((cell, step, self._prepare(cell, step.part)))
        covered = {id(cell): cell.loaded.copy() for cell, *_ in work}
        done: dict[int, _Cell] = {}
        for cell, step, touched in work:
            covered[id(cell)] |= touched
            if not cell.patched and _is_complete(cell, step.part, covered[id(cell)]):
                done[id(cell)] = cell
        for cell, step, _ in work if done else ():
            place = (step.leaf.node, step.number)
            if place not in before:
                before[place] = cell, (cell.raw.copy(), cell.loaded.copy())
        for cell, step, touched in work:
            cell.raw[step.part.inside] = step.value[step.part.outside]
            cell.loaded |= touched
        self.flush(list(done.values()))

    def _write_in_lots(self, steps: Sequence[Step]) -> None:
        done: list[_Cell] = []
        for step in steps:
            cell = self._cells.get((step.leaf.node, step.number)) or self._new_cell(step)
            cell.loaded |= self._prepare(cell, step.part)
            cell.raw[step.part.inside] = step.value[step.part.outside]
            if not cell.patched and _is_complete(cell, step.part, cell.loaded):
                done.append(cell)
            if self._bytes > self.limit:
                self.flush()
                done = []
        self.flush(done)

    def _new_cell(self, step: Step) -> _Cell:
        cell = self._cells[step.leaf.node, step.number] = _Cell(step.leaf, step.number, self.engine.url)
        self._bytes += cell.raw.nbytes
        return cell

    def roll_back(self) -> None:
        """Undo what `write` did; in a store that is not published, only what is not on the storage."""
        for place, saved in self.before.items():
            self._cells.pop(place, None)
            if saved is not None:
                cell, (raw, loaded) = saved
                cell.raw, cell.loaded = raw, loaded
                self._cells[place] = cell
        self._bytes = sum(cell.raw.nbytes for cell in self._cells.values())
        for leaf, number, old in reversed(self.replaced) if self.engine.revocable else ():
            if old is None:
                leaf.objects.pop(number, None)
            else:
                leaf.objects[number] = old
            self.reader.forget(leaf, number)
        self.before, self.replaced = {}, []

    def _prepare(self, cell: _Cell, part: Part) -> Any:
        """Load the inner chunks that are about to be written in part; return those about to be written."""
        touched, partial, edge = _coverage(cell, part)
        missing = np.flatnonzero(partial & ~cell.loaded)
        if len(missing):
            cell.patched = True
            self._load(cell, missing.tolist())
            cell.loaded.reshape(-1)[missing] = True
        if edge is not None:
            fill = np.frombuffer(cell.leaf.meta.fill, _dtype(cell.leaf))[0]
            for position in np.flatnonzero(touched & ~partial & edge & ~cell.loaded).tolist():
                cell.chunk(position)[...] = fill  # elements beyond the end
        return touched

    def _load(self, cell: _Cell, positions: list[int]) -> None:
        """Load stored inner chunks, or the fill value, into a cell."""
        leaf, meta = cell.leaf, cell.leaf.meta
        data, index = self._old(cell, positions)
        assert meta.pipeline is not None
        decode = meta.pipeline.decoder(meta.inner_bytes)
        scratch = np.empty(meta.inner_bytes, np.uint8)
        for position in positions:
            start, stop = index[position].tolist()
            if start < 0:
                cell.chunk(position)[...] = np.frombuffer(meta.fill, _dtype(leaf))[0]
                continue
            try:
                decode(data[start:stop], scratch)
            except ChunkError as error:
                raise self.reader.corrupt(leaf, cell.number, f"cannot be decoded: {error}") from None
            values = scratch.view(_dtype(leaf)).reshape(meta.inner)
            cell.chunk(position)[...] = values.byteswap() if meta.pipeline.big else values

    def _old(self, cell: _Cell, positions: Sequence[int]) -> tuple[memoryview, Index]:
        """Return encoded inner chunks of a stored object, and the place of each in these bytes: those of a shard whole,
        or, where few are asked for, just them.
        """
        leaf, number = cell.leaf, cell.number
        stored = leaf.objects.get(number)
        if stored is None:
            return memoryview(b""), np.full((cell.loaded.size, 2), -1, np.int64)
        index = self.reader.index_of(leaf, number) if leaf.meta.sharded else np.array([[0, stored.size]])
        wanted = index[positions]
        try:
            if leaf.meta.sharded and 2 * int((wanted[:, 1] - wanted[:, 0]).sum()) < stored.size:
                return self._some(leaf, number, index, [p for p in positions if index[p, 0] >= 0])
            data = memoryview(self.engine.get(leaf.key(number), stored.size).data).cast("B")
        except StoreNotFoundError:
            raise self.reader.corrupt(leaf, number, "was written and is missing") from None
        except CorruptStoreError as error:
            raise self.reader.corrupt(leaf, number, error.message) from error
        if len(data) != stored.size:
            raise self.reader.corrupt(leaf, number, f"has {len(data)} bytes instead of {stored.size}")
        if stored.crc != UNKNOWN and _seal_in(leaf, data) != stored.crc:
            raise self.reader.corrupt(leaf, number, _ANOTHER)
        return data, index

    def _some(self, leaf: Leaf, number: int, index: Index, positions: list[int]) -> tuple[memoryview, Index]:
        key, stored = leaf.key(number), leaf.objects[number]
        ranges = [Range(key, *index[p].tolist()) for p in positions]
        if stored.crc != UNKNOWN:  # the index may be one that was kept when the shard was put
            at = stored.size - leaf.meta.index_bytes - TAIL
            ranges.append(Range(key, at, at + TAIL))
        parts = self.engine.get_ranges(ranges)
        if stored.crc != UNKNOWN and int.from_bytes(parts.pop(), "little") != stored.crc:
            raise self.reader.corrupt(leaf, number, _ANOTHER)
        found, at = np.full_like(index, -1), 0
        for position, part in zip(positions, parts, strict=True):
            found[position] = at, at + len(part)
            at += len(part)
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts)).cast("B"), found

    # -- to the storage -----------------------------------------------------------------------
    def flush(self, cells: list[_Cell] | None = None) -> None:
        """Encode and put buffered objects."""
        cells = list(self._cells.values()) if cells is None else cells
        if not cells:
            return
        if len(cells) < 2 or sum(cell.fresh for cell in cells) <= ALONE:
            for cell in cells:
                self._put(cell)
                self._written(cell)
            return
        errors = []
        with ThreadPool(min(len(cells), max(2, _workers())), "tdstore-zarr") as pool:
            for cell, future in [(cell, pool.submit(self._put, cell)) for cell in cells]:
                if (error := future.exception()) is None:
                    self._written(cell)
                else:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _put(self, cell: _Cell) -> None:
        leaf, number = cell.leaf, cell.number
        data, crc, pieces = self._encode(cell)
        self.engine.put(leaf.key(number), data)
        if self.engine.revocable:
            self.replaced.append((leaf, number, leaf.objects.get(number)))
        stored = leaf.objects[number] = Stored(len(data), crc)
        self.reader.forget(leaf, number)
        if pieces is not None:
            self.reader.keep_index(leaf, number, pieces.index)
            self._marks[leaf.node] = number, stored, pieces.marks

    def _written(self, cell: _Cell) -> None:
        if self._cells.pop((cell.leaf.node, cell.number), None) is not None:
            self._bytes -= cell.raw.nbytes

    def _encode(self, cell: _Cell) -> tuple[Bytes, int, _Pieces | None]:
        """Return an object, its checksum, and the pieces of a shard."""
        meta = cell.leaf.meta
        assert meta.pipeline is not None
        encode = meta.pipeline.encoder()
        raw = cell.raw.byteswap() if meta.pipeline.big else cell.raw
        if not meta.sharded:
            data = bytes(encode(np.ascontiguousarray(raw).reshape(-1).view(np.uint8)))
            return data, seal(data), None
        loaded = cell.loaded.reshape(-1)
        # Chunks that are contiguous in memory need no copy.
        blocks = raw.reshape(len(loaded), -1).view(np.uint8) if _in_order(meta.chunks, meta.inner) else None
        fresh = np.flatnonzero(loaded).tolist()
        last, index = self._marks.get(cell.leaf.node), None
        known = last is not None and last[:2] == (cell.number, cell.leaf.objects.get(cell.number))
        pieces = _Pieces(len(loaded), last[2] if last is not None and known else {})
        if len(fresh) < len(loaded):
            old, index = self._old(cell, np.flatnonzero(~loaded).tolist())
        done = 0
        for position in fresh:
            if index is not None:
                pieces.keep(old, index, done, position)
            if blocks is not None:
                pieces.add(position, encode(blocks[position]))
            else:
                part = raw[region(position, cell.per_object, meta.inner)]
                pieces.add(position, encode(np.ascontiguousarray(part).reshape(-1).view(np.uint8)))
            done = position + 1
        if index is not None:
            pieces.keep(old, index, done, len(loaded))
        return *pieces.pack(at_end=meta.index_at_end, crc=meta.index_crc), pieces

    # -- life ----------------------------------------------------------------------------------
    def drop(self, leaf: Leaf) -> None:
        """Drop the buffered writes of a removed leaf."""
        for place in [p for p in self._cells if p[0] == leaf.node]:
            self._bytes -= self._cells.pop(place).raw.nbytes

    def clear(self) -> None:
        """Drop all buffered writes."""
        self._cells.clear()
        self._bytes = 0


class _Pieces:
    """The encoded inner chunks of a shard, in order.

    Args:
        count: the number of inner chunks of a full shard.
        marks: those of the stored shard, as far as they are known.
    """

    def __init__(self, count: int, marks: Marks) -> None:
        self.data: list[Bytes] = []
        self.index: Index = np.full((count, 2), -1, np.int64)
        """Start and stop of each, -1 where it is absent."""
        self.marks = marks
        self._at = 0
        self._same = 0
        """How many bytes are those with which the stored shard begins."""

    def add(self, position: int, data: Bytes) -> None:
        """Add an inner chunk."""
        self.index[position] = self._at, self._at + len(data)
        self._put(data)

    def keep(self, data: memoryview, index: Index, first: int, last: int) -> None:
        """Add inner chunks `[first, last)` of the stored shard: neighbours, which most are, as one piece."""
        there = first + np.flatnonzero(index[first:last, 0] >= 0)
        for run in np.split(there, 1 + np.flatnonzero(index[there[1:], 0] != index[there[:-1], 1])):
            if len(run):
                start, stop = int(index[run[0], 0]), int(index[run[-1], 1])
                self.index[run] = index[run] + (self._at - start)
                if start == self._at == self._same:
                    self._same = stop
                self._put(data[start:stop])

    def _put(self, data: Bytes) -> None:
        self.data.append(data)
        self._at += len(data)

    def pack(self, *, at_end: bool, crc: bool) -> tuple[Bytes, int]:
        """Return the shard, and the checksum of the bytes before its tail; `index` and `marks` are those of this shard.

        Args:
            at_end: the index is the tail.
            crc: the index ends in its crc32c.
        """
        if not at_end:
            self.index = np.where(self.index < 0, -1, self.index + (16 * len(self.index) + (4 if crc else 0)))
        table = self.index.copy()
        table[:, 1] -= np.where(table[:, 0] < 0, 0, table[:, 0])  # what is absent has two times 2**64 - 1
        text = table.astype("<i8").tobytes()
        end = crc32c(text).to_bytes(4, "little") if crc else b""
        if not at_end:
            return b"".join((text, end, *self.data)), UNKNOWN
        known, self.marks, mark, at = self.marks, {}, 0, 0
        for number, piece in enumerate(self.data, 2 - len(self.data)):
            at += len(piece)
            mark = known[at] if at <= self._same and at in known else seal(piece, mark)
            if number >= 0:  # one ends the shard, and one is before the chunk that the next row goes into
                self.marks[at] = mark
        return b"".join((*self.data, mark.to_bytes(TAIL, "little"), text, end)), mark


def _seal_in(leaf: Leaf, data: memoryview) -> int:
    """Return the checksum that tells which object this is: of a shard the one in its tail, which is not computed."""
    if not leaf.meta.sharded:
        return seal(data)
    at = len(data) - leaf.meta.index_bytes - TAIL
    return int.from_bytes(data[at : at + TAIL], "little")


def seal_of(leaf: Leaf, data: memoryview) -> int:
    """Return the checksum with which an object should have been recorded.

    Raises:
        CorruptStoreError: the object is too short.
    """
    if not leaf.meta.sharded:
        return seal(data)
    end = len(data) - leaf.meta.index_bytes - TAIL
    if end < 0:
        raise CorruptStoreError(f"it has {len(data)} bytes, too few for its index")
    return seal(data[:end])


def _coverage(cell: _Cell, part: Part) -> tuple[Mask, Mask, Mask | None]:
    """Return the inner chunks that a write touches, and those of them that it does not fill.

    And those that reach beyond the end of the leaf; None if there are none.
    """
    meta, each = cell.leaf.meta, cell.per_object
    edge: Mask | None = None
    block: list[slice] | None = []
    filled, sizes = [], []
    for dim, term in enumerate(part.inside):
        inner = meta.inner[dim]
        size = meta.shape[dim] - part.place[dim] * meta.chunks[dim]
        sizes.append(size)
        if size < inner * each[dim]:
            edge = np.zeros(each, np.bool_) if edge is None else edge
            edge[(slice(None),) * dim + (slice(size // inner, None),)] = True
        if block is None or not isinstance(term, slice) or term.step not in (None, 1):
            block = None
            continue
        last = term.stop + inner - 1 if term.stop >= size else term.stop
        block.append(slice(term.start // inner, -(-term.stop // inner)))
        filled.append(slice(-(-term.start // inner), last // inner))
    if block is not None:  # neither is of any other form than the block itself
        touched = np.zeros(each, np.bool_)
        touched[tuple(block)] = True
        partial = touched.copy()
        partial[tuple(filled)] = False
        return touched, partial, edge
    touched = full = np.ones((), np.bool_)
    for dim, (inside, inner, n) in enumerate(zip(part.inside, meta.inner, each, strict=True)):
        rows = np.arange(inside.start, inside.stop, inside.step) if isinstance(inside, slice) else inside
        counts = np.bincount(rows // inner, minlength=n)
        valid = np.clip(sizes[dim] - np.arange(n, dtype=np.int64) * inner, 0, inner)
        shape = [1] * len(each)
        shape[dim] = n
        touched = touched & (counts > 0).reshape(shape)
        full = full & (counts == valid).reshape(shape)
    return touched, touched & ~full, edge


def _in_order(chunks: tuple[int, ...], inner: tuple[int, ...]) -> bool:
    """Check whether the inner chunks of a shard in memory are contiguous."""
    cut = [d for d in range(len(chunks)) if chunks[d] != inner[d]]
    return not cut or math.prod(chunks[: cut[-1]]) == math.prod(inner[: cut[-1]]) == 1 or cut == [0]


def _is_complete(cell: _Cell, part: Part, loaded: Any) -> bool:
    """Check whether every inner chunk within the leaf was written."""
    meta = cell.leaf.meta
    within = tuple(
        slice(0, -(-(size - place * chunk) // inner))
        for size, place, chunk, inner in zip(meta.shape, part.place, meta.chunks, meta.inner, strict=True)
    )
    return bool(loaded[within].all())


def _dtype(leaf: Leaf) -> np.dtype[Any]:
    return np.dtype(leaf.meta.data_type)
