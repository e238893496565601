"""Reinforcement learning on the containers: storages of rows, replay buffers, search trees, transitions, scores.

`storages` are tables of a fixed capacity in any backend, `buffers` are replay buffers over them with their
writers and samplers, `trees` are search trees, `transitions` are what agents record, `agents` has steps and
trajectories of agents of language models, `scores` are how their answers are judged. `import tdstore` does not import
this package. The `ReplayBuffer` and the `PrioritizedReplayBuffer` of this module are those of `buffers`; `transitions`
has others of the same names.
"""

from tdstore.rl.agents import Step, Trajectory
from tdstore.rl.buffers import (
    ConsumingSampler,
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
from tdstore.rl.scores import IFEvalScoreData, accuracies, default_reward, score_from_checks, verify
from tdstore.rl.storages import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    TensorStorage,
    torchrl_storage,
)
from tdstore.rl.transitions import (
    MultiAgentTransition,
    MultiStepReplayBuffer,
    ReplayDataset,
    RolloutBuffer,
    Transition,
    create_dataloader,
    to_tensordict,
    to_torch_tensor,
    transition_to_tensordict,
)
from tdstore.rl.trees import MCTSForest, PUCTScore, Tree, UCBScore

__all__ = [
    "ConsumingSampler",
    "IFEvalScoreData",
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyStorage",
    "LazyTensorStorage",
    "ListStorage",
    "MCTSForest",
    "MultiAgentTransition",
    "MultiStepReplayBuffer",
    "PUCTScore",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReplayBuffer",
    "ReplayDataset",
    "RolloutBuffer",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Step",
    "Storage",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Trajectory",
    "Transition",
    "Tree",
    "UCBScore",
    "Writer",
    "accuracies",
    "create_dataloader",
    "default_reward",
    "score_from_checks",
    "to_tensordict",
    "to_torch_tensor",
    "torchrl_storage",
    "transition_to_tensordict",
    "verify",
]
