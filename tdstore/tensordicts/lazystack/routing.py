"""Where an index leads in a lazy stack: which elements, what each is indexed with, and where they are put.

Pure functions on the terms of an index and on shapes; nothing here knows containers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tdstore.errors import DimensionError, IndexKindError, InvalidArgumentError, OutOfRangeError
from tdstore.index.index_terms import dims_used, on_cpu
from tdstore.index.rows import as_rows
from tdstore.ops.rearrange import CopyFunction

_ALL = slice(None)


class Route(NamedTuple):
    """What an index does to a stack of `count` elements."""

    rows: int | Tensor
    """One element, or the numbers of those that are stacked again: an int64 tensor of any shape."""
    rest: tuple[Any, ...]
    """What each element is indexed with."""
    place: int
    """Where the dimensions of `rows` go in the result."""
    lift: bool
    """Whether `rest` puts a dimension of one at `place`, for the stack to go there."""
    masked: bool = False
    """Whether a mask says which elements: torch copies what a mask selects."""

    @property
    def index(self) -> Any:
        """`rest` in its shortest form."""
        rest = self.rest
        while len(rest) > 1 and type(rest[-1]) is slice and rest[-1] == _ALL:
            rest = rest[:-1]
        return rest[0] if len(rest) == 1 else rest

    @property
    def whole(self) -> bool:
        """Whether elements are taken as they are."""
        return all(type(t) is slice and t == _ALL for t in self.rest)


def _plain(term: Any) -> Any:
    """Convert ints of all kinds to int. torch takes a 0-d tensor for one, too."""
    if isinstance(term, Tensor):
        return int(term) if term.ndim == 0 and term.dtype is not torch.bool else term
    if term is None or isinstance(term, (slice, bool, np.bool_)):
        return term
    try:
        return operator.index(term)
    except TypeError:
        raise IndexKindError(
            f"a TensorDict is indexed with ints, slices, lists, tensors and masks, not with {term!r}"
        ) from None


def route(terms: tuple[Any, ...], dim: int, count: int, ndim: int) -> Route | None:
    """Follow an index, given as `spelled_out` gives it, into a stack along `dim` of a batch of `ndim` dimensions.

    None where elements are not taken whole and alike: several tensors side by side, masks over the stack
    dimension and others, scalar bools.

    Raises:
        OutOfRangeError: too many terms, or no such element. InvalidArgumentError: a negative step.
    """
    used = sum(map(dims_used, terms))
    if used > ndim:
        raise DimensionError(f"too many indices: {used} for {ndim} dimensions")
    full = (*map(_plain, terms), *(_ALL,) * (ndim - used))
    if not any(isinstance(t, Tensor) for t in full):
        full = tuple(None if t is True else t for t in full)  # to torch, a new dimension
    if any(isinstance(t, (bool, np.bool_)) or (isinstance(t, Tensor) and not t.ndim) for t in full):
        return None
    at = _covering(full, dim)
    hit = full[at]
    arrays = [i for i, t in enumerate(full) if isinstance(t, Tensor)]
    others = full[:at] + full[at + 1 :]
    before = sum(1 for t in full[:at] if t is None or isinstance(t, slice))
    if isinstance(hit, int):
        if not -count <= hit < count:
            raise OutOfRangeError(f"index {hit} is out of bounds for dimension {dim} with size {count}")
        return Route(hit % count, others, 0, False)
    if isinstance(hit, slice):
        start, stop, step = hit.indices(count)
        if step <= 0:
            raise InvalidArgumentError("slice step must be positive")
        rows = torch.arange(start, max(start, stop), step, device="cpu")
        if not arrays:
            return Route(rows, others, before, False)
        block = max(1 if full[i].dtype is torch.bool else full[i].ndim for i in arrays)
        first = _are_separated(full, arrays)
        place = block + before if first or arrays[0] < at else before
        if first and not _are_separated(others, [i for i, t in enumerate(others) if isinstance(t, Tensor)]):
            return Route(rows, (*full[:at], None, *full[at + 1 :]), place, True)
        return Route(rows, others, place, False)
    if len(arrays) > 1 or dims_used(hit) != 1:
        return None
    if hit.ndim == 1:
        return Route(_row_numbers(hit, count), others, before, False, hit.dtype is torch.bool)
    return Route(_row_numbers(hit.flatten(), count).reshape(hit.shape), others, before, False)


def _covering(full: Sequence[Any], dim: int) -> int:
    done = 0
    for at, term in enumerate(full):
        width = dims_used(term)
        if done <= dim < done + width:
            return at
        done += width
    raise AssertionError("unreachable: the terms cover every dimension")


def _row_numbers(term: Tensor, count: int) -> Tensor:
    rows = as_rows(term.cpu(), count)
    if isinstance(rows, Tensor):
        return rows
    return torch.arange(count, device="cpu")[rows]


def _are_separated(full: Sequence[Any], arrays: Sequence[int]) -> bool:
    """Return whether torch puts the dimensions of index tensors first, because something lies between them."""
    return bool(arrays) and any(t is None or isinstance(t, slice) for t in full[arrays[0] : arrays[-1]])


def positions(batch: torch.Size, terms: tuple[Any, ...]) -> Tensor:
    """Compute the flat position in the batch of each position of the result."""
    return torch.arange(batch.numel(), device="cpu").reshape(batch)[on_cpu(terms)]


def unravel(flat: Tensor, batch: torch.Size, dim: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Split flat positions into element numbers and an index into an element."""
    found = torch.unravel_index(flat, batch)
    return found[dim], (*found[:dim], *found[dim + 1 :])


