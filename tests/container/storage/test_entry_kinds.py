"""Every entry of a store is of one kind, which follows what is committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict, UnbatchedTensor
from tdstore.container.storage.entry_kinds import (
    Column,
    Entries,
    Entry,
    Inline,
    Leaf,
    NestedTensor,
    Refused,
    SubGroup,
    Unbatched,
)
from tdstore.header import Group
from tdstore.store import Store
from tdstore.storekit.foreign_strings import refused

ROWS = 300
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
VALUES: dict[str, tuple[Any, type]] = {
    "tensor": (torch.zeros(ROWS, 2), Leaf),
    "group": (TensorDict({"below": torch.ones(ROWS)}, [ROWS]), SubGroup),
    "strings": ([f"row {row}" for row in range(ROWS)], Column),
    "jagged": (
        torch.nested.nested_tensor([torch.ones(row % 3) for row in range(ROWS)], layout=torch.jagged),
        NestedTensor,
    ),
    "unbatched": (UnbatchedTensor(torch.arange(3)), Unbatched),
    "value": ("one for all", Inline),
}


@pytest.fixture(params=["h5", "zarr", "objects"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    place = f"file://{tmp_path}/data" if request.param == "objects" else str(tmp_path / f"data.{request.param}")
    td = TensorDict({key: value for key, (value, _) in VALUES.items()}, [ROWS])
    td.save(place).close()
    return tdstore.open(place, mode="r+")


def entry(td: Any, *path: str) -> Entry | None:
    found: Entry | None = td._handle.entries[path]
    return found


def test_each_entry_is_of_its_kind(stored: Any) -> None:
    assert {key: type(entry(stored, key)) for key in stored.keys()} == {key: kind for key, (_, kind) in VALUES.items()}
    assert type(entry(stored, "group", "below")) is Leaf
    assert entry(stored, "absent") is None and entry(stored, "group", "absent") is None
    assert entry(stored, "tensor") is entry(stored, "tensor")
    assert {leaf for key in stored.keys() for leaf in stored._handle.leaves_below((key,))} == set(stored._handle.specs)
    stored.close()


@pytest.mark.parametrize("old", VALUES)
@pytest.mark.parametrize("new", VALUES)
def test_an_entry_that_is_replaced_has_the_new_kind(tmp_path: Path, old: str, new: str) -> None:
    TensorDict({"entry": VALUES[old][0]}, [ROWS]).save(tmp_path / "a.h5").close()
    td = tdstore.open(tmp_path / "a.h5", mode="r+")
    assert type(entry(td, "entry")) is VALUES[old][1]
    td["entry"] = VALUES[new][0]
    assert type(entry(td, "entry")) is VALUES[new][1]
    td.rename_key_("entry", "other")
    assert entry(td, "entry") is None and type(entry(td, "other")) is VALUES[new][1]
    td.read(torch.tensor([1, 2]))
    del td["other"]
    assert entry(td, "other") is None and not list(td.keys())
    td.close()


def test_a_change_that_fails_leaves_the_kinds_as_they_were(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(header: Any) -> None:
        raise tdstore.errors.StoreIOError("the disk is full", url="?")

    before = {key: type(entry(stored, key)) for key in stored.keys()}
    with monkeypatch.context() as patch:
        patch.setattr(stored._handle.store, "save_header", full)
        with pytest.raises(tdstore.errors.StoreIOError):
            stored["tensor"] = "a value now"
    assert {key: type(entry(stored, key)) for key in stored.keys()} == before
    assert torch.equal(stored.read(torch.tensor([1, 2]))["tensor"], torch.zeros(2, 2))
    stored.close()


def test_an_entry_that_a_store_refuses_is_of_a_kind_of_its_own() -> None:
    group = Group(batch_size=(3,), keys=("odd",), values={"odd": refused("it is a compound", "read it with h5py")})
    found = Entries({(): group}, {}, "?")[("odd",)]
    assert isinstance(found, Refused) and found.why == "it is a compound" and found.leaves == ()


def test_what_another_handle_grew_is_read(tmp_path: Path) -> None:
    """The length of a text is looked up again when a span lies behind the one that was known."""
    TensorDict({"s": VALUES["strings"][0]}, [ROWS]).save(tmp_path / "a.h5").close()
    td = tdstore.open(tmp_path / "a.h5", mode="r+")
    known = dict(td._handle.specs)
    td[:2] = TensorDict({"s": ["long " * 20_000, "short"]}, [2])
    td._handle.specs.update(known)
    assert td.read(torch.tensor([0, 1]))["s"] == ["long " * 20_000, "short"]
    td.close()


def test_stores_are_asked_for_specs_at_opening_only(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store over a wire may pay a round trip for them."""

    def asked(self: Store, paths: Any) -> Any:
        raise AssertionError("specs were asked for")

    monkeypatch.setattr(type(stored._handle.store), "specs", asked)
    assert len(stored.read(torch.tensor([5, 7]))["strings"]) == 2
    monkeypatch.undo()
    stored.close()
