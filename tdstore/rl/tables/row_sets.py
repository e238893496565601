"""Rows of a table that are written or read together."""

from __future__ import annotations

from collections.abc import Iterator

from tdstore.rl.tables.state import Ints

_BLOCK = 8 << 20
"""Bytes that are copied at once."""
RowSet = slice | Ints
"""Rows of the first dimension: a slice of step 1, or row numbers without repetition."""


def count_rows(rows: RowSet) -> int:
    """Count the rows of an index."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def part_of_rows(rows: RowSet, start: int, stop: int) -> RowSet:
    """Return some of the rows of an index."""
    if isinstance(rows, slice):
        return slice(rows.start + start, rows.start + stop)
    return rows[start:stop]


def blocks_of(rows: slice, row_bytes: int) -> Iterator[slice]:
    """Cut rows into blocks of a few MiB."""
    step = max(1, _BLOCK // max(1, row_bytes))
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(rows.stop, start + step))
