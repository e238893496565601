"""`TensorDictDataset`: rows for a `DataLoader`, in this process and in workers of each kind."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import tdstore
from tdstore import TensorDict
from tdstore.data import TensorDictDataset
from tdstore.errors import DimensionError, InvalidTypeError, OutOfRangeError
from tests.data_loading.places import LOCAL, SERVERS, numbered, stored

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torch; torchdata calls it


def negated(rows: Any) -> Any:
    return rows.set("row", -rows["row"])


@pytest.mark.parametrize("kind", LOCAL + SERVERS)
def test_rows_of_a_location(kind: str, request: Any) -> None:
    with stored(kind, 30, request) as (place, options):
        dataset = TensorDictDataset(place, options=options)
        assert isinstance(dataset, Dataset)
        assert len(dataset) == 30
        assert dataset[7]["row"] == 7
        assert dataset[-1]["next", "x"].tolist() == [29.0] * 3
        batch = dataset.__getitems__([5, 3, 5])
        assert batch["row"].tolist() == [5, 3, 5]
        assert list(batch["name"]) == ["r5", "r3", "r5"]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_open_the_place_for_themselves(tmp_path: Any, context: str) -> None:
    numbered(30).save(tmp_path / "x.h5").close()
    dataset = TensorDictDataset(tmp_path / "x.h5", columns=["row"], transform=negated)
    assert dataset[1]["row"] == -1
    loader = DataLoader(
        dataset, 8, num_workers=2, collate_fn=TensorDictDataset.collate, multiprocessing_context=context
    )
    assert torch.cat([batch["row"] for batch in loader]).tolist() == [-row for row in range(30)]


def test_rows_that_are_read_one_by_one_are_stacked() -> None:
    joined = ConcatDataset([TensorDictDataset(numbered(5)), TensorDictDataset(numbered(3))])
    batches = list(DataLoader(joined, 6, collate_fn=TensorDictDataset.collate))
    assert [batch["row"].tolist() for batch in batches] == [[0, 1, 2, 3, 4, 0], [1, 2]]
    assert list(batches[0]["name"]) == ["r0", "r1", "r2", "r3", "r4", "r0"]


def test_a_pickle_is_the_location(tmp_path: Any) -> None:
    numbered(3000).save(tmp_path / "x").close()
    dataset = TensorDictDataset(tmp_path / "x", columns=["row"])
    assert dataset[2999]["row"] == 2999
    data = pickle.dumps(dataset)
    assert len(data) < 1000
    assert pickle.loads(data)[2999]["row"] == 2999


def test_columns_transform_and_device() -> None:
    dataset = TensorDictDataset(numbered(5), ["row", ("next", "x")], negated, "meta")
    assert set(dataset[0].keys()) == {"row", "next"}
    assert dataset[0]["row"].device.type == "meta"
    td = numbered(5)
    assert TensorDictDataset(td, ["row"], lambda rows: rows.apply_(torch.neg)).__getitems__([1, 2])["row"].tolist() == [
        -1,
        -2,
    ]
    assert td["row"].tolist() == list(range(5)), "a transform in place changed the dataset"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_resumes_it(tmp_path: Any, workers: int) -> None:
    numbered(200).save(tmp_path / "x").close()
    dataset = TensorDictDataset(tmp_path / "x", columns=["row"])

    def loader() -> Any:
        return StatefulDataLoader(dataset, 8, num_workers=workers, collate_fn=TensorDictDataset.collate)

    first = loader()
    batches = iter(first)
    had = [next(batches)["row"].tolist() for _ in range(5)]
    state = first.state_dict()
    assert len(pickle.dumps(state)) < 2000
    again = loader()
    again.load_state_dict(state)
    assert sum(had + [batch["row"].tolist() for batch in again], []) == list(range(200))


def test_what_is_wrong_is_refused(tmp_path: Any) -> None:
    with pytest.raises(InvalidTypeError, match="rows of a list"):
        TensorDictDataset([1, 2])  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="for a location"):
        TensorDictDataset(numbered(2), options={"storage": "h5"})
    with pytest.raises(OutOfRangeError, match="row 30 of .*, which has 30 rows"):
        TensorDictDataset(numbered(30))[30]
    with pytest.raises(DimensionError, match="without batch dimensions"):
        len(TensorDictDataset(TensorDict({"a": torch.zeros(())}, [])))
    with pytest.raises(tdstore.errors.StoreNotFoundError):
        len(TensorDictDataset(tmp_path / "nothing"))
