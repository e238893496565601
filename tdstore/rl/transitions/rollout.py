"""Steps of the current policy, in order, with advantages and returns."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import tdstore
from tdstore.arguments import check_flags, check_int, check_number
from tdstore.errors import EmptyBufferError, InvalidArgumentError, InvalidTypeError, OutOfRangeError
from tdstore.rl.storages import LazyStorage
from tdstore.rl.transitions.conversion import to_torch_tensor
from tdstore.rl.types import BackendLike, Numbers

if TYPE_CHECKING:
    from tdstore import TensorDictBase

_PLURALS = {
    "obs": "observations", "action": "actions", "reward": "rewards", "done": "dones", "value": "values",
    "log_prob": "log_probs", "next_obs": "next_observations",
}  # fmt: skip
"""Names of AgileRL's batches."""
_NUMBERS = {"reward", "done", "value", "log_prob", "advantages", "returns"}


class RolloutBuffer:
    """Steps of several environments, in their order, for on-policy learning.

    Args:
        capacity: number of steps.
        observation_space, action_space: of one environment; anything with `shape`, or a mapping of such objects. With
            one environment, entries of exactly that shape get a dimension for it. Shapes and dtypes are those of the
            first step.
        num_envs: number of environments, which all take a step at once.
        device: of the steps, and of batches: a device for steps in memory, "cpu" for a backend.
        gae_lambda: how far bias is traded for variance in advantages; 1 trades none.
        gamma: the discount of one step.
        use_gae: False: returns are sums of all rewards that follow, as with `gae_lambda=1`.
        storage: where the steps are: None for memory, the name of a backend, or a URL; see `LazyStorage`.
        path: the place, for a backend that is named.
        **options: of `LazyStorage`.

    Raises:
        ValueError: `num_envs` is below 1. TypeError: `observation_space` is a number.

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
        observation_space: Any = None,
        action_space: Any = None,
        num_envs: int = 1,
        device: torch.device | str = "cpu",
        gae_lambda: float = 0.95,
        gamma: float = 0.99,
        *,
        use_gae: bool = True,
        storage: BackendLike | None = None,
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        check_int(num_envs, "num_envs")
        check_number(gamma, "gamma")
        check_number(gae_lambda, "gae_lambda")
        check_flags(use_gae=use_gae)
        if num_envs < 1:
            raise InvalidArgumentError(f"num_envs is at least 1, not {num_envs}")
        self.capacity, self.num_envs = capacity, num_envs
        if isinstance(observation_space, int):
            raise InvalidTypeError(
                f"observation_space is a space, not a number: did you mean num_envs={observation_space}?"
            )
        self.observation_space, self.action_space = observation_space, action_space
        self.gamma, self.gae_lambda = gamma, gae_lambda if use_gae else 1.0
        self._in_memory = storage is None and path is None
        self._make = functools.partial(LazyStorage, capacity, storage, path=path, device=device, **options)
        self._steps = self._make()
        self._learned: tuple[Tensor, Tensor] | None = None
        """Advantages and returns, `[size, num_envs]`."""

    def __len__(self) -> int:
        return len(self._steps)

    def size(self) -> int:
        """Return the number of rows: steps times environments."""
        return len(self._steps) * self.num_envs

    @property
    def is_full(self) -> bool:
        """Whether no step can be added."""
        return len(self._steps) == self.capacity

    def add(
        self,
        obs: Numbers,
        action: Numbers,
        reward: Numbers,
        done: Numbers,
        value: Numbers,
        log_prob: Numbers,
        next_obs: Numbers | None = None,
        **more: Any,
    ) -> None:
        """Add a step of all environments.

        Args:
            obs: the observation, a tensor or array `[num_envs, ...]`, or a dict or TensorDict of them.
            action: the action, `[num_envs, ...]`.
            reward: the reward, `[num_envs]`.
            done: whether the episode ended with this step, `[num_envs]`.
            value: the value of `obs` by the critic, `[num_envs]`.
            log_prob: the log-probability of the action.
            next_obs: the observation after the step.
            **more: further entries, such as hidden states.

        Raises:
            IndexError: the buffer is full. RuntimeError: an entry does not start with `num_envs`.
        """
        if self.is_full:
            raise OutOfRangeError(f"all {self.capacity} steps are in use: reset() before the next rollout")
        fields = {"obs": obs, "action": action, "log_prob": log_prob, "next_obs": next_obs, **more}
        spaces = {"obs": self.observation_space, "next_obs": self.observation_space, "action": self.action_space}
        entries = {
            name: _batched(entry, self.num_envs, spaces.get(name))
            for name, entry in fields.items()
            if entry is not None
        }
        for name, entry in (("reward", reward), ("done", done), ("value", value)):
            entries[name] = to_torch_tensor(entry).reshape(self.num_envs)
        step = tdstore.TensorDict(entries, batch_size=[self.num_envs])
        step = step.detach().unsqueeze(0)
        step.batch_size = [1]
        self._steps.set(slice(len(self), len(self) + 1), step)
        self._learned = None

    def compute_returns_and_advantages(self, last_value: Any, last_done: Any = None) -> None:
        """Compute generalized advantage estimates, and returns, which are advantages plus values.

        Args:
            last_value: the value after the last step by the critic, `[num_envs]`.
            last_done: whether the episode ended with the last step, `[num_envs]`; default: the `done` of that step.

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
        if not len(self):
            raise EmptyBufferError("the buffer is empty: add steps first")
        return self._steps.get(slice(None))

    def get(self, batch_size: int | None = None) -> TensorDictBase:
        """Return all steps of all environments as a TensorDict `[steps * num_envs]`, a copy.

        Leaves of shape `[steps, num_envs]` become `[steps * num_envs, 1]`. `advantages` and `returns` are included
        once they were computed.

        Args:
            batch_size: number of rows to draw, without repetition; default: all, in order.

        Raises:
            EmptyBufferError: there is no step.
        """
        rows = self._rows()
        if batch_size is None:
            return rows
        _check_rows(batch_size)
        return rows[torch.randperm(len(rows), device="cpu")[:batch_size].to(rows.device or "cpu")]

    def get_tensor_batch(
        self, batch_size: int | None = None, device: torch.device | str | None = None
    ) -> TensorDictBase:
        """Return `get(batch_size)` under the names and shapes of AgileRL.

        These are "observations", "actions", "rewards", "dones", "values", "log_probs", "next_observations",
        "advantages" and "returns", as far as there are such entries. Entries of one number have the shape `[n]`,
        actions `[n, 1]`.

        Args:
            batch_size: as of `get`.
            device: where the batch is moved.

        Raises:
            EmptyBufferError: there is no step.
        """
        rows = self.get(batch_size)
        made = tdstore.TensorDict({}, batch_size=rows.batch_size)
        for name, entry in rows.items():
            flat = name in _NUMBERS and entry.ndim == 2 and entry.shape[1] == 1
            made[_PLURALS.get(name, name)] = entry.squeeze(1) if flat else entry
        made["dones"] = made["dones"].bool()
        return made if device is None else made.to(device)

    def _rows(self) -> TensorDictBase:
        steps = self._all().clone()
        if self._learned is not None:
            steps["advantages"], steps["returns"] = self._learned
        flat: Any = steps.apply(lambda leaf: leaf.flatten(0, 1), batch_size=[self.size()])
        made: TensorDictBase = flat.apply(lambda leaf: leaf.unsqueeze(-1) if leaf.ndim == 1 else leaf)
        return made

    def minibatches(self, batch_size: int, epochs: int = 1) -> Iterator[TensorDictBase]:
        """Yield all rows in random order, in batches; the last one of an epoch may be shorter.

        Args:
            batch_size: number of rows of a batch.
            epochs: the number of times that each row occurs.

        Raises:
            EmptyBufferError: there is no step.
        """
        _check_rows(batch_size)
        rows = self._rows()
        for _ in range(epochs):
            for part in torch.randperm(len(rows), device="cpu").split(batch_size):
                yield rows[part.to(rows.device or "cpu")]

    def reset(self) -> None:
        """Remove all steps."""
        self._learned = None
        if self._in_memory:
            self._steps = self._make()
        else:
            self._steps.empty()

    clear = reset

    def flush(self) -> None:
        """Make all steps durable, if the backend can."""
        self._steps.flush()

    def close(self) -> None:
        """Commit, and close the storage."""
        self._steps.close()


def _check_rows(batch_size: int) -> None:
    if batch_size < 1:
        raise InvalidArgumentError(f"batch_size is at least 1, not {batch_size}")


def _batched(entry: Any, num_envs: int, space: Any = None) -> Any:
    """Convert an entry to a tensor, or to a TensorDict of batch size `[num_envs]`; tensors keep their dtype."""
    if isinstance(entry, (tdstore.TensorDictBase, dict)):
        made = tdstore.TensorDict({}, batch_size=[num_envs])
        for key, value in entry.items():
            made[key] = _batched(value, num_envs, None if space is None else space[key])
        return made
    tensor = torch.as_tensor(entry)
    one = not tensor.ndim or (space is not None and tensor.shape == tuple(space.shape or ()))
    return tensor.unsqueeze(0) if one and num_envs == 1 else tensor
