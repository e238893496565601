"""Programs that a generator drew, in which the two sides differed once: sources that calls changed, jagged leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict, UnbatchedTensor, lazy_stack

from .programs import check, programs


def with_empty() -> TensorDict:
    inner = TensorDict({"b": torch.ones(3), "m": TensorDict({}, [3])}, [3])
    return TensorDict({"a": torch.zeros(3), "e": torch.ones(3), "n": inner}, [3])


def jagged(**entries: torch.Tensor) -> TensorDict:
    parts = [torch.ones(1, 2), torch.ones(2, 2)]
    return TensorDict({**entries, "j": torch.nested.nested_tensor(parts, layout=torch.jagged)}, [2])


@programs("""
td = TensorDict({"e": torch.ones(3), "n": TensorDict({"b": torch.ones(3), "m": TensorDict({}, [3])}, [3])}, [3])
parts = td.split_keys(["e"])
(parts, td, parts[-1]["n"] is td["n"])
---
td = TensorDict({"e": torch.ones(3), "n": TensorDict({"b": torch.ones(3), "m": TensorDict({}, [3])}, [3])}, [3])
(td.split_keys([("n", "b")], default=None), td)
---
td = TensorDict({"e": torch.ones(3), "n": TensorDict({"b": torch.ones(3), "m": TensorDict({}, [3])}, [3])}, [3])
(td.split_keys(["e"], reproduce_struct=True), td)
---
td = TensorDict({"e": torch.ones(3), "n": TensorDict({"b": torch.ones(3), "m": TensorDict({}, [3])}, [3])}, [3])
(td.split_keys(["e"], inplace=True), td)
---
td = TensorDict({"a": torch.zeros(3), "u": UnbatchedTensor(torch.ones(2))}, [3])
(pad(td, [0, 1]).view(2, 2)["a"], pad(td, [0, 1]).expand(2, 4).batch_size, pad(td, [0, 1])[None].batch_size)
---
j = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
td = TensorDict({"a": torch.ones(2), "j": j}, [2])
td.zero_()
(td["a"], td["j"].values())
---
j = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
td = TensorDict({"a": torch.ones(2), "j": j}, [2])
td.fill_("j", 3)
td["j"].values()
---
j = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
td = TensorDict({"a": torch.ones(2), "j": j}, [2])
state = td.state_dict()
td.zero_().load_state_dict(state)["a"]
""")
def test_drawn(source: str) -> None:
    check(source)


def test_splitting_keys_leaves_stored_groups_in_their_file(tmp_path: Path) -> None:
    with with_empty().to_h5(tmp_path / "x.h5") as stored:
        rest = stored.split_keys(["e"])[-1]
        assert sorted(rest["n"].keys()) == ["b"]
        assert sorted(stored["n"].keys()) == ["b", "m"]
    with tdstore.load(tmp_path / "x.h5") as read_only:
        assert sorted(read_only.split_keys(["e"])[-1].keys()) == ["a", "n"]


def test_splitting_keys_leaves_elements_of_lazy_stacks() -> None:
    lazy = lazy_stack([with_empty(), with_empty()])
    lazy.split_keys(["e"])
    assert sorted(lazy["n"].keys()) == ["b", "m"]


@pytest.mark.parametrize(
    "container", [lambda td: td, tdstore.TensorDictParams, lambda td: lazy_stack([td, td.clone()])]
)
def test_a_group_does_not_move_into_itself(container: object) -> None:
    assert callable(container)
    td = container(TensorDict({"n": TensorDict({"b": torch.ones(3)}, [3])}, [3]))
    with pytest.raises(tdstore.errors.InvalidKeyError, match="which is below it"):
        td.rename_key_("n", ("n", "inner"))
    assert list(td.keys(True, True)) == [("n", "b")]


def test_maths_of_jagged_leaves_beside_dense_ones_of_other_dtypes() -> None:
    td = jagged(i=torch.tensor([1, 2]), f=torch.ones(2))
    assert (td * 2)["j"].values().tolist() == [[2.0, 2.0]] * 3
    assert (td + td)["i"].tolist() == [2, 4]
    td.add_(1)
    assert td["j"].values().tolist() == [[2.0, 2.0]] * 3
    assert (td["i"].tolist(), td["f"].tolist()) == ([2, 3], [2.0, 2.0])


def test_a_refused_dtype_still_changes_nothing() -> None:
    td = TensorDict({"f": torch.ones(2), "b": torch.tensor([True, False])}, [2])
    with pytest.raises(RuntimeError):
        td.neg_()
    assert td["f"].tolist() == [1.0, 1.0]


def test_state_dict_of_a_jagged_leaf_loads() -> None:
    td = jagged()
    state = td.clone().mul_(3).state_dict()
    assert td.load_state_dict(state)["j"].values().tolist() == [[3.0, 3.0]] * 3


@pytest.mark.parametrize("make", [lambda t: t.T, lambda t: t[:, ::2], lambda t: t[::2]])
def test_writes_in_place_of_leaves_with_strides(make: object) -> None:
    assert callable(make)
    whole = torch.zeros(4, 4)
    td = TensorDict({"a": make(whole)})
    view = td["a"]
    td.fill_("a", 7)
    assert (view == 7).all()
    td.set_("a", torch.full_like(view, 3.0))
    td.set_at_("a", torch.tensor(5.0), 0)
    assert td["a"] is view and (view[0] == 5).all() and (view[1:] == 3).all()


def test_what_is_not_a_plain_leaf_is_filled() -> None:
    td = TensorDict({"u": UnbatchedTensor(torch.zeros(2)), "s": "text"}, [3])
    assert td.fill_("u", 4)["u"].tolist() == [4.0, 4.0]
    assert td.fill_("s", 4)["s"] == "text"
    with pytest.raises(KeyError):
        td.fill_("missing", 4)


def test_filling_a_read_only_leaf_is_refused(tmp_path: Path) -> None:
    TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, [3]).save(tmp_path / "x")
    for key in ("a", "n", ("n", "b")):
        with tdstore.load(tmp_path / "x") as td, pytest.raises(tdstore.errors.ReadOnlyError):
            td.fill_(key, 1)


@programs("""
td = TensorDict({"a": torch.arange(12).view(4, 3), "n": TensorDict({"b": torch.arange(4.0)}, [4])}, [4], names=["t"])
i = np.int64(-1)
td[i] = td[np.int32(0)]
td[torch.tensor(1)] = td[torch.tensor(2, dtype=torch.int32)]
(td[i], td[torch.tensor(-3)], td[i, None], td[None, i], td.get_at("a", i), td.get_at(("n", "b"), torch.tensor(1)), td)
---
td = TensorDict({"a": torch.arange(12).view(4, 3)}, [4, 3])
td[np.int64(1), np.int8(2)] = 100
td[torch.tensor(2), 1:] = 200
td[:, torch.tensor(0)] = 7
td.set_at_("a", torch.tensor([1, 2, 3]), np.int64(3))
(td, td[np.uint8(2)], td[..., np.int64(-1)], td[torch.tensor(3), np.int64(0)])
---
TensorDict({"a": torch.zeros(4)}, [4])[np.int64(4)]
---
td = TensorDict({"a": torch.zeros(4)}, [4])
td[torch.tensor(-5)] = 1
td
---
TensorDict({"a": torch.zeros(4)}, [])[np.int64(0)]
---
td = TensorDict({"a": torch.zeros(4, 2)}, [4, 2]).share_memory_()
[part.is_locked for part in (td[1], td[np.int64(1)], td[np.int64(1), None], td[1, np.int64(0)])]
---
lazy = lazy_stack([TensorDict({"a": torch.full((2,), float(i))}, [2]) for i in range(3)])
lazy[np.int64(0)] = lazy[torch.tensor(1)].clone()
lazy[torch.tensor(-1)] = 5
(lazy[np.int64(-2)], lazy[:, np.int64(1)]["a"], lazy["a"])
""")
def test_rows_named_by_ints_of_numpy_and_tensors(source: str) -> None:
    check(source)


def test_a_leaf_with_strides_takes_rows_of_its_own_memory() -> None:
    whole = torch.arange(16.0).view(4, 4)
    td = TensorDict({"a": whole[:, ::2]})
    value = whole.view(8, 2)[:2]
    wanted = whole[:, ::2].clone()
    wanted[[1, 0]] = value.clone()
    td.set_at_("a", value, torch.tensor([1, 0]))
    assert torch.equal(td["a"], wanted)


def strided() -> TensorDict:
    """Return a TensorDict of views, of which none is contiguous."""
    leaves = {"a": torch.arange(72.0).view(4, 6, 3), "b": torch.arange(24).view(4, 6), "n": {"c": torch.zeros(4, 6)}}
    td: TensorDict = TensorDict(leaves, [4, 6])[:, 2]
    return td


INDICES = [
    1,
    slice(1, 3),
    ...,
    torch.tensor([True, False, True, False]),
    [0, 2],
    torch.tensor([3, 0]),
    (slice(2), None),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_writes_at_rows_of_views(index: Any) -> None:
    for value in (0, 2.0, torch.tensor(3), torch.tensor(1.0, dtype=torch.float64), torch.tensor(True)):
        td, dense = strided(), strided().contiguous()
        tensors = dict(td.items(True, True))
        td[index] = value
        dense[index] = value
        assert (td == dense).all()
        assert all(td[key] is tensor for key, tensor in tensors.items())
    td, dense = strided(), strided().contiguous()
    td[index] = dense[index].clone().zero_()
    dense[index] = dense[index].clone().zero_()
    assert (td == dense).all()


def test_a_number_in_a_tensor_is_cast_as_the_tensor_is() -> None:
    for number in (2.5, 300, -1, 1e30, float("nan"), 0.1):
        td = TensorDict({"i": torch.zeros(2, dtype=torch.int64), "u": torch.zeros(2, dtype=torch.uint8)}, [2])
        td["h"], td["d"] = torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.float64)
        value = torch.tensor(number, dtype=torch.float32)
        wanted = {key: leaf.clone() for key, leaf in td.items()}
        for leaf in wanted.values():
            leaf[1] = value
        td[1] = value
        assert all(torch.equal(td[key].nan_to_num(), leaf.nan_to_num()) for key, leaf in wanted.items())


def test_a_number_that_requires_a_gradient_keeps_it() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    td = TensorDict({"a": torch.zeros(3)}, [3])
    td[1] = weight
    td["a"].sum().backward()
    assert weight.grad == 1


def test_an_expanded_view_is_not_written() -> None:
    td = TensorDict({"a": torch.zeros(1).expand(3)}, [3])
    for value in (1, torch.tensor(1.0), TensorDict({"a": torch.ones(3)}, [3])):
        with pytest.raises(RuntimeError):
            td[...] = value
    assert td["a"].tolist() == [0.0] * 3
