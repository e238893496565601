"""The kit of `tdstore.testing` on the icechunk backend: nothing is a deviation."""

from __future__ import annotations

from pathlib import Path as FsPath

import pytest
from tdstore_icechunk.store import IcechunkStore

from tdstore.testing import StoreTests


class TestIcechunk(StoreTests):
    ON_DISK = True
    backend = "icechunk"
    caps = IcechunkStore.caps
    max_examples = 5

    @pytest.fixture
    def location(self, tmp_path: FsPath) -> FsPath:
        return tmp_path / "kit" / "t.icechunk"
