"""The metadata of every node after a commit, as zarr-python, xarray and the tensordict package read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from tdstore.engine import Engine
from tdstore.errors import CorruptStoreError, StoreNotFoundError
from tdstore.header import Group, Header
from tdstore.types import Path
from tdstore_zarr.codec.codecs import Pipeline
from tdstore_zarr.codec.metadata import ArrayMeta
from tdstore_zarr.layout.document import PEER, PEER_VALUE
from tdstore_zarr.layout.leaf import Leaf, Stored, seal
from tdstore_zarr.layout.names import Names

Metadata = dict[str, Any]


@dataclass
class Wanted:
    """The intended nodes of a store."""

    metadata: Metadata
    root: dict[str, Any]
    """Attributes of the root that are not ours alone."""
    groups: dict[Path, str]
    copies: dict[str, Leaf]
    values: dict[str, bytes]
    """Content of each copy."""


def wanted_nodes(header: Header, leaves: dict[Path, Leaf], names: Names, keys: tuple[str, str]) -> Wanted:
    """Describe every node of a store with this header and these leaves."""
    groups: dict[Path, None] = dict.fromkeys(header.groups)
    for path in leaves:
        for depth in range(len(path)):
            groups.setdefault(path[:depth])
    found = Wanted({}, {}, {}, {}, {})
    for path in groups:
        if path in leaves:
            continue  # a header may list more than the store holds
        attributes = _tensordict_attributes(header.groups.get(path))
        if not path:
            found.root = attributes
            continue
        node = found.groups[path] = names.node(path)
        found.metadata[node] = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    for path, leaf in leaves.items():
        leaf.meta.names = dimension_names(leaf, header.groups.get(path[:-1]))
        found.metadata[leaf.node] = leaf.meta.to_json()
    for path, text in _plain_values(header).items():
        if path not in leaves and path not in groups:
            copy = _copy(path, names.node(path), text, keys)
            found.copies[copy.node], found.values[copy.node] = copy, text
            found.metadata[copy.node] = copy.meta.to_json()
    return found


def dimension_names(leaf: Leaf, group: Group | None) -> tuple[str, ...]:
    """Return a name for each dimension: xarray needs them all, and those of one group must agree in size."""
    batch = (group.batch_size if group is not None else None) or ()
    group_names = (group.names if group is not None else None) or (None,) * len(batch)
    shape = leaf.meta.shape
    found: list[str] = []
    for dim in range(len(shape)):
        if dim < len(batch) and batch[: dim + 1] == shape[: dim + 1]:
            name = group_names[dim] or f"batch_{dim}"
        else:
            name = f"{leaf.path[-1]}_dim_{dim}"
        while name in found:
            name += "_"
        found.append(name)
    return tuple(found)


def _tensordict_attributes(group: Group | None) -> dict[str, Any]:
    if group is None or group.batch_size is None:
        return {}
    names = {} if group.names is None else {"names": list(group.names)}
    return {PEER: {"batch_size": list(group.batch_size), "version": 1, **names}}


def _plain_values(header: Header) -> dict[Path, bytes]:
    """Return the values of the header that are plain JSON."""
    found = {}
    for path, group in header.groups.items():
        for key, record in group.values.items():
            if isinstance(record, dict) and set(record) == {"data"} and not _tagged(record["data"]):
                found[*path, key] = msgspec.json.encode(record["data"])
    return found


def _tagged(data: Any, depth: int = 0) -> bool:
    """Check whether a value has forms that other programs would not understand."""
    if depth > 64:
        return True
    if isinstance(data, dict):
        return any(k.startswith("$") for k in data) or any(_tagged(v, depth + 1) for v in data.values())
    return isinstance(data, list) and any(_tagged(v, depth + 1) for v in data)


def _copy(path: Path, node: str, text: bytes, keys: tuple[str, str]) -> Leaf:
    pipeline = Pipeline()
    size = (len(text),)
    meta = ArrayMeta(
        size, torch.uint8, "uint8", b"\0", size, size, pipeline=pipeline, codecs=pipeline.codecs(1), keys=keys,
        attributes={PEER_VALUE: {"encoding": "json"}}, names=(f"{path[-1]}_bytes",),
    )  # fmt: skip
    return Leaf(path, node, meta, {0: Stored(len(text), seal(text))})


def put_copies(engine: Engine, wanted: Wanted, there: Metadata) -> None:
    """Write the content of copies that are new or changed.

    Args:
        engine: the engine of the store.
        wanted: the intended nodes.
        there: the metadata of the existing nodes.
    """
    for node, copy in wanted.copies.items():
        text = wanted.values[node]
        if there.get(node) == wanted.metadata[node]:
            try:
                if engine.get(copy.key(0), len(text)).data == text:
                    continue
            except (StoreNotFoundError, CorruptStoreError):
                there = {}  # removed, or of another size: it is written again
        engine.put(copy.key(0), text)
