"""Tensorclasses: keys that are no fields, classes that nobody declared, shapes in annotations."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import pytest
import tensordict as peer
import torch
from torch import Tensor

import tdstore
from tdstore import TensorClass, TensorDict, TypedTensorDict, lazy_stack, tensorclass
from tdstore.container.core import tensorclasses
from tdstore.errors import LockedError

from .classes import PLACES, Counted, Frozen, Inner, Outer, outer


# -- replace and update ------------------------------------------------------------------------------
@peer.tensorclass
class PeerOuter:
    t: Tensor
    name: str = "n"


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.replace(zz=torch.ones(3)),
        lambda o: o.replace({"zz": torch.ones(3)}),
        lambda o: o.replace({"t": torch.ones(3, 2), "zz": 1}),
        lambda o: o.update(zz=torch.ones(3)),
        lambda o: o.update({"t": torch.ones(3, 2)}, zz=torch.ones(3)),
    ],
)
def test_what_is_no_field_is_refused(change):
    theirs = PeerOuter(t=torch.zeros(3, 2), batch_size=[3])
    for obj in (theirs, outer(), lazy_stack(list(outer()))):
        before = obj.t.clone()
        with pytest.raises((ValueError, RuntimeError), match="zz|batch dimension"):
            change(obj)
        assert "zz" not in obj.keys() and torch.equal(obj.t, before)
    with pytest.raises(ValueError, match="Outer has no field 'zz'; its fields are t, opt, name, inner"):
        change(outer())


@pytest.mark.parametrize("kind", ["memory", "lazy", "memmap", "h5", "zarr"])
def test_replace_gives_another_object_of_the_class(kind, tmp_path):
    obj = outer() if kind == "memory" else lazy_stack(list(outer())) if kind == "lazy" else None
    obj = outer().save(PLACES[kind](tmp_path)) if obj is None else obj
    made = obj.replace(t=torch.ones(3, 2), name="b", inner=None)
    assert type(made) is Outer and made.t.sum() == 6 and made.inner is None and "b" in str(made.name)
    assert obj.t.sum() == 15 and obj.inner.x.tolist() == [0, 1, 2] and "a" in str(obj.name)
    assert obj.replace() is obj and type(obj.replace(inner=Inner(x=torch.ones(3), batch_size=[3])).inner) is Inner
    if kind in ("h5", "zarr"):
        obj.close()


def test_replace_of_frozen_casting_and_open_classes():
    frozen = Frozen(x=torch.zeros(2))
    made = frozen.replace(x=torch.ones(2))
    assert type(made) is Frozen and made.is_locked and made.x.sum() == 2 and frozen.x.sum() == 0

    @tensorclass(autocast=True)
    class Cast:
        i: int

    assert Cast(i=1).replace(i=torch.tensor(4)).i == 4

    class Open(TypedTensorDict):
        x: Tensor

    assert Open(x=torch.zeros(2)).replace(y=torch.ones(2))["y"].sum() == 2
    Counted.runs = 0
    Counted(x=torch.zeros(1)).replace(x=torch.ones(1))
    assert Counted.runs == 1  # as for every other method that gives an object
    assert dataclasses.replace(outer(), name="z").name == "z"


# -- classes that are not declared -------------------------------------------------------------------
def unknown(monkeypatch, place):
    """A dataset of two classes that this process does not know, one of them three times."""
    body = {"__annotations__": {"x": Any}, "__module__": "gone"}
    Part = tensorclass(type("Part", (), dict(body)))
    Whole = tensorclass(type("Whole", (), {"__annotations__": {"a": Any, "b": Any, "c": Any}, "__module__": "gone"}))
    parts = [Part(x=torch.arange(2), batch_size=[2]) for _ in range(3)]
    TensorDict({"w": Whole(*parts, batch_size=[2])}, [2]).save(place).close()
    for name in ("gone.Part", "gone.Whole"):
        monkeypatch.delitem(tensorclasses._known, name)


@pytest.mark.parametrize("kind", ["memmap", "h5", "zarr"])
def test_a_load_warns_once_and_names_each_unknown_class_once(kind, monkeypatch, tmp_path):
    place = PLACES[kind](tmp_path)
    unknown(monkeypatch, place)
    for _ in range(2):  # each load by itself
        with pytest.warns(UserWarning) as caught, tdstore.open(place) as td:
            assert type(td["w"]["b"]) is type(td["w", "a"]) is type(td) and td["w", "c", "x"].tolist() == [0, 1]
            assert td[1]["w", "a", "x"] == 1
            td["w"].to_tensordict()
        (text,) = [str(w.message) for w in caught]
        assert text.count("gone.Whole") == text.count("gone.Part") == 1 and "not declared" in text


def test_a_lost_field_is_told_once_a_load(tmp_path):
    body = {"__annotations__": {"x": Tensor, "y": Tensor}}
    Lost = tensorclass(type("Lost", (), dict(body)))
    obj = Lost(x=torch.zeros(2), y=torch.zeros(2), batch_size=[2])
    TensorDict({"a": obj, "b": obj.clone()}, [2]).save(tmp_path / "a.h5").close()
    tensorclass(type("Lost", (), {"__annotations__": {"x": Tensor}}))
    with pytest.warns(UserWarning, match="'y', which the class lacks") as caught, tdstore.open(tmp_path / "a.h5") as td:
        assert td["a"]["y"].sum() == td["b", "y"].sum() == td["a", "x"].sum()
    assert len(caught) == 1


# -- check ---------------------------------------------------------------------------------------------
class Float:
    """As an annotation of jaxtyping looks from outside."""

    dim_str = "b *more 4"


class Pose(TensorClass):
    xy: Annotated[Tensor, ("b", 2)]


class Step(TensorClass):
    obs: Annotated[Tensor, "b t 3"]
    mask: Annotated[Tensor, "b t"] | None = None
    pose: Annotated[Pose, "b"] | None = None
    free: Annotated[Tensor, "... _"] | None = None
    note: Annotated[str, "no dimensions at all"] = "n"
    more: Float | None = None
    odd: NoSuchName | None = None  # type: ignore[name-defined]  # noqa: F821


def step(**fields: Any) -> Any:
    return Step(**{"obs": torch.zeros(2, 5, 3), **fields}, batch_size=[2])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask": torch.zeros(2, 5)},
        {"pose": Pose(xy=torch.zeros(2, 2), batch_size=[2])},
        {"more": torch.zeros(2, 8, 8, 4)},
        {"more": torch.zeros(2, 4), "note": "x"},
    ],
)
def test_shapes_that_annotations_allow(fields, tmp_path):
    obj = step(**fields)
    assert obj.check() is obj
    with obj.save(tmp_path / "a.h5") as stored:
        assert stored.check() is stored


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"obs": torch.zeros(2, 5, 4)}, r"'obs' of shape \[2, 5, 4\] is annotated 'b t 3': dimension 2 is 4, not 3"),
        ({"obs": torch.zeros(2, 5)}, "2 dimensions, not 3"),
        ({"mask": torch.zeros(2, 6)}, "'mask' of .*: t is 6 here and 5 in 'obs'"),
        ({"more": torch.zeros(2, 8, 3)}, "'more'.*dimension 2 is 3, not 4"),
        ({"more": torch.zeros(2)}, "'more'.*1 dimensions"),
        ({"pose": Pose(xy=torch.zeros(2, 7), batch_size=[2])}, r"'pose' / 'xy' of shape \[2, 7\]"),
        ({"mask": torch.zeros(2, 6), "more": torch.zeros(2, 3)}, "'mask'.*; 'more'"),
    ],
)
def test_shapes_that_annotations_do_not_allow(fields, says):
    obj = step(**fields)  # off by default: it can be made
    with pytest.raises(ValueError, match=says):
        obj.check()


def test_a_field_may_be_called_check():
    class Own(TensorClass):
        check: Tensor

    assert Own(check=torch.ones(2)).check.sum() == 2


def test_what_is_below_twice_is_unlocked_with_all():
    shared = TensorDict({"x": torch.ones(2)})
    both = TensorDict({"a": {"s": shared}, "b": {"s": shared}})
    both["a", "s"], both["b", "s"] = shared, shared
    both.lock_()
    assert shared.is_locked
    both.unlock_()
    assert not shared.is_locked
    other = TensorDict({"s": shared}).lock_()
    both.lock_()
    with pytest.raises(LockedError, match="another locked one"):
        both.unlock_()
    assert both.is_locked and both["a"].is_locked and shared.is_locked and other.is_locked


def test_deep_trees_are_locked():
    deep = TensorDict({})
    for _ in range(3000):
        deep = TensorDict({"n": deep})
    assert deep.lock_().is_locked
    assert not deep.unlock_().is_locked
