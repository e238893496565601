"""Windows of datasets of nothing but tensors are read without what other entries need: the same comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.container.varlen.rounds import drive
from tdstore.tensordicts.persistent.reading import StoredTree

PLACES = ["x.h5", "x.zarr", "file://"]
INDICES: list[Any] = [
    3,
    -1,
    slice(2, 9, 3),
    [4, 1, 1],
    torch.tensor([7, 0]),
    torch.arange(10) % 2 == 0,
    (slice(None), 1),
    (None, 2),
    ([1, 2], [0, 1]),
    ...,
    slice(0, 0),
]


def dataset() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(40).view(10, 4), "b": torch.arange(80.0).view(10, 4, 2), "c": torch.ones(10, 4) > 0}, [10, 4]
    )


@pytest.mark.parametrize("place", PLACES)
def test_the_same_as_read_by_rounds(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    td = dataset()
    where = place + str(tmp_path / "o") if "://" in place else str(tmp_path / place)
    td.save(where).close()
    with tdstore.open(where) as stored:
        for index in INDICES:
            window: Any = stored[index]
            by_rounds = drive(window._rounds(), window._handle.store)
            with monkeypatch.context() as patch:
                patch.setattr(StoredTree, "_rounds", lambda self: pytest.fail("not by the short way"))
                plain = window._resident()
            for got in (plain, by_rounds):
                assert got.batch_size == td[index].batch_size, index
                assert list(got.keys()) == ["a", "b", "c"], index
                assert all(torch.equal(got[key], td[index][key]) for key in td.keys()), index
        assert list(stored.select("c", "a")[2]._resident().keys()) == ["c", "a"]


@pytest.mark.parametrize("place", PLACES)
def test_entries_that_are_no_plain_tensors_are_read_by_rounds(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    td = dataset()
    td["text"] = "a value"
    where = place + str(tmp_path / "o") if "://" in place else str(tmp_path / place)
    td.save(where).close()
    with tdstore.open(where) as stored:
        window: Any = stored[2]
        patched = "tdstore.tensordicts.persistent.reading.read_plain"
        monkeypatch.setattr(patched, lambda *args: pytest.fail("by the short way"))
        assert window._resident()["text"] == "a value" and torch.equal(window._resident()["a"], td["a"][2])


@pytest.mark.parametrize("place", PLACES)
def test_what_contiguous_returns_belongs_to_the_caller(place: str, tmp_path: Path) -> None:
    where = place + str(tmp_path / "o") if "://" in place else str(tmp_path / place)
    dataset().save(where).close()
    with tdstore.open(where) as stored:
        one = stored[3].contiguous()
        one["a"].zero_()
        one["more"] = torch.ones(4)
        assert type(one) is TensorDict and not one.is_locked
        assert torch.equal(stored[3].contiguous()["a"], dataset()["a"][3]) and "more" not in stored[3].contiguous()
