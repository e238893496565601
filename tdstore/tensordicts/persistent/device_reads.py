"""Reading stored leaves to a CUDA device: one block after the other, each read straight into pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tdstore.container.core.staging import STAGED_BYTES, Lane, Staging, cuda_lane
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.varlen.rounds import Rounds
from tdstore.index.selection import Selection
from tdstore.io.blocks import BLOCK_BYTES, index_shape, padded, pieces, row_ranges
from tdstore.store import Cap
from tdstore.types import Path, Read, StoreIndex

Wanted = Sequence[tuple[Path, Selection]]


def to_cuda(
    handle: StoreHandle, wanted: Wanted, device: torch.device, read: Callable[[Wanted], Rounds[list[Tensor]]]
) -> Rounds[list[Tensor]]:
    """Return the read of leaves to a CUDA device: large ones in blocks, the others by `read`.

    Args:
        handle: the store.
        wanted: leaves, each with the selection of its leading dimensions; rows are checked.
        device: a CUDA device.
        read: returns the read of leaves in one round.
    """
    plan = DeviceReads(handle, wanted)
    lane = cuda_lane(device, non_blocking=False) if plan.pays else None
    if lane is None:
        return (yield from read(wanted))
    made = yield from plan.rounds(lane)
    rest = [at for at in range(len(wanted)) if at not in made]
    if rest:
        made |= zip(rest, (yield from read([wanted[at] for at in rest])), strict=True)
    return [made[at] for at in range(len(wanted))]


class _Piece(NamedTuple):
    """A part of a leaf that is read into one block."""

    number: int
    """Which of the wanted leaves."""
    rows: StoreIndex
    """What is read of the stored leaf."""
    part: StoreIndex
    """Where it goes in the tensor of the device."""
    shape: tuple[int, ...]


class DeviceReads:
    """The plan of reading leaves to a CUDA device.

    Leaves that are read as they are wanted go through pinned buffers. The others, whose rows have another order in the
    store or which a store reads only as a whole, are left to the caller.

    Args:
        handle: the store.
        wanted: leaves, each with the selection of its leading dimensions; rows are checked.
        block_bytes: the largest number of bytes of a block; a chunk may be larger.
    """

    def __init__(self, handle: StoreHandle, wanted: Wanted, block_bytes: int = BLOCK_BYTES) -> None:
        self._handle, self._wanted, self._block_bytes = handle, wanted, block_bytes
        self._parts = Cap.PARTIAL_READ in handle.store.caps
        self.shapes = [(*sel.shape, *handle.specs[path].shape[len(sel.src_shape) :]) for path, sel in wanted]
        self.staged = [at for at, (_, sel) in enumerate(wanted) if self._is_exact(at, sel)]
        self.nbytes = sum(self._bytes(at) for at in self.staged)

    @property
    def pays(self) -> bool:
        """Whether the leaves are large enough for blocks."""
        return self.nbytes >= STAGED_BYTES and Cap.DIRECT_DEVICE not in self._handle.store.caps

    def rounds(self, lane: Lane) -> Rounds[dict[int, Tensor]]:
        """Return the read of the staged leaves, one block each round: tensors of the device, by number.

        Args:
            lane: the device.
        """
        made: dict[int, Tensor] = {}
        room = sum(padded(self._bytes(at)) for at in self.staged)
        with Staging(lane, room, self._block_bytes) as staging:
            for block in self._blocks():
                outs = staging.block([(piece.shape, self._dtype(piece.number)) for piece in block])
                reads = [
                    Read(self._wanted[piece.number][0], piece.rows, out) for piece, out in zip(block, outs, strict=True)
                ]
                values = yield reads
                pairs = []
                for piece, out, value in zip(block, outs, values, strict=True):
                    if value.data_ptr() != out.data_ptr():
                        out.copy_(value)
                    if piece.number not in made:
                        made[piece.number] = staging.target(self.shapes[piece.number], self._dtype(piece.number))
                    target = made[piece.number]
                    pairs.append((target[piece.part] if piece.part else target, out))
                staging.send(pairs)
        return made

    def _is_exact(self, at: int, sel: Selection) -> bool:
        full = sel.shape == sel.src_shape and sel.is_full
        if not self._parts:
            return full and self._bytes(at) <= self._block_bytes
        return full or sel.read_plan().exact

    def _bytes(self, at: int) -> int:
        return torch.Size(self.shapes[at]).numel() * self._dtype(at).itemsize

    def _dtype(self, at: int) -> torch.dtype:
        return self._handle.specs[self._wanted[at][0]].dtype

    def _pieces(self, at: int) -> Iterator[_Piece]:
        path, sel = self._wanted[at]
        full, shape, nbytes = sel.shape == sel.src_shape and sel.is_full, self.shapes[at], self._bytes(at)
        if nbytes <= self._block_bytes or not self._parts:
            yield _Piece(at, () if full else sel.read_plan().index, (), shape)
        elif full:
            chunks = self._handle.store.layout(path).get("chunks")
            borders = [chunks] if isinstance(chunks, (tuple, list)) else []
            for index in pieces(shape, self._dtype(at).itemsize, self._block_bytes, borders):
                yield _Piece(at, index, index, index_shape(shape, index))
        elif not sel.shape:  # one row, larger than a block
            yield _Piece(at, sel.read_plan().index, (), shape)
        else:
            for start, stop in row_ranges(shape[0], nbytes // shape[0], self._block_bytes):
                rows = slice(start, stop, 1)
                yield _Piece(at, sel[rows].read_plan().index, (rows,), (stop - start, *shape[1:]))

    def _blocks(self) -> Iterator[list[_Piece]]:
        block: list[_Piece] = []
        filled = 0
        for at in self.staged:
            for piece in self._pieces(at):
                nbytes = padded(torch.Size(piece.shape).numel() * self._dtype(at).itemsize)
                if block and filled + nbytes > self._block_bytes:
                    yield block
                    block, filled = [], 0
                block.append(piece)
                filled += nbytes
        if block:
            yield block
