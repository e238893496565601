"""Reads of objects that must not change, their ends in one round, and clients that engines share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path as FsPath
from typing import Any

import pytest
from remotehelp import name
from tdstore_remote.engines import pins
from tdstore_remote.engines.obstore_engine import ObstoreEngine
from tdstore_remote.opening import open_engine

from tdstore.errors import CorruptStoreError, StoreNotFoundError, TDStoreError
from tdstore.index.ranges import Range
from tests.servers import FaultProxy, S3Server, WebServer, http_nginx

DATA = os.urandom(10_000)
OTHER = DATA[::-1] + b"."
"""Longer: the tag of nginx is size and second."""
MANY = [Range("object", at, at + 10) for at in range(0, 4000, 100)]
EXPECTED = [DATA[r.start : r.stop] for r in MANY]


@pytest.fixture
def folder(http: WebServer) -> FsPath:
    made = http.folder / name()
    made.mkdir()
    (made / "object").write_bytes(DATA)
    return made


@pytest.fixture
def way(http: WebServer) -> Iterator[FaultProxy]:
    with FaultProxy(http.port, latency_ms=60) as proxy:
        yield proxy


def inner(engine: Any) -> ObstoreEngine:
    found = engine.inner
    assert isinstance(found, ObstoreEngine)
    return found


# -- ends -----------------------------------------------------------------------------------
@pytest.mark.parametrize("nbytes", [1, 4000, 9_999, 10_000, 10_001, 50_000])
def test_ends_come_in_one_round(nbytes: int, folder: FsPath, way: FaultProxy) -> None:
    with open_engine(f"{way.url}/{folder.name}", writable=False) as engine:
        size, first, last = engine.pin_ends("object", nbytes)
        assert (size, bytes(first), bytes(last)) == (10_000, DATA[:nbytes], DATA[-nbytes:])
        assert way.rounds() == 1
        assert [request.method for request in way.requests] == ["GET", "GET"]
        (folder / "object").write_bytes(OTHER)
        with pytest.raises(CorruptStoreError, match="was replaced since it was opened"):
            engine.get_ranges([Range("object", 0, 5)])


@pytest.mark.parametrize("options", [{"engine": "fsspec"}, {"cache_ram": 1 << 20}, {}], ids=str)
def test_ends_by_any_engine(options: dict[str, Any], s3: S3Server) -> None:
    url = f"{s3.url}/{name()}"
    with open_engine(url, {**s3.fsspec_options, **options}) as engine:
        for key, data in (("object", DATA), ("empty", b"")):
            engine.put(key, data)
        for nbytes in (100, 20_000):
            found = engine.pin_ends("object", nbytes)
            assert (found.size, bytes(found.first), bytes(found.last)) == (10_000, DATA[:nbytes], DATA[-nbytes:])
        with pytest.raises(StoreNotFoundError):
            engine.pin_ends("missing", 100)


def test_ends_without_ranges(folder: FsPath) -> None:
    with http_nginx(folder, ranges=False) as server, open_engine(server.url, writable=False) as engine:
        found = engine.pin_ends("object", 300)
        assert (found.size, bytes(found.first), bytes(found.last)) == (10_000, DATA[:300], DATA[-300:])


def test_ends_of_two_versions_are_an_error(folder: FsPath, way: FaultProxy) -> None:
    way.latency_ms = 0
    with open_engine(f"{way.url}/{folder.name}", writable=False) as engine:
        engine.pin_ends("object", 100)
        (folder / "object").write_bytes(OTHER)
        way.stale(nth=1)
        with pytest.raises(TDStoreError, match="was replaced while it was opened"):
            engine.pin_ends("object", 100)


# -- many ranges of a pinned object ---------------------------------------------------------
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_replaced_object_is_an_error_however_it_is_read(before: int, folder: FsPath, http: WebServer) -> None:
    with open_engine(f"{http.url}/{folder.name}", writable=False) as engine:
        engine.pin(["object"])
        for _ in range(before):
            assert [bytes(data) for data in engine.get_ranges(MANY)] == EXPECTED
        (folder / "object").write_bytes(OTHER)
        with pytest.raises(CorruptStoreError, match="was replaced since it was opened"):
            engine.get_ranges(MANY)
        engine.pin(["object"])  # opened again
        assert bytes(engine.get_ranges(MANY)[0]) == DATA[::-1][:10]


def test_many_ranges_use_a_client_that_sends_the_condition(
    folder: FsPath, http: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[bool, int]] = []
    real = pins.Pins.read

    async def read(self: pins.Pins, reader: Any, client: Any, key: str, starts: Any, ends: Any) -> Any:
        used.append((client is not None, len(starts)))
        return await real(self, reader, client, key, starts, ends)

    monkeypatch.setattr(pins.Pins, "read", read)
    with open_engine(f"{http.url}/{folder.name}", writable=False) as engine:
        engine.pin(["object"])
        for _ in range(3):
            engine.get_ranges(MANY)
            engine.get_ranges(MANY[:3])
    of_many = [own for own, count in used if count > 1]
    assert of_many == [False] * (len(of_many) // 3) + [True] * (2 * len(of_many) // 3), "the first read has none"
    assert not any(own for own, count in used if count == 1)


def test_a_bucket_takes_the_condition_beside_its_signature(rgw: S3Server) -> None:
    url = f"{rgw.url}/{name()}"
    with open_engine(url, rgw.fsspec_options) as writer, open_engine(url, rgw.fsspec_options) as engine:
        writer.put("object", DATA)
        engine.pin(["object"])
        for _ in range(3):
            assert [bytes(data) for data in engine.get_ranges(MANY)] == EXPECTED
        writer.put("object", DATA[::-1])
        with pytest.raises(CorruptStoreError, match="was replaced since it was opened"):
            engine.get_ranges(MANY)


# -- clients --------------------------------------------------------------------------------
def test_a_second_engine_uses_the_connections_of_the_first(folder: FsPath, way: FaultProxy) -> None:
    url = f"{way.url}/{folder.name}"
    with open_engine(url, writable=False) as engine:
        engine.get("object")
        with open_engine(url, writable=False) as other:
            other.get("object")
        assert inner(other)._client is inner(engine)._client
    assert way.connections == 1


def test_clients_differ_by_what_they_are_built_from(
    folder: FsPath, http: WebServer, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Any] = []

    def client(url: str, options: dict[str, Any]) -> Any:
        engines.append(open_engine(url, options, writable=False))
        return inner(engines[-1])._client

    url, bucket = f"{http.url}/{folder.name}", f"{s3.url}/{name()}"
    same = client(url, {})
    assert client(url, {}) is same
    assert client(url, {"concurrency": 7}) is same
    assert client(url, {"headers": {"x": "1"}}) is not same
    assert client(url, {"stall_timeout": 3}) is not same
    assert client(http.url, {}) is not same
    keys = client(bucket, s3.fsspec_options)
    assert client(bucket, s3.fsspec_options) is keys
    assert client(bucket, {**s3.fsspec_options, "secret": "another"}) is not keys
    monkeypatch.setenv("AWS_REGION", "eu-west-7")
    assert client(bucket, s3.fsspec_options) is not keys


def test_credentials_of_files_are_read_again(s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: FsPath) -> None:
    """A user who has changed them would get the old ones."""
    url, options = f"{s3.url}/{name()}", {"endpoint_url": s3.endpoint}
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    engines = [open_engine(url, options, writable=False) for _ in range(2)]
    assert inner(engines[0])._client is not inner(engines[1])._client
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    engines = [open_engine(url, options, writable=False) for _ in range(2)]
    assert inner(engines[0])._client is inner(engines[1])._client


def test_a_client_ends_with_its_last_engine(folder: FsPath, http: WebServer) -> None:
    from tdstore_remote.engines import clients

    gc.collect()
    before = len(clients._shared)
    engine = open_engine(f"{http.url}/{folder.name}", writable=False)
    assert len(clients._shared) == before + 1
    engine.close()
    del engine
    gc.collect()
    assert len(clients._shared) == before
