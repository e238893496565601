"""The catalogue: the place of each leaf in the arena, and the header, as one JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch

from tdstore.dtypes import NAME_TO_DTYPE, dtype_name
from tdstore.errors import CorruptStoreError, OptionError
from tdstore.header import MAX_BYTES, MAX_DEPTH, Header, header_from_builtins, header_to_builtins
from tdstore.types import LeafSpec, Path, path_text
from tdstore.values import decode_value, encode_value

ALIGN = 64
MAX_LEAVES = 1_000_000
MAX_LENGTH = 1 << 48


class Entry(NamedTuple):
    """One leaf: its spec and its place. Cheaper to make than a `LeafSpec`: a message may bring hundreds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Any
    offset: int
    """In the arena. Space is never given out twice, so this names the leaf as well."""


class Catalogue(msgspec.Struct, frozen=True):
    """The contents of a store, at one generation; 0 before the first commit."""

    generation: int = 0
    entries: Mapping[Path, Entry] = msgspec.field(default_factory=dict)
    header: Header = msgspec.field(default_factory=Header)
    end: int = 0
    """Where the last leaf ends."""
    specs: Mapping[Path, LeafSpec] = msgspec.field(default_factory=dict)


class _Row(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A leaf in the JSON document."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    offset: int
    fill: Any = 0


class _Document(msgspec.Struct, frozen=True):
    """The fields of the JSON document."""

    leaves: list[_Row]
    header: Any = None


_decoder = msgspec.json.Decoder(_Document)


def encode_catalogue(entries: Mapping[Path, Entry], header: Header, *, url: str) -> bytes:
    """Encode the catalogue as JSON.

    Raises:
        OptionError: larger than readers accept.
    """
    rows = [
        _Row(path, dtype_name(e.dtype), e.shape, e.offset, encode_value(e.fill) if e.fill else 0)
        for path, e in entries.items()
    ]
    data = msgspec.json.encode(_Document(rows, header_to_builtins(header) if header else None))
    if len(data) > MAX_BYTES or len(rows) > MAX_LEAVES:
        raise OptionError(
            f"the header and the {len(rows)} leaves of {url} take {len(data)} bytes to describe; "
            f"a store may have {MAX_LEAVES} leaves in {MAX_BYTES} bytes",
            url=url,
            hint="store large non-tensor values as uint8 leaves",
        )
    return data


Decoded = tuple[Mapping[Path, Entry], Header, int, Mapping[Path, LeafSpec]]


@lru_cache(64)
def decode_catalogue(data: bytes, *, start: int, size: int, url: str) -> Decoded:
    """Parse and check a catalogue: every leaf is between `start` and `size` of the arena, and none overlap.

    Cached, since the batches of a stream differ in their data only.

    Raises:
        CorruptStoreError: anything else.
    """
    try:
        document = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptStoreError(f"the catalogue of {url} is not readable: {error}", url=url) from error
    if len(document.leaves) > MAX_LEAVES:
        raise CorruptStoreError(f"the catalogue of {url} has {len(document.leaves)} leaves", url=url)
    entries: dict[Path, Entry] = {}
    ranges = []
    for row in document.leaves:
        entry = _entry(row, url)
        end = row.offset + max(prod(row.shape) * entry.dtype.itemsize, 1)
        if row.offset % ALIGN or row.offset < start or end > size:
            raise CorruptStoreError(
                f"{path_text(row.path)} of {url} should be bytes {row.offset} to {end}, but leaves are between "
                f"{start} and {size} in steps of {ALIGN}",
                url=url,
            )
        if row.path in entries:
            raise CorruptStoreError(f"the catalogue of {url} names {path_text(row.path)} twice", url=url)
        entries[row.path] = entry
        ranges.append((row.offset, end, row.path))
    ranges.sort()
    for (_, end, path), (begin, _, other) in pairwise(ranges):
        if begin < end:
            raise CorruptStoreError(f"{path_text(path)} and {path_text(other)} of {url} overlap", url=url)
    header = Header() if document.header is None else header_from_builtins(document.header, url=url)
    made = LeafSpec.of_checked
    specs = {path: made(e.shape, e.dtype, e.fill, prod(e.shape) * e.dtype.itemsize) for path, e in entries.items()}
    return MappingProxyType(entries), header, ranges[-1][1] if ranges else 0, MappingProxyType(specs)


def check_path(path: Path, url: str) -> None:
    """Refuse a path that the catalogue cannot represent."""
    try:
        "".join(path).encode()
    except UnicodeEncodeError:
        raise OptionError(
            f"the key {path_text(path)} has a lone surrogate and cannot be stored in {url}", url=url, hint="rename it"
        ) from None
    if not 0 < len(path) <= MAX_DEPTH:
        raise OptionError(f"{path_text(path)} has {len(path)} parts; a leaf has 1 to {MAX_DEPTH}", url=url)


def _entry(row: _Row, url: str) -> Entry:
    if not 0 < len(row.path) <= MAX_DEPTH:
        raise CorruptStoreError(f"the catalogue of {url} has a path of {len(row.path)} parts", url=url)
    dtype = NAME_TO_DTYPE.get(row.dtype)
    if dtype is None:
        raise CorruptStoreError(f"{path_text(row.path)} of {url} has the unknown dtype {row.dtype!r}", url=url)
    # Each factor bounded: a huge dimension beside a 0 has no bytes, but overflows in torch.
    shape = row.shape
    if shape and (min(shape) < 0 or max(shape) > MAX_LENGTH or len(shape) > 64):
        raise CorruptStoreError(f"{path_text(row.path)} of {url} has the shape {shape}", url=url)
    return Entry(shape, dtype, _fill(row, url), row.offset)


def _fill(row: _Row, url: str) -> bool | int | float | complex:
    if type(row.fill) is int:
        return row.fill
    try:
        fill = decode_value(row.fill)
    except (TypeError, ValueError, KeyError) as error:
        raise CorruptStoreError(f"{path_text(row.path)} of {url} has no readable fill value", url=url) from error
    if not isinstance(fill, (bool, int, float, complex)):
        raise CorruptStoreError(f"{path_text(row.path)} of {url} has the fill value {fill!r}", url=url)
    return fill
