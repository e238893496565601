"""Batches on their way to a device: pinned memory, and copies that run beside the work of the caller."""

import torch

from tdstore import TensorDictBase

from .source import Allocator


def allocate_pinned(nbytes: int) -> torch.Tensor:
    """Allocate page-locked memory. torch reuses it once it is freed and the copies from it have ended."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def as_pinned(batch: TensorDictBase) -> TensorDictBase:
    """Return a batch in page-locked memory: itself if it was read into that, or a transform has moved it."""
    leaves = [leaf for leaf in batch.values(True, True) if isinstance(leaf, torch.Tensor)]
    ready = all(leaf.is_pinned() for leaf in leaves) or not all(leaf.is_cpu for leaf in leaves)
    return batch if ready else batch.pin_memory()


class Transfer:
    """Move batches to a device.

    To a CUDA device a batch goes from pinned memory by a copy on a stream of its own, so that it overlaps with the
    kernels of the caller, whose current stream waits for the copy when the batch is handed out.

    Args:
        device: where batches go. None leaves them where they are.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        self.allocator: Allocator | None = allocate_pinned if cuda else None
        """Allocates memory to read batches into, from which the device copies them."""

    def send(self, batch: TensorDictBase) -> tuple[TensorDictBase, torch.cuda.Event | None]:
        """Begin the move of a batch; called in the thread that has read it."""
        if self.device is None:
            return batch, None
        if self._stream is None:
            return batch.to(self.device), None
        with torch.cuda.stream(self._stream):
            moved = as_pinned(batch).to(self.device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        # The pinned memory goes back to its allocator when the copy has ended: torch records the stream for that.
        return moved, copied

    def receive(self, sent: tuple[TensorDictBase, torch.cuda.Event | None]) -> TensorDictBase:
        """Return a batch that the current stream of the caller may use."""
        batch, copied = sent
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for leaf in batch.values(True, True):
                if isinstance(leaf, torch.Tensor):
                    leaf.record_stream(current)
        return batch
