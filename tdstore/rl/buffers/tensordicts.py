"""Replay buffers with priorities, and those of TensorDicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import tdstore
from tdstore import TensorDict
from tdstore.errors import InvalidArgumentError, KeyNotFoundError
from tdstore.rl.buffers.buffer import ReplayBuffer
from tdstore.rl.buffers.parts import collated, is_storage, made_part
from tdstore.rl.buffers.prioritized import PrioritizedSampler, as_numbers, ranked
from tdstore.rl.buffers.writers import TensorDictRoundRobinWriter, only_collections
from tdstore.rl.storages.lists import ListStorage
from tdstore.rl.storages.tabular import TabularStorage, is_collection


class PrioritizedReplayBuffer(ReplayBuffer):
    """A replay buffer whose rows are chosen by priorities.

    Args:
        alpha, beta, eps, dtype: as `PrioritizedSampler`.
        storage, **kwargs: as `ReplayBuffer`.
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        storage: Any = None,
        **kwargs: Any,
    ) -> None:
        storage = made_part("storage", storage, lambda: ListStorage(1000), is_storage)
        reduction = kwargs.pop("reduction", "max")
        sampler = PrioritizedSampler(storage.max_size, alpha, beta, eps, dtype, reduction)
        super().__init__(storage=storage, sampler=sampler, **kwargs)


class TensorDictReplayBuffer(ReplayBuffer):
    """A replay buffer of TensorDicts.

    Samples have the entry "index", and entries of the sampler. `update_tensordict_priority(sample)` sets the priorities
    of its rows. The priorities of rows with an entry `priority_key` are set when they are written, and when their place
    is opened.

    Args:
        priority_key: entry with the priorities.
        **kwargs: as `ReplayBuffer`.

    Example:
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        >>> _ = rb.extend(TensorDict({"obs": torch.zeros(4, 3)}, [4]))
        >>> sorted(rb.sample().keys())
        ['index', 'obs']
    """

    _default_writer = TensorDictRoundRobinWriter

    def __init__(self, *, priority_key: Any = "td_error", **kwargs: Any) -> None:
        self.priority_key = priority_key
        super().__init__(**kwargs)

    def _begin(self) -> None:
        super()._begin()
        if isinstance(self._sampler, PrioritizedSampler) and isinstance(self._storage, TabularStorage):
            self._rank_stored()

    def _rank_stored(self) -> None:
        """Set the priorities of existing rows to those of their entry `priority_key`."""
        rows = np.arange(len(self._storage))
        stored = self._storage.column(self.priority_key, rows) if len(rows) else None
        if stored is not None and bool((stored.isfinite() & (stored >= 0)).all()):
            self._sampler.update_priority(torch.from_numpy(rows), self._reduced(stored, len(rows)))

    def extend(self, data: Any, *, update_priority: bool | None = None) -> Tensor:
        """Write TensorDicts, with the priorities of their entry `priority_key`, if they have it.

        Args:
            data: as `ReplayBuffer.extend`.
            update_priority: False: new rows get the largest priority, whatever their entry is.
        """
        if type(data) is not TensorDict and not isinstance(data, list):
            only_collections(data)
        if not self._ranks or update_priority is False:
            return super().extend(data)
        priority = self._priority_of(data, None) if is_collection(data) else None
        index = super().extend(data)
        if priority is not None:
            self.update_priority(index, priority)
        return index

    def add(self, data: Any) -> int | Tensor | None:
        """Write one TensorDict, and return its index; None if the writer dropped it."""
        slots = data.batch_size[: self._storage.ndim - 1].numel() if is_collection(data) else 1
        priority = self._priority_of(only_collections(data), slots)
        index = super().add(data)
        if priority is not None and index is not None:
            self.update_priority(torch.as_tensor(index).reshape(slots, -1).squeeze(-1), priority)
        return index

    def _priority_of(self, data: Any, slots: int | None) -> Tensor | None:
        """Return the priorities that rows bring along, checked before the rows are written; None for none."""
        priority = data.get(self.priority_key, None) if self._ranks else None
        if priority is None:
            return None
        slots = data.batch_size[: self._storage.ndim].numel() if slots is None else slots
        reduced = self._reduced(priority, slots)
        ranked(reduced, slots)
        return reduced

    def _reduced(self, priority: Any, rows: int) -> Tensor:
        flat = as_numbers(priority)
        if flat.numel() == rows or not rows:
            return flat if flat.ndim == 1 else flat.reshape(-1)
        if not flat.numel() or flat.numel() % rows:
            raise InvalidArgumentError(
                f"{self.priority_key!r} has shape {list(flat.shape)}: those are no priorities of {rows} rows"
            )
        flat = flat.reshape(rows, -1).double()
        made = getattr(flat, getattr(self._sampler, "reduction", "max"))(dim=1)
        return made if isinstance(made, Tensor) else torch.as_tensor(made.values)

    def update_tensordict_priority(self, data: Any) -> None:
        """Set the priorities of the rows of a sample, from its entries "index" and `priority_key`.

        Raises:
            KeyError: one of them is missing. ValueError: a priority is negative or NaN.
        """
        only_collections(data)
        index, priority = data.get("index", None), data.get(self.priority_key, None)
        if index is None or priority is None:
            missing = "index" if index is None else self.priority_key
            raise KeyNotFoundError(f"the sample has no entry {missing!r}, which tells the priorities of its rows")
        if index.ndim == 2 and self._storage.ndim == 1:
            index = index[:, 0]
        self.update_priority(index, self._reduced(priority, index.shape[0]))

    def _finished(self, batch: Any, info: dict[Any, Any]) -> Any:
        if isinstance(batch, list):
            batch = collated(batch) if self._collate is None else self._collate(batch)
        if type(batch) is TensorDict or (is_collection(batch) and not tdstore.is_tensorclass(batch)):
            index = info["index"]
            batch.set("index", torch.stack(index, -1) if isinstance(index, tuple) else index)
            weight = info.get("priority_weight")
            if weight is not None:
                batch.set("priority_weight", weight)
        return super()._finished(batch, info)


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A replay buffer of TensorDicts that are chosen by priorities.

    Args:
        alpha, beta, eps, reduction: as `PrioritizedSampler`.
        priority_key: entry with the priorities.
        storage, **kwargs: as `ReplayBuffer`.

    Example:
        >>> rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(10), batch_size=5)
        >>> _ = rb.extend(TensorDict({"obs": torch.zeros(4, 3)}, [4]))
        >>> sample = rb.sample()
        >>> sample["td_error"] = torch.rand(5)
        >>> rb.update_tensordict_priority(sample)
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        priority_key: Any = "td_error",
        eps: float = 1e-8,
        storage: Any = None,
        reduction: Any = "max",
        **kwargs: Any,
    ) -> None:
        storage = made_part("storage", storage, lambda: ListStorage(1000), is_storage)
        sampler = PrioritizedSampler(storage.max_size, alpha, beta, eps, reduction=reduction)
        super().__init__(priority_key=priority_key, storage=storage, sampler=sampler, **kwargs)
