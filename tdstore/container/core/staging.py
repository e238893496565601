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
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from tdstore.index.rows import COPIED_DTYPES, as_bits, has_bits
from tdstore.index.tracing import traced
from tdstore.io.blocks import in_blocks, padded
from tdstore.storekit.pages import empty

BLOCK_BYTES = 32 << 20
BUFFERS = 2
"""Blocks that are in pinned memory at a time: a copy takes `BUFFERS * BLOCK_BYTES` of it, 64 MiB."""
STAGED_BYTES = 1 << 20
"""Leaves of fewer bytes are copied by torch: a block costs more calls than its pinned memory saves."""
STAGED_TOTAL = 8 << 20
"""So are those to a device that have fewer bytes together: buffers, streams and events take 0.3 ms on an H100."""
FEW = 24
"""Fewer small leaves are fetched from a device one by one.

On an H200 and its slow cores 16 leaves of 4 KiB took 258 us so and 423 together, 256 of 256 B 3,770 and 2,990.
"""


class CopyEvent(Protocol):
    """A point behind the copies that a stream was given."""

    def synchronize(self) -> None:
        """Wait until all of them have ended."""


class CopyStream(Protocol):
    """What a staged copy needs of a device."""

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate pinned memory, as bytes."""

    def target(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor of the device."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> CopyEvent:
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
        stream: makes the copies.
        nbytes: the bytes of all blocks together, if they are fewer than the buffers have.
        block_bytes: the bytes of a buffer. A larger block gets a larger one.
        buffers: the number of buffers.
    """

    def __init__(
        self, stream: CopyStream, nbytes: int | None = None, block_bytes: int = BLOCK_BYTES, buffers: int = BUFFERS
    ) -> None:
        self._stream = stream
        self._block_bytes = block_bytes if nbytes is None else min(block_bytes, nbytes)
        self._buffers: list[Tensor | None] = [None] * buffers
        self._events: list[CopyEvent | None] = [None] * buffers
        self._at = 0
        self._targets: list[Tensor] = []

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.join(self._targets)
        self._buffers = []

    def target(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor of the device, into which blocks are sent."""
        made = self._stream.target(shape, dtype)
        self._targets.append(made)
        return made

    def block(self, parts: Sequence[tuple[Sequence[int], torch.dtype]]) -> Block:
        """Return pinned tensors of these shapes and dtypes, in the next buffer, once its last copy has ended."""
        at = self._at
        self._at = (at + 1) % len(self._buffers)
        shapes = [torch.Size(shape) for shape, _ in parts]
        sizes = [shape.numel() * dtype.itemsize for shape, (_, dtype) in zip(shapes, parts, strict=True)]
        needed = sum(map(padded, sizes))
        if (event := self._events[at]) is not None:
            event.synchronize()
            self._events[at] = None
        buffer = self._buffers[at]
        if buffer is None or buffer.nbytes < needed:
            self._buffers[at] = None  # freed before the larger one is allocated
            buffer = self._buffers[at] = self._stream.pinned(max(needed, self._block_bytes))
        found, start = [], 0
        for shape, (_, dtype), size in zip(shapes, parts, sizes, strict=True):
            found.append(buffer[start : start + size].view(dtype).view(shape))
            start += padded(size)
        return Block(at, found)

    def send(self, block: Block, pairs: Sequence[tuple[Tensor, Tensor]]) -> CopyEvent:
        """Begin to copy the second tensor of each pair into the first; one of them is a part of the block."""
        self._events[block.buffer] = event = self._stream.copy(pairs)
        return event


class CudaCopyStream:
    """Copies on a CUDA stream of their own, which all copies of a device share.

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
        event = torch.cuda.Event(blocking=True)  # the CPU has other work than to poll
        if not self._non_blocking:
            # Targets are allocated for the current stream: kernels that run may still use their memory.
            self._stream.wait_stream(self._current)
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event.record(self._stream)
        return event

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


def cuda_copy_stream(device: torch.device, *, non_blocking: bool) -> CudaCopyStream | None:
    """Return the stream of copies of a device; None where copies cannot be staged: other devices, captured graphs.

    Args:
        device: the device.
        non_blocking: as of `CudaCopyStream`.
    """
    if device.type != "cuda" or traced() or torch.cuda.is_current_stream_capturing():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaCopyStream(torch.device("cuda", index), non_blocking=non_blocking)


# -- tensors in memory ---------------------------------------------------------------------
def move(leaves: Sequence[Tensor], device: torch.device, *, non_blocking: bool = False) -> list[Tensor]:
    """Copy tensors to a device: large ones of pageable memory in blocks, the others as `Tensor.to` does.

    Args:
        leaves: any tensors. Those of the device are returned as they are.
        device: the target.
        non_blocking: whether to return before the copies have ended; what the current stream does next waits for them.
    """
    if traced():  # torch.compile breaks its graph at `is_conj`
        return [leaf.to(device, non_blocking=non_blocking) for leaf in leaves]
    moved = {at: leaf for at, leaf in enumerate(leaves) if leaf.device == device}
    if device.type == "cuda":
        moved |= _sent(leaves, device, non_blocking)
    elif device.type == "cpu" and not non_blocking:  # else torch returns pinned memory, and does not wait
        for source in {leaf.device for leaf in leaves if leaf.is_cuda}:
            moved |= _fetched(leaves, source)
    rest = [at for at in range(len(leaves)) if at not in moved]
    one_wait = device.type == "cuda" and not non_blocking and len(rest) > 1
    for at in rest:
        moved[at] = leaves[at].to(device, non_blocking=non_blocking or one_wait)
    if one_wait:  # and not one for each leaf
        torch.cuda.current_stream(device).synchronize()
    return [moved[at] for at in range(len(leaves))]


def _sent(leaves: Sequence[Tensor], device: torch.device, non_blocking: bool) -> dict[int, Tensor]:
    """Copy the large tensors of pageable memory to a CUDA device, if that pays; by number."""
    large = [
        at
        for at, leaf in enumerate(leaves)
        if leaf.is_cpu and leaf.nbytes >= STAGED_BYTES and is_plain(leaf) and not leaf.is_pinned()
    ]
    pays = sum(leaves[at].nbytes for at in large) >= STAGED_TOTAL
    stream = cuda_copy_stream(device, non_blocking=non_blocking) if pays else None
    if stream is None:
        return {}
    return dict(zip(large, move_in_blocks([leaves[at] for at in large], stream), strict=True))


def _fetched(leaves: Sequence[Tensor], source: torch.device) -> dict[int, Tensor]:
    """Copy the large tensors of a CUDA device to the CPU in blocks, and many small ones together; by number."""
    large: list[int] = []
    small: list[int] = []
    for at, leaf in enumerate(leaves):
        if leaf.device == source and is_plain(leaf) and (nbytes := leaf.nbytes):
            if nbytes >= STAGED_BYTES:
                large.append(at)
            elif has_bits(leaf.dtype):
                small.append(at)
    stream = cuda_copy_stream(source, non_blocking=False) if large or len(small) >= FEW else None
    if stream is None:
        return {}
    made = dict(zip(large, fetch_in_blocks([leaves[at] for at in large], stream), strict=True)) if large else {}
    if len(small) >= FEW:
        made |= zip(small, fetch_together([leaves[at] for at in small], _pinned_copy), strict=True)
    return made


def is_plain(leaf: Tensor) -> bool:
    """Return whether the bytes of a tensor are one piece of memory, and all that there is to copy."""
    return (
        leaf.layout is torch.strided
        and not leaf.is_nested
        and not (leaf.requires_grad and torch.is_grad_enabled())
        and leaf.is_contiguous()
        and not (leaf.is_conj() or leaf.is_neg())
    )


def move_in_blocks(
    leaves: Sequence[Tensor], stream: CopyStream, *, block_bytes: int = BLOCK_BYTES, buffers: int = BUFFERS
) -> list[Tensor]:
    """Copy contiguous tensors of the CPU to a device, in blocks that may begin and end within a tensor.

    Args:
        leaves: the tensors.
        stream: makes the copies.
        block_bytes: the bytes of a block.
        buffers: the number of pinned buffers.
    """
    with Staging(stream, sum(padded(leaf.nbytes) for leaf in leaves), block_bytes, buffers) as staging:
        made = [staging.target(leaf.shape, leaf.dtype) for leaf in leaves]
        sources, targets = map(_bytes_of, leaves), map(_bytes_of, made)
        for pairs in _blocks(list(zip(targets, sources, strict=True)), block_bytes):
            block = staging.block([(source.shape, torch.uint8) for _, source in pairs])
            for buffer, (_, source) in zip(block.parts, pairs, strict=True):
                buffer.copy_(source)
            staging.send(block, [(target, buffer) for buffer, (target, _) in zip(block.parts, pairs, strict=True)])
    return made


def fetch_in_blocks(
    leaves: Sequence[Tensor], stream: CopyStream, *, block_bytes: int = BLOCK_BYTES, buffers: int = BUFFERS
) -> list[Tensor]:
    """Copy contiguous tensors of a device into fresh memory of the CPU, in blocks, and wait for them.

    Args:
        leaves: the tensors.
        stream: makes the copies.
        block_bytes: the bytes of a block.
        buffers: the number of pinned buffers.
    """
    made = [empty(leaf.shape, leaf.dtype) for leaf in leaves]
    pending: deque[tuple[CopyEvent, list[tuple[Tensor, Tensor]]]] = deque()

    def write_next() -> None:
        event, written = pending.popleft()
        event.synchronize()
        for target, buffer in written:
            target.copy_(buffer)

    with Staging(stream, sum(padded(leaf.nbytes) for leaf in leaves), block_bytes, buffers) as staging:
        sources, targets = map(_bytes_of, leaves), map(_bytes_of, made)
        for pairs in _blocks(list(zip(targets, sources, strict=True)), block_bytes):
            if len(pending) == buffers:
                write_next()
            block = staging.block([(source.shape, torch.uint8) for _, source in pairs])
            matched = list(zip(block.parts, pairs, strict=True))
            event = staging.send(block, [(buffer, source) for buffer, (_, source) in matched])
            pending.append((event, [(target, buffer) for buffer, (target, _) in matched]))
        while pending:
            write_next()
    return made


def fetch_together(leaves: Sequence[Tensor], to_cpu: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Copy small contiguous tensors into memory of their own on the CPU: one transfer for many of a dtype.

    Args:
        leaves: tensors of one device, none of them empty, of which no gradients are recorded now.
        to_cpu: copies a flat tensor to the CPU, and waits for it.
    """
    groups: dict[torch.dtype, list[int]] = {}
    for at, leaf in enumerate(leaves):
        groups.setdefault(leaf.dtype, []).append(at)
    made: dict[int, Tensor] = {}
    for dtype, group in groups.items():
        plain = dtype in COPIED_DTYPES
        for part in in_blocks(((at, leaves[at].nbytes) for at in group), BLOCK_BYTES):
            found = [leaves[at] if plain else as_bits(leaves[at]) for at in part]
            # One call each, where a loop would make some for each leaf.
            views = _unflatten_dense_tensors(to_cpu(_flatten_dense_tensors(found)), found)
            own = [view.clone() for view in views]
            made |= zip(part, own if plain else [bits.view(dtype) for bits in own], strict=True)
    return [made[at] for at in range(len(leaves))]


def _pinned_copy(flat: Tensor) -> Tensor:
    made = flat.to("cpu", non_blocking=True)
    torch.cuda.current_stream(flat.device).synchronize()
    return made


def pieces_on_cpu(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Return parts of tensors on the CPU, to be written and dropped: those of a CUDA device in pinned memory.

    Args:
        pieces: tensors of any device, together of about one block; larger ones are moved to pageable memory.
    """
    devices: set[torch.device] = set()
    found = []
    for piece in pieces:
        if piece.is_cuda:
            devices.add(piece.device)
        elif not devices:
            found.append(piece if piece.is_cpu and not piece.requires_grad else piece.detach().cpu())
    if not devices:
        return found
    small = sum(piece.nbytes for piece in pieces) <= BUFFERS * BLOCK_BYTES and not traced()
    made = move([piece.detach() for piece in pieces], torch.device("cpu"), non_blocking=small)
    for device in devices if small else ():
        torch.cuda.current_stream(device).synchronize()
    return made


def _bytes_of(leaf: Tensor) -> Tensor:
    return leaf.detach().as_subclass(Tensor).reshape(-1).view(torch.uint8)


def _blocks(pairs: Iterable[tuple[Tensor, Tensor]], block_bytes: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield lists of parts of pairs of flat tensors, each of up to `block_bytes` with padding."""
    parts = (
        ((target[start:stop], source[start:stop]), padded(stop - start))
        for target, source in pairs
        for start, stop in pairwise([*range(0, source.nbytes, block_bytes), source.nbytes])
    )
    return in_blocks(parts, block_bytes)
