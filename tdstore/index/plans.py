"""Plans for reading and writing a selection: what to request from a store, and what torch does before or after."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from tdstore.index.rows import gather, last_wins, runs, sorted_unique, take, to_slice
from tdstore.pickling import rebuild
from tdstore.types import StoreIndex


class Zipped(NamedTuple):
    """Positions along one source dimension that go element by element with those of the other zipped dimensions."""

    positions: Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, ("Zipped", self.positions)


Term = int | range | Tensor | Zipped
"""The selection of one source dimension: one position, a range, rows (1-D), or its part of zipped positions."""


class Axis(NamedTuple):
    """Source of one dimension of a selection.

    `dim`: source dimension `n`. `new`: from nowhere, with `n` equal entries. `zip`: dimension `n`
    of the zipped positions; these axes always come in order.
    """

    kind: Literal["dim", "new", "zip"]
    n: int

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, ("Axis", self.kind, self.n)


_ALL = slice(None)
_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


class _Parts(NamedTuple):
    """Parts of a selection: its source dimensions by kind of term, its layout as a permutation."""

    zipped: tuple[int, ...]
    own_dims: tuple[int, ...]  # dimensions with an axis of their own, in order
    single: tuple[int, ...]  # dimensions at one position
    order: tuple[int, ...]  # axes (without new ones) as positions in [zip axes..., kept...]
    new: tuple[tuple[int, int], ...]  # (axis, size)
    zip_shape: tuple[int, ...]


_ROWS = _Parts((), (0,), (), (0,), (), ())
"""Rows of a batch of one dimension."""
_ONE = _Parts((), (), (0,), (), (), ())
"""One row of such a batch."""


def _parts(terms: Sequence[Term], layout: Sequence[Axis]) -> _Parts:
    zipped = tuple(d for d, t in enumerate(terms) if isinstance(t, Zipped))
    own_dims = tuple(a.n for a in sorted(layout) if a.kind == "dim")
    single = tuple(d for d, t in enumerate(terms) if isinstance(t, int))
    zip_shape = tuple(terms[zipped[0]].positions.shape) if zipped else ()  # type: ignore[union-attr]
    place = {Axis("zip", k): k for k in range(len(zip_shape))}
    place |= {Axis("dim", d): len(zip_shape) + k for k, d in enumerate(own_dims)}
    order = tuple(place[a] for a in layout if a.kind != "new")
    new = tuple((i, a.n) for i, a in enumerate(layout) if a.kind == "new")
    return _Parts(zipped, own_dims, single, order, new, zip_shape)


def _permute(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Permute the leading axes."""
    if all(i == n for i, n in enumerate(order)):
        return tensor
    return tensor.permute(*order, *range(len(order), tensor.ndim))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _rows_or_slice(rows: Tensor) -> Tensor | slice:
    """Return a slice where rows follow each other without a gap."""
    count = len(rows)
    if count == 0:
        return slice(0, 0, 1)
    first, last = int(rows[0]), int(rows[-1])
    if last - first != count - 1 or (count > 2 and not bool((np.diff(rows.numpy()) == 1).all())):
        return rows
    return slice(first, last + 1, 1)


# -- reading ------------------------------------------------------------------------------


