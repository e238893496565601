"""Fill entries, and create filled TensorDicts of the same form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tdstore.arguments import as_device, number_like
from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.container.core.dim_names import as_names
from tdstore.container.entries.unbatched import UnbatchedTensor
from tdstore.container.methods.access import NO_DEFAULT
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.index.shapes import as_size, flat_args
from tdstore.types import DeviceLike, NestedKey, Number, Path, SizeLike


class FillingMixin(Container):
    """zero_, fill_, new_zeros, new_tensor, ..."""

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

    def fill_(self, key: NestedKey, value: Number) -> Self:
        """Fill one entry in place with a number: in a nested TensorDict, every leaf. A value stays as it is.

        Args:
            key: a string, or a tuple of strings for a nested entry.
            value: a number, which is cast to the dtype of the entry.

        Returns:
            This TensorDict.

        Raises:
            KeyNotFoundError: there is no such entry.
            ArgumentKindError: no number, or one that the dtype of an entry does not have.
            ReadOnlyError: the dataset was opened in mode "r".

        Example:
            >>> TensorDict({"a": torch.ones(2), "b": torch.ones(2)}, [2]).fill_("a", 7)["a"]
            tensor([7., 7.])
        """
        entry, what = self.get(key), f"entry {key!r}"
        if isinstance(entry, Container):

            def fill(leaves: Sequence[Tensor]) -> None:
                kinds = {(leaf.dtype, leaf.device): leaf for leaf in leaves}
                numbers = {kind: number_like(value, what, leaf) for kind, leaf in kinds.items()}
                for leaf in leaves:  # none before all numbers are there
                    leaf.fill_(numbers[leaf.dtype, leaf.device])

            entry._foreach_(fill)
            return self
        if entry is None:
            raise self._missing(key)
        if isinstance(entry, NonTensor) and not isinstance(entry, Tensor):
            return self
        if isinstance(entry, UnbatchedTensor):
            return self.set_(key, entry.holding(torch.full_like(entry.wrapped, value)))
        number = number_like(value, what, entry)
        if entry.is_nested:
            return self.set_(key, torch.full_like(entry, value))
        return self.set_(key, number.expand(entry.shape))

    # -- new tensors of the same form ----------------------------------------------------------
    def new_zeros(self, *size: SizeLike, **kwargs: Any) -> Self:
        """Create zeros with the feature shapes and dtypes of these leaves, for another batch size.

        The last dimensions of `size` have the names of the last batch dimensions. Values that differ from row
        to row are left out, since the result has other rows.

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

    def new_ones(self, *size: SizeLike, **kwargs: Any) -> Self:
        """Create ones; see `new_zeros`."""
        return self._new_leaves(size, Tensor.new_ones, kwargs)

    def new_empty(self, *size: SizeLike, **kwargs: Any) -> Self:
        """Create uninitialised leaves; see `new_zeros`."""
        return self._new_leaves(size, Tensor.new_empty, kwargs)

    def new_full(self, size: SizeLike, fill_value: Number, **kwargs: Any) -> Self:
        """Create leaves filled with `fill_value`; see `new_zeros`."""
        return self._new_leaves((size,), Tensor.new_full, {**kwargs, "fill_value": fill_value})

    def new_tensor(
        self,
        data: Tensor | Container,
        *,
        dtype: torch.dtype | None = None,
        device: DeviceLike | None = NO_DEFAULT,
        requires_grad: bool = False,
        pin_memory: bool | None = None,
    ) -> Self:
        """Create a TensorDict of these entries with a copy of `data`, in these leaves' dtypes and on their devices.

        Args:
            data: a tensor, of which every entry holds a copy and whose shape is the batch size; or a TensorDict that
                has every key of this one.

        Raises:
            KeyNotFoundError: `data` lacks an entry.
        """
        where = None if device is NO_DEFAULT else device

        def copy(like: Tensor, value: Tensor) -> Tensor:
            made = torch.empty(
                value.shape, dtype=dtype or like.dtype, device=where or like.device, pin_memory=bool(pin_memory)
            )
            return made.copy_(value.detach()).requires_grad_(requires_grad)

        td = self._resident()
        own: Any = self._device if device is NO_DEFAULT or device is None else as_device(device)
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
            if isinstance(self, self._stack_class):
                rows: Self = _empty_rows(self, batch)
                return rows
            empty = dict(_row_entries(self))
        source = self.exclude(*empty) if empty else self
        made: Self = _without_row_values(source._resident())._move(
            lambda t: make(t, (*batch, *t.shape[n:]), **how),
            batch,
            self._names and as_names(names[len(names) - len(batch) :], len(batch)),
        )
        for path, entry in empty.items():
            made.set(path, _empty_rows(entry, torch.Size((*batch, *entry.batch_size[n:]))))
        if device is not NO_DEFAULT:
            made._set_device(None if device is None else as_device(device))
        return made


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
    inner = torch.Size((*batch[:dim], *batch[dim + 1 :]))
    below = dict(_row_entries(entry._tds[0])) if entry._tds else {}
    elements = [Container._resident_class({}, inner) for _ in range(batch[dim])]
    for path, rows in below.items():
        wide = torch.Size((*inner, *rows.batch_size[entry.batch_dims - 1 :]))
        for element in elements:
            element.set(path, _empty_rows(rows, wide))
    return Container._stack_class(*elements, stack_dim=dim)


def _without_row_values(td: Any) -> Any:
    data = {
        key: _without_row_values(value._resident()) if isinstance(value, Container) else value
        for key, value in td._data.items()
        if not isinstance(value, NonTensorStack)
    }
    return td._new(data, td._batch_size, td._device, td._names)
