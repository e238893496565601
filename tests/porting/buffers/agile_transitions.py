"""Transitions of one and of many agents as tensorclasses that convert what environments give."""

from collections.abc import Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch
from tensordict import TensorClass, TensorDict

Array = np.ndarray | torch.Tensor


def as_tensor(value, dtype=torch.float32):
    if isinstance(value, torch.Tensor):
        return value.to(dtype=dtype)
    if isinstance(value, (np.ndarray, Number, bool)):
        return torch.tensor(value, dtype=dtype)
    return torch.as_tensor(np.asarray(value), dtype=dtype)


def as_tensordict(data, dtype=torch.float32):
    if isinstance(data, TensorDict):
        return data.to(dtype=dtype)
    out = TensorDict()
    entries = data.items() if isinstance(data, Mapping) else ((f"obs_{i}", part) for i, part in enumerate(data))
    for key, value in entries:
        out[key] = as_tensor(value, dtype)
    return out


class Transition(TensorClass):
    obs: Array | dict | tuple | TensorDict
    action: Array
    next_obs: Array | dict | tuple | TensorDict
    reward: Array | float
    done: Array | bool

    def __post_init__(self) -> None:
        if isinstance(self.obs, (dict, tuple)):
            self.obs = as_tensordict(self.obs)
        if isinstance(self.next_obs, (dict, tuple)):
            self.next_obs = as_tensordict(self.next_obs)
        self.action = as_tensor(self.action)
        self.reward = as_tensor(self.reward)
        self.done = as_tensor(self.done)
        for name in ("reward", "done"):
            if getattr(self, name).ndim == 0:
                setattr(self, name, getattr(self, name).unsqueeze(-1))


def per_agent(data):
    return TensorDict(
        {
            agent: as_tensordict(value) if isinstance(value, (dict, tuple)) else as_tensor(value)
            for agent, value in data.items()
        }
    )


class MultiAgentTransition(TensorClass):
    obs: Mapping[str, Any] | TensorDict
    action: Mapping[str, Any] | TensorDict
    reward: Mapping[str, Any] | TensorDict
    next_obs: Mapping[str, Any] | TensorDict
    done: Mapping[str, Any] | TensorDict

    def __post_init__(self) -> None:
        for name in ("obs", "action", "reward", "next_obs", "done"):
            setattr(self, name, per_agent(getattr(self, name)))


def main():
    flat = Transition(obs=torch.ones(3), action=2, next_obs=torch.zeros(3), reward=1.5, done=False)
    print(type(flat).__name__, flat.batch_size, flat.action.dtype, flat.reward.tolist(), flat.done.tolist())
    td = flat.to_tensordict()
    print(type(td).__name__, list(td.keys()), td["obs"].tolist())

    image = Transition(
        obs={"pixels": np.zeros((2, 2), dtype=np.uint8), "speed": np.float64(0.5)},
        action=np.array([1, 0]),
        next_obs={"pixels": np.ones((2, 2), dtype=np.uint8), "speed": 0.25},
        reward=np.float32(0.1),
        done=True,
    )
    print(type(image.obs).__name__, sorted(image.obs.keys()), image.next_obs["pixels"].dtype, image.obs["speed"].item())

    vectorised = Transition(
        obs=(np.zeros((4, 3)), np.ones((4, 1))),
        action=np.arange(4),
        next_obs=(np.ones((4, 3)), np.ones((4, 1))),
        reward=np.ones(4),
        done=np.zeros(4, dtype=bool),
    )
    vectorised.batch_size = [4]
    print(
        vectorised.batch_size,
        vectorised.obs["obs_1"].shape,
        vectorised[1].action.item(),
        vectorised[:2].reward.tolist(),
    )
    stored = vectorised.to_tensordict()
    print(sorted(map(str, stored.keys(True, True))), stored.batch_size, stored["obs"].batch_size)
    again = Transition.from_tensordict(stored)
    print(type(again).__name__, type(again.obs).__name__, torch.equal(again.action, vectorised.action))

    agents = MultiAgentTransition(
        obs={"speaker": np.zeros(3), "listener": {"sound": np.ones(2), "place": np.zeros(2)}},
        action={"speaker": 1, "listener": np.array([0.5, 0.5])},
        reward={"speaker": 1.0, "listener": -1.0},
        next_obs={"speaker": np.ones(3), "listener": {"sound": np.ones(2), "place": np.ones(2)}},
        done={"speaker": False, "listener": True},
    )
    td = agents.to_tensordict()
    print(sorted(map(str, td.keys(True, True))))
    print(td["obs", "listener", "sound"].dtype, td["reward", "listener"].item(), td["done"]["speaker"].item())
    both = torch.stack([td, td], 0)
    print(both.batch_size, both["action", "listener"].shape, {a: tuple(r.shape) for a, r in both["reward"].items()})
