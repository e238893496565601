"""`stored[rows] = batch`: the index is parsed once, and what is written is what memory would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import TDStoreError
from tdstore.index.selection import Selection

ROWS = 300


def dataset() -> TensorDict:
    td = TensorDict({"a": torch.arange(ROWS), "s": [f"row {row}" for row in range(ROWS)], "one": "value"}, [ROWS])
    td["below"] = TensorDict({"b": torch.zeros(ROWS, 3, 2), "further": {"c": torch.zeros(ROWS, 3)}}, [ROWS, 3])
    return td


def batch(count: int) -> TensorDict:
    td = TensorDict({"a": -torch.arange(count), "s": [f"new {row}" for row in range(count)]}, [count])
    td["below"] = TensorDict({"b": torch.rand(count, 3, 2), "further": {"c": torch.rand(count, 3)}}, [count, 3])
    return td


INDICES: dict[str, Any] = {
    "rows": torch.tensor([5, 2, 299]),
    "slice": slice(10, 13),
    "list": [7, -1, 0],
    "mask": torch.arange(ROWS) % 100 == 3,
    "ellipsis": (torch.tensor([5, 2, 299]), ...),
}


@pytest.fixture(params=["h5", "zarr"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    place = tmp_path / f"data.{request.param}"
    dataset().save(place).close()
    return tdstore.open(place, mode="r+")


def same(one: Any, other: Any) -> bool:
    tensors = all(torch.equal(one[k], other[k]) for k in ("a", ("below", "b"), ("below", "further", "c")))
    return tensors and list(one["s"]) == list(other["s"]) and one["one"] == other["one"]


@pytest.mark.parametrize("name", INDICES)
def test_rows_are_written_as_in_memory(stored: Any, name: str) -> None:
    memory, rows = dataset(), batch(3)
    memory[INDICES[name]] = rows
    stored[INDICES[name]] = rows
    assert same(stored.to_tensordict(), memory)
    stored[20:40][INDICES["list"] if name == "list" else slice(4, 7)] = rows
    memory[20:40][INDICES["list"] if name == "list" else slice(4, 7)] = rows
    assert same(stored.to_tensordict(), memory)
    stored.close()


def test_the_index_is_parsed_once(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[object] = []
    parse = Selection.__getitem__
    monkeypatch.setattr(Selection, "__getitem__", lambda self, index: parsed.append(index) or parse(self, index))
    stored[torch.tensor([3, 1, 2])] = batch(3)
    assert len(parsed) == 1
    monkeypatch.undo()
    stored.close()


def test_new_entries_start_as_zeros_elsewhere(stored: Any) -> None:
    rows = batch(2)
    rows["new"] = torch.ones(2)
    stored[[1, 2]] = rows
    assert stored["new"].sum() == 2 and stored["new"].shape == (ROWS,)
    stored.close()


def test_a_batch_that_does_not_fit_changes_nothing(stored: Any) -> None:
    rows = batch(3)
    rows["below"] = TensorDict({"b": torch.ones(3, 5)}, [3])
    with pytest.raises((TDStoreError, RuntimeError)):
        stored[[1, 2, 3]] = rows
    with pytest.raises((TDStoreError, RuntimeError)):
        stored[[1, 2]] = batch(3)
    assert same(stored.to_tensordict(), dataset())
    stored.close()
