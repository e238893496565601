"""The manifest `tdstore.json`: every leaf, its checksums and the header, as one JSON document with a checksum.

The first line is `TDS1 <crc32c of the rest, 8 hex digits>`; the rest is JSON. Parsing is strict:
a document that passes `decode_manifest` names plain files below the root, each once, of sizes that fit the shapes.
"""

from __future__ import annotations

import base64
import math
import re
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.errors import CorruptStoreError, InvalidArgumentError, UnsupportedError
from tdstore.header import (
    MAX_BYTES,
    MAX_DEPTH,
    Header,
    header_from_builtins,
    header_to_builtins,
    without_collection,
)
from tdstore.storekit.checksums import BLOCK, FINE, Sums, crc32c
from tdstore.types import Path, path_text
from tdstore.values import decode_number

NAME = "tdstore.json"
VERSION = 1
MAX_FILE_BYTES = MAX_BYTES + 64
MAX_LEAVES = 1_000_000
MAX_DIMS = 64
MAX_NAME_BYTES = 255
OBJECTS_START = b'{"layout":"objects",'
"""How the document of the object layout begins."""

_FIRST_LINE = re.compile(rb"TDS(\d{1,6}) ([0-9a-f]{8})\n")


class LeafRecord(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One leaf as recorded in the manifest."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: tuple[str, ...] = ()
    """Components below the root; empty for a leaf without elements, which has no file."""
    crc: str = ""
    """base64 of little-endian uint32 crc32c, one for each block."""
    tips: int = 0
    """crc32c of the first, middle and last 4 KiB."""
    fill: Any = 0
    """What rows added later read as (`values.encode_value`)."""
    block: int = BLOCK
    """Bytes of a block: 64 KiB to 4 MiB, a power of two."""

    def sums(self) -> Sums:
        """Decode the checksums."""
        return Sums(base64.b64decode(self.crc), self.tips, self.block)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document below the first line."""

    generation: str
    """A fresh random name for every commit."""
    header: Any
    """`header.header_to_builtins`."""
    leaves: list[LeafRecord]


def leaf_record(
    path: Path, dtype: str, shape: tuple[int, ...], nbytes: int, file: tuple[str, ...], sums: Sums, fill: Any
) -> LeafRecord:
    """Build the record of a leaf, with its checksums encoded."""
    crc = base64.b64encode(sums.crc).decode()
    return LeafRecord(path, dtype, shape, nbytes, file, crc, sums.tips, fill, sums.block)


def encode_manifest(header: Header, leaves: Iterable[LeafRecord], *, url: str) -> bytes:
    """Encode the manifest of a new generation.

    Raises:
        ValueError: beyond the limits that a reader accepts.
    """
    records = list(leaves)
    body = msgspec.json.encode(Manifest(uuid.uuid4().hex, header_to_builtins(header), records))
    if len(body) > MAX_BYTES or len(records) > MAX_LEAVES:
        raise InvalidArgumentError(
            f"{url} would have a manifest of {len(body)} bytes and {len(records)} leaves; "
            f"the limits are {MAX_BYTES} and {MAX_LEAVES}"
        )
    for what, paths in (("leaf", [r.path for r in records]), ("group", list(header.groups))):
        for path in paths:
            if len(path) > MAX_DEPTH:
                raise InvalidArgumentError(
                    f"a {what} of {url} is nested {len(path)} levels deep; the limit is {MAX_DEPTH}"
                )
    return seal(body)


def seal(body: bytes) -> bytes:
    """Prepend the first line, which holds version and checksum."""
    return b"TDS%d %08x\n" % (VERSION, crc32c(body)) + body


def is_objects(body: bytes) -> bool:
    """Check whether a document describes the object layout (`tdstore.bytestore.manifest`), not a directory of files."""
    return body.startswith(OBJECTS_START)


def unseal(data: bytes, *, url: str, what: str = NAME, hint: str | None = None) -> bytes:
    """Check version, size and checksum, and return the document below the first line.

    Args:
        data: the whole document.
        url: the location, for messages.
        what: the name of the document, for messages.
        hint: the remedy for a damaged document.

    Raises:
        CorruptStoreError: damaged.
        UnsupportedError: of a newer version.
    """
    hint = hint or _RESTORE
    head = _FIRST_LINE.match(data)
    if head is None or int(head[1]) < VERSION:
        raise CorruptStoreError(f"{url}: {what} does not start as a manifest of tdstore", url=url, hint=hint)
    if int(head[1]) > VERSION:
        raise UnsupportedError(
            f"{url}: {what} has format version {int(head[1])}, this tdstore reads {VERSION}",
            url=url,
            hint="a newer tdstore wrote it: upgrade this one",
        )
    body = data[head.end() :]
    if len(body) > MAX_BYTES:
        raise CorruptStoreError(f"{url}: {what} has {len(body)} bytes, more than {MAX_BYTES}", url=url)
    if crc32c(body) != int(head[2], 16):
        raise CorruptStoreError(
            f"{url}: {what} is damaged: its checksum is {crc32c(body):08x}, expected {head[2].decode()}",
            url=url,
            hint=hint,
        )
    return body


def decode_manifest(data: bytes, *, url: str) -> tuple[Manifest, Header]:
    """Parse and check a manifest.

    Raises:
        CorruptStoreError: damaged, of another layout, or inconsistent.
        UnsupportedError: of a newer version.
    """
    body = unseal(data, url=url)
    if is_objects(body):
        raise CorruptStoreError(
            f"{url}: {NAME} describes the object layout, not a directory of files",
            url=url,
            hint="open it as a remote store: storage='remote'",
        )
    # Counting the bytes of a field that each leaf has is cheap; decoding millions of records is not.
    if body.count(b'"nbytes":') > MAX_LEAVES:
        raise CorruptStoreError(f"{url}: {NAME} has more than {MAX_LEAVES} leaves", url=url)
    try:
        with without_collection():
            manifest = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptStoreError(f"{url}: {NAME} is not readable: {error}", url=url) from error
    header = header_from_builtins(manifest.header, url=url)
    _check_leaves(manifest.leaves, url)
    return manifest, header


_decoder = msgspec.json.Decoder(Manifest)
_RESTORE = "restore it from a copy; the raw leaves beside it, and meta.json for `tensordict`, are unaffected"


def _check_leaves(leaves: list[LeafRecord], url: str) -> None:
    paths: set[Path] = set()
    files: dict[Path, Path] = {}
    for leaf in leaves:
        if reason := _fault(leaf):
            raise CorruptStoreError(f"{url}: leaf {path_text(leaf.path)} {reason}", url=url)
        if leaf.path in paths:
            raise CorruptStoreError(f"{url}: leaf {path_text(leaf.path)} is described twice", url=url)
        paths.add(leaf.path)
        if leaf.file:
            if leaf.file in files:
                raise CorruptStoreError(
                    f"{url}: leaves {path_text(files[leaf.file])} and {path_text(leaf.path)} share one file", url=url
                )
            files[leaf.file] = leaf.path


def _fault(leaf: LeafRecord) -> str | None:
    if not 1 <= len(leaf.path) <= MAX_DEPTH:
        return f"is nested {len(leaf.path)} levels deep, not 1 to {MAX_DEPTH}"
    dtype = NAME_TO_DTYPE.get(leaf.dtype)
    if dtype is None:
        return f"has the unknown dtype {leaf.dtype!r}"
    shape = leaf.shape
    if shape and (len(shape) > MAX_DIMS or min(shape) < 0):
        return f"has the impossible shape {shape[:8]}"
    expected = math.prod(shape) * dtype.itemsize
    if leaf.nbytes != expected or expected >= 2**62:
        return f"of shape {shape} and dtype {leaf.dtype} has {expected} bytes, but {leaf.nbytes} are declared"
    file = leaf.file
    if bool(file) != bool(expected):
        return f"has {expected} bytes and the file {'/'.join(file)!r}"
    if file:
        if len(file) > 2 * MAX_DEPTH or not all(map(is_plain_name, file)):
            return f"names {file!r}, which is not a plain file below the root"
        if file[-1] in RESERVED or file[0] in RESERVED:
            return f"names {file!r}, which is not a data file"
    if reason := fill_fault(leaf.fill, dtype):
        return reason
    # Four bytes a block, as base64 of exactly that length; `sums` decodes it.
    if not FINE <= leaf.block <= BLOCK or leaf.block & (leaf.block - 1):
        return f"has checksums of blocks of {leaf.block} bytes"
    blocks = -(-expected // leaf.block)
    if len(leaf.crc) != -(-4 * blocks // 3) * 4 or not _BASE64.fullmatch(leaf.crc):
        return f"has malformed checksums for {expected} bytes"
    return None


def fill_fault(fill: Any, dtype: torch.dtype) -> str | None:
    """Return the fault in the record of a fill value (`values.encode_value`), or None."""
    if type(fill) is int and fill == 0:
        return None
    try:
        torch.full((1,), decode_number(fill), dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        return f"cannot be filled: {str(error)[:200]}"
    return None


_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_SIMPLE = re.compile(r"[A-Za-z0-9_%~-][A-Za-z0-9_%~.-]{0,200}")
RESERVED = (NAME, "tdstore.session", "meta.json")


def is_plain_name(name: str) -> bool:
    """Check whether a string can be one component of a path, and stays below its folder."""
    if _SIMPLE.fullmatch(name):
        return True
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        return False
    try:
        return len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False
