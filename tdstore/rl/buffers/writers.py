"""Writers, which choose the slots of new rows."""

from __future__ import annotations

import heapq
import json
import operator
import os
from abc import ABC, abstractmethod
from pathlib import Path as FilePath
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from tdstore import TensorDict
from tdstore.errors import InvalidArgumentError, InvalidStateError, InvalidTypeError, KeyNotFoundError
from tdstore.rl.kinds import is_collection
from tdstore.rl.storages.lists import ListStorage, stacked
from tdstore.rl.storages.tabular import TabularStorage
from tdstore.rl.tables.conversion import length_of
from tdstore.rl.tables.state import Ints
from tdstore.rl.types import Rows, StorageLike
from tdstore.types import NestedKey

V = TypeVar("V")

_FILE = "metadata.json"


class Writer(ABC):
    """Base of writers, which choose the slots of new rows and write them to a storage.

    Example:
        >>> class Fixed(Writer):
        ...     def add(self, data):
        ...         self.storage.set(0, data)
        ...         return 0
        ...
        ...     def extend(self, data):
        ...         rows = torch.zeros(len(data), dtype=torch.int64)
        ...         self.storage.set(rows[-1:], data[-1:])
        ...         return rows
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(5), writer=Fixed())
        >>> rb.add(torch.ones(2)), len(rb)
        (0, 1)
    """

    adds_index = False
    """Whether samples of TensorDicts have the entry "index"."""

    def __init__(self, compilable: bool = False) -> None:
        self._storage: Any = None
        self._ours = False
        """Whether the storage has a cursor of its own, as those of this package have."""

    def register_storage(self, storage: StorageLike) -> None:
        """Set the storage to write to."""
        self._storage = storage
        self._ours = isinstance(storage, (TabularStorage, ListStorage))

    @property
    def storage(self) -> Any:
        """The storage to write to.

        Raises:
            RuntimeError: there is none.
        """
        if self._storage is None:
            raise InvalidStateError(f"this {type(self).__name__} has no storage: give it to a ReplayBuffer")
        return self._storage

    @abstractmethod
    def add(self, data: Any) -> int | Tensor | None:
        """Write one row, and return its index; None if the row is dropped."""

    @abstractmethod
    def extend(self, data: Rows) -> Tensor:
        """Write rows, and return their int64 indices `[n]`; -1 for dropped rows."""

    def check_rows(self, data: object) -> None:
        """Check that `extend` accepts rows, without writing them.

        Raises:
            StoreError: as `extend` would.
        """
        if self._ours:
            self._storage.check_rows(data)

    @property
    def write_count(self) -> int:
        """The number of all rows that were ever written."""
        return 0

    def empty(self) -> None:
        """Reset the writer."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the writer."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position of the writer."""

    def check_state(self, state_dict: dict[str, Any], capacity: int | None) -> None:
        """Check a state dict before the rows that belong to it are loaded.

        Args:
            state_dict: what `load_state_dict` will be given.
            capacity: rows that the storage will have room for; None: that is not known.

        Raises:
            ValueError: the state does not fit.
        """

    def check_file(self, path: str | os.PathLike[str], capacity: int | None) -> None:
        """Check the state in a folder, as `check_state` does, except for a writer with files of its own."""
        if type(self).loads is Writer.loads:
            self.check_state(self._read(path), capacity)

    def _read(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        named = json.loads((FilePath(path) / _FILE).read_text())
        if not isinstance(named, dict):
            raise InvalidArgumentError(f"{FilePath(path) / _FILE} is no state of a writer")
        return {f"_{key}": value for key, value in named.items()}

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a folder."""
        folder = FilePath(path)
        folder.mkdir(parents=True, exist_ok=True)
        named = {key.lstrip("_"): value for key, value in self.state_dict().items()}
        (folder / _FILE).write_text(json.dumps(named))

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Restore the state of a folder."""
        self.load_state_dict(self._read(path))

    def __repr__(self) -> str:
        """Name and place."""
        return f"{type(self).__name__}(write_count={self.write_count})"


class RoundRobinWriter(Writer):
    """Writer to consecutive slots, which starts again at the first slot when all are full.

    The cursor belongs to the storage, and is committed with the rows.

    Args:
        compilable: no effect; accepted for callers of torchrl.
        track_generations: not supported.

    Raises:
        TypeError: `track_generations=True`.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(5), writer=RoundRobinWriter())
        >>> rb.extend(torch.arange(4)), rb.extend(torch.arange(4, 7))
        (tensor([0, 1, 2, 3]), tensor([4, 0, 1]))
    """

    _selective = False
    """Whether only TensorDicts are written, or lists of rows."""

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        if track_generations:
            raise InvalidTypeError(
                "track_generations=True: slots have no numbers of their writes here; write a running number as an "
                "entry of the rows, and compare that of a sample with storage.column(key, index)"
            )
        super().__init__(compilable)
        self._foreign = (0, 0)
        """Cursor and number of rows written, for a storage that is not ours."""

    @property
    def _cursor(self) -> int:
        return int(self._storage.cursor) if self._ours else self._foreign[0]

    @property
    def write_count(self) -> int:
        """Rows of the first dimension that were ever written."""
        return int(self._storage.write_count) if self._ours else self._foreign[1]

    def add(self, data: Any) -> int | Tensor | None:
        """Write one row at the cursor.

        Returns:
            Its index; with several dimensions of slots, the coordinates `[n, ndim]` of its slots.
        """
        storage = self.storage
        if self._ours:
            row = storage.append_one(data)
            index: int | Tensor = row if storage.ndim == 1 else self._coordinates(np.array([row]))
        else:
            index, count = self._foreign
            storage.set(index, data)
            self._foreign = ((index + 1) % storage.max_size, count + 1)
        _notify(storage, index)
        return index

    def extend(self, data: Rows) -> Tensor:
        """Write rows at the cursor. If there are more rows than slots, the last ones are kept.

        Returns:
            int64 indices `[n]`; with several dimensions of slots, coordinates `[n, ndim]`.

        Raises:
            RuntimeError: there are no rows.
        """
        if self._selective and type(data) is not TensorDict and not isinstance(data, list):
            only_collections(data)
        if not self._ours:
            index = self._extend_foreign(self.storage, data)
            _notify(self.storage, index)
            return index
        storage = self._storage
        rows = storage.append(data)
        index = torch.from_numpy(rows) if storage.ndim == 1 else self._coordinates(rows)
        storage.mark_update(index)
        return index

    def _extend_foreign(self, storage: Any, data: Any) -> Tensor:
        data = stacked(data) if isinstance(data, list) else data
        n = length_of(data)[0]
        if not n:
            raise InvalidStateError("there are no rows in the data that is to be written")
        cursor, count = self._foreign
        rows = torch.arange(cursor, cursor + n, device="cpu") % int(storage.max_size)
        keep = min(n, storage.max_size)
        storage.set(rows[n - keep :], data[n - keep :])
        self._foreign = ((cursor + n) % storage.max_size, count + n)
        return rows

    def _coordinates(self, rows: Ints) -> Tensor:
        inner = self._storage.shape[1:]
        grid = np.indices((len(rows), *inner)).reshape(1 + len(inner), -1).T.copy()
        grid[:, 0] = rows[grid[:, 0]]
        return torch.from_numpy(grid)

    def empty(self) -> None:
        """Reset the cursor to the first slot."""
        if self._ours:
            self._storage.set_counters(0, 0)
        self._foreign = (0, 0)

    def check_state(self, state_dict: dict[str, Any], capacity: int | None) -> None:
        """Check that the cursor of a state dict is a row of the storage."""
        _check_number("cursor", state_dict.get("_cursor"))
        _check_number("write_count", state_dict.get("_write_count", 0))
        cursor = operator.index(state_dict["_cursor"])
        if self._ours and capacity is not None and cursor >= capacity:
            raise InvalidArgumentError(f"cursor {cursor} is beyond the {capacity} rows of the storage")

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor and the number of rows written."""
        return {"_cursor": self._cursor, "_write_count": self.write_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the cursor of a state dict.

        Raises:
            ValueError: the cursor is beyond the storage.
        """
        cursor, count = state_dict["_cursor"], state_dict.get("_write_count", 0)
        self.check_state(state_dict, self._storage.capacity if self._ours else None)
        cursor, count = operator.index(cursor), operator.index(count)
        if self._ours:
            self._storage.set_counters(cursor, count)
        self._foreign = (cursor, count)


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """A round-robin writer that only accepts TensorDicts.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(5), writer=TensorDictRoundRobinWriter())
        >>> rb.extend(TensorDict({"a": torch.zeros(3)}, [3]))
        tensor([0, 1, 2])
    """

    _selective = True
    adds_index = True

    def add(self, data: Rows) -> int | Tensor | None:
        """Write one TensorDict at the cursor."""
        return super().add(only_collections(data))


class ImmutableDatasetWriter(Writer):
    """Writer that refuses all writes, for the rows of a fixed dataset.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(5), writer=ImmutableDatasetWriter())
        >>> rb.add(torch.zeros(3))
        Traceback (most recent call last):
        ...
        tdstore.errors.InvalidStateError: this buffer has an ImmutableDatasetWriter: its rows cannot be changed
    """

    def add(self, data: Rows) -> NoReturn:
        """Refuse the row.

        Raises:
            RuntimeError: always.
        """
        raise InvalidStateError("this buffer has an ImmutableDatasetWriter: its rows cannot be changed")

    def extend(self, data: Rows) -> NoReturn:
        """Refuse the rows.

        Raises:
            RuntimeError: always.
        """
        raise InvalidStateError("this buffer has an ImmutableDatasetWriter: its rows cannot be changed")

    def check_rows(self, data: Any) -> NoReturn:
        """Refuse the rows, as `extend`."""
        self.extend(data)


class TensorDictMaxValueWriter(Writer):
    """Writer that keeps the rows with the largest values of one entry.

    Args:
        rank_key: the entry; `("next", "reward")` by default.
        reduction: reduces an entry with several numbers in a row to one: "sum", "max", "min", "mean" or "median".
        compilable: no effect; accepted for callers of torchrl.

    Raises:
        ValueError: there is no such reduction.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="key"))
        >>> _ = rb.extend(TensorDict({"key": torch.tensor([0.0, 3.0, 1.0, 2.0])}, [4]))
        >>> sorted(rb["key"].tolist())
        [2.0, 3.0]
    """

    def __init__(self, rank_key: NestedKey | None = None, reduction: str = "sum", compilable: bool = False) -> None:
        super().__init__(compilable)
        if reduction not in ("sum", "max", "min", "mean", "median"):
            raise InvalidArgumentError(f"reduction is 'sum', 'max', 'min', 'mean' or 'median', not {reduction!r}")
        self.rank_key = ("next", "reward") if rank_key is None else rank_key
        self.reduction = reduction
        self._ranks = np.zeros(0)
        """The values of the rows, by row."""
        self._count = 0

    @property
    def write_count(self) -> int:
        """The number of all rows passed to the writer."""
        return self._count

    def _values(self, data: Any, rows: int) -> Any:
        value = data.get(self.rank_key)
        if value is None:
            raise KeyNotFoundError(f"the rows have no entry {self.rank_key!r}, by which this writer ranks them")
        flat = torch.as_tensor(value).detach().cpu().double().reshape(rows, -1)
        if flat.isnan().any():
            raise InvalidArgumentError(f"{self.rank_key!r} is NaN in some rows, which therefore have no rank")
        made = getattr(flat, self.reduction)(dim=1)
        return (made if isinstance(made, Tensor) else made.values).numpy()

    def add(self, data: Any) -> int | None:
        """Write a row if it is among the largest, and return its index; None if it is not."""
        index = int(self.extend(only_collections(data).unsqueeze(0))[0])
        return None if index < 0 else index

    def check_rows(self, data: Any) -> None:
        """Check that the rows have ranks, and that the storage accepts them."""
        self._values(only_collections(data), int(data.batch_size[0]))
        super().check_rows(data)

    def extend(self, data: Any) -> Tensor:
        """Write the rows that are among the largest.

        Returns:
            int64 indices `[n]`; -1 for rows that were not written.

        Raises:
            RuntimeError: there are no rows. KeyError: the rows lack the entry. ValueError: a value is NaN.
        """
        storage = self.storage
        data = stacked(data) if isinstance(data, list) else only_collections(data)
        n = int(data.batch_size[0])
        if not n:
            raise InvalidStateError("there are no rows in the data that is to be written")
        ranks, length = self._values(data, n), len(storage)
        if len(self._ranks) != length:
            self._ranks = self._values(storage.get(slice(None)), length) if length else np.zeros(0)
        index, ordered = self._placed(ranks, min(storage.max_size, length + n))
        new = np.flatnonzero(index >= 0)
        if len(new):
            storage.set(torch.from_numpy(index[new]), data[torch.from_numpy(new)])
            self._ranks = ordered
        self._count += n
        made = torch.from_numpy(index)
        _notify(storage, made[made >= 0])
        return made

    def _placed(self, ranks: Any, capacity: int) -> tuple[Ints, Any]:
        """Assign a row to each new value: a free row, or the row of the smallest value if that is smaller.

        Returns:
            The row of each value, -1 for values without one, and the resulting values of all rows.
        """
        index = np.full(len(ranks), -1, np.int64)
        length = len(self._ranks)
        free = capacity - length
        after = np.concatenate([self._ranks, ranks[:free]])
        owner = np.concatenate([np.full(length, -1), np.arange(free)])
        smallest = list(zip(after.tolist(), range(capacity), strict=True))
        heapq.heapify(smallest)
        for number in (free + np.flatnonzero(ranks[free:] > smallest[0][0])).tolist():
            value = float(ranks[number])
            if value > smallest[0][0]:
                row = smallest[0][1]
                heapq.heapreplace(smallest, (value, row))
                after[row], owner[row] = value, number
        written = np.flatnonzero(owner >= 0)
        index[owner[written]] = written
        return index, after

    def empty(self) -> None:
        """Reset the values and the count."""
        self._ranks, self._count = np.zeros(0), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows passed to the writer. The values are read from the storage."""
        return {"_write_count": self._count}

    def check_state(self, state_dict: dict[str, Any], capacity: int | None) -> None:
        """Check that the count of a state dict is a valid count."""
        _check_number("write_count", state_dict.get("_write_count"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the count; the values are read from the storage at the next write."""
        self._count, self._ranks = int(state_dict["_write_count"]), np.zeros(0)


def only_collections(data: V) -> V:
    """Raise an error unless the data is a TensorDict."""
    if not is_collection(data):
        raise InvalidArgumentError(f"this buffer takes TensorDicts, not {type(data).__name__}")
    return data


def _check_number(name: str, value: Any) -> None:
    if not hasattr(value, "__index__") or operator.index(value) < 0:
        raise InvalidArgumentError(f"{name} of the state of the writer (_writer) is {value!r}, and no number of rows")


def _notify(storage: Any, index: Any) -> None:
    """Notify the listeners of a storage, which one of another package may not have, that rows were written."""
    if hasattr(storage, "mark_update"):
        storage.mark_update(index)
