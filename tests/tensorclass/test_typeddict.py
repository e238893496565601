"""`TypedTensorDict`: a TensorDict whose fields are declared, over any container."""

from __future__ import annotations

import copy
import pickle
from typing import NotRequired

import pytest
import tensordict
import torch
from torch import Tensor

import tdstore
from tdstore import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    TypedTensorDict,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
)

from .classes import PLACES


class Step(TypedTensorDict):
    x: Tensor
    y: NotRequired[Tensor]


class Played(Step):
    z: Tensor


class Held(TypedTensorDict):
    step: Step
    name: str = "n"
    tags: list = None


X = torch.arange(6.0).reshape(3, 2)


def step(**kwargs):
    return Step(x=X, batch_size=[3], **kwargs)


# -- as the peer's ---------------------------------------------------------------------------
def declared(m):
    """The class of the cases, of one package; annotations are types here, strings above."""
    body = {"__annotations__": {"x": Tensor, "y": NotRequired[Tensor]}, "__module__": __name__}
    base = type("Base", (m.TypedTensorDict,), body)
    return base, type("More", (base,), {"__annotations__": {"z": Tensor}, "__module__": __name__})


def raised(fn):
    try:
        return fn()
    except Exception as error:
        return next(
            kind for kind in (AttributeError, KeyError, TypeError, ValueError, Exception) if isinstance(error, kind)
        )


CASES = {
    "made": lambda m, S, M: S(x=X, batch_size=[3]),
    "made of a dict": lambda m, S, M: S({"x": X}, batch_size=[3], names=["t"], device="cpu", lock=True),
    "without a batch": lambda m, S, M: S(x=X),
    "a number": lambda m, S, M: S(x=1),
    "an optional field": lambda m, S, M: S(x=X, y=X[:, 0], batch_size=[3]).y,
    "a required field is missing": lambda m, S, M: S(batch_size=[3]),
    "one of the base is missing": lambda m, S, M: M(z=X, batch_size=[3]),
    "no such field": lambda m, S, M: S(x=X, q=X, batch_size=[3]),
    "by position": lambda m, S, M: S({"x": X}, [3]),
    "attribute": lambda m, S, M: S(x=X, batch_size=[3]).x is X,
    "key": lambda m, S, M: S(x=X, batch_size=[3])["x"] is X,
    "attribute not set": lambda m, S, M: S(x=X, batch_size=[3]).y,
    "no such attribute": lambda m, S, M: S(x=X, batch_size=[3]).q,
    "get": lambda m, S, M: [S(x=X, batch_size=[3]).get("y"), S(x=X, batch_size=[3]).get("q", 4)],
    "no such key": lambda m, S, M: S(x=X, batch_size=[3])["q"],
    "set": lambda m, S, M: after(S(x=X, batch_size=[3]), lambda s: setattr(s, "x", X + 1)),
    "set a key": lambda m, S, M: after(S(x=X, batch_size=[3]), lambda s: s.__setitem__("y", X)),
    "set another key": lambda m, S, M: after(S(x=X, batch_size=[3]), lambda s: s.set("q", X)),
    "set rows": lambda m, S, M: after(S(x=X.clone(), batch_size=[3]), lambda s: s.__setitem__(0, s[1])),
    "update": lambda m, S, M: S(x=X, batch_size=[3]).update({"y": X, "q": X}),
    "del_": lambda m, S, M: S(x=X, batch_size=[3]).del_("x"),
    "keys": lambda m, S, M: [list(S(x=X, batch_size=[3]).keys()), "x" in S(x=X, batch_size=[3])],
    "spread": lambda m, S, M: M(**S(x=X, batch_size=[3]), z=X, batch_size=[3]),
    "row": lambda m, S, M: S(x=X, batch_size=[3])[0],
    "maths": lambda m, S, M: S(x=X, batch_size=[3]) + 1,
    "to": lambda m, S, M: S(x=X, batch_size=[3]).to(torch.float64),
    "stack": lambda m, S, M: torch.stack([S(x=X, batch_size=[3])] * 2),
    "cat": lambda m, S, M: torch.cat([S(x=X, batch_size=[3])] * 2),
    "clone": lambda m, S, M: S(x=X, batch_size=[3]).clone(),
    "exclude": lambda m, S, M: S(x=X, batch_size=[3]).exclude("x"),
    "empty": lambda m, S, M: S(x=X, batch_size=[3]).empty(),
    "rename": lambda m, S, M: S(x=X, batch_size=[3]).rename_key_("x", "w"),
    "apply": lambda m, S, M: S(x=X, batch_size=[3]).apply(lambda v: v * 2),
    "reshape": lambda m, S, M: S(x=X, batch_size=[3]).view(3, 1).unsqueeze(0),
    "unbind": lambda m, S, M: list(S(x=X, batch_size=[3]).unbind(0)),
    "rows": lambda m, S, M: list(S(x=X, batch_size=[3])),
    "to_tensordict": lambda m, S, M: S(x=X, batch_size=[3]).to_tensordict(),
    "to_dict": lambda m, S, M: list(S(x=X, batch_size=[3]).to_dict()),
    "from_dict": lambda m, S, M: S.from_dict({"x": X}, batch_size=[3]),
    "deepcopy": lambda m, S, M: copy.deepcopy(S(x=X, batch_size=[3])),
    "tree_map": lambda m, S, M: torch.utils._pytree.tree_map(lambda v: v + 1, S(x=X, batch_size=[3])),
    "replace": lambda m, S, M: S(x=X, batch_size=[3]).replace(x=X + 1),
    "nested": lambda m, S, M: m.TensorDict({"s": S(x=X, batch_size=[3])}, [3])[0]["s"],
    "around": lambda m, S, M: S.from_tensordict(m.TensorDict({"x": X, "q": X}, [3])),
    "around a lazy stack": lambda m, S, M: S.from_tensordict(m.lazy_stack([m.TensorDict(x=X), m.TensorDict(x=X)]))[0],
    "around too little": lambda m, S, M: S.from_tensordict(m.TensorDict(y=X)),
    "around too little, unchecked": lambda m, S, M: S.from_tensordict(m.TensorDict(y=X), check=False),
    "kinds": lambda m, S, M: [
        isinstance(S(x=X), m.TensorDictBase),
        isinstance(S(x=X), m.TensorDict),
        m.is_tensor_collection(S(x=X)),
        m.is_tensorclass(S(x=X)),
        m.is_tensorclass(S),
    ],
    "sets of keys": lambda m, S, M: [
        [sorted(c.__required_keys__), sorted(c.__optional_keys__), sorted(c.__expected_keys__)] for c in (S, M)
    ],
    "reserved name": lambda m, S, M: type("B", (m.TypedTensorDict,), {"__annotations__": {"data": Tensor}}),
    "shadow": lambda m, S, M: (
        type("B", (m.TypedTensorDict["shadow"],), {"__annotations__": {"data": Tensor}})(data=X).data
    ),
}


