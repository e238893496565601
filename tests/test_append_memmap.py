"""`append_memmap`, and `to_arrow` as a function; what is pinned here is what tensordict 0.15.3 returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tensordict
import torch

import tdstore
from tdstore import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    append_memmap,
    from_arrow,
    lazy_stack,
    load_memmap,
    to_arrow,
)
from tdstore.errors import BatchSizeError, InvalidArgumentError, InvalidTypeError, KeyNotFoundError, StoreNotFoundError


@tdstore.tensorclass
class Step:
    a: torch.Tensor


def rows(count: int = 2, **more: Any) -> TensorDict:
    entries = {"a": torch.arange(count) + 7, "n": {"b": torch.zeros(count, 2)}, "t": NonTensorData("q", [count])}
    return TensorDict({**entries, **more}, [count])


@pytest.mark.parametrize("writer", ["memmap", "save", "tensordict"])
def test_rows_are_added(writer: str, tmp_path: Path) -> None:
    if writer == "tensordict":
        values = {"a": torch.arange(2) + 7, "n": {"b": torch.zeros(2, 2)}, "t": tensordict.NonTensorData("q", [2])}
        tensordict.TensorDict(values, [2]).memmap(tmp_path / "d")
    else:
        getattr(rows(), writer)(tmp_path / "d")
    append_memmap(tmp_path / "d", rows(1))
    append_memmap(str(tmp_path / "d"), lazy_stack(list(rows(3).unbind(0))))
    append_memmap(tmp_path / "d", rows(0))
    td = load_memmap(tmp_path / "d")
    assert td["a"].tolist() == [7, 8, 7, 7, 8, 9] and td["n"].batch_size == torch.Size([6])
    assert set(td.get("t").tolist()) == {"q"}
    if writer != "save":
        there = tensordict.load_memmap(tmp_path / "d")
        assert there["a"].tolist() == [7, 8, 7, 7, 8, 9] and there["n", "b"].shape == (6, 2)


def test_tensorclasses(tmp_path: Path) -> None:
    Step(torch.arange(2), batch_size=[2]).memmap(tmp_path / "d")
    append_memmap(tmp_path / "d", Step(torch.arange(1), batch_size=[1]))
    found = load_memmap(tmp_path / "d")
    assert type(found) is Step and found.a.tolist() == [0, 1, 0]


WRONG: dict[str, tuple[Any, type[Exception]]] = {
    "an entry less": (rows().exclude("a"), KeyNotFoundError),
    "an entry more": (rows(z=torch.ones(2)), KeyNotFoundError),
    "another shape": (rows(n={"b": torch.ones(2, 3)}), BatchSizeError),
    "another dtype": (rows(a=torch.ones(2)), InvalidArgumentError),
    "a dict": ({"a": torch.ones(2)}, InvalidTypeError),
    "no batch": (rows()[0], BatchSizeError),
    "another batch": (TensorDict({"a": torch.zeros(2, 3)}, [2, 3]), BatchSizeError),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rows_change_nothing(case: str, tmp_path: Path) -> None:
    rows().memmap(tmp_path / "d")
    data, error = WRONG[case]
    with pytest.raises(error):
        append_memmap(tmp_path / "d", data)
    td = load_memmap(tmp_path / "d")
    assert td.batch_size == torch.Size([2]) and td["a"].tolist() == [7, 8] and td["n", "b"].shape == (2, 2)


def test_wrong_places_and_arguments(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        append_memmap(tmp_path / "none", rows())
    assert not (tmp_path / "none").exists()
    rows().memmap(tmp_path / "d")
    with pytest.raises(InvalidTypeError, match="allow_pickle"):
        append_memmap(tmp_path / "d", rows(), allow_pickle="yes")  # type: ignore[arg-type]


# -- tables ------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["dense", "lazy", "memmap"])
def test_arrow_round_trip(place: str, tmp_path: Path) -> None:
    made = TensorDict(
        {
            "a": torch.arange(2),
            "m": torch.rand(2, 3, 4),
            "v": torch.rand(2, 3),
            "n": {"x": torch.rand(2)},
            "s": NonTensorStack("a", "b"),
            "b": torch.tensor([True, False]),
        },
        [2],
    )
    td: Any = lazy_stack(list(made.unbind(0))) if place == "lazy" else made
    td = td.memmap(tmp_path / "d") if place == "memmap" else td
    table = to_arrow(td)
    assert isinstance(table.schema.field("m").type, pa.FixedShapeTensorType) and table.num_rows == 2
    back = from_arrow(table)
    assert set(back.keys(True, True)) == set(made.keys(True, True)) and list(back["s"]) == ["a", "b"]
    assert all(torch.equal(back[key], made[key]) for key in ("a", "m", "v", "b", ("n", "x")))
    assert to_arrow(td, separator=".", tensors=False).column_names[-3:] == td.to_arrow(separator=".").column_names[-3:]
    with pytest.raises(InvalidTypeError, match="TensorDict"):
        to_arrow({"a": 1})  # type: ignore[arg-type]
    with pytest.raises(BatchSizeError):
        to_arrow(made[0])
