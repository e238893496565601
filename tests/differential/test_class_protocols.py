"""Tensorclasses beside plain dataclasses: signatures, hashes, setters, arrays, and back from dicts."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest
import torch

import tdstore
from tdstore.errors import InvalidTypeError

from .cases import Case, Cases
from .oracle import Side
from .structures import t

case = Cases()


def body(**fields: object) -> type:
    """A class body: annotations, and defaults where a field is given as (annotation, default)."""
    hints = {name: hint[0] if isinstance(hint, tuple) else hint for name, hint in fields.items()}
    defaults = {name: hint[1] for name, hint in fields.items() if isinstance(hint, tuple)}
    return type("Made", (), {"__annotations__": hints, "__module__": __name__, **defaults})


# --- signatures ---
def parameters(cls: type) -> list[object]:
    found = inspect.signature(cls).parameters.values()
    return [
        (p.name, str(p.kind), None if p.name in ("batch_size",) else str(p.default), str(p.annotation)) for p in found
    ]


FIELDS = {
    "required": {"a": torch.Tensor, "b": torch.Tensor},
    "defaults": {"a": torch.Tensor, "b": (int, 3), "c": ("str", "text")},
    "by name": {"a": torch.Tensor, "b": (int, dataclasses.field(default=1, kw_only=True))},
    "made by a factory": {"a": torch.Tensor, "b": (list, dataclasses.field(default_factory=list))},
}
for name, fields in FIELDS.items():
    case(f"signature: {name}", lambda M, f=fields: parameters(M.tensorclass(body(**f))))


def inherited(M: Side) -> object:
    class First(M.TensorClass):
        a: torch.Tensor
        b: str = "x"

    class Second(First):
        c: torch.Tensor | None = None

    return parameters(First), parameters(Second)


case("signature of a subclass", inherited)


# --- objects and TensorDicts joined ---
JOINS = {
    "cat": lambda M, obj, td: M.TensorDict.cat([obj, td], 0),
    "torch.cat of the TensorDict first": lambda M, obj, td: torch.cat([td, obj]),
    "lazy_stack": lambda M, obj, td: M.lazy_stack([obj, td]),
    "lazy_stack of the TensorDict first": lambda M, obj, td: M.lazy_stack([td, obj], 1),
    "lazy_stack of other keys": lambda M, obj, td: M.lazy_stack([obj, td.exclude("b")]),
}


def joined(M: Side, way: str) -> object:
    made = M.tensorclass(body(a=torch.Tensor, b=torch.Tensor))
    obj = made(a=t(3, 2), b=t(3), batch_size=[3])
    found = JOINS[way](M, obj, M.td({"a": t(3, 2) + 1, "b": t(3) + 1}, [3]))
    kind = type(found).__name__
    return kind, found.batch_size, {key: found.get(key) for key in sorted(found.keys())}


for way in JOINS:
    case(f"an object and a TensorDict: {way}", lambda M, way=way: joined(M, way))


# --- hashes ---
def hashes(M: Side, **flags: bool) -> object:
    cls = M.tensorclass(**flags)(body(a=torch.Tensor))
    first, second = cls(a=t(2)), cls(a=t(2))
    return hash(first) == hash(first), hash(first) == hash(second), len({first, first, second}), first in {first: 1}


case("hash of a frozen object", lambda M: hashes(M, frozen=True))
case("hash of another object", lambda M: hashes(M, frozen=False))


def inherited_hash(M: Side) -> object:
    class Base(M.TensorClass["frozen"]):
        a: torch.Tensor

    class Further(Base):
        b: torch.Tensor

    return isinstance(hash(Further(t(2), t(2))), int)


case("hash of a frozen subclass", inherited_hash)


# --- a setter of the class's own ---
def with_setter(M: Side) -> tuple[type, list[str]]:
    log: list[str] = []

    class Logged(M.TensorClass):
        a: torch.Tensor
        b: str = "x"
        c: torch.Tensor | None = None

        def __setattr__(self, name: str, value: object) -> None:
            log.append(name)
            super().__setattr__(name, value * 2 if name == "a" else value)

    return Logged, log


def constructed(M: Side) -> object:
    cls, log = with_setter(M)
    made = cls(t(2), batch_size=[2])
    seen = [*log]
    log.clear()
    made.a = t(2)
    made.clone(), made[0], torch.stack([made, made])
    return seen[:2], made.a, made.b, log


case("an own __setattr__ in construction", constructed)

# --- arrays ---
ARRAYS = {"tensor": torch.ones(2), "list": [1, 2], "array": np.ones(3), "number": 3, "rows": [[1.0], [2.0]]}
for name, value in ARRAYS.items():
    case(
        f"autocast to an array of a {name}",
        lambda M, v=value: M.tensorclass(autocast=True)(body(a=np.ndarray))(a=v).a,
    )


def assigned(M: Side) -> object:
    obj = M.tensorclass(autocast=True)(body(a=np.ndarray))(a=np.zeros(2))
    obj.a = torch.ones(3)
    return obj.a, type(obj.get("a")).__name__


case("an array is assigned", assigned)

# --- names of fields ---
case("__expected_keys__", lambda M: sorted(M.tensorclass(body(a=torch.Tensor, b=(str, "x")))(t(2)).__expected_keys__))
case("type of __expected_keys__", lambda M: type(M.tensorclass(body(a=torch.Tensor)).__expected_keys__).__name__)

# --- back from a dict ---
CAST = {"i": int, "s": str, "a": torch.Tensor, "f": (float, 0.0), "m": (dict, None), "n": (np.ndarray, None)}


def there_and_back(M: Side, autocast: bool) -> object:
    cls = M.tensorclass(autocast=autocast)(body(**CAST))
    obj = cls(i=3, s="x", a=t(2), f=1.5, m={"k": "v"}, n=np.ones(2))
    back = obj.from_dict_instance(obj.to_dict())
    return [(type(getattr(back, name)).__name__, getattr(back, name)) for name in ("i", "s", "a", "f", "n")]


case("from_dict_instance of an autocast class", lambda M: there_and_back(M, True))


def nested_back(M: Side) -> object:
    inner = M.tensorclass(autocast=True)(body(i=int, a=torch.Tensor))
    outer = M.tensorclass(body(b=torch.Tensor, inner=(object, None)))
    obj = outer(b=t(2), inner=inner(i=3, a=t(2)))
    back = obj.from_dict_instance(obj.to_dict())
    return type(back.inner).__name__, type(back.inner.i).__name__, back.inner.a


case("from_dict_instance of a nested autocast class", nested_back)


@case.parametrize
def test_class_protocols(case: Case) -> None:
    case.check()


def test_a_dict_stays_a_dict() -> None:
    cls = tdstore.tensorclass(autocast=True)(body(**CAST))
    obj = cls(i=3, s="x", a=torch.ones(2), m={"k": "v"})
    assert obj.from_dict_instance(obj.to_dict()).m == {"k": "v"}


def test_a_constructor_of_the_class_is_its_signature() -> None:
    class Own(tdstore.TensorClass):
        a: torch.Tensor

        def __init__(self, q: int) -> None:
            super().__init__(a=torch.ones(q))

    assert list(inspect.signature(Own).parameters) == ["q"]


def test_an_optional_array_is_cast() -> None:
    cls = tdstore.tensorclass(autocast=True)(body(a=(np.ndarray | None, None)))
    assert isinstance(cls(a=torch.ones(2)).a, np.ndarray) and cls().a is None


def test_an_object_stacked_with_a_tensordict_gives_what_comes_first() -> None:
    made = tdstore.tensorclass(body(a=torch.Tensor))
    obj, td = made(a=t(3), batch_size=[3]), tdstore.TensorDict({"a": t(3) + 1}, [3])
    for fn in (torch.stack, torch.cat):  # theirs knows `cat` of a TensorDict and an object only
        assert type(fn([obj, td])) is made
        assert type(fn([td, obj])) is tdstore.TensorDict
        assert fn([obj, td]).a.tolist() == fn([obj, obj + 1]).a.tolist()
    other = tdstore.tensorclass(body(a=torch.Tensor))(a=t(3), batch_size=[3])
    with pytest.raises(InvalidTypeError, match="cannot join"):
        torch.stack([obj, other])
