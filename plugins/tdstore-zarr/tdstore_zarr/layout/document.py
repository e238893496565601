"""The root's `zarr.json`: consolidated metadata of every node, and our manifest in one attribute, with a checksum.

    "attributes": {"tdstore": "TDS1 89abcdef\n<JSON>", ...}

The first line is that of `tdstore.json`. The body holds the header, the objects of every leaf (with sizes and
checksums), and the checksum of the consolidated metadata, so that any change in the document is detected.
"""

from __future__ import annotations

import base64
import os
import re
import socket
import struct
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from tdstore.errors import CorruptStoreError, InvalidArgumentError, UnsupportedError
from tdstore.header import MAX_BYTES, MAX_DEPTH, Header, header_from_builtins, header_to_builtins
from tdstore.storekit.checksums import crc32c
from tdstore.storekit.documents import SealedDocument
from tdstore.types import Path, path_text
from tdstore_zarr.codec.parsing import ArrayParser
from tdstore_zarr.layout.leaf import Leaf, Stored
from tdstore_zarr.place.redo_log import LOG, RedoLog, decode_log, with_attribute

NAME = "zarr.json"
MANIFEST = "tdstore"
DIRTY = "tdstore_dirty"
PEER = "__tensordict__"
PEER_VALUE = "__tensordict_non_tensor__"
MAX_ROOT = 4 * MAX_BYTES
MAX_NODES = 1_000_000


