"""Padding, and stacking after padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, overload

import torch
from torch import Tensor

from tdstore.arguments import as_list, check_int, refuse_type
from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.container.core.paths import entry_path
from tdstore.container.core.tensorclasses import Typed, class_of, rewrap, unwrap, unwrap_all
from tdstore.container.functions.construct_and_join import lazy_stack, maybe_dense_stack
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack, merge
from tdstore.errors import BatchSizeError, InvalidArgumentError, InvalidStateError, KeyNotFoundError, OutOfRangeError
from tdstore.ops.base import check_container
from tdstore.types import Path, path_text

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase
    from tdstore.tensordicts.lazystack.stack import LazyStackedTensorDict

C = TypeVar("C", bound=Container)
T = TypeVar("T")
_Run: TypeAlias = tuple[int, int]
"""The first position of the values of a row, and their number."""


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
            tensor, mask = pad_and_stack(column, dim, value, here, len(batch))
            made.set(key, tensor)
            masks.set(key, mask)
        elif all(isinstance(entry, NonTensor) for entry in column):
            made.set(key, _values(column, dim, batch))
        else:
            raise InvalidStateError(f"the entries {path_text(here)} are tensors in some of the TensorDicts only")
    return made


def pad_and_stack(tensors: Sequence[Tensor], dim: int, value: float, path: Path, ndim: int) -> tuple[Tensor, Tensor]:
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
def unpad_sequence(
    padded: TensorDictBase, mask: Tensor | Container | None = None, *, pad_dim: int = 0
) -> LazyStackedTensorDict: ...
@overload
def unpad_sequence(padded: T, mask: Tensor | Container | None = None, *, pad_dim: int = 0) -> T: ...
def unpad_sequence(padded: Any, mask: Tensor | Container | None = None, *, pad_dim: int = 0) -> Any:
    """Take the TensorDicts that `pad_sequence` stacked out of it again, without what they were padded with.

    Their tensors are views of the padded ones; values at padded positions of a batch dimension are left out, too.

    Args:
        padded: a TensorDict or tensorclass, whose first batch dimension is that of the stack.
        mask: where there are values: a tensor `[n, longest]` for all entries, or a TensorDict with a bool tensor for
            each, as `pad_sequence(return_mask=...)` makes it. Default: the entry "masks", which the result lacks.
        pad_dim: the dimension that was padded, counted without that of the stack.

    Returns:
        A lazy stack along dimension 0, whose elements have the batch sizes of before the padding.

    Raises:
        BatchSizeError: `padded` has no batch dimension.
        InvalidArgumentError: there is no mask, or it does not fit the entries: it has another shape, the values of a
            row do not follow each other, or the entries of a batch dimension differ in length.
        KeyNotFoundError: a mask has no entry for a tensor.

    Example:
        >>> made = pad_sequence([TensorDict({"a": torch.ones(i)}, [i]) for i in (1, 2)], return_mask=True)
        >>> [td["a"].tolist() for td in unpad_sequence(made)]
        [[1.0], [1.0, 1.0]]
    """
    check_container(padded, "what unpad_sequence() takes")
    check_int(pad_dim, "pad_dim")
    if pad_dim < 0:
        raise OutOfRangeError(f"pad_dim must be at least 0, not {pad_dim}: it is that of pad_sequence")
    td = unwrap(padded)._resident()
    if not td.batch_dims:
        raise BatchSizeError("unpad_sequence needs the batch dimension of the stack, and the batch size is []")
    if mask is None:
        mask = td.get("masks", None)
        if mask is None:
            raise InvalidArgumentError(
                'unpad_sequence needs a mask, and there is no entry "masks"',
                hint="pass mask=, or pad with return_mask=True",
            )
        td = td.exclude("masks")
    if not isinstance(mask, (Tensor, Container)):
        raise refuse_type("mask", "a tensor or a TensorDict", mask)
    tensorclass, rows = class_of(unwrap(padded)), td.batch_size[0]
    if not rows:
        return lazy_stack([Container._resident_class(batch_size=td.batch_size[1:])]).split([0, 1])[0]
    if isinstance(mask, Tensor) and (mask.ndim != 2 or len(mask) != rows):
        raise InvalidArgumentError(f"a mask of all entries has the shape [{rows}, longest], not {[*mask.shape]}")
    of_all = _runs(mask, ("mask",)) if isinstance(mask, Tensor) else None
    runs = _runs_of_leaves(td, mask, pad_dim, ())
    made = []
    for i in range(rows):
        own = {path: of_rows[i] for path, of_rows in runs.items()}
        padding = _Padding(own, None if of_all is None else of_all[i], pad_dim)
        made.append(rewrap(tensorclass, _without_padding(unwrap(td[i])._resident(), padding, ())))
    return lazy_stack(made)


class _Padding(NamedTuple):
    """Where the values of one row are: for each tensor, and for what has no tensors, by the mask of all entries."""

    runs: dict[Path, _Run]
    of_all: _Run | None
    dim: int


def _runs_of_leaves(td: Any, mask: Any, dim: int, path: Path) -> dict[Path, list[_Run]]:
    """Return where the values of each tensor are, for each row."""
    found: dict[Path, list[_Run]] = {}
    for key in td._first_keys():
        here, kind = (*path, key), td._kind(key)
        if kind == GROUP:
            found.update(_runs_of_leaves(unwrap(td._raw(key))._resident(), mask, dim, here))
        elif kind == LEAF:
            found[here] = _runs(_mask_of(mask, td._raw(key), dim, here), here)
    return found


def _mask_of(mask: Any, tensor: Tensor, dim: int, path: Path) -> Tensor:
    """Return the mask `[n, longest]` of one tensor."""
    found = mask if isinstance(mask, Tensor) else mask.get(path, None)
    if found is None and any(_is_same(mask.get(path[at:], None), tensor) for at in range(1, len(path))):
        found = tensor  # the masks are entries of the TensorDict themselves
    if not isinstance(found, Tensor):
        raise KeyNotFoundError(f"the mask has no tensor for the entry {path_text(path)}")
    if isinstance(mask, Tensor):
        fits = tensor.ndim > dim + 1 and found.shape[1] == tensor.shape[dim + 1]
    else:
        fits = found.ndim > dim + 1 and found.shape == tensor.shape[: found.ndim]
        found = found.movedim(dim + 1, 1).unsqueeze(-1).flatten(2) if fits else found
        fits = fits and bool((found == found[..., :1]).all())  # a row is cut at one place, whatever else it has
        found = found[..., 0] if fits and found.shape[2] else found.new_ones(found.shape[:2])
    if not fits:
        raise InvalidArgumentError(
            f"the mask {[*found.shape]} does not say where dimension {dim} of the entry {path_text(path)} has values: "
            f"its shape is {[*tensor.shape]}",
            hint="pass the pad_dim= of pad_sequence",
        )
    return found


def _is_same(mask: object, tensor: Tensor) -> bool:
    return isinstance(mask, Tensor) and mask.dtype == tensor.dtype and torch.equal(mask, tensor)


def _runs(mask: Tensor, path: Path) -> list[_Run]:
    """Return the first position and the number of the values of each row."""
    mask = mask.bool()
    if not mask.shape[1]:
        return [(0, 0)] * len(mask)
    first, count = mask.int().argmax(1, keepdim=True), mask.sum(1, keepdim=True)
    at = torch.arange(mask.shape[1], device=mask.device)
    if not torch.equal(mask, (at >= first) & (at < first + count)):
        raise InvalidArgumentError(f"the mask of {path_text(path)}: in some row there is padding between the values")
    return list(zip(first[:, 0].tolist(), count[:, 0].tolist(), strict=True))


def _without_padding(td: Any, padding: _Padding, path: Path) -> Any:
    """Return a row, or a TensorDict in it, as a view of its values."""
    dim = padding.dim
    if td.batch_dims > dim:
        runs = {run for leaf, run in padding.runs.items() if leaf[: len(path)] == path}
        runs = runs or ({padding.of_all} if padding.of_all else {(0, td.batch_size[dim])})
        if len(runs) > 1:
            where = path_text(path) if path else "the TensorDict"
            raise InvalidArgumentError(
                f"the entries of {where} differ in padding, and dimension {dim} is one of the batch"
            )
        start, count = runs.pop()
        return td[(*(slice(None),) * dim, slice(start, start + count))]
    made = Container._resident_class(batch_size=td.batch_size, device=td.device, names=td._dim_names())
    for key in td._first_keys():
        here, entry = (*path, key), td._raw(key)
        if isinstance(entry, Container):
            below = _without_padding(unwrap(entry)._resident(), padding, here)
            made.set(key, rewrap(class_of(unwrap(entry)), below))
        else:
            made.set(key, entry.narrow(dim, *padding.runs[here]) if here in padding.runs else entry)
    return made


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
