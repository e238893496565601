"""Groups of rows that share the value of an entry."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from tdstore.container.core.container import VALUE, Container
from tdstore.container.core.paths import entry_path
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.values.nontensor import NonTensor, NonTensorData
from tdstore.errors import BatchSizeError, InvalidTypeError, KeyNotFoundError, UnsupportedError
from tdstore.ops.base import check_container
from tdstore.types import NestedKey, Path, path_text

T = TypeVar("T")


def group_by(tensordict: T, key: NestedKey) -> tuple[Tensor | list[Any], tuple[T, ...]]:
    """Split rows along the first batch dimension into groups that share the value of an entry.

    The rows are gathered once, and each group is a part of them: of a stored TensorDict they are read once. Rows keep
    their order in a group. Where an entry has several values in each row, all of them are compared.

    Args:
        tensordict: a TensorDict of any kind, or a tensorclass.
        key: a tensor `[rows, ...]`, or an entry of values that can be hashed and sorted, such as strings.

    Returns:
        The sorted values without repetition, a tensor or a list (of tuples, where a row has several), and the groups,
        one for each value.

    Raises:
        BatchSizeError: there are no batch dimensions.
        KeyNotFoundError: there is no such entry.
        InvalidTypeError: the entry is a TensorDict, or has values that cannot be hashed or sorted.
        UnsupportedError: torch cannot sort the tensor: it is complex or a nested tensor, for example; or the entry
            has no value of its own for each row.

    Example:
        >>> td = TensorDict({"run": torch.tensor([2, 0, 2]), "x": torch.tensor([1.0, 2.0, 3.0])}, [3])
        >>> values, groups = group_by(td, "run")
        >>> values, [group["x"] for group in groups]
        (tensor([0, 2]), [tensor([2.]), tensor([1., 3.])])
    """
    check_container(tensordict, "what group_by() takes")
    td: Any = tensordict
    if not td.batch_dims:
        raise BatchSizeError("group_by needs a batch dimension, along which the rows are, and the batch size is []")
    path = entry_path(key)
    column = td.get(path, None)
    _check_column(td, column, path)
    values, groups = _of_tensor(column, path) if isinstance(column, Tensor) else _of_values(column, path, td.shape[0])
    counts = torch.bincount(groups, minlength=len(values))
    if not len(values):
        return values, ()
    rows = td[torch.argsort(groups, stable=True)]
    return values, tuple(rows.split(counts.tolist(), 0))


def _check_column(td: Any, column: object, path: Path) -> None:
    if column is None and path not in td.keys(include_nested=True):
        raise KeyNotFoundError(f"group_by: there is no entry {path_text(path)}", hint=f"there are {sorted(td.keys())}")
    if not isinstance(column, (Tensor, NonTensor)):
        kind = "a TensorDict" if isinstance(column, Container) else type(column).__name__
        raise InvalidTypeError(f"group_by needs tensors or values, and the entry {path_text(path)} is {kind}")
    node = unwrap(td if len(path) == 1 else td.get(path[:-1]))
    if node._kind(path[-1]) == VALUE and node._is_unbatched(path[-1]):
        raise UnsupportedError(f"group_by: the entry {path_text(path)} is one for all rows, and has no value for each")


def _of_tensor(column: Tensor, path: Path) -> tuple[Tensor, Tensor]:
    """Return the values, sorted, and the position of each row's among them."""
    column = column.detach()
    if column.is_nested:
        raise UnsupportedError(f"group_by: the entry {path_text(path)} is a nested tensor, whose rows are not compared")
    if column.ndim > 1 and not column.shape[1:].numel() and len(column):  # rows of no numbers, which are all the same
        return column[:1], torch.zeros(len(column), dtype=torch.int64, device=column.device)
    try:
        values, groups = torch.unique(column, return_inverse=True, dim=0 if column.ndim > 1 else None)
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedError(
            f"group_by: torch cannot sort the entry {path_text(path)}, of {column.dtype}: {error}",
            hint="group by an entry that is derived of it",
        ) from error
    return values, groups


def _of_values(column: NonTensor, path: Path, rows: int) -> tuple[list[Any], Tensor]:
    of_rows = [_hashable(value) for value in _of_rows(column, rows)]
    try:
        values = sorted(set(of_rows))
        number = {value: at for at, value in enumerate(values)}
        groups = [number[value] for value in of_rows]
    except TypeError as error:
        raise InvalidTypeError(
            f"group_by: the values {path_text(path)} cannot be hashed or sorted: {error}",
            hint="group by an entry that is derived of them",
        ) from error
    return values, torch.tensor(groups, dtype=torch.int64, device="cpu")


def _of_rows(column: NonTensor, rows: int) -> list[Any]:
    if not isinstance(column, NonTensorData):
        found: list[Any] = column.tolist()
        return found
    value = column.data
    for size in reversed(column.batch_size[1:]):
        value = [value] * size
    return [value] * rows


def _hashable(value: Any) -> Any:
    """Return the values of a row as nested tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
