"""Further small things that code written for the peer does: empty stacks, bad keys, state dicts, hooks."""

from __future__ import annotations

import pytest
import torch

import tdstore
from tdstore.errors import InvalidKeyError, StateDictError

from .cases import Case, Cases
from .oracle import Side
from .structures import t

case = Cases()


# --- lazy stacks without elements ---
def hollow(M: Side, element: tuple[int, ...] | None = None, **options: object) -> object:
    stack = M.LazyStackedTensorDict(**options)
    if element is not None:
        stack.append(M.td({"a": t(*element)}, element))
    return stack.batch_size, stack.stack_dim


for options in (
    {"stack_dim": 1, "batch_size": [1, 2]},
    {"stack_dim": 0, "batch_size": [3]},
    {"stack_dim": -1, "batch_size": [1, 2]},
    {"stack_dim": -2, "batch_size": [1, 2]},
    {"stack_dim": -5, "batch_size": [1, 2]},
    {"stack_dim": 0, "batch_size": [0, 2]},
    {"stack_dim": 0, "batch_size": []},
    {},
):
    case(f"a stack without elements, {options}", lambda M, o=options: hollow(M, **o))
case("its first element", lambda M: hollow(M, (1, 2), stack_dim=1, batch_size=[1, 2]))
case("elements that do not fit", lambda M: M.LazyStackedTensorDict(M.td({"a": t(3, 2)}, [3, 2]), batch_size=[1, 2]))

# --- make_tensordict of a TensorDict ---
SOURCES = {
    "plain": lambda M: M.td({"a": t(2, 3)}, [2]),
    "nested": lambda M: M.td({"a": t(2, 3), "n": {"b": t(2, 4)}}, [2]),
    "with a text": lambda M: M.td({"a": t(2, 3), "s": "x"}, [2]),
    "named": lambda M: M.td({"a": t(2, 3)}, [2], names=["x"]),
    "lazy": lambda M: M.lazy_stack([M.td({"a": t(2, 3)}, [2])] * 3),
    "empty": lambda M: M.td({}, [2]),
}
OPTIONS = [{}, {"auto_batch_size": True}, {"batch_size": [2]}, {"batch_size": []}, {"device": "cpu"}]
for name, source in SOURCES.items():
    for options in OPTIONS:
        if name == "lazy" and options == {"batch_size": [2]}:
            continue

        def made(M: Side, source=source, options=options) -> object:
            td = source(M)
            result = M.make_tensordict(td, **options)
            return result, result is td, td.batch_size

        case(f"make_tensordict of a TensorDict, {name}, {options}", made)
case("make_tensordict of both", lambda M: M.make_tensordict(M.td({"a": t(2, 3)}, [2]), b=t(2, 1), auto_batch_size=True))

# --- what is no key ---
BAD = [("n", str), ("n", 1), 1, (), (str, "n"), str, None, ("n", None)]
for key in BAD:
    case(f"get of {key!r}", lambda M, k=key: M.td({"n": {"a": t(2)}}).get(k))
    case(f"get of {key!r} with a default", lambda M, k=key: M.td({"n": {"a": t(2)}}).get(k, None))


# --- state dicts ---
def loaded(M: Side, target: dict[str, object], source: dict[str, object], **options: object) -> object:
    td = M.td(target)
    td.load_state_dict(M.td(source).state_dict(), **options)
    return sorted(map(str, td.keys(True, True))), td["a"]


LOADS = {
    "an empty one more in the target": ({"a": t(2), "e": {}}, {"a": t(2, start=5)}),
    "an empty one more in the source": ({"a": t(2)}, {"a": t(2, start=5), "e": {}}),
    "empty ones more in the source": ({"a": t(2)}, {"a": t(2, start=5), "e": {"f": {}}}),
    "different empty ones": ({"a": t(2), "e": {"f": {}}}, {"a": t(2, start=5), "e": {"g": {}}}),
    "one with an entry in the target": ({"a": t(2), "e": {"b": t(2)}}, {"a": t(2), "e": {}}),
    "one with an entry in the source": ({"a": t(2), "e": {}}, {"a": t(2), "e": {"b": t(2)}}),
    "one with a text in the target": ({"a": t(2), "e": {"s": "x"}}, {"a": t(2)}),
}
for name, (target, source) in LOADS.items():
    case(f"strict load of {name}", lambda M, a=target, b=source: loaded(M, a, b))


def unknown(M: Side, value: object) -> object:
    cls = M.tensorclass(type("Named", (), {"__annotations__": {"a": torch.Tensor, "s": str}}))
    obj = cls(a=t(2), s="x")
    state = obj.state_dict()
    state._metadata[""]["_non_tensor"]["unknown"] = value
    obj.load_state_dict(state, strict=True)


case("strict load of an unknown value", lambda M: unknown(M, "v"))
case("strict load of an unknown None", lambda M: unknown(M, None))


# --- an update with lazy stacks of elements that differ ---
def ragged(M: Side) -> object:
    return M.lazy_stack([M.td({"x": t(n)}) for n in (3, 4)])


def exclusive(M: Side) -> object:
    return M.lazy_stack([M.td({"x": t(3), name: t(2)}) for name in "pq"])


