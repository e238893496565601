"""Parts of torchrl around ours, and ours inside its buffers."""

from __future__ import annotations

import pytest
import torch

import tdstore.rl
from tdstore import TensorDict
from tdstore.rl import LazyStorage, LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, TensorDictReplayBuffer

tensordict = pytest.importorskip("tensordict")
theirs = pytest.importorskip("torchrl.data")


def data(n, kind=None):
    kind = kind or tensordict.TensorDict
    done = kind({"done": torch.zeros(n, 1, dtype=torch.bool)}, [n])
    return kind({"obs": torch.arange(3 * n).view(n, 3).float(), "t": torch.arange(n) // 4, "next": done}, [n])


@pytest.mark.parametrize("storage", ["memory", "memmap", "zarr"])
@pytest.mark.parametrize("kind", ["ReplayBuffer", "TensorDictReplayBuffer"])
def test_our_storage_in_their_buffer(storage, kind):
    rows = LazyStorage(20, storage)
    buffer = getattr(theirs, kind)(storage=rows, batch_size=8)
    buffer.extend(data(8))
    buffer.extend(data(16))
    sample = buffer.sample()
    assert isinstance(sample, tensordict.TensorDict) and sample.batch_size == torch.Size([8])
    assert len(rows) == 20 and rows.cursor == 4 and (rows[:]["obs"].diff(dim=1) == 1).all()


def test_their_slices_and_checkpoints_over_our_storage(tmp_path):
    sampler = theirs.SliceSampler(num_slices=2, traj_key="t")
    buffer = theirs.TensorDictReplayBuffer(storage=LazyStorage(20, "memmap"), sampler=sampler, batch_size=8)
    buffer.extend(data(16))
    assert (buffer.sample()["t"].view(2, 4).diff(dim=1) == 0).all()
    buffer.dumps(tmp_path)
    again = theirs.TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=8)
    again.loads(tmp_path)
    assert len(again) == 16 and again[:]["t"].tolist() == [k // 4 for k in range(16)]


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: theirs.RandomSampler(),
        lambda: theirs.SamplerWithoutReplacement(),
        lambda: theirs.SliceSampler(num_slices=2, traj_key="t"),
    ],
    ids=["random", "without replacement", "slices"],
)
def test_their_samplers_in_our_buffer(sampler):
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler(), batch_size=4)
    buffer.extend(data(8, TensorDict))
    sample = buffer.sample()
    assert isinstance(sample, TensorDict) and sample.batch_size == torch.Size([4])
    assert (sample["obs"].diff(dim=1) == 1).all()


def test_their_writer_and_storage_in_our_buffer():
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), writer=theirs.RoundRobinWriter(), batch_size=4)
    assert buffer.extend(data(8, TensorDict)).tolist() == list(range(8))
    assert len(buffer) == 8 and buffer.write_count == 8
    other = ReplayBuffer(storage=theirs.LazyTensorStorage(20), batch_size=4)
    other.extend(data(8))
    other.add(data(1)[0])
    assert len(other) == 9 and other.sample().batch_size == torch.Size([4])


@pytest.mark.parametrize("storage", [tdstore.rl.ListStorage, tdstore.rl.LazyStackStorage])
def test_their_data_in_a_list(storage):
    buffer = TensorDictReplayBuffer(storage=storage(10), batch_size=3)
    buffer.extend(data(4))
    buffer.add(data(1)[0])
    sample = buffer.sample()
    assert sample.batch_size == torch.Size([3]) and sample["index"].shape == (3,)
    assert (sample["obs"].diff(dim=1) == 1).all() and buffer[[0, 3]]["t"].tolist() == [0, 0]


def test_their_data_and_transforms_in_our_buffer():
    transforms = pytest.importorskip("torchrl.envs.transforms")
    renamed = transforms.RenameTransform(["obs"], ["seen"])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, transform=renamed)
    buffer.extend(data(8))
    buffer.add(data(1)[0])
    sample = buffer.sample()
    assert isinstance(sample, TensorDict) and sample["seen"].shape == (4, 3) and "obs" not in sample.keys()


def test_a_checkpoint_of_theirs_in_our_storage(tmp_path):
    storage = theirs.LazyMemmapStorage(20, scratch_dir=str(tmp_path / "rows"))
    storage.set(range(8), data(8))
    storage.dumps(tmp_path / "checkpoint")
    ours = LazyTensorStorage(30)
    ours.loads(tmp_path / "checkpoint")
    assert len(ours) == 8 and ours[:]["t"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1] and ours.cursor == 8


