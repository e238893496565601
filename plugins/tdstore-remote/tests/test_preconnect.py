"""Connections that are opened beside the first request: how many, when, and that nobody waits for them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from remotehelp import name, run
from tdstore_remote.opening import open_engine

import tdstore
from tdstore import TensorDict
from tdstore.data import Epochs
from tdstore.engine import expect_ranges, expected_ranges
from tdstore.errors import OptionError
from tdstore.index.ranges import Range
from tests.servers import FaultProxy, S3Server, WebServer

ROWS = 500


@pytest.fixture(autouse=True)
def _no_other_engines() -> None:
    """Engines of earlier tests would share their clients, and the connections of these."""
    gc.collect()


@pytest.fixture(scope="module")
def where(s3: S3Server) -> str:
    location = f"{s3.url}/{name()}"
    data = TensorDict({"row": torch.arange(ROWS), "x": torch.randn(ROWS, 20_000)}, [ROWS])
    data.save(location, storage_options=s3.fsspec_options).close()
    return location


def heads(proxy: FaultProxy) -> list[str]:
    """The objects that were asked for by HEAD."""
    return [request.path for request in list(proxy.requests) if request.method == "HEAD"]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_reads_find_their_connections_open(http: WebServer) -> None:
    (http.folder / "object").write_bytes(bytes(100))
    with FaultProxy(http.port, latency_ms=60) as slow:  # moto closes a connection after each answer, nginx does not
        with open_engine(slow.url, {"preconnect": 15}, writable=False) as engine:
            engine.get("object")
            wait_until(lambda: len(heads(slow)) == 15 and all(request.end for request in slow.requests))
            assert set(heads(slow)) == {"/object"}
            assert slow.connections == 16
            engine.get("object")
            engine.get_ranges([Range("object", at, at + 1) for at in range(10)])
            assert (slow.connections, len(heads(slow))) == (16, 15), "connections were opened again"


@pytest.mark.parametrize(
    ("how", "expected"),
    [({"batch_size": 20}, 20), ({"batch_size": 300}, 64), ({"batch_size": 20, "shuffle": False}, 8)],
    ids=["full", "large batches", "in order"],
)
def test_epochs_open_as_many_as_their_first_batch_needs(
    where: str, faulty: S3Server, slow: FaultProxy, how: dict[str, Any], expected: int
) -> None:
    slow.forget()
    options = {"storage_options": faulty.fsspec_options}
    next(iter(Epochs(where, prefetch=0, options=options, **how)))
    wait_until(lambda: len(heads(slow)) >= expected)
    assert len(heads(slow)) == expected


@pytest.mark.parametrize("what", ["open", "off", "cached"])
def test_nothing_is_asked_that_nobody_needs(
    where: str, faulty: S3Server, proxy: FaultProxy, what: str, tmp_path: Any
) -> None:
    proxy.forget()
    options = {"storage_options": faulty.fsspec_options | ({"preconnect": 0} if what == "off" else {})}
    if what == "open":
        tdstore.open(where, **options).read(slice(0, 9))
    else:
        options |= {"cache": str(tmp_path)} if what == "cached" else {}
        next(iter(Epochs(where, 9, prefetch=0, options=options)))
    assert not [path for path in heads(proxy) if path.endswith("tdstore.json")]


def test_errors_of_these_requests_are_nobody_s(where: str, faulty: S3Server, proxy: FaultProxy) -> None:
    refused = proxy.answer(403, method="HEAD")
    batches = list(Epochs(where, 100, options={"storage_options": faulty.fsspec_options}))
    assert sum(len(batch) for batch in batches) == ROWS
    assert refused.hits == 64, "each was asked for once, and not again"


def test_a_process_ends_while_they_are_under_way(where: str, faulty: S3Server, proxy: FaultProxy) -> None:
    proxy.stall(method="HEAD")
    start = time.monotonic()
    run(
        f"""
import tdstore
from tdstore.engine import expect_ranges
with expect_ranges(20):
    td = tdstore.open({where!r}, storage_options={faulty.fsspec_options!r})
assert td.batch_size == ({ROWS},)
"""
    )
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("value", [-1, 1.5, "many"])
def test_a_number_of_connections_is_checked(where: str, value: Any) -> None:
    with pytest.raises(OptionError, match="preconnect must be a number of connections"):
        tdstore.open(where, storage_options={"preconnect": value})


def test_expectations_nest_and_end() -> None:
    with expect_ranges(3):
        with pytest.raises(KeyError), expect_ranges(5):
            assert expected_ranges() == 5
            raise KeyError
        assert expected_ranges() == 3
    assert expected_ranges() == 0


def test_connections_for_the_indices_of_zarr_are_opened_beside_the_root(http: WebServer) -> None:
    pytest.importorskip("tdstore_zarr")
    place = f"{name()}.zarr"
    data = TensorDict({"x": torch.arange(640 * 100).reshape(640, 100)}, [640])
    data.save(http.folder / place, chunks=1, shards=64).close()
    with FaultProxy(http.port, latency_ms=300) as slow, tdstore.open(f"{slow.url}/{place}") as td:
        wait_until(lambda: all(request.end for request in list(slow.requests)))
        root = next(request for request in slow.requests if request.path.endswith("zarr.json"))
        first = min(request.start for request in slow.requests if request.method == "HEAD")
        assert first < root.end
        assert len(heads(slow)) == 16
        # A HEAD that is answered later than the root has no part in it: the client opens a further connection.
        connections = slow.connections
        assert 17 <= connections <= 17 + 10, "one for the root, one for each HEAD; ten indices"
        with tdstore.open(f"{slow.url}/{place}") as again:
            assert torch.equal(again[[3, 600]]["x"], data[[3, 600]]["x"])
            assert (slow.connections, len(heads(slow))) == (connections, 16), "the first one has opened them"
        assert torch.equal(td[[3, 600]]["x"], data[[3, 600]]["x"])
