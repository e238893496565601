"""Buffers of transitions: a ring, n steps, priorities, rollouts (scenarios A6 to A8)."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from tdstore import TensorDict, errors
from tdstore.rl.transitions import (
    MultiStepReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
    Transition,
)
from tests import scripts


def rows(*values, **more):
    values = torch.tensor(values, dtype=torch.float32)
    data = {"obs": values, "pixels": values.reshape(-1, 1, 1).expand(-1, 2, 2), **more}
    return TensorDict(data, [len(values)])


def step(reward, done=False, obs=None, **more):
    """One step of one environment; the observation counts the steps."""
    at = reward if obs is None else obs
    data = {"obs": [[at]], "reward": [reward], "next_obs": [[at + 1.0]], "done": [float(done)], "action": [int(at)]}
    return TensorDict({**{name: torch.tensor(value) for name, value in data.items()}, **more}, [1])


# -- A6: the ring ----------------------------------------------------------------------------
PLACES = [None, "memmap", "h5", "zarr"]


@pytest.mark.parametrize("storage", PLACES)
def test_a6_a_ring_of_five(tmp_path, storage):
    buffer = ReplayBuffer(5) if storage is None else ReplayBuffer(5, storage=storage, path=tmp_path / "rows")
    assert buffer.storage is None
    assert not buffer.initialized
    for value in range(4):
        assert buffer.add(rows(value)) is None
    assert (buffer.size, buffer.counter, buffer.is_full) == (4, 4, False)
    buffer.add(rows(4, 4, 4))
    assert buffer.storage[: buffer.size]["obs"].flatten().tolist() == [4, 4, 2, 3, 4]
    assert (buffer.size, buffer.cursor, buffer.counter, buffer.is_full) == (5, 2, 7, True)
    batch = buffer.sample(100, return_idx=True)
    assert batch.batch_size == (5,)
    assert sorted(batch["idxs"].tolist()) == [0, 1, 2, 3, 4]
    assert batch["obs"].shape == (5, 1)
    assert batch["pixels"].shape == (5, 2, 2)
    assert batch["obs"].flatten().tolist() == [[4, 4, 2, 3, 4][i] for i in batch["idxs"].tolist()]
    assert "idxs" not in buffer.sample(2).keys()


def test_samples_are_copies_and_input_is_not_changed():
    buffer = ReplayBuffer(5)
    data = TensorDict({"obs": torch.arange(3.0), "n": TensorDict({"x": torch.arange(3)}, [3])}, [3])
    buffer.add(data)
    assert data["obs"].shape == (3,)
    assert data["n", "x"].shape == (3,)
    batch = buffer.sample(3)
    assert batch["n", "x"].shape == (3, 1)
    batch["obs"].fill_(9)
    assert buffer.storage[: buffer.size]["obs"].flatten().tolist() == [0, 1, 2]


def test_more_rows_than_there_is_room_for():
    buffer = ReplayBuffer(3)
    buffer.add(rows(*range(8)))
    assert sorted(buffer.storage[: buffer.size]["obs"].flatten().tolist()) == [5, 6, 7]
    assert buffer.counter == 8


def test_dtypes_are_kept_unless_one_is_given():
    data = rows(1, 2, idx=torch.tensor([1, 2]), wide=torch.zeros(2, 3, dtype=torch.float64))
    plain, cast = ReplayBuffer(5), ReplayBuffer(5, dtype=torch.float16)
    for buffer in (plain, cast):
        buffer.add(data)
    assert plain.storage[: plain.size]["wide"].dtype == torch.float64
    assert cast.storage[: cast.size]["wide"].dtype == cast.storage[: cast.size]["obs"].dtype == torch.float16
    assert cast.storage[: cast.size]["idx"].dtype == torch.int64


def test_entries_that_come_later_or_are_missing(tmp_path):
    buffer = ReplayBuffer(4)
    buffer.add(rows(1, 2))
    buffer.add(rows(3, extra=torch.ones(1, 2)))
    assert buffer.storage[: buffer.size]["extra"].tolist() == [[0, 0], [0, 0], [1, 1]]
    assert (buffer.counter, buffer.cursor) == (3, 3)
    with pytest.raises(KeyError, match="extra"):
        buffer.add(rows(4))
    assert (buffer.size, buffer.counter) == (3, 3)


@pytest.mark.parametrize("storage", [None, "memmap", "h5", "zarr", "shared", "cached"])
def test_a_new_entry_is_zero_in_earlier_rows(tmp_path, storage):
    place = {} if storage is None else {"storage": storage, "path": str(tmp_path / "rows")}
    if storage == "shared":
        place = {"storage": "shared"}
    elif storage == "cached":
        place = {"storage": "zarr", "path": str(tmp_path / "rows"), "write_buffer": 10}
    buffer = ReplayBuffer(3, **place)
    buffer.add(rows(1, 2))
    more = rows(3, 4, extra=torch.ones(2, 2), name=["c", "d"])
    more["next"] = TensorDict({"seen": torch.tensor([3, 4], dtype=torch.int16)}, [2])
    buffer.add(more)
    with pytest.raises(KeyError, match="extra"):
        buffer.add(rows(5))
    assert (buffer.size, buffer.counter, buffer.cursor) == (3, 4, 1)
    for opened in ("before", "after"):
        found = buffer.sample_from_indices([0, 1, 2])
        assert found["obs"].flatten().tolist() == [4, 2, 3]
        assert found["extra"].tolist() == [[1, 1], [0, 0], [1, 1]]
        assert found["next", "seen"].flatten().tolist() == [4, 0, 3]
        assert found["name"] == ["d", None, "c"]
        if opened == "before" and storage not in (None, "shared"):
            buffer.close()
            buffer = ReplayBuffer.open(place["path"], storage=place["storage"])
    buffer.close()


def test_entries_are_not_added_under_other_processes(tmp_path):
    buffer = ReplayBuffer(4, storage="memmap", path=tmp_path / "rows", shared_init=True)
    buffer.add(rows(1))
    with pytest.raises(errors.UnsupportedError, match="other processes"):
        buffer.add(rows(3, extra=torch.ones(1, 2)))
    assert buffer.counter == 1
    buffer.add(rows(2))
    buffer.close()


def test_storage_has_all_the_room():
    buffer = ReplayBuffer(5)
    buffer.add(rows(1, 2))
    assert buffer.storage.batch_size == (5,)
    assert buffer.storage["obs"].flatten().tolist() == [1, 2, 0, 0, 0]


def test_bad_input():
    buffer = ReplayBuffer(4)
    with pytest.raises(RuntimeError, match="empty") as caught:
        buffer.sample(1)
    assert isinstance(caught.value, AssertionError)
    with pytest.raises(RuntimeError, match="unsqueeze"):
        buffer.add(rows(1)[0])
    with pytest.raises(TypeError, match="dict"):
        buffer.add({"obs": torch.ones(1)})
    buffer.add(rows(1))
    with pytest.raises(ValueError, match="at least 1"):
        buffer.sample(0)
    with pytest.raises(IndexError):
        buffer.sample_from_indices([3])
    with pytest.raises(RuntimeError, match="obs"):
        buffer.add(TensorDict({"obs": torch.ones(1, 7), "pixels": torch.ones(1, 2, 2)}, [1]))
    assert buffer.size == buffer.counter == 1


def test_clear_keeps_the_counter(tmp_path):
    for buffer in (ReplayBuffer(4), ReplayBuffer(4, storage="memmap", path=tmp_path / "rows")):
        buffer.add(rows(1, 2))
        buffer.clear()
        assert (buffer.size, buffer.cursor, buffer.counter, buffer.storage) == (0, 0, 2, None)
        buffer.add(rows(3))
        assert (buffer.size, buffer.counter) == (1, 3)


def test_with_many_rows_batches_may_be_larger_than_unique():
    buffer = ReplayBuffer(20_000)
    buffer.add(TensorDict({"x": torch.arange(20_000)}, [20_000]))
    drawn = buffer.sample(20_000)["x"].flatten()
    assert len(drawn) == 20_000
    assert len(drawn.unique()) < 19_000


def test_tensorclasses_go_in():
    buffer = ReplayBuffer(4)
    one = Transition(obs=torch.zeros(4), action=1, next_obs=torch.zeros(4), reward=1.0, done=False)
    buffer.add(torch.stack([one, one]))
    assert buffer.sample(2)["action"].shape == (2, 1)


KILLED = """
import sys, torch
from tdstore import TensorDict
from tdstore.rl.transitions import ReplayBuffer
buffer = ReplayBuffer(1000, storage={storage!r}, path={path!r})
for i in range(1000):
    buffer.add(TensorDict({{"x": torch.full((1, 4), i)}}, [1]))
    if i % 20 == 0:
        buffer.flush()
        print(i, flush=True)
