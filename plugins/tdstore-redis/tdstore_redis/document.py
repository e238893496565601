"""The manifest: specs, layout and header of a dataset as one value with a checksum.

`TDR1 <crc32c of the rest, 8 hex digits>`, a newline, and JSON. A document that passes `decode` is consistent:
known dtypes, possible layouts, no array twice.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from tdstore.dtypes import NAME_TO_DTYPE, dtype_name
from tdstore.errors import CorruptStoreError
from tdstore.header import MAX_DEPTH, Header, header_from_builtins, header_to_builtins
from tdstore.storekit.documents import MAX_FILE_BYTES, MAX_LEAVES, SealedDocument
from tdstore.types import LeafSpec, Path, path_text
from tdstore.values import decode_value, encode_value
from tdstore_redis.cells.layout import CHECK, MAX_VALUE, Array

MAX_DIMS = 64
MAX_MANIFEST = MAX_FILE_BYTES
DATASET = re.compile(r"[0-9a-f]{16}\Z")
_HINT = "save it again, or restore the server's snapshot"


class Leaf(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One leaf as recorded in the manifest."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    array: int
    cell: int
    block: int
    sealed: int = 0
    written: int = 0
    fill: Any = 0


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document below the first line."""

    dataset: str
    revision: int
    next: int
    """The number of the next new array."""
    header: Any
    leaves: list[Leaf]


class Document:
    """A manifest, decoded."""

    __slots__ = ("arrays", "dataset", "header", "next", "revision")

    def __init__(
        self, dataset: str, revision: int = 0, header: Header | None = None, *, arrays: dict[Path, Array], next: int = 1
    ) -> None:
        self.dataset, self.revision, self.next = dataset, revision, next
        self.header = header or Header()
        self.arrays = arrays

    def copy(self) -> Document:
        """Return another document over the same arrays."""
        return Document(self.dataset, self.revision, self.header, arrays=dict(self.arrays), next=self.next)

    def same_structure(self, other: Document) -> bool:
        """Check whether the other has the same leaves in the same places, and the same header."""
        return self.header == other.header and {p: _place(a) for p, a in self.arrays.items()} == {
            p: _place(a) for p, a in other.arrays.items()
        }


def _place(array: Array) -> tuple[Any, ...]:
    return array.number, array.spec, array.cell, array.per_block


def encode(document: Document, *, url: str) -> bytes:
    """Encode a manifest.

    Raises:
        InvalidArgumentError: beyond the limits that a reader accepts.
    """
    leaves = [
        Leaf(
            path,
            dtype_name(a.spec.dtype),
            a.spec.shape,
            a.number,
            a.cell,
            a.per_block,
            a.sealed,
            a.written,
            encode_value(a.spec.fill_value),
        )
        for path, a in document.arrays.items()
    ]
    header = header_to_builtins(document.header)
    manifest = Manifest(document.dataset, document.revision, document.next, header, leaves)
    return _MANIFEST.encode(manifest, [*document.arrays, *document.header.groups], url=url)


def decode(data: bytes, *, url: str) -> Document:
    """Parse and check a manifest.

    Raises:
        CorruptStoreError: damaged, or inconsistent.
        UnsupportedError: of a newer version.
    """
    manifest = _MANIFEST.decode(data, url=url)
    if not DATASET.match(manifest.dataset) or not 0 <= manifest.revision < 2**62 or not 0 < manifest.next < 2**62:
        raise CorruptStoreError(f"{url}: the manifest has an impossible generation", url=url, hint=_HINT)
    arrays: dict[Path, Array] = {}
    numbers: set[int] = set()
    for leaf in manifest.leaves:
        reason = "is described twice" if leaf.path in arrays else _fault(leaf, manifest.next)
        if leaf.array in numbers:
            reason = "shares its array with another leaf"
        if reason:
            raise CorruptStoreError(f"{url}: leaf {path_text(leaf.path)} {reason}", url=url)
        numbers.add(leaf.array)
        try:
            fill = decode_value(leaf.fill)
            spec = LeafSpec(leaf.shape, NAME_TO_DTYPE[leaf.dtype], fill_value=fill)
            array = Array(spec, leaf.array, leaf.cell, leaf.block, manifest.dataset, leaf.sealed, leaf.written)
            array.fill_item() if leaf.fill else None  # it has to be one of the dtype
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise CorruptStoreError(f"{url}: leaf {path_text(leaf.path)}: {error}", url=url) from error
        if max(leaf.sealed, leaf.written) > array.cells:
            raise CorruptStoreError(f"{url}: leaf {path_text(leaf.path)} has more cells written than it has", url=url)
        arrays[leaf.path] = array
    header = header_from_builtins(manifest.header, url=url)
    return Document(manifest.dataset, manifest.revision, header, arrays=arrays, next=manifest.next)


_MANIFEST = SealedDocument(Manifest, {b'"array":': (MAX_LEAVES, "leaves")}, what="the manifest", tag=b"TDR", hint=_HINT)


def _fault(leaf: Leaf, following: int) -> str | None:
    if not 1 <= len(leaf.path) <= MAX_DEPTH:
        return f"is nested {len(leaf.path)} levels deep, not 1 to {MAX_DEPTH}"
    dtype = NAME_TO_DTYPE.get(leaf.dtype)
    if dtype is None:
        return f"has the unknown dtype {leaf.dtype[:40]!r}"
    shape = leaf.shape
    if len(shape) > MAX_DIMS or any(not 0 <= n < 2**62 for n in shape):
        return f"has the impossible shape {shape[:8]}"
    size = math.prod(shape) * dtype.itemsize
    row = math.prod(shape[1:]) * dtype.itemsize
    if size >= 2**62 or row >= 2**62:
        return f"has the impossible shape {shape[:8]}"
    if not 0 < leaf.array < following or leaf.sealed < 0 or leaf.written < 0:
        return "has impossible numbers in its record"
    whole = leaf.cell % dtype.itemsize == 0 and (leaf.cell % row == 0 if row and leaf.cell > row else True)
    if not (0 < leaf.cell <= MAX_VALUE - CHECK and whole):
        return f"has cells of {leaf.cell} bytes for rows of {row}"
    if not 0 < leaf.block * (leaf.cell + CHECK) <= MAX_VALUE:
        return f"has blocks of {leaf.block} cells"
    return None
