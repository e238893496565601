"""The layout of a leaf on the server: cells with a checksum each, in numbered blocks. Pure: no I/O.

A leaf is its bytes in C order, cut into *cells* of equal size. A cell is stored with four bytes of checksum
after it, and as many cells as fit into about a MiB are concatenated in one string value, a *block*:

    key  tds:<dataset>:<array>:<block>      value  [cell][check][cell][check]...

Rows of half a KiB or more have a cell each, small ones share one of that size, and rows beyond 64 KiB are cut.
So any row is one GETRANGE that includes its checksum, and a whole leaf a few large ones.

Each cell has a *mark*, 32 bits made of the leaf's identity and the cell's number. The check takes a
crc32c that runs over cell and check from the mark of this cell to that of the next. So a cell that was
moved, or is of another generation, does not fit; and any number of neighbours is checked at once: a crc32c
over all their bytes that begins at the mark of the first must end at that of the cell after the last.
Only if it does not are the cells checked one by one.

The check is never 0: zeros are a cell that was not written.
The last cell is as long as the others, filled up with the fill value, so that a leaf can grow in place.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import numpy as np

from tdstore.dtypes import to_numpy
from tdstore.storekit.checked import full
from tdstore.types import LeafSpec

CHECK = 4
TARGET_CELL = 512
MAX_CELL = 64 << 10
BLOCK = 1 << 20
MAX_VALUE = 512 << 20
GAP = 4 << 10
"""Bytes between two cells that are rather fetched than skipped."""
PIECE = 4 << 20
"""Bytes of cells that are handled in one step."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Ids = np.ndarray[Any, np.dtype[np.int64]]
Words = np.ndarray[Any, np.dtype[np.uint32]]
Command = bytes | tuple[bytes, Bytes]
"""A packed command; one with much data is split into the part before the data, and the data."""
_TABLE = 1 << 18
"""Arrays of at most so many cells keep their marks: 8 bytes a cell."""
_ZERO: Ids = np.zeros(1, np.int64)
_TENS = np.array([0, *(10**n for n in range(1, 19))], np.int64)
_FACTOR = 0x9E3779B97F4A7C15
_64 = (1 << 64) - 1
_ATTACHED = 32 << 10
"""Data of this size and more is not copied into its command."""
extend = google_crc32c.extend


def _undo_tables() -> Words:
    """Build `t[k, b]`: a crc32c register with the byte `b` at place `k`, zeros elsewhere, four zero bytes earlier."""
    step = [~google_crc32c.extend(0xFFFFFFFF ^ b, b"\0") & 0xFFFFFFFF for b in range(256)]
    by_top = {value >> 24: b for b, value in enumerate(step)}
    tables = np.zeros((4, 256), np.uint32)
    for place in range(4):
        for b in range(256):
            register = b << 8 * place
            for _ in range(4):
                low = by_top[register >> 24]
                register = (register ^ step[low]) << 8 & 0xFFFFFFFF | low
            tables[place, b] = register
    return tables


_UNDO = _undo_tables()


def undo_check(crcs: Words) -> Words:
    """Return the crc32c that four more zero bytes turn into these."""
    octets = (~crcs).astype("<u4").view(np.uint8).reshape(-1, 4)
    found: Words = ~np.bitwise_xor.reduce(_UNDO[np.arange(4), octets], axis=1)
    return found


def checks_between(marks: Words, goals: Words, cells: Iterable[Any]) -> Words:
    """Compute the checksums of cells, of one leaf or several, from their marks and their goals."""
    crcs = list(map(extend, marks.tolist(), cells))
    found: Words = np.array(crcs, np.uint32) ^ goals
    if not found.all():
        found[found == 0] = 1
    return found


def marks_of(arrays: Sequence[Array], first: int, stop: int) -> Words:
    """Return the marks of the same cells of several arrays, a row for each."""
    seeds = np.array([array.seed for array in arrays], np.uint64)
    mixed = np.arange(first, stop).astype(np.uint64) * np.uint64(_FACTOR) + seeds[:, None]
    return (mixed >> np.uint64(32)).astype(np.uint32)


def _listed(ids: range | Ids) -> Ids:
    return np.arange(ids.start, ids.stop) if isinstance(ids, range) else ids


