"""Selection of ranges to rewrite, so that many small updates leave no long manifests or half-empty objects. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tdstore.bytestore.table import Extents, Leaf, Table, coalesce
from tdstore.index.ranges import Ints
from tdstore.types import Path

WINDOW = 1 << 20
SPARE = 1024
"""Extents that a leaf may have whatever its size ..."""
BYTES_PER_EXTENT = 32 << 10
"""... and one more for so many of its bytes ..."""
MAX_EXTENTS = 1_000_000
"""... up to so many."""
SMALL_LEAF = 1 << 20
SMALL_SPARE = 16
"""A leaf of at most 1 MiB has fewer: reading them costs little."""
GROWTH = 2
"""An extent that is at least so many times as large as all behind it stays, so that appends copy a byte seldom."""
POOR = 4
"""An object is poor when less than a fourth of its bytes is in use."""
TINY_OBJECT = 256 << 10
MANY_TINY = 128
BUDGET = 64 << 20
"""At most so many bytes are moved out of poor and tiny objects at a commit."""


def allowed(nbytes: int) -> int:
    """Return how many extents a leaf of that size may have."""
    return SMALL_SPARE if nbytes <= SMALL_LEAF else min(SPARE + nbytes // BYTES_PER_EXTENT, MAX_EXTENTS)


def ranges_to_merge(leaf: Leaf) -> Ints | None:
    """Return the ranges of a leaf to rewrite, each as one extent; None if it has few enough.

    Half of the allowed number remains, so that the next commit does not rewrite again.
    """
    e = leaf.extents
    if len(e.start) <= SMALL_SPARE:
        return None
    # What is in memory becomes one piece anyway.
    nbytes = leaf.spec.nbytes
    extents = coalesce(Extents(e.start, e.stop, np.maximum(e.piece, -1), np.where(e.piece < 0, e.start, e.offset)))
    count, limit = len(extents.start), allowed(nbytes)
    if count <= limit:
        return None
    if nbytes <= SMALL_LEAF:
        end = int(extents.stop[-1])
        stays = extents.stop - extents.start >= GROWTH * (end - extents.stop)
        stays[-1] = False
        first = min(int(np.argmin(stays)), limit // 2)
        return np.array([[int(extents.start[first]), end]])
    row = leaf.row or 1
    window = max(WINDOW, -(-nbytes * SMALL_SPARE // limit) if limit == MAX_EXTENTS else 0)
    window = -(-window // row) * row
    numbers, sizes = np.unique(extents.start // window, return_counts=True)
    order = np.argsort(-sizes, kind="stable")
    left = count - np.cumsum(sizes[order] - 1)
    enough = int(np.searchsorted(-left, -(limit // 2), "left")) + 1
    chosen = np.sort(numbers[order[:enough]])
    starts = chosen * window
    return np.stack([starts, np.minimum(starts + window, nbytes)], 1)


def ranges_to_rewrite(table: Table) -> dict[Path, Ints]:
    """Return the ranges of leaves in poorly used or in far too many tiny objects."""
    if not len(table.objects):
        return {}
    size = np.array([o.size for o in table.objects], np.int64)
    live = np.zeros(len(size), np.int64)
    for _, extents, which in _stored(table):
        live += np.bincount(which, extents.stop - extents.start, len(size)).astype(np.int64)
    chosen = (live > 0) & (live * POOR < size) & (size > TINY_OBJECT)
    tiny = (live > 0) & (size <= TINY_OBJECT)
    if int(tiny.sum()) > MANY_TINY:
        chosen |= tiny
    order = np.argsort(np.where(chosen, live, np.iinfo(np.int64).max), kind="stable")
    order = order[: int(chosen.sum())]
    order = order[np.cumsum(live[order]) <= BUDGET]
    chosen[:] = False
    chosen[order] = True
    if not chosen.any():
        return {}
    found: dict[Path, Ints] = {}
    for path, extents, which in _stored(table):
        mine = extents.take(chosen[which])
        if len(mine.start):
            runs = coalesce(Extents(mine.start, mine.stop, mine.piece * 0, mine.start))
            found[path] = np.stack([runs.start, runs.stop], 1)
    return found


def _stored(table: Table) -> Iterator[tuple[Path, Extents, Ints]]:
    """Yield each leaf's extents on the storage, and their objects."""
    rows = table.pieces.rows
    for path, leaf in table.leaves.items():
        extents = leaf.extents.take(leaf.extents.piece >= 0)
        if len(extents.start):
            yield path, extents, rows[extents.piece, 0]
