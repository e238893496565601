"""Loads of `torch.distributed.checkpoint`: each rank reads the ranges that it needs from the parts that have them."""

import io
import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tdstore import Read, StoreHandle
from tdstore.errors import CorruptStoreError, StoreNotFoundError
from tdstore.threads import ThreadPool
from tdstore.types import path_text
from tdstore.values import decode_value

from .document import KEY, Document, PartRecord, Stored, leaf_path, read_document, to_metadata
from .places import Places

_BATCH_BYTES = 256 << 20
"""The most bytes of one read of a part."""
_THREADS = 8
"""Parts that are read at the same time."""


class StorageReader(storage.StorageReader):
    """Read checkpoints that `StorageWriter` wrote, into any number of ranks.

    A rank reads the ranges of the pieces that overlap with its own, from several parts at a time, straight into its
    tensors where they are on the CPU. Nothing that comes from the storage is unpickled.

    Args:
        location: of the checkpoint. `checkpoint_id=` of `torch.distributed.checkpoint.load` replaces it.
        storage: name of the backend. Default: found from what is there.
        **options: of the backend, such as `storage_options`.

    Raises:
        InvalidTypeError: the location is neither text nor a path.
        StoreNotFoundError: there is no checkpoint.
        CorruptStoreError: it is damaged.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> from tdstore.dcp import StorageReader, StorageWriter
        >>> _ = dcp.save({"a": torch.arange(4)}, storage_writer=StorageWriter("runs/ckpt"), no_dist=True)
        >>> list(StorageReader("runs/ckpt").read_metadata().state_dict_metadata)
        ['a']
    """

    def __init__(self, location: str | os.PathLike[str], *, storage: str | None = None, **options: Any) -> None:
        self._storage, self._options = storage, options
        self._places = Places(location, storage, options)
        self._document: Document | None = None
        self._stored: dict[MetadataIndex, Stored] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[MetadataIndex, tuple[int, ...]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load.

        Args:
            checkpoint_id: the location from now on; None: as before.
        """
        if checkpoint_id is not None:
            self._places = Places(checkpoint_id, self._storage, self._options)
        self._document = None

    def read_metadata(self) -> Metadata:
        """Read the document.

        Raises:
            StoreNotFoundError: there is no checkpoint. CorruptStoreError: it is damaged.
        """
        place = self._places.document
        try:
            handle = self._places.open(place, "r")
        except StoreNotFoundError as error:
            raise StoreNotFoundError(
                f"no checkpoint was saved at {self._places.root}", url=self._places.root, hint=error.hint
            ) from None
        with closing(handle):
            self._document = read_document(handle.groups[()].extra, handle.store.url)
            return to_metadata(self._document, self._places.root, handle.store.url)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the metadata that the load goes by."""
        self._stored = metadata.storage_data
        tensors = {f: e for f, e in metadata.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)}
        self._sizes = {fqn: tuple(entry.size) for fqn, entry in tensors.items()}
        self._pieces = {
            MetadataIndex(fqn, c.offsets): tuple(c.sizes) for fqn, entry in tensors.items() for c in entry.chunks
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan of a rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all pieces of a plan, and give them to the planner.

        Raises:
            CorruptStoreError: a part is damaged, or is not of this save. StoreError: as the backend says.
        """
        by_part: dict[int, list[tuple[ReadItem, Tensor | None]]] = {}
        for item in plan.items:
            target = planner.resolve_tensor(item).detach() if item.type is LoadItemType.TENSOR else None
            by_part.setdefault(self._stored[item.storage_index].part, []).append((item, target))
        values: list[tuple[ReadItem, Any]] = []
        with ThreadPool(max(1, min(_THREADS, len(by_part)))) as pool:
            for found in pool.map(lambda of: self._read_part(*of), by_part.items()):
                values += found
        for item, value in values:
            planner.load_bytes(item, _as_torch_saves(value))
        for of in by_part.values():
            for item, target in of:
                if target is not None:
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Check whether a checkpoint may be at a location: a path or a URL."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _read_part(self, part: int, wanted: list[tuple[ReadItem, Tensor | None]]) -> list[tuple[ReadItem, Any]]:
        """Fill the tensors that are in one part, and return the values."""
        assert self._document is not None
        handle = self._places.open(self._places.part(self._document.save, part), "r")
        with closing(handle):
            for reads in self._batches(handle, [(item, target) for item, target in wanted if target is not None]):
                found = handle.store.read([read for read, _ in reads])
                for (read, target), tensor in zip(reads, found, strict=True):
                    if read.out is None:
                        target.copy_(tensor)
            return self._values(handle, [item for item, target in wanted if target is None])

    def _batches(
        self, handle: StoreHandle, wanted: list[tuple[ReadItem, Tensor]]
    ) -> Iterator[list[tuple[Read, Tensor]]]:
        """Yield the reads of a part with the tensors to fill, which the store fills itself where it can."""
        batch: list[tuple[Read, Tensor]] = []
        held = 0
        for item, target in wanted:
            at = item.storage_index
            path = leaf_path(at.fqn, tuple(at.offset or ()), self._pieces[at], self._sizes[at.fqn])
            if path not in handle.specs:
                url = handle.store.url
                raise CorruptStoreError(f"{url} does not hold {path_text(path)} of its checkpoint", url=url)
            index = tuple(slice(o, o + n, 1) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
            direct = target.device.type == "cpu" and target.dtype == handle.specs[path].dtype
            batch.append((Read(path, index, target if direct else None), target))
            held += target.nbytes
            if held >= _BATCH_BYTES:
                yield batch
                batch, held = [], 0
        if batch:
            yield batch

    def _values(self, handle: StoreHandle, items: list[ReadItem]) -> list[tuple[ReadItem, Any]]:
        """Return values from the header of a part.

        Raises:
            CorruptStoreError: they are not there, or cannot be decoded.
        """
        url = handle.store.url
        try:
            record = msgspec.convert(handle.groups[()].extra.get(KEY), PartRecord)
            return [(item, decode_value(record.values[item.storage_index.fqn])) for item in items]
        except (KeyError, ValueError, TypeError) as error:
            raise CorruptStoreError(f"{url} does not hold the values of its checkpoint: {error}", url=url) from None


def _as_torch_saves(value: Any) -> io.BytesIO:
    """Return a value in the form that planners take. It is made and read in this process."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
