"""Fixtures of every test, of the core and of the plugins: the real servers (how to use one: tests/servers), folders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from tests import servers

T = TypeVar("T")


@contextmanager
def needed(server: AbstractContextManager[T]) -> Iterator[T]:
    """Skip the tests of a server that is not installed here. Where all servers are required, that is a failure."""
    try:
        running = server.__enter__()
    except servers.MissingServer as missing:
        if os.environ.get("TDSTORE_REQUIRE_SERVERS") == "1":
            pytest.fail(f"TDSTORE_REQUIRE_SERVERS=1, and this test {missing}", pytrace=False)
        pytest.skip(str(missing))
    try:
        yield running
    finally:
        server.__exit__(None, None, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first: one that comes last is waited for by all."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """For the modules that sync a lot (`IN_MEMORY = True`) a folder in memory, where that costs nothing."""
    if getattr(request.module, "IN_MEMORY", None) is not True or not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def redis() -> Iterator[servers.RedisServer]:
    """A redis of this worker; start another with redis_server() to stop, pause or kill it."""
    with needed(servers.redis_server()) as server:
        yield server


@pytest.fixture(scope="session")
def s3() -> Iterator[servers.S3Server]:
    """S3 for unit tests: moto, in this process, with a bucket. `s3.make_bucket()` gives an empty one."""
    with needed(servers.s3_moto()) as server:
        yield server


@pytest.fixture(scope="session")
def rgw() -> Iterator[servers.S3Server]:
    """S3 for real: Ceph RGW, one for all workers, with a bucket of this worker."""
    with needed(servers.s3_rgw()) as server:
        yield server


@pytest.fixture(scope="session")
def azure() -> Iterator[servers.AzureServer]:
    """Azure blobs: azurite, with a container. `azure.make_container()` gives an empty one."""
    with needed(servers.azurite()) as server:
        yield server


@pytest.fixture(scope="session")
def pyright() -> Iterator[list[str]]:
    """The command of pyright, for programs that are checked as their users would."""
    with needed(servers.pyright()) as command:
        yield command


@pytest.fixture(scope="session")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.WebServer]:
    """nginx on the folder `http.folder`: write files there, read them below `http.url`."""
    with needed(servers.http_nginx(tmp_path_factory.mktemp("http"), autoindex="html")) as server:
        yield server
