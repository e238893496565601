"""Samplers, which choose the slots of a batch."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tdstore
from tdstore.arguments import check_flags
from tdstore.errors import InvalidArgumentError, InvalidStateError, InvalidTypeError, KeyNotFoundError, OutOfRangeError
from tdstore.rl.storages.base import Storage
from tdstore.rl.storages.tabular import TabularStorage
from tdstore.rl.tables.state import Ints
from tdstore.rl.types import Priorities, RowIndex
from tdstore.types import NestedKey

_FILE = "sampler_metadata.json"
_FILE_OF_TORCHRL = "meta.json"
Info = dict[Any, Any]


class Sampler(ABC):
    """Base of samplers, which choose the slots of a batch.

    Example:
        >>> class Newest(Sampler):
        ...     def slots(self, storage, batch_size):
        ...         return np.arange(len(storage) - batch_size, len(storage)), {}
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=Newest(), batch_size=2)
        >>> _ = rb.extend(torch.arange(5))
        >>> rb.sample()
        tensor([3, 4])
    """

    ran_out = False
    """Whether the last batch ended a pass over all rows."""

    def __init__(self) -> None:
        self._rng: torch.Generator | None = None

    @abstractmethod
    def slots(self, storage: Storage, batch_size: int) -> tuple[Ints, Info]:
        """Choose slots, counted over all their dimensions, and report what else is known about them.

        Args:
            storage: a storage with rows.
            batch_size: how many slots.
        """

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, Info]:
        """Choose slots.

        Returns:
            int64 indices `[batch_size]`, a tuple of such tensors where slots have several dimensions, and a dict.

        Raises:
            RuntimeError: the storage is empty.
        """
        if not len(storage):
            raise InvalidStateError("the storage is empty: there is nothing to sample")
        slots, info = self.slots(storage, batch_size)
        return as_index(slots, storage), info

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Check whether a batch of this many slots can be sampled from the storage; nothing is drawn."""
        return len(storage) > 0

    def available(self, storage: Storage, batch_size: int) -> int:
        """Return how many places there are to sample from: rows, or places where a piece can begin."""
        return len(storage)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from that generator from now on."""
        self._rng = generator

    def batches_left(self, storage: Storage, batch_size: int) -> int | None:
        """Return the number of batches left in this pass; None: there is no end."""
        return None

    # Notifications of buffers; most samplers need none of them.
    def add(self, index: RowIndex) -> None:
        """Record that a row was written."""

    def extend(self, index: RowIndex) -> None:
        """Record that rows were written."""

    def mark_update(self, index: RowIndex, *, storage: Storage | None = None) -> None:
        """Record that rows were changed."""

    def update_priority(self, index: RowIndex, priority: Priorities, *, storage: Storage | None = None) -> None:
        """Update the priorities of rows; samplers without priorities do nothing.

        Args:
            index: int64 `[n]`, or a tuple of such tensors.
            priority: a number, or numbers `[n]`.
            storage: the storage of the rows.
        """

    def empty(self) -> None:
        """Reset after all rows are gone."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the sampler."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there."""

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write the state into a folder: numbers as JSON, arrays beside them."""
        folder = FilePath(path)
        folder.mkdir(parents=True, exist_ok=True)
        plain = {}
        for key, value in self.state_dict().items():
            if isinstance(value, Tensor):
                np.save(folder / f"{key.lstrip('_')}.npy", value.cpu().numpy(), allow_pickle=False)
            else:
                plain[key.lstrip("_")] = value
        (folder / _FILE).write_text(json.dumps(plain))

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Take over the state of a folder, including one of torchrl."""
        folder = FilePath(path)
        if not (folder / _FILE).exists() and (folder / _FILE_OF_TORCHRL).exists():
            with tdstore.open(folder) as found:
                self.load_state_dict(found.clone().to_dict())
            return
        named = json.loads((folder / _FILE).read_text())
        state: dict[str, Any] = {f"_{key}": value for key, value in named.items()}
        for file in folder.glob("*.npy"):
            state[f"_{file.stem}"] = torch.from_numpy(np.load(file, allow_pickle=False))
        self.load_state_dict(state)

    def __repr__(self) -> str:
        """Return the class name."""
        return f"{type(self).__name__}()"


class RandomSampler(Sampler):
    """Any slot with the same probability, with replacement.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(), batch_size=20)
        >>> _ = rb.extend(torch.ones(5))
        >>> rb.sample().shape
        torch.Size([20])
    """

    def slots(self, storage: Storage, batch_size: int) -> tuple[Ints, Info]:
        """Choose slots."""
        return torch.randint(len(storage), (batch_size,), generator=self._rng, device="cpu").numpy(), {}


class SamplerWithoutReplacement(Sampler):
    """Each slot once, then again from the beginning.

    Args:
        drop_last: leave out the last batch of a pass if it is smaller than the others.
        shuffle: whether the order is a new random one in each pass.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(shuffle=False))
        >>> _ = rb.extend(torch.arange(10))
        >>> rb.sample(4), rb.sample(4), rb.sample(4)
        (tensor([0, 1, 2, 3]), tensor([4, 5, 6, 7]), tensor([8, 9]))
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        super().__init__()
        check_flags(drop_last=drop_last, shuffle=shuffle)
        self.drop_last, self.shuffle = drop_last, shuffle
        self._order = np.zeros(0, np.int64)
        self._at = 0
        self._length = 0

    def slots(self, storage: Storage, batch_size: int) -> tuple[Ints, Info]:
        """Choose the next slots of the pass.

        Raises:
            ValueError: with `drop_last`, a batch is larger than the storage.
        """
        length = len(storage)
        if self.drop_last and batch_size > length:
            raise InvalidArgumentError(f"drop_last leaves nothing of {length} rows in batches of {batch_size}")
        if length != self._length or self._at >= length:
            self._begin(length)
        stop = min(length, self._at + batch_size)
        picked = self._order[self._at : stop] if self.shuffle else np.arange(self._at, stop)
        self._at = stop
        left = length - stop
        self.ran_out = left < batch_size if self.drop_last else left == 0
        if self.ran_out:
            self._at = length
        return picked, {}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Check whether there is a batch: with `drop_last`, only whole ones count."""
        return len(storage) >= (batch_size if self.drop_last else 1)

    def _begin(self, length: int) -> None:
        self._length, self._at = length, 0
        if self.shuffle:
            self._order = torch.randperm(length, generator=self._rng, device="cpu").numpy()

    def batches_left(self, storage: Storage, batch_size: int) -> int | None:
        """Return the number of batches left in this pass."""
        length = len(storage)
        left = length if length != self._length or self._at >= length else length - self._at
        return left // batch_size if self.drop_last else -(-left // batch_size)

    def empty(self) -> None:
        """Reset after all rows are gone, and begin a new pass."""
        self._length = self._at = 0
        self.ran_out = False

    def state_dict(self) -> dict[str, Any]:
        """Return the order of this pass, and its position."""
        return {
            "_order": torch.from_numpy(self._order.copy()), "_at": self._at, "_length": self._length,
            "_ran_out": self.ran_out, "_drop_last": self.drop_last, "_shuffle": self.shuffle,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue in the middle of a pass, including one of torchrl."""
        if "_sample_list" in state_dict:  # of torchrl: what is left of the pass
            left, length = state_dict["_sample_list"].cpu(), int(state_dict["len_storage"])
            done = torch.zeros(max(0, length - len(left)), dtype=torch.int64, device="cpu")
            position = {"_order": torch.cat([done, left.long()]), "_at": len(done), "_length": length}
            others = {"_ran_out": state_dict["_ran_out"], "_drop_last": state_dict["drop_last"]}
            state_dict = {**position, **others, "_shuffle": self.shuffle}
        self._order = state_dict["_order"].clone().numpy()
        self._at, self._length = int(state_dict["_at"]), int(state_dict["_length"])
        self.ran_out = bool(state_dict["_ran_out"])
        self.drop_last, self.shuffle = bool(state_dict["_drop_last"]), bool(state_dict["_shuffle"])


