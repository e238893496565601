"""Ensembles of buffers, rows by the age of their policy, and goals that are replaced in hindsight."""

from __future__ import annotations

import pytest
import torch

from tdstore import TensorDict
from tdstore.rl import (
    HERReplayBuffer,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    StalenessAwareSampler,
    StorageEnsemble,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    WriterEnsemble,
)


def member(number: int, rows: int = 6, **parts) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), **parts)
    if rows:
        buffer.extend(TensorDict({"a": torch.arange(rows) + 100 * number}, [rows]))
    return buffer


def test_a_batch_has_rows_of_each_chosen_member_and_says_where_they_are():
    rb = ReplayBufferEnsemble(member(0), member(1), member(2), batch_size=12, sample_from_all=True)
    batch, info = rb.sample(return_info=True)
    assert batch.batch_size == (3, 4) and (batch["a"] // 100 == torch.tensor([[0], [1], [2]])).all()
    assert batch["index", "buffer_ids"].tolist() == [[k] * 4 for k in range(3)]
    assert (batch["index", "index"] == batch["a"] % 100).all()
    assert (info["index"]["index"] == batch["index", "index"]).all()
    some = ReplayBufferEnsemble(member(0), member(1), member(2), num_buffer_sampled=2, p=[0, 1, 1])
    assert {int(k) for _ in range(20) for k in some.sample(4)["index", "buffer_ids"].flatten()} == {1, 2}
    assert next(iter(rb)).batch_size == (3, 4)


def test_members_are_reached_by_index():
    rb = ReplayBufferEnsemble(member(0), member(1), member(2), batch_size=4, p=[1.0, 1.0, 2.0])
    assert len(rb) == 3 and rb[-1] is rb.members[2] and len(rb[:2]) == 2
    torch.testing.assert_close(rb[1:].sampler.p, torch.tensor([1 / 3, 2 / 3]))
    assert rb[1, 3]["a"] == 103 and rb[:, :2]["a"].tolist() == [[0, 1], [100, 101], [200, 201]]
    assert rb[[0, 2]].members == (rb[0], rb[2])
    with pytest.raises(IndexError, match="no member 3"):
        rb[3]
    assert rb.stats()["size"] == 18 and rb.write_count == 18 and rb.storage.max_size == 30


def test_transforms_of_members_and_of_the_ensemble_are_called():
    one, two = member(0), member(1)
    two.append_transform(lambda rows: rows.set("a", -rows["a"]))
    rb = ReplayBufferEnsemble(
        one, two, batch_size=4, sample_from_all=True, transform=lambda rows: rows.set("b", rows["a"] * 2)
    )
    batch = rb.sample()
    assert (batch["a"][0] >= 0).all() and (batch["a"][1] <= -100).all() and (batch["b"] == batch["a"] * 2).all()
    listed = ReplayBufferEnsemble(one, two, batch_size=4, sample_from_all=True, collate_fn=len)
    assert listed.sample() == 2


def test_members_with_other_entries_give_a_lazy_stack():
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    other.extend(TensorDict({"a": torch.arange(3), "b": torch.ones(3)}, [3]))
    batch = ReplayBufferEnsemble(member(0), other, batch_size=4, sample_from_all=True).sample()
    assert batch.batch_size == (2, 2) and "b" not in batch and batch[1]["b"].tolist() == [1, 1]
    assert batch["index", "buffer_ids"].tolist() == [[0, 0], [1, 1]]


def test_only_members_with_rows_are_sampled_where_asked():
    sliced = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=2, traj_key="t", truncated_key=None)
    )
    sliced.extend(TensorDict({"a": torch.arange(4), "t": torch.tensor([0, 0, 0, 1])}, [4]))
    rb = ReplayBufferEnsemble(member(0, 0), sliced, batch_size=4, p="sampleable", num_buffer_sampled=2)
    assert rb.can_sample() and (rb.sample()["index", "buffer_ids"] == 1).all()
    assert sliced.sampler.available(sliced.storage, 2) == 2, "a piece begins at row 0 or 1"
    assert not ReplayBufferEnsemble(member(0, 0), member(1), batch_size=4).can_sample()
    with pytest.raises(RuntimeError, match="no member"):
        ReplayBufferEnsemble(member(0, 0), batch_size=4, p="sampleable").sample()


