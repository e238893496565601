"""The hot path of reads: rows of many leaves in one round of byte ranges, decoded into the caller's memory.

zarr-python would fetch the inner chunks of a shard one after another, and decode whole chunks into
memory of its own.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from tdstore.engine import Engine
from tdstore.errors import CorruptStoreError, StoreError, StoreNotFoundError
from tdstore.index.ranges import GAP, PART, Batch, Range
from tdstore.storekit.checksums import crc32c
from tdstore.threads import ThreadPool
from tdstore.types import StoreIndex, path_text
from tdstore_zarr.codec.codecs import ChunkError
from tdstore_zarr.layout.grid import Part, count_chunks, full_index, parts, strides
from tdstore_zarr.layout.leaf import TAIL, UNKNOWN, Leaf, parse_index, seal
from tdstore_zarr.reading.row_slices import SLICES_OF, RowSlices
from tdstore_zarr.reading.scattered_rows import ROWS_OF, Rows, are_whole

Array = np.ndarray[Any, Any]
Index = np.ndarray[tuple[int, int], np.dtype[np.int64]]

LOCAL_GAP = 4096
SMALL = 256 << 10
"""Objects up to this size are fetched whole over a network, and cached."""
INDEX_CACHE = 128 << 20
WHOLE_CACHE = 64 << 20
MAX_PARTS = 50_000_000
_THREADS_PAY = 4 << 20
_ROWS_PAY = 32 << 20
_GRAIN = 32 << 10


class Pending:
    """Writes that are not on the storage yet; `buffers.Buffers` is one."""

    def chunk(self, leaf: Leaf, number: int, position: int) -> Array | None:
        """Return the inner chunk at a position of an object, if it is buffered."""
        return None


@dataclass(slots=True)
class Job:
    """One leaf's share of a batch."""

    leaf: Leaf
    index: StoreIndex
    out: Array
    """Of the leaf's numpy dtype (its bits) and the shape of the result."""
    chunks: list[tuple[int, int]] = field(default_factory=list)
    """What it needs: the number of an object, and the position of an inner chunk in it."""
    parts: list[Part] = field(default_factory=list)
    """What to take of each ..."""
    rows: Rows | RowSlices | None = None
    """... or rows of all, at once. Slices are given; scattered rows are found in the index."""


_Place = memoryview | tuple[str, int, int] | None
"""The bytes themselves, or their object's key and range."""


class _Wire(Batch[str]):
    """Ranges over a network: near ones are one request, and all requests run at once."""

    def __init__(self) -> None:
        super().__init__(gap=GAP, part=PART)

    def collect(self, key: str, ranges: list[tuple[int, int]]) -> None:
        self.want(key, np.array(ranges, np.int64))

    def gather(self, engine: Engine) -> None:
        self.fetch(lambda asked: engine.get_ranges([Range(*r) for r in asked]))


class _Runs:
    """Ranges of local files: a call costs a microsecond, so only neighbours are joined, and nothing is sorted."""

    def __init__(self) -> None:
        self._runs: list[Range] = []
        self._places: dict[tuple[str, int], tuple[int, int]] = {}
        self._blocks: list[memoryview] = []

    def collect(self, key: str, ranges: list[tuple[int, int]]) -> None:
        runs, places = self._runs, self._places
        first, last, number = -1, -1, len(runs) - 1
        for start, stop in ranges:
            if first >= 0 and last <= start <= last + LOCAL_GAP:
                last = stop
            else:
                if first >= 0:
                    runs.append(Range(key, first, last))
                first, last, number = start, stop, number + 1
            places[key, start] = number, start - first
        runs.append(Range(key, first, last))

    def gather(self, engine: Engine) -> None:
        self._blocks = [memoryview(b) for b in engine.get_ranges(self._runs)]

    def take(self, key: str, start: int, stop: int) -> memoryview:
        number, at = self._places[key, start]
        return self._blocks[number][at : at + stop - start]


