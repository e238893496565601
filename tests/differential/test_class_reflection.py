"""What a tensorclass tells of itself, what its reductions are, and how a frozen object refuses."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from tdstore import TensorClass, TensorDict, lazy_stack
from tdstore.errors import FrozenError

from .programs import check, programs

START = """
@tensorclass
class P:
    x: torch.Tensor
    y: torch.Tensor = None
@tensorclass(frozen=True)
class F:
    x: torch.Tensor
p = P(x=torch.arange(12.0).view(3, 4), y=torch.arange(3), batch_size=[3])
f = F(x=torch.ones(3), batch_size=[3])
"""


@programs("""
import typing
typing.get_type_hints(P)["x"].__name__
---
import typing
class Q(P):
    z: int = 3
typing.get_type_hints(Q)["z"].__name__
---
best = p.max(0)
(type(best[0]).__name__, type(best[1]).__name__, best[0].x, best[1].y)
---
best, where = p.min(dim=0)
(type(best).__name__, best.x, type(where).__name__, where.x)
---
p.max(0, return_indices=False).x
---
type(p.cummax(0)[0]).__name__
""")
def test_reflection(source: str) -> None:
    check(START + source)


@programs("""
f.update({"x": torch.zeros(3)})
---
f.set("x", torch.zeros(3))
---
setattr(f, "x", torch.zeros(3))
---
setattr(f.clone(), "x", torch.zeros(3))
""")
def test_frozen(source: str) -> None:
    check(START + source)


def test_extremes_keep_the_kind_of_tuple() -> None:
    class P(TensorClass):
        x: torch.Tensor

    best = P(x=torch.tensor([1.0, 3.0]), batch_size=[2]).max(0)
    assert isinstance(best, torch.return_types.max) and isinstance(best.values, P)  # type: ignore[attr-defined]
    assert best.values.x == 3 and best.indices.x == 1


def test_one_error_for_what_is_frozen() -> None:
    class P(TensorClass["frozen"]):
        x: torch.Tensor

    p = P(x=torch.ones(2), batch_size=[2])
    for change in (lambda: setattr(p, "x", torch.zeros(2)), lambda: p.set("x", torch.zeros(2)), lambda: p.update(x=1)):
        with pytest.raises(FrozenError, match="'x'") as caught:
            change()
        assert isinstance(caught.value, FrozenInstanceError) and isinstance(caught.value, RuntimeError)


def test_repeats_share_no_rows() -> None:
    stack = lazy_stack([TensorDict({"x": torch.ones(3)}, [3]) for _ in range(2)])
    for repeated in (stack.repeat(2, 1), stack.repeat_interleave(2, dim=0)):
        repeated[0]["x"].zero_()
        assert repeated["x"].sum() == 9 and stack["x"].sum() == 6