def test_rows_are_written_to_the_members_that_they_name():
    rb = ReplayBufferEnsemble(member(0, 0), member(1, 0), member(2, 0), routing_key="m")
    rows = TensorDict({"a": torch.arange(6), "m": torch.tensor([0, 2, 2, 0, 1, 2])}, [6])
    index = rb.extend(rows)
    assert index["buffer_ids"].tolist() == [0, 2, 2, 0, 1, 2] and index["index"].tolist() == [0, 0, 1, 1, 0, 2]
    assert [one[:]["a"].tolist() for one in rb.members] == [[0, 3], [4], [1, 2, 5]]
    assert rb.add(TensorDict({"a": torch.tensor(9), "m": torch.tensor(1)}, []))["index"] == 1
    with pytest.raises(ValueError, match="0 to 2"):
        rb.extend(TensorDict({"a": torch.arange(2), "m": torch.tensor([0, 3])}, [2]))
    with pytest.raises(ValueError, match="'m'"):
        rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    assert rb.write_count == 7
    by_dim = ReplayBufferEnsemble(member(0, 0), member(1, 0), routing_dim=1)
    by_dim.extend(TensorDict({"a": torch.arange(6).view(3, 2)}, [3, 2]))
    assert [one[:]["a"].tolist() for one in by_dim.members] == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(ValueError, match="routing_dim=1"):
        by_dim.extend(TensorDict({"a": torch.arange(6).view(2, 3)}, [2, 3]))
    with pytest.raises(RuntimeError, match=r"ensemble\[0\]"):
        ReplayBufferEnsemble(member(0)).extend(rows)


def rows_of(member_ids, **entries) -> TensorDict:
    return TensorDict({"m": torch.tensor(member_ids), **entries}, [len(member_ids)])


def refusing(kind: str, folder) -> tuple[ReplayBuffer, TensorDict]:
    """A second member that refuses its rows, and the rows."""
    rows = rows_of([0, 1, 0, 1], a=torch.arange(4))
    made = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    if kind == "keys":
        made.extend(rows_of([1], b=torch.zeros(1)))
    elif kind == "dtype":
        made.extend(rows_of([1], a=torch.zeros(1, dtype=torch.int8)))
    elif kind == "shape":
        made.extend(rows_of([1], a=torch.zeros(1, 2, dtype=torch.int64)))
    elif kind == "immutable":
        made.set_writer(ImmutableDatasetWriter())
    elif kind == "no rank":
        made.set_writer(TensorDictMaxValueWriter(rank_key="reward"))
    elif kind == "priority":
        made = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(10))
        rows["td_error"] = torch.tensor([1.0, 1.0, 1.0, -1.0])
    elif kind == "ensemble":
        made = ReplayBufferEnsemble(refusing("keys", folder)[0], routing_key="n")
        rows["n"] = torch.zeros(4, dtype=torch.int64)
    else:
        place = LazyStorage(10, kind, path=folder / kind)
        place.append(rows[:1])
        place.close()
        made = TensorDictReplayBuffer(storage=LazyStorage.open(folder / kind, "r"))
    return made, rows


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("keys", KeyError), ("dtype", TypeError), ("shape", RuntimeError), ("immutable", RuntimeError),
        ("no rank", KeyError), ("priority", ValueError), ("ensemble", KeyError), ("memmap", PermissionError),
        ("h5", PermissionError),
    ],
)  # fmt: skip
def test_no_member_is_written_where_one_refuses_its_rows(kind, error, tmp_path):
    second, rows = refusing(kind, tmp_path)
    first = member(0, 0)
    rb = ReplayBufferEnsemble(first, second, routing_key="m")
    before = second.write_count
    with pytest.raises(error):
        rb.extend(rows)
    assert len(first) == first.write_count == 0
    assert second.write_count == before
    assert rb.extend(rows[::2])["index"].tolist() == [0, 1]


