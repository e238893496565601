"""Columns of a table, and values that fit them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import tdstore
from tdstore.dtypes import dtype_name
from tdstore.errors import BatchSizeError, InvalidTypeError
from tdstore.rl.kinds import is_container
from tdstore.types import Path, path_text


@dataclass(frozen=True, slots=True)
class Column:
    """One tensor of the rows: its name, and the shape and dtype of one row of it."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: bool = False
    """Whether rows are values that are not tensors, as bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def wider(self, width: int) -> Column:
        """Return the same column for values of up to `width` bytes."""
        return replace(self, shape=(*self.shape[:-1], width))


def as_dense(value: Any, column: Column) -> Tensor:
    """Return the value of an entry as a tensor whose rows can be copied into a column of tensors.

    Raises:
        TypeError: it is neither a number, nor an array, nor a dense tensor with data.
    """
    where, held = path_text(column.path) if column.path else "the data", dtype_name(column.dtype)
    if not isinstance(value, Tensor):
        if tdstore.is_non_tensor(value) or is_container(value) or isinstance(value, (str, bytes, Mapping)):
            raise InvalidTypeError(
                f"{where} is a {type(value).__name__}, and the storage holds tensors of {held} there"
            )
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidTypeError(f"{where} cannot be made a tensor of {held}: {error}") from error
    if value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise InvalidTypeError(
            f"{where} is a {kind} tensor, and the rows of a storage are dense", hint="pass value.to_dense()"
        )
    if value.is_meta:
        raise InvalidTypeError(f"{where} is a meta tensor, which has no data to store")
    return value


def fit_value(value: Any, column: Column, shape: tuple[int, ...], *, lenient: bool) -> Tensor:
    """Return the value of an entry as a tensor that a column accepts.

    Raises:
        TypeError: it is not a dense tensor, or its dtype does not fit. RuntimeError: it has another shape.
    """
    received = fit_dtype(as_dense(value, column), column, lenient=lenient)
    if received.shape != shape:
        raise BatchSizeError(
            f"{path_text(column.path)} has shape {list(received.shape)}, and the storage takes {list(shape)}",
            hint="a list is a batch of separate items; rows are along the first dimension",
        )
    return received


def fit_dtype(value: Tensor, column: Column, *, lenient: bool) -> Tensor:
    """Return a tensor in the dtype of a column, which cuts values only if it is lenient."""
    if value.dtype is column.dtype:
        return value
    if lenient or torch.promote_types(value.dtype, column.dtype) == column.dtype:
        return value.to(column.dtype)
    raise InvalidTypeError(
        f"{path_text(column.path)} is {dtype_name(value.dtype)}, and the storage holds {dtype_name(column.dtype)}: "
        "values would be cut"
    )


class Block(Sequence[Any]):
    """Values of all columns, each a dense tensor of the CPU of the very dtype and shape: bytes that can be copied.

    Args:
        values: the tensors.
        addresses: the address of the first row of each.
        rows: those of the tensors that the block has; None: all.
    """

    __slots__ = ("_rows", "_values", "addresses")

    def __init__(self, values: Sequence[Any], addresses: list[int], rows: tuple[int, int] | None = None) -> None:
        self._values, self.addresses, self._rows = values, addresses, rows

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self._values)

    def __getitem__(self, number: Any) -> Any:
        """Return the tensor of a column."""
        value = self._values[number]
        return value if self._rows is None else value[self._rows[0] : self._rows[1]]

    def cut(self, start: int, stop: int, sizes: Iterable[int]) -> Block:
        """Return some of the rows of a whole block, whose rows have these sizes in bytes; no tensor is made."""
        addresses = [address + start * size for address, size in zip(self.addresses, sizes, strict=True)]
        return Block(self._values, addresses, (start, stop))
