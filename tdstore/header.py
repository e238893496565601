"""The header: everything about a TensorDict that is not array data, as one small JSON document.

Groups are a flat list of (path, record): the depth of a TensorDict is a number to check, not a recursion.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tdstore.errors import CorruptStoreError
from tdstore.types import Path, path_text

FORMAT_VERSION = 1
MAX_DEPTH = 256
MAX_BYTES = 64 << 20
MAX_GROUPS = 1_000_000
NESTED_VALUES, NESTED_SPANS, NESTED_SHAPES = "nested.values", "nested.spans", "nested.shapes"
"""Names of the leaves below the key of a nested tensor."""
VALUE_KIND, VALUE_KEY = "NonTensorData", "data"
"""The kind of the group that holds a value by itself, and the key of its only entry, the value."""


class Group(msgspec.Struct, frozen=True, omit_defaults=True):
    """One nested TensorDict as the header keeps it."""

    batch_size: tuple[int, ...] | None = None
    """None when the writer did not say: the reader infers the largest common shape."""
    names: tuple[str | None, ...] | None = None
    device: str | None = None
    kind: str = "TensorDict"
    """What the group is: "TensorDict", "LazyStackedTensorDict", `VALUE_KIND`, or "tensorclass:" and the qualified name
    of a class. A name to look up among the classes that this process has declared, never one to import."""
    keys: tuple[str, ...] = ()
    """First-level entries in order: leaves, groups and values."""
    values: dict[str, Any] = {}
    """Non-tensor entries: key -> JSON as `values.encode_value` makes it, in a value record."""
    extra: dict[str, Any] = {}
    """Room for what a container class must keep beside its entries (a lazy stack's dimension, ...)."""


@dataclass(frozen=True, slots=True)
class Header:
    """Group records by path. Falsy when nothing was ever saved."""

    groups: Mapping[Path, Group] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.groups)


def encode_header(header: Header) -> bytes:
    """Encode the header as JSON (UTF-8)."""
    return msgspec.json.encode(header_to_builtins(header))


def header_to_encode(header: Header) -> dict[str, Any]:
    """Return what `header_to_builtins` does as far as a JSON encoder can tell: it takes groups as they are."""
    return {"format": FORMAT_VERSION, "groups": list(header.groups.items())}


def header_to_builtins(header: Header) -> dict[str, Any]:
    """Return the header as plain dicts and lists, to be part of a larger document."""
    groups = [[list(path), msgspec.to_builtins(group)] for path, group in header.groups.items()]
    return {"format": FORMAT_VERSION, "groups": groups}


def decode_header(data: bytes, *, url: str = "?") -> Header:
    """Parse what `encode_header` wrote; never recurses deeper than the JSON parser's own limit.

    Raises:
        CorruptStoreError: too large, not JSON, wrong types, a group twice, too deep.
    """
    if len(data) > MAX_BYTES:
        raise CorruptStoreError(f"the header of {url} has {len(data)} bytes, more than {MAX_BYTES}", url=url)
    try:
        with without_collection():
            plain = msgspec.json.decode(data)
        return header_from_builtins(plain, url=url)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptStoreError(f"the header of {url} is not readable: {error}", url=url) from error


FEW_BYTES, FEW_GROUPS = 64 << 10, 256
"""Documents of up to so many bytes or groups are decoded with the garbage collector on: they hardly make it run."""
_PAIRS = list[tuple[tuple[str, ...], Group]]


def header_from_builtins(data: Any, *, url: str = "?") -> Header:
    """Check and convert the result of `header_to_builtins`."""
    try:
        version = data["format"]
        if version != FORMAT_VERSION:
            raise CorruptStoreError(
                f"{url} has header format {str(version)[:40]!r}, this tdstore reads {FORMAT_VERSION}",
                url=url,
                hint="a newer tdstore wrote it: upgrade this one",
            )
        if len(data["groups"]) > MAX_GROUPS:
            raise CorruptStoreError(f"the header of {url} has more than {MAX_GROUPS} groups", url=url)
        if len(data["groups"]) < FEW_GROUPS:
            pairs = msgspec.convert(data["groups"], _PAIRS)
        else:
            with without_collection():
                pairs = msgspec.convert(data["groups"], _PAIRS)
    except (KeyError, TypeError, msgspec.ValidationError, RecursionError) as error:
        raise CorruptStoreError(f"the header of {url} is malformed: {error}", url=url) from error
    return Header(_checked(pairs, url))


class without_collection:  # noqa: N801 - reads as a statement: `with without_collection():`
    """Keep the garbage collector from counting a million new lists over and over: three quarters of the time."""

    __slots__ = ("_on",)

    def __enter__(self) -> None:
        self._on = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        if self._on:
            gc.enable()


def _checked(pairs: Iterable[tuple[Path, Group]], url: str) -> dict[Path, Group]:
    groups: dict[Path, Group] = {}
    for path, group in pairs:
        if len(path) > MAX_DEPTH:
            raise CorruptStoreError(f"a group of {url} is nested more than {MAX_DEPTH} levels deep", url=url)
        if path in groups:
            raise CorruptStoreError(f"the header of {url} describes {path_text(path)} twice", url=url)
        if path and path[:-1] not in groups:
            raise CorruptStoreError(f"the header of {url} describes {path_text(path)} without its parent", url=url)
        if group.batch_size and min(group.batch_size) < 0:
            raise CorruptStoreError(f"{path_text(path)} of {url} has batch size {group.batch_size}", url=url)
        if group.names is not None and len(group.names) != len(group.batch_size or ()):
            raise CorruptStoreError(f"{path_text(path)} of {url} has names that do not fit its batch size", url=url)
        groups[path] = group
    return groups
