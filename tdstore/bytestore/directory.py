"""Uploaded directories of files, of tdstore or of tensordict, as the table of a byte store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from tdstore.builtin.memmap.layout import LeafFile
from tdstore.builtin.memmap.tensordict_layout import (
    INNER,
    MAX_META,
    MAX_PICKLE,
    META,
    PICKLES,
    TensordictReader,
    tensordict_name,
)
from tdstore.bytestore.manifest import Retired
from tdstore.bytestore.table import NOTHING, UNCHECKED, Extents, Leaf, Pieces, StoredObject, Table
from tdstore.engine import Engine, EngineCap
from tdstore.errors import CorruptStoreError, InvalidArgumentError, StoreNotFoundError
from tdstore.header import MAX_GROUPS, Header
from tdstore.index.ranges import Range
from tdstore.storekit.checksums import BLOCK
from tdstore.storekit.documents import NAME, PACK, decode_manifest, is_plain_name
from tdstore.storekit.session import FileParts
from tdstore.types import Path
from tdstore.values import unique_keys

DIRECTORY_HINT = "a directory of files that was uploaded can be read only: save it anew somewhere else to change it"


class UploadedDirectory(msgspec.Struct, frozen=True):
    """The contents of an uploaded directory."""

    table: Table
    header: Header
    tips: dict[Path, int]
    """Checksum of the tips of each leaf, where it is known."""
    generation: str | None
    retired: Sequence[Retired] = ()


def read_uploaded(engine: Engine, url: str, manifest: bytes | None) -> UploadedDirectory:
    """Describe a directory by its `tdstore.json`, or without one by the `meta.json` files of tensordict.

    The latter are fetched level by level, all of a level in one round.

    Raises:
        StoreNotFoundError: neither exists.
        CorruptStoreError: damaged.
    """
    if manifest is not None:
        document, header = decode_manifest(manifest, url=url)
        leaves = [LeafFile.from_record(record) for record in document.leaves]
        tips = {leaf.path: leaf.sums.tips for leaf in leaves if leaf.sums is not None and leaf.nbytes}
        return UploadedDirectory(_table(leaves), header, tips, document.generation)
    try:
        root = engine.get(META, MAX_META)
    except StoreNotFoundError:
        raise StoreNotFoundError(f"{url} holds neither {NAME} nor {META}: it is not a dataset", url=url) from None
    header, leaves = _EngineReader(engine, url, bytes(root.data)).read()
    return UploadedDirectory(_table(leaves), header, {}, None)


def _table(files: Iterable[LeafFile]) -> Table:
    objects: list[StoredObject] = []
    pieces: list[tuple[int, int, int, int, int]] = []
    leaves: dict[Path, Leaf] = {}
    packed: list[bytes] = []
    length = 0
    for file in files:
        extents = NOTHING
        if file.nbytes:
            extents = Extents(*(np.array([v], np.int64) for v in (0, file.nbytes, len(pieces), 0)))
        if file.packed and file.sums is not None:
            # One checksum each; their object is that behind all others.
            pieces.append((-1, file.offset, file.nbytes, BLOCK, len(packed)))
            packed.append(file.sums.crc)
            length = max(length, file.offset + file.nbytes)
        elif file.nbytes:
            sums = None if file.sums is None else np.frombuffer(file.sums.crc, "<u4")
            block = BLOCK if file.sums is None else file.sums.block
            pieces.append((len(objects), 0, file.nbytes, block, UNCHECKED if sums is None else 0))
            objects.append(StoredObject.known("/".join(file.file), file.nbytes, () if sums is None else sums))
        leaves[file.path] = Leaf(file.spec, extents)
    if packed:
        pieces = [(len(objects) if at < 0 else at, a, b, c, d) for at, a, b, c, d in pieces]
        objects.append(StoredObject.known(PACK, length, np.frombuffer(b"".join(packed), "<u4")))
    table = Table(objects, Pieces(), leaves)
    table.pieces.extend(pieces)
    return table


class _EngineReader(TensordictReader):
    """Read `meta.json` files over an engine instead of below a folder."""

    def __init__(self, engine: Engine, url: str, root: bytes) -> None:
        super().__init__(url)
        self._engine = engine
        self._metas: dict[FileParts, bytes] = {(): root}

    def read(self) -> tuple[Header, list[LeafFile]]:
        """Return the header and the leaves that the files describe."""
        level: list[tuple[Path, FileParts]] = [((), ())]
        while level:
            self._fetch_level(level)
            below: list[tuple[Path, FileParts]] = []
            for path, folder in level:
                below += self.group(path, folder)
            if len(self.groups) + len(below) > MAX_GROUPS:
                raise CorruptStoreError(f"{self.url} has more than {MAX_GROUPS} groups", url=self.url)
            level = below
        return Header(self.groups), self.leaves

    def _fetch_level(self, level: Sequence[tuple[Path, FileParts]]) -> None:
        """Fetch the files of the groups of one level, then those of their entries."""
        self._fetch([folder for _, folder in level])
        metas = {folder: self._meta(folder, path) for path, folder in level}
        kinds = {folder: self._kind(meta, path) for (path, folder), meta in zip(level, metas.values(), strict=True)}
        classes = [folder for folder, kind in kinds.items() if kind not in ("TensorDict", "LazyStackedTensorDict")]
        self._fetch([(*folder, INNER) for folder in classes])
        inner: list[FileParts] = []
        for path, folder in level:
            if kinds[folder] == "LazyStackedTensorDict":
                continue
            if folder in classes:
                folder = (*folder, INNER)
            entries = self._meta(folder, path).items()
            typed = [key for key, entry in entries if isinstance(entry, dict) and "type" in entry]
            inner += [(*folder, self._folder_name(folder, key, path)) for key in typed]
        self._fetch(inner)

    def _fetch(self, folders: Iterable[FileParts]) -> None:
        missing = [folder for folder in folders if folder not in self._metas]
        try:
            found = self._engine.get_ranges([Range("/".join((*folder, META)), 0, None) for folder in missing])
        except StoreNotFoundError:
            return  # the caller of the missing one gets an error that names it
        self._metas.update({folder: bytes(raw) for folder, raw in zip(missing, found, strict=True)})

    def _meta(self, folder: FileParts, path: Path) -> dict[str, Any]:
        name = "/".join((*folder, META))
        if folder not in self._metas:
            try:
                self._metas[folder] = bytes(self._engine.get(name, MAX_META).data)
            except StoreNotFoundError:
                raise self._corrupt(f"is missing: there is no {name}", path) from None
        raw = self._metas[folder]
        try:
            if len(raw) > MAX_META:
                raise InvalidArgumentError(f"it has {len(raw)} bytes, more than {MAX_META}")
            meta = json.loads(raw, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise self._corrupt(f"{name} is not readable: {error}", path) from error
        if not isinstance(meta, dict):
            raise self._corrupt(f"{name} is not an object", path)
        return meta

    def _entries(self, folder: FileParts) -> set[str]:
        """Return the names in a folder, as far as callers use them."""
        prefix = "".join(f"{part}/" for part in folder)
        if EngineCap.LIST in self._engine.can:
            return {entry.key[len(prefix) :].partition("/")[0] for entry in self._engine.list(prefix)}
        found = {name for name in PICKLES if self._there(prefix + name)}
        count = 0
        while self._there(f"{prefix}{count}/{META}"):
            found.add(str(count))
            count += 1
        return found

    def _name(self, folder: FileParts, key: str, suffix: str, path: Path) -> str:
        name, bare = tensordict_name(key) + suffix, key + suffix
        if not is_plain_name(name):
            raise self._corrupt("has a key that cannot be a file name", path)
        if bare == name or not key or not is_plain_name(bare):
            return name
        place = "/".join((*folder, name)) + ("" if suffix else f"/{META}")
        return name if self._there(place) else bare

    def _size(self, parts: FileParts) -> int | None:
        try:
            return self._engine.size("/".join(parts))
        except StoreNotFoundError:
            return None

    def _read_pickle(self, parts: FileParts) -> bytes:
        try:
            return bytes(self._engine.get("/".join(parts), MAX_PICKLE).data)
        except StoreNotFoundError as error:
            raise FileNotFoundError(*error.args) from None

    def _there(self, key: str) -> bool:
        try:
            self._engine.size(key)
        except StoreNotFoundError:
            return False
        return True
