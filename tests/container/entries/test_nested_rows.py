"""Rows of nested tensors in memory: a nested tensor of the same layout, as stored ones give; or the one row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict

pytestmark = pytest.mark.filterwarnings("ignore:.*prototype stage")
LENGTHS = [2, 0, 3, 1]
SEVERAL: list[Any] = [
    slice(1, 3), slice(None, None, 2), slice(2, 2), [0, 2], [-1, 0, 0], range(1, 3), torch.tensor([3, 1]),
    torch.tensor([True, False, True, False]), [True, False, True, False], (slice(1, 3),), (..., slice(1, 4)),
]  # fmt: skip


def parts() -> list[torch.Tensor]:
    return [torch.arange(n * 2.0).view(n, 2) + 10 * i for i, n in enumerate(LENGTHS)]


@pytest.fixture(params=[torch.strided, torch.jagged], ids=["strided", "jagged"])
def nested(request: pytest.FixtureRequest) -> TensorDict:
    x = torch.nested.as_nested_tensor(parts(), layout=request.param)
    return TensorDict({"x": x, "n": {"y": x * 2}, "a": torch.arange(4), "s": list("abcd")}, [4])


def rows_of(tensor: torch.Tensor) -> list[Any]:
    return [row.tolist() for row in tensor.unbind()]


@pytest.mark.parametrize("index", SEVERAL, ids=str)
def test_several_rows(nested: TensorDict, index: Any, tmp_path: Path) -> None:
    """The rows of every entry, and the same as on h5 and memmap."""
    found = nested[index]
    chosen = found["a"].tolist()
    assert found["x"].is_nested
    assert found["x"].layout is nested["x"].layout
    assert found["x"].dtype is nested["x"].dtype
    assert rows_of(found["x"]) == [parts()[i].tolist() for i in chosen]
    assert rows_of(found["n", "y"]) == [(parts()[i] * 2).tolist() for i in chosen]
    assert found.batch_size == (len(chosen),)
    assert found["s"] == ["abcd"[i] for i in chosen]
    for place in (tmp_path / "mapped", tmp_path / "file.h5"):
        stored = nested.save(place)
        again = stored[index]
        assert again["x"].layout is nested["x"].layout
        assert rows_of(again["x"]) == rows_of(found["x"])
        stored.close()


def test_one_row(nested: TensorDict) -> None:
    for i in (0, 1, -1):
        assert nested[i]["x"].tolist() == parts()[i].tolist()
        assert not nested[i]["x"].is_nested
    for bad in (4, [4], [0, -5]):
        with pytest.raises(IndexError):
            nested[bad]
    with pytest.raises(tdstore.errors.UnsupportedError, match="new dimensions"):
        nested[None]


def test_ragged_along_another_dimension() -> None:
    """What is ragged stays ragged, wherever that is, also of rows that happen to be of one length."""
    x = torch.nested.nested_tensor_from_jagged(torch.arange(14.0).view(2, 7), torch.tensor([0, 3, 5, 7]), jagged_dim=2)
    td = TensorDict({"x": x}, [3])[1:]
    assert rows_of(td["x"]) == rows_of(x)[1:]
    assert td.get_item_shape("x") == torch.Size([2, 2, -1])
    assert td[:0]["x"].layout is torch.jagged


def test_gradients_go_through_rows() -> None:
    leaves = [torch.ones(n, 2, requires_grad=True) for n in (1, 2, 3)]
    td = TensorDict({"x": torch.nested.as_nested_tensor(leaves, layout=torch.jagged)}, [3])
    (td[[2, 0]]["x"].values() * 3).sum().backward()
    grads = [leaf.grad for leaf in leaves]
    assert [None if g is None else g.unique().tolist() for g in grads] in ([[3.0], [0.0], [3.0]], [[3.0], None, [3.0]])


def test_writing(nested: TensorDict) -> None:
    """One row of the same shape is written; several are refused, and nothing changes."""
    nested[2] = {"x": torch.full((3, 2), 7.0)}
    assert nested["x"].unbind()[2].unique().tolist() == [7]
    before = rows_of(nested["x"])
    for index, value in ((slice(0, 2), nested[0:2]), ([0, 2], nested[[0, 2]]), (slice(0, 2), 0)):
        with pytest.raises(tdstore.errors.UnsupportedError, match="set the whole entry"):
            nested[index] = value
    with pytest.raises(tdstore.errors.BatchSizeError):
        nested[2] = {"x": torch.zeros(5, 2)}
    assert rows_of(nested["x"]) == before
    assert nested["a"].tolist() == [0, 1, 2, 3]
