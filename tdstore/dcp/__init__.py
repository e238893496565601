"""Checkpoints of `torch.distributed.checkpoint` in any place that tdstore writes, without pickle."""

from .reader import StorageReader
from .writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
