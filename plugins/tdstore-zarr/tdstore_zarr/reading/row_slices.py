"""Many short slices of rows of one leaf, as of a ragged entry: planned and copied all at once, not one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from tdstore.types import LeafSpec, Read
from tdstore_zarr.layout.leaf import Leaf

MANY = 8
"""Slices from which on they are read together."""
SLICES_OF = 16 << 10
"""Chunks of up to this size are decoded one after another for one slice; larger ones perhaps in threads."""
SHORT = 1 << 20
"""Longer slices, in bytes, are read by themselves: they are decoded in threads."""

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class RowSlices:
    """Slices of the first dimension, by their chunk; their rows follow one another in the target."""

    chunks: Ints
    """The chunks that are touched, in order."""
    parts: Sequence[Sequence[tuple[int, int, int]]]
    """Of each chunk: the first row and the end of a part in it, and where the part goes."""
    per_chunk: int
    nbytes: int
    """Of a chunk."""

    @staticmethod
    def of(slices: Sequence[tuple[int, int]], leaf: Leaf) -> RowSlices:
        """Cut slices by chunks.

        Args:
            slices: the first row and the end of each; none is empty.
            leaf: whose chunks hold whole rows.
        """
        per, target = leaf.cut.inner[0], 0
        parts: dict[int, list[tuple[int, int, int]]] = {}
        for start, stop in slices:
            first, last = start // per, (stop - 1) // per
            if first == last:
                parts.setdefault(first, []).append((start - first * per, stop - first * per, target))
            else:
                for number in range(first, last + 1):
                    low, high = max(start, number * per), min(stop, (number + 1) * per)
                    part = (low - number * per, high - number * per, target + low - start)
                    parts.setdefault(number, []).append(part)
            target += stop - start
        chunks = sorted(parts)
        return RowSlices(np.array(chunks, np.int64), [parts[number] for number in chunks], per, leaf.cut.nbytes)

    def fill(self, out: np.ndarray[Any, Any], decode: Callable[[int, Bytes], None], begin: int, end: int) -> None:
        """Copy the rows of `chunks[begin:end]` to their targets; `decode(i, buffer)` decodes `chunks[i]`.

        Args:
            out: the target.
            decode: decodes a chunk.
            begin, end: the chunks.
        """
        to = out.reshape(-1).view(np.uint8).reshape(len(out), -1)
        buffer = np.empty(self.nbytes, np.uint8)
        source = buffer.reshape(self.per_chunk, -1)
        for at in range(begin, end):
            parts = self.parts[at]
            first, last, target = parts[0]
            if last - first == self.per_chunk and len(parts) == 1:
                decode(at, to[target : target + last - first].reshape(-1))
                continue
            decode(at, buffer)
            for first, last, target in parts:
                to[target : target + last - first] = source[first:last]


def read_together(wanted: Sequence[tuple[Any, Read]], spec_of: Callable[[Leaf], LeafSpec]) -> Iterator[tuple[Any, ...]]:
    """Yield the reads, those that are short slices of one leaf together.

    Args:
        wanted: reads, each with its leaf.
        spec_of: the spec of a leaf for the reader, which opened it earlier.

    Yields:
        the leaf and a read of it, or the leaf, the first of several reads, and the slices of these.
    """
    for _, group in groupby(wanted, key=lambda pair: id(pair[0])):
        pairs = list(group)
        leaf, reads = pairs[0][0], [read for _, read in pairs]
        slices = []
        if len(reads) >= MANY and isinstance(leaf, Leaf) and spec_of(leaf).shape[1:] == leaf.meta.shape[1:]:
            slices = _slices(leaf, reads)
        if slices:
            yield leaf, reads[0], *slices
        else:
            yield from pairs


def _slices(leaf: Leaf, reads: Sequence[Read]) -> list[tuple[int, int]]:
    """Return the slices of reads that can be read together; none if one of them cannot."""
    pipeline, inner, shape = leaf.cut.pipeline, leaf.cut.inner, leaf.meta.shape
    if pipeline is None or pipeline.big or not inner or inner[1:] != shape[1:] or 0 in shape:
        return []
    most = max(SHORT * inner[0] // max(leaf.cut.nbytes, 1), 1)
    found = []
    for read in reads:
        term = read.index[0] if len(read.index) == 1 else None
        if read.out is not None or not isinstance(term, slice) or term.step != 1:
            return []
        start, stop = term.start, term.stop
        if not start < stop <= start + most:
            return []
        found.append((start, stop))
    return found
