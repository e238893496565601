"""How a leaf lies on the server: cells with a checksum each, in numbered blocks. Pure: no I/O.

A leaf is its bytes in C order, cut into *cells* of equal size. A cell is stored behind four bytes of
checksum, and as many cells as fit into about a MiB lie behind one another in one string value, a *block*:

    key  tds:<dataset>:<array>:<block>      value  [check][cell][check][cell]...

Rows of a page or more have a cell each, small ones share one of half a KiB, and rows beyond 64 KiB are cut.
So any row is one GETRANGE that brings its checksum along, and a whole leaf a few large ones.

The check is crc32c of the cell, mixed with the leaf's identity and the cell's number: a cell that was
moved, or is of another generation, does not fit. It is never 0: zeros are a cell that was not written.
The last cell is as long as the others, filled up with the fill value, so that a leaf can grow in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import numpy as np

from tdstore.builtin.resident import full
from tdstore.dtypes import to_numpy
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
_TABLE = 1 << 18
"""Arrays of at most so many cells keep what their checks are mixed with: 4 bytes a cell."""
_ZERO: Ids = np.zeros(1, np.int64)
_TENS = np.array([0, *(10**n for n in range(1, 19))], np.int64)
_NONE: Ids = np.empty(0, np.int64)
_crc = google_crc32c.value


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
    """Cells written, while nobody but this process knows the array; None once it is in the manifest."""
    prefix: bytes = field(init=False)
    row: int = field(init=False)
    """Bytes of a row."""
    _seed: int = field(init=False)
    _keys: dict[int, bytes] = field(init=False, default_factory=dict)
    _mix: np.ndarray[Any, np.dtype[np.uint32]] | None = field(init=False, default=None)
    _fill: Bytes | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.prefix = b"tds:%b:%d:" % (self.dataset.encode(), self.number)
        digest = hashlib.blake2b(self.prefix, digest_size=8).digest()
        self._seed = int.from_bytes(digest, "little")
        shape = self.spec.shape
        self.row = self.spec.replace(shape=shape[1:]).nbytes if shape else self.spec.nbytes

    @property
    def stride(self) -> int:
        """Bytes from one stored cell to the next."""
        return self.cell + CHECK

    @property
    def cells(self) -> int:
        """Number of cells."""
        return -(-self.spec.nbytes // self.cell)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.cells // self.per_block)

    @property
    def rows_per_cell(self) -> int:
        """How many whole rows a cell holds; 0 when rows are cut."""
        return self.cell // self.row if self.row and self.cell % self.row == 0 else 0

    def block_size(self, block: int) -> int:
        """Bytes of a block when all its cells are there."""
        return min(self.per_block, self.cells - block * self.per_block) * self.stride

    def key(self, block: int) -> bytes:
        """The key of a block."""
        return self.prefix + b"%d" % block

    @property
    def bits_key(self) -> bytes:
        """The key of the bitmap of written cells, which only an array that is not sealed has."""
        return self.prefix + b"w"

    def packed_key(self, block: int) -> bytes:
        """The key of a block as an argument on the wire."""
        packed = self._keys.get(block)
        if packed is None:
            key = self.key(block)
            packed = self._keys[block] = b"$%d\r\n%b\r\n" % (len(key), key)
        return packed

    # -- checksums -----------------------------------------------------------------------
    def checks(self, ids: Ids, crcs: list[int]) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """The checks of cells with these crc32c."""
        if self.cells > _TABLE:
            mixed = self._mixed(ids)
        else:
            if self._mix is None or len(self._mix) < self.cells:
                self._mix = self._mixed(np.arange(self.cells))
            # Neighbours are the common case, and a slice costs nothing.
            first, last = int(ids[0]), int(ids[-1]) + 1
            mixed = self._mix[first:last] if last - first == len(ids) else self._mix[ids]
        found = np.array(crcs, np.uint32) ^ mixed
        if not found.all():
            found[found == 0] = 1
        return found

    def _mixed(self, ids: Ids) -> np.ndarray[Any, np.dtype[np.uint32]]:
        mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(self._seed)
        return (mixed >> np.uint64(32)).astype(np.uint32)

    def encode(self, ids: Ids, data: Bytes) -> Bytes:
        """Cells `[n, cell]` with their checks before them: `[n, stride]`."""
        stored = np.empty((len(ids), self.stride), np.uint8)
        stored[:, CHECK:] = data
        checks = self.checks(ids, [_crc(one) for one in data])
        stored[:, :CHECK] = checks.astype("<u4").view(np.uint8).reshape(-1, CHECK)
        return stored

    def wrong(self, ids: Ids, raw: bytes) -> Ids:
        """Positions of the stored cells in `raw` whose check does not fit."""
        cell, stride = self.cell, self.stride
        crcs = [_crc(raw[at : at + cell]) for at in range(CHECK, len(raw), stride)]
        if stride % CHECK:
            stored = np.frombuffer(raw, np.uint8).reshape(len(ids), stride)[:, :CHECK]
            told = np.ascontiguousarray(stored).view("<u4").reshape(-1)
        else:
            told = np.frombuffer(raw, "<u4")[:: stride // CHECK]
        differs = told != self.checks(ids, crcs)
        return np.flatnonzero(differs) if differs.any() else _NONE

    def fill_cell(self) -> Bytes:
        """A cell that holds the fill value only."""
        if self._fill is None:
            one = to_numpy(full(LeafSpec((1,), self.spec.dtype, fill_value=self.spec.fill_value)))
            pattern = np.frombuffer(one.tobytes(), np.uint8)
            self._fill = np.tile(pattern, self.cell // len(pattern))
        return self._fill

    # -- ranges --------------------------------------------------------------------------
    def runs(self, ids: Ids) -> Iterator[tuple[int, int, int, int]]:
        """Neighbouring cells together: `(block, offset in it, first position in ids, last + 1)`."""
        first, last = int(ids[0]), int(ids[-1])
        if last - first == len(ids) - 1 and last // self.per_block == first // self.per_block:
            yield first // self.per_block, first % self.per_block * self.stride, 0, len(ids)
            return
        block = ids // self.per_block
        offset = (ids - block * self.per_block) * self.stride
        breaks = np.flatnonzero((ids[1:] != ids[:-1] + 1) | (block[1:] != block[:-1])) + 1
        starts = np.concatenate(([0], breaks))
        yield from zip(
            block[starts].tolist(),
            offset[starts].tolist(),
            starts.tolist(),
            [*breaks.tolist(), len(ids)],
            strict=True,
        )

    def get_commands(self, ids: Ids) -> tuple[list[bytes], list[int], Ids | None]:
        """Packed GETRANGEs for sorted cells, how many bytes each should bring, and which of these cells to take.

        Cells that are near one another come in one range, with what is between them: a command costs both
        sides more than some KiB do. The last answer is None where nothing is.
        """
        stride, per = self.stride, self.per_block
        first, last = int(ids[0]), int(ids[-1])
        take = None
        if last - first == len(ids) - 1 and first // per == last // per:
            begin, span = ids[:1], np.array([len(ids)])
        else:
            block = ids // per
            step = ids[1:] - ids[:-1]
            breaks = np.flatnonzero((step > 1 + GAP // stride) | (block[1:] != block[:-1])) + 1
            heads = np.concatenate((_ZERO, breaks))
            begin = ids[heads]
            span = ids[np.concatenate((breaks - 1, [len(ids) - 1]))] - begin + 1
            if int(span.sum()) != len(ids):
                moved = np.cumsum(span) - span - begin  # from the number of a cell to its place in the answers
                take = ids + np.repeat(moved, np.diff(heads, append=len(ids)))
        number, at = np.divmod(begin, per)
        sizes = span * stride
        start = at * stride
        stop = start + sizes - 1
        # How long the numbers are as text, for all at once: packing one by one takes twice the time.
        digits = [np.searchsorted(_TENS, n, "right").tolist() for n in (start, stop)]
        keys = {n: self.packed_key(n) for n in set(number.tolist())}
        commands = [
            b"*4\r\n$8\r\nGETRANGE\r\n%b$%d\r\n%d\r\n$%d\r\n%d\r\n" % (keys[n], i, a, j, b)
            for n, i, a, j, b in zip(number.tolist(), digits[0], start.tolist(), digits[1], stop.tolist(), strict=True)
        ]
        return commands, sizes.tolist(), take

    def set_commands(self, ids: Ids, stored: Bytes) -> list[bytes]:
        """Packed commands that put encoded, sorted cells in their places."""
        commands = []
        for block, offset, i, j in self.runs(ids):
            data = stored[i:j].tobytes()
            if offset == 0 and len(data) == self.block_size(block):
                # A whole block: no spare room is set aside for it, as SETRANGE would.
                commands.append(b"*3\r\n$3\r\nSET\r\n%b$%d\r\n%b\r\n" % (self.packed_key(block), len(data), data))
                continue
            at = b"%d" % offset
            commands.append(
                b"*4\r\n$8\r\nSETRANGE\r\n%b$%d\r\n%b\r\n$%d\r\n%b\r\n"
                % (self.packed_key(block), len(at), at, len(data), data)
            )
        return commands

    def bit_commands(self, ids: Ids) -> list[bytes]:
        """Packed commands that mark sorted cells as written; none for those that are sealed."""
        if int(ids[-1]) < self.sealed:
            return []
        open_ids = ids[ids >= self.sealed]
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

    def own_keys(self) -> list[bytes]:
        """Every key that the array may have."""
        return [*map(self.key, range(self.blocks)), self.bits_key]


def new_array(
    spec: LeafSpec, number: int, dataset: str, *, cell: int = TARGET_CELL, max_cell: int = MAX_CELL, block: int = BLOCK
) -> Array:
    """Choose cells and blocks for a new leaf, which nobody knows yet."""
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