class ConsumingSampler(Sampler):
    """Any slot with the same probability, each a limited number of times.

    No row is twice in a batch, so the last one may be smaller. A row that is written again counts from zero. The length
    of a buffer with this sampler is the number of rows that are left. Each sample reads the counts of all rows.

    Args:
        max_sample_count: how many times a row is sampled.

    Raises:
        ValueError: `max_sample_count` is not a number of at least 1.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler(), batch_size=3)
        >>> _ = rb.extend(torch.arange(4))
        >>> rb.sample().shape, len(rb)
        (torch.Size([3]), 1)
    """

    def __init__(self, max_sample_count: int = 1) -> None:
        super().__init__()
        if isinstance(max_sample_count, bool) or not isinstance(max_sample_count, int) or max_sample_count < 1:
            raise InvalidArgumentError(f"a row is sampled at least once, not max_sample_count={max_sample_count!r}")
        self.max_sample_count = max_sample_count
        self._counts = np.zeros(0, np.int64)
        """How many times each slot was sampled since it was written."""

    def _reach(self, slots: int) -> None:
        if slots > len(self._counts):
            self._counts = np.append(self._counts, np.zeros(slots - len(self._counts), np.int64))

    def left(self, storage: Storage) -> Ints:
        """Return the slots that can still be sampled."""
        self._reach(len(storage))
        return np.flatnonzero(self._counts[: len(storage)] < self.max_sample_count)

    def slots(self, storage: Storage, batch_size: int) -> tuple[Ints, Info]:
        """Choose slots, and count them.

        Raises:
            RuntimeError: none is left, or slots have several dimensions.
        """
        if storage.ndim > 1:
            raise InvalidStateError("rows are sampled a limited number of times where slots have one dimension: ndim=1")
        left = self.left(storage)
        if not len(left):
            raise InvalidStateError(
                f"all {len(storage)} rows were sampled as often as they may be (max_sample_count="
                f"{self.max_sample_count}): write more"
            )
        picked: Ints = left[torch.randperm(len(left), generator=self._rng, device="cpu").numpy()[:batch_size]]
        self._counts[picked] += 1
        self.ran_out = not len(self.left(storage))
        return picked, {}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Check whether a row is left."""
        return len(self.left(storage)) > 0

    def batches_left(self, storage: Storage, batch_size: int) -> int | None:
        """Return the number of batches of rows that were not sampled yet, or may be again."""
        self._reach(len(storage))
        often = self.max_sample_count - self._counts[: len(storage)]
        return max(int(often.max(initial=0)), -(-int(often.sum()) // batch_size))

    def add(self, index: RowIndex) -> None:
        """Count a row that was written from zero."""
        self.extend(index)

    def extend(self, index: RowIndex, *, storage: Any = None) -> None:
        """Count rows that were written from zero."""
        if index is None:
            return
        slots = as_slots(index, storage)
        slots = slots[slots >= 0]
        self._reach(int(slots.max(initial=-1)) + 1)
        self._counts[slots] = 0
        self.ran_out = False

    def empty(self) -> None:
        """Reset after all rows are gone."""
        self._counts = np.zeros(0, np.int64)
        self.ran_out = False

    def state_dict(self) -> dict[str, Any]:
        """Return how many times each slot was sampled."""
        return {"_counts": torch.from_numpy(self._counts.copy()), "_max_sample_count": self.max_sample_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting."""
        self._counts = state_dict["_counts"].clone().numpy()
        self.max_sample_count = int(state_dict["_max_sample_count"])

    def __repr__(self) -> str:
        """Return the class and the limit."""
        return f"{type(self).__name__}(max_sample_count={self.max_sample_count})"


