"""The limit on requests under way: their order, both limits, and waits that are cancelled."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tdstore_remote.engines.gate import FEW, Gate
from tdstore_remote.opening import open_engine

from tdstore.index.ranges import Range
from tests.servers import FaultProxy


def run(
    requests: int, nbytes: int, sizes: list[tuple[int, int]], cancelled: int | None = None
) -> tuple[list[int], int]:
    """Pass a gate with requests that take some turns of the loop; returns their order, and the most at a time."""
    order: list[int] = []
    most = 0

    async def one(gate: Gate, number: int, count: int, size: int) -> None:
        nonlocal most
        async with gate.pass_(count, size):
            order.append(number)
            most = max(most, gate.requests)
            for _ in range(3):
                await asyncio.sleep(0)

    async def main() -> None:
        gate = Gate(requests, nbytes)
        tasks = [asyncio.ensure_future(one(gate, n, *size)) for n, size in enumerate(sizes)]
        await asyncio.sleep(0)
        if cancelled is not None:
            tasks[cancelled].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.requests == gate.nbytes == 0
        assert not gate._waiting

    asyncio.run(main())
    return order, most


def test_requests_begin_in_their_order() -> None:
    assert run(3, 1000, [(1, 1)] * 10) == (list(range(10)), 3)
    assert run(4, 1000, [(2, 1), (3, 1), (1, 1), (9, 1), (1, 1)]) == ([0, 1, 2, 3, 4], 9), "a large one goes alone"


def test_bytes_limit_more_than_a_few() -> None:
    assert run(64, 100, [(1, 60)] * 40) == (list(range(40)), FEW)
    assert run(64, 60 * 40, [(1, 60)] * 40) == (list(range(40)), 40)


@pytest.mark.parametrize("cancelled", [0, 1, 2])
def test_a_cancelled_request_leaves_its_place(cancelled: int) -> None:
    order, most = run(1, 100, [(1, 1)] * 4, cancelled)
    assert order == [n for n in range(4) if n != cancelled or n == 0]
    assert most == 1


def test_reads_of_all_threads_share_the_limit(s3: Any) -> None:
    s3.client().put_object(Bucket=s3.bucket, Key="a", Body=bytes(100))
    with FaultProxy(s3.port, latency_ms=20) as proxy:
        options = {**s3.through(proxy.port).fsspec_options, "concurrency": 3}
        with open_engine(s3.url, options, writable=False) as engine:
            ranges = [Range("a", 10 * n, 10 * n + 1) for n in range(5)]
            threads = [threading.Thread(target=engine.get_ranges, args=(ranges,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(proxy.requests) == 20
        starts = sorted(request.start for request in proxy.requests)
        under_way = [sum(r.start <= at < r.end for r in proxy.requests) for at in starts]
        assert max(under_way) <= 3
