"""One generation of a byte store for reading: its table, its caches, and the plan of reads as rounds."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from tdstore.bytestore.read import Check, Fetcher, Rounds, Want, drive, written_bytes
from tdstore.bytestore.table import Bytes, Leaf, Table, stored_bytes
from tdstore.dtypes import repair_bools
from tdstore.engine import Engine
from tdstore.errors import CorruptStoreError, StoreError
from tdstore.header import Header
from tdstore.index.ranges import Ints, Range, byte_ranges, index_shape
from tdstore.index.rows import gather
from tdstore.storekit.budget import SUSPECT_BYTES, allocating, is_suspect, refuse_absent
from tdstore.storekit.checked import full
from tdstore.storekit.checksums import TIP, crc32c, tip_ranges
from tdstore.storekit.pages import empty
from tdstore.types import LeafSpec, Path, Read, StoreIndex, path_text

SMALL_LEAF = 256 << 10
"""Leaves of at most so many bytes are fetched whole and cached: their next row costs nothing."""
AHEAD = 1 << 20
"""The first read fetches all small leaves and all checksums along, when they are no more than this."""
WARM_LEAF = 16 << 20
"""Leaves of at most so many bytes are fetched whole and cached, too, once reading parts of them has cost as much. So
reads cost at most twice as much as with the best decision in hindsight: the rule of the ski-rental problem
(Karlin, Manasse, Rudolph, Sleator: Competitive snoopy caching, 1988)."""
REQUEST = 8 << 10
"""A range costs so many bytes more than it has: those that are compared with it, and those before the next."""
CACHE_BYTES = 64 << 20
"""Bytes of all cached leaves."""


Found = Callable[[], Sequence[tuple[Leaf, Read]]]


class View:
    """The state that a store reads from. Several threads may read at once.

    Args:
        engine: the engine of the store.
        table: objects, pieces and leaves.
        tips: for leaves of an uploaded directory, crc32c of their first, middle and last 4 KiB.
        wary: refuse reads that would allocate far more than is stored.
    """

    def __init__(
        self,
        engine: Engine,
        url: str,
        table: Table,
        header: Header,
        *,
        check: Check,
        nbytes: int = 0,
        tips: Mapping[Path, int] | None = None,
        wary: bool = False,
    ) -> None:
        self.engine = engine
        self.url = url
        self.table = table
        self.header = header
        self.check = check
        self.nbytes = nbytes
        """Bytes of the manifest."""
        self.wary = wary
        self.memory: Mapping[int, Bytes] = {}
        self._tips = dict(tips or {})
        self._cached: dict[Path, Tensor] = {}
        self._cached_bytes = 0
        self._paid: dict[Path, int] = {}
        self._ahead = True
        self.guard = threading.RLock()
        """Held while leaves, pieces or memory change, and while a read is planned; never while bytes travel."""
        self._changes = 0

    def fetcher(self) -> Fetcher:
        """Return a fetcher of ranges of leaves of the present table."""
        return Fetcher(self.engine, self.url, self.table, self.memory, self.check)

    # -- changing ------------------------------------------------------------------------
    def replace(self, path: Path, leaf: Leaf) -> None:
        """Add or replace a leaf."""
        self.forget(path)
        self.table.leaves[path] = leaf

    def remove(self, path: Path) -> None:
        """Remove a leaf."""
        self.forget(path)
        self.table.leaves.pop(path, None)

    def restore(self, leaves: Mapping[Path, Leaf]) -> None:
        """Replace all leaves of the table."""
        now = self.table.leaves
        for path in [path for path, leaf in now.items() if leaves.get(path) is not leaf]:
            self.forget(path)
        self.table.leaves = dict(leaves)

    def forget(self, path: Path) -> None:
        """Drop the cached value of a leaf."""
        self._changes += 1
        self._ahead = False
        self._paid.pop(path, None)
        cached = self._cached.pop(path, None)
        if cached is not None:
            self._cached_bytes -= cached.nbytes

    def adopt(self, table: Table, header: Header, nbytes: int) -> None:
        """Take the table of a new generation with the same leaves, its header, and the bytes of its manifest."""
        with self.guard:
            self.table, self.header, self.nbytes = table, header, nbytes

    # -- reading -------------------------------------------------------------------------
    def read(self, reads: Found) -> list[Tensor]:
        """Read values, in order.

        Args:
            reads: finds the leaves. Called whenever a read is planned: they may have changed since.
        """
        for job, rounds, generous in self._attempts(reads):
            try:
                drive(rounds, self.engine.get_ranges)
                return job.results()
            except CorruptStoreError:
                if not generous:
                    raise
        raise AssertionError("the last attempt is never generous")

    async def aread(self, reads: Found) -> list[Tensor]:
        """Read values, as `read` does, with asynchronous requests."""
        for job, rounds, generous in self._attempts(reads):
            try:
                await self._adrive(rounds)
                return job.results()
            except CorruptStoreError:
                if not generous:
                    raise
        raise AssertionError("the last attempt is never generous")

    def _attempts(self, reads: Found) -> Iterator[tuple[_Job, Rounds, bool]]:
        """Yield ways to read: with prefetched data first, then without, as only the prefetched part may be damaged."""
        with self.guard:
            job = _Job(self, reads())
            ahead = self._prefetch(job)
            generous = job.generous or ahead is not None
            rounds = plan_first_round(ahead or job.rounds())
        yield job, rounds, generous
        if generous:
            with self.guard:
                job = _Job(self, reads(), exact=True)
                rounds = plan_first_round(job.rounds())
            yield job, rounds, False

    async def _adrive(self, rounds: Rounds) -> None:
        try:
            asked = next(rounds)
            while True:
                try:
                    answers = await self.engine.aget_ranges(asked)
                except StoreError as error:
                    asked = rounds.throw(error)
                else:
                    asked = rounds.send(answers)
        except StopIteration:
            return

    def _prefetch(self, job: _Job) -> Rounds | None:
        """Return rounds that also fetch all small leaves with the first read; None later, or if it is too much."""
        if not self._ahead or not job.wants:
            return None
        self._ahead = False
        fetcher = self.fetcher()
        small = {p: leaf for p, leaf in self.table.leaves.items() if p in job.wholes or is_small(leaf)}
        total = sum([leaf.spec.nbytes for leaf in small.values()])
        total += fetcher.sums_missing() if self.check is Check.FULL else 0
        if total > AHEAD:
            return None
        for path in small.keys() - job.wholes.keys():
            job.want_whole(path, small[path])
        return job.rounds(all_sums=True)

    def cached(self, path: Path) -> Tensor | None:
        """Return the cached value of a leaf that was fetched whole."""
        return self._cached.get(path)

    def should_fetch_whole(self, path: Path, leaf: Leaf, ranges: Ints) -> bool:
        """Check whether to fetch a leaf whole, since reading parts has cost as much; counts the ranges otherwise."""
        nbytes = leaf.spec.nbytes
        if nbytes > WARM_LEAF or self._cached_bytes + nbytes > CACHE_BYTES or not is_complete(leaf):
            return False
        paid = self._paid.pop(path, 0)
        if paid >= nbytes:
            return True
        self._paid[path] = paid + int((ranges[:, 1] - ranges[:, 0]).sum()) + REQUEST * len(ranges)
        return False

    def cache(self, path: Path, leaf: Leaf, value: Tensor, changes: int) -> None:
        """Cache a leaf, if the number of changes is still the `changes` at the time its read was planned."""
        with self.guard:
            same = self._changes == changes and self.table.leaves.get(path) is leaf and path not in self._cached
            if same and self._cached_bytes + value.nbytes <= CACHE_BYTES:
                self._cached_bytes += value.nbytes
                self._cached[path] = value

    def tip(self, path: Path) -> int | None:
        """Return the checksum of a leaf's tips, if it was not compared yet."""
        return self._tips.get(path)

    def record_tip_checked(self, path: Path) -> None:
        """Record that the tips were compared."""
        self._tips.pop(path, None)


