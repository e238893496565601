"""Batches that threads of a buffer read ahead: at the end of a script, and after errors."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import weakref
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch

from tdstore import TensorDict
from tdstore.rl import (
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests import scripts

LATE = """
import atexit, sys, threading, torch
from tdstore import TensorDict
from tdstore.rl import (
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
begun, new = (TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, prefetch=2) for _ in range(2))
for buffer in (begun, new):
    buffer.extend(TensorDict({"a": torch.zeros(10, 3)}, [10]))
begun.sample()
def work():
    if sys.argv[1] == "thread":
        threading.main_thread().join()
    for buffer in (begun, new):
        for _ in range(4):
            assert buffer.sample()["a"].shape == (4, 3)
    print("done")
if sys.argv[1] == "thread":
    threading.Thread(target=work).start()
else:
    atexit.register(work)
"""


@pytest.mark.parametrize("where", ["thread", "hook"])
def test_sampling_after_the_main_thread_ended(where: str) -> None:
    done = scripts.run(LATE, where)
    assert (done.status, done.errors, done.output) == (0, "", "done\n")


@pytest.mark.parametrize("fetched", [1, 3])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_dropped_buffer_whose_batches_failed_is_gone_at_once(prefetch: int, fetched: int) -> None:
    """Errors of batches that wait were kept by the buffer, and kept it by their frames until the collector ran."""

    def fail(_: object) -> object:
        raise ValueError("the transform fails")

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, prefetch=prefetch, transform=fail)
    buffer.extend(TensorDict({"a": torch.zeros(10, 3)}, [10]))
    storage = weakref.ref(buffer.storage)
    gc.collect()
    gc.disable()
    try:
        for _ in range(fetched):
            with pytest.raises(ValueError, match="the transform fails"):
                buffer.sample()
        pool = buffer._pool
        del buffer
        assert pool is not None
        pool.shutdown(wait=True)
        assert storage() is None
    finally:
        gc.enable()


def _half_read(prefetch: int = 2) -> ReplayBuffer:
    sampler = SamplerWithoutReplacement()
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=3, prefetch=prefetch)
    buffer.extend(torch.arange(10))
    buffer.sample()
    return buffer


@pytest.mark.parametrize("into", [0, 1, 3])
@pytest.mark.parametrize("way", ["state", "folder", "pickle", "copy"])
def test_a_pass_goes_on_with_the_batches_that_were_prefetched(way: str, into: int, tmp_path: Path) -> None:
    """State dicts left them out, and a buffer that prefetches none never returned them: their rows were skipped."""
    buffer, again = (
        _half_read(),
        ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=3, prefetch=into),
    )
    if way in ("pickle", "copy"):
        again = pickle.loads(pickle.dumps(buffer)) if way == "pickle" else copy.deepcopy(buffer)
        again._prefetch = into
    elif way == "state":
        again.load_state_dict(buffer.state_dict())
    else:
        buffer.dumps(tmp_path / "checkpoint")
        again.loads(tmp_path / "checkpoint")
    left = [buffer.sample().tolist() for _ in range(3)]
    assert [batch.tolist() for batch in again] == left
    assert sorted(torch.cat(list(again)).tolist()) == list(range(10))
    for one in (buffer, again):
        one.close()


def _finish_pass(buffer: ReplayBuffer, queue: Queue[list[int]]) -> None:
    torch.set_num_threads(1)
    queue.put([int(row) for batch in buffer for row in batch])
    buffer.close()


def test_another_process_goes_on_with_the_batches_that_were_prefetched() -> None:
    buffer, spawn = _half_read(), multiprocessing.get_context("spawn")
    queue: Queue[list[int]] = spawn.Queue()
    process = spawn.Process(target=_finish_pass, args=(buffer, queue))
    process.start()
    assert queue.get(timeout=120) == [int(row) for batch in buffer for row in batch]
    process.join()
    buffer.close()


def test_a_state_dict_aliases_no_prefetched_batch() -> None:
    buffer, again = _half_read(), _half_read(0)
    state = buffer.state_dict()
    expected = [batch.tolist() for batch, _, _ in state["_prefetched"]]
    buffer.sample().zero_()
    again.load_state_dict(state)
    again.sample().zero_()
    assert [batch.tolist() for batch, _, _ in state["_prefetched"]] == expected
    buffer.close()


def test_a_checkpoint_leaves_out_prefetched_batches_that_failed(tmp_path: Path) -> None:
    """A failing transform made the rows impossible to save."""
    calls = []

    def fail_later(batch: torch.Tensor) -> torch.Tensor:
        calls.append(batch)
        if len(calls) > 1:
            raise ValueError("the transform fails")
        return batch

    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=3, prefetch=1, transform=fail_later)
    buffer.extend(torch.arange(10))
    buffer.sample()
    assert buffer.state_dict()["_prefetched"] == []
    buffer.dumps(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="the transform fails"):
        buffer.sample()
    buffer.close()


def test_prefetched_batches_of_a_malformed_state_change_nothing() -> None:
    buffer = _half_read(0)
    state = {**buffer.state_dict(), "_prefetched": [5]}
    with pytest.raises(KeyError, match="_prefetched"):
        buffer.load_state_dict(state)
    assert len(buffer) == 10
    assert len(torch.cat(list(buffer))) == 7


def test_an_ensemble_goes_on_with_the_batches_that_were_prefetched() -> None:
    def made() -> ReplayBufferEnsemble:
        members = [
            TensorDictReplayBuffer(storage=LazyTensorStorage(6), sampler=SamplerWithoutReplacement()) for _ in range(2)
        ]
        return ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=4, prefetch=2)

    ensemble, again = made(), made()
    for member in ensemble.members:
        member.extend(TensorDict({"a": torch.arange(6)}, [6]))
    ensemble.sample()
    again.load_state_dict(ensemble.state_dict())
    for _ in range(2):
        assert again.sample()["a"].tolist() == ensemble.sample()["a"].tolist()
    for one in (ensemble, again):
        one.close()
