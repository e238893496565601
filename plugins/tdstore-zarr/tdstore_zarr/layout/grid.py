"""Intersection of an index with a grid of chunks. Pure.

Along each dimension an index is cut into pieces, one for each chunk that it touches; a chunk of the
grid is needed where pieces of all dimensions meet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from tdstore.types import StoreIndex

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Piece(NamedTuple):
    """The part of an index in one chunk, along one dimension."""

    chunk: int
    inside: Any
    """Slice or rows within the chunk."""
    outside: Any
    """Slice or positions in the result."""
    selected: int
    """How many elements."""


class Part(NamedTuple):
    """The part of an index in one chunk."""

    place: tuple[int, ...]
    """The chunk's coordinates in the grid."""
    inside: tuple[Any, ...]
    outside: tuple[Any, ...]
    counts: tuple[int, ...]


def pieces(size: int, chunk: int, term: slice | Tensor) -> list[Piece]:
    """Cut one term of an index by the chunks of its dimension; rows may come in any order and repeat.

    Example:
        >>> [(p.chunk, p.inside, p.outside) for p in pieces(10, 8, slice(2, 10, 3))]
        [(0, slice(2, 8, 3), slice(0, 2, None)), (1, slice(0, 2, 3), slice(2, 3, None))]
    """
    if isinstance(term, slice):
        return _slice_pieces(chunk, term)
    rows = term.numpy()
    if not len(rows):
        return []
    chunks = rows // chunk
    order = np.argsort(chunks, kind="stable")
    ordered = chunks[order]
    inside = rows[order] - ordered * chunk
    edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    starts = [0, *edges.tolist()]
    stops = [*edges.tolist(), len(rows)]
    if len(starts) == len(rows):
        return [
            Piece(c, slice(r, r + 1), slice(o, o + 1), 1)
            for c, r, o in zip(ordered.tolist(), inside.tolist(), order.tolist(), strict=True)
        ]
    return [Piece(int(ordered[a]), inside[a:b], order[a:b], b - a) for a, b in zip(starts, stops, strict=True)]


def _slice_pieces(chunk: int, term: slice) -> list[Piece]:
    start, stop, step = term.start, term.stop, term.step
    found = []
    at, out = start, 0
    while at < stop:
        number = at // chunk
        base = number * chunk
        end = min(stop, base + chunk)
        count = len(range(at, end, step))
        found.append(Piece(number, slice(at - base, end - base, step), slice(out, out + count), count))
        out += count
        at += count * step
    return found


def full_index(shape: Sequence[int], index: StoreIndex) -> list[slice | Tensor]:
    """Return the index with a term for every dimension."""
    return [*index, *[slice(0, n, 1) for n in shape[len(index) :]]]


def count_chunks(shape: Sequence[int], chunks: Sequence[int], index: StoreIndex) -> int:
    """Return an upper bound of the number of chunks that an index touches, without listing them."""
    total = 1
    for dim, (size, chunk) in enumerate(zip(shape, chunks, strict=True)):
        term = index[dim] if dim < len(index) else None
        if term is None:
            touched = -(-size // chunk)
        elif isinstance(term, Tensor):
            touched = min(len(term), -(-size // chunk))
        else:
            length = len(range(term.start, term.stop, term.step))
            touched = min(length, -(-term.stop // chunk) - term.start // chunk) if length else 0
        total *= touched
    return total


def parts(shape: Sequence[int], chunks: Sequence[int], index: StoreIndex) -> Iterator[Part]:
    """Yield every chunk that an index touches, in order, with the part of the index and its target."""
    cut = [pieces(n, c, term) for n, c, term in zip(shape, chunks, full_index(shape, index), strict=True)]
    if not cut:
        yield Part((), (), (), ())
        return
    if set(map(len, cut[1:])) == {1}:  # rows of whole chunks
        rest, inside, outside, counts = zip(*[p[0] for p in cut[1:]], strict=True)
        for c, i, o, n in cut[0]:
            yield Part((c, *rest), (i, *inside), (o, *outside), (n, *counts))
        return
    for combined in itertools.product(*cut):
        place, inside, outside, counts = zip(*combined, strict=True)
        yield Part(place, inside, outside, counts)


def strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return C-order strides of a grid, in chunks."""
    return tuple([math.prod(sizes[d + 1 :]) for d in range(len(sizes))])


def region(number: int, sizes: Sequence[int], chunk: Sequence[int]) -> tuple[slice, ...]:
    """Return the elements of the chunk with that C-order number, in an array of `sizes` chunks."""
    place = []
    for size in reversed(sizes):
        number, rest = divmod(number, size)
        place.append(rest)
    return tuple(slice(p * c, (p + 1) * c) for p, c in zip(reversed(place), chunk, strict=True))


def rows_of(term: slice | Tensor) -> Ints:
    """Return the positions that a term selects."""
    return term.numpy() if isinstance(term, Tensor) else np.arange(term.start, term.stop, term.step, dtype=np.int64)
