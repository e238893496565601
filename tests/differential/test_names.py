"""Names of dimensions: those of nested TensorDicts, of what is set, of what is stacked."""

from __future__ import annotations

import pytest
import torch

import tdstore

from .cases import Case, Cases
from .oracle import Side
from .programs import check
from .structures import t

case = Cases()


def named(M: Side, names: object, nested: object = None) -> object:
    td = M.td({"a": t(2, 3)}, [2], names=names)
    return td if nested is None else td.set("n", M.td({"b": t(2, 3)}, [2, 3], names=nested))


def names_of(td: object) -> object:
    return {"": td.names, **{key: td[key].names for key in td.keys() if not isinstance(td[key], torch.Tensor)}}


def lazy(M: Side) -> object:
    return M.lazy_stack([M.td({"a": t(3)}, [3])] * 2)


def renamed(td: object, names: object) -> object:
    td.names = names
    return names_of(td)


# --- a TensorDict without names takes those of what is set ---
SET = {
    "set": lambda td, new: td.set("n", new),
    "subscript": lambda td, new: td.__setitem__("n", new),
    "update": lambda td, new: td.update({"n": new}),
    "update by keyword": lambda td, new: td.update(n=new),
    "setdefault": lambda td, new: td.setdefault("n", new),
    "replace": lambda td, new: td.update(td.replace(n=new)),
    "a nested dict": lambda td, new: td.set("n", {"m": new}),
    "below an entry": lambda td, new: td.set(("z", "n"), new),
    "below a new entry": lambda td, new: td.set(("y", "n"), new),
    "update below": lambda td, new: td.update({"z": {"n": new}}),
    "then removed": lambda td, new: td.set("n", new).del_("n"),
    "then renamed": lambda td, new: td.set("n", new).rename_key_("n", "m"),
    "twice": lambda td, new: td.set("n", new).set("m", new.clone()),
    "then cleared": lambda td, new: setattr(td.set("n", new), "names", None),
}
BATCHES = {
    "of the same batch": ([2], ["x"]),
    "of a larger batch": ([2, 3], ["x", "y"]),
    "of a larger batch, the first unnamed": ([2, 3], [None, "y"]),
}
for how, change in SET.items():
    for what, (batch, names) in BATCHES.items():
        if "unnamed" in what:
            continue

        def setting(M: Side, change=change, batch=batch, names=names) -> object:
            td = M.td({"a": t(2, 3), "z": M.td({}, [2])}, [2])
            change(td, M.td({"b": t(2, 3, 4)}, batch, names=names))
            return names_of(td), td["z"].names

        case(f"{how}, a TensorDict {what}", setting)
case("set of a smaller batch", lambda M: names_of(M.td({}, [2, 3]).set("n", M.td({"b": t(2, 3)}, [2], names=["x"]))))
case("set into a batch without dimensions", lambda M: names_of(M.td({}).set("n", named(M, ["x"]))))
case("set into a named one", lambda M: names_of(named(M, ["x"]).set("n", named(M, ["x"]))))
case("set of an unnamed one into a named one", lambda M: names_of(named(M, ["x"]).set("n", named(M, None))))
case("set with a name that differs", lambda M: named(M, ["x"]).set("n", named(M, ["y"])))
case("a second with a name that differs", lambda M: M.td({}, [2]).set("n", named(M, ["x"])).set("m", named(M, ["y"])))
case("made of a dict", lambda M: names_of(M.td({"a": t(2), "n": named(M, ["x"])}, [2])))
case("made of nested dicts", lambda M: names_of(M.td({"a": t(2), "n": {"m": named(M, ["x"])}}, [2])))
case("from_dict", lambda M: names_of(M.TensorDict.from_dict({"n": {"m": named(M, ["x"])}}, batch_size=[2])))
case("a tensor is set", lambda M: M.td({"a": t(2)}, [2]).set("b", t(2)).names)
case("an update with a named one", lambda M: M.td({"a": t(2)}, [2]).update(M.td({"b": t(2)}, [2], names=["x"])).names)
case("stacked after", lambda M: names_of(torch.stack([M.td({"n": named(M, ["x"])}, [2])] * 2)))
case("cloned after", lambda M: names_of(M.td({}, [2]).set("n", named(M, ["x"])).clone()))
case("indexed after", lambda M: names_of(M.td({}, [2]).set("n", named(M, ["x"]))[:1]))
case("a lazy stack takes them", lambda M: names_of(lazy(M).set("n", M.td({}, [2, 3], names=["x", "y"]))))

