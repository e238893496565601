"""Conversion of user-facing keys to paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tdstore.errors import InvalidKeyError, InvalidTypeError
from tdstore.keys import unravel
from tdstore.types import NestedKey, Path, is_key


def entry_path(key: NestedKey) -> Path:
    """Return the path of an entry: as `unravel`, but an empty tuple, which names none, is an `InvalidKeyError`."""
    path = unravel(key)
    if not path:
        raise InvalidKeyError(f"a key is a string or a (nested) tuple of strings; {key!r} names no entry")
    return path


def unravel_key(key: NestedKey) -> str | Path:
    """Flatten a nested key: return a string if it has one part, else a tuple.

    A tuple that is an index, or partly one, is no key and gives an empty tuple.

    Raises:
        InvalidKeyError: neither a string nor a tuple.

    Example:
        >>> unravel_key(("a", ("b", ("c",)))), unravel_key(("a",)), unravel_key((0, slice(3)))
        (('a', 'b', 'c'), 'a', ())
    """
    try:
        path = unravel(key)
    except InvalidKeyError:
        if isinstance(key, tuple):  # torchrl indexes its specs with what this function says is no key
            return ()
        raise
    return path[0] if len(path) == 1 else path


def unravel_key_to_tuple(key: object) -> Path:
    """Flatten a nested key to a tuple of strings; return an empty one for anything that is no key.

    Example:
        >>> unravel_key_to_tuple(("a", ("b",))), unravel_key_to_tuple("a"), unravel_key_to_tuple(1)
        (('a', 'b'), ('a',), ())
    """
    return unravel(key) if is_nested_key(key) else ()  # type: ignore[arg-type]  # it is a key


def unravel_key_list(keys: list[Any] | tuple[Any, ...]) -> list[Any]:
    """Apply `unravel_key` to each key of a list or tuple.

    Raises:
        InvalidTypeError: neither a list nor a tuple, or an element that is no key.
    """
    if not isinstance(keys, (list, tuple)):
        raise InvalidTypeError(f"expected a list or tuple of keys, not {keys!r}")
    return [unravel_key(key) for key in keys]


def is_nested_key(key: object) -> bool:
    """Check whether a value names an entry: a string, or a nested tuple of strings that is not empty."""
    return is_key(key)


def is_seq_of_nested_key(keys: object) -> bool:
    """Check whether a value is a sequence of keys. The empty one is."""
    return isinstance(keys, Sequence) and all(map(is_key, keys))
