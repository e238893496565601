"""Rows of a buffer that are read and changed in place, as users of torchrl do it, and what can be sampled."""

from __future__ import annotations

import pytest
import torch

import tdstore.rl
from tdstore import TensorDict
from tdstore.rl import (
    LazyStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

theirs = pytest.importorskip("torchrl.data")
tensordict = pytest.importorskip("tensordict")
BOTH = pytest.mark.parametrize(
    ("package", "collection"), [(theirs, tensordict.TensorDict), (tdstore.rl, TensorDict)], ids=["torchrl", "ours"]
)


def filled(package, collection, storage=None, rows=6, **options):
    """Rows with the entries "a", from 0 on, and ("n", "b"), zeros, in a storage for ten of them."""
    made = package.LazyTensorStorage(10) if storage is None else storage
    buffer = package.TensorDictReplayBuffer(storage=made, **options)
    buffer.extend(collection({"a": torch.arange(rows), "n": {"b": torch.zeros(rows, 2)}}, [rows]))
    return buffer


@BOTH
def test_an_entry_of_all_rows_is_set(package, collection):
    buffer = filled(package, collection)
    assert buffer.set_("a", torch.arange(6) + 10) is buffer
    assert buffer.set_(("n", "b"), torch.ones(6, 2)) is buffer
    assert buffer["a"].tolist() == [10, 11, 12, 13, 14, 15] and buffer["n", "b"].sum() == 12
    with pytest.raises(KeyError, match="zz"):
        buffer.set_("zz", torch.zeros(6))
    with pytest.raises(RuntimeError):
        buffer.set_("a", torch.arange(10))
    assert buffer["a"].tolist() == [10, 11, 12, 13, 14, 15] and len(buffer) == 6


@BOTH
def test_an_entry_of_some_rows_is_set(package, collection):
    buffer = filled(package, collection)
    assert buffer.set_at_("a", torch.tensor([7, 8]), torch.tensor([1, 2])) is buffer
    buffer.set_at_("a", torch.tensor(9), 0).set_at_("a", torch.tensor([1, 1]), slice(4, 6))
    assert buffer["a"].tolist() == [9, 7, 8, 3, 1, 1] and buffer["n", "b"].sum() == 0
    with pytest.raises(IndexError):
        buffer.set_at_("a", torch.tensor([9]), torch.tensor([8]))
    assert buffer["a"].tolist() == [9, 7, 8, 3, 1, 1] and len(buffer) == 6


@BOTH
def test_entries_of_all_rows_are_updated(package, collection):
    buffer = filled(package, collection)
    assert buffer.update_({"a": torch.arange(6) + 1}) is buffer
    assert buffer["a"].tolist() == [1, 2, 3, 4, 5, 6]
    both = collection({"a": torch.arange(6) + 2, "n": {"b": torch.ones(6, 2)}}, [6])
    buffer.update_(both, keys_to_update=["a"])
    assert buffer["a"].tolist() == [2, 3, 4, 5, 6, 7] and buffer["n", "b"].sum() == 0
    buffer.update_(both)
    assert buffer["n", "b"].sum() == 12
    with pytest.raises(KeyError, match="zz"):
        buffer.update_({"zz": torch.arange(6)})


@pytest.mark.parametrize("end", [None, 8])
def test_rows_that_are_not_there_are_not_written(end):
    buffer = filled(tdstore.rl, TensorDict)
    with pytest.raises(IndexError, match="8 rows.*has 6"):
        buffer.write_all(TensorDict({"a": torch.ones(8, dtype=torch.int64), "n": {"b": torch.ones(8, 2)}}, [8]), end)
    assert buffer["a"].tolist() == [0, 1, 2, 3, 4, 5] and len(buffer) == 6


def test_an_update_that_fails_changes_nothing():
    buffer = filled(tdstore.rl, TensorDict)
    for wrong in ({"a": torch.arange(6) + 1, "n": {"b": torch.ones(6, 3)}}, {"a": torch.arange(6) + 1, "zz": 1}):
        with pytest.raises((RuntimeError, KeyError)):
            buffer.update_(wrong)
        assert buffer["a"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(KeyError, match="zz"):
        buffer.set_at_("zz", torch.zeros(1), [0])


@pytest.mark.parametrize("name", ["memmap", "h5", "zarr"])
def test_changes_in_place_are_in_the_place(tmp_path, name):
    path = tmp_path / "rows"
    buffer = filled(tdstore.rl, TensorDict, LazyStorage(10, name, path=path))
    buffer.set_("a", torch.arange(6) + 10).set_at_("a", torch.tensor([1, 2]), [0, 5])
    buffer.update_({"n": {"b": torch.ones(6, 2)}})
    buffer.close()
    there = LazyStorage.open(path, "r")
    assert there[:]["a"].tolist() == [1, 11, 12, 13, 14, 2] and there[:]["n", "b"].sum() == 12
    there.close()


def test_entries_of_rows_along_another_dimension():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20, ndim=2))
    buffer.extend(TensorDict({"a": torch.arange(6).view(2, 3)}, [2, 3]))
    assert buffer.dim_extend == 1
    buffer.set_("a", torch.arange(6).view(2, 3) + 10)
    buffer.set_at_("a", torch.tensor([0, 1, 2]), 0)
    assert buffer["a"].tolist() == [[0, 1, 2], [13, 14, 15]]


