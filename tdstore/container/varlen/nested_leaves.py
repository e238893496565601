"""Nested tensors as leaves of a store: the elements of all rows one after the other, and the place of each row.

Below its key, a store keeps a nested tensor as

* `nested.values`: of the strided layout, the elements `[total]`; of the jagged one `[total, ...]`, the ragged
  dimension first.
* `nested.spans`, int64 `[rows, 2]`: where each row begins and ends in the values. Rows follow one another.
* `nested.shapes`, int64 `[rows, dims]`, of the strided layout only: the shape of each row.

The value record in the header says which: `{"nested": {"layout": "jagged", "shape": [8, -1, 3], "dim": 1}}`. The files
of the `tensordict` package have no offsets: there, the shapes give them.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdstore.container.entries.nested_tensors import leaf_shape, ragged_dim
from tdstore.container.entries.unbatched import is_batched
from tdstore.container.varlen.rounds import Rounds, drive
from tdstore.errors import CorruptStoreError, UnsupportedError
from tdstore.header import NESTED_SHAPES, NESTED_SPANS, NESTED_VALUES, Group
from tdstore.index.nested import nested_over
from tdstore.index.selection import Selection
from tdstore.store import Cap, Store
from tdstore.types import LeafSpec, Path, Read, path_text

VALUES, SPANS, SHAPES = NESTED_VALUES, NESTED_SPANS, NESTED_SHAPES
PARTS = (VALUES, SPANS, SHAPES)
LAYOUTS = {"strided": torch.strided, "jagged": torch.jagged}


def is_nested(record: Any) -> bool:
    """Return whether a record says that the leaves below are those of a nested tensor."""
    return isinstance(record, dict) and "nested" in record


def nested_leaves(path: Path, record: Any) -> tuple[Path, ...]:
    """Return the paths of the leaves of a nested tensor."""
    return tuple((*path, name) for name in (VALUES, *_places_of(record["nested"])))


def _places_of(about: Any) -> list[str]:
    """Return the names of the leaves that hold the positions of rows."""
    row_offsets = isinstance(about, dict) and about.get("spans", True)
    shapes = isinstance(about, dict) and about.get("layout") == "strided"
    return [SPANS] * bool(row_offsets) + [SHAPES] * shapes


# -- taking apart ------------------------------------------------------------------------------
def parts_of_nested(tensor: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Build the record and the leaves of a nested tensor. Values of one without gaps share its memory."""
    tensor = tensor.detach()
    record, values, ends, shapes = (_of_jagged if tensor.layout is torch.jagged else _of_strided)(tensor)
    begins = torch.cat((ends.new_zeros(1), ends[:-1])) if len(ends) else ends
    leaves = {VALUES: values, SPANS: torch.stack((begins, ends), 1)}
    return {"nested": record}, leaves if shapes is None else {**leaves, SHAPES: shapes}


def leaf_below(td: Any, path: Path) -> Tensor:
    """Return a leaf by its path in a store, where lazy stacks have elements, values and nested tensors leaves."""
    for key in path[:-1]:
        td = td._child(key)
    leaf: Tensor = parts_of_nested(td)[1][path[-1]] if is_batched(td) else td._raw(path[-1])
    return leaf


def _of_strided(tensor: Tensor) -> tuple[dict[str, Any], Tensor, Tensor, Tensor]:
    rows = list(tensor.unbind())
    shapes = torch.tensor([row.shape for row in rows], dtype=torch.int64, device="cpu").reshape(
        len(rows), tensor.dim() - 1
    )
    sizes = shapes.prod(1)
    ends = sizes.cumsum(0)
    total = int(ends[-1]) if rows else 0
    dense = tensor.is_contiguous() and rows and torch.equal(tensor._nested_tensor_storage_offsets(), ends - sizes)
    values = tensor.values().flatten() if dense else None
    if values is None or len(values) != total:
        values = torch.cat([row.reshape(-1) for row in rows]) if rows else tensor.new_empty(0)
    return {"layout": "strided", "shape": list(leaf_shape(tensor))}, values, ends, shapes


