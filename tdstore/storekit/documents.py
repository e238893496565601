"""The manifest `tdstore.json`: every leaf, its checksums and the header, as one JSON document with a checksum.

The first line is `TDS1 <crc32c of the rest, 8 hex digits>`; the rest is JSON. Parsing is strict:
a document that passes `decode_manifest` names plain files below the root, each once, of sizes that fit the shapes.

While rows are appended, the first line is `TDS2 ...`, and each commit adds a line after the JSON (`Step`), which costs
one write: the crc32c of the line and JSON with the new lengths and checksums. The last writer writes `TDS1` again.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
import torch

from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.errors import CorruptStoreError, InvalidArgumentError, UnsupportedError
from tdstore.header import (
    FEW_BYTES,
    MAX_BYTES,
    MAX_DEPTH,
    Group,
    Header,
    header_from_builtins,
    header_to_builtins,
    header_to_encode,
    without_collection,
)
from tdstore.storekit.checksums import BLOCK, FINE, Sums, crc32c
from tdstore.types import Path, path_text
from tdstore.values import decode_number

T = TypeVar("T")
NAME = "tdstore.json"
VERSION = 1
LOGGED = b"TDS2 "
"""How a manifest begins that has a log: a version of its own, so that a tdstore that knows no log says so."""
MAX_FILE_BYTES = MAX_BYTES + 64
MAX_LEAVES = 1_000_000
MAX_DIMS = 64
MAX_NAME_BYTES = 255
OBJECTS_START = b'{"layout":"objects",'
"""How the document of the object layout begins."""
_FIRST_LINE = re.compile(rb"(\d{1,6}) ([0-9a-f]{8})\n")


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
    offset: int = -1
    """Where the leaf begins in the file of packed leaves; -1: it has a file of its own."""

    def sums(self) -> Sums:
        """Return the checksums."""
        return Sums(self.crc, self.tips, self.block)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document below the first line."""

    generation: str
    """A fresh random name for every commit."""
    header: Any
    """`header.header_to_builtins`."""
    leaves: list[LeafRecord]