def after(obj, change):
    change(obj)
    return obj


def plain(value):
    if is_tensor_collection(value) or tensordict.is_tensor_collection(value):
        kept = tuple(value.batch_size), value.is_locked, list(value.names), str(value.device)
        return [type(value).__name__, *kept, {k: plain(value[k]) for k in sorted(value.keys())}]
    if isinstance(value, Tensor):
        return [str(value.dtype), value.tolist()]
    return [plain(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", CASES)
def test_as_the_peer(name):
    theirs, ours = (plain(raised(lambda m=m: CASES[name](m, *declared(m)))) for m in (tensordict, tdstore))
    assert ours == theirs


# -- where ours does more --------------------------------------------------------------------
def test_values_come_unwrapped_and_defaults_count():
    held = Held(step=TensorDict(x=X, batch_size=[3]), batch_size=[3])
    assert type(held.step) is Step and held.step.x is X
    assert held.name == held["name"] == "n" and held.get("name").data == "n"  # as td.get of any TensorDict
    assert "tags" not in held and Held.__optional_keys__ == {"name", "tags"}


def test_a_name_that_is_no_field_is_not_set_as_an_attribute():
    obj = step()
    with pytest.raises(AttributeError, match="no field 'q'"):
        obj.q = X  # the peer keeps it beside the TensorDict, where nothing sees it
    obj.y = X
    del obj.y
    assert list(obj.keys()) == ["x"]
    with pytest.raises(TypeError, match="not a Tensor"):
        Step(X)


def test_a_field_that_is_not_set_says_so():
    with pytest.raises(AttributeError, match="^'y' of Step is not set$"):
        step().y


def test_from_a_schema(tmp_path):
    schema = {"x": ((2,), torch.float32), "q": ((), torch.int64)}
    made = Step.from_schema(schema, batch_size=[4], location=tmp_path / "s.h5")
    assert type(made) is Step and made[1:].x.shape == (3, 2)
    made.close()
    with tdstore.open(tmp_path / "s.h5") as again:
        assert type(again) is Step and again["q"].tolist() == [0] * 4


def test_a_frozen_one():
    class Fixed(TypedTensorDict, frozen=True):
        x: Tensor

    obj = Fixed(x=X.clone(), batch_size=[3])
    for change in (lambda: setattr(obj, "x", X), lambda: obj.set("x", X), lambda: obj.update({"x": X})):
        with pytest.raises((AttributeError, RuntimeError)):
            change()
    assert obj.is_locked and obj.zero_().x.sum() == 0


def test_get_follows_the_default_of_all_tensordicts():
    tdstore.set_get_defaults_to_none(False)
    try:
        with pytest.raises(KeyError):
            step().get("y")
    finally:
        tdstore.set_get_defaults_to_none(True)


def test_elements_of_a_lazy_stack_keep_the_class():
    stack = lazy_stack([step(), step()])
    assert type(stack) is LazyStackedTensorDict and stack["x"].shape == (2, 3, 2) and type(stack[0]) is Step
    assert isinstance(stack, TensorDictBase)


@pytest.mark.parametrize("place", [*PLACES, "redis"])
def test_nothing_is_copied_and_every_storage_keeps_the_class(place, tmp_path, request):
    location = f"{request.getfixturevalue('redis').url}/typed" if place == "redis" else PLACES[place](tmp_path)
    step(y=X[:, 0]).set("q", X).save(location).close()
    with tdstore.open(location, mode="r+") as td:
        assert (
            type(td) is Step
            and not is_tensorclass(td)
            and td.y.tolist() == [0, 2, 4]
            and td["q"].tolist() == X.tolist()
        )
        inner = td._tensordict
        obj = Step.from_tensordict(inner)
        assert obj._tensordict is inner
        obj[0] = {"x": torch.full((2,), 9.0), "y": torch.tensor(9.0), "q": torch.zeros(2)}
        assert td[0].x.tolist() == [9, 9] and type(td[1:]) is Step
        assert type(pickle.loads(pickle.dumps(td))) is Step