def _of_jagged(tensor: Tensor) -> tuple[dict[str, Any], Tensor, Tensor, None]:
    dim = ragged_dim(tensor)
    values, offsets = jagged_parts(tensor)
    rest = list(values.shape[1:])
    shape = [len(offsets) - 1, *rest[: dim - 1], -1, *rest[dim - 1 :]]
    return {"layout": "jagged", "shape": shape, "dim": dim}, values, offsets[1:], None


def jagged_parts(tensor: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Return the values of a jagged tensor, the ragged dimension first, and where each row begins.

    Args:
        tensor: a jagged tensor; or a strided one, nested or plain, whose rows are to be those of one.
        dim: the ragged dimension of a strided one, counted with the rows in front.

    Returns:
        Values `[total, ...]`, which share memory where rows follow one another; offsets `[n + 1]`, int64, on the CPU.
    """
    if not tensor.is_nested:
        count, size = tensor.shape[0], tensor.shape[dim]
        return tensor.movedim(dim, 1).flatten(0, 1), torch.arange(count + 1, device="cpu") * size
    if tensor.layout is torch.jagged:
        dim = ragged_dim(tensor)
        values, offsets = tensor.values().movedim(dim - 1, 0), tensor.offsets().to("cpu", torch.int64)  # type: ignore[attr-defined]
        if tensor.lengths() is None and not int(offsets[0]) and int(offsets[-1]) == len(values):  # type: ignore[attr-defined]
            return values, offsets
        none = values[:0]
    else:
        none = tensor.new_empty(0)
    rows = [row.movedim(dim - 1, 0) for row in tensor.unbind()]
    offsets = torch.tensor([0, *map(len, rows)], dtype=torch.int64, device="cpu").cumsum(0)
    return torch.cat(rows) if rows else none, offsets


def parts_of_rows(rows: Tensor, record: Any) -> dict[str, Tensor]:
    """Build the leaves of rows that are added to a nested tensor of a store.

    Args:
        rows: a nested tensor, or a plain one `[n, ...]`: `n` rows of one shape.
        record: the value record of the nested tensor.

    Returns:
        Leaves by name, on the CPU. Offsets begin at 0.
    """
    about, rows = record["nested"], rows.detach().cpu()
    names = [VALUES, *_places_of(about)]
    if LAYOUTS[about["layout"]] is torch.jagged:
        values, offsets = jagged_parts(rows, about.get("dim", 1))
        found = {VALUES: values, SPANS: torch.stack((offsets[:-1], offsets[1:]), 1)}
    elif rows.is_nested:
        found = parts_of_nested(_as_strided(rows))[1]
    else:
        shapes = torch.tensor([rows.shape[1:]], dtype=torch.int64, device="cpu").reshape(1, -1).expand(len(rows), -1)
        ends = shapes.prod(1).cumsum(0)
        found = {VALUES: rows.flatten(), SPANS: torch.stack((ends - shapes.prod(1), ends), 1), SHAPES: shapes}
    return {name: found[name] for name in names}


def _as_strided(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else torch.nested.as_nested_tensor(list(tensor.unbind()))


def record_of_rows(record: Any, length: int, row: Sequence[int]) -> dict[str, Any]:
    """Return the value record of a nested tensor that got another number of rows.

    Args:
        record: the record until now.
        length: the number of rows afterwards.
        row: the shape of the rows that were added. A dimension in which they differ from the others is ragged then.
    """
    about = record["nested"]
    rest = [n if n == new else -1 for n, new in zip(about["shape"][1:], row, strict=True)]
    return {"nested": {**about, "shape": [length, *rest]}}


def specs_of_nested(leaves: dict[str, Tensor]) -> dict[str, LeafSpec]:
    """Build specs for the leaves of a nested tensor."""
    return {name: LeafSpec(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}


def places_among(groups: Mapping[Path, Group], specs: Mapping[Path, LeafSpec]) -> list[Path]:
    """List the leaves that hold the positions of the rows of nested tensors."""
    return [
        path
        for path in specs
        if path[-1] in (SPANS, SHAPES) and (group := groups.get(path[:-2])) and is_nested(group.values.get(path[-2]))
    ]


# -- putting together --------------------------------------------------------------------------
class Nested:
    """The layout of a nested tensor in a store, by its header: its shape, its leaves, and how its rows are read.

    Args:
        path: the entry.
        record: its value record in the header, checked by `check_nested`.
        values: the spec of the leaf of its elements.
        url: where it is, for messages.
    """

    __slots__ = ("_length", "_places_are", "_url", "dim", "dtype", "layout", "leaves", "path", "rest", "rows")

    def __init__(self, path: Path, record: Any, values: LeafSpec, url: str) -> None:
        about = record["nested"]
        self._url, self.path = url, path
        self.layout: torch.layout = LAYOUTS[about["layout"]]
        self.dim: int = about.get("dim", 1)
        self.dtype = values.dtype
        self._length = values.shape[0]
        self.rows, *self.rest = about["shape"]
        self._places_are = _places_of(about)
        self.leaves = nested_leaves(path, record)

    def shape(self, sel: Selection, store: Store) -> torch.Size:
        """Return the shape of what `rounds` gives; -1 for a ragged dimension. The shape of one row is read."""
        selected = len(sel.src_shape)
        if not self.is_row(sel):
            return torch.Size((*sel.shape, *(self.rows, *self.rest)[selected:]))
        sel.check_there((self.rows,))
        first: Any = sel.by_dimension()[0]  # type: ignore[index]
        row_offsets, shapes = drive(self._places_at(slice(first, first + 1), partial=_partial(store)), store)
        own = list(self.rest) if shapes is None else shapes[0].tolist()
        if shapes is None:
            own[self.dim - 1] = int(row_offsets[0, 1] - row_offsets[0, 0])
        return torch.Size((*sel.shape, *own[selected - 1 :]))

    def is_row(self, sel: Selection) -> bool:
        """Return whether a selection leaves one row, which is a plain tensor."""
        terms = sel.by_dimension()
        return bool(terms) and isinstance(terms[0], int)  # type: ignore[index]

    def elements_before(self, row: int, store: Store) -> int:
        """Return how many elements the rows before one have."""
        if not row:
            return 0
        found, _ = drive(self._places_at(slice(row - 1, row), partial=_partial(store)), store)
        return int(found[0, 1])

    # -- whole -----------------------------------------------------------------------------------
    def viewed(self, store: Store) -> Tensor:
        """Build the nested tensor whose elements are those of the store, as live as its leaves are."""
        places = self._places([store.view((*self.path, name)).cpu() for name in self._places_are])
        return self._whole(store.view((*self.path, VALUES)), *places)

    def _read_whole(self) -> Rounds[Tensor]:
        values, *rest = yield [Read((*self.path, name)) for name in (VALUES, *self._places_are)]
        return self._whole(values, *self._places(rest))

    def _whole(self, values: Tensor, row_offsets: Tensor, shapes: Tensor | None) -> Tensor:
        begins, ends = row_offsets.numpy().T
        self._check(row_offsets, shapes, len(values))
        dense = bool((begins[1:] == ends[:-1]).all())
        if not dense or (len(row_offsets) and (int(begins[0]) or int(ends[-1]) != len(values))):
            raise self._damaged("its rows do not follow one another")
        if shapes is None:
            offsets = torch.from_numpy(np.concatenate(([0], ends))).to(values.device)
            return torch.nested.nested_tensor_from_jagged(values.movedim(0, self.dim - 1), offsets, jagged_dim=self.dim)
        return nested_over(values, shapes)

    # -- rows ------------------------------------------------------------------------------------
    def rounds(self, sel: Selection, store: Store) -> Rounds[Tensor]:
        """Read what a selection of the batch leaves of it: a nested tensor, or the one row that it names.

        All rows take one round; some take two, the first for where they are.

        Raises:
            UnsupportedError: the selection has new dimensions, or takes several together.
        """
        if sel.is_full:
            return (yield from self._read_whole())
        sel.check_there((self.rows,))
        terms = sel.by_dimension()
        if terms is None:
            raise UnsupportedError(
                f"the nested tensor {path_text(self.path)} of {self._url} cannot be seen through a window with "
                "new or zipped dimensions",
                hint="index its rows only: td[rows]",
            )
        first, *further = terms
        one = isinstance(first, int)
        chosen = slice(first, first + 1) if isinstance(first, int) else first
        parts, shapes = yield from self._read_rows(chosen, partial=_partial(store))
        whole = all(isinstance(t, slice) and t == slice(0, n, 1) for t, n in zip(further, self.rest, strict=False))
        if whole and not one and self.layout is torch.jagged:
            return self._joined(parts)
        rows = self._shaped(parts, shapes)
        if whole:
            return rows[0] if one else self._strided(rows)
        for d in reversed(range(len(further))):
            rows = [row[(*(slice(None),) * d, further[d])] for row in rows]
        return rows[0] if one else torch.nested.as_nested_tensor(rows, layout=self.layout)

    def _shaped(self, parts: list[Tensor], shapes: Tensor | None) -> list[Tensor]:
        """Return rows as they are in the nested tensor, from their values as they are stored."""
        if shapes is not None:
            return [part.reshape(shape) for part, shape in zip(parts, shapes.tolist(), strict=True)]
        return parts if self.dim == 1 else [part.movedim(0, self.dim - 1) for part in parts]

    def _strided(self, rows: list[Tensor]) -> Tensor:
        if rows:
            return torch.nested.as_nested_tensor(rows, layout=torch.strided)
        none = torch.zeros((0, len(self.rest)), dtype=torch.int64, device="cpu")
        return self._whole(self._no_values(), none.new_zeros((0, 2)), none)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        values = torch.cat(parts) if parts else self._no_values()
        ends = np.cumsum([part.shape[0] for part in parts], dtype=np.int64)
        row_offsets = np.stack((np.concatenate(([0], ends))[: len(ends)], ends), 1)
        return self._whole(values, torch.from_numpy(row_offsets), None)

    def _no_values(self) -> Tensor:
        rest = [*self.rest[: self.dim - 1], *self.rest[self.dim :]] if self.layout is torch.jagged else []
        return torch.empty((0, *rest), dtype=self.dtype, device="cpu")

    def _read_rows(self, index: slice | Tensor, *, partial: bool) -> Rounds[tuple[list[Tensor], Tensor | None]]:
        """Read the elements of some rows, as they are stored, and their shapes. Adjacent ones take one request."""
        row_offsets, shapes = yield from self._places_at(index, partial=partial)
        path = (*self.path, VALUES)
        length = self._length
        self._check(row_offsets, shapes, length)
        # A row may be asked for twice; but rows that lie over one another could make any amount of memory.
        each = row_offsets if isinstance(index, slice) else row_offsets[np.unique(index.numpy(), return_index=True)[1]]
        if int((each[:, 1] - each[:, 0]).sum()) > length:
            raise self._damaged("its rows overlap")
        pairs = sorted({(begin, end) for begin, end in row_offsets.tolist() if begin < end})
        runs: list[list[int]] = []
        for begin, end in pairs:
            if runs and begin <= runs[-1][1]:
                runs[-1][1] = max(end, runs[-1][1])
            else:
                runs.append([begin, end])
        if runs and not partial:
            runs, reads = [[0, runs[-1][1]]], [Read(path)]
        else:
            reads = [Read(path, (slice(begin, end, 1),)) for begin, end in runs]
        found = (yield reads) if reads else []
        # Most rows are a run of their own.
        alone = {(begin, end): values for (begin, end), values in zip(runs, found, strict=True)} if partial else {}
        starts = [begin for begin, _ in runs]
        rows = []
        for pair in map(tuple, row_offsets.tolist()):
            values = alone.get(pair)
            if values is None:
                begin, end = pair
                run = bisect.bisect_right(starts, begin) - 1
                values = found[run][begin - starts[run] : end - starts[run]] if begin < end else self._no_values()
            rows.append(values)
        return rows, shapes

    # -- where they are --------------------------------------------------------------------------
    def _places_at(self, index: slice | Tensor, *, partial: bool) -> Rounds[tuple[Tensor, Tensor | None]]:
        names = self._places_are
        if SPANS not in names or not partial:
            found = yield [Read((*self.path, name)) for name in names]
            row_offsets, shapes = self._places(found)
            return row_offsets[index], None if shapes is None else shapes[index]
        plan = Selection.full((self.rows,))[index].read_plan()
        found = yield [Read((*self.path, name), plan.index) for name in names]
        return self._places([plan.finish(part) for part in found])

    def _places(self, found: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return offsets and shapes, from the leaves that hold them."""
        named = dict(zip(self._places_are, found, strict=True))
        shapes = named.get(SHAPES) if self.layout is torch.strided else None
        row_offsets = named.get(SPANS)
        if row_offsets is None:
            assert shapes is not None, self.path
            ends = shapes.prod(1).cumsum(0)
            row_offsets = torch.stack((ends - shapes.prod(1), ends), 1)
            length = self._length
            self._check(row_offsets, shapes, length)
            if len(ends) and int(ends[-1]) != length:
                raise self._damaged(f"its shapes describe {int(ends[-1])} elements, but it has {length}")
        return row_offsets, shapes

    def _check(self, row_offsets: Tensor, shapes: Tensor | None, length: int) -> None:
        begins, ends = row_offsets.numpy().T  # numpy, since torch starts threads for some thousand numbers
        if (begins < 0).any() or (begins > ends).any() or (ends > length).any():
            raise self._damaged(f"a row reaches beyond its {length} elements")
        if shapes is None:
            return
        sizes = shapes.double().prod(1).numpy()  # which does not wrap around
        fixed = [d for d, n in enumerate(self.rest) if n != -1]
        mismatched = bool((shapes < 0).any()) or not np.array_equal(sizes, ends - begins)
        if mismatched or bool(
            (shapes[:, fixed] != torch.tensor([self.rest[d] for d in fixed], dtype=torch.int64, device="cpu")).any()
        ):
            raise self._damaged("a shape is not that of its elements")

    def _damaged(self, why: str) -> CorruptStoreError:
        url = self._url
        return CorruptStoreError(f"the nested tensor {path_text(self.path)} of {url} is damaged: {why}", url=url)


def _partial(store: Store) -> bool:
    return Cap.PARTIAL_READ in store.caps


def check_nested(path: Path, record: Any, specs: Any, batch: Sequence[int], url: str) -> None:
    """Refuse a nested tensor whose leaves are not those that its group and its value record need.

    Raises:
        CorruptStoreError: one is missing, or has another dtype or shape.
    """
    if not _sound(path, record, specs, batch):
        raise CorruptStoreError(
            f"the nested tensor {path_text(path)} of {url} is missing: its leaves do not hold rows for a batch of "
            f"{list(batch)}",
            url=url,
        )


def _sound(path: Path, record: Any, specs: Any, batch: Sequence[int]) -> bool:
    about = record["nested"]
    if not isinstance(about, dict) or about.get("layout") not in LAYOUTS:
        return False
    shape, dim, jagged = about.get("shape"), about.get("dim", 1), about["layout"] == "jagged"
    if not isinstance(shape, list) or not shape or not all(type(n) is int and n >= -1 for n in shape):
        return False
    rows, rest = shape[0], shape[1:]
    if rows < 0 or (jagged and not about.get("spans", True)) or len(batch) > len(shape):
        return False
    if any(n not in (-1, b) for n, b in zip(shape, batch, strict=False)):
        return False
    values, row_offsets, shapes = (specs.get((*path, name)) for name in PARTS)
    if values is None or (
        about.get("spans", True) and (row_offsets is None or row_offsets != LeafSpec((rows, 2), torch.int64))
    ):
        return False
    if not jagged:
        return len(values.shape) == 1 and shapes is not None and shapes == LeafSpec((rows, len(rest)), torch.int64)
    fits = type(dim) is int and 1 <= dim <= len(rest) and rest[dim - 1] == -1
    return fits and tuple(values.shape[1:]) == (*rest[: dim - 1], *rest[dim:])
