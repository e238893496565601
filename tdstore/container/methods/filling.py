"""Filling and choosing values, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.container.core.dim_names import as_names
from tdstore.container.entries.unbatched import UnbatchedTensor, is_batched
from tdstore.container.functions.broadcast import expanded_as, uneven, widened
from tdstore.container.functions.compare import keys_compared
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.container.storage.block_writer import into, rows_of
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.errors import BatchSizeError, InvalidTypeError, KeyNotFoundError
from tdstore.index.shapes import as_size, flat_args
from tdstore.keys import unravel
from tdstore.types import NestedKey, Path, path_text


class FillingMixin(Container):
    """zero_, fill_, masked_fill, masked_select, where, new_*, equality."""

    __slots__ = ()

    def zero_(self) -> Self:
        """Set every element of every leaf to zero, in place. A dataset that is open for writing is changed.

        Returns:
            This TensorDict.

        Raises:
            ReadOnlyError: the dataset was opened in mode "r".

        Example:
            >>> TensorDict({"a": torch.ones(2)}, [2]).zero_()["a"]
            tensor([0., 0.])
        """
        return self._foreach_(torch._foreach_zero_)

    def fill_(self, key: NestedKey, value: Any) -> Self:
        """Fill one entry in place with a number; of a nested TensorDict, every leaf.

        Args:
            key: a string, or a tuple of strings for a nested entry.
            value: a number, which is cast to the dtype of the entry.

        Returns:
            This TensorDict.

        Raises:
            KeyNotFoundError: there is no such entry.
            ReadOnlyError: the dataset was opened in mode "r".

        Example:
            >>> TensorDict({"a": torch.ones(2), "b": torch.ones(2)}, [2]).fill_("a", 7)["a"]
            tensor([7., 7.])
        """
        entry = self.get(key)
        if isinstance(entry, Container):
            entry._foreach_(lambda leaves: [t.fill_(value) for t in leaves])
            return self
        if entry is None:
            raise self._missing(key)
        if isinstance(entry, UnbatchedTensor):
            return self.set_(key, entry.holding(torch.full_like(entry.wrapped, value)))
        return self.set_(key, torch.full((), value, dtype=entry.dtype, device=entry.device).expand(entry.shape))

    def masked_fill_(self, mask: Tensor, value: Any) -> Self:
        """Set the rows where a mask is true, in place, in every entry.

        Args:
            mask: a bool tensor of the batch size or of its leading dimensions.
            value: a number, or what `td[mask] = value` accepts.

        Returns:
            This TensorDict.

        Raises:
            BatchSizeError: the mask is not bool, or has another shape.
            ReadOnlyError: the dataset was opened in mode "r".

        Example:
            >>> TensorDict({"a": torch.ones(2)}, [2]).masked_fill_(torch.tensor([True, False]), 9)["a"]
            tensor([9., 1.])
        """
        self._check_mask(mask)
        self[mask] = value
        return self

    def masked_fill(self, mask: Tensor, value: Any) -> Self:
        """Copy, with `value` in the rows where `mask` is true."""
        return self.clone().masked_fill_(mask, value)

    def masked_select(self, mask: Tensor) -> Self:
        """Return the rows where `mask` is true, as one batch dimension: `td[mask]`."""
        if mask.dtype != torch.bool:
            raise InvalidTypeError(f"a mask is a bool tensor, not one of {mask.dtype}")
        made: Self = self._at(mask)._resident()
        return made

    def _expanded_as(self, other: Any, lead: int) -> Any:
        return expanded_as(self._resident(), other, lead)

    def _check_mask(self, mask: Tensor) -> None:
        if mask.dtype != torch.bool or mask.shape != self._batch_size[: mask.ndim]:
            raise BatchSizeError(
                f"a mask is a bool tensor of the batch's leading shape {list(self._batch_size)}, "
                f"not {mask.dtype} of shape {list(mask.shape)}"
            )

    def where(
        self, condition: Tensor, other: Any, *, out: Any = None, pad: Any = None, update_batch_size: bool = False
    ) -> Self:
        """Select rows of this TensorDict where a condition is true, and of `other` elsewhere.

        Args:
            condition: a bool tensor, of the batch size or of its leading dimensions.
            other: a TensorDict, a tensor or a number.
            out: a TensorDict to write the result into, wherever it lives: in blocks of rows of bounded memory, so
                that none of the three need fit in memory. Without it the result is in memory.
            pad: a number that stands for entries that one side lacks.
            update_batch_size: whether `out` adopts this batch size.

        Raises:
            KeyNotFoundError: one side lacks an entry, and there is no `pad`.
            RuntimeError: the shapes of two leaves do not broadcast.

        Example:
            >>> td = TensorDict({"a": torch.tensor([1, 2, 3])}, [3])
            >>> td.where(torch.tensor([True, False, True]), 0)["a"]
            tensor([1, 0, 3])
        """
        if update_batch_size and out is not None:
            out.batch_size = self.batch_size
        if out is not None and pad is None and self._where_into(condition, other, out):
            found: Self = out
            return found
        made = self._chosen(condition, other, pad)
        result: Self = made if out is None else out.update(made, inplace=True)
        return result

    def _chosen(self, condition: Tensor, other: Any, pad: Any) -> Any:
        """Compute the result of `where` in memory."""
        td = self._resident()

        def pick(a: Any, b: Any) -> Tensor:
            like = a if isinstance(a, Tensor) else b
            if not is_batched(like):
                unbatched: Tensor = like
                return unbatched  # an unbatched tensor has no rows to choose
            wide = condition.reshape((*condition.shape, *(1,) * (like.ndim - condition.ndim)))
            return torch.where(wide, a, b)

        if uneven(td, (other,)) and widened(td, (other,)) is not None:
            raise BatchSizeError(
                f"where: a TensorDict of batch size {list(other.batch_size)} for one of {list(td.batch_size)}",
                hint="expand() the smaller one first",
            )
        leaves: list[Tensor] = []
        if pad is None and not td._collect(leaves):
            return td._mixed(lambda node, *parts: node.where(condition, *parts), (other,))
        if not isinstance(other, (Container, Tensor)):
            return td.apply(lambda a: pick(a, other), filter_empty=False, propagate_lock=True)
        rhs = other if isinstance(other, Tensor) else other._resident()
        if pad is None and not leaves and isinstance(rhs, Container) and (unmatched := _first_leaf(rhs)):
            raise KeyNotFoundError(
                f"{path_text(unmatched)} is in one TensorDict and not in the other",
                hint="pass pad= to stand for entries that one of them lacks",
            )
        if pad is None or isinstance(other, Tensor):
            made = td._foreach(lambda xs, ys: [pick(x, y) for x, y in zip(xs, ys, strict=True)], rhs)
            if isinstance(rhs, Container):
                made.unlock_()
        else:
            made = _where_padded(td, rhs, pick, pad)
        rows = _values_where(condition, td, rhs)
        if not rows:
            return made
        locked = made.is_locked
        made.unlock_().update(rows)
        return made.lock_() if locked else made

    def _where_into(self, condition: Tensor, other: Any, out: Any) -> bool:
        def run(block: Any, rows: slice) -> Any:
            return block.where(condition[rows] if condition.ndim else condition, rows_of(other, rows, self._batch_size))

        if condition.ndim and condition.shape[0] != self._batch_size[:1].numel():
            return False
        if not into(self, out, run):
            return False
        out.update(_values_where(condition, self, other), inplace=True)
        return True

    # -- new tensors of the same form ----------------------------------------------------------
    def new_zeros(self, *size: Any, **kwargs: Any) -> Self:
        """Create zeros with the feature shapes and dtypes of these leaves, for another batch size.

        The last dimensions of `size` have the names of the last batch dimensions. Values that differ from row
        to row are left out, since the rows are others.

        Args:
            *size: the batch size, as numbers or as one sequence.
            **kwargs: those of `Tensor.new_zeros`, such as `device` and `dtype`. With
                `empty_lazy=True` a nested lazy stack becomes one of elements without entries, for an indexed write
                to fill, and values that differ from row to row become None.

        Raises:
            RuntimeError: a negative size.

        Example:
            >>> TensorDict({"a": torch.ones(3, 5)}, [3]).new_zeros(10)["a"].shape
            torch.Size([10, 5])
        """
        return self._new_leaves(size, Tensor.new_zeros, kwargs)

    def new_ones(self, *size: Any, **kwargs: Any) -> Self:
        """Create ones; see `new_zeros`."""
        return self._new_leaves(size, Tensor.new_ones, kwargs)

    def new_empty(self, *size: Any, **kwargs: Any) -> Self:
        """Create uninitialised leaves; see `new_zeros`."""
        return self._new_leaves(size, Tensor.new_empty, kwargs)

    def new_full(self, size: Any, fill_value: Any, **kwargs: Any) -> Self:
        """Create leaves filled with `fill_value`; see `new_zeros`."""
        return self._new_leaves((size,), Tensor.new_full, {**kwargs, "fill_value": fill_value})

    def new_tensor(
        self,
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: Any = NO_DEFAULT,
        requires_grad: bool = False,
        pin_memory: bool | None = None,
    ) -> Self:
        """Create a TensorDict of these entries with a copy of `data`, in these leaves' dtypes and on their devices.

        Args:
            data: a tensor, which every entry then holds and whose shape is the batch size; or a TensorDict that has
                every key of this one.

        Raises:
            KeyNotFoundError: an entry that `data` lacks.
        """
        where = None if device is NO_DEFAULT else device

        def copy(like: Tensor, value: Tensor) -> Tensor:
            made = torch.empty(
                value.shape, dtype=dtype or like.dtype, device=where or like.device, pin_memory=bool(pin_memory)
            )
            return made.copy_(value.detach()).requires_grad_(requires_grad)

        td = self._resident()
        own: Any = self._device if device is NO_DEFAULT or device is None else torch.device(device)
        if isinstance(data, Container):
            how = {"batch_size": data.batch_size, "device": own, "names": data._dim_names(), "filter_empty": False}
            found: Self = td.apply(copy, data._resident(), **how)
            return found
        tensor = torch.as_tensor(data)
        how = {"batch_size": tensor.shape, "device": own or tensor.device, "names": None, "filter_empty": False}
        result: Self = td.apply(lambda leaf: copy(leaf, tensor), **how)
        return result

    def _new_leaves(self, size: tuple[Any, ...], make: Callable[..., Tensor], how: dict[str, Any]) -> Self:
        batch = as_size(flat_args(size))
        n = len(self._batch_size)
        names = (None,) * len(batch) + (self._names or ())
        device = how.get("device", NO_DEFAULT)
        how = {key: value for key, value in how.items() if value is not NO_DEFAULT}
        empty = {}
        if how.pop("empty_lazy", False):
            empty = {path: entry for path, entry in _row_entries(self) if entry is not self}
        source = self.exclude(*empty) if empty else self
        made: Self = _without_row_values(source._resident())._move(
            lambda t: make(t, (*batch, *t.shape[n:]), **how),
            batch,
            self._names and as_names(names[len(names) - len(batch) :], len(batch)),
        )
        for path, entry in empty.items():
            made.set(path, _empty_rows(entry, torch.Size((*batch, *entry.batch_size[n:]))))
        if device is not NO_DEFAULT:
            made._set_device(None if device is None else torch.device(device))
        return made

    # -- equality ------------------------------------------------------------------------------
    def __eq__(self, other: object) -> Any:
        return self._compare(other, torch.eq)

    def __ne__(self, other: object) -> Any:
        return self._compare(other, torch.ne)

    def _compare(self, other: Any, op: Any) -> Any:
        if not isinstance(other, (Container, Tensor, dict, bool, int, float, complex, np.ndarray, np.generic)):
            return NotImplemented
        mine = self._resident()
        if isinstance(other, dict):
            keys_compared(mine._data, other)
            other = self._resident_class(other, batch_size=self._batch_size)
        elif isinstance(other, np.ndarray):
            other = torch.as_tensor(other)
        return mine._compared(other._resident() if isinstance(other, Container) else other, op)


def _first_leaf(td: Any) -> Path | None:
    """Return the path of a tensor of a TensorDict, or None if it has none."""
    return next((unravel(key) for key in td.keys(True, True) if is_batched(td.get(key))), None)


def _row_entries(td: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the nested lazy stacks and the values that differ from row to row, each with its path."""
    if isinstance(td, Container._stack_class):
        yield path, td
        return
    for key in td._first_keys():
        kind = td._kind(key)
        entry = td._raw(key) if kind != LEAF else None
        if kind == GROUP:
            yield from _row_entries(entry, (*path, key))
        elif isinstance(entry, NonTensorStack):
            yield (*path, key), entry


