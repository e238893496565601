"""The acceptance scenarios C1 to C7 of RL.md 5.5, with their values, in memory and on every storage that they touch."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorClass, TensorDict, lazy_stack, tensorclass

from .classes import PLACES, Counted, Frozen, Inner, Outer, outer

WHERE = ["memory", *PLACES, "redis"]


@pytest.fixture(params=WHERE)
def put(request, tmp_path):
    """A function that saves an object somewhere and opens it again to read and write; in memory, a copy."""
    opened = []
    kind = request.param

    def put(obj):
        if kind == "memory":
            return obj.clone()
        if kind == "redis":
            place = f"{request.getfixturevalue('redis').url}/{tmp_path.name}-{len(opened)}"
        else:
            folder = tmp_path / str(len(opened))
            folder.mkdir()
            place = PLACES[kind](folder)
        opened.append(obj.save(place))
        if kind != "shared":
            opened[-1].close()
            opened[-1] = tdstore.open(place, mode="r+")
        return opened[-1]

    yield put
    for td in opened:
        td.close()


def test_c1_what_is_not_given(put):
    o = put(Outer(t=torch.zeros(3, 2), batch_size=[3]))
    assert o.opt is None and o.name == "n" and type(o.name) is str and o.batch_size == (3,)
    assert set(o.keys()) == {"t", "name"} and o[0].name == "n"


def test_c2_a_stack_of_two_names(put):
    s = put(torch.stack([Outer(t=torch.ones(2), name="a"), Outer(t=torch.zeros(2), name="b")]))
    assert type(s) is Outer and list(s.name) == ["a", "b"] and s[1].name == "b" and type(s[1].name) is str


def test_c2_two_lengths(put):
    parts = [Outer(t=torch.ones(2)), Outer(t=torch.zeros(3))]
    with pytest.raises(RuntimeError, match="'t'"):
        torch.stack(parts)
    s = put(lazy_stack(parts))
    with pytest.raises(RuntimeError, match="as_padded_tensor"):
        _ = s.t
    assert s.get("t", as_padded_tensor=True).tolist() == [[1, 1, 0], [0, 0, 0]]
    assert s.get("t", as_padded_tensor=True, padding_side="left").tolist() == [[0, 1, 1], [0, 0, 0]]
    assert [t.tolist() for t in s.get("t", as_list=True)] == [[1, 1], [0, 0, 0]]
    assert [t.tolist() for t in s.get("t", as_nested_tensor=True).unbind()] == [[1, 1], [0, 0, 0]]


def test_c3_there_and_back(put):
    """`test_stored` has this with every way to open, below TensorDicts and in lazy stacks."""
    o = put(outer())
    assert type(o) is Outer and type(o.inner) is Inner and o.opt is None
    assert (o.name, type(o.name), o.inner.tag) == ("a", str, "in") and o.t.tolist() == outer().t.tolist()


def test_c4_names_that_are_no_fields(put):
    td = put(TensorDict({"t": torch.zeros(2), "zz": 1}))
    with pytest.raises(ValueError, match="'zz'"):
        Outer.from_tensordict(td)
    o = put(Outer(t=torch.zeros(2)))
    with pytest.raises(KeyError, match="zz"):
        o.load_state_dict({"zz": torch.zeros(2)})
    o.load_state_dict({"zz": torch.zeros(2)}, strict=False)
    assert o.t.tolist() == [0, 0] and "zz" not in o.keys()  # noqa: SIM118


class Cast(TensorClass, autocast=True):
    i: int = 0


def test_c5_flags(put):
    obj = put(Cast(i=torch.tensor(3)))
    assert obj.i == 3 and type(obj.i) is int
    if not obj.is_locked:  # as what lies in shared memory is
        obj.i = torch.tensor(4)
        assert obj.i == 4 and type(obj.i) is int
    before = obj.i
    with pytest.raises(ValueError, match="'i'"):
        obj.i = "abc"
    assert obj.i == before
    frozen = put(Frozen(x=torch.zeros(2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.x = torch.ones(2)
    with pytest.raises(AttributeError, match="any"):
        tensorclass(type("Bad", (), {"__annotations__": {"any": Any}}))


def test_c6_state_dict(put):
    blank = outer().zero_()
    blank.name, blank.inner.tag = "z", "z"
    source, target = put(outer()), put(blank)
    state = source.state_dict()
    assert list(state) == ["t", "inner.x"]
    held = target.t
    in_memory = held.data_ptr() == target.t.data_ptr()
    target.load_state_dict(state)
    assert target.t.tolist() == outer().t.tolist() and target.inner.x.tolist() == [0, 1, 2]
    assert (target.name, target.inner.tag) == ("a", "in") and type(target.name) is str
    assert not in_memory or target.t.data_ptr() == held.data_ptr()


def test_c7_post_init_runs_for_what_the_user_makes(put, tmp_path):
    Counted.runs = 0
    made = Counted(x=torch.arange(3.0), batch_size=[3])
    stack = torch.stack([made[0], made[1]])
    stack.memmap(tmp_path / "m")
    TensorDict.load_memmap(tmp_path / "m")
    stored = put(stack)
    for use in (stored[0], stored.clone(), stored + 1, stored.to("cpu"), stored.reshape(2, 1), *stored.unbind(0)):
        assert type(use) is Counted
    pickle.loads(pickle.dumps(made)), torch.vmap(lambda row: row.x)(made)
    assert Counted.runs == 1
    assert Counted.from_tensordict(stored.to_tensordict()).x.tolist() == [0, 1] and Counted.runs == 2
    assert Counted.from_dict({"x": torch.zeros(2)}).x.tolist() == [0, 0] and Counted.runs == 3
    assert Counted.from_any({"x": torch.zeros(2)}).x.tolist() == [0, 0] and Counted.runs == 4
