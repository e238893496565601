"""`update` from an object of the same class, whose entries are fields already."""

from __future__ import annotations

import pytest
import torch

from tdstore import TensorClass, TensorDict, lazy_stack
from tdstore.errors import BatchSizeError, FrozenError, LockedError


class Part(TensorClass):
    x: torch.Tensor
    y: torch.Tensor | None = None


class Whole(TensorClass):
    a: torch.Tensor
    p: Part
    note: str = "none"
    b: torch.Tensor | None = None


class Counted(TensorClass["autocast"]):
    n: int
    a: torch.Tensor


class HoldsCounted(TensorClass):
    c: Counted


def whole(fill: float, **more: object) -> Whole:
    part = Part(torch.full((3,), fill), batch_size=[3])
    return Whole(a=torch.full((3, 2), fill), p=part, batch_size=[3], **more)


def test_tensors_are_taken_over_and_nested_objects_stay() -> None:
    mine, theirs = whole(0.0, note="old"), whole(1.0, note="new", b=torch.ones(3))
    part = mine.p
    assert mine.update(theirs) is mine
    assert mine.a is theirs.a and mine.b is theirs.b and mine.note == "new"
    assert mine.p is part and part.x is theirs.p.x


def test_what_the_other_lacks_stays() -> None:
    mine = whole(0.0, b=torch.zeros(3))
    mine.p.y = torch.zeros(3)
    mine.update(whole(1.0))
    assert mine.b is not None and mine.p.y is not None and mine.p.x.sum() == 3


@pytest.mark.parametrize("how", ["clone", "inplace", "positional"])
def test_copies(how: str) -> None:
    mine, theirs = whole(0.0), whole(1.0)
    before = mine.a
    if how == "positional":
        mine.update(theirs, False, True)
    else:
        mine.update(theirs, **{how: True})
    assert mine.a is not theirs.a and mine.p.x is not theirs.p.x
    assert (mine.a is before) == (how != "clone")
    assert mine.a.sum() == 6 and mine.p.x.sum() == 3


def test_some_keys() -> None:
    mine, theirs = whole(0.0), whole(1.0)
    mine.update(theirs, keys_to_update=["a"])
    assert mine.a is theirs.a and not mine.p.x.any()
    mine.update(theirs, keys_to_update=[("p", "x")])
    assert mine.p.x is theirs.p.x


def test_options_and_fields_by_keyword() -> None:
    mine, theirs = whole(0.0), whole(1.0)
    value = torch.full((3, 2), 5.0)
    mine.update(theirs, a=value)
    assert mine.a is value and mine.p.x is theirs.p.x


def test_locks_are_kept() -> None:
    mine = whole(0.0).lock_()
    with pytest.raises(LockedError):
        mine.update(whole(1.0))
    half = whole(0.0)
    half.p.lock_()
    with pytest.raises(LockedError):
        half.update(whole(1.0))
    assert not half.a.any()  # all or nothing


def test_other_batch_sizes_are_refused() -> None:
    mine = whole(0.0)
    longer = Whole(a=torch.ones(4, 2), p=Part(torch.ones(4), batch_size=[4]), batch_size=[4])
    with pytest.raises(BatchSizeError):
        mine.update(longer)
    assert not mine.a.any() and not mine.p.x.any()


def test_conversions_are_made() -> None:
    mine, theirs = (Counted(n=n, a=torch.zeros(2), batch_size=[2]) for n in (1, 2))
    theirs._tensordict.set("n", torch.tensor([7, 7]))  # past the class, which would have converted it
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        mine.update(theirs)
    theirs._tensordict.set_non_tensor("n", 3)
    mine.update(theirs)
    assert mine.n == 3
    outer = [HoldsCounted(c=Counted(n=n, a=torch.zeros(2), batch_size=[2]), batch_size=[2]) for n in (1, 2)]
    outer[0].update(outer[1])
    assert outer[0].c.n == 2


def test_frozen_ones_are_refused() -> None:
    class Frozen(TensorClass["frozen"]):
        a: torch.Tensor

    one, two = (Frozen(torch.full((2,), fill), batch_size=[2]) for fill in (0.0, 1.0))
    with pytest.raises(FrozenError):
        one.update(two)
    assert not one.a.any()


def test_objects_inside_a_tensordict() -> None:
    tds = [TensorDict({"w": whole(fill), "z": torch.full((3,), fill)}, [3]) for fill in (0.0, 1.0)]
    kept = tds[0]["w"]
    tds[0].update(tds[1])
    assert tds[0]["w"] is kept and kept.a is tds[1]["w"].a and tds[0]["z"] is tds[1]["z"]


def test_attributes_of_lazy_stacks_only() -> None:
    stack = lazy_stack([whole(0.0), whole(1.0)])
    assert stack.stack_dim == 0 and len(stack.tensordicts) == 2
    with pytest.raises(AttributeError, match="no field"):
        whole(0.0).stack_dim  # noqa: B018


def test_in_place_writes_take_objects_of_the_class_only() -> None:
    mine, theirs = whole(0.0), whole(1.0)
    kept = mine.a
    mine.update_(theirs)
    assert mine.a is kept and mine.a.sum() == 6
    with pytest.raises(ValueError, match="no field"):
        mine.update_({"c": torch.ones(3)})
