"""What type checkers must understand of classes with fields: checked and run by `test_typing.py`."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from dataclasses import InitVar, field
from typing import Any, ClassVar, Generic, TypeVar, assert_type

import torch
from torch import Tensor

import tdstore
from tdstore import TensorClass, TensorDict, TensorDictBase, TypedTensorDict, is_tensorclass, tensorclass

T = TypeVar("T")


class Inner(TensorClass):
    x: Tensor
    tag: str = "in"


class Outer(TensorClass, nocast=True):
    t: Tensor
    opt: Tensor | None = None
    name: str = "n"
    inner: Inner | None = None
    tags: dict[str, int] = field(default_factory=dict)
    last: Tensor | None = field(default=None, kw_only=True)

    count: ClassVar[int] = 0

    def twice(self) -> Tensor:
        return self.t * 2

    @property
    def halved(self) -> Tensor:
        return self.t / 2

    @classmethod
    def zeros(cls, *shape: int) -> Outer:
        return cls(torch.zeros(shape), batch_size=shape)


class Wider(Outer):
    more: Tensor | None = None


# -- making one: fields by place and by name, then what every tensorclass takes --------------
outer = Outer(torch.zeros(3, 2), name="a", batch_size=[3], device="cpu", names=None, lock=False)
assert_type(outer, Outer)
Outer(torch.zeros(3), None, "b", Inner(torch.zeros(3)), {"c": 1}, last=torch.ones(3), batch_size=(3,), names=["time"])
wider = Wider(torch.zeros(3), more=torch.zeros(3), batch_size=torch.Size([3]), device=torch.device("cpu"))
assert_type(Outer.zeros(3), Outer)
assert_type(Outer.from_tensordict(TensorDict({"t": torch.zeros(3)}, [3])), Outer)

# -- fields ----------------------------------------------------------------------------------
assert_type(outer.t, Tensor)
assert_type(outer.opt, Tensor | None)
assert_type(outer.name, str)
assert_type(outer.tags, dict[str, int])
assert_type(outer.twice(), Tensor)
assert_type(outer.halved, Tensor)
outer.inner = Inner(torch.zeros(3, 4), batch_size=[3])
assert_type(outer.inner.x, Tensor)
if (inner := wider.inner) is not None:
    assert_type(inner.tag, str)
outer.opt = None
outer.name = "b"

# -- what a TensorDict has, and gives back with the class ------------------------------------
assert_type(outer.batch_size, torch.Size)
assert_type(outer.device, torch.device | None)
outer.batch_size = [3]
outer.names = ["time"]
assert_type(outer[0], Outer)
assert_type(outer[0].t, Tensor)
assert_type(outer[1:].inner, Inner | None)
assert_type(outer + 1, Outer)
assert_type(outer.exp(), Outer)
assert_type(wider.reshape(-1), Wider)
assert_type(outer.clone(), Outer)
assert_type(outer.to("cpu").contiguous().detach(), Outer)
assert_type(outer.lock_(), Outer)
assert_type(outer.exclude("name"), Outer)
with outer.unlock_() as unlocked:
    assert_type(unlocked, Outer)
for row in outer:
    assert_type(row, Outer)
for row in outer.unbind(0):
    assert_type(row.t, Tensor)
assert_type(outer.split(2), tuple[Outer, ...])
assert_type(outer.to_dict(), dict[str, Any])
outer[0] = outer[1]
outer[:2] = 0
same = outer == outer
assert same.all()

# torch's own stubs say that torch.stack takes tensors and gives one
assert_type(tdstore.stack([outer, outer]), Outer)
assert_type(tdstore.cat([wider, wider], 0)[0].more, Tensor | None)
assert_type(tdstore.lazy_stack([outer, outer]), Outer)


def size_of(td: TensorDictBase) -> int:
    return td.numel()


size_of(outer)

# -- the tools for dataclasses ---------------------------------------------------------------
assert_type(dataclasses.replace(outer, name="c"), Outer)
assert [f.name for f in dataclasses.fields(wider)][:2] == ["t", "opt"]
match outer:
    case Outer(t, name=name):
        assert_type(t, Tensor)
        assert_type(name, str)


# -- flags, `__post_init__`, classes that name themselves, generic and abstract ones ---------
class Cold(TensorClass, frozen=True):
    x: Tensor
    y: Tensor | None = None


class Colder(Cold, frozen=True):
    z: Tensor | None = None


class Flagged(TensorClass["nocast"]):  # type: ignore[type-arg, name-defined]  # of mypy alone: a keyword is understood
    x: Tensor
    n: int = 0


class Scaled(TensorClass):
    x: Tensor
    scale: InitVar[float] = 1.0

    def __post_init__(self, scale: float) -> None:
        self.x = self.x * scale


class Tree(TensorClass):
    x: Tensor
    left: Tree | None = None


class Holder(TensorClass, Generic[T], nocast=True):
    x: Tensor
    value: T | None = None


class Shape(TensorClass, abc.ABC):
    x: Tensor

    @abc.abstractmethod
    def area(self) -> Tensor: ...


class Square(Shape, nocast=True):
    side: float = 1.0

    def area(self) -> Tensor:
        return self.x**2


assert_type(Cold(torch.zeros(3), batch_size=[3]).x, Tensor)
assert_type(Colder(torch.zeros(3), z=torch.zeros(3)) + 1, Colder)
flagged = Flagged(torch.zeros(3), 2, batch_size=[3])
assert_type(flagged.n, int)
assert_type(flagged[0], Flagged)
assert_type(Scaled(torch.ones(3), 2.0, batch_size=[3]).x, Tensor)
assert_type(Tree(torch.zeros(3), Tree(torch.ones(3))).left, Tree | None)
assert_type(Holder[int](torch.zeros(3), 3).value, int | None)
assert_type(Square(torch.ones(3), 2.0, batch_size=[3])[0].area(), Tensor)


# -- decorated classes: their own fields and methods; with the base, everything --------------
@tensorclass
class Decorated:
    x: Tensor
    label: str = ""

    def total(self) -> Tensor:
        return self.x.sum()


@tensorclass(frozen=True)
class Frozen:
    x: Tensor


@tensorclass(nocast=True)
class Both(TensorClass):
    x: Tensor
    n: int = 0


decorated = Decorated(x=torch.zeros(3), label="b")
assert_type(decorated.x, Tensor)
assert_type(decorated.total(), Tensor)
assert_type(Frozen(torch.zeros(3)).x, Tensor)
assert is_tensorclass(decorated)
assert_type(Both(torch.zeros(3), 1, batch_size=[3])[0].n, int)


# -- TypedTensorDict -------------------------------------------------------------------------
class Keyed(TypedTensorDict):
    x: Tensor
    mask: Tensor | None = None


class KeyedMore(Keyed):
    y: Tensor


keyed = KeyedMore(x=torch.zeros(3), y=torch.zeros(3), batch_size=[3])
assert_type(keyed.y, Tensor)
assert_type(keyed + 1, KeyedMore)
assert_type(keyed[0].y, Tensor)
keyed["free"] = torch.zeros(3)
tensor: Tensor = keyed["free"]
assert_type(Keyed.from_tensordict(TensorDict({"x": torch.zeros(3)}, [3]), check=False), Keyed)
keyed = KeyedMore(**keyed.select("x", "y"), batch_size=[3])

call: Callable[[Tensor], Inner] = Inner
