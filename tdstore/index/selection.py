"""Batch indexing: what a torch-style index selects of a batch, kept lazy until it is read or written."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdstore.errors import BatchSizeError, DimensionError, IndexKindError, InvalidTypeError, OutOfRangeError
from tdstore.index.index_terms import as_terms, reaches_past, spelled_out, torch_terms
from tdstore.index.plans import Axis, ReadPlan, Term, WritePlan, Zipped, plan_read, plan_write
from tdstore.index.rows import (
    as_index_tensor,
    as_rows,
    as_slice,
    check_rows,
    gather,
    last_wins,
    mask_mismatch,
    out_of_range,
    runs,
    scatter,
    sorted_unique,
)
from tdstore.index.tracing import traced
from tdstore.pickling import rebuild

__all__ = [
    "ReadPlan",
    "Selection",
    "WritePlan",
    "as_rows",
    "gather",
    "index_shape",
    "last_wins",
    "runs",
    "scatter",
    "sorted_unique",
]


def checked_terms(terms: tuple[Any, ...], batch: torch.Size, entries: Iterable[object]) -> tuple[Any, ...]:
    """Check an index into a batch, or one with terms for more dimensions into each entry, and spell it out.

    Raises:
        OutOfRangeError: as `Selection.__getitem__`.
    """
    if not reaches_past(terms, len(batch)):
        terms = spelled_out(terms, len(batch))
        index_shape(batch, terms)
        return terms
    terms = torch_terms(terms)
    for leaf in entries:
        if isinstance(leaf, Tensor) and not leaf.is_nested:
            index_shape(leaf.shape, terms)
    return terms


def index_shape(shape: Iterable[int], index: object) -> torch.Size:
    """Return the batch size of `batch[index]` for a batch of `shape`, without touching data.

    Raises:
        OutOfRangeError: as `Selection.__getitem__`.

    Example:
        >>> index_shape((4, 3, 2), (..., None, [0, 1, 0]))
        torch.Size([4, 3, 1, 3])
    """
    if traced():
        device = next((term.device for term in as_terms(index) if isinstance(term, Tensor)), "cpu")
        return torch.empty((), device=device).expand(tuple(shape))[index].shape  # type: ignore[index]
    size = torch.Size(shape)
    found = _usual_shape(size, as_terms(index))
    return Selection.full(size)[index].shape if found is None else found


def _usual_shape(shape: torch.Size, terms: tuple[Any, ...]) -> torch.Size | None:
    """Compute what ints, slices, None and one tensor, mask or bool give; None for others and for errors."""
    sizes: list[int] = []
    dim, ndim, tensors = 0, len(shape), 0
    for term in terms:
        kind = type(term)
        if term is None:
            sizes.append(1)
            continue
        if kind is bool and not tensors:
            tensors = 1
            sizes.append(int(term))
            continue
        if dim == ndim:
            return None
        size = shape[dim]
        if kind is slice:
            if term.step is not None and (type(term.step) is not int or term.step <= 0):
                return None
            sizes.append(len(range(*term.indices(size))))
        elif kind is int:
            if not -size <= term < size:
                return None
        elif kind is Tensor and term.is_cpu and not tensors:
            tensors = 1
            if term.dtype is torch.int64:
                try:
                    check_rows(term, size, dim)
                except OutOfRangeError:  # another term may be wrong before it
                    return None
                sizes += term.shape
            elif term.dtype is torch.bool and term.ndim and term.shape == shape[dim : dim + term.ndim]:
                sizes.append(int(np.count_nonzero(term.numpy())))
                dim += term.ndim - 1
            else:
                return None
        else:
            return None
        dim += 1
    return torch.Size((*sizes, *shape[dim:]))


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Some positions of a batch, in some order and shape: what is left of it after indexing, again and again.

    Nothing is listed before it must be: ints and slices cost no memory however large the batch,
    and one-dimensional rows or masks cost their own length.

    Attributes:
        src_shape: the batch size that is selected from.
        shape: the batch size of the selection.

    Example:
        >>> window = Selection.full((10**12, 4))[10:][:5, 1]
        >>> window.shape, window.read_plan().index
        (torch.Size([5]), (slice(10, 15, 1), slice(1, 2, 1)))
    """

    src_shape: torch.Size
    shape: torch.Size
    _terms: tuple[Term, ...]
    _layout: tuple[Axis, ...]
    _plans: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """Plans that were made, for they are the same for every leaf."""

    @classmethod
    def full(cls, src_shape: Iterable[int]) -> Selection:
        """Select everything."""
        size = torch.Size(src_shape)
        return cls(size, size, tuple(map(range, size)), tuple(Axis("dim", d) for d in range(len(size))))

    @property
    def is_full(self) -> bool:
        """Whether this is the whole batch, in its own order and shape."""
        return self.shape == self.src_shape and all(
            isinstance(t, range) and t == range(n) for t, n in zip(self._terms, self.src_shape, strict=True)
        )

    def __getitem__(self, index: object) -> Selection:
        """Select further, exactly as torch indexes a tensor of this shape.

        Args:
            index: an int, slice, None, Ellipsis, bool, list, range, numpy array, tensor of ints or
                mask, or a tuple of these. A nested list is an index of several dimensions, as in numpy.

        Raises:
            OutOfRangeError: out of range, too many terms, a mask of the wrong shape, floats.
            InvalidArgumentError: a slice with a step that is not positive.
        """
        if type(index) is Tensor and (found := self._rows_of_one_dimension(index)) is not None:
            return found
        if type(index) is int and len(self._layout) == len(self._terms) == 1:
            term = self._terms[0]
            if type(term) is range and -len(term) <= index < len(term):  # the commonest number
                return Selection(self.src_shape, _NO_DIMENSIONS, (term[index],), ())
        work = _Indexing(self)
        work.apply(index)
        return _make(self.src_shape, work.terms, work.layout)

    def _rows_of_one_dimension(self, index: Tensor) -> Selection | None:
        """Parse the commonest index, rows of one dimension, in less time; return None for anything else."""
        if index.ndim != 1 or index.dtype is not torch.int64 or not index.is_cpu or len(self._layout) != 1:
            return None
        term = self._terms[0] if len(self._terms) == 1 else None
        if not isinstance(term, (range, Tensor)):
            return None
        rows = check_rows(index, len(term))
        picked = _pick(term, rows)
        # The caller's memory may change before this selection is used.
        picked = picked.clone() if picked is index else picked
        return Selection(self.src_shape, torch.Size((len(picked),)), (picked,), self._layout)

    def extend(self, more: Iterable[int]) -> Selection:
        """Add dimensions at the end of the source, all of them selected."""
        size = (*self.src_shape, *more)
        if len(size) == len(self.src_shape):
            return self
        extra = range(len(self.src_shape), len(size))
        return _make(
            torch.Size(size),
            [*self._terms, *(range(size[d]) for d in extra)],
            [*self._layout, *(Axis("dim", d) for d in extra)],
        )

    def by_dimension(self) -> tuple[int | slice | Tensor, ...] | None:
        """Return what is selected of each source dimension; None where dimensions are indexed together or are new."""
        order = [axis.n for axis in self._layout if axis.kind == "dim"]
        if len(order) != len(self._layout) or order != sorted(order):
            return None
        if any(isinstance(term, Zipped) for term in self._terms):
            return None
        return tuple(_as_index(term) for term in self._terms)

    @property
    def is_one(self) -> bool:
        """Whether the selection is one position of the source."""
        return all(axis.kind == "new" for axis in self._layout)

    def check_there(self, shape: Sequence[int]) -> None:
        """Look whether a source of that shape has all rows that are selected: some may have been removed since.

        Raises:
            BatchSizeError: it has not.
        """
        last: int | None = self._plans.get("last")
        if last is None:
            last = self._plans["last"] = _last(self._terms[0]) if self._terms else -1
        if last >= 0 and last >= shape[0]:
            raise BatchSizeError(
                f"row {last} was selected out of {self.src_shape[0]} rows, and now there are {shape[0]}",
                hint="index the TensorDict over the dataset again",
            )

    def read_plan(self) -> ReadPlan:
        """Plan to read this selection of a leaf whose leading dimensions are `src_shape`."""
        plan: ReadPlan | None = self._plans.get("read")
        if plan is None:
            plan = self._plans["read"] = plan_read(self._terms, self._layout, self.shape)
        return plan

    def write_plan(self) -> WritePlan:
        """Plan to write this selection of a leaf whose leading dimensions are `src_shape`."""
        plan: WritePlan | None = self._plans.get("write")
        if plan is None:
            plan = self._plans["write"] = plan_write(self._terms, self._layout, self.shape)
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the cached plans out of the pickle."""
        return rebuild, ("Selection", self.src_shape, self.shape, self._terms, self._layout)

    def __repr__(self) -> str:
        return f"Selection({list(self.shape)} of {list(self.src_shape)})"


_NO_DIMENSIONS = torch.Size()


def _last(term: Term) -> int:
    """Return the last position of a term; -1 if it has none."""
    if isinstance(term, int):
        return term
    if isinstance(term, range):
        return term[-1] if term else -1
    positions = term.positions if isinstance(term, Zipped) else term
    return int(np.maximum.reduce(positions.numpy(), None)) if positions.numel() else -1


def _as_index(term: Term) -> int | slice | Tensor:
    if isinstance(term, Zipped):
        raise InvalidTypeError("index tensors that are combined cannot index one dimension")
    if not isinstance(term, range):
        return term
    if term.step > 0:
        return slice(term.start, max(term.start, term.stop), term.step)
    return torch.tensor(list(term), dtype=torch.int64, device="cpu")


def _make(src_shape: torch.Size, terms: list[Term], layout: list[Axis]) -> Selection:
    """Put the zipped axes in the order of the layout, and unzip what need not be zipped."""
    zipped = {d: t.positions for d, t in enumerate(terms) if isinstance(t, Zipped)}
    if zipped:
        order = [a.n for a in layout if a.kind == "zip"]
        if not order:
            for d, positions in zipped.items():
                terms[d] = int(positions)
        else:
            if order != sorted(order):
                fresh = iter(range(len(order)))
                layout = [Axis("zip", next(fresh)) if a.kind == "zip" else a for a in layout]
                for d, positions in zipped.items():
                    terms[d] = Zipped(positions.permute(order))
            if len(order) == len(zipped) == 1:
                ((d, positions),) = zipped.items()
                plain = [Axis("dim", d) if a.kind == "zip" else a for a in layout]
                dims = [a.n for a in plain if a.kind == "dim"]
                if dims == sorted(dims):
                    terms[d], layout = positions, plain
    shape = torch.Size(_sizes(terms, layout))
    return Selection(src_shape, shape, tuple(terms), tuple(layout))


def _sizes(terms: list[Term], layout: Iterable[Axis]) -> list[int]:
    zip_shape = next((t.positions.shape for t in terms if isinstance(t, Zipped)), torch.Size())
    sizes = []
    for axis in layout:
        if axis.kind == "dim":
            sizes.append(len(terms[axis.n]))  # type: ignore[arg-type]
        else:
            sizes.append(axis.n if axis.kind == "new" else zip_shape[axis.n])
    return sizes


def _pick(term: Term, positions: Tensor) -> Tensor:
    """Return the source positions at `positions` of one dimension."""
    if isinstance(term, range):
        if term.step != 1:
            positions = positions * term.step
        return positions + term.start if term.start else positions
    assert isinstance(term, Tensor)
    return term.take(positions)


class _Indexing:
    """One indexing step, as torch does it: ints, slices and None first, then all tensors at once."""

    def __init__(self, selection: Selection) -> None:
        self.old = selection
        self.terms: list[Term] = list(selection._terms)
        self.layout: list[Axis] = []
        self.tensors: dict[int, Tensor] = {}  # by axis of `layout`
        self.dropped = 0  # zipped axes that ints have taken away so far

    def apply(self, index: object) -> None:
        terms = self._expand(index if isinstance(index, tuple) else (index,))
        dim = 0
        for term in terms:
            if term is None:
                self.layout.append(Axis("new", 1))
            elif isinstance(term, bool):
                self.tensors[len(self.layout)] = torch.zeros(int(term), dtype=torch.int64, device="cpu")
                self.layout.append(Axis("new", 1))
            elif isinstance(term, Tensor) and term.dtype is torch.bool:
                sizes = self.old.shape[dim : dim + term.ndim]
                if term.shape != sizes:
                    raise mask_mismatch(term.shape, dim, sizes)
                for column in np.nonzero(term.numpy()):
                    self._tensor(dim, torch.from_numpy(column))
                    dim += 1
            else:
                if isinstance(term, Tensor):
                    checked = check_rows(term, self.old.shape[dim], dim)
                    # The caller's memory may change before this selection is used.
                    self._tensor(dim, checked.clone() if checked is term else checked)
                elif isinstance(term, slice):
                    self._slice(dim, term)
                else:
                    self._int(dim, term)
                dim += 1
        if self.tensors:
            self._take()

    def _expand(self, index: tuple[Any, ...]) -> list[int | bool | slice | Tensor | None]:
        """Classify the terms and write out the Ellipsis (at the end if there is none)."""
        terms = [_classify(term) for term in index]
        used = sum(map(_consumes, terms))
        ndim = len(self.old.shape)
        if used > ndim:
            raise DimensionError(
                f"too many indices for batch size {list(self.old.shape)}: {used} for {ndim} dimensions"
            )
        dots = [i for i, t in enumerate(terms) if t is Ellipsis]
        if len(dots) > 1:
            raise DimensionError("an index can hold only one Ellipsis (...)")
        at = dots[0] if dots else len(terms)
        out: list[Any] = [*terms[:at], *[slice(None)] * (ndim - used), *terms[at + 1 :]]
        return out

    def _zipped(self, change: Any) -> None:
        for d, term in enumerate(self.terms):
            if isinstance(term, Zipped):
                self.terms[d] = Zipped(change(term.positions))

    def _axis(self, dim: int) -> Axis:
        axis = self.old._layout[dim]
        return Axis("zip", axis.n - self.dropped) if axis.kind == "zip" else axis

    def _tensor(self, dim: int, positions: Tensor) -> None:
        self.tensors[len(self.layout)] = positions
        self.layout.append(self._axis(dim))

    def _int(self, dim: int, i: int) -> None:
        size = self.old.shape[dim]
        if not -size <= i < size:
            raise out_of_range(i, dim, size)
        i %= size
        axis = self._axis(dim)
        if axis.kind == "dim":
            self.terms[axis.n] = int(self.terms[axis.n][i])  # type: ignore[index]
        elif axis.kind == "zip":
            self._zipped(lambda positions: positions.select(axis.n, i))
            self.dropped += 1

    def _slice(self, dim: int, part: slice) -> None:
        axis = self._axis(dim)
        if part.start is not None or part.stop is not None or part.step is not None:
            positions = as_slice(part, self.old.shape[dim])
            plain = slice(positions.start, max(positions.start, positions.stop), positions.step)
            if axis.kind == "dim":
                self.terms[axis.n] = self.terms[axis.n][plain]  # type: ignore[index]
            elif axis.kind == "zip":
                self._zipped(lambda old: old[(slice(None),) * axis.n + (plain,)])
            else:
                axis = Axis("new", len(positions))
        self.layout.append(axis)

    def _take(self) -> None:
        """Apply the tensors, all together."""
        places = list(self.tensors)
        if len(places) == 1 and self.tensors[places[0]].ndim == 1:
            self._take_rows(places[0], self.tensors[places[0]])
            return
        try:
            block = torch.Size(np.broadcast_shapes(*(t.shape for t in self.tensors.values())))
        except ValueError:
            shapes = ", ".join(str(list(t.shape)) for t in self.tensors.values())
            raise OutOfRangeError(f"index tensors of shapes {shapes} cannot be broadcast together") from None
        expanded = {place: tensor.expand(block) for place, tensor in self.tensors.items()}
        involved = [self.layout[p] for p in places]
        if all(axis.kind == "new" for axis in involved):
            new_axes = [Axis("new", n) for n in block]
            other = {}
        else:
            other = self._zip({axis: expanded[p] for p, axis in zip(places, involved, strict=True)}, block)
            new_axes = [Axis("zip", k) for k in range(len(block))]
        rest = [other.get(a, a) if a.kind == "zip" else a for p, a in enumerate(self.layout) if p not in expanded]
        # The dimensions that several tensors give come in their place, or first where that is torn apart.
        at = places[0] if places[-1] - places[0] == len(places) - 1 else 0
        self.layout = [*rest[:at], *new_axes, *rest[at:]]

    def _take_rows(self, place: int, rows: Tensor) -> None:
        axis = self.layout[place]
        if axis.kind == "dim":
            self.terms[axis.n] = _pick(self.terms[axis.n], rows)
        elif axis.kind == "zip":
            self._zipped(lambda positions: positions.index_select(axis.n, rows))
        else:
            self.layout[place] = Axis("new", len(rows))

    def _zip(self, expanded: dict[Axis, Tensor], block: torch.Size) -> dict[Axis, Axis]:
        """Zip the dimensions that tensors index with those zipped before: `[*block, *untouched zipped axes]`.

        Returns:
            What the untouched zipped axes have become.
        """
        before = next((t.positions.shape for t in self.terms if isinstance(t, Zipped)), torch.Size())
        free = [k for k in range(len(before)) if Axis("zip", k) not in expanded]
        shape = (*block, *(before[k] for k in free))
        tail = (1,) * len(free)
        picks = []
        for k, size in enumerate(before):
            if k in free:
                picks.append(torch.arange(size, device="cpu").reshape(-1, *(1,) * (len(free) - 1 - free.index(k))))
            else:
                picks.append(expanded[Axis("zip", k)].reshape(*block, *tail))
        self._zipped(lambda positions: positions[tuple(picks)].expand(shape))
        for axis, positions in expanded.items():
            if axis.kind == "dim":
                picked = _pick(self.terms[axis.n], positions)
                self.terms[axis.n] = Zipped(picked.reshape(*block, *tail).expand(shape))
        return {Axis("zip", k): Axis("zip", len(block) + i) for i, k in enumerate(free)}


def _consumes(term: object) -> int:
    """Count the dimensions that a term consumes."""
    if term is None or isinstance(term, (bool, EllipsisType)):
        return 0
    return term.ndim if isinstance(term, Tensor) and term.dtype is torch.bool else 1


def _classify(term: object) -> int | bool | slice | Tensor | EllipsisType | None:
    """Reduce the many kinds of index to a few."""
    if term is None or term is Ellipsis or isinstance(term, (bool, slice)):
        return term
    if isinstance(term, np.bool_):
        return bool(term)
    if isinstance(term, (int, np.integer)):
        return int(term)
    if isinstance(term, (Tensor, np.ndarray, list, range)):
        tensor = as_index_tensor(term)
        if tensor.ndim:
            return tensor
        return bool(tensor) if tensor.dtype is torch.bool else int(tensor)
    if isinstance(term, tuple):  # inside a tuple, as a list
        return as_index_tensor(list(term))
    try:
        return operator.index(term)  # type: ignore[arg-type]
    except TypeError:
        raise IndexKindError(
            f"an index holds ints, slices, None, ..., bools, lists, arrays or tensors, not {term!r} "
            f"of type {type(term).__qualname__}"
        ) from None
