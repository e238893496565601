"""Replay buffers: writing, sampling, priorities, slices, prefetching, checkpoints, threads."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
import torch

from tdstore import TensorClass, TensorDict
from tdstore.rl import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tdstore.rl.buffers import SegmentTree
from tests.rl.places import rows


def steps(*lengths, start=0):
    """Rows of episodes of those lengths."""
    episode = torch.cat([torch.full((n,), start + k) for k, n in enumerate(lengths)])
    done = torch.zeros(len(episode), 1, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    step = torch.cat([torch.arange(n) for n in lengths])
    return TensorDict({"episode": episode, "step": step, "next": TensorDict({"done": done}, [len(done)])}, [len(done)])


class Pinned:
    """A batch that counts how often it was pinned."""

    def __init__(self, rows, pins=0):
        self.rows, self.pins = rows, pins

    def pin_memory(self):
        return Pinned(self.rows, self.pins + 1)


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("pin", [True, False])
def test_batches_are_pinned_once_and_after_all_transforms(pin, prefetch):
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(10), batch_size=4, collate_fn=Pinned, pin_memory=pin, prefetch=prefetch,
        transform=lambda batch: Pinned(batch.rows + 1, batch.pins),
    )  # fmt: skip
    buffer.extend(torch.arange(5))
    for _ in range(3):
        batch = buffer.sample()
        assert batch.pins == int(pin) and batch.rows.min() >= 1 and batch.rows.shape == (4,)
    buffer.close()


def test_pinned_batches_of_a_machine_without_an_accelerator_are_batches():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, pin_memory=True)
    buffer.extend(TensorDict({"a": torch.arange(5)}, [5]))
    batch = buffer.sample()
    assert batch.batch_size == (4,) and torch.equal(batch["a"], batch["index"])
    assert batch["a"].is_pinned() is torch.cuda.is_available()


# -- parts and arguments -----------------------------------------------------------------------
def test_parts_are_instances_or_functions():
    buffer = ReplayBuffer()
    assert isinstance(buffer.storage, ListStorage) and buffer.storage.max_size == 1000
    assert isinstance(buffer.sampler, RandomSampler) and isinstance(buffer.writer, RoundRobinWriter)
    made = ReplayBuffer(storage=lambda: LazyTensorStorage(7), sampler=RandomSampler, writer=RoundRobinWriter)
    assert made.storage.max_size == 7
    for name in ("storage", "sampler", "writer"):
        with pytest.raises(TypeError, match=name):
            ReplayBuffer(**{name: 3})
        with pytest.raises(TypeError, match=name):
            ReplayBuffer(**{name: lambda: 3})
    for arguments in ({"batch_size": 0}, {"prefetch": -1}, {"dim_extend": -1}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            ReplayBuffer(**arguments)
    with pytest.raises(ValueError, match="batch_size"):
        ReplayBuffer(sampler=SamplerWithoutReplacement(drop_last=True))


def test_batch_sizes():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(RuntimeError, match="no rows"):
        buffer.sample(2)
    buffer.extend(torch.arange(10))
    with pytest.raises(RuntimeError, match="batch size"):
        buffer.sample()
    with pytest.raises(RuntimeError, match="batch_size"):
        next(iter(buffer))
    with pytest.raises(ValueError, match="at least 1"):
        buffer.sample(0)
    sized = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=3)
    sized.extend(torch.arange(10))
    with pytest.warns(UserWarning, match="batch_size=5"):
        assert len(sized.sample(5)) == 5
    batch, info = sized.sample(return_info=True)
    assert (batch == info["index"]).all()


def test_writing():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    for nothing in ([], torch.zeros(0)):
        with pytest.raises(RuntimeError, match="row"):
            buffer.extend(nothing)
    index = buffer.extend((torch.arange(3), {"x": torch.ones(3, 2)}))
    assert index.dtype == torch.int64 and buffer.add((torch.tensor(3), {"x": torch.ones(2)})) == 3
    assert buffer[:][0].tolist() == [0, 1, 2, 3]
    items = ReplayBuffer(storage=LazyTensorStorage(10))
    items.extend([TensorDict(a=torch.tensor(1)), TensorDict(a=torch.tensor(2))])
    assert items["a"].tolist() == [1, 2]
    data = TensorDict({"a": torch.arange(2)}, [2])
    TensorDictReplayBuffer(storage=LazyTensorStorage(10)).extend(data)
    assert list(data.keys()) == ["a"], "what is written stays as it is"
    assert items.stats() == {
        "size": 2, "capacity": 10, "utilization": 0.2, "write_count": 2, "prefetch_queue_size": 0, "initialized": True,
    }  # fmt: skip


def test_rows_by_index_and_by_key():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(steps(2, 3))
    buffer["step"] = torch.arange(5) * 10
    assert buffer[:]["step"].tolist() == [0, 10, 20, 30, 40] and buffer["next", "done"].sum() == 2
    buffer[1] = TensorDict(
        {"episode": torch.tensor(7), "step": torch.tensor(7), "next": {"done": torch.tensor([True])}}
    )
    assert buffer[1]["step"] == 7 and len(buffer) == 5
    with pytest.raises(KeyError, match="nothing"):
        buffer["nothing"] = torch.arange(5)
    with pytest.raises(RuntimeError, match="shape|batch"):
        buffer["step"] = torch.arange(4)
    with pytest.raises(RuntimeError):
        buffer["step"] = torch.zeros(5, 3, dtype=torch.int64)
    assert buffer["step"].tolist() == [0, 7, 20, 30, 40]
    buffer.empty()
    assert len(buffer) == 0 and buffer.write_count == 0 and buffer.extend(steps(2)).tolist() == [0, 1]


def test_an_entry_of_all_rows_is_set_from_a_tensor_with_gradients():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(TensorDict({"reward": torch.zeros(3)}, [3]))
    buffer["reward"] = torch.arange(6.0, requires_grad=True)[::2]
    assert buffer["reward"].tolist() == [0, 2, 4] and not buffer["reward"].requires_grad


def test_an_immutable_dataset():
    buffer = ReplayBuffer(storage=TensorStorage(steps(2, 3)), writer=ImmutableDatasetWriter(), batch_size=4)
    assert buffer.sample().batch_size == torch.Size([4])
    for write in (buffer.add, buffer.extend):
        with pytest.raises(RuntimeError, match="Immutable"):
            write(steps(1))


def test_the_largest_rows_stay():
    writer = TensorDictMaxValueWriter(rank_key="key")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=writer, batch_size=2)
    assert buffer.extend(TensorDict({"key": torch.tensor([5.0, 1.0])}, [2])).tolist() == [0, 1]
    assert buffer.add(TensorDict(key=torch.tensor(3.0))) == 2
    assert buffer.add(TensorDict(key=torch.tensor(0.5))) is None
    index = buffer.extend(TensorDict({"key": torch.tensor([4.0, 0.1, 9.0, 2.0])}, [4]))
    assert sorted(buffer["key"].tolist()) == [4, 5, 9] and (index < 0).tolist() == [False, True, False, True]
    with pytest.raises(ValueError, match="NaN"):
        buffer.add(TensorDict(key=torch.tensor(float("nan"))))
    with pytest.raises(ValueError, match="reduction"):
        TensorDictMaxValueWriter(reduction="first")


# -- samplers ----------------------------------------------------------------------------------
def test_random_samples_are_of_visible_rows_and_can_be_repeated():
    generator = torch.Generator().manual_seed(3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=2000, generator=generator)
    buffer.extend(torch.arange(10))
    first = buffer.sample()
    assert set(first.tolist()) == set(range(10)) and np.bincount(first.numpy()).min() > 130
    buffer.set_rng(torch.Generator().manual_seed(3))
    assert torch.equal(buffer.sample(), first)


def test_a_change_of_length_restarts_the_pass():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=2)
    buffer.extend(torch.arange(4))
    buffer.sample()
    buffer.extend(torch.arange(4, 6))
    assert sorted(torch.cat([buffer.sample() for _ in range(3)]).tolist()) == list(range(6))
    assert sorted(torch.cat(list(buffer)).tolist()) == list(range(6))
    small = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(drop_last=True), batch_size=9)
    small.extend(torch.arange(4))
    with pytest.raises(ValueError, match="drop_last"):
        small.sample()


@pytest.mark.parametrize("size", [1, 31, 32, 33, 63, 64, 65, 5000, 131_073, 300_000, 4_200_000])
def test_the_tree_finds_what_a_running_sum_finds(size):
    random = np.random.default_rng(0)
    tree, weights = SegmentTree(size), np.zeros(size)
    for _ in range(5):
        slots = random.integers(0, size, 500)
        values = random.integers(0, 50, 500).astype(float)
        tree.update(slots, values)
        for slot, value in zip(slots, values, strict=True):
            weights[slot] = value
        if not weights.sum():
            continue
        assert tree.total == weights.sum() and tree.smallest == weights[weights > 0].min()
        masses = random.random(300) * tree.total
        assert (tree.find(masses) == weights.cumsum().searchsorted(masses, side="right")).all()
        assert (weights[tree.find(np.array([0.0, tree.total]))] > 0).all()


@pytest.mark.parametrize("size", [33, 131_073, 4_200_000])
def test_a_mass_beyond_the_total_finds_the_last_slot_with_weight(size):
    tree = SegmentTree(size)
    tree.update(np.array([0, size - 1]), np.array([1.0, 2.0]))
    assert tree.find(np.array([3.0, 9.0])).tolist() == [size - 1] * 2
    tree.update(np.array([size - 1]), 0.0)
    assert tree.find(np.array([1.0, 9.0])).tolist() == [0, 0] and tree.smallest == tree.total == 1.0


def test_priorities_of_new_rows_and_of_rows_that_are_named_twice():
    sampler = PrioritizedSampler(8, alpha=1.0, beta=1.0, eps=0.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=4)
    buffer.extend(torch.arange(4))
    np.testing.assert_allclose(sampler.priorities(4), [0.25] * 4)
    buffer.update_priority(torch.tensor([0, 1, 1, -1]), torch.tensor([3.0, 9.0, 5.0, 100.0]))
    np.testing.assert_allclose(sampler.priorities(4), np.array([3, 5, 1, 1]) / 10)
    buffer.add(torch.tensor(4))
    np.testing.assert_allclose(sampler.priorities(5), np.array([3, 5, 1, 1, 9]) / 19, err_msg="the largest ever set")


@pytest.mark.parametrize(
    ("index", "priority", "error", "match"),
    [
        ([0], [-1.0], ValueError, "-1.0 at position 0"),
        ([0, 1], [1.0, float("nan")], ValueError, "nan at position 1"),
        ([0], [float("inf")], ValueError, "inf"),
        ([0, 8], [1.0, 1.0], IndexError, "8"),
        ([-2], [1.0], IndexError, "-2"),
        ([0, 1, 2], [1.0, 1.0], ValueError, "2 priorities for 3 rows"),
        ([0.5], [1.0], IndexError, "integers"),
    ],
)
def test_priorities_are_checked(index, priority, error, match):
    sampler = PrioritizedSampler(8, alpha=0.7, beta=0.5)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=4)
    buffer.extend(torch.arange(4))
    before = sampler.priorities()
    with pytest.raises(error, match=match):
        buffer.update_priority(torch.tensor(index), torch.tensor(priority))
    assert (sampler.priorities() == before).all()


@pytest.mark.parametrize("wrong", [{"alpha": -0.1}, {"beta": -1}, {"alpha": float("nan")}, {"max_capacity": 0}])
def test_parameters_of_priorities_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PrioritizedSampler(**{"max_capacity": 4, "alpha": 0.5, "beta": 0.5, **wrong})


def test_priorities_need_a_limit():
    with pytest.raises(ValueError, match="max_size"):
        PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=ListStorage())


def test_a_buffer_of_tensordicts_with_priorities():
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(10), batch_size=200
    )
    buffer.extend(TensorDict({"a": torch.arange(4), "td_error": torch.tensor([[1.0], [0.0], [0.0], [3.0]])}, [4]))
    sample = buffer.sample()
    assert set(sample["a"].tolist()) == {0, 3} and (sample["index"] == sample["a"]).all()
    weight = torch.where(sample["a"] == 3, 1 / 3, 1.0)
    torch.testing.assert_close(sample["priority_weight"], weight)
    sample["td_error"] = torch.where(sample["a"] == 3, 0.0, 1.0)
    buffer.update_tensordict_priority(sample)
    assert set(buffer.sample()["a"].tolist()) == {0}
    with pytest.raises(KeyError, match="td_error"):
        buffer.update_tensordict_priority(sample.exclude("td_error"))
    with pytest.raises(ValueError, match="TensorDicts"):
        buffer.extend(torch.arange(3))


@pytest.mark.parametrize("keys", [{"traj_key": "episode"}, {}], ids=["by id", "by end"])
def test_slices_are_pieces_of_one_episode_each(keys):
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40), sampler=SliceSampler(slice_len=4, **keys), batch_size=32
    )
    for start in range(0, 60, 4):
        buffer.extend(steps(3, 7, 5, 4, start=start))
        sample = buffer.sample()
        pieces = sample["step"].view(8, 4)
        assert (pieces.diff(dim=1) == 1).all()
        assert (sample["episode"].view(8, 4) == sample["episode"].view(8, 4)[:, :1]).all()
        last = torch.tensor([False, False, False, True]).repeat(8)
        assert (sample["next", "truncated"][:, 0] == last).all() and sample["next", "done"][last].all()
        assert (sample["episode"] % 4 != 0).all() or start % 4, "episodes of three steps have no piece of four"


def test_slices_that_span_the_end_of_the_ring():
    sampler = SliceSampler(slice_len=6, traj_key="episode")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=60)
    buffer.extend(steps(7, 7, start=1))
    sample = buffer.sample()
    assert (sample["step"].view(10, 6).diff(dim=1) == 1).all() and set(sample["episode"].tolist()) == {2}
    assert {0, 9} <= set(sample["index"].tolist())


def test_slices_that_cannot_be():
    for sizes in ({}, {"num_slices": 2, "slice_len": 3}):
        with pytest.raises(TypeError, match="exactly one"):
            SliceSampler(**sizes)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(num_slices=3), batch_size=8)
    buffer.extend(steps(4, 4))
    with pytest.raises(RuntimeError, match="multiple"):
        buffer.sample()
    long = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=5), batch_size=10)
    long.extend(steps(4, 3))
    with pytest.raises(RuntimeError, match="longest has 4"):
        long.sample()
    lost = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=2, traj_key="no"), batch_size=10)
    lost.extend(steps(4))
    with pytest.raises(KeyError, match="no"):
        lost.sample()
    loose = ReplayBuffer(
        storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=5, strict_length=False), batch_size=50
    )
    loose.extend(steps(4, 3))
    assert 30 <= len(loose.sample()) <= 40


def test_slices_without_replacement_and_with_priorities():
    sampler = SliceSamplerWithoutReplacement(slice_len=3, traj_key="episode")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=6)
    buffer.extend(steps(3, 4, 5, 6, 2))
    seen = torch.cat([batch["episode"] for batch in buffer])
    assert torch.bincount(seen, minlength=5).tolist() == [3, 3, 3, 3, 0]
    ranked = PrioritizedSliceSampler(40, 1.0, 1.0, eps=0.0, slice_len=3, traj_key="episode")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=ranked, batch_size=30)
    index = buffer.extend(steps(6, 6))
    buffer.update_priority(index, torch.tensor([0, 1.0, 0, 0, 0, 5.0, 0, 0, 0, 0, 0, 0]))
    sample = buffer.sample()
    assert sample["index"].view(10, 3).tolist() == [[1, 2, 3]] * 10 and sample["priority_weight"].shape == (30,)


# -- batches -----------------------------------------------------------------------------------
def test_transforms_and_collation():
    buffer = ReplayBuffer(storage=ListStorage(10), batch_size=3, transform=lambda batch: batch * 2)
    buffer.append_transform(lambda item: item + 100, invert=True)
    buffer.append_transform(lambda batch: -batch)
    buffer.add(torch.tensor(1))
    assert buffer.sample().tolist() == [-202] * 3
    ragged = ReplayBuffer(storage=LazyStackStorage(10), batch_size=4, collate_fn=lambda td: td)
    ragged.extend([TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(3))])
    assert {td["a"].shape[0] for td in ragged.sample().unbind(0)} <= {2, 3}


def test_rows_by_index_are_transformed_and_the_stored_ones_are_not():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), transform=lambda td: td.set("b", td["a"].add_(1)))
    buffer.extend(TensorDict(a=torch.arange(4), batch_size=[4]))
    assert buffer[1:3]["b"].tolist() == [2, 3] and buffer[0]["b"] == 1
    assert buffer["a"].tolist() == [0, 1, 2, 3]


def test_prefetched_batches_do_not_see_later_writes():
    sampler = SamplerWithoutReplacement(shuffle=False)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4, prefetch=3)
    buffer.extend(torch.arange(10))
    assert [batch.tolist() for batch in buffer] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    random = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, prefetch=2)
    random.extend(torch.zeros(10))
    random.sample()
    for future in random._pending:
        future.result()
    random[:].fill_(1.0)
    assert random.sample().sum() == 0 and random.sample().sum() == 0 and random.sample().sum() == 4
    random.empty()
    assert random.stats()["prefetch_queue_size"] == 0
    random.close()


def test_threads_extend_and_sample_at_once():
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(64), batch_size=32)

    def block(k):
        return TensorDict({"a": torch.full((8,), k), "b": torch.full((8, 500), k)}, [8])

    buffer.extend(block(0))
    failures = []

    def write():
        for k in range(300):
            buffer.extend(block(k))

    def read():
        try:
            for _ in range(300):
                sample = buffer.sample()
                assert (sample["b"] == sample["a"][:, None]).all()
                sample["td_error"] = torch.rand(32)
                buffer.update_tensordict_priority(sample)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run) for run in (write, write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and buffer.write_count == 8 + 2 * 300 * 8


# -- checkpoints -----------------------------------------------------------------------------------
def make_ranked(place=None):
    storage = LazyTensorStorage(20) if place is None else LazyMemmapStorage(20, scratch_dir=place)
    generator = torch.Generator().manual_seed(0)
    return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, batch_size=5, generator=generator)


@pytest.mark.parametrize("way", ["folder", "state dict", "pickle"])
def test_a_buffer_goes_on_where_it_was(way, tmp_path):
    buffer = make_ranked()
    buffer.extend(steps(10, 15))
    buffer.update_priority(torch.arange(20), torch.arange(20) + 0.5)
    buffer.sample()
    if way == "folder":
        buffer.dumps(tmp_path / "new" / "checkpoint")
        again = make_ranked()
        again.loads(tmp_path / "new" / "checkpoint")
    elif way == "state dict":
        again = make_ranked()
        again.load_state_dict(buffer.state_dict())
    else:
        again = pickle.loads(pickle.dumps(buffer))
    assert again.write_count == 25 and again.writer._cursor == 5
    for _ in range(3):
        left, right = buffer.sample(), again.sample()
        assert (left["index"] == right["index"]).all() and (left["step"] == right["step"]).all()
        torch.testing.assert_close(left["priority_weight"], right["priority_weight"])
    assert again.extend(steps(2)).tolist() == [5, 6] and buffer.writer._cursor == 5


def test_prefetched_batches_are_part_of_a_checkpoint(tmp_path):
    def make():
        sampler = SamplerWithoutReplacement(shuffle=False)
        return TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4, prefetch=2)

    buffer = make()
    buffer.extend(TensorDict({"a": torch.arange(20)}, [20]))
    buffer.sample()
    buffer.dumps(tmp_path / "checkpoint")
    assert not list((tmp_path / "checkpoint").rglob("*.pkl"))
    again = make()
    again.loads(tmp_path / "checkpoint")
    assert [again.sample()["a"].tolist() for _ in range(2)] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    with pytest.raises(FileNotFoundError, match="checkpoint"):
        make().loads(tmp_path)


def test_tensorclasses_in_a_buffer_of_tensordicts():
    class Move(TensorClass):
        obs: torch.Tensor

    buffer = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=3)
    buffer.extend(Move(obs=torch.arange(4.0), batch_size=[4]))
    assert type(buffer.sample()) is Move and type(buffer[0]) is Move


def test_rows_of_another_buffer_get_priorities():
    storage = LazyTensorStorage(10)
    ranked = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, batch_size=200)
    other = TensorDictReplayBuffer(storage=storage, batch_size=4)
    ranked.extend(rows(0, 1))
    ranked.update_priority(torch.tensor([0]), torch.tensor([3.0]))
    other.extend(rows(2, 3))
    other.add(rows(4)[0])
    assert set(ranked.sample()["a"].tolist()) == {0, 1, 2, 3, 4}
    assert ranked.sampler.priorities(5) * 13 == pytest.approx([3, 1, 3, 3, 3])


def test_two_buffers_over_one_storage_write_from_two_threads():
    storage = LazyTensorStorage(100)
    buffers = [TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, batch_size=4) for _ in range(2)]

    def work(buffer):
        for i in range(100):
            buffer.extend(rows(i, i))
            buffer.sample()

    threads = [threading.Thread(target=work, args=[buffer], daemon=True) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    assert all((buffer.sampler.priorities(100) > 0).all() for buffer in buffers if buffer.sample() is not None)


@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage])
def test_a_writer_over_rows_that_were_set_begins_at_the_first(make):
    storage = make(5)
    storage.set(range(2), rows(0, 1))
    assert ReplayBuffer(storage=storage).add(rows(7)[0]) == 0
    assert ReplayBuffer(storage=storage).add(rows(8)[0]) == 1, "a writer wrote last: the ring goes on"


def parallel(start, n, envs=3):
    """Rows of several environments, whose episodes of five steps begin at different times."""
    time = torch.arange(start, start + n)[:, None].expand(n, envs).clone()
    env = torch.arange(envs).expand(n, envs).clone()
    done = ((time + env) % 5 == 4).unsqueeze(-1)
    return TensorDict({"t": time, "env": env, "episode": (time + env) // 5, "next": {"done": done}}, [n, envs])


def is_in_pieces(sample, length):
    found = sample.view(-1, length)
    in_order = (found["t"].diff(dim=1) == 1).all()
    return bool(in_order and not found["env"].diff(dim=1).any() and not found["episode"].diff(dim=1).any())


@pytest.mark.parametrize("key", [{"traj_key": "episode"}, {}], ids=["traj_key", "end_key"])
@pytest.mark.parametrize("sampler", [SliceSampler, SliceSamplerWithoutReplacement])
def test_slices_of_several_environments(sampler, key):
    storage = LazyTensorStorage(30, ndim=2)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler(slice_len=3, **key), batch_size=12)
    at = 0
    for n in (6, 7, 3, 6, 10, 1, 2):  # around the end of the ring, at each place in it
        rb.extend(parallel(at, n).transpose(0, 1))
        at += n
        seen = set()
        for _ in range(20):
            sample = rb.sample()
            assert is_in_pieces(sample, 3)
            assert sample["t"].min() >= max(0, at - 10)
            assert sample["index"].shape == (len(sample), 2)
            assert sample["next", "truncated"].view(-1, 3).tolist() == [[False, False, True]] * (len(sample) // 3)
            seen |= set(sample["env"].tolist())
        assert seen == {0, 1, 2}


def test_prioritized_slices_of_several_environments():
    sampler = PrioritizedSliceSampler(30, 1.0, 0.5, slice_len=3, traj_key="episode")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(30, ndim=2), sampler=sampler, batch_size=12, dim_extend=0)
    rb.extend(parallel(0, 8))
    assert is_in_pieces(rb.sample(), 3)
    slots = torch.cartesian_prod(torch.arange(8), torch.arange(3))
    rb.update_priority(slots, torch.where((slots == torch.tensor([1, 1])).all(-1), 1e6, 0.0))
    sample = rb.sample()
    assert sample["t"].tolist() == [1, 2, 3] * 4
    assert sample["env"].unique().tolist() == [1]


def test_slices_of_rows_that_were_set_read_them_once():
    storage, reads = LazyTensorStorage(100), []
    storage.set(range(50), TensorDict({"episode": torch.arange(50) // 10}, [50]))
    column = storage.column
    storage.column = lambda key, slots: reads.append(len(slots)) or column(key, slots)
    rb = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=5, traj_key="episode"), batch_size=10)
    for _ in range(5):
        rb.sample()
    assert reads == [50]
