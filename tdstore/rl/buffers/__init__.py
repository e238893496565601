"""Replay buffers and their parts: writers choose the slots to fill, samplers the slots to read."""

from tdstore.rl.buffers.buffer import ReplayBuffer
from tdstore.rl.buffers.prioritized import PrioritizedSampler
from tdstore.rl.buffers.samplers import ConsumingSampler, RandomSampler, Sampler, SamplerWithoutReplacement
from tdstore.rl.buffers.segment_tree import SegmentTree
from tdstore.rl.buffers.slices import PrioritizedSliceSampler, SliceSampler, SliceSamplerWithoutReplacement
from tdstore.rl.buffers.tensordicts import (
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
    "ImmutableDatasetWriter",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "SegmentTree",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "Writer",
]
