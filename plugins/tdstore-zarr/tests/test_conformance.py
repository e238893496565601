"""The kit of `tdstore.testing` on the zarr backend: sharded, plain, by zarr-python's codecs, zip, memory."""

from __future__ import annotations

from pathlib import Path as FsPath
from typing import Any

import pytest
from tdstore_zarr.place.memory_engine import memory_engine
from tdstore_zarr.store import ZarrStore, open_on, open_zarr

from tdstore.header import Header
from tdstore.store import Cap, Store
from tdstore.testing import StoreTests
from tdstore.testing.checks.machine import MachineTests
from tdstore.testing.checks.reading import ReadTests
from tdstore.testing.checks.writing import WriteTests
from tdstore.testing.setup import Location, fill
from tdstore.types import Mode

CAPS = ZarrStore.caps


class TestZarr(StoreTests):
    ON_DISK = True
    backend = "zarr"
    caps = CAPS
    options = {"durable": "none"}

    @pytest.fixture
    def location(self, tmp_path: FsPath) -> str:
        return f"zarr://{tmp_path}/t.zarr"


@pytest.mark.slow  # another layout: the tiers run the kit once for each backend
class TestShardsOfFewRows(ReadTests, WriteTests, MachineTests):
    backend = "zarr"
    caps = CAPS
    options: dict[str, Any] = {"durable": "none", "chunks": 3, "shards": 7, "compressors": "zstd"}
    max_examples = 6

    @pytest.fixture
    def location(self, tmp_path: FsPath) -> str:
        return f"{tmp_path}/t.zarr"


class TestPlainChunks(ReadTests, WriteTests):
    backend = "zarr"
    caps = CAPS
    options: dict[str, Any] = {"durable": "none", "chunks": (50, 3), "compressors": "none", "checksum": False}

    @pytest.fixture
    def location(self, tmp_path: FsPath) -> str:
        return f"{tmp_path}/t.zarr"


class TestOtherCodecs(WriteTests):
    """Codecs that only zarr-python applies."""

    backend = "zarr"
    caps = CAPS
    options: dict[str, Any] = {
        "durable": "none",
        "compressors": [{"name": "numcodecs.zlib", "configuration": {"level": 1}}],
    }

    @pytest.fixture
    def location(self, tmp_path: FsPath) -> str:
        return f"{tmp_path}/t.zarr"


@pytest.mark.slow  # another layout: the tiers run the kit once for each backend
class TestZip(StoreTests):
    """Zip files are written whole: the kit is given them ready made."""

    caps = Cap.PARTIAL_READ | Cap.PERSISTENT | Cap.CONCURRENT_READ
    open = staticmethod(open_zarr)

    @pytest.fixture
    def location(self, tmp_path: FsPath) -> str:
        return f"{tmp_path}/t.zarr.zip"

    def prepare(self, location: Location, leaves: Any, header: Header) -> None:
        with open_zarr(str(location), mode="w", durable="none") as store:
            fill(store, leaves)
            store.save_header(header)


def open_memory(location: str | None, *, mode: Mode = "r", chunks: int | None = None) -> Store:
    """The same protocol as on an object store, without a wire."""
    assert location is not None
    return open_on(memory_engine(location), mode=mode, chunks=chunks)


class TestMemory(StoreTests):
    caps = CAPS & ~Cap.PERSISTENT
    max_examples = 6
    open = staticmethod(open_memory)

    @pytest.fixture
    def location(self, tmp_path: FsPath) -> str:
        return f"{tmp_path}"

    def test_it_is_a_zarr_store(self) -> None:
        assert issubclass(ZarrStore, Store)