class ReadPlan(msgspec.Struct, frozen=True, eq=False):
    """Plan for reading a selection: read `leaf[index]` from a store, then `finish` the result.

    Attributes:
        index: what to ask for, over all the leading (batch) dimensions of a leaf.
        exact: what comes back is what was selected: `finish` does nothing.
    """

    index: StoreIndex
    exact: bool
    _shape: tuple[int, ...]
    _lead: int
    _parts: _Parts
    _local: tuple[tuple[int, Tensor], ...]  # rows to gather along a dimension after reading
    _linear: Tensor | None  # where the zipped elements lie in what was read of the zipped dimensions

    def finish(self, tensor: Tensor) -> Tensor:
        """Turn the result of a store, `[*index, *feature]`, into `[*selection, *feature]`; copies only to gather."""
        if self.exact:
            return tensor
        if self._parts is _ONE:
            return tensor[0]
        if 0 in self._shape:
            return tensor.new_empty((*self._shape, *tensor.shape[self._lead :]))
        parts = self._parts
        for dim, rows in self._local:
            tensor = gather(tensor, (_ALL,) * dim + (rows,))
        if parts.zipped:
            rest = [d for d in range(self._lead) if d not in parts.zipped]
            tensor = _permute(tensor, [*parts.zipped, *rest]).flatten(0, len(parts.zipped) - 1)
            if self._linear is not None:
                tensor = gather(tensor, (self._linear,))
            for at in reversed([i for i, d in enumerate(rest) if d in parts.single]):
                tensor = tensor.select(at + 1, 0)
            tensor = tensor.reshape((*parts.zip_shape, *tensor.shape[1:]))
        else:
            for dim in reversed(parts.single):
                tensor = tensor.select(dim, 0)
        tensor = _permute(tensor, parts.order)
        for axis, size in parts.new:
            tensor = tensor.unsqueeze(axis)
            if size != 1:
                tensor = tensor.expand(*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
        return tensor

    def into(self, out: Tensor) -> Tensor | None:
        """View `out`, `[*selection, *feature]`, in the shape of a store's result: reading into the view fills `out`.

        `None` when something is to be gathered after reading, or `out` cannot be viewed so.
        """
        if self.exact:
            return out
        parts = self._parts
        if self._local or self._linear is not None or 0 in self._shape or any(size != 1 for _, size in parts.new):
            return None
        for axis, _ in reversed(parts.new):
            out = out.select(axis, 0)
        out = _permute(out, _inverse(parts.order))
        if parts.zipped:
            if len(parts.zip_shape) > 1:
                if not out.is_contiguous():
                    return None
                out = out.flatten(0, len(parts.zip_shape) - 1)
            out = out.movedim(0, sum(d < parts.zipped[0] for d in parts.own_dims))
        for dim in parts.single:
            out = out.unsqueeze(dim)
        return out


def plan_read(terms: Sequence[Term], layout: Sequence[Axis], shape: Sequence[int]) -> ReadPlan:
    """Plan to read a selection in one request, with rows along one dimension and slices along the others."""
    if len(terms) == len(layout) == 1 and isinstance(terms[0], Tensor) and len(terms[0]):  # most of what is read
        return ReadPlan((_rows_or_slice(terms[0]),), True, tuple(shape), 1, _ROWS, (), None)
    if len(terms) == 1 and not layout and isinstance(terms[0], int):
        return ReadPlan((slice(terms[0], terms[0] + 1, 1),), False, (), 1, _ONE, (), None)
    parts = _parts(terms, layout)
    if 0 in shape:
        return ReadPlan((slice(0, 0, 1),) * len(terms), False, tuple(shape), len(terms), parts, (), None)
    index = [_basic(t) for t in terms]
    rows = {d: r for d, t in enumerate(terms) if (r := _flat_rows(t)) is not None}
    local: list[tuple[int, Tensor]] = []
    linear = None
    if len(rows) == 1:
        ((dim, only),) = rows.items()
        index[dim] = _rows_or_slice(only)
    elif rows:
        unique = {d: sorted_unique(r) for d, r in rows.items()}
        extents = {d: int(u[-1]) - int(u[0]) + 1 for d, (u, _) in unique.items()}
        # A store takes rows along one dimension: where they are sparsest. The others are bounded by slices.
        best = min(rows, key=lambda d: len(unique[d][0]) / extents[d])
        within: dict[int, Tensor | None] = {}  # None: all that was read, in order
        sizes = extents.copy()
        for dim, (u, inverse) in unique.items():
            if dim == best and len(u) < extents[dim]:
                index[dim], within[dim], sizes[dim] = u, inverse, len(u)
            else:
                index[dim] = slice(int(u[0]), int(u[-1]) + 1, 1)
                within[dim] = None if inverse is None and len(u) == extents[dim] else rows[dim] - u[0]
        local = [(d, at) for d, at in within.items() if d not in parts.zipped and at is not None]
        if len(parts.zipped) == 1:
            linear = within[parts.zipped[0]]
        elif parts.zipped:
            linear = torch.zeros((), dtype=torch.int64, device="cpu")
            for dim in parts.zipped:
                at = within[dim]
                linear = linear * sizes[dim] + (torch.arange(sizes[dim], device="cpu") if at is None else at)
    exact = not (local or parts.zipped or parts.single or parts.new)
    return ReadPlan(tuple(index), exact, tuple(shape), len(terms), parts, tuple(local), linear)


def _basic(term: Term) -> slice | Tensor:
    if isinstance(term, range):
        return to_slice(term)
    return slice(term, term + 1, 1) if isinstance(term, int) else slice(0, 0, 1)


def _flat_rows(term: Term) -> Tensor | None:
    if isinstance(term, Zipped):
        return term.positions.flatten()
    return term if isinstance(term, Tensor) else None


# -- writing ------------------------------------------------------------------------------


class _Piece(msgspec.Struct, frozen=True, eq=False):
    index: StoreIndex
    zipped: Tensor | None  # which of the zipped elements
    cuts: tuple[tuple[int, int, int], ...]  # (axis, start, length) along kept dimensions


class WritePlan(msgspec.Struct, frozen=True, eq=False):
    """Plan for writing a selection: pieces that together hold the selected positions and nothing else.

    Attributes:
        indices: what is written, one `StoreIndex` a piece, over all the leading dimensions of a leaf.
        exact: there is one piece, and it is the value as it is given.
    """

    indices: tuple[StoreIndex, ...]
    exact: bool
    _pieces: tuple[_Piece, ...]
    _lead: int
    _parts: _Parts
    _reorder: tuple[tuple[int, Tensor], ...]  # along kept dimensions: repeated rows dropped, sorted
    _tensor_dim: int  # which zipped dimension has rows; the others are at one position a piece

    def pieces(self, value: Tensor) -> Iterator[tuple[StoreIndex, Tensor]]:
        """Cut `value`, `[*selection, *feature]`, into the tensors to write at each of `indices`.

        Where a position was selected twice, the value that comes last wins.
        """
        if not self._pieces:
            return
        if self.exact:
            yield self.indices[0], value
            return
        parts = self._parts
        for axis, size in reversed(parts.new):
            value = value.select(axis, size - 1)
        value = _permute(value, _inverse(parts.order))
        base = 0
        if parts.zipped:
            value = value.reshape(-1, *value.shape[len(parts.zip_shape) :])
            base = 1
        for axis, rows in self._reorder:
            value = take(value, base + axis, rows)
        for piece in self._pieces:
            part = value
            for axis, start, length in piece.cuts:
                part = part.narrow(base + axis, start, length)
            missing = parts.single
            if parts.zipped:
                if piece.zipped is not None:
                    part = take(part, 0, piece.zipped)
                part = part.movedim(0, sum(d < self._tensor_dim for d in parts.own_dims))
                missing = tuple(sorted({*parts.single, *parts.zipped} - {self._tensor_dim}))
            for dim in missing:
                part = part.unsqueeze(dim)
            yield piece.index, part


def plan_write(terms: Sequence[Term], layout: Sequence[Axis], shape: Sequence[int]) -> WritePlan:
    """Plan to write a selection piece by piece, each with rows along one dimension at most."""
    if len(terms) == len(layout) == 1 and 0 not in shape and isinstance(terms[0], (Tensor, range)):
        return _plan_rows(terms[0])
    parts = _parts(terms, layout)
    if 0 in shape:
        return WritePlan((), False, (), len(terms), parts, (), -1)
    index = [_basic(t) for t in terms]
    reorder: dict[int, Tensor] = {}
    rows: dict[int, Tensor] = {}
    for dim, term in enumerate(terms):
        if isinstance(term, Tensor):
            rows[dim], positions = last_wins(term)
            if positions is not None:
                reorder[dim] = positions
    tensor_dim = -1
    groups: list[tuple[dict[int, slice | Tensor], Tensor | None]] = [({}, None)]
    if parts.zipped:
        coords = [t.positions.flatten().numpy() for t in terms if isinstance(t, Zipped)]
        best, groups = _group(parts.zipped, coords)
        tensor_dim = best
    elif rows:
        # One dimension keeps its rows; where there are more, it is the one that has most runs.
        most = max(rows, key=lambda d: _run_count(rows[d])) if len(rows) > 1 else next(iter(rows))
        groups = [({most: _rows_or_slice(rows.pop(most))}, None)]
    choices: list[list[tuple[int, slice, tuple[int, int, int]]]] = []
    for dim, r in rows.items():
        ordered, positions = _sort(r)
        if positions is not None:
            reorder[dim] = reorder[dim][positions] if dim in reorder else positions
        axis, start, options = parts.own_dims.index(dim), 0, []
        for first, stop in runs(ordered):
            options.append((dim, slice(first, stop, 1), (axis, start, stop - first)))
            start += stop - first
        choices.append(options)
    pieces = []
    for fixed, zipped in groups:
        for choice in itertools.product(*choices):
            at = index.copy()
            for dim, selected in (*fixed.items(), *((d, s) for d, s, _ in choice)):
                at[dim] = selected
            pieces.append(_Piece(tuple(at), zipped, tuple(cut for *_, cut in choice)))
    order = tuple((parts.own_dims.index(d), positions) for d, positions in sorted(reorder.items()))
    return WritePlan(tuple(p.index for p in pieces), False, tuple(pieces), len(terms), parts, order, tensor_dim)


def _plan_rows(term: Tensor | range) -> WritePlan:
    """Plan to write rows of a batch of one dimension: most of what is written."""
    if isinstance(term, range):
        index: StoreIndex = (to_slice(term),)
        return WritePlan((index,), True, (_Piece(index, None, ()),), 1, _ROWS, (), -1)
    rows, positions = last_wins(term)
    index = (_rows_or_slice(rows),)
    reorder = () if positions is None else ((0, positions),)
    return WritePlan((index,), positions is None, (_Piece(index, None, ()),), 1, _ROWS, reorder, -1)


def _run_count(rows: Tensor) -> int:
    return len(runs(_sort(rows)[0]))


def _sort(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    if len(rows) < 2 or bool((rows[1:] > rows[:-1]).all()):
        return rows, None
    return torch.sort(rows)


def _group(
    dims: Sequence[int], coords: Sequence[_Ints]
) -> tuple[int, list[tuple[dict[int, slice | Tensor], Tensor | None]]]:
    """Gather zipped positions into groups in which all but one dimension stay at one position.

    Returns:
        The dimension whose positions vary, and for each group its index terms and its elements.
    """
    order = np.lexsort(coords[::-1])  # stable: of equal positions the last given comes last
    changes = _changes([c[order] for c in coords])
    keep = np.sort(order[np.append(changes[1:] - 1, len(order) - 1)])
    coords = [c[keep] for c in coords]

    def grouped(vary: int) -> tuple[_Ints, _Ints]:
        others = [c for k, c in enumerate(coords) if k != vary]
        order = np.lexsort((coords[vary], *others[::-1]))
        return order, _changes([c[order] for c in others])

    vary, (order, starts) = min(((k, grouped(k)) for k in range(len(dims))), key=lambda g: len(g[1][1]))
    groups: list[tuple[dict[int, slice | Tensor], Tensor | None]] = []
    for start, stop in itertools.pairwise([*starts.tolist(), len(order)]):
        members = order[start:stop]
        at: dict[int, slice | Tensor] = {
            d: slice(v := int(coords[k][members[0]]), v + 1, 1) for k, d in enumerate(dims) if k != vary
        }
        at[dims[vary]] = _rows_or_slice(torch.from_numpy(coords[vary][members]))
        groups.append((at, torch.from_numpy(keep[members])))
    return dims[vary], groups


def _changes(columns: Sequence[_Ints]) -> _Ints:
    """Return where a new combination begins in sorted columns (0 first; there is at least one element)."""
    if not columns:
        return np.zeros(1, dtype=np.int64)
    new = np.zeros(len(columns[0]), dtype=bool)
    new[0] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(new)