class Reader:
    """Reads of one store. Indices of shards are cached."""

    def __init__(self, engine: Engine, url: str, *, local: bool) -> None:
        self.engine = engine
        self.url = url
        self.local = local
        self._lock = threading.Lock()
        self._indices: OrderedDict[tuple[str, int], Index] = OrderedDict()
        self._whole: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._index_bytes = 0
        self._whole_bytes = 0

    # -- a batch ---------------------------------------------------------------------------
    def read(self, jobs: Sequence[Job], pending: Pending | None = None) -> None:
        """Fill the `out` of every job."""
        for job in jobs:
            self._plan(job)
        if not self.local or True in [job.leaf.meta.sharded for job in jobs]:
            self.need_indices((job.leaf, {number for number, _ in job.chunks}) for job in jobs)
        batch: _Runs | _Wire = _Runs() if self.local else _Wire()
        places = [self._want(job, batch) for job in jobs]
        self._fetch(batch, [job.leaf for job in jobs])
        for job, where in zip(jobs, places, strict=True):
            self._fill(job, where, batch, pending)

    def _plan(self, job: Job) -> None:
        cut, shape = job.leaf.cut, job.leaf.meta.shape
        if not job.out.size:
            return
        wanted = len(job.rows.chunks) if job.rows is not None else count_chunks(shape, cut.inner, job.index)
        if wanted > MAX_PARTS:
            raise CorruptStoreError(
                f"{self.url}: this read of {path_text(job.leaf.path)} touches {wanted} chunks, more than {MAX_PARTS}",
                url=self.url,
                hint="read fewer rows at a time",
            )
        if job.rows is None and job.index:
            term = job.index[0]
            if not isinstance(term, slice):
                if cut.nbytes <= ROWS_OF and are_whole(job.index, job.out, job.leaf):
                    job.rows = Rows.of(term, job.leaf)
            elif term.step == 1 and cut.nbytes <= SLICES_OF and are_whole(job.index, job.out, job.leaf):
                job.rows = RowSlices.of([(term.start, term.stop)], job.leaf)
        if job.rows is not None:
            job.chunks = list(map(divmod, job.rows.chunks.tolist(), itertools.repeat(cut.per_object[0])))
            return
        whole = len(cut.grid) == 1 or all(n == 1 for n in (*cut.grid[1:], *cut.per_object[1:]))
        if whole and cut.grid:
            each = cut.per_object[0]
            job.parts = list(parts(shape, cut.inner, job.index))
            job.chunks = [divmod(part.place[0], each) for part in job.parts]
            return
        objects, inside = strides(cut.grid), strides(cut.per_object)
        for part in parts(shape, cut.inner, job.index):
            number = position = 0
            for place, each, a, b in zip(part.place, cut.per_object, objects, inside, strict=True):
                number += place // each * a
                position += place % each * b
            job.chunks.append((number, position))
            job.parts.append(part)

    def _want(self, job: Job, batch: _Runs | _Wire) -> list[_Place]:
        """Return the position of the bytes of each chunk; None for one that was never written."""
        leaf, cut = job.leaf, job.leaf.cut
        places: list[_Place] = []
        wanted: dict[str, list[tuple[int, int]]] = {}
        for number, run in itertools.groupby(job.chunks, key=operator.itemgetter(0)):
            positions = [position for _, position in run]
            stored = leaf.objects.get(number)
            if stored is None:
                places += [None] * len(positions)
                continue
            if leaf.meta.sharded:
                index = self._index(leaf, number)
                found = index[positions].tolist() if len(positions) > 4 else [index[at].tolist() for at in positions]
            elif cut.raw:
                found = [(at * cut.nbytes, (at + 1) * cut.nbytes) for at in positions]
                if (max(positions) + 1) * cut.nbytes > stored.size:
                    raise self.corrupt(leaf, number, f"has {stored.size} bytes and should have {leaf.meta.inner_bytes}")
            else:
                found = [(0, stored.size)] * len(positions)
            whole = self._whole.get((leaf.node, number))
            if whole is not None:
                places += [whole[start:stop] if start >= 0 else None for start, stop in found]
                continue
            key = leaf.key(number)
            if not (leaf.meta.sharded or cut.raw):
                places += [(key, 0, stored.size)] * len(positions)
                wanted.setdefault(key, []).extend(found)
                continue
            places += [(key, start, stop) if start >= 0 else None for start, stop in found]
            wanted.setdefault(key, []).extend([(start, stop) for start, stop in found if start >= 0])
        for name, ranges in wanted.items():
            if ranges:
                batch.collect(name, ranges)
        return places

    def _fetch(self, batch: _Runs | _Wire, leaves: Sequence[Leaf]) -> None:
        try:
            batch.gather(self.engine)
        except (StoreNotFoundError, CorruptStoreError) as error:
            raise self._blame(leaves, error) from error
        except EOFError as error:
            key, start, stop, size = error.args
            raise CorruptStoreError(
                f"{self.engine.where(key)}: {size} bytes came where {stop - start} were asked for", url=self.url
            ) from error

    def _fill(self, job: Job, places: Sequence[_Place], batch: _Runs | _Wire, pending: Pending | None) -> None:
        leaf, cut = job.leaf, job.leaf.cut
        if not job.chunks:
            return
        assert cut.pipeline is not None
        decode = cut.pipeline.decoder(cut.nbytes)
        fill = np.frombuffer(leaf.meta.fill, job.out.dtype)[0]
        flat = _flat(job) if job.rows is None else None
        kind = job.out.dtype.newbyteorder(">") if cut.pipeline.big else job.out.dtype
        check, take = not leaf.meta.sharded and not cut.raw, batch.take

        def chunk(at: int, out: Array) -> None:
            place = places[at]
            if pending is not None and (waiting := pending.chunk(leaf, *job.chunks[at])) is not None:
                out.view(kind).reshape(cut.inner)[...] = waiting
                return
            if place is None:
                out.view(kind)[:] = fill
                return
            data = take(*place) if isinstance(place, tuple) else place
            try:
                if check and (crc := leaf.objects[job.chunks[at][0]].crc) != UNKNOWN and seal(data) != crc:
                    raise ChunkError("it is not the one that was committed")
                decode(data, out)
            except ChunkError as error:
                raise self.corrupt(leaf, job.chunks[at][0], f"cannot be decoded: {error}") from None

        def work(first: int, last: int) -> None:
            scratch: Array | None = None
            for at, place, part in zip(range(first, last), places[first:last], job.parts[first:last], strict=True):
                waiting = pending.chunk(leaf, *job.chunks[at]) if pending is not None else None
                if waiting is not None:
                    job.out[part.outside] = waiting[part.inside]
                elif place is None:
                    job.out[part.outside] = fill
                elif flat is not None and part.counts == cut.inner and type(outside := part.outside[0]) is slice:
                    chunk(at, flat[outside.start : outside.stop].reshape(-1))
                else:
                    if scratch is None:
                        scratch = np.empty(cut.nbytes, np.uint8)
                    chunk(at, scratch)
                    job.out[part.outside] = scratch.view(kind).reshape(cut.inner)[part.inside]

        if job.rows is None:
            _spread(work, len(job.chunks), cut.nbytes)
        else:
            pays = _THREADS_PAY if job.rows.per_chunk == 1 else _ROWS_PAY
            _spread(partial(job.rows.fill, job.out, chunk), len(job.chunks), cut.nbytes, pays)

    # -- indices of shards ------------------------------------------------------------------
    def need_indices(self, wanted: Iterable[tuple[Leaf, Iterable[int]]]) -> None:
        """Fetch the indices that are not cached, and whole small objects if requests are slow, in one round."""
        asked: list[tuple[Leaf, int, bool]] = []
        ranges: list[Range] = []
        for leaf, numbers in wanted:
            meta = leaf.meta
            if not meta.sharded and (self.local or leaf.cut.raw):
                continue
            for number in numbers:
                stored = leaf.objects.get(number)
                if stored is None or (leaf.node, number) in self._whole or (leaf.node, number) in self._indices:
                    continue
                small = not self.local and stored.size <= SMALL
                if not small and not meta.sharded:
                    continue
                tail = TAIL if stored.crc != UNKNOWN and meta.index_at_end else 0
                if meta.sharded and stored.size < meta.index_bytes + tail:
                    raise self.corrupt(leaf, number, f"has {stored.size} bytes, too few for its index")
                start, stop = (stored.size - meta.index_bytes - tail, stored.size)
                if not meta.index_at_end:
                    start, stop = 0, meta.index_bytes
                if small:
                    start, stop = 0, stored.size
                asked.append((leaf, number, small))
                ranges.append(Range(leaf.key(number), start, stop))
        if not asked:
            return
        try:
            answers = self.engine.get_ranges(ranges)
        except (StoreNotFoundError, CorruptStoreError) as error:
            raise self._blame([leaf for leaf, _, _ in asked], error) from error
        for (leaf, number, small), found, r in zip(asked, answers, ranges, strict=True):
            data = memoryview(found).cast("B")
            if r.stop is not None and len(data) != r.stop - r.start:
                raise self.corrupt(leaf, number, f"gave {len(data)} bytes where {r.stop - r.start} were asked for")
            if leaf.meta.sharded:
                self._parse_index(leaf, number, data)
            if small:
                self._keep_whole((leaf.node, number), data)

    def keep_index(self, leaf: Leaf, number: int, index: Index) -> None:
        """Keep the index of a shard, as `parse_index` returns it."""
        place = leaf.node, number
        with self._lock:
            if (old := self._indices.pop(place, None)) is not None:
                self._index_bytes -= old.nbytes
            self._indices[place] = index
            self._index_bytes += index.nbytes
            while self._index_bytes > INDEX_CACHE and len(self._indices) > 1:
                self._index_bytes -= self._indices.popitem(last=False)[1].nbytes

    def _parse_index(self, leaf: Leaf, number: int, data: memoryview) -> None:
        meta, stored = leaf.meta, leaf.objects[number]
        if meta.index_at_end:
            if stored.crc != UNKNOWN:
                at = len(data) - meta.index_bytes - TAIL
                if int.from_bytes(data[at : at + TAIL], "little") != stored.crc:
                    raise self.corrupt(leaf, number, "is not the one that was committed")
            body = data[len(data) - meta.index_bytes :]
        else:
            body = data[: meta.index_bytes]
        if meta.index_crc:
            if crc32c(np.frombuffer(body[:-4], np.uint8)) != int.from_bytes(body[-4:], "little"):
                raise self.corrupt(leaf, number, "has an index whose checksum does not fit")
            body = body[:-4]
        try:
            index = parse_index(body, leaf, stored.size)
        except ValueError as error:
            raise self.corrupt(leaf, number, str(error)) from None
        self.keep_index(leaf, number, index)

    def _keep_whole(self, place: tuple[str, int], data: memoryview) -> None:
        with self._lock:
            self._whole[place] = data
            self._whole_bytes += len(data)
            while self._whole_bytes > WHOLE_CACHE and len(self._whole) > 1:
                self._whole_bytes -= len(self._whole.popitem(last=False)[1])

    def _index(self, leaf: Leaf, number: int) -> Index:
        found = self._indices.get((leaf.node, number))
        if found is None:  # a batch of more shards than the cache holds
            self.need_indices([(leaf, [number])])
            found = self._indices[leaf.node, number]
        return found

    def index_of(self, leaf: Leaf, number: int) -> Index:
        """Return the index of a written shard."""
        self.need_indices([(leaf, [number])])
        return self._index(leaf, number)

    def forget(self, leaf: Leaf, number: int | None = None) -> None:
        """Drop the caches of a changed object (or of all objects of a leaf)."""
        with self._lock:
            if number is not None:
                gone = [(leaf.node, number)]
            else:
                gone = [place for place in (*self._indices, *self._whole) if place[0] == leaf.node]
            for place in gone:
                if (index := self._indices.pop(place, None)) is not None:
                    self._index_bytes -= index.nbytes
                if (data := self._whole.pop(place, None)) is not None:
                    self._whole_bytes -= len(data)

    def forget_all(self) -> None:
        """Drop all caches."""
        with self._lock:
            self._indices.clear()
            self._whole.clear()
            self._index_bytes = self._whole_bytes = 0

    # -- errors -------------------------------------------------------------------------------
    def corrupt(self, leaf: Leaf, number: int, text: str) -> CorruptStoreError:
        """Build the error for a damaged object."""
        return CorruptStoreError(
            f"{self.url}: {'shard' if leaf.meta.sharded else 'chunk'} {leaf.key(number)!r} "
            f"of {path_text(leaf.path)} {text}",
            url=self.url,
            hint="restore it from a copy; store.verify() lists every damaged leaf",
        )

    def _blame(self, leaves: Sequence[Leaf], error: StoreError) -> CorruptStoreError:
        """Name the leaf of the object in an engine's error."""
        where = error.url or error.message
        for leaf in leaves:
            for number in leaf.objects if f"/{leaf.node}/" in where else ():
                if where == self.engine.where(leaf.key(number)) or leaf.key(number) in error.message:
                    missing = isinstance(error, StoreNotFoundError)
                    return self.corrupt(leaf, number, "was written and is missing" if missing else error.message)
        return CorruptStoreError(f"{self.url}: a chunk that was written cannot be read: {error.message}", url=self.url)


