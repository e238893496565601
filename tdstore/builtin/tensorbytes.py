"""Elements of a tensor as bytes in C order, in blocks of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdstore.dtypes import to_numpy
from tdstore.storekit import files
from tdstore.storekit.checksums import BLOCK


def write_tensor(fd: int, value: Tensor, offset: int) -> None:
    """Write a tensor's elements in C order at a byte offset, in blocks of bounded memory."""
    for block in byte_blocks(value):
        files.write_at(fd, block.data, offset)
        offset += block.nbytes


def byte_blocks(value: Tensor, size: int = BLOCK) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the bytes of a tensor in C order, as uint8 arrays of exactly `size` bytes (the last may be shorter).

    A contiguous tensor is not copied; any other a few megabytes at a time.
    """
    value = value.detach()
    if value.device.type == "cpu" and value.is_contiguous():
        flat = to_numpy(value).reshape(-1).view("uint8")
        for start in range(0, len(flat), size):
            yield flat[start : start + size]
        return
    flat_count = size // value.dtype.itemsize
    for part in _flat_parts(value, flat_count):
        yield to_numpy(part).reshape(-1).view("uint8")


def _flat_parts(value: Tensor, count: int) -> Any:
    """Yield contiguous 1-D pieces of exactly `count` elements (the last shorter), in C order."""
    total = value.numel()
    if not total:
        return
    if value.ndim == 0:
        yield value.reshape(1).cpu()
        return
    held = torch.empty(min(count, total), dtype=value.dtype)
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
