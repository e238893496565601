"""Parts of a dataset with strings, values and nested tensors as one: offsets are written anew, data is not copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from tdstore.bytestore import open_objects
from tdstore.bytestore.manifest import Document, LeafRecord, decode_objects, new_generation
from tdstore.container.concat.leaves import ConcatLeaf
from tdstore.container.concat.schema import Place, Structure
from tdstore.container.concat.store import ConcatStore
from tdstore.container.distribute.parts import PARTS, PartEngine, join_parts, part_name
from tdstore.container.storage.describe import STACK_KIND
from tdstore.container.storage.handle import StoreHandle
from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.engine import Engine
from tdstore.header import Header
from tdstore.hookspecs import Backend
from tdstore.index.ranges import Ints
from tdstore.io.blocks import leaf_batches
from tdstore.store import Cap
from tdstore.storekit.documents import MAX_FILE_BYTES
from tdstore.storekit.foreign_strings import HEAD
from tdstore.types import LeafSpec, Path, Read, Write

BACKEND = Backend(
    name="build", opener="tdstore:build", summary="parts of an unfinished build", caps=Cap.PARTIAL_READ | Cap.PERSISTENT
)
"""The backend that handles of parts name. It is not in the registry: no location leads to it."""
_VALUES = PARTS + "values.json"
_BLOCK = 32 << 20


class _Source(NamedTuple):
    """A part that gives extents to the whole: its document, and how it counts."""

    document: Document
    extents: Mapping[Path, Ints]
    leaves: Mapping[Path, LeafRecord]
    first_piece: int


def join_documents(engine: Engine, parts: Sequence[Document], url: str) -> Document:
    """Return one document whose rows are those of the parts, in order. What the driver has to write is put before.

    Args:
        engine: the engine of the place.
        parts: the documents of all parts, in order; at least one.
        url: the place, for messages.

    Raises:
        MismatchError: a part has other entries than the first.
        UnsupportedError: the rows of a part are a lazy stack.
    """
    groups = [group for part in parts for group in part.header.groups.values()]
    if not any(group.values or group.extra or group.kind == STACK_KIND for group in groups):
        return join_parts(parts, url)
    places: list[Place] = []
    try:
        for number in range(len(parts)):
            store = open_objects(PartEngine(engine, part_name(number)), close_engine=False)
            places.append(Place(f"{url}: task {number}", StoreHandle(store, BACKEND, None, "r", {})))
        structure = Structure(places)
        whole = ConcatStore(places, structure.leaves, Header())
        return _joined(parts, _write(engine, whole, structure.leaves, url), structure)
    finally:
        for place in places:
            place.handle.close()


def _in_place(leaf: ConcatLeaf) -> bool:
    """Check whether the whole has the bytes of the parts, one after the other."""
    return leaf.role in ("rows", "text") and all(part.held is None for part in leaf.parts)


def _write(engine: Engine, whole: ConcatStore, leaves: Mapping[Path, ConcatLeaf], url: str) -> Document | None:
    """Write what differs from the parts, as a part of its own: whole leaves, and the heads of values per row."""
    specs = {path: leaf.spec for path, leaf in leaves.items() if not _in_place(leaf)}
    heads = {path: _head(whole, path) for path, leaf in leaves.items() if leaf.role == "text"}
    specs |= {path: LeafSpec((HEAD,), "uint8") for path in heads if path not in specs}
    if not specs:
        return None
    engine.delete([_VALUES])  # of a driver that was killed
    part = PartEngine(engine, _VALUES)
    with open_objects(part, mode="x", single_writer=not engine.conditional(), close_engine=False) as store:
        store.create(specs)
        for batch in leaf_batches({path: specs[path] for path in specs if not _in_place(leaves[path])}, _BLOCK):
            values = whole.read([Read(path, index) for path, index in batch])
            store.write([Write(path, index, value) for (path, index), value in zip(batch, values, strict=True)])
        store.write([Write(path, (slice(0, HEAD, 1),), head) for path, head in heads.items()])
        store.save_header(Header())
    return decode_objects(bytes(engine.get(_VALUES, MAX_FILE_BYTES).data), url=f"{url}/{_VALUES}")


def _head(whole: ConcatStore, path: Path) -> Tensor:
    """Return the first bytes of values per row: where the next value goes, and the epoch of the first part."""
    head = whole.read([Read(path, (slice(0, HEAD, 1),))])[0].clone()
    (spec,) = whole.specs([path])
    head[:8] = torch.tensor([spec.shape[0]], device="cpu").view(torch.uint8)
    return head


def _joined(parts: Sequence[Document], values: Document | None, structure: Structure) -> Document:
    documents = [*parts, *([] if values is None else [values])]
    sources, objects, pieces, tables = [], 0, 0, []
    for document in documents:
        sources.append(_source(document, pieces))
        tables.append(document.pieces.reshape(-1, 5) + np.array([objects, 0, 0, 0, 0], np.int64))
        objects += len(document.objects)
        pieces += len(document.pieces)
    leaves, extents = [], [np.zeros((0, 4), np.int64)]
    for path, leaf in structure.leaves.items():
        chosen = sources[: len(parts)] if _in_place(leaf) else sources[len(parts) :]
        found, before = [], 0
        for number, source in enumerate(chosen):
            table = source.extents[path]
            if leaf.role == "text" and _in_place(leaf) and not number:
                found.append(_shifted(sources[-1].extents[path], 0, sources[-1].first_piece))
                table = _without_head(table)
            found.append(_shifted(table, before, source.first_piece))
            before += _nbytes(source.leaves[path])
        extents += found
        record = chosen[0].leaves[path]
        shape = tuple(leaf.spec.shape)
        leaves.append(msgspec.structs.replace(record, shape=shape, extents=sum(map(len, found))))
    return msgspec.structs.replace(
        parts[0],
        generation=new_generation(),
        header=Header(structure.groups),
        objects=[record for document in documents for record in document.objects],
        pieces=np.concatenate(tables),
        leaves=leaves,
        extents=np.concatenate(extents),
        retired=(),
    )


def _shifted(table: Ints, before: int, first_piece: int) -> Ints:
    return table + np.array([before, 0, first_piece, 0], np.int64)


def _without_head(table: Ints) -> Ints:
    """Return the extents of a leaf from byte `HEAD` on."""
    start, nbytes, piece, offset = table.T
    cut = np.clip(HEAD - start, 0, nbytes)
    rest = np.stack([start + cut, nbytes - cut, piece, offset + cut], 1)
    return rest[rest[:, 1] > 0]


def _source(document: Document, first_piece: int) -> _Source:
    extents, at = {}, 0
    for leaf in document.leaves:
        extents[leaf.path] = document.extents[at : at + leaf.extents].reshape(-1, 4)
        at += leaf.extents
    return _Source(document, extents, {leaf.path: leaf for leaf in document.leaves}, first_piece)


def _nbytes(leaf: LeafRecord) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64)) * NAME_TO_DTYPE[leaf.dtype].itemsize
