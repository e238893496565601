"""Lazy stacks that cases start from, built alike on both sides, and how their results are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .structures import t


def _even(M: Any, i: int) -> Any:
    return M.td({"a": t(3, 2, start=10 * i), "n": {"b": t(3, dtype=torch.int64, start=100 * i)}}, [3])


def _wide(M: Any, i: int) -> Any:
    return M.td({"a": t(3, 2, 2, start=12 * i), "n": {"b": t(3, 2, dtype=torch.int64, start=7 * i)}}, [3, 2])


def _uneven(M: Any, i: int) -> Any:
    """Leaves of other widths, and a key that only one has."""
    entries = {"a": t(3, 2 + i, start=10 * i), "n": {"b": t(3, 1 + i, dtype=torch.int64)}}
    return M.td({**entries, "x": t(3)} if i == 1 else entries, [3])


def _ragged(M: Any, i: int) -> Any:
    """Batch sizes differ."""
    return M.td({"a": t(2 + i, start=10 * i), "n": {"b": t(2 + i, 2, dtype=torch.int64)}}, [2 + i])


def _named(M: Any, i: int) -> Any:
    return M.td({"a": t(3, start=5 * i), "n": {"b": t(3, 2, start=9 * i)}}, [3], names=["time"])


def _text(M: Any, i: int) -> Any:
    return M.td({"a": t(3, start=5 * i), "s": f"text {i}", "same": "alike"}, [3])


def _on_cpu(M: Any, i: int) -> Any:
    return M.td({"a": t(3, start=5 * i), "n": {"b": t(3)}}, [3], device="cpu")


def _bare(M: Any, i: int) -> Any:
    return M.td({"a": t(2, start=5 * i), "n": {"b": t(start=i)}}, [])


def _inner(M: Any, i: int) -> Any:
    """Elements with a lazy stack inside."""
    return M.td({"a": t(2, start=i), "z": M.lazy_stack([_bare(M, i), _bare(M, i + 7)], 0)}, [2])


_MAKERS: dict[str, tuple[Callable[[Any, int], Any], int]] = {
    "even": (_even, 4),
    "wide": (_wide, 2),
    "uneven": (_uneven, 2),
    "ragged": (_ragged, 3),
    "named": (_named, 3),
    "text": (_text, 2),
    "on_cpu": (_on_cpu, 3),
    "bare": (_bare, 3),
    "inner": (_inner, 2),
    "one": (_even, 1),
}
STACKS: dict[str, Callable[[Any], Any]] = {
    f"{name}@{dim}": lambda M, make=make, n=n, dim=dim: M.lazy_stack([make(M, i) for i in range(n)], dim)
    for name, (make, n) in _MAKERS.items()
    for dim in {"bare": (0,), "wide": (0, 1, 2), "inner": (0,), "one": (0,)}.get(name, (0, 1))
}
DENSE = [name for name in STACKS if name.split("@")[0] not in ("uneven", "ragged")]


def elements(td: Any) -> Any:
    return getattr(td, "tensordicts", None) if type(td).__name__ == "LazyStackedTensorDict" else None


def exact(value: Any) -> object:
    """A result with the class and the elements of every stack; keys sorted, since the peer sorts a stack's."""
    parts = elements(value)
    if parts is not None:
        head = ("stack", value.stack_dim, value.batch_size, list(value.names), value.device, value.is_locked)
        return (*head, [exact(p) for p in parts])
    if isinstance(value, (tuple, list)):
        return [exact(v) for v in value]
    if isinstance(value, dict):
        return {k: exact(value[k]) for k in sorted(value)}
    if hasattr(value, "batch_size") and hasattr(value, "keys") and "NonTensor" not in type(value).__name__:
        head = (type(value).__name__, value.batch_size, list(value.names), value.device, value.is_locked)
        return (*head, {k: exact(value.get(k)) for k in sorted(value.keys())})
    return value


def content(value: Any) -> object:
    """A result by its values: a lazy stack as good as the TensorDict that it makes."""
    if elements(value) is not None:
        value = value.to_tensordict()
    if isinstance(value, (tuple, list)):
        return [content(v) for v in value]
    if hasattr(value, "batch_size") and hasattr(value, "keys") and "NonTensor" not in type(value).__name__:
        return (value.batch_size, {k: content(value.get(k)) for k in sorted(value.keys())})
    return value.tolist() if "NonTensor" in type(value).__name__ else value
