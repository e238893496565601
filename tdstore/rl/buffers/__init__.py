"""Replay buffers and their parts: writers choose the slots to fill, samplers the slots to read."""

from tdstore.rl.buffers.buffer import ReplayBuffer
from tdstore.rl.buffers.checkpoints import ListStorageCheckpointer, TensorStorageCheckpointer
from tdstore.rl.buffers.ensembles import ReplayBufferEnsemble, SamplerEnsemble, StorageEnsemble, WriterEnsemble
from tdstore.rl.buffers.prioritized import PrioritizedSampler
from tdstore.rl.buffers.samplers import (
    ConsumingSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
)
from tdstore.rl.buffers.segment_tree import SegmentTree
from tdstore.rl.buffers.slices import PrioritizedSliceSampler, SliceSampler, SliceSamplerWithoutReplacement
from tdstore.rl.buffers.tensordicts import (
    HERReplayBuffer,
    HindsightStrategy,
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tdstore.rl.buffers.writers import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)

__all__ = [
    "ConsumingSampler",
    "HERReplayBuffer",
    "HindsightStrategy",
    "ImmutableDatasetWriter",
    "ListStorageCheckpointer",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "RoundRobinWriter",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SegmentTree",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StalenessAwareSampler",
    "StorageEnsemble",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorageCheckpointer",
    "Writer",
    "WriterEnsemble",
]
