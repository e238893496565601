"""Calls that write more than one transaction takes: all of it is there, or nothing, whatever the server does."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from redis import Redis
from redishelp import Leaves, deaths, die, dump, everything, header_of, load, same, save, span
from tdstore_redis.cells import plans
from tdstore_redis.connection import Wire
from tdstore_redis.store import open_redis
from tdstore_redis.transactions import row_writes
from tdstore_redis.transactions.writer import Writer

from tdstore.errors import StoreError, StoreIOError, TDStoreError
from tdstore.types import LeafSpec, Read, Write
from tests.servers import redis_server

LEAVES: Leaves = {
    ("wide",): torch.arange(900 * 70).view(900, 70),  # a cell for each row
    ("n", "small"): torch.arange(5000, dtype=torch.int16).view(1000, 5),  # many rows in a cell
    ("long",): torch.arange(3 * 9000).view(3, 9000),  # rows that are cut
    ("one",): torch.tensor(5.0),
}


@pytest.fixture(params=["staged", "copied"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every call is too large for one transaction; `copied`: also what is of blocks that are changed in part."""
    monkeypatch.setattr(row_writes, "STEP", 600)
    monkeypatch.setattr(row_writes, "GROUP", 150_000)
    monkeypatch.setattr(plans, "PIECE", 40_000)
    if request.param == "copied":
        monkeypatch.setattr(row_writes, "INLINE", 600)
    return str(request.param)


@pytest.fixture
def filled(place: str) -> str:
    save(place, LEAVES, block=6000)
    return place


def staged_keys(client: Redis) -> list[bytes]:
    """Keys of blocks under the numbers of staging, and notes of them."""
    numbers = [key for key in client.scan_iter(b"tds:*", count=1000) if b"{" not in key]
    return [k for k in numbers if int(k.split(b":")[2]) >= 1 << 61] + [*client.scan_iter(b"*:pending")]


def large(sign: int = -1) -> list[Write]:
    """Rows of every leaf: some blocks whole, others in part, and one leaf twice."""
    rows = torch.randperm(1000, generator=torch.Generator().manual_seed(3))[:901]
    return [
        Write(("wide",), span(3, 890), sign * LEAVES["wide",][3:890] + 1),
        Write(("n", "small"), (rows,), sign * LEAVES["n", "small"][rows] - 1),
        Write(("long",), span(0, 2), sign * LEAVES["long",][:2] - 1),
        Write(("long",), (slice(1, 3, 1), slice(5, 8900, 7)), sign * LEAVES["long",][1:3, 5:8900:7] - 2),
        Write(("one",), (), torch.tensor(float(sign))),
    ]


def after(leaves: Leaves, writes: list[Write]) -> Leaves:
    found = {path: value.clone() for path, value in leaves.items()}
    for w in writes:
        found[w.path][w.index] = w.value
    return found


def test_all_of_a_call(client: Redis, filled: str, way: str) -> None:
    before = len(dump(client))
    with open_redis(filled, mode="r+") as store:
        store.write(large())
        assert same(everything(store), after(LEAVES, large()))
        assert not staged_keys(client)
        with open_redis(filled) as reader:
            assert same(everything(reader), after(LEAVES, large()))
    assert len(dump(client)) == before
    assert same(load(filled, verify="full"), after(LEAVES, large()))