class Growth(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A leaf whose rows have changed since the previous line."""

    leaf: int
    """Its position in the manifest."""
    rows: int
    crc: str
    """base64, as `LeafRecord.crc`: of the blocks after the first `leading`, whose checksums stay as they are."""
    tips: int
    leading: int = 0
    block: int = 0
    """Bytes of a block; 0: as before."""


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the log of a manifest: a commit that changed rows and lengths only."""

    generation: str
    groups: list[tuple[tuple[str, ...], Group]]
    """Groups that changed, as they are now."""
    leaves: list[Growth]


def leaf_record(
    path: Path,
    dtype: str,
    shape: tuple[int, ...],
    nbytes: int,
    file: tuple[str, ...],
    sums: Sums,
    fill: Any,
    offset: int = -1,
) -> LeafRecord:
    """Build the record of a leaf, with its checksums encoded.

    Args:
        path: the leaf.
        dtype: its name in `tdstore.dtypes`.
        shape: its shape.
        nbytes: bytes of the data.
        file: components of the file's path below the root; empty without elements.
        sums: checksums of the data.
        fill: the fill value, as `values.encode_value` returns it.
        offset: position of the data in a file that holds several leaves; -1 if the leaf has a file of its own.
    """
    return LeafRecord(path, dtype, shape, nbytes, file, sums.text(), sums.tips, fill, sums.block, offset)


def encode_manifest(header: Header, leaves: Iterable[LeafRecord], *, url: str, logged: bool = False) -> bytes:
    """Encode the manifest of a new generation.

    Args:
        header: the header.
        leaves: records of all leaves.
        url: the location, for messages.
        logged: begin a log: lines of `encode_step` may follow.

    Returns:
        The bytes of the document, with its first line.

    Raises:
        InvalidArgumentError: beyond the limits that a reader accepts.
    """
    records = list(leaves)
    manifest = Manifest(os.urandom(16).hex(), header_to_encode(header), records)
    raw = _MANIFEST.encode(manifest, [*[record.path for record in records], *header.groups], url=url)
    return LOGGED + raw[len(LOGGED) :] + b"\n" if logged else raw


def encode_step(groups: list[tuple[Path, Group]], leaves: list[Growth]) -> bytes:
    """Encode a line of the log, with a generation of its own.

    Args:
        groups: the groups that changed.
        leaves: the leaves that changed.
    """
    body = msgspec.json.encode(Step(os.urandom(16).hex(), groups, leaves))
    return b"%08x%b\n" % (crc32c(body), body)


def log_start(raw: bytes) -> int:
    """Return where the log of a checked manifest begins; 0 if it has none.

    Args:
        raw: the document, with its first line.
    """
    return raw.index(b"\n", raw.index(b"\n") + 1) + 1 if raw.startswith(LOGGED) else 0


def seal(body: bytes, tag: bytes = b"TDS") -> bytes:
    """Prepend the first line, with version and checksum.

    Args:
        body: the document.
        tag: the first letters of the result.

    Example:
        >>> seal(b"{}")
        b'TDS1 297bd0aa\\n{}'
    """
    return b"%b%d %08x\n" % (tag, VERSION, crc32c(body)) + body


class SealedDocument(Generic[T]):
    """Documents of one type, as bytes: a first line with version and checksum, and strict JSON.

    `encode` refuses to write what a reader would refuse: more than `MAX_BYTES`, too many records, paths too deep.

    Args:
        kind: a `msgspec.Struct` that forbids unknown fields.
        counts: by a field of JSON that each record of a table has, the largest number of records, and their name.
            Counting bytes is cheap, and decoding millions of records is not.
        what: the name of the document, for messages.
        tag: the first letters of the document.
        hint: the remedy for a damaged document.
        ascii: escape all other characters.

    Example:
        >>> class Index(msgspec.Struct, forbid_unknown_fields=True):
        ...     leaves: list[str]
        >>> index = SealedDocument(Index, {})
        >>> data = index.encode(Index(["a"]), [("a",)], url="runs/1")
        >>> data
        b'TDS1 d1fa6d2a\\n{"leaves":["a"]}'
        >>> index.decode(data, url="runs/1")
        Index(leaves=['a'])
    """

    def __init__(
        self,
        kind: type[T],
        counts: Mapping[bytes, tuple[int, str]],
        *,
        what: str = NAME,
        tag: bytes = b"TDS",
        hint: str | None = None,
        ascii: bool = False,
    ) -> None:
        self.what = what
        self._counts = dict(counts)
        self._tag = tag
        self._hint = hint
        self._ascii = ascii
        self._decoder = msgspec.json.Decoder(kind)

    def encode(self, document: T, paths: Iterable[Path], *, url: str) -> bytes:
        """Encode a document.

        Args:
            document: the document.
            paths: of the leaves and groups that it names.
            url: the location, for messages.

        Raises:
            InvalidArgumentError: beyond the limits that a reader accepts.
        """
        body = msgspec.json.encode(document)
        if self._ascii and not body.isascii():
            body = json.dumps(msgspec.to_builtins(document), separators=(",", ":")).encode("ascii")
        if excess := self._excess(body):
            raise InvalidArgumentError(f"{url} would have a manifest that cannot be read: {excess}")
        deepest = max(map(len, paths), default=0)
        if deepest > MAX_DEPTH:
            raise InvalidArgumentError(f"{url} would be nested {deepest} levels deep; the limit is {MAX_DEPTH}")
        return seal(body, self._tag)

    def body(self, data: bytes, *, url: str) -> bytes:
        """Check version, checksum and limits, and return the document below the first line.

        Args:
            data: the document, with its first line.
            url: the location, for messages.

        Raises:
            CorruptStoreError: damaged, or beyond the limits.
            UnsupportedError: of a newer version.
        """
        body = unseal(data, url=url, what=self.what, hint=self._hint, tag=self._tag)
        if excess := self._excess(body):
            raise CorruptStoreError(f"{url}: {self.what} has {excess}", url=url)
        return body

    def decode(self, data: bytes, *, url: str) -> T:
        """Parse and check the output of `encode`.

        Args:
            data: the document, with its first line.
            url: the location, for messages.

        Raises:
            CorruptStoreError: damaged, beyond the limits, or with fields that its type does not have.
            UnsupportedError: of a newer version.
        """
        return self.decode_body(self.body(data, url=url), url=url)

    def decode_body(self, body: bytes, *, url: str) -> T:
        """Parse what `body` returned.

        Args:
            body: the document without its first line.
            url: the location, for messages.

        Raises:
            CorruptStoreError: not JSON, or with fields that its type does not have.
        """
        try:
            if len(body) <= FEW_BYTES:
                return self._decoder.decode(body)
            with without_collection():
                return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptStoreError(f"{url}: {self.what} is not readable: {error}", url=url, hint=self._hint) from error

    def _excess(self, body: bytes) -> str | None:
        if len(body) > MAX_BYTES:
            return f"{len(body)} bytes, more than {MAX_BYTES}"
        for field, (most, records) in self._counts.items():
            # A body that is too short for so many need not be searched.
            if len(body) > most * len(field) and body.count(field) > most:
                return f"more than {most} {records}"
        return None


def is_objects(body: bytes) -> bool:
    """Check whether a document describes the object layout (`tdstore.bytestore.manifest`), not a directory of files."""
    return body.startswith(OBJECTS_START)


def unseal(data: bytes, *, url: str, what: str = NAME, hint: str | None = None, tag: bytes = b"TDS") -> bytes:
    """Check version, size and checksum, and return the document below the first line.

    Args:
        data: the whole document.
        url: the location, for messages.
        what: the name of the document, for messages.
        hint: the remedy for a damaged document.
        tag: its first letters.

    Raises:
        CorruptStoreError: damaged.
        UnsupportedError: of a newer version.

    Example:
        >>> unseal(seal(b"{}"), url="runs/1")
        b'{}'
    """
    hint = hint or _RESTORE
    head = _FIRST_LINE.match(data, len(tag)) if data.startswith(tag) else None
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


def decode_manifest(data: bytes, *, url: str, checked: bool = False) -> tuple[Manifest, Header]:
    """Parse and check a manifest.

    Args:
        data: the document, with its first line.
        url: the location, for messages.
        checked: its records need no check: the caller wrote these bytes, or decoded them before.

    Returns:
        The manifest and the header that it holds.

    Raises:
        CorruptStoreError: damaged, of another layout, or inconsistent.
        UnsupportedError: of a newer version.
    """
    if data.startswith(LOGGED):
        return _decode_logged(data, url)
    manifest = _decode_whole(data, url)
    _check_leaves([] if checked else manifest.leaves, url)
    return manifest, header_from_builtins(manifest.header, url=url)


def _decode_whole(data: bytes, url: str) -> Manifest:
    body = _MANIFEST.body(data, url=url)
    if is_objects(body):
        raise CorruptStoreError(
            f"{url}: {NAME} describes the object layout, not a directory of files",
            url=url,
            hint="open it as a remote store: storage='remote'",
        )
    return _MANIFEST.decode_body(body, url=url)


def _decode_logged(data: bytes, url: str) -> tuple[Manifest, Header]:
    """Parse a manifest with a log, and apply its lines."""
    end = data.find(b"\n", data.find(b"\n") + 1)
    if end < 0:
        raise CorruptStoreError(f"{url}: {NAME} was truncated", url=url, hint=_RESTORE)
    first = _decode_whole(b"TDS%d " % VERSION + data[len(LOGGED) : end], url)
    groups = dict(header_from_builtins(first.header, url=url).groups)
    _check_leaves(first.leaves, url)
    leaves, generation = list(first.leaves), first.generation
    grown: dict[int, _Grown] = {}
    for number, step in enumerate(_steps(data[end + 1 :], url)):
        generation = step.generation
        try:
            for path, group in step.groups:
                groups[path]  # a step adds no group
                groups[path] = group
            for growth in step.leaves:
                if growth.leaf not in grown:
                    grown[growth.leaf] = _Grown(leaves[growth.leaf])
                grown[growth.leaf].apply(growth)
        except (KeyError, IndexError, ValueError) as error:
            what = f"line {number + 1} of its log does not fit the lines before: {error!r}"
            raise CorruptStoreError(f"{url}: {NAME} is damaged: {what}", url=url, hint=_RESTORE) from error
    for at, leaf in grown.items():
        leaves[at] = leaf.record()
    _check_leaves(leaves, url)
    header = header_from_builtins(header_to_builtins(Header(groups)), url=url)
    return Manifest(generation, header, leaves), header


class _Grown:
    """A leaf while the lines of a log are applied; `_check_leaves` checks the result."""

    def __init__(self, leaf: LeafRecord) -> None:
        self.leaf, self.rows, self.tips, self.block = leaf, 0, 0, leaf.block
        self.crc = bytearray(base64.b64decode(leaf.crc))

    def apply(self, growth: Growth) -> None:
        """Apply a line; raise `InvalidArgumentError` for one that no writer writes."""
        if not self.leaf.file or min(growth.leaf, growth.rows, growth.leading, len(self.crc) - 4 * growth.leading) < 0:
            raise InvalidArgumentError(path_text(self.leaf.path))
        del self.crc[4 * growth.leading :]
        self.crc += base64.b64decode(growth.crc, validate=True)
        self.rows, self.tips, self.block = growth.rows, growth.tips, growth.block or self.block

    def record(self) -> LeafRecord:
        """Return the record of the leaf as it is now."""
        shape = (self.rows, *self.leaf.shape[1:])
        nbytes = math.prod(shape) * NAME_TO_DTYPE[self.leaf.dtype].itemsize
        crc = base64.b64encode(self.crc).decode()
        fields = {"shape": shape, "nbytes": nbytes, "crc": crc, "tips": self.tips, "block": self.block}
        return msgspec.structs.replace(self.leaf, **fields)


def _steps(log: bytes, url: str) -> list[Step]:
    """Parse the lines of a log, except a last one that was never completely written, and so never acknowledged."""
    *lines, rest = log.split(b"\n")
    rest = rest.rstrip(b"\0")
    bodies = [_line_body(line) for line in lines]
    if bodies and bodies[-1] is None and b"\0\0" in lines[-1]:
        bodies.pop()  # a power cut, and the blocks of the line were written in another order
    if rest and (whole := _line_body(rest)) is not None:
        bodies.append(whole)
    elif rest and _line_body(rest[:-1]) is not None:
        bodies.append(None)  # whole, but the end of the line is another byte
    steps = []
    for number, body in enumerate(bodies):
        try:
            if body is None:
                raise CorruptStoreError(
                    f"{url}: {NAME} is damaged: the checksum of line {number + 1} of its log does not fit",
                    url=url,
                    hint=_RESTORE,
                )
            steps.append(_STEP.decode(body))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptStoreError(f"{url}: {NAME} is not readable: {error}", url=url, hint=_RESTORE) from error
    return steps


def _line_body(line: bytes) -> bytes | None:
    """Return the JSON of a line; None if its checksum is wrong."""
    return line[8:] if len(line) > 8 and line[:8] == b"%08x" % crc32c(line[8:]) else None


_STEP = msgspec.json.Decoder(Step)
_MANIFEST = SealedDocument(Manifest, {b'"nbytes":': (MAX_LEAVES, "leaves")})
_RESTORE = "restore it from a copy; the raw leaves beside it, and meta.json for `tensordict`, are unaffected"


def _check_leaves(leaves: list[LeafRecord], url: str) -> None:
    paths: set[Path] = set()
    files: dict[Path, Path] = {}
    packed: list[LeafRecord] = []
    forms: set[tuple[object, ...]] = set()
    for leaf in leaves:
        form = leaf.dtype, leaf.shape, leaf.nbytes, leaf.block  # which many leaves have in common
        if reason := (None if form in forms else _form_fault(leaf)) or _fault(leaf):
            raise CorruptStoreError(f"{url}: leaf {path_text(leaf.path)} {reason}", url=url)
        if leaf.path in paths:
            raise CorruptStoreError(f"{url}: leaf {path_text(leaf.path)} is described twice", url=url)
        forms.add(form)
        paths.add(leaf.path)
        if leaf.offset >= 0:
            packed.append(leaf)
        elif leaf.file:
            if leaf.file in files:
                raise CorruptStoreError(
                    f"{url}: leaves {path_text(files[leaf.file])} and {path_text(leaf.path)} share one file", url=url
                )
            files[leaf.file] = leaf.path
    packed.sort(key=lambda leaf: leaf.offset)
    for one, other in itertools.pairwise(packed):
        if one.offset + one.nbytes > other.offset:
            raise CorruptStoreError(
                f"{url}: leaves {path_text(one.path)} and {path_text(other.path)} share bytes of {PACK}", url=url
            )


def _fault(leaf: LeafRecord) -> str | None:
    if not 1 <= len(leaf.path) <= MAX_DEPTH:
        return f"is nested {len(leaf.path)} levels deep, not 1 to {MAX_DEPTH}"
    expected, file, at = leaf.nbytes, leaf.file, leaf.offset
    if bool(file) != bool(expected):
        return f"has {expected} bytes and the file {'/'.join(file)!r}"
    if file and at == -1:
        if len(file) > 2 * MAX_DEPTH or not (all(map(_SIMPLE.fullmatch, file)) or all(map(is_plain_name, file))):
            return f"names {file!r}, which is not a plain file below the root"
        if file[-1] in RESERVED or file[0] in RESERVED:
            return f"names {file!r}, which is not a data file"
    packed = file == (PACK,) and leaf.block == BLOCK and 0 <= at < 2**62 and not at % PACK_ALIGN
    if (at != -1 or PACK in file) and not (packed and 0 < expected <= PACKED_MOST):
        return f"of {expected} bytes is recorded at byte {at} of {'/'.join(file)!r}"
    if leaf.fill != 0 and (reason := fill_fault(leaf.fill, NAME_TO_DTYPE[leaf.dtype])):
        return reason
    # Four bytes a block, as base64 of exactly that length; `Sums.crc` decodes it.
    length = 4 * -(-expected // leaf.block)
    crc, padding = leaf.crc.encode("utf-8", "replace"), b"=" * (-length % 3)
    sound = len(crc) == -(-length // 3) * 4 and crc.translate(None, _BASE64) == padding and crc.endswith(padding)
    return None if sound else f"has malformed checksums for {expected} bytes"


def _form_fault(leaf: LeafRecord) -> str | None:
    """Return a description of what is wrong with dtype, shape and sizes, or None."""
    dtype, shape = NAME_TO_DTYPE.get(leaf.dtype), leaf.shape
    if dtype is None:
        return f"has the unknown dtype {leaf.dtype!r}"
    if shape and (len(shape) > MAX_DIMS or min(shape) < 0):
        return f"has the impossible shape {shape[:8]}"
    expected = math.prod(shape) * dtype.itemsize
    if leaf.nbytes != expected or expected >= 2**62:
        return f"of shape {shape} and dtype {leaf.dtype} has {expected} bytes, but {leaf.nbytes} are declared"
    sound = FINE <= leaf.block <= BLOCK and not leaf.block & (leaf.block - 1)
    return None if sound else f"has checksums of blocks of {leaf.block} bytes"


def fill_fault(fill: Any, dtype: torch.dtype) -> str | None:
    """Return the fault in the record of a fill value (`values.encode_value`), or None.

    Args:
        fill: the record.
        dtype: the dtype of the leaf.

    Example:
        >>> fill_fault(0.5, torch.float32)
        >>> fill_fault("a", torch.float32) is None
        False
    """
    if type(fill) is int and fill == 0:
        return None
    try:
        torch.full((1,), decode_number(fill), dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        return f"cannot be filled: {str(error)[:200]}"
    return None


_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_SIMPLE = re.compile(r"[A-Za-z0-9_%~-][A-Za-z0-9_%~.-]{0,200}")
PACK = "tdstore.pack"
"""The file of packed leaves. No key has a file or a folder of that name (`keys.encode_file_name`)."""
PACK_ALIGN = 64
PACKED_BYTES = 64 << 10
"""Largest packed leaf, unless the writer says otherwise."""
PACKED_MOST = 4 << 20
"""Largest packed leaf there may be: its checksum is of one block."""
PACKED_FROM = 256
"""A new store of so many leaves of that size packs them, unless the caller says otherwise."""
RESERVED = (NAME, "tdstore.session", "meta.json")


is_plain_key = re.compile(f"{_SIMPLE.pattern}(/{_SIMPLE.pattern})*").fullmatch
"""Tell keys of which all components are plain names of the commonest kind; others may be plain, too."""


def is_plain_name(name: str) -> bool:
    """Check whether a string can be one component of a path, and stays below its folder.

    Example:
        >>> [is_plain_name(name) for name in ("obs", "..", "a/b", "")]
        [True, False, False, False]
    """
    if _SIMPLE.fullmatch(name):
        return True
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        return False
    try:
        return len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False
