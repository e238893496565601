"""Task payloads for workers: stored rows by reference, in-memory rows by value."""

from __future__ import annotations

import atexit
import functools
import multiprocessing.util
import os
import pickle
import threading
import uuid
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tdstore.container.core.container import Container
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.storage.handle import StoreHandle
from tdstore.errors import InvalidArgumentError, InvalidTypeError, StoreError
from tdstore.parallel.byvalue import PLAIN, Packed, plain
from tdstore.store import Cap

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase

_LARGE = 1 << 20
"""Rows of so many bytes are sent as shared memory."""
_KEPT = 4
"""A worker keeps so many containers open; those of earlier calls are closed as others come."""


class _Entry:
    """An open container, and how many threads are reading from it."""

    __slots__ = ("lock", "td", "users")

    def __init__(self, td: Any) -> None:
        self.td = td
        self.users = 0
        self.lock = _reading_lock(handle_of(td))


_open: OrderedDict[str, _Entry] = OrderedDict()
_inherited: list[_Entry] = []
"""Datasets that the parent of this forked process opened: this process does not close them."""
_guard = threading.Lock()
_registered_in = 0


def handle_of(td: Any) -> StoreHandle | None:
    """Return the open store that a container is pickled by; None where it is pickled with its values."""
    _, (_, *parts), *_ = _sent(td)
    return parts[0] if parts and isinstance(parts[0], StoreHandle) else None


def _sent(td: Any) -> Any:
    """Return what a container is pickled as, for another process."""
    in_memory = isinstance(unwrap(td), Container._resident_class)
    return td._to_process() if in_memory else td.__reduce__()


def _reading_lock(handle: StoreHandle | None) -> AbstractContextManager[Any]:
    parallel = handle is None or Cap.CONCURRENT_READ in handle.store.caps
    return nullcontext() if parallel else threading.Lock()


def _close(td: Any) -> None:
    handle = handle_of(td)
    if handle is not None:
        handle.store.close()


def close_all() -> None:
    """Close what this process has opened for tasks: what they wrote is committed."""
    while _open:
        _close(_open.popitem()[1].td)


atexit.register(close_all)


def _close_at_exit() -> None:
    # Processes of multiprocessing do not come to atexit, and forget at a fork what was to be done at their end.
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        _inherited.extend(_open.values())
        _open.clear()
        multiprocessing.util.Finalize(None, close_all, exitpriority=10)


class Place:
    """A container over a store that another process can open: travels as the way to the data.

    A worker opens it once, for all the tasks of a call. In the caller's own process it is the container itself.
    """

    __slots__ = ("_lock", "_restored", "container", "key")

    def __init__(self, container: Any, handle: StoreHandle, restored: Any) -> None:
        self.container = container
        self.key = uuid.uuid4().hex
        self._restored = restored
        self._lock = _reading_lock(handle)

    def __reduce__(self) -> Any:
        return _arrived, (self.key, *self._restored)

    def rows(self, at: tuple[Any, ...]) -> TensorDictBase:
        """Return the rows at an index, in memory or as views of mapped memory."""
        with self._lock:
            made: TensorDictBase = self.container._at(at)._resident()
            return made


class Arrived:
    """A `Place` in a worker."""

    __slots__ = ("key", "restored")

    def __init__(self, key: str, restored: Any) -> None:
        self.key = key
        self.restored = restored

    def opened(self) -> TensorDictBase:
        """Open the container anew."""
        restore, (reopen, way), rest = self.restored
        made: TensorDictBase = restore(reopen(*way), *rest)
        return made

    def rows(self, at: tuple[Any, ...]) -> TensorDictBase:
        """Return the rows at an index, in memory or as views of mapped memory."""
        with _guard:
            entry = self._entry()
            entry.users += 1
        try:
            with entry.lock:
                made: TensorDictBase = entry.td._at(at)._resident()
                return made
        finally:
            with _guard:
                entry.users -= 1

    def _entry(self) -> _Entry:
        entry = _open.get(self.key)
        if entry is None:
            _close_at_exit()
            idle = [key for key, other in _open.items() if not other.users]
            for key in idle[: len(_open) + 1 - _KEPT]:
                _close(_open.pop(key).td)
            entry = _open[self.key] = _Entry(self.opened())
        _open.move_to_end(self.key)
        return entry


def _arrived(key: str, *restored: Any) -> Arrived:
    return Arrived(key, restored)


def place_of(td: Any, *, by_multiprocessing: bool) -> Place | None:
    """Return the place of a container; None where only its values can be sent.

    Args:
        by_multiprocessing: it goes to processes that multiprocessing started, which can be sent open files.
    """
    handle = handle_of(td)
    if handle is None:
        return None
    try:
        way = handle.__reduce__()
        if not by_multiprocessing:
            pickle.dumps(way)
    except (StoreError, TypeError, pickle.PicklingError):
        return None  # temporary, or known to this process alone
    restore, (kind, _, *rest) = _sent(td)
    return Place(td, handle, (functools.partial(restore, kind), way, tuple(rest)))


