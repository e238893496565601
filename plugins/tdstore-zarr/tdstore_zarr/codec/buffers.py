"""The write buffer: rows are gathered into whole chunks and shards before they go to the storage.

An object is written once it is complete, or when the buffer is full, or at the commit. Of an existing
object, untouched inner chunks are copied in their encoded form.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tdstore.errors import CorruptStoreError, StoreNotFoundError
from tdstore.index.ranges import Range
from tdstore.storekit.budget import allocating
from tdstore.storekit.checksums import crc32c
from tdstore.types import StoreIndex
from tdstore_zarr.codec.codecs import Bytes, ChunkError
from tdstore_zarr.layout.grid import Ints, Part, parts, region, rows_of, strides
from tdstore_zarr.layout.leaf import TAIL, UNKNOWN, Leaf, Stored, seal
from tdstore_zarr.place.redo_log import LoggedEngine
from tdstore_zarr.place.thread_pool import Pool
from tdstore_zarr.reading.reader import Array, Pending, Reader, _workers

LIMIT = 64 << 20
"""Bytes that wait to be written, decoded, without `buffer_bytes=`."""
ALONE = 1 << 20
"""Bytes that one thread encodes before starting others pays."""


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


_Saved = tuple[Array, "np.ndarray[Any, np.dtype[np.bool_]]"]
"""`raw` and `loaded` of a cell."""


class Buffers(Pending):
    """The writes of one store that are not on its storage yet."""

    def __init__(self, engine: LoggedEngine[Any], reader: Reader, limit: int) -> None:
        self.engine = engine
        self.reader = reader
        self.limit = limit
        self._cells: dict[tuple[str, int], _Cell] = {}
        self._bytes = 0
        self._replaced: list[tuple[Leaf, int, Stored | None]] = []
        """Objects that were put since `write` began, and the ones they replaced."""

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
        """Execute steps: all of them, or, if an error is raised, none (in a published store).

        Args:
            steps: the steps.
            fits: the result of `make_room`, which is called first.
        """
        self._replaced.clear()
        before: dict[tuple[str, int], tuple[_Cell, _Saved] | None] = {}
        try:
            if fits:
                self._write_at_once(steps, before)
            else:
                self._write_in_lots(steps)
        except BaseException:
            if not fits:
                self.clear()  # nothing but this was in memory
            self._roll_back(before)
            raise

    def _write_at_once(self, steps: Sequence[Step], before: dict[tuple[str, int], tuple[_Cell, _Saved] | None]) -> None:
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

    def _roll_back(self, before: Mapping[tuple[str, int], tuple[_Cell, _Saved] | None]) -> None:
        for place, saved in before.items():
            self._cells.pop(place, None)
            if saved is not None:
                cell, (raw, loaded) = saved
                cell.raw, cell.loaded = raw, loaded
                self._cells[place] = cell
        self._bytes = sum(cell.raw.nbytes for cell in self._cells.values())
        for leaf, number, old in reversed(self._replaced) if self.engine.revocable else ():
            if old is None:
                leaf.objects.pop(number, None)
            else:
                leaf.objects[number] = old
            self.reader.forget(leaf, number)

    def _prepare(self, cell: _Cell, part: Part) -> Any:
        """Load the inner chunks that are about to be written in part; return those about to be written."""
        meta = cell.leaf.meta
        touched = full = edge = np.zeros((), np.bool_)
        touched, full = ~touched, ~full
        for dim, (inside, inner, each) in enumerate(zip(part.inside, meta.inner, cell.per_object, strict=True)):
            counts = _counts(inside, inner, each)
            starts = part.place[dim] * meta.chunks[dim] + np.arange(each, dtype=np.int64) * inner
            valid = np.clip(meta.shape[dim] - starts, 0, inner)
            shape = [1] * len(meta.inner)
            shape[dim] = each
            touched = touched & (counts > 0).reshape(shape)
            full = full & (counts == valid).reshape(shape)
            edge = edge | (valid < inner).reshape(shape)
        missing = np.flatnonzero((touched & ~full & ~cell.loaded).reshape(-1))
        if len(missing):
            cell.patched = True
            self._load(cell, missing.tolist())
            cell.loaded.reshape(-1)[missing] = True
        fill = np.frombuffer(meta.fill, _dtype(cell.leaf))[0]
        for position in np.flatnonzero((touched & full & edge & ~cell.loaded).reshape(-1)).tolist():
            cell.chunk(position)[...] = fill  # elements beyond the end
        return touched

    def _load(self, cell: _Cell, positions: list[int]) -> None:
        """Load stored inner chunks, or the fill value, into a cell."""
        leaf, meta = cell.leaf, cell.leaf.meta
        old = self._old(cell, positions)
        assert meta.pipeline is not None
        decode = meta.pipeline.decoder(meta.inner_bytes)
        fill = np.frombuffer(meta.fill, _dtype(leaf))[0]
        scratch = np.empty(meta.inner_bytes, np.uint8)
        for position in positions:
            data = old.get(position)
            if data is None:
                cell.chunk(position)[...] = fill
                continue
            try:
                decode(data, scratch)
            except ChunkError as error:
                raise self.reader.corrupt(leaf, cell.number, f"cannot be decoded: {error}") from None
            values = scratch.view(_dtype(leaf)).reshape(meta.inner)
            cell.chunk(position)[...] = values.byteswap() if meta.pipeline.big else values

    def _old(self, cell: _Cell, positions: Iterable[int]) -> dict[int, memoryview]:
        """Return the encoded inner chunks of a stored object."""
        leaf, number = cell.leaf, cell.number
        stored = leaf.objects.get(number)
        if stored is None:
            return {}
        index = self.reader.index_of(leaf, number) if leaf.meta.sharded else None
        wanted = [p for p in positions if index[p, 0] >= 0] if index is not None else []
        try:
            if index is not None and 2 * int((index[wanted, 1] - index[wanted, 0]).sum()) < stored.size:
                ranges = [Range(leaf.key(number), int(index[p, 0]), int(index[p, 1])) for p in wanted]
                parts = [memoryview(part).cast("B") for part in self.engine.get_ranges(ranges)]
                return dict(zip(wanted, parts, strict=True))
            data = memoryview(self.engine.get(leaf.key(number), stored.size).data).cast("B")
        except StoreNotFoundError:
            raise self.reader.corrupt(leaf, number, "was written and is missing") from None
        except CorruptStoreError as error:
            raise self.reader.corrupt(leaf, number, error.message) from error
        if len(data) != stored.size:
            raise self.reader.corrupt(leaf, number, f"has {len(data)} bytes instead of {stored.size}")
        if index is None:
            if stored.crc != UNKNOWN and seal(data) != stored.crc:
                raise self.reader.corrupt(leaf, number, "is not the one that was committed")
            return {0: data}
        return {p: data[index[p, 0] : index[p, 1]] for p in wanted}

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
        with Pool(min(len(cells), max(2, _workers()))) as pool:
            for cell, future in [(cell, pool.submit(self._put, cell)) for cell in cells]:
                if (error := future.exception()) is None:
                    self._written(cell)
                else:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _put(self, cell: _Cell) -> None:
        leaf, number = cell.leaf, cell.number
        data, crc = self._encode(cell)
        self.engine.put(leaf.key(number), data)
        if self.engine.revocable:
            self._replaced.append((leaf, number, leaf.objects.get(number)))
        leaf.objects[number] = Stored(len(data), crc)
        self.reader.forget(leaf, number)

    def _written(self, cell: _Cell) -> None:
        if self._cells.pop((cell.leaf.node, cell.number), None) is not None:
            self._bytes -= cell.raw.nbytes

    def _encode(self, cell: _Cell) -> tuple[Bytes, int]:
        meta = cell.leaf.meta
        assert meta.pipeline is not None
        encode = meta.pipeline.encoder()
        raw = cell.raw.byteswap() if meta.pipeline.big else cell.raw
        if not meta.sharded:
            data = bytes(encode(np.ascontiguousarray(raw).reshape(-1).view(np.uint8)))
            return data, seal(data)
        loaded = cell.loaded.reshape(-1)
        # Chunks that are contiguous in memory need no copy.
        blocks = raw.reshape(len(loaded), -1).view(np.uint8) if _in_order(meta.chunks, meta.inner) else None
        unloaded = [] if loaded.all() else np.flatnonzero(~loaded).tolist()
        old = self._old(cell, unloaded) if unloaded else {}
        pieces: list[Bytes] = []
        index = np.full((len(loaded), 2), 2**64 - 1, "<u8")
        at = 0
        for position, fresh in enumerate(loaded.tolist()):
            piece: Bytes | None
            if not fresh:
                piece = old.get(position)
            elif blocks is not None:
                piece = encode(blocks[position])
            else:
                part = raw[region(position, cell.per_object, meta.inner)]
                piece = encode(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
            if piece is not None:
                pieces.append(piece)
                index[position] = at, len(piece)
                at += len(piece)
        return pack_shard(pieces, index, meta.index_at_end, meta.index_crc)

    # -- life ----------------------------------------------------------------------------------
    def drop(self, leaf: Leaf) -> None:
        """Drop the buffered writes of a removed leaf."""
        for place in [p for p in self._cells if p[0] == leaf.node]:
            self._bytes -= self._cells.pop(place).raw.nbytes

    def clear(self) -> None:
        """Drop all buffered writes."""
        self._cells.clear()
        self._bytes = 0


def pack_shard(pieces: list[Bytes], index: Array, at_end: bool, crc: bool) -> tuple[Bytes, int]:
    """Return a shard of encoded inner chunks and their index, and the checksum of the bytes before its tail.

    Args:
        pieces: the encoded inner chunks.
        index: offset and length of each.
        at_end: the index is the tail.
        crc: the index ends in its crc32c.
    """
    if at_end:
        mark = 0
        for piece in pieces:
            mark = seal(piece, mark)
        table = index.tobytes()
        end = crc32c(table).to_bytes(4, "little") if crc else b""
        return b"".join((*pieces, mark.to_bytes(TAIL, "little"), table, end)), mark
    size = 16 * len(index) + (4 if crc else 0)
    moved = index.copy()
    moved[index[:, 0] != np.uint64(2**64 - 1), 0] += np.uint64(size)
    table = moved.tobytes()
    return b"".join((table, crc32c(table).to_bytes(4, "little") if crc else b"", *pieces)), UNKNOWN


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


def _counts(inside: Any, inner: int, each: int) -> Ints:
    """Return the number of elements of each inner chunk that a selection takes, along one dimension."""
    if isinstance(inside, slice):
        if inside.step in (None, 1):
            edges = np.clip(np.arange(each + 1, dtype=np.int64) * inner, inside.start, inside.stop)
            return edges[1:] - edges[:-1]
        inside = rows_of(inside)
    return np.bincount(inside // inner, minlength=each)


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
