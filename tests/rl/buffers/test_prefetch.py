"""Batches that threads of a buffer read ahead: at the end of a script, and after errors."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tdstore import TensorDict
from tdstore.rl import LazyTensorStorage, TensorDictReplayBuffer
from tests import scripts

LATE = """
import atexit, sys, threading, torch
from tdstore import TensorDict
from tdstore.rl import LazyTensorStorage, TensorDictReplayBuffer
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
