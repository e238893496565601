"""A save replaces a dataset of its backend, or nothing: what is of other programs stays, on every backend."""

from __future__ import annotations

import json
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from redis import Redis

import tdstore
from tdstore import TensorDict
from tdstore.builtin.memory import MemoryStore
from tdstore.errors import CorruptStoreError, OptionError, StoreError, StoreExistsError, StoreNotFoundError
from tdstore.header import Group, Header
from tdstore.hookspecs import Backend
from tdstore.registry import registry
from tdstore.store import Store


def sqlite_file(path: Path) -> None:
    with sqlite3.connect(path) as base:
        base.execute("create table places (url text)")
    base.close()


def hdf5_file(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(10)


def hdf5_attributes(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.attrs["notes"] = "all that there is"


def zip_file(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("letter.txt", "hello")


def folder(path: Path) -> None:
    (path / "below").mkdir(parents=True)
    (path / "below" / "notes.txt").write_text("hello")


def folder_with_a_marker(path: Path) -> None:
    path.mkdir()
    (path / "meta.json").write_text(json.dumps({"name": "of another program"}))


def zarr_group(path: Path) -> None:
    zarr.open_group(str(path), mode="w")["x"] = np.arange(4)


def zarr_array(path: Path) -> None:
    zarr.save(str(path), np.arange(4))


def datasets(path: Path) -> None:
    TensorDict(a=torch.ones(2)).save(path / "run 1").close()


FOREIGN: list[Callable[[Path], None]] = [
    *(sqlite_file, hdf5_file, hdf5_attributes, zip_file, folder, folder_with_a_marker, zarr_group, zarr_array),
    datasets,
]
FILES = ["memmap", "tdz", "h5", "zarr"]
WAYS: dict[str, Callable[..., Any]] = {
    "save": lambda where, storage: TensorDict(a=torch.zeros(3)).save(where, storage=storage),
    "from_schema": lambda where, storage: TensorDict.from_schema(
        {"a": ((), "int64")}, batch_size=[3], location=where, storage=storage, mode="w"
    ),
    "open": lambda where, storage: tdstore.open(where, storage=storage, mode="w"),
    "copy": lambda where, storage: tdstore.copy(
        TensorDict(a=torch.zeros(3)), where, storage=storage, mode="w", progress=False
    ),
}


def contents(path: Path) -> Any:
    if path.is_file():
        return path.read_bytes()
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
@pytest.mark.parametrize("suffix", ["", ".zarr.zip"])
@pytest.mark.parametrize("storage", FILES)
def test_what_is_of_other_programs_stays(storage: str, suffix: str, make: Any, tmp_path: Path) -> None:
    if suffix and storage != "zarr":
        suffix = f".{storage}"
    where = tmp_path / f"place{suffix}"
    make(where)
    before = contents(where)
    for way in WAYS.values():
        with pytest.raises(StoreExistsError) as caught:
            way(where, storage)
        assert str(where) in str(caught.value)
        assert caught.value.hint
        assert contents(where) == before
    assert [path.name for path in tmp_path.iterdir()] == [where.name]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("storage", FILES)
def test_a_dataset_is_replaced(storage: str, way: str, tmp_path: Path) -> None:
    where = tmp_path / "x"
    TensorDict(b=torch.ones(5), s="text").save(where, storage=storage).close()
    second = WAYS[way](where, storage)
    if second is None:  # a copy is not open
        second = tdstore.open(where, storage=storage)
    assert set(second.keys()) == ({"a"} if way != "open" else set())
    second.close()
    tdstore.open(where, storage=storage, mode="w").close()  # one of an empty TensorDict, too
    TensorDict(c=torch.ones(5)).save(where, storage=storage).close()
    assert list(tdstore.load(where).keys()) == ["c"]


def test_a_shared_dataset_is_replaced() -> None:
    first = TensorDict(b=torch.ones(5)).save("shm://replaced")
    second = TensorDict(a=torch.ones(5)).save("shm://replaced")
    assert list(tdstore.load("shm://replaced").keys()) == ["a"]
    first.close()
    second.close()


@pytest.mark.parametrize("storage", FILES)
def test_an_empty_place_is_taken(storage: str, tmp_path: Path) -> None:
    where = tmp_path / "x"
    if storage in ("tdz", "h5"):
        where.touch()
    else:
        where.mkdir()
    TensorDict(a=torch.arange(3)).save(where, storage=storage).close()
    assert TensorDict.load(where, storage=storage)["a"].tolist() == [0, 1, 2]


def test_keys_of_others_in_redis(redis: Any) -> None:
    client = Redis.from_url(redis.url)
    where = f"{redis.url}/of-others"
    head = b"tds:{9:of-others}:head"
    client.set(head, "of another program")
    with pytest.raises(StoreError) as caught:
        TensorDict(a=torch.zeros(3)).save(where)
    assert isinstance(caught.value, StoreExistsError)
    assert client.get(head) == b"of another program"


# -- a backend of a third party gets the same from the core -------------------------------------------
class Database(MemoryStore):
    """One file whose format other programs use as well."""


OPENED: list[str] = []


def open_database(location: str, *, mode: str = "r", lock_timeout: float = 5.0, pages: int = 8) -> Store:
    OPENED.append(f"{mode} {lock_timeout} {pages}")
    path = Path(location)
    if mode in ("r", "r+"):
        if not path.exists():
            raise StoreNotFoundError(f"nothing is stored at {location}", url=location)
        if path.read_bytes().startswith(b"BASE of a browser"):
            raise ValueError("no such table: leaves")
        return Database()  # no leaves, no header
    path.write_bytes(b"BASE of tdstore")
    return Database()


@pytest.fixture
def third_party() -> Any:
    backend = Backend(
        name="base", opener=f"{__name__}:open_database", summary="s", suffixes=(".base",), magic=(b"BASE",)
    )
    registry().register(backend)
    OPENED.clear()
    yield backend
    registry().unregister("base")


@pytest.mark.parametrize("data", [b"BASE of a browser", b"BASE of a mail program", b"no base at all"])
def test_a_third_party_replaces_no_file_of_others(third_party: Any, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "app.base").write_bytes(data)
    with pytest.raises(StoreExistsError, match="the backend 'base' does not replace"):
        TensorDict(a=torch.zeros(3)).save(tmp_path / "app.base", pages=2)
    assert (tmp_path / "app.base").read_bytes() == data
    assert OPENED == ["r 0.0 2"], "it was opened for writing, or with other options"


def test_a_third_party_takes_a_free_place(third_party: Any, tmp_path: Path) -> None:
    TensorDict(a=torch.zeros(3)).save(tmp_path / "new.base")
    (tmp_path / "empty.base").touch()
    TensorDict(a=torch.zeros(3)).save(tmp_path / "empty.base")
    assert OPENED == ["r 0.0 8", "w 5.0 8"] * 2


# -- options of writing alone, which mode "r" refuses --------------------------------------------------
def open_labelled(
    location: str, *, mode: str = "r", label: str = "", comment: str = "", password: str = "", lock_timeout: float = 5.0
) -> Store:
    OPENED.append(f"{mode} {lock_timeout} {label}{comment}{password}")
    if mode == "r" and (label or comment):
        raise OptionError("label= and comment= are written: there are none in mode 'r'")
    if label == "wrong":
        raise OptionError("label= must be right")
    path = Path(location)
    if mode == "r":
        if not path.exists():
            raise StoreNotFoundError(f"nothing is stored at {location}", url=location)
        if path.read_bytes() != b"LABEL of tdstore" + password.encode():
            raise CorruptStoreError("of another program, or of another password", url=location)
        store = Database()
        store.save_header(Header({(): Group(batch_size=(3,))}))
        return store
    path.write_bytes(b"LABEL of tdstore" + password.encode())
    return Database()


@pytest.fixture
def labelled() -> Any:
    backend = Backend(
        name="label", opener=f"{__name__}:open_labelled", summary="s", suffixes=(".label",), magic=(b"LABEL",)
    )
    registry().register(backend)
    OPENED.clear()
    yield backend
    registry().unregister("label")


@pytest.mark.parametrize(
    ("options", "looks"),
    [
        ({"label": "x"}, ["r 0.0 x", "r 0.0 ", "w 5.0 x"]),
        ({"label": "x", "password": "p"}, ["r 0.0 xp", "r 0.0 p", "w 5.0 xp"]),
        ({"label": "x", "comment": "c"}, ["r 0.0 xc", "r 0.0 c", "r 0.0 x", "r 0.0 ", "w 5.0 xc"]),
    ],
)
def test_an_option_of_writing_alone(labelled: Any, options: dict[str, str], looks: list[str], tmp_path: Path) -> None:
    where = tmp_path / "x.label"
    for _ in range(2):  # where nothing is, and over a dataset
        TensorDict(a=torch.zeros(3)).save(where, **options)
        assert OPENED == looks
        OPENED.clear()


def test_an_option_of_writing_alone_replaces_no_file_of_others(labelled: Any, tmp_path: Path) -> None:
    where = tmp_path / "x.label"
    where.write_bytes(b"LABEL of a printer")
    with pytest.raises(StoreExistsError, match="the backend 'label' does not replace"):
        TensorDict(a=torch.zeros(3)).save(where, label="x")
    assert where.read_bytes() == b"LABEL of a printer"
    assert OPENED == ["r 0.0 x", "r 0.0 "]


def test_a_wrong_option_is_still_an_error(labelled: Any, tmp_path: Path) -> None:
    where = tmp_path / "x.label"
    with pytest.raises(OptionError, match="label= must be right"):
        TensorDict(a=torch.zeros(3)).save(where, label="wrong")
    assert not where.exists()
