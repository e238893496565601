"""Read-through caches: what was read is not asked for again, what changed is, and the folder keeps its size."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path as FsPath
from typing import Any

import pytest
from remotehelp import name, same, sample
from tdstore_remote.cache.cached_engine import CachedEngine
from tdstore_remote.cache.disk import DiskCache
from tdstore_remote.opening import open_engine

import tdstore
from tdstore.errors import CorruptStoreError, OptionError, StoreNotFoundError
from tdstore.index.ranges import Range
from tdstore.storekit.local_engine import LocalEngine
from tdstore.testing.processes.warm import python
from tests.servers import FaultProxy, S3Server

PAGE = 100


class Counting(LocalEngine):
    """A local folder that counts what it is asked for."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self.asked: list[Range] = []

    def get_ranges(self, ranges: Sequence[Range]) -> list[Any]:
        self.asked += ranges
        return super().get_ranges(ranges)


@pytest.fixture
def inner(tmp_path: FsPath) -> Counting:
    engine = Counting(tmp_path / "data")
    engine.put("a", bytes(i % 251 for i in range(1050)))
    engine.put("b", b"0123456789")
    return engine


@pytest.fixture(params=["disk", "ram", "both"])
def cached(request: pytest.FixtureRequest, inner: Counting, tmp_path: FsPath) -> CachedEngine:
    folder = None if request.param == "ram" else str(tmp_path / "cache")
    return CachedEngine(inner, folder=folder, ram=0 if request.param == "disk" else 10_000, page=PAGE)


def test_what_was_read_is_not_asked_for_again(cached: CachedEngine, inner: Counting) -> None:
    data = bytes(inner.get("a").data)
    asked = [Range("a", 150, 420), Range("a", 10, 20), Range("b", 3, 6), Range("a", -30, None), Range("b", 5, 5)]
    expected = [data[150:420], data[10:20], b"345", data[-30:], b""]
    assert [bytes(d) for d in cached.get_ranges(asked)] == expected
    # neighbouring pages come together
    assert sorted(inner.asked) == [Range("a", 0, 500), Range("a", 1000, 1050), Range("b", 0, 10)]
    inner.asked.clear()
    assert [bytes(d) for d in cached.get_ranges(asked)] == expected
    assert inner.asked == []
    assert bytes(cached.get_ranges([Range("a", 380, 620)])[0]) == data[380:620]
    assert inner.asked == [Range("a", 500, 700)]


def test_ends_and_gaps_are_told(cached: CachedEngine) -> None:
    with pytest.raises(CorruptStoreError, match="/a ends at byte 1050"):
        cached.get_ranges([Range("a", 1000, 1051)])
    with pytest.raises(StoreNotFoundError):
        cached.get_ranges([Range("gone", 0, 1)])
    assert cached.pin(["a", "b"]) == [1050, 10]


def test_own_writes_are_seen(cached: CachedEngine) -> None:
    assert bytes(cached.get_ranges([Range("b", 0, 10)])[0]) == b"0123456789"
    cached.put("b", b"9876543210!")
    assert bytes(cached.get_ranges([Range("b", 0, 11)])[0]) == b"9876543210!"
    cached.delete(["b"])
    with pytest.raises(StoreNotFoundError):
        cached.get_ranges([Range("b", 0, 1)])


def test_ram_is_bounded(inner: Counting) -> None:
    cached = CachedEngine(inner, ram=350, page=PAGE)
    cached.get_ranges([Range("a", 0, 1050)])
    assert cached._ram_used == sum(map(len, cached._ram.values())) <= 350
    inner.asked.clear()
    cached.get_ranges([Range("a", 1000, 1050)])
    assert inner.asked == []


# -- on disk -------------------------------------------------------------------------------
def test_damaged_pages_are_fetched_anew(inner: Counting, tmp_path: FsPath) -> None:
    data = bytes(inner.get("a").data)
    folder = tmp_path / "cache"
    CachedEngine(inner, folder=str(folder), page=PAGE).get_ranges([Range("a", 0, 1050)])
    pages = sorted(folder.rglob("*.page"))
    assert len(pages) == 11
    pages[0].write_bytes(pages[0].read_bytes()[:-3])
    pages[1].write_bytes(pages[1].read_bytes()[:-1] + b"\xff")
    pages[2].write_bytes(b"")
    pages[3].write_bytes(pages[4].read_bytes()[:8])
    inner.asked.clear()
    found = CachedEngine(inner, folder=str(folder), page=PAGE).get_ranges([Range("a", 0, 1050)])
    assert bytes(found[0]) == data
    assert inner.asked


