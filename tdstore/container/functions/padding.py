"""Padding, and stacking after padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from tdstore.arguments import as_list, check_int
from tdstore.container.core.container import Container
from tdstore.container.core.paths import entry_path
from tdstore.container.core.tensorclasses import Typed, class_of, rewrap, unwrap, unwrap_all
from tdstore.container.functions.construct_and_join import maybe_dense_stack
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack, merge
from tdstore.errors import BatchSizeError, InvalidArgumentError, InvalidStateError, OutOfRangeError
from tdstore.ops.base import check_container
from tdstore.types import Path, path_text

C = TypeVar("C", bound=Container)
T = TypeVar("T")


def pad(tensordict: T, pad_size: Sequence[int], value: float = 0.0, inplace: bool = False, safe: bool = True) -> T:
    """Pad batch dimensions with a number: `TensorDict.pad`.

    Args:
        tensordict: the TensorDict.
        pad_size: `(before, after)` of dimension 0, then of dimension 1, and so on. Negative amounts crop.
        value: the number.
        inplace: change the TensorDict, and return it.
        safe: accepted for compatibility.

    Raises:
        BatchSizeError: not one pair for each of some leading batch dimensions, or more is cropped than there is.

    Example:
        >>> pad(TensorDict({"a": torch.ones(2)}, [2]), [0, 1], value=-1.0)["a"]
        tensor([ 1.,  1., -1.])
    """
    if not isinstance(tensordict, NonTensor):
        check_container(tensordict, "what pad() takes")
    td: Any = tensordict
    made: T = td.pad(pad_size, value, inplace=inplace, safe=safe)
    return made


def pad_sequence(
    list_of_tensordicts: Iterable[T],
    pad_dim: int = 0,
    padding_value: float = 0.0,
    out: Any = None,
    return_mask: bool | str | tuple[Any, ...] = False,
) -> T:
    """Pad the entries of TensorDicts to the longest along one dimension, and stack them along a new first one.

    Args:
        list_of_tensordicts: TensorDicts; entries that only some have are left out.
        pad_dim: the dimension of every tensor that is padded.
        padding_value: the number to pad with.
        out: a TensorDict to write the result into.
        return_mask: add an entry "masks" (or of this key): a TensorDict of bool tensors `[n, ..., longest]`, one for
            each tensor, that are False where it was padded.

    Raises:
        InvalidStateError: there are no TensorDicts, or tensors of an entry differ in other dimensions too.

    Example:
        >>> pad_sequence([TensorDict({"a": torch.ones(i)}, [i]) for i in (1, 2)])["a"]
        tensor([[1., 0.],
                [1., 1.]])
    """
    parts = as_list(list_of_tensordicts, "what pad_sequence() takes", "a sequence of TensorDicts")
    for part in (*parts, *([] if out is None else [out])):
        check_container(part, "what pad_sequence() takes and fills")
    check_int(pad_dim, "pad_dim")
    tensorclass, tds = unwrap_all(parts)
    tds = [td._resident() for td in tds]
    if not tds:
        raise InvalidStateError("pad_sequence needs at least one TensorDict")
    if pad_dim < 0:
        raise OutOfRangeError(
            f"pad_dim must be at least 0, not {pad_dim}: tensors are aligned at their first dimension"
        )
    masks = Container._resident_class(batch_size=_batch(tds, pad_dim), device=tds[0].device)
    made = _padded(tds, pad_dim, padding_value, masks, ())
    if return_mask is not False:
        made.set(entry_path("masks" if return_mask is True else return_mask), masks)
    found: T = rewrap(tensorclass, made) if out is None else out.update(made, inplace=True)
    return found


def _batch(tds: Sequence[Any], dim: int) -> torch.Size:
    sizes = [list(td.batch_size) for td in tds]
    if dim < len(sizes[0]):
        longest = max(size[dim] for size in sizes if len(size) > dim)
        sizes = [[*size[:dim], longest, *size[dim + 1 :]] for size in sizes]
    if any(size != sizes[0] for size in sizes):
        raise BatchSizeError(f"the batch sizes {[list(td.batch_size) for td in tds]} differ in more than one dimension")
    return torch.Size((len(tds), *sizes[0]))


def _padded(tds: Sequence[Any], dim: int, value: float, masks: Any, path: Path) -> Any:
    first = tds[0]
    batch = _batch(tds, dim)
    made = Container._resident_class(batch_size=batch, device=first.device)
    if first._dim_names() is not None:
        made.names = [None, *first.names]
    for key in first._first_keys():
        if any(td._kind(key) is None for td in tds):
            continue
        column = [td._raw(key) for td in tds]
        here = (*path, key)
        if all(isinstance(entry, Container) for entry in column):
            below = Container._resident_class(batch_size=batch, device=first.device)
            nested = _padded([entry._resident() for entry in column], dim, value, below, here)
            made.set(key, rewrap(class_of(unwrap(column[0])), nested))
            masks.set(key, below)
        elif all(isinstance(entry, Tensor) for entry in column):
            tensor, mask = _stacked(column, dim, value, here, len(batch))
            made.set(key, tensor)
            masks.set(key, mask)
        elif all(isinstance(entry, NonTensor) for entry in column):
            made.set(key, _values(column, dim, batch))
        else:
            raise InvalidStateError(f"the entries {path_text(here)} are tensors in some of the TensorDicts only")
    return made


def _stacked(tensors: Sequence[Tensor], dim: int, value: float, path: Path, ndim: int) -> tuple[Tensor, Tensor]:
    """Return the padded tensors, and where they are: of `ndim` dimensions, those of the batch, at least."""
    shapes = [tensor.shape for tensor in tensors]
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(others) > 1 or any(len(shape) <= dim for shape in shapes):
        raise InvalidStateError(
            f"cannot pad the entries {path_text(path)} along dimension {dim}: their shapes are {[*map(list, shapes)]}"
        )
    longest = max(shape[dim] for shape in shapes)
    size = (len(tensors), *shapes[0][:dim], longest, *shapes[0][dim + 1 :])
    out = tensors[0].new_full(size, value)
    mask = torch.zeros(size[: max(dim + 2, ndim)], dtype=torch.bool, device=out.device)
    for i, tensor in enumerate(tensors):
        out[i].narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        mask[i].narrow(dim, 0, tensor.shape[dim]).fill_(True)
    return out, mask


def _values(column: Sequence[NonTensor], dim: int, batch: torch.Size) -> NonTensor:
    """Return the values, with None where there was no position."""
    if all(isinstance(entry, NonTensorData) for entry in column):
        wide = batch[1:]
        return merge([type(e)(e.plain(), wide) for e in column], torch.stack)  # type: ignore[call-arg]
    sizes = {(*entry.batch_size[:dim], *entry.batch_size[dim + 1 :]) for entry in column}
    if dim >= len(batch) - 1 or len(sizes) > 1:  # they differ beyond the batch: lists of any lengths
        return NonTensorStack._make([entry.tolist() for entry in column], torch.arange(len(column), device="cpu"))
    rows = []
    for entry in column:
        size = list(entry.batch_size)
        size[dim] = batch[dim + 1] - size[dim]
        filler = NonTensorStack._make([None], torch.zeros(size, dtype=torch.int64, device="cpu"))
        rows.append(merge([entry, filler], lambda parts: torch.cat(parts, dim)))
    return merge(rows, torch.stack)


@overload
def dense_stack_tds(td_list: C, dim: int | None = None) -> C: ...
@overload
def dense_stack_tds(td_list: Sequence[C], dim: int | None = None) -> C: ...
def dense_stack_tds(td_list: Any, dim: int | None = None) -> Any:
    """Stack TensorDicts, or the elements of a lazy stack, for real; return any other TensorDict as it is.

    Lazy stacks inside of them stay lazy: their elements are stacked one by one, and may differ in shapes and keys.
    What cannot be stacked, as its keys or shapes differ, is a lazy stack.

    Args:
        dim: the new dimension; of a lazy stack, by default its own.

    Raises:
        InvalidArgumentError: a list without `dim`.

    Example:
        >>> ragged = lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (1, 2)])
        >>> made = dense_stack_tds([TensorDict({"l": ragged}, [2])] * 3, 0)
        >>> made["l"].stack_dim, made["l"][:, 1]["x"].shape
        (1, torch.Size([3, 2]))
    """
    if isinstance(unwrap(td_list), Container) and not isinstance(unwrap(td_list), Container._stack_class):
        return td_list
    if isinstance(td_list, Typed):
        return rewrap(type(td_list), dense_stack_tds(unwrap(td_list), dim))
    if isinstance(td_list, Container._stack_class):
        dim = td_list.stack_dim if dim is None else dim
        td_list = td_list._tds
    if dim is None:
        raise InvalidArgumentError("dense_stack_tds of a list of TensorDicts needs dim=")
    return maybe_dense_stack(td_list, dim)
