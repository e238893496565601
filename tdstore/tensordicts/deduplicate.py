"""Rows of one entry that occur twice, or in another TensorDict."""

from __future__ import annotations

from typing import Literal, TypeVar, overload

import torch
from torch import Tensor

from tdstore.container.core.paths import entry_path
from tdstore.errors import BatchSizeError, KeyNotFoundError
from tdstore.tensordicts.base import TensorDictBase
from tdstore.types import NestedKey, path_text

T = TypeVar("T", bound=TensorDictBase)


def isin(input: TensorDictBase, reference: TensorDictBase, key: NestedKey, dim: int = 0) -> Tensor:
    """Tell which rows of an entry occur in the same entry of another TensorDict.

    Args:
        input: of batch size `[*b]`.
        reference: with as many batch dimensions.
        key: a tensor of both.
        dim: the batch dimension whose rows are compared.

    Returns:
        A boolean tensor of shape `[input.batch_size[dim]]`.

    Raises:
        KeyError: `key` is no tensor of one of them.
        ValueError: `dim` is no batch dimension, or the numbers of batch dimensions differ.
        RuntimeError: the rows differ in shape.

    Example:
        >>> td = TensorDict({"x": torch.tensor([4, 5, 6])}, [3])
        >>> isin(td, td[1:], "x").tolist()
        [False, True, True]
    """
    rows, others = _tensor(input, key), _tensor(reference, key)
    if input.ndim != reference.ndim:
        raise BatchSizeError(f"both need as many batch dimensions, not {input.ndim} and {reference.ndim}")
    dim = _batch_dim(input, dim)
    together = torch.cat([rows, others], dim)
    _, inverse = torch.unique(together, dim=dim, return_inverse=True)
    return torch.isin(inverse[: rows.shape[dim]], inverse[rows.shape[dim] :])


@overload
def remove_duplicates(input: T, key: NestedKey, dim: int = 0, *, return_indices: Literal[False] = False) -> T: ...
@overload
def remove_duplicates(input: T, key: NestedKey, dim: int = 0, *, return_indices: Literal[True]) -> tuple[T, Tensor]: ...
def remove_duplicates(
    input: T,
    key: NestedKey,
    dim: int = 0,
    *,
    return_indices: bool = False,
) -> T | tuple[T, Tensor]:
    """Keep one of the rows that are equal in one entry, in the sorted order of that entry.

    Args:
        input: of batch size `[*b]`.
        key: the tensor whose rows are compared.
        dim: the batch dimension of the rows.
        return_indices: return too, for each row of `input`, which row of the result is equal to it (int64, shape
            `[input.batch_size[dim]]`).

    Raises:
        KeyError: `key` is no tensor of `input`.
        ValueError: `dim` is no batch dimension.

    Example:
        >>> td = TensorDict({"x": torch.tensor([6, 4, 6]), "n": torch.arange(3)}, [3])
        >>> remove_duplicates(td, "x")["n"].tolist()
        [1, 0]
    """
    values = _tensor(input, key)
    dim = _batch_dim(input, dim)
    unique, inverse = torch.unique(values, dim=dim, return_inverse=True)
    first = torch.full((unique.shape[dim],), values.shape[dim], dtype=inverse.dtype, device=values.device)
    first.scatter_reduce_(0, inverse, torch.arange(values.shape[dim], device=values.device), "amin")
    result: T = input[(slice(None),) * dim + (first,)]
    return (result, inverse) if return_indices else result


def _batch_dim(td: TensorDictBase, dim: int) -> int:
    if not -td.ndim <= dim < td.ndim:
        raise BatchSizeError(f"dimension {dim} is no batch dimension of a batch size of {list(td.batch_size)}")
    return dim % td.ndim


def _tensor(td: TensorDictBase, key: NestedKey) -> Tensor:
    value = td.get(key, None)
    if not isinstance(value, Tensor):
        raise KeyNotFoundError(f"{path_text(entry_path(key))} is no tensor of the TensorDict")
    return value
