"""Tensorclasses in the styles of the documentation: decorated, inherited, cast, frozen, typed, with methods."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Optional

import torch
from tensordict import TensorClass, TensorDict, is_tensorclass, tensorclass


@tensorclass
class Position:
    x: torch.Tensor
    y: torch.Tensor
    label: str = "origin"
    DIMENSIONS: ClassVar[int] = 2

    @property
    def norm(self):
        return (self.x**2 + self.y**2).sqrt()

    @classmethod
    def on_circle(cls, n):
        angle = torch.arange(n) * (2 * torch.pi / n)
        return cls(x=angle.cos(), y=angle.sin(), label="circle", batch_size=[n])

    @staticmethod
    def distance(a, b):
        return ((a.x - b.x) ** 2 + (a.y - b.y) ** 2).sqrt()

    def __len__(self):
        return self.batch_size[0] if self.batch_size else 0


@tensorclass
class Point3(Position):
    z: Optional[torch.Tensor] = None

    def lift(self, height):
        self.z = torch.full_like(self.x, height)
        return self


class Sample(TensorClass["autocast"]):
    value: int
    name: str
    weight: float
    tensor: torch.Tensor


class Raw(TensorClass["nocast"]):
    value: Any
    parts: list | None = None


class Strict(TensorClass["tensor_only"]):
    a: torch.Tensor
    b: torch.Tensor


@tensorclass(frozen=True)
class Fixed:
    a: torch.Tensor
    note: str = "fixed"


def main():
    p = Position(torch.tensor(3.0), torch.tensor(4.0))
    print(p.norm.item(), p.batch_size, p.label, Position.DIMENSIONS, is_tensorclass(p), is_tensorclass(Position))
    circle = Position.on_circle(4)
    print([round(v, 3) for v in circle.norm.tolist()], circle[1].label, len(circle), circle[2:].shape)
    print(round(Position.distance(circle[0], circle[2]).item(), 4))
    print([f.name for f in dataclasses.fields(Position)])

    q = Point3(x=torch.zeros(2), y=torch.ones(2), batch_size=[2])
    print(q.z, q.lift(5.0).z.tolist(), isinstance(q, Position), q.norm.tolist())
    stacked = torch.stack([q, q + 1], 1)
    print(type(stacked).__name__, stacked.shape, stacked.z.tolist(), stacked.label)
    try:
        q.w = 1
    except AttributeError:
        print("no such field")
    try:
        Position(torch.zeros(3))
    except TypeError:
        print("a field is missing")

    s = Sample(value=3, name="x", weight=0.5, tensor=[1, 2])
    print(s.value, type(s.value).__name__, s.name, type(s.weight).__name__, type(s.tensor).__name__)
    raw = Raw(value=3)
    print(raw.value, type(raw.value).__name__, raw.parts)
    strict = Strict(a=torch.ones(3), b=torch.zeros(3), batch_size=[3])
    print(strict[0].a.item(), (strict + 1).b.sum().item(), strict.device)
    fixed = Fixed(a=torch.ones(2), batch_size=[2])
    try:
        fixed.a = torch.zeros(2)
    except Exception:
        print("frozen")
    print(fixed.note, fixed.is_locked)

    td = circle.to_tensordict()
    print(type(td).__name__, td["label"], Position.from_tensordict(td).norm.shape)
    made = Position.from_tensordict(TensorDict({"x": torch.zeros(2), "y": torch.ones(2), "label": "made"}, [2]))
    print(made.label, made.y.tolist(), made.batch_size)
    circle.x[0] = 9.0
    circle.label = "bent"
    print(circle.x[0].item(), circle.label, circle.get("x").shape, circle.clone().label)
    replaced = circle.replace(y=torch.zeros(4))
    print(replaced.y.sum().item(), circle.y.abs().sum().item() > 0)
    print(repr(p))
    holder = TensorDict({"points": circle, "n": torch.arange(4)}, [4])
    print(type(holder["points"]).__name__, holder[0]["points"].x.item(), type(holder[1:3].get("points")).__name__)
