"""Containers under torchdata's StatefulDataLoader: a checkpoint has the position, never the rows."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import tdstore
from tdstore import LazyStackedTensorDict, TensorDict

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torch; torchdata calls it


class Rows(tdstore.TensorClass):
    a: torch.Tensor


# A batch as it is, by a function that spawned workers find: torchrl, where it was imported before, makes them so.
as_it_is = operator.itemgetter(slice(None))


def loader(data: Any, workers: int = 0) -> Any:
    return StatefulDataLoader(data, batch_size=4, num_workers=workers, collate_fn=as_it_is)


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "in memory": lambda td, place: td,
    "h5": lambda td, place: td.save(place / "x.h5"),
    "memmap": lambda td, place: td.save(place / "x"),
    "a window": lambda td, place: td.save(place / "x.h5")[:500],
    "lazy": lambda td, place: LazyStackedTensorDict(*td[:12].unbind(0)),
    "tensorclass": lambda td, place: Rows(a=td["a"], batch_size=[1000]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_checkpoint_has_the_position_and_not_the_rows(tmp_path: Any, name: str) -> None:
    data = CONTAINERS[name](TensorDict({"a": torch.arange(1000.0)}, [1000]), tmp_path)
    first = loader(data)
    assert next(iter(first)).get("a").tolist() == [0, 1, 2, 3]
    state = first.state_dict()
    assert len(pickle.dumps(state)) < 1000, "the rows are in the checkpoint"
    again = loader(data)
    again.load_state_dict(state)
    assert next(iter(again)).get("a").tolist() == [4, 5, 6, 7]


def test_loading_a_checkpoint_writes_no_rows(tmp_path: Any) -> None:
    TensorDict({"a": torch.arange(100.0)}, [100]).save(tmp_path / "x.h5").close()
    with tdstore.open(tmp_path / "x.h5", "r+") as stored:
        first = loader(stored)
        next(iter(first))
        state = first.state_dict()
        # As of a checkpoint that was written when the rows still were in it.
        state["dataset_state"] = {"a": torch.arange(100.0)}
        stored["a"] = torch.full((100,), -1.0)
        again = loader(stored)
        again.load_state_dict(state)
        assert next(iter(again))["a"].tolist() == [-1] * 4
        assert (stored["a"] == -1).all(), "old rows were written over newer ones"


def test_workers(tmp_path: Any) -> None:
    TensorDict({"a": torch.arange(10_000.0)}, [10_000]).save(tmp_path / "x").close()
    stored = tdstore.open(tmp_path / "x")
    first = loader(stored, workers=2)
    rows = iter(first)
    assert [next(rows)["a"][0].item() for _ in range(2)] == [0, 4]
    state = first.state_dict()
    assert len(pickle.dumps(state)) < 2000
    again = loader(stored, workers=2)
    again.load_state_dict(state)
    assert next(iter(again))["a"].tolist() == [8, 9, 10, 11]


def test_users_get_the_entries() -> None:
    td = TensorDict({"a": torch.arange(3.0)}, [3])
    assert td.state_dict()["a"].tolist() == [0, 1, 2]
    other = TensorDict({"a": torch.zeros(3)}, [3])
    assert other.load_state_dict(td.state_dict())["a"].tolist() == [0, 1, 2]
    assert Rows(a=torch.ones(2), batch_size=[2]).state_dict()
