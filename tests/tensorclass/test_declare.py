"""Declaring classes: flags, inheritance, defaults, dataclass tools."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import FrozenInstanceError, InitVar, field
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

import tdstore
from tdstore import TensorClass, TensorDict, is_tensorclass, tensorclass
from tdstore.errors import LockedError

from .classes import Counted, Frozen, Inner, Outer, outer

T = TypeVar("T")


def test_three_forms_are_one():
    @tensorclass(nocast=True, frozen=True)
    class A:
        n: Any = None

    class B(TensorClass["nocast", "frozen"]):
        n: Any = None

    class C(TensorClass, nocast=True, frozen=True):
        n: Any = None

    for cls in (A, B, C):
        obj = cls(n=3)
        assert obj.n == 3 and type(obj.n) is int and obj.is_locked and is_tensorclass(cls)
        with pytest.raises(FrozenInstanceError):
            obj.n = 4


def test_post_init_runs_once_for_what_the_user_makes(tmp_path):  # C7
    Counted.runs = 0
    obj = Counted(x=torch.arange(3), batch_size=[3])
    torch.stack([obj[0], obj[1:][0]]).memmap(tmp_path / "m")
    Counted.load_memmap(tmp_path / "m").clone().to(torch.float64).reshape(2, 1)
    obj.memmap_(tmp_path / "n")
    assert Counted.runs == 1
    Counted.from_tensordict(TensorDict({"x": torch.zeros(2)}, [2]))
    assert Counted.runs == 2
    Counted.from_dict({"x": torch.zeros(2)})
    assert Counted.runs == 3


def test_post_init_may_change_the_object_and_gets_initvars():
    @tensorclass
    class Scaled:
        x: Tensor
        by: InitVar[int] = 2
        y: Any = field(default=None, init=False)

        def __post_init__(self, by):
            self.y = self.x * by

    assert Scaled(torch.ones(2), 3).y.tolist() == [3, 3]
    assert Scaled(x=torch.ones(2)).y.tolist() == [2, 2]
    assert [f.name for f in dataclasses.fields(Scaled)] == ["x", "y"]
    with pytest.raises(AttributeError, match="no field 'y'"):
        Scaled(torch.ones(2), y=torch.ones(2))


def test_a_generic_class_takes_types_and_others_names_of_flags():
    class Holder(TensorClass, Generic[T], nocast=True):
        x: Tensor
        value: T | None = None

    held = Holder[int](torch.zeros(3), 3, batch_size=[3])
    assert type(held) is Holder and held.value == 3 and type(held[0]) is Holder
    with pytest.raises(TypeError, match=r"TensorClass\[...\] takes names of flags \(autocast, frozen, .*\), not .*int"):
        TensorClass[int]


def test_defaults_are_for_the_constructor():
    class Made(TensorClass):
        a: Tensor = field(default_factory=lambda: torch.zeros(2))
        b: list[str] = field(default_factory=list, kw_only=True)
        c: str = "c"
        shared: ClassVar[int] = 5

    assert Made().a.tolist() == [0, 0] and Made().c == "c" and Made.shared == 5
    assert Made().a is not Made().a
    bare = Made.from_tensordict(TensorDict())
    assert bare.a is None and bare.c is None
    with pytest.raises(TypeError, match="follows 'a'"):
        tensorclass(type("Wrong", (), {"__annotations__": {"a": Tensor, "b": Tensor}, "a": None}))


def test_subclasses_add_fields_and_keep_flags():
    class Wider(Outer):
        more: Tensor | None = None

    class Colder(Frozen):
        y: Any = None

    wide = Wider(t=torch.zeros(2), more=torch.ones(2))
    assert isinstance(wide, Outer) and [f.name for f in wide.fields()] == ["t", "opt", "name", "inner", "more"]
    with pytest.raises(FrozenInstanceError):
        Colder(x=torch.zeros(2)).y = 1
    assert tensorclass(shadow=True)(Wider)(t=torch.zeros(1)).name == "n"


def test_super_and_user_methods():
    class Base(TensorClass):
        x: Tensor

        def total(self) -> Any:
            return self.x.sum()

    @tensorclass
    class Child(Base):
        def total(self) -> Any:
            return super().total() + 1

        def clone(self, recurse=True):
            return super().clone(recurse).add_(1)

    child = Child(x=torch.ones(2))
    assert child.total() == 3 and child.clone().x.tolist() == [2, 2]

    @tensorclass
    class Plain:
        x: Tensor

        def reshape(self, *shape):
            return super().reshape(*shape).lock_()

    assert Plain(x=torch.zeros(4), batch_size=[4]).reshape(2, 2).is_locked


@pytest.mark.parametrize("name", ["any", "reshape", "_data", "keys"])
def test_names_that_are_taken(name):  # C5
    body = {"__annotations__": {name: Any}}
    with pytest.raises(AttributeError, match=name):
        tensorclass(type("Bad", (), dict(body)))
    cls = tensorclass(shadow=True)(type("Good", (), dict(body)))
    obj = cls(**{name: torch.arange(3)}, batch_size=[3])
    assert getattr(obj, name).tolist() == [0, 1, 2] and getattr(obj[1:] + 1, name).tolist() == [2, 3]


@pytest.mark.parametrize("name", ["batch_size", "device", "names", "lock"])
def test_arguments_are_fields_only_in_their_shadow(name):
    body = {"__annotations__": {name: Any}}
    with pytest.raises(AttributeError, match=name):
        tensorclass(shadow=name == "lock")(type("Bad", (), dict(body)))


def test_flags_that_contradict():
    for other in ("autocast", "tensor_only"):
        with pytest.raises(TypeError, match=other):
            tensorclass(nocast=True, **{other: True})(type("Bad", (), {}))
    with pytest.raises(TypeError, match="no flag 'warm'"):
        tensorclass(warm=True)(type("Bad", (), {}))


def test_autocast():  # C5
    class Cast(TensorClass, autocast=True):
        i: int | None = None
        t: Tensor | None = None
        inner: Inner | None = None
        td: TensorDict | None = None
        unknown: "NoSuchClass" = None  # noqa: F821, UP037
        note: Annotated[float, "why"] = 0.0

    obj = Cast(i=torch.tensor(3), t=[1, 2], inner={"x": torch.zeros(2)}, td={"y": 1.0}, unknown="u", note=1)
    assert obj.i == 3 and type(obj.i) is int
    assert obj.t.tolist() == [1, 2] and type(obj.inner) is Inner and type(obj.td) is TensorDict
    assert obj.unknown == "u" and type(obj.note) is float
    obj.i = "7"
    assert obj.i == 7
    with pytest.raises(ValueError, match="'i' is a int"):
        obj.i = "abc"
    obj.i = None
    assert obj.i is None
    assert Cast().update({"i": torch.tensor(4), "inner": {"x": torch.ones(1)}}).inner.x.tolist() == [1]


def test_tensor_only():
    class Only(TensorClass, tensor_only=True):
        x: Tensor
        y: Tensor | None = None

    obj = Only(x=torch.zeros(3), y=[1.0, 2.0])
    obj.y = None
    assert obj.y is None and list(obj.keys()) == ["x"]
    with pytest.raises(TypeError, match="takes tensors"):
        obj.x = "a"
    with pytest.raises(TypeError, match="'s' .* is annotated str"):
        tensorclass(tensor_only=True)(type("Bad", (), {"__annotations__": {"s": str}}))


def test_nocast_keeps_arrays_and_numbers():
    @tensorclass(nocast=True)
    class Raw:
        n: Any

    assert isinstance(Raw(np.ones(2)).n, np.ndarray) and Raw((1, 2)).n == (1, 2)
    assert list(torch.stack([Raw(1), Raw(2)]).n) == [1, 2] and torch.stack([Raw(1), Raw(2)])[1].n == 2


def test_frozen():
    obj = Frozen(x=torch.zeros(2))
    for change in (lambda: setattr(obj, "x", 1), lambda: obj.set("x", 1), lambda: obj.update({"x": torch.ones(2)})):
        with pytest.raises(FrozenInstanceError):
            change()
    with pytest.raises(LockedError):
        obj.unlock_()
    assert obj.add_(1).x.tolist() == [1, 1] and obj.clone().is_locked


def test_dataclass_tools():
    obj = outer()
    copy = dataclasses.replace(obj, name="q")
    assert copy.name == "q" and copy.batch_size == obj.batch_size and copy.t is obj.t
    assert dataclasses.asdict(obj)["inner"]["tag"] == "in" and dataclasses.is_dataclass(Outer)
    match obj:
        case Outer(t, None, "a"):
            assert t is obj.t
        case _:
            pytest.fail("does not match")


@dataclasses.dataclass
class Position:
    x: Tensor
    label: str = "p"

    def twice(self) -> Tensor:
        return self.x * 2


def test_from_dataclass():
    @dataclasses.dataclass
    class Line:
        start: Position
        width: float = 1.0

    made = tdstore.from_dataclass(Position(torch.arange(3)), auto_batch_size=True)
    assert is_tensorclass(made) and made.batch_size == (3,) and made.label == "p"
    assert made[1:].twice().tolist() == [2, 4] and type(made).__name__ == "Position_tc"
    cls = tdstore.from_dataclass(Position)
    assert cls is type(made) and cls(x=torch.zeros(1)).label == "p"
    line = tdstore.from_dataclass(Line(Position(torch.zeros(2))))
    assert type(line.start) is cls and line.width == 1.0
    assert is_tensorclass(TensorDict.from_dataclass(Position(torch.zeros(2)), as_tensorclass=True))
    assert type(TensorDict.from_dataclass(Position(torch.zeros(2)))) is TensorDict
    assert type(tdstore.from_dataclass(Position(torch.zeros(2)), dest_cls=cls)) is cls
    assert type(pickle.loads(pickle.dumps(made))) is cls and made.clone().label == "p"
    with pytest.raises(TypeError, match="takes a dataclass"):
        tdstore.from_dataclass(3)


def test_repr_is_the_one_that_users_know():
    assert repr(Outer(t=torch.zeros(2))) == (
        "Outer(\n"
        "    name=NonTensorData(data=n, batch_size=torch.Size([]), device=None),\n"
        "    t=Tensor(shape=torch.Size([2]), device=cpu, dtype=torch.float32, is_shared=False),\n"
        "    opt=None,\n"
        "    inner=None,\n"
        "    batch_size=torch.Size([]),\n"
        "    device=None,\n"
        "    is_shared=False)"
    )


def test_what_is_missing_and_what_is_no_field():
    @tensorclass
    class Step:
        obs: torch.Tensor
        reward: torch.Tensor

    with pytest.raises(TypeError, match=r"is missing 'reward', and has no field 'rewrad'$"):
        Step(obs=torch.zeros(2), rewrad=1)


class Guarded(TensorClass):
    x: torch.Tensor

    @property
    def first(self):
        raise AttributeError("nothing was measured")


def test_a_property_says_itself_what_it_lacks():
    with pytest.raises(AttributeError, match="nothing was measured"):
        Guarded(x=torch.ones(2)).first  # noqa: B018


class Sums(TensorClass):
    total: torch.Tensor


class Table(TensorClass):
    x: torch.Tensor

    def __opened__(self):
        return Sums(total=self.x.sum())


@pytest.mark.parametrize("place", ["folder", "data.h5"])
def test_a_class_says_what_opening_its_data_gives(tmp_path, place):
    Table(x=torch.arange(3)).save(tmp_path / place)
    found = tdstore.open(tmp_path / place)
    assert type(found) is Sums and found.total == 3
