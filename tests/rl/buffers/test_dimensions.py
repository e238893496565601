"""Buffers of several dimensions of slots: environments, each over time."""

from __future__ import annotations

import pytest
import torch

from tdstore import TensorDict
from tdstore.rl import (
    LazyMemmapStorage,
    LazyStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.rl.places import kinds, maker

ENVS, STEPS = 4, 5


def collected(first=0):
    numbers = torch.arange(ENVS * STEPS).view(ENVS, STEPS) + first
    return TensorDict({"a": numbers}, [ENVS, STEPS])


@pytest.mark.parametrize("storage", [None, "memmap", "h5"])
def test_time_is_along_the_rows(tmp_path, storage):
    made = LazyTensorStorage(40, ndim=2) if storage is None else LazyStorage(40, storage, path=tmp_path / "r", ndim=2)
    buffer = ReplayBuffer(storage=made, batch_size=3)
    assert buffer.dim_extend == 1
    index = buffer.extend(collected())
    assert index[:3].tolist() == [[0, 0], [0, 1], [0, 2]]
    buffer.extend(collected(100))
    want = torch.cat([collected()["a"], collected(100)["a"]], 1)
    assert made.shape == (10, ENVS)
    assert buffer[:]["a"].tolist() == want.tolist() == buffer["a"].tolist()
    for index in (
        0,
        -1,
        slice(1, 3),
        (2, 7),
        (2, -1),
        (slice(None), 3),
        (slice(1, 3), slice(-4, -1)),
        (1, slice(0, 9, 2)),
    ):
        assert buffer[index]["a"].tolist() == want[index].tolist(), index
    assert buffer[torch.tensor([2, 0])]["a"].tolist() == want[[2, 0]].tolist()
    batch, info = buffer.sample(return_info=True)
    assert batch["a"].tolist() == want.T[info["index"]].tolist()


@pytest.mark.parametrize("storage", [None, "h5"])
def test_rows_are_set_in_the_order_of_the_data(tmp_path, storage):
    made = LazyTensorStorage(20, ndim=2) if storage is None else LazyStorage(20, storage, path=tmp_path / "r", ndim=2)
    buffer = ReplayBuffer(storage=made, batch_size=3)
    buffer.extend(collected())
    want = collected()["a"]
    for index in (1, (2, 3), (slice(0, 2), slice(3, 5)), (3, -1)):
        value = -torch.ones_like(want[index])
        buffer[index] = TensorDict({"a": value}, value.shape)
        want[index] = value
        assert buffer[:]["a"].tolist() == want.tolist(), index
    buffer["a"] = want + 1
    assert buffer["a"].tolist() == (want + 1).tolist()
    assert len(buffer) == 20


def test_slices_follow_time():
    sampler = SliceSampler(slice_len=4, end_key=("next", "done"))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40, ndim=2), sampler=sampler, batch_size=40)
    done = torch.zeros(4, 10, 1, dtype=torch.bool)
    done[:, 4] = True
    steps = {"t": torch.arange(10).expand(4, 10), "env": torch.arange(4)[:, None].expand(4, 10), "next": {"done": done}}
    buffer.extend(TensorDict(steps, [4, 10]))
    batch = buffer.sample()
    assert (batch["t"].view(10, 4).diff(dim=1) == 1).all()
    assert (batch["env"].view(10, 4).diff(dim=1) == 0).all()
    assert not (batch["t"].view(10, 4)[:, 0] % 5 > 1).any()


def test_rows_of_one_dimension_of_slots():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), dim_extend=1, batch_size=3)
    assert buffer.extend(torch.arange(10).view(2, 5)).tolist() == [0, 1, 2, 3, 4]
    assert buffer[:].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert buffer.storage[:].shape == (5, 2) and buffer.sample().shape == (3, 2)
    pair = ReplayBuffer(storage=LazyTensorStorage(10), dim_extend=1, batch_size=3)
    pair.extend({"x": torch.zeros(2, 5), "y": (torch.ones(2, 5, 3),)})
    assert pair[:]["y"][0].shape == (2, 5, 3) and pair.storage[:]["y"][0].shape == (5, 2, 3)
    with pytest.raises(TypeError, match="dim_extend=0"):
        pair[0] = {"x": torch.zeros(5), "y": (torch.ones(5, 3),)}


def test_items_of_a_list_are_environments():
    buffer = ReplayBuffer(storage=LazyTensorStorage(20, ndim=2), batch_size=3)
    buffer.extend(list(collected().unbind(0)))
    assert buffer[:]["a"].tolist() == collected()["a"].tolist() and buffer.storage.shape == (STEPS, ENVS)


@kinds(["memory", "memmap", "h5"])
def test_further_terms_of_an_index_go_into_the_rows(kind, request):
    storage = maker(kind, request)(10)
    whole = torch.arange(24).view(4, 3, 2)
    storage.set(range(4), TensorDict({"x": whole, "n": TensorDict({"y": whole + 1}, [4, 3])}, [4, 3]))
    for index in (
        (slice(0, 3), 2), (1, 2), (-1, slice(1, 3)), (slice(None), torch.tensor([0, 2])), (slice(1, 4, 2), slice(2)),
        ([0, 3], [1, 2]), (torch.tensor([3, 1]), 0), (torch.tensor([True, False, True, False]), 1),
    ):  # fmt: skip
        found = storage.get(index)
        assert torch.equal(found["x"], whole[index]) and torch.equal(found["n", "y"], whole[index] + 1), index
        assert found.batch_size == whole[index].shape[:-1]
    for beyond in ((0, 0, 0), (slice(2), 3), (4, 0)):
        with pytest.raises(IndexError):
            storage.get(beyond)
    assert storage._storage.batch_size == (10, 3)


def test_further_terms_of_an_index_go_into_dicts_and_tensors():
    pairs, tensors = LazyTensorStorage(5), LazyTensorStorage(12, ndim=2)
    whole = torch.arange(24).view(4, 3, 2)
    assert tensors._storage is None
    pairs.set(range(4), {"a": whole, "b": (whole, whole + 1)})
    tensors.set(range(4), whole)
    found = pairs.get((slice(0, 2), 1))
    assert torch.equal(found["a"], whole[:2, 1]) and torch.equal(found["b"][1], whole[:2, 1] + 1)
    assert torch.equal(tensors.get((slice(2), 1, 0)), whole[:2, 1, 0]) and tensors.get((3, -1, 1)) == 23
    with pytest.raises(IndexError, match="4 terms for slots of 2 dimensions"):
        tensors.get((0, 0, 0, 0))


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
def test_data_with_fewer_dimensions_than_slots_is_refused(make):
    storage = make(16, ndim=2)
    rb = TensorDictReplayBuffer(storage=storage, dim_extend=0)
    few = TensorDict({"a": torch.arange(4)}, [4])
    with pytest.raises(RuntimeError, match=r"leading shape \[4\]"):
        rb.extend(few)
    assert not storage.initialized
    rb.extend(TensorDict({"a": torch.arange(8).view(2, 4)}, [2, 4]))
    with pytest.raises(RuntimeError, match=r"leading shape \[4\]"):
        rb.extend(few)
    with pytest.raises(RuntimeError, match=r"the data has \[4\]"):
        storage.set(range(4), few)
    assert storage.shape == (2, 4) and storage[:]["a"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
