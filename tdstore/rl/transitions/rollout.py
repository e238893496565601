"""Steps of the current policy, in order, with advantages and returns."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import tdstore
from tdstore.errors import EmptyBufferError
from tdstore.rl.storages import LazyStorage
from tdstore.rl.transitions.conversion import to_torch_tensor

if TYPE_CHECKING:
    from tdstore import TensorDictBase


class RolloutBuffer:
    """Steps of several environments, in the order in which they were taken, for on-policy learning.

    Args:
        capacity: number of steps.
        num_envs: number of environments, which all take a step at once.
        gamma: the discount of one step.
        gae_lambda: the trade of bias for variance in advantages; 1 is none.
        device: of the steps, and of batches: a device for steps in memory, "cpu" for a backend.
        storage: where the steps lie: None for memory, the name of a backend, or a URL; see `LazyStorage`.
        path: the place, for a backend that is named.
        **options: of `LazyStorage`.

    Example:
        >>> buffer = RolloutBuffer(2, num_envs=3, gamma=0.5, gae_lambda=1.0)
        >>> for reward in (1.0, 2.0):
        ...     one = torch.full((3,), reward)
        ...     buffer.add(obs=torch.zeros(3, 4), action=one, reward=one, done=one * 0, value=one * 0, log_prob=one)
        >>> buffer.compute_returns_and_advantages(last_value=torch.zeros(3))
        >>> buffer.get()["returns"][:, 0].tolist()
        [2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int = 1,
        *,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        device: torch.device | str = "cpu",
        storage: Any = None,
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is at least 1, not {num_envs}")
        self.capacity, self.num_envs = capacity, num_envs
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self._in_memory = storage is None and path is None
        self._make = functools.partial(LazyStorage, capacity, storage, path=path, device=device, **options)
        self._steps = self._make()
        self._learned: tuple[Tensor, Tensor] | None = None
        """Advantages and returns, `[size, num_envs]`."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def size(self) -> int:
        """The number of steps that are there."""
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """Whether no step can be added."""
        return self.size == self.capacity

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        done: Any,
        value: Any,
        log_prob: Any,
        next_obs: Any = None,
        **more: Any,
    ) -> None:
        """Add a step of all environments.

        Args:
            obs: what was seen, a tensor or array `[num_envs, ...]`, or a dict or TensorDict of them.
            action: what was done.
            reward: what it brought, `[num_envs]`.
            done: whether the episode ended with this step, `[num_envs]`.
            value: what the critic expected of `obs`, `[num_envs]`.
            log_prob: the log-probability of the action.
            next_obs: what was seen after the step.
            **more: further entries, such as hidden states.

        Raises:
            IndexError: the buffer is full. RuntimeError: an entry does not start with `num_envs`.
        """
        if self.is_full:
            raise IndexError(f"all {self.capacity} steps are taken: reset() before the next rollout")
        given = {"obs": obs, "action": action, "log_prob": log_prob, "next_obs": next_obs, **more}
        entries = {name: _batched(entry, self.num_envs) for name, entry in given.items() if entry is not None}
        for name, entry in (("reward", reward), ("done", done), ("value", value)):
            entries[name] = to_torch_tensor(entry).reshape(self.num_envs)
        step = tdstore.TensorDict(entries, batch_size=[self.num_envs])
        step = step.detach().unsqueeze(0)
        step.batch_size = [1]
        self._steps.set(slice(self.size, self.size + 1), step)
        self._learned = None

    def compute_returns_and_advantages(self, last_value: Any, last_done: Any = None) -> None:
        """Compute generalized advantage estimates, and returns, which are advantages plus values.

        Args:
            last_value: what the critic expects after the last step, `[num_envs]`.
            last_done: whether the episode ended with the last step, `[num_envs]`; default: as it was added.

        Raises:
            EmptyBufferError: there is no step.
        """
        steps = self._all()
        reward, value = steps["reward"], steps["value"]
        running = 1.0 - steps["done"]
        if last_done is not None:
            running = torch.cat([running[:-1], 1.0 - to_torch_tensor(last_done).to(running.device).reshape(1, -1)])
        after = torch.cat([value[1:], to_torch_tensor(last_value).to(value.device).reshape(1, -1)])
        delta = reward + self.gamma * after * running - value
        advantages = torch.zeros_like(delta)
        carried = torch.zeros_like(delta[0])
        for t in reversed(range(len(delta))):
            carried = delta[t] + self.gamma * self.gae_lambda * running[t] * carried
            advantages[t] = carried
        self._learned = advantages, advantages + value

    def _all(self) -> Any:
        if not self.size:
            raise EmptyBufferError("the buffer is empty: add steps first")
        return self._steps.get(slice(None))

    def get(self) -> TensorDictBase:
        """Return all steps of all environments as a TensorDict `[size * num_envs]`, a copy.

        Leaves of shape `[size, num_envs]` become `[size * num_envs, 1]`. `advantages` and `returns` are there once
        they were computed.

        Raises:
            EmptyBufferError: there is no step.
        """
        steps = self._all().clone()
        if self._learned is not None:
            steps["advantages"], steps["returns"] = self._learned
        rows = self.size * self.num_envs
        flat: Any = steps.apply(lambda leaf: leaf.flatten(0, 1), batch_size=[rows])
        made: TensorDictBase = flat.apply(lambda leaf: leaf.unsqueeze(-1) if leaf.ndim == 1 else leaf)
        return made

    def minibatches(self, batch_size: int, epochs: int = 1) -> Iterator[Any]:
        """Yield all rows in random order, in batches; the last one of an epoch may be shorter.

        Args:
            batch_size: number of rows of a batch.
            epochs: how often each row comes.

        Raises:
            EmptyBufferError: there is no step.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is at least 1, not {batch_size}")
        rows = self.get()
        for _ in range(epochs):
            for part in torch.randperm(len(rows)).split(batch_size):
                yield rows[part.to(rows.device or "cpu")]

    def reset(self) -> None:
        """Forget all steps."""
        self._learned = None
        if self._in_memory:
            self._steps = self._make()
        else:
            self._steps.empty()

    clear = reset

    def flush(self) -> None:
        """Make what was written durable, where the backend is."""
        self._steps.flush()

    def close(self) -> None:
        """Commit, and let go of the steps."""
        self._steps.close()


def _batched(entry: Any, num_envs: int) -> Any:
    """Return an entry as a tensor, or a TensorDict of batch size `[num_envs]`; tensors keep their dtype."""
    if isinstance(entry, (tdstore.TensorDictBase, dict)):
        made = tdstore.TensorDict({}, batch_size=[num_envs])
        for key, value in entry.items():
            made[key] = _batched(value, num_envs)
        return made
    return torch.as_tensor(entry)
