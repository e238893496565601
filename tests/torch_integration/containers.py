"""One TensorDict in every kind of container."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tdstore
from tdstore import TensorDict, lazy_stack


def sample(module: Any = tdstore) -> Any:
    """Batch [3, 2], floats, one nested."""
    return module.TensorDict(
        {"a": torch.arange(24.0).reshape(3, 2, 4) / 7 + 0.1, "n": {"b": torch.linspace(0.2, 1.9, 6).reshape(3, 2)}},
        [3, 2],
    )


def _window(path: Path) -> Any:
    torch.cat([sample() * 0, sample()]).save(path / "w.h5")
    return tdstore.open(path / "w.h5")[3:]


def _inside(path: Path) -> Any:
    """A lazy stack below the root."""
    td = sample()
    return TensorDict({"a": td["a"], "n": lazy_stack(list(td["n"].unbind(0)))}, [3, 2])


CONTAINERS: dict[str, Callable[[Path], Any]] = {
    "TensorDict": lambda path: sample(),
    "memmap": lambda path: sample().memmap(path / "mm"),
    "lazy stack": lambda path: lazy_stack(list(sample().unbind(0))),
    "lazy stack along 1": lambda path: lazy_stack(list(sample().unbind(1)), 1),
    "lazy inside": _inside,
    "h5": lambda path: sample().save(path / "td.h5"),
    "zarr": lambda path: sample().save(path / "td.zarr"),
    "window": _window,
}


def content(value: Any) -> Any:
    """Values, shapes and dtypes, whatever holds them."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.detach().double().mul(1e4).round().tolist())
    if hasattr(value, "batch_size") and hasattr(value, "keys"):
        td = value.to_tensordict() if hasattr(value, "to_tensordict") else value
        keys = sorted(td.keys(True, True), key=str)
        return (tuple(td.batch_size), {str(k): content(td.get(k)) for k in keys})
    if isinstance(value, (tuple, list)):
        return [content(v) for v in value]
    return value
