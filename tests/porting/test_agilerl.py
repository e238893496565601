"""AgileRL's components, with nothing but the import of `tensordict` changed.

Its replay buffers, datasets and rollout buffers are run from the sources of the released package. What they take from
its other modules, which need its many dependencies, is stood in for.
"""

from __future__ import annotations

import enum
import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensordict  # its first import warns, which is an error within a test
import torch
from gymnasium import spaces

import tdstore.rl

FOUND = importlib.util.find_spec("agilerl")
assert FOUND is not None, "make install"
assert FOUND.origin is not None
SOURCES = Path(FOUND.origin).parent / "components"
ORDER = ("segment_tree", "replay_buffer", "data", "rollout_buffer")


class _Sequences(enum.Enum):
    CHUNKED = "chunked"
    MAXIMUM = "maximum"
    FIFTY_PERCENT_OVERLAP = "fifty_percent_overlap"


def _narrow_tensor(value: Any) -> Any:
    assert isinstance(value, torch.Tensor)
    return value


def _with_batch(value: Any, space: Any, actions: bool = False) -> Any:
    return value[None] if value.ndim == len(space.shape) and not actions else value


def components(package: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules, with `package` in place of tensordict."""
    typing, helpers = ModuleType("agilerl.typing"), ModuleType("agilerl.utils.algo_utils")
    typing.__getattr__ = lambda name: Any  # type: ignore[method-assign]
    typing.BPTTSequenceType = _Sequences  # type: ignore[attr-defined]
    vars(helpers).update(
        narrow_tensor=_narrow_tensor,
        is_str_keyed_dict=lambda value: isinstance(value, dict) and all(isinstance(key, str) for key in value),
        get_obs_shape=lambda space: space.shape,
        get_num_actions=lambda space: 1 if isinstance(space, spaces.Discrete) else space.shape[0],
        maybe_add_batch_dim=_with_batch,
        extract_sequences_from_episode=None,
    )
    parents = [ModuleType(name) for name in ("agilerl", "agilerl.utils", "agilerl.components")]
    for module in (*parents, typing, helpers):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    made: dict[str, ModuleType] = {}
    for name in ORDER:
        text = (SOURCES / f"{name}.py").read_text()
        module = ModuleType(f"agilerl.components.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(text.replace("from tensordict import", f"from {package} import"), name, "exec"), vars(module))
        vars(parents[-1]).update({key: value for key, value in vars(module).items() if key[0] != "_"})
        made[name] = module
    return made


def shown(value: Any) -> Any:
    """A result as plain data, of either package."""
    if hasattr(value, "to_dict") and hasattr(value, "batch_size"):
        return tuple(value.batch_size), {key: shown(below) for key, below in sorted(value.to_dict().items())}
    if isinstance(value, dict):
        return {key: shown(below) for key, below in sorted(value.items())}
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.tolist()
    return [shown(below) for below in value] if isinstance(value, (list, tuple)) else value


def step(of: dict[str, ModuleType], i: int, n: int = 4) -> Any:
    return of["data"].Transition(
        obs=torch.full((n, 3), float(i)),
        action=torch.arange(n) + i,
        next_obs=torch.full((n, 3), i + 1.0),
        reward=torch.arange(n) * 1.0 + i,
        done=torch.tensor([i % 3 == 0] * n).float(),
        batch_size=[n],
    )


def plain(of: Any) -> Any:
    buffer = of["replay_buffer"].ReplayBuffer(10)
    for i in range(4):
        buffer.add(step(of, i).to_tensordict())
    return len(buffer), buffer.sample(5), buffer.storage


def multi_step(of: Any) -> Any:
    buffer = of["replay_buffer"].MultiStepReplayBuffer(20, n_step=3, gamma=0.9)
    oldest = [buffer.add(step(of, i).to_tensordict()) for i in range(8)]
    return len(buffer), oldest, buffer.sample(4)


def prioritized(of: Any) -> Any:
    buffer = of["replay_buffer"].PrioritizedReplayBuffer(20, alpha=0.6)
    for i in range(4):
        buffer.add(step(of, i).to_tensordict())
    first = buffer.sample(4, beta=0.4)
    buffer.update_priorities(first["idxs"], torch.rand(4) + 0.1)
    return first, buffer.sample(4, beta=0.5)


def conversions(of: Any) -> Any:
    data = of["data"]
    return data.to_tensordict({"a": np.ones((2, 3)), "b": np.arange(2)}), data.to_torch_tensor([1, 2.5])


def transitions(of: Any) -> Any:
    one = step(of, 2)
    agents = [{"x": torch.ones(2) * k, "y": torch.zeros(2)} for k in range(5)]
    several = of["data"].MultiAgentTransition(*agents, batch_size=[])
    return one[0:2], one.to_tensordict(), torch.stack([step(of, 0), one]).to_tensordict(), several.to_tensordict()


def dataset(of: Any) -> Any:
    buffer = of["replay_buffer"].ReplayBuffer(10)
    for i in range(2):
        buffer.add(step(of, i).to_tensordict())
    return next(iter(of["data"].ReplayDataset(buffer, batch_size=4)))


def rollout(of: Any) -> Any:
    room = spaces.Box(-1, 1, (3,))
    buffer = of["rollout_buffer"].RolloutBuffer(
        capacity=4, observation_space=room, action_space=spaces.Discrete(2), num_envs=2
    )
    for i in range(4):
        buffer.add(
            obs=np.ones((2, 3)) * i,
            action=np.array([0, 1]),
            reward=np.array([1.0, 2.0]),
            done=np.array([0.0, i == 2]),
            value=np.array([0.5, 0.2]),
            log_prob=np.array([-0.1, -0.2]),
            next_obs=np.ones((2, 3)) * (i + 1),
        )
    buffer.compute_returns_and_advantages(last_value=np.array([0.1, 0.2]), last_done=np.array([0.0, 0.0]))
    return buffer.get_tensor_batch(batch_size=3), buffer.buffer, buffer.size()


@pytest.mark.parametrize("program", [plain, multi_step, prioritized, conversions, transitions, dataset, rollout])
def test_components(program: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for package in ("tensordict", "tdstore"):
        with monkeypatch.context() as patched:
            of = components(package, patched)
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            results.append(shown(program(of)))
    assert results[1] == results[0]


def test_a_tensordict_that_is_converted_keeps_its_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = components("tensordict", monkeypatch)["data"].to_tensordict
    for batch in ([], [3], [3, 2]):
        entries = {"a": torch.ones(3, 2, dtype=torch.int64), "n": {"b": torch.zeros(3, 2, 4, dtype=torch.uint8)}}
        expected = theirs(tensordict.TensorDict(entries, batch))
        found = tdstore.rl.to_tensordict(tdstore.TensorDict(entries, batch))
        assert shown(found) == shown(expected) and list(found.batch_size) == batch
        assert found["n"].batch_size == expected["n"].batch_size
