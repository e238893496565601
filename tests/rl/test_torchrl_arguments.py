"""Arguments of torchrl's buffers, samplers and writers: those that are taken, and those that are not."""

from __future__ import annotations

import pickle

import pytest
import torch

import tdstore.rl
from tdstore import TensorDict
from tdstore.rl import (
    ConsumingSampler,
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
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
)

theirs = pytest.importorskip("torchrl.data")
tensordict = pytest.importorskip("tensordict")
BOTH = [(theirs, tensordict.TensorDict), (tdstore.rl, TensorDict)]


def episodes(collection):
    """Runs of 4, 3 and 3 rows, of which the second one ends by being cut off."""
    done, cut = torch.zeros(10, 1, dtype=torch.bool), torch.zeros(10, 1, dtype=torch.bool)
    done[[3, 9]], cut[6] = True, True
    first = torch.zeros(10, 1, dtype=torch.bool)
    first[[0, 4, 7]] = True
    ends = collection({"done": done, "truncated": cut}, [10])
    run = torch.tensor([0] * 4 + [1] * 3 + [2] * 3)
    return collection({"obs": torch.arange(10), "run": run, "is_init": first, "next": ends}, [10])


def pieces(package, collection, batch_size, kind="SliceSampler", **options):
    """Sample pieces of the episodes."""
    sampler = getattr(package, kind)(**options)
    storage = package.LazyTensorStorage(10)
    buffer = package.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)
    buffer.extend(episodes(collection))
    return buffer.sample(return_info=True)


KEYS = [("next", "done"), ("next", "truncated"), ("next", "terminated")]


@pytest.mark.parametrize("kind", ["SliceSampler", "SliceSamplerWithoutReplacement"])
@pytest.mark.parametrize(("package", "collection"), BOTH, ids=["torchrl", "ours"])
def test_any_of_several_entries_ends_a_trajectory(package, collection, kind):
    batch, _ = pieces(package, collection, 9, kind, slice_len=3, end_keys=KEYS)
    found = batch["obs"].reshape(-1, 3)
    assert (found == found[:, :1] + torch.arange(3)).all()
    assert all(run.unique().numel() == 1 for run in batch["run"].reshape(-1, 3))


@pytest.mark.parametrize(("package", "collection"), BOTH, ids=["torchrl", "ours"])
def test_entries_that_end_trajectories_are_there_and_named_once(package, collection):
    with pytest.raises(KeyError, match="zzz"):
        pieces(package, collection, 6, slice_len=3, end_keys=[("next", "zzz")])
    with pytest.raises(RuntimeError, match="end_keys"):
        package.SliceSampler(slice_len=3, end_key="done", end_keys=KEYS)
    with pytest.raises(ValueError, match="strict_length"):
        package.SliceSampler(slice_len=3, pad_output=True)


@pytest.mark.parametrize(
    ("init_key", "marked"), [("is_init", True), (("is_init",), True), (None, False), ("no", False)]
)
@pytest.mark.parametrize(("package", "collection"), BOTH, ids=["torchrl", "ours"])
def test_first_steps_are_marked_where_rows_tell_them(package, collection, init_key, marked):
    batch, _ = pieces(package, collection, 60, slice_len=2, traj_key="run", init_key=init_key)
    stored = torch.isin(batch["obs"], torch.tensor([0, 4, 7]))
    begins = torch.arange(60) % 2 == 0
    expected = stored | begins if marked else stored
    assert batch["is_init"].squeeze(-1).tolist() == expected.tolist()
    assert "no" not in batch.keys()


@pytest.mark.parametrize(("package", "collection"), BOTH, ids=["torchrl", "ours"])
def test_short_pieces_are_filled_by_their_last_step(package, collection):
    batch, info = pieces(package, collection, 40, slice_len=4, traj_key="run", strict_length=False, pad_output=True)
    rows, mask = batch["obs"].reshape(10, 4), batch["collector", "mask"].reshape(10, 4)
    whole = batch["run"].reshape(10, 4)[:, 0] == 0
    assert (mask[:, :3]).all() and (mask[:, 3] == whole).all() and not whole.all()
    assert (rows[:, :3] == rows[:, :1] + torch.arange(3)).all()
    assert (rows[:, 3] == torch.where(whole, 3, rows[:, 2])).all()
    cut = batch["next", "truncated"].reshape(10, 4)
    assert (cut[:, 3] == whole).all() and (cut[:, 2] | whole).all()
    assert torch.equal(info["collector", "mask"].reshape(10, 4), mask)


