"""Objects of fsspec, universal_pathlib and obstore as locations."""

from __future__ import annotations

import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import s3fs
import torch
import torch.distributed.checkpoint as checkpoint
from obstore.fsspec import FsspecStore
from obstore.store import AzureStore, GCSStore, HTTPStore, LocalStore, MemoryStore, S3Store
from tdstore_remote.ready_made import locate

import tdstore
from tdstore import TensorDict
from tdstore.data import Epochs, TensorDictDataset
from tdstore.dcp import StorageReader, StorageWriter
from tdstore.errors import InvalidTypeError, UnsupportedError


def numbers() -> TensorDict:
    return TensorDict({"a": torch.arange(3)}, [3])


def double(rows: Any) -> TensorDict:
    return TensorDict({"a": 2 * torch.tensor(list(rows))}, [len(rows)])


@pytest.fixture
def memory() -> Any:
    return fsspec.filesystem("memory")


def test_a_file_system_with_a_path_everywhere(memory: Any, tmp_path: Path) -> None:
    place = (memory, f"{tmp_path.name}/run")
    assert not tdstore.exists(place)
    numbers().save(place).close()
    assert tdstore.exists(place)
    assert tdstore.info(place).backend == "remote"
    assert tdstore.list_datasets((memory, tmp_path.name)) == [f"memory://{tmp_path.name}/run"]
    for location in (place, memory.get_mapper(place[1]), (memory.get_mapper(tmp_path.name), "run")):
        assert tdstore.open(location)["a"].tolist() == [0, 1, 2]
    opened = TensorDict.load(place)
    assert pickle.loads(pickle.dumps(opened))["a"].tolist() == [0, 1, 2]
    assert tdstore.open(place, storage="remote")["a"].tolist() == [0, 1, 2]
    tdstore.delete(place)
    assert not tdstore.exists(place)
    made = TensorDict.from_schema({"a": ((), "int64")}, batch_size=[2], location=place)
    assert made["a"].tolist() == [0, 0]


def test_local_folders_are_paths(tmp_path: Path) -> None:
    numbers().save((fsspec.filesystem("file"), str(tmp_path / "x"))).close()
    for location in (LocalStore(tmp_path / "x"), (LocalStore(tmp_path), "x"), (LocalStore(), str(tmp_path / "x"))):
        with tdstore.open(location) as td:
            assert td["a"].tolist() == [0, 1, 2]
    assert tdstore.info(LocalStore(tmp_path / "x")).backend == "memmap"


def test_a_folder_of_another_file_system(memory: Any, tmp_path: Path) -> None:
    below = fsspec.filesystem("dir", path=tmp_path.name, fs=memory)
    numbers().save((below, "x")).close()
    assert tdstore.open(f"memory://{tmp_path.name}/x")["a"].tolist() == [0, 1, 2]


