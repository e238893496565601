"""Stores of other programs: zarr-python, xarray, tensorstore, the tensordict package."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from tdstore.engine import Engine, EngineCap
from tdstore.errors import CorruptStoreError, StoreError, StoreNotFoundError, UntrustedDataError
from tdstore.header import MAX_DEPTH, Group, Header
from tdstore.index.ranges import Range
from tdstore.storekit.foreign_strings import StringsLeaf
from tdstore.types import Path, path_text
from tdstore.values import PICKLE, encode_value, pickled_form
from tdstore_zarr.codec.metadata import FREE, RATIO, parse_array
from tdstore_zarr.layout.document import MAX_NODES, NAME, PEER, PEER_VALUE, Document
from tdstore_zarr.layout.leaf import UNKNOWN, Leaf, Stored
from tdstore_zarr.layout.names import decode_nodes
from tdstore_zarr.place.base import Place
from tdstore_zarr.strings import StringArray, kind_of, refuse

MAX_NODE_BYTES = 16 << 20
MAX_VALUE = 64 << 20


class Foreign:
    """The contents of another program's store."""

    def __init__(self, place: Place, document: Document, *, trust: bool, wary: bool, leaves: bool) -> None:
        self.place = place
        self.url = place.url
        self.document = document
        self.trust = trust
        self.wary = wary
        """Whether arrays that declare far more than is stored are refused."""
        self.leaves = leaves
        """Whether many strings may be leaves, in memory; in a store that is written they are in the header."""
        self.values: dict[Path, Leaf] = {}
        """Arrays that are values, not leaves (the tensordict package's)."""
        self.paths: dict[str, Path] = {}
        self.strings: dict[Path, dict[str, Any]] = {}
        """Arrays of strings: their envelopes ..."""
        self.tensors: dict[Path, StringsLeaf] = {}
        """... and their leaves."""

    def load(self) -> None:
        """Find all nodes, and the written objects of each array, and add them to the document."""
        engine, document = self.place.engine, self.document
        sizes: dict[str, int] | None = None
        if EngineCap.LIST in engine.can:
            sizes = {}
            for entry in engine.list():
                sizes[entry.key] = entry.size
        if not document.consolidated or (self.place.local and sizes is not None):
            # An array added with zarr-python leaves the consolidated metadata stale. A check is cheap here.
            if sizes is None:
                raise self.place.needs_list() or StoreNotFoundError(f"{self.url} cannot be listed", url=self.url)
            document.metadata = self._nodes(engine, sizes)
        if len(document.metadata) > MAX_NODES:
            raise CorruptStoreError(f"{self.url} has more than {MAX_NODES} nodes", url=self.url)
        self.paths = decode_nodes(document.metadata)
        chunks = None if sizes is None else _by_node(sizes, document.metadata)
        for node, data in document.metadata.items():
            self._add(node, data, None if chunks is None else chunks.get(node, {}))

    def _nodes(self, engine: Engine, sizes: dict[str, int]) -> dict[str, Any]:
        keys = sorted(key for key in sizes if key.endswith("/" + NAME))
        if len(keys) > MAX_NODES:
            raise CorruptStoreError(f"{self.url} has more than {MAX_NODES} nodes", url=self.url)
        for key in keys:
            if sizes[key] > MAX_NODE_BYTES:
                raise CorruptStoreError(f"{engine.where(key)} has {sizes[key]} bytes, too many", url=self.url)
        found = {}
        for key, data in zip(keys, engine.get_ranges([Range(key, 0, sizes[key]) for key in keys]), strict=True):
            try:
                found[key[: -len(NAME) - 1]] = msgspec.json.decode(bytes(data))
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise CorruptStoreError(f"{engine.where(key)} is not readable: {error}", url=self.url) from error
        return found

    def _add(self, node: str, data: Any, chunks: dict[str, int] | None) -> None:
        path = self.paths[node]
        if len(path) > MAX_DEPTH:
            raise CorruptStoreError(f"{self.url}: {path_text(path)[:60]}... is nested too deep", url=self.url)
        kind = data.get("node_type") if isinstance(data, dict) else None
        if kind == "group":
            self.document.groups[path] = node
            return
        if kind != "array":
            raise CorruptStoreError(f"{self.url}: {path_text(path)} is neither a group nor an array", url=self.url)
        if kind_of(data) is not None:
            self._add_strings(path, node, data, chunks)
            return
        meta = parse_array(data, path_text(path), self.url, trust=self.trust)
        leaf = Leaf(path, node, meta)
        _find_objects(leaf, chunks)
        if PEER_VALUE in meta.attributes:
            self.values[path] = leaf
            return
        self._check_believable(leaf)
        self.document.leaves[path] = leaf
        for depth in range(1, len(path)):
            self.document.groups.setdefault(path[:depth], "/".join(node.split("/")[:depth]))

    def _add_strings(self, path: Path, node: str, data: Any, chunks: dict[str, int] | None) -> None:
        try:
            array = StringArray(path, node, data, self.url)
        except StoreError as error:
            self.strings[path] = refuse(path, self.url, error)
            return
        _find_objects(array.leaf, chunks)
        self.strings[path], leaves = array.read(self.place.engine, local=self.place.local, leaves=self.leaves)
        self.tensors.update({place: StringsLeaf.over(data) for place, data in leaves.items()})

    def _check_believable(self, leaf: Leaf) -> None:
        """Refuse leaves that declare far more than the storage holds."""
        if not self.wary or not leaf.complete:
            return
        stored, declared = leaf.stored, leaf.spec.nbytes
        chunk = leaf.cut.nbytes
        largest = max((o.size for o in leaf.objects.values()), default=0)
        if declared > max(FREE, RATIO * stored) or (leaf.objects and chunk > max(FREE, RATIO * largest)):
            raise CorruptStoreError(
                f"{self.url}: {path_text(leaf.path)} declares {declared} bytes in chunks of {chunk}, "
                f"of which {stored} are stored",
                url=self.url,
                hint="pass max_bytes= when opening it to allow so many",
            )

    def header(self, read: Callable[[Leaf], Any]) -> Header:
        """Build a header: keys in the order of the store, batch sizes where the tensordict package recorded them."""
        keys: dict[Path, dict[str, None]] = {(): {}}
        for path in [*self.document.groups, *self.document.leaves, *self.values, *self.strings]:
            for depth in range(len(path)):
                keys.setdefault(path[:depth], {})[path[depth]] = None
            if path in self.document.groups:
                keys.setdefault(path, {})
        values: dict[Path, dict[str, Any]] = {}
        for path, leaf in self.values.items():
            values.setdefault(path[:-1], {})[path[-1]] = {"data": self._value(leaf, read)}
        for path, record in self.strings.items():
            values.setdefault(path[:-1], {})[path[-1]] = record
        groups = {}
        for path in sorted(keys, key=len):
            attributes = self.document.attributes
            if path:
                data = self.document.metadata.get(self.document.groups.get(path, ""), {})
                attributes = data.get("attributes", {}) if isinstance(data, dict) else {}
            batch, names = _noted(attributes)
            groups[path] = Group(batch, names, keys=tuple(sorted(keys[path])), values=values.get(path, {}))
        return Header(groups)

    def _value(self, leaf: Leaf, read: Callable[[Leaf], Any]) -> Any:
        where = f"{self.url}: the value {path_text(leaf.path)}"
        how = leaf.meta.attributes[PEER_VALUE]
        encoding = how.get("encoding") if isinstance(how, dict) else how
        if encoding not in ("json", PICKLE):
            raise UntrustedDataError(
                f"{where} is encoded as {encoding!r}, and reading it could run code",
                url=self.url,
                hint="save it again with values that are plain data, or delete it: "
                f"zarr.open_group(store, mode='r+').__delitem__({leaf.node!r})",
            )
        if leaf.spec.nbytes > MAX_VALUE or leaf.meta.data_type != "uint8":
            raise CorruptStoreError(f"{where} is not a value of a sensible size", url=self.url)
        data = np.ascontiguousarray(read(leaf)).tobytes()
        if encoding == PICKLE:
            return pickled_form(data)
        try:
            return encode_value(msgspec.json.decode(data))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError, TypeError) as error:
            raise CorruptStoreError(f"{where} is not readable: {error}", url=self.url) from error


