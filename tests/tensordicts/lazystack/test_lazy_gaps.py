"""Lazy stacks below others: uneven ones reduce and are updated, views write through, values go with their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict, lazy_stack
from tdstore.errors import UnevenError, UnsupportedError


def uneven(start: float = 0.0) -> Any:
    """A TensorDict of two rows whose lazy stack has leaves of two and three elements."""
    parts = [TensorDict({"v": torch.arange(2.0 + i) + start}) for i in range(2)]
    return TensorDict({"x": torch.ones(2) + start, "z": lazy_stack(parts)}, [2])


@pytest.mark.parametrize("where", ["TensorDict", "h5"])
def test_uneven_stacks_below(where: str, tmp_path: Path) -> None:
    td = uneven() if where == "TensorDict" else uneven().save(tmp_path / "u.h5")
    every = torch.cat([torch.arange(2.0), torch.arange(3.0)])
    for name in ("sum", "mean", "std", "amax"):
        if name != "amax":
            assert torch.allclose(getattr(td, name)()["z", "v"], getattr(every, name)()), name
            assert torch.allclose(getattr(td, name)()["x"], getattr(torch.ones(2), name)()), name
    with pytest.raises(UnevenError, match="as_padded_tensor"):
        td.sum(0)
    td.update_(uneven(7))
    assert td["x"].tolist() == [8, 8] and [e["v"].tolist() for e in td["z"].tensordicts] == [[7, 8], [7, 8, 9]]
    with pytest.raises(KeyError):
        td.update_({"z": lazy_stack([TensorDict({"w": torch.zeros(2)})] * 2)})
    td.close()


def test_stacks_of_uneven_stacks() -> None:
    rows = [lazy_stack([TensorDict({"v": torch.ones(2 + i + j)}) for j in range(2)]) for i in range(2)]
    assert lazy_stack(rows).sum()["v"] == 2 + 3 + 3 + 4
    with pytest.raises(UnevenError, match="'v'"):
        lazy_stack(rows).sum(1)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_view_of_a_stack_below_writes_through(dim: int) -> None:
    shape = ([3], [2])[dim]
    stack = lazy_stack([TensorDict({"v": torch.arange(float(shape[0])) + 10 * i}, shape) for i in range(2 + dim)], dim)
    td = TensorDict({"x": torch.zeros(2, 3), "z": stack}, [2, 3])
    flat = td.view(6)
    assert torch.equal(flat["z", "v"], stack["v"].reshape(6))
    flat.zero_()
    assert td["z", "v"].sum() == 0 and stack.tensordicts[1]["v"].sum() == 0
    assert td.reshape(3, 2)["z"].batch_size == (3, 2)
    with pytest.raises((UnevenError, UnsupportedError, RuntimeError)):
        ragged = lazy_stack([TensorDict({"v": torch.zeros(n)}, [n]) for n in (2, 3)])
        TensorDict({"z": ragged}, [2]).view(2, 1)["z"].view(-1)


def test_values_that_differ_only_along_other_dimensions_stay() -> None:
    """The peer leaves an empty TensorDict where they were."""
    td = TensorDict({"a": torch.ones(2, 3, dtype=torch.bool)}, [2, 3])
    td["s"] = [["x"] * 3, ["y"] * 3]
    td["each"] = [["a", "b", "c"], ["d", "e", "f"]]
    stack = lazy_stack([TensorDict({"a": torch.ones(3), "s": s}, [3]) for s in "xy"])
    for reduced in (td.all(1), td.any(1), td.sum(dim=1), stack.sum(1)):
        assert reduced.get("s").tolist() == ["x", "y"] and "each" not in reduced.keys()
    assert td.all(1, keepdim=True).get("s").tolist() == [["x"], ["y"]]
    assert "s" not in td.all(0).keys() and "s" not in stack.sum(0).keys()
    assert tdstore.NonTensorData("v", [2, 3]).batch_size == (2, 3)
