"""Checkpoints and state dicts of ensembles: all members go on, or none of them has changed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from tdstore import TensorDict
from tdstore.errors import TDStoreError
from tdstore.rl import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)


def rows(*numbers):
    return TensorDict({"a": torch.tensor(numbers)}, [len(numbers)])


def made(*numbers, **options):
    samplers = [
        SamplerWithoutReplacement(shuffle=False),
        PrioritizedSampler(10, 1.0, 0.0),
        PrioritizedSampler(10, 1.0, 0.0),
    ]
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=one) for one in samplers]
    if numbers:
        for k, one in enumerate(members):
            one.extend(rows(*numbers) + 100 * k)
    return ReplayBufferEnsemble(*members, batch_size=6, **options)


def seen(rb):
    prioritized = [one.sampler.priorities(10).tolist() for one in rb.members[1:]]
    position = rb[0].sampler.state_dict()
    return (
        [one[:]["a"].tolist() for one in rb.members], [one.write_count for one in rb.members], prioritized,
        position["_at"], position["_length"], rb.batch_size,
    )  # fmt: skip


def listed(rb):
    return [batch["a"].tolist() for batch in rb.sample().unbind(0)]


def edit(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def replace_rows(folder, data, max_size=20):
    shutil.rmtree(folder)
    storage = LazyTensorStorage(max_size)
    storage.set(range(len(data)), data)
    storage.dumps(folder)


def longer(folder):
    sampler = PrioritizedSampler(30, 1.0, 0.0)
    sampler.extend(torch.arange(30))
    sampler.dumps(folder)


DAMAGE = {
    "no rows": lambda last: shutil.rmtree(last / "storage"),
    "other rows": lambda last: replace_rows(last / "storage", TensorDict({"b": torch.zeros(3)}, [3])),
    "more rows": lambda last: replace_rows(last / "storage", rows(*range(15))),
    "a torn writer": lambda last: (last / "writer" / "metadata.json").write_text("{broken"),
    "a cursor beyond the end": lambda last: edit(last / "writer" / "metadata.json", cursor=10),
    "more priorities": lambda last: longer(last / "sampler"),
    "no sampler": lambda last: shutil.rmtree(last / "sampler"),
    "a torn member": lambda last: (last / "buffer_metadata.json").write_text("{broken"),
    "a torn ensemble": lambda last: (last.parent / "buffer_metadata.json").write_text("{broken"),
    "other random numbers": lambda last: TensorDict({"state": torch.zeros(3)}).save(last.parent / "rng_state").close(),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_checkpoint_that_the_last_member_refuses_changes_no_member(tmp_path, what):
    first = made(1, 2, 3)
    first[0].sample(2)
    first.dumps(tmp_path / "there")
    again = made(7, 8)
    before = seen(again)
    DAMAGE[what](tmp_path / "there" / "2")
    with pytest.raises((TDStoreError, OSError)):
        again.loads(tmp_path / "there")
    assert seen(again) == before
    again.sample()


WRONG = {
    "no rows": lambda state: state.update(_storage={}),
    "other rows": lambda state: state["_storage"].update(
        _storage=TensorDict({"b": torch.zeros(10)}, [10]).state_dict()
    ),
    "more rows": lambda state: state["_storage"].update(_len=11),
    "a cursor beyond the end": lambda state: state.update(_writer={"_cursor": 10, "_write_count": 1}),
    "no cursor": lambda state: state.update(_writer={}),
    "more priorities": lambda state: state["_sampler"].update(_weights=torch.ones(30)),
    "no priorities": lambda state: state.update(_sampler={}),
    "other random numbers": lambda state: state.update(_rng=torch.zeros(3)),
    "no entry": lambda state: state.pop("_storage"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_state_that_the_last_member_refuses_changes_no_member(what):
    state = made(1, 2, 3).state_dict()
    again = made(7, 8)
    before = seen(again)
    WRONG[what](state["2"])
    with pytest.raises(TDStoreError):
        again.load_state_dict(state)
    assert seen(again) == before


@pytest.mark.parametrize("part", ["storage", "sampler", "writer"])
def test_parts_of_an_ensemble_resume_all_or_none(tmp_path, part):
    first = made(1, 2, 3)
    first[0].sample(2)
    of_first = getattr(first, part)
    of_first.dumps(tmp_path / "there")
    assert sorted(one.name for one in (tmp_path / "there").iterdir()) == ["0", "1", "2"]
    for load in (lambda ours: ours.loads(tmp_path / "there"), lambda ours: ours.load_state_dict(of_first.state_dict())):
        again = made(7, 8)
        load(getattr(again, part))
        contents, written, _, at, length, _ = seen(again)
        if part == "storage":
            assert contents == [[1, 2, 3], [101, 102, 103], [201, 202, 203]]
        elif part == "sampler":
            assert (at, length) == (2, 3) and seen(again)[2] == seen(first)[2]
        else:
            assert written == [3, 3, 3]
    again = made(7, 8)
    before = seen(again)
    state = of_first.state_dict()
    shutil.rmtree(tmp_path / "there" / "2")
    (tmp_path / "there" / "2").mkdir()
    with pytest.raises((TDStoreError, OSError)):
        getattr(again, part).loads(tmp_path / "there")
    with pytest.raises((TDStoreError, KeyError)):
        getattr(again, part).load_state_dict({**state, "2": {}})
    with pytest.raises(KeyError, match="3 members"):
        getattr(again, part).load_state_dict({"0": state["0"]})
    assert seen(again) == before


def test_random_numbers_batch_size_and_prefetched_batches_of_an_ensemble_go_on(tmp_path):
    first = made(*range(9), generator=torch.Generator().manual_seed(5))
    first.sample()
    first.dumps(tmp_path / "there")
    state = first.state_dict()
    from_folder, from_state = made(generator=torch.Generator()), made()
    from_folder._batch_size = None
    from_folder.loads(tmp_path / "there")
    from_state.load_state_dict(state)
    wanted = [listed(first) for _ in range(3)]
    for again in (from_folder, from_state):
        assert [listed(again) for _ in range(3)] == wanted
    ahead = made(*range(9), prefetch=2, num_buffer_sampled=1, p=[1.0, 0.0, 0.0])
    assert listed(ahead) == [[0, 1, 2, 3, 4, 5]]
    ahead.dumps(tmp_path / "ahead")
    again = made(prefetch=2, num_buffer_sampled=1, p=[1.0, 0.0, 0.0])
    again.loads(tmp_path / "ahead")
    batch, info = again.sample(return_info=True)
    assert batch["a"].tolist() == [[6, 7, 8]] and info["index", "buffer_ids"].tolist() == [[0, 0, 0]]
    for rb in (ahead, again):
        rb.close()


def test_a_checkpoint_of_members_alone_is_that_of_an_earlier_release(tmp_path):
    first = made(1, 2, 3)
    first.dumps(tmp_path / "there")
    (tmp_path / "there" / "buffer_metadata.json").unlink()
    again = made()
    again.loads(tmp_path / "there")
    assert seen(again)[:2] == seen(first)[:2] and again.batch_size == 6


def test_random_numbers_and_prefetched_batches_are_read_before_rows_change(tmp_path):
    def buffer(*numbers):
        made = TensorDictReplayBuffer(
            storage=LazyTensorStorage(10), batch_size=2, prefetch=1, generator=torch.Generator()
        )
        made.extend(rows(*numbers))
        return made

    first = buffer(1, 2, 3)
    first.sample()
    first.dumps(tmp_path / "there")
    first.close()
    shutil.rmtree(tmp_path / "there" / "prefetch")
    again = buffer(7, 8)
    with pytest.raises(FileNotFoundError, match="prefetch"):
        again.loads(tmp_path / "there")
    state = {**first.state_dict(), "_rng": "none"}
    with pytest.raises(KeyError, match="random numbers"):
        again.load_state_dict(state)
    assert again[:]["a"].tolist() == [7, 8] and again.writer._cursor == 2


def test_rows_of_load_hooks_are_looked_at_before_rows_change(tmp_path):
    storage = LazyTensorStorage(10)
    storage.set(range(6), rows(*range(6)))
    storage.dumps(tmp_path / "there")
    for hook, message in (
        (lambda data, out: torch.stack([data, data]).reshape(-1), "12 rows"),
        (lambda data, out: TensorDict({"b": data["a"]}, [6]), "b"),
    ):
        again = LazyMemmapStorage(10, scratch_dir=tmp_path / message)
        again.set(range(2), rows(7, 8))
        again.register_load_hook(hook)
        with pytest.raises(TDStoreError, match=message):
            again.loads(tmp_path / "there")
        assert again[:]["a"].tolist() == [7, 8]


def test_a_state_that_is_refused_leaves_a_new_storage_without_rows():
    storage = LazyTensorStorage(10)
    storage.set(range(3), rows(1, 2, 3))
    again = LazyTensorStorage(10)
    with pytest.raises(RuntimeError, match="11"):
        again.load_state_dict({**storage.state_dict(), "_len": 11})
    assert not again.initialized
    again.set(range(1), TensorDict({"b": torch.zeros(1)}, [1]))
    listed = ListStorage(2)
    listed.set(0, "mine")
    with pytest.raises(RuntimeError, match="3 objects"):
        listed.load_state_dict({"_storage": [1, 2, 3]})
    assert listed[0] == "mine" and len(listed) == 1


def test_a_count_that_is_none_is_refused_before_rows_change():
    def buffer(*numbers):
        made = ReplayBuffer(storage=LazyTensorStorage(10), writer=TensorDictMaxValueWriter(rank_key="a"))
        made.extend(rows(*numbers))
        return made

    again = buffer(7, 8)
    with pytest.raises(ValueError, match="write_count"):
        again.load_state_dict({**buffer(1, 2, 3).state_dict(), "_writer": {}})
    assert again[:]["a"].tolist() == [7, 8]


@pytest.mark.parametrize("how", ["folder", "state"])
def test_a_medium_that_fails_amid_a_load_leaves_a_buffer_to_be_filled(tmp_path, monkeypatch, how):
    def buffer(*numbers):
        sampler = PrioritizedSampler(10, 1.0, 0.0)
        made = TensorDictReplayBuffer(storage=LazyMemmapStorage(10), sampler=sampler, batch_size=50)
        made.extend(rows(*numbers))
        return made

    def failing(*_):
        raise OSError("the medium failed")

    first, again = buffer(1, 2, 3), buffer(*range(8))
    first.dumps(tmp_path / "there")
    state = first.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(type(again.storage._table), "write", failing)
        with pytest.raises(OSError, match="failed"):
            again.loads(tmp_path / "there") if how == "folder" else again.load_state_dict(state)
    assert len(again) == 0 and again.write_count == 0
    assert again.extend(rows(5, 6)).tolist() == [0, 1]
    assert set(again.sample()["a"].tolist()) == {5, 6}
    again.loads(tmp_path / "there")
    assert again[:]["a"].tolist() == [1, 2, 3]
