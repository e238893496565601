"""Leaves whose rows lie in several places, one after the other: which rows of which place an index names. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from tdstore.errors import CorruptStoreError
from tdstore.index.ranges import distinct
from tdstore.types import LeafSpec, Path, StoreIndex, path_text

Role = Literal["rows", "spans", "offsets", "text", "unbatched"]
"""The purpose of a leaf: rows of an entry; places of the rows of a nested tensor; places of values per row, and the
bytes of these; or a tensor without rows, which all places share."""


class Part(msgspec.Struct, frozen=True):
    """The rows of one leaf that one place has."""

    place: int
    """The number of the place."""
    length: int
    """The number of its rows."""
    held: Tensor | None = None
    """The rows themselves, where the place has them in its header."""
    before: int = 0
    """For offsets: the number of elements that the earlier places have in the leaf that the offsets point into."""
    room: int = 0
    """For offsets: the number of elements that this place has in that leaf."""
    mark: int = 0
    """For text: the epoch that the header was written with."""


class Piece(NamedTuple):
    """The rows of one part that an index selects."""

    part: Part
    local: StoreIndex
    """In the leaf of that place."""
    positions: slice | Tensor
    """The positions of its rows in the result."""


class ConcatLeaf:
    """A leaf of several places.

    Args:
        spec: shape, dtype and fill value of the whole.
        parts: the places, in their order. Their lengths add up to that of the whole.
        role: what the leaf is for.
    """

    __slots__ = ("_ends", "parts", "role", "spec")

    def __init__(self, spec: LeafSpec, parts: list[Part], role: Role = "rows") -> None:
        self.spec, self.parts, self.role = spec, parts, role
        self._ends: np.ndarray[Any, np.dtype[np.int64]] = np.array(
            [*accumulate(part.length for part in parts)], np.int64
        )

    def pieces(self, index: StoreIndex) -> Iterator[Piece]:
        """Yield the parts that an index names rows of, in the order of the places.

        Args:
            index: checked against the shape of the whole.
        """
        if self.role == "unbatched":
            yield from (Piece(part, index, slice(None)) for part in self.parts)
            return
        first: Any
        first, *rest = index or (slice(0, int(self._ends[-1]), 1),)
        if isinstance(first, Tensor):
            yield from self._scattered(first, rest)
            return
        begin = int(np.searchsorted(self._ends, first.start, side="right"))
        for number in range(begin, len(self.parts)):
            part, end = self.parts[number], int(self._ends[number])
            low, high = end - part.length, min(end, first.stop)
            if low >= first.stop:
                return
            skipped = max(0, -(-(low - first.start) // first.step))
            start = first.start + skipped * first.step
            if start < high:
                count = -(-(high - start) // first.step)
                term = slice(start - low, high - low, first.step)
                yield Piece(part, (term, *rest), slice(skipped, skipped + count))

    def _scattered(self, rows: Tensor, rest: list[Any]) -> Iterator[Piece]:
        numbers = rows.numpy()
        which = np.searchsorted(self._ends, numbers, side="right")
        for number in distinct(which).tolist():
            part = self.parts[number]
            at = np.flatnonzero(which == number)
            local = numbers[at] - (int(self._ends[number]) - part.length)
            yield Piece(part, (torch.from_numpy(local), *rest), torch.from_numpy(at))

    def whole(self, part: Part, found: Tensor, path: Path, url: str) -> Tensor:
        """Return rows of a place as they are in the whole: offsets count from the first place on.

        Raises:
            CorruptStoreError: an offset points beyond the data that the place had when it was opened.
        """
        if self.role not in ("spans", "offsets") or not found.numel():
            return found
        if part.held is None:
            ints = found.numpy()
            reach = int(np.where(ints < 0, ~ints, ints).max()) if self.role == "offsets" else int(ints.max())
            if reach > part.room:
                raise CorruptStoreError(
                    f"a row of {path_text(path[:-1])} of {url} reaches beyond its {part.room} elements",
                    url=url,
                    hint="if another process writes there, concatenate the places again",
                )
        if not part.before:
            return found
        if self.role == "spans":
            return found + part.before
        none = (found == -1).all(-1, keepdim=True)  # both are -1: None
        moved = torch.where(found < 0, found - part.before, found + part.before)
        return torch.where(none, found, moved)
