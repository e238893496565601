"""Pieces of datasets with nested tensors: split, chunk, cat, stack and index, on every container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import LazyStackedTensorDict, NonTensorData, TensorDict
from tdstore.errors import InvalidStateError, UnevenError
from tdstore.testing import CountingStore
from tests.container.varlen.test_nested_growth import REOPENED, WHERE, Maker, check, lists, make, ragged, sample

__all__ = ["make"]  # the fixture
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
SIZES = (3, 0, 2, 5, 1, 4)


@pytest.mark.parametrize("where", WHERE)
def test_pieces_have_the_rows_of_a_list(where: str, make: Maker) -> None:
    td = make(where, sample(*SIZES))
    tokens, points, rows = lists(td["tokens"]), lists(td["n", "points"]), list(range(6))
    mask = torch.tensor([True, False, True, False, False, True])
    cuts = {
        "split": (td.split(4), [rows[:4], rows[4:]]),
        "split into sizes": (td.split([1, 0, 5]), [rows[:1], [], rows[1:]]),
        "chunk": (td.chunk(3), [rows[:2], rows[2:4], rows[4:]]),
        "torch.split": (torch.split(td, 3), [rows[:3], rows[3:]]),
        "tensor_split": (td.tensor_split(4), [rows[:2], rows[2:4], rows[4:5], rows[5:]]),
        "tensor_split at places": (td.tensor_split([2, 5]), [rows[:2], rows[2:5], rows[5:]]),
        "narrow": ([td.narrow(0, 2, 3), td.narrow(0, -2, 2)], [rows[2:5], rows[4:]]),
        "slices": ([td[1:4], td[::2], td[-2:], td[4:4]], [rows[1:4], rows[::2], rows[-2:], []]),
        "lists": ([td[[5, 0, 0]], td[torch.tensor([-1])], td[range(2, 4)]], [[5, 0, 0], [5], [2, 3]]),
        "masks": ([td[mask], td[mask.tolist()], td[~mask]], [[0, 2, 5], [0, 2, 5], [1, 3, 4]]),
        "a piece of a piece": ([td[1:][[0, 2]], td[mask][1:]], [[1, 3], [2, 5]]),
    }
    for how, (pieces, expected) in cuts.items():
        for piece, chosen in zip(pieces, expected, strict=True):
            assert piece.batch_size == (len(chosen),) and piece["x"].tolist() == chosen, how
            assert lists(piece["tokens"]) == [tokens[i] for i in chosen], how
            assert lists(piece["n", "points"]) == [points[i] for i in chosen], how
            assert piece["note"] == [f"row {i}" for i in chosen], how
    check(torch.cat([td[:2], td[2:3], td[3:]]), *SIZES)
    assert [row["tokens"].tolist() for row in td] == tokens


@pytest.mark.parametrize("where", WHERE)
def test_a_stack_keeps_nested_tensors_apart(where: str, make: Maker) -> None:
    td = make(where, sample(3, 0, 2))
    with pytest.raises(InvalidStateError, match="'tokens'") as caught:
        torch.stack([td, td])
    assert "lazy_stack" in str(caught.value.hint)
    stack = tdstore.lazy_stack([td, make(where, sample(1, 4, 2))])
    assert isinstance(stack, LazyStackedTensorDict) and stack.batch_size == (2, 3)
    assert lists(stack[1]["tokens"]) == lists(sample(1, 4, 2)["tokens"]) and stack[0, 2]["tokens"].tolist() == [
        200,
        201,
    ]
    assert [lists(part) for part in stack.get("tokens", as_list=True)] == [lists(part["tokens"]) for part in stack]
    padded = stack.get("tokens", as_padded_tensor=True, padding_value=-1)
    assert padded.shape == (2, 3, 4) and padded[0, 2].tolist() == [200, 201, -1, -1]
    with pytest.raises(UnevenError, match="components"):
        stack.get("tokens", as_nested_tensor=True)


@pytest.mark.parametrize("where", ["h5", "zarr", "objects"])
def test_a_gather_of_rows_is_one_round_for_places_and_one_for_elements(where: str, make: Maker) -> None:
    sizes = [row % 4 for row in range(2048)]
    td = make(where, TensorDict({"r": ragged(*sizes), "p": ragged(*sizes, width=3), "x": torch.arange(2048)}, [2048]))
    rows = torch.randperm(2048)[:32]
    counting = td._handle.store = CountingStore(td._handle.store)
    batch = td.read(rows)
    assert counting.calls["read"] == 2 and counting.leaves["read"] <= 3 + 2 * 32
    assert [len(row) for row in batch["r"].unbind()] == [sizes[row] for row in rows]
    assert [len(row) for row in batch["p"].unbind()] == [sizes[row] for row in rows]
    td.close()


@pytest.mark.parametrize("rows", [0, 300])
@pytest.mark.parametrize("where", REOPENED)
def test_a_schema_of_strings_values_and_ragged_rows(where: str, rows: int, make: Maker) -> None:
    _, place = make.at(where, TensorDict({"a": torch.zeros(1)}, [1]))
    schema = {
        "text": str, "n": {"tokens": ((-1, 2), "int64"), "any": object}, "config": NonTensorData("adam")
    }  # fmt: skip
    options: dict[str, Any] = {"storage": "memmap"} if where == "memmap" else {}
    td = TensorDict.from_schema(schema, batch_size=[rows], location=place, mode="w", **options)
    for count in (1, 3):
        row = {"text": f"{count}", "n": {"tokens": torch.ones(count, 2).long(), "any": b"%d" % count}}
        td.append({**row, "config": "adam"})
    if where != "shm":  # which ends with its last handle
        td.close()
    with tdstore.open(place) as again:
        assert again.batch_size == (rows + 2,) and again["config"] == "adam"
        assert again["text"] == [None] * rows + ["1", "3"]
        assert list(again["n", "any"])[-2:] == [b"1", b"3"]
        assert [len(row) for row in again["n", "tokens"].unbind()] == [0] * rows + [1, 3]


def test_an_append_moves_the_new_rows_only(tmp_path: Path) -> None:
    td = TensorDict({"r": ragged(*[3] * 500)}, [500]).save(tmp_path / "x.h5")
    counting = td._handle.store = CountingStore(td._handle.store)
    moved = []
    write = counting.write
    counting.write = lambda writes: (moved.extend(len(w.value) for w in writes), write(writes))  # type: ignore[method-assign,func-returns-value,assignment]
    td.append({"r": [7.0] * 5})
    assert counting.calls["read"] == 0 and sorted(moved) == [1, 5], "one span, five elements"
    assert counting.calls["save_header"] == 1
    td.close()