def random_index(shape: torch.Size, dice: random.Random) -> Any:
    terms: list[Any] = []
    for d, n in enumerate(shape[: dice.choice((1, 1, 2))]):
        start = dice.randrange(n)
        stop = dice.randint(start, n)
        if d == 0 and dice.random() < 0.5:
            count = dice.randint(0, 2 * n)
            terms.append(torch.tensor([dice.randrange(n) for _ in range(count)], dtype=torch.int64))
        elif d == 0 and dice.random() < 0.3:
            terms.append(torch.randperm(n))
        else:
            terms.append(slice(start, stop, dice.choice((1, 1, 1, 3))))
    return tuple(terms)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_any_rows_in_any_order(place: str, way: str, seed: int, sealed: bool) -> None:
    """Slices, steps, rows in any order and several times, parts of rows; leaves that were written, or only declared."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    leaves = {path: value for path, value in LEAVES.items() if value.dim()}
    if sealed:
        save(place, leaves, block=dice.choice((700, 6000, 50_000)))
    else:
        with open_redis(place, mode="w", block=6000) as store:
            store.create({path: LeafSpec(value.shape, value.dtype) for path, value in leaves.items()})
            store.save_header(header_of(leaves))
        leaves = {path: torch.zeros_like(value) for path, value in leaves.items()}
    for _ in range(3):
        with open_redis(place, mode="r+") as store:
            for _ in range(3):
                writes = []
                for _ in range(dice.randint(1, 5)):
                    path = dice.choice(list(leaves))
                    index = random_index(leaves[path].shape, dice)
                    value = torch.randint(-9999, 9999, leaves[path][index].shape).to(leaves[path].dtype)
                    writes.append(Write(path, index, value))
                store.write(writes)
                for w in writes:
                    target = leaves[w.path]
                    if w.index and isinstance(w.index[0], torch.Tensor):
                        for row, new in zip(w.index[0].tolist(), w.value, strict=True):  # the last wins
                            target[(row, *w.index[1:])] = new
                    else:
                        target[w.index] = w.value
                assert same(everything(store), leaves)
        assert same(load(place, verify="full"), leaves)


def test_two_writes_of_one_leaf_are_one_transaction(client: Redis, filled: str) -> None:
    """Also in a small call, whose second write gives a cell a part of which the first gave all."""
    writes = [
        Write(("n", "small"), span(0, 400), torch.full((400, 5), -1, dtype=torch.int16)),
        Write(("n", "small"), (slice(70, 300, 3), slice(1, 3, 1)), torch.full((77, 2), -2, dtype=torch.int16)),
        Write(("n", "small"), (torch.tensor([80, 3]),), torch.full((2, 5), -3, dtype=torch.int16)),
    ]
    with open_redis(filled, mode="r+") as store:
        before = client.info("commandstats")["cmdstat_exec"]["calls"]
        store.write(writes)
        assert client.info("commandstats")["cmdstat_exec"]["calls"] == before + 1
    assert same(load(filled, verify="full"), after(LEAVES, writes))


class Counter:
    """Calls of a function: before the `nth` from now something is done."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str, nth: int, do: Any) -> None:
        self.count, real = 0, getattr(owner, name)

        def counted(*args: Any) -> Any:
            self.count += 1
            if self.count == nth:
                do(*args)
            return real(*args)

        patch.setattr(owner, name, counted)


@pytest.fixture
def unlimited(client: Redis) -> Iterator[Redis]:
    yield client
    client.config_set("maxmemory", 0)


def test_a_server_that_runs_out_of_memory_at_any_step(unlimited: Redis, filled: str, way: str) -> None:
    """And stays so: nothing could be put back. A reader beside has the rows of before, and nothing is left over."""
    client = unlimited
    with open_redis(filled, mode="r+") as store, open_redis(filled) as reader:
        keys = len(dump(client))
        for nth in range(1, 200):
            with pytest.MonkeyPatch.context() as patch:
                counter = Counter(patch, Writer, "sending", nth, lambda *_: client.config_set("maxmemory", 1))
                if nth == 1:
                    with pytest.raises(StoreIOError, match="out of memory"):
                        store.write(large())
                else:
                    try:
                        store.write(large())
                    except StoreIOError as error:
                        assert "out of memory" in str(error)
            if counter.count < nth:
                break
            assert same(everything(store), LEAVES)
            assert same(everything(reader), LEAVES)
            assert not staged_keys(client)
            assert len(dump(client)) == keys
            client.config_set("maxmemory", 0)
        assert nth > 4
        assert same(everything(store), after(LEAVES, large()))
    assert same(load(filled, verify="full"), after(LEAVES, large()))


def test_rows_of_a_change_of_structure_are_put_back_in_one_transaction(unlimited: Redis, filled: str, way: str) -> None:
    """`discard()`: all rows, or, where the server refuses, none; then it can be tried again."""
    client = unlimited
    with open_redis(filled, mode="r+") as store:
        store.create({("new",): LeafSpec((3,), "bool")})
        store.write(large())
        store.write([Write(("wide",), span(0, 50), torch.zeros(50, 70, dtype=torch.int64))])
        with open_redis(filled) as reader:
            new = everything(reader)
            client.config_set("maxmemory", 1)
            with pytest.raises(StoreIOError):
                store.discard()
            assert same(everything(reader), new)
            client.config_set("maxmemory", 0)
            store.discard()
            assert same(everything(reader), LEAVES)
    assert same(load(filled, verify="full"), LEAVES)


