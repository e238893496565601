"""Copies to a CUDA device, and back, in blocks: each goes through one of a few reused pinned buffers.

A copy from or to pageable memory is made by the driver, by one thread, through a buffer of its own, and the caller
waits for it. From and to pinned memory the device copies by itself: while it copies one block, the CPU reads or writes
another one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tdstore.index.tracing import traced
from tdstore.io.blocks import padded
from tdstore.storekit.pages import empty

BLOCK_BYTES = 32 << 20
BUFFERS = 2
"""Blocks that are in pinned memory at a time: a copy takes `BUFFERS * BLOCK_BYTES` of it, 64 MiB."""
STAGED_BYTES = 1 << 20
"""Leaves of fewer bytes are copied by torch: a block costs more calls than its pinned memory saves."""
STAGED_TOTAL = 8 << 20
"""So are those to a device that have fewer bytes together: buffers, streams and events take 0.3 ms on an H100."""


FEW = 4
"""Fewer small leaves are fetched from a device one by one."""
_NUMPY = frozenset(
    getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64")
)
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element: integers that carry the bits of dtypes that numpy lacks."""


class Copied(Protocol):
    """A point behind the copies that a lane was given."""

    def synchronize(self) -> None:
        """Wait until all of them have ended."""


class Lane(Protocol):
    """What a staged copy needs of a device."""

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate pinned memory, as bytes."""

    def target(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor of the device."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Copied:
        """Begin to copy each second tensor into the first one, and return without waiting for it."""

    def join(self, targets: Sequence[Tensor]) -> None:
        """Make what the caller does next on the device, or all of it, wait for the copies."""


class Block(NamedTuple):
    """A part of a copy, in one of the pinned buffers."""

    buffer: int
    """The number of the buffer."""
    parts: list[Tensor]
    """Pinned tensors."""


class Staging:
    """Reused pinned buffers, each for one block at a time: up to as many blocks as there are buffers are not sent yet.

    A buffer is used again only after its last copy has ended. As a context manager, it joins the copies at the end,
    also after an error: memory of their targets may be freed then.

    Args:
        lane: the device.
        nbytes: the bytes of all blocks together, if they are fewer than the buffers have.
        block_bytes: the bytes of a buffer. A larger block gets a larger one.
        buffers: the number of buffers.
    """

    def __init__(
        self, lane: Lane, nbytes: int | None = None, block_bytes: int = BLOCK_BYTES, buffers: int = BUFFERS
    ) -> None:
        self._lane = lane
        self._block_bytes = block_bytes if nbytes is None else min(block_bytes, nbytes)
        self._buffers: list[Tensor | None] = [None] * buffers
        self._copied: list[Copied | None] = [None] * buffers
        self._at = 0
        self._targets: list[Tensor] = []

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *error: object) -> None:
        self._lane.join(self._targets)
        self._buffers = []

    def target(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor of the device, into which blocks are sent."""
        made = self._lane.target(shape, dtype)
        self._targets.append(made)
        return made

    def block(self, parts: Sequence[tuple[Sequence[int], torch.dtype]]) -> Block:
        """Return pinned tensors of these shapes and dtypes, in the next buffer, once its last copy has ended."""
        at = self._at
        self._at = (at + 1) % len(self._buffers)
        shapes = [torch.Size(shape) for shape, _ in parts]
        sizes = [shape.numel() * dtype.itemsize for shape, (_, dtype) in zip(shapes, parts, strict=True)]
        needed = sum(map(padded, sizes))
        if (copied := self._copied[at]) is not None:
            copied.synchronize()
            self._copied[at] = None
        buffer = self._buffers[at]
        if buffer is None or buffer.nbytes < needed:
            self._buffers[at] = None  # freed before the larger one is allocated
            buffer = self._buffers[at] = self._lane.pinned(max(needed, self._block_bytes))
        found, start = [], 0
        for shape, (_, dtype), size in zip(shapes, parts, sizes, strict=True):
            found.append(buffer[start : start + size].view(dtype).view(shape))
            start += padded(size)
        return Block(at, found)

    def send(self, block: Block, pairs: Sequence[tuple[Tensor, Tensor]]) -> Copied:
        """Begin to copy the second tensor of each pair into the first; one of them is a part of the block."""
        self._copied[block.buffer] = copied = self._lane.copy(pairs)
        return copied


