"""Division of work into batches of bounded memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

from tdstore.types import LeafSpec, Path, StoreIndex

T = TypeVar("T")
_NBYTES = attrgetter("nbytes")
BLOCK_BYTES = 32 << 20
MOST_BLOCKS = 8
"""A chunk of up to this many blocks is moved as a whole, since each part would decode and encode it again."""
ALIGN = 64
MAX_DIMS = 64

Batch = list[tuple[Path, StoreIndex]]


def row_ranges(rows: int, row_bytes: int, block_bytes: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of at most `block_bytes` (`BLOCK_BYTES`) each; a single row may be larger."""
    step = max(1, (block_bytes or BLOCK_BYTES) // max(1, row_bytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def leaf_batches(
    specs: Mapping[Path, LeafSpec],
    block_bytes: int = BLOCK_BYTES,
    chunks: Mapping[Path, Sequence[tuple[int, ...]]] | None = None,
    *,
    dims: int = 1,
) -> Iterator[Batch]:
    """Yield batches of `(path, index)` that cover all leaves, small leaves together, large ones in pieces.

    Args:
        specs: the leaves, in order.
        block_bytes: the largest number of bytes of a batch. A chunk of up to `MOST_BLOCKS` times as many, and an
            element of the first `dims` dimensions of any size, are a batch too.
        chunks: chunk shapes to which the pieces of a leaf are aligned, the most important first.
        dims: the number of leading dimensions that may be cut.
    """
    if specs and sum(map(_NBYTES, specs.values())) + ALIGN * len(specs) <= block_bytes:
        return iter([list(zip(specs, itertools.repeat(())))])  # no call for each leaf

    def cut() -> Iterator[tuple[tuple[Path, StoreIndex], int]]:
        for path, spec in specs.items():
            borders = chunks.get(path, ()) if chunks else ()
            whole = spec.nbytes <= block_bytes
            for index in ((),) if whole else pieces(spec.shape, spec.dtype.itemsize, block_bytes, borders, dims=dims):
                nbytes = spec.nbytes if whole else math.prod(index_shape(spec.shape, index)) * spec.dtype.itemsize
                yield (path, index), padded(nbytes)

    return in_blocks(cut(), block_bytes)


def in_blocks(sized: Iterable[tuple[T, int]], block_bytes: int) -> Iterator[list[T]]:
    """Yield lists of consecutive items of at most `block_bytes` together; a larger item is a list of its own.

    Args:
        sized: items, each with its bytes.
        block_bytes: the largest number of bytes of a list.

    Example:
        >>> list(in_blocks([("a", 3), ("b", 2), ("c", 9), ("d", 1)], 5))
        [['a', 'b'], ['c'], ['d']]
    """
    block: list[T] = []
    filled = 0
    for item, nbytes in sized:
        if block and filled + nbytes > block_bytes:
            yield block
            block, filled = [], 0
        block.append(item)
        filled += nbytes
    if block:
        yield block


def pieces(
    shape: Sequence[int],
    itemsize: int,
    block_bytes: int,
    chunks: Iterable[Sequence[int]] = (),
    *,
    dims: int = MAX_DIMS,
) -> Iterator[StoreIndex]:
    """Yield indices that cut a leaf into blocks of at most `block_bytes`, in C order; `()` for a single block.

    Args:
        shape: the shape of the leaf.
        itemsize: the bytes of an element.
        block_bytes: the largest number of bytes of a block.
        chunks: chunk shapes to which blocks are aligned, the most important first.
        dims: the number of leading dimensions that may be cut.

    Example:
        >>> [index[0] for index in pieces((10, 4), 1, 12)]
        [slice(0, 3, 1), slice(3, 6, 1), slice(6, 9, 1), slice(9, 10, 1)]
    """
    if math.prod(shape) * itemsize <= block_bytes or not shape:
        yield ()
        return
    inner = math.prod(shape[dims:]) * itemsize
    extent = _extent(shape[:dims], inner, block_bytes, [_full_rank(c, shape)[:dims] for c in chunks])
    cut = max((dim for dim, n in enumerate(extent) if n < shape[dim]), default=-1)
    terms = [[slice(a, min(a + n, size), 1) for a in range(0, size, n)] for n, size in zip(extent, shape, strict=False)]
    yield from itertools.product(*terms[: cut + 1])


def _extent(shape: Sequence[int], itemsize: int, block_bytes: int, chunks: list[tuple[int, ...]]) -> list[int]:
    """Return the shape of a block: of whole chunks of all shapes if that fits, else of the first shape that fits."""
    common = [tuple(map(math.lcm, *chunks))] if len(chunks) > 1 else []
    for unit in (*common, *chunks):
        extent = _grown(shape, itemsize, block_bytes, unit)
        if math.prod(extent) * itemsize <= block_bytes * (1 if unit in common else MOST_BLOCKS):
            return extent
    return _grown(shape, itemsize, block_bytes, (1,) * len(shape))


def _grown(shape: Sequence[int], itemsize: int, block_bytes: int, unit: Sequence[int]) -> list[int]:
    extent = list(shape)
    for dim, size in enumerate(shape):
        others = math.prod(n for d, n in enumerate(extent) if d != dim) * itemsize
        rows = block_bytes // others
        if rows >= size:
            break
        if rows >= unit[dim]:
            extent[dim] = rows // unit[dim] * unit[dim]
            break
        extent[dim] = min(unit[dim], size)
    return extent


def _full_rank(chunk: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(max(1, min(c, n)) for c, n in zip(chunk, shape, strict=False))
    return (*sizes, *(max(1, n) for n in shape[len(sizes) :]))


def padded(nbytes: int) -> int:
    """Round the bytes of a piece up to its size in a buffer of many pieces."""
    return -(-nbytes // ALIGN) * ALIGN


def index_shape(shape: Sequence[int], index: StoreIndex) -> tuple[int, ...]:
    """Return the shape of `leaf[index]` for an index of slices."""
    head = tuple(len(range(t.start, t.stop, t.step)) for t in index if isinstance(t, slice))
    return (*head, *shape[len(head) :])
