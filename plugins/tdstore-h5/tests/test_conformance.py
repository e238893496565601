"""The kit of `tdstore.testing` on the h5 backend, with contiguous and with compressed leaves."""

from __future__ import annotations

from pathlib import Path as FsPath
from typing import Any

import pytest

from tdstore.store import Cap
from tdstore.testing import StoreTests

PARTS = Cap.PARTIAL_READ | Cap.PARTIAL_WRITE
CAPS = Cap.WRITE | PARTS | Cap.RESIZE | Cap.PERSISTENT | Cap.CONCURRENT_READ | Cap.DISCARD


class TestH5(StoreTests):
    ON_DISK = True
    backend = "h5"
    caps = CAPS
    options = {"durable": "none"}

    @pytest.fixture
    def location(self, tmp_path: FsPath) -> str:
        return f"h5://{tmp_path}/t.h5"


@pytest.mark.slow  # another layout: the tiers run the kit once for each backend
class TestChunkedH5(StoreTests):
    backend = "h5"
    caps = CAPS
    options: dict[str, Any] = {"durable": "none", "chunks": 64, "compression": "lzf", "shuffle": True, "maxshape": True}
    max_examples = 6

    @pytest.fixture
    def location(self, tmp_path: FsPath) -> str:
        return f"{tmp_path}/t.h5"
