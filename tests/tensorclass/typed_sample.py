"""What type checkers must understand: checked by `test_typing.py`, never run."""

from __future__ import annotations

from dataclasses import field
from typing import assert_type

import torch
from torch import Tensor

from tdstore import TensorClass, TensorDict, TypedTensorDict, is_tensorclass, tensorclass


class Inner(TensorClass):
    x: Tensor
    tag: str = "in"


class Outer(TensorClass, nocast=True):
    t: Tensor
    opt: Tensor | None = None
    name: str = "n"
    inner: Inner | None = None
    tags: list[str] = field(default_factory=list)

    def twice(self) -> Tensor:
        return self.t * 2


class Wider(Outer):
    more: Tensor | None = None


outer = Outer(torch.zeros(3, 2), name="a", batch_size=[3], device="cpu", names=None, lock=False)
assert_type(outer, Outer)
assert_type(outer.t, Tensor)
assert_type(outer.opt, Tensor | None)
assert_type(outer.twice(), Tensor)
assert_type(outer.batch_size, torch.Size)
assert_type(outer + 1, Outer)
assert_type(outer.exp(), Outer)
assert_type(outer.lock_(), Outer)
assert_type(Outer.from_tensordict(TensorDict({"t": torch.zeros(3)}, [3])), Outer)
assert_type(Wider(torch.zeros(3), more=torch.zeros(3)).reshape(-1), Wider)
for row in outer.unbind(0):
    assert_type(row, Outer)


@tensorclass
class Decorated:
    x: Tensor
    label: str = ""

    def total(self) -> Tensor:
        return self.x.sum()


@tensorclass(frozen=True)
class Frozen:
    x: Tensor


class Keyed(TypedTensorDict):
    x: Tensor


class KeyedMore(Keyed):
    y: Tensor


keyed = KeyedMore(x=torch.zeros(3), y=torch.zeros(3), batch_size=[3])
assert_type(keyed.y, Tensor)
assert_type(keyed + 1, KeyedMore)
assert_type(Keyed.from_tensordict(TensorDict({"x": torch.zeros(3)}, [3]), check=False), Keyed)

decorated = Decorated(x=torch.zeros(3), label="b")
assert_type(decorated.x, Tensor)
assert_type(decorated.total(), Tensor)
assert_type(Frozen(torch.zeros(3)).x, Tensor)
assert is_tensorclass(decorated)

assert_type(outer.batch_size, torch.Size)
outer.batch_size = [3]
