"""A save replaces a dataset of its backend, or nothing: what is of other programs stays, on every backend."""

from __future__ import annotations

import json
import sqlite3
import uuid
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
from tdstore_redis.store import open_redis

import tdstore
from tdstore import TensorDict
from tdstore.builtin.memory import MemoryStore
from tdstore.errors import CorruptStoreError, OptionError, StoreExistsError, StoreNotFoundError
from tdstore.header import Group, Header
from tdstore.hookspecs import Backend
from tdstore.registry import registry
from tdstore.store import Store
from tdstore.types import LeafSpec


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


# -- object stores -------------------------------------------------------------------------------------
def remote_group(version: Any) -> Callable[[str, Any], None]:
    def make(url: str, options: Any) -> None:
        group = zarr.open_group(url, mode="w", storage_options=options, zarr_format=version)
        group["x"] = np.arange(4)

    return make


def remote_array(version: Any) -> Callable[[str, Any], None]:
    def make(url: str, options: Any) -> None:
        zarr.save_array(url, np.arange(4), storage_options=options, zarr_format=version)

    return make


def remote_empty_group(url: str, options: Any) -> None:
    zarr.open_group(url, mode="w", storage_options=options)


def remote_dataset(storage: str) -> Callable[[str, Any], None]:
    def make(url: str, options: Any) -> None:
        TensorDict(a=torch.ones(2)).save(url, storage=storage, storage_options=options).close()

    return make


def remote_directory(url: str, options: Any) -> None:
    with registry().engine(url, options) as engine:
        engine.put("meta.json", b"{}")


REMOTE: dict[str, Callable[[str, Any], None]] = {
    "group of version 3": remote_group(3),
    "group of version 2": remote_group(2),
    "array of version 3": remote_array(3),
    "array of version 2": remote_array(2),
    "empty group": remote_empty_group,
    "uploaded directory": remote_directory,
}


@pytest.fixture(params=["s3", "rgw"])
def bucket(request: Any) -> Any:
    return request.getfixturevalue(request.param)


def objects_below(bucket: Any, name: str) -> dict[str, bytes]:
    client = bucket.client()
    found = client.list_objects_v2(Bucket=bucket.bucket, Prefix=name).get("Contents", [])
    return {o["Key"]: client.get_object(Bucket=bucket.bucket, Key=o["Key"])["Body"].read() for o in found}


def refuses_all_ways(where: str, options: Any, look: Callable[[], Any]) -> None:
    before = look()
    assert before
    ways: dict[str, Callable[[], Any]] = {
        "save": lambda: TensorDict(a=torch.zeros(3)).save(where, **options),
        "new": lambda: TensorDict.from_schema({"a": ((), "int64")}, batch_size=[3], location=where, **options),
        "open": lambda: tdstore.open(where, mode="w", **options),
        "exclusive": lambda: tdstore.open(where, mode="x", **options),
    }
    for way, call in ways.items():
        with pytest.raises(StoreExistsError) as caught:
            call()
        assert where in str(caught.value), way
        assert caught.value.hint, way
        assert look() == before, way


@pytest.mark.parametrize("suffix", ["", ".zarr"], ids=["objects", "zarr"])
@pytest.mark.parametrize("make", REMOTE.values(), ids=REMOTE)
def test_objects_of_other_programs_stay(bucket: Any, suffix: str, make: Callable[[str, Any], None]) -> None:
    name = f"of others {uuid.uuid4().hex[:8]}{suffix}"
    where = f"{bucket.url}/{name}"
    options = {"storage_options": bucket.fsspec_options}
    make(where, bucket.fsspec_options)
    refuses_all_ways(where, options, lambda: objects_below(bucket, name))


@pytest.mark.parametrize(("suffix", "other"), [("", "zarr"), (".zarr", "remote")], ids=["objects", "zarr"])
def test_a_dataset_of_the_other_format_stays(s3: Any, suffix: str, other: str) -> None:
    name = f"of ours {uuid.uuid4().hex[:8]}{suffix}"
    where = f"{s3.url}/{name}"
    how = {"format": "raw"} if other == "remote" else {}
    TensorDict(a=torch.ones(2)).save(where, storage=other, storage_options=s3.fsspec_options, **how).close()
    refuses_all_ways(where, {"storage_options": s3.fsspec_options}, lambda: objects_below(s3, name))


@pytest.mark.parametrize("suffix", ["", ".zarr"], ids=["objects", "zarr"])
def test_a_dataset_in_a_bucket_is_replaced(s3: Any, suffix: str) -> None:
    where = f"{s3.url}/again {uuid.uuid4().hex[:8]}{suffix}"
    options = {"storage_options": s3.fsspec_options}
    for number in range(2):
        TensorDict(a=torch.full((3,), number)).save(where, **options).close()
    assert TensorDict.load(where, **options)["a"].tolist() == [1, 1, 1]


# -- keys of a server ----------------------------------------------------------------------------------
KEYS: dict[str, Callable[[Redis, bytes], object]] = {
    "string": lambda client, key: client.set(key, "of another program"),
    "hash": lambda client, key: client.hset(key, "name", "of another program"),
    "list": lambda client, key: client.rpush(key, "of another program"),
    "set": lambda client, key: client.sadd(key, "of another program"),
    "sorted set": lambda client, key: client.zadd(key, {"of another program": 1}),
    "stream": lambda client, key: client.xadd(key, {"of another": "program"}),
}


@pytest.mark.parametrize("part", ["head", "writers", "pending"])
@pytest.mark.parametrize("make", KEYS.values(), ids=KEYS)
def test_keys_of_others_in_redis(redis: Any, make: Callable[[Redis, bytes], object], part: str) -> None:
    client = Redis.from_url(redis.url)
    client.flushall()
    key = b"tds:{9:of-others}:" + part.encode()
    make(client, key)
    refuses_all_ways(f"{redis.url}/of-others", {}, lambda: (client.keys("*"), client.dump(key)))
    client.flushall()


def test_a_key_of_others_that_comes_before_the_commit_stays(redis: Any) -> None:
    client = Redis.from_url(redis.url)
    client.flushall()
    key = b"tds:{9:of-others}:head"
    store = open_redis(f"{redis.url}/of-others", mode="w")
    store.create({("a",): LeafSpec((3,), "int64")})
    client.hset(key, "name", "of another program")
    with pytest.raises(StoreExistsError, match="another application"):
        store.save_header(Header())
    store.discard()
    store.close()
    assert client.keys("*") == [key]
    assert client.hgetall(key) == {b"name": b"of another program"}
    client.flushall()


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
