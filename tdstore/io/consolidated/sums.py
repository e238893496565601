"""Checksums of a consolidated file: of its leaves by blocks, of the bytes between them, and of its description.

They end the description, so that they can be renewed in place:

    ..."size":{"tdstore":1,"sums":{"crc":"AAAA","state":"known","self":"0123abcd"}}}
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tdstore.errors import CorruptStoreError
from tdstore.io.consolidated.buffer import Slot
from tdstore.storekit.checksums import BLOCK, Memory, Summer, block_bytes, crc32c
from tdstore.types import Path

SECTOR = 512
_END = re.compile(rb'"sums":\{"crc":"([A-Za-z0-9+/=]*)","state":"(known|stale)","self":"([0-9a-f]{8})"\}\}\}\Z')
_RENEWED = 40
"""Bytes behind the checksums of leaves, at least: state, checksum of the description, brackets."""
Placed = Sequence[tuple[Path, Slot]]
"""The leaves with elements, by position."""


class Seal(NamedTuple):
    """Checksum section of a description."""

    crcs: bytes | None
    """crc32c of each block as little-endian uint32, and of all bytes between leaves at the end; None: stale."""
    start: int
    """Their first position in the text, as base64."""
    stop: int


def blank(placed: Placed) -> dict[str, str]:
    """Return stale checksums with the length of those of these leaves."""
    count = 1 + sum(-(-slot.nbytes // block_bytes(slot.nbytes)) for _, slot in placed)
    return {"crc": base64.b64encode(bytes(4 * count)).decode(), "state": "stale", "self": "0" * 8}


def aligned(text: bytes, at: int) -> bytes:
    """Pad a description so that its last bytes, which are rewritten, lie in one sector of the disk.

    Args:
        text: the description.
        at: the position of the text in the file.
    """
    beyond = (at + len(text)) % SECTOR
    return sealed(b" " * (_RENEWED - beyond) + text if 0 < beyond < _RENEWED else text, None)


def sealed(text: bytes, crcs: bytes | None) -> bytes:
    """Return the same description with these checksums, or with stale ones."""
    found = _END.search(text)
    assert found is not None
    state = b"stale" if crcs is None else b"known"
    digits = found[1] if crcs is None else base64.b64encode(crcs)
    assert len(digits) == len(found[1])
    made = text[: found.start(1)] + digits + text[found.end(1) : found.start(2)] + state + text[found.end(2) :]
    return made[: found.start(3)] + b"%08x" % _own(made, found) + made[found.end(3) :]


def _own(text: bytes, found: re.Match[bytes]) -> int:
    """Compute the crc32c of a description without its own digits, and without those of stale checksums."""
    digits = b"" if text[found.start(2) : found.end(2)] == b"stale" else text[found.start(1) : found.end(1)]
    parts = text[: found.start(1)], digits, text[found.end(1) : found.start(3)], text[found.end(3) :]
    return crc32c(b"\0".join(parts))


def read_seal(text: bytes, placed: Placed, size: int, url: str) -> Seal:
    """Parse the checksums in a description.

    Raises:
        CorruptStoreError: the description is damaged.
    """
    found = _END.search(text)
    if found is None:
        raise CorruptStoreError(f"{url}: the checksums in its description are not readable", url=url, hint=HINT)
    if int(found[3], 16) != (own := _own(text, found)):
        raise CorruptStoreError(
            f"{url}: its description is damaged: its crc32c is {own:08x}, expected {found[3].decode()}",
            url=url,
            hint=HINT,
        )
    unused = sum(stop - start for start, stop in between(placed, size))
    if len(found[1]) != len(blank(placed)["crc"]) or unused > _UNUSED * (len(placed) + 1):
        raise CorruptStoreError(f"{url}: the checksums in its description are not those of its leaves", url=url)
    known = found[2] == b"known"
    return Seal(base64.b64decode(found[1]) if known else None, found.start(1), found.end(1))


_UNUSED = 64
"""Bytes behind a leaf, at most."""
HINT = "restore it from a copy; verify='none' reads it as it is"


# -- the bytes of the file -------------------------------------------------------------------
def crcs_of(fd: int, placed: Placed, size: int) -> Iterator[bytes]:
    """Compute the checksums of each leaf in its stored form, and at the end that of the bytes between leaves.

    Raises:
        EOFError: the file is shorter than `size`.
    """
    pieces = _Pieces(fd, size)
    for _, slot in placed:
        summer = Summer(slot.nbytes)
        for at in range(slot.start, slot.start + slot.nbytes, BLOCK):
            summer.add(pieces.get(at, min(at + BLOCK, slot.start + slot.nbytes)))
        yield summer.sums().crc
    yield crc_between(fd, placed, size)


def crc_between(fd: int, placed: Placed, size: int) -> bytes:
    """Compute the checksum of the bytes that belong to no leaf."""
    pieces, found = _Pieces(fd, size), bytearray()
    for start, stop in between(placed, size):
        found += pieces.get(start, stop).tobytes()
    return crc32c(bytes(found)).to_bytes(4, "little")


def between(placed: Placed, size: int) -> Iterator[tuple[int, int]]:
    """Return the ranges that belong to no leaf: a few unused bytes behind each."""
    at = 0
    for start, stop in [(slot.start, slot.start + slot.nbytes) for _, slot in placed] + [(size, size)]:
        if start > at:
            yield at, start
        at = stop


class _Pieces:
    """Reader of parts of a file, in ascending order, many small ones with one system call."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._size = fd, size
        self._start, self._data = 0, np.empty(0, np.uint8)

    def get(self, start: int, stop: int) -> Memory:
        if not self._start <= start <= stop <= self._start + len(self._data):
            raw = bytearray()
            wanted = min(BLOCK, self._size - start) if stop - start < BLOCK // 64 else stop - start
            while len(raw) < wanted:
                part = os.pread(self._fd, wanted - len(raw), start + len(raw))
                if not part:
                    raise EOFError
                raw += part
            self._start, self._data = start, np.frombuffer(raw, np.uint8)
        return self._data[start - self._start : stop - self._start]
