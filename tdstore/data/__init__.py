"""Datasets and epochs for training: rows of a container in an order that resumes exactly."""

from .dataset import TensorDictDataset
from .epochs import Epochs
from .mixture import Mixture
from .quality import ShuffleQuality, measure_shuffle

__all__ = ["Epochs", "Mixture", "ShuffleQuality", "TensorDictDataset", "measure_shuffle"]
