"""Common interface of storages, as used by a buffer, its sampler and its writer."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tdstore.rl.storages.indices import as_ints
from tdstore.rl.types import RowIndex, Rows

SaveHook = Callable[..., Any]


class Storage(ABC):
    """A table of at most `max_size` slots.

    Args:
        max_size: number of slots.
        ndim: number of leading dimensions of data that are slots.
    """

    max_size: int
    ndim: int = 1
    initialized: bool = False
    filled_directly = False
    """Whether `set` wrote the last rows, and no writer: a writer over the storage begins at slot 0."""

    def __init__(self) -> None:
        self._attached: list[weakref.ref[Any]] = []
        self._save_hooks: list[SaveHook] = []
        self._load_hooks: list[SaveHook] = []

    # -- rows --------------------------------------------------------------------------------
    @abstractmethod
    def set(self, cursor: RowIndex, data: Rows, *, set_cursor: bool = True) -> None:
        """Write rows at an int, a slice, a range, a list or a tensor of rows.

        Args:
            cursor: rows of the first dimension; an int means that `data` is one row, without that dimension.
            data: rows with the dtypes and shapes of the first ones.
            set_cursor: whether the length is updated; `storage[i] = row` leaves it as it is.
        """

    def check_rows(self, data: object) -> None:
        """Check that rows can be written, without writing them. A storage that accepts all objects checks nothing.

        Args:
            data: rows along the first dimension.

        Raises:
            StoreError: as `set` would.
        """

    @abstractmethod
    def get(self, index: RowIndex) -> Any:
        """Read rows. An int and a slice return views where the storage has live tensors; a list or tensor returns
        copies.

        Raises:
            IndexError: a row beyond those that were written. RuntimeError: nothing was ever written.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of visible slots."""

    @abstractmethod
    def empty(self) -> None:
        """Forget all rows; their space stays allocated."""

    def __getitem__(self, index: Any) -> Any:
        """Return rows as `get(index)`."""
        return self.get(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write rows; the length stays."""
        self.set(index, value, set_cursor=False)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rows one by one."""
        for row in range(len(self)):
            yield self.get(row)

    def __contains__(self, item: Any) -> bool:
        """Check whether a slot is visible."""
        found = self.contains(item)
        return bool(found.all()) if isinstance(found, Tensor) else found

    def contains(self, item: RowIndex) -> bool | Tensor:
        """Check whether slots are visible: a bool for an int, a bool tensor for a tensor.

        Raises:
            NotImplementedError: neither an int nor a tensor.
        """
        if isinstance(item, int) and not isinstance(item, bool):
            return -len(self) <= item < len(self)
        if isinstance(item, Tensor) and not item.is_floating_point():
            found = torch.from_numpy(as_ints(item))
            made = (found >= -len(self)) & (found < len(self))
            return bool(made) if not item.ndim else made
        raise NotImplementedError(f"contains takes an int or a tensor of ints, not {type(item).__name__}")

    # -- listeners ---------------------------------------------------------------------------
    def attach(self, buffer: object) -> None:
        """Add a listener, once: writers call its `mark_update(index)` after each write."""
        if all(ref() is not buffer for ref in self._attached):
            self._attached.append(weakref.ref(buffer))

    def mark_update(self, index: RowIndex) -> None:
        """Notify all listeners that rows were written."""
        for ref in self._attached:
            listener = ref()
            if listener is not None:
                listener.mark_update(index)

    # -- checkpoints ---------------------------------------------------------------------------
    def register_save_hook(self, hook: SaveHook) -> None:
        """Have `dumps` call `hook(data, path=path)` and write the result."""
        self._save_hooks.append(hook)

    def register_load_hook(self, hook: SaveHook) -> None:
        """Have `loads` call `hook(data, out=data_or_None)` and use the result."""
        self._load_hooks.append(hook)

    @abstractmethod
    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint into a folder."""

    @abstractmethod
    def loads(self, path: str | os.PathLike[str]) -> None:
        """Take over a checkpoint."""

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save as `dumps(path)`."""
        self.dumps(*args, **kwargs)

    def dump(self, *args: Any, **kwargs: Any) -> None:
        """Save as `dumps(path)`."""
        self.dumps(*args, **kwargs)

    def load(self, *args: Any, **kwargs: Any) -> None:
        """Load as `loads(path)`."""
        self.loads(*args, **kwargs)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all rows and the length, as plain tensors."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the result of `state_dict`; no tensor of it is aliased."""

    def flush(self) -> None:
        """Commit what was written, where the rows outlive the process."""

    def close(self) -> None:
        """Commit, and release the rows."""
