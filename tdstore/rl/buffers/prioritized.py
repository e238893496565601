"""Prioritized sampling: rows are chosen by weights that the learner sets."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from tdstore.arguments import as_device, check_flags
from tdstore.dtypes import dtype_name
from tdstore.errors import InvalidArgumentError, InvalidStateError, InvalidTypeError, OutOfRangeError, StateDictError
from tdstore.rl.buffers.samplers import Info, Sampler, as_slots
from tdstore.rl.buffers.segment_tree import SegmentTree
from tdstore.rl.storages.base import Storage
from tdstore.rl.tables.state import Ints, State
from tdstore.rl.types import Priorities, RowIndex
from tdstore.types import DeviceLike

_MOST = 1 << 40
Reduction = Literal["max", "min", "median", "mean"]
Floats = npt.NDArray[np.float64]
_INFINITY = np.array(np.inf).view(np.uint64)[()]
_PLAIN = (torch.float32, torch.float64)
"""Dtypes of priorities that are used unchanged."""


class PrioritizedSampler(Sampler):
    """Rows by their priorities: P(i) is proportional to (p(i) + eps) ** alpha.

    A new row gets the largest priority that was ever set (1.0 before any was). Each sample comes with the
    weights (P(i) / min P) ** -beta in `info["priority_weight"]`, a float32 tensor `[batch_size]`.

    Args:
        max_capacity: number of slots.
        alpha: 0 is uniform.
        beta: how far the weights correct for the priorities.
        eps: added to all priorities.
        dtype: the dtype of the weights of a sample.
        reduction: how priorities with more than one number in a row are reduced to one.
        max_priority_within_buffer: a new row gets the largest priority of the present rows, not the largest that was
            ever set.
        device: where the priorities are; only the CPU.

    Raises:
        TypeError: a device other than the CPU, or a dtype that is not of floats.
        ValueError: `alpha` or `beta` is negative or NaN, or `max_capacity` below 1.

    Example:
        >>> sampler = PrioritizedSampler(4, alpha=0.6, beta=0.4)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=2)
        >>> index = rb.extend(torch.arange(4))
        >>> rb.update_priority(index, torch.tensor([1.0, 2.0, 3.0, 4.0]))
        >>> rb.sample(return_info=True)[1]["priority_weight"].shape
        torch.Size([2])
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: Reduction = "max",
        max_priority_within_buffer: bool = False,
        device: DeviceLike | None = None,
    ) -> None:
        super().__init__()
        if device is not None and as_device(device).type != "cpu":
            raise InvalidTypeError(f"device={device!s}: priorities are kept on the CPU; leave the argument out")
        for name, value in (("alpha", alpha), ("beta", beta), ("eps", eps)):
            if not isinstance(value, (int, float, np.number)) or not (value >= 0 and math.isfinite(value)):
                raise InvalidArgumentError(f"{name} is a number of 0 or more, not {value!r}")
        if isinstance(max_capacity, bool) or not isinstance(max_capacity, (int, np.integer)) or max_capacity < 1:
            raise InvalidArgumentError(f"max_capacity is a number of slots, at least 1, not {max_capacity!r}")
        if max_capacity > _MOST:
            raise InvalidArgumentError(
                f"max_capacity={max_capacity}: priorities need a storage with a limit, give its max_size a number"
            )
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InvalidTypeError(f"dtype is one of floats, for the weights of a sample, not {dtype!r:.100}")
        if reduction not in get_args(Reduction):
            raise InvalidArgumentError(f"reduction is one of {', '.join(get_args(Reduction))}, not {reduction!r}")
        self.max_capacity = int(max_capacity)
        self.alpha, self.beta, self.eps = float(alpha), float(beta), float(eps)
        self.dtype, self.reduction = dtype, reduction
        check_flags(max_priority_within_buffer=max_priority_within_buffer)
        self.max_priority_within_buffer = max_priority_within_buffer
        self._tree = SegmentTree(self.max_capacity)
        self._largest = 1.0
        self._seen: State | None = None
        """The counters of a storage that other processes write, when it was last looked at."""

    @property
    def default_priority(self) -> float:
        """Priority of a new row: the largest that was ever set, or of the present rows."""
        if self.max_priority_within_buffer and self.alpha and (weight := self._tree.largest):
            return float(max(weight ** (1 / self.alpha) - self.eps, 0.0))
        return self._largest

    def _weight(self, priority: Any) -> Any:
        return (priority + self.eps) ** self.alpha

    def priorities(self, length: int | None = None) -> Floats:
        """Return P(i) of the first slots, float64; their sum is 1 unless there are none."""
        weights = self._tree.weights(self.max_capacity if length is None else length)
        total = weights.sum()
        return weights / total if total else weights

    def slots(self, storage: Storage, batch_size: int) -> tuple[Ints, Info]:
        """Choose slots by their priorities.

        Raises:
            RuntimeError: no row has a priority above 0, or a slot without a row has one.
        """
        total = self._tree.total
        if not total > 0 or not math.isfinite(total):
            raise InvalidStateError(
                f"the priorities add up to {total}: none of the rows can be chosen; "
                "write rows through the buffer, or set priorities with update_priority"
            )
        masses: Floats = torch.rand(batch_size, dtype=torch.float64, generator=self._rng, device="cpu").numpy()
        masses *= total
        slots, weights = self._tree.draw(masses)
        length = len(storage)
        if length < self.max_capacity and slots.max(initial=0) >= length:
            raise InvalidStateError(
                f"slot {int(slots.max())} has a priority, and the storage has {length} rows: "
                "both are restored together, by the buffer's dumps and loads"
            )
        return slots, {"priority_weight": self._corrections(weights)}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Check whether a row has a priority above 0."""
        return len(storage) > 0 and self._tree.total > 0

    def _corrections(self, weights: Floats) -> torch.Tensor:
        found = (weights / self._tree.smallest) ** -self.beta
        if self.dtype is torch.float32:  # numpy's cast takes a fraction of the time of torch's for so few numbers
            return torch.from_numpy(found.astype(np.float32))
        return torch.from_numpy(found).to(self.dtype)

    def add(self, index: RowIndex) -> None:
        """Set the largest priority for a new row."""
        self.extend(index)

    def extend(self, index: RowIndex, *, storage: Any = None) -> None:
        """Set the largest priority for new rows. A storage with more slots than the sampler makes it larger."""
        slots = as_slots(index, storage)
        if storage is not None and len(slots) and slots.max() >= self.max_capacity:
            self._grow(min(int(storage.max_size), 2 * int(slots.max()) + 2))
        self._check(slots)
        if len(slots):
            self._tree.update(slots, self._weight(self.default_priority))

    def _grow(self, slots: int) -> None:
        weights, self.max_capacity = self._tree.weights(self.max_capacity), slots
        self._tree = SegmentTree(slots)
        self._tree.update(np.arange(len(weights)), weights)

    def _unranked(self, length: int) -> Ints:
        """Return the rows that have no priority, and forget priorities beyond the rows."""
        weights = self._tree.weights(self.max_capacity)
        self._tree.update(length + np.flatnonzero(weights[length:]), 0.0)
        return np.flatnonzero(np.append(weights[:length], np.zeros(max(0, length - len(weights)))) == 0)

    def cover(self, storage: Storage) -> bool:
        """Set the largest priority for rows that have none; return whether any row had one before."""
        slots = self._unranked(len(storage))
        known = self._tree.total > 0
        if known:
            self.extend(torch.from_numpy(slots), storage=storage)
        return known

    def follow(self, storage: Any, written: Ints | None = None) -> None:
        """Set the largest priority for rows that other processes wrote.

        Args:
            storage: one that they also write to.
            written: slots whose priorities are set already.
        """
        length, now = len(storage), storage.counters
        if now == self._seen:
            return
        rows = now.rows_since(self._seen, storage.capacity)
        self._seen = now
        if rows is None:  # changed in another way
            slots = self._unranked(length)
        else:
            inner = math.prod(storage.shape[1:])
            slots = (rows.reshape(-1, 1) * inner + np.arange(inner)).reshape(-1)
            if written is not None:
                slots = np.setdiff1d(slots, written)
        self.extend(torch.from_numpy(slots), storage=storage)

    def mark_update(self, index: RowIndex, *, storage: Any = None) -> None:
        """Set the largest priority for changed rows."""
        self.extend(index, storage=storage)

    def update_priority(self, index: RowIndex, priority: Priorities, *, storage: Any = None) -> None:
        """Set priorities of rows; a row that is named twice gets the last value, and index -1 is ignored.

        Args:
            index: int64 `[n]`, or a tuple of such tensors.
            priority: a number, or a tensor `[n]` of numbers of 0 or more.
            storage: the storage of the rows; None: any slot may have a priority.

        Raises:
            ValueError: a priority is negative, NaN or infinite, or their number is wrong.
            IndexError: an index is beyond the rows of the storage.
            TypeError: the priorities are not real numbers.
        """
        slots = as_slots(index, storage)
        values, largest = ranked(priority, len(slots))  # everything is checked before anything is set
        rows = self.max_capacity if storage is None else min(self.max_capacity, len(storage))
        if len(slots) and np.maximum.reduce(slots.view(np.uint64)) >= rows:  # beyond the end, or below 0
            named = slots != -1
            slots = slots[named]
            if len(values) == len(named):
                values = values[named]
                largest = float(values.max(initial=0.0))
            self._check(slots, rows)
        if len(slots):
            self._largest = max(self._largest, largest)
            weights = self._weight(values)
            self._tree.update(slots, weights if len(weights) > 1 else float(weights[0]))

    def check_index(self, index: RowIndex, storage: Storage) -> None:
        """Check that an index names rows of the storage, or -1 for none.

        Raises:
            IndexError: it names a row beyond them.
        """
        slots = as_slots(index, storage)
        self._check(slots[slots != -1], min(self.max_capacity, len(storage)))

    def _check(self, slots: Ints, rows: int | None = None) -> None:
        limit = self.max_capacity if rows is None else rows
        if len(slots) and slots.view(np.uint64).max() >= limit:
            wrong = int(slots.max()) if slots.max() >= limit else int(slots.min())
            what = f"{limit} slots of this {type(self).__name__}"
            raise OutOfRangeError(
                f"index {wrong} is beyond the {what if limit == self.max_capacity else f'{limit} rows of the storage'}"
            )

    def empty(self) -> None:
        """Forget all priorities."""
        self._tree.clear()
        self._largest, self._seen = 1.0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of all slots, and the parameters."""
        return {
            "_weights": torch.from_numpy(self._tree.weights(self.max_capacity)), "_alpha": self.alpha,
            "_beta": self.beta, "_eps": self.eps, "_largest": self._largest, "_max_capacity": self.max_capacity,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over priorities and parameters.

        Raises:
            ValueError: there are priorities beyond the slots of this sampler.
        """
        if lacking := sorted({"_weights", "_alpha", "_beta", "_eps", "_largest"} - {*state_dict}):
            raise StateDictError(f"this state of a prioritized sampler lacks {lacking}")
        weights = state_dict["_weights"].cpu().numpy().astype(np.float64)
        if len(weights) > self.max_capacity and weights[self.max_capacity :].any():
            raise InvalidArgumentError(
                f"priorities of {len(weights)} slots do not fit the {self.max_capacity} of this sampler"
            )
        self.alpha, self.beta = float(state_dict["_alpha"]), float(state_dict["_beta"])
        self.eps, self._largest = float(state_dict["_eps"]), float(state_dict["_largest"])
        self._tree.clear()
        self._seen = None
        count = min(len(weights), self.max_capacity)
        self._tree.update(np.arange(count), weights[:count])

    def __repr__(self) -> str:
        """Return the class and its parameters."""
        return f"{type(self).__name__}(alpha={self.alpha}, beta={self.beta}, max_capacity={self.max_capacity})"


def as_numbers(priority: Priorities) -> torch.Tensor:
    """Return priorities as a tensor of real numbers.

    Raises:
        TypeError: they are not real numbers.
    """
    if type(priority) is torch.Tensor and priority.dtype in _PLAIN and not priority.requires_grad:
        return priority
    try:
        received = torch.as_tensor(priority).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidTypeError(f"priority is a number or a tensor of numbers, not {priority!r:.100}") from error
    if received.is_complex():
        raise InvalidTypeError(f"priority is of real numbers, not {dtype_name(received.dtype)}")
    return received


def ranked(priority: Priorities, rows: int) -> tuple[Floats, float]:
    """Return the priorities of that many rows, `[rows]` or `[1]`, checked, and the largest of them.

    Raises:
        ValueError: one is negative, NaN or infinite, or their number is wrong.
        TypeError: they are not real numbers.
    """
    received = as_numbers(priority)
    if received.ndim != 1:
        received = received.reshape(-1)
    if received.dtype is torch.float32 and received.is_cpu:  # numpy casts few numbers faster than torch does
        values: Floats = received.numpy().astype(np.float64)
    else:
        values = received.cpu().to(torch.float64).numpy()
    if len(values) not in (1, rows):
        raise InvalidArgumentError(f"there are {len(values)} priorities for {rows} rows")
    if not len(values):
        return values, 0.0
    # As unsigned integers, the bits of finite positive numbers are in their order, and those of all others above them.
    bits = np.maximum.reduce(values.view(np.uint64))
    if bits < _INFINITY:
        return values, float(bits.view(np.float64))
    good = (values >= 0) & (values < np.inf)  # -0.0 is among the others
    if not good.all():
        wrong = int(np.flatnonzero(~good)[0])
        raise InvalidArgumentError(
            f"priority {values[wrong]} at position {wrong}: priorities are finite and not negative"
        )
    return values, float(values.max())
