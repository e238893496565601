"""The kit of `tdstore.testing` on the remote backend: in memory, and on S3 and Azure."""

from __future__ import annotations

import uuid
from typing import Any, ClassVar

import pytest
from tdstore_remote.opening import open_engine

from tdstore.store import Cap
from tdstore.testing import StoreTests
from tests.servers import AzureServer, S3Server

CAPS = (
    Cap.WRITE
    | Cap.PARTIAL_READ
    | Cap.PARTIAL_WRITE
    | Cap.RESIZE
    | Cap.PERSISTENT
    | Cap.CONCURRENT_READ
    | Cap.DISCARD
    | Cap.VERSIONS
)


class RemoteTests(StoreTests):
    """What is stored is found and damaged through an engine of the test's own."""

    def _largest(self, location: Any) -> tuple[Any, str, bytes]:
        engine = open_engine(str(location), self.options.get("storage_options"))
        entries = [e for e in engine.list() if not e.key.endswith(".json")]
        key = max(entries, key=lambda e: e.size).key
        return engine, key, bytes(engine.get(key).data)

    def corrupt(self, location: Any) -> None:
        engine, key, data = self._largest(location)
        middle = len(data) // 2
        engine.put(key, data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :])

    def truncate(self, location: Any) -> None:
        engine, key, data = self._largest(location)
        engine.put(key, data[: len(data) * 2 // 3])


class TestMemory(RemoteTests):
    backend = "remote"
    caps = CAPS
    one_process = "memory:// is the memory of one process"

    @pytest.fixture
    def location(self) -> str:
        return f"memory://{uuid.uuid4().hex}/t"


class TestS3(RemoteTests):
    backend = "remote"
    caps = CAPS | Cap.ASYNC
    options: ClassVar[dict[str, Any]] = {}
    max_examples = 4

    @pytest.fixture
    def location(self, s3: S3Server) -> str:
        type(self).options = {"storage_options": s3.fsspec_options}
        return f"{s3.url}/{uuid.uuid4().hex}/t"


class TestAzure(RemoteTests):
    backend = "remote"
    caps = CAPS | Cap.ASYNC
    options: ClassVar[dict[str, Any]] = {}
    max_examples = 2

    @pytest.fixture
    def location(self, azure: AzureServer) -> str:
        options = {"account_name": azure.account, "account_key": azure.key, "endpoint": azure.endpoint}
        type(self).options = {"storage_options": options}
        return f"az://{azure.container}/{uuid.uuid4().hex}/t"
