"""Tensors written to files, in blocks of bounded memory."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tdstore.dtypes import to_numpy
from tdstore.storekit import files
from tdstore.storekit.checksums import BLOCK, Memory, byte_blocks


def memory_of(value: Tensor) -> Memory | None:
    """Return the bytes of a contiguous tensor on the CPU, without a copy; None for any other."""
    if not (value.is_cpu and value.is_contiguous()) or value.is_conj() or value.is_neg():
        return None
    memory: Memory = to_numpy(value.detach()).reshape(-1).view("uint8")
    return memory


def write_tensor(fd: int, value: Tensor, offset: int, written: Callable[[Memory], None] | None = None) -> None:
    """Write a tensor's elements in C order at a byte offset, in blocks of bounded memory; `written` gets each."""
    for block in byte_blocks(value, BLOCK):
        files.write_at(fd, block.data, offset)
        offset += block.nbytes
        if written is not None:
            written(block)
