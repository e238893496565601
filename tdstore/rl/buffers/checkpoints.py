"""Checkpoints of buffers: a folder for each part, the random numbers, and the batches that were prefetched."""

from __future__ import annotations

import json
import multiprocessing.context
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path as FilePath
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Generator, Tensor

import tdstore
from tdstore import TensorDict
from tdstore.arguments import check_path
from tdstore.errors import CorruptStoreError, StateDictError, StoreExistsError, StoreNotFoundError, TDStoreError
from tdstore.rl.buffers.writers import Writer
from tdstore.rl.kinds import is_collection
from tdstore.rl.storages.base import Storage
from tdstore.rl.storages.checkpoints import plan_load, plan_state
from tdstore.rl.storages.lazy import LazyStorage
from tdstore.rl.storages.lists import ListStorage
from tdstore.values import decode_value, encode_value

METADATA = "buffer_metadata.json"
_PREFETCH = "prefetch"
_PICKLES_OF_TORCHRL = "prefetch.pkl"
"""Prefetched batches in a checkpoint of torchrl; they are left where they are."""
_RNG = "rng_state"
T = TypeVar("T")
Action = Callable[[], None]
"""Makes a part continue from a state that was checked."""
Batch = tuple[Any, dict[Any, Any], bool]
"""A prefetched batch, what the sampler says about it, and whether it ends a pass."""


