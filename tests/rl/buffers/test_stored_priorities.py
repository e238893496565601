"""Priorities of rows that other processes wrote, and of rows whose place is opened again."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from tdstore.rl import transitions
from tdstore.rl.buffers import ImmutableDatasetWriter, TensorDictPrioritizedReplayBuffer
from tdstore.rl.storages import LazyStorage
from tests.rl.places import add_to, extend_by, kinds, maker, rows


def elsewhere(target, *arguments):
    """Run a function in another process."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == 0


@pytest.mark.parametrize("kind", ["memmap", "shared"])
def test_rows_of_another_process_are_sampled(kind, tmp_path):
    place = tmp_path / "rows" if kind == "memmap" else None
    storage = LazyStorage(12, kind, path=place, shared_init=True)
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, batch_size=600)
    index = buffer.extend(rows(0, 1, 2, 3))
    buffer.update_priority(index, torch.tensor([1.0, 1.0, 1.0, 2.0]))
    elsewhere(extend_by, storage, 4, 8)
    numbers = buffer.sample()["a"]
    assert set(numbers.tolist()) == set(range(8))
    share = (numbers >= 4).float().mean()
    assert 0.5 < share < 0.8, "new rows have the largest priority: 8 of 13 parts"
    buffer.update_priority(torch.arange(8), torch.zeros(8))
    elsewhere(extend_by, storage, 8, 14)  # around the end: rows 12 and 13 lie in the slots 0 and 1
    assert set(buffer.sample()["a"].tolist()) == set(range(8, 14)), "older rows have no priority"
    buffer.extend(rows(14))
    elsewhere(extend_by, storage, 15, 16)
    assert set(buffer.sample()["a"].tolist()) == set(range(8, 16))
    if kind == "memmap":
        reader = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=LazyStorage.open(place, "r"), writer=ImmutableDatasetWriter(), batch_size=600
        )
        assert set(reader.sample()["a"].tolist()) == set(range(4, 16))
        elsewhere(extend_by, storage, 16, 18)
        assert set(reader.sample()["a"].tolist()) == set(range(6, 18)), "a reader sees what is written later"


def test_a_buffer_that_wrote_nothing_samples_rows_of_another_process(tmp_path):
    storage = LazyStorage(12, "memmap", path=tmp_path / "rows", shared_init=True)
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, batch_size=60)
    elsewhere(extend_by, storage, 0, 3)
    assert set(buffer.sample()["a"].tolist()) == {0, 1, 2}


def test_transitions_of_another_process_have_its_priorities(tmp_path):
    buffer = transitions.PrioritizedReplayBuffer(
        12, alpha=1.0, storage="memmap", path=tmp_path / "rows", shared_init=True
    )
    other = transitions.PrioritizedReplayBuffer(
        12, alpha=1.0, storage="memmap", path=tmp_path / "rows", shared_init=True
    )
    elsewhere(add_to, other, 0, 3, 5.0)
    assert set(buffer.sample(60)["a"].reshape(-1).tolist()) == {0, 1, 2}
    assert buffer.priorities.tolist() == [5.0] * 3 and buffer.max_priority == 5.0


@kinds(["memmap", "h5", "zarr", "remote", "redis"])
@pytest.mark.parametrize("waiting", [0, 50], ids=["each write", "buffered"])
def test_priorities_are_there_after_opening(kind, waiting, request):
    storage = maker(kind, request)(6, write_buffer=waiting)
    place, name = storage.place, storage.storage_name
    storage = name if name else place
    path = place if name else None
    buffer = transitions.PrioritizedReplayBuffer(6, alpha=0.5, storage=storage, path=path, write_buffer=waiting)
    buffer.add(rows(0, 1, 2, 3))
    buffer.update_priorities([0, 1, 1, 2], [4.0, 3.0, 9.0, 0.0])
    assert set(buffer.sample(3).keys()) == {"a", "weights", "idxs"}
    assert set(buffer.storage.keys()) == set(buffer.sample_from_indices([0]).keys()) == {"a"}
    buffer.add(rows(4))
    buffer.update_priorities([4], [16.0])
    buffer.close()
    again = transitions.PrioritizedReplayBuffer.open(place, storage=name, alpha=0.5)
    assert torch.allclose(again.priorities, torch.tensor([2.0, 3.0, 1e-5**0.5, 1.0, 4.0], dtype=torch.float64))
    assert again.max_priority == 16.0
    again.add(rows(5, 6, 7))
    assert torch.allclose(again.priorities, torch.tensor([4.0, 4.0, 1e-5**0.5, 1.0, 4.0, 4.0], dtype=torch.float64))
    again.close()


def test_priorities_that_were_set_alone_are_there_after_opening(tmp_path):
    buffer = transitions.PrioritizedReplayBuffer(6, alpha=1.0, storage="h5", path=tmp_path / "rows.h5")
    buffer.add(rows(0, 1))
    buffer.update_priorities([1], [4.0])
    buffer.flush()
    buffer.update_priorities([0], [3.0])
    buffer.add(rows(2))
    del buffer  # without close
    again = transitions.PrioritizedReplayBuffer.open(tmp_path / "rows.h5", alpha=1.0)
    assert again.priorities.tolist() == [3.0, 4.0, 4.0]


def test_rows_of_a_plain_buffer_get_priorities(tmp_path):
    plain = transitions.ReplayBuffer(6, storage="h5", path=tmp_path / "rows.h5")
    plain.add(rows(0, 1))
    plain.close()
    buffer = transitions.PrioritizedReplayBuffer.open(tmp_path / "rows.h5", alpha=1.0)
    assert buffer.priorities.tolist() == [1.0, 1.0]
    buffer.update_priorities([1], [3.0])
    buffer.add(rows(2))
    buffer.close()
    again = transitions.PrioritizedReplayBuffer.open(tmp_path / "rows.h5", alpha=1.0)
    assert again.priorities.tolist() == [1.0, 3.0, 3.0]


def test_the_name_of_the_priorities_is_taken():
    buffer = transitions.PrioritizedReplayBuffer(6)
    with pytest.raises(ValueError, match="_priority is taken"):
        buffer.add(rows(0).set("_priority", torch.ones(1)))
    assert buffer.size == 0


def test_rows_with_priorities_have_them_after_opening(tmp_path):
    storage = LazyStorage(6, "zarr", path=tmp_path / "rows.zarr")
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, batch_size=50)
    buffer.extend(rows(0, 1, 2).set("td_error", torch.tensor([0.0, 3.0, 0.0])))
    buffer.close()
    opened = LazyStorage.open(tmp_path / "rows.zarr")
    again = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=opened, batch_size=50)
    assert set(again.sample()["a"].tolist()) == {1}


def test_priorities_of_a_state_dict_are_stored_with_its_rows(tmp_path):
    """Those that waited for the next write were in the state, but not in its rows, so that open() lost them."""
    buffer = transitions.PrioritizedReplayBuffer(4, alpha=1.0, storage="h5", path=tmp_path / "rows.h5")
    buffer.add(rows(0, 1))
    buffer.update_priorities([0, 1], [5.0, 7.0])
    again = transitions.PrioritizedReplayBuffer(4, alpha=1.0, storage="h5", path=tmp_path / "again.h5")
    again.load_state_dict(buffer.state_dict())
    assert again.priorities.tolist() == [5.0, 7.0]
    again.close()
    buffer.close()
    with_rows = transitions.PrioritizedReplayBuffer.open(tmp_path / "again.h5", alpha=1.0)
    assert with_rows.priorities.tolist() == [5.0, 7.0]
    with_rows.close()
