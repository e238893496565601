"""Steps and trajectories of agents: what goes in comes out, in memory and from every local backend."""

from __future__ import annotations

import pytest
import torch

import tdstore
from tdstore import errors
from tdstore.data import Epochs
from tdstore.rl.agents import Step, Trajectory

CALL = {"name": "add", "arguments": {"a": 1, "b": [2, 3]}}


def trajectory(number, steps):
    """Return a trajectory whose steps have 0, 1, 2, ... tokens."""
    made = [
        Step(
            messages=[{"role": "user", "content": f"{number}.{at}"}, {"role": "assistant", "content": "é"}],
            tool_calls=[CALL] * (at % 2),
            reward=number + at / 8,
            token_ids=list(range(at)),
            log_probs=[-0.5] * at,
            loss_mask=[token % 2 == 0 for token in range(at)],
        )
        for at in range(steps)
    ]
    return Trajectory.from_steps(made, task=f"task {number}", terminated=bool(number % 2)), made


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert type(one) is Step
        assert (one.messages, one.tool_calls) == (other.messages, other.tool_calls)
        for name in ("reward", "token_ids", "log_probs", "loss_mask"):
            assert torch.equal(one.get(name), other.get(name)), name
            assert one.get(name).dtype == other.get(name).dtype


def test_a_step_fills_what_is_left_out():
    step = Step(token_ids=[4, 5])
    assert (step.messages, step.tool_calls, float(step.reward)) == ([], [], 0.0)
    assert step.log_probs.tolist() == [0, 0] and step.loss_mask.tolist() == [True, True]
    assert step.token_ids.dtype == torch.int64 and step.reward.dtype == torch.float32
    assert Step().token_ids.shape == (0,)
    assert Step(messages=[], tool_calls=[]).messages == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"token_ids": [1, 2], "log_probs": [0.5]}, r"log_probs has the shape \[1\]: the step has 2 token ids"),
        ({"log_probs": [0.5]}, "the step has 0 token ids"),
        ({"token_ids": torch.zeros(2, 2)}, r"token_ids has the shape \[2, 2\]"),
        ({"reward": torch.zeros(2)}, "a step has a single number"),
    ],
)
def test_fields_of_a_step_that_disagree_are_refused(fields, text):
    with pytest.raises(errors.InvalidArgumentError, match=text):
        Step(**fields)


@pytest.mark.parametrize("name", [None, "folder", "file.h5", "place.zarr"])
def test_trajectories_grow_in_any_place(tmp_path, name):
    place = None if name is None else tmp_path / name
    table = Trajectory.create(place)
    made = [trajectory(number, steps) for number, steps in enumerate([3, 0, 1, 5])]
    table.append(made[0][0])
    table.extend([row for row, _ in made[1:]])
    if place is not None:
        table.close()
        table = tdstore.open(place)
    assert type(table) is Trajectory and table.batch_size == (4,)
    for number, (row, steps) in enumerate(made):
        assert_same(table[number].steps(), steps)
        assert table[number].task == f"task {number}"
        assert bool(table[number].terminated) is bool(number % 2)
        assert table[number].conversation() == row.conversation()
    assert [len(tokens) for tokens in table[[3, 0]].token_ids.unbind()] == [10, 3]
    rows = [row for batch in Epochs(table, batch_size=3, seed=2) for row in batch]
    assert sorted(row.task for row in rows) == [f"task {number}" for number in range(4)]
    for row in rows:
        assert_same(row.steps(), made[int(row.task[-1])][1])
    if place is not None:
        table.close()


def test_several_trajectories_have_no_steps_of_their_own():
    table = Trajectory.create()
    table.append(trajectory(0, 2)[0])
    with pytest.raises(errors.BatchSizeError, match="index one"):
        table.steps()
    with pytest.raises(errors.BatchSizeError, match="index one"):
        table.conversation()
    with pytest.raises(errors.BatchSizeError, match="step 0"):
        Trajectory.from_steps([torch.stack([Step(), Step()])])


def test_counts_that_disagree_are_named():
    row, _ = trajectory(0, 3)
    row.rewards = torch.zeros(2)
    with pytest.raises(errors.InvalidArgumentError, match="3 steps and 3 tokens, but: 2 rewards"):
        row.steps()
