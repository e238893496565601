"""What goes over the wire between ranks: schemas to compare, and a TensorDict's description as JSON. Never pickle.

A whole TensorDict travels as one JSON document, `{"header": ..., "leaves": [[path, shape, dtype], ...]}`, and the
bytes of its leaves, which the receiver puts into one buffer, each at the next multiple of 64 bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from tdstore.dtypes import as_dtype, dtype_name
from tdstore.errors import CorruptStoreError, MismatchError
from tdstore.header import Group, Header, header_from_builtins, header_to_builtins
from tdstore.io.blocks import padded
from tdstore.rows import gather
from tdstore.store import Cap, Store
from tdstore.types import LeafSpec, Path, Read, Write, path_text

URL = "a TensorDict that another rank sent"
MAX_TEXT = 1 << 30
"""Longest description that a rank accepts, in bytes."""


# -- schemas -----------------------------------------------------------------------------------
def schema_text(leaves: Sequence[tuple[Path, LeafSpec]]) -> bytes:
    """Keys, shapes and dtypes as JSON, in the order given."""
    rows = [[list(path), list(spec.shape), dtype_name(spec.dtype)] for path, spec in leaves]
    return msgspec.json.encode({"leaves": rows})


def error_text(error: Exception) -> bytes:
    """Why a rank cannot take part, in place of its schema."""
    return msgspec.json.encode({"error": f"{type(error).__name__}: {error}"})


def digest(text: bytes) -> tuple[int, int]:
    """Two int64 that tell two texts apart."""
    data = hashlib.blake2b(text, digest_size=16).digest()
    return int.from_bytes(data[:8], "little", signed=True), int.from_bytes(data[8:], "little", signed=True)


def differences(mine: bytes, theirs: bytes, me: str, them: str) -> str:
    """In words, where two schemas differ (or why one is missing)."""
    ours, others = (msgspec.json.decode(text) for text in (mine, theirs))
    for said, who in ((ours, me), (others, them)):
        if "error" in said:
            return f"{who} cannot take part: {said['error']}"
    a = {tuple(path): (shape, dtype) for path, shape, dtype in ours["leaves"]}
    b = {tuple(path): (shape, dtype) for path, shape, dtype in others["leaves"]}
    told = [f"{path_text(path)} is on {me} only" for path in a if path not in b]
    told += [f"{path_text(path)} is on {them} only" for path in b if path not in a]
    for path in a:
        if path in b and a[path] != b[path]:
            told.append(f"{path_text(path)} is {a[path][1]} {a[path][0]} on {me}, {b[path][1]} {b[path][0]} on {them}")
    more = f" (and {len(told) - 5} more)" if len(told) > 5 else ""
    return "; ".join(told[:5]) + more


# -- whole TensorDicts -------------------------------------------------------------------------
def encode_message(groups: Mapping[Path, Group], specs: Mapping[Path, LeafSpec]) -> bytes:
    """The description of a TensorDict."""
    leaves = [[list(path), list(spec.shape), dtype_name(spec.dtype)] for path, spec in specs.items()]
    return msgspec.json.encode({"header": header_to_builtins(Header(groups)), "leaves": leaves})


def decode_message(data: bytes) -> tuple[Header, dict[Path, LeafSpec]]:
    """What `encode_message` was given.

    Raises:
        CorruptStoreError: not such a message.
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
    """Raise what the sender has to say in place of a description.

    Raises:
        MismatchError: it could not send.
    """
    try:
        message = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return  # told by decode_message
    if isinstance(message, dict) and "error" in message:
        raise MismatchError(f"rank {rank} of the group cannot send its TensorDict: {message['error']}")


class ReceivedStore(Store):
    """Leaves that are views of one buffer."""

    caps = Cap.VIEW | Cap.PARTIAL_READ | Cap.CONCURRENT_READ

    def __init__(self, header: Header, specs: Mapping[Path, LeafSpec], device: torch.device) -> None:
        self.url = URL
        self.writable = False
        self.device = device
        if device.type != "cpu":
            self.caps = ReceivedStore.caps | Cap.DIRECT_DEVICE  # type: ignore[misc]
        self._header = header
        self._specs = dict(specs)
        self.buffer = torch.empty(sum(padded(spec.nbytes) for spec in specs.values()), dtype=torch.uint8, device=device)
        self._starts: dict[Path, int] = {}
        start = 0
        for path, spec in specs.items():
            self._starts[path] = start
            start += padded(spec.nbytes)

    def paths(self) -> Iterator[Path]:
        """The leaves."""
        return iter(self._specs)

    def specs(self, paths: Sequence[Path]) -> list[LeafSpec]:
        """Their shapes and dtypes."""
        return [self._specs[path] for path in paths]

    def load_header(self) -> Header:
        """The header that came with them."""
        return self._header

    def view(self, path: Path) -> Tensor:
        """A leaf, where it lies in the buffer."""
        spec, start = self._specs[path], self._starts[path]
        return self.buffer[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """Copies of rows."""
        return [gather(self.view(read.path), read.index, read.out) for read in reads]

    def save_header(self, header: Header) -> None:
        """Refused: see `caps`."""
        raise self.unsupported(Cap.WRITE)

    def create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        """Refused: see `caps`."""
        raise self.unsupported(Cap.WRITE)

    def write(self, writes: Sequence[Write]) -> None:
        """Refused: see `caps`."""
        raise self.unsupported(Cap.WRITE)

    def delete(self, paths: Sequence[Path]) -> None:
        """Refused: see `caps`."""
        raise self.unsupported(Cap.WRITE)

    def close(self) -> None:
        """Nothing to let go of: the views keep the buffer."""
