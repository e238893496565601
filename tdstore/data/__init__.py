"""Datasets and epochs for training: rows of a container in an order that resumes exactly."""

from .dataset import TensorDictDataset
from .epochs import Epochs
from .images import DecodeImages, encode_images
from .mixture import Mixture
from .quality import ShuffleQuality, measure_shuffle

__all__ = [
    "DecodeImages",
    "Epochs",
    "Mixture",
    "ShuffleQuality",
    "TensorDictDataset",
    "encode_images",
    "measure_shuffle",
]
