"""One buffer for many leaves: the position of each, and a store over such a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tdstore.errors import KeyNotFoundError, StoreClosedError
from tdstore.header import Header
from tdstore.index.rows import gather
from tdstore.store import Cap, Store
from tdstore.types import LeafSpec, Path, Read, Write, path_text

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


class BufferStore(Store):
    """A read-only store whose leaves are views of one buffer."""

    caps = Cap.VIEW | Cap.PARTIAL_READ | Cap.CONCURRENT_READ

    def __init__(self, url: str, header: Header, slots: Mapping[Path, Slot], buffer: Tensor) -> None:
        self.url = url
        self.writable = False
        self.buffer = buffer
        self.device = buffer.device
        if buffer.device.type != "cpu":
            self.caps = BufferStore.caps | Cap.DIRECT_DEVICE  # type: ignore[misc]
        self._header = header
        self._slots = dict(slots)
        self._closed = False

    def paths(self) -> Iterator[Path]:
        """Return the paths of the leaves."""
        self._check_open()
        return iter(tuple(self._slots))

    def specs(self, paths: Sequence[Path]) -> list[LeafSpec]:
        """Return the shapes and dtypes of leaves."""
        return [LeafSpec(slot.shape, slot.dtype) for slot in map(self._slot, paths)]

    def load_header(self) -> Header:
        """Return the header of the buffer."""
        self._check_open()
        return self._header

    def view(self, path: Path) -> Tensor:
        """Return a leaf as a view of the buffer."""
        return self._slot(path).view(self.buffer)

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """Return copies of rows."""
        return [gather(self.view(read.path), read.index, read.out) for read in reads]

    def save_header(self, header: Header) -> None:
        """Raise an error: see `caps`."""
        raise self.unsupported(Cap.WRITE)

    def create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        """Raise an error: see `caps`."""
        raise self.unsupported(Cap.WRITE)

    def write(self, writes: Sequence[Write]) -> None:
        """Raise an error: see `caps`."""
        raise self.unsupported(Cap.WRITE)

    def delete(self, paths: Sequence[Path]) -> None:
        """Raise an error: see `caps`."""
        raise self.unsupported(Cap.WRITE)

    def close(self) -> None:
        """Close the store. Views of leaves keep the buffer in memory."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.url} was closed", url=self.url)

    def _slot(self, path: Path) -> Slot:
        self._check_open()
        try:
            return self._slots[path]
        except KeyError:
            raise KeyNotFoundError(f"no leaf {path_text(path)} in {self.url}") from None
