"""The classes of the scenarios of RL.md 5.5."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from tdstore import TensorClass, tensorclass


@tensorclass
class Inner:
    x: Tensor
    tag: str = "in"


@tensorclass
class Outer:
    t: Tensor
    opt: Tensor | None = None
    name: str = "n"
    inner: Inner | None = None


class Counted(TensorClass):
    x: Tensor
    runs: ClassVar[int] = 0

    def __post_init__(self) -> None:
        type(self).runs += 1


class Frozen(TensorClass, frozen=True):
    x: Tensor


def outer(n: int = 3) -> Any:
    inner = Inner(x=torch.arange(n), batch_size=[n])  # type: ignore[call-arg]
    return Outer(t=torch.arange(2.0 * n).reshape(n, 2), name="a", inner=inner, batch_size=[n])  # type: ignore[call-arg]


PLACES: dict[str, Callable[[Any], str]] = {
    "memmap": lambda tmp: str(tmp / "m"),
    "h5": lambda tmp: str(tmp / "m.h5"),
    "zarr": lambda tmp: str(tmp / "m.zarr"),
    "shared": lambda tmp: f"shm://tc-{os.getpid()}-{tmp.name}",
}