DESTINATIONS = {
    "another key": lambda M: M.td({"y": t(2, 5)}, [2]),
    "the same key": lambda M: M.td({"x": t(2, 3), "y": t(2)}, [2]),
    "nested keys": lambda M: M.td({"n": {"z": t(2)}}, [2]),
    "a text": lambda M: M.td({"s": "text"}, [2]),
}
HOW = {
    "update": lambda M, td, new: td.update({"k": new}),
    "update with a TensorDict": lambda M, td, new: td.update(M.td({"k": new}, [2])),
    "update with copies": lambda M, td, new: td.update({"k": new}, clone=True),
    "update below": lambda M, td, new: M.td({"o": td}, [2]).update({"o": {"k": new}})["o"],
    "update of a locked one": lambda M, td, new: td.lock_().update({"k": new}),
    "update in place": lambda M, td, new: td.update({"k": new}, inplace=True),
}


def merged(M: Side, destination: object, source: object, how: object) -> object:
    td = M.td({"k": destination(M)}, [2])
    found = how(M, td, source(M))["k"]
    return type(found).__name__, [found[0], found[1]]


for place, destination in DESTINATIONS.items():
    for way, how in HOW.items():
        for source in (ragged, exclusive):
            if way == "update in place" and not (source is ragged and place == "the same key"):
                continue
            case(
                f"{way}, {source.__name__} elements into {place}",
                lambda M, d=destination, s=source, h=how: merged(M, d, s, h),
            )


# --- hooks of parameters ---
def hooked(M: Side, read: object, *hooks: object) -> object:
    params = M.TensorDictParams(M.td({"a": torch.ones(2), "n": {"b": torch.ones(2)}, "s": "x"}))
    for hook in hooks:
        params.register_get_post_hook(hook)
    found = read(params)
    return found.detach() if isinstance(found, torch.Tensor) else found


def double(params: object, entry: object) -> object:
    return entry * 2


READS = {
    "a subscript": lambda p: p["a"],
    "get": lambda p: p.get("a"),
    "a nested subscript": lambda p: p["n", "b"],
    "get of a nested key": lambda p: p.get(("n", "b")),
    "items": lambda p: [value.detach() for key, value in p.items() if key == "a"],
    "values": lambda p: [value.detach() for value in p.values() if isinstance(value, torch.Tensor)],
    "items of leaves": lambda p: [value.detach() for _, value in p.items(True, True)],
    "a nested TensorDict": lambda p: p["n"]["b"],
    "get_at": lambda p: p.get_at("a", 0),
    "a text": lambda p: p["s"],
    "data": lambda p: p.data["a"],
    "parameters": lambda p: [value.detach() for value in p.parameters()],
}
for name, read in READS.items():
    case(f"a hook sees {name}", lambda M, r=read: hooked(M, r, double))
case("hooks in a row", lambda M: hooked(M, READS["get"], double, lambda p, v: v + 1))
case("a hook without a result", lambda M: hooked(M, READS["get"], lambda p, v: None))


@case.parametrize
def test_more_small_methods(case: Case) -> None:
    case.check()


def test_a_bad_key_is_of_both_kinds() -> None:
    with pytest.raises(InvalidKeyError) as caught:
        tdstore.TensorDict({"a": 1}).get(("a", str))
    assert isinstance(caught.value, KeyError) and isinstance(caught.value, TypeError)


def test_nothing_is_loaded_where_an_unknown_value_is_refused() -> None:
    cls = tdstore.tensorclass(type("Named", (), {"__annotations__": {"a": torch.Tensor, "s": str}}))
    source, target = cls(a=torch.ones(2), s="x"), cls(a=torch.zeros(2), s="y")
    state = source.state_dict()
    state._metadata[""]["_non_tensor"]["unknown"] = None
    with pytest.raises(StateDictError, match="unknown"):
        target.load_state_dict(state)
    assert target.s == "y" and not target.a.any()


def test_a_hook_is_not_called_for_what_is_missing() -> None:
    params = tdstore.TensorDictParams(tdstore.TensorDict({"a": torch.ones(2)}))
    params.register_get_post_hook(lambda params, entry: entry * 2)
    assert params.get("missing", None) is None


@pytest.mark.parametrize("suffix", ["", ".h5"])
def test_an_uneven_update_of_what_is_stored(tmp_path, suffix: str) -> None:
    place = tmp_path / f"data{suffix}"
    tdstore.TensorDict({"k": tdstore.TensorDict({"y": torch.ones(2)}, [2])}, [2]).save(place)
    stack = tdstore.lazy_stack([tdstore.TensorDict({"x": torch.ones(n)}) for n in (3, 4)])
    with tdstore.open(place, mode="r+") as td:
        td = td.unlock_() if td.is_locked else td
        td.update({"k": stack})
        assert [len(td["k"][i]["x"]) for i in (0, 1)] == [3, 4] and td["k"][1]["y"] == 1
    if suffix:
        with tdstore.open(place) as td:
            assert [len(td["k"][i]["x"]) for i in (0, 1)] == [3, 4] and td["k"][1]["y"] == 1
