"""Storages and samplers that take the place of others in a buffer."""

from __future__ import annotations

import torch

from tdstore import TensorDict
from tdstore.rl import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)


def test_another_storage_takes_the_place_of_the_first():
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.5, beta=0.5, storage=LazyTensorStorage(4))
    buffer.extend(TensorDict(a=torch.arange(4), batch_size=[4]))
    other = LazyTensorStorage(8)
    other.set(range(3), TensorDict(a=torch.arange(3) + 10, batch_size=[3]))
    buffer.set_storage(other)
    assert len(buffer) == 3 and set(buffer.sample(20)["a"].tolist()) == {10, 11, 12}
    buffer.set_storage(lambda: LazyTensorStorage(8))
    assert len(buffer) == 0
    assert buffer.extend(TensorDict(a=torch.arange(2), batch_size=[2])).tolist() == [0, 1]


def test_a_prioritized_sampler_that_is_set_later_knows_the_rows() -> None:
    """It had no priorities, so nothing could be sampled until rows were written."""
    ranked = PrioritizedSampler(4, alpha=1.0, beta=1.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=50)
    buffer.set_sampler(ranked)
    buffer.extend(torch.arange(2))
    buffer.update_priority([0, 1], [1.0, 3.0])
    uniform = buffer.set_sampler(None)
    assert uniform is ranked
    buffer.extend(torch.arange(2))
    buffer.set_sampler(ranked)
    assert [round(p, 6) for p in ranked.priorities(4)] == [0.1, 0.3, 0.3, 0.3]

    buffer.set_sampler(PrioritizedSampler(4, alpha=1.0, beta=1.0))
    assert buffer.can_sample()
    assert buffer.sample().unique().tolist() == [0, 1]

    stored = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    stored.extend(TensorDict({"td_error": torch.tensor([1.0, 3.0])}, [2]))
    fresh = PrioritizedSampler(4, alpha=1.0, beta=1.0)
    stored.set_sampler(fresh)
    assert [round(p, 6) for p in fresh.priorities(2)] == [0.25, 0.75]
