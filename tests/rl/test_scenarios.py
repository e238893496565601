"""The scenarios of the specification, with its numbers; those that concern rows, in every place."""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
import pytest
import torch

from tdstore import TensorDict
from tdstore.errors import StoreBusyError
from tdstore.rl.buffers import PrioritizedSampler, ReplayBuffer, SamplerWithoutReplacement
from tdstore.rl.storages import LazyMemmapStorage, LazyStorage, LazyTensorStorage
from tests.rl.places import KINDS, kinds, maker, rows, write_four

STORED = [kind for kind in KINDS if kind not in ("memory", "shared")]


def content(buffer):
    return buffer[:]["a"].tolist()


@kinds()
def test_s1_ten_rows_of_a_hundred(kind, request):
    storage = maker(kind, request)(100)
    storage.set(range(10), TensorDict({"a": torch.arange(110).view(10, 11)}, [10, 11]))
    assert len(storage) == 10 and storage.shape == torch.Size([10]) and storage.capacity == 100
    assert storage.get(0).batch_size == torch.Size([11])
    assert storage.get(-1)["a"].tolist() == storage.get(9)["a"].tolist() == list(range(99, 110))
    with pytest.raises(IndexError, match="10 of 100"):
        storage.get(10)


@kinds()
def test_s2_beyond_the_end_and_a_gap(kind, request):
    make = maker(kind, request)
    storage = make(100)
    storage.set(range(10), rows(*range(10)))
    with pytest.raises(IndexError, match="104"):
        storage.set(range(95, 105), rows(*range(10)))
    assert len(storage) == 10 and content(storage) == list(range(10))
    storage = make(5)
    storage.set(4, TensorDict({"a": torch.tensor(7)}))
    assert len(storage) == 5 and content(storage) == [0, 0, 0, 0, 7]
    storage.set(4, TensorDict({"a": torch.tensor(8)}))
    assert len(storage) == 5 and storage.get(4)["a"] == 8


@kinds()
def test_s3_the_ring(kind, request):
    buffer = ReplayBuffer(storage=maker(kind, request)(5))
    assert buffer.extend(rows(0, 1, 2, 3)).tolist() == [0, 1, 2, 3]
    assert buffer.extend(rows(4, 5, 6)).tolist() == [4, 0, 1]
    assert content(buffer) == [5, 6, 2, 3, 4] and buffer.writer._cursor == 2
    assert buffer.add(TensorDict({"a": torch.tensor(99)})) == 2
    buffer.add(TensorDict({"a": torch.tensor(98)}))
    assert buffer.writer._cursor == 4
    buffer.extend(rows(*range(100, 112)))
    assert content(buffer) == [111, 107, 108, 109, 110] and buffer.writer._cursor == 1
    assert buffer.write_count == 4 + 3 + 2 + 12


def test_s4_a_checkpoint_in_place(tmp_path):
    def make():
        storage = LazyMemmapStorage(10000, scratch_dir=tmp_path / "storage", existsok=True)
        return ReplayBuffer(storage=storage)

    buffer = make()
    buffer.extend(rows(*range(1000)))
    file = tmp_path / "storage" / "a.memmap"
    before = file.stat()
    assert before.st_size == 80000
    buffer.dumps(tmp_path)
    after = file.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, 80000)
    assert '"len": 1000' in (tmp_path / "storage" / "storage_metadata.json").read_text()
    buffer.close()
    again = make()
    again.loads(tmp_path)
    assert len(again) == 1000 and content(again) == list(range(1000))
    assert again.extend(rows(*range(5))).tolist() == [1000, 1001, 1002, 1003, 1004]


@kinds()
def test_s5_a_checkpoint_elsewhere(kind, request, tmp_path):
    make = maker(kind, request)
    buffer = ReplayBuffer(storage=make(4))
    buffer.extend(rows(*range(6)))
    buffer.dumps(tmp_path / "checkpoint")
    again = ReplayBuffer(storage=make(4))
    again.loads(tmp_path / "checkpoint")
    assert content(again) == [4, 5, 2, 3] and again.writer._cursor == 2 and again.write_count == 6
    assert again.add(TensorDict({"a": torch.tensor(9)})) == 2
    assert content(buffer) == [4, 5, 2, 3], "nothing is shared with the checkpoint"


@pytest.mark.parametrize("kind", ["memmap", "shared", "redis"])
def test_s6_two_processes_write_one_storage(kind, request):
    storage = maker(kind, request)(10, shared_init=True)
    spawn = multiprocessing.get_context("spawn")
    index = spawn.Queue()
    workers = [spawn.Process(target=write_four, args=(storage, start, index)) for start in (0, 100)]
    for worker in workers:
        worker.start()
    written = sorted(index.get(timeout=200) for _ in workers)
    for worker in workers:
        worker.join(200)
        assert worker.exitcode == 0
    assert written == [[0, 1, 2, 3], [4, 5, 6, 7]] and len(storage) == 8
    assert sorted(content(storage)) == [0, 1, 2, 3, 100, 101, 102, 103]


