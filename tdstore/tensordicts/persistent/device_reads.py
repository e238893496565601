"""Reading stored leaves to a CUDA device in blocks, each straight into pinned memory, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from tdstore.container.core.staging import STAGED_TOTAL, Block, CopyStream, Staging, cuda_copy_stream
from tdstore.container.storage.handle import StoreHandle
from tdstore.container.varlen.rounds import Rounds
from tdstore.index.selection import Selection
from tdstore.io.blocks import in_blocks, index_shape, padded, pieces, row_ranges
from tdstore.store import Cap
from tdstore.threads import ThreadPool
from tdstore.types import Path, Read, StoreIndex

Wanted = Sequence[tuple[Path, Selection]]

BLOCK_BYTES = 16 << 20
THREADS = 8
"""Blocks that are read at a time, if the store allows it: with the one that is event, they take 144 MiB of pinned
memory at most, or that many of the chunks that are larger."""


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
    plan = DeviceReads(handle, wanted, BLOCK_BYTES)
    stream = cuda_copy_stream(device, non_blocking=False) if plan.pays else None
    if stream is None:
        return (yield from read(wanted))
    concurrent = Cap.CONCURRENT_READ in handle.store.caps
    made = plan.read(stream, min(THREADS, torch.get_num_threads()) if concurrent else 1)
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


Pieces = list[_Piece]


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
        return self.nbytes >= STAGED_TOTAL and Cap.DIRECT_DEVICE not in self._handle.store.caps

    def read(self, stream: CopyStream, threads: int = 1) -> dict[int, Tensor]:
        """Read the staged leaves, and return tensors of the device by number.

        Args:
            stream: makes the copies.
            threads: the number of blocks to read at a time, each in a thread. A further buffer is copied meanwhile.
        """
        blocks = list(self._blocks())
        threads = max(1, min(threads, len(blocks)))
        made: dict[int, Tensor] = {}
        pending: deque[tuple[Pieces, Block, Future[list[Tensor]]]] = deque()
        with ExitStack() as stack:
            staging = stack.enter_context(Staging(stream, self._padded_bytes(), self._block_bytes, threads + 1))
            pool = stack.enter_context(ThreadPool(threads, "tdstore-device")) if threads > 1 else None

            def send_next() -> None:
                pieces, block, found = pending.popleft()
                self._send(staging, made, pieces, block, found.result())

            for pieces in blocks:
                if len(pending) == threads:
                    send_next()
                block = staging.block([(piece.shape, self._dtype(piece.number)) for piece in pieces])
                if pool is None:
                    self._send(staging, made, pieces, block, self._filled(pieces, block))
                else:
                    pending.append((pieces, block, pool.submit(self._filled, pieces, block)))
            while pending:
                send_next()
        return made

    def _filled(self, pieces: Pieces, block: Block) -> list[Tensor]:
        places = zip(pieces, block.parts, strict=True)
        return self._handle.store.read([Read(self._wanted[one.number][0], one.rows, out) for one, out in places])

    def _send(
        self, staging: Staging, made: dict[int, Tensor], pieces: Pieces, block: Block, values: list[Tensor]
    ) -> None:
        pairs = []
        for piece, out, value in zip(pieces, block.parts, values, strict=True):
            if value.data_ptr() != out.data_ptr():
                out.copy_(value)
            if piece.number not in made:
                made[piece.number] = staging.target(self.shapes[piece.number], self._dtype(piece.number))
            target = made[piece.number]
            pairs.append((target[piece.part] if piece.part else target, out))
        staging.send(block, pairs)

    def _padded_bytes(self) -> int:
        return sum(padded(self._bytes(at)) for at in self.staged)

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

    def _blocks(self) -> Iterator[Pieces]:
        sized = (
            (piece, padded(torch.Size(piece.shape).numel() * self._dtype(at).itemsize))
            for at in self.staged
            for piece in self._pieces(at)
        )
        return in_blocks(sized, self._block_bytes)
