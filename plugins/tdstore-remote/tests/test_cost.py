"""What it costs: rounds of requests, bytes and memory, counted by a proxy before the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from remotehelp import name, run, same
from tdstore_remote.opening import ForkSafeEngine

import tdstore
from tdstore import TensorDict
from tdstore.types import Read
from tests.servers import FaultProxy, S3Server

ROWS = 2000


@pytest.fixture(scope="module")
def big() -> TensorDict:
    numbers = torch.arange(ROWS)
    return TensorDict(
        {
            "obs": (numbers[:, None] + torch.arange(1764)).to(torch.int32),
            "action": numbers.clone(),
            "reward": numbers.to(torch.float32),
            "done": numbers % 7 == 0,
        },
        [ROWS],
    )


@pytest.fixture(scope="module")
def where(s3: S3Server, big: TensorDict) -> str:
    location = f"{s3.url}/{name()}"
    big.save(location, storage_options=s3.fsspec_options)
    return location


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_rounds_and_bytes(
    engine: str, where: str, big: TensorDict, faulty: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []  # ranges of each round, as the store asks for them
    real = ForkSafeEngine.get_ranges
    monkeypatch.setattr(ForkSafeEngine, "get_ranges", lambda self, r: (asked.append(len(r)), real(self, r))[1])
    proxy.latency_ms = 25
    proxy.forget()
    with tdstore.open(where, storage_options={**faulty.fsspec_options, "engine": engine}) as td:
        assert proxy.rounds() <= 2, "to open"
        # a new connection takes a round of its own: these are made once
        td[torch.randint(0, ROWS, (256,))].to_tensordict()
        proxy.forget()
        asked.clear()
        rows = torch.randint(0, ROWS, (256,), generator=torch.Generator().manual_seed(0))
        assert same(td[rows], big[rows])
        wanted = 256 * (1764 * 4 + 8 + 4 + 1)
        assert len(asked) == 1, "for 256 rows of all leaves"
        assert proxy.rounds() <= 3, "as seen on the wire, where connections may open late"
        # of 14 MB these rows are a share so large that near ones are fetched together
        assert proxy.bytes_sent <= 8 * wanted
        proxy.forget()
        assert td[1234]["action"].item() == 1234
        assert proxy.rounds() <= 1
        proxy.forget()
        asked.clear()
        assert same(td[100:200], big[100:200])
        assert len(asked) == 1
    proxy.latency_ms = 4


@pytest.mark.parametrize(("suffix", "rounds"), [("", 3), (".zarr", 7)])
def test_looking_for_other_formats_costs_no_round(suffix: str, rounds: int, faulty: S3Server, slow: FaultProxy) -> None:
    """What is of other programs is looked for beside the manifest, at the same time."""
    TensorDict(a=torch.zeros(3)).save(f"{faulty.url}/{name()}", storage_options=faulty.fsspec_options).close()
    slow.forget()  # the first save has tried out what the bucket can do
    TensorDict(a=torch.zeros(3)).save(f"{faulty.url}/{name()}{suffix}", storage_options=faulty.fsspec_options).close()
    assert slow.rounds() <= rounds
    assert {r.method for r in slow.requests} >= {"GET", "HEAD", "PUT"}


def test_asynchronous_reads_overlap(where: str, faulty: S3Server, proxy: FaultProxy) -> None:
    from tdstore_remote.store import open_remote

    proxy.latency_ms = 60
    with open_remote(where, storage_options=faulty.fsspec_options) as store:

        async def work() -> list[Any]:
            reads = [[Read(("obs",), (slice(i, i + 1, 1),))] for i in range(0, ROWS, 250)]
            return await asyncio.gather(*(store.aread(r) for r in reads))

        asyncio.run(work())
        proxy.forget()
        found = asyncio.run(work())
        assert [part[0][0, 0].item() for part in found] == list(range(0, ROWS, 250))
        assert proxy.rounds() <= 3, "eight reads at once"
    proxy.latency_ms = 4


MEMORY = """
import resource, torch, tdstore
from tdstore import TensorDict
options, where = {options!r}, {where!r}
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
td = TensorDict.from_schema(
    {{"a": tdstore.LeafSpec((1 << 18,), "float32")}}, batch_size=[160], storage=where, storage_options=options
)
warm = td[0]
before = peak()
row = torch.zeros(8, 1 << 18)
for i in range(0, 160, 8):
    row.fill_(float(i))
    td[i : i + 8] = TensorDict({{"a": row}}, [8])
td.close()
with tdstore.open(where, storage_options=options) as td:
    total = sum(float(td[i : i + 8]["a"][:, 0].sum()) for i in range(0, 160, 8))
assert total == sum(8 * i for i in range(0, 160, 8)), total
print((peak() - before) // 1024)
"""


def test_memory_stays_bounded(rgw: S3Server) -> None:
    """160 MiB are streamed up and read back in blocks with far less than that in memory."""
    used = int(run(MEMORY.format(options=rgw.fsspec_options, where=f"{rgw.url}/{name()}"), seconds=150))
    assert used < 250, f"{used} MiB"
