"""The cells of changes as they are to be stored: new values over the present content, with checksums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from tdstore.types import Path
from tdstore_redis.cells.fetch import Promised, fetch, fetch_group
from tdstore_redis.cells.layout import Bytes, Command, Ids
from tdstore_redis.cells.plans import Change, Fetch, Rows, Run
from tdstore_redis.connection import Wire


class CellWrites(Protocol):
    """What one transaction writes to the cells of committed leaves."""

    @property
    def paths(self) -> set[Path]:
        """Return the leaves."""

    def partial_blocks(self) -> list[bytes]:
        """Return the keys of the blocks with cells that are changed in part, sorted."""

    def commands(self, wire: Wire, promised: Promised, before: Sequence[bytes]) -> list[Command]:
        """Return packed commands that write the cells.

        Args:
            wire: the connection.
            promised: returns which cells were written.
            before: packed commands that are sent before the old content is requested; `OK` is their only good reply.
        """


class Changes:
    """Writes as changes of any kind."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = changes

    @property
    def paths(self) -> set[Path]:
        return {change.path for change in self.changes}

    def partial_blocks(self) -> list[bytes]:
        return sorted({c.array.key(b) for c in self.changes for b in {i // c.array.per_block for i in c.needed}})

    def commands(self, wire: Wire, promised: Promised, before: Sequence[bytes]) -> list[Command]:
        found: list[Command] = []
        for change, stored in zip(self.changes, stored_cells(wire, self.changes, promised, before), strict=True):
            found += change.array.set_commands(change.ids, stored)
            found += change.array.bit_commands(change.ids)
        return found


def stored_cells(
    wire: Wire, changes: Sequence[Change], promised: Promised, before: Sequence[bytes] = ()
) -> list[Bytes]:
    """Return the cells of each change, `[n, stride]`: the new content, over the old one if necessary.

    Args:
        wire: the connection.
        changes: the changes.
        promised: returns which cells were written.
        before: packed commands that are sent before the old content is requested; `OK` is their only good reply.
    """
    held: list[Bytes] = []
    asked: list[Fetch] = []
    for change in changes:
        stored = np.empty((len(change.ids), change.array.stride), np.uint8)
        held.append(stored)
        cells = stored[:, : change.array.cell]
        if isinstance(change.ids, range):
            asked += [
                Run(change.path, change.array, cell, cell + 1, cells[at])
                for at, cell in zip(change.needs, change.needed, strict=True)
            ]
        elif change.needs:
            at = np.array(change.needs, np.int64)
            asked.append(Rows(change.path, change.array, change.ids[at], _into(cells, at)))
    if before:
        fetch_group(wire, asked, promised, before)
    elif asked:
        fetch(wire, asked, promised)
    counts = Counter(id(change.array) for change in changes)
    patched: dict[tuple[int, int], Bytes] = {}
    """Cells of which another change may have a part."""
    for change, stored in zip(changes, held, strict=True):
        cells = stored[:, : change.array.cell]
        shared = change.needs if counts[id(change.array)] > 1 else ()
        names = [(i, (id(change.array), int(change.ids[i]))) for i in shared]
        for i, name in names:
            if (there := patched.get(name)) is not None:
                cells[i] = there
        change.patch(cells)
        if change.repeated:
            names = [(i, (id(change.array), int(cell))) for i, cell in enumerate(change.ids)]
        patched.update((name, cells[i]) for i, name in names)
        change.array.seal(change.ids, stored)
    return held


def _into(cells: Bytes, at: Ids) -> Callable[[Bytes], None]:
    def take(data: Bytes) -> None:
        cells[at] = data

    return take
