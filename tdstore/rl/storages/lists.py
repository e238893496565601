"""Storages of whole objects: a list of them, and lazy stacks of TensorDicts whose shapes differ."""

from __future__ import annotations

import json
import multiprocessing.context
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import tdstore
from tdstore import NonTensorStack
from tdstore.arguments import as_device, check_flags
from tdstore.errors import (
    BatchSizeError,
    InvalidArgumentError,
    InvalidStateError,
    OutOfRangeError,
    StateDictError,
    UnsupportedError,
)
from tdstore.interop import from_tensordict
from tdstore.rl.kinds import is_container, is_foreign
from tdstore.rl.storages.base import Storage
from tdstore.rl.storages.checkpoints import class_names, td_of_state
from tdstore.rl.storages.indices import as_ints, is_int, select
from tdstore.rl.tables.conversion import length_of
from tdstore.rl.tables.state import Ints
from tdstore.rl.types import RowIndex, Rows
from tdstore.types import DeviceLike, NestedKey
from tdstore.values import decode_value, encode_value

if TYPE_CHECKING:
    from tdstore import TensorDictBase

_UNLIMITED = 2**62
_FILE = "items.json"


class ListStorage(Storage):
    """A list of objects of any kind, in this process.

    Args:
        max_size: number of objects; None: no limit.
        compilable: no effect; accepted for callers of torchrl.
        device: where tensors and TensorDicts are moved to when they are written.

    Raises:
        ValueError: `max_size` is below 1.

    Example:
        >>> storage = ListStorage(10)
        >>> storage.set([0, 1], ["first", "second"])
        >>> storage.get(1), len(storage)
        ('second', 2)
    """

    def __init__(
        self, max_size: int | None = None, *, compilable: bool = False, device: DeviceLike | None = None
    ) -> None:
        super().__init__()
        check_flags(compilable=compilable)
        if max_size is not None and (isinstance(max_size, bool) or not isinstance(max_size, int) or max_size < 1):
            raise InvalidArgumentError(f"max_size is a number of objects, at least 1, or None, not {max_size!r}")
        self.max_size = _UNLIMITED if max_size is None else max_size
        self.device = None if device is None else as_device(device)
        self.initialized = True
        self._items: list[Any] = []
        self._lock = threading.RLock()
        self.cursor = 0
        self.write_count = 0
        self.epoch = 0

    @property
    def capacity(self) -> int:
        """Capacity, in objects."""
        return self.max_size

    @property
    def shape(self) -> torch.Size:
        """Number of objects."""
        return torch.Size((len(self._items),))

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self._items)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write objects at an int, or at several rows.

        Args:
            cursor: an int, or a slice, a range, a list or an int64 tensor `[n]` of rows.
            data: one object for an int, otherwise a list of `n` objects.
            set_cursor: no effect: the length is that of the list.

        Raises:
            RuntimeError: a row is beyond the end with a gap before it, or beyond `max_size`.
        """
        with self._lock:
            if is_int(cursor):
                rows, items = [int(cursor)], [data]
            else:
                if isinstance(cursor, slice):
                    items = _items(data)
                    stop = cursor.stop if cursor.stop is not None else (cursor.start or 0) + len(items)
                    rows = list(range(*slice(cursor.start, stop, cursor.step).indices(max(stop, len(self)))))
                else:
                    rows, items = as_ints(list(cursor) if isinstance(cursor, range) else cursor).tolist(), _items(data)
                if len(rows) != len(items):
                    raise InvalidStateError(f"{len(items)} objects for {len(rows)} rows")
            self._write(rows, items)
            if set_cursor and rows:
                self.filled_directly = True
                self.cursor = (rows[-1] + 1) % self.max_size
                self.write_count += len(rows)
            self.epoch += 1

    def _write(self, rows: list[int], items: list[Any]) -> None:
        length = len(self._items)
        end, placed = length, []
        for row in rows:
            at = row + length if row < 0 else row
            if at > end or at < 0:
                raise InvalidStateError(
                    f"row {row} is not next to the {length} objects that are there: no gaps in a list"
                )
            if at >= self.max_size:
                raise InvalidStateError(
                    f"row {row} is beyond the {self.max_size} objects that this ListStorage has room for"
                )
            end = max(end, at + 1)
            placed.append(at)
        if self.device is not None:
            items = [item.to(self.device) if hasattr(item, "to") else item for item in items]
        for at, item in zip(placed, items, strict=True):
            if at == len(self._items):
                self._items.append(item)
            else:
                self._items[at] = item

    def append(self, data: Rows) -> Ints:
        """Write objects at the cursor, which wraps at `max_size`; return their rows, int64 `[n]`.

        Raises:
            RuntimeError: there are no objects.
        """
        items = _items(data)
        if not items:
            raise InvalidStateError("there are no rows in the data that is to be written")
        with self._lock:
            start = self.cursor
            rows = (start + np.arange(len(items))) % self.max_size
            skip = max(0, len(items) - self.max_size)
            if skip and start < len(items):  # a first round over more than fit: in the order of the rows
                order = np.argsort(rows[skip:], kind="stable")
                self._write(rows[skip:][order].tolist(), [items[skip + int(i)] for i in order])
            else:
                self._write(rows[skip:].tolist(), items[skip:])
            self.cursor = int((start + len(items)) % self.max_size)
            self.write_count += len(items)
            return rows

    def append_one(self, item: Any) -> int:
        """Write one object at the cursor; return its row."""
        with self._lock:
            row = self.cursor
            self._write([row], [item])
            self.cursor = (row + 1) % self.max_size
            self.write_count += 1
            return row

    def set_counters(self, cursor: int, write_count: int) -> None:
        """Set where the writer continues, and how many objects it has written."""
        self.filled_directly = False
        self.cursor, self.write_count = cursor, write_count

    def get(self, index: RowIndex) -> Any:
        """Return the object of an int, or the list of objects of several rows.

        Raises:
            IndexError: the index is beyond the end.
        """
        with self._lock:
            if isinstance(index, tuple):
                if len(index) != 1:
                    raise OutOfRangeError(f"a list has one dimension, and the index has {len(index)}")
                index = index[0]
            found = select(index, len(self._items), (), f"{len(self._items)} objects are in this {type(self).__name__}")
            if found.single:
                assert found.rows is not None
                return self._items[found.rows.start]
            rows = range(found.rows.start, found.rows.stop) if found.rows is not None else found.slots
            assert rows is not None
            return [self._items[row] for row in rows]

    def take_slots(self, slots: Ints) -> Any:
        """Return the objects of rows that the caller has checked."""
        with self._lock:
            return [self._items[row] for row in slots.tolist()]

    def empty(self) -> None:
        """Forget all objects."""
        with self._lock:
            self._items.clear()
            self.cursor = self.write_count = 0
            self.epoch += 1

    # -- checkpoints -------------------------------------------------------------------------
    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write the objects into a folder: plain data and tensors as JSON, TensorDicts as datasets.

        Raises:
            UnsupportedError: an object is neither.
        """
        folder = FilePath(path)
        beside = folder.with_name(f"{folder.name}.{os.getpid()}.new")
        beside.mkdir(parents=True)
        try:
            listed = []
            for row, item in enumerate(self._items):
                if is_container(item):
                    item.save(beside / str(row))
                    listed.append({"dataset": str(row)})
                    continue
                try:
                    value = item.detach().cpu() if isinstance(item, Tensor) else item
                    listed.append({"value": encode_value(value)})
                except TypeError as error:
                    raise UnsupportedError(f"object {row} of this ListStorage cannot be written: {error}") from error
            about = {"items": listed, "cursor": self.cursor, "write_count": self.write_count}
            (beside / _FILE).write_text(json.dumps(about))
            if folder.exists():
                shutil.rmtree(folder)
            beside.rename(folder)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Take over the objects of a folder.

        Raises:
            RuntimeError: there are more than `max_size`; the storage is unchanged.
        """
        self._plan_loads(path)()

    def _plan_loads(self, path: str | os.PathLike[str]) -> Callable[[], None]:
        """Read the objects of a folder, and return the function that takes them over."""
        folder = FilePath(path)
        about = json.loads((folder / _FILE).read_text())
        listed = about["items"]
        self._check_room(len(listed), str(folder))
        items = [
            tdstore.open(folder / str(int(one["dataset"]))).clone() if "dataset" in one else decode_value(one["value"])
            for one in listed
        ]
        return partial(self._take_over, items, int(about["cursor"]), int(about["write_count"]))

    def _check_room(self, count: int, whose: str) -> None:
        if count > self.max_size:
            raise InvalidStateError(f"{whose} has {count} objects, and this storage has room for {self.max_size}")

    def _take_over(self, items: list[Any], cursor: int | None = None, write_count: int | None = None) -> None:
        with self._lock:
            self._items = items
            self.cursor = self.cursor if cursor is None else cursor
            self.write_count = self.write_count if write_count is None else write_count
            self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the objects; for TensorDicts, their state dicts."""
        rows = [i.state_dict() if is_container(i) else _copied(i) for i in self._items]
        return {"_storage": rows, "_classes": [class_names(item) for item in self._items]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the objects of a state dict.

        Raises:
            RuntimeError: there are more than `max_size`; the storage is unchanged.
            StateDictError: the classes are malformed; the storage is unchanged.
        """
        self._plan_state(state_dict)()

    def _plan_state(self, state_dict: dict[str, Any]) -> Callable[[], None]:
        """Copy the objects of a state dict, and return the function that takes them over."""
        self._check_room(len(state_dict["_storage"]), "the state dict")
        rows = state_dict["_storage"]
        classes = state_dict.get("_classes", [()] * len(rows))
        if not isinstance(classes, (list, tuple)) or len(classes) != len(rows):
            raise StateDictError(f"_classes of the state dict is malformed: it is no list of {len(rows)} lists")
        items: list[Any] = []
        for one, names in zip(rows, classes, strict=True):
            if isinstance(one, dict) and _is_state(one):
                items.append(td_of_state(one, names))
            else:
                items.append(_copied(one))
        return partial(self._take_over, items)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy; a list is not visible to another process."""
        if multiprocessing.context.get_spawning_popen() is not None:
            raise InvalidStateError(
                f"a {type(self).__name__} is a list of this process, which others cannot see: use a LazyMemmapStorage"
            )
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_attached")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a copy."""
        self.__dict__.update(state)
        self._lock, self._attached = threading.RLock(), []


class LazyStackStorage(ListStorage):
    """A list of TensorDicts whose shapes may differ; several rows are read as a lazy stack.

    Args:
        max_size: number of TensorDicts; None: no limit.
        compilable: no effect; accepted for callers of torchrl.
        stack_dim: along which dimension rows are stacked.
        device: where TensorDicts are moved to when they are written.

    Example:
        >>> storage = LazyStackStorage(10)
        >>> storage.set([0, 1], [TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(3))])
        >>> storage.get([0, 1])[1]["a"].shape
        torch.Size([3])
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        stack_dim: int = 0,
        device: DeviceLike | None = None,
    ) -> None:
        super().__init__(max_size, compilable=compilable, device=device)
        self.stack_dim = stack_dim

    def get(self, index: RowIndex) -> Any:
        """Return a TensorDict, or a lazy stack of several."""
        found = super().get(index)
        return tdstore.lazy_stack(_ours(found), self.stack_dim) if isinstance(found, list) and found else found

    def take_slots(self, slots: Ints) -> TensorDictBase:
        """Return a lazy stack of rows that the caller has checked."""
        made: TensorDictBase = tdstore.lazy_stack(_ours(super().take_slots(slots)), self.stack_dim)
        return made

    @property
    def entries(self) -> set[Any]:
        """Keys of the first row, as `td.keys(True, True)` returns them."""
        return set(_ours(self._items[:1])[0].keys(True, True)) if self._items else set()

    def column(self, key: NestedKey, slots: Ints) -> Tensor | None:
        """Return one entry of rows, `[n]` of equal shapes; None where a row has none of that name."""
        values = [item.get(key, None) for item in super().take_slots(slots)]
        return None if any(value is None for value in values) else torch.stack(values)


def _ours(items: list[Any]) -> list[Any]:
    """Convert TensorDicts of the `tensordict` package."""
    return [from_tensordict(item) if is_foreign(item) else item for item in items]


def _items(data: Any) -> list[Any]:
    if isinstance(data, list):
        return data
    if isinstance(data, Tensor) or is_container(data):
        return list(data.unbind(0))
    if isinstance(data, tuple):
        return [
            type(data)(*parts) if hasattr(data, "_fields") else parts for parts in zip(*map(_items, data), strict=True)
        ]
    if isinstance(data, dict):
        return [dict(zip(data, parts, strict=True)) for parts in zip(*map(_items, data.values()), strict=True)]
    return list(data)


def _is_state(item: dict[Any, Any]) -> bool:
    """Check whether a dict is the state dict of a TensorDict, of this release or of an earlier one."""
    return "__batch_size" in item or "batch_size" in getattr(item, "_metadata", {}).get("", ())


def _copied(item: Any) -> Any:
    return item.clone() if isinstance(item, Tensor) else item


def leading(data: Rows, ndim: int) -> tuple[int, ...]:
    """Return the first `ndim` dimensions of rows that are to be written.

    Raises:
        RuntimeError: there are no rows, or they have fewer dimensions.
    """
    lead = length_of(data, ndim)
    if not lead or not lead[0]:
        raise InvalidStateError("there are no rows in the data that is to be written")
    if len(lead) < ndim:
        raise BatchSizeError(f"the data has the leading shape {list(lead)}, and slots have {ndim} dimensions")
    return lead


def stacked(items: Sequence[Any]) -> Any:
    """Stack separate items into one batch: TensorDicts, tensors, or dicts and tuples of these.

    Raises:
        RuntimeError: their structures differ.
    """
    if not items:
        raise InvalidStateError("there are no rows in the data that is to be written")
    first = items[0]
    if is_container(first):
        return tdstore.stack(list(items))
    if is_foreign(first):
        return tdstore.stack([from_tensordict(item) for item in items])
    if isinstance(first, Tensor):
        if any(not isinstance(item, Tensor) or item.shape != first.shape for item in items):
            raise _uneven()
        return torch.stack(list(items))
    if isinstance(first, Mapping):
        if any(not isinstance(item, Mapping) or item.keys() != first.keys() for item in items):
            raise _uneven()
        return {key: stacked([item[key] for item in items]) for key in first}
    if isinstance(first, tuple):
        if any(not isinstance(item, tuple) or len(item) != len(first) for item in items):
            raise _uneven()
        made = [stacked(parts) for parts in zip(*items, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else tuple(made)
    if isinstance(first, str):
        return NonTensorStack.from_list(list(items))
    return torch.as_tensor(np.asarray(items))


def _uneven() -> BatchSizeError:
    return BatchSizeError(
        "a list is a batch of separate items, and these have different structures",
        hint="one item that is made of several things is a tuple: extend((a, b)), not extend([a, b])",
    )
