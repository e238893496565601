"""Terms of a batch index: the dimensions of each, and the form in which torch applies it to a leaf."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tdstore.errors import DimensionError
from tdstore.index.rows import as_index_tensor
from tdstore.types import Names

T = TypeVar("T")
_LISTS = (list, range, tuple, np.ndarray)
_NARROW = (torch.int8, torch.int16)


def as_terms(index: Any) -> tuple[Any, ...]:
    """Return an index as a tuple of terms."""
    return index if isinstance(index, tuple) else (index,)


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
