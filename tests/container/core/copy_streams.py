"""A stream without a device: copies are made when somebody waits for them, and not before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tdstore.container.core.staging import CopyEvent


class LateEvent:
    """A point behind the copies that a stream was given until now."""

    def __init__(self, stream: LateCopyStream) -> None:
        self._stream, self._number = stream, len(stream.copies)

    def synchronize(self) -> None:
        self._stream.waits.append(self._number)
        self._stream.run(self._number)


@dataclass
class LateCopyStream:
    """Targets in the memory of the CPU. A buffer that is overwritten too early shows in what is event."""

    copies: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    joined: int = 0
    done: int = 0
    ahead: int = 0
    """The most copies that were under way at a time."""

    def pinned(self, nbytes: int) -> Tensor:
        self.allocated.append(nbytes)
        return torch.full((nbytes,), 0xAA, dtype=torch.uint8)

    def target(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> CopyEvent:
        self.copies.append(list(pairs))
        self.ahead = max(self.ahead, len(self.copies) - self.done)
        return LateEvent(self)

    def join(self, targets: Sequence[Tensor]) -> None:
        self.joined += 1
        self.run(len(self.copies))

    def run(self, stop: int) -> None:
        for pairs in self.copies[self.done : stop]:
            for target, source in pairs:
                target.copy_(source)
        self.done = max(self.done, stop)

    @property
    def sent(self) -> list[int]:
        """The bytes of each copy, in order."""
        return [sum(source.nbytes for _, source in pairs) for pairs in self.copies]