def cut(wire: Wire, commands: Any) -> None:
    """Send half of it, and hang up."""
    parts = [part for command in commands for part in (command if isinstance(command, tuple) else (command,))]
    data = b"".join(bytes(part) for part in parts)
    wire._socket.sendall(data[: len(data) // 2])
    wire.close()


def test_a_connection_that_ends_at_any_step(client: Redis, filled: str, way: str) -> None:
    """What is opened then has the rows of before, and the next writer removes what was staged."""
    keys = len(dump(client))
    for nth in range(1, 200):
        store = open_redis(filled, mode="r+")
        with pytest.MonkeyPatch.context() as patch:
            counter = Counter(patch, Wire, "send", nth, cut)
            try:
                store.write(large())
            except TDStoreError:
                assert counter.count >= nth
            else:
                assert counter.count < nth or same(everything(store), after(LEAVES, large()))
        with open_redis(filled) as reader:
            found = everything(reader)
        assert same(found, LEAVES) or counter.count < nth
        if counter.count < nth:
            break
        store.close()
        open_redis(filled, mode="r+").close()
        assert not staged_keys(client)
        assert len(dump(client)) == keys
    assert nth > 4
    store.close()
    assert same(load(filled, verify="full"), after(LEAVES, large()))


def test_a_process_that_ends_at_any_step(client: Redis, place: str, way: str) -> None:
    """Before or after any of its messages: the rows of before, or all new ones; nothing stays behind."""
    seen = set()

    def begin() -> None:
        save(place, LEAVES, block=6000)

    def work() -> None:
        with open_redis(place, mode="r+") as store:
            store.write(large())

    def die_at(kill_at: int) -> None:
        count, send = [0], Wire.send

        def counted(self: Any, data: Any) -> None:
            for when in (0, 1):
                count[0] += 1
                if count[0] == kill_at:
                    die()
                if not when:
                    send(self, data)

        Wire.send = counted  # type: ignore[method-assign]

    for died in deaths(begin, work, die_at):
        found = load(place, recover="accept", verify="full")
        new = same(found, after(LEAVES, large()))
        assert new or same(found, LEAVES)
        assert new or died
        seen.add(new)
        open_redis(place, mode="r+", recover="accept").close()
        assert not staged_keys(client)
    assert seen == {True, False}


def test_writers_beside_one_another(filled: str, way: str) -> None:
    """Blocks that a large call changes in part are changed by others, too: no row is lost."""
    rounds, failed = 25, []

    def one(leaf: str, rows: slice, store: Any) -> None:
        try:
            for k in range(rounds):
                shape = (rows.stop - rows.start, *LEAVES[leaf,].shape[1:])
                store.write([Write((leaf,), (rows,), torch.full(shape, k))])
        except BaseException as error:
            failed.append(error)

    stores = [open_redis(filled, mode="r+", lock_timeout=60) for _ in range(3)]
    parts = [slice(0, 5, 1), slice(5, 880, 1), slice(880, 900, 1)]
    threads = [threading.Thread(target=one, args=("wide", *pair)) for pair in zip(parts, stores, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for store in stores:
        store.close()
    assert same(load(filled, verify="full"), {**LEAVES, ("wide",): torch.full((900, 70), rounds - 1)})


def test_rows_that_somebody_appends_are_kept(place: str) -> None:
    """A writer of the old length gives the last block all of the cells that it knows of."""
    save(place, {("a",): torch.arange(95 * 70).view(95, 70)}, block=6000)  # blocks of ten rows
    with open_redis(place, mode="r+") as other, open_redis(place, mode="r+") as grower:
        grower.resize({("a",): 98})
        grower.write([Write(("a",), span(95, 98), torch.full((3, 70), 7))])
        other.write([Write(("a",), (), torch.zeros(95, 70, dtype=torch.int64))])
        other.close()
        assert load(place, verify="full")["a",].eq(0).all()  # a reader beside finds no fault
        grower.save_header(header_of({("a",): torch.ones(1)}))
    found = load(place, verify="full")["a",]
    assert found[:95].eq(0).all() and found[95:].eq(7).all()


def test_staged_rows_that_the_server_loses(client: Redis, filled: str, way: str) -> None:
    """A server that evicts keys: the call is refused, not done by half."""
    store = open_redis(filled, mode="r+")
    prepare = row_writes._Staging.prepare

    def lose(self: Any, wire: Wire) -> None:
        client.delete(next(key for key in staged_keys(client) if not key.endswith(b"pending")))
        prepare(self, wire)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_writes._Staging, "prepare", lose)
        with pytest.raises(StoreError, match="evict"):
            store.write(large())
    assert same(load(filled), LEAVES)
    store.close()
    open_redis(filled, mode="r+").close()
    assert not staged_keys(client)
    assert same(load(filled, verify="full"), LEAVES)


def test_70_mib_that_a_server_has_no_room_for() -> None:
    """The real bound and a real limit: the server takes a part of it, then refuses all that would need memory."""
    rows = 70
    with redis_server(maxmemory="120mb") as server:
        place = f"{server.url}/large"
        old = torch.full((rows, 1 << 20), 3, dtype=torch.uint8)
        save(place, {("a",): old, ("b",): torch.arange(rows)})
        with Redis(port=server.port) as client, open_redis(place, mode="r+") as store:
            keys = set(client.scan_iter())
            writes = [Write(("b",), (), torch.zeros(rows).long()), Write(("a",), (), torch.zeros_like(old))]
            with pytest.raises(StoreIOError, match="out of memory"):
                store.write(writes)
            assert set(client.scan_iter()) == keys
            a, b = store.read([Read(("a",)), Read(("b",))])
            assert torch.equal(a, old) and torch.equal(b, torch.arange(rows))
            client.config_set("maxmemory", 0)
            store.write(writes)
        found = load(place, verify="full")
        assert not found["a",].any() and not found["b",].any()
