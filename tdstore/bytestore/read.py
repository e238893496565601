"""Reads of a byte store: fetch pieces of objects in few rounds, compare checksums, and copy to the targets.

Planning and checking are one generator that yields requests: `read` and `aread` differ in the transport only.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np

from tdstore.bytestore.table import (
    OBJECT_BITS,
    PER_BLOCK,
    UNCHECKED,
    Bytes,
    Extents,
    Leaf,
    Table,
    fill_bytes,
    locate,
    place,
    spread,
)
from tdstore.engine import Buffer, Engine
from tdstore.errors import CorruptStoreError, StoreError, StoreNotFoundError
from tdstore.index.ranges import GAP, PART, Ints, Range, RangeInto, cover, distinct
from tdstore.storekit.checksums import crc32c, crcs_of
from tdstore.types import Path, path_text

ROUND = 128 << 20
"""At most about so many bytes are in memory between the wire and their place."""
WASTE = 2
"""Bridging gaps may double the bytes, not more ..."""
FREE = 512 << 10
"""... unless they are so few."""
DIRECT = PART // 2
"""A part of so many bytes is a request of its own, whose answer an engine may write into the target."""

_AS_IT_IS = "restore it from a copy; verify='size' reads it as it is"

Block = tuple[int, int]
"""An object, and the number of a block of its checksums."""
Rounds = Generator[list[Range], Sequence[Buffer], None]
Targets = Mapping[int, memoryview]
"""The memory that ranges are read into, by the offset at which each begins."""


class Check(enum.Enum):
    """The extent of the comparison with checksums."""

    FULL = enum.auto()
    """Everything: whole grains are fetched."""
    COVERED = enum.auto()
    """The grains that are fetched whole anyway."""
    NONE = enum.auto()


class Want(msgspec.Struct, frozen=True):
    """Ranges of a leaf, to be placed consecutively in `out`."""

    path: Path
    leaf: Leaf
    ranges: Ints
    out: memoryview


class _Parts(msgspec.Struct):
    """Stored bytes to fetch, part by part: `[start, stop)` of a piece is copied to `out[want][at:]`."""

    want: Ints
    piece: Ints
    start: Ints
    stop: Ints
    at: Ints
    leaf_byte: Ints

    def take(self, which: Any) -> _Parts:
        return _Parts(*(getattr(self, name)[which] for name in self.__struct_fields__))

    def __len__(self) -> int:
        return len(self.want)


class Fetcher:
    """Read ranges of leaves of one table, over an engine.

    Args:
        engine: the engine of the store.
        table: objects, pieces and leaves.
        memory: the pieces that are not on the storage yet.
    """

    def __init__(self, engine: Engine, url: str, table: Table, memory: Mapping[int, Bytes], check: Check) -> None:
        self.engine = engine
        self.url = url
        self.table = table
        self.memory = memory
        self.check = check

    def sums_missing(self) -> int:
        """Return the bytes of checksums that are not loaded."""
        return sum(4 * o.count for o in self.table.objects if len(o.sums) < o.blocks)

    def rounds(self, wants: Sequence[Want], *, all_sums: bool = False, check: Check | None = None) -> Rounds:
        """Fill the `out` of each; yields requests and is sent their answers, a round at a time.

        Args:
            wants: the ranges and their targets.
            all_sums: load every checksum of the objects that are touched.
            check: the extent of the comparison.

        Raises:
            CorruptStoreError: an object is missing or short, or its bytes are not those that were committed.
        """
        parts = self._plan(wants)
        check = check or self.check
        extra = self._all_sums() if all_sums and check is Check.FULL else []
        for some in self._split(parts, check):
            yield from self._round(some, wants, check, extra)
            extra = []

    def _split(self, parts: _Parts, check: Check) -> Iterator[_Parts]:
        """Yield lots that fit the memory limit of a round, as a rule all in one."""
        if not len(parts):
            return
        number, base, _, grain, _ = self.table.pieces.rows[parts.piece].T
        size = parts.stop - parts.start
        if check is Check.FULL:
            size = (-(-parts.stop // grain) - parts.start // grain) * grain
        if int(size.sum()) <= ROUND:
            yield parts
            return
        # In storage order: a grain that several parts begin in is fetched once.
        order = np.argsort(place(number) + base + parts.start, kind="stable")
        first = (place(number) + base + parts.start // grain * grain)[order]
        size = np.where(
            np.concatenate([[True], first[1:] != first[:-1]]), size[order], (parts.stop - parts.start)[order]
        )
        edges = np.flatnonzero(np.diff((np.cumsum(size) - 1) // ROUND)) + 1
        for lot in np.split(order, edges):
            yield parts.take(lot)

    # -- planning ------------------------------------------------------------------------
    def _plan(self, wants: Sequence[Want]) -> _Parts:
        """Fill in the bytes that need no request; return the rest as parts."""
        columns: list[tuple[Ints, ...]] = []
        for number, want in enumerate(wants):
            extents, ranges = want.leaf.extents, want.ranges
            sizes = ranges[:, 1] - ranges[:, 0]
            begins = np.cumsum(sizes) - sizes
            found = locate(extents, ranges)
            lengths = found.stop - found.start
            at = begins[found.query] + found.start - ranges[found.query, 0]
            if int(lengths.sum()) < len(want.out):
                _fill(want.out, fill_bytes(want.leaf.spec))
            piece = extents.piece[found.extent]
            offset = extents.offset[found.extent] + found.start - extents.start[found.extent]
            stored = piece >= 0
            if not stored.all():
                here = ~stored
                for p, a, n, to in zip(*(v[here].tolist() for v in (piece, offset, lengths, at)), strict=True):
                    want.out[to : to + n] = memoryview(self.memory[p])[a : a + n]  # type: ignore[arg-type]
                piece, offset, lengths, at = (v[stored] for v in (piece, offset, lengths, at))
                leaf_byte = found.start[stored]
            else:
                leaf_byte = found.start
            columns.append((np.full(len(piece), number), piece, offset, offset + lengths, at, leaf_byte))
        if not columns:
            columns.append(tuple(np.empty(0, np.int64) for _ in range(6)))
        return _Parts(*map(np.concatenate, zip(*columns, strict=True)))

    # -- one round -----------------------------------------------------------------------
    def _round(self, parts: _Parts, wants: Sequence[Want], check: Check, extra: Sequence[Block]) -> Rounds:
        job = _Job(self.table, parts, check)
        needed = job.sums_needed()
        sums = list(dict.fromkeys([*needed, *extra]))
        ranges = [job.span, self._span(sums)]
        got = yield from self._fetch(ranges, lambda o: job.owner(o, wants), job.targets(ranges, wants))
        wanted = set(needed)
        bad_sums = [block for block in self._take_sums(got, sums) if block in wanted]
        if bad_sums:
            again = yield from self._fetch([self._span(bad_sums)], lambda o: job.owner(o, wants))
            for number, block in self._take_sums(again, bad_sums):
                self._refuse_sums(number, block, job.owner(number, wants))
        bad = job.damaged(got)
        job.copy(got, wants, skip=bad)
        if len(bad):
            # A second read repairs an error of the transport, but not one of the storage.
            redone = _Job(self.table, parts.take(bad), check)
            ranges = [redone.span]
            got = yield from self._fetch(ranges, lambda o: redone.owner(o, wants), redone.targets(ranges, wants))
            still = redone.damaged(got)
            if len(still):
                self._refuse(redone, wants)
            redone.copy(got, wants, skip=still)

    def _fetch(
        self, ranges: Sequence[Ints], owner: Callable[[int], str], targets: Targets = MappingProxyType({})
    ) -> Generator[list[Range], Sequence[Buffer], Fetched]:
        """Fetch in one round, and in a second if an answer was missing or short."""
        got = Fetched(np.concatenate(ranges), targets)
        asked = got.requests()
        for last in (False, True):
            if not asked:
                break
            try:
                got.store_answers((yield [self._request(one) for one in asked]), asked)
                break
            except (StoreNotFoundError, CorruptStoreError, EOFError) as error:
                if last:
                    self._explain(error, [one.number for one in asked], owner)
        return got

    def _request(self, one: Request) -> Range:
        name = self.table.objects[one.number].name
        return Range(name, one.start, one.stop) if one.into is None else RangeInto.make(name, one.start, one.into)

    def _explain(self, error: Exception, asked: Sequence[int], owner: Callable[[int], str]) -> NoReturn:
        names = {self.table.objects[o].name: o for o in asked}
        if isinstance(error, EOFError):
            number, start, stop, got = error.args
            name = self.table.objects[number].name
            what = f"{name} gives {got} of the bytes {start} to {stop}"
        else:
            assert isinstance(error, StoreError)
            place = error.url or ""
            name = next((n for n in names if self.engine.where(n) == place or place.endswith(f"/{n}")), "")
            name = name or next((n for n in names if n in error.message), next(iter(names)))
            what = f"{name} is missing" if isinstance(error, StoreNotFoundError) else error.message
        raise CorruptStoreError(
            f"{self.url}: {owner(names[name])} cannot be read: {what}",
            url=self.url,
            hint="if the dataset was replaced since it was opened, open it again; otherwise restore it from a copy",
        ) from error

    def _refuse(self, job: _Job, wants: Sequence[Want]) -> NoReturn:
        number = int(job.parts.want[job.bad_part[0]])
        want = wants[number]
        rows = distinct(job.bad_byte[job.parts.want[job.bad_part] == number] // (want.leaf.row or 1)).tolist()
        name = self.table.objects[int(job.object[job.bad_part[0]])].name
        said = f"from row {rows[0]} on" if len(rows) == 1 else f"from rows {', '.join(map(str, rows[:5]))} on"
        raise CorruptStoreError(
            f"{self.url}: leaf {path_text(want.path)} is damaged {said}: bytes of {name} have other "
            f"checksums than were committed, fetched twice",
            url=self.url,
            hint=_AS_IT_IS,
        )

    # -- checksums -----------------------------------------------------------------------
    def _refuse_sums(self, number: int, block: int, owner: str) -> NoReturn:
        name = self.table.objects[number].name
        raise CorruptStoreError(
            f"{self.url}: {owner} cannot be read: block {block} of the checksums in {name} is damaged",
            url=self.url,
            hint=_AS_IT_IS,
        )

    def _all_sums(self) -> list[Block]:
        return [(o, b) for o, it in enumerate(self.table.objects) for b in range(it.blocks) if b not in it.sums]

    def _span(self, blocks: Sequence[Block]) -> Ints:
        ranges = [self.table.objects[o].sums_range(b) for o, b in blocks]
        return (np.array(ranges, np.int64).reshape(-1, 2).T + place(np.array([o for o, _ in blocks], np.int64))).T

    def _take_sums(self, got: Fetched, blocks: Sequence[Block]) -> list[Block]:
        """Store the blocks of checksums that are right; return the others."""
        bad = []
        for (number, block), raw in zip(blocks, got.arrays(self._span(blocks)), strict=True):
            o = self.table.objects[number]
            if crc32c(raw) == int(o.block_crc[block]):
                o.sums[block] = np.frombuffer(raw.tobytes(), "<u4")
            else:
                bad.append((number, block))
        return bad


class Request(NamedTuple):
    """Bytes `[start, stop)` of an object, and the memory that they are for, if that is known."""

    number: int
    start: int
    stop: int
    into: memoryview | None


class Fetched:
    """Ranges `[n, 2]` of objects in one address space (`place`), fetched with few requests.

    Args:
        ranges: what is needed.
        targets: of some of them, which no other range touches, where their bytes go.
    """

    def __init__(self, ranges: Ints, targets: Targets) -> None:
        self._targets = targets
        if targets:
            own = np.fromiter(targets, np.int64, len(targets))
            separate = np.isin(ranges[:, 0], own)
            ranges = np.concatenate([_few_requests(ranges[~separate]), ranges[separate]])
            self._cover = ranges[np.argsort(ranges[:, 0])]
        else:
            self._cover = _few_requests(ranges)
        self._blocks: list[Bytes] = []

    def requests(self) -> list[Request]:
        """Return the requests."""
        asked = []
        mask = (1 << OBJECT_BITS) - 1
        for a, b in self._cover.tolist():
            number, start, stop = a >> OBJECT_BITS, a & mask, (b - 1 & mask) + 1
            target = self._targets.get(a)
            for at in range(start, stop, PART):
                end = min(at + PART, stop)
                asked.append(Request(number, at, end, None if target is None else target[at - start : end - start]))
        return asked

    def store_answers(self, answers: Sequence[Buffer], asked: Sequence[Request]) -> None:
        """Store the answers.

        Raises:
            EOFError: one is shorter or longer than requested; its `args` are object, start, stop and the length.
        """
        arrays = [np.frombuffer(answer, np.uint8) for answer in answers]
        for array, (number, start, stop, _) in zip(arrays, asked, strict=True):
            if len(array) != stop - start:
                raise EOFError(number, start, stop, len(array))
        at = 0
        for a, b in self._cover.tolist():
            count = -(-(b - a) // PART)
            some = arrays[at : at + count]
            target = self._targets.get(a)
            if target is not None:
                for answer, one in zip(answers[at : at + count], asked[at : at + count], strict=True):
                    if answer is not one.into:
                        assert one.into is not None
                        one.into[:] = answer
                self._blocks.append(np.frombuffer(target, np.uint8))
            else:
                self._blocks.append(some[0] if count == 1 else np.concatenate(some))
            at += count

    def arrays(self, ranges: Ints) -> Iterator[Bytes]:
        """Yield the bytes of ranges within the requested ones, without a copy."""
        block = np.searchsorted(self._cover[:, 0], ranges[:, 0], "right") - 1
        start = ranges[:, 0] - self._cover[block, 0]
        stop = ranges[:, 1] - self._cover[block, 0]
        blocks = self._blocks
        return iter([blocks[i][a:b] for i, a, b in zip(block.tolist(), start.tolist(), stop.tolist(), strict=True)])

    def is_in_place(self, start: int) -> bool:
        """Check whether the range that begins at a place is in its target already."""
        return start in self._targets


class _Job:
    """The arithmetic of one round: requests, their checksums, and the targets."""

    def __init__(self, table: Table, parts: _Parts, check: Check) -> None:
        self.parts = parts
        self.objects = table.objects
        self.object, base, self.nbytes, self.grain, self.first = table.pieces.rows[parts.piece].T
        self.base = base + place(self.object)
        inside = check is Check.COVERED
        # Grains [low, high) of the piece are to be checked.
        self.low = -(-parts.start // self.grain) if inside else parts.start // self.grain
        ceil = -(-parts.stop // self.grain)
        self.high = np.where(parts.stop == self.nbytes, ceil, parts.stop // self.grain) if inside else ceil
        if check is Check.NONE:
            self.high = self.low
        self.high = np.where(self.first == UNCHECKED, self.low, np.maximum(self.high, self.low))
        some = self.high > self.low
        start = np.where(some, np.minimum(parts.start, self.low * self.grain), parts.start)
        stop = np.where(some, np.maximum(parts.stop, np.minimum(self.high * self.grain, self.nbytes)), parts.stop)
        self.span = np.stack([self.base + start, self.base + stop], 1)
        self.bad_part = self.bad_byte = np.empty(0, np.int64)

    def owner(self, number: int, wants: Sequence[Want]) -> str:
        """Return the first leaf that needs an object, for messages."""
        at = next(iter(np.flatnonzero(self.object == number).tolist()), None)
        if at is None:
            return f"the object {self.objects[number].name}"
        return f"leaf {path_text(wants[int(self.parts.want[at])].path)}"

    def targets(self, ranges: Sequence[Ints], wants: Sequence[Want]) -> Targets:
        """Return the targets of large parts that no other range touches."""
        parts = self.parts
        size = parts.stop - parts.start
        if not len(size) or int(size.max()) < DIRECT:
            return {}
        every = np.concatenate(ranges)
        order = np.argsort(every[:, 0], kind="stable")
        start, stop = every[order].T
        separate = np.empty(len(every), bool)
        separate[order] = (start >= np.concatenate([[0], np.maximum.accumulate(stop)[:-1]])) & (
            stop <= np.concatenate([start[1:], [np.iinfo(np.int64).max]])
        )
        large = separate[: len(size)] & (size >= DIRECT) & (self.span[:, 1] - self.span[:, 0] == size)
        return {
            int(self.span[i, 0]): wants[parts.want[i]].out[parts.at[i] : parts.at[i] + size[i]]
            for i in np.flatnonzero(large).tolist()
        }

    def sums_needed(self) -> list[Block]:
        """Return the blocks of checksums that are not loaded yet."""
        some = self.high > self.low
        if not some.any():
            return []
        low = (self.first + self.low)[some] // PER_BLOCK
        high = (self.first + self.high - 1)[some] // PER_BLOCK + 1
        keys = distinct(place(np.repeat(self.object[some], high - low)) + spread(low, high - low))
        blocks = [(key >> OBJECT_BITS, key & ((1 << OBJECT_BITS) - 1)) for key in keys.tolist()]
        return [(o, b) for o, b in blocks if b not in self.objects[o].sums]

    def damaged(self, got: Fetched) -> Ints:
        """Return the positions of the parts that touch a grain whose checksum is wrong."""
        count = self.high - self.low
        parts, grains = np.repeat(np.arange(len(count)), count), spread(self.low, count)
        every = place(self.object[parts]) + self.first[parts] + grains
        keys, at = np.unique(every, return_index=True)
        if not len(keys):
            return keys
        part, grain = parts[at], grains[at]
        start = grain * self.grain[part]
        stop = np.minimum(start + self.grain[part], self.nbytes[part]) + self.base[part]
        # Consecutive grains of a part are compared together.
        first = np.concatenate([[True], (part[1:] != part[:-1]) | (grain[1:] != grain[:-1] + 1)])
        runs = np.flatnonzero(first)
        ranges = np.stack([(start + self.base[part])[runs], stop[np.append(runs[1:], len(keys)) - 1]], 1)
        found = [crcs_of(run, g) for run, g in zip(got.arrays(ranges), self.grain[part[runs]].tolist(), strict=True)]
        crc = np.fromiter(itertools.chain.from_iterable(found), np.uint32, len(keys))
        wrong = keys[crc != self._expected(keys)]
        if not len(wrong):
            return np.asarray(wrong)
        bad = np.isin(every, wrong)
        part, grain = parts[bad], grains[bad]
        self.bad_part = part
        self.bad_byte = self.parts.leaf_byte[part] + np.maximum(grain * self.grain[part] - self.parts.start[part], 0)
        return distinct(part)

    def _expected(self, keys: Ints) -> Any:
        out = np.empty(len(keys), np.uint32)
        edges = (np.flatnonzero(np.diff(keys // PER_BLOCK)) + 1).tolist()
        for low, high in zip([0, *edges], [*edges, len(keys)], strict=True):
            number, first = int(keys[low]) >> OBJECT_BITS, int(keys[low]) & ((1 << OBJECT_BITS) - 1)
            out[low:high] = self.objects[number].sums[first // PER_BLOCK][keys[low:high] % PER_BLOCK]
        return out

    def copy(self, got: Fetched, wants: Sequence[Want], *, skip: Ints) -> None:
        """Copy each part, but those in `skip`, to its target."""
        outs = [np.frombuffer(want.out, np.uint8) for want in wants]
        parts = self.parts
        arrays = got.arrays(np.stack([self.base + parts.start, self.base + parts.stop], 1))
        left_out = set(skip.tolist())
        begins = (self.base + parts.start).tolist()
        for i, (want, to, array) in enumerate(zip(parts.want.tolist(), parts.at.tolist(), arrays, strict=True)):
            if i not in left_out and not got.is_in_place(begins[i]):
                outs[want][to : to + len(array)] = array


def _few_requests(ranges: Ints) -> Ints:
    """Bridge gaps between ranges, but not so many that far more is fetched than needed."""
    exact = cover(ranges, 0)
    needed = _size(exact)
    for gap in (GAP, GAP // 4, GAP // 16):
        bridged = cover(exact, gap)
        if _size(bridged) <= max(WASTE * needed, FREE):
            return bridged
    return exact


def _size(ranges: Ints) -> int:
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def _fill(out: memoryview, element: Bytes | None) -> None:
    flat = np.frombuffer(out, np.uint8)
    if element is None:
        flat[:] = 0
    else:
        flat.reshape(-1, len(element))[:] = element


def drive(rounds: Rounds, ask: Callable[[list[Range]], Sequence[Buffer]]) -> None:
    """Run rounds by calling `ask` for one after the other."""
    steps: Iterator[list[Range]] = iter(rounds)
    try:
        asked = next(steps)
        while True:
            try:
                answers = ask(asked)
            except StoreError as error:
                asked = rounds.throw(error)
            else:
                asked = rounds.send(answers)
    except StopIteration:
        return


def written_bytes(extents: Extents) -> int:
    """Return how many bytes of a leaf were written."""
    return int((extents.stop - extents.start).sum())
