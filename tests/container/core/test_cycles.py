"""A TensorDict is never its own entry, nor below itself: every method that would set it there refuses."""

from __future__ import annotations

import pytest
import torch

import tdstore
from tdstore import TensorDict, errors


class Item(tdstore.TensorClass):
    a: torch.Tensor
    n: TensorDict


def tree():
    return TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}, "o": {"c": torch.zeros(2)}}, [2])


def wrapped(td):
    return TensorDict({"w": td}, [2])


def through_a_view(td):
    with td.unflatten_keys() as view:
        view["n", "q"] = td


WAYS = {
    "td[q] =": lambda td: td.__setitem__("q", td),
    "td[n, q] =": lambda td: td.__setitem__(("n", "q"), td),
    "of a group": lambda td: td["n"].set("q", td),
    "below a group": lambda td: td["n"].set(("q", "r"), td),
    "dict": lambda td: td.set("q", {"w": td}),
    "dict of a group": lambda td: td["n"].set("q", {"w": {"v": td}}),
    "wrapped": lambda td: td.set("q", wrapped(td)),
    "wrapped in a group": lambda td: td.set(("n", "q"), wrapped(td)),
    "two groups": lambda td: (td["n"].set("o", td["o"]), td["o"].set("n", td["n"])),
    "lazy stack": lambda td: td.set("q", tdstore.lazy_stack([td, td], 1)),
    "lazy stack of a group": lambda td: td["n"].set("q", tdstore.lazy_stack([td, td], 1)),
    "update, a path": lambda td: td.update({("n", "q"): td}),
    "update, a new path": lambda td: td.update({("q", "r"): td}),
    "update, a dict": lambda td: td.update({"n": {"q": td}}),
    "update, a new dict": lambda td: td.update({"q": {"r": td}}),
    "update, a TensorDict": lambda td: td.update(TensorDict({"n": TensorDict({"q": td}, [2])}, [2])),
    "update, some keys": lambda td: td.update({"n": {"q": td}}, keys_to_update=[("n", "q")]),
    "update of a group": lambda td: td["n"].update(q=td),
    "setdefault": lambda td: td.setdefault(("n", "q"), td),
    "a view": through_a_view,
}


@pytest.mark.parametrize("way", WAYS)
def test_no_tensordict_is_set_below_itself(way):
    td = tree()
    with pytest.raises(errors.InvalidArgumentError, match="its own entry"):
        WAYS[way](td)
    assert ("q" in td, "q" in td["n"]) == (False, False)
    assert set(td.clone().keys(True, True)) >= {"a", ("n", "b"), ("o", "c")}


LAZY_WAYS = {
    "an element": lambda lazy: lazy.tensordicts[0].set("q", lazy),
    "a group of an element": lambda lazy: lazy.tensordicts[0]["n"].set("q", lazy),
    "a group": lambda lazy: lazy["n"].set("q", lazy),
    "update, a path": lambda lazy: lazy.update({("n", "q"): lazy}),
    "append": lambda lazy: lazy.append(wrapped(lazy)),
    "insert": lambda lazy: lazy.insert(0, wrapped(lazy)),
    "extend": lambda lazy: lazy.extend([tree(), wrapped(lazy)]),
}


@pytest.mark.parametrize("way", LAZY_WAYS)
def test_no_lazy_stack_is_set_below_itself(way):
    lazy = tdstore.lazy_stack([tree(), tree()])
    with pytest.raises(errors.InvalidArgumentError, match="its own entry"):
        LAZY_WAYS[way](lazy)
    assert lazy.clone().keys(True, True) == {"a", ("n", "b"), ("o", "c")}
    assert len(lazy.tensordicts) == 2


OBJECT_WAYS = {
    "field": lambda obj: setattr(obj, "n", obj),
    "set": lambda obj: obj.set("n", obj),
    "a group": lambda obj: obj.n.set("q", obj),
    "update": lambda obj: obj.update({("n", "q"): obj}),
}


@pytest.mark.parametrize("way", OBJECT_WAYS)
def test_no_object_of_a_class_is_set_below_itself(way):
    obj = Item(a=torch.zeros(2), n=TensorDict({"b": torch.zeros(2)}, [2]), batch_size=[2])
    with pytest.raises(errors.InvalidArgumentError, match="its own entry"):
        OBJECT_WAYS[way](obj)
    assert list(obj.clone().n.keys()) == ["b"]


def test_a_shallow_copy_and_one_group_at_two_keys_are_no_cycle():
    td = tree()
    td["n", "q"] = td.clone(recurse=False)
    td["m"] = td["o"]
    td["n"]["o"] = td["o"]
    assert td["n", "q", "n"].keys() == {"b"}
    assert td["m"] is td["n", "o"]
