"""How much memory buffers take: one batch for a sample, and nothing for rows in files."""

from __future__ import annotations

import gc
import subprocess
import tracemalloc
import warnings
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tdstore import TensorDict
from tdstore.rl import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from tdstore.testing.processes import warm

BATCH, FRAME = 256, 84 * 84


def frames(n):
    return TensorDict({"pixels": torch.zeros(n, 84, 84, dtype=torch.uint8), "action": torch.zeros(n)}, [n])


def allocated(run):
    """Bytes that numpy had at most at once, and all that torch took, while a function ran."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # of torch 2.11
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
            run()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
            assert run() is not None
    tracemalloc.start()
    try:
        held = run()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held is not None
    return peak + sum(max(0, event.self_cpu_memory_usage) for event in made.events())


@pytest.mark.parametrize("place", ["memory", "memmap"])
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_sample_takes_one_batch(tmp_path, place, buffer):
    storage = LazyTensorStorage(1000) if place == "memory" else LazyMemmapStorage(1000, scratch_dir=tmp_path / "rows")
    rb = buffer(storage=storage, batch_size=BATCH)
    rb.extend(frames(1000))
    one = BATCH * FRAME
    assert one <= allocated(rb.sample) < 1.5 * one


def test_a_write_takes_no_copy(tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=tmp_path / "rows"))
    rb.extend(frames(1000))
    block = frames(500)
    assert allocated(lambda: rb.extend(block)) < 0.1 * 500 * FRAME


def test_a_second_batch_is_noticed():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000), batch_size=BATCH, transform=lambda batch: batch.clone()
    )
    rb.extend(frames(1000))
    assert allocated(rb.sample) > 1.9 * BATCH * FRAME


LIMITED = """
import resource, torch
from tdstore import TensorDict
from tdstore.rl import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

torch.set_num_threads(1)

def block(first):
    pixels = torch.full((8, 1024, 1024), first % 251 + 1, dtype=torch.uint8)
    return TensorDict({{"pixels": pixels, "step": torch.arange(first, first + 8)}}, [8])

small = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=8)
small.extend(block(0))
small.sample()
del small
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
limit = used + (64 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    hoard = [bytearray(8 << 20) for _ in range(12)]
except MemoryError:
    hoard = []
    print("limited")
rows = -(-10 * limit // (1 << 20) // 80) * 80
storage = {storage}
rb = TensorDictReplayBuffer(storage=storage(rows), batch_size=8)
for first in range(0, rows, 80):  # the rows between them are zero, and holes of the files
    rb.storage.set(range(first, first + 8), block(first))
rb.extend(block(rows - 72))
rb.storage.set(range(rows - 8, rows), block(rows - 8))
for _ in range(20):
    batch = rb.sample()
    wanted = torch.where(batch["index"] % 80 < 8, batch["index"] // 80 * 80 % 251 + 1, 0)
    for late in (rows - 72, rows - 8):
        wanted[(batch["index"] >= late) & (batch["index"] < late + 8)] = late % 251 + 1
    assert (batch["pixels"][:, 0, -1] == wanted).all(), (batch["index"], batch["pixels"][:, 0, -1])
print(len(rb) == rows, rows * (1 << 20) >= 10 * limit)
"""


def limited(storage):
    command = [*warm.python(), "-c", LIMITED.format(storage=storage)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_buffer_in_files_may_be_ten_times_the_memory_limit(tmp_path):
    done = limited(f"lambda rows: LazyMemmapStorage(rows, scratch_dir={str(tmp_path / 'rows')!r})")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["limited", "True True"]


def test_a_buffer_in_memory_may_not():
    done = limited("LazyTensorStorage")
    assert done.stdout.splitlines() == ["limited"] and "memory" in done.stderr.lower()


@pytest.mark.parametrize("prefetch", [None, 1, 3])
def test_a_buffer_is_freed_after_an_error(prefetch):
    """Its rows would stay in memory until Python looks for cycles."""

    def fail(batch):
        raise ZeroDivisionError("by 0")

    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, prefetch=prefetch, transform=fail)
    rb.extend(TensorDict({"a": torch.zeros(10)}, [10]))
    storage = weakref.ref(rb.storage)
    gc.collect()
    gc.disable()
    try:
        try:
            rb.sample()
        except ZeroDivisionError:
            rb.close()
        else:
            pytest.fail("the transform did not run")
        del rb
        assert storage() is None
    finally:
        gc.enable()