class CudaLane:
    """Copies on a stream of their own, which is shared by all copies to a device.

    Args:
        device: a CUDA device with its index.
        non_blocking: whether `join` returns before the copies have ended: the current stream waits for them. The copies
            then do not wait for what the current stream has to do, either.
    """

    def __init__(self, device: torch.device, *, non_blocking: bool) -> None:
        self._device, self._non_blocking = device, non_blocking
        self._current = torch.cuda.current_stream(device)
        self._stream = _stream(device)

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate pinned memory, as bytes. torch keeps it for later copies when it is freed."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def target(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor of the device."""
        if not self._non_blocking:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)
        with torch.cuda.stream(self._stream):
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Begin to copy each second tensor into the first one, and return without waiting for it."""
        copied = torch.cuda.Event(blocking=True)  # the CPU has other work than to poll
        if not self._non_blocking:
            # Targets are allocated for the current stream: kernels that run may still use their memory.
            self._stream.wait_stream(self._current)
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            copied.record(self._stream)
        return copied

    def join(self, targets: Sequence[Tensor]) -> None:
        """Make the current stream wait for the copies, and the CPU too unless the copy is `non_blocking`."""
        self._current.wait_stream(self._stream)
        if not self._non_blocking:
            self._stream.synchronize()
            return
        for target in targets:
            target.record_stream(self._current)


_streams: dict[torch.device, torch.cuda.Stream] = {}
_lock = threading.Lock()


def _stream(device: torch.device) -> torch.cuda.Stream:
    with _lock:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        return _streams[device]


def cuda_lane(device: torch.device, *, non_blocking: bool) -> CudaLane | None:
    """Return the lane to a device; None where copies cannot be staged: other devices, and the capture of a graph.

    Args:
        device: the target.
        non_blocking: as of `CudaLane`.
    """
    if device.type != "cuda" or traced() or torch.cuda.is_current_stream_capturing():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaLane(torch.device("cuda", index), non_blocking=non_blocking)


# -- tensors in memory ---------------------------------------------------------------------
def move(leaves: Sequence[Tensor], device: torch.device, *, non_blocking: bool = False) -> list[Tensor]:
    """Copy tensors to a device: large ones of pageable memory in blocks, the others as `Tensor.to` does.

    Args:
        leaves: any tensors. Those of the device are returned as they are.
        device: the target.
        non_blocking: whether to return before the copies have ended; what the current stream does next waits for them.
    """
    moved: dict[int, Tensor] = {}
    if device.type == "cuda":
        staged = [at for at, leaf in enumerate(leaves) if is_staged(leaf)]
        pays = sum(leaves[at].nbytes for at in staged) >= STAGED_TOTAL
        lane = cuda_lane(device, non_blocking=non_blocking) if pays else None
        if lane is not None:
            moved = dict(zip(staged, move_in_blocks([leaves[at] for at in staged], lane), strict=True))
    elif device.type == "cpu" and not non_blocking:  # else torch returns pinned memory, and does not wait
        for source in {leaf.device for leaf in leaves if leaf.is_cuda}:
            staged = [at for at, leaf in enumerate(leaves) if leaf.device == source and is_staged(leaf, "cuda")]
            lane = cuda_lane(source, non_blocking=False) if staged else None
            if lane is not None:
                moved |= zip(staged, fetch_in_blocks([leaves[at] for at in staged], lane), strict=True)
            small = [at for at, leaf in enumerate(leaves) if leaf.device == source and is_small(leaf)]
            if len(small) >= FEW and not traced() and not torch.cuda.is_current_stream_capturing():
                moved |= zip(small, fetch_together([leaves[at] for at in small], _pinned_copy), strict=True)
    one_wait = device.type == "cuda" and not non_blocking and len(leaves) > 1 and not traced()
    made = [
        moved[at]
        if at in moved
        else leaf
        if leaf.device == device
        else leaf.to(device, non_blocking=one_wait or non_blocking)
        for at, leaf in enumerate(leaves)
    ]
    if one_wait:  # and not one for each leaf
        torch.cuda.current_stream(device).synchronize()
    return made


def is_small(leaf: Tensor) -> bool:
    """Return whether a tensor of a CUDA device is copied to the CPU together with others."""
    return (
        leaf.layout is torch.strided
        and not leaf.is_nested
        and leaf.nbytes < STAGED_BYTES
        and leaf.itemsize <= 8
        and not (leaf.requires_grad and torch.is_grad_enabled())
        and leaf.is_contiguous()
        and not (leaf.is_conj() or leaf.is_neg())
    )


def is_staged(leaf: Tensor, source: str = "cpu") -> bool:
    """Return whether a copy of a tensor between the CPU and a CUDA device goes through pinned buffers.

    Args:
        leaf: the tensor.
        source: the type of the device that it has to be on.
    """
    return (
        leaf.device.type == source
        and leaf.layout is torch.strided
        and not leaf.is_nested
        and leaf.nbytes >= STAGED_BYTES
        and not (leaf.requires_grad and torch.is_grad_enabled())
        and leaf.is_contiguous()
        and not (leaf.is_conj() or leaf.is_neg())
        and not (source == "cpu" and leaf.is_pinned())
    )


def move_in_blocks(
    leaves: Sequence[Tensor], lane: Lane, *, block_bytes: int = BLOCK_BYTES, buffers: int = BUFFERS
) -> list[Tensor]:
    """Copy contiguous tensors of the CPU to a device, in blocks that may begin and end within a tensor.

    Args:
        leaves: the tensors.
        lane: the device.
        block_bytes: the bytes of a block.
        buffers: the number of pinned buffers.
    """
    with Staging(lane, sum(padded(leaf.nbytes) for leaf in leaves), block_bytes, buffers) as staging:
        made = [staging.target(leaf.shape, leaf.dtype) for leaf in leaves]
        sources, targets = map(_bytes_of, leaves), map(_bytes_of, made)
        for pairs in _blocks(list(zip(targets, sources, strict=True)), block_bytes):
            block = staging.block([(source.shape, torch.uint8) for _, source in pairs])
            for buffer, (_, source) in zip(block.parts, pairs, strict=True):
                buffer.copy_(source)
            staging.send(block, [(target, buffer) for buffer, (target, _) in zip(block.parts, pairs, strict=True)])
    return made


def fetch_in_blocks(
    leaves: Sequence[Tensor], lane: Lane, *, block_bytes: int = BLOCK_BYTES, buffers: int = BUFFERS
) -> list[Tensor]:
    """Copy contiguous tensors of a device into fresh memory of the CPU, in blocks, and wait for them.

    Args:
        leaves: the tensors.
        lane: the device.
        block_bytes: the bytes of a block.
        buffers: the number of pinned buffers.
    """
    made = [empty(leaf.shape, leaf.dtype) for leaf in leaves]
    under_way: deque[tuple[Copied, list[tuple[Tensor, Tensor]]]] = deque()

    def write_next() -> None:
        copied, written = under_way.popleft()
        copied.synchronize()
        for target, buffer in written:
            target.copy_(buffer)

    with Staging(lane, sum(padded(leaf.nbytes) for leaf in leaves), block_bytes, buffers) as staging:
        sources, targets = map(_bytes_of, leaves), map(_bytes_of, made)
        for pairs in _blocks(list(zip(targets, sources, strict=True)), block_bytes):
            if len(under_way) == buffers:
                write_next()
            block = staging.block([(source.shape, torch.uint8) for _, source in pairs])
            matched = list(zip(block.parts, pairs, strict=True))
            copied = staging.send(block, [(buffer, source) for buffer, (_, source) in matched])
            under_way.append((copied, [(target, buffer) for buffer, (target, _) in matched]))
        while under_way:
            write_next()
    return made


def fetch_together(leaves: Sequence[Tensor], to_cpu: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Copy small contiguous tensors into memory of their own on the CPU: one transfer for many of a dtype.

    Args:
        leaves: tensors of one device, of which no gradients are recorded now.
        to_cpu: copies a flat tensor to the CPU, and waits for it.
    """
    groups: dict[torch.dtype, list[int]] = {}
    for at, leaf in enumerate(leaves):
        groups.setdefault(leaf.dtype, []).append(at)
    made: dict[int, Tensor] = {}
    for dtype, group in groups.items():
        carrier = dtype if dtype in _NUMPY else _CARRIERS[dtype.itemsize]
        for part in _parts_of(group, [leaves[at].nbytes for at in group]):
            flat = [leaves[at].reshape(-1) for at in part]
            joined = torch.cat(flat if carrier is dtype else [one.view(carrier) for one in flat])
            there, stop = to_cpu(joined).numpy(), 0
            for at in part:
                start, stop = stop, stop + leaves[at].numel()
                copy = torch.from_numpy(there[start:stop].reshape(leaves[at].shape).copy())
                made[at] = copy if carrier is dtype else copy.view(dtype)
    return [made[at] for at in range(len(leaves))]