class _Record(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One leaf in the manifest."""

    path: tuple[str, ...]
    node: str
    count: int = 0
    objects: str = ""
    """base64 of `count` records of three little-endian 8-byte integers: number, size, seal (-1: unknown)."""


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of the manifest."""

    generation: str
    metadata: str
    """crc32c of the consolidated metadata, keys sorted."""
    header: Any
    leaves: list[_Record]
    groups: list[tuple[tuple[str, ...], str]]
    copies: list[tuple[tuple[str, ...], str]]


class Mark(msgspec.Struct, frozen=True):
    """The dirty marker of a writer in place: its identity, and the leaves it changes."""

    leaves: list[tuple[str, ...]]
    pid: int = 0
    host: str = ""
    time: float = 0.0
    token: str = ""
    """Distinguishes the writers of one process."""

    @property
    def who(self) -> str:
        """Describe the writer, for messages."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.time))
        return f"process {self.pid} on {self.host or 'an unknown host'}, since {when} UTC"

    def is_here(self) -> bool:
        """Check whether the writer is, or was, a process of this machine."""
        return self.host == socket.gethostname()

    def is_dead(self) -> bool:
        """Check whether the writer was a process of this machine that has ended."""
        if not self.is_here():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            return False
        return False


def mark_now() -> Mark:
    """Return a marker of this process."""
    return Mark([], os.getpid(), socket.gethostname(), time.time(), uuid.uuid4().hex)


@dataclass
class Document:
    """The contents of a root."""

    nodes: dict[str, Any] = field(default_factory=dict)
    """Consolidated: the `zarr.json` of every node below the root, where `raw` as text."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Those of the root that are not ours."""
    consolidated: bool = False
    ours: bool = False
    mark: Mark | None = None
    """Of a writer of tdstore 0.1, which changed chunks in place: the leaves it names may be neither old nor new."""
    log: RedoLog | None = None
    generation: str = ""
    header: Header = field(default_factory=Header)
    leaves: dict[Path, Leaf] = field(default_factory=dict)
    groups: dict[Path, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    """Nodes that repeat values of the header, for other programs."""
    raw: bool = False
    url: str = ""

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the `zarr.json` of every node below the root."""
        if self.raw:
            try:
                self.nodes = {node: msgspec.json.decode(text) for node, text in self.nodes.items()}
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise CorruptStoreError(f"{self.url}: {NAME} is not readable: {error}", url=self.url) from error
            self.raw = False
        return self.nodes

    @metadata.setter
    def metadata(self, nodes: dict[str, Any]) -> None:
        self.nodes, self.raw = nodes, False


class _Consolidated(msgspec.Struct):
    """The consolidated metadata of a root."""

    metadata: dict[str, msgspec.Raw]


class _Root(msgspec.Struct):
    """A root of ours, whose nodes stay text until they are needed."""

    zarr_format: Literal[3]
    node_type: Literal["group"]
    attributes: dict[str, Any]
    consolidated_metadata: _Consolidated


class _Attributes(msgspec.Struct):
    """The attributes of a root, as far as they are ours."""

    tdstore: str


class _Manifest(msgspec.Struct):
    """A root of which only the manifest is needed."""

    attributes: _Attributes


_GENERATION = re.compile(r'TDS\d+ [0-9a-f]{8}\n\{"generation":"([^"\\]+)"')
_decode_manifest = msgspec.json.Decoder(_Manifest).decode
_decode_ours = msgspec.json.Decoder(_Root).decode
_dumps = msgspec.json.Encoder(order="sorted").encode


def encode_root(
    document: Document, header: Header, leaves: Iterable[Leaf], *, url: str, generation: str | None = None
) -> bytes:
    """Encode the root of a new generation.

    Args:
        document: the previous root.
        header: the header.
        leaves: the leaves.
        url: the location, for messages.
        generation: its name.

    Raises:
        InvalidArgumentError: beyond the limits that a reader accepts.
    """
    records = [_record(leaf) for leaf in leaves]
    nodes = _dumps(document.metadata)
    metadata = f"{crc32c(nodes):08x}"
    groups = sorted(document.groups.items())
    copies = sorted((path, node) for node, path in document.copies.items())
    name = generation or uuid.uuid4().hex
    if len(document.metadata) > MAX_NODES:
        raise InvalidArgumentError(f"{url} would have {len(document.metadata)} nodes; the limit is {MAX_NODES}")
    body = _Body(name, metadata, header_to_builtins(header), records, groups, copies)
    manifest = _MANIFEST.encode(body, [*(record.path for record in records), *header.groups], url=url)
    root: dict[str, Any] = {"zarr_format": 3, "node_type": "group"}
    root["attributes"] = {**document.attributes, MANIFEST: manifest.decode()}
    # Sorted, like the input of the checksum: a reader need not decode them to compare it.
    root["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": msgspec.Raw(nodes)}
    return msgspec.json.encode(root)


def generation_of(data: bytes) -> str | None:
    """Return the generation that a root names; None for one of another program. The rest of the root is not decoded."""
    try:
        text = _decode_manifest(data).attributes.tdstore
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    found = _GENERATION.match(text)
    return None if found is None else found[1]


def unmarked(data: bytes) -> bytes:
    """Return the same root, without a marker."""
    return with_attribute(data, DIRTY, None)


def _record(leaf: Leaf) -> _Record:
    rows = sorted(leaf.objects.items())
    table = np.zeros(len(rows), _TABLE)
    if rows:
        table["number"] = [n for n, _ in rows]
        table["size"] = [s.size for _, s in rows]
        table["crc"] = [s.crc for _, s in rows]
    return _Record(leaf.path, leaf.node, len(rows), base64.b64encode(table.tobytes()).decode())


_TABLE = np.dtype([("number", "<u8"), ("size", "<u8"), ("crc", "<i8")])
_RECORD = struct.Struct("<QQq")


def decode_root(data: bytes, *, url: str, trust: bool = False) -> Document:
    """Parse a root, and check it against the manifest of tdstore, if it has one.

    Args:
        data: the bytes.
        url: the location, for messages.
        trust: allow codecs outside of the list of safe ones.

    Raises:
        CorruptStoreError: damaged, or inconsistent.
        UnsupportedError: an array, or another version.
    """
    try:
        ours = _decode_ours(data)
        attributes, metadata, consolidated = ours.attributes, ours.consolidated_metadata.metadata, True
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        attributes, metadata, consolidated = _decode_any(data, url)
    if MANIFEST not in attributes and consolidated:
        attributes, metadata, consolidated = _decode_any(data, url)
    if len(metadata) > MAX_NODES:
        raise CorruptStoreError(f"{url}: {NAME} has more than {MAX_NODES} nodes", url=url, hint=_RESTORE)
    manifest, mark, log = attributes.pop(MANIFEST, None), attributes.pop(DIRTY, None), attributes.pop(LOG, None)
    raw = msgspec.Raw in map(type, metadata.values())
    found = Document(metadata, attributes, consolidated, manifest is not None, raw=raw, url=url)
    if log is not None:
        found.log = decode_log(log, url)
    if mark is not None:
        try:
            found.mark = msgspec.convert(mark, Mark)
        except msgspec.ValidationError as error:
            raise CorruptStoreError(f"{url}: the mark of a writer is malformed: {error}", url=url) from error
    if manifest is not None:
        _read_manifest(found, manifest, url, trust)
    return found


def _decode_any(data: bytes, url: str) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Return the attributes and nodes of any root, and whether its metadata is consolidated."""
    try:
        root = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptStoreError(f"{url}: {NAME} is not readable: {error}", url=url, hint=_RESTORE) from error
    if not isinstance(root, dict) or root.get("zarr_format") != 3:
        raise CorruptStoreError(f"{url}: {NAME} is not that of a zarr v3 node", url=url, hint=_RESTORE)
    if root.get("node_type") != "group":
        what = "an array" if root.get("node_type") == "array" else f"a {root.get('node_type')!r:.100}"
        raise UnsupportedError(f"{url} is {what}, not a group of arrays", url=url, hint="open the group that holds it")
    attributes = root.get("attributes", {})
    consolidated = root.get("consolidated_metadata")
    metadata: Any = {}
    if consolidated is not None:
        metadata = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    if not isinstance(attributes, dict) or not isinstance(metadata, dict):
        raise CorruptStoreError(f"{url}: {NAME} has malformed attributes or metadata", url=url, hint=_RESTORE)
    return attributes, metadata, consolidated is not None


def _read_manifest(found: Document, manifest: Any, url: str, trust: bool) -> None:
    raw = manifest.encode("utf-8", "replace") if isinstance(manifest, str) else b""
    body = _MANIFEST.decode(raw, url=url)
    if (
        f"{crc32c(_dumps(found.nodes)):08x}" != body.metadata
        and f"{crc32c(_dumps(found.metadata)):08x}" != body.metadata
    ):
        raise CorruptStoreError(
            f"{url}: the metadata of its arrays is not what was committed: damaged, or changed by another program",
            url=url,
            hint="if zarr changed it on purpose, open it with recover='accept'",
        )
    found.generation = body.generation
    found.header = header_from_builtins(body.header, url=url)
    found.groups = dict(body.groups)
    found.copies = {node: path for path, node in body.copies}
    parser = ArrayParser(url, trust)
    for record in body.leaves:
        _add_leaf(found, record, parser)


def _add_leaf(found: Document, record: _Record, parser: ArrayParser) -> None:
    path, data = record.path, found.nodes.get(record.node)
    if not 1 <= len(path) <= MAX_DEPTH or path in found.leaves:
        raise _wrong(parser, path, "is described twice, or nested too deep")
    meta, spec, cut, most = parser.parse(data, path)
    try:
        rows = list(_RECORD.iter_unpack(base64.b64decode(record.objects, validate=True)))
    except (ValueError, struct.error):
        raise _wrong(parser, path, "has a malformed list of objects") from None
    objects: dict[int, Stored] = {}
    for number, size, crc in rows:
        objects[number] = Stored(size, crc)
    if len(rows) != record.count or len(rows) > most or (rows and max(objects) >= most):
        raise _wrong(parser, path, "lists objects that it cannot have")
    for row in rows:
        if row[1] >= 2**62:
            raise _wrong(parser, path, "lists an object of impossible size")
    found.leaves[path] = Leaf(path, record.node, meta, objects, True, spec, cut)


def _wrong(parser: ArrayParser, path: Path, what: str) -> CorruptStoreError:
    return CorruptStoreError(f"{parser.url}: leaf {path_text(path)} {what}", url=parser.url, hint=_RESTORE)


_RESTORE = "restore the store from a copy; zarr can still read the arrays that are whole"
_MANIFEST = SealedDocument(
    _Body, {b'"node":': (MAX_NODES, "leaves")}, what=f"the root attribute {MANIFEST!r}", hint=_RESTORE
)