# --- names of nested TensorDicts ---
for new in (["c"], [None], None, ["y"], ["x"]):
    for own in (["x", "y"], ["x", None]):
        case(
            f"names = {new} over {own}",
            lambda M, n=new, o=own: (lambda td: (setattr(td, "names", n), names_of(td)))(named(M, ["x"], o)),
        )
case("rename_ with further names below", lambda M: names_of(named(M, ["x"], ["x", "y"]).rename_(x="z")))
case(
    "refine_names with further names below",
    lambda M: names_of(named(M, [None]).set("n", M.td({}, [2, 3])).refine_names("z")),
)
ELEMENTS = {
    "unnamed": (None, None),
    "named": (["e"], ["e", "f"]),
    "named alike": (["e"], ["e", None]),
}
CHOSEN = [["c", "d"], ["d", "c"], ["c", None], [None, "d"], None, [None, None]]
TAKEN = [["e", "d"], ["d", "e"], ["f", "d"], ["d", "f"]]
for kind, (own, below) in ELEMENTS.items():
    for dim in (0, 1):
        for new in CHOSEN + TAKEN:

            def naming(M: Side, own=own, below=below, dim=dim, new=new) -> object:
                nested = [M.td({"b": t(3, 4)}, [3, 4], names=below) for _ in range(2)]
                elements = [M.td({"a": t(3), "n": n}, [3], names=own) for n in nested]
                stack = M.lazy_stack(elements, dim)
                before = names_of(stack)
                stack.names = new
                return before, names_of(stack), names_of(elements[0])

            case(f"names = {new} of a lazy stack along {dim} of elements {kind}", naming)

# --- joining ---
JOIN = {
    "torch.stack": lambda M, tds: torch.stack(tds),
    "torch.stack along 1": lambda M, tds: torch.stack(tds, 1),
    "stack": lambda M, tds: M.stack(tds),
    "cat": lambda M, tds: torch.cat(tds),
    "lazy_stack": lambda M, tds: M.lazy_stack(tds),
    "maybe_dense_stack": lambda M, tds: M.maybe_dense_stack(tds),
    "the class": lambda M, tds: M.LazyStackedTensorDict(*tds),
    "append": lambda M, tds: (lambda s: (s.append(tds[1]), s)[1])(M.lazy_stack([tds[0]])),
    "insert": lambda M, tds: (lambda s: (s.insert(0, tds[1]), s)[1])(M.lazy_stack([tds[0]])),
    "lazy legacy": lambda M, tds: M.set_lazy_legacy(True)(torch.stack)(tds),
}  # fmt: skip
PAIRS = {
    "alike": ((["x"], None), (["x"], None)),
    "different": ((["x"], None), (["z"], None)),
    "the first": ((["x"], None), (None, None)),
    "the second": ((None, None), (["x"], None)),
    "none": ((None, None), (None, None)),
    "nested alike": ((["x"], ["x", "y"]), (["x"], ["x", "y"])),
    "nested, both different": ((["x"], ["x", "y"]), (["z"], ["z", "y"])),
}
for how, join in JOIN.items():
    for which, (first, second) in PAIRS.items():
        if how == "cat" and which == "nested, both different":
            continue  # the names of the first alone

        case(
            f"{how} of names: {which}",
            lambda M, j=join, a=first, b=second: names_of(j(M, [named(M, *a), named(M, *b)])),
        )
