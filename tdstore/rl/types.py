"""Types of the arguments of storages, samplers, writers and buffers: what editors show of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tdstore import TensorDictBase
from tdstore.hookspecs import Backend
from tdstore.types import NestedKey

Rows: TypeAlias = "TensorDictBase | Tensor | npt.NDArray[Any] | Mapping[Any, Any] | Sequence[Any]"
"""Rows along the first dimension: a TensorDict, a tensor or array, a dict or tuple of these, or a list of rows."""

RowIndex: TypeAlias = "int | slice | range | Sequence[Any] | Tensor | npt.NDArray[Any] | tuple[Any, ...]"
"""Which rows: one, some of them, or indices for each of several dimensions of slots."""

Priorities: TypeAlias = "float | Sequence[float] | Tensor | npt.NDArray[Any]"
"""One priority for all rows, or one for each."""

MarksLike: TypeAlias = "Tensor | npt.NDArray[Any] | Sequence[int]"
"""A number or a bool for each row: that of its trajectory, or whether it is the last of one."""

Keys: TypeAlias = "NestedKey | Sequence[NestedKey]"
"""One key, or a list of keys."""

BackendLike: TypeAlias = "str | Backend"
"""A backend, or the name of one."""

PathLike: TypeAlias = "str | os.PathLike[str]"
"""A path or a URL."""

Numbers: TypeAlias = "float | Sequence[Any] | Tensor | np.number[Any] | npt.NDArray[Any]"
"""A number, or an array of them: of one environment, or of several."""

Transform: TypeAlias = "Callable[[Any], Any]"
"""A function of a batch: one of rows, or of torchrl."""


class StorageLike(Protocol):
    """What a buffer needs of a storage, as those of torchrl have it too."""

    def set(self, cursor: Any, data: Any) -> None:
        """Write rows."""

    def get(self, index: Any) -> object:
        """Read rows."""

    def __len__(self) -> int:
        """Return the number of rows."""


class SamplerLike(Protocol):
    """What a buffer needs of a sampler, as those of torchrl have it too."""

    def sample(self, storage: Any, batch_size: int) -> object:
        """Choose slots."""


class WriterLike(Protocol):
    """What a buffer needs of a writer, as those of torchrl have it too."""

    def add(self, data: Any) -> object:
        """Write a row."""

    def extend(self, data: Any) -> object:
        """Write rows."""

    def register_storage(self, storage: Any) -> None:
        """Set the storage to write to."""


StoragePart: TypeAlias = StorageLike | Callable[[], StorageLike]
"""A storage, or a function that makes one."""

SamplerPart: TypeAlias = SamplerLike | Callable[[], SamplerLike]
"""A sampler, or a function that makes one."""

WriterPart: TypeAlias = WriterLike | Callable[[], WriterLike]
"""A writer, or a function that makes one."""
