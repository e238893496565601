"""Writes of values by one call: all of them succeed, or, in committed leaves, none.

Small writes are one transaction. In larger ones, blocks that get all of their cells are staged: put under keys of a
number that no array has, which a note in `pending` lists. Then one transaction renames them, and changes the cells of
the other blocks. So if the server refuses, or the connection ends, before that, nothing visible has changed;
if the process is killed, the next writer removes the staged blocks of the note. If the other blocks are large,
too, the server copies them, and the copies are staged and changed while the blocks are watched.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from tdstore.errors import StoreError
from tdstore.types import Path, StoreIndex, Write
from tdstore_redis.cells.encoding import Changes
from tdstore_redis.cells.fetch import Damaged
from tdstore_redis.cells.layout import Array, Command
from tdstore_redis.cells.plans import Change, Fetch, plan_read, plan_write
from tdstore_redis.cells.same_rows import same_rows
from tdstore_redis.connection import Wire, pack
from tdstore_redis.faults import ServerError
from tdstore_redis.transactions.writer import Extra, Writer

STEP = 64 << 20
"""Bytes of cells in one transaction without staging, and at a time to uncommitted arrays."""
INLINE = 256 << 20
"""Bytes of cells of blocks that are changed in part, which a transaction with staged blocks takes: a server holds them
in memory until it is complete, and hangs up at 1 GiB."""
GROUP = 16 << 20
"""Bytes of cells that are staged in one round trip."""
_KEYS = 512
"""Keys that one command names."""
_NUMBERS = 1 << 61
"""Staged blocks are under numbers from here to twice that. No array has one: those are counted from 1."""

Item = tuple[Write, Array]


def write(writer: Writer, writes: Sequence[Write]) -> None:
    """Write values, in order; for the same cells, the last value wins."""
    items = [(w, writer.document.arrays[w.path]) for w in writes]
    with writer.line.errors("writing"):
        if writer.owns:
            _remember(writer, items)
        _put(writer, items)


def put_back(writer: Writer) -> None:
    """Restore rows that were written while the structure changed, the oldest last."""
    with writer.line.errors("taking back rows"):
        _put(writer, writer.replaced_rows[::-1])
        writer.replaced_rows.clear()


def _remember(writer: Writer, items: Iterable[Item]) -> None:
    """Read the rows that are to be replaced: the change of structure that they belong to may fail."""
    lengths = {array.number: array.spec.shape[:1] for array in writer.base.arrays.values()}
    for w, array in items:
        if array.mine is not None or array.number not in lengths or not w.value.numel():
            continue
        if lengths[array.number] and _first_row(w.index) >= lengths[array.number][0]:
            continue  # rows that the last commit does not have
        value = torch.empty(w.value.shape, dtype=w.value.dtype, device="cpu")
        ends: list[Callable[[], None]] = []
        writer.read(partial(_plan_read, w.path, array, w.index, value, ends), writer.wire())
        for end in ends[-1:]:
            end()
        writer.replaced_rows.append((Write(w.path, w.index, value), array))


def _plan_read(path: Path, array: Array, index: StoreIndex, out: Tensor, ends: list[Callable[[], None]]) -> list[Fetch]:
    fetches, end = plan_read(path, array, index, out)
    if end is not None:
        ends.append(end)
    return fetches


def _first_row(index: StoreIndex) -> int:
    if not index:
        return 0
    term = index[0]
    return int(term.min()) if isinstance(term, Tensor) else term.start


def _put(writer: Writer, items: Sequence[Item]) -> None:
    try:
        own = [item for item in items if item[1].mine is not None]
        if own:
            _put_own(writer, own)
        known = [item for item in items if item[1].mine is None] if own else items
        if known:
            _put_known(writer, known)
    except Damaged as damage:
        writer.explain(damage)


def _put_own(writer: Writer, items: Sequence[Item]) -> None:
    """Write values into arrays that are in no manifest yet, some at a time."""
    step: list[Change] = []
    paths: set[Path] = set()
    size = 0
    for w, array in items:
        for n, change in enumerate(plan_write(w.path, array, w.index, w.value)):
            if step and (size >= STEP or (n == 0 and w.path in paths)):  # rows that are written twice, in order
                writer.put(step)
                step, size = [], 0
                paths.clear()
            step.append(change)
            size += _size(change)
        paths.add(w.path)
    if step:
        writer.put(step)


def _put_known(writer: Writer, items: Sequence[Item]) -> None:
    if _put_same_rows(writer, items):
        return
    counts = Counter(array.number for _, array in items)
    repeated = {number for number, count in counts.items() if count > 1}
    step = _up_to(STEP, _changes(items, repeated))
    if step is None:
        _put_staged(writer, items, repeated)
    elif step:
        writer.transact(Changes(step))


def _put_same_rows(writer: Writer, items: Sequence[Item]) -> bool:
    """Write values as `SameRows`; return False, with nothing written, if they are of another kind or do not fit."""
    alike = same_rows(items)
    if alike is None:
        return False
    try:
        writer.transact(alike)
    except Damaged:
        return False  # a write as changes finds and names the cell
    return True


def _size(change: Change) -> int:
    return len(change.ids) * change.array.stride


def _up_to(limit: int, changes: Iterable[Change]) -> list[Change] | None:
    """Return all of these changes, unless they have more bytes of cells than the limit."""
    found: list[Change] = []
    size = 0
    for change in changes:
        size += _size(change)
        if size > limit and found:
            return None
        found.append(change)
    return found


def _changes(items: Iterable[Item], repeated: set[int], *, whole_blocks: bool | None = None) -> Iterator[Change]:
    """Yield the changes of all writes, in order.

    Args:
        items: the writes.
        repeated: numbers of arrays to which several of the writes go.
        whole_blocks: as for `plan_write`. Where order matters a block never counts as whole.
    """
    for w, array in items:
        again = array.number in repeated
        if again and whole_blocks:
            continue
        for change in plan_write(w.path, array, w.index, w.value, whole_blocks=None if again else whole_blocks):
            change.repeated = again
            yield change


def _put_staged(writer: Writer, items: Sequence[Item], repeated: set[int]) -> None:
    rest = partial(_changes, items, repeated, whole_blocks=False)
    inline = _up_to(INLINE, rest())
    staging = _Staging(writer, items, rest if inline is None else None)
    try:
        writer.note_pending(writer.wire())
        staging.put(_changes(items, repeated, whole_blocks=True))
        extra = Extra(staging.prepare, staging.commands, {w.path for w, _ in items if w.value.numel()})
        writer.transact(Changes(inline or ()), extra)
    except BaseException as error:
        try:
            if writer._lost is None:
                writer.unstage()
        except (StoreError, ServerError, OSError) as second:
            error.add_note(f"{writer.url}: staged rows could not be removed: {second}; the next writer does")
        raise
    writer.nothing_staged()


class _Staging:
    """Blocks under keys of their own, which one transaction renames to those of the leaves.

    Args:
        copied: changes that are made to copies of the blocks as they are.
    """

    def __init__(self, writer: Writer, items: Iterable[Item], copied: Callable[[], Iterable[Change]] | None) -> None:
        self.writer, self.copied = writer, copied
        self.arrays: dict[int, Array] = {}
        """By number of the array: the one that has its staged blocks."""
        self.blocks: dict[bytes, bytes] = {}
        """Key of each staged block, and the key that it gets."""
        self.copies: dict[bytes, bytes] = {}
        """The same, of copies."""
        self.bits: list[bytes] = []
        self.copied_bits: list[bytes] = []
        writer.staging = {}
        for _, array in items:
            if array.number not in self.arrays:
                number = _NUMBERS + secrets.randbelow(_NUMBERS)
                writer.staging[number] = array.blocks
                self.arrays[array.number] = array.staged(number)

    def put(self, changes: Iterable[Change]) -> None:
        """Stage blocks that get all of their cells."""
        self.bits = self._store(changes, self.blocks)

    def _store(self, changes: Iterable[Change], blocks: dict[bytes, bytes]) -> list[bytes]:
        group: list[Change] = []
        bits: list[bytes] = []
        size = 0
        for change in changes:
            if group and size + _size(change) > GROUP:
                self.writer.store(group)
                group, size = [], 0
            staged = self.arrays[change.array.number]
            for block in change.blocks():
                key = staged.key(block)
                blocks[key] = change.array.key(block)
                self.writer.staged.add(key)
            bits += change.array.bit_commands(change.ids)
            group.append(replace(change, array=staged))
            size += _size(change)
        if group:
            self.writer.store(group)
        return bits

    def prepare(self, wire: Wire) -> None:
        """Watch the note, so that staged blocks are renamed only while they belong to this session; make copies."""
        pending, mine = self.writer.keys.pending, self.writer.session.encode()
        _, noted = wire.raising([pack(b"WATCH", pending), pack(b"HEXISTS", pending, mine)])
        if noted and self.copied is not None:
            self._copy(wire, self.copied)
        keys = sorted(self.writer.staged)
        asked = [pack(b"EXISTS", *keys[at : at + _KEYS]) for at in range(0, len(keys), _KEYS)]
        if not noted or sum(wire.raising(asked)) != len(keys):
            raise self.writer.lose("the server removed rows while they were written; does its maxmemory-policy evict?")

    def _copy(self, wire: Wire, changes: Callable[[], Iterable[Change]]) -> None:
        blocks: dict[bytes, bytes] = {}
        for change in changes():
            staged = self.arrays[change.array.number]
            blocks.update((staged.key(block), change.array.key(block)) for block in change.blocks())
        self.writer.staged.update(blocks)
        every = list(blocks.items())
        for at in range(0, len(every), _KEYS):
            some = every[at : at + _KEYS]
            wire.raising(
                [
                    pack(b"WATCH", *[key for _, key in some]),
                    pack(b"UNLINK", *[staged for staged, _ in some]),  # of an attempt before
                    *[pack(b"COPY", key, staged) for staged, key in some],
                ]
            )
        self.copied_bits = self._store(changes(), blocks)
        self.copies = blocks

    def commands(self) -> list[Command]:
        """Return packed commands that move staged blocks to their keys."""
        renames = [pack(b"RENAME", *pair) for pair in chain(self.blocks.items(), self.copies.items())]
        wire = self.writer.wire()
        return [self.writer.pending_without_staging(wire), *renames, *self.bits, *self.copied_bits]