def test_the_folder_keeps_its_size(tmp_path: FsPath) -> None:
    cache = DiskCache(str(tmp_path / "c"), most=50_000)
    for i in range(200):
        cache.put(f"page {i}", bytes(1000))
    cache.trim()
    assert sum(f.stat().st_size for f in (tmp_path / "c").rglob("*.page")) <= 50_000
    assert cache.get("page 199") == bytes(1000)


def test_the_unused_go_first(tmp_path: FsPath) -> None:
    cache = DiskCache(str(tmp_path / "c"), most=3300)
    old = time.time() - 1000
    for i in range(4):
        cache.put(f"page {i}", bytes(1000))
        os.utime(cache._path(f"page {i}"), (old + i, old + i))
    assert cache.get("page 0")  # used now
    cache.trim()
    assert [cache.get(f"page {i}") is not None for i in range(4)] == [True, False, False, True]


def test_rests_of_killed_writers_go(tmp_path: FsPath) -> None:
    cache = DiskCache(str(tmp_path / "c"), most=10_000)
    cache.put("page", b"x" * 5)
    rest = next((tmp_path / "c").rglob("*.page")).with_suffix(".tmp")
    rest.write_bytes(b"half")
    cache.trim()
    assert rest.exists(), "a writer may be busy with it"
    os.utime(rest, (1, 1))
    cache.trim()
    assert not rest.exists()


def test_a_folder_that_cannot_be_written_is_no_failure(
    inner: Counting, tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = CachedEngine(inner, folder=str(tmp_path / "c"), page=PAGE)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert bytes(cached.get_ranges([Range("b", 0, 10)])[0]) == b"0123456789"


WORKER = """
import sys
from tdstore_remote.cache.cached_engine import CachedEngine
from tdstore.storekit.local_engine import LocalEngine
from tdstore.index.ranges import Range
root, folder, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
engine = CachedEngine(LocalEngine(root), folder=folder, most=6000, page=100)
data = bytes(i % 251 for i in range(1050))
for i in range(300):
    start = (seed * 7919 + i * 104729) % 1000
    [found] = engine.get_ranges([Range("a", start, start + 50)])
    assert bytes(found) == data[start:start + 50]
"""


def test_many_processes_share_a_folder(inner: Counting, tmp_path: FsPath) -> None:
    import subprocess

    commands = [[*python(), "-c", WORKER, str(tmp_path / "data"), str(tmp_path / "cache"), str(i)] for i in range(3)]
    workers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for worker in workers:
        _, text = worker.communicate(timeout=120)
        assert worker.returncode == 0, text
    assert not list((tmp_path / "cache").rglob("*.tmp"))


# -- around object stores ----------------------------------------------------------------------
def test_a_store_through_a_cache(faulty: S3Server, proxy: FaultProxy, tmp_path: FsPath) -> None:
    where, options = f"{faulty.url}/{name()}", {"storage_options": faulty.fsspec_options, "cache": str(tmp_path / "c")}
    sample().save(where, storage_options=faulty.fsspec_options)
    with tdstore.open(where, **options) as td:
        assert same(td, sample())
    proxy.forget()
    with tdstore.open(where, **options) as td:
        assert same(td[[5, 299]], sample()[[5, 299]])
    assert [r.method for r in proxy.requests if r.method == "GET"] == ["GET"], "only the manifest is asked for"
    # another generation at the same place
    sample(50).save(where, storage_options=faulty.fsspec_options)
    with tdstore.open(where, **options) as td:
        assert same(td, sample(50))


def test_a_replaced_object_does_not_poison_the_cache(s3: S3Server, tmp_path: FsPath) -> None:
    where, options = f"{s3.url}/{name()}", {**s3.fsspec_options, "cache": str(tmp_path / "c")}
    plain = open_engine(where, s3.fsspec_options)
    plain.put("a", b"x" * 600_000)
    with open_engine(where, options) as engine:
        assert bytes(engine.get_ranges([Range("a", 0, 5)])[0]) == b"xxxxx"
        plain.put("a", b"y" * 600_000)
        with pytest.raises(CorruptStoreError, match="was replaced"):
            engine.get_ranges([Range("a", 500_000, 500_005)])
    with open_engine(where, options) as engine:
        assert bytes(engine.get_ranges([Range("a", 0, 5)])[0]) == b"yyyyy"


def test_a_cache_that_cannot_be_is_told(tmp_path: FsPath) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="cache folder"):
        open_engine("memory://x", {"cache": str(tmp_path / "file" / "c")})
    with pytest.raises(OptionError, match="cache must be a folder"):
        open_engine("memory://x", {"cache": 5})