class StalenessAwareSampler(Sampler):
    """Rows by the age of the policy that made them, called staleness: `consumer_version` less the version of the row.

    No row is twice in a batch, unless there are fewer rows to choose from than a batch has. Each sample reads the
    versions of all rows. Samples of TensorDicts have the staleness of their rows as the entry "staleness", float32
    `[batch_size]`.

    Args:
        max_staleness: rows that are staler are not sampled; -1: there is no limit.
        staleness_weight_fn: returns the weights of rows by their staleness, float32 `[n]`; by default
            `1 / (staleness + 1)`. Rows without weight are not sampled.
        version_key: entry with the version of the policy, one number per row. A version newer than the consumer's
            counts as the consumer's.

    Raises:
        TypeError: `staleness_weight_fn` is not a function.

    Example:
        >>> sampler = StalenessAwareSampler(max_staleness=1)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=2)
        >>> _ = rb.extend(TensorDict({"policy_version": torch.tensor([0, 1, 2, 3])}, [4]))
        >>> sampler.consumer_version = 3
        >>> rb.sample()["policy_version"].sort().values
        tensor([2, 3])
    """

    def __init__(
        self,
        max_staleness: int = -1,
        staleness_weight_fn: Callable[[Tensor], Tensor] | None = None,
        version_key: NestedKey = "policy_version",
    ) -> None:
        super().__init__()
        if staleness_weight_fn is not None and not callable(staleness_weight_fn):
            raise InvalidTypeError(f"staleness_weight_fn is a function, not {staleness_weight_fn!r:.100}")
        self.max_staleness, self.version_key = max_staleness, version_key
        self.staleness_weight_fn = staleness_weight_fn
        self.consumer_version = 0

    def increment_consumer_version(self) -> None:
        """Add 1 to the version of the policy that is trained."""
        self.consumer_version += 1

    def _weights(self, storage: Any) -> tuple[Tensor, Tensor]:
        """Return the staleness and the weight of each row."""
        versions = (
            storage.column(self.version_key, np.arange(len(storage))) if isinstance(storage, TabularStorage) else None
        )
        if versions is None or versions.numel() != len(storage):
            raise KeyNotFoundError(
                f"the rows have no entry {self.version_key!r} with the version of the policy, one number a row"
            )
        staleness = (self.consumer_version - versions.reshape(-1).cpu().to(torch.float64)).clamp_(min=0).float()
        weigh = self.staleness_weight_fn
        weights = 1 / (staleness + 1) if weigh is None else torch.as_tensor(weigh(staleness)).reshape(-1)
        if weights.shape != staleness.shape or not bool((weights >= 0).all()):
            raise InvalidArgumentError("staleness_weight_fn returns a weight of 0 or more for each row")
        if self.max_staleness >= 0:
            weights = weights.float().masked_fill(staleness > self.max_staleness, 0.0)
        return staleness, weights

    def slots(self, storage: Storage, batch_size: int) -> tuple[Ints, Info]:
        """Choose slots by the weights of their staleness.

        Raises:
            RuntimeError: all rows are too stale, or without weight. KeyError: they have no version.
            ValueError: `staleness_weight_fn` does not return a weight for each row.
        """
        staleness, weights = self._weights(storage)
        several = int(weights.count_nonzero())
        if not several:
            raise InvalidStateError(
                f"all {len(weights)} rows are staler than max_staleness={self.max_staleness}, or have no weight, at "
                f"consumer_version={self.consumer_version}"
            )
        picked = torch.multinomial(weights, batch_size, batch_size > several, generator=self._rng)
        return picked.numpy(), {"staleness": staleness[picked]}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Check whether a row is fresh enough."""
        return len(storage) > 0 and bool(self._weights(storage)[1].any())

    def state_dict(self) -> dict[str, Any]:
        """Return the version of the policy that is trained, and the limit."""
        return {"_consumer_version": self.consumer_version, "_max_staleness": self.max_staleness}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with that version."""
        self.consumer_version = int(state_dict["_consumer_version"])
        self.max_staleness = int(state_dict["_max_staleness"])

    def __repr__(self) -> str:
        """Return the class, the version and the limit."""
        return f"{type(self).__name__}(consumer_version={self.consumer_version}, max_staleness={self.max_staleness})"


