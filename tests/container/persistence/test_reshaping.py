"""astype_ and permute_features_: values are kept on every container, and what fails has changed nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import LeafSpec, TensorDict, lazy_stack
from tdstore.container.persistence import reshaping
from tdstore.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    KeyNotFoundError,
    LockedError,
    ReadOnlyError,
    StoreIOError,
    UnsupportedError,
)
from tdstore.types import Write

STORED = ["memmap", "tdz", "h5", "zarr", "objects"]
WHERE = ["TensorDict", "memory", "shared", *STORED]
Make = Callable[[str], Any]


def whole() -> TensorDict:
    return TensorDict(
        {
            "z": torch.arange(24.0).reshape(4, 6),
            "n": TensorDict({"image": torch.arange(4 * 2 * 3 * 5).reshape(4, 2, 3, 5)}, [4]),
            "s": ["a", "b", "c", "d"],
            "row": torch.arange(4),
        },
        [4],
    )


@pytest.fixture
def location(tmp_path: Path) -> Callable[[str], str]:
    return lambda where: f"file://{tmp_path}/objects/" if where == "objects" else str(tmp_path / f"x.{where}")


@pytest.fixture
def make(location: Callable[[str], str]) -> Make:
    def made(where: str) -> Any:
        td = whole()
        if where in ("memory", "shared"):
            return td.save(storage=where).unlock_()
        if where != "TensorDict":
            more = {} if where == "objects" else {"storage": where}
            td.save(location(where), **more).close()
            td = tdstore.open(location(where), mode="r+").unlock_()
        return td

    return made


@pytest.mark.parametrize("where", WHERE)
def test_values_are_kept(make: Make, location: Callable[[str], str], where: str) -> None:
    td = make(where)
    before = td["z"]
    assert td.astype_({"z": torch.float16, ("n", "image"): torch.int8}) is td
    assert td.permute_features_({("n", "image"): (1, -1, 0)}) is td
    expected = whole()
    expected["z"] = expected["z"].half()
    expected["n", "image"] = expected["n", "image"].to(torch.int8).permute(0, 2, 3, 1)
    assert before.dtype is torch.float32
    assert before[3, 5] == 23  # a tensor that was obtained earlier stays as it is
    places = [td]
    if where in STORED:
        td.close()
        places = [tdstore.open(location(where))]
    for place in places:
        assert place["z"].dtype is torch.float16
        assert place["n", "image"].dtype is torch.int8
        assert place.to_tensordict().shape == (4,)
        assert (place == expected).all()
        assert list(place.keys()) == list(whole().keys())


@pytest.mark.parametrize("where", ["TensorDict", "memmap", "h5"])
def test_one_dtype_for_every_tensor(make: Make, where: str) -> None:
    td = make(where).astype_(torch.float64)
    assert {td[key].dtype for key in ("z", ("n", "image"), "row")} == {torch.float64}
    assert list(td["s"]) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("where", ["memmap", "h5", "zarr"])
def test_in_blocks(make: Make, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshaping, "BLOCK_BYTES", 100)
    td = make(where)
    calls: list[Write] = []
    store = (td._binding[0] if where == "memmap" else td._handle).store
    write = store.write

    def noted(writes: list[Write]) -> None:
        calls.extend(writes)
        write(writes)

    monkeypatch.setattr(store, "write", noted)
    td.astype_({"z": torch.float64})
    assert [w.index for w in calls] == [(slice(a, a + 2, 1),) for a in (0, 2)]
    td.permute_features_({("n", "image"): (2, 0, 1)})
    assert len(calls) == 6
    assert torch.equal(td["n", "image"], whole()["n", "image"].permute(0, 3, 1, 2))
    assert torch.equal(td["z"], whole()["z"].double())


@pytest.mark.parametrize("where", ["memmap", "h5", "zarr"])
@pytest.mark.parametrize("method", ["create", "write", "rename", "save_header"])
def test_what_fails_has_changed_nothing(
    make: Make, location: Callable[[str], str], where: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    td = make(where)
    store = (td._binding[0] if where == "memmap" else td._handle).store

    def refuse(*args: Any) -> None:
        raise StoreIOError("no room", url=store.url)

    with monkeypatch.context() as broken, pytest.raises(StoreIOError):
        broken.setattr(store, method, refuse)
        td.astype_({"z": torch.float64, "row": torch.int8})
    assert (td == whole()).all()
    assert td["z"].dtype is torch.float32
    td.close()
    again = tdstore.open(location(where))
    assert (again == whole()).all()
    assert again["z"].dtype is torch.float32
    assert set(again.keys(True, True)) == set(whole().keys(True, True))


def test_an_open_reader_sees_one_or_the_other(make: Make, location: Callable[[str], str]) -> None:
    td = make("zarr")
    reader = tdstore.open(location("zarr"))
    with td.transaction():
        td.astype_({"z": torch.float64})
        td.permute_features_({("n", "image"): (1, 0, 2)})
        assert reader.refresh_()["z"].dtype is torch.float32
    assert reader.refresh_()["z"].dtype is torch.float64
    assert reader["n", "image"].shape == (4, 3, 2, 5)


def test_fill_value_and_layout_follow(location: Callable[[str], str]) -> None:
    schema = {"a": LeafSpec((2, 3), "int16", fill_value=7, chunks=(2, 1, 3))}
    td: Any = TensorDict.from_schema(schema, batch_size=[6], location=location("h5"))
    td.unlock_().astype_({"a": torch.float32}).permute_features_({"a": (1, 0)})
    td.resize_(7)
    assert torch.equal(td["a"], torch.full((7, 3, 2), 7.0))
    assert td._handle.store.layout(("a",))["chunks"] == (2, 3, 1)


def test_elements_of_a_lazy_stack(tmp_path: Path) -> None:
    stack = lazy_stack([whole(), whole()])
    stack.astype_({"z": torch.int32})
    stack.permute_features_({("n", "image"): (2, 1, 0)})
    assert stack["z"].dtype is torch.int32
    assert stack["n", "image"].shape == (2, 4, 5, 3, 2)


def test_what_is_there_already_is_no_change(make: Make) -> None:
    td = make("h5")
    generation = td._handle.store.generation()
    td.astype_({"z": torch.float32}).permute_features_({("n", "image"): (0, 1, 2), "row": ()})
    assert td._handle.store.generation() == generation


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "missing": (lambda td: td.astype_({"no": torch.int8}), KeyNotFoundError, "no"),
    "values": (lambda td: td.astype_({"s": torch.int8}), InvalidTypeError, "'s' is a value, not a tensor"),
    "group": (lambda td: td.astype_({"n": torch.int8}), InvalidTypeError, "'n' is a TensorDict, not a tensor"),
    "no dtype": (lambda td: td.astype_({"z": "float16"}), InvalidTypeError, "dtypes of torch"),
    "nothing at all": (lambda td: td.astype_("float16"), InvalidTypeError, "dtypes of torch"),
    "order": (lambda td: td.permute_features_({("n", "image"): (0, 1)}), InvalidArgumentError, "3 feature dimensions"),
    "twice": (lambda td: td.permute_features_({("n", "image"): (0, 1, -2)}), InvalidArgumentError, "no order of them"),
    "locked": (lambda td: td.lock_().astype_({"z": torch.int8}), LockedError, "change the dtype of 'z'"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("where", ["TensorDict", "memmap", "h5"])
def test_refused(make: Make, where: str, what: str) -> None:
    td, (call, error, says) = make(where), REFUSED[what]
    with pytest.raises(error, match=says):
        call(td)
    assert (td == whole()).all()


@pytest.mark.parametrize("where", ["memmap", "h5"])
def test_rows_of_a_dataset_and_readers(make: Make, location: Callable[[str], str], where: str) -> None:
    td = make(where)
    with pytest.raises((UnsupportedError, LockedError), match=r"astype_|change the dtype"):
        td[1:3].astype_({"z": torch.float64})
    td.close()
    with tdstore.open(location(where), storage=where) as reader, pytest.raises((ReadOnlyError, LockedError)):
        reader.astype_({"z": torch.float64})


def test_nested_tensors_are_refused(location: Callable[[str], str]) -> None:
    td = TensorDict.from_schema({"t": ((-1,), "int64")}, batch_size=[0], location=location("h5"))
    td.unlock_().append({"t": [1, 2]})
    with pytest.raises(UnsupportedError, match="'t' is a nested tensor"):
        td.astype_({"t": torch.int32})
