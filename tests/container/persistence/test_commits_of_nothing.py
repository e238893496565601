"""A commit where nothing was changed since the last one writes nothing; any change is committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import ReadOnlyError, StoreClosedError

PLACES = ["x.h5", "x.zarr", "file://"]
CHANGES: dict[str, Callable[[Any], object]] = {
    "rows": lambda td: td.__setitem__(0, TensorDict({"a": torch.tensor(9)})),
    "one leaf": lambda td: td.set_at_("a", 9, 1),
    "all": lambda td: td.zero_(),
}


def where(place: str, folder: Path) -> str:
    return place + str(folder / "o") if "://" in place else str(folder / place)


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_written_behind_an_append(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    td: Any = TensorDict({"a": torch.arange(4)}, [4]).save(where(place, tmp_path))
    td.append(TensorDict({"a": torch.tensor(4)}))
    store = td._handle.store
    before = store.generation()
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "save_header", lambda *args: pytest.fail("written"))
        assert td.commit() is td
    assert store.generation() == before
    td.close()
    with pytest.raises(StoreClosedError):
        td.commit()
    with tdstore.open(where(place, tmp_path)) as again:
        assert again["a"].tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(ReadOnlyError):
            again.commit()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", CHANGES)
def test_rows_are_committed(place: str, change: str, tmp_path: Path) -> None:
    td: Any = TensorDict({"a": torch.arange(4)}, [4]).save(where(place, tmp_path))
    td.commit()
    store = td._handle.store
    before = store.generation()
    CHANGES[change](td)
    assert store.uncommitted
    td.commit()
    assert store.generation() != before and not store.uncommitted
    expected = td["a"]
    td.close()
    with tdstore.open(where(place, tmp_path)) as again:
        assert torch.equal(again["a"], expected) and not again.verify()


@pytest.mark.parametrize("place", PLACES)
def test_a_new_dataset_is_committed(place: str, tmp_path: Path) -> None:
    td: Any = tdstore.open(where(place, tmp_path), mode="w")
    td.commit()
    td.close()
    with tdstore.open(where(place, tmp_path)) as again:
        assert not list(again.keys())
