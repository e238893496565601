"""Keys as users give them, and the paths that they are."""

from __future__ import annotations

from typing import Any

from tdstore.keys import unravel
from tdstore.types import NestedKey, Path


def is_key(index: Any) -> bool:
    """Whether a subscript is a key (a string, or a nested tuple of strings) and not a batch index."""
    kind = type(index)
    if kind is tuple:
        return bool(index) and all(map(is_key, index))
    return kind is str or isinstance(index, str)


def entry_path(key: NestedKey) -> Path:
    """The path of an entry: as `unravel`, but an empty tuple, which names none, is a `TypeError`."""
    path = unravel(key)
    if not path:
        raise TypeError(f"a key is a string or a (nested) tuple of strings; {key!r} names no entry")
    return path