def _flat(job: Job) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """Return the result as rows of bytes, if whole pieces have the same form in it as encoded."""
    cut, out = job.leaf.cut, job.out
    assert cut.pipeline is not None
    if not out.flags.c_contiguous or not out.ndim or (cut.pipeline.big and out.itemsize > 1) or not out.flags.writeable:
        return None
    if out.shape[1:] != cut.inner[1:]:
        return None
    terms = full_index(job.leaf.meta.shape, job.index)
    if not all(isinstance(t, slice) and t.step == 1 for t in terms[1:]):
        return None
    return out.reshape(out.shape[0], -1).view(np.uint8)


def _spread(work: Callable[[int, int], None], count: int, nbytes: int, pays: int = _THREADS_PAY) -> None:
    """Decode in threads if that pays: for large chunks and many bytes.

    Args:
        work: decodes items `[begin, end)`.
        count: number of items.
        nbytes: bytes of an item.
        pays: total bytes from which threads pay.
    """
    workers = _workers()
    if nbytes < _GRAIN or count * nbytes < pays or workers < 2:
        work(0, count)
        return
    step = -(-count // workers)
    with ThreadPool(workers, "tdstore-zarr") as pool:
        list(pool.map(lambda first: work(first, min(first + step, count)), range(0, count, step)))


@cache
def _workers() -> int:
    affinity: Callable[[int], Mapping[int, Any] | set[int]] | None = getattr(os, "sched_getaffinity", None)
    return min(8, len(affinity(0)) if affinity is not None else os.cpu_count() or 1)