def plan_first_round(rounds: Rounds) -> Rounds:
    """Plan the first of the rounds now: later writes do not affect them."""
    try:
        first = next(rounds)
    except StopIteration:
        return _rest(rounds, None)
    return _rest(rounds, first)


def _rest(rounds: Rounds, asked: list[Range] | None) -> Rounds:
    while asked is not None:
        try:
            try:
                answers = yield asked
            except StoreError as error:
                asked = rounds.throw(error)
            else:
                asked = rounds.send(answers)
        except StopIteration:
            return


def is_small(leaf: Leaf) -> bool:
    """Check whether a leaf is fetched whole for any read of it."""
    pieces = leaf.extents.piece
    return 0 < leaf.spec.nbytes <= SMALL_LEAF and len(pieces) > 0 and bool((pieces >= 0).all())


def is_complete(leaf: Leaf) -> bool:
    """Check whether all of a leaf was written."""
    return len(leaf.extents.piece) > 0 and bool((leaf.extents.piece >= 0).all())


class _Target(msgspec.Struct):
    """One read: the buffer for its bytes, and the tensor they belong to."""

    spec: LeafSpec
    index: StoreIndex
    out: Tensor | None
    shape: tuple[int, ...]
    path: Path | None = None
    """The path of the small leaf to gather rows from."""
    value: Tensor | None = None


