"""Several replay buffers that are sampled as one, and the tuples of their parts."""

from tdstore.rl.buffers.ensembles.buffer import ReplayBufferEnsemble
from tdstore.rl.buffers.ensembles.parts import SamplerEnsemble, StorageEnsemble, WriterEnsemble

__all__ = ["ReplayBufferEnsemble", "SamplerEnsemble", "StorageEnsemble", "WriterEnsemble"]