def _find_objects(leaf: Leaf, chunks: dict[str, int] | None) -> None:
    """Record the written objects of an array; `chunks`: None if they are unknown."""
    leaf.complete = chunks is not None
    for key, size in (chunks or {}).items():
        number = leaf.meta.number_of(key)
        if number is not None:
            leaf.objects[number] = Stored(size, UNKNOWN)


def _noted(attributes: Any) -> tuple[tuple[int, ...] | None, tuple[str | None, ...] | None]:
    """Return the batch size that the tensordict package recorded at a group, and the names of its dimensions."""
    noted = attributes.get(PEER) if isinstance(attributes, dict) else None
    if not isinstance(noted, dict):
        return None, None
    sizes, names = noted.get("batch_size"), noted.get("names")
    if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes):
        return None, None
    if not isinstance(names, list) or len(names) != len(sizes):
        return tuple(sizes), None
    named = [name for name in names if name is not None]
    sound = named and all(isinstance(name, str) for name in named) and len(set(named)) == len(named)
    return tuple(sizes), tuple(names) if sound else None


def _by_node(sizes: dict[str, int], nodes: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return the objects of each array, by their key below it."""
    found: dict[str, dict[str, int]] = {node: {} for node in nodes}
    for key, size in sizes.items():
        end = key.rfind("/")
        while end > 0:
            mine = found.get(key[:end])
            if mine is not None:
                mine[key[end + 1 :]] = size
                break
            end = key.rfind("/", 0, end)
    return found


def relist(engine: Engine, leaf: Leaf) -> None:
    """Replace a leaf's objects by those on the storage, without regard to the manifest."""
    start = f"{leaf.node}/"
    leaf.objects.clear()
    for entry in engine.list(start):
        number = leaf.meta.number_of(entry.key[len(start) :])
        if number is not None:
            leaf.objects[number] = Stored(entry.size, UNKNOWN)
