"""Conversion of data to columns: the structure that its rows have, and their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tdstore
from tdstore import TensorDict
from tdstore.errors import BatchSizeError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from tdstore.interop import from_tensordict
from tdstore.rl.kinds import is_container, is_foreign
from tdstore.rl.tables.columns import Column
from tdstore.rl.tables.structure import RESERVED, Collection, Fields, Part, Structure
from tdstore.rl.tables.values import encode_values, pack_values, width_of
from tdstore.rl.types import Rows
from tdstore.types import Path, path_text


def structure_of(data: Rows, lead: int, inner: Sequence[int] = ()) -> Structure:
    """Return the structure of the rows of data whose first `lead` dimensions are slots.

    Raises:
        TypeError: it is not a TensorDict, a tensor, or a dict or tuple of these. ValueError: an entry has a reserved
            name.
        BatchSizeError: a tensor has fewer dimensions than the slots.
    """
    found = Structure(0, [], tuple(inner))
    found.root = _part_of(data, lead, (), found.columns)
    found.device = _device_in(data)
    if not found.columns:
        raise InvalidArgumentError("the data has no entries: the first rows say which ones a storage has")
    return found


def check_lengths(structure: Structure, data: Rows, lead: Sequence[int]) -> None:
    """Check that all tensors of data have the same leading dimensions.

    Raises:
        BatchSizeError: one has different ones.
    """
    for column, value in zip(structure.columns, structure.take(data), strict=True):
        if not column.values and tuple(torch.as_tensor(value).shape[: len(lead)]) != tuple(lead):
            raise BatchSizeError(
                f"{path_text(column.path)} has shape {list(value.shape)}, and the data is {list(lead)} rows"
            )


def _device_in(data: Any) -> torch.device | None:
    """Return the device that data names, or the device of its first tensor."""
    if getattr(data, "device", None) is not None:
        return torch.device(data.device)
    values = data if isinstance(data, tuple) else data.values() if hasattr(data, "values") else ()
    return next(filter(None, map(_device_in, values)), None)


def _part_of(data: Any, lead: int, path: Path, columns: list[Column]) -> Part:
    if path and path[0] in RESERVED:
        raise InvalidArgumentError(f"the name {path[0]} is taken by the storage itself: rename this entry")
    if is_foreign(data):
        data = from_tensordict(data)
    if is_container(data):
        td = tdstore.unwrap_tensorclass(data)
        kind = None if td is data else type(data)
        batch = tuple(td.batch_size[lead:])
        if len(td.batch_size) < lead:
            raise BatchSizeError(
                f"data{_at(path)} of batch size {list(td.batch_size)} has no {lead} leading dimensions for slots",
                hint="give it a batch size",
            )
        parts = {key: _part_of(value, lead, (*path, key), columns) for key, value in td.items() if value is not None}
        name = None if kind is None else tdstore.tensorclass_name(kind)
        return Collection(path, parts, batch, kind, name, td.device)
    if isinstance(data, Tensor):
        if data.layout is not torch.strided or data.is_nested or data.is_meta:
            found = "has no values" if data.is_meta else "is nested" if data.is_nested else "is sparse"
            raise UnsupportedError(
                f"data{_at(path)} {found}: rows are dense tensors of one shape",
                hint="LazyStackStorage and ListStorage keep rows of any kind in memory",
            )
        if data.ndim < lead:
            raise BatchSizeError(f"data{_at(path)} of shape {list(data.shape)} has no {lead} dimensions for slots")
        columns.append(Column(path or ("rows",), tuple(data.shape[lead:]), data.dtype))
        return len(columns) - 1
    if tdstore.is_non_tensor(data) or (path and not isinstance(data, (Mapping, tuple, np.ndarray))):
        return _values_column(data, lead, path, columns)
    if isinstance(data, Mapping):
        names = _unique([key if isinstance(key, str) else repr(key) for key in data])
        made = [_part_of(v, lead, (*path, n), columns) for n, v in zip(names, data.values(), strict=True)]
        return Fields(path, tuple(data), tuple(made))
    if isinstance(data, tuple):
        made = [_part_of(value, lead, (*path, str(i)), columns) for i, value in enumerate(data)]
        return Fields(path, (), tuple(made), type(data))
    if isinstance(data, (np.ndarray, int, float, bool, complex, np.generic)):
        return _part_of(torch.as_tensor(data), lead, path, columns)
    raise InvalidTypeError(
        f"rows are TensorDicts, tensorclasses, tensors, or dicts and tuples of these, not {type(data).__name__}"
    )


def _at(path: Path) -> str:
    return f" {path_text(path)}" if path else ""


def _unique(names: list[str]) -> list[str]:
    made: list[str] = []
    for name in names:
        while name in made:
            name += "'"
        made.append(name)
    return made


def _values_column(data: Any, lead: int, path: Path, columns: list[Column]) -> Part:
    if isinstance(data, (int, float, bool, complex)) and not tdstore.is_non_tensor(data):
        return _part_of(torch.as_tensor(data), lead, path, columns)
    extra = tuple(data.batch_size[lead:]) if tdstore.is_non_tensor(data) else ()
    columns.append(Column(path, (*extra, width_of(encode_values(data))), torch.uint8, values=True))
    return len(columns) - 1


def length_of(data: Rows, dims: int = 1) -> tuple[int, ...]:
    """Return the first `dims` dimensions of data."""
    if type(data) is TensorDict:
        size = data.batch_size
        return size if len(size) == dims else size[:dims]
    if isinstance(data, (Tensor, np.ndarray)):
        return tuple(data.shape[:dims])
    if isinstance(data, Mapping) and not is_container(data):
        return next((length_of(value, dims) for value in data.values()), ())
    if isinstance(data, tuple):
        return next((length_of(value, dims) for value in data), ())
    if hasattr(data, "batch_size"):
        return tuple(data.batch_size[:dims])
    raise InvalidTypeError(f"rows are TensorDicts, tensors, or dicts and tuples of these, not {type(data).__name__}")


def columns_of(structure: Structure, data: Rows, lead: Sequence[int]) -> list[Tensor]:
    """Return the columns of data that has this very structure, values as bytes."""
    made = []
    for column, value in zip(structure.columns, structure.take(data), strict=True):
        if column.values:
            values = encode_values(value)
            shape = (*lead, *column.shape[:-1])
            made.append(pack_values(values * (math.prod(shape) if len(values) == 1 else 1), shape, column.shape[-1]))
        else:
            made.append(torch.as_tensor(value).detach().cpu())
    return made


def flatten_rows(rows: Any, dims: int) -> Any:
    """Merge the first dimensions of a pytree of rows into one."""
    if isinstance(rows, Tensor):
        return rows.reshape(-1, *rows.shape[dims:])
    if is_container(rows):
        return rows.reshape(-1, *rows.batch_size[dims:])
    if isinstance(rows, dict):
        return {key: flatten_rows(value, dims) for key, value in rows.items()}
    made = [flatten_rows(value, dims) for value in rows]
    return type(rows)(*made) if hasattr(rows, "_fields") else tuple(made)
