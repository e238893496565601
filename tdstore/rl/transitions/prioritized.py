"""Prioritized replay of transitions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tdstore import TensorDict
from tdstore.arguments import check_number
from tdstore.errors import InvalidArgumentError
from tdstore.rl.buffers.prioritized import as_numbers
from tdstore.rl.buffers.samplers import as_slots
from tdstore.rl.buffers.segment_tree import SegmentTree
from tdstore.rl.tables.state import State
from tdstore.rl.transitions.replay import Ints, ReplayBuffer
from tdstore.rl.types import BackendLike

if TYPE_CHECKING:
    from tdstore import TensorDictBase

SMALLEST = 1e-5
"""The smallest priority."""
KEY = "_priority"
"""The entry of the rows that holds their priorities."""


class PrioritizedReplayBuffer(ReplayBuffer):
    """A replay buffer whose rows are sampled with probabilities proportional to `priority ** alpha`.

    New rows have the largest priority so far, 1.0 at first. Priorities are stored beside the rows, as the entry
    `_priority`, and `open` reads them there. Where each write is a request (h5, zarr, servers), the priorities that
    `update_priorities` sets are written with the next rows, at `flush` and at `close`.

    Args:
        max_size: number of rows.
        alpha: the exponent of priorities; 0 samples uniformly.
        device, dtype, storage, path, **options: as for `ReplayBuffer`.

    Raises:
        ValueError: `alpha` is negative or not finite.

    Example:
        >>> buffer = PrioritizedReplayBuffer(10)
        >>> buffer.add(tdstore.TensorDict({"obs": torch.arange(4)}, [4]))
        >>> batch = buffer.sample(2, beta=0.4)
        >>> buffer.update_priorities(batch["idxs"], torch.tensor([0.5, 2.0]))
        >>> batch["weights"].shape, buffer.max_priority
        (torch.Size([2, 1]), 2.0)
    """

    def __init__(
        self,
        max_size: int,
        alpha: float = 0.6,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        storage: BackendLike | None = None,
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        check_number(alpha, "alpha", 0)
        super().__init__(max_size, device, dtype, storage=storage, path=path, **options)
        self.alpha = alpha
        self.max_priority = 1.0
        self._tree = SegmentTree(max_size)
        self._unwritten: dict[int, float] = {}
        """Priorities of rows that are newer than those in their place."""
        self._seen: State | None = None
        """The counters of rows that other processes write, when they were last looked at."""

    def _reopened(self) -> None:
        self._have_entry()
        self._take_from_place(np.arange(self.size))

    def _have_entry(self) -> None:
        """Add the missing entry to rows of a buffer without priorities."""
        slots = np.arange(self.size)
        if self._rows.initialized and KEY not in self._rows.entries:
            self._rows.add_entries(TensorDict({KEY: torch.ones(1, dtype=torch.float64, device="cpu")}, [1]))
            self._rows.put_values(KEY, slots, torch.ones(len(slots), dtype=torch.float64, device="cpu"))

    def _take_from_place(self, slots: Ints) -> None:
        """Set the priorities of rows to the stored ones."""
        found = self._rows.column(KEY, slots)
        assert found is not None
        there = found.cpu().numpy()
        there = np.where(np.isfinite(there) & (there >= SMALLEST), there, 1.0)
        self._tree.update(slots, there**self.alpha)
        self.max_priority = max(self.max_priority, float(there.max(initial=0.0)))

    def _follow(self, written: Ints | None = None) -> None:
        """Read the priorities of rows that other processes wrote, except those of `written`."""
        if not self._rows.others_write or (now := self._rows.counters) == self._seen:
            return
        rows = now.rows_since(self._seen, self.max_size)
        self._seen = now
        if rows is None:
            weights = self._tree.weights(self.max_size)
            self._tree.update(now.length + np.flatnonzero(weights[now.length :]), 0.0)
            rows = np.flatnonzero(weights[: now.length] == 0)
        elif written is not None:
            rows = np.setdiff1d(rows, written)
        self._take_from_place(rows)

    def _append(self, rows: Any) -> Ints:
        if KEY in rows:
            raise InvalidArgumentError(f"the name {KEY} is taken by the buffer itself: rename this entry")
        self._write_priorities()
        slots = super()._append(
            rows.set(KEY, torch.full((len(rows),), self.max_priority, dtype=torch.float64, device="cpu"))
        )
        self._unwritten.clear()
        self._tree.update(slots[-self.max_size :], self.max_priority**self.alpha)
        self._follow(slots)
        return slots

    def _write_priorities(self) -> None:
        """Store the priorities that are newer than the stored ones."""
        if self._unwritten:
            newer = sorted(self._unwritten.items())
            slots = np.array([slot for slot, _ in newer])
            self._rows.put_values(
                KEY, slots, torch.tensor([value for _, value in newer], dtype=torch.float64, device="cpu")
            )

    @property
    def storage(self) -> TensorDictBase | None:
        """All rows as a TensorDict `[max_size]`, without their priorities; None before the first row."""
        return self._rows.all_slots().exclude(KEY) if self.size else None

    def sample_from_indices(self, idxs: Tensor | list[int]) -> TensorDictBase:
        """Return rows by their positions, as a copy.

        Args:
            idxs: int64 `[n]` or `[n, 1]`.

        Raises:
            EmptyBufferError: there are no rows. IndexError: a position has no row.
        """
        return super().sample_from_indices(idxs).exclude(KEY, inplace=True)

    @property
    def total_priority(self) -> float:
        """The sum of `priority ** alpha` over all rows."""
        return self._tree.total

    @property
    def priorities(self) -> Tensor:
        """The stored `priority ** alpha` of each row, float64 `[size]`."""
        return torch.from_numpy(self._tree.weights(self.size))

    def sample(self, batch_size: int, return_idx: bool = True, *, beta: float = 0.4) -> TensorDictBase:
        """Sample exactly `batch_size` rows, one from each equal share of the priorities, as a copy.

        Args:
            batch_size: number of rows.
            return_idx: no effect; `idxs` is always part of the result.
            beta: how far the weights correct for the priorities; 1 corrects in full.

        Returns:
            A TensorDict `[batch_size]` with `weights`, float32 `[batch_size, 1]`, 1 at most, and `idxs`, int64
            `[batch_size, 1]`.

        Raises:
            EmptyBufferError: there are no rows. ValueError: `beta` is negative.
        """
        check_number(beta, "beta", 0)
        self._check_size(batch_size)
        self._follow()
        share = self._tree.total / batch_size
        masses = (
            torch.arange(batch_size, dtype=torch.float64, device="cpu")
            + torch.rand(batch_size, dtype=torch.float64, device="cpu")
        ) * share
        slots, chosen = self._tree.draw(masses.numpy())
        weights = (chosen / self._tree.smallest) ** -beta
        batch: TensorDictBase = self._rows.take_slots(slots)
        del batch[KEY]
        device = batch.device or "cpu"
        batch.set("weights", torch.from_numpy(weights).float().unsqueeze(-1).to(device))
        batch.set("idxs", torch.from_numpy(slots).unsqueeze(-1).to(device))
        return batch

    def update_priorities(self, idxs: Tensor | list[int], priorities: Tensor | list[float]) -> None:
        """Set the priorities of rows; for a row that occurs twice, the last priority counts.

        Args:
            idxs: int64 `[n]` or `[n, 1]`, as in the result of `sample`.
            priorities: `[n]` or `[n, 1]`; smaller ones are stored as 1e-5.

        Raises:
            IndexError: a position has no row. ValueError: the numbers of positions and priorities differ, or a
                priority is not finite. After an error nothing is changed.
        """
        slots = as_slots(idxs, None)
        values = as_numbers(priorities).reshape(-1).cpu().double().numpy()
        if len(slots) != len(values):
            raise InvalidArgumentError(f"{len(values)} priorities for {len(slots)} rows")
        if not len(slots):
            return
        if not np.isfinite(values).all():
            raise InvalidArgumentError(f"priorities are finite numbers, and one is {values[~np.isfinite(values)][0]}")
        slots = self._rows.check_slots(slots)
        self._follow()
        values = np.maximum(values, SMALLEST)
        if self._rows.by_request:
            self._unwritten.update(zip(slots.tolist(), values.tolist(), strict=True))
        else:
            self._rows.put_values(KEY, slots, torch.from_numpy(values))
        self._tree.update(slots, values**self.alpha)
        self.max_priority = max(self.max_priority, float(values.max()))

    def _facts(self) -> Any:
        facts = super()._facts()
        facts["priorities"] = torch.from_numpy(self._tree.weights(self.max_size))
        facts["max_priority"] = torch.tensor(self.max_priority, dtype=torch.float64, device="cpu")
        return facts

    def _take_facts(self, facts: Any) -> None:
        super()._take_facts(facts)
        self._have_entry()
        weights = facts["priorities"].numpy()[: self.size]
        self._tree.clear()
        self._tree.update(np.arange(len(weights)), weights)
        self.max_priority = float(facts["max_priority"])
        self._unwritten.clear()
        self._seen = self._rows.counters

    def clear(self) -> None:
        """Remove all rows and their priorities. `counter` is not reset."""
        super().clear()
        self._tree.clear()
        self._unwritten.clear()
        self.max_priority, self._seen = 1.0, None

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint to a folder: the rows, their priorities and the state of the buffer."""
        self._write_priorities()
        super().dumps(path)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows, their priorities and the state of the buffer, as tensors and plain data."""
        self._write_priorities()
        return super().state_dict()

    def flush(self) -> None:
        """Make rows and priorities durable, if the backend can."""
        self._write_priorities()
        super().flush()
        self._unwritten.clear()

    def close(self) -> None:
        """Commit, and close the storage."""
        self._write_priorities()
        super().close()
