"""Tensors written to files, in blocks of bounded memory."""

from __future__ import annotations

from torch import Tensor

from tdstore.storekit import files
from tdstore.storekit.checksums import byte_blocks


def write_tensor(fd: int, value: Tensor, offset: int) -> None:
    """Write a tensor's elements in C order at a byte offset, in blocks of bounded memory."""
    for block in byte_blocks(value):
        files.write_at(fd, block.data, offset)
        offset += block.nbytes
