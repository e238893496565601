"""The root's `zarr.json`: consolidated metadata of every node, and our manifest in one attribute, sealed.

    "attributes": {"tdstore": "TDS1 89abcdef\\n<JSON>", ...}

The seal is that of `tdstore.json`. The body holds the header, which objects every leaf has (with sizes and
checksums), and the checksum of the consolidated metadata, so that a change anywhere in the document shows.
"""

from __future__ import annotations

import base64
import os
import socket
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from tdstore.checksums import crc32c
from tdstore.errors import CorruptStoreError, UnsupportedError
from tdstore.header import MAX_BYTES, MAX_DEPTH, Header, header_from_builtins, header_to_builtins
from tdstore.manifest import seal, unseal
from tdstore.types import Path, path_text
from tdstore_zarr.arrays import parse_array
from tdstore_zarr.leaf import Leaf, Stored
from tdstore_zarr.redolog import LOG, RedoLog, decode_log

NAME = "zarr.json"
MANIFEST = "tdstore"
DIRTY = "tdstore_dirty"
PEER = "__tensordict__"
PEER_VALUE = "__tensordict_non_tensor__"
MAX_ROOT = 4 * MAX_BYTES
MAX_NODES = 1_000_000


class _Record(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    path: tuple[str, ...]
    node: str
    count: int = 0
    objects: str = ""
    """base64 of `count` records of three little-endian 8-byte integers: number, size, seal (-1: unknown)."""


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    generation: str
    metadata: str
    """crc32c of the consolidated metadata, keys sorted."""
    header: Any
    leaves: list[_Record]
    groups: list[tuple[tuple[str, ...], str]]
    copies: list[tuple[tuple[str, ...], str]]


class Mark(msgspec.Struct, frozen=True):
    """Who is writing in place, and what."""

    leaves: list[tuple[str, ...]]
    pid: int = 0
    host: str = ""
    time: float = 0.0
    token: str = ""
    """Tells writers of one process apart."""

    @property
    def who(self) -> str:
        """For messages."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.time))
        return f"process {self.pid} on {self.host or 'an unknown host'}, since {when} UTC"

    def is_here(self) -> bool:
        """Whether the writer is, or was, a process of this machine."""
        return self.host == socket.gethostname()

    def is_dead(self) -> bool:
        """Whether the writer was a process of this machine that is no more."""
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
    """A mark of this process."""
    return Mark([], os.getpid(), socket.gethostname(), time.time(), uuid.uuid4().hex)


@dataclass
class Document:
    """What a root says."""

    metadata: dict[str, Any] = field(default_factory=dict)
    """Consolidated: the `zarr.json` of every node below the root."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Those of the root that are not ours."""
    consolidated: bool = False
    ours: bool = False
    mark: Mark | None = None
    """Of a writer of tdstore 0.1, which changed chunks in place: what it names may be neither old nor new."""
    log: RedoLog | None = None
    generation: str = ""
    header: Header = field(default_factory=Header)
    leaves: dict[Path, Leaf] = field(default_factory=dict)
    groups: dict[Path, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    """Nodes that repeat values of the header, for other programs."""


_dumps = msgspec.json.Encoder(order="sorted").encode


def encode_root(
    document: Document, header: Header, leaves: Iterable[Leaf], *, url: str, generation: str | None = None
) -> bytes:
    """The bytes of a new generation's root.

    Raises:
        ValueError: beyond the limits that a reader accepts.
    """
    records = [_record(leaf) for leaf in leaves]
    metadata = f"{crc32c(_dumps(document.metadata)):08x}"
    groups = sorted(document.groups.items())
    copies = sorted((path, node) for node, path in document.copies.items())
    name = generation or uuid.uuid4().hex
    body = msgspec.json.encode(_Body(name, metadata, header_to_builtins(header), records, groups, copies))
    if len(body) > MAX_BYTES or len(document.metadata) > MAX_NODES:
        raise ValueError(
            f"{url} would have a manifest of {len(body)} bytes and {len(document.metadata)} nodes; "
            f"the limits are {MAX_BYTES} and {MAX_NODES}"
        )
    return _root(document, {MANIFEST: seal(body).decode()})


def unmarked(data: bytes) -> bytes:
    """The same root, without a mark."""
    root = msgspec.json.decode(data)
    root.get("attributes", {}).pop(DIRTY, None)
    return msgspec.json.encode(root)


def _root(document: Document, ours: dict[str, Any]) -> bytes:
    root: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {**document.attributes, **ours}}
    root["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": document.metadata}
    return msgspec.json.encode(root)


def _record(leaf: Leaf) -> _Record:
    rows = sorted(leaf.objects.items())
    table = np.zeros(len(rows), _TABLE)
    if rows:
        table["number"] = [n for n, _ in rows]
        table["size"] = [s.size for _, s in rows]
        table["crc"] = [s.crc for _, s in rows]
    return _Record(leaf.path, leaf.node, len(rows), base64.b64encode(table.tobytes()).decode())


_TABLE = np.dtype([("number", "<u8"), ("size", "<u8"), ("crc", "<i8")])


def decode_root(data: bytes, *, url: str, trust: bool = False) -> Document:
    """Parse a root, and check it against its manifest where it has one of ours.

    Raises:
        CorruptStoreError: damaged, or describing what cannot be. UnsupportedError: an array, or another version.
    """
    try:
        root = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptStoreError(f"{url}: {NAME} is not readable: {error}", url=url, hint=_RESTORE) from error
    if not isinstance(root, dict) or root.get("zarr_format") != 3:
        raise CorruptStoreError(f"{url}: {NAME} is not that of a zarr v3 node", url=url, hint=_RESTORE)
    if root.get("node_type") != "group":
        what = "an array" if root.get("node_type") == "array" else f"a {root.get('node_type')!r}"
        raise UnsupportedError(f"{url} is {what}, not a group of arrays", url=url, hint="open the group that holds it")
    attributes = root.get("attributes", {})
    consolidated = root.get("consolidated_metadata")
    metadata: Any = {}
    if consolidated is not None:
        metadata = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    if not isinstance(attributes, dict) or not isinstance(metadata, dict) or len(metadata) > MAX_NODES:
        raise CorruptStoreError(f"{url}: {NAME} has malformed attributes or metadata", url=url, hint=_RESTORE)
    manifest, mark, log = (attributes.pop(name, None) for name in (MANIFEST, DIRTY, LOG))
    found = Document(metadata, attributes, consolidated is not None, manifest is not None)
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


def _read_manifest(found: Document, manifest: Any, url: str, trust: bool) -> None:
    raw = manifest.encode("utf-8", "replace") if isinstance(manifest, str) else b""
    data = unseal(raw, url=url, what=f"the root attribute {MANIFEST!r}", hint=_RESTORE)
    try:
        body = msgspec.json.decode(data, type=_Body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptStoreError(f"{url}: the manifest is not readable: {error}", url=url) from error
    if f"{crc32c(_dumps(found.metadata)):08x}" != body.metadata:
        raise CorruptStoreError(
            f"{url}: the metadata of its arrays is not what was committed: damaged, or changed by another program",
            url=url,
            hint="if zarr changed it on purpose, open it with recover='accept'",
        )
    found.generation = body.generation
    found.header = header_from_builtins(body.header, url=url)
    found.groups = dict(body.groups)
    found.copies = {node: path for path, node in body.copies}
    for record in body.leaves:
        _add_leaf(found, record, url, trust)


def _add_leaf(found: Document, record: _Record, url: str, trust: bool) -> None:
    where = f"leaf {path_text(record.path)}"
    data = found.metadata.get(record.node)
    if not isinstance(data, dict) or data.get("node_type") != "array":
        raise CorruptStoreError(f"{url}: {where} has no array", url=url, hint=_RESTORE)
    if not 1 <= len(record.path) <= MAX_DEPTH or record.path in found.leaves:
        raise CorruptStoreError(f"{url}: {where} is described twice, or nested too deep", url=url)
    meta = parse_array(data, where, url, trust=trust)
    try:
        table = np.frombuffer(base64.b64decode(record.objects, validate=True), _TABLE)
    except ValueError:
        raise CorruptStoreError(f"{url}: {where} has a malformed list of objects", url=url) from None
    limit = 1
    for n in meta.grid:
        limit *= n
    if len(table) != record.count or len(table) > limit or (len(table) and int(table["number"].max()) >= limit):
        raise CorruptStoreError(f"{url}: {where} lists objects that it cannot have", url=url)
    if len(table) and int(table["size"].max()) >= 2**62:
        raise CorruptStoreError(f"{url}: {where} lists an object of impossible size", url=url)
    rows = zip(table["number"].tolist(), table["size"].tolist(), table["crc"].tolist(), strict=True)
    found.leaves[record.path] = Leaf(record.path, record.node, meta, {n: Stored(s, c) for n, s, c in rows})


_RESTORE = "restore the store from a copy; zarr can still read the arrays that are whole"