def test_transforms_before_writing_are_called_once_for_each_row():
    seen = []
    members = [member(0, 0), member(1, 0)]

    def more(rows: TensorDict) -> TensorDict:
        seen.extend(rows["a"].tolist())
        return rows.set("a", rows["a"] + 1)

    for one in members:
        one.append_transform(more, invert=True)
    rb = ReplayBufferEnsemble(*members, routing_key="m")
    rb.extend(rows_of([0, 1, 0], a=torch.arange(3)))
    assert sorted(seen) == [0, 1, 2] and members[0][:]["a"].tolist() == [1, 3]


def test_bad_priorities_of_one_member_change_none():
    members = [TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(4)) for _ in range(2)]
    rb = ReplayBufferEnsemble(*members, batch_size=4, sample_from_all=True)
    for one in members:
        one.extend(TensorDict({"a": torch.arange(2)}, [2]))

    def index(ids, rows) -> TensorDict:
        return TensorDict({"buffer_ids": torch.tensor(ids), "index": torch.tensor(rows)}, [2])

    for wrong, priority, error in (
        (index([0, 1], [0, 0]), torch.tensor([5.0, -1.0]), ValueError),
        (index([0, 1], [0, 0]), torch.tensor([5.0, float("nan")]), ValueError),
        (index([0, 1], [0, 0]), torch.tensor([5.0, 6.0, 7.0]), ValueError),
        (index([0, 1], [0, 3]), torch.tensor([5.0, 6.0]), IndexError),
        (index([0, 2], [0, 0]), torch.tensor([5.0, 6.0]), IndexError),
        (index([0, -1], [0, 0]), torch.tensor([5.0, 6.0]), IndexError),
        (index([0, 1], [0, 0]), "large", TypeError),
    ):
        with pytest.raises(error):
            rb.update_priority(wrong, priority)
        assert all(one.sampler.priorities(2).tolist() == [0.5, 0.5] for one in members)
    rb.update_priority(index([0, 1], [0, -1]), 3.0)
    assert members[0].sampler.priorities(2).tolist() == pytest.approx([0.75, 0.25])


def test_priorities_are_set_through_the_ensemble():
    members = [TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(4)) for _ in range(2)]
    rb = ReplayBufferEnsemble(*members, batch_size=8, sample_from_all=True)
    for one in members:
        one.extend(TensorDict({"a": torch.arange(4)}, [4]))
        one.update_priority(torch.arange(4), 0.0)
    index = TensorDict({"buffer_ids": torch.tensor([[0], [1]]), "index": torch.tensor([[3], [1]])}, [2, 1])
    rb.update_priority(index, torch.tensor([[1e9], [1e9]]))
    batch = rb.sample()
    assert batch["a"].tolist() == [[3] * 4, [1] * 4] and batch["priority_weight"].shape == (2, 4)


def test_checkpoints_of_ensembles_resume(tmp_path):
    def made(rows: int) -> ReplayBufferEnsemble:
        sampler = SamplerWithoutReplacement(shuffle=False)
        return ReplayBufferEnsemble(member(0, rows, sampler=sampler), member(1, rows), batch_size=4)

    first = made(6)
    first[0].sample(2)
    first.dumps(tmp_path / "there")
    from_folder, from_state = made(0), made(0)
    from_folder.loads(tmp_path / "there")
    from_state.load_state_dict(first.state_dict())
    for again in (from_folder, from_state):
        assert [len(one) for one in again.members] == [6, 6] and again[0].sample(2)["a"].tolist() == [2, 3]
    with pytest.raises(KeyError, match="1 members"):
        ReplayBufferEnsemble(member(0)).loads(tmp_path / "there")
    first.empty()
    assert first.write_count == 0


