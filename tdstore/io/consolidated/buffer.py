"""One buffer for many leaves: the position of each, and a store over such a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tdstore.header import Header
from tdstore.index.rows import gather
from tdstore.index.tracing import traced
from tdstore.store import Cap
from tdstore.storekit import CheckedStore
from tdstore.types import LeafSpec, Path, Read

PAD = 8
"""Alignment of leaves in bytes, unless their element size is larger."""


class Slot(NamedTuple):
    """The place of one leaf in a buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int
    pad: int
    """Unused bytes behind it."""

    @property
    def stop(self) -> int:
        """End of the slot, where the next one may begin."""
        return self.start + self.nbytes + self.pad

    def view(self, buffer: Tensor) -> Tensor:
        """Return the leaf as a view of a uint8 buffer."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype, device=buffer.device)
        return buffer[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


class BufferViews:
    """Views of a uint8 buffer as leaves, by one call of torch each.

    Args:
        buffer: uint8, of one dimension.
    """

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._typed: dict[torch.dtype, Tensor | None] = {}

    def at(self, dtype: torch.dtype, shape: Sequence[int], start: int) -> Tensor:
        """Return the leaf that starts at a byte of the buffer.

        Args:
            dtype: that of the leaf.
            shape: that of the leaf.
            start: the offset of its first byte.
        """
        nbytes = dtype.itemsize
        strides: list[int] = []
        step = 1
        for n in reversed(shape):
            strides.append(step)
            step *= n
            nbytes *= n
        if dtype not in self._typed:
            self._typed[dtype] = self._as(dtype)
        typed = self._typed[dtype]
        if typed is None or not nbytes or start % dtype.itemsize or start + nbytes > self._buffer.nbytes:
            return Slot(dtype, tuple(shape), start, nbytes, 0).view(self._buffer)
        return typed.as_strided(shape, strides[::-1], typed.storage_offset() + start // dtype.itemsize)

    def _as(self, dtype: torch.dtype) -> Tensor | None:
        """Return the whole buffer as another dtype; None where torch cannot."""
        buffer, size = self._buffer, dtype.itemsize
        if traced() or buffer.storage_offset() % size or not buffer.is_contiguous():
            return None
        return buffer[: len(buffer) // size * size].view(dtype)


def arrange(leaves: Iterable[tuple[torch.dtype, Sequence[int]]]) -> list[Slot]:
    """Arrange leaves of these dtypes and shapes in slots, one behind the other.

    Example:
        >>> [slot.start for slot in arrange([(torch.float32, (3,)), (torch.int32, (3, 2)), (torch.bool, (3,))])]
        [0, 16, 40]
    """
    slots: list[Slot] = []
    at = 0
    for dtype, shape in leaves:
        nbytes = dtype.itemsize
        for n in shape:
            nbytes *= n
        start = -(-at // max(PAD, dtype.itemsize)) * max(PAD, dtype.itemsize) if nbytes else at
        if start > at:  # each byte of the buffer belongs to a slot
            slots[-1] = slots[-1]._replace(pad=slots[-1].pad + start - at)
        slots.append(Slot(dtype, tuple(shape), start, nbytes, -nbytes % PAD))
        at = slots[-1].stop
    return slots


class BufferStore(CheckedStore[Slot]):
    """A read-only store whose leaves are views of one buffer."""

    caps = Cap.VIEW | Cap.PARTIAL_READ | Cap.CONCURRENT_READ

    def __init__(self, url: str, header: Header, slots: Mapping[Path, Slot], buffer: Tensor) -> None:
        super().__init__(url, writable=False)
        self.buffer = buffer
        self.device = buffer.device
        if buffer.device.type != "cpu":
            self.caps = BufferStore.caps | Cap.DIRECT_DEVICE  # type: ignore[misc]
        self._header = header
        self._slots = dict(slots)

    def _catalogue(self) -> Mapping[Path, Slot]:
        return self._slots

    def _spec(self, leaf: Slot) -> LeafSpec:
        return LeafSpec(leaf.shape, leaf.dtype)

    def _typed(self, leaf: Slot) -> Slot:
        return leaf

    def _read(self, wanted: Sequence[tuple[Slot, Read]]) -> list[Tensor]:
        return [gather(slot.view(self.buffer), r.index, r.out) for slot, r in wanted]

    def view(self, path: Path) -> Tensor:
        """Return a leaf as a view of the buffer, which stays in memory after `close`."""
        return self._leaf(path).view(self.buffer)