def dump_parts(
    folder: FilePath,
    parts: Mapping[str, Any],
    generator: Generator | None,
    pending: Sequence[Future[Batch]],
    about: Mapping[str, Any],
) -> None:
    """Write the parts of a buffer, each into a folder of its name; the metadata file comes last.

    Args:
        folder: the folder; created if it does not exist.
        parts: objects with `dumps`, by the names of their folders.
        generator: its state is written, None for none.
        pending: prefetched batches.
        about: plain data for the metadata.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise StoreExistsError(f"{folder} is no folder, and there is no room for one", url=str(folder)) from error
    for name, part in parts.items():
        part.dumps(folder / name)
    if generator is not None:
        TensorDict({"state": generator.get_state()}).save(folder / _RNG, mode="w").close()
    infos = _dump_batches(folder / _PREFETCH, pending)
    beside = folder / f".{METADATA}.{os.getpid()}"
    beside.write_text(json.dumps({**about, "prefetched": infos}))
    beside.replace(folder / METADATA)


def _dump_batches(folder: FilePath, pending: Sequence[Future[Batch]]) -> list[Any]:
    infos = []
    for number, (batch, info, ran_out) in enumerate(_read_ones(pending)):
        if not (is_collection(batch) or isinstance(batch, Tensor)):
            return []
        described = is_collection(info)  # of an ensemble, which names the member of each row
        beside = {"info": info} if described else {}
        TensorDict({"batch": batch, **beside}).save(folder / str(number), mode="w").close()
        infos.append({"info": None if described else encode_value(list(info.items())), "ran_out": ran_out})
    return infos


def state_of_batches(pending: Sequence[Future[Batch]]) -> list[Batch]:
    """Return copies of prefetched batches, for a state dict."""
    return [(_copied(batch), _copied(info), ran_out) for batch, info, ran_out in _read_ones(pending)]


def _read_ones(pending: Sequence[Future[Batch]]) -> list[Batch]:
    """Return the batches that were read; those that failed are an error of the next sample, not of a checkpoint."""
    return [future.result() for future in pending if future.exception() is None]


def batches_of_state(states: Iterable[Batch]) -> list[Future[Batch]]:
    """Return copies of the prefetched batches of a state dict.

    Raises:
        StateDictError: they are no such batches.
    """
    pending: list[Future[Batch]] = []
    try:
        for batch, info, ran_out in states:
            future: Future[Batch] = Future()
            future.set_result((_copied(batch), _copied(info), bool(ran_out)))
            pending.append(future)
    except (TypeError, ValueError) as error:
        raise StateDictError(f"_prefetched of the state dict is malformed: {error!r}") from error
    return pending


def _copied(value: Any) -> Any:
    """Return a copy of a batch: of a TensorDict or a tensor, or of those in dicts, tuples and lists."""
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [_copied(one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value.clone() if isinstance(value, Tensor) or is_collection(value) else value


def plan_storage_load(storage: Any, folder: FilePath) -> tuple[int | None, Action]:
    """Check that a storage can take over a folder, and return its room after that and the function that does so.

    Storages of other packages, and those with a checkpointer, are not checked first.
    """
    if isinstance(storage, LazyStorage):
        return plan_load(storage, str(folder))
    if isinstance(storage, ListStorage):
        return storage.capacity, storage._plan_loads(folder)
    return getattr(storage, "capacity", None), partial(storage.loads, folder)


def plan_sampler_load(sampler: Any, folder: FilePath) -> Action:
    """Test whether a sampler can take over a folder, and return the function that makes it do so."""
    if not folder.exists() and (folder.parent / _PICKLES_OF_TORCHRL).exists() and not sampler.state_dict():
        return _nothing  # a sampler of torchrl without a state writes no folder
    try:
        return _plan_by_trial(sampler, partial(sampler.loads, folder))
    except (KeyError, TypeError, AttributeError) as error:
        if isinstance(error, TDStoreError):
            raise
        raise CorruptStoreError(f"{folder} is no state of a {type(sampler).__name__}: {error!r}") from error


def _nothing() -> None:
    """Do nothing."""


def plan_sampler_state(sampler: Any, state: Any) -> Action:
    """Test whether a sampler can take over a state dict, and return the function that makes it do so."""
    return _plan_by_trial(sampler, partial(sampler.load_state_dict, state))


def _plan_by_trial(sampler: Any, load: Action) -> Action:
    before = sampler.state_dict()
    try:
        load()
        return partial(sampler.load_state_dict, sampler.state_dict())
    finally:
        sampler.load_state_dict(before)


def plan_writer_load(writer: Any, folder: FilePath, room: int | None) -> Action:
    """Check that a writer can take over a folder, and return the function that makes it do so."""
    for file in sorted(folder.glob("*.json")):
        _read(file)
    if isinstance(writer, Writer):
        writer.check_file(folder, room)
    return partial(writer.loads, folder)


def plan_writer_state(writer: Any, state: Any, room: int | None) -> Action:
    """Check that a writer can take over a state dict, and return the function that makes it do so."""
    if isinstance(writer, Writer):
        writer.check_state(state, room)
    return partial(writer.load_state_dict, state)


def plan_storage_state(storage: Any, state: Any) -> tuple[int | None, Action]:
    """Check that a storage can take over a state dict, and return its room and the function that makes it do so."""
    room = getattr(storage, "capacity", None)
    if isinstance(storage, LazyStorage):
        return room, plan_state(storage, state)
    if isinstance(storage, ListStorage):
        return room, storage._plan_state(state)
    return room, partial(storage.load_state_dict, state)


class BufferState(NamedTuple):
    """What a checkpoint has in addition to rows and positions."""

    batch_size: int | None
    rng: Tensor | None
    pending: list[Future[Batch]]


def read_buffer_state(folder: FilePath) -> BufferState:
    """Read what a checkpoint has in addition to its parts.

    Raises:
        StoreNotFoundError: there is no checkpoint. CorruptStoreError: a file of it is damaged.
    """
    if not (folder / METADATA).exists():
        raise StoreNotFoundError(
            f"{folder} is no checkpoint of a replay buffer: there is no {METADATA}", url=str(folder)
        )
    about = _read(folder / METADATA)
    if "batch_size" not in about:
        raise CorruptStoreError(f"{folder / METADATA} of the checkpoint names no batch size", url=str(folder))
    rng = _copy_of(folder / _RNG)["state"] if (folder / _RNG).exists() else None
    pending = []
    for number, one in enumerate(about.get("prefetched", ())):
        future: Future[Batch] = Future()
        found = _copy_of(folder / _PREFETCH / str(number))
        info = found["info"] if one["info"] is None else dict(decode_value(one["info"]))
        future.set_result((found["batch"], info, one["ran_out"]))
        pending.append(future)
    return BufferState(about["batch_size"], rng, pending)


def _read(file: FilePath) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise CorruptStoreError(f"{file} of the checkpoint is no JSON: {error}", url=str(file)) from error
    return read


def _copy_of(folder: FilePath) -> Any:
    with tdstore.open(folder) as found:
        return found.clone()


def _bytes_of(state: Any) -> Tensor:
    return torch.as_tensor(state, dtype=torch.uint8).cpu().contiguous()


class Checkpointer(Protocol):
    """An object that writes and reads the rows of a checkpoint in place of their storage."""

    def dumps(self, storage: Any, path: FilePath) -> None:
        """Write the rows of a storage to a folder."""

    def loads(self, storage: Any, path: FilePath) -> None:
        """Read the rows of a folder into a storage."""


class TensorStorageCheckpointer:
    """A checkpointer that leaves the format to the storage, as a buffer without a checkpointer does."""

    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> None:
        """Write the rows of a storage to a folder."""
        storage.dumps(path)

    def loads(self, storage: Any, path: str | os.PathLike[str]) -> None:
        """Read the rows of a folder into a storage."""
        storage.loads(path)


class ListStorageCheckpointer(TensorStorageCheckpointer):
    """Writes and reads checkpoints of list storages."""


class Checkpointed:
    """A storage whose checkpoints another object writes and reads, by `dumps(storage, path)` and `loads`."""

    def __init__(self, storage: Any, checkpointer: Checkpointer) -> None:
        self.storage, self.checkpointer = storage, checkpointer

    def dumps(self, path: FilePath) -> None:
        """Write the rows to a folder."""
        self.checkpointer.dumps(self.storage, path)

    def loads(self, path: FilePath) -> None:
        """Read the rows of a folder."""
        self.checkpointer.loads(self.storage, path)


class Resumable(ABC):
    """A buffer that can be saved and resumed, with its random numbers and its prefetched batches."""

    _lock: threading.RLock
    _storage: Any
    _sampler: Any
    _writer: Any
    _checkpointer: Checkpointer | None
    _generator: Generator | None
    _batch_size: int | None
    _pending: deque[Future[Any]]
    _marked: deque[Any]

    @abstractmethod
    def set_rng(self, generator: Generator | None) -> None:
        """Set the generator of all random numbers."""

    @abstractmethod
    def _rank_marked(self) -> None:
        """Set the priorities of rows that others wrote."""

    @abstractmethod
    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all rows; the writer starts again."""

    @abstractmethod
    def _clear_prefetched(self) -> None:
        """Drop the prefetched batches."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or another process: without threads, with copies of prefetched batches."""
        if "_delayed" in self.__dict__:
            return dict(self.__dict__)
        return self._with_batches(self._pickled)

    def _pickled(self, pending: Sequence[Future[Any]]) -> dict[str, Any]:
        left_out = ("_lock", "_pool", "_pending", "_latest", "_iterator", "_marked", "_writing", "_sent")
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        batches = state_of_batches(pending)
        if multiprocessing.context.get_spawning_popen() is not None:
            self._sent = batches
        return {**state, "_prefetched_batches": batches}

    _sent: Sequence[Batch] = ()
    """Batches whose memory a process that is being started maps: they must be there until it has."""

    def state_dict(self) -> dict[str, Any]:
        """Return rows, positions, random numbers and prefetched batches, as plain data and tensors."""
        return self._with_batches(self._state)

    def _state(self, pending: Sequence[Future[Any]]) -> dict[str, Any]:
        return {
            "_storage": self._storage.state_dict(), "_sampler": self._sampler.state_dict(),
            "_writer": self._writer.state_dict(), "_batch_size": self._batch_size,
            "_rng": None if self._generator is None else self._generator.get_state(),
            "_prefetched": state_of_batches(pending),
        }  # fmt: skip

    def _with_batches(self, use: Callable[[Sequence[Future[Any]]], T]) -> T:
        """Call a function with the prefetched batches as soon as all are read, and nothing else changes meanwhile."""
        while True:
            with self._lock:
                pending = list(self._pending)
                if all(future.done() for future in pending):
                    self._rank_marked()
                    return use(pending)
            wait(pending)  # without the lock: their threads may wait for it

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state dict; no tensor of it is aliased. After bad input nothing is changed.

        Raises:
            KeyError: an entry is missing, or is of another kind.
        """
        with self._lock:
            self._plan_state(state_dict)()

    def _plan_state(self, state_dict: Any) -> Action:
        """Check that the buffer can resume from a state dict, and return the function that does so."""
        names = ("_storage", "_sampler", "_writer")
        missing = [name for name in names if not isinstance(state_dict, Mapping) or name not in state_dict]
        if missing:
            raise StateDictError(f"this is no state dict of a replay buffer: it has no {', '.join(sorted(missing))}")
        name = "_sampler"
        try:
            position = plan_sampler_state(self._sampler, state_dict[name])
            name = "_storage"
            room, rows = plan_storage_state(self._storage, state_dict[name])
            name = "_writer"
            cursor = plan_writer_state(self._writer, state_dict[name], room)
        except (KeyError, TypeError, AttributeError) as error:
            if isinstance(error, TDStoreError) and not isinstance(error, StateDictError):
                raise
            why = str(error) if isinstance(error, StateDictError) else repr(error)
            raise StateDictError(f"{name} of the state dict is malformed: {why}") from error
        rng, size = state_dict.get("_rng"), state_dict.get("_batch_size", self._batch_size)
        self._check_rng(rng)
        pending = batches_of_state(state_dict.get("_prefetched", ()))
        return partial(self._resume, (rows, position, cursor), size, rng, pending)

    def _resume(
        self, actions: Sequence[Action], batch_size: int | None, rng: Tensor | None, pending: Sequence[Future[Any]] = ()
    ) -> None:
        """Continue where a state was taken."""
        with self._lock:
            try:
                for act in actions:
                    act()
            except BaseException:
                if isinstance(self._storage, Storage) and not len(self._storage):  # the storage failed amid the rows
                    self.empty()
                raise
            self._clear_prefetched()
            self._marked.clear()
            self._batch_size = batch_size
            if rng is not None:
                if self._generator is None:
                    self.set_rng(Generator())
                assert self._generator is not None
                self._generator.set_state(_bytes_of(rng))
            self._pending.extend(pending)

    def _check_rng(self, state: Any) -> None:
        """Check that random numbers can continue from a state; None for no state."""
        if state is None:
            return
        try:
            Generator("cpu" if self._generator is None else self._generator.device).set_state(_bytes_of(state))
        except (RuntimeError, TypeError) as error:
            raise StateDictError(f"there is no state of random numbers to go on at: {error}") from error

    def _parts(self) -> dict[str, Any]:
        """Return the parts for which a checkpoint has a folder."""
        return {"storage": self._rows_of_checkpoints, "sampler": self._sampler, "writer": self._writer}

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint into a folder: `storage/`, `sampler/`, `writer/`, and the prefetched batches.

        A storage whose rows are already in `storage/` only commits them.
        """
        check_path(path, "path")
        about = {"batch_size": self._batch_size}
        self._with_batches(lambda pending: dump_parts(FilePath(path), self._parts(), self._generator, pending, about))

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Continue where a checkpoint was written: rows, cursor, sampling position, random numbers.

        Everything is checked first: a checkpoint that does not fit, or is damaged, changes nothing. If the
        disk or server fails while rows are copied, the buffer is left empty, to be loaded or filled again.

        Raises:
            FileNotFoundError: the folder has no checkpoint of a replay buffer.
        """
        with self._lock:
            self._plan_loads(path)()

    def _plan_loads(self, path: str | os.PathLike[str]) -> Action:
        """Check that the buffer can continue from a checkpoint, and return the function that does so."""
        check_path(path, "path")
        folder = FilePath(path)
        beside = read_buffer_state(folder)
        self._check_rng(beside.rng)
        position = plan_sampler_load(self._sampler, folder / "sampler")
        room, rows = plan_storage_load(self._rows_of_checkpoints, folder / "storage")
        cursor = plan_writer_load(self._writer, folder / "writer", room)
        return partial(self._resume, (rows, position, cursor), *beside)

    @property
    def _rows_of_checkpoints(self) -> Any:
        return self._storage if self._checkpointer is None else Checkpointed(self._storage, self._checkpointer)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save as `dumps(path)`."""
        self.dumps(path)

    dump = save

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load as `loads(path)`."""
        self.loads(path)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Call `storage.register_save_hook(hook)`."""
        self._storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Call `storage.register_load_hook(hook)`."""
        self._storage.register_load_hook(hook)
