"""Batch sizes of the operands of arithmetic and comparisons: as tensors do, TensorDicts broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdstore.container.core import Container
from tdstore.errors import BatchSizeError


def uneven(td: Container, operands: Sequence[Any]) -> bool:
    """Whether an operand is a TensorDict of another batch size."""
    batch = td.batch_size
    return any(isinstance(o, Container) and o.batch_size != batch for o in operands)


def widened(td: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]] | None:
    """A TensorDict and its operands, expanded to the batch size of the result.

    Returns None where that is the batch size of `td`, or where there is none: then the leaves say what does not fit.
    """
    try:
        wide = torch.broadcast_shapes(td.batch_size, *[o.batch_size for o in operands if isinstance(o, Container)])
    except RuntimeError:
        return None
    if wide == td.batch_size:
        return None
    return td.expand(wide), [o.expand(wide) if isinstance(o, Container) else o for o in operands]


def check_leaves(results: Sequence[Tensor], batch_size: torch.Size) -> None:
    """Refuse results that do not start with the batch size of their TensorDict.

    Raises:
        BatchSizeError: a leaf of an operand is larger than its place in the result.
    """
    for leaf in results:
        if leaf.shape[: len(batch_size)] != batch_size:
            raise BatchSizeError(
                f"a result of shape {list(leaf.shape)} does not start with the batch size {list(batch_size)}",
                hint="give both TensorDicts the batch size of the result",
            )
