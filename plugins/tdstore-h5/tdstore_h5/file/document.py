"""The manifest of a file, in one attribute of the root: header, specs and checksums, sealed as `tdstore.json` is."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import h5py
import msgspec
import numpy as np
from h5py import h5a

from tdstore.dtypes import NAME_TO_DTYPE, dtype_name
from tdstore.errors import CorruptStoreError
from tdstore.header import MAX_BYTES, MAX_DEPTH, Header, header_from_builtins, header_to_builtins
from tdstore.storekit.checksums import BLOCK
from tdstore.storekit.documents import MAX_LEAVES, SealedDocument
from tdstore.types import LeafSpec, Path, path_text
from tdstore_h5.file.tree import Leaf
from tdstore_h5.rows.checksums import LeafSums

MANIFEST = "tdstore"
DIRTY = "tdstore_dirty"


class _Record(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One leaf in the JSON document."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    crc: str = ""
    grain: int = BLOCK


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of the JSON document."""

    generation: int
    header: Any
    leaves: list[_Record]


@dataclass
class Document:
    """The contents of the last commit's manifest."""

    generation: int = 0
    """The number of the commit; 0 where nothing is committed."""
    header: Header = field(default_factory=Header)
    specs: dict[Path, LeafSpec] = field(default_factory=dict)
    sums: dict[Path, LeafSums] = field(default_factory=dict)


def encode_document(document: Document, *, url: str) -> bytes:
    """Encode the text of the attribute, ASCII only.

    Raises:
        InvalidArgumentError: beyond the limits that a reader accepts.
    """
    records = [
        _Record(
            path,
            dtype_name(spec.dtype),
            spec.shape,
            base64.b64encode(document.sums[path].crcs.astype("<u4").tobytes()).decode(),
            document.sums[path].grain,
        )
        for path, spec in document.specs.items()
    ]
    body = _Body(document.generation, header_to_builtins(document.header), records)
    return _MANIFEST.encode(body, [*document.specs, *document.header.groups], url=url)


def decode_document(text: bytes | str, leaves: Mapping[Path, Leaf], *, url: str) -> Document:
    """Parse and check the output of `encode_document`.

    Args:
        text: the output.
        leaves: the leaves of the file; their specs are used if they are as recorded.
        url: the location, for messages.

    Raises:
        CorruptStoreError: damaged, or inconsistent.
        UnsupportedError: of a newer version.
    """
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
    body = _MANIFEST.decode(raw, url=url)
    found = Document(body.generation, header_from_builtins(body.header, url=url))
    specs, sums = found.specs, found.sums
    for record in body.leaves:
        path, shape, dtype = record.path, record.shape, NAME_TO_DTYPE.get(record.dtype)
        if dtype is None or not 1 <= len(path) <= MAX_DEPTH or path in specs:
            raise _refused(record, f"is described twice, too deep or of unknown dtype {record.dtype!r}", url)
        if len(shape) > 32 or (shape and min(shape) < 0):
            raise _refused(record, f"has the impossible shape {shape[:8]}", url)
        try:
            crcs = np.frombuffer(base64.b64decode(record.crc, validate=True), "<u4").astype(np.uint32)
        except ValueError:
            raise _refused(record, "has checksums that are not base64", url) from None
        spec, grain = leaves[path].spec if path in leaves else None, record.grain
        if spec is None or spec.shape != shape or spec.dtype is not dtype:
            spec = LeafSpec(shape, dtype)
        if grain < 1 or len(crcs) != -(-spec.nbytes // grain):
            raise _refused(record, f"has {len(crcs)} checksums for {spec.nbytes} bytes", url)
        specs[path], sums[path] = spec, LeafSums(grain, crcs)
    return found


def _refused(record: _Record, text: str, url: str) -> CorruptStoreError:
    """Create the error for one record."""
    return CorruptStoreError(f"{url}: leaf {path_text(record.path)} {text}", url=url)


def decode_dirty(text: bytes | str, *, url: str) -> set[Path]:
    """Return the leaves that a session was about to write."""
    try:
        return set(msgspec.json.decode(text, type=list[tuple[str, ...]]))
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise CorruptStoreError(
            f"{url}: a writer ended in the middle, and its mark is not readable: {error}", url=url, hint=_RESTORE
        ) from error


def get_attribute(attributes: h5py.AttributeManager, name: str, url: str) -> bytes | str | None:
    """Return a text attribute, or None."""
    if name not in attributes:
        return None
    if attributes.get_id(name).get_storage_size() > MAX_BYTES + 64:
        raise CorruptStoreError(f"{url}: the attribute {name!r} is larger than {MAX_BYTES} bytes", url=url)
    value = attributes[name]
    if isinstance(value, (bytes, str)):
        return value
    raise CorruptStoreError(f"{url}: the attribute {name!r} is not text", url=url, hint=_RESTORE)


def put_attribute(file: h5py.File, name: str, text: bytes) -> None:
    """Set a text attribute of the root, of any length."""
    raw = name.encode()
    if h5a.exists(file.id, raw):
        there = h5a.open(file.id, raw)
        if there.dtype == f"S{len(text)}" and not there.shape:  # most often it only has other numbers
            there.write(np.array(text, there.dtype), mtype=there.get_type())
            return
    try:
        # Fixed length: HDF5 takes the room back when it is replaced.
        file.attrs.create(name, np.bytes_(text), dtype=h5py.string_dtype("utf-8", len(text)))
    except OSError as error:
        if "too large" not in str(error):
            raise
        # A file in the oldest format keeps long attributes of variable length only.
        file.attrs.create(name, text.decode("ascii"), dtype=h5py.string_dtype())


_RESTORE = "restore the file from a copy; h5py can still read the datasets that are whole"
_MANIFEST = SealedDocument(
    _Body,
    {b'"shape":': (MAX_LEAVES, "leaves")},
    what=f"the root attribute {MANIFEST!r}",
    hint=_RESTORE,
    ascii=True,
)