def pick(value: Tensor, place: int, block: Sequence[int], number: int, ndim: int) -> Tensor:
    """Pick the part of a value for one element, the value aligned right to a result of `ndim` dimensions.

    Args:
        place: where the result has the dimensions of `block`.
        number: of the element, counting through `block`.
    """
    while value.ndim > ndim and value.shape[0] == 1:
        value = value[0]  # as torch does
    at, short = np.unravel_index(number, tuple(block)) if block else (), ndim - value.ndim
    for k in reversed(range(len(block))):
        dim = place + k - short
        if dim < 0:
            continue
        if value.shape[dim] not in (1, block[k]):
            raise OutOfRangeError(f"a value of shape {list(value.shape)} does not fit {block[k]} elements")
        value = value.select(dim, int(at[k]) if value.shape[dim] != 1 else 0)
    return value


class Traced(NamedTuple):
    """A result that is a view: where its elements lie."""

    rows: list[int] | int
    """The numbers of the elements, in order; one element where no dimension goes through them."""
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    """Result dimensions that go through the elements, of these sizes."""
    same: bool
    """Whether each element is there as it was."""


def trace(fn: Callable[[Tensor], Any], batch: Sequence[int], dim: int) -> list[Traced] | None:
    """Trace where a shape function moves the elements of a stack along `dim`. Return None unless it makes views.

    The function sees a tensor without data, whose strides tell its dimensions apart.
    """
    if isinstance(fn, CopyFunction):
        return None
    sizes = [2 if n < 0 else n for n in batch]
    base, n = 2 * max([1, *sizes]) + 3, len(sizes)
    if base**n >= 1 << 60:
        return None
    strides = [base ** (n - 1 - i) for i in range(n)]
    probe = torch.empty_strided(sizes, strides, dtype=torch.uint8, device="meta")
    try:
        made = fn(probe)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    outs = [made] if isinstance(made, Tensor) else list(made)
    storage = probe.untyped_storage()._cdata
    if any(not isinstance(out, Tensor) or out.untyped_storage()._cdata != storage for out in outs):
        return None
    return [_traced(out, sizes, strides, base, dim) for out in outs]


def merges_dims(old: Sequence[int], new: Sequence[int]) -> bool:
    """Return whether a view of shape `new` puts several dimensions of `old` into one. Plain numbers, for compilers."""
    if 0 in old:
        return False
    sizes = iter(new)
    for size in old:
        done = 1
        while done < size:
            done *= next(sizes)
        if done != size:
            return True
    return False


def wants_view(fn: Callable[[Tensor], Any], batch: Sequence[int]) -> bool:
    """Return whether a shape function refuses to copy, as `Tensor.view` does, where dimensions cannot be merged."""
    if isinstance(fn, CopyFunction):
        return False
    sizes = [2 if n < 0 else n for n in batch]
    strides = [1000 ** (len(sizes) - i) for i in range(len(sizes))]
    try:
        fn(torch.empty_strided(sizes, strides, dtype=torch.uint8, device="meta"))
    except RuntimeError:
        return True
    except (IndexError, ValueError, TypeError):
        pass  # told by whoever calls it
    return False


def _traced(out: Tensor, sizes: list[int], strides: list[int], base: int, dim: int) -> Traced:
    starts = [out.storage_offset() // s % base for s in strides]
    unit = strides[dim]
    steps = [s // unit if unit <= s < unit * base else 0 for s in out.stride()]
    dims = [q for q, step in enumerate(steps) if step and out.shape[q] > 1]
    if not dims:
        dims = [q for q, step in enumerate(steps) if step == 1 and out.stride(q) == unit][:1]
    rows = [starts[dim]]
    for q in dims:
        rows = [row + i * steps[q] for row in rows for i in range(out.shape[q])]
    left = [(out.shape[q], out.stride(q)) for q in range(out.ndim) if q not in dims]
    own = [(sizes[i], strides[i]) for i in range(len(sizes)) if i != dim]
    same = left == own and not any(s for i, s in enumerate(starts) if i != dim)
    return Traced(rows if dims else starts[dim], tuple(out.shape[q] for q in dims), tuple(dims), same)
