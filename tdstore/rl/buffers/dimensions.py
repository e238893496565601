"""Buffers whose rows lie along another dimension than the first: a batch of environments, each over time.

The storage has the rows first. Data that is written, and what a buffer gives by index, have the caller's order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tdstore.errors import InvalidTypeError
from tdstore.rl.storages.lists import stacked


def rows_first(data: Any, dim: int) -> Any:
    """Exchange dimensions 0 and `dim` of data; a list of items is stacked before."""
    if isinstance(data, list):
        data = stacked(data)
    return _each(data, lambda part: part.transpose(0, dim))


def read(storage: Any, index: Any, dim: int) -> Any:
    """Return `data[index]` of all data, in the caller's order of dimensions. Only rows that it names are read."""
    rows, index = _narrowed(index, dim)
    return _each(storage.get(rows), lambda part: part.transpose(0, dim)[index])


def write(storage: Any, index: Any, value: Any, dim: int) -> None:
    """Write `data[index] = value`, in the caller's order of dimensions: rows are read, changed, and written whole."""
    rows, index = _narrowed(index, dim)
    found = storage.get(rows)
    if not hasattr(found, "transpose"):
        raise InvalidTypeError(f"rows that are a {type(found).__name__} are set by index with dim_extend=0 alone")
    found = found.clone()
    found.transpose(0, dim)[index] = value
    storage.set(range(*rows.indices(storage.shape[0])), found, set_cursor=False)


def _narrowed(index: Any, dim: int) -> tuple[slice, Any]:
    """Return the rows of the storage that an index names, and the index that remains for these."""
    parts = index if isinstance(index, tuple) else (index,)
    plain = all(isinstance(part, (int, slice)) and not isinstance(part, bool) for part in parts)
    if not plain or len(parts) <= dim:
        return slice(None), index
    row = parts[dim]
    if isinstance(row, int):
        return slice(row, row + 1 or None), (*parts[:dim], 0, *parts[dim + 1 :])
    if row.step not in (None, 1):
        return slice(None), index
    return row, (*parts[:dim], slice(None), *parts[dim + 1 :])


def _each(data: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(data, dict):
        return {key: _each(value, change) for key, value in data.items()}
    if isinstance(data, tuple):
        return tuple(_each(value, change) for value in data)
    return change(data)
