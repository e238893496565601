"""Large chunks of tensors in memory go to processes as shared memory; results are what they are by value."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch

from tdstore import TensorDict
from tdstore.container.distribute import row_tasks


def told(rows):
    leaf = rows["x"]
    leaf += 1  # memory of the worker's own
    rows["new"] = torch.zeros(rows.batch_size)  # an ordinary TensorDict: neither locked nor over a store
    facts = torch.tensor([rows.is_locked, rows.is_shared(), type(leaf) is torch.Tensor])
    return TensorDict({"sum": leaf.sum(1), "facts": facts.expand(len(rows), 3)}, rows.batch_size)


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


def test_large_chunks_are_shared(processes, monkeypatch):
    sent = []
    cut = row_tasks.near_chunk

    def watched(source, at):
        chunk = cut(source, at)
        sent.append(chunk.at is None)
        return chunk

    monkeypatch.setattr("tdstore.container.distribute.map.near_chunk", watched)
    td = TensorDict({"x": torch.ones(4, 1 << 17), "n": {"y": torch.zeros(4)}}, [4], names=["t"])
    with_values = TensorDict({"x": torch.ones(4, 1 << 17), "s": "hi"}, [4])
    for source, shared in ((td, True), (td[:, None].squeeze(1)[:1], False), (with_values, False)):
        sent.clear()
        rows = source.map(told, executor=processes, chunksize=2)
        assert set(sent) == {shared}
        assert rows["sum"].tolist() == [2.0 * (1 << 17)] * len(source)
        assert rows["facts"].tolist() == [[False, False, True]] * len(source)
        assert source["x"].sum() == source["x"].numel(), "the caller's tensors are not changed"


def test_threads_are_given_the_rows_themselves():
    td = TensorDict({"x": torch.ones(2, 1 << 18)}, [2])
    with ThreadPoolExecutor(1) as executor:
        assert td.map(lambda rows: rows["x"].sum(1), executor=executor).tolist() == [1 << 18] * 2
