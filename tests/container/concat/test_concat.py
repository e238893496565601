"""`tdstore.concat`: many places read as one, in common rounds."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tdstore
from tdstore import TensorDict, UnbatchedTensor
from tdstore.data import Epochs, TensorDictDataset
from tdstore.errors import (
    BatchSizeError,
    CorruptStoreError,
    InvalidArgumentError,
    InvalidTypeError,
    MismatchError,
    ReadOnlyError,
    StoreClosedError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.testing import CountingStore
from tests.references import frees_its_caller

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
KINDS = ["memmap", "h5", "zarr", "tdz", "objects"]
LENGTHS = (5, 0, 300, 7)
"""Rows of the places: values per row are in the header of all but one."""


def rows(first: int, count: int) -> TensorDict:
    """Rows that know their numbers, of every kind of entry."""
    if not count:  # an empty list would be an empty tensor
        return rows(first, 1)[:0]
    number = torch.arange(first, first + count)
    parts = [torch.full((int(n) % 4, 2), float(n)) for n in number]
    jagged = torch.nested.nested_tensor_from_jagged(
        torch.cat([torch.zeros(0, 2), *parts]), torch.tensor([0, *map(len, parts)]).cumsum(0)
    )
    return TensorDict(
        {
            "row": number,
            "next": TensorDict({"x": number[:, None] * torch.ones(3), "note": [f"n{n % 3}" for n in number]}, [count]),
            "name": [f"row {n}" * (int(n) % 3) if n % 5 else None for n in number],
            "tokens": jagged,
            "config": "one for all",
            "shared": UnbatchedTensor(torch.arange(4.0)),
        },
        [count],
    )


def place(folder: Path, kind: str, name: str, td: Any) -> str:
    at = f"file://{folder}/{name}/" if kind == "objects" else f"{folder}/{name}{'' if kind == 'memmap' else '.' + kind}"
    td.save(at).close()
    return at


def places(folder: Path, kinds: list[str], lengths: tuple[int, ...] = LENGTHS) -> list[str]:
    made, first = [], 0
    for i, length in enumerate(lengths):
        made.append(place(folder, kinds[i % len(kinds)], f"p{i}", rows(first, length)))
        first += length
    return made


def check(td: Any, numbers: list[int]) -> None:
    assert td.batch_size == (len(numbers),) and td["row"].tolist() == numbers
    assert td["next", "x"].tolist() == [[float(n)] * 3 for n in numbers]
    assert list(td["next", "note"]) == [f"n{n % 3}" for n in numbers]
    assert list(td["name"]) == [f"row {n}" * (n % 3) if n % 5 else None for n in numbers]
    assert [part.tolist() for part in td["tokens"].unbind()] == [[[float(n)] * 2] * (n % 4) for n in numbers]
    assert td["config"] == "one for all"
    assert td.get("shared").wrapped.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [KINDS])
def test_rows_of_all_places(kinds: list[str], tmp_path: Path) -> None:
    with tdstore.concat(places(tmp_path, kinds)) as td:
        whole = list(range(312))
        assert td.batch_size == (312,) and list(td.keys()) == list(rows(0, 1).keys())
        check(td.to_tensordict(), whole)
        for index in (slice(2, 309), slice(3, 312, 4), slice(5, 5), torch.tensor([311, 0, 5, 4, 304, 305, 5]), [7]):
            chosen = torch.arange(312)[index].tolist()
            check(td.read(index if not isinstance(index, list) else torch.tensor(index)), chosen)
            check(td[index].to_tensordict(), chosen)
        check(td[torch.arange(312) % 7 == 0].to_tensordict(), whole[::7])
        assert td[310]["tokens"].tolist() == [[310.0] * 2] * 2 and td[4]["name"] == "row 4"
        out = TensorDict({"row": torch.zeros(4, dtype=torch.int64)}, [4])
        td.read(torch.tensor([311, 0, 6, 305]), keys=["row"], out=out)
        assert out["row"].tolist() == [311, 0, 6, 305]
        td.read(slice(3, 7), keys=["row"], out=out)
        assert out["row"].tolist() == [3, 4, 5, 6]
        again = td.save(tmp_path / "whole")
        check(again, whole)


def test_a_batch_is_one_round_of_each_place_and_they_run_at_once(tmp_path: Path) -> None:
    td = tdstore.concat(places(tmp_path, ["h5"], (300, 280, 290)))
    meeting = threading.Barrier(3, timeout=120)

    class Meeting(CountingStore):
        """A store whose reads wait until all places are being read."""

        def read(self, reads: Any) -> list[torch.Tensor]:
            meeting.wait()
            return super().read(reads)

    store = td._handle.store
    for one in store.places:
        one.handle.store = Meeting(one.handle.store)
    counting = td._handle.store = CountingStore(store)
    check(td.read(torch.tensor([869, 0, 301, 299, 580])), [869, 0, 301, 299, 580])
    assert counting.calls["read"] == 2, "places of strings and of ragged rows, and what lies there"
    assert [one.handle.store.calls["read"] for one in store.places] == [2, 2, 2]
    td.close()
    with pytest.raises(StoreClosedError):
        td["row"]


def test_places_without_rows_of_a_batch_are_left_alone(tmp_path: Path) -> None:
    td = tdstore.concat(places(tmp_path, ["h5"], (10, 10, 10)))
    stores = [CountingStore(one.handle.store) for one in td._handle.store.places]
    for one, store in zip(td._handle.store.places, stores, strict=True):
        one.handle.store = store
    assert td.read(slice(12, 15), keys=["row", "tokens"])["row"].tolist() == [12, 13, 14]
    assert [store.calls["read"] for store in stores] == [0, 2, 0]
    td.close()


def test_datasets_epochs_and_pickles(tmp_path: Path) -> None:
    td = tdstore.concat(places(tmp_path, KINDS, (40, 300, 20)))
    assert len(pickle.dumps(td)) < 2000
    check(pickle.loads(pickle.dumps(td[[359, 3]])).to_tensordict(), [359, 3])
    dataset = TensorDictDataset(td, columns=["row", "name"])
    assert dataset[-1]["row"] == 359
    for context in ("fork", "spawn"):
        loader = DataLoader(
            dataset, 90, num_workers=2, collate_fn=TensorDictDataset.collate, multiprocessing_context=context
        )
        assert torch.cat([batch["row"] for batch in loader]).tolist() == list(range(360))
    epochs = Epochs(td, 64, seed=2, columns=["row", "tokens"])
    found = list(epochs)
    assert sorted(torch.cat([batch["row"] for batch in found]).tolist()) == list(range(360))
    assert [len(part) for part in found[0]["tokens"].unbind()] == [n % 4 for n in found[0]["row"].tolist()]
    td.close()


WRONG: list[tuple[Any, str]] = [
    (lambda td: td.exclude("row"), "'row' is missing"),
    (lambda td: td.set("more", torch.zeros(3)), "'more' is there"),
    (lambda td: td.set("row", torch.zeros(3)), "'row' is torch.float32 .* 'row' is torch.int64"),
    (lambda td: td.set("row", torch.zeros(3, 2, dtype=torch.int64)), r"\[2\] in each row"),
    (lambda td: td.set("row", ["a", "b", "c"]), "'row' is a value that is not a tensor"),
    (lambda td: td.set(("next", "x"), torch.zeros(3, 4)), r"'next' / 'x' is torch.float32 \[4\]"),
    (lambda td: td.set("tokens", torch.zeros(3, 2)), "'tokens' is a tensor"),
    (lambda td: td.set("next", TensorDict(td["next"], [3]).exclude("note")), "'next' / 'note' is missing"),
    (lambda td: td.set("shared", UnbatchedTensor(torch.zeros(5))), r"\[5\] for all rows"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_another_schema_names_the_place_and_the_key(case: int, tmp_path: Path) -> None:
    change, says = WRONG[case]
    first, other = place(tmp_path, "h5", "a", rows(0, 3)), place(tmp_path, "h5", "b", change(rows(3, 3)))
    with pytest.raises(MismatchError, match=says) as caught:
        tdstore.concat([first, first, other])
    assert str(caught.value).startswith(other) and first in str(caught.value)
    td = tdstore.open(other, "r+")  # the places that were opened are closed again
    td.close()


def test_tensors_without_rows_are_compared_when_they_are_read(tmp_path: Path) -> None:
    other = rows(3, 3).set("shared", UnbatchedTensor(torch.zeros(4)))
    td = tdstore.concat([place(tmp_path, "h5", "a", rows(0, 3)), place(tmp_path, "h5", "b", other)])
    assert td.read(None, keys=["row"])["row"].tolist() == list(range(6))
    with pytest.raises(MismatchError, match=r"'shared' .*b\.h5"):
        td.to_tensordict()
    td.close()


def test_values_of_a_place_and_of_each_row(tmp_path: Path) -> None:
    for count in (3, 300):
        parts = [
            TensorDict({"v": "all", "w": [f"{i}" for i in range(count)]}, [count]),
            TensorDict({"v": ["x", "y"], "w": "none"}, [2]),
            TensorDict({"v": "other", "w": b"bytes"}, [count]),
        ]
        at = [place(tmp_path, "h5", f"{count}-{i}", part) for i, part in enumerate(parts)]
        with tdstore.concat(at) as td:
            assert list(td["v"]) == ["all"] * count + ["x", "y"] + ["other"] * count
            assert list(td[count - 1 : count + 3]["w"]) == [f"{count - 1}", "none", "none", b"bytes"]


def test_what_is_refused(tmp_path: Path) -> None:
    at = place(tmp_path, "h5", "a", rows(0, 3))
    with pytest.raises(InvalidArgumentError, match="at least one"):
        tdstore.concat([])
    with pytest.raises(InvalidTypeError, match="list of locations"):
        tdstore.concat(at)
    with pytest.raises(InvalidTypeError, match="paths and URLs"):
        tdstore.concat([at, rows(0, 1)])  # type: ignore[list-item]
    with pytest.raises(InvalidArgumentError, match="mode"):
        tdstore.concat([at], mode="r+")
    with pytest.raises(StoreNotFoundError, match=r"none\.h5"):
        tdstore.concat([at, str(tmp_path / "none.h5")])
    single = place(tmp_path, "h5", "b", TensorDict({"row": torch.zeros(2)}))
    with pytest.raises(BatchSizeError, match=r"b\.h5"):
        tdstore.concat([single])
    stack = place(tmp_path, "h5", "c", tdstore.lazy_stack([TensorDict({"a": torch.zeros(n)}) for n in (1, 2)]))
    with pytest.raises(UnsupportedError, match="elements of their own"):
        tdstore.concat([stack])
    with tdstore.concat([at]) as td:
        for write in (lambda: td.set_("row", torch.zeros(3, dtype=torch.int64)), lambda: td.append(rows(3, 1)[0])):
            with pytest.raises((ReadOnlyError, UnsupportedError)):
                write()
        with pytest.raises(ReadOnlyError, match="open the place that has the rows with mode='r\\+'"):
            td[0] = rows(3, 1)[0]


def test_a_place_that_is_missing_holds_no_other_open(tmp_path: Path) -> None:
    """What the caller has would stay in memory until Python looks for cycles."""
    at = place(tmp_path, "h5", "a", rows(0, 3))
    assert frees_its_caller(lambda: tdstore.concat([at, str(tmp_path / "none.h5")]), StoreNotFoundError)


def test_places_that_change_meanwhile(tmp_path: Path) -> None:
    """New rows are seen after `refresh_`; values that moved are an error, and never another place's bytes."""
    at = places(tmp_path, ["memmap"], (300, 300))
    td = tdstore.concat(at)
    with tdstore.open(at[0], "r+") as first:
        first[3] = rows(3, 1)[0].set("name", "a longer name " * 9000)
        first.append(rows(300, 1)[0])
    with pytest.raises(CorruptStoreError, match="concatenate the places again"):
        td.read(torch.tensor([3]), keys=["name"])
    td.refresh_()
    assert td.batch_size == (601,) and td[3]["name"].startswith("a longer name")
    assert td[300]["row"] == 300 and td[301]["row"] == 300
    td.close()


def test_servers_and_files_together(tmp_path: Path, redis: Any) -> None:
    server = redis.url
    at = [f"{server}/0?name=concat-{tmp_path.name}-{i}" for i in range(2)]
    rows(0, 300).save(at[0]).close()
    rows(300, 4).save(at[1]).close()
    at.insert(1, place(tmp_path, "h5", "between", rows(304, 3)))
    with tdstore.concat(at) as td:
        chosen = torch.tensor([306, 0, 302, 299, 300])
        numbers = [*range(300), 304, 305, 306, 300, 301, 302, 303]
        check(td.read(chosen), [numbers[row] for row in chosen.tolist()])
