"""The safetensors format: eight bytes of length, a JSON header, and the tensors one after the other."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

from tdstore.dtypes import dtype_name
from tdstore.errors import CorruptStoreError, OptionError, UnsupportedError
from tdstore.types import LeafSpec

MAX_HEADER = 100_000_000
"""Longer headers the safetensors library does not read either."""

TAGS = "BOOL U8 I8 U16 I16 U32 I32 U64 I64 F16 BF16 F32 F64 C64 F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0".split()
NAMES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()
DTYPES = dict(zip(TAGS, NAMES, strict=True))
"""What the format calls a dtype -> what tdstore calls it."""


def header_length(first: bytes, file_bytes: int, url: str) -> int:
    """Read the length of the header off the first eight bytes of a file; never more than the file has."""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(MAX_HEADER, file_bytes - 8):
        raise CorruptStoreError(
            f"{url} is not a safetensors file, or is cut short: its header would have {length} bytes, and the file "
            f"has {file_bytes}",
            url=url,
        )
    return length


def parse(text: bytes, data_bytes: int, url: str) -> tuple[dict[str, tuple[LeafSpec, int]], dict[str, str]]:
    """Read a header: spec and offset of each tensor by name, in the order of the header, and the metadata.

    Everything that a header claims is checked here, so that nothing later can leave the file.
    """
    try:
        header = json.loads(text.decode(), object_pairs_hook=_without_repeats)
        metadata = {key: _text(value) for key, value in (header.pop("__metadata__", None) or {}).items()}
        tensors = {name: _tensor(name, facts, url) for name, facts in header.items()}
        end = 0
        for spec, start in sorted(tensors.values(), key=lambda tensor: (tensor[1], tensor[0].nbytes)):
            if start != end:
                raise ValueError(f"tensors overlap, or leave a hole, at byte {min(start, end)} of the data")
            end += spec.nbytes
        if end != data_bytes:
            raise ValueError(f"the header promises {end} bytes of data, and the file has {data_bytes}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptStoreError(f"{url} is damaged: {error or type(error).__name__}", url=url) from error
    return tensors, metadata


def _tensor(name: str, facts: Any, url: str) -> tuple[LeafSpec, int]:
    shape, (start, stop) = facts["shape"], facts["data_offsets"]
    if facts["dtype"] not in DTYPES:
        raise UnsupportedError(f"{name!r} of {url} has the dtype {facts['dtype']}, which tdstore lacks", url=url)
    # A dimension of 0 hides the size of the others, and torch computes with 64 bits.
    if any(type(n) is not int or n < 0 for n in [*shape, start, stop]) or math.prod(n or 1 for n in shape) >= 1 << 59:
        raise ValueError(f"{name!r} has the shape {shape} and the offsets {[start, stop]}")
    spec = LeafSpec(shape, DTYPES[facts["dtype"]])
    if stop - start != spec.nbytes:
        raise ValueError(f"{name!r} takes {spec.nbytes} bytes, and its offsets are {[start, stop]}")
    return spec, start


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = {_text(key): value for key, value in pairs}
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in the header")
    return found


def _text(value: str) -> str:
    value.encode()  # half a surrogate pair is no text: it could neither be printed nor written again
    return value


CARRIED = {"complex128": "F64", "complex32": "F16"}
"""The format has no such dtypes: they are written as pairs of real numbers, and tdstore's document says so."""


def build(specs: Mapping[str, LeafSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Make what a file begins with, and say where each tensor goes, counted from the beginning of the file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, end = {}, 0
    # Wide elements first: each tensor then begins at a multiple of its element's size.
    for name in sorted(specs, key=lambda name: -specs[name].dtype.itemsize):
        spec, dtype = specs[name], dtype_name(specs[name].dtype)
        shape = [*spec.shape, 2] if dtype in CARRIED else [*spec.shape]
        starts[name], end = end, end + spec.nbytes
        header[name] = {
            "dtype": CARRIED.get(dtype) or TAGS[NAMES.index(dtype)],
            "shape": shape,
            "data_offsets": [starts[name], end],
        }
    try:
        text = json.dumps(header, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"a key has half a surrogate pair, which is no text: {error}", hint="rename it") from error
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise UnsupportedError(f"a safetensors header has at most {MAX_HEADER} bytes; this one has {len(text)}")
    begin = struct.pack("<Q", len(text)) + text
    return begin, {name: len(begin) + start for name, start in starts.items()}
