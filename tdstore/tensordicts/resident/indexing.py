"""Batch indices on live tensors: a fast path for each common kind of index, and a general path for the rest.

A write that no path here takes, such as one that makes new entries, goes on in `container/methods/writing`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from tdstore.container.core.locks import LOCKED, MAPPED, READONLY, SHARED
from tdstore.container.core.tensorclasses import Typed, unwrap
from tdstore.container.entries.unbatched import UnbatchedTensor, is_batched
from tdstore.container.values.lazy_gather import repeats
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.container.varlen.nested_rows import rows_at
from tdstore.errors import DimensionError, InvalidArgumentError, OutOfRangeError
from tdstore.index.index_terms import as_row, as_terms, basic_shape, bounds_of, indexed_names, spelled_out
from tdstore.index.rows import (
    COPIED_DTYPES,
    at_rows,
    check_rows,
    rows_on,
    take,
    take_by_numpy,
    threads_pay_from,
)
from tdstore.index.selection import as_rows, index_shape
from tdstore.index.tracing import traced
from tdstore.storekit.pages import HOLES, LARGE, empty, reserve
from tdstore.tensordicts.resident.entries import VIEW_FLAGS
from tdstore.tensordicts.resident.leaf_writes import assign_at, fill_at, fill_masked, fill_rows
from tdstore.tensordicts.resident.store_backed import BindingMixin
from tdstore.tensordicts.resident.write_checks import are_plain, check_copies, copy_plain, is_unexpanded, same_value
from tdstore.types import Names

TensorPairs = list[tuple[Tensor, Tensor]]
ValuePairs = list[tuple[NonTensorStack, NonTensor]]
_ALL = slice(None)
_CPU = torch.device("cpu")
_ROW_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)
_FEW = 64
"""Up to this many rows Python checks a list faster than numpy does."""
_PAGE = 4096
_HALF = 65504  # the greatest number of float16
_FILLED = COPIED_DTYPES | {torch.complex64, torch.complex128}


class IndexedTree(BindingMixin):
    """`td[index]` and `td[index] = value`."""

    __slots__ = ()

    # -- reading -----------------------------------------------------------------------------
    def _at(self, index: Any) -> Any:
        batch = self._batch_size
        kind = type(index)
        if kind is tuple:
            return self._at_terms(index)
        if index is Ellipsis:
            return self
        if not batch:
            if index is None or kind is bool or getattr(index, "dtype", None) is torch.bool:
                return self._at_terms((index,))
            raise DimensionError(f"a TensorDict without batch dimensions cannot be indexed with {index!r}")
        n = batch[0]
        if kind is int:
            if not -n <= index < n:
                raise OutOfRangeError(f"index {index} is out of bounds for dimension 0 with size {n}")
            return self._view_at(index, batch[1:], self._names and self._names[1:], len(batch))
        if kind is slice:
            start, stop, step = bounds_of(index, n) if is_compiling() else index.indices(n)
            if step <= 0:
                raise InvalidArgumentError("slice step must be positive")
            if index == _ALL:
                return self  # and only then: whether a part is the whole must not depend on the data
            new = torch.Size((max(0, -(-(stop - start) // step)), *batch[1:]))
            return self._view_at(index, new, self._names, len(batch))
        if index is None:
            return self._view_at(None, torch.Size((1, *batch)), self._names and (None, *self._names), len(batch))
        rows: Tensor | None = None
        if not traced():
            # Rows of mapped and shared ones at numpy's ints have no flags.
            one = not index.ndim if kind is Tensor else not (kind is list or self._state & (MAPPED | SHARED))
            if one and (row := as_row(index)) is not index:
                return self._at(row)
            if kind is Tensor and index.dtype is torch.int64 and index.ndim == 1 and self._starts_with_cpu_tensor():
                try:  # torch checks the rows as it copies them: good ones need not be checked before
                    return self._take(index, torch.Size((index.shape[0], *batch[1:])), self._names, len(batch))
                except IndexError:
                    rows = self._rows_of(index)  # negative rows, or the error to tell
            else:
                rows = self._rows_here(index)
        if rows is None:
            return self._at_terms(as_terms(index))
        return self._take(rows, torch.Size((rows.shape[0], *batch[1:])), self._names, len(batch))

    def _starts_with_cpu_tensor(self) -> bool:
        for first in self._data.values():
            return is_batched(first) and first.is_cpu
        return False

    def _rows_here(self, index: Any) -> Tensor | None:
        """Return rows of the first dimension: where the leaves are if the index is there too, otherwise checked."""
        rows = self._rows_on_device(index) if type(index) is Tensor and not index.is_cpu else None
        return self._rows_of(index) if rows is None else rows

    def _rows_on_device(self, index: Tensor) -> Tensor | None:
        """Return rows of the first dimension for rows or a mask on the device that the leaves are on.

        They stay there and are not checked, as in torch: to look at them, the CPU would wait for the device.

        Returns:
            None for an index of more dimensions, of another device than the first leaf, or with an error to tell.
        """
        if index.ndim != 1 or index.is_meta or index.device != self._first_device():
            return None
        if index.dtype is torch.bool:
            return index.nonzero().squeeze(1) if len(index) == self._batch_size[0] else None
        return index.long() if index.dtype in _ROW_DTYPES else None

    def _first_device(self) -> torch.device | None:
        for first in self._data.values():
            if is_batched(first):
                return first.device
            if isinstance(first, IndexedTree):
                return first._first_device()
        return None

    def _rows_of(self, index: Any) -> Tensor | None:
        """Return rows of the first dimension for a list, mask, range, array or 1-D tensor, checked once for all."""
        if type(index) is Tensor and index.dtype is torch.int64 and index.ndim == 1 and index.is_cpu:
            return check_rows(index, self._batch_size[0])
        if type(index) is list and index and type(index[0]) is int:
            few = _few_rows(index, self._batch_size[0])
            if few is not None:
                return few
        if type(index) is range:
            return _range_rows(index, self._batch_size[0])
        if not isinstance(index, (Tensor, list)) and not hasattr(index, "__array__"):
            return None
        rows = as_rows(index, self._batch_size[0])
        return rows if isinstance(rows, Tensor) else None

    def _view_at(self, index: Any, new: torch.Size, names: Names, n: int) -> Self:
        """Return views at an int, a slice or a tuple of them. The batch size is known."""
        data: dict[str, Any] = {}
        for key, value in self._data.items():
            if type(value) is Tensor:
                try:
                    data[key] = value[index]
                except RuntimeError:  # a nested tensor has no slices
                    data[key] = rows_at(value, index)
            elif isinstance(value, IndexedTree):
                below = value._batch_size
                if len(below) == n:
                    data[key] = value._view_at(index, new, names, n)
                else:
                    below = self._fitting(value)._batch_size
                    deeper = indexed_names(value._names, index, len(below))
                    data[key] = value._view_at(index, torch.Size((*new, *below[n:])), deeper, len(below))
            elif is_batched(value):
                data[key] = rows_at(value, index)
            else:
                data[key] = _value_at(value, index, self._batch_size, new)
        td = self._new(data, new, self._device, names)
        if self._state & VIEW_FLAGS:
            td._state = self._state & VIEW_FLAGS
            if self._state & LOCKED and not _starts_later(index):
                td.lock_()
        return td

    def _take(
        self, rows: Tensor, new: torch.Size, names: Names, n: int, by_device: dict[torch.device, Tensor] | None = None
    ) -> Self:
        """Copy rows of the first dimension row by row, several times faster than elementwise indexing.

        Args:
            rows: checked, or on the device of the leaves.
            new: the batch size of the result.
            names: the names of its dimensions.
            n: how many dimensions the batch has that is indexed.
            by_device: the rows on other devices, each moved there for the first leaf that needs them.
        """
        data: dict[str, Any] = {}
        if by_device is None:
            by_device = {}
        array = rows.numpy() if rows.is_cpu else None
        batch = self._batch_size
        page = _PAGE * batch[0]
        if len(rows) > _FEW:
            page = min(page, threads_pay_from() * batch[0] // len(rows))
        left: Iterable[str] = self._data
        if array is not None:
            # A subclass looks for an override at each attribute, in 0.2 instead of 0.07 us; mapped tensors have none.
            with torch._C.DisableTorchFunctionSubclass() if self._state & MAPPED else nullcontext():
                left = take_by_numpy(self._data, array, page, data)
        for key in left:
            value = self._data[key]
            if is_batched(value):
                data[key] = _take_rows(value, rows, by_device)
            elif isinstance(value, IndexedTree):
                below = value._batch_size
                wide = new if len(below) == n else torch.Size((*new, *self._fitting(value)._batch_size[n:]))
                data[key] = value._take(rows, wide, value._names, len(value._batch_size), by_device)
            elif isinstance(value, NonTensorData) and value.batch_size == batch:
                data[key] = value.for_batch(new)
            elif isinstance(value, NonTensor):
                data[key] = value.rows(rows if array is not None else rows_on(_CPU, rows, batch[0], by_device))
            else:
                data[key] = value[rows]
        return self._new(data, new, self._device, names)

    def _at_terms(self, terms: tuple[Any, ...]) -> Any:
        batch = self._batch_size
        ndim = len(batch)
        found = basic_shape(terms, batch)
        if found is None and not self._state & (MAPPED | SHARED):
            found = basic_shape(tuple(map(as_row, terms)), batch)
        if found is not None:
            terms, new = found
            if new is None:
                return self
            return self._view_at(terms, new, self._names and indexed_names(self._names, terms, ndim), ndim)
        index = spelled_out(terms, ndim)
        # raises for too many terms, masks that do not fit, ...
        new = index_shape(batch, tuple(map(_shape_only, index)))
        return self._move_tree(lambda t: rows_at(t, index), new, indexed_names(self._names, index, ndim), ndim)

    # -- writing -----------------------------------------------------------------------------
    def _set_rows(self, index: Any, value: Any) -> None:
        index = tuple(map(as_row, index)) if type(index) is tuple else as_row(index)
        number = _number_of(value) if type(value) is Tensor else value
        kind = type(number)
        if kind is int or kind is float or kind is bool:
            if self._write_number(index, number):
                return
        elif self._write_views(index, value):
            return
        same = self._same_at(index, value)
        if same is None:
            super()._set_rows(index, value)
        else:
            self._write_same(*same)

    def _plan_rows(self, changes: Any, index: Any, value: Any, made: list[tuple[Any, list[str]]]) -> None:
        same = self._same_at(index, value)
        if same is None:
            super()._plan_rows(changes, index, value, made)
        else:
            changes.then(partial(self._write_same, *same))

    def _write_number(self, index: Any, value: float) -> bool:
        """Write a number at rows, a mask or terms. False, and nothing done, where a closer look is needed."""
        batch, kind = self._batch_size, type(index)
        leaves: list[Tensor] = []
        if not batch or HOLES or not self._takes_number(value, leaves) or not leaves:
            return False  # without leaves, nothing would look at the index
        at: list[tuple[Tensor, Tensor]] = []
        if kind is tuple:
            found = basic_shape(index, batch)
            if found is None:
                return False
            terms: Any = found[0]
        elif index is Ellipsis:
            terms = index
        elif kind is Tensor and index.dtype is torch.bool and index.ndim > 1:
            if index.shape != batch[: index.ndim]:
                return False
            for leaf in leaves:
                wide = index.reshape(*index.shape, *(1,) * (leaf.ndim - index.ndim))
                at.append((leaf, wide.to(leaf.device)))
            fill_masked(at, value)
            return True
        elif (kind is int and -batch[0] <= index < batch[0]) or (
            kind is slice and (index.step is None or index.step > 0)
        ):
            terms = index
        else:
            one_mask = kind is Tensor and index.dtype is torch.bool and index.shape == batch[:1]
            rows = None if traced() else index.nonzero().squeeze(1) if one_mask else self._rows_of(index)
            if rows is None:
                return False
            by_device: dict[torch.device, Tensor] = {}
            for leaf in leaves:
                here = rows if leaf.device == rows.device else rows_on(leaf.device, rows, batch[0], by_device)
                at.append((leaf, here))
            fill_rows(at, value)
            return True
        fill_at(terms, leaves, value)
        return True

    def _takes_number(self, value: float, leaves: list[Tensor]) -> bool:
        """Collect the tensors, if each can be filled with a number. False if anything needs a closer look."""
        if self._state & (READONLY | MAPPED):
            return False
        fits_ints = type(value) is bool or (0 <= value < 128 and float(value).is_integer())
        if not fits_ints and not -_HALF <= value <= _HALF:
            return False
        for mine in self._data.values():
            if type(mine) is Tensor:
                dtype = mine.dtype
                if (
                    dtype not in _FILLED
                    or not (fits_ints or dtype.is_floating_point or dtype.is_complex)
                    or mine.requires_grad
                    or mine.is_nested
                    or mine.is_meta
                    or not is_unexpanded(mine)
                ):
                    return False
                leaves.append(mine)
                continue
            mine = mine._tensordict if isinstance(mine, Typed) else mine
            if type(mine) is not NonTensorData and not (
                isinstance(mine, IndexedTree) and mine._takes_number(value, leaves)
            ):
                return False
        return True

    def _write_views(self, index: Any, value: Any) -> bool:
        """Write a TensorDict of the same structure and dtypes at an int, a slice or `...`.

        False, and nothing done, if anything needs a closer look.
        """
        views: list[Tensor] = []
        sources: list[Tensor] = []
        if not self._views_to_write(index, value, views, sources):
            return False
        copy_plain(views, sources)
        return True

    def _views_to_write(self, index: Any, value: Any, views: list[Tensor], sources: list[Tensor]) -> bool:
        """Collect what `_write_views` writes; False if anything needs a closer look."""
        batch, kind = self._batch_size, type(index)
        if not isinstance(value, IndexedTree) or self._state & (READONLY | MAPPED):
            return False
        if index is Ellipsis or (kind is slice and batch and index == _ALL):
            if value._batch_size != batch:
                return False
            index = ...
        elif not batch:
            return False
        elif kind is tuple:
            found = basic_shape(index, batch)
            if found is None or value._batch_size != (batch if found[1] is None else found[1]):
                return False
            index = found[0]
        elif kind is int and -batch[0] <= index < batch[0]:
            if value._batch_size != batch[1:]:
                return False
        elif kind is slice and (index.step is None or index.step > 0):
            if value._batch_size != (len(range(*index.indices(batch[0]))), *batch[1:]):
                return False
        else:
            return False
        try:
            return self._match_views(index, value, views, sources)
        except RuntimeError:  # a nested tensor, or one that torch.vmap hands out, does not tell its shape
            return False

    def _match_views(self, index: Any, other: IndexedTree, views: list[Tensor], sources: list[Tensor]) -> bool:
        """Collect views at an index, and what is to be copied into them. False if anything needs a closer look."""
        theirs = other._data
        if len(theirs) != len(self._data):
            return False
        for key, mine in self._data.items():
            match: Any = theirs.get(key)
            if type(mine) is Tensor is type(match):
                view = mine if index is Ellipsis else mine[index]
                if (
                    view.shape != match.shape
                    or match.dtype is not mine.dtype
                    or mine.requires_grad
                    or match.layout is not torch.strided
                    or match.is_meta
                    or not is_unexpanded(mine)
                ):
                    return False
                views.append(view)
                sources.append(match)
                continue
            if isinstance(mine, Typed) and type(mine) is type(match):
                mine, match = mine._tensordict, match._tensordict
            if type(mine) is NonTensorData and type(match) is NonTensorData:
                if not same_value(mine, match):
                    return False  # else there is nothing to write
            elif not (
                isinstance(mine, IndexedTree)
                and isinstance(match, IndexedTree)
                and not mine._state & READONLY
                and mine._match_views(index, match, views, sources)
            ):
                return False
        return True

    def _same_at(self, index: Any, value: Any) -> tuple[Any, TensorPairs, ValuePairs] | None:
        """Return the checked index, and pairs of tensors and values of this one and of what is written there.

        None if that is no TensorDict of the same structure (dtypes aside) and no dict of tensors with some of its keys,
        or if the index needs a closer look.
        """
        batch, kind = self._batch_size, type(index)
        loose = type(value) is dict
        if not batch or self._state & READONLY or not (loose or isinstance(value, IndexedTree)):
            return None
        if kind is int and -batch[0] <= index < batch[0]:
            new = batch[1:]
        elif kind is slice and (index.step is None or index.step > 0):
            new = torch.Size((len(range(*index.indices(batch[0]))), *batch[1:]))
        elif kind is Tensor or kind is list or kind is np.ndarray:
            rows = None if traced() else self._rows_here(index)
            if rows is None:
                return None
            index, new = rows, torch.Size((rows.shape[0], *batch[1:]))
        else:
            return None
        pairs: TensorPairs = []
        values: ValuePairs = []
        if loose:
            if not self._pair_some(value, len(batch), new, pairs) or not pairs:
                return None
        elif value._batch_size != new or not self._pair(value, len(batch), len(new) - len(batch), pairs, values):
            return None
        if not are_plain(pairs):
            if any(mine.is_nested or theirs.is_nested for mine, theirs in pairs):
                return None
            check_copies(pairs)
        return index, pairs, values

    def _write_same(self, index: Any, pairs: TensorPairs, values: ValuePairs) -> None:
        """Write at a checked index what `_same_at` found."""
        mapped = type(index) is slice and self._state & MAPPED
        if mapped and self._write_files(index, [theirs for _, theirs in pairs]):
            return
        if HOLES:
            for mine, _ in pairs:
                reserve(mine, (index,))
        assign_at(index, pairs, values)

    def _pair_some(self, entries: dict[Any, Any], n: int, new: torch.Size, pairs: TensorPairs) -> bool:
        """Match tensors of a dict, whose first dimensions are `new`, by key. False if anything does not fit."""
        missing = len(entries)
        lead = len(new)
        for key, mine in self._data.items():  # in whose order the store would write them
            theirs = entries.get(key)
            if theirs is None:
                continue
            missing -= 1
            if type(mine) is Tensor is type(theirs):
                try:
                    shape = theirs.shape
                    if len(shape) - lead != mine.ndim - n or shape[:lead] != new or shape[lead:] != mine.shape[n:]:
                        return False
                except RuntimeError:  # a nested tensor
                    return False
                pairs.append((mine, theirs))
            elif not (
                type(theirs) is dict
                and isinstance(mine, IndexedTree)
                and not mine._state & READONLY
                and mine._pair_some(theirs, n, new, pairs)
            ):
                return False
        return not missing

    def _pair(self, other: IndexedTree, n: int, shift: int, pairs: TensorPairs, values: ValuePairs) -> bool:
        """Match tensors, and values of which each row has its own, by key. False if anything does not fit.

        `n` is how many dimensions the index is about, `shift` how many more the other side has of them.
        """
        theirs = other._data
        if len(theirs) != len(self._data):
            return False
        other_n = n + shift
        for key, mine in self._data.items():
            match: Any = theirs.get(key)
            if type(mine) is Tensor or is_batched(mine):
                if not (type(match) is Tensor or is_batched(match)):
                    return False
                try:
                    shape, wanted = match.shape, mine.shape
                    features = len(wanted) - n
                    if (
                        len(shape) - other_n != features
                        or not (
                            not features
                            or (features == 1 and shape[-1] == wanted[-1])  # slices of shapes take ten times longer
                            or (shape[other_n:] if other_n else shape) == wanted[n:]
                        )
                    ):
                        return False
                except RuntimeError:  # a nested tensor
                    return False
                pairs.append((mine, match))
                continue
            if isinstance(mine, Typed):
                mine, match = mine._tensordict, unwrap(match)
            if isinstance(mine, IndexedTree) and isinstance(match, IndexedTree):
                if mine._state & READONLY or not mine._pair(match, n, shift, pairs, values):
                    return False
            elif type(mine) is NonTensorData and type(match) is NonTensorData:
                if not same_value(mine, match):
                    return False  # else there is nothing to write
            elif self._binding is None and _takes_values(mine, match, self._batch_size, other._batch_size):
                values.append((mine, match))
            else:
                return False
        return True


def _number_of(value: Tensor) -> Any:
    """Return the number in a tensor without dimensions on the CPU, to be written in its place; else the tensor."""
    hidden = value.ndim or not value.is_cpu or value.requires_grad or value.layout is not torch.strided or traced()
    return value if hidden else value.item()


def _takes_values(mine: Any, match: Any, batch: torch.Size, rows: torch.Size) -> bool:
    """Return whether values in memory can be written into a stack of them at rows, which cannot fail then."""
    return (
        type(mine) is NonTensorStack
        and type(mine._pool) is list
        and mine._at.shape == batch
        and (type(match) is NonTensorData or type(match) is NonTensorStack)
        and match.batch_size == rows
        and not repeats(mine._at)
    )


def _starts_later(index: Any) -> bool:
    """Check whether a slice leaves out the first rows.

    Such views of mapped or shared data are not locked, as in the `tensordict` package: callers add entries to them.
    """
    terms = index if type(index) is tuple else (index,)
    return any(type(term) is slice and term.start not in (None, 0) for term in terms)


def _shape_only(term: Any) -> Any:
    """Replace rows on a device by zeros of their shape: their shape is enough, and the CPU would wait for them."""
    if type(term) is Tensor and not (term.is_cpu or term.is_meta) and term.dtype in _ROW_DTYPES and not traced():
        return torch.zeros((), dtype=torch.int64).expand(term.shape)
    return term


def _value_at(value: Any, index: Any, batch: torch.Size, new: torch.Size) -> Any:
    """Return an entry without tensor rows at an index that gives the batch size `new` of `batch`."""
    if isinstance(value, UnbatchedTensor) or (isinstance(value, NonTensorData) and value.batch_size == batch):
        return value.for_batch(new)
    return value[index]


def _few_rows(index: list[Any], size: int) -> Tensor | None:
    """Convert a short list of rows in `[0, size)` to a tensor. Return None for others, such as negative rows."""
    if len(index) > _FEW or set(map(type, index)) != {int} or min(index) < 0 or max(index) >= size:
        return None
    return torch.from_numpy(np.array(index, dtype=np.int64))


def _range_rows(index: range, size: int) -> Tensor:
    """Convert a range of rows to a tensor of checked ones: its first and last are the least and the greatest."""
    rows = torch.from_numpy(np.arange(index.start, index.stop, index.step))
    if not index or (0 <= index[0] < size and 0 <= index[-1] < size):
        return rows
    return check_rows(rows, size)


def _take_rows(leaf: Tensor, rows: Tensor, by_device: dict[torch.device, Tensor]) -> Tensor:
    if leaf.is_nested:
        return rows_at(leaf, rows)
    if leaf.device != rows.device:
        rows = rows_on(leaf.device, rows, len(leaf), by_device)
    if leaf.is_cuda:
        return at_rows(leaf, rows)  # which may be negative
    try:
        large = leaf.ndim > 1 and leaf.nbytes * rows.shape[0] >= LARGE * leaf.shape[0] > 0
        if large and leaf.is_cpu and not (leaf.requires_grad or traced()):
            # Into huge pages: the faults of small ones cost more than the copy.
            return torch.index_select(leaf, 0, rows, out=empty((rows.shape[0], *leaf.shape[1:]), leaf.dtype))
        return leaf.index_select(0, rows)
    except (NotImplementedError, RuntimeError):
        if not len(leaf):
            return at_rows(leaf, rows)  # no rows at all
        return take(leaf, 0, check_rows(rows, len(leaf)))  # dtypes that index_select lacks
