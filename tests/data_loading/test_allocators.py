"""Batches that are read straight into given memory, from which a GPU copies them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.data import Epochs, Mixture, TensorDictDataset
from tdstore.data.source import Source
from tests.data_loading.places import LOCAL, stored

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
ROWS = [np.array([5, 2, 2, 19]), np.arange(3, 11), np.array([7])]


class Rooms:
    """Memory that was asked for."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def __call__(self, nbytes: int) -> torch.Tensor:
        self.made.append(torch.full((nbytes,), 0xAA, dtype=torch.uint8))
        return self.made[-1]

    def holds(self, leaf: torch.Tensor) -> bool:
        at, size = self.made[-1].data_ptr(), self.made[-1].nbytes
        return at <= leaf.data_ptr() and leaf.data_ptr() + leaf.nbytes <= at + size


def same(one: Any, other: Any) -> None:
    assert one.batch_size == other.batch_size
    assert one.names == other.names
    assert list(one.keys(True, True)) == list(other.keys(True, True))
    for key in one.keys(True, True):
        assert one[key].dtype == other[key].dtype
        assert torch.equal(one[key].cpu(), other[key].cpu()), key
    for key in one.keys(True):
        if isinstance(one[key], tdstore.TensorDictBase):
            assert one[key].batch_size == other[key].batch_size


@pytest.mark.parametrize("kind", LOCAL)
@pytest.mark.parametrize("rows", ROWS, ids=["rows", "run", "row"])
def test_tensors_are_read_into_one_room(kind: str, rows: Any, request: Any) -> None:
    with stored(kind, 20, request) as (place, options):
        source, rooms = Source(place, ["row", "next"], options), Rooms()
        read = source.read(rows, rooms)
        same(read, source.read(rows))
        assert len(rooms.made) == 1
        assert all(rooms.holds(leaf) for leaf in read.values(True, True))
        source.read(rows, rooms)
        assert len(rooms.made) == 2, "each batch has memory of its own"


class Memory(bytearray):
    """Memory that can be referenced weakly."""


@pytest.mark.parametrize("kind", LOCAL)
def test_memory_is_freed_with_its_batch(kind: str, request: Any) -> None:
    """Without the cycle collector: pinned memory would be allocated anew for each batch until that runs."""
    made: list[weakref.ref[Memory]] = []

    def allocate(nbytes: int) -> torch.Tensor:
        memory = Memory(nbytes)
        made.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=torch.uint8)

    with stored(kind, 20, request) as (place, options):
        source = Source(place, ["row", "next"], options)
        source.read(ROWS[0], allocate)
        gc.collect()
        gc.disable()
        try:
            for rows in ROWS:
                read = source.read(rows, allocate)
                assert made[-1]() is not None
                del read
                assert made[-1]() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("kind", ["memmap", "h5"])
def test_strings_are_read_as_before(kind: str, request: Any) -> None:
    with stored(kind, 20, request) as (place, options):
        source, rooms = Source(place, None, options), Rooms()
        read = source.read(ROWS[0], rooms)
        assert list(read["name"]) == ["r5", "r2", "r2", "r19"]
        assert read["row"].tolist() == [5, 2, 2, 19]
        assert not rooms.made


def test_tensordicts_in_memory_may_change_between_batches() -> None:
    td = TensorDict(
        {"a": torch.arange(20), "n": TensorDict({"b": torch.rand(20, 3, 2)}, [20, 3])}, [20], names=["rows"]
    )
    source, rooms = Source(td), Rooms()
    same(source.read(ROWS[0], rooms), td[torch.from_numpy(ROWS[0])])
    td["later"] = torch.rand(20, 2).double()
    del td["a"]
    same(source.read(ROWS[0], rooms), td[torch.from_numpy(ROWS[0])])
    assert len(rooms.made) == 2
    td["weights"] = torch.nn.Parameter(torch.rand(20))
    assert source.read(ROWS[0], rooms)["weights"].shape == (4,)
    assert len(rooms.made) == 2, "a read of what requires gradients is left to torch"


def test_stored_tensordicts_may_change_between_batches(tmp_path: Any) -> None:
    td = TensorDict({"a": torch.arange(20), "b": torch.rand(20, 3)}, [20])
    held = td.save(tmp_path / "x.h5").unlock_()
    source, rooms = Source(held), Rooms()
    same(source.read(ROWS[0], rooms), td[torch.from_numpy(ROWS[0])])
    held["c"] = td["c"] = torch.rand(20)
    del held["a"], td["a"]
    same(source.read(ROWS[0], rooms), td[torch.from_numpy(ROWS[0])])


def test_windows_of_rows_have_two_dimensions() -> None:
    source, rooms = Source(TensorDict({"a": torch.arange(20)}, [20])), Rooms()
    assert source.read(np.array([[1, 2], [5, 6]]), rooms)["a"].tolist() == [[1, 2], [5, 6]]


# -- on a GPU ------------------------------------------------------------------------------
@GPU
@pytest.mark.parametrize("kind", LOCAL)
@pytest.mark.parametrize("columns", [None, ["row", "next"]], ids=["strings", "tensors"])
def test_epochs_on_the_gpu(kind: str, columns: Any, request: Any) -> None:
    with stored(kind, 300, request) as (place, options):
        there = Epochs(place, 7, device="cuda", columns=columns, options=options, seed=3)
        here = Epochs(place, 7, columns=columns, options=options, seed=3)
        count = 0
        for one, other in zip(there, here, strict=True):
            assert one["row"].is_cuda
            assert one["next", "x"].is_cuda
            assert one["row"].tolist() == other["row"].tolist()
            assert torch.equal(one["next", "x"].cpu(), other["next", "x"])
            assert columns or list(one["name"]) == list(other["name"])
            count += 1
        assert count == 43


@GPU
def test_batches_that_are_kept_on_the_gpu_stay_as_they_are(request: Any) -> None:
    with stored("memmap", 2000, request) as (place, options):
        kept = list(Epochs(place, 16, device="cuda", columns=["row", "next"], prefetch=8, options=options))
        for batch in kept:
            assert torch.equal(batch["next", "x"], batch["row"][:, None] * torch.ones(3, device="cuda"))
        assert sorted(torch.cat([batch["row"] for batch in kept]).tolist()) == list(range(2000))


@GPU
def test_a_mixture_and_a_dataset_on_the_gpu(request: Any) -> None:
    with stored("h5", 50, request) as (place, options):
        sources = [Epochs(place, 5, columns=["row"], options=options) for _ in range(2)]
        assert all(batch["row"].is_cuda for batch in Mixture(sources, device="cuda"))
        dataset = TensorDictDataset(place, columns=["row", "next"], device="cuda", options=options)
        batch = dataset.__getitems__([4, 2, 4])
        assert batch["next", "x"].is_cuda
        assert batch["row"].tolist() == [4, 2, 4]
        assert dataset[3]["row"].item() == 3
