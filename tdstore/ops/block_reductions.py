"""Reductions, each as a function of a whole tensor and as a merge over blocks of rows; the methods are in `reduce`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Dims = tuple[int, ...]
State = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction over `dims` (never empty), and the way to merge results over parts of dimension 0.

    `part`, `merge` and `finish` may be missing: then the reduction needs all rows at once.
    """

    whole: Callable[[Tensor, Dims, bool], Tensor]
    part: Callable[[Tensor, Dims, bool], State] | None = None
    merge: Callable[[State, State], State] | None = None
    finish: Callable[[State], Tensor] | None = None


def _first(state: State) -> Tensor:
    return state[0]


def _count(t: Tensor, dims: Dims) -> Tensor:
    return torch.tensor(torch.Size(t.shape[d] for d in dims).numel(), device="cpu")


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of many blocks, so that no block is lost to rounding."""
    return torch.complex128 if dtype.is_complex else torch.float64


def simple(fn: Callable[[Tensor, Dims, bool], Tensor], merge: Callable[[Tensor, Tensor], Tensor]) -> Reduction:
    """Build a reduction whose results over two parts are combined by `merge`."""
    return Reduction(fn, lambda t, d, k: (fn(t, d, k),), lambda a, b: (merge(a[0], b[0]),), _first)


def add_up(dtype: torch.dtype | None, *, nan: bool = False) -> Reduction:
    """Build the reduction for sum and nansum."""
    fn: Any = torch.nansum if nan else torch.sum

    def whole(t: Tensor, dims: Dims, keep: bool) -> Tensor:
        result: Tensor = fn(t, dims, keep, dtype=dtype)
        return result

    def part(t: Tensor, dims: Dims, keep: bool) -> State:
        if not (t.is_floating_point() or t.is_complex()):
            return (whole(t, dims, keep), t.new_empty(0, dtype=dtype or torch.int64))
        return (fn(t, dims, keep, dtype=_exact(dtype or t.dtype)), t.new_empty(0, dtype=dtype))

    def merge(a: State, b: State) -> State:
        return (a[0] + b[0], a[1])

    return Reduction(whole, part, merge, lambda s: s[0].to(s[1].dtype))


def multiply(dtype: torch.dtype | None) -> Reduction:
    """Build the reduction for prod; torch takes one dimension at a time."""

    def fn(t: Tensor, dims: Dims, keep: bool) -> Tensor:
        if not keep and t.ndim > 1 and len(dims) == t.ndim:
            return torch.prod(t, dtype=dtype)
        for d in sorted(dims, reverse=True):
            t = torch.prod(t, d, keep, dtype=dtype)
        return t

    return simple(fn, torch.mul)


def average(dtype: torch.dtype | None, *, nan: bool = False) -> Reduction:
    """Build the reduction for mean and nanmean."""
    fn: Any = torch.nanmean if nan else torch.mean

    def whole(t: Tensor, dims: Dims, keep: bool) -> Tensor:
        result: Tensor = fn(t, dims, keep, dtype=dtype)
        return result

    def part(t: Tensor, dims: Dims, keep: bool) -> State:
        kind = whole(t[:0] if t.ndim else t, dims, keep).dtype  # raises for integers, as torch does
        summed: Any = torch.nansum if nan else torch.sum
        counted = (~t.isnan()).sum(dims, keep) if nan else _count(t, dims)
        return (summed(t, dims, keep, dtype=_exact(kind)), counted, t.new_empty(0, dtype=kind))

    def merge(a: State, b: State) -> State:
        return (a[0] + b[0], a[1] + b[1], a[2])

    return Reduction(whole, part, merge, lambda s: (s[0] / s[1]).to(s[2].dtype))


def spread(correction: int, *, root: bool) -> Reduction:
    """Build std and var; blocks are merged in double precision (Chan, Golub and LeVeque, 1979)."""
    fn: Any = torch.std if root else torch.var

    def whole(t: Tensor, dims: Dims, keep: bool) -> Tensor:
        result: Tensor = fn(t, dims, correction=correction, keepdim=keep)
        return result

    def part(t: Tensor, dims: Dims, keep: bool) -> State:
        if not (t.is_floating_point() or t.is_complex()):
            whole(t[:0] if t.ndim else t, dims, keep)  # raises, as torch does
        kind = t.abs().dtype if t.is_complex() else t.dtype
        wide = t.to(_exact(t.dtype))
        mean = wide.mean(dims, True)
        off = (wide - mean).abs().square().sum(dims, keep)
        return (_count(t, dims), mean if keep else mean.squeeze(dims), off, t.new_empty(0, dtype=kind))

    def merge(a: State, b: State) -> State:
        n, delta = a[0] + b[0], b[1] - a[1]
        mean = a[1] + delta * (b[0] / n)
        return (n, mean, a[2] + b[2] + delta.abs().square() * (a[0] * b[0] / n), a[3])

    def finish(state: State) -> Tensor:
        variance = state[2] / (state[0] - correction).clamp(min=0)
        return (variance.sqrt() if root else variance).to(state[3].dtype)

    return Reduction(whole, part, merge, finish)


def length(dtype: torch.dtype | None) -> Reduction:
    """Build the reduction for the 2-norm."""

    def whole(t: Tensor, dims: Dims, keep: bool) -> Tensor:
        result: Tensor = torch.linalg.vector_norm(t, 2, dims, keep, dtype=dtype)
        return result

    def part(t: Tensor, dims: Dims, keep: bool) -> State:
        kind = whole(t[:0] if t.ndim else t, dims, keep).dtype
        return (t.to(_exact(t.dtype)).abs().square().sum(dims, keep), t.new_empty(0, dtype=kind))

    def merge(a: State, b: State) -> State:
        return (a[0] + b[0], a[1])

    return Reduction(whole, part, merge, lambda s: s[0].sqrt().to(s[1].dtype))


def argument(fn: Any) -> Reduction:
    """Build the reduction for the index of the largest or smallest element (`torch.max`, `torch.min`)."""
    better = torch.gt if fn is torch.max else torch.lt

    def part(t: Tensor, dims: Dims, keep: bool) -> State:
        found = fn(t, dims[0], keep)
        return (found.values, found.indices, torch.tensor(t.shape[dims[0]], device="cpu"))

    def merge(a: State, b: State) -> State:
        later = better(b[0], a[0])
        if b[0].is_floating_point():
            later |= b[0].isnan() & ~a[0].isnan()  # a NaN wins
        return (torch.where(later, b[0], a[0]), torch.where(later, b[1] + a[2], a[1]), a[2] + b[2])

    return Reduction(lambda t, d, k: fn(t, d[0], k).indices, part, merge, lambda s: s[1])


def _every(fn: Any) -> Callable[[Tensor, Dims, bool], Tensor]:
    def reduced(t: Tensor, dims: Dims, keep: bool) -> Tensor:
        result: Tensor = fn(t, dims, keep)
        return result

    return reduced


AMAX = simple(_every(torch.amax), torch.maximum)
AMIN = simple(_every(torch.amin), torch.minimum)
ALL = simple(_every(torch.all), torch.logical_and)
ANY = simple(_every(torch.any), torch.logical_or)
LOGSUMEXP = simple(_every(torch.logsumexp), torch.logaddexp)


def over_one(t: Tensor, dims: Dims, keep: bool, fn: Callable[[Tensor, bool], Tensor]) -> Tensor:
    """Reduce several dimensions with a function that takes only the last."""
    rest = [d for d in range(t.ndim) if d not in dims]
    result = fn(t.permute(*rest, *dims).flatten(len(rest)) if dims else t.unsqueeze(-1), False)
    if keep:
        for d in sorted(dims):
            result = result.unsqueeze(d)
    return result
