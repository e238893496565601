"""Reinforcement learning on the containers: storages of rows, replay buffers, search trees, transitions, scores.

`storages` are tables of a fixed capacity in any backend, `buffers` are replay buffers over them with their
writers and samplers, `trees` are search trees, `transitions` are what agents record, `scores` are how answers of
language models are judged. `import tdstore` does not import this package.
"""

from tdstore.rl.buffers import (
    ImmutableDatasetWriter,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    Writer,
)
from tdstore.rl.storages import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    TensorStorage,
)

__all__ = [
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyStorage",
    "LazyTensorStorage",
    "ListStorage",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Writer",
]
