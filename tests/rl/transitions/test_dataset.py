"""Buffers behind a DataLoader (scenario A9)."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

from tdstore import TensorDict
from tdstore.rl.transitions import PrioritizedReplayBuffer, ReplayBuffer, ReplayDataset, create_dataloader


def filled(buffer):
    x = torch.arange(20)
    buffer.add(TensorDict({"x": x, "n": TensorDict({"y": x * 2.0}, [20])}, [20]))
    return buffer


def whole(batch):
    return (batch["n", "y"] == batch["x"] * 2).all()


def test_a9_one_batch_an_iteration():
    dataset = ReplayDataset(filled(ReplayBuffer(100)), batch_size=4)
    (batch,) = dataset
    assert batch.batch_size == (4,)
    dataset.batch_size = 7
    assert next(iter(dataset)).batch_size == (7,)
    assert ReplayDataset(dataset.buffer).batch_size == 256
    with pytest.raises(TypeError):
        len(dataset)
    assert [len(batch) for batch in ReplayDataset(dataset.buffer, 3, num_batches=5)] == [3] * 5


def test_wrong_arguments():
    buffer = filled(ReplayBuffer(100))
    for size in (0, -1):
        with pytest.raises(AssertionError, match="positive"):
            ReplayDataset(buffer, size)
    with pytest.warns(UserWarning, match="list"):
        ReplayDataset([])


@pytest.mark.parametrize("make", [create_dataloader, ReplayDataset.create_dataloader])
def test_loaders_of_the_library(make):
    dataset = ReplayDataset(filled(ReplayBuffer(100)), 4)
    (batch,) = make(dataset)
    assert type(batch) is TensorDict
    assert batch.batch_size == (4,)
    assert whole(batch)
    (batch,) = make(dataset, batch_size=3)
    assert batch.batch_size == (1, 4)
    dataset.num_batches = 3
    (batch,) = make(dataset, batch_size=3)
    assert batch.batch_size == (3, 4)


def test_a_stock_loader():
    dataset = ReplayDataset(filled(ReplayBuffer(100)), 4, num_batches=2)
    batches = list(DataLoader(dataset, batch_size=None))
    assert [type(batch) for batch in batches] == [TensorDict] * 2
    assert all(batch.batch_size == (4,) and whole(batch) for batch in batches)
    (batch,) = DataLoader(dataset, batch_size=2)
    assert batch.batch_size == (2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("storage", [None, "shared", "memmap", "h5", "zarr"])
def test_workers_open_the_rows_for_themselves(tmp_path, storage, context):
    place = {} if storage is None else {"storage": storage, "path": tmp_path / "rows"}
    if storage == "shared":
        place = {"storage": "shared"}
    buffer = filled(ReplayBuffer(100, **place))
    dataset = ReplayDataset(buffer, 6, num_batches=2)
    for loader in (
        create_dataloader(dataset, num_workers=2, multiprocessing_context=context),
        DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=context),
    ):
        batches = list(loader)
        assert [batch.batch_size for batch in batches] == [(6,)] * 4
        assert all(whole(batch) for batch in batches)
        drawn = [tuple(batch["x"].flatten().tolist()) for batch in batches]
        assert len(set(drawn)) == 4, "workers draw the same rows"
    buffer.add(TensorDict({"x": torch.tensor([99]), "n": TensorDict({"y": torch.tensor([198.0])}, [1])}, [1]))
    assert buffer.size == 21


def test_prioritized_rows_reach_a_loader():
    (batch,) = create_dataloader(ReplayDataset(filled(PrioritizedReplayBuffer(100)), 8))
    assert batch["weights"].shape == (8, 1)


def test_a_training_loop_repeats():
    loader = create_dataloader(ReplayDataset(filled(ReplayBuffer(100)), 4))
    batches = [batch for _ in itertools.repeat(None, 5) for batch in loader]
    assert len(batches) == 5
