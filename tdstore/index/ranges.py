"""Byte ranges: the bytes of an array that an index needs, merged into few requests. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from tdstore.errors import InvalidArgumentError
from tdstore.index.rows import check_indices
from tdstore.types import StoreIndex, Write, path_text

GAP = 64 << 10
"""Ranges this near to one another cost less fetched together than apart (a request is worth about as many bytes)."""
PART = 8 << 20
"""A request is not larger than this: several at once fill a wire better than one, and a retry costs less."""

Key = TypeVar("Key", bound=Hashable)
Ints = np.ndarray[Any, np.dtype[np.int64]]


def index_shape(shape: Sequence[int], index: StoreIndex) -> tuple[int, ...]:
    """Return the shape of `leaf[index]`."""
    out = list(shape)
    for dim, term in enumerate(index):
        out[dim] = len(term) if isinstance(term, Tensor) else len(range(term.start, term.stop, term.step))
    return tuple(out)


def check_writes(places: Iterable[tuple[Write, Sequence[int], torch.dtype]]) -> None:
    """Check the indices and values of all writes that reach a store, before any is written.

    Args:
        places: `(write, shape of the leaf, dtype of the leaf)`.

    Raises:
        OutOfRangeError: as of `check_indices`.
        InvalidArgumentError: a value has another shape or dtype than `leaf[index]`; names the leaf.
    """
    places = list(places)
    indexed = []
    for w, shape, _ in places:
        if w.index:
            indexed.append((w.index, shape))
    if indexed:
        check_indices(indexed)
    for w, shape, dtype in places:
        expected = index_shape(shape, w.index) if w.index else tuple(shape)
        if w.value.dtype is not dtype or tuple(w.value.shape) != expected:
            raise InvalidArgumentError(
                f"{path_text(w.path)} takes shape {list(expected)} and dtype {dtype} at this index, "
                f"not {list(w.value.shape)} and {w.value.dtype}"
            )


def byte_ranges(shape: Sequence[int], itemsize: int, index: StoreIndex) -> Ints:
    """Locate the bytes of `leaf[index]` in a C-order array: `[n, 2]`, start and stop, in the order of the result.

    Ranges that touch in that order are joined, so a slice of rows is one range whatever its length.

    Example:
        >>> byte_ranges((10, 4), 2, (slice(2, 5, 1),)).tolist()
        [[16, 40]]
        >>> byte_ranges((10, 4), 2, (torch.tensor([7, 0, 1]),)).tolist()
        [[56, 64], [0, 16]]
    """
    terms = list(index)
    while terms and isinstance(terms[-1], slice) and _is_full(terms[-1], shape[len(terms) - 1]):
        terms.pop()
    size = itemsize * math.prod(shape[len(terms) :])
    if not size or 0 in index_shape(shape, index):
        return np.empty((0, 2), np.int64)
    offset = 0
    if terms and isinstance(last := terms[-1], slice) and last.step == 1:
        offset, size = last.start * size, (last.stop - last.start) * size
        terms.pop()
        stride = itemsize * math.prod(shape[len(terms) :])
    else:
        stride = size
    starts = np.zeros(1, np.int64)
    strides: list[int] = []
    for dim in range(len(terms) - 1, -1, -1):
        strides.append(stride)
        stride *= shape[dim]
    for term, step in zip(terms, reversed(strides), strict=True):
        at = term.numpy() if isinstance(term, Tensor) else np.arange(term.start, term.stop, term.step, dtype=np.int64)
        starts = (starts[:, None] + at * step).ravel()
    starts = starts + offset
    return join(np.stack([starts, starts + size], 1))


def _is_full(term: slice, size: int) -> bool:
    return bool(term.start == 0 and term.stop == size and term.step == 1)


def join(ranges: Ints) -> Ints:
    """Join each range with the next where it starts where the one before stops."""
    if len(ranges) < 2:
        return ranges
    breaks = np.flatnonzero(ranges[1:, 0] != ranges[:-1, 1]) + 1
    first = np.concatenate([[0], breaks])
    last = np.concatenate([breaks, [len(ranges)]]) - 1
    return np.stack([ranges[first, 0], ranges[last, 1]], 1)


def distinct(numbers: Ints) -> Ints:
    """Return the distinct numbers of an array, ascending.

    `np.unique` of an array alone imports `numpy.ma`, which costs the first read of a process 13 ms.

    Args:
        numbers: int64, of any shape.

    Example:
        >>> distinct(np.array([[3, 1], [1, 3]])).tolist()
        [1, 3]
    """
    ordered = np.sort(numbers, axis=None)
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def cover(ranges: Ints, gap: int = GAP) -> Ints:
    """Merge ranges into sorted disjoint ones; those at most `gap` bytes apart become one.

    Example:
        >>> cover(np.array([[100, 110], [0, 10], [12, 20]]), gap=4).tolist()
        [[0, 20], [100, 110]]
    """
    if len(ranges) < 2:
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ranges[:, 1])
    first = np.concatenate([[0], np.flatnonzero(ranges[1:, 0] > ends[:-1] + gap) + 1])
    last = np.concatenate([first[1:], [len(ranges)]]) - 1
    return np.stack([ranges[first, 0], ends[last]], 1)


def cover_objects(objects: Ints, ranges: Ints, gap: int = GAP) -> tuple[Ints, Ints]:
    """Merge ranges of many objects at once, as `cover` does: `objects` has a number for each range; both come back
    sorted.

    Example:
        >>> objects, ranges = cover_objects(np.array([1, 0, 1]), np.array([[5, 9], [0, 3], [0, 4]]), gap=1)
        >>> objects.tolist(), ranges.tolist()
        ([0, 1], [[0, 3], [0, 9]])
    """
    if len(ranges) < 2:
        return objects, ranges
    order = np.lexsort((ranges[:, 0], objects))
    objects, ranges = objects[order], ranges[order]
    new = objects[1:] != objects[:-1]
    # The largest end so far of the same object: ends by their rank, so that all of an object are above the one before.
    ends, ranks = np.unique(ranges[:, 1], return_inverse=True)
    ranks = np.maximum.accumulate(np.concatenate([[0], np.cumsum(new)]) * len(ends) + ranks)
    reached = ends[ranks % len(ends)]
    first = np.concatenate([[0], np.flatnonzero(new | (ranges[1:, 0] > reached[:-1] + gap)) + 1])
    last = np.concatenate([first[1:], [len(ranges)]]) - 1
    return objects[first], np.stack([ranges[first, 0], reached[last]], 1)


class Range(NamedTuple):
    """Bytes `[start, stop)` of one object. A negative start with `stop=None` is the last bytes of it."""

    key: str
    start: int
    stop: int | None


class RangeInto(Range):
    """A range, and the memory that its bytes are for: an engine may write them there, and answer with that memory."""

    into: memoryview

    @classmethod
    def make(cls, key: str, start: int, into: memoryview) -> RangeInto:
        """Build the range that begins at `start` and is as long as the memory."""
        made = cls(key, start, start + into.nbytes)
        made.into = into
        return made


class Batch(Generic[Key]):
    """Ranges of many objects, fetched in one round.

    Collect what is wanted, fetch it all at once, then take each piece out: near ranges are one
    request, overlapping ones are fetched once, large ones come in parts.

    Example:
        >>> data = {"a": bytes(range(100))}
        >>> batch = Batch[str]()
        >>> batch.want("a", np.array([[10, 12], [14, 16]]))
        >>> batch.fetch(lambda asked: [data[key][a:b] for key, a, b in asked])
        >>> batch.take("a", 14, 16).tobytes()
        b'\\x0e\\x0f'
    """

    def __init__(self, *, gap: int = GAP, part: int = PART) -> None:
        self.gap = gap
        self.part = part
        self._numbers: dict[Key, int] = {}
        self._objects: list[Ints] = []
        self._ranges: list[Ints] = []
        self._blocks: dict[Key, tuple[list[int], list[memoryview]]] = {}

    def want(self, key: Key, ranges: Ints) -> None:
        """Ask for `[n, 2]` byte ranges of an object."""
        if len(ranges):
            self._objects.append(np.full(len(ranges), self._number(key)))
            self._ranges.append(ranges)

    def _number(self, key: Key) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def requests(self) -> list[tuple[Key, int, int]]:
        """Return what will be fetched, in order of object and offset."""
        return self._parts(self._covered())

    def _covered(self) -> list[tuple[Key, int, int]]:
        if not self._ranges:
            return []
        objects, ranges = cover_objects(np.concatenate(self._objects), np.concatenate(self._ranges), self.gap)
        keys = list(self._numbers)
        return [(keys[n], a, b) for n, (a, b) in zip(objects.tolist(), ranges.tolist(), strict=True)]

    def _parts(self, covered: Iterable[tuple[Key, int, int]]) -> list[tuple[Key, int, int]]:
        part = self.part
        return [(key, at, min(at + part, b)) for key, a, b in covered for at in range(a, b, part)]

    def fetch(self, get: Callable[[list[tuple[Key, int, int]]], Sequence[Any]]) -> None:
        """Fetch everything with one call of `get`, which returns a buffer for each request.

        Raises:
            EOFError: a buffer is not as long as was asked; its `args` are the key, start, stop and the length.
        """
        covered = self._covered()
        requests = self._parts(covered)
        if not requests:
            return
        answers = get(requests)
        at = 0
        for key, a, b in covered:
            parts = []
            for start in range(a, b, self.part):
                view = memoryview(answers[at]).cast("B")
                if len(view) != min(start + self.part, b) - start:
                    raise EOFError(key, start, min(start + self.part, b), len(view))
                parts.append(view)
                at += 1
            starts, blocks = self._blocks.setdefault(key, ([], []))
            starts.append(a)
            blocks.append(parts[0] if len(parts) == 1 else memoryview(b"".join(parts)))

    def take(self, key: Key, start: int, stop: int) -> memoryview:
        """Return the bytes `[start, stop)` without a copy; they must lie in a requested range."""
        starts, blocks = self._blocks[key]
        i = bisect.bisect_right(starts, start) - 1
        at = starts[i]
        return blocks[i][start - at : stop - at]
