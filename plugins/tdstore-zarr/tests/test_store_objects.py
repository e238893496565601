"""`to_zarr` and `from_zarr` with store objects of zarr-python, here and in tensordict."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path as FsPath
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensordict
import torch
import zarr
from tdstore_zarr.store_objects import StoreEngine
from zarr.storage import LocalStore, LoggingStore, MemoryStore, ZipStore

import tdstore
from tdstore import PersistentTensorDict, TensorDict
from tdstore.engine import EngineCap
from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    OptionError,
    ReadOnlyError,
    StoreExistsError,
    StoreIOError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.index.ranges import Range

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

Maker = Callable[[FsPath], Any]
MAKERS: dict[str, Maker] = {
    "LocalStore": lambda folder: LocalStore(folder / "l.zarr"),
    "MemoryStore": lambda folder: MemoryStore(),
    "ZipStore": lambda folder: ZipStore(folder / "z.zip", mode="w"),
}


def data() -> dict[str, Any]:
    return {"a": torch.arange(3), "n": {"b": torch.ones(3, 2)}}


@pytest.fixture(params=MAKERS)
def store(request: pytest.FixtureRequest, tmp_path: FsPath) -> Any:
    return MAKERS[request.param](tmp_path)


@pytest.fixture(params=["tensordict", "tdstore"])
def package(request: pytest.FixtureRequest) -> ModuleType:
    return {"tensordict": tensordict, "tdstore": tdstore}[request.param]


def test_saving_to_a_store_object_and_opening_it(store: Any, package: ModuleType) -> None:
    td = package.TensorDict(data(), [3])
    saved = td.to_zarr(store)
    assert torch.equal(saved["n", "b"], torch.ones(3, 2))
    saved.set("c", torch.zeros(3))
    # tensordict needs a zip store that is open for reading and writing
    mode = "r+" if package is tensordict and isinstance(store, ZipStore) else "r"
    found = package.TensorDict.from_zarr(store, mode=mode)
    assert isinstance(found, package.PersistentTensorDict) and found.batch_size == (3,)
    assert set(found.keys()) == {"a", "c", "n"} and torch.equal(found["a"], torch.arange(3))


def test_zarr_reads_on_with_the_store_object(store: Any) -> None:
    saved = TensorDict(data(), [3]).to_zarr(store)
    saved.close()
    group = zarr.open_group(store, mode="r+")
    assert np.array_equal(group["a"][:], np.arange(3)) and group["n/b"].shape == (3, 2)
    store.close()


def test_the_other_package_opens_it(tmp_path: FsPath) -> None:
    ours, theirs = MemoryStore(), MemoryStore()
    TensorDict(data(), [3]).to_zarr(ours)
    tensordict.TensorDict(data(), [3]).to_zarr(theirs)
    assert torch.equal(tensordict.TensorDict.from_zarr(ours)["n", "b"], torch.ones(3, 2))
    assert torch.equal(TensorDict.from_zarr(theirs)["n", "b"], torch.ones(3, 2))


def test_a_zip_store_in_a_with_block(tmp_path: FsPath) -> None:
    with ZipStore(tmp_path / "a.zip", mode="w") as store:
        TensorDict(data(), [3]).to_zarr(store).close()
    with ZipStore(tmp_path / "a.zip") as store:
        assert torch.equal(TensorDict.from_zarr(store)["a"], torch.arange(3))
    for mode in ("a", "w"):
        with ZipStore(tmp_path / "a.zip", mode=mode) as store:
            assert torch.equal(TensorDict.from_zarr(store)["a"], torch.arange(3))
            assert zarr.open_group(store, mode="r+")["a"].shape == (3,), "zarr does not empty the file"
    assert torch.equal(TensorDict.from_zarr(tmp_path / "a.zip")["a"], torch.arange(3))


def test_a_zip_store_that_zarr_writes_is_to_be_closed_first(tmp_path: FsPath) -> None:
    store = ZipStore(tmp_path / "a.zip", mode="w")
    zarr.open_group(store, mode="w").create_array("x", data=np.arange(6))
    with pytest.raises(CorruptStoreError, match="close the ZipStore first"):
        TensorDict.from_zarr(store)
    store.close()
    assert torch.equal(TensorDict.from_zarr(store)["x"], torch.arange(6))


def test_a_zip_store_of_mode_x_replaces_nothing(tmp_path: FsPath) -> None:
    TensorDict(data(), [3]).to_zarr(tmp_path / "a.zip").close()
    before = (tmp_path / "a.zip").read_bytes()
    with pytest.raises(StoreExistsError):
        TensorDict(data(), [3]).to_zarr(ZipStore(tmp_path / "a.zip", mode="x"))
    assert (tmp_path / "a.zip").read_bytes() == before


def test_a_failed_save_leaves_what_a_zip_store_has(tmp_path: FsPath) -> None:
    TensorDict(data(), [3]).to_zarr(tmp_path / "a.zip").close()
    before = (tmp_path / "a.zip").read_bytes()
    with pytest.raises(OptionError):
        TensorDict(data(), [3]).to_zarr(ZipStore(tmp_path / "a.zip", mode="w"), compressors="none such")
    assert (tmp_path / "a.zip").read_bytes() == before


def test_rows_written_to_a_memory_store_are_committed() -> None:
    store = MemoryStore()
    with TensorDict(data(), [3]).to_zarr(store) as saved:
        saved[1:] = TensorDict({"a": torch.tensor([7, 8]), "n": {"b": torch.zeros(2, 2)}}, [2])
    assert TensorDict.from_zarr(store)["a"].tolist() == [0, 7, 8]
    with TensorDict.from_zarr(store, mode="r+") as again:
        again["a"][0]
        again.set_at_("a", torch.tensor(5), 0)
        again["more"] = torch.ones(3)
    group = zarr.open_group(store, mode="r")
    assert group["a"][:].tolist() == [5, 7, 8] and group["more"][:].tolist() == [1, 1, 1]
    left = [entry.key for entry in StoreEngine(store).list() if "tdstore." in entry.key]
    assert not left, "the claim and the redo log are gone"


def test_what_was_dropped_is_committed_to_a_memory_store() -> None:
    store = MemoryStore()
    saved = TensorDict(data(), [3]).to_zarr(store)
    saved.set_at_("a", torch.tensor(9), 2)
    del saved
    tdstore.lifetime.settle()
    assert TensorDict.from_zarr(store)["a"].tolist() == [0, 1, 9]


def test_a_second_save_replaces_the_first() -> None:
    store = MemoryStore()
    TensorDict(data(), [3]).to_zarr(store).close()
    TensorDict({"z": torch.ones(2)}, [2]).to_zarr(store).close()
    td = TensorDict.from_zarr(store)
    assert list(td.keys()) == ["z"] and td.batch_size == (2,)
    with pytest.raises(StoreExistsError):
        TensorDict(data(), [3]).to_zarr(store, mode="x")
    assert not [entry.key for entry in StoreEngine(store).list() if entry.key.startswith(("a/", "n/"))]


def test_groups_of_other_programs_are_not_replaced(tmp_path: FsPath) -> None:
    for store in (MemoryStore(), LocalStore(tmp_path / "l.zarr")):
        zarr.open_group(store, mode="w").create_array("x", data=np.arange(6))
        with pytest.raises(StoreExistsError, match="not saved from a TensorDict"):
            TensorDict(data(), [3]).to_zarr(store)
        assert zarr.open_group(store, mode="r")["x"][:].tolist() == list(range(6))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.txt").write_text("mine")
    with pytest.raises(StoreExistsError):
        TensorDict(data(), [3]).to_zarr(LocalStore(tmp_path / "d"))
    assert (tmp_path / "d" / "notes.txt").read_text() == "mine"


def test_an_empty_memory_store_holds_nothing() -> None:
    with pytest.raises(StoreNotFoundError):
        TensorDict.from_zarr(MemoryStore())


def test_a_dataset_in_a_memory_store_cannot_be_sent_to_another_process() -> None:
    saved = TensorDict(data(), [3]).to_zarr(MemoryStore())
    with pytest.raises(UnsupportedError, match="no name by which another process"):
        pickle.dumps(saved)


@pytest.mark.parametrize("kind", ["LocalStore", "MemoryStore", "ZipStore"])
def test_a_read_only_store_is_not_written(tmp_path: FsPath, kind: str) -> None:
    path = tmp_path / "d"
    store = {"LocalStore": lambda: LocalStore(path, read_only=True), "MemoryStore": lambda: MemoryStore(read_only=True),
             "ZipStore": lambda: ZipStore(path, mode="r")}[kind]()  # fmt: skip
    with pytest.raises(ReadOnlyError, match="reading only"):
        TensorDict(data(), [3]).to_zarr(store)
    assert not path.exists()


def test_stores_of_other_kinds_are_read_and_written_by_one_writer() -> None:
    inner = MemoryStore()
    store = LoggingStore(inner, log_level="ERROR")
    with pytest.raises(UnsupportedError, match="single_writer=True"):
        TensorDict(data(), [3]).to_zarr(store)
    assert not list(StoreEngine(inner).list())
    TensorDict(data(), [3]).to_zarr(store, single_writer=True).close()
    assert torch.equal(TensorDict.from_zarr(store)["a"], torch.arange(3))


def test_a_persistent_tensordict_takes_store_objects(package: ModuleType) -> None:
    store = MemoryStore()
    package.TensorDict(data(), [3]).to_zarr(store)
    td = package.PersistentTensorDict(filename=store, backend="zarr", batch_size=[3])
    assert torch.equal(td["a"], torch.arange(3))


def test_reading_another_mode_opens_the_same_memory_store() -> None:
    store = MemoryStore()
    TensorDict(data(), [3]).to_zarr(store).close()
    td = PersistentTensorDict(filename=store, backend="zarr", mode="r+")
    td["c"] = torch.ones(3)
    assert td.clone(False)["c"].sum() == 3


def test_something_else_is_refused() -> None:
    with pytest.raises(OptionError, match="not a dict"):
        TensorDict(data(), [3]).to_zarr({})
    with pytest.raises(OptionError, match="group="):
        TensorDict.from_zarr(zarr.open_group(MemoryStore(), mode="w"))


# -- the engine ----------------------------------------------------------------------------
@pytest.fixture
def engine() -> Iterator[StoreEngine]:
    with StoreEngine(MemoryStore()) as engine:
        yield engine


def test_conditions_of_a_put(engine: StoreEngine) -> None:
    tag = engine.put("a/b", b"0123456789", if_absent=True)
    assert engine.get("a/b") == (b"0123456789", tag) and engine.size("a/b") == 10
    with pytest.raises(ConflictError):
        engine.put("a/b", b"x", if_absent=True)
    with pytest.raises(ConflictError):
        engine.put("a/b", b"x", if_match="another")
    assert engine.put("a/b", b"01", if_match=tag) != tag and bytes(engine.get("a/b").data) == b"01"
    with pytest.raises(ConflictError):
        engine.put("none", b"x", if_match=tag)


def test_ranges_and_listing(engine: StoreEngine) -> None:
    engine.put_many([("a/b", b"0123456789"), ("a/c/d", b"xy"), ("ab", b"")])
    found = engine.get_ranges([Range("a/b", 2, 5), Range("a/b", -3, None), Range("a/b", 8, None), Range("ab", 0, None)])
    assert [bytes(part) for part in found] == [b"234", b"789", b"89", b""]
    assert sorted((e.key, e.size) for e in engine.list("a/")) == [("a/b", 10), ("a/c/d", 2)]
    assert sorted(e.key for e in engine.list("a")) == ["a/b", "a/c/d", "ab"]
    engine.delete(["a/b", "not there"])
    assert sorted(e.key for e in engine.list()) == ["a/c/d", "ab"]


def test_what_is_missing_or_short(engine: StoreEngine) -> None:
    engine.put("a", b"0123")
    for ask in (lambda: engine.get("b"), lambda: engine.size("b"), lambda: engine.get_ranges([Range("b", 0, 1)])):
        with pytest.raises(StoreNotFoundError):
            ask()
    with pytest.raises(CorruptStoreError, match="ends before"):
        engine.get_ranges([Range("a", 2, 9)])
    with pytest.raises(CorruptStoreError, match="more than 3"):
        engine.get("a", 3)


def test_errors_of_the_store_are_ours() -> None:
    class Failing(MemoryStore):
        async def get(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("no luck")

    with pytest.raises(StoreIOError, match="ValueError: no luck"):
        StoreEngine(Failing()).get("a")


def test_a_read_only_engine_says_so() -> None:
    engine = StoreEngine(MemoryStore(read_only=True))
    assert engine.can == EngineCap.LIST
    for write in (lambda: engine.put("a", b""), lambda: engine.delete(["a"]), lambda: engine.put_many([("a", b"")])):
        with pytest.raises(UnsupportedError):
            write()
