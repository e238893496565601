"""Messages between ranks: schemas to compare, and a TensorDict's description as JSON. Never pickle.

A whole TensorDict is sent as one JSON document, `{"header": ..., "leaves": [[path, shape, dtype], ...]}`, and the
bytes of its leaves, which the receiver puts into one buffer, each at the next multiple of 64 bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import torch

from tdstore.dtypes import as_dtype, dtype_name
from tdstore.errors import CorruptStoreError, MismatchError
from tdstore.header import Group, Header, header_from_builtins, header_to_builtins
from tdstore.io.blocks import padded
from tdstore.io.consolidated.buffer import BufferStore, Slot
from tdstore.types import LeafSpec, Path, path_text

URL = "a TensorDict that another rank sent"
MAX_TEXT = 1 << 30
"""Longest description that a rank accepts, in bytes."""


# -- schemas -----------------------------------------------------------------------------------
def schema_text(leaves: Sequence[tuple[Path, LeafSpec]], *, consolidated: bool = False) -> bytes:
    """Encode keys, shapes and dtypes as JSON, in their order, and whether the leaves are sent as one buffer."""
    rows = [[list(path), list(spec.shape), dtype_name(spec.dtype)] for path, spec in leaves]
    return msgspec.json.encode({"leaves": rows} | ({"consolidated": True} if consolidated else {}))


def error_text(error: Exception) -> bytes:
    """Encode the reason why a rank cannot take part, in place of its schema."""
    return msgspec.json.encode({"error": f"{type(error).__name__}: {error}"})


def digest(text: bytes) -> tuple[int, int]:
    """Hash a text to two int64."""
    data = hashlib.blake2b(text, digest_size=16).digest()
    return int.from_bytes(data[:8], "little", signed=True), int.from_bytes(data[8:], "little", signed=True)


def differences(mine: bytes, theirs: bytes, me: str, them: str) -> str:
    """Describe the differences of two schemas, or the reason why one is missing."""
    ours, others = (msgspec.json.decode(text) for text in (mine, theirs))
    for message, who in ((ours, me), (others, them)):
        if "error" in message:
            return f"{who} cannot take part: {message['error']}"
    if ours.get("consolidated", False) != others.get("consolidated", False):
        one, each = (me, them) if ours.get("consolidated", False) else (them, me)
        return f"{one} was called with consolidated=True, {each} without"
    a = {tuple(path): (shape, dtype) for path, shape, dtype in ours["leaves"]}
    b = {tuple(path): (shape, dtype) for path, shape, dtype in others["leaves"]}
    found = [f"{path_text(path)} is on {me} only" for path in a if path not in b]
    found += [f"{path_text(path)} is on {them} only" for path in b if path not in a]
    for path in a:
        if path in b and a[path] != b[path]:
            found.append(f"{path_text(path)} is {a[path][1]} {a[path][0]} on {me}, {b[path][1]} {b[path][0]} on {them}")
    more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
    return "; ".join(found[:5]) + more


# -- whole TensorDicts -------------------------------------------------------------------------
def encode_message(groups: Mapping[Path, Group], specs: Mapping[Path, LeafSpec]) -> bytes:
    """Encode the description of a TensorDict."""
    leaves = [[list(path), list(spec.shape), dtype_name(spec.dtype)] for path, spec in specs.items()]
    return msgspec.json.encode({"header": header_to_builtins(Header(groups)), "leaves": leaves})


def decode_message(data: bytes) -> tuple[Header, dict[Path, LeafSpec]]:
    """Decode the result of `encode_message`.

    Raises:
        CorruptStoreError: `data` is not such a message.
    """
    try:
        message = msgspec.json.decode(data)
        header = header_from_builtins(message["header"], url=URL)
        rows = msgspec.convert(message["leaves"], list[tuple[tuple[str, ...], tuple[int, ...], str]])
        specs = {path: LeafSpec(shape, as_dtype(dtype)) for path, shape, dtype in rows}
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptStoreError(f"the description of {URL} is not readable: {error}", url=URL) from error
    if sum(padded(spec.nbytes) for spec in specs.values()) >= 2**62:
        raise CorruptStoreError(f"{URL} claims to have more bytes than any machine", url=URL)
    return header, specs


def refuse_error(text: bytes, rank: int) -> None:
    """Raise the error that the sender sent in place of a description.

    Raises:
        MismatchError: it could not send.
    """
    try:
        message = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return  # told by decode_message
    if isinstance(message, dict) and "error" in message:
        raise MismatchError(f"rank {rank} of the group cannot send its TensorDict: {message['error']}")


def new_store(header: Header, specs: Mapping[Path, LeafSpec], device: torch.device) -> BufferStore:
    """Create a store for the leaves about to arrive: views of one new buffer."""
    slots: dict[Path, Slot] = {}
    start = 0
    for path, spec in specs.items():
        slots[path] = Slot(spec.dtype, spec.shape, start, spec.nbytes, padded(spec.nbytes) - spec.nbytes)
        start = slots[path].stop
    return BufferStore(URL, header, slots, torch.empty(start, dtype=torch.uint8, device=device))