def _parts_of(group: list[int], sizes: list[int]) -> Iterator[list[int]]:
    part: list[int] = []
    filled = 0
    for at, size in zip(group, sizes, strict=True):
        if part and filled + size > BLOCK_BYTES:
            yield part
            part, filled = [], 0
        part.append(at)
        filled += size
    if part:
        yield part


def _pinned_copy(flat: Tensor) -> Tensor:
    made = flat.to("cpu", non_blocking=True)
    torch.cuda.current_stream(flat.device).synchronize()
    return made


def pieces_on_cpu(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Return parts of tensors on the CPU, to be written and dropped: those of a CUDA device in pinned memory.

    Args:
        pieces: tensors of any device, together of about one block; larger ones are moved to pageable memory.
    """
    devices = {piece.device for piece in pieces if piece.is_cuda}
    if not devices:
        return [piece if piece.is_cpu and not piece.requires_grad else piece.detach().cpu() for piece in pieces]
    small = sum(piece.nbytes for piece in pieces) <= BUFFERS * BLOCK_BYTES and not traced()
    made = move([piece.detach() for piece in pieces], torch.device("cpu"), non_blocking=small)
    for device in devices if small else ():
        torch.cuda.current_stream(device).synchronize()
    return made


def _bytes_of(leaf: Tensor) -> Tensor:
    return leaf.detach().as_subclass(Tensor).reshape(-1).view(torch.uint8)


def _blocks(pairs: Iterable[tuple[Tensor, Tensor]], block_bytes: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield lists of parts of pairs of flat tensors, each of up to `block_bytes` with padding."""
    block: list[tuple[Tensor, Tensor]] = []
    filled = 0
    for target, source in pairs:
        cuts = [*range(0, source.nbytes, block_bytes), source.nbytes]
        for start, stop in pairwise(cuts):
            if block and filled + padded(stop - start) > block_bytes:
                yield block
                block, filled = [], 0
            block.append((target[start:stop], source[start:stop]))
            filled += padded(stop - start)
    if block:
        yield block