@BOTH
def test_rows_are_read_and_written_in_the_order_of_slots(package, collection):
    buffer = filled(package, collection)
    assert buffer.read_all_in_order()["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert buffer.read_all_in_order(2)["a"].tolist() == [0, 1]
    rows = collection({"a": torch.arange(3) + 50, "n": {"b": torch.ones(3, 2)}}, [3])
    if package is theirs:  # samples of torchrl's buffers have their numbers in the storage
        rows["index"] = torch.arange(3)
    assert buffer.write_all(rows) is None
    assert buffer["a"].tolist() == [50, 51, 52, 3, 4, 5]
    with pytest.raises(RuntimeError):
        buffer.write_all(rows, end=2)
    assert buffer["a"].tolist() == [50, 51, 52, 3, 4, 5] and len(buffer) == 6


@BOTH
def test_the_count_of_writes_outlives_the_rows(package, collection):
    buffer = filled(package, collection)
    buffer.empty(empty_write_count=False)
    assert buffer.write_count == 6 and len(buffer) == 0
    assert buffer.extend(collection({"a": torch.arange(2), "n": {"b": torch.zeros(2, 2)}}, [2])).tolist() == [0, 1]
    assert buffer.write_count == 8
    buffer.empty()
    assert buffer.write_count == 0


@BOTH
def test_what_can_be_sampled(package, collection):
    empty = package.TensorDictReplayBuffer(storage=package.LazyTensorStorage(10), batch_size=4)
    assert not empty.can_sample()
    assert filled(package, collection).can_sample(100)
    with pytest.raises(RuntimeError, match="batch"):
        filled(package, collection).can_sample()
    whole = filled(package, collection, sampler=package.SamplerWithoutReplacement(drop_last=True), batch_size=4)
    assert whole.can_sample() and not whole.can_sample(8)
    assert filled(package, collection, sampler=package.SamplerWithoutReplacement()).can_sample(8)
    once = filled(package, collection, sampler=package.ConsumingSampler(), batch_size=4)
    assert once.can_sample() and len(once.sample()) == 4
    assert once.can_sample() and len(once.sample()) == 2
    assert not once.can_sample(1)


@pytest.mark.parametrize(
    ("package", "collection", "kind"),
    [
        (theirs, tensordict.TensorDict, "SliceSampler"),
        (tdstore.rl, TensorDict, "SliceSampler"),
        (tdstore.rl, TensorDict, "SliceSamplerWithoutReplacement"),
    ],
)
def test_pieces_that_can_be_sampled(package, collection, kind):
    def made(length: int):
        sampler = getattr(package, kind)(slice_len=length, traj_key="run")
        buffer = package.TensorDictReplayBuffer(storage=package.LazyTensorStorage(10), sampler=sampler)
        buffer.extend(collection({"run": torch.tensor([0, 0, 0, 1, 1, 1])}, [6]))
        return buffer

    assert made(3).can_sample(6) and not made(4).can_sample(8)
    with pytest.raises(RuntimeError, match="slice_len"):
        made(3).can_sample(7)


def test_a_check_draws_nothing():
    sampler = SliceSamplerWithoutReplacement(slice_len=1, traj_key="a", shuffle=False)
    buffer = filled(tdstore.rl, TensorDict, sampler=sampler, batch_size=2)
    assert buffer.can_sample() and buffer.sample()["a"].tolist() == [0, 1]
    assert buffer.can_sample() and buffer.sample()["a"].tolist() == [2, 3]


def test_rows_without_priority_cannot_be_sampled():
    buffer = filled(tdstore.rl, TensorDict, sampler=PrioritizedSampler(10, 1.0, 1.0, eps=0.0), batch_size=2)
    assert buffer.can_sample()
    buffer.update_priority(torch.arange(6), 0.0)
    assert not buffer.can_sample()


@pytest.mark.parametrize("update", [None, True, False])
def test_priorities_of_new_rows_come_from_their_entry_unless_refused(update):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=PrioritizedSampler(4, 1.0, 1.0, eps=0.0))
    buffer.extend(TensorDict({"td_error": torch.tensor([1.0, 3.0])}, [2]), update_priority=update)
    assert buffer.sampler.priorities(2).tolist() == ([0.5, 0.5] if update is False else [0.25, 0.75])