@pytest.mark.parametrize(("package", "collection"), BOTH, ids=["torchrl", "ours"])
def test_rows_are_consumed(package, collection):
    buffer = package.ReplayBuffer(storage=package.LazyTensorStorage(6), batch_size=4, consume_after_n_samples=1)
    buffer.extend(torch.arange(6))
    first = buffer.sample()
    assert len(buffer) == 2
    assert sorted(torch.cat([first, buffer.sample()]).tolist()) == list(range(6)) and len(buffer) == 0
    with pytest.raises(RuntimeError):
        buffer.sample()
    buffer.extend(torch.tensor([10, 11]))
    assert len(buffer) == 2 and sorted(buffer.sample().tolist()) == [10, 11]
    for options in ({"sampler": package.SamplerWithoutReplacement()}, {"prefetch": 2, "batch_size": 2}):
        with pytest.raises(ValueError, match=r"consume_after_n_samples|limited number"):
            package.ReplayBuffer(storage=package.LazyTensorStorage(6), consume_after_n_samples=1, **options)
    with pytest.raises(ValueError, match="0|positive"):
        package.ReplayBuffer(storage=package.LazyTensorStorage(6), consume_after_n_samples=0)


def test_rows_are_consumed_after_several_samples_and_resumed(tmp_path):
    def made() -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(4), sampler=ConsumingSampler(2), batch_size=3)

    buffer = made()
    buffer.extend(torch.arange(4))
    drawn = [buffer.sample()]
    buffer.dumps(tmp_path)
    other = made()
    other.loads(tmp_path)
    drawn += list(other)
    assert all(len(batch.unique()) == len(batch) for batch in drawn)
    assert torch.cat(drawn).bincount().tolist() == [2] * 4 and len(other) == 0 and len(buffer) == 4
    buffer.add(torch.tensor(9))
    assert len(buffer) == 4
    buffer.empty()
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match="ndim=1"):
        several = ReplayBuffer(storage=LazyTensorStorage(4, ndim=2), sampler=ConsumingSampler(), batch_size=1)
        several._storage.set(slice(0, 2), torch.zeros(2, 2))
        several.sample()


@pytest.mark.parametrize(("package", "collection"), BOTH, ids=["torchrl", "ours"])
def test_parts_are_made_at_the_first_use(package, collection):
    made = []

    def storage():
        made.append("storage")
        return package.LazyTensorStorage(4)

    def transform():
        made.append("transform")
        return lambda rows: rows + 10

    buffer = package.ReplayBuffer(storage=storage, delayed_init=True, batch_size=2)
    assert not made
    buffer.extend(torch.arange(4))
    assert made == ["storage"] and len(buffer) == 4
    buffer = package.ReplayBuffer(storage=storage, transform_factory=transform, batch_size=2)
    assert made == ["storage"]
    buffer.extend(torch.arange(4))
    assert sorted(made) == ["storage", "storage", "transform"] and buffer.sample().min() >= 10
    now = package.ReplayBuffer(storage=storage, transform_factory=transform, delayed_init=False)
    assert len(made) == 5 and len(now) == 0
    with pytest.raises(TypeError, match="transform_factory"):
        package.ReplayBuffer(transform=transform, transform_factory=transform, delayed_init=False)


def test_a_buffer_whose_parts_are_not_made_travels_and_keeps_its_arguments():
    buffer = TensorDictReplayBuffer(storage=ListStorage, sampler=RandomSampler, batch_size=2, delayed_init=True)
    other = pickle.loads(pickle.dumps(buffer))
    other.extend(TensorDict({"a": torch.arange(4)}, [4]))
    assert len(other) == 4 and len(buffer) == 0 and other.sample()["a"].shape == (2,)
    wrong = ReplayBuffer(storage=3, delayed_init=True)
    for _ in range(2):  # the arguments are still there after an error
        with pytest.raises(TypeError, match="storage="):
            wrong.extend(torch.arange(4))
    with pytest.raises(AttributeError, match="nothing"):
        _ = buffer.nothing


class Rows:
    """A checkpointer of tensors."""

    def dumps(self, storage, path):
        path.mkdir(parents=True, exist_ok=True)
        torch.save(storage.get(slice(None)).clone(), path / "rows.pt")

    def loads(self, storage, path):
        rows = torch.load(path / "rows.pt")
        storage.set(range(len(rows)), rows)


@pytest.mark.parametrize(
    "checkpointer", [Rows, Rows(), theirs.TensorStorageCheckpointer, TensorStorageCheckpointer(), None]
)
def test_checkpointers_write_the_rows(tmp_path, checkpointer):
    def made() -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(6), batch_size=2, checkpointer=checkpointer)

    buffer = made()
    buffer.extend(torch.arange(4))
    buffer.dumps(tmp_path / "saved")
    other = made()
    other.loads(tmp_path / "saved")
    assert other[:].tolist() == [0, 1, 2, 3] and other.add(torch.tensor(4)) == 4
    assert (tmp_path / "saved" / "storage" / "rows.pt").exists() == (
        checkpointer is Rows or isinstance(checkpointer, Rows)
    )


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ReplayBuffer(sample_unit=object()), "sample_unit.*SliceSampler"),
        (lambda: ReplayBuffer(service_backend="ray"), "service_backend.*LazyStorage"),
        (lambda: TensorDictReplayBuffer(transport="distributed"), "transport.*LazyStorage"),
        (lambda: ReplayBuffer(nonsense=1), "unexpected.*nonsense"),
        (lambda: ReplayBuffer(checkpointer=3), "checkpointer.*dumps"),
        (
            lambda: ReplayBuffer(checkpointer=theirs.FlatStorageCheckpointer()),
            "checkpointer.*TensorStorageCheckpointer",
        ),
        (lambda: ReplayBuffer(transform_factory=3, delayed_init=False), "transform_factory"),
        (lambda: SliceSampler(slice_len=2, fragmented=True), "fragmented.*ndim=2"),
        (lambda: PrioritizedSliceSampler(4, 0.5, 0.5, slice_len=2, span=1), "span.*strict_length"),
        (lambda: RoundRobinWriter(track_generations=True), "track_generations.*running number"),
        (lambda: PrioritizedSampler(4, 0.5, 0.5, device="cuda"), "device"),
    ],
)
def test_arguments_that_are_not_supported_tell_what_to_do(make, named):
    with pytest.raises(TypeError, match=named):
        make()


