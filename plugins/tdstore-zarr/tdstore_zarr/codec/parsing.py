"""Fast parsing of the arrays of a large store: arrays whose metadata differs in names only are parsed once."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import msgspec

from tdstore.errors import CorruptStoreError
from tdstore.types import LeafSpec, Path, path_text
from tdstore_zarr.codec.metadata import ArrayMeta, parse_array
from tdstore_zarr.layout.leaf import Cut


class _Node(msgspec.Struct):
    """The `zarr.json` of an array, as text except for the parts that differ from array to array."""

    node_type: Literal["array"]
    shape: msgspec.Raw
    data_type: msgspec.Raw
    chunk_grid: msgspec.Raw
    chunk_key_encoding: msgspec.Raw
    fill_value: msgspec.Raw
    codecs: msgspec.Raw
    attributes: msgspec.Raw = msgspec.Raw(b"{}")
    storage_transformers: msgspec.Raw = msgspec.Raw(b"[]")
    dimension_names: list[str | None] | None = None


class Parsed(NamedTuple):
    """An array, and values derived from its metadata."""

    meta: ArrayMeta
    spec: LeafSpec
    cut: Cut
    most: int
    """How many objects it may have."""


class ArrayParser:
    """Parse the arrays of one store."""

    def __init__(self, url: str, trust: bool) -> None:
        self.url = url
        self.trust = trust
        self._decode = msgspec.json.Decoder(_Node).decode
        self._seen: dict[tuple[bytes, ...], Parsed] = {}

    def parse(self, data: Any, path: Path) -> Parsed:
        """Check the metadata of an array, decoded or as text (`msgspec.Raw`).

        Raises:
            CorruptStoreError, UnsupportedError: as `parse_array`.
        """
        if not isinstance(data, msgspec.Raw):
            return self._parse(data, path)
        try:
            node = self._decode(data)
        except (msgspec.ValidationError, RecursionError):
            return self._parse(self._whole(data, path), path)  # which raises the specific error
        parts = (
            node.shape, node.data_type, node.chunk_grid, node.chunk_key_encoding, node.fill_value, node.codecs,
            node.attributes, node.storage_transformers,
        )  # fmt: skip
        key = tuple(map(bytes, parts))
        found = self._seen.get(key)
        names = node.dimension_names
        if found is None or (names is not None and len(names) != len(found.meta.shape)):
            found = self._parse(self._whole(data, path), path)
            self._seen[key] = found
            return found
        return Parsed(found.meta.named(None if names is None else tuple(names)), found.spec, found.cut, found.most)

    def _whole(self, data: msgspec.Raw, path: Path) -> Any:
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptStoreError(
                f"{self.url}: the metadata of {path_text(path)} is not readable: {error}", url=self.url
            ) from error

    def _parse(self, data: Any, path: Path) -> Parsed:
        where = f"leaf {path_text(path)}"
        if not isinstance(data, dict) or data.get("node_type") != "array":
            raise CorruptStoreError(f"{self.url}: {where} has no array", url=self.url, hint="restore it from a copy")
        meta = parse_array(data, where, self.url, trust=self.trust)
        cut = Cut.of(meta)
        return Parsed(meta, meta.spec(), cut, math.prod(cut.grid))
