"""Buffers as datasets of torch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

V = TypeVar("V")


class ReplayDataset(IterableDataset[Any]):
    """Random batches of a buffer, for a `DataLoader`.

    Each iteration samples one batch, or `num_batches`. A worker process samples from its own view of the rows: a copy
    of those in memory, or the store, which it opens itself. Workers draw different rows.

    Args:
        buffer: an object with `sample(batch_size)`.
        batch_size: number of rows of a batch; a plain attribute, which may be changed.
        num_batches: number of batches of one iteration, in each worker; default: 1.

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
        """Create a `DataLoader`; see the function `create_dataloader`."""
        return create_dataloader(self, batch_size, **kwargs)


def create_dataloader(dataset: ReplayDataset, batch_size: int | None = None, **kwargs: Any) -> DataLoader[Any]:
    """Create a `DataLoader` of a dataset of batches.

    Args:
        dataset: a dataset that yields TensorDicts of batch size `[n]`.
        batch_size: None yields the batches unchanged; a number stacks up to this many of them. An iteration of the
            dataset is one batch by default, so the result has the batch size `[1, n]`; see `num_batches`.
        **kwargs: of `DataLoader`, such as `num_workers`.

    Example:
        >>> from tdstore.rl.transitions import ReplayBuffer
        >>> buffer = ReplayBuffer(100)
        >>> buffer.add(tdstore.TensorDict({"obs": torch.zeros(20, 4)}, [20]))
        >>> dataset = ReplayDataset(buffer, batch_size=4, num_batches=2)
        >>> [batch.batch_size for batch in create_dataloader(dataset)]
        [torch.Size([4]), torch.Size([4])]
        >>> [batch.batch_size for batch in create_dataloader(dataset, 2)]
        [torch.Size([2, 4])]
    """
    kwargs.setdefault("collate_fn", as_it_is if batch_size is None else stacked)
    return DataLoader(dataset, batch_size=batch_size, **kwargs)


def as_it_is(batch: V) -> V:
    """Return a batch unchanged."""
    return batch


def stacked(batches: list[V]) -> V:
    """Stack batches along a new first dimension."""
    return cast("V", torch.stack(cast("list[torch.Tensor]", batches)))
