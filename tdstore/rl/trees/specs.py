"""Specifications of environments in a tree: looked up by name, and reduced to shapes and dtypes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tdstore.errors import KeyNotFoundError

GROUPS = {"state": "input_spec", "action": "input_spec"}
"""Where a specification is found; those that are not named here are in `output_spec`."""


def full_spec(specs: Any, kind: str) -> Any:
    """Look up `full_{kind}_spec`, in a mapping, a nested one, or an object with attributes.

    Raises:
        KeyError: the specification is missing.
    """
    if specs is None:
        return None
    group, name = GROUPS.get(kind, "output_spec"), f"full_{kind}_spec"
    for found in _candidates(specs, group, name):
        if found is not None:
            return found
    raise KeyNotFoundError(f"the specs of this tree have no {name!r}, neither in {group!r} nor by itself")


def _candidates(specs: Any, group: str, name: str) -> Iterator[Any]:
    yield _item(specs, (group, name))
    inner = _item(specs, group)
    if inner is not None:
        yield _item(inner, name)
    inner = getattr(specs, group, None)
    if inner is not None:
        yield getattr(inner, name, None)
    yield _item(specs, name)
    yield getattr(specs, name, None)


def _item(specs: Any, key: Any) -> Any:
    if not hasattr(specs, "__getitem__"):
        return None
    try:
        return specs[key]
    except (KeyError, TypeError, IndexError, AttributeError):
        return None


def spec_keys(spec: Any) -> list[tuple[str, ...]]:
    """Return the keys of the leaves of a specification, as paths."""
    return [path for path, _ in _walk(spec, ())]


def _walk(spec: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if _as_pair(spec) is None and hasattr(spec, "items"):
        for key, value in spec.items():
            yield from _walk(value, (*path, *((key,) if isinstance(key, str) else key)))
    else:
        yield path, spec


def _as_pair(spec: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return the shape and dtype of a leaf; None where it lacks one of them."""
    if isinstance(spec, (tuple, list)) and len(spec) == 2:
        shape, dtype = spec
    elif not isinstance(spec, Mapping) and not hasattr(spec, "items"):
        shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
    else:
        return None
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if shape is None or not isinstance(dtype, torch.dtype):
        return None
    try:
        return tuple(int(size) for size in shape), dtype
    except (TypeError, ValueError):
        return None


def reduce_specs(specs: Any) -> list[list[Any]] | None:
    """Reduce specifications to `[path, shape, dtype name]`, their form in a store.

    Specifications without a shape or dtype are dropped, with one warning for all of them.
    """
    if specs is None:
        return None
    leaves, dropped = [], []
    for path, leaf in _walk(specs, ()):
        pair = _as_pair(leaf)
        if pair is not None:
            leaves.append([list(path), list(pair[0]), str(pair[1]).removeprefix("torch.")])
        elif leaf is not None:
            dropped.append("/".join(path) or type(leaf).__name__)
    if dropped:
        warnings.warn(
            f"the specs of a tree are saved as shapes and dtypes; without both, and not saved: {', '.join(dropped)}",
            stacklevel=3,
        )
    return leaves


def restore_specs(leaves: list[list[Any]] | None) -> dict[str, Any] | None:
    """Build nested dicts of `(shape, dtype)` from the result of `reduce_specs`."""
    if leaves is None:
        return None
    made: dict[str, Any] = {}
    for path, shape, dtype in leaves:
        inner = made
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        if path:
            inner[path[-1]] = (tuple(shape), getattr(torch, dtype))
    return made