def near_chunk(source: Any, at: tuple[Any, ...]) -> Chunk:
    """Build a chunk for a process of multiprocessing, which can be sent memory: rows are copied once, not piped."""
    if not isinstance(source, Place):
        rows = Chunk(source, at).rows()
        if _is_plain(rows) and rows.bytes() >= _LARGE:
            try:
                return Chunk(rows.save(storage="shared"), None)
            except StoreError:
                return Chunk(source, at)  # no room there
    return Chunk(source, at)


def _is_plain(rows: Any) -> bool:
    """Check whether a container has tensors only, of the kinds that a store returns unchanged."""
    return type(rows) is Container._resident_class and all(
        _is_plain(value)
        if isinstance(value, Container)
        else type(value) in PLAIN
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not (value.is_nested or value.is_quantized or value.requires_grad)
        for value in rows._data.values()
    )


class Chunk:
    """Rows of a container. Pickled as a place and an index, as shared memory, or as the rows by value."""

    __slots__ = ("at", "source")

    def __init__(self, source: Any, at: tuple[Any, ...] | None) -> None:
        self.source = source
        self.at = at

    def __reduce__(self) -> Any:
        if isinstance(self.source, (Place, Arrived)) or self.at is None:
            return Chunk, (self.source, self.at)
        return Chunk, (Packed(self.rows()), None)

    def rows(self) -> TensorDictBase:
        """Return the rows, in memory."""
        made: TensorDictBase
        if self.at is None and isinstance(self.source, Container):
            source: Any = self.source
            made = source._shallow()  # a TensorDict like any other, of memory that nobody else uses
        elif self.at is None:
            made = plain(self.source)
        elif isinstance(self.source, (Place, Arrived)):
            made = self.source.rows(self.at)
        else:
            made = self.source._at(self.at)._resident()
        return made


class Rows:
    """A function of a chunk as a function of a task: takes the rows, and puts the result where it belongs.

    Args:
        one_by_one: call `fn` with each row, without the dimension `dim`.
        joined: stack the results for the rows; without it they are a list.
    """

    __slots__ = ("dim", "fn", "joined", "one_by_one")

    def __init__(self, fn: Any, dim: int, one_by_one: bool, joined: bool) -> None:
        self.fn = fn
        self.dim = dim
        self.one_by_one = one_by_one
        self.joined = joined

    def __call__(self, task: tuple[Chunk, Any]) -> Any:
        """Return the result for one chunk, or a list of them for its rows; None if it is in the task's target."""
        chunk, target = task
        rows = chunk.rows()
        made = [self.fn(row) for row in rows.unbind(self.dim)] if self.one_by_one else self.fn(rows)
        if self.one_by_one and self.joined:
            made = join(made, self.dim, torch.stack)
        if target is None or made is None:
            return made
        target.put(made)
        return None


def join(results: list[Any], dim: int, how: Any) -> Container | Tensor | None:
    """Join results by `torch.cat` or `torch.stack`; None when all of them are.

    Raises:
        InvalidTypeError: results that are neither TensorDicts nor tensors, or not all of one kind.
    """
    kinds = {"None" if r is None else "Tensor" if isinstance(r, Tensor) else "TensorDict" for r in results}
    mismatched = next((r for r in results if not isinstance(r, (Tensor, Container, NoneType))), None)
    if mismatched is not None or len(kinds) > 1:
        what = f"a {type(mismatched).__name__}" if mismatched is not None else " for some rows and ".join(sorted(kinds))
        raise InvalidTypeError(f"fn must return TensorDicts, or tensors, or None, for all rows; it returned {what}")
    made: Container | Tensor | None = None if kinds == {"None"} else how(results, dim)
    return made


class Target:
    """The part of an `out=` that one task fills."""

    __slots__ = ("at", "place")

    def __init__(self, place: Any, at: tuple[Any, ...]) -> None:
        self.place = place
        self.at = at

    def __reduce__(self) -> Any:
        return Target, (self.place, self.at)

    def put(self, made: Any) -> None:
        """Write a result into its rows, and commit it."""
        if isinstance(self.place, Place):
            write_rows(self.place.container, self.at, made)
            return
        # Closed at once: a writer that is still there when its process is ended would look like one that died.
        td = self.place.opened()
        try:
            write_rows(td, self.at, made)
        finally:
            _close(td)


def write_rows(out: Any, at: tuple[Any, ...], made: Any) -> None:
    """Write `out[at] = made`, in place; every key of the result must exist, with as many rows.

    Raises:
        KeyNotFoundError: `out` lacks a key. InvalidArgumentError: another number of rows, or not of its kind.
    """
    if isinstance(out, Tensor):
        if not isinstance(made, Tensor) or made.shape != out[at].shape:
            raise InvalidArgumentError(f"fn returned {_shape(made)} for rows of `out` of shape {list(out[at].shape)}")
        out[at].copy_(made)
        return
    window = out._at(at)
    if isinstance(made, Tensor) or made.batch_size[: window.batch_dims] != window.batch_size:
        raise InvalidArgumentError(
            f"fn returned {_shape(made)} for rows of `out` of batch size {list(window.batch_size)}"
        )
    window.update_(made)


def _shape(made: Any) -> str:
    if isinstance(made, Tensor):
        return f"a tensor of shape {list(made.shape)}"
    return f"a {type(made).__name__} of batch size {list(getattr(made, 'batch_size', ()))}"
