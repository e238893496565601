"""What agents of language models record: steps with messages and tokens, and trajectories of them."""

from .step import Step
from .trajectory import Trajectory

__all__ = ["Step", "Trajectory"]
