"""Arguments of transition buffers that are no numbers, positions, paths or states: named, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tdstore import TensorDict, errors
from tdstore.rl.transitions import MultiStepReplayBuffer, PrioritizedReplayBuffer, RolloutBuffer

NO_NUMBERS = [None, "x", [], 1j, torch.ones(2)]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=str)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("alpha", lambda value: PrioritizedReplayBuffer(4, alpha=value)),
        ("gamma", lambda value: MultiStepReplayBuffer(4, gamma=value)),
        ("n_step", lambda value: MultiStepReplayBuffer(4, n_step=value)),
        ("num_envs", lambda value: RolloutBuffer(4, num_envs=value)),
        ("gamma", lambda value: RolloutBuffer(4, gamma=value)),
        ("gae_lambda", lambda value: RolloutBuffer(4, gae_lambda=value)),
    ],
)
def test_what_is_no_number(name: str, make: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(errors.InvalidTypeError, match=f"^{name} must be"):
        make(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_numbers_that_are_not_finite(value: float) -> None:
    if value != 10**400:
        with pytest.raises(errors.InvalidArgumentError, match="gamma is a finite number"):
            RolloutBuffer(4, gamma=value)
    with pytest.raises(errors.InvalidArgumentError, match="alpha is a finite number of 0 or more"):
        PrioritizedReplayBuffer(4, alpha=-value)


@pytest.fixture
def buffer() -> PrioritizedReplayBuffer:
    made = PrioritizedReplayBuffer(4, alpha=1.0)
    made.add(TensorDict({"a": torch.arange(3.0)}, [3]))
    made.update_priorities([0, 1, 2], [1.0, 2.0, 3.0])
    return made


def test_calls_that_change_nothing(buffer: PrioritizedReplayBuffer) -> None:
    calls: list[tuple[str, Callable[[Any], Any], list[Any]]] = [
        ("batch_size", buffer.sample, [None, "x", 1.5, []]),
        ("beta", lambda value: buffer.sample(2, beta=value), NO_NUMBERS),
        ("index", lambda value: buffer.update_priorities(value, [1.0]), [None, "x", {}, 2**70, [0.5]]),
        ("priority", lambda value: buffer.update_priorities([0], value), [None, "x", {}, 2**70, [1j]]),
        ("index", buffer.sample_from_indices, [None, "x", {}, 1.5, [0.5], float("nan")]),
        ("path", buffer.loads, [None, 5, b"x", []]),
        ("path", buffer.dumps, [None, 5, b"x", []]),
        ("state_dict", buffer.load_state_dict, [None, 5, {}, {"rows": {}}, torch.ones(2)]),
    ]
    for name, call, values in calls:
        for value in values:
            with pytest.raises(errors.TDStoreError, match=name):
                call(value)
    assert buffer.priorities.tolist() == [1.0, 2.0, 3.0]
    assert len(buffer.sample_from_indices([])) == 0
