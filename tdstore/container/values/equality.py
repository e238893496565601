"""Equality of two values that are not tensors; pure."""

from __future__ import annotations

from typing import Any


def equal(a: Any, b: Any) -> bool:
    """Check whether two values are of one type and equal as a whole."""
    return type(a) is type(b) and alike(a, b)


def alike(a: Any, b: Any) -> bool:
    """Check whether two values of any types are equal; incomparable values are equal if identical."""
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return a is b
