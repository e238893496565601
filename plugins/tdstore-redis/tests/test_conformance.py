"""The kit of `tdstore.testing` on a real server, with ordinary blocks and with tiny ones."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis
from redishelp import blocks, dump

from tdstore.store import Cap
from tdstore.testing import StoreTests
from tdstore.testing.checks.catalogue import CatalogueTests
from tdstore.testing.checks.machine import MachineTests
from tdstore.testing.checks.reading import ReadTests
from tdstore.testing.checks.writing import WriteTests
from tdstore.testing.setup import StoreSetup

CAPS = (
    Cap.WRITE
    | Cap.PARTIAL_READ
    | Cap.PARTIAL_WRITE
    | Cap.RESIZE
    | Cap.SHARED
    | Cap.PERSISTENT
    | Cap.CONCURRENT_READ
    | Cap.CONCURRENT_WRITE
    | Cap.DISCARD
)


class OnServer(StoreSetup):
    backend = "redis"
    caps = CAPS

    @pytest.fixture
    def location(self, client: Redis, place: str) -> str:
        self.client = client
        return place

    def fingerprint(self, location: Any) -> object:
        return dump(self.client)

    def largest(self) -> bytes:
        return max(blocks(self.client), key=self.client.strlen)

    def corrupt(self, location: Any) -> None:
        key = self.largest()
        at = self.client.strlen(key) // 2
        (byte,) = self.client.getrange(key, at, at)
        self.client.setrange(key, at, bytes([byte ^ 0x10]))

    def truncate(self, location: Any) -> None:
        key = self.largest()
        data = self.client.get(key)
        assert data
        self.client.set(key, data[: len(data) * 2 // 3])


class TestRedis(OnServer, StoreTests):
    pass


class TestTinyBlocks(OnServer, ReadTests, WriteTests, CatalogueTests, MachineTests):
    """Where data lie in many blocks. What other processes see of them is the same."""

    options = {"block": 64}
    max_examples = 6


del OnServer