def _as_index(ids: range | Ids) -> slice | Ids:
    return slice(ids.start, ids.stop) if isinstance(ids, range) else ids


@dataclass(slots=True)
class Array:
    """One leaf on the server."""

    spec: LeafSpec
    number: int
    """Unique in its dataset, never used again."""
    cell: int
    """Bytes of data in a cell."""
    per_block: int
    """Cells in a block."""
    dataset: str
    sealed: int = 0
    """So many cells, from the first, are all written: one that is missing is damage."""
    written: int = 0
    """Cells that the bitmap of written ones had when the manifest was made."""
    mine: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    """The written cells of an uncommitted array; None once it is in the manifest."""
    prefix: bytes = field(init=False)
    """What the keys of its blocks begin with."""
    stride: int = field(init=False)
    """Bytes from one stored cell to the next."""
    row: int = field(init=False)
    """Bytes of a row."""
    cells: int = field(init=False)
    """Number of cells."""
    seed: int = field(init=False)
    """What tells the marks of this leaf from those of others."""
    _keys: dict[int, bytes] = field(init=False, default_factory=dict)
    _marks: Words | None = field(init=False, default=None)
    _goals: Words | None = field(init=False, default=None)
    _fill: Bytes | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.stride = self.cell + CHECK
        self.cells = -(-self.spec.nbytes // self.cell)
        self.prefix = b"tds:%b:%d:" % (self.dataset.encode(), self.number)
        digest = hashlib.blake2b(self.prefix, digest_size=8).digest()
        self.seed = int.from_bytes(digest, "little")
        shape = self.spec.shape
        self.row = self.spec.replace(shape=shape[1:]).nbytes if shape else self.spec.nbytes

    @property
    def blocks(self) -> int:
        """Return the number of blocks."""
        return -(-self.cells // self.per_block)

    @property
    def rows_per_cell(self) -> int:
        """Return the number of whole rows that a cell holds; 0 if rows are cut."""
        return self.cell // self.row if self.row and self.cell % self.row == 0 else 0

    def block_size(self, block: int) -> int:
        """Return the bytes of a block with all its cells."""
        return min(self.per_block, self.cells - block * self.per_block) * self.stride

    def key(self, block: int) -> bytes:
        """Return the key of a block."""
        return self.prefix + b"%d" % block

    @property
    def bits_key(self) -> bytes:
        """Return the key of the bitmap of written cells, which only an array that is not sealed has."""
        return b"tds:%b:%d:w" % (self.dataset.encode(), self.number)

    def staged(self, number: int) -> Array:
        """Return the same cells with the same checks, with blocks under the keys of another number."""
        other = copy.copy(self)
        other.prefix = b"tds:%b:%d:" % (self.dataset.encode(), number)
        other._keys = {}
        return other

    def packed_key(self, block: int) -> bytes:
        """Return the key of a block as a packed argument."""
        packed = self._keys.get(block)
        if packed is None:
            key = self.key(block)
            packed = self._keys[block] = b"$%d\r\n%b\r\n" % (len(key), key)
        return packed

    # -- checksums -----------------------------------------------------------------------
    def mark(self, cell: int) -> int:
        """Return the state before a cell of a crc32c that runs over the cells."""
        return (cell * _FACTOR + self.seed & _64) >> 32

    def marks(self, ids: range | Ids) -> Words:
        """Return the marks of cells."""
        if self.cells > _TABLE:
            return self._hashed(_listed(ids))
        if self._marks is None:
            self._marks = self._hashed(np.arange(self.cells + 1))
        return self._marks[_as_index(ids)]

    def _hashed(self, ids: Ids) -> Words:
        mixed = ids.astype(np.uint64) * np.uint64(_FACTOR) + np.uint64(self.seed)
        return (mixed >> np.uint64(32)).astype(np.uint32)

    def _goals_of(self, ids: range | Ids) -> Words:
        """Return for each cell the value that four zero bytes would turn into the mark of the next."""
        if self.cells > _TABLE:
            return undo_check(self._hashed(_listed(ids) + 1))
        if self._goals is None:
            self._goals = undo_check(self.marks(range(1, self.cells + 1)))
        return self._goals[_as_index(ids)]

    def checks(self, ids: range | Ids, cells: Iterable[Any]) -> Words:
        """Compute the checksums of some cells, each passed as contiguous bytes."""
        return checks_between(self.marks(ids), self._goals_of(ids), cells)

    def seal(self, ids: range | Ids, stored: Bytes) -> None:
        """Write the checks of some cells: `stored` is `[n, stride]`."""
        checks = self.checks(ids, stored[:, : self.cell])
        stored[:, self.cell :] = checks.astype("<u4").view(np.uint8).reshape(-1, CHECK)

    def fits(self, first: int, stop: int, raw: bytes | Bytes) -> bool:
        """Check whether these are the stored cells from `first` to `stop`, all of them written and undamaged."""
        end: int = extend(self.mark(first), raw)
        return end == self.mark(stop)

    def wrong(self, ids: range | Ids, stored: Bytes) -> Ids:
        """Return the positions of the stored cells `[n, stride]` whose checksum differs."""
        cells = stored[:, : self.cell]
        stored_checks = np.ascontiguousarray(stored[:, self.cell :]).view("<u4").reshape(-1)
        return np.flatnonzero(stored_checks != self.checks(ids, cells))

    def fill_item(self) -> Bytes:
        """Return the bytes of one fill value."""
        one = to_numpy(full(LeafSpec((1,), self.spec.dtype, fill_value=self.spec.fill_value)))
        return np.frombuffer(one.tobytes(), np.uint8)

    def fill_cell(self) -> Bytes:
        """Return a cell of fill values."""
        if self._fill is None:
            pattern = self.fill_item()
            self._fill = np.tile(pattern, self.cell // len(pattern))
        return self._fill

    # -- ranges --------------------------------------------------------------------------
    def runs(self, ids: range | Ids) -> Iterator[tuple[int, int, int, int]]:
        """Yield runs of neighbouring cells: `(block, offset in it, first position in ids, last + 1)`."""
        first, last, per = int(ids[0]), int(ids[-1]), self.per_block
        if last - first == len(ids) - 1:
            at = first
            while at <= last:
                block, within = divmod(at, per)
                stop = min(last + 1, at - within + per)
                yield block, within * self.stride, at - first, stop - first
                at = stop
            return
        assert not isinstance(ids, range)
        blocks = ids // per
        offsets = (ids - blocks * per) * self.stride
        breaks = np.flatnonzero((ids[1:] != ids[:-1] + 1) | (blocks[1:] != blocks[:-1])) + 1
        starts = np.concatenate((_ZERO, breaks))
        yield from zip(
            blocks[starts].tolist(),
            offsets[starts].tolist(),
            starts.tolist(),
            [*breaks.tolist(), len(ids)],
            strict=True,
        )

    def get_run(self, first: int, stop: int) -> list[tuple[bytes, int, int]]:
        """Return packed GETRANGEs for neighbouring cells, one per block, each with the range of its cells."""
        per, stride = self.per_block, self.stride
        found = []
        while first < stop:
            block, at = divmod(first, per)
            end = min(stop, first - at + per)
            a, b = b"%d" % (at * stride), b"%d" % ((at + end - first) * stride - 1)
            command = b"*4\r\n$8\r\nGETRANGE\r\n%b$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
                self.packed_key(block),
                len(a),
                a,
                len(b),
                b,
            )
            found.append((command, first, end))
            first = end
        return found

    def get_commands(self, ids: Ids) -> tuple[list[bytes], Ids, Ids, Ids | None]:
        """Return packed GETRANGEs for sorted cells, the first cell and the count of cells of each, and which to take.

        Cells that are near one another are fetched as one range, with those between them: a command costs both
        sides more than some KiB do. The last item is None if no cell is between others.
        """
        stride, per = self.stride, self.per_block
        block = ids // per
        breaks = np.flatnonzero((np.diff(ids) > 1 + GAP // stride) | (block[1:] != block[:-1])) + 1
        heads = np.concatenate((_ZERO, breaks))
        begin = ids[heads]
        span = ids[np.concatenate((breaks - 1, [len(ids) - 1]))] - begin + 1
        take = None
        if int(span.sum()) != len(ids):
            moved = np.cumsum(span) - span - begin  # from the number of a cell to its place in the answers
            take = ids + np.repeat(moved, np.diff(heads, append=len(ids)))
        number = block[heads]
        start = (begin - number * per) * stride
        stop = start + span * stride - 1
        # How long the numbers are as text, for all at once: packing one by one takes twice the time.
        digits = [np.searchsorted(_TENS, n, "right").tolist() for n in (start, stop)]
        keys = {n: self.packed_key(n) for n in set(number.tolist())}
        commands = [
            b"*4\r\n$8\r\nGETRANGE\r\n%b$%d\r\n%d\r\n$%d\r\n%d\r\n" % (keys[n], i, a, j, b)
            for n, i, a, j, b in zip(number.tolist(), digits[0], start.tolist(), digits[1], stop.tolist(), strict=True)
        ]
        return commands, begin, span, take

    def set_commands(self, ids: range | Ids, stored: Bytes) -> list[Command]:
        """Return packed commands that write encoded, sorted cells."""
        commands: list[Command] = []
        for block, offset, i, j in self.runs(ids):
            data = stored[i:j]
            size = (j - i) * self.stride
            capacity = self.block_size(block) if self.mine is not None else self.per_block * self.stride
            if offset == 0 and size == capacity:
                # A whole block: no spare room is set aside for it, as SETRANGE would. The last one of a leaf that
                # of other clients may be longer than ours: it grows while another writer appends.
                head = b"*3\r\n$3\r\nSET\r\n%b$%d\r\n" % (self.packed_key(block), size)
            else:
                at = b"%d" % offset
                head = b"*4\r\n$8\r\nSETRANGE\r\n%b$%d\r\n%b\r\n$%d\r\n" % (
                    self.packed_key(block),
                    len(at),
                    at,
                    size,
                )
            commands.append((head, data) if size >= _ATTACHED else b"%b%b\r\n" % (head, data.tobytes()))
        return commands

    def bit_commands(self, ids: range | Ids) -> list[bytes]:
        """Return packed commands that mark sorted cells as written; none for those that are sealed."""
        if int(ids[-1]) < self.sealed:
            return []
        every = _listed(ids)
        open_ids = every[every >= self.sealed]
        if not len(open_ids):
            return []
        parts: list[bytes] = []
        breaks = np.flatnonzero(open_ids[1:] != open_ids[:-1] + 1) + 1
        starts = [0, *breaks.tolist()]
        for i, j in zip(starts, [*breaks.tolist(), len(open_ids)], strict=True):
            at, stop = int(open_ids[i]), int(open_ids[j - 1]) + 1
            while at < stop:
                width = min(32, stop - at)
                parts += [b"SET", b"u%d" % width, b"%d" % at, b"%d" % ((1 << width) - 1)]
                at += width
        key = self.bits_key
        return [
            b"*%d\r\n$8\r\nBITFIELD\r\n$%d\r\n%b\r\n" % (len(group) + 2, len(key), key)
            + b"".join([b"$%d\r\n%b\r\n" % (len(p), p) for p in group])
            for group in (parts[at : at + 4096] for at in range(0, len(parts), 4096))
        ]


def new_array(
    spec: LeafSpec, number: int, dataset: str, *, cell: int = TARGET_CELL, max_cell: int = MAX_CELL, block: int = BLOCK
) -> Array:
    """Choose cells and blocks for a new leaf.

    Args:
        spec: the spec of the leaf.
        number: the number of the array.
        dataset: the generation.
        cell: intended bytes of a cell.
        max_cell: largest bytes of a cell of one row.
        block: bytes of a block.
    """
    row = spec.replace(shape=spec.shape[1:]).nbytes if spec.shape else spec.nbytes
    item = spec.dtype.itemsize
    if not row:
        size = item
    elif not spec.shape:
        size = row
    elif row <= cell:
        size = cell // row * row
    elif row <= max_cell:
        size = row
    else:
        size = max(max_cell // item, 1) * item
    array = Array(spec, number, size, max(1, block // (size + CHECK)), dataset)
    array.mine = np.zeros(array.cells, np.bool_)
    return array
