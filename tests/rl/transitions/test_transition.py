"""Transitions and what they are converted from (scenarios A1 to A5)."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.rl.transitions import (
    MultiAgentTransition,
    Transition,
    to_tensordict,
    to_torch_tensor,
    transition_to_tensordict,
)


def step(**changes):
    fields = {"obs": np.zeros(4), "action": 1, "next_obs": np.ones(4), "reward": 1.0, "done": False}
    return Transition(**{**fields, **changes})


# -- conversions -----------------------------------------------------------------------------
def test_to_torch_tensor():
    same = torch.ones(3, requires_grad=True)
    assert to_torch_tensor(same) is same
    assert to_torch_tensor(torch.ones(2, dtype=torch.int64)).dtype == torch.float32
    array = np.zeros(3, np.float32)
    made = to_torch_tensor(array)
    array[0] = 7
    assert made.tolist() == [0, 0, 0]
    for data, expected in (
        (3, 3.0),
        (True, 1.0),
        (np.float64(2), 2.0),
        ([1, [2][0]], [1, 2]),
        (((1, 2), [3, 4]), [[1, 2], [3, 4]]),
    ):
        assert to_torch_tensor(data).tolist() == expected
        assert to_torch_tensor(data).dtype == torch.float32
    assert to_torch_tensor([np.ones(2), torch.zeros(2)], torch.int32).tolist() == [[1, 1], [0, 0]]
    for bad in ("x", None, {"a": 1}, ["x"], [None], np.array(["x"]), [[1], {}]):
        with pytest.raises(TypeError, match="Cannot convert"):
            to_torch_tensor(bad)


def test_a1_tuples():
    td = to_tensordict((np.zeros(3), np.ones((2, 2)), 5))
    assert td.batch_size == ()
    shapes = {key: tuple(value.shape) for key, value in td.items()}
    assert shapes == {"tuple_obs_0": (3,), "tuple_obs_1": (2, 2), "tuple_obs_2": ()}
    assert all(value.dtype == torch.float32 for value in td.values())


def test_dicts_and_what_is_none():
    td = to_tensordict({"a": np.zeros(3, np.uint8), "n": {"b": (1, 2)}})
    assert td["a"].dtype == torch.float32
    assert td["n", "b", "tuple_obs_1"].item() == 2
    assert to_tensordict(TensorDict({"a": torch.ones(2, dtype=torch.int8)}))["a"].dtype == torch.float32
    for bad in (np.zeros(3), torch.zeros(3), 1, [1], "x", None):
        with pytest.raises(TypeError, match="Cannot convert data of type"):
            to_tensordict(bad)
    for bad in ({0: torch.zeros(1)}, {"a": {1: 2}}):
        with pytest.raises(TypeError, match="keys are strings"):
            to_tensordict(bad)


def test_prompts():
    prompt = {"input_ids": [1, 2], "attention_mask": np.ones(2, np.int64), "text": "hi", "answer": None, "score": 0.5}
    td = to_tensordict(prompt)
    assert td["input_ids"].dtype == td["attention_mask"].dtype == torch.int64
    assert td["text"] == "hi"
    assert "answer" not in td.keys()
    assert td["score"].dtype == torch.float32
    stack = to_tensordict([prompt, {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "text": "ho", "score": 1}])
    assert isinstance(stack, tdstore.LazyStackedTensorDict)
    assert stack.batch_size == (2,)
    assert stack["text"] == ["hi", "ho"]


# -- A2, A3, A5 ------------------------------------------------------------------------------
def test_a2_dtypes_and_shapes():
    made = step()
    assert (made.obs.dtype, made.obs.shape) == (torch.float64, (4,))
    assert (made.action.dtype, made.action.shape) == (torch.float32, ())
    assert (made.reward.dtype, made.reward.shape) == (torch.float32, (1,))
    assert (made.done.dtype, made.done.shape) == (torch.float32, (1,))
    assert step(obs=5).obs.dtype == torch.int64
    assert step(obs="text", next_obs=None).obs == "text"
    assert step(next_obs=None).next_obs is None


def test_a3_images():
    image = np.zeros((2, 2), np.uint8)
    assert step(obs={"image": image}).obs["image"].dtype == torch.float32
    assert step(obs=image).obs.dtype == torch.uint8


def test_missing_and_wrong_fields():
    with pytest.raises(TypeError, match="'action'.*'done'"):
        Transition(obs=1)
    with pytest.raises(RuntimeError, match="reward"):
        Transition(obs=np.zeros(2), next_obs=np.zeros(2), action=[1, 2], reward=1.0, done=[0, 0], batch_size=[2])
    with pytest.raises(TypeError, match="Cannot convert"):
        step(action="left")


def test_batches_of_nested_observations():
    obs = {"a": np.zeros((2, 3)), "n": (np.zeros(2), np.ones((2, 1)))}
    made = Transition(obs=obs, action=[0, 1], next_obs=obs, reward=[1.0, 2.0], done=[False, True], batch_size=[2])
    assert made[1].obs["n", "tuple_obs_1"].tolist() == [1]
    assert made[1].done.item() == 1.0


def test_a5_stacks():
    stack = torch.stack([step(), step()])
    assert type(stack) is Transition
    assert stack.batch_size == (2,)
    assert stack.reward.shape == (2, 1)
    assert stack.action.shape == (2,)


# -- A4: places ------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["folder", "step.h5", "step.zarr"])
def test_a4_transitions_in_places(tmp_path, place):
    made = step(obs={"image": np.ones((2, 2)), "n": {"x": 3}})
    made.save(tmp_path / place).close()
    with tdstore.open(tmp_path / place) as found:
        assert type(found) is Transition
        assert found.done.shape == (1,)
        assert found.obs["n", "x"].item() == 3
        assert found.next_obs.dtype == torch.float64


def test_a4_memmap_pickle_and_select(tmp_path):
    made = step()
    mapped = made.memmap(tmp_path / "step")
    assert type(mapped) is Transition
    assert Transition.load_memmap(tmp_path / "step").done.shape == (1,)
    assert type(pickle.loads(pickle.dumps(made))) is Transition
    assert type(made.select("obs", as_tensordict=True)) is TensorDict


def test_schemas_may_lack_fields():
    made = Transition.from_schema({"obs": ((4,), "float32")}, batch_size=[3])
    assert made.obs.shape == (3, 4)
    assert made.reward is None


def test_multi_agent_transitions():
    def each(value):
        return {"walker": value, "flyer": {"arm": value, "leg": (value, value)}}

    made = MultiAgentTransition(
        obs=each(np.zeros(3)), action=each(1), next_obs=each(np.ones(3)), reward=each(1.0), done=each(False)
    )
    assert made.obs["walker"].dtype == torch.float32
    assert made.reward["flyer", "leg", "tuple_obs_1"].shape == ()
    plain = transition_to_tensordict(made)
    assert type(plain) is TensorDict
    assert plain["action", "walker"].item() == 1.0
    plain["action", "walker"] = torch.tensor(5.0)
    assert made.action["walker"].item() == 1.0
    with pytest.raises(TypeError, match="'reward' is a dict from agents"):
        MultiAgentTransition(obs={}, action={}, next_obs={}, reward=1.0, done={})


def test_fields_of_several_agents_in_agilerls_order():
    made = MultiAgentTransition(*({"a": number} for number in range(5)))
    assert [made.get(name)["a"].item() for name in ("obs", "action", "reward", "next_obs", "done")] == [0, 1, 2, 3, 4]


def test_a_transition_as_a_tensordict():
    plain = transition_to_tensordict(step())
    assert type(plain) is TensorDict
    assert set(plain.keys()) == {"obs", "action", "next_obs", "reward", "done"}
