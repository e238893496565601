"""Fetches of cells with checks, which distinguish cells that were never written from damaged ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tdstore.types import Path
from tdstore_redis.cells.layout import CHECK, Array, Bytes, Ids, extend
from tdstore_redis.cells.plans import Fetch, Rows, Run
from tdstore_redis.connection import Wire

WINDOW = 16 << 20
"""Bytes requested in one round trip: neither side buffers more of an answer."""
LARGE = 2 << 10
"""Replies of so many bytes on average are parsed one by one as they arrive; smaller ones cost less in one batch."""

Promised = Callable[[Wire, Array, Ids], "np.ndarray[Any, np.dtype[np.bool_]]"]
"""Which of these cells have been written, according to the notes on the server."""


class Damaged(Exception):
    """A cell is damaged. Becomes a `CorruptStoreError` when the dataset is still the same."""

    def __init__(self, path: Path, array: Array, reason: str) -> None:
        super().__init__(reason)
        self.path, self.array, self.reason = path, array, reason


def fetch(wire: Wire, fetches: Iterable[Fetch], promised: Promised) -> None:
    """Run all fetches, as many in one round trip as the window allows.

    Args:
        wire: the connection.
        fetches: the cells to fetch.
        promised: returns which cells were written.

    Raises:
        Damaged: a cell whose checksum differs, or that is missing.
    """
    group: list[Fetch] = []
    size = 0
    for one in fetches:
        if group and size + one.size > WINDOW:
            fetch_group(wire, group, promised)
            group, size = [], 0
        group.append(one)
        size += one.size
    if group:
        fetch_group(wire, group, promised)


def fetch_group(wire: Wire, group: Sequence[Fetch], promised: Promised, before: Sequence[bytes] = ()) -> None:
    """Run some fetches in one round trip.

    Args:
        wire: the connection.
        group: the fetches.
        promised: returns which cells were written.
        before: packed commands that are sent first; `OK` is their only good reply.
    """
    takers = [_RunTaker(one) if isinstance(one, Run) else _RowsTaker(one) for one in group]
    commands = [command for taker in takers for command in taker.commands]
    sizes = [size for taker in takers for size in taker.sizes]
    if sum(sizes) >= LARGE * len(sizes) or all(isinstance(taker, _RunTaker) for taker in takers):
        # Each is checked and copied to its place where it was received.
        parts = [(taker, i) for taker in takers for i in range(len(taker.commands))]

        def take(at: int, raw: Bytes) -> None:
            taker, i = parts[at]
            taker.take(i, raw)

        wire.strings(commands, sizes, take, before)
    else:
        replies = wire.raising([*before, *commands], limit=sum(sizes) + 32 * len(commands) + 4096)
        at = len(before)
        for taker in takers:
            taker.take_all(replies[at : at + len(taker.commands)])
            at += len(taker.commands)
    for taker in takers:
        taker.finish(wire, promised)


class _RunTaker:
    """Stores the cells of a run, and handles faulty replies after all others have arrived."""

    __slots__ = ("commands", "faulty", "parts", "run", "sizes")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.commands: list[bytes] = []
        self.parts: list[tuple[int, int]] = []
        self.sizes: list[int] = []
        for command, first, stop in run.array.get_run(run.first, run.stop):
            self.commands.append(command)
            self.parts.append((first, stop))
            self.sizes.append((stop - first) * run.array.stride)
        self.faulty: list[tuple[int, bytes]] = []

    def take(self, i: int, raw: Bytes) -> None:
        run, (first, stop) = self.run, self.parts[i]
        if len(raw) != self.sizes[i] or not run.array.fits(first, stop, raw):
            self.faulty.append((i, raw.tobytes()))
        elif len(run.into):
            run.put(first, stop, raw.reshape(-1, run.array.stride))

    def take_all(self, replies: list[bytes]) -> None:
        for i, reply in enumerate(replies):
            self.take(i, np.frombuffer(reply, np.uint8))

    def finish(self, wire: Wire, promised: Promised) -> None:
        for i, raw in self.faulty:
            first, stop = self.parts[i]
            stored = np.frombuffer(_padded(raw, self.sizes[i]), np.uint8).reshape(stop - first, -1)
            ids = np.arange(first, stop)
            self.run.put(first, stop, _checked(wire, self.run, ids, stored, ids - first, promised))


class _RowsTaker:
    """Collects the cells of single rows, with those between them, and selects the requested ones at the end."""

    __slots__ = ("begin", "commands", "goals", "good", "picked", "raw", "rows", "sizes", "span", "starts")

    def __init__(self, rows: Rows) -> None:
        array = rows.array
        self.rows = rows
        self.commands, self.begin, self.span, self.picked = array.get_commands(rows.ids)
        self.sizes: list[int] = (self.span * array.stride).tolist()
        self.starts: list[int] = array.marks(self.begin).tolist()
        self.goals: list[int] = array.marks(self.begin + self.span).tolist()
        self.raw: list[bytes] = []
        self.good: list[bool] = []

    def take(self, i: int, raw: Bytes) -> None:
        self.raw.append(raw.tobytes())
        self.good.append(extend(self.starts[i], raw) == self.goals[i])

    def take_all(self, replies: list[bytes]) -> None:
        self.raw = [*replies]
        crcs = list(map(extend, self.starts, replies))
        # All at once, as they nearly always are.
        self.good = [] if crcs == self.goals else [a == b for a, b in zip(crcs, self.goals, strict=True)]

    def finish(self, wire: Wire, promised: Promised) -> None:
        rows, array = self.rows, self.rows.array
        whole = all(self.good)
        if not whole:
            self.raw = [_padded(raw, size) for raw, size in zip(self.raw, self.sizes, strict=True)]
        stored = np.frombuffer(b"".join(self.raw), np.uint8).reshape(-1, array.stride)
        if self.picked is not None:
            stored = stored[self.picked]
        if whole:
            rows.take(stored[:, :-CHECK])
            return
        doubtful = np.repeat(~np.array(self.good), self.span)
        at = np.flatnonzero(doubtful if self.picked is None else doubtful[self.picked])
        rows.take(_checked(wire, rows, rows.ids, stored, at, promised))


# -- cells that are not written, or damaged ---------------------------------------------------


def _padded(raw: bytes, size: int) -> bytes:
    """Pad a short block with zeros: cells not written."""
    return raw[:size].ljust(size, b"\0")


def _checked(wire: Wire, one: Fetch, ids: Ids, stored: Bytes, at: Ids, promised: Promised) -> Bytes:
    """Return the data of stored cells `ids`, after a check of each cell at `at`.

    Args:
        wire: the connection.
        one: the fetch.
        ids: the numbers of the cells.
        stored: their bytes, with checksums.
        at: the positions of doubtful cells.
        promised: returns which cells were written.
    """
    array = one.array
    wrong = at[array.wrong(ids[at], stored[at])]
    if not len(wrong):
        return stored[:, :-CHECK]
    suspects = ids[wrong]
    empty = ~stored[wrong].any(axis=1)
    if not empty.all():
        cell = int(suspects[~empty][0])
        raise Damaged(one.path, array, f"cell {cell} of {array.cells} does not have its checksum")
    if int(suspects[0]) < array.sealed or promised(wire, array, suspects).any():
        raise Damaged(one.path, array, f"cell {int(suspects[0])} of {array.cells} is missing")
    cells = stored[:, :-CHECK].copy()
    cells[wrong] = array.fill_cell()
    return cells
