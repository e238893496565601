"""Replay buffers with priorities, those of TensorDicts, and those that replace goals in hindsight."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdstore import TensorDict, TensorDictBase
from tdstore.errors import InvalidArgumentError, InvalidTypeError, KeyNotFoundError
from tdstore.rl.buffers.buffer import ReplayBuffer
from tdstore.rl.buffers.parts import is_storage, made_part
from tdstore.rl.buffers.prioritized import PrioritizedSampler, Reduction, as_numbers, ranked
from tdstore.rl.buffers.samplers import Sampler, as_slots
from tdstore.rl.buffers.slices import SliceSampler
from tdstore.rl.buffers.writers import TensorDictRoundRobinWriter, only_collections
from tdstore.rl.kinds import is_collection
from tdstore.rl.storages.lists import ListStorage
from tdstore.rl.storages.tabular import TabularStorage
from tdstore.rl.tables.state import Ints
from tdstore.rl.types import SamplerPart, StoragePart
from tdstore.types import NestedKey


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
        storage: StoragePart | None = None,
        **kwargs: Any,
    ) -> None:
        made = made_part("storage", storage, lambda: ListStorage(1000), is_storage)
        reduction = kwargs.pop("reduction", "max")
        sampler = PrioritizedSampler(made.max_size, alpha, beta, eps, dtype, reduction)
        super().__init__(storage=made, sampler=sampler, **kwargs)


class TensorDictReplayBuffer(ReplayBuffer):
    """A replay buffer of TensorDicts.

    Samples have the entry "index", and entries from the sampler. `update_tensordict_priority(sample)` sets the
    priorities of its rows. The priorities of rows with an entry `priority_key` are set when the rows are written, and
    when their place is opened.

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
    _described = True

    def __init__(self, *, priority_key: NestedKey = "td_error", **kwargs: Any) -> None:
        self.priority_key = priority_key
        super().__init__(**kwargs)

    def _rank_rows(self) -> None:
        """Set the priorities of existing rows to those of their entry `priority_key`, where they have one."""
        super()._rank_rows()
        rows = np.arange(len(self._storage))
        tabular = isinstance(self._storage, TabularStorage)
        stored = self._storage.column(self.priority_key, rows) if tabular else None
        if stored is not None and bool((stored.isfinite() & (stored >= 0)).all()):
            self._sampler.update_priority(torch.from_numpy(rows), self._reduced(stored, len(rows)))

    def extend(  # type: ignore[override]  # TensorDicts only
        self, data: TensorDictBase, *, update_priority: bool | None = None
    ) -> Tensor:
        """Write TensorDicts, with the priorities in their entry `priority_key`, if they have it.

        Args:
            data: as `ReplayBuffer.extend`.
            update_priority: False: new rows get the largest priority, whatever their entry is.
        """
        if type(data) is not TensorDict and not isinstance(data, list):
            only_collections(data)
        if not self._ranks or update_priority is False:
            return super().extend(data)
        priority = self._priority_of(data, None) if is_collection(data) else None
        return self._prioritized(super().extend(data), priority)

    def _planned(self, data: Any) -> Callable[[], Tensor]:
        priority, write = self._priority_of(only_collections(data), None), super()._planned(data)
        return lambda: self._prioritized(write(), priority)

    def _prioritized(self, index: Tensor, priority: Tensor | None) -> Tensor:
        """Set the priorities that came with rows."""
        if priority is not None:
            self.update_priority(index, priority)
        return index

    def add(self, data: TensorDictBase) -> int | Tensor | None:
        """Write one TensorDict, and return its index; None if the writer dropped it."""
        slots = data.batch_size[: self._storage.ndim - 1].numel() if is_collection(data) else 1
        priority = self._priority_of(only_collections(data), slots)
        index = super().add(data)
        if priority is not None and index is not None:
            self.update_priority(torch.as_tensor(index).reshape(slots, -1).squeeze(-1), priority)
        return index

    def _priority_of(self, data: Any, slots: int | None) -> Tensor | None:
        """Return the priorities that come with rows, checked before the rows are written; None if there are none."""
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

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of the rows of a sample, from its entries "index" and `priority_key`.

        A sampler without priorities needs neither entry: nothing is set.

        Raises:
            KeyError: one of them is missing. ValueError: a priority is negative or NaN.
        """
        only_collections(data)
        if type(self._sampler).update_priority is Sampler.update_priority:
            return
        index, priority = data.get("index", None), data.get(self.priority_key, None)
        if index is None or priority is None:
            missing = "index" if index is None else self.priority_key
            raise KeyNotFoundError(f"the sample has no entry {missing!r}, which tells the priorities of its rows")
        if index.ndim == 2 and self._storage.ndim == 1:
            index = index[:, 0]
        self.update_priority(index, self._reduced(priority, index.shape[0]))


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
        priority_key: NestedKey = "td_error",
        eps: float = 1e-8,
        storage: StoragePart | None = None,
        reduction: Reduction = "max",
        **kwargs: Any,
    ) -> None:
        made = made_part("storage", storage, lambda: ListStorage(1000), is_storage)
        sampler = PrioritizedSampler(made.max_size, alpha, beta, eps, reduction=reduction)
        super().__init__(priority_key=priority_key, storage=made, sampler=sampler, **kwargs)


class HindsightStrategy(StrEnum):
    """Which row a `HERReplayBuffer` takes a goal from."""

    FUTURE = "future"
    """The row itself, or one after it in its episode."""
    FINAL = "final"
    """The last row of its episode."""
    EPISODE = "episode"
    """Any row of its episode."""
    RANDOM = "random"
    """Any row."""


class HERReplayBuffer(TensorDictReplayBuffer):
    """A replay buffer for goals, which samples rows as if what was achieved later had been the goal.

    In a share of each batch, the goal is what another row achieved, and the reward is computed again. The stored rows
    are not changed. Transforms are called with rows whose goals are replaced. Episodes end where `end_key`, or the
    entry "terminated" next to it, is true, and at the last row; they may span the end of the ring.

    Args:
        reward_fn: called with the rows whose goals were replaced; returns their rewards.
        her_ratio: the share of a batch whose goals are replaced, 0 to 1.
        strategy: a `HindsightStrategy` or its name.
        goal_key: entry with the goal. If the rows have it below "next", too, it is replaced there as well.
        achieved_goal_key: entry with what was achieved.
        reward_key: entry with the reward.
        end_key: entry that is true in the last row of an episode.
        sampler: chooses the rows of a batch. Default: `RandomSampler()`.
        **kwargs: as `TensorDictReplayBuffer`.

    Raises:
        ValueError: `her_ratio` or `strategy` is out of its range. TypeError: `reward_fn` is not callable, or the
            storage has objects instead of entries.

    Example:
        >>> def reward(rows):
        ...     return (rows["achieved_goal"] == rows["desired_goal"]).float()
        >>> rb = HERReplayBuffer(reward, her_ratio=1.0, strategy="final", storage=LazyTensorStorage(9), batch_size=3)
        >>> done = torch.tensor([[False], [False], [True]])
        >>> after = TensorDict({"reward": torch.zeros(3, 1), "done": done}, [3])
        >>> goals = {"achieved_goal": torch.arange(3.0).view(3, 1), "desired_goal": torch.full((3, 1), 7.0)}
        >>> _ = rb.extend(TensorDict({**goals, "next": after}, [3]))
        >>> rb.sample()["desired_goal"].flatten()
        tensor([2., 2., 2.])
    """

    def __init__(
        self,
        reward_fn: Callable[[Any], Tensor],
        *,
        her_ratio: float = 0.8,
        strategy: HindsightStrategy | str = "future",
        goal_key: NestedKey = "desired_goal",
        achieved_goal_key: NestedKey = "achieved_goal",
        reward_key: NestedKey = ("next", "reward"),
        end_key: NestedKey = ("next", "done"),
        sampler: SamplerPart | None = None,
        **kwargs: Any,
    ) -> None:
        if not callable(reward_fn):
            raise InvalidTypeError(f"reward_fn is a function of rows, not {type(reward_fn).__name__}")
        if not 0 <= her_ratio <= 1:
            raise InvalidArgumentError(f"her_ratio is a share, 0 to 1, not {her_ratio}")
        if strategy not in list(HindsightStrategy):
            raise InvalidArgumentError(f"strategy is one of {', '.join(HindsightStrategy)}, not {strategy!r}")
        self.reward_fn, self.her_ratio, self.strategy = reward_fn, her_ratio, HindsightStrategy(strategy)
        self.goal_key, self.achieved_goal_key = goal_key, achieved_goal_key
        self.reward_key, self.end_key = reward_key, end_key
        path = (end_key,) if isinstance(end_key, str) else tuple(end_key)
        self._episodes = SliceSampler(slice_len=1, end_keys=[path, (*path[:-1], "terminated")])
        super().__init__(sampler=sampler, **kwargs)

    def _begin(self) -> None:
        super()._begin()
        if not isinstance(self._storage, TabularStorage):
            raise InvalidTypeError(f"goals are entries of rows, and a {type(self._storage).__name__} has objects")

    def _finished(self, batch: Any, info: dict[Any, Any]) -> Any:
        rows = torch.randperm(len(batch), generator=self._generator, device="cpu")[: round(self.her_ratio * len(batch))]
        if len(rows):
            with self._lock:
                slots = self._goal_slots(as_slots(info["index"], self._storage)[rows.numpy()])
                goals = self._storage.column(self.achieved_goal_key, slots)
            path = (self.goal_key,) if isinstance(self.goal_key, str) else tuple(self.goal_key)
            for key, value in ((self.achieved_goal_key, goals), (path, batch.get(path, None))):
                if value is None:
                    raise KeyNotFoundError(f"the rows have no entry {key!r}, which hindsight needs")
            for key in (path, ("next", *path)):
                if (present := batch.get(key, None)) is not None:
                    present[rows] = goals.to(present)
            present = batch.get(self.reward_key)
            present[rows] = torch.as_tensor(self.reward_fn(batch[rows])).reshape(present[rows].shape).to(present)
        return super()._finished(batch, info)

    def _goal_slots(self, slots: Ints) -> Ints:
        """Choose for each row the row from which its goal is taken."""
        drawn = torch.rand(len(slots), dtype=torch.float64, generator=self._generator, device="cpu").numpy()
        if self.strategy is HindsightStrategy.RANDOM:
            return (drawn * len(self._storage)).astype(np.int64)
        found = self._episodes.look(self._storage)
        first, stops = found.containing(slots)
        if self.strategy is HindsightStrategy.EPISODE:
            begins, _ = found.begins_and_lengths()
            first = begins[begins.searchsorted(first, side="right") - 1]
        elif self.strategy is HindsightStrategy.FINAL:
            first = stops - 1
        return found.slots(first + (drawn * (stops - first)).astype(np.int64))
