"""Rows grouped by an entry; what is pinned here is what tensordict 0.15.3 returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor, group_by, lazy_stack
from tdstore.errors import BatchSizeError, InvalidKeyError, InvalidTypeError, KeyNotFoundError, UnsupportedError


@tdstore.tensorclass
class Step:
    k: torch.Tensor
    x: torch.Tensor


def sample() -> TensorDict:
    entries = {
        "x": torch.arange(6.0),
        "k": torch.tensor([2, 1, 2, 0, 1, 2]),
        "n": {"k": torch.tensor([True, True, False, False, True, True])},
        "pair": torch.tensor([[0, 1], [0, 0], [0, 1], [1, 0], [0, 0], [0, 1]]),
        "s": NonTensorStack(*"xyxzyx"),
    }
    return TensorDict(entries, [6])


def on(place: str, tmp_path: Path) -> Any:
    td = sample()
    if place == "lazy":
        return lazy_stack(list(td.unbind(0)))
    if place == "tensorclass":
        return Step(td["k"], td["x"], batch_size=[6])
    return td if place == "dense" else td.save(str(tmp_path / ("a.h5" if place == "h5" else "a")))


@pytest.mark.parametrize("place", ["dense", "lazy", "tensorclass", "memmap", "h5"])
def test_groups_keep_the_order_of_rows(place: str, tmp_path: Path) -> None:
    td = on(place, tmp_path)
    values, groups = group_by(td, "k")
    assert values.tolist() == [0, 1, 2]
    assert [group.get("x").tolist() for group in groups] == [[3.0], [1.0, 4.0], [0.0, 2.0, 5.0]]
    assert [list(group.batch_size) for group in groups] == [[1], [2], [3]]
    if place in ("dense", "lazy", "tensorclass"):
        assert {type(group) for group in groups} == {type(td)}
    groups[1].get("x")[0] = 99.0
    assert td.get("x").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("place", ["dense", "lazy", "memmap", "h5"])
@pytest.mark.parametrize(
    ("key", "values", "rows"),
    [
        (("n", "k"), [False, True], [[2, 3], [0, 1, 4, 5]]),
        ("pair", [[0, 0], [0, 1], [1, 0]], [[1, 4], [0, 2, 5], [3]]),
        ("s", ["x", "y", "z"], [[0, 2, 5], [1, 4], [3]]),
    ],
)
def test_kinds_of_entries(place: str, key: Any, values: list[Any], rows: list[Any], tmp_path: Path) -> None:
    found, groups = group_by(on(place, tmp_path), key)
    assert (found if isinstance(found, list) else found.tolist()) == values
    assert [group["x"].tolist() for group in groups] == rows


def test_rare_columns() -> None:
    nan = float("nan")
    td = TensorDict(
        {"f": torch.tensor([nan, 1.0, nan]), "none": torch.zeros(3, 0), "one": NonTensorData("q", [3])}, [3]
    )
    values, groups = group_by(td, "f")
    assert str(values.tolist()) == "[1.0, nan, nan]" and [len(group) for group in groups] == [1, 1, 1]
    assert group_by(td, "one")[0] == ["q"] and len(group_by(td, "one")[1][0]) == 3
    values, groups = group_by(td, "none")  # rows without numbers are all the same; refused there
    assert values.shape == (1, 0) and [len(group) for group in groups] == [3]
    assert group_by(td[:0], "f")[0].tolist() == [] and group_by(td[:0], "f")[1] == ()
    assert group_by(td[:0], "one") == ([], ())
    wide = TensorDict({"s": NonTensorStack(*[NonTensorStack("a", last) for last in "bcb"])}, [3, 2])
    values, groups = group_by(wide, "s")
    assert values == [("a", "b"), ("a", "c")] and [list(g.batch_size) for g in groups] == [[2, 2], [1, 2]]
    assert group_by(TensorDict({"s": NonTensorData("a", [3, 2])}, [3, 2]), "s")[0] == [("a", "a")]


def test_names_and_locks() -> None:
    td = TensorDict({"k": torch.tensor([1, 0])}, [2], names=["t"]).lock_()
    _, groups = group_by(td, "k")
    assert groups[0].names == ["t"] and not groups[0].is_locked


WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "a dict": ({"k": 1}, "k", InvalidTypeError, "group_by"),
    "no batch": (TensorDict({"k": torch.tensor(1)}), "k", BatchSizeError, "batch size is"),
    "no entry": (sample(), ("n", "zz"), KeyNotFoundError, "'n' / 'zz'"),
    "no key": (sample(), 3, InvalidKeyError, "3"),
    "a TensorDict": (sample(), "n", InvalidTypeError, "is a TensorDict"),
    "complex": (TensorDict({"k": torch.ones(2).cfloat()}, [2]), "k", UnsupportedError, "complex64"),
    "unbatched": (TensorDict({"k": UnbatchedTensor(torch.ones(2))}, [2]), "k", UnsupportedError, "one for all rows"),
    "dicts": (TensorDict({"k": NonTensorStack({"a": 1}, {"a": 2})}, [2]), "k", InvalidTypeError, "hashed or sorted"),
    "mixed": (TensorDict({"k": NonTensorStack(3, None)}, [2]), "k", InvalidTypeError, "hashed or sorted"),
    "nested tensor": (
        TensorDict({"k": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)}, [2]),
        "k",
        UnsupportedError,
        "nested tensor",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    td, key, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        group_by(td, key)
