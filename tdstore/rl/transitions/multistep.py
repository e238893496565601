"""Transitions of several steps, folded into one."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import tdstore
from tdstore import TensorDict
from tdstore.arguments import check_int, check_number
from tdstore.errors import InvalidArgumentError, InvalidStateError, MissingEntryError
from tdstore.rl.tables.columns import fit_value
from tdstore.rl.tables.conversion import structure_of
from tdstore.rl.transitions.replay import ReplayBuffer
from tdstore.rl.types import BackendLike

if TYPE_CHECKING:
    from tdstore import TensorDictBase

DONE_KEYS = ("done", "termination", "terminated")
"""The entries that mark the end of an episode; the first one that exists is used."""


class MultiStepReplayBuffer(ReplayBuffer):
    """A replay buffer of n-step transitions.

    A folded transition has the entries of the first step, except for the reward, which is the sum of
    `gamma ** i * reward_i`, and for `next_obs` and the done flag, which are those of the last step used. It ends with
    the first step that ends an episode, separately for each row and for each agent.

    Args:
        max_size: number of rows.
        n_step: number of steps.
        gamma: the discount of one step.
        device, dtype, storage, path, **options: as for `ReplayBuffer`.

    Raises:
        ValueError: `n_step` is below 1, or `gamma` is not finite.

    Example:
        >>> buffer = MultiStepReplayBuffer(10, n_step=2, gamma=0.5)
        >>> def step(i):
        ...     data = {"obs": torch.tensor([i]), "reward": torch.tensor([float(i)]),
        ...             "next_obs": torch.tensor([i + 1]), "done": torch.tensor([0.0])}
        ...     return tdstore.TensorDict(data, [1])
        >>> buffer.add(step(1)) is None, buffer.add(step(2))["obs"].item(), buffer.storage["reward"][0].item()
        (True, 1, 2.0)
    """

    def __init__(
        self,
        max_size: int,
        n_step: int = 3,
        gamma: float = 0.99,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        storage: BackendLike | None = None,
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        check_int(n_step, "n_step")
        if n_step < 1:
            raise InvalidArgumentError(f"n_step is at least 1, not {n_step}")
        check_number(gamma, "gamma")
        super().__init__(max_size, device, dtype, storage=storage, path=path, **options)
        self.n_step = n_step
        self.gamma = gamma
        self._queue: deque[tuple[Any, Any]] = deque()
        """Steps as they came, and as they are stored."""

    def add(self, data: TensorDictBase) -> TensorDictBase | None:
        """Queue a step; with `n_step` steps, store the folded transition and return the oldest step unchanged.

        Args:
            data: a TensorDict or tensorclass of batch size `[n]`: one step of n environments.

        Returns:
            The oldest step, None while fewer than `n_step` are queued.

        Raises:
            MissingEntryError: there is no `reward`, `next_obs` or done flag. RuntimeError: the number of environments,
                or the shape of an entry, differs. KeyError: an entry of earlier steps is missing. After an error
                nothing is changed.
        """
        step = self._ready(data)
        for name in ("reward", "next_obs"):
            if step.get(name, None) is None:
                raise MissingEntryError(f"a step has an entry {name!r}, and this one has none")
        _done_key(step)
        if self._queue and self._queue[0][1].batch_size != step.batch_size:
            raise InvalidStateError(
                f"a step of {step.batch_size[0]} environments follows steps of {self._queue[0][1].batch_size[0]}: "
                "flush() or clear() before their number changes"
            )
        self._check_step(step)
        self._queue.append((data, step))
        if len(self._queue) < self.n_step:
            return None
        try:
            self._append(self._folded())
        except BaseException:
            self._queue.pop()
            raise
        oldest: TensorDictBase = self._queue.popleft()[0]
        return oldest

    def _check_step(self, step: Any) -> None:
        """Check that a step can be stored later: one that cannot would be in the way of all that follow it."""
        if self._rows.initialized:
            known = self._rows.entries
            self._rows.check_rows(step.select(*known) if self._adds_entries(step) else step)
        elif self._queue:
            structure = structure_of(self._queue[0][1], 1, ())
            known = {column.path[0] if len(column.path) == 1 else column.path for column in structure.columns}
            values = structure.take(step.select(*known, strict=False))
            for column, value in zip(structure.columns, values, strict=True):
                if not column.values:
                    fit_value(value, column, (len(step), *column.shape), lenient=True)

    def flush(self) -> None:
        """Store the queued steps as transitions of fewer steps, and make all rows durable."""
        while self._queue:
            self._append(self._folded())
            self._queue.popleft()
        super().flush()

    def clear(self) -> None:
        """Remove all rows and all queued steps. `counter` is not reset."""
        self._queue.clear()
        super().clear()

    def _facts(self) -> Any:
        facts = super()._facts()
        queued = [step.to_tensordict() for step, _ in self._queue]  # of a tensorclass, its entries
        facts["queue"] = TensorDict({str(number): step for number, step in enumerate(queued)})
        return facts

    def _take_facts(self, facts: Any) -> None:
        super()._take_facts(facts)
        queue = facts["queue"]
        steps = [queue[str(number)] for number in range(len(queue.keys()))]
        for step in steps:  # a dict has no batch size
            step.batch_size = step["reward"].shape[:1]
        self._queue = deque((step, self._ready(step)) for step in steps)

    def _folded(self) -> Any:
        """Fold all queued steps into one transition."""
        steps = [step for _, step in self._queue]
        there = steps[-1].keys()
        names = [name for name in (*DONE_KEYS, "truncation", "truncated", "next_obs") if name in there]
        last = {name: steps[-1].get(name) for name in names}
        reward = steps[-1].get("reward")
        for step in reversed(steps[:-1]):
            ended = step.get(_done_key(step))
            reward = _discounted(step.get("reward"), reward, ended, self.gamma)
            last = {name: _chosen(ended, step.get(name), value) for name, value in last.items()}
        return steps[0].clone(False).update({"reward": reward, **last})


def _done_key(step: Any) -> str:
    for name in DONE_KEYS:
        if step.get(name, None) is not None:
            return name
    raise MissingEntryError(f"a step has one of the entries {', '.join(map(repr, DONE_KEYS))}, and this one has none")


def _discounted(now: Any, later: Any, ended: Any, gamma: float) -> Any:
    """Add the discounted later reward to the present one, unless the episode ended; a TensorDict has one per agent."""
    if isinstance(now, Tensor):
        later = later.to(now.device)  # steps of a checkpoint are on the CPU
        return now + gamma * torch.where(_mask(ended, now), torch.zeros_like(later), later)
    return _by_entry(lambda mask, a, b: _discounted(a, b, mask, gamma), ended, now, later)


def _chosen(ended: Any, now: Any, later: Any) -> Any:
    """Select the present entry where the episode ended, else the later one; a TensorDict has one per agent."""
    if isinstance(now, Tensor):
        return torch.where(_mask(ended, now), now, later.to(now.device))
    if isinstance(now, tdstore.TensorDictBase):
        return _by_entry(_chosen, ended, now, later)
    stop = _mask(ended, torch.empty(len(later), device="cpu")).tolist()  # values that are not tensors, one for each row
    return [a if end else b for end, a, b in zip(stop, now, later, strict=True)]


def _by_entry(fn: Any, ended: Any, now: Any, later: Any) -> Any:
    made = tdstore.TensorDict({}, batch_size=now.batch_size)
    for key in now.keys():  # noqa: SIM118  # iterating a TensorDict gives rows
        flags = ended.get(key, ended) if isinstance(ended, tdstore.TensorDictBase) else ended
        made[key] = fn(flags, now.get(key), later.get(key))
    return made


def _mask(ended: Any, like: Tensor) -> Tensor:
    """Build a mask of the rows whose episode ended, in a shape that broadcasts with `like`."""
    if not isinstance(ended, Tensor):
        raise MissingEntryError("the done flags are by agent, and another entry is not")
    flags = ended.bool().reshape(len(ended), -1)
    if flags.shape[1] > 1 and flags.shape[1:] != like.shape[1:2]:
        flags = flags.any(1, keepdim=True)
    return flags.reshape(len(flags), *([flags.shape[1]] if like.ndim > 1 else []), *([1] * (like.ndim - 2)))