@pytest.mark.parametrize("how", ["folder", "state"])
@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        ("RandomSampler", {}),
        ("SamplerWithoutReplacement", {}),
        ("SamplerWithoutReplacement", {"shuffle": False}),
        ("SliceSampler", {"slice_len": 1, "traj_key": "t"}),
        ("SliceSamplerWithoutReplacement", {"slice_len": 1, "traj_key": "t"}),
    ],
)
def test_a_buffer_of_theirs_goes_on_in_ours(tmp_path, sampler, options, how):
    def made(package):
        parts = {"storage": package.LazyTensorStorage(6), "sampler": getattr(package, sampler)(**options)}
        return package.TensorDictReplayBuffer(**parts, batch_size=4)

    buffer = made(theirs)
    buffer.extend(tensordict.TensorDict({"t": torch.arange(8)}, [8]))
    first = buffer.sample()["t"].tolist()
    ours = made(tdstore.rl)
    if how == "folder":
        buffer.dumps(tmp_path / "checkpoint")
        ours.loads(tmp_path / "checkpoint")
    else:
        ours.load_state_dict(buffer.state_dict())
    assert ours[:]["t"].tolist() == [6, 7, 2, 3, 4, 5] and ours.write_count == 8 and ours.writer._cursor == 2
    after = ours.sample()["t"].tolist()
    assert set(after) <= set(range(2, 8))
    if sampler == "SamplerWithoutReplacement":
        assert sorted(first + after) == list(range(2, 8)), "the pass goes on"
    assert ours.append_transform(lambda rows: rows).sample().batch_size[0] > 0


@pytest.mark.parametrize("named", [None, "cpu"])
@pytest.mark.parametrize("make", ["LazyTensorStorage", "LazyMemmapStorage", "ListStorage", "auto", "TensorStorage"])
def test_batches_name_the_device_that_torchrl_names(make, named):
    found = []
    for data, collection in ((theirs, tensordict.TensorDict), (tdstore.rl, TensorDict)):
        rows = collection({"a": torch.arange(4), "n": collection({"b": torch.zeros(4, 2)}, [4], device=named)}, [4])
        rows = rows.to(named) if named else rows
        if make == "TensorStorage":
            buffer = data.ReplayBuffer(storage=data.TensorStorage(rows), batch_size=2)
        else:
            storage = data.LazyTensorStorage(8, device="auto") if make == "auto" else getattr(data, make)(8)
            buffer = data.ReplayBuffer(storage=storage, batch_size=2)
            buffer.extend(rows)
        batch = buffer.sample()
        found.append([str(x.device) for x in (batch, batch["n"], buffer[0], buffer[:2], buffer[[0, 1]])])
    assert found[0] == found[1]


def test_pieces_of_episodes_have_the_entries_that_torchrl_gives():
    found = []
    for package, collection in ((theirs, tensordict.TensorDict), (tdstore.rl, TensorDict)):
        sampler = package.SliceSampler(slice_len=5, traj_key="e")
        buffer = package.TensorDictReplayBuffer(storage=package.LazyTensorStorage(40), sampler=sampler, batch_size=10)
        buffer.extend(collection({"e": torch.arange(40) // 10}, [40]))
        found.append({key: value.tolist() for key, value in sorted(buffer.sample()["next"].items())})
    assert found[0] == found[1] and sorted(found[0]) == ["done", "terminated", "truncated"]


def test_transforms_are_inserted_before_others():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=50)
    buffer.append_transform(lambda rows: rows + 1)
    buffer.insert_transform(0, lambda rows: rows * 10)
    buffer.extend(torch.arange(4))
    assert set(buffer.sample().tolist()) <= {1, 11, 21, 31}


@pytest.mark.parametrize("kind", ["a sampler of theirs", "a storage of theirs", "an ensemble"])
def test_batches_of_parts_that_need_the_lock_are_prefetched(tmp_path, kind):
    collection, parts = TensorDict, {"storage": LazyTensorStorage(20), "batch_size": 4, "prefetch": 2}
    if kind == "an ensemble":
        member = TensorDictReplayBuffer(storage=LazyTensorStorage(20))
        buffer = ReplayBufferEnsemble(member, member, batch_size=4, prefetch=2)
    elif kind == "a sampler of theirs":
        buffer = member = ReplayBuffer(**parts, sampler=theirs.RandomSampler())
    else:
        collection = tensordict.TensorDict
        buffer = member = ReplayBuffer(**{**parts, "storage": theirs.LazyTensorStorage(20)})
    member.extend(data(8, collection))
    for _ in range(20):
        assert buffer.sample().numel() == 4
    if kind == "an ensemble":
        buffer.dumps(tmp_path / "checkpoint")
        again = ReplayBufferEnsemble(member, member, batch_size=4, prefetch=2)
        again.loads(tmp_path / "checkpoint")
        assert len(again._pending) == 2 and again.sample().batch_size == (2, 2)
        again.close()
    elif kind == "a storage of theirs":
        buffer.flush()
        buffer.empty()
        assert len(buffer) == 0
    buffer.close()
