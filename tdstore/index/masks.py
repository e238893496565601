"""Masks of several dimensions in an index with other terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdstore.index.tracing import traced

_MISPLACED = torch.__version__ < "2.11"
"""Torch 2.6 misplaces the terms after such a mask, 2.11 does not."""


def masks_as_rows(terms: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace masks of several dimensions by the rows they select, for an older torch; the masks are known to fit."""
    if not _MISPLACED or traced() or not any(map(_is_wide, terms[:-1])):
        return terms
    made: list[Any] = []
    for term in terms:
        made += term.nonzero().unbind(1) if _is_wide(term) else (term,)
    return tuple(made)


def _is_wide(term: Any) -> bool:
    return isinstance(term, Tensor) and term.dtype is torch.bool and term.ndim > 1
