"""Checkpoints of prioritized buffers that were written when the priorities lay in a binary tree."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tdstore import TensorDict
from tdstore.rl import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer

ARCHIVE = Path(__file__).parents[2] / "data" / "replay-tree-8180139.zip"
"""40 rows of 50 slots, by commit 8180139: `a` counts from 0, rows 0 to 29 have the priorities 1 to 30, the others 1."""


@pytest.fixture
def checkpoint(tmp_path):
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("storage", ["memory", "memmap"])
def test_rows_and_priorities_are_those_of_the_checkpoint(storage, checkpoint, tmp_path):
    rows = LazyTensorStorage(50) if storage == "memory" else LazyMemmapStorage(50, scratch_dir=tmp_path / "rows")
    sampler = PrioritizedSampler(50, 0.9, 0.9)
    buffer = TensorDictReplayBuffer(storage=rows, sampler=sampler, batch_size=400)
    buffer.loads(checkpoint)
    assert len(buffer) == 40 and buffer.write_count == 40
    assert buffer["a"].tolist() == list(range(40))
    assert (sampler.alpha, sampler.beta, sampler.default_priority) == (0.6, 0.4, 30.0)
    weights = np.concatenate([np.arange(1, 31), np.ones(10)]) ** 0.6
    assert np.allclose(sampler.priorities(40), weights / weights.sum())
    sample, info = buffer.sample(return_info=True)
    expected = torch.from_numpy(weights**-0.4)[sample["a"]]
    assert torch.allclose(info["priority_weight"].double(), expected, rtol=1e-5)
    assert buffer.extend(TensorDict({"a": torch.arange(40, 43)}, [3])).tolist() == [40, 41, 42]
