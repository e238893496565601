"""Ragged entries padded: nested tensors, and entries of lazy stacks whose elements differ in shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.container.core.tensorclasses import class_of, rewrap, unwrap
from tdstore.container.values.nontensor import NonTensor, NonTensorData, NonTensorStack
from tdstore.errors import InvalidStateError, UnevenError
from tdstore.index.shapes import as_size
from tdstore.types import NestedKey

if TYPE_CHECKING:
    from tdstore.tensordicts.resident.tensordict import TensorDict


def to_padded_tensor(td: Container, padding: float, mask_key: NestedKey | None) -> TensorDict:
    """See `TensorDict.to_padded_tensor`."""
    if mask_key is not None and -1 not in td.batch_size:
        raise InvalidStateError(
            f"mask_key tells real positions of the batch from padding, and in a batch of {list(td.batch_size)} all are"
        )
    made: TensorDict = _padded(td, padding, None)
    if mask_key is not None:
        made.set(mask_key, _mask(td, made.batch_size))
    return made


def _padded(td: Any, padding: float, batch: torch.Size | None) -> Any:
    """Convert all entries to dense tensors; `batch` is the batch size of the parent, once it is known."""
    if isinstance(td, Container._stack_class):
        data, dim = _stacked(td, padding), td._stack_dim
    else:
        data, dim = {}, 0
        for key in td._first_keys():
            kind, value = td._kind(key), td._raw(key)
            if kind == LEAF and value.is_nested:
                data[key] = padded_together(value.unbind(), padding)
            else:
                data[key] = rewrap(class_of(unwrap(value)), _padded(value, padding, None)) if kind == GROUP else value
    sizes = _sizes(td, data)
    made = Container._resident_class(batch_size=sizes, device=td.device, names=td._dim_names())
    for key, value in data.items():
        made.set(key, _values(value, dim, sizes) if isinstance(value, list) else value)
    return made


def _stacked(td: Any, padding: float) -> dict[str, Any]:
    """Stack the entries of a lazy stack; values become one value per element."""
    data: dict[str, Any] = {}
    for key in td._first_keys():
        kind = td._kind(key)
        if kind == LEAF:
            parts = [_one(element, key, padding) for element in td._tds]
            if len({part.ndim for part in parts}) > 1:
                raise UnevenError(
                    f"the entries {key!r} have different numbers of dimensions and cannot be padded to one shape",
                    hint=f"td.get({key!r}, as_list=True)",
                )
            data[key] = padded_together(parts, padding).movedim(0, td._stack_dim)
        elif kind == GROUP:
            data[key] = _padded(td._raw(key), padding, None)
        else:
            data[key] = [element._raw(key) for element in td._tds]
    return data


def _one(element: Any, key: str, padding: float) -> Tensor:
    """Return the entry of an element as one tensor, also for an element that is a stack."""
    if isinstance(element, Container._stack_class):
        found: Tensor = _stacked(element.select(key), padding)[key]
        return found
    part: Tensor = element._raw(key)
    return padded_together(part.unbind(), padding) if part.is_nested else part


def padded_together(parts: Sequence[Tensor], padding: float) -> Tensor:
    """Stack tensors of equal dimensionality into one tensor of the largest sizes."""
    sizes = [max(along) for along in zip(*(part.shape for part in parts), strict=True)]
    out = parts[0].new_full((len(parts), *sizes), padding)
    for i, part in enumerate(parts):
        where = tuple(slice(n) for n in part.shape)
        out[i][where] = part
    return out


def _sizes(td: Any, data: dict[str, Any]) -> torch.Size:
    """Return the batch size, with the largest size for ragged dimensions."""
    sizes = list(td.batch_size)
    if -1 not in sizes:
        return as_size(sizes)
    shapes = [value.shape for value in data.values() if isinstance(value, (Tensor, Container))]
    known = list(zip(*(shape[: len(sizes)] for shape in shapes), strict=True)) if shapes else []
    if not known:
        known = list(zip(*(s for s in _element_sizes(td)), strict=True))
    return torch.Size(max(known[d]) if n == -1 else n for d, n in enumerate(sizes))


def _element_sizes(td: Any) -> list[tuple[int, ...]]:
    d = td._stack_dim
    return [(*e.batch_size[:d], len(td._tds), *e.batch_size[d:]) for e in td._tds]


def _values(parts: list[NonTensor], dim: int, sizes: torch.Size) -> NonTensor:
    """Return the values of the elements of a stack, None where there was no position."""
    if all(isinstance(part, NonTensorData) for part in parts):
        flat = [part.data for part in parts]  # type: ignore[attr-defined]
        at = torch.arange(len(parts), device="cpu").reshape([-1 if d == dim else 1 for d in range(len(sizes))])
        return NonTensorStack._make(flat, at).move(lambda t: t.expand(sizes))
    array = np.empty(sizes, object)
    rows = np.moveaxis(array, dim, 0)
    for row, part in zip(rows, parts, strict=True):
        found = np.empty(part.numel(), object)
        found[:] = part.flat()
        row[tuple(map(slice, part.batch_size))] = found.reshape(part.batch_size)
    return NonTensorStack.from_list(array.tolist(), len(sizes))


def _mask(td: Any, sizes: torch.Size) -> Tensor:
    """Build a mask that is True at the existing positions of the batch."""
    mask = torch.zeros(sizes, dtype=torch.bool, device="cpu")
    if isinstance(td, Container._stack_class):
        for row, element in zip(mask.unbind(td._stack_dim), td._tds, strict=True):
            row[tuple(map(slice, element.batch_size))] = True
        return mask
    for key in td._first_keys():
        value = td._raw(key)
        if td._kind(key) == LEAF and value.is_nested:
            for row, part in zip(mask, value.unbind(), strict=True):
                row[tuple(map(slice, part.shape[: len(sizes) - 1]))] = True
            return mask
        if td._kind(key) == GROUP and -1 in value.batch_size:
            return _mask(value, value._resident_class(batch_size=sizes).batch_size)
    return mask.fill_(True)
