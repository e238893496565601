"""Writes into many leaves that Ctrl-C does not divide: what comes between two leaves is raised after the last one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tdstore.container.values.elements import PutPlan
from tdstore.container.values.nontensor import NonTensor, NonTensorStack
from tdstore.index.rows import for_index_copy, put_rows
from tdstore.threads import complete, without_interrupts

TensorPairs = Sequence[tuple[Tensor, Tensor]]
ValuePairs = Sequence[tuple[NonTensorStack, NonTensor]]


def assign_at(index: Any, pairs: TensorPairs, values: ValuePairs = ()) -> None:
    """Write tensors, and values in memory, at an int or a slice, or at checked rows of the first dimension."""
    ready = for_index_copy(pairs, index) if type(index) is Tensor else pairs
    if ready is None:
        _put_all(index, pairs, values)
    elif values:
        complete(_write_each, iter(ready), (index, [stack.put_plan(index, part) for stack, part in values]))
    else:
        complete(_copy_rows if type(index) is Tensor else _assign_each, iter(ready), index)


def copy_each(pairs: TensorPairs) -> None:
    """Copy tensors into others of their shapes, so that gradients flow to what is copied."""
    complete(_copy_whole, iter(pairs), None)


def fill_at(terms: Any, leaves: Iterable[Tensor], value: float) -> None:
    """Write a number at an index of views."""
    complete(_fill_each, iter(leaves), (terms, value))


def fill_masked(pairs: TensorPairs, value: float) -> None:
    """Write a number into leaves where the mask of each is true."""
    complete(_fill_masked, iter(pairs), value)


def fill_rows(pairs: TensorPairs, value: float) -> None:
    """Write a number into leaves at the rows for each."""
    complete(_fill_rows, iter(pairs), value)


@without_interrupts
def _put_all(rows: Tensor, pairs: TensorPairs, values: ValuePairs) -> None:
    by_device: dict[torch.device, tuple[Tensor, Tensor | None]] = {}
    for mine, theirs in pairs:
        put_rows(mine, rows, theirs, by_device)
    for stack, part in values:
        stack.put(rows, part)


def _copy_whole(pairs: Iterator[tuple[Tensor, Tensor]], _: None) -> None:
    for mine, theirs in pairs:
        mine.copy_(theirs)


def _assign_each(pairs: Iterator[tuple[Tensor, Tensor]], index: Any) -> None:
    for mine, theirs in pairs:
        mine[index] = theirs


def _copy_rows(pairs: Iterator[tuple[Tensor, Tensor]], rows: Tensor) -> None:
    for mine, theirs in pairs:
        mine.index_copy_(0, rows, theirs)


def _write_each(pairs: Iterator[tuple[Tensor, Tensor]], rest: tuple[Any, list[PutPlan]]) -> None:
    index, columns = rest
    (_copy_rows if type(index) is Tensor else _assign_each)(pairs, index)
    for values, placed in columns:
        for place, value in placed:
            values[place] = value


def _fill_each(leaves: Iterator[Tensor], at: tuple[Any, float]) -> None:
    terms, value = at
    for leaf in leaves:
        leaf[terms] = value


def _fill_masked(pairs: Iterator[tuple[Tensor, Tensor]], value: float) -> None:
    for leaf, mask in pairs:
        leaf.masked_fill_(mask, value)


def _fill_rows(pairs: Iterator[tuple[Tensor, Tensor]], value: float) -> None:
    for leaf, rows in pairs:
        leaf.index_fill_(0, rows, value)
