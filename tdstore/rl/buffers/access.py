"""Rows of a buffer by index, and entries that are set in place.

The rows of a buffer may be along a dimension other than the first: a batch of environments, each over time. The storage
has the rows first. Data that is written, and data that a buffer returns by index, has the caller's order.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch

from tdstore import TensorDict
from tdstore.arguments import as_list, check_int, refuse_type
from tdstore.errors import InvalidTypeError, KeyNotFoundError, OutOfRangeError
from tdstore.keys import unravel
from tdstore.rl.kinds import is_collection
from tdstore.rl.storages.indices import is_key
from tdstore.rl.storages.lists import stacked
from tdstore.rl.storages.tabular import TabularStorage
from tdstore.rl.types import RowIndex, Rows
from tdstore.types import NestedKey


class RowAccess(ABC):
    """A buffer whose rows are read and changed by their index."""

    _lock: threading.RLock
    _storage: Any

    @property
    @abstractmethod
    def dim_extend(self) -> int:
        """Dimension of data that is along the rows."""

    @abstractmethod
    def __getitem__(self, index: Any) -> Any:
        """Return rows by index."""

    def _rows(self, index: Any) -> Any:
        dim = self.dim_extend
        return _read(self._storage, index, dim) if dim else self._storage.get(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write rows by index, or one entry of all rows by its key."""
        with self._lock:
            if is_key(index):
                self._set_entries({index: value})
            elif self.dim_extend:
                _write(self._storage, index, value, self.dim_extend)
            else:
                self._storage.set(index, value, set_cursor=False)

    def _set_entries(self, entries: Mapping[Any, Any]) -> None:
        if not isinstance(self._storage, TabularStorage):
            raise InvalidTypeError(f"a {type(self._storage).__name__} has no entries to set by a key")
        if dim := self.dim_extend:
            entries = {key: torch.as_tensor(value).transpose(0, dim) for key, value in entries.items()}
        self._storage.put_columns(entries)

    def set_(self, key: NestedKey, value: Any) -> Self:
        """Set one entry of all rows, and return the buffer.

        Raises:
            KeyError: no such entry. RuntimeError: the value has another shape.
        """
        self[unravel(key)] = value
        return self

    def set_at_(self, key: NestedKey, value: Any, index: RowIndex) -> Self:
        """Set one entry of some rows, and return the buffer.

        Args:
            key: the entry.
            value: its values, in the shape of the rows.
            index: the rows.

        Raises:
            KeyError: no such entry. IndexError: beyond the rows. RuntimeError: the value has another shape.
        """
        with self._lock:
            found = self._rows(index)
            if not is_collection(found):
                raise InvalidTypeError(f"rows that are a {type(found).__name__} have no entries to set by a key")
            if found.get(key, None) is None:
                raise KeyNotFoundError(f"no entry {key!r} in the rows of this buffer")
            self[index] = found.clone().set(key, value)
        return self

    def update_(self, data: Any, clone: bool = False, *, keys_to_update: Iterable[Any] | None = None) -> Self:
        """Set entries of all rows, all of them or none, and return the buffer.

        Args:
            data: a TensorDict with the same number of rows, or a dict.
            clone: no effect, as values are copied.
            keys_to_update: only these entries, and everything in them; default: all of `data`.

        Raises:
            KeyError: no such entry. RuntimeError: a value has another shape.
        """
        if not is_collection(data) and not isinstance(data, Mapping):
            raise refuse_type("what update_() takes", "a TensorDict or a dict", data)
        received = data if is_collection(data) else TensorDict(dict(data))
        entries = {key if isinstance(key, tuple) else (key,): value for key, value in received.items(True, True)}
        if keys_to_update is not None:
            named = [unravel(key) for key in as_list(keys_to_update, "keys_to_update", "a sequence of keys")]
            entries = {path: v for path, v in entries.items() if any(path[: len(n)] == n for n in named)}
        with self._lock:
            self._set_entries(entries)
        return self

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Return the rows `[:end]` in the order of their slots."""
        return self[slice(None) if end is None else slice(end)]

    def write_all(self, data: Rows, end: int | None = None) -> None:
        """Write rows to the first slots.

        Args:
            data: the rows.
            end: how many rows; default: as many as `data` has.

        Raises:
            RuntimeError: `data` has another number of rows. IndexError: there are fewer rows in the buffer.
        """
        if not hasattr(data, "__len__"):
            raise refuse_type("what write_all() takes", "rows", data)
        count = len(data) if end is None else end
        check_int(count, "end")
        with self._lock:
            if self._storage.ndim == 1 and count > len(self._storage):
                raise OutOfRangeError(f"{count} rows are to be written, and this buffer has {len(self._storage)}")
            self[:count] = data


def rows_first(data: Rows, dim: int) -> Any:
    """Exchange dimensions 0 and `dim` of data; a list of items is stacked before."""
    if isinstance(data, list):
        data = stacked(data)
    return _each(data, lambda part: part.transpose(0, dim))


def _read(storage: Any, index: Any, dim: int) -> Any:
    """Return `data[index]` of all data, in the caller's order of dimensions. Only the rows that it names are read."""
    rows, index = _narrowed(index, dim)
    return _each(storage.get(rows), lambda part: part.transpose(0, dim)[index])


def _write(storage: Any, index: Any, value: Any, dim: int) -> None:
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
