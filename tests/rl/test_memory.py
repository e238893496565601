"""How much memory buffers take: one batch for a sample, and nothing for rows in files."""

from __future__ import annotations

import subprocess
import tracemalloc

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


LIMITED = """
import resource, sys, torch
from tdstore import TensorDict
from tdstore.rl import {storage}, TensorDictReplayBuffer

torch.set_num_threads(1)
rb = TensorDictReplayBuffer(storage={storage}({rows}{more}), batch_size=32)
rb.extend(TensorDict({{"pixels": torch.zeros(8, 1024, 128, dtype=torch.uint8), "step": torch.arange(8)}}, [8]))
rb.sample()
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
limit = used + (32 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    hoard = [bytearray(8 << 20) for _ in range(12)]
except MemoryError:
    hoard = []
    print("limited")
for first in range(8, {rows}, 8):
    pixels = torch.full((8, 1024, 128), first % 251, dtype=torch.uint8)
    rb.extend(TensorDict({{"pixels": pixels, "step": torch.arange(first, first + 8)}}, [8]))
for _ in range(20):
    batch = rb.sample()
    first = batch["step"] // 8 * 8
    assert (batch["pixels"][:, 0, 0] == first % 251).all()
print("rows", len(rb), sum(1 for _ in rb.storage[:]["step"]))
"""


def test_a_buffer_in_files_may_be_ten_times_the_memory_limit(tmp_path):
    rows = 10 * 32 * 8  # of 128 KiB: 320 MiB
    code = LIMITED.format(storage="LazyMemmapStorage", rows=rows, more=f", scratch_dir={str(tmp_path / 'rows')!r}")
    done = subprocess.run([*warm.python(), "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["limited", f"rows {rows} {rows}"]