def as_index(slots: Ints, storage: Any) -> Tensor | tuple[Tensor, ...]:
    """Return slots as an index of a storage: a tensor, or a tuple of one for each dimension of slots."""
    if storage.ndim == 1:
        return torch.from_numpy(slots)
    return tuple(torch.from_numpy(part) for part in np.unravel_index(slots, tuple(storage.shape)))


def as_slots(index: RowIndex, storage: Any) -> Ints:
    """Return the slots that an index names: the inverse of `as_index`; coordinates `[n, ndim]` too.

    Raises:
        IndexError: numbers that are not integers. TypeError: not numbers.
    """
    ndim = storage.ndim if storage is not None else 1
    if ndim == 1 and isinstance(index, Tensor) and index.ndim == 1 and index.dtype is torch.int64 and index.is_cpu:
        slots: Ints = index.numpy()
        return slots
    if ndim > 1:
        if isinstance(index, Tensor) and index.ndim == 2:
            index = index.unbind(-1)
        if isinstance(index, (tuple, list)) and len(index) == ndim:
            parts = np.broadcast_arrays(*(np.asarray(torch.as_tensor(part).cpu()) for part in index))
            shape = (int(storage.capacity), *storage.shape[1:])
            return np.ravel_multi_index(tuple(parts), shape).reshape(-1).astype(np.int64)
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    try:
        found = np.asarray(torch.as_tensor(index).cpu()).reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidTypeError(f"index is an integer or a tensor of integers, not {index!r:.100}") from error
    if found.size and found.dtype.kind not in "iu":
        raise OutOfRangeError(f"index is of integers, not {found.dtype}")
    return found.astype(np.int64)
