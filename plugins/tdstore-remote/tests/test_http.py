"""Web servers: read only, ranges, and servers that have none."""

from __future__ import annotations

from pathlib import Path as FsPath
from typing import Any

import pytest
import torch
from remotehelp import name, open_remote, same, sample
from tdstore_remote.engines import obstore_engine
from tdstore_remote.opening import open_engine

import tdstore
from tdstore.engine import EngineCap
from tdstore.errors import ReadOnlyError, StoreIOError, StoreNotFoundError, UnsupportedError
from tdstore.index.ranges import Range
from tests.servers import WebServer, http_nginx


@pytest.fixture
def site(http: WebServer) -> str:
    """A dataset of the object layout, uploaded as it is."""
    folder = name()
    sample().save(f"file://{http.folder}/{folder}")
    return folder


def test_a_dataset_is_read_over_http(site: str, http: WebServer) -> None:
    http.reset()
    with tdstore.open(f"{http.url}/{site}") as td:
        assert len(http.requests()) == 1
        http.reset()
        rows = torch.tensor([250, 3, 3, 99])
        assert same(td[rows], sample()[rows])
        assert all(hit.status == 206 for hit in http.requests())
        assert same(td, sample())


@pytest.mark.parametrize("mode", ["r+", "w", "x", "a"])
def test_http_is_read_only(mode: Any, site: str, http: WebServer) -> None:
    with pytest.raises(ReadOnlyError, match="read only"):
        open_remote(f"{http.url}/{site}", mode=mode)
    engine = open_engine(f"{http.url}/{site}")
    assert EngineCap.WRITE not in engine.can
    with pytest.raises(ReadOnlyError, match="web server"):
        engine.put("a", b"")
    with pytest.raises(ReadOnlyError, match="web server"):
        engine.delete(["tdstore.json"])
    with pytest.raises(UnsupportedError, match="list"):
        list(engine.list())


def test_nothing_there_is_told(http: WebServer) -> None:
    with pytest.raises(StoreNotFoundError, match="nothing is stored at"):
        tdstore.open(f"{http.url}/{name()}")


@pytest.fixture
def no_ranges(http: WebServer) -> Any:
    with http_nginx(http.folder, ranges=False) as server:
        yield server


def test_a_server_without_ranges(site: str, no_ranges: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small objects are fetched whole, once; large ones are refused with what to do."""
    with tdstore.open(f"{no_ranges.url}/{site}") as td:
        rows = torch.tensor([250, 3])
        assert same(td[rows], sample()[rows])
        no_ranges.reset()
        assert same(td[rows + 1], sample()[rows + 1])
    monkeypatch.setattr(obstore_engine, "WHOLE", 1000)
    with tdstore.open(f"{no_ranges.url}/{site}") as td, pytest.raises(Exception, match="cannot send parts") as error:
        td[rows].to_tensordict()
    assert "simplecache::" in str(error.value) + str(error.value.__cause__)
    with open_engine(f"{no_ranges.url}/{site}", {"engine": "fsspec"}) as engine:
        whole = bytes(engine.get("tdstore.json").data)
        assert bytes(engine.get_ranges([Range("tdstore.json", 5, 9)])[0]) == whole[5:9]


def test_passwords(http: WebServer, site: str) -> None:
    with http_nginx(http.folder, auth=("me", "hidden-word")) as server:
        with pytest.raises(StoreIOError, match="not allowed to read") as error:
            tdstore.open(f"{server.url}/{site}")
        assert "credentials" in str(error.value)
        with tdstore.open(f"{server.url}/{site}", storage_options={"headers": server.auth_header}) as td:
            assert td[5]["action"].item() == 5
        url = f"{server.url}/{site}".replace("http://", "http://me:hidden-word@")
        with tdstore.open(url) as td:
            assert td[5]["action"].item() == 5
            assert "hidden-word" not in repr(td)


def test_a_query_belongs_to_one_object(http: WebServer, tmp_path: FsPath) -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("h5py")
    sample().save(f"{http.folder}/{(file := name())}.h5")
    with tdstore.open(f"{http.url}/{file}.h5?signature=hidden-word") as td:
        assert td[5]["action"].item() == 5
        assert "hidden-word" not in repr(td)
    with pytest.raises(StoreNotFoundError) as error:
        tdstore.open(f"{http.url}/none.h5?signature=hidden-word")
    assert "hidden-word" not in str(error.value)