@pytest.mark.parametrize("kind", ["h5", "zarr", "remote"])
def test_one_writer_at_a_time(kind, request):
    with pytest.raises(NotImplementedError, match="one writer"):
        maker(kind, request)(10, shared_init=True)


def test_a_second_writer_is_refused(tmp_path):
    storage = LazyStorage(5, "h5", path=tmp_path / "rows.h5")
    storage.set(range(3), rows(1, 2, 3))
    for kind in (RuntimeError, StoreBusyError):
        with pytest.raises(kind, match=r"rows\.h5"):
            LazyStorage.open(tmp_path / "rows.h5")
    storage.close()
    assert content(LazyStorage.open(tmp_path / "rows.h5")) == [1, 2, 3]


def test_s7_two_dimensions_of_slots():
    storage = LazyTensorStorage(12, ndim=2)
    storage.set(range(2), torch.zeros(2, 4))
    assert len(storage) == 8 and storage.shape == torch.Size([2, 4]) and storage.capacity == 3
    storage = LazyTensorStorage(13, ndim=2)
    storage.set(range(2), torch.zeros(2, 4))
    assert storage.max_size == 16
    buffer = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), dim_extend=0)
    buffer.extend(torch.tensor([[0, 1], [2, 3]]))
    index = buffer.extend(torch.tensor([[10, 11], [12, 13]]))
    assert index.tolist() == [[2, 0], [2, 1], [0, 0], [0, 1]]
    assert buffer[:].tolist() == [[12, 13], [2, 3], [10, 11]] and buffer.writer._cursor == 1


def test_s8_without_replacement(tmp_path):
    def make(drop_last=False):
        storage = LazyTensorStorage(10)
        sampler = SamplerWithoutReplacement(shuffle=False, drop_last=drop_last)
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
        buffer.extend(torch.arange(10))
        return buffer

    buffer = make()
    seen = [buffer.sample().tolist() for _ in range(4)]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    assert [batch.tolist() for batch in make(drop_last=True)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    buffer = make()
    buffer.sample()
    buffer.dumps(tmp_path / "checkpoint")
    again = make()
    again.loads(tmp_path / "checkpoint")
    assert again.sample().tolist() == [4, 5, 6, 7]


def test_s9_priorities():
    sampler = PrioritizedSampler(4, alpha=0.6, beta=0.4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=4000)
    index = buffer.extend(torch.arange(4))
    buffer.update_priority(index, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    expected = [0.148, 0.225, 0.287, 0.341]
    np.testing.assert_allclose(sampler.priorities(), expected, atol=5e-4)
    torch.manual_seed(0)
    batch, info = buffer.sample(return_info=True)
    np.testing.assert_allclose(np.bincount(batch.numpy(), minlength=4) / 4000, expected, atol=0.03)
    weights = {int(row): float(w) for row, w in zip(batch, info["priority_weight"], strict=True)}
    np.testing.assert_allclose([weights[i] for i in range(4)], [1, 0.847, 0.768, 0.717], atol=5e-4)


@kinds()
def test_s10_strings_of_each_row(kind, request):
    storage = maker(kind, request)(4)
    storage.set([0, 1], TensorDict({"a": torch.zeros(2), "text": ["hello", "world"]}, [2]))
    assert storage[0]["text"] == "hello" and storage[1]["text"] == "world"
    assert list(storage[[1, 0]]["text"]) == ["world", "hello"]
    long = "x" * 1000
    storage.set(2, TensorDict({"a": torch.tensor(1.0), "text": long}))
    assert list(storage[:]["text"]) == ["hello", "world", long]


@kinds(STORED)
def test_a_place_opens_again_with_its_length_and_cursor(kind, request):
    storage = maker(kind, request)(5)
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(TensorDict({"a": torch.arange(7), "text": [f"row {i}" for i in range(7)]}, [7]))
    options = dict(storage._place.options)
    place, name = storage.place, storage.storage_name
    storage.close()
    again = LazyStorage.open(place, storage=name, **options)
    assert (len(again), again.cursor, again.write_count, again.max_size) == (5, 2, 7, 5)
    assert content(again) == [5, 6, 2, 3, 4] and again[4]["text"] == "row 4"
    assert again.append(TensorDict({"a": torch.tensor([70]), "text": ["new"]}, [1])).tolist() == [2]
    again.close()
    reader = LazyStorage.open(place, mode="r", storage=name, **options)
    assert content(reader) == [5, 6, 70, 3, 4]
    with pytest.raises(OSError, match="read"):
        reader.append(TensorDict({"a": torch.tensor([70]), "text": ["new"]}, [1]))
    assert os.getpid() and content(reader) == [5, 6, 70, 3, 4]