case(
    "stack of lazy stacks with different names",
    lambda M: names_of(torch.stack([M.lazy_stack([named(M, [n])] * 2) for n in ("x", "z")])),
)


@case.parametrize
def test_names(case: Case) -> None:
    case.check()


def test_cat_has_the_names_of_the_first() -> None:
    def make(first: str) -> tdstore.TensorDict:
        nested = tdstore.TensorDict({}, [2, 3], names=[first, "y"])
        return tdstore.TensorDict({"n": nested}, [2], names=[first])

    joined = torch.cat([make("x"), make("z")])
    assert joined.names == ["x"] and joined["n"].names == ["x", "y"]


def test_a_failed_update_leaves_the_names() -> None:
    td = tdstore.TensorDict({"a": torch.ones(2)}, [2])
    with pytest.raises(RuntimeError):
        td.update({"n": tdstore.TensorDict({}, [2], names=["x"]), "b": torch.ones(3)})
    assert td.names == [None]


@pytest.mark.parametrize("suffix", ["", ".h5"])
def test_stored_names_follow(tmp_path, suffix: str) -> None:
    place = tmp_path / f"data{suffix}"
    tdstore.TensorDict({"a": torch.ones(2), "n": tdstore.TensorDict({"b": torch.ones(2, 3)}, [2, 3])}, [2]).save(place)
    with tdstore.open(place, mode="r+") as td:
        td.names = ["x"]
        td["n"].names = ["x", "y"]
        td.names = ["z"]
        assert td["n"].names == ["z", "y"]
    with tdstore.open(place) as td:
        assert td.names == ["z"] and td["n"].names == ["z", "y"]


def test_a_stored_tensordict_takes_the_names_of_what_is_set(tmp_path) -> None:
    place = tmp_path / "data.h5"
    tdstore.TensorDict({"a": torch.ones(2)}, [2]).save(place)
    with tdstore.open(place, mode="r+") as td:
        td["n"] = tdstore.TensorDict({"b": torch.ones(2, 3)}, [2, 3], names=["x", "y"])
        assert td.names == ["x"] and td["n"].names == ["x", "y"]
    with tdstore.open(place) as td:
        assert td.names == ["x"] and td["n"].names == ["x", "y"]


@pytest.mark.parametrize("suffix", ["", ".h5"])
def test_names_of_stored_lazy_stacks(tmp_path, suffix: str) -> None:
    elements = [tdstore.TensorDict({"a": torch.ones(2, n)}, [2]) for n in (3, 4)]
    place = tmp_path / f"data{suffix}"
    tdstore.TensorDict({"first": tdstore.lazy_stack(elements), "second": tdstore.lazy_stack(elements, 1)}, [2]).save(
        place
    )
    with tdstore.open(place, mode="r+") as td:
        td["second"].names = ["x", "y"]
        td.names = ["z"]
        found = [td["first"].names, td["first"][0].names, td["second"].names, td["second"][:, 0].names]
        assert found == [["z", None], [None], ["z", "y"], ["z"]]
    with tdstore.open(place) as td:
        assert [td.names, td["first"].names, td["second"].names] == [["z"], ["z", None], ["z", "y"]]


MOVED = [
    "td.unsqueeze(0)",
    "td.unbind(0)[0]",
    "list(td)[0]",
    "td.split(1)[0]",
    "td.chunk(2)[0]",
    "td.expand(2, 3)",
    "td.flip(0)",
    "td.repeat(2)",
    "td.unsqueeze(0).transpose(0, 1)",
    "td.sum(0, keepdim=True)",
    "td.view(3, 1)",
    "lazy_stack(list(td))",
]


@pytest.mark.parametrize("call", MOVED)
def test_further_dimensions_of_nested_tensordicts_keep_their_names(call: str) -> None:
    check(
        """
nested = TensorDict({"a": torch.zeros(3, 4)}, [3, 4], names=["c", "d"])
td = TensorDict({"n": nested}, [3], names=["c"])
"""
        + f"made = {call}\n(made.names, made['n'].names)"
    )
