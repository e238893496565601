"""Tensors written to files, in blocks of bounded memory."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tdstore.storekit import files
from tdstore.storekit.checksums import BLOCK, Memory, byte_blocks

_CACHED = 256 << 10
"""Bytes that are written at once where they are looked at again: the second time they are in the processor's cache."""


def write_tensor(fd: int, value: Tensor, offset: int, written: Callable[[Memory], None] | None = None) -> None:
    """Write a tensor's elements in C order at a byte offset, in blocks of bounded memory; `written` gets each."""
    for block in byte_blocks(value, BLOCK if written is None else _CACHED):
        files.write_at(fd, block.data, offset)
        offset += block.nbytes
        if written is not None:
            written(block)
