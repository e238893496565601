"""Batch-dimension algebra: pure functions on shapes, no tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from tdstore.arguments import as_list, check_int, refuse_type
from tdstore.errors import (
    ArgumentKindError,
    BatchSizeError,
    DimensionError,
    InvalidArgumentError,
    InvalidStateError,
    NoSizeError,
)
from tdstore.types import IndexType

LENGTHS: tuple[Any, ...] = (int, torch.SymInt)
"""The types of a length; torch uses symbolic ones while it traces a program."""


def as_size(value: Any) -> torch.Size:
    """Convert an int, any iterable of ints, or None (`torch.Size([])`) to a batch size."""
    kind = type(value)
    if kind is torch.Size:
        size: torch.Size = value
        return size
    if kind is list or kind is tuple:
        try:
            return torch.Size(value)
        except TypeError:
            raise _no_size(value) from None
    if value is None:
        return torch.Size(())
    if isinstance(value, LENGTHS):
        return torch.Size((value,))
    with suppress(TypeError):
        return torch.Size(tuple(value))
    try:
        return torch.Size((operator.index(value),))  # a number of numpy
    except TypeError:
        raise _no_size(value) from None


def _no_size(value: Any) -> NoSizeError:
    return NoSizeError(f"a batch size is an int or a sequence of ints, not {value!r}")


def flat_args(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Accept `f(2, 3)` and `f((2, 3))` alike, as torch's shape arguments."""
    if len(args) == 1 and not isinstance(args[0], LENGTHS):
        try:
            return tuple(args[0])
        except TypeError:
            raise ArgumentKindError(f"sizes and dimensions are ints or a sequence of ints, not {args[0]!r}") from None
    return args


def as_dim(dim: int, ndim: int, what: str = "batch dimensions") -> int:
    """Return a dimension as a non-negative number.

    Raises:
        DimensionError: outside `[-ndim, ndim)`.
        ArgumentKindError: no number.
    """
    if type(dim) is not int and not isinstance(dim, LENGTHS):
        try:
            dim = operator.index(dim)
        except TypeError:
            raise ArgumentKindError(f"a dimension is a number, not {dim!r}") from None
    if not -ndim <= dim < ndim:
        raise DimensionError(f"dimension {dim} is out of range for {ndim} {what}")
    return dim % ndim


def view_shape(old: Sequence[int], new: Sequence[int]) -> torch.Size:
    """Fill in a -1 and check that the number of elements stays.

    Raises:
        BatchSizeError: the sizes do not fit.
    """
    count = math.prod(old)
    if len(new) == 1 and new[0] == -1:
        return torch.Size((count,))
    if list(new).count(-1) > 1 or any(n < -1 for n in new):
        raise BatchSizeError(f"{list(new)} is not a shape: one -1 at most")
    if -1 in new:
        known = math.prod([n for n in new if n != -1])
        if known == 0 or count % known:
            raise BatchSizeError(f"a batch size of {list(old)} cannot be viewed as {list(new)}")
        return torch.Size(count // known if n == -1 else n for n in new)
    if math.prod(new) != count:
        raise BatchSizeError(f"a batch size of {list(old)} cannot be viewed as {list(new)}")
    return torch.Size(new)


def expand_shape(old: Sequence[int], new: Sequence[int]) -> torch.Size:
    """Return the batch size after `expand(*new)` (-1 keeps a dimension).

    Raises:
        BatchSizeError: a dimension that is neither 1 nor the size asked for.
    """
    lead = len(new) - len(old)
    if lead < 0:
        raise BatchSizeError(f"cannot expand a batch size of {list(old)} to the smaller {list(new)}")
    out = list(new[:lead])
    for have, want in zip(old, new[lead:], strict=True):
        if want not in (-1, have) and have != 1:
            raise BatchSizeError(f"cannot expand a batch size of {list(old)} to {list(new)}")
        out.append(have if want == -1 else want)
    if -1 in out:
        raise BatchSizeError(f"-1 in {list(new)} stands for a dimension that is not there yet")
    return torch.Size(out)


_PIECES = ("split_size", "an int or a sequence of ints")


def split_sizes(length: int, size: int | Sequence[int]) -> list[int]:
    """Return the lengths of the pieces of `split(size)`.

    Raises:
        BatchSizeError: the pieces do not add up to `length`. InvalidArgumentError: a size below 1.
    """
    if isinstance(size, int):
        if size <= 0:
            raise InvalidArgumentError(f"split_size must be at least 1, not {size}")
        return [min(size, length - i) for i in range(0, length, size)] or [0]
    if isinstance(size, str) or not all(isinstance(n, LENGTHS) for n in as_list(size, *_PIECES)):
        raise refuse_type(*_PIECES, size)
    if sum(size) != length or any(n < 0 for n in size):
        raise BatchSizeError(f"pieces of {list(size)} do not add up to a length of {length}")
    return list(size)


def chunk_size(length: int, chunks: int) -> int:
    """Return the length of the pieces of `chunk(chunks)`, the last of which may be shorter."""
    check_int(chunks, "chunks")
    if chunks < 1:
        raise InvalidArgumentError(f"chunks must be at least 1, not {chunks}")
    return max(1, -(-length // chunks))


def common_prefix(shapes: Iterable[Sequence[int]]) -> torch.Size:
    """Return the longest shape that all shapes start with; `[]` when there are none."""
    prefix: Sequence[int] | None = None
    for shape in shapes:
        if prefix is None:
            prefix = shape
            continue
        same = 0
        while same < min(len(prefix), len(shape)) and prefix[same] == shape[same]:
            same += 1
        prefix = prefix[:same]
    return torch.Size(prefix or ())


def infer_size_impl(shape: Sequence[int], numel: int) -> list[int]:
    """Fill in the -1 of a shape, so that it has a number of elements.

    Args:
        shape: sizes, at most one of them -1.
        numel: the number of elements.

    Raises:
        BatchSizeError: no size fits.

    Example:
        >>> infer_size_impl([4, -1], 12)
        [4, 3]
    """
    return list(view_shape((numel,), shape))


def convert_ellipsis_to_idx(index: IndexType, batch_size: Sequence[int]) -> IndexType:
    """Write an index with full slices in the place of its `...`.

    Args:
        index: an index, or a tuple of them.
        batch_size: of what is indexed.

    Raises:
        InvalidStateError: more than one `...`, or more dimensions than there are.

    Example:
        >>> convert_ellipsis_to_idx((..., 0), [4, 3])
        (slice(None, None, None), 0)
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not (count := sum(part is ... for part in parts)):
        return index
    if count > 1:
        raise InvalidStateError("an index has one ... at most")
    missing = len(batch_size) - sum(part is not None and part is not ... for part in parts)
    if missing < 0:
        raise InvalidStateError(f"too many indices for batch size {list(batch_size)}: {index}")
    at = next(i for i, part in enumerate(parts) if part is ...)
    return (*parts[:at], *[slice(None)] * missing, *parts[at + 1 :])
