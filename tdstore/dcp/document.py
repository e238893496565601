"""The document of a checkpoint: which tensors there are, and which part has which piece of them."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tdstore.dtypes import as_dtype, dtype_name
from tdstore.errors import CorruptStoreError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from tdstore.types import Path
from tdstore.values import decode_value, encode_value

KEY = "torch_checkpoint"
"""Where the header of a dataset has the document, or what a part has besides its leaves."""
VERSION = 1
_SAVE = re.compile(r"[0-9a-f]{32}")
_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block of a tensor, and the part that has it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    part: int


class TensorEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag="tensor"):
    """A tensor of the state."""

    dtype: str
    size: tuple[int, ...]
    pieces: list[Piece]
    requires_grad: bool = False
    pin_memory: bool = False
    memory_format: str = "contiguous"


class ValueEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="value"):
    """An object of the state that is no tensor; a header has it."""

    part: int


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the header of the dataset `checkpoint` holds."""

    version: int
    save: str
    parts: int
    entries: dict[str, TensorEntry | ValueEntry]
    planner: Any
    """`encode_value` of the data of the planner: how keys of nested dicts were joined."""


class PartRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the header of a part holds besides its leaves."""

    save: str
    values: dict[str, Any]
    """Objects that are no tensors, as `encode_value` makes them."""


class Stored(NamedTuple):
    """Where a tensor's piece, or a value, was written."""

    part: int


def leaf_path(fqn: str, offsets: tuple[int, ...], sizes: tuple[int, ...], size: tuple[int, ...]) -> Path:
    """Return the path of a piece in its part: the name of the tensor; below it the offsets, unless it is all of it.

    Args:
        fqn: name of the tensor.
        offsets: of the piece.
        sizes: of the piece.
        size: of the tensor.
    """
    return (fqn,) if sizes == size else (fqn, ",".join(map(str, offsets)))


def make_document(metadata: Metadata, save: str, parts: int, stored: Mapping[MetadataIndex, Stored]) -> Document:
    """Build the document of a save.

    Args:
        metadata: what the planner says of the state.
        save: name of the save.
        parts: how many parts were planned.
        stored: where each piece and value was written.

    Raises:
        InvalidTypeError: the planner's data cannot be stored.
        InvalidArgumentError: a piece was planned, and not written.
    """

    def part_of(index: MetadataIndex) -> int:
        if index not in stored:
            raise InvalidArgumentError(f"{index.fqn!r} at {index.offset} was planned, and no rank has written it")
        return stored[index].part

    entries: dict[str, TensorEntry | ValueEntry] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            entries[fqn] = ValueEntry(part_of(MetadataIndex(fqn)))
            continue
        had = entry.properties
        entries[fqn] = TensorEntry(
            dtype_name(had.dtype),
            tuple(entry.size),
            [Piece(tuple(c.offsets), tuple(c.sizes), part_of(MetadataIndex(fqn, c.offsets))) for c in entry.chunks],
            had.requires_grad,
            had.pin_memory,
            next((name for name, value in _FORMATS.items() if value == had.memory_format), "contiguous"),
        )
    try:
        planner = encode_value(metadata.planner_data)
    except InvalidTypeError as error:
        raise InvalidTypeError(f"the planner's data cannot be stored: {error.message}") from None
    return Document(VERSION, save, parts, entries, planner)


def read_document(extra: Mapping[str, Any], url: str) -> Document:
    """Return the document in the header of a dataset.

    Args:
        extra: of the root group.
        url: of the dataset, for messages.

    Raises:
        CorruptStoreError: there is none, or it is not what was written. UnsupportedError: of a newer version.
    """
    found = extra.get(KEY)
    if isinstance(found, dict) and isinstance(found.get("version"), int) and found["version"] > VERSION:
        raise UnsupportedError(
            f"{url} is a checkpoint of version {found['version']}; this tdstore reads {VERSION}", url=url
        )
    try:
        document = msgspec.convert(found, Document)
        for fqn, entry in document.entries.items():
            _check_entry(fqn, entry, document.parts)
        if _SAVE.fullmatch(document.save) is None:
            raise InvalidArgumentError(f"the name of the save is {document.save[:80]!r}")
    except (msgspec.ValidationError, InvalidArgumentError) as error:
        raise CorruptStoreError(f"{url} has no sound document of a checkpoint: {error}", url=url) from None
    return document


def _check_entry(fqn: str, entry: TensorEntry | ValueEntry, parts: int) -> None:
    pieces = entry.pieces if isinstance(entry, TensorEntry) else [Piece((), (), entry.part)]
    size = entry.size if isinstance(entry, TensorEntry) else ()
    for piece in pieces:
        ends = [(o, n, end) for o, n, end in zip(piece.offsets, piece.sizes, size, strict=False)]
        if (
            not 0 <= piece.part < parts
            or not len(piece.offsets) == len(piece.sizes) == len(size)
            or any(o < 0 or n < 0 or o + n > end for o, n, end in ends)
        ):
            raise InvalidArgumentError(f"a piece of {fqn!r} is outside of the tensor, or of a part that is not there")


def to_metadata(document: Document, root: str, url: str) -> Metadata:
    """Build what the loaders of torch read.

    Args:
        document: the document.
        root: location of the checkpoint.
        url: of the document, for messages.

    Raises:
        CorruptStoreError: a dtype, or the planner's data, is unknown.
    """
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, Stored] = {}
    try:
        for fqn, entry in document.entries.items():
            if isinstance(entry, ValueEntry):
                state[fqn] = BytesStorageMetadata()
                stored[MetadataIndex(fqn)] = Stored(entry.part)
                continue
            properties = TensorProperties(
                dtype=as_dtype(entry.dtype),
                requires_grad=entry.requires_grad,
                memory_format=_FORMATS.get(entry.memory_format, torch.contiguous_format),
                pin_memory=entry.pin_memory,
            )
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.pieces]
            state[fqn] = TensorStorageMetadata(properties, torch.Size(entry.size), chunks)
            stored |= {MetadataIndex(fqn, p.offsets): Stored(p.part) for p in entry.pieces}
        planner = decode_value(document.planner)
    except (ValueError, TypeError) as error:
        raise CorruptStoreError(f"{url} has no sound document of a checkpoint: {error}", url=url) from None
    meta = StorageMeta(checkpoint_id=root, save_id=document.save)
    return Metadata(state, planner_data=planner, storage_data=stored, storage_meta=meta)
