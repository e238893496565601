"""Buffers as datasets of torch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

V = TypeVar("V")

if TYPE_CHECKING:
    pass


class ReplayDataset(IterableDataset[Any]):
    """Random batches of a buffer, for a `DataLoader`.

    Each iteration samples one batch, or `num_batches`. A worker process samples from its own view of the rows: a copy
    of those in memory, or the store, which it opens for itself. Workers draw different rows.

    Args:
        buffer: anything with `sample(batch_size)`.
        batch_size: number of rows of a batch; may be set later.
        num_batches: batches of one iteration; default: 1. For each worker.

    Raises:
        AssertionError: `batch_size` is not positive.

    Example:
        >>> from tdstore.rl.transitions import ReplayBuffer
        >>> buffer = ReplayBuffer(100)
        >>> buffer.add(tdstore.TensorDict({"obs": torch.zeros(20, 4)}, [20]))
        >>> [batch.batch_size for batch in create_dataloader(ReplayDataset(buffer, batch_size=4))]
        [torch.Size([4])]
    """

    def __init__(self, buffer: Any, batch_size: int = 256, num_batches: int | None = None) -> None:
        if not hasattr(buffer, "sample"):
            warnings.warn(
                f"a ReplayDataset samples from a replay buffer, and a {type(buffer).__name__} has no sample()",
                stacklevel=2,
            )
        if batch_size <= 0:
            raise AssertionError(f"batch_size is a positive number of rows, not {batch_size}")
        self.buffer = buffer
        self.batch_size = batch_size
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[Any]:
        for _ in itertools.repeat(None, 1 if self.num_batches is None else self.num_batches):
            yield self.buffer.sample(self.batch_size)

    def create_dataloader(self, batch_size: int | None = None, **kwargs: Any) -> DataLoader[Any]:
        """Make a `DataLoader`; see the function `create_dataloader`."""
        return create_dataloader(self, batch_size, **kwargs)


def create_dataloader(dataset: ReplayDataset, batch_size: int | None = None, **kwargs: Any) -> DataLoader[Any]:
    """Make a `DataLoader` of a dataset of batches.

    Args:
        dataset: gives TensorDicts of batch size `[n]`.
        batch_size: None gives them as they are; a number stacks as many: as an iteration of the dataset is one batch
            unless `num_batches` says more, the result is `[1, n]`.
        **kwargs: of `DataLoader`, such as `num_workers`.
    """
    kwargs.setdefault("collate_fn", as_it_is if batch_size is None else stacked)
    return DataLoader(dataset, batch_size=batch_size, **kwargs)


def as_it_is(batch: V) -> V:
    """Return a batch."""
    return batch


def stacked(batches: list[Any]) -> Any:
    """Return batches as one, with a dimension more."""
    return torch.stack(batches)
