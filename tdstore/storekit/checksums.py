"""crc32c checksums of leaves: one per block, and one of the tips, which detects a swapped file by one small read.

A leaf of up to 4 MiB is one block. Larger leaves have blocks of 64 KiB, so that a read of few rows compares little.

A hole of a sparse file is not read: its blocks have the checksum of zeros.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from tdstore.dtypes import to_numpy

BLOCK = 4 << 20
"""Largest block, and how much is read at once."""
FINE = 64 << 10
"""Smallest block of a leaf that has more than one."""
MOST_BLOCKS = 1 << 18
"""Blocks are longer for leaves that would have more of them."""
TIP = 4096
SHORT = 3 * TIP
"""Most bytes of a leaf of which the tips are all of it."""

Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Sums:
    """Checksums of one leaf; immutable.

    Args:
        crc: little-endian uint32 crc32c of each block; or the same as base64, which is decoded when it is needed.
        tips: crc32c of the first, middle and last 4 KiB together (of all bytes if there are at most 12 KiB).
        block: bytes of a block; the last one may be short.
    """

    __slots__ = ("_crc", "block", "tips")

    def __init__(self, crc: bytes | str, tips: int, block: int = BLOCK) -> None:
        self._crc = crc
        self.tips = tips
        self.block = block

    @property
    def crc(self) -> bytes:
        """Return the little-endian uint32 crc32c of each block."""
        crc = self._crc
        if isinstance(crc, str):
            crc = self._crc = binascii.a2b_base64(crc)
        return crc

    def text(self) -> str:
        """Return `crc` as base64."""
        crc = self._crc
        return crc if isinstance(crc, str) else base64.b64encode(crc).decode()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sums):
            return NotImplemented
        return self is other or (self.tips, self.block, self.crc) == (other.tips, other.block, other.crc)

    def __hash__(self) -> int:
        return hash((self.tips, self.block, self.crc))

    def __repr__(self) -> str:
        return f"Sums({self.crc!r}, {self.tips}, {self.block})"

    def leading(self, nbytes: int) -> Sums:
        """Return the checksums of the whole blocks among the first `nbytes`, without tips."""
        return Sums(self.crc[: nbytes // self.block * 4], 0, self.block)


EMPTY = Sums(b"", 0)


def block_bytes(nbytes: int) -> int:
    """Return the block size for new checksums of a leaf of `nbytes`.

    Example:
        >>> [block_bytes(n) >> 10 for n in (1 << 20, 4 << 20, 5 << 20, 16 << 30, 20 << 30)]
        [4096, 4096, 64, 64, 128]
    """
    block = BLOCK if nbytes <= BLOCK else FINE
    while block < BLOCK and nbytes > block * MOST_BLOCKS:
        block *= 2
    return block


crc32c: Callable[[bytes | Memory], int] = google_crc32c.value
"""Compute the crc32c of bytes or of a contiguous uint8 array."""


def crcs_of(memory: Memory, size: int) -> list[int]:
    """Compute the crc32c of each `size` bytes of a contiguous uint8 array; the last block may be shorter.

    Args:
        memory: the array.
        size: bytes per checksum.
    """
    value = google_crc32c.value
    return [value(memory[at : at + size]) for at in range(0, len(memory), size)]


def block_text(block: int, size: int, nbytes: int) -> str:
    """Describe where a block of `size` bytes is in a leaf of `nbytes`, for messages; "" if it is the whole leaf.

    Args:
        block: number of the block.
        size: bytes per block.
        nbytes: bytes of the leaf.

    Example:
        >>> block_text(2, 65536, 1 << 20)
        ' in the 64 KiB from byte 131072 on'
    """
    return "" if nbytes <= size else f" in the {size >> 10} KiB from byte {block * size} on"


class Summer:
    """Compute the checksums of a leaf that arrives in order, in pieces of any length.

    Args:
        nbytes: bytes of the leaf.
        block: bytes per checksum.
    """

    def __init__(self, nbytes: int, block: int | None = None) -> None:
        self.nbytes = nbytes
        self.block = block or block_bytes(nbytes)
        self._crc: list[int] = []
        self._wanted = tip_ranges(nbytes)
        self._tips = bytearray()
        self.at = 0
        """The bytes that were added."""

    def add(self, piece: Memory) -> None:
        """Add the next bytes."""
        begun = self.at % self.block
        rest = piece
        if begun:
            rest = piece[self.block - begun :]
            self._crc[-1] = google_crc32c.extend(self._crc[-1], piece[: self.block - begun])
        self._crc += crcs_of(rest, self.block)
        start, stop = self.at, self.at + len(piece)
        for a, b in self._wanted:
            if a < stop and b > start:
                self._tips += piece[max(a - start, 0) : b - start].tobytes()
        self.at = stop

    def add_zeros(self, size: int) -> None:
        """Add `size` zeros as the next bytes, behind whole blocks: more of these, or the rest."""
        self._crc += [_crc_of_zeros(self.block)] * (size // self.block)
        if size % self.block:
            self._crc.append(_crc_of_zeros(size % self.block))
        start, stop = self.at, self.at + size
        for a, b in self._wanted:
            if a < stop and b > start:
                self._tips += bytes(min(b, stop) - max(a, start))
        self.at = stop

    def sums(self) -> Sums:
        """Return the checksums of all bytes that were added."""
        if not self.nbytes:
            return EMPTY
        return Sums(np.array(self._crc, "<u4").tobytes(), crc32c(bytes(self._tips)), self.block)


def tip_ranges(nbytes: int) -> list[tuple[int, int]]:
    """Return the byte ranges of the tips."""
    if nbytes <= 3 * TIP:
        return [(0, nbytes)]
    middle = nbytes // 2 // TIP * TIP
    last = max(nbytes - TIP, middle + TIP)
    return [(0, TIP), (middle, middle + TIP), (last, nbytes)]


def tips_of_file(fd: int, nbytes: int) -> int:
    """Compute the checksum of the tips of a file, by up to three small reads.

    Args:
        fd: descriptor of the file.
        nbytes: bytes of the leaf.
    """
    if nbytes <= 3 * TIP:
        return int(google_crc32c.value(os.pread(fd, nbytes, 0)))
    _, (middle, _), (last, end) = tip_ranges(nbytes)
    tips = os.pread(fd, TIP, 0) + os.pread(fd, TIP, middle) + os.pread(fd, end - last, last)
    return int(google_crc32c.value(tips))


def sums_of_memory(memory: Memory, block: int | None = None) -> Sums:
    """Compute the checksums of a contiguous uint8 array.

    Args:
        memory: the array.
        block: bytes per checksum; default: by `block_bytes`.

    Example:
        >>> sums = sums_of_memory(np.zeros(5 << 20, np.uint8))
        >>> sums.block, len(sums.crc) // 4
        (65536, 80)
    """
    summer = Summer(len(memory), block)
    for start in range(0, len(memory), BLOCK):
        summer.add(memory[start : start + BLOCK])
    return summer.sums()


def sums_of_block(data: bytes | Memory, block: int = BLOCK) -> Sums:
    """Compute the checksums of a leaf of one block, from all its bytes.

    Args:
        data: the bytes.
        block: bytes per checksum; at least as many as `data` has.

    Example:
        >>> sums_of_block(bytes(3)) == sums_of_memory(np.zeros(3, np.uint8))
        True
    """
    whole = tips = crc32c(data)
    if len(data) > SHORT:
        (_, first), *others = tip_ranges(len(data))
        tips = crc32c(data[:first])
        for start, stop in others:
            tips = google_crc32c.extend(tips, data[start:stop])
    return Sums(whole.to_bytes(4, "little"), tips, block)


def sums_of_short(data: bytes | np.ndarray[Any, Any]) -> Sums:
    """Compute the checksums of a leaf of at most `SHORT` bytes.

    Args:
        data: all its bytes, as a contiguous array of any shape and dtype.

    Example:
        >>> sums_of_short(np.ones((3, 2))) == sums_of_block(np.ones((3, 2)).tobytes())
        True
    """
    crc = google_crc32c.value(data)
    return Sums(crc.to_bytes(4, "little"), crc)


@lru_cache(256)
def sums_of_zeros(nbytes: int) -> Sums:
    """Return the checksums of a leaf that was never written."""
    summer = Summer(nbytes)
    summer.add_zeros(nbytes)
    return summer.sums()


def sums_of_file(fd: int, nbytes: int, known: Sums = EMPTY, *, block: int | None = None) -> Sums:
    """Compute the checksums of the first `nbytes` of a file, without reading holes and leading blocks that are `known`.

    Args:
        fd: descriptor of the file.
        nbytes: bytes of the leaf.
        known: checksums of the leaf as far as they are known; those of its leading blocks are used as they are.
        block: bytes per checksum; default: as `known`, unless there would be very many of them.

    Raises:
        EOFError: the file is shorter.
    """
    is_short = 0 < nbytes <= min(FINE, block or FINE) and not known.crc
    if is_short and len(data := os.pread(fd, nbytes, 0)) == nbytes:
        return sums_of_block(data, block or BLOCK)  # by one read, without a search for holes
    if known.block < BLOCK and nbytes > 2 * MOST_BLOCKS * known.block:
        known = EMPTY
    size_of_block = known.block if known.crc else block or block_bytes(nbytes)
    summer = Summer(nbytes, size_of_block)
    buffer = np.empty(min(BLOCK, nbytes), np.uint8)
    at = len(known.crc) // 4 * size_of_block
    data_until = 0  # [at, data_until) is known to hold data
    while at < nbytes:
        size = min(BLOCK, nbytes - at)
        if at >= data_until:
            at_data, data_until = next_data(fd, at, nbytes)
            whole = (nbytes if at_data >= nbytes else at_data // size_of_block * size_of_block) - at
            if whole > 0:
                if os.fstat(fd).st_size < at + whole:
                    raise EOFError
                summer.add_zeros(whole)
                at += whole
                continue
        piece = buffer[:size]
        got = 0
        while got < size:
            n = os.preadv(fd, [piece[got:].data], at + got)
            if not n:
                raise EOFError
            got += n
        summer.add(piece)
        at += size
    if known.crc:
        return Sums(known.crc + summer.sums().crc, tips_of_file(fd, nbytes), size_of_block)
    return summer.sums()


def sums_of_part(fd: int, nbytes: int, offset: int) -> Sums:
    """Compute the checksums of a part of a file.

    Args:
        fd: descriptor of the file.
        nbytes: bytes of the part.
        offset: its position in the file.

    Raises:
        EOFError: the file is shorter.
    """
    data = os.pread(fd, nbytes, offset)
    if len(data) < nbytes:
        raise EOFError
    return sums_of_memory(np.frombuffer(data, np.uint8))


def next_data(fd: int, at: int, nbytes: int) -> tuple[int, int]:
    """Return start and end of the next extent at or after `at`; all bytes are data if the file system has no holes.

    Args:
        fd: descriptor of the file.
        at: the byte to begin at.
        nbytes: length of the file; also the result if no data follows.
    """
    try:
        start = os.lseek(fd, at, os.SEEK_DATA)
        return start, os.lseek(fd, start, os.SEEK_HOLE)
    except OSError as error:
        # ENXIO: no data after `at`.
        return (nbytes, nbytes) if error.errno == 6 else (at, nbytes)


@lru_cache(64)
def _crc_of_zeros(size: int) -> int:
    return crc32c(bytes(size))


def crc32_and_zeros(crc: int, nbytes: int) -> int:
    """Return the CRC-32 of data that is followed by zeros, in time that grows with the logarithm of their number.

    A CRC is a polynomial over GF(2): to append a zero bit multiplies by x, modulo the polynomial of the CRC.
    M. Adler's `crc32_combine` in zlib, which Python does not offer, does the same.

    Args:
        crc: CRC-32 of the data, as `zlib.crc32` returns it.
        nbytes: number of zeros.

    Example:
        >>> import zlib
        >>> crc32_and_zeros(zlib.crc32(b"data"), 1000) == zlib.crc32(b"data" + bytes(1000))
        True
    """
    register, power, bits = crc ^ 0xFFFFFFFF, 0x40000000, 8 * nbytes  # bits are reflected: this is x
    while bits:
        if bits & 1:
            register = _crc32_product(register, power)
        power, bits = _crc32_product(power, power), bits >> 1
    return register ^ 0xFFFFFFFF


def _crc32_product(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


# -- bytes of tensors ------------------------------------------------------------------------
def byte_blocks(value: Tensor, size: int = BLOCK) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the bytes of a tensor in C order, as uint8 arrays of exactly `size` bytes (the last may be shorter).

    A contiguous tensor is not copied; any other is copied a few megabytes at a time.

    Args:
        value: a dense tensor of any shape and dtype.
        size: bytes of a block, a multiple of the size of an element.

    Example:
        >>> [block.tolist() for block in byte_blocks(torch.tensor([1, 2, 3], dtype=torch.int8), 2)]
        [[1, 2], [3]]
    """
    if value.requires_grad:
        value = value.detach()
    if value.is_cpu and value.is_contiguous():
        flat = to_numpy(value).reshape(-1).view(np.uint8)
        if 0 < len(flat) <= size:  # most leaves: without slices
            yield flat
            return
        for start in range(0, len(flat), size):
            yield flat[start : start + size]
        return
    flat_count = size // value.dtype.itemsize
    for part in _flat_parts(value, flat_count):
        yield to_numpy(part).reshape(-1).view("uint8")


def _flat_parts(value: Tensor, count: int) -> Any:
    """Yield contiguous 1-D pieces of exactly `count` elements (the last may be shorter), in C order."""
    total = value.numel()
    if not total:
        return
    if value.ndim == 0:
        yield value.reshape(1).cpu()
        return
    held = torch.empty(min(count, total), dtype=value.dtype, device="cpu")
    filled = 0
    for piece in _pieces(value, count):
        flat = piece.reshape(-1)
        at = 0
        while at < len(flat):
            n = min(len(held) - filled, len(flat) - at)
            held[filled : filled + n].copy_(flat[at : at + n])
            filled += n
            at += n
            if filled == len(held):
                yield held
                filled = 0
    if filled:
        yield held[:filled]


def _pieces(value: Tensor, count: int) -> Any:
    """Yield sub-tensors of at most `count` elements along the leading dimensions, in C order."""
    if value.numel() <= count or value.ndim == 0:
        yield value
        return
    row = value.numel() // len(value)
    if row <= count:
        step = max(count // row, 1)
        for start in range(0, len(value), step):
            yield value[start : start + step]
        return
    for part in value:
        yield from _pieces(part, count)
