"""Equality of two values that are not tensors, which may hold some; pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor


def equal(a: Any, b: Any) -> bool:
    """Check whether two values are of one type and equal as a whole."""
    return type(a) is type(b) and alike(a, b)


def alike(a: Any, b: Any) -> bool:
    """Check whether two values of any types are equal; incomparable values are equal if identical."""
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return a is b or _alike_by_part(a, b)


def _alike_by_part(a: Any, b: Any) -> bool:
    """Compare tensors, arrays, and what has them as items."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (Tensor, np.ndarray)):
        return a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return False
