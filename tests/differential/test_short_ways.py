"""Calls that have a short way of their own in memory, on entries that take it and on entries that do not."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import tensordict
import torch

import tdstore
from tdstore.errors import BatchSizeError, LockedError


class Part:
    k: torch.Tensor


class Whole:
    a: torch.Tensor
    p: Any


def classes(m: ModuleType) -> tuple[Any, Any]:
    return tuple(m.tensorclass(type(c.__name__, (), {"__annotations__": c.__annotations__})) for c in (Part, Whole))


CLASSES = {m: classes(m) for m in (tensordict, tdstore)}


def flat(m: ModuleType, shift: float) -> Any:
    return m.TensorDict({"b": torch.arange(6.0).view(3, 2) + shift, "a": torch.arange(3) + int(shift)}, [3])


def nested(m: ModuleType, shift: float) -> Any:
    td = flat(m, shift)
    td["n"] = m.TensorDict({"x": torch.arange(12.0).view(3, 4) - shift}, [3, 4])
    return td


def values(m: ModuleType, shift: float) -> Any:
    return nested(m, shift).set("s", "text")


def typed(m: ModuleType, shift: float) -> Any:
    part, whole = CLASSES[m]
    return whole(a=torch.arange(3.0) + shift, p=part(k=torch.ones(3, 2) * shift, batch_size=[3]), batch_size=[3])


def locked(m: ModuleType, shift: float) -> Any:
    return nested(m, shift).lock_()


def deep(m: ModuleType, shift: float) -> Any:
    td = nested(m, shift)
    td["n", "z"] = m.TensorDict({"c": torch.ones(3, 4) * shift, "b": torch.zeros(3, 4)}, [3, 4])
    td["t"] = typed(m, shift)
    td["s"] = m.lazy_stack([m.TensorDict({"e": torch.ones(2) * shift}) for _ in range(3)])
    return td


MAKERS = [flat, nested, values, typed, locked]
ROWS = torch.tensor([2, 0])
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "update(inplace)": lambda td, o: td.update(o, inplace=True),
    "update(inplace) of one that is smaller": lambda td, o: td.update(o.select("a"), inplace=True),
    "update(clone)": lambda td, o: td.update(o, clone=True),
    "update(keys)": lambda td, o: td.update(o, keys_to_update=["a"]),
    "update(nested keys)": lambda td, o: td.update(o, keys_to_update=[("n", "x")]),
    "update(keys of more)": lambda td, o: td.update(o, keys_to_update=[("n", "z", "b"), ("t", "p", "k"), "b"]),
    "update(keys that are missing)": lambda td, o: td.update(o, keys_to_update=["a", "missing"]),
    "update(no keys)": lambda td, o: td.update(o, keys_to_update=[]),
    "update(dict of dicts)": lambda td, o: td.update(o.to_dict()),
    "update(dict of dicts, clone)": lambda td, o: td.update(o.to_dict(), clone=True),
    "update(dict of an empty dict)": lambda td, o: td.update({"a": o.get("a"), "n": {}}),
    "update(dict of more)": lambda td, o: td.update({"n": {"new": torch.ones(3, 4), "m": {"k": torch.ones(3, 4)}}}),
    "update(dict of nested keys)": lambda td, o: td.update({"n": {("x",): torch.ones(3, 4)}}),
    "update_(keys)": lambda td, o: td.update_(o, keys_to_update=["a"]),
    "update_at_(rows)": lambda td, o: td.update_at_(o[ROWS], ROWS),
    "update_at_(list)": lambda td, o: td.update_at_(o[[0, 1]], [1, 2]),
    "set_at_(rows)": lambda td, o: td.set_at_("a", o.get("a")[ROWS], ROWS),
    "set_at_(negative rows)": lambda td, o: td.set_at_("a", o.get("a")[ROWS], torch.tensor([-1, 0])),
    "apply_": lambda td, o: td.apply_(lambda x: x + 1),
    "apply(inplace)": lambda td, o: td.apply(lambda x: x * 2, inplace=True),
    "apply(inplace), in the function": lambda td, o: td.apply(lambda x: x.zero_(), inplace=True),
    "apply(inplace) of nothing": lambda td, o: td.apply(lambda x: None, inplace=True),
    "td[tensor(1)]": lambda td, o: td[torch.tensor(1)],
    "td[tensor(-3)]": lambda td, o: td[torch.tensor(-3)],
    "td[tensor(3)]": lambda td, o: td[torch.tensor(3)],
    "td[[[0], [1]]]": lambda td, o: td[[[0], [1]]],
    "td[rows, None]": lambda td, o: td[ROWS, None],
    "td[...]": lambda td, o: td[...],
    "movedim": lambda td, o: td.movedim(0, -1),
    "repeat_interleave": lambda td, o: td.repeat_interleave(2, dim=0),
    "repeat_interleave(0)": lambda td, o: td.repeat_interleave(0, dim=0),
    "batch_size": lambda td, o: setattr(td, "batch_size", [3]),
    "names": lambda td, o: setattr(td, "names", ["t"]),
    "add_": lambda td, o: td.add_(o),
    "mul_(2)": lambda td, o: td.mul_(2),
    "mul_(tensor)": lambda td, o: td.mul_(torch.arange(3)),
    "maximum_": lambda td, o: td.maximum_(o),
    "lerp": lambda td, o: td.add(o),
    "prod": lambda td, o: td.prod(),
    "td + td": lambda td, o: td + o,
    "td == td": lambda td, o: td == o,
}


OURS_ALONE = {
    ("update(no keys)", locked): "tensordict refuses an update of nothing",
    ("update(dict of dicts, clone)", values): "tensordict raises: a text has no clone",
    ("update_(keys)", typed): "tensordict updates all fields",
    ("update_at_(rows)", typed): "tensordict raises for its own objects",
    ("update_at_(list)", typed): "tensordict raises for its own objects",
}
PAIRS = [(name, make) for name in CALLS for make in MAKERS if (name, make) not in OURS_ALONE]
PAIRS += [(name, deep) for name in CALLS if name.startswith("update")]


def plain(found: Any) -> Any:
    """What can be compared of a result: tensors as lists, with shapes and dtypes."""
    if isinstance(found, torch.Tensor):
        return found.dtype, found.shape, found.tolist()
    if hasattr(found, "batch_size"):
        return tuple(found.batch_size), list(found.names), plain(found.to_dict())
    if isinstance(found, dict):
        return {k: plain(v) for k, v in sorted(found.items()) if v is not None}
    return found


def run(m: ModuleType, make: Any, call: Any) -> Any:
    td, other = make(m, 0.0), make(m, 5.0)
    try:
        result = plain(call(td, other))
    except Exception as error:
        result = "error", isinstance(error, IndexError)
    return result, plain(td), plain(other)


@pytest.mark.parametrize(("name", "make"), PAIRS)
def test_results_and_changes_are_those_of_tensordict(name: str, make: Any) -> None:
    assert run(tdstore, make, CALLS[name]) == run(tensordict, make, CALLS[name])


LISTS: dict[str, Callable[[Any], Any]] = {
    "keys(sort)": lambda td: td.keys(sort=True),
    "keys(True)": lambda td: td.keys(True),
    "keys(True, True)": lambda td: td.keys(True, True),
    "keys(True, sort)": lambda td: td.keys(True, sort=True),
    "keys(True, True, sort)": lambda td: td.keys(True, True, sort=True),
    "items(True, sort)": lambda td: ((k, plain(v)) for k, v in td.items(True, sort=True)),
    "values(True)": lambda td: map(plain, td.values(True)),
    "values(True, True)": lambda td: map(plain, td.values(True, True)),
    "items(True)": lambda td: ((k, plain(v)) for k, v in td.items(True)),
    "items(True, True)": lambda td: ((k, plain(v)) for k, v in td.items(True, True)),
    "non_tensor_items": lambda td: (k for k, _ in td.non_tensor_items()),
}


@pytest.mark.parametrize("make", [*MAKERS, deep])
@pytest.mark.parametrize("name", LISTS)
def test_lists_are_those_of_tensordict(name: str, make: Any) -> None:
    ours, theirs = (sorted(map(str, LISTS[name](make(m, 1.0)))) for m in (tdstore, tensordict))
    assert ours == theirs


@pytest.mark.parametrize("make", [nested, values, deep])
def test_a_key_of_a_group_updates_all_of_it(make: Any) -> None:  # in tensordict, nothing
    td, other, want = make(tdstore, 0.0), make(tdstore, 5.0), make(tdstore, 0.0)
    td.update(other, keys_to_update=["n", "b"])
    assert plain(td) == plain(want.update({"n": other["n"], "b": other["b"]}))


def test_a_dict_of_which_a_nested_entry_does_not_fit_changes_nothing() -> None:
    td = deep(tdstore, 0.0)
    with pytest.raises(BatchSizeError, match=r"entry 'x' has shape \[3, 5\]"):
        td.update({"a": torch.ones(3), "n": {"z": {"b": torch.ones(3, 4)}, "x": torch.ones(3, 5)}})
    with pytest.raises(LockedError, match="new"):
        td["n", "z"].lock_()
        td.update({"a": torch.ones(3), "n": {"z": {"new": torch.ones(3, 4)}}})
    assert plain(td) == plain(deep(tdstore, 0.0))


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("make", [flat, nested, values, deep])
def test_keys_are_as_many_as_there_are_and_sorted_by_level(make: Any, sort: bool) -> None:
    td = make(tdstore, 0.0)
    keys, leaves = td.keys(True, sort=sort), td.keys(True, True, sort=sort)
    assert len(keys) == len(list(keys)) and len(leaves) == len(list(leaves))
    assert set(leaves) <= set(keys)
    if sort:
        paths = [key if isinstance(key, tuple) else (key,) for key in keys]
        assert paths == sorted(paths)
    td["more"] = torch.zeros(td.batch_size)
    assert "more" in keys and len(keys) == len(list(keys))  # a view


def test_keys_of_all_entries_are_counted_and_sorted() -> None:
    td = nested(tdstore, 0.0)
    assert list(td.keys(sort=True)) == ["a", "b", "n"]
    assert len(td.keys(sort=True)) == 3
    assert len(td.keys(True, sort=True)) == 4
    assert "n" in td.keys(sort=True)


@pytest.mark.parametrize("make", MAKERS)
def test_nothing_is_written_at_rows_out_of_range(make: Any) -> None:
    td, other = make(tdstore, 0.0), make(tdstore, 5.0)
    with pytest.raises(IndexError, match="index 3 is out of range"):
        td.set_at_("a", other.get("a")[ROWS], torch.tensor([0, 3]))
    assert plain(td) == plain(make(tdstore, 0.0))


def test_only_the_chosen_fields_are_updated_in_place() -> None:
    td = typed(tdstore, 0.0)
    td.update_(typed(tdstore, 5.0), keys_to_update=["a"])
    assert plain(td) == plain(typed(tdstore, 0.0).replace(a=typed(tdstore, 5.0).a))


def test_rows_of_objects_are_updated() -> None:
    td, other = typed(tdstore, 0.0), typed(tdstore, 5.0)
    td.update_at_(other[ROWS], ROWS)
    assert td.a.tolist() == [5.0, 1.0, 7.0]
    assert td.p.k[:, 0].tolist() == [5.0, 0.0, 5.0]