class _Whole(msgspec.Struct):
    """A leaf that is fetched whole."""

    leaf: Leaf
    value: Tensor
    fetched: bool = False


class _Tips(msgspec.Struct):
    """The tips of a leaf, to be compared."""

    path: Path
    expected: int
    data: Bytes


class _Job:
    """The reads of one call: requested ranges, then results."""

    def __init__(self, view: View, reads: Sequence[tuple[Leaf, Read]], *, exact: bool = False) -> None:
        self.view = view
        self._exact = exact
        self._changes = view._changes
        self.generous = False
        """A leaf is fetched whole, though only a part was requested."""
        self.wants: list[Want] = []
        self._targets: list[_Target] = []
        self.wholes: dict[Path, _Whole] = {}
        self._tips: dict[Path, _Tips] = {}
        shapes = [index_shape(leaf.spec.shape, read.index) for leaf, read in reads]
        self._check_room(reads, shapes)
        for (leaf, read), shape in zip(reads, shapes, strict=True):
            self._add(read, leaf, shape)

    def _check_room(self, reads: Sequence[tuple[Leaf, Read]], shapes: Sequence[tuple[int, ...]]) -> None:
        """Refuse to allocate far more than is stored, before any allocation."""
        sizes = [
            math.prod(shape) * leaf.spec.dtype.itemsize if read.out is None else 0
            for (leaf, read), shape in zip(reads, shapes, strict=True)
        ]
        if not self.view.wary or sum(sizes) <= SUSPECT_BYTES:
            return
        leaves = {read.path: leaf for leaf, read in reads}
        wanted = dict.fromkeys(leaves, 0)
        for (leaf, read), size in zip(reads, sizes, strict=True):
            wanted[read.path] = min(wanted[read.path] + size, leaf.spec.nbytes)  # repeated rows are intended
        total, stored = sum(wanted.values()), stored_bytes(leaves.values(), self.view.table.pieces)
        if is_suspect(total, stored):
            path = max(wanted, key=lambda path: wanted[path] - written_bytes(leaves[path].extents))
            raise refuse_absent(path, total, stored, self.view.url)

    def _room(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if math.prod(shape) * dtype.itemsize <= SMALL_LEAF:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with allocating(path, shape, dtype, self.view.url):
            return empty(shape, dtype)

    def _add(self, read: Read, leaf: Leaf, shape: tuple[int, ...]) -> None:
        spec = leaf.spec
        out = read.out
        target = _Target(spec, read.index, out, shape)
        self._targets.append(target)
        if not self._exact and (is_small(leaf) or self.view.cached(read.path) is not None):
            self._add_whole(target, read.path, leaf)
            return
        if not len(leaf.extents.start) and out is None:
            with allocating(read.path, shape, spec.dtype, self.view.url):
                target.value = full(LeafSpec(shape, spec.dtype, fill_value=spec.fill_value))
            return
        ranges = byte_ranges(spec.shape, spec.dtype.itemsize, read.index)
        if not self._exact and len(ranges) and self.view.should_fetch_whole(read.path, leaf, ranges):
            self._add_whole(target, read.path, leaf)
            return
        usable = out is not None and out.is_contiguous() and not out.is_conj() and not out.is_neg()
        target.value = out.detach() if usable and out is not None else self._room(read.path, shape, spec.dtype)
        if len(ranges):
            self.wants.append(Want(read.path, leaf, ranges, _memory(target.value)))
            self._want_tips(read.path, leaf)

    def _add_whole(self, target: _Target, path: Path, leaf: Leaf) -> None:
        target.path = path
        self.generous = self.generous or target.shape != leaf.spec.shape
        self.want_whole(path, leaf)

    def want_whole(self, path: Path, leaf: Leaf) -> None:
        """Request a leaf whole, unless it was requested already."""
        if path in self.wholes:
            return
        cached = self.view._cached.get(path)
        if cached is not None:
            self.wholes[path] = _Whole(leaf, cached)
            return
        value = self._room(path, leaf.spec.shape, leaf.spec.dtype)
        self.wholes[path] = _Whole(leaf, value, True)
        self.wants.append(Want(path, leaf, np.array([[0, leaf.spec.nbytes]]), _memory(value)))

    def _want_tips(self, path: Path, leaf: Leaf) -> None:
        expected = self.view.tip(path)
        if expected is None or path in self._tips:
            return
        ranges: Ints = np.array(tip_ranges(leaf.spec.nbytes), np.int64)
        data = np.empty(int((ranges[:, 1] - ranges[:, 0]).sum()), np.uint8)
        assert len(data) <= 3 * TIP
        self._tips[path] = _Tips(path, expected, data)
        self.wants.append(Want(path, leaf, ranges, memoryview(data)))  # type: ignore[arg-type]

    def rounds(self, *, all_sums: bool = False) -> Rounds:
        """Return the rounds of requests."""
        return self.view.fetcher().rounds(self.wants, all_sums=all_sums)

    def results(self) -> list[Tensor]:
        """Return the values, once every round was answered."""
        view = self.view
        for tips in self._tips.values():
            found = crc32c(tips.data)
            if found != tips.expected:
                raise CorruptStoreError(
                    f"{view.url}: leaf {path_text(tips.path)} holds other data than was committed "
                    f"(crc32c of its tips is {found:08x}, expected {tips.expected:08x})",
                    url=view.url,
                    hint="upload it again: its files are of different saves",
                )
            view.record_tip_checked(tips.path)
        for path, whole in self.wholes.items():
            if whole.fetched:
                repair_bools(whole.value)
                view.cache(path, whole.leaf, whole.value, self._changes)
        return [self._result(target) for target in self._targets]

    def _result(self, target: _Target) -> Tensor:
        if target.path is not None:
            return gather(self.wholes[target.path].value, target.index, target.out)
        value = target.value
        assert value is not None
        repair_bools(value)
        if target.out is None:
            return value
        if value.data_ptr() != target.out.data_ptr() or not target.out.is_contiguous():
            target.out.detach().copy_(value)
        return target.out


def _memory(value: Tensor) -> memoryview:
    return value.reshape(-1).view(torch.uint8).numpy().data
