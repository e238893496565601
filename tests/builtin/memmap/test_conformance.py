"""The memmap backend under the kit that every backend must pass."""

from __future__ import annotations

import pytest

from tdstore.builtin.memmap.store import open_memmap
from tdstore.store import Cap
from tdstore.testing import StoreTests

CAPS = (
    Cap.WRITE
    | Cap.PARTIAL_READ
    | Cap.PARTIAL_WRITE
    | Cap.RESIZE
    | Cap.VIEW
    | Cap.SHARED
    | Cap.PERSISTENT
    | Cap.CONCURRENT_READ
    | Cap.CONCURRENT_WRITE
    | Cap.DISCARD
)


class TestMemmap(StoreTests):
    ON_DISK = True
    backend = "memmap"
    caps = CAPS


@pytest.mark.slow  # another layout: the tiers run the kit once for each backend
class TestMemmapPreallocatedUnsynced(StoreTests):
    backend = "memmap"
    caps = CAPS
    options = {"preallocate": True, "durable": "none", "verify": "full"}


class TestMemmapAnonymous(StoreTests):
    open = staticmethod(open_memmap)
    caps = CAPS & ~(Cap.PERSISTENT | Cap.DISCARD)

    @pytest.fixture
    def location(self) -> None:
        return None


class TestMemmapPacked(StoreTests):
    backend = "memmap"
    caps = CAPS
    options = {"pack": True}