def test_defaults_of_arguments_that_are_not_supported_are_taken():
    ReplayBuffer(sample_unit=None, service_backend="direct", transport="auto", transport_options=None)
    TensorDictPrioritizedReplayBuffer(alpha=0.5, beta=0.5, sampler_device=None, sync=True, storage=LazyTensorStorage(4))
    buffer = PrioritizedReplayBuffer(
        alpha=0.5, beta=0.5, dtype=torch.float64, storage=LazyTensorStorage(4), batch_size=2
    )
    buffer.extend(torch.arange(4))
    assert buffer.sample(return_info=True)[1]["priority_weight"].dtype is torch.float64
    RoundRobinWriter(track_generations=False), PrioritizedSampler(4, 0.5, 0.5, device="cpu")
    SliceSampler(slice_len=2, step_key="step"), SliceSamplerWithoutReplacement(slice_len=2, init_key=None)
    SamplerWithoutReplacement()


@pytest.mark.parametrize(("package", "collection"), BOTH, ids=["torchrl", "ours"])
def test_storages_are_read_by_keys_and_by_none(package, collection):
    storage = package.LazyTensorStorage(5)
    storage.set(range(3), collection({"a": torch.arange(3), "n": {"b": torch.zeros(3, 2)}}, [3]))
    assert storage.get("a").tolist() == storage["a"].tolist() == [0, 1, 2]
    assert storage["n", "b"].shape == (3, 2)
    assert storage.get(None).batch_size == (1, 3)
    with pytest.raises(KeyError):
        storage["missing"]


@pytest.mark.parametrize(("package", "collection"), BOTH, ids=["torchrl", "ours"])
@pytest.mark.parametrize("sampler", ["RandomSampler", "SamplerWithoutReplacement"])
def test_priorities_of_a_sampler_without_them_are_no_error(package, collection, sampler):
    parts = {"storage": package.LazyTensorStorage(5), "sampler": getattr(package, sampler)()}
    buffer = package.TensorDictReplayBuffer(**parts, batch_size=2)
    buffer.extend(collection({"a": torch.arange(4)}, [4]))
    buffer.update_tensordict_priority(buffer.sample())
    assert sorted(buffer[:]["a"].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(("package", "collection"), BOTH, ids=["torchrl", "ours"])
def test_parts_that_are_replaced_are_returned(package, collection):
    buffer = package.TensorDictReplayBuffer(storage=package.LazyTensorStorage(5), batch_size=2)
    storage, sampler, writer = buffer.storage, buffer.sampler, buffer.writer
    assert buffer.set_sampler(package.SamplerWithoutReplacement()) is sampler
    assert buffer.set_writer(package.TensorDictRoundRobinWriter()) is writer
    assert buffer.set_storage(package.LazyTensorStorage(7)) is storage and buffer.storage.max_size == 7
    if package is tdstore.rl:  # torchrl's writer goes on with the old storage
        buffer.extend(collection({"a": torch.arange(3)}, [3]))
        assert len(buffer) == 3 and len(storage) == 0


@pytest.mark.parametrize(("package", "collection"), BOTH, ids=["torchrl", "ours"])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_pass_without_a_first_batch_is_an_error(package, collection, prefetch):
    def buffer(sampler, rows):
        parts = {"storage": package.LazyTensorStorage(10), "sampler": sampler}
        made = package.TensorDictReplayBuffer(**parts, batch_size=4, prefetch=prefetch)
        if rows:
            made.extend(collection({"a": torch.arange(rows)}, [rows]))
        return made

    for rb in (buffer(package.SamplerWithoutReplacement(), 0), buffer(package.RandomSampler(), 0)):
        with pytest.raises(RuntimeError):
            next(iter(rb))
        with pytest.raises(RuntimeError):
            rb.next()
    with pytest.raises(ValueError, match="4"):
        next(iter(buffer(package.SamplerWithoutReplacement(drop_last=True), 3)))
    if prefetch is None:
        rb = buffer(package.ConsumingSampler(), 5)
        assert [len(batch) for batch in rb] == [4, 1]
        with pytest.raises(RuntimeError):
            next(iter(rb))