def _empty_rows(entry: Any, batch: torch.Size) -> Any:
    """Create a lazy stack of elements without entries, or a stack of None."""
    if isinstance(entry, NonTensorStack):
        return NonTensorStack.from_nontensordata(NonTensorData(None, batch))
    dim = entry.stack_dim
    inner = (*batch[:dim], *batch[dim + 1 :])
    elements = [Container._resident_class({}, inner) for _ in range(batch[dim])]
    return Container._stack_class(*elements, stack_dim=dim)


def _without_row_values(td: Any) -> Any:
    data = {
        key: _without_row_values(value._resident()) if isinstance(value, Container) else value
        for key, value in td._data.items()
        if not isinstance(value, NonTensorStack)
    }
    return td._new(data, td._batch_size, td._device, td._names)


def _values_where(condition: Tensor, td: Any, other: Any) -> dict[Any, NonTensor]:
    """Apply `where` row by row to the values of `td` that differ from those of `other`."""
    rows: dict[Any, NonTensor] = {}
    for key, mine in td.non_tensor_items(True) if isinstance(other, Container) else ():
        theirs = other.get(key, None)
        if isinstance(theirs, NonTensor) and not mine.same(theirs):
            wide = condition.reshape((*condition.shape, *(1,) * (mine.ndim - condition.ndim))).expand(mine.batch_size)
            pairs = zip(wide.flatten().tolist(), mine.flat(), theirs.flat(), strict=True)
            values = [a if chosen else b for chosen, a, b in pairs]
            at = torch.arange(len(values)).reshape(mine.batch_size)
            rows[key] = NonTensorStack._make(values, at) if mine.ndim else NonTensorData(values[0])
    return rows


def _where_padded(td: Any, other: Any, pick: Any, pad: Any) -> Any:
    td, other = td._resident(), other._resident()
    data: dict[str, Any] = {}
    for key in dict.fromkeys([*td._data, *other._data]):
        a, b = td._data.get(key, pad), other._data.get(key, pad)
        if isinstance(a, NonTensor) or isinstance(b, NonTensor):
            data[key] = a if isinstance(a, NonTensor) else b
        elif isinstance(a, Container) and isinstance(b, Container):
            data[key] = _where_padded(a, b, pick, pad)
        elif isinstance(a, Container):
            data[key] = a._resident().apply(lambda x: pick(x, pad))
        elif isinstance(b, Container):
            data[key] = b._resident().apply(lambda y: pick(pad, y))
        else:
            data[key] = pick(a, b)
    return td._new(data, td._batch_size, td._device, td._names)