def test_entries_are_those_of_tensordicts_in_tables():
    rows = ReplayBuffer(storage=LazyTensorStorage(4))
    rows.extend(torch.arange(3))
    for act in (
        lambda: rows.set_("a", torch.zeros(3)),
        lambda: rows.set_at_("a", torch.zeros(1), [0]),
        lambda: rows.update_({"a": torch.zeros(3)}),
        lambda: filled(tdstore.rl, TensorDict, ListStorage(10)).set_("a", torch.zeros(6)),
    ):
        with pytest.raises(TypeError, match="entr"):
            act()
    rows.write_all(torch.tensor([5, 6]))
    assert rows[:].tolist() == [5, 6, 2]


def test_a_writer_without_a_ring_counts_anew():
    writer = TensorDictMaxValueWriter(rank_key="a")
    buffer = filled(tdstore.rl, TensorDict, writer=writer)
    buffer.empty(empty_write_count=False)
    assert buffer.write_count == 0


@pytest.mark.parametrize("storage", [ListStorage, LazyTensorStorage])
def test_rows_are_collated_once(storage):
    seen = []

    def collate(rows):
        seen.append(rows)
        return torch.stack(rows) if isinstance(rows, list) else rows

    buffer = TensorDictReplayBuffer(storage=storage(4), batch_size=2, collate_fn=collate)
    buffer.extend(TensorDict({"a": torch.arange(4)}, [4]))
    batch = buffer.sample()
    assert len(seen) == 1 and torch.equal(batch["index"], batch["a"])
    assert storage is ListStorage or "index" in seen[0]


def test_a_writer_of_tensordicts_has_samples_say_where_rows_are():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictRoundRobinWriter(), batch_size=3)
    buffer.extend(TensorDict({"a": torch.arange(4)}, [4]))
    batch = buffer.sample()
    assert torch.equal(batch["index"], batch["a"])
    buffer.set_writer(RoundRobinWriter())
    assert "index" not in buffer.sample()
