"""Saves of `torch.distributed.checkpoint`: each rank writes a dataset, and the coordinator publishes them together."""

import dataclasses
import os
import uuid
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.futures import Future

from tdstore import LeafSpec, Write
from tdstore.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    StoreError,
    StoreExistsError,
    UnsupportedError,
)
from tdstore.header import Group
from tdstore.types import Path
from tdstore.values import encode_value

from .document import KEY, PartRecord, Stored, leaf_path, make_document, read_document
from .places import Places

_BATCH_BYTES = 64 << 20
"""The most bytes of copies on the CPU that wait for one write."""


class _Part(NamedTuple):
    """Where a rank writes: the plan brings it from the coordinator."""

    save: str
    number: int


class StorageWriter(storage.StorageWriter):
    """Write checkpoints of `torch.distributed.checkpoint` to any place that tdstore writes.

    Each rank saves its pieces as a dataset of its own below the location. At the end the coordinator saves the document
    that names them, in one step: until then readers see the checkpoint of before, which a save that dies leaves as it
    is. What an interrupted save left is removed by the next one. Nothing is pickled on the storage: objects that are no
    tensors are stored as plain values, or refused. One save at a time may write to a location.

    Args:
        location: a folder or a URL, which all ranks reach. `checkpoint_id=` of `torch.distributed.checkpoint.save`
            replaces it.
        storage: name of the backend. Default: found from the location; memmap for a folder.
        **options: of the backend, such as `storage_options`.

    Raises:
        InvalidTypeError: the location is neither text nor a path.
        StoreExistsError: the location is itself a dataset.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> from tdstore.dcp import StorageReader, StorageWriter
        >>> state = {"weight": torch.arange(6.0).reshape(2, 3), "step": 7}
        >>> _ = dcp.save(state, storage_writer=StorageWriter("runs/ckpt"), no_dist=True)
        >>> loaded = {"weight": torch.zeros(2, 3), "step": 0}
        >>> dcp.load(loaded, storage_reader=StorageReader("runs/ckpt"), no_dist=True)
        >>> loaded["weight"][1].tolist(), loaded["step"]
        ([3.0, 4.0, 5.0], 7)
    """

    def __init__(self, location: str | os.PathLike[str], *, storage: str | None = None, **options: Any) -> None:
        self._storage, self._options = storage, options
        self._save = ""
        self._parts = 0
        self._places = Places(location, storage, options)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save.

        Args:
            checkpoint_id: the location from now on; None: as before.
        """
        if checkpoint_id is not None:
            self._places = Places(checkpoint_id, self._storage, self._options)
        self._save = ""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check the location, on the coordinator.

        Raises:
            StoreExistsError: the location is itself a dataset.
            UnsupportedError: ranks that do not communicate, each with metadata of its own.
        """
        if kwargs.get("use_collectives") is False:
            raise UnsupportedError(
                "a checkpoint has one document for all ranks", hint="leave use_collectives=True in dcp.save"
            )
        if is_coordinator and self._places.is_dataset():
            raise StoreExistsError(
                f"{self._places.root} is a dataset; a checkpoint needs a location of its own", url=self._places.root
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan of a rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its place."""
        self._save, self._parts = uuid.uuid4().hex, len(plans)
        return [dataclasses.replace(p, storage_data=_Part(self._save, i)) for i, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[storage.WriteResult]]:
        """Save the pieces and values of a rank as one dataset.

        Raises:
            InvalidTypeError: an object that is neither a tensor nor a value that can be stored.
            StoreError: as the backend says.
        """
        done: Future[list[storage.WriteResult]] = Future()
        part = plan.storage_data
        done.set_result(_write_part(self._places, part, plan.items, planner) if plan.items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Publish what all ranks wrote, and remove what earlier saves left.

        Raises:
            InvalidTypeError: the planner's data cannot be stored.
            StoreError: as the backend says; the checkpoint of before is there.
        """
        stored = {result.index: result.storage_data for rank in results for result in rank}
        document = make_document(metadata, self._save, self._parts, stored)
        before = self._parts_before()
        group = Group(batch_size=(), extra={KEY: msgspec.to_builtins(document)})
        with closing(self._places.open(self._places.document, "w")) as handle, handle.changing():
            handle.commit({(): group}, {})
        try:
            self._places.remove_others(self._save, before)
        except StoreError as error:  # the save is complete
            warnings.warn(f"parts of an earlier checkpoint were not removed: {error}", stacklevel=2)

    def _parts_before(self) -> list[str]:
        try:
            with closing(self._places.open(self._places.document, "r")) as handle:
                document = read_document(handle.groups[()].extra, handle.store.url)
        except StoreError:
            return []  # none, or none that can be read
        return [self._places.part(document.save, index) for index in range(document.parts)]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Check whether a checkpoint may be at a location: a path or a URL."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def storage_meta(self) -> StorageMeta:
        """Return the location, for the planner."""
        return StorageMeta(checkpoint_id=self._places.root, save_id=self._save or None)


def _write_part(places: Places, part: _Part, items: list[WriteItem], planner: SavePlanner) -> list[storage.WriteResult]:
    values = {item.index.fqn: _value(item, planner) for item in items if item.type is WriteItemType.BYTE_IO}
    leaves = {_path(item): item for item in items if item.type is not WriteItemType.BYTE_IO}
    specs = {path: _spec(item) for path, item in leaves.items()}
    record = msgspec.to_builtins(PartRecord(part.save, values))
    with closing(places.open(places.part(part.save, part.number), "x")) as handle, handle.changing():
        handle.store.create(specs)
        for batch in _batches(leaves, planner):
            handle.store.write(batch)
        handle.commit(_groups(list(leaves), record), specs)
    sizes = {item.index: specs[path].nbytes for path, item in leaves.items()}
    return [storage.WriteResult(item.index, sizes.get(item.index, 0), Stored(part.number)) for item in items]


def _path(item: WriteItem) -> Path:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return leaf_path(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), tuple(item.tensor_data.size))


