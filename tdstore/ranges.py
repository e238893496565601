"""Byte ranges: which bytes of an array an index needs, and how to ask for many ranges in few requests. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from tdstore.types import StoreIndex

GAP = 64 << 10
"""Ranges this near to one another cost less fetched together than apart (a request is worth about as many bytes)."""
PART = 8 << 20
"""A request is not larger than this: several at once fill a wire better than one, and a retry costs less."""

Key = TypeVar("Key", bound=Hashable)
Ints = np.ndarray[Any, np.dtype[np.int64]]


def index_shape(shape: Sequence[int], index: StoreIndex) -> tuple[int, ...]:
    """The shape of `leaf[index]`."""
    head = (len(t) if isinstance(t, Tensor) else len(range(t.start, t.stop, t.step)) for t in index)
    return (*head, *shape[len(index) :])


def byte_ranges(shape: Sequence[int], itemsize: int, index: StoreIndex) -> Ints:
    """Where the bytes of `leaf[index]` lie in a C-order array: `[n, 2]`, start and stop, in the order of the result.

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


def cover(ranges: Ints, gap: int = GAP) -> Ints:
    """Sorted disjoint ranges that hold all of `ranges`; those at most `gap` bytes apart are made one.

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


class Range(NamedTuple):
    """Bytes `[start, stop)` of one object. A negative start with `stop=None` is the last bytes of it."""

    key: str
    start: int
    stop: int | None


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
        self._wanted: dict[Key, list[Ints]] = {}
        self._blocks: dict[Key, tuple[list[int], list[memoryview]]] = {}

    def want(self, key: Key, ranges: Ints) -> None:
        """Ask for `[n, 2]` byte ranges of an object."""
        if len(ranges):
            self._wanted.setdefault(key, []).append(ranges)

    def requests(self) -> list[tuple[Key, int, int]]:
        """What will be fetched, in order of object and offset."""
        return [
            (key, start, min(start + self.part, stop))
            for key, (a, b) in self._covered()
            for start in range(a, b, self.part)
            for stop in (b,)
        ]

    def _covered(self) -> Iterable[tuple[Key, tuple[int, int]]]:
        for key, ranges in self._wanted.items():
            for a, b in cover(np.concatenate(ranges), self.gap).tolist():
                yield key, (a, b)

    def fetch(self, get: Callable[[list[tuple[Key, int, int]]], Sequence[Any]]) -> None:
        """Fetch everything with one call of `get`, which returns a buffer for each request.

        Raises:
            EOFError: a buffer is not as long as was asked; its `args` are the key, start, stop and the length.
        """
        requests = self.requests()
        if not requests:
            return
        answers = get(requests)
        at = 0
        for key, (a, b) in self._covered():
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
        """The bytes `[start, stop)`, which must lie in a range that was asked for; no copy."""
        starts, blocks = self._blocks[key]
        i = bisect.bisect_right(starts, start) - 1
        at = starts[i]
        return blocks[i][start - at : stop - at]