def test_upaths(monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
    """By the three attributes that are used: the package is not installed here."""
    module = types.ModuleType("upath")
    module.UPath = type("UPath", (), {"fs": memory, "path": "runs/1"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "upath", module)
    assert locate(module.UPath()) == ("memory://runs/1", {})
    assert locate((module.UPath(), "a")) == ("memory://runs/1/a", {})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_everything_that_takes_a_location_takes_them(tmp_path: Path) -> None:
    """Functions of two locations, of many, and those that pickle what they were given."""
    store = LocalStore(tmp_path)
    first, second = (store, "a"), (store, "b")
    numbers().save(first).close()
    assert tdstore.verify(first) == []
    tdstore.copy(first, second)
    tdstore.move(second, (store, "c.h5"))
    assert not tdstore.exists(second)
    both = tdstore.concat([first, (store, "c.h5")])
    assert pickle.loads(pickle.dumps(both))["a"].tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(InvalidTypeError, match="a list of locations, not one of them"):
        tdstore.concat(first)
    for data in (first, LocalStore(tmp_path / "a")):
        epochs = pickle.loads(pickle.dumps(Epochs(data, 2, shuffle=False)))
        assert [batch["a"].tolist() for batch in epochs] == [[0, 1], [2]]
        assert TensorDictDataset(data)[2]["a"] == 2
    built = tdstore.build((store, "d"), double, range(3), num_workers=0)
    assert built["a"].tolist() == [0, 2, 4]
    assert built.map(lambda rows: rows, out=(store, "e"), num_workers=0)["a"].tolist() == [0, 2, 4]
    checkpoint.save({"w": torch.ones(2)}, storage_writer=StorageWriter((store, "ckpt")), no_dist=True)
    loaded = {"w": torch.zeros(2)}
    checkpoint.load(loaded, storage_reader=StorageReader((store, "ckpt")), no_dist=True)
    assert loaded["w"].tolist() == [1, 1]


def test_versions_and_concatenation_in_a_file_system(memory: Any, tmp_path: Path) -> None:
    place = memory.get_mapper(f"{tmp_path.name}/run")
    with numbers().save(place) as td:
        td.commit(message="three rows")
    tdstore.tag(place, "first")
    assert tdstore.open(place, tag="first")["a"].tolist() == [0, 1, 2]
    assert tdstore.concat([place, place]).batch_size == (6,)
    assert not tdstore.prune(place, keep=1)
    tdstore.untag(place, "first")
    assert [version.tags for version in tdstore.versions(place)] == [()]


def test_files_of_other_formats(tmp_path: Path) -> None:
    numbers().to_parquet(tmp_path / "t.parquet")
    np.savez(tmp_path / "t.npz", a=np.arange(3))
    fs, store = fsspec.filesystem("file"), LocalStore(tmp_path)
    for path in ((store, "t.parquet"), (fs, str(tmp_path / "t.parquet"))):
        assert tdstore.from_parquet(path)["a"].tolist() == [0, 1, 2]
        assert tdstore.from_parquet([path, path])["a"].tolist() == [0, 1, 2, 0, 1, 2]
    assert tdstore.from_npz((store, "t.npz"))["a"].tolist() == [0, 1, 2]


def test_open_files_of_fsspec_and_archives(tmp_path: Path) -> None:
    numbers().save(tmp_path / "x.h5").close()
    assert tdstore.open(fsspec.open(f"file://{tmp_path}/x.h5"))["a"].tolist() == [0, 1, 2]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "x.h5", "x.h5")
    with pytest.raises(UnsupportedError, match="over another one") as caught:
        tdstore.open((fsspec.filesystem("zip", fo=str(tmp_path / "a.zip")), "x.h5"))
    assert "zip://run.h5::" in str(caught.value.hint)
    assert tdstore.open(f"zip://x.h5::file://{tmp_path}/a.zip")["a"].tolist() == [0, 1, 2]


def test_the_file_system_of_obstore(s3: Any) -> None:
    options = s3.fsspec_options
    endpoint = options.get("endpoint_url") or options["client_kwargs"]["endpoint_url"]
    given = {"endpoint": endpoint, "access_key_id": options["key"], "secret_access_key": options["secret"]}
    fs = FsspecStore("s3", config=given, client_options={"allow_http": True}, region="us-east-1")
    path = f"{s3.url.removeprefix('s3://')}/of-obstore"
    numbers().save((fs, path)).close()
    assert tdstore.open((fs, path))["a"].tolist() == [0, 1, 2]
    assert fs.exists(f"{path}/tdstore.json")
    both = tdstore.concat([(fs, path), (fs, path)])
    assert pickle.loads(pickle.dumps(both))["a"].tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(UnsupportedError, match="MemoryStore has no URL"):
        numbers().save((FsspecStore("memory"), "x"))
    with pytest.raises(UnsupportedError, match="come from a function"):
        tdstore.open((FsspecStore("s3", credential_provider=lambda: None), "b/x"))


def test_buckets(s3: Any) -> None:
    fs = s3fs.S3FileSystem(**s3.fsspec_options)
    path = s3.url.removeprefix("s3://")
    numbers().save((fs, f"{path}/ready")).close()
    options = s3.fsspec_options
    store = S3Store(
        path.partition("/")[0],
        prefix="/".join([*path.split("/")[1:], "ready"]),
        endpoint=fs.endpoint_url or options["client_kwargs"]["endpoint_url"],
        access_key_id=options["key"],
        secret_access_key=options["secret"],
        region="us-east-1",
        client_options={"allow_http": True},
    )
    with tdstore.open(store) as td:
        assert td["a"].tolist() == [0, 1, 2]
    # Options of the call go first.
    assert tdstore.open(store, storage_options={"timeout": 20})["a"].tolist() == [0, 1, 2]


def test_the_urls_of_stores() -> None:
    s3 = S3Store("b", prefix="p/q", region="eu-1", skip_signature=True)
    url, options = locate((s3, "r/"))  # type: ignore[misc]
    assert url == "s3://b/p/q/r"
    assert options["region"] == "eu-1"
    assert "bucket" not in options
    assert locate((AzureStore("c", account_name="n", use_emulator=True), "z"))[0] == "az://c/z"  # type: ignore[index]
    assert locate(GCSStore("g", skip_signature=True))[0] == "gs://g"  # type: ignore[index]
    assert locate((HTTPStore("http://h/y"), "z")) == ("http://h/y/z", {})


def test_what_stands_for_no_place(memory: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidTypeError, match="is a file system, and no place in it"):
        tdstore.open(memory)
    with pytest.raises(UnsupportedError, match="MemoryStore has no URL"):
        numbers().save(MemoryStore())
    cached = fsspec.filesystem("simplecache", target_protocol="memory", cache_storage=str(tmp_path))
    with pytest.raises(UnsupportedError, match="a file system over another one"):
        tdstore.open((cached, "x"))
    provider = S3Store(
        "b", credential_provider=lambda: {"access_key_id": "k", "secret_access_key": "s", "expires_at": None}
    )
    with pytest.raises(UnsupportedError, match="come from a function"):
        tdstore.open(provider)
    for wrong in (3, (3, "a"), (memory, 3)):
        for storage in (None, "remote"):
            with pytest.raises(InvalidTypeError, match="a URL"):
                tdstore.open(wrong, storage=storage)