def _spec(item: WriteItem) -> LeafSpec:
    """Return the spec of a piece.

    Raises:
        UnsupportedError: a sparse tensor. InvalidTypeError, InvalidArgumentError: a dtype that tdstore does not store.
    """
    assert item.tensor_data is not None
    had = item.tensor_data.properties
    if had.layout is not torch.strided:
        raise UnsupportedError(f"{item.index.fqn!r} is a tensor of layout {had.layout}; checkpoints hold strided ones")
    return LeafSpec(item.tensor_data.chunk.sizes, had.dtype)


def _groups(paths: list[Path], record: dict[str, Any]) -> dict[Path, Group]:
    below: dict[str, list[str]] = {}
    for path in paths:
        below.setdefault(path[0], []).extend(path[1:])
    made: dict[Path, Group] = {(): Group(batch_size=(), keys=tuple(below), extra={KEY: record})}
    made |= {(fqn,): Group(batch_size=(), keys=tuple(keys)) for fqn, keys in below.items() if keys}
    return made


def _batches(leaves: dict[Path, WriteItem], planner: SavePlanner) -> Iterator[list[Write]]:
    """Yield the writes of all pieces; those that are not contiguous on the CPU are copied a batch at a time."""
    batch: list[Write] = []
    held = 0
    for path, item in leaves.items():
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, Tensor):
            raise InvalidTypeError(f"the planner gives {type(tensor).__name__} for the tensor {item.index.fqn!r}")
        value = tensor.detach().cpu().contiguous()
        batch.append(Write(path, (), value))
        if value.data_ptr() != tensor.data_ptr():
            held += value.nbytes
        if held >= _BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _value(item: WriteItem, planner: SavePlanner) -> Any:
    """Return an object that is no tensor as plain data.

    Raises:
        InvalidTypeError: it cannot be stored without pickle.
    """
    name = item.index.fqn
    if not isinstance(planner, DefaultSavePlanner):  # others have no method for it
        raise InvalidTypeError(
            f"{name!r} of the state is no tensor, and {type(planner).__name__} gives a pickle of it",
            hint="derive the planner from torch's DefaultSavePlanner",
        )
    try:
        return encode_value(planner.lookup_object(item.index))
    except (InvalidTypeError, InvalidArgumentError) as error:
        raise InvalidTypeError(
            f"{name!r} of the state is no tensor, and cannot be stored without pickle: {error}",
            hint="store tensors, numbers, strings, and lists and dicts of them",
        ) from None
