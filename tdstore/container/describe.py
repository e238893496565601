"""A container as a store sees it: group records and leaf specs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tdstore.container.core import GROUP, LEAF
from tdstore.container.nontensor import NonTensor, NonTensorData, from_json
from tdstore.errors import UnsupportedError, UntrustedDataError
from tdstore.header import Group
from tdstore.hookspecs import Codec
from tdstore.registry import registry
from tdstore.types import LeafSpec, Path, path_text
from tdstore.values import decode_value, encode_value

STACK_KIND = "LazyStackedTensorDict"
"""How the header calls the groups that are lazy stacks, whose own groups are the elements."""


def describe(td: Any, prefix: Path = ()) -> tuple[dict[Path, Group], dict[Path, LeafSpec]]:
    """Group records and leaf specs of a container, by path under `prefix`. Reads no data.

    Raises:
        UntrustedDataError: a value that is not plain data; the message names its key.
    """
    groups: dict[Path, Group] = {}
    specs: dict[Path, LeafSpec] = {}
    for path, node in _nodes(td, prefix):
        if (record := node._own_record()) is not None:
            groups[path] = record
            continue
        values: dict[str, Any] = {}
        for key in node._first_keys():
            kind = node._kind(key)
            if kind == LEAF:
                shape, device, dtype, *_ = node._leaf_facts(key)
                specs[(*path, key)] = _spec((*path, key), shape, device, dtype, node)
            elif kind != GROUP:
                values[key] = value_json(node._raw(key), (*path, key))
        groups[path] = group_of(node, values)
    return groups, specs


def _spec(path: Path, shape: Any, device: Any, dtype: torch.dtype, node: Any) -> LeafSpec:
    layout = node._leaf_layout(path[-1])
    if device.type == "meta" or layout != torch.strided:
        what = "has no data (it is on the meta device)" if device.type == "meta" else f"has the layout {layout}"
        raise UnsupportedError(
            f"entry {path_text(path)} {what} and cannot be stored", hint="store dense tensors, or exclude the key"
        )
    try:
        return LeafSpec(shape, dtype)
    except TypeError as error:
        raise UnsupportedError(f"entry {path_text(path)}: {error}", hint="cast it, or exclude the key") from None


def group_of(node: Any, values: dict[str, Any]) -> Group:
    """The record of one level."""
    return Group(
        batch_size=tuple(node.batch_size),
        names=node._dim_names(),
        device=None if node.device is None else str(node.device),
        keys=tuple(node._first_keys()),
        values=values,
    )


def value_json(value: NonTensor, path: Path) -> Any:
    """The envelope of a value; an error that names its key if it is not plain data."""
    try:
        codec = _codec_of(value)
        if codec is not None:
            return {"codec": codec.name, "data": encode_value(codec.encode(value.plain()))}
        return value.to_json()
    except (TypeError, ValueError) as error:
        raise UntrustedDataError(
            f"the value {path_text(path)} cannot be stored: {error}",
            hint="store plain data (numbers, strings, lists, dicts, bytes, ...), or exclude the key before saving",
        ) from error


def _codec_of(value: NonTensor) -> Codec | None:
    """The plugin's codec for one value that is not plain data."""
    if not isinstance(value, NonTensorData) or type(value.data).__module__ == "builtins":
        return None
    return next((c for c in registry().codecs() if c.kind is type(value.data)), None)


def decoded(envelope: Any, batch_size: torch.Size) -> NonTensor:
    """The entry that `value_json` described.

    Raises:
        ValueError: malformed. UntrustedDataError: no installed plugin brings its codec.
    """
    if not isinstance(envelope, dict) or "codec" not in envelope:
        return from_json(envelope, batch_size)
    codec = next((c for c in registry().codecs() if c.name == envelope["codec"]), None)
    if codec is None:
        raise UntrustedDataError(
            f"the codec {envelope['codec']!r} is not installed", hint="install the plugin that wrote this value"
        )
    return NonTensorData(codec.decode(decode_value(envelope["data"])), batch_size)


def _nodes(td: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    yield path, td
    for key, group in td._stored_groups():
        yield from _nodes(group, (*path, key))
