"""Results that go into a TensorDict that is there, in blocks of rows: what is large never lies in memory whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tdstore.arguments import as_operand
from tdstore.container.core.container import GROUP, LEAF, Container
from tdstore.io.blocks import row_ranges
from tdstore.types import Path


def into(td: Any, out: Any, run: Callable[[Any, slice], Any], *, exact: bool = False) -> bool:
    """Write `run(rows of td, which rows)` into the same rows of `out`, a block at a time; values at the end.

    False, with nothing done, where all fits in one block, or `out` has not all entries in these shapes.

    Args:
        exact: nor where results of the first block have other dtypes than the entries of `out`.
    """
    batch = td.batch_size
    if not batch or out.batch_size != batch or not batch[0] or -1 in batch:
        return False
    mine = dict(leaf_forms(td))
    there = dict(leaf_forms(out))
    if any(-1 in shape or path not in there or there[path][0] != shape for path, (shape, _) in mine.items()):
        return False
    row = sum(prod(shape[1:]) * dtype.itemsize for shape, dtype in mine.values())
    blocks = list(row_ranges(batch[0], row))
    if len(blocks) < 2:
        return False
    for start, stop in blocks:
        rows = slice(start, stop)
        made = run(td._at(rows), rows)
        if exact and not start and made is not None and _others(made, there):
            return False
        if made is not None:
            out._at(rows).update_(made, keys_to_update=list(mine))
    values = td._resident_class._new({}, batch, None, None)
    for key, value in td.non_tensor_items(True):
        values.set(key, value)
    if not values.is_empty():
        out.update(values, inplace=True)
    return True


def _others(made: Any, there: dict[Path, tuple[torch.Size, torch.dtype]]) -> bool:
    """Return whether results have other dtypes than the entries that they would be written into."""
    return any(dtype != there.get(path, (None, dtype))[1] for path, (_, dtype) in leaf_forms(made))


T = TypeVar("T")


def rows_of(operand: T, rows: slice, batch: torch.Size) -> T:
    """Return the part of an operand that belongs to some rows of a batch."""
    part: Any = as_operand(operand) if isinstance(operand, np.ndarray) else operand
    if isinstance(part, Container):
        part = part._at(rows)
    elif isinstance(part, Tensor) and part.ndim:
        part = part.expand(batch)[rows]
    found: T = part
    return found


def leaf_forms(node: Any, path: Path = ()) -> Iterator[tuple[Path, tuple[torch.Size, torch.dtype]]]:
    """Yield the path, shape and dtype of each leaf below a container; no leaf is read."""
    for key in node._first_keys():
        kind = node._kind(key)
        if kind == GROUP:
            yield from leaf_forms(node._raw(key), (*path, key))
        elif kind == LEAF:
            shape, _, dtype, *_ = node._leaf_facts(key)
            yield (*path, key), (shape, dtype)
