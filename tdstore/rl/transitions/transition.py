"""Transitions: one step of an agent, or of several agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

import tdstore
from tdstore.errors import InvalidTypeError
from tdstore.rl.transitions.conversion import to_tensordict, to_torch_tensor


class Transition(tdstore.TensorClass):
    """A step of an agent, or a batch of steps.

    Args:
        obs: the observation. A dict or tuple becomes a TensorDict of float32; arrays, tensors and numbers keep their
            dtype; strings and None are unchanged.
        action: the action, as float32.
        next_obs: the observation after it, as `obs`.
        reward: the reward, as float32; a single number gets the shape `[1]`.
        done: whether the episode ended, as float32; a single number gets the shape `[1]`.

    Raises:
        TypeError: a field is missing, or cannot be converted. BatchSizeError: a field does not start with the batch
            size.

    Example:
        >>> step = Transition(obs=torch.zeros(4), action=1, next_obs=torch.ones(4), reward=1.0, done=False)
        >>> step.action.shape, step.reward.shape, torch.stack([step, step]).done.shape
        (torch.Size([]), torch.Size([1]), torch.Size([2, 1]))
    """

    obs: Any
    action: Any
    next_obs: Any
    reward: Any
    done: Any

    def __post_init__(self) -> None:
        for name in ("obs", "next_obs"):
            value = self.get(name)
            if isinstance(value, (Mapping, tuple)) and not isinstance(value, tdstore.TensorDictBase):
                _put(self, name, to_tensordict(value))
        for name in ("action", "reward", "done"):
            value = self.get(name)
            if value is None:
                continue
            tensor = to_torch_tensor(value)
            if name != "action" and not tensor.ndim:
                tensor = tensor.reshape(1)
            if tensor is not value:
                setattr(self, name, tensor)


class MultiAgentTransition(tdstore.TensorClass):
    """A step of several agents: each field is a dict from the name of an agent to its value.

    Values are converted to float32; dicts and tuples among them become TensorDicts. No dimensions are added.

    Args:
        obs: the observation of each agent.
        action: the action of each.
        reward: the reward of each.
        next_obs: the observation of each after its action.
        done: whether the episode of each ended.

    Raises:
        TypeError: a field is missing, or cannot be converted.

    Example:
        >>> each = {"a": 1.0, "b": 2.0}
        >>> step = MultiAgentTransition(obs=each, action=each, next_obs=each, reward=each, done=each)
        >>> step.reward["b"]
        tensor(2.)
    """

    obs: Any
    action: Any
    reward: Any
    next_obs: Any
    done: Any

    def __post_init__(self) -> None:
        for name in ("obs", "action", "next_obs", "reward", "done"):
            value = self.get(name)
            if value is None or isinstance(value, tdstore.TensorDictBase):
                continue
            if isinstance(value, (Tensor, str)) or not isinstance(value, Mapping):
                raise InvalidTypeError(f"{name!r} is a dict from agents to values, not a {type(value).__name__}")
            _put(self, name, to_tensordict(value))


def _put(step: Any, name: str, value: Any) -> None:
    """Set a nested TensorDict, which gets the batch size of the step."""
    value.batch_size = step.batch_size
    setattr(step, name, value)


def transition_to_tensordict(transition: Transition | MultiAgentTransition) -> tdstore.TensorDict:
    """Convert a step to a TensorDict without a class, with copies of its tensors."""
    made: tdstore.TensorDict = transition.to_tensordict()
    return made
