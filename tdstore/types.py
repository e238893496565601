"""Small value types of every layer: paths, leaf specs, reads and writes."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import EllipsisType
from typing import IO, TYPE_CHECKING, Any, Literal, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from tdstore.dtypes import DTYPE_TO_NAME, as_dtype, dtype_name
from tdstore.errors import InvalidArgumentError

Path = tuple[str, ...]
"""A leaf's or group's place: `("next", "obs")`; `()` is the root."""


def is_key(index: Any) -> bool:
    """Check whether a subscript is a key (a string, or a nested tuple of strings) and not a batch index."""
    kind = type(index)
    if kind is tuple:
        return len(index) > 0 and all(map(is_key, index))  # torch 2.11 traces no `bool` of a tuple
    return kind is str or isinstance(index, str)


if TYPE_CHECKING:
    NestedKey = str | tuple[Any, ...]
else:

    class _KeyType(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return is_key(instance)

    class NestedKey(metaclass=_KeyType):
        """A key as users write it: a string or a (nested) tuple of strings, as `isinstance(key, NestedKey)` checks."""


Entry = Any
"""An entry as `td[key]` returns it: a tensor, a nested TensorDict, or a value that is not a tensor. Which of these it
is depends on the key and is not known to type checkers: annotate the name that it is assigned to,
`obs: Tensor = td["obs"]`."""

IndexTerm = SupportsIndex | slice | EllipsisType | None | Tensor | np.ndarray[Any, Any] | Sequence[Any]
"""One term of an index into the batch: an int, a slice, `...`, None, a mask, or row numbers in any sequence."""

IndexType = IndexTerm | tuple[IndexTerm, ...]
"""An index into the batch, as `td[index]` takes it."""

SizeLike = int | Sequence[int]
"""A batch size as callers write it: `torch.Size`, a sequence of ints, or one int."""

Number = int | float | complex
"""A number of Python."""

DimLike = int | str
"""A batch dimension as callers write it: its position, or its name."""

DimsLike = DimLike | Sequence[DimLike]
"""One batch dimension or several, as reductions take them. `"feature"` means the dimensions behind the batch."""

FileLike = str | os.PathLike[str] | IO[str] | IO[bytes]
"""A file as callers name it: by its path, or open."""

DeviceLike = str | int | torch.device
"""A device as callers write it: `"cuda:0"`, the index of an accelerator, or a `torch.device`."""

Names = tuple[str | None, ...] | None
"""Batch dimension names; None when no dimension has one."""

NamesLike = Sequence[str | None] | None
"""Names of the batch dimensions as callers write them; None for a dimension that has none."""

StoreIndex = tuple["slice | Tensor", ...]
"""What reaches a store, one term per leading dimension (missing ones are full).

A `slice` has `0 <= start <= stop <= dim` and `step >= 1`, all given. At most one term is a
1-D int64 CPU tensor of rows in `[0, dim)`, in any order, duplicates allowed.
"""

Mode = Literal["r", "r+", "w", "x", "a"]
MAX_TEXT = 1 << 16
"""Characters of the message of a version, or of a tag."""
MODES: tuple[Mode, ...] = ("r", "r+", "w", "x", "a")

Durable = Literal["none", "commit"]
"""`durable=` of openers: "commit" waits for the storage before it publishes, and so survives a power cut."""

Verify = Literal["none", "size", "full"]
"""`verify=` of openers: which bytes are compared with their checksums."""

Recover = Literal["accept"]
"""`recover=` of openers: "accept" accepts leaves as a killed writer left them."""


class LeafSpec:
    """A leaf's shape and dtype, its fill value, and layout options for the backend.

    Args:
        shape: shape of the leaf. In a schema, the shape *without* the batch size.
        dtype: a `torch.dtype`, a numpy dtype, or a name such as `"bfloat16"`.
        fill_value: what a new leaf holds before anything is written.
        **options: passed to the backend as they are (`chunks=`, `compression=`, ...); a
            backend that does not know one refuses it.

    Example:
        >>> LeafSpec((84, 84, 3), "uint8", chunks=(16, 84, 84, 3)).nbytes
        21168
    """

    __slots__ = ("dtype", "fill_value", "nbytes", "options", "shape")

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill_value: Any
    options: Mapping[str, Any]
    nbytes: int
    """Size in bytes of the leaf in memory."""

    def __init__(self, shape: Iterable[int], dtype: object, *, fill_value: Any = 0, **options: Any) -> None:
        self.shape = tuple(shape) if type(shape) is torch.Size else tuple(map(operator.index, shape))
        if self.shape and min(self.shape) < 0:
            raise InvalidArgumentError(f"a leaf cannot have a negative dimension: {self.shape}")
        self.dtype = dtype = dtype if type(dtype) is torch.dtype and dtype in DTYPE_TO_NAME else as_dtype(dtype)
        self.fill_value = fill_value
        self.options = options
        self.nbytes = math.prod(self.shape) * dtype.itemsize  # stores ask for it several times per read

    @classmethod
    def of_checked(cls, shape: tuple[int, ...], dtype: torch.dtype, fill_value: Any, nbytes: int) -> LeafSpec:
        """Return the spec of a leaf that was checked before, without checking its shape and dtype again."""
        spec = cls.__new__(cls)
        spec.shape, spec.dtype, spec.fill_value, spec.options, spec.nbytes = shape, dtype, fill_value, {}, nbytes
        return spec

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def replace(self, **changes: Any) -> LeafSpec:
        """Return a copy with `shape`, `dtype`, `fill_value` or options changed."""
        merged = {"shape": self.shape, "dtype": self.dtype, "fill_value": self.fill_value, **self.options, **changes}
        return LeafSpec(**merged)

    def __eq__(self, other: object) -> bool:
        # Equal when an array of one can stand for an array of the other: layout options do not count.
        return isinstance(other, LeafSpec) and self.shape == other.shape and self.dtype == other.dtype

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        for name, value in state[1].items():
            setattr(self, name, value)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize  # which older pickles do not have

    def __repr__(self) -> str:
        usual = self.fill_value == 0 and str(self.fill_value) != "-0.0"
        shown = dict(self.options) if usual else {"fill_value": self.fill_value, **self.options}
        extra = "".join(f", {k}={v!r}" for k, v in shown.items())
        return f"LeafSpec({self.shape}, {dtype_name(self.dtype)!r}{extra})"


@dataclass(frozen=True, slots=True)
class Read:
    """Ask for `leaf[index]`, in memory of its own or in `out` (same shape and dtype, any strides, CPU)."""

    path: Path
    index: StoreIndex = ()
    out: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """Put `value` (exactly the shape and dtype of `leaf[index]`, CPU unless the store says otherwise) at `index`."""

    path: Path
    index: StoreIndex
    value: Tensor


@dataclass(frozen=True, slots=True)
class Fault:
    """One leaf whose bytes are not those that were committed."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a dataset: a state of it that later commits leave as it is."""

    id: str
    """Its name, which the backend chose."""
    time: datetime
    """When it was made, in UTC."""
    message: str
    tags: tuple[str, ...] = ()
    rows: int | None = None
    """Length of the first batch dimension; None without one."""
    new_bytes: int | None = None
    """Bytes that the storage took for it beyond what earlier versions have; None where that is unknown."""


def path_text(path: Path) -> str:
    """Format a path for messages: `'next' / 'obs'`, unambiguous whatever the keys hold."""
    return " / ".join(map(repr, path)) if path else "the root"
