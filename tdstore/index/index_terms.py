"""Terms of a batch index: the dimensions of each, and the form in which torch applies it to a leaf."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from tdstore.errors import DimensionError
from tdstore.index.rows import as_index_tensor
from tdstore.index.tracing import traced
from tdstore.types import Names

T = TypeVar("T")
_LISTS = (list, range, tuple, np.ndarray)
_NARROW = (torch.int8, torch.int16)
_ALL = slice(None)
_INTS = (torch.int64, torch.int32, *_NARROW)


def as_terms(index: Any) -> tuple[Any, ...]:
    """Return an index as a tuple of terms."""
    return index if isinstance(index, tuple) else (index,)


def as_row(term: T) -> T | int:
    """Return numpy's ints, and tensors of one int on the CPU, as an int, which every way is shorter for.

    Other terms, and what a trace hides the value of, are returned as they are.
    """
    found: Any = term
    if type(found) is Tensor:
        is_row = not found.ndim and found.dtype in _INTS and found.is_cpu and not traced()
    else:
        is_row = isinstance(found, np.integer) and not traced()
    return int(found) if is_row else term


def on_cpu(index: T) -> T:
    """Return an index with its tensors on the CPU, for what has its positions there: values, parts of a stack."""
    moved: Any = index
    if isinstance(index, Tensor) and index.device.type not in ("cpu", "meta"):
        moved = index.cpu()
    elif isinstance(index, tuple):
        moved = tuple(on_cpu(term) for term in index)
    found: T = moved
    return found


def bounds_of(index: slice, size: int) -> tuple[int, int, int]:
    """Return `index.indices(size)` for a step that is not negative, in operations that torch 2.11 traces."""
    ends = []
    for end, default in ((index.start, 0), (index.stop, size)):
        end = default if end is None else end
        ends.append(max(end + size, 0) if end < 0 else min(end, size))
    return ends[0], ends[1], 1 if index.step is None else index.step


def basic_shape(terms: tuple[Any, ...], batch: torch.Size) -> tuple[tuple[Any, ...], torch.Size | None] | None:
    """Compute what ints, slices, None and one ellipsis give.

    Returns:
        The terms with the ellipsis as slices, since it must not reach into the feature dimensions of a leaf; and the
        batch size, or None where all of the batch is taken. None for an index of another kind, or with an error.
    """
    dots, used = -1, 0
    for at, term in enumerate(terms):
        if term is Ellipsis and dots < 0:
            dots = at
        elif term is not None:
            used += 1
    if dots >= 0:
        terms = (*terms[:dots], *(_ALL,) * (len(batch) - used), *terms[dots + 1 :])
    sizes: list[int] = []
    at, whole = 0, True
    for term in terms:
        if term is None:
            sizes.append(1)
            whole = False
            continue
        if at == len(batch):
            return None
        size, kind = batch[at], type(term)
        if kind is slice:
            if term is _ALL or term == _ALL:
                sizes.append(size)
            else:
                start, stop, step = bounds_of(term, size) if is_compiling() else term.indices(size)
                if step <= 0:
                    return None
                sizes.append(max(0, -(-(stop - start) // step)))
                whole = False
        elif kind is int and -size <= term < size:
            whole = False
        else:
            return None
        at += 1
    return terms, None if whole else torch.Size((*sizes, *batch[at:]))


def torch_terms(terms: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert terms that torch misreads as tensors: an empty list (taken for floats), a range, an int16 tensor."""
    made = tuple(map(_torch_term, terms))
    rows = [t for t in made if isinstance(t, Tensor) and t.dtype is not torch.bool]
    if len(rows) < 2 or all(t.numel() for t in rows):
        return made
    # Together they select nothing, so that torch looks at none of them: [0] is no error beside [].
    try:
        block = torch.broadcast_shapes(*(t.shape for t in rows))
    except RuntimeError:
        return made
    nothing = torch.empty(block, dtype=torch.int64, device="cpu")
    return tuple(nothing if isinstance(t, Tensor) and t.dtype is not torch.bool else t for t in made)


def _torch_term(term: Any) -> Any:
    if isinstance(term, _LISTS):
        return as_index_tensor(list(term) if isinstance(term, tuple) else term)
    return term.long() if isinstance(term, Tensor) and term.dtype in _NARROW else term


def spelled_out(terms: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """Convert as `torch_terms`, with the ellipsis as slices up to `ndim` batch dimensions."""
    terms = torch_terms(terms)
    for at, term in enumerate(terms):
        if term is Ellipsis:
            if any(t is Ellipsis for t in terms[at + 1 :]):
                raise DimensionError("an index can hold only one Ellipsis (...)")
            used = sum(map(dims_used, terms)) - 1
            return (*terms[:at], *(slice(None),) * (ndim - used), *terms[at + 1 :])
    return terms


def reaches_past(terms: tuple[Any, ...], ndim: int) -> bool:
    """Check whether an index has terms for more than `ndim` dimensions."""
    return sum([dims_used(term) for term in torch_terms(terms) if term is not Ellipsis]) > ndim


def dims_used(term: Any) -> int:
    """Count the dimensions that a term of `torch_terms` consumes: those of a mask, none for None and bools."""
    if term is None or isinstance(term, (bool, np.bool_)):
        return 0
    if isinstance(term, Tensor):
        return term.ndim if term.dtype is torch.bool else 1
    return 1


def indexed_names(names: Names, index: Any, ndim: int) -> Names:
    """Return the names after indexing: an int drops its dimension's, None inserts None, rows keep it, masks lose it."""
    if names is None:
        return None
    terms = spelled_out(as_terms(index), ndim)
    terms += (slice(None),) * (ndim - sum(map(dims_used, terms)))
    out: list[str | None] = []
    at = 0
    arrays = 0
    for term in terms:
        width = dims_used(term)
        if isinstance(term, slice):
            out.append(names[at])
        elif width == 0:
            out.append(None)
        elif (rank := int(getattr(term, "ndim", 0))) > 0:
            arrays += 1
            if arrays == 1:  # further arrays broadcast with the first
                out += [names[at]] if rank == width == 1 else [None] * (1 if width > 1 else rank)
        at += width
    if arrays > 1:
        return None
    return tuple(out) if any(n is not None for n in out) else None
