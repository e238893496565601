"""The manifest of the object layout: the byte ranges of immutable objects that each leaf is made of. Pure.

`docs/reference/object-layout.md` specifies the format. Parsing is strict: a document that passes `decode_objects`
names each object once, by a name that we make, and no number in it points outside of an object, a piece or a leaf.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import math
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np

from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.errors import CorruptStoreError, InvalidArgumentError
from tdstore.header import MAX_DEPTH, Header, header_from_builtins, header_to_builtins, without_collection
from tdstore.index.ranges import Ints
from tdstore.storekit.documents import MAX_DIMS, MAX_LEAVES, NAME, SealedDocument, fill_fault, is_objects
from tdstore.types import MAX_TEXT, Path, path_text

OBJECT_NAME = re.compile(r"data/[0-9a-f-]{1,100}\.bin")
VERSION_ID = re.compile(r"[0-9a-f]{32}")
VERSION_NAME = re.compile(r"versions/[0-9a-f]{32}\.json")
MAX_VERSIONS = 100_000
SUMS_BLOCK = 4096
"""Bytes of checksums (1,024 of them) that are fetched, and checked against the manifest, together."""
MAX_GRAIN = 4 << 20
MAX_OBJECTS = 1_000_000
MAX_OBJECT_BYTES = 1 << 42
RECENT = 64
"""Retired objects that a commit encodes each time."""
MAX_ROWS = 4_000_000
"""Pieces, and extents, of one manifest."""
_TOP = 2**62

PIECE_COLUMNS = ("object", "offset", "nbytes", "grain", "sum")
EXTENT_COLUMNS = ("gap", "nbytes", "piece", "offset")


class ObjectRecord(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One data object. Its last `4 * sums` bytes are the crc32c of its grains."""

    name: str
    size: int
    sums: int = 0
    crc: str = ""
    """base64 of little-endian uint32: the crc32c of each 4 KiB of those bytes."""
    versioned: bool = False
    """Whether a version names it, so that it is held when this generation is replaced."""


