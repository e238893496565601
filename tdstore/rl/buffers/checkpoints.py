"""Checkpoints of buffers: a folder for each part, the random numbers, and the batches that were prefetched."""

from __future__ import annotations

import json
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path as FilePath
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

import tdstore
from tdstore import TensorDict
from tdstore.errors import CorruptStoreError, StateDictError, StoreNotFoundError, TDStoreError
from tdstore.rl.buffers.writers import Writer
from tdstore.rl.storages.checkpoints import room_for
from tdstore.rl.storages.lazy import LazyStorage
from tdstore.rl.storages.tabular import is_collection
from tdstore.values import decode_value, encode_value

_METADATA = "buffer_metadata.json"
_PREFETCH = "prefetch"
_RNG = "rng_state"
Batch = tuple[Any, dict[Any, Any], bool]
"""A prefetched batch, what the sampler says of it, and whether it ends a pass."""


def dump_parts(
    folder: FilePath,
    parts: Mapping[str, Any],
    generator: Generator | None,
    pending: Sequence[Future[Batch]],
    about: Mapping[str, Any],
) -> None:
    """Write the parts of a buffer, each into a folder of its name; the metadata file comes last.

    Args:
        folder: made where it is not there.
        parts: objects with `dumps`, by the names of their folders.
        generator: its state is written, None for none.
        pending: prefetched batches.
        about: plain data for the metadata.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        part.dumps(folder / name)
    if generator is not None:
        TensorDict({"state": generator.get_state()}).save(folder / _RNG, mode="w").close()
    infos = _dump_batches(folder / _PREFETCH, pending)
    beside = folder / f".{_METADATA}.{os.getpid()}"
    beside.write_text(json.dumps({**about, "prefetched": infos}))
    beside.replace(folder / _METADATA)


def _dump_batches(folder: FilePath, pending: Sequence[Future[Batch]]) -> list[Any]:
    infos = []
    for number, future in enumerate(pending):
        batch, info, ran_out = future.result()
        if not (is_collection(batch) or isinstance(batch, Tensor)):
            return []
        TensorDict({"batch": batch}).save(folder / str(number), mode="w").close()
        infos.append({"info": encode_value(list(info.items())), "ran_out": ran_out})
    return infos


def load_parts(folder: FilePath, parts: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None, list[Future[Batch]]]:
    """Have the parts of a buffer take over a checkpoint; after an error nothing is changed.

    Args:
        folder: of the checkpoint.
        parts: the storage, the sampler and the writer, by the names of their folders.

    Returns:
        The metadata, the state of the generator, and the prefetched batches.

    Raises:
        StoreNotFoundError: there is no checkpoint. CorruptStoreError: a file of it is no JSON.
        ValueError: the cursor is beyond the rows.
    """
    if not (folder / _METADATA).exists():
        raise StoreNotFoundError(
            f"{folder} is no checkpoint of a replay buffer: there is no {_METADATA}", url=str(folder)
        )
    about = _read(folder / _METADATA)
    for name in ("sampler", "writer"):
        for file in sorted((folder / name).glob("*.json")):
            _read(file)
    if "batch_size" not in about:
        raise CorruptStoreError(f"{folder / _METADATA} of the checkpoint names no batch size", url=str(folder))
    storage, writer = parts["storage"], parts["writer"]
    if isinstance(writer, Writer):
        lazy = isinstance(storage, LazyStorage)
        room = room_for(storage, str(folder / "storage")) if lazy else getattr(storage, "capacity", None)
        writer.check_file(folder / "writer", room)
    # A sampler may have room for fewer rows: it is asked before the rows are changed.
    before = parts["sampler"].state_dict()
    try:
        for name in ("sampler", "storage", "writer"):
            parts[name].loads(folder / name)
    except BaseException:
        parts["sampler"].load_state_dict(before)
        raise
    rng = _copy_of(folder / _RNG)["state"] if (folder / _RNG).exists() else None
    pending = []
    for number, one in enumerate(about.get("prefetched", ())):
        future: Future[Batch] = Future()
        batch = _copy_of(folder / _PREFETCH / str(number))["batch"]
        future.set_result((batch, dict(decode_value(one["info"])), one["ran_out"]))
        pending.append(future)
    return about, rng, pending


def _read(file: FilePath) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise CorruptStoreError(f"{file} of the checkpoint is no JSON: {error}", url=str(file)) from error
    return read


def load_states(parts: Mapping[str, Any], state_dict: Any) -> None:
    """Have the parts of a buffer take over their entries of a state dict, all of them or none.

    Args:
        parts: by their entries; that of the rows, whose loading changes most, comes last.
        state_dict: as `state_dict()` of the buffer returns it.

    Raises:
        StateDictError: an entry is missing, or is of another kind.
    """
    missing = [name for name in parts if not isinstance(state_dict, Mapping) or name not in state_dict]
    if missing:
        raise StateDictError(f"this is no state dict of a replay buffer: it has no {', '.join(sorted(missing))}")
    *small, rows = parts
    before = {name: parts[name].state_dict() for name in small}
    name = rows
    try:
        for name in (*small, rows):
            parts[name].load_state_dict(state_dict[name])
        for name in small:  # the cursor of a writer is one of the rows
            parts[name].load_state_dict(state_dict[name])
    except BaseException as error:
        for changed, state in before.items():
            parts[changed].load_state_dict(state)
        if isinstance(error, (KeyError, TypeError, AttributeError)) and not isinstance(error, TDStoreError):
            raise StateDictError(f"{name} of the state dict is malformed: {error!r}") from error
        raise


def _copy_of(folder: FilePath) -> Any:
    with tdstore.open(folder) as found:
        return found.clone()


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
    """A storage whose checkpoints another object writes and reads: one with `dumps(storage, path)` and `loads`."""

    def __init__(self, storage: Any, checkpointer: Checkpointer) -> None:
        self.storage, self.checkpointer = storage, checkpointer

    def dumps(self, path: FilePath) -> None:
        """Write the rows to a folder."""
        self.checkpointer.dumps(self.storage, path)

    def loads(self, path: FilePath) -> None:
        """Read the rows of a folder."""
        self.checkpointer.loads(self.storage, path)


class Resumable(ABC):
    """A buffer that can be saved and resumed, with its random numbers, and what is prefetched."""

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
    def _clear_prefetched(self) -> None:
        """Drop what is prefetched."""

    def state_dict(self) -> dict[str, Any]:
        """Return rows, positions and random numbers, as plain data and tensors."""
        with self._lock:
            self._rank_marked()
            return {
                "_storage": self._storage.state_dict(), "_sampler": self._sampler.state_dict(),
                "_writer": self._writer.state_dict(), "_batch_size": self._batch_size,
                "_rng": None if self._generator is None else self._generator.get_state(),
            }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state dict; nothing of it is aliased. After an error nothing is changed.

        Raises:
            KeyError: an entry is missing, or is of another kind.
        """
        with self._lock:
            load_states({"_writer": self._writer, "_sampler": self._sampler, "_storage": self._storage}, state_dict)
            self._clear_prefetched()
            self._marked.clear()
            self._batch_size = state_dict.get("_batch_size", self._batch_size)
            if state_dict.get("_rng") is not None:
                self._restore_rng(state_dict["_rng"])

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint into a folder: `storage/`, `sampler/`, `writer/`, and what is prefetched.

        A storage whose rows lie in `storage/` already only commits them.
        """
        with self._lock:
            self._rank_marked()
            parts = {"storage": self._rows_of_checkpoints, "sampler": self._sampler, "writer": self._writer}
            about = {"batch_size": self._batch_size}
            dump_parts(FilePath(path), parts, self._generator, list(self._pending), about)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Go on where a checkpoint was written: rows, cursor, sampling position, random numbers.

        Raises:
            FileNotFoundError: the folder has no checkpoint of a replay buffer.
        """
        with self._lock:
            parts = {"storage": self._rows_of_checkpoints, "writer": self._writer, "sampler": self._sampler}
            about, rng, pending = load_parts(FilePath(path), parts)
            self._clear_prefetched()
            self._marked.clear()
            self._batch_size = about["batch_size"]
            if rng is not None:
                self._restore_rng(rng)
            self._pending.extend(pending)

    @property
    def _rows_of_checkpoints(self) -> Any:
        return self._storage if self._checkpointer is None else Checkpointed(self._storage, self._checkpointer)

    def _restore_rng(self, state: Tensor) -> None:
        if self._generator is None:
            self.set_rng(Generator())
        assert self._generator is not None
        self._generator.set_state(torch.as_tensor(state, dtype=torch.uint8).cpu().contiguous())

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