"""


@pytest.mark.parametrize("storage", ["memmap", "h5", "zarr"])
def test_a_killed_writer_loses_no_committed_row(tmp_path, storage):
    path = str(tmp_path / "rows")
    code = KILLED.format(storage=storage, path=path)
    os.mkfifo(tmp_path / "output")
    with scripts.started(code, output=tmp_path / "output") as writer, open(tmp_path / "output") as printed:
        for line in printed:
            if int(line) >= 100:
                break
        os.kill(writer.pid, signal.SIGKILL)
    assert writer.status == -signal.SIGKILL, writer.errors
    buffer = ReplayBuffer.open(path, storage=storage)
    size = buffer.size
    assert size > 100
    assert buffer.storage[: buffer.size]["x"][:, 0].tolist() == list(range(size))
    buffer.add(TensorDict({"x": torch.full((1, 4), -1)}, [1]))
    assert buffer.storage[: buffer.size]["x"][:, 0].tolist() == [*range(size), -1]
    assert buffer.counter == size + 1
    buffer.close()


# -- checkpoints -----------------------------------------------------------------------------
def by_folder(buffer, fresh, folder):
    buffer.dumps(folder)
    fresh.loads(folder)


def by_state_dict(buffer, fresh, folder):
    torch.save(buffer.state_dict(), folder)
    fresh.load_state_dict(torch.load(folder, weights_only=True))


@pytest.mark.parametrize("travel", [by_folder, by_state_dict])
def test_checkpoints_have_priorities(tmp_path, travel):
    buffer, fresh = PrioritizedReplayBuffer(5, alpha=1.0), PrioritizedReplayBuffer(5, alpha=1.0)
    buffer.add(rows(*range(7)))
    buffer.update_priorities([0, 1, 2], [3.0, 4.0, 5.0])
    travel(buffer, fresh, tmp_path / "checkpoint")
    assert fresh.priorities.tolist() == [3, 4, 5, 1, 1]
    assert (fresh.size, fresh.counter, fresh.cursor, fresh.max_priority) == (5, 7, 2, 5.0)
    fresh.add(rows(9))
    assert fresh.priorities.tolist() == [3, 4, 5, 1, 1]
    fresh.add(rows(9))
    assert fresh.priorities.tolist() == [3, 4, 5, 5, 1]


@pytest.mark.parametrize("travel", [by_folder, by_state_dict])
def test_checkpoints_have_queued_steps(tmp_path, travel):
    steps = [step(float(i)) for i in range(1, 6)]
    buffer, _ = folded(steps[:4])
    fresh = MultiStepReplayBuffer(10, n_step=3, gamma=0.5)
    travel(buffer, fresh, tmp_path / "checkpoint")
    fresh.add(steps[4])
    assert fresh.storage[:3]["reward"].flatten().tolist() == [2.75, 4.5, 6.25]


def test_checkpoints_of_nothing_and_of_others(tmp_path):
    ReplayBuffer(4).dumps(tmp_path / "empty")
    buffer = ReplayBuffer(4)
    buffer.add(rows(1))
    buffer.loads(tmp_path / "empty")
    assert buffer.size == 0
    ranked = PrioritizedReplayBuffer(4)
    ranked.add(rows(1))
    with pytest.raises(ValueError, match="priorities"):
        ranked.loads(tmp_path / "empty")
    assert ranked.size == 1
    with pytest.raises(FileNotFoundError):
        buffer.loads(tmp_path / "nowhere")


# -- A7: n steps -----------------------------------------------------------------------------
def folded(steps, **kwargs):
    buffer = MultiStepReplayBuffer(10, n_step=3, gamma=0.5, **kwargs)
    returned = [buffer.add(one) for one in steps]
    return buffer, returned


def test_a7_three_steps():
    steps = [step(float(i)) for i in range(1, 6)]
    buffer, returned = folded(steps)
    assert buffer.storage[: buffer.size]["reward"].flatten().tolist() == [2.75, 4.5, 6.25]
    assert buffer.storage[: buffer.size]["next_obs"].flatten().tolist() == [4, 5, 6]
    assert buffer.storage[: buffer.size]["obs"].flatten().tolist() == [1, 2, 3]
    assert returned[:2] == [None, None]
    assert [one is steps[i] for i, one in enumerate(returned[2:])] == [True] * 3
    assert buffer.sample_from_indices([2, 0])["reward"].flatten().tolist() == [6.25, 2.75]


def test_a7_the_first_done_stops():
    buffer, _ = folded([step(float(i), done=i in (2, 5)) for i in range(1, 6)])
    assert buffer.storage[: buffer.size]["reward"].flatten().tolist() == [2.0, 2.0, 6.25]
    assert buffer.storage[: buffer.size]["done"].flatten().tolist() == [1, 1, 1]
    assert buffer.storage[: buffer.size]["next_obs"].flatten().tolist() == [3, 3, 6]
    buffer, _ = folded([step(float(i), done=i == 1) for i in range(1, 4)])
    assert buffer.storage[: buffer.size]["reward"].item() == 1.0
    assert buffer.storage[: buffer.size]["done"].item() == 1.0


def test_each_environment_stops_by_itself():
    steps = [torch.cat([step(float(i), done=i == 2), step(float(i))]) for i in range(1, 4)]
    buffer, _ = folded(steps)
    assert buffer.storage[: buffer.size]["reward"].flatten().tolist() == [2.0, 2.75]
    assert buffer.storage[: buffer.size]["next_obs"].flatten().tolist() == [3, 4]
    assert buffer.storage[: buffer.size]["done"].flatten().tolist() == [1, 0]


def test_nested_observations_and_agents():
    def one(i, done):
        flags = TensorDict({"a": torch.tensor([float(done)]), "b": torch.tensor([0.0])}, [1])
        both = TensorDict({name: torch.tensor([float(i)]) for name in "ab"}, [1])
        images = TensorDict({name: torch.full((1, 2, 2), i) for name in "ab"}, [1])
        data = {"obs": images, "next_obs": images + 1, "reward": both, "terminated": flags}
        return TensorDict(data, [1])

    buffer, _ = folded([one(i, i == 2) for i in range(1, 4)])
    assert buffer.storage[: buffer.size]["reward", "a"].item() == 2.0
    assert buffer.storage[: buffer.size]["reward", "b"].item() == 2.75
    assert buffer.storage[: buffer.size]["next_obs", "a"].unique().tolist() == [3]
    assert buffer.storage[: buffer.size]["next_obs", "b"].unique().tolist() == [4]
    assert buffer.storage[: buffer.size]["terminated", "a"].item() == 1.0


def test_the_tail_is_flushed_and_cleared():
    buffer, _ = folded([step(float(i)) for i in range(1, 4)])
    buffer.flush()
    assert buffer.storage[: buffer.size]["reward"].flatten().tolist() == [2.75, 3.5, 3.0]
    buffer.flush()
    assert buffer.size == 3
    buffer.add(step(9.0))
    buffer.clear()
    buffer.add(step(1.0))
    buffer.add(step(2.0))
    assert buffer.size == 0
    assert buffer.counter == 3


def test_n_steps_need_their_entries():
    buffer = MultiStepReplayBuffer(4)
    for name in ("reward", "next_obs", "done"):
        with pytest.raises(AssertionError, match=name):
            buffer.add(step(1.0).exclude(name))
    buffer.add(step(1.0))
    with pytest.raises(RuntimeError, match="2 environments"):
        buffer.add(torch.cat([step(1.0), step(1.0)]))
    with pytest.raises(ValueError, match="n_step"):
        MultiStepReplayBuffer(4, n_step=0)


# -- A8: priorities --------------------------------------------------------------------------
@pytest.mark.parametrize("stored", [True, False])
def test_a_step_that_does_not_fit_is_refused_before_it_is_queued(stored):
    """It was queued, and made all later steps fail: each was dropped, and flush() failed too."""
    buffer = MultiStepReplayBuffer(10, n_step=3, gamma=0.5)
    for reward in range(4 if stored else 1):
        buffer.add(step(float(reward)))
    with pytest.raises(RuntimeError, match="obs"):
        buffer.add(step(1.0).set("obs", torch.zeros(1, 3)))
    with pytest.raises(KeyError, match="action"):
        buffer.add(step(1.0).exclude("action"))
    buffer.add(step(9.0, more=torch.ones(1)))
    buffer.add(step(10.0, more=torch.ones(1)))
    buffer.flush()
    observed = buffer.storage["obs"][: buffer.size].reshape(-1).tolist()
    assert observed == [*map(float, range(4 if stored else 1)), 9.0, 10.0]


def prioritized(alpha=1.0):
    buffer = PrioritizedReplayBuffer(8, alpha=alpha)
    buffer.add(rows(0, 1, 2, 3))
    buffer.update_priorities(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    return buffer


def test_a8_frequencies_and_weights():
    torch.manual_seed(0)
    buffer = prioritized()
    assert buffer.total_priority == 10
    batch = buffer.sample(10_000, beta=1.0)
    assert batch.batch_size == (10_000,)
    assert batch["idxs"].shape == batch["weights"].shape == (10_000, 1)
    assert (batch["idxs"].dtype, batch["weights"].dtype) == (torch.int64, torch.float32)
    slots = batch["idxs"].flatten()
    assert (torch.bincount(slots) / 10_000).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.01)
    assert (batch["obs"].flatten() == slots).all()
    for beta, expected in ((1.0, [1, 0.5, 1 / 3, 0.25]), (0.4, [1, 0.7579, 0.6444, 0.5743])):
        batch = buffer.sample(1000, beta=beta)
        weights = dict(zip(batch["idxs"].flatten().tolist(), batch["weights"].flatten().tolist(), strict=True))
        assert [weights[i] for i in range(4)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_each_equal_share_of_the_priorities_gives_one_row(times):
    buffer = prioritized()
    expected = [slot for slot in range(4) for _ in range(times * (slot + 1))]
    for _ in range(20):
        assert buffer.sample(10 * times)["idxs"].flatten().tolist() == expected


def test_from_16384_rows_on_a_sample_may_have_a_row_twice():
    buffer = ReplayBuffer(20_000)
    buffer.add(TensorDict({"obs": torch.arange(16_383)}, [16_383]))
    seen = buffer.sample(10_000, return_idx=True)
    assert len(seen["idxs"].unique()) == 10_000 and (seen["obs"].flatten() == seen["idxs"]).all()
    assert len(buffer.sample(20_000)) == 16_383
    buffer.add(TensorDict({"obs": torch.tensor([16_383])}, [1]))
    seen = buffer.sample(10_000, return_idx=True)
    assert 7_000 < len(seen["idxs"].unique()) < 8_000, "16,384 * (1 - exp(-10,000 / 16,384)) = 7,485"
    assert (seen["obs"].flatten() == seen["idxs"]).all() and len(buffer.sample(20_000)) == 16_384


def test_a_checkpoint_in_a_buffer_of_just_its_size_goes_on_at_the_first_row(tmp_path):
    buffer = ReplayBuffer(10)
    buffer.add(rows(*range(5)))
    buffer.dumps(tmp_path / "checkpoint")
    small = ReplayBuffer(5)
    small.loads(tmp_path / "checkpoint")
    assert (small.size, small.cursor) == (5, 0)
    small.add(rows(7))
    assert small.sample_from_indices(torch.arange(5))["obs"].flatten().tolist() == [7, 1, 2, 3, 4]


def test_a8_small_and_new_priorities():
    buffer = prioritized()
    buffer.update_priorities([0], [0.0])
    assert buffer.priorities.tolist() == pytest.approx([1e-5, 2, 3, 4])
    buffer.add(rows(9))
    assert buffer.priorities[4] == 4.0
    buffer.update_priorities([1, 1], torch.tensor([[5.0], [7.0]]))
    assert buffer.priorities[1] == 7.0
    buffer.update_priorities([], [])
    assert PrioritizedReplayBuffer(4, alpha=0.5).max_priority == 1.0


def test_priorities_follow_the_ring():
    buffer = prioritized()
    buffer.add(rows(*range(6)))
    assert buffer.priorities.tolist() == [4, 4, 3, 4, 4, 4, 4, 4]
    buffer.clear()
    assert (buffer.total_priority, buffer.max_priority) == (0, 1.0)
    buffer.add(rows(1))
    assert buffer.priorities.tolist() == [1]
    buffer.add(rows(*range(20)))
    assert buffer.total_priority == 8


def test_bad_priorities_change_nothing():
    buffer = prioritized()
    for idxs, priorities, error, text in (
        ([0, 1], [1.0], ValueError, "1 priorities for 2 rows"),
        ([0, 1], [1.0, float("nan")], ValueError, "nan"),
        ([0, 7], [1.0, 1.0], IndexError, "7"),
    ):
        with pytest.raises(error, match=text):
            buffer.update_priorities(idxs, priorities)
    assert buffer.total_priority == 10
    with pytest.raises(ValueError, match="beta"):
        buffer.sample(2, beta=-1.0)
    with pytest.raises(ValueError, match="alpha"):
        PrioritizedReplayBuffer(4, alpha=-1.0)
    with pytest.raises(errors.EmptyBufferError):
        PrioritizedReplayBuffer(4).sample(2)


def test_priorities_of_stored_rows(tmp_path):
    buffer = PrioritizedReplayBuffer(8, storage="memmap", path=tmp_path / "rows")
    buffer.add(rows(1, 2, 3))
    buffer.close()
    found = PrioritizedReplayBuffer.open(tmp_path / "rows")
    assert found.priorities.tolist() == [1, 1, 1]
    assert found.sample(5).batch_size == (5,)


# -- rollouts --------------------------------------------------------------------------------
def reference(reward, value, done, last, gamma, lam):
    """Generalized advantages by their definition, as sums over what follows."""
    steps = len(reward)
    values = [*value, last]
    delta = [reward[t] + gamma * values[t + 1] * (1 - done[t]) - value[t] for t in range(steps)]
    out = []
    for t in range(steps):
        total, factor = 0.0, 1.0
        for k in range(t, steps):
            total += factor * delta[k]
            factor *= gamma * lam * (1 - done[k])
        out.append(total)
    return out


@pytest.mark.parametrize("storage", PLACES)
def test_advantages(tmp_path, storage):
    place = {} if storage is None else {"storage": storage, "path": tmp_path / "steps"}
    buffer = RolloutBuffer(5, num_envs=2, gamma=0.9, gae_lambda=0.8, **place)
    reward, value = torch.rand(5, 2), torch.rand(5, 2)
    done = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 1], [0, 0]])
    for t in range(5):
        obs = {"image": torch.full((2, 3, 3), t, dtype=torch.uint8)}
        buffer.add(
            obs, torch.tensor([t, -t]), reward[t], done[t].bool(), value[t], torch.zeros(2), hidden=torch.ones(2, 4)
        )
    assert buffer.is_full
    last = torch.tensor([0.5, 0.25])
    buffer.compute_returns_and_advantages(last)
    found = buffer.get()
    assert found.batch_size == (10,)
    assert buffer.size() == 10
    for env in range(2):
        columns = (reward[:, env].tolist(), value[:, env].tolist(), done[:, env].tolist(), last[env].item())
        expected = reference(*columns, 0.9, 0.8)
        assert found["advantages"][env::2].flatten().tolist() == pytest.approx(expected, abs=1e-5)
        assert found["returns"][env::2].flatten().tolist() == pytest.approx(
            [a + v for a, v in zip(expected, columns[1], strict=True)], abs=1e-5
        )
    assert found["obs", "image"].shape == (10, 3, 3)
    assert found["obs", "image"].dtype == torch.uint8
    assert found["action"].flatten().tolist() == [0, 0, 1, -1, 2, -2, 3, -3, 4, -4]
    assert found["hidden"].shape == (10, 4)
    buffer.compute_returns_and_advantages(last, last_done=[1, 1])
    assert buffer.get()["returns"][-2:].flatten().tolist() == pytest.approx(reward[-1].tolist())


def test_minibatches_have_each_row_once():
    buffer = RolloutBuffer(4, num_envs=3)
    for t in range(4):
        one = torch.full((3,), float(t))
        buffer.add(torch.arange(3) + 3 * t, one, one, one, one, one)
    parts = list(buffer.minibatches(5, epochs=2))
    assert [len(part) for part in parts] == [5, 5, 2] * 2
    for epoch in (parts[:3], parts[3:]):
        assert sorted(torch.cat([part["obs"] for part in epoch]).flatten().tolist()) == list(range(12))
    with pytest.raises(IndexError, match="reset"):
        buffer.add(one, one, one, one, one, one)
    buffer.reset()
    assert len(buffer) == 0
    with pytest.raises(errors.EmptyBufferError):
        buffer.get()
    with pytest.raises(ValueError, match="num_envs"):
        RolloutBuffer(3, num_envs=0)
    with pytest.raises(TypeError, match="num_envs=2"):
        RolloutBuffer(3, 2)


class Space:
    """A space as gymnasium has it, as far as the buffer looks."""

    def __init__(self, *shape):
        self.shape = shape


def test_one_environment_without_a_dimension():
    buffer = RolloutBuffer(3, {"image": Space(2, 2), "speed": Space()}, Space(), 1, "cpu", 0.9, 0.5)
    for t in range(3):
        buffer.add({"image": torch.ones(2, 2), "speed": 1.0}, t, 1.0, False, 0.0, 0.0)
    assert buffer.get()["obs", "image"].shape == (3, 2, 2)
    assert buffer.get()["obs", "speed"].shape == buffer.get()["action"].shape == (3, 1)
    assert (buffer.gamma, buffer.gae_lambda) == (0.5, 0.9)


def test_batches_under_the_names_of_agilerl():
    buffer = RolloutBuffer(4, num_envs=3, gamma=0.5, use_gae=False)
    for t in range(4):
        one = torch.full((3,), float(t))
        buffer.add(torch.full((3, 2), t), one, one, one == 1, one, one, next_obs=torch.zeros(3, 2))
    buffer.compute_returns_and_advantages(torch.tensor([8.0, 8, 8]))
    batch = buffer.get_tensor_batch()
    shapes = {key: tuple(value.shape) for key, value in batch.items()}
    flat = dict.fromkeys(["rewards", "dones", "values", "log_probs", "advantages", "returns"], (12,))
    assert shapes == {**flat, "observations": (12, 2), "next_observations": (12, 2), "actions": (12, 1)}
    assert batch["dones"].dtype == torch.bool
    assert batch["returns"].view(4, 3)[:, 0].tolist() == [0.5, 1.0, 2 + 0.5 * 7, 3 + 0.5 * 8]
    few = buffer.get_tensor_batch(5, device="cpu")
    assert few.batch_size == (5,)
    assert few["observations"].sum() == 2 * few["rewards"].sum()
    with pytest.raises(ValueError, match="batch_size"):
        buffer.get(0)
