"""Recorded experience: steps as tensorclasses, buffers of them, and datasets for a `DataLoader`.

The names and arguments are those that users of AgileRL know. `tdstore.rl.buffers` has the buffers of torchrl.
"""

from __future__ import annotations

from tdstore.rl.transitions.conversion import to_tensordict, to_torch_tensor
from tdstore.rl.transitions.dataset import ReplayDataset, create_dataloader
from tdstore.rl.transitions.multistep import MultiStepReplayBuffer
from tdstore.rl.transitions.prioritized import PrioritizedReplayBuffer
from tdstore.rl.transitions.replay import ReplayBuffer
from tdstore.rl.transitions.rollout import RolloutBuffer
from tdstore.rl.transitions.transition import MultiAgentTransition, Transition, transition_to_tensordict

__all__ = [
    "MultiAgentTransition",
    "MultiStepReplayBuffer",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayDataset",
    "RolloutBuffer",
    "Transition",
    "create_dataloader",
    "to_tensordict",
    "to_torch_tensor",
    "transition_to_tensordict",
]