def test_an_ensemble_of_parts():
    storages = [LazyTensorStorage(4), LazyTensorStorage(4)]
    for number, storage in enumerate(storages):
        storage.set(range(4), torch.arange(4) + 10 * number)
    rb = ReplayBufferEnsemble(
        storages=StorageEnsemble(*storages, transforms=[None, lambda rows: -rows]),
        samplers=SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True),
        writers=WriterEnsemble(RoundRobinWriter(), ImmutableDatasetWriter()), batch_size=6,
    )  # fmt: skip
    batch, info = rb.sample(return_info=True)
    assert batch.shape == (2, 3) and (batch[0] >= 0).all() and (batch[1] <= -10).all()
    (number, rows), _ = rb.storage.get(info["index"])
    assert number == 0 and (rows == batch[0]).all()
    with pytest.raises(RuntimeError, match="ImmutableDatasetWriter"):
        rb[1].extend(torch.arange(2))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"p": [-1.0, 2.0]}, ValueError, "p="),
        ({"p": [1.0]}, ValueError, "2 members"),
        ({"p": "all"}, ValueError, "sampleable"),
        ({"p": [1, 1], "sample_from_all": True}, RuntimeError, "sample_from_all"),
        ({"num_buffer_sampled": 0}, ValueError, "at least 1"),
        ({"routing_key": "m", "routing_dim": 0}, ValueError, "routing"),
        ({"storages": StorageEnsemble(LazyTensorStorage(3))}, TypeError, "not both"),
        ({"quux": 3}, TypeError, "quux"),
    ],
)
def test_arguments_of_ensembles_are_checked(arguments, error, match):
    with pytest.raises(error, match=match):
        ReplayBufferEnsemble(member(0), member(1), **arguments)
    with pytest.raises(TypeError, match="members"):
        ReplayBufferEnsemble()
    with pytest.raises(ValueError, match="divided"):
        ReplayBufferEnsemble(member(0), member(1)).sample(3)


def versions(**arguments) -> tuple[StalenessAwareSampler, TensorDictReplayBuffer]:
    sampler = StalenessAwareSampler(**arguments)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=3)
    rb.extend(TensorDict({"policy_version": torch.arange(10)}, [10]))
    return sampler, rb


def test_rows_are_sampled_by_the_age_of_their_policy():
    sampler, rb = versions(max_staleness=2)
    sampler.consumer_version = 9
    batch = rb.sample()
    assert sorted(batch["policy_version"].tolist()) == [7, 8, 9]
    assert (batch["staleness"] == 9 - batch["policy_version"]).all()
    with pytest.warns(UserWarning):
        many = rb.sample(3000)["policy_version"]
    shares = many.bincount(minlength=10)[7:] / 3000  # 1/3, 1/2 and 1 in proportion
    torch.testing.assert_close(shares, torch.tensor([2.0, 3.0, 6.0]) / 11, atol=0.05, rtol=0)
    sampler.increment_consumer_version()
    again = StalenessAwareSampler()
    again.load_state_dict(sampler.state_dict())
    assert (again.consumer_version, again.max_staleness) == (10, 2)
    sampler.consumer_version = 90
    assert not rb.can_sample()
    with pytest.raises(RuntimeError, match="max_staleness=2"):
        rb.sample()


def test_weights_of_staleness_are_those_of_the_caller():
    sampler, rb = versions(staleness_weight_fn=lambda staleness: (staleness == 3).float())
    sampler.consumer_version = 9
    assert rb.sample()["policy_version"].tolist() == [6, 6, 6], "rows without weight are left out"
    sampler.staleness_weight_fn = lambda staleness: -staleness
    with pytest.raises(ValueError, match="staleness_weight_fn"):
        rb.sample()
    with pytest.raises(KeyError, match="policy_version"):
        member(0, sampler=StalenessAwareSampler()).sample(2)


def goals(strategy: str, storage=None, **arguments) -> HERReplayBuffer:
    """Three episodes of 4 rows that achieved 0, 1, 2, ..., the first of which lost its first two rows to the third."""
    rb = HERReplayBuffer(
        lambda rows: rows["desired_goal"] - rows["achieved_goal"], strategy=strategy,
        storage=LazyTensorStorage(10) if storage is None else storage, batch_size=400, **arguments,
    )  # fmt: skip
    for start in (0, 4, 8):
        achieved = torch.arange(start, start + 4.0).unsqueeze(-1)
        after = {"reward": torch.full((4, 1), -7.0), "done": achieved == start + 3}
        nowhere = torch.full((4, 1), -1.0)
        rows = {"achieved_goal": achieved, "desired_goal": nowhere, "next": {**after, "desired_goal": nowhere}}
        rb.extend(TensorDict(rows, [4]).auto_batch_size_(1))
    return rb