class LeafRecord(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One leaf; the next `extents` rows of the table of extents are its own."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    extents: int = 0
    fill: Any = 0
    """The fill value, as `values.encode_value` encodes it."""


class Retired(msgspec.Struct, frozen=True, array_like=True):
    """An object of an earlier generation, to be removed by a later commit."""

    name: str
    size: int
    since: int
    """Seconds since the epoch."""
    stay: int = -1
    """Seconds after `since` for which it stays; -1: for those that the writer waits which removes it."""


class RetiredList(Sequence[Retired]):
    """Retired objects, newest first. A commit adds few: it neither goes through the others nor encodes them again.

    Args:
        recent: the newest.
        rest: the others.
    """

    __slots__ = ("_due", "_due_by_stay", "_recent", "_rest")

    def __init__(self, recent: tuple[Retired, ...], rest: _Rest) -> None:
        self._recent = recent
        self._rest = rest
        self._due = min([rest.due, *(item.since for item in recent if item.stay < 0)])
        by_stay = (item.since + item.stay for item in recent if item.stay >= 0)
        self._due_by_stay = min([rest.due_by_stay, *by_stay])

    @classmethod
    def of(cls, items: Sequence[Retired]) -> RetiredList:
        """Build the list, unless it is one."""
        return items if isinstance(items, RetiredList) else cls((), _rest(items))

    def __len__(self) -> int:
        return len(self._recent) + len(self._rest.items)

    def __getitem__(self, at: Any) -> Any:
        return (*self._recent, *self._rest.items)[at]

    def __iter__(self) -> Iterator[Retired]:
        return itertools.chain(self._recent, self._rest.items)

    def plus(self, new: Iterable[Retired]) -> RetiredList:
        """Return the list with newer objects before the others."""
        recent = (*new, *self._recent)
        if len(recent) <= RECENT:
            return RetiredList(recent, self._rest)
        return RetiredList((), _rest((*recent, *self._rest.items)))

    def without(self, names: set[str]) -> RetiredList:
        """Return the list without objects of these names."""
        if names.isdisjoint(self._rest.names) and not any(item.name in names for item in self._recent):
            return self
        return RetiredList.of([item for item in self if item.name not in names])

    def is_due(self, keep_old: float, moment: int) -> bool:
        """Check whether the time of an object has come."""
        return self._due + keep_old <= moment or self._due_by_stay <= moment

    def encodable(self) -> list[Any]:
        """Return the items for the encoder; older ones are JSON already."""
        return [*self._recent, self._rest.encoded] if self._rest.items else list(self._recent)


class _Rest(msgspec.Struct, frozen=True):
    """The older items of a `RetiredList`, and what is needed of all of them."""

    items: tuple[Retired, ...]
    names: frozenset[str]
    due: float
    """The first `since` of those that a writer waits for."""
    due_by_stay: float
    """The time of the first of the others."""
    encoded: msgspec.Raw
    """Their JSON, separated by commas."""


def _rest(items: Iterable[Retired]) -> _Rest:
    found = tuple(items)
    return _Rest(
        found,
        frozenset(item.name for item in found),
        min((item.since for item in found if item.stay < 0), default=math.inf),
        min((item.since + item.stay for item in found if item.stay >= 0), default=math.inf),
        msgspec.Raw(msgspec.json.encode(found)[1:-1]),
    )


class Held(msgspec.Struct, frozen=True, array_like=True):
    """An object that versions need, and the present generation does not."""

    name: str
    size: int


class VersionRecord(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One version. Its manifest is the object `version_name(id)`."""

    id: str
    """The generation."""
    time: int
    """Microseconds since the epoch."""
    message: str = ""
    rows: int = -1
    """-1: there is no batch dimension."""
    added: int = 0
    """Bytes of the objects that no earlier version had."""
    tags: tuple[str, ...] = ()


class Columns(msgspec.Struct, frozen=True, array_like=True):
    """A table of non-negative integers, column by column."""

    rows: int
    columns: list[str]
    """Width in bytes (0, 1, 2, 4 or 8), then base64 of little-endian unsigned integers; width 0 is all zeros."""


class _Document(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The fields of the JSON document."""

    layout: str
    generation: str
    header: Any
    objects: list[ObjectRecord]
    pieces: Columns
    leaves: list[LeafRecord]
    extents: Columns
    retired: list[Retired] = []
    versions: list[VersionRecord] = []
    held: list[Held] = []


class Document(msgspec.Struct, frozen=True):
    """The contents of a manifest of the object layout."""

    generation: str
    header: Header
    objects: Sequence[ObjectRecord]
    pieces: Ints
    """`[n, 5]`: `PIECE_COLUMNS`."""
    leaves: Sequence[LeafRecord]
    extents: Ints
    """`[n, 4]`: start in the leaf, bytes, piece, offset in the piece; leaf after leaf, ascending in each."""
    retired: Sequence[Retired] = ()
    versions: Sequence[VersionRecord] = ()
    """Oldest first."""
    held: Sequence[Held] = ()


def new_generation() -> str:
    """Return a fresh random name for a commit."""
    return uuid.uuid4().hex


def version_name(version: str) -> str:
    """Return the name of the object that is the manifest of a version."""
    return f"versions/{version}.json"


# -- writing ---------------------------------------------------------------------------------
def encode_objects(document: Document, *, url: str) -> bytes:
    """Encode a manifest.

    Raises:
        InvalidArgumentError: beyond the limits that a reader accepts.
    """
    start, nbytes, piece, offset = document.extents.T.reshape(4, -1)
    before = np.concatenate([[0], (start + nbytes)[:-1]])
    counts = np.array([leaf.extents for leaf in document.leaves], np.int64)
    first = (np.cumsum(counts) - counts)[counts > 0]
    before[first] = 0
    if len(document.pieces) > MAX_ROWS or len(document.extents) > MAX_ROWS:
        raise InvalidArgumentError(f"{url} would have {len(document.extents)} extents; the limit is {MAX_ROWS}")
    fields = _Document(
        layout="objects",
        generation=document.generation,
        header=header_to_builtins(document.header),
        objects=list(document.objects),
        pieces=_pack(document.pieces, len(PIECE_COLUMNS)),
        leaves=list(document.leaves),
        extents=_pack(np.stack([start - before, nbytes, piece, offset], 1), len(EXTENT_COLUMNS)),
        retired=RetiredList.of(document.retired).encodable(),
        versions=list(document.versions),
        held=list(document.held),
    )
    return _MANIFEST.encode(fields, [*(leaf.path for leaf in document.leaves), *document.header.groups], url=url)


def sums_crc(blocks: Ints | np.ndarray[Any, np.dtype[np.uint32]]) -> str:
    """Return the `crc` of an `ObjectRecord`."""
    return base64.b64encode(np.asarray(blocks, "<u4").tobytes()).decode()


def _pack(table: Ints, width: int) -> Columns:
    return Columns(len(table), [_pack_column(column) for column in table.reshape(-1, width).T])


def _pack_column(values: Ints) -> str:
    top = int(values.max(initial=0))
    if not top:
        return "0"
    size = next(size for size in (1, 2, 4, 8) if top < 1 << 8 * size)
    return f"{size}{base64.b64encode(values.astype(f'<u{size}').tobytes()).decode()}"


# -- reading ---------------------------------------------------------------------------------
def decode_objects(data: bytes, *, url: str) -> Document:
    """Parse and check a manifest of the object layout.

    Raises:
        CorruptStoreError: damaged, of another layout, or inconsistent.
        UnsupportedError: of a newer version.
    """
    body = _MANIFEST.body(data, url=url)
    if not is_objects(body):
        raise CorruptStoreError(f"{url}: {NAME} describes a directory of files, not the object layout", url=url)
    document = _MANIFEST.decode_body(body, url=url)
    with without_collection():
        header = header_from_builtins(document.header, url=url)
        return _Checker(document, url).check(header)


_MANIFEST = SealedDocument(_Document, {b'"path":': (MAX_LEAVES, "leaves"), b'"name":': (MAX_OBJECTS, "objects")})


class _Checker:
    """The checks of a parsed manifest."""

    def __init__(self, document: _Document, url: str) -> None:
        self.document = document
        self.url = url

    def check(self, header: Header) -> Document:
        found = self.document
        if not re.fullmatch(r"[0-9a-f]{32}", found.generation):
            self._refuse(f"has the generation {found.generation[:40]!r}")
        self._objects()
        leaves = self._leaves()
        pieces = self._pieces()
        extents = self._extents(pieces, leaves)
        self._versions()
        return Document(
            found.generation, header, found.objects, pieces, found.leaves, extents, found.retired, found.versions,
            found.held,
        )  # fmt: skip

    def _refuse(self, reason: str) -> NoReturn:
        raise CorruptStoreError(f"{self.url}: {NAME} {reason}", url=self.url)

    def _objects(self) -> None:
        names: set[str] = set()
        for record in self.document.objects:
            name, count = record.name, record.sums
            if OBJECT_NAME.fullmatch(name) is None or name in names:
                self._refuse(f"names the object {name[:80]!r} twice, or it is no name of ours")
            names.add(name)
            if not 0 <= 4 * count <= record.size < MAX_OBJECT_BYTES:
                self._refuse(f"says that {name} has {record.size} bytes with {count} checksums")
            crcs = -(-4 * count // SUMS_BLOCK)
            if len(record.crc) != -(-4 * crcs // 3) * 4 or _decode64(record.crc) is None:
                self._refuse(f"has malformed checksums of {name}")
        for old in self.document.retired:
            ours = OBJECT_NAME.fullmatch(old.name) or VERSION_NAME.fullmatch(old.name)
            if ours is None or old.name in names:
                self._refuse(f"retires {old.name[:80]!r}, which is in use, retired twice, or no name of ours")
            names.add(old.name)
            if not (0 <= old.size < _TOP and 0 <= old.since < _TOP):
                self._refuse(f"retires {old.name} of {old.size} bytes at {old.since}")
        for held in self.document.held:
            if OBJECT_NAME.fullmatch(held.name) is None or held.name in names or not 0 <= held.size < _TOP:
                self._refuse(f"holds {held.name[:80]!r} of {held.size} bytes, which is in use, or no name of ours")
            names.add(held.name)

    def _versions(self) -> None:
        found = self.document.versions
        ids = {version.id for version in found}
        retired = {old.name for old in self.document.retired}
        tags = [tag for version in found for tag in version.tags]
        if len(ids) < len(found) or len(set(tags)) < len(tags) or len(found) > MAX_VERSIONS:
            self._refuse(f"has {len(found)} versions of {len(ids)} names and {len(set(tags))} tags")
        for version in found:
            if VERSION_ID.fullmatch(version.id) is None or max(map(len, (version.message, *version.tags))) > MAX_TEXT:
                self._refuse(f"has a version {version.id[:80]!r}, which is no name of ours, or a text that is too long")
            if not (0 <= version.time < _TOP and -1 <= version.rows < _TOP and 0 <= version.added < _TOP):
                self._refuse(f"has a version {version.id} of {version.rows} rows at {version.time}")
            if version_name(version.id) in retired:
                self._refuse(f"retires the version {version.id}, which it has")

    def _leaves(self) -> Ints:
        """Return the bytes of each leaf."""
        paths: set[Path] = set()
        sizes = []
        total = 0
        for leaf in self.document.leaves:
            if not 1 <= len(leaf.path) <= MAX_DEPTH:
                self._refuse(f"has a leaf that is nested {len(leaf.path)} levels deep, not 1 to {MAX_DEPTH}")
            dtype = NAME_TO_DTYPE.get(leaf.dtype)
            shape = leaf.shape
            if dtype is None or (shape and (len(shape) > MAX_DIMS or min(shape) < 0)):
                self._refuse(f"gives {path_text(leaf.path)} the dtype {leaf.dtype!r} and the shape {shape[:8]}")
            size = math.prod(shape) * dtype.itemsize
            if size >= _TOP or not 0 <= leaf.extents <= MAX_ROWS:
                self._refuse(f"gives {path_text(leaf.path)} the impossible shape {shape[:8]}")
            if leaf.path in paths:
                self._refuse(f"describes {path_text(leaf.path)} twice")
            if leaf.fill != 0 and (reason := fill_fault(leaf.fill, dtype)):
                self._refuse(f"has a leaf {path_text(leaf.path)} that {reason}")
            paths.add(leaf.path)
            sizes.append(size)
            total += leaf.extents
        if total != self.document.extents.rows:
            self._refuse(f"has {self.document.extents.rows} extents, but its leaves have {total}")
        return np.array(sizes, np.int64)

    def _pieces(self) -> Ints:
        table = self._unpack(self.document.pieces, PIECE_COLUMNS, "pieces")
        if not len(table):
            return table
        which, offset, nbytes, grain, first = table.T
        objects = self.document.objects
        if int(which.max()) >= len(objects):
            self._refuse("has a piece of an object that it does not name")
        payload = np.array([o.size - 4 * o.sums for o in objects], np.int64)[which]
        count = np.array([o.sums for o in objects], np.int64)[which]
        if bool(((nbytes < 1) | (offset + nbytes > payload)).any()):
            self._refuse("has a piece that lies outside of its object")
        if bool(((grain < 1) | (grain > MAX_GRAIN)).any()):
            self._refuse(f"has a piece that is checked in grains of other than 1 to {MAX_GRAIN} bytes")
        if bool((first + (nbytes + grain - 1) // grain > count).any()):
            self._refuse("has a piece whose checksums lie outside of its object")
        return table

    def _extents(self, pieces: Ints, sizes: Ints) -> Ints:
        table = self._unpack(self.document.extents, EXTENT_COLUMNS, "extents")
        if not len(table):
            return table
        gap, nbytes, piece, offset = table.T
        if float(gap.sum(dtype=np.float64) + nbytes.sum(dtype=np.float64)) >= float(_TOP):
            self._refuse("has extents beyond every leaf")
        counts = np.array([leaf.extents for leaf in self.document.leaves], np.int64)
        leaf = np.repeat(np.arange(len(counts)), counts)
        # Gaps count from the extent before; each leaf begins at 0.
        stop = np.cumsum(gap + nbytes)
        base = np.concatenate([[0], stop])[np.cumsum(counts) - counts]
        stop -= base[leaf]
        if bool(((nbytes < 1) | (stop > sizes[leaf])).any()):
            bad = int(leaf[np.flatnonzero((nbytes < 1) | (stop > sizes[leaf]))[0]])
            self._refuse(f"has bytes beyond the end of {path_text(self.document.leaves[bad].path)}")
        if int(piece.max()) >= len(pieces):
            self._refuse("has an extent of a piece that is not there")
        if bool((offset + nbytes > pieces[piece, 2]).any()):
            self._refuse("has an extent that lies outside of its piece")
        return np.stack([stop - nbytes, nbytes, piece, offset], 1)

    def _unpack(self, packed: Columns, names: Sequence[str], what: str) -> Ints:
        if not 0 <= packed.rows <= MAX_ROWS or len(packed.columns) != len(names):
            self._refuse(f"has {packed.rows} {what} of {len(packed.columns)} columns")
        out = np.zeros((packed.rows, len(names)), np.int64)
        for at, text in enumerate(packed.columns):
            if text == "0":
                continue
            size = int(text[0]) if text[:1] in ("1", "2", "4", "8") else 0
            data = _decode64(text[1:]) if size else None
            if data is None or len(data) != packed.rows * size:
                self._refuse(f"has a malformed column {names[at]!r} of {what}")
            values = np.frombuffer(data, f"<u{size}")
            if int(values.max(initial=0)) >= _TOP // 2:
                self._refuse(f"has an impossible {names[at]!r} of {what}")
            out[:, at] = values
        return out


def _decode64(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def is_object_layout(data: bytes) -> bool:
    """Check whether a `tdstore.json` begins as that of the object layout, rather than of a directory of files."""
    start = data.find(b"\n", 0, 40) + 1
    return is_objects(data[start : start + 100])
