"""Fixtures of every test, of the core and of the plugins: the real servers (how to use one: tests/servers), folders."""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import multiprocessing.util
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tdstore.testing import crash
from tdstore.testing.processes import warm
from tests import lacking, pages, servers, tiers
from tests.cuda import mode

T = TypeVar("T")
MEMORY = "/dev/shm"
AMPLE = 4 << 30
_folders = itertools.count()
spawnv_passfds = multiprocessing.util.spawnv_passfds


@contextmanager
def needed(server: AbstractContextManager[T]) -> Iterator[T]:
    """Skip the tests of a server that is not installed here. Where all servers are required, that is a failure."""
    tiers.refuse("server")
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


if mode.ON:

    def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
        """Run the tests of a table a second time, with the GPU as the default device."""
        mode.twice(metafunc)

    @pytest.fixture(autouse=True)
    def default_device(request: pytest.FixtureRequest) -> Iterator[None]:
        """Make the device of a test's second run the default."""
        with mode.default(getattr(request, "param", "cpu")):
            yield


@pytest.fixture(autouse=True)
def no_handler_of_sigterm() -> Iterator[None]:
    """Give SIGTERM its default action: a handler that an earlier test left drops the signal in a child being forked.

    The child of a pool would live on, and the end of the pool would wait for it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, handler)


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers of tests/tiers.py known, and fix how processes start.

    torchrl makes "spawn" the way of the whole process when it is imported: pools and loaders of all other tests would
    then start interpreters of their own, each of which imports torch, or not, as the order of the tests has it.
    """
    mode.check()
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_forkserver_preload(["tdstore"])
    if sys.platform == "linux":
        multiprocessing.util.spawnv_passfds = start_warm
    for mark, meaning in {**tiers.TRAITS, **tiers.TIERS}.items():
        config.addinivalue_line("markers", f"{mark}: {meaning}")


def pytest_sessionfinish() -> None:
    """End what still runs: the manager of tensordict's shared values would outlive the run, with its output open."""
    for child in multiprocessing.active_children():
        child.kill()
    gc.unfreeze()  # extensions say at the end what was not freed


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what each test uses; the long ones first: one that comes last is waited for by all."""
    lacking.deselect(config, items)
    tiers.add_markers(items)
    mode.skip_outside(items)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect no garbage while tests are collected, and never walk them later: each `gc.collect()` of a test did."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        if pages.occupied() > pages.MUCH:
            pages.use_large_pages()


def start_warm(path: bytes, args: list[Any], passed: Iterable[int]) -> int:
    """Start what multiprocessing starts for "spawn" by the server of `warm`: no second import of torch for each."""
    arguments = [os.fsdecode(argument) for argument in args]
    if "--multiprocessing-fork" not in arguments:  # a resource tracker or a fork server
        return spawnv_passfds(path, args, passed)
    command = [*warm.python(numbers := sorted(map(int, passed))), *arguments[arguments.index("-c") :]]
    return spawnv_passfds(os.fsencode(command[0]), command, numbers)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what a tier has nothing of: half of its minute."""
    beyond = tiers.is_beyond(collection_path, config.option.markexpr)
    return True if beyond or lacking.cannot_collect(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that starts processes or servers beyond its tier: tests/tiers.py did not see that it does."""
    with tiers.within(item):
        found = yield
    mode.end_if_lost(item)
    return found


@pytest.fixture(scope="module", autouse=True)
def frozen_survivors() -> Iterator[None]:
    """Freeze what outlives a module, as caches do: each `gc.collect()` of a test walked a million objects."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def shared_samples() -> Iterator[None]:
    """Fail a module that wrote into the samples of all: another test, of another module, would fail for it."""
    samples = [value for sample in (crash.OLD, crash.NEW) for value in sample.values()]
    before = [value.clone() for value in samples]
    yield
    assert all(map(torch.equal, samples, before)), "a test of this module wrote into tdstore.testing.crash.OLD or NEW"


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory: making, syncing and removing small files there is what half of the system's time went to.

    It is on the disk for modules and classes that say `ON_DISK = True`, which is for what a file system of the disk
    may do otherwise: the kit once for each backend, page caches, holes, numbers of files that are used again.
    """
    if is_memory_ample() and not getattr(request.cls, "ON_DISK", getattr(request.module, "ON_DISK", False)):
        with tempfile.TemporaryDirectory(prefix="tdstore-test-", dir=MEMORY) as folder:
            yield Path(folder)
        return
    # Numbered by a count: pytest lists all folders that there are for the next number.
    path = tmp_path_factory.getbasetemp() / f"{re.sub(r'[^a-zA-Z0-9_]', '_', request.node.name)[:30]}{next(_folders)}"
    path.mkdir(mode=0o700)
    yield path


@functools.cache
def is_memory_ample() -> bool:
    """Check whether a file system in memory has room for the files of tests, beside what shared memory takes."""
    return os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > AMPLE


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
