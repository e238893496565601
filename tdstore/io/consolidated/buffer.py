"""One buffer for many leaves: the position of each, and a store over such a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tdstore.header import Header
from tdstore.index.rows import gather
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
