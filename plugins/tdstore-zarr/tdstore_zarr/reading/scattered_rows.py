"""Scattered rows of small chunks: planned and gathered all at once, not chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tdstore.types import StoreIndex
from tdstore_zarr.layout.leaf import Leaf

ROWS_OF = 64 << 10
"""Chunks up to this size are decoded into memory that many share."""
TOGETHER = 2 << 20
"""Bytes of chunks that are decoded before rows are copied from them."""

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the first dimension, by their chunk."""

    chunks: Ints
    """The chunks that are touched, in order."""
    edges: Ints
    """Where the rows of each begin among `inside` and `outside`; one more at the end."""
    inside: Ints
    """The position of each row in its chunk."""
    outside: Ints
    """Where it goes."""
    per_chunk: int
    nbytes: int
    """Of a chunk."""

    @staticmethod
    def of(numbers: Tensor, leaf: Leaf) -> Rows:
        """Return the rows of these numbers; chunks hold whole rows."""
        rows, each = numbers.numpy(), leaf.cut.inner[0]
        chunks = rows // each
        order = np.argsort(chunks, kind="stable")
        ordered = chunks[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        edges = np.append(starts, len(rows))
        return Rows(ordered[starts], edges, rows[order] - ordered * each, order, each, leaf.cut.nbytes)

    def fill(self, out: np.ndarray[Any, Any], decode: Callable[[int, Bytes], None], begin: int, end: int) -> None:
        """Copy the rows of `chunks[begin:end]` to their targets; `decode(i, buffer)` decodes `chunks[i]`.

        Args:
            out: the target.
            decode: decodes a chunk.
            begin, end: the chunks.
        """
        row = self.nbytes // self.per_chunk
        if self.per_chunk == 1:
            targets = out.reshape(-1).view(np.uint8).reshape(-1, row)
            firsts = self.outside[self.edges[begin:end]]
            for at, target in zip(range(begin, end), firsts.tolist(), strict=True):
                decode(at, targets[target])
            for at in (np.flatnonzero(np.diff(self.edges[begin : end + 1]) > 1) + begin).tolist():
                first, *others = self.outside[self.edges[at] : self.edges[at + 1]].tolist()
                targets[others] = targets[first]
            return
        to = out.reshape(-1).view(np.uint8).view(f"V{row}") if row > 1 else out.reshape(-1).view(np.uint8)
        lot = max(1, min(TOGETHER // self.nbytes, end - begin))
        buffer = np.empty((lot, self.nbytes), np.uint8)
        source = buffer.reshape(-1).view(to.dtype)
        for first in range(begin, end, lot):
            last = min(first + lot, end)
            for at in range(first, last):
                decode(at, buffer[at - first])
            a, b = int(self.edges[first]), int(self.edges[last])
            base = np.repeat(np.arange(last - first) * self.per_chunk, np.diff(self.edges[first : last + 1]))
            to[self.outside[a:b]] = source[base + self.inside[a:b]]


def are_whole(index: StoreIndex, out: np.ndarray[Any, Any], leaf: Leaf) -> bool:
    """Check whether an index selects rows as they are in chunks and in the target: whole, and in the same form."""
    inner, shape, pipeline = leaf.cut.inner, leaf.meta.shape, leaf.cut.pipeline
    return (
        pipeline is not None
        and not pipeline.big
        and inner[:1] != (0,)
        and inner[1:] == shape[1:]
        and out.shape[1:] == shape[1:]
        and out.flags.c_contiguous
        and out.flags.writeable
        and all(map(_whole, index[1:]))
    )


def _whole(term: slice | Tensor) -> bool:
    return isinstance(term, slice) and term.start == 0 and term.step == 1
