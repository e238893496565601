"""How many rounds, requests and bytes it takes to open, to read a batch, to read a row, and to save."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tdstore.bytestore import open_objects
from tdstore.engine import EngineCap
from tdstore.errors import CorruptStoreError
from tdstore.store import Cap
from tdstore.types import LeafSpec, Read, Write
from tests.bytestore.memory_engine import ALL, MemoryEngine
from tests.bytestore.support import contents, equal, numbered, save

ROWS = 3000
LEAVES = {
    ("obs",): torch.arange(ROWS * 28 * 28 * 8, dtype=torch.int64).to(torch.uint8).view(ROWS, 28, 28, 8),
    ("action",): torch.arange(ROWS * 64, dtype=torch.float32).view(ROWS, 64),
    ("next", "reward"): torch.arange(ROWS, dtype=torch.float32),
    ("done",): torch.zeros(ROWS, dtype=torch.bool),
}


@pytest.fixture(scope="module")
def bucket():
    engine = MemoryEngine()
    save(engine, LEAVES).close()
    return engine.bucket


@pytest.fixture
def engine(bucket):
    return MemoryEngine(bucket)


def test_opening_is_one_round(engine):
    store = open_objects(engine)
    assert (engine.rounds, engine.requests) == (1, 1)
    assert sorted(store.paths()) == sorted(LEAVES)
    store.specs(list(LEAVES))
    store.load_header()
    assert engine.rounds == 1


@pytest.mark.parametrize("verify", ["full", "size"])
def test_a_batch_over_all_leaves_is_one_round(engine, verify):
    store = open_objects(engine, verify=verify)
    rows = torch.randperm(ROWS)[:256]
    for expected in (1, 1):
        engine.reset()
        got = store.read([Read(path, (rows,)) for path in LEAVES])
        assert engine.rounds == expected
        assert all(torch.equal(g, v[rows]) for g, v in zip(got, LEAVES.values()))
    wanted = sum(v[rows].nbytes for v in LEAVES.values())
    assert engine.bytes_read < 4 * wanted


def test_one_row_is_one_round_and_small_leaves_cost_once(engine):
    store = open_objects(engine)
    for turn, row in enumerate((7, 2900, 7)):
        engine.reset()
        got = store.read([Read(path, (slice(row, row + 1, 1),)) for path in LEAVES])
        assert engine.rounds == 1
        assert all(torch.equal(g, v[row : row + 1]) for g, v in zip(got, LEAVES.values()))
        if turn:
            # Verified, and yet: the frame, one grain of the actions, nothing of the small leaves.
            assert engine.bytes_read == 28 * 28 * 8 + 4096
    engine.reset()
    store.read([Read(("next", "reward"), (slice(5, 9, 1),)), Read(("done",))])
    assert engine.rounds == 0


SPANS = torch.arange(2 * 100_000).view(-1, 2)  # 1.6 MB


def random_rows(turn):
    return torch.randint(0, len(SPANS), (64,), generator=torch.Generator().manual_seed(turn))


def test_a_leaf_that_is_read_again_and_again_is_fetched_whole_when_that_costs_no_more():
    saver = MemoryEngine()
    save(saver, {("a",): SPANS}).close()
    engine = MemoryEngine(saver.bucket)
    store = open_objects(engine)
    engine.reset()
    costs = []
    for turn in range(30):
        before = engine.bytes_read
        assert torch.equal(store.read([Read(("a",), (random_rows(turn),))])[0], SPANS[random_rows(turn)])
        costs.append(engine.bytes_read - before)
        assert engine.rounds <= turn + 1
    # What it costs to rent until that is the price, and then to buy.
    assert costs[0] < SPANS.nbytes / 2 and costs[-10:] == [0] * 10
    assert engine.bytes_read < 2.5 * SPANS.nbytes
    assert sum(cost >= SPANS.nbytes for cost in costs) == 1


def test_a_large_leaf_is_never_fetched_whole(monkeypatch):
    monkeypatch.setattr("tdstore.bytestore.view.WARM_LEAF", SPANS.nbytes - 1)
    saver = MemoryEngine()
    save(saver, {("a",): SPANS}).close()
    engine = MemoryEngine(saver.bucket)
    store = open_objects(engine)
    for turn in range(20):
        engine.reset()
        store.read([Read(("a",), (random_rows(turn),))])
        assert 0 < engine.bytes_read < SPANS.nbytes / 2


def test_leaves_that_are_kept_have_bounds_together_and_see_writes(monkeypatch):
    monkeypatch.setattr("tdstore.bytestore.view.CACHE_BYTES", SPANS.nbytes)
    engine = MemoryEngine()
    store = save(engine, {("a",): SPANS, ("b",): SPANS})

    def read(path, turn):
        engine.reset()
        got = store.read([Read(path, (random_rows(turn),))])[0]
        return got, engine.bytes_read

    costs = {path: [read(path, turn)[1] for turn in range(20)] for path in store.paths()}
    assert costs[("a",)][-1] == 0 and all(0 < cost < SPANS.nbytes / 2 for cost in costs[("b",)])
    rows = random_rows(3).unique()
    store.write([Write(("a",), (rows,), -SPANS[rows])])
    assert torch.equal(store.read([Read(("a",), (rows,))])[0], -SPANS[rows])
    store.save_header(numbered(0))
    assert torch.equal(read(("a",), 3)[0], -SPANS[random_rows(3)])
    assert read(("a",), 4)[1] > 0  # what was kept is no more, and neither is what was paid for it
    want = SPANS.clone()
    want[rows] *= -1
    for turn in range(20):
        got, cost = read(("a",), turn)
        assert torch.equal(got, want[random_rows(turn)])
    assert cost == 0


def test_rows_that_are_sound_are_read_where_the_whole_leaf_is_not():
    saver = MemoryEngine()
    save(saver, {("a",): SPANS}).close()
    engine = MemoryEngine(saver.bucket)
    store = open_objects(engine)
    (key,) = [k for k in engine.bucket.keys() if len(engine.bucket.bytes_of(k)) > SPANS.nbytes]
    whole = bytearray(engine.bucket.bytes_of(key))
    whole[whole.index(SPANS[-1].numpy().tobytes())] ^= 1
    engine.bucket.put(key, whole)
    rows = random_rows(0) % 50_000
    for _ in range(20):
        assert torch.equal(store.read([Read(("a",), (rows,))])[0], SPANS[rows])
    with pytest.raises(CorruptStoreError):
        store.read([Read(("a",), (slice(len(SPANS) - 1, len(SPANS), 1),))])


def test_whole_leaves_are_one_round(engine):
    store = open_objects(engine)
    engine.reset()
    assert equal(contents(store), LEAVES)
    assert engine.rounds == 1


def test_checksums_too_many_to_fetch_ahead_come_with_the_rows(engine, monkeypatch):
    monkeypatch.setattr("tdstore.bytestore.view.AHEAD", 0)
    store = open_objects(engine)
    engine.reset()
    got = store.read([Read(("obs",), (torch.tensor([5, 1000]),))])
    assert torch.equal(got[0], LEAVES[("obs",)][[5, 1000]])
    assert engine.rounds == 1
    assert engine.bytes_read < 2 * 28 * 28 * 8 + 3 * 4096


def test_more_than_fits_into_memory_at_once_comes_in_several_rounds(engine, monkeypatch):
    monkeypatch.setattr("tdstore.bytestore.read.ROUND", 1 << 20)
    store = open_objects(engine)
    engine.reset()
    assert equal(contents(store), LEAVES)
    assert engine.rounds > 3


def test_async_reads_use_the_engine(bucket):
    engine = MemoryEngine(bucket, can=ALL | EngineCap.ASYNC)
    engine.latency = 0.05
    store = open_objects(engine)
    assert Cap.ASYNC in store.caps
    assert Cap.ASYNC not in open_objects(MemoryEngine(bucket)).caps
    rows = [torch.tensor([i, ROWS - 1 - i]) for i in range(8)]

    async def several():
        return await asyncio.gather(*(store.aread([Read(("obs",), (r,)), Read(("done",), (r,))]) for r in rows))

    threads = threading.active_count()
    for r, (obs, done) in zip(rows, asyncio.run(several())):
        assert torch.equal(obs, LEAVES[("obs",)][r])
        assert torch.equal(done, LEAVES[("done",)][r])
    assert threading.active_count() == threads


def test_threads_share_a_reader(bucket):
    store = open_objects(MemoryEngine(bucket))

    def read(turn):
        rows = torch.randint(0, ROWS, (20,), generator=torch.Generator().manual_seed(turn))
        got = store.read([Read(path, (rows,)) for path in LEAVES])
        return all(torch.equal(g, v[rows]) for g, v in zip(got, LEAVES.values()))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(100)))


def test_a_save_streams_with_bounded_memory():
    engine = MemoryEngine()
    store = open_objects(engine, mode="w", buffer_bytes=8 << 20, object_bytes=1 << 20)
    store.create({("a",): LeafSpec((64, 1 << 20), "uint8"), ("b",): LeafSpec((64,), "int64")})
    most = 0
    for i in range(0, 64, 4):
        rows = (slice(i, i + 4, 1),)
        store.write([Write(("a",), rows, torch.full((4, 1 << 20), i, dtype=torch.uint8))])
        store.write([Write(("b",), rows, torch.arange(i, i + 4))])
        most = max(most, store._buffer.nbytes)
    store.save_header(numbered(64))
    assert most <= 8 << 20
    assert engine.puts_at_once > 1  # side by side
    assert all(len(engine.bucket.bytes_of(k)) <= (1 << 20) + 5000 for k in engine.bucket.keys())
    a, b = open_objects(MemoryEngine(engine.bucket)).read([Read(("a",)), Read(("b",))])
    assert torch.equal(a, (torch.arange(64) // 4 * 4).to(torch.uint8)[:, None].expand(64, 1 << 20))
    assert torch.equal(b, torch.arange(64))


def test_one_large_write_is_cut():
    engine = MemoryEngine()
    value = torch.arange(1 << 20, dtype=torch.int32).view(256, -1)
    store = save(engine, {("a",): value}, buffer_bytes=300_000, object_bytes=100_000)
    assert len(engine.bucket.keys()) > 40
    store.write([Write(("a",), (torch.arange(255, -1, -1),), value.flip(0))])
    store.close()
    assert torch.equal(contents(open_objects(MemoryEngine(engine.bucket)))[("a",)], value)


def test_small_leaves_share_objects_on_lines_of_their_own():
    engine = MemoryEngine()
    leaves = {(f"leaf{i}",): torch.arange(i + 1) for i in range(500)}
    store = save(engine, leaves)
    assert len(engine.bucket.keys()) == 1
    assert all(int(offset) % 64 == 0 for offset in store._view.table.pieces.rows[:, 1])
    fresh = MemoryEngine(engine.bucket)
    assert equal(contents(open_objects(fresh)), leaves)
    assert fresh.rounds == 2
