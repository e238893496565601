"""Datasets and epochs for training: rows of a container in an order that resumes exactly."""

from .dataset import TensorDictDataset
from .epochs import Epochs
from .mixture import Mixture

__all__ = ["Epochs", "Mixture", "TensorDictDataset"]
