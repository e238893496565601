"""The TensorDicts that cases start from, built alike on both sides, and tensors with telling values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Build = Callable[[Any], Any]


def t(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> Tensor:
    """Counts up from `start`: every element is another, so that a misplaced row shows."""
    n = math.prod(shape)
    if dtype is torch.bool:
        return (torch.arange(start, start + n) % 3 == 0).reshape(shape)
    return torch.arange(start, start + n).reshape(shape).to(dtype)


@dataclass(frozen=True)
class Sample:
    build: Build
    batch: tuple[int, ...]


def _flat(cls: Any) -> Any:
    return cls({"a": t(5), "b": t(5, 3, dtype=torch.int64)}, batch_size=[5])


def _nested(cls: Any) -> Any:
    n = {"b": t(4, 3, 2, dtype=torch.int64), "m": {"c": t(4, 3, dtype=torch.bool)}}
    return cls({"a": t(4, 3), "n": n}, batch_size=[4, 3])


def _named(cls: Any) -> Any:
    return cls({"a": t(4, 3, 2), "n": {"b": t(4, 3, dtype=torch.float64)}}, batch_size=[4, 3], names=["time", "env"])


def _deep_batch(cls: Any) -> Any:
    """The nested TensorDict has more batch dimensions than its parent."""
    inner = cls({"b": t(4, 3, 2), "c": t(4, 3, dtype=torch.int16)}, batch_size=[4, 3])
    return cls({"a": t(4, dtype=torch.uint8), "n": inner}, batch_size=[4])


def _wide(cls: Any) -> Any:
    """Every leaf has feature dimensions."""
    return cls({"a": t(4, 3, 2), "n": {"b": t(4, 3, 2, dtype=torch.int64)}}, batch_size=[4])


def _cube(cls: Any) -> Any:
    return cls({"a": t(2, 3, 4), "n": {"b": t(2, 3, 4, 1, dtype=torch.int32)}}, batch_size=[2, 3, 4])


def _scalar(cls: Any) -> Any:
    return cls({"a": t(3), "z": torch.tensor(7), "n": {"b": t(2, 2)}}, batch_size=[])


def _empty(cls: Any) -> Any:
    return cls({}, batch_size=[4, 3])


def _zero_rows(cls: Any) -> Any:
    return cls({"a": t(0, 3), "n": {"b": t(0, dtype=torch.int64)}}, batch_size=[0])


def _on_cpu(cls: Any) -> Any:
    return cls({"a": t(4), "n": {"b": t(4, 2)}}, batch_size=[4], device="cpu")


def _text(cls: Any) -> Any:
    return cls({"a": t(4), "s": "hello", "n": {"none": None, "b": t(4, 1)}}, batch_size=[4])


SAMPLES: dict[str, Sample] = {
    "flat": Sample(_flat, (5,)),
    "nested": Sample(_nested, (4, 3)),
    "named": Sample(_named, (4, 3)),
    "deep_batch": Sample(_deep_batch, (4,)),
    "wide": Sample(_wide, (4,)),
    "cube": Sample(_cube, (2, 3, 4)),
    "scalar": Sample(_scalar, ()),
    "empty": Sample(_empty, (4, 3)),
    "zero_rows": Sample(_zero_rows, (0,)),
    "on_cpu": Sample(_on_cpu, (4,)),
    "text": Sample(_text, (4,)),
}