EPISODES = {2: (2, 3), 3: (2, 3), **dict.fromkeys(range(4, 8), (4, 7)), **dict.fromkeys(range(8, 12), (8, 11))}


@pytest.mark.parametrize(
    ("strategy", "allowed"),
    [
        ("future", {row: set(range(row, last + 1)) for row, (_, last) in EPISODES.items()}),
        ("final", {row: {last} for row, (_, last) in EPISODES.items()}),
        ("episode", {row: set(range(first, last + 1)) for row, (first, last) in EPISODES.items()}),
        ("random", {row: set(range(2, 12)) for row in EPISODES}),
    ],
)
def test_goals_are_those_that_were_achieved_later(strategy, allowed):
    rb = goals(strategy, her_ratio=1.0)
    found: dict[int, set[int]] = {}
    for _ in range(10):
        batch = rb.sample()
        goal = batch["desired_goal"]
        assert (batch["next", "desired_goal"] == goal).all()
        assert (batch["next", "reward"] == goal - batch["achieved_goal"]).all()
        for row, one in zip(batch["achieved_goal"].flatten().tolist(), goal.flatten().tolist(), strict=True):
            found.setdefault(int(row), set()).add(int(one))
    assert found == allowed, "the episode around the end of the ring included"
    assert (rb[:]["desired_goal"] == -1).all() and (rb[:]["next", "reward"] == -7).all(), "the rows are not changed"


def test_a_share_of_a_batch_has_new_goals(tmp_path):
    rb = goals("future", storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "rows"), her_ratio=0.25)
    batch = rb.sample()
    new = batch["desired_goal"] >= 0
    assert int(new.sum()) == 100 and (batch["next", "reward"][~new] == -7).all()
    rb.append_transform(lambda rows: rows.set("seen", rows["desired_goal"].clone()))
    batch = rb.sample()
    assert (batch["seen"] == batch["desired_goal"]).all()
    assert (goals("final", her_ratio=0.0).sample()["desired_goal"] == -1).all()


def test_arguments_of_hindsight_are_checked():
    with pytest.raises(ValueError, match=r"her_ratio.*1\.5"):
        goals("future", her_ratio=1.5)
    with pytest.raises(ValueError, match="future, final, episode, random"):
        goals("later")
    with pytest.raises(TypeError, match="ListStorage"):
        goals("future", storage=ListStorage(10))
    with pytest.raises(TypeError, match="reward_fn"):
        HERReplayBuffer(3)
    rb = goals("future", achieved_goal_key="reached")
    with pytest.raises(KeyError, match="reached"):
        rb.sample()


def test_a_list_of_tensordicts_comes_back_from_its_state_dict():
    rb = ReplayBuffer(storage=ListStorage(4))
    weights = torch.nn.Linear(1, 1).state_dict()
    rb.extend([TensorDict({"a": torch.tensor(1), "n": {"b": torch.tensor([2.0])}}, []), weights])
    again = ReplayBuffer(storage=ListStorage(4))
    again.load_state_dict(rb.state_dict())
    rows, kept = again.storage.get(0), again.storage.get(1)
    assert type(rows) is TensorDict and rows["n", "b"].tolist() == [2.0]
    assert kept.keys() == weights.keys()


def test_a_buffer_that_is_not_made_yet_says_so():
    rb = ReplayBuffer(storage=lambda: LazyTensorStorage(4), delayed_init=True)
    assert not rb.initialized and rb.stats() == {
        "size": 0, "write_count": 0, "prefetch_queue_size": 0, "initialized": False,
    }  # fmt: skip
    rb.extend(torch.arange(2))
    assert rb.initialized and rb.stats()["size"] == 2
