"""Killed writers, rivals, servers that restart or stand still: old, new, or an error that says so."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from redis import Redis
from redishelp import (
    NEW,
    OLD,
    Leaves,
    blocks,
    deaths,
    die,
    dump,
    everything,
    fill,
    header_of,
    in_child,
    killed_after,
    load,
    rows,
    same,
    save,
    span,
)
from tdstore_redis import connection
from tdstore_redis.store import open_redis

from tdstore.errors import (
    CorruptStoreError,
    DirtyStoreError,
    StoreBusyError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
    TransientError,
)
from tdstore.types import LeafSpec, Read, Write
from tests.servers import redis_server


def save_new(place: str) -> None:
    save(place, NEW)


def update_in_place(place: str) -> None:
    with open_redis(place, mode="r+") as store:
        order = torch.arange(100).flip(0)
        for path, value in NEW.items():
            for part in order.split(40):
                store.write([Write(path, (part,), value[part])])


def update_structure(place: str) -> None:
    with open_redis(place, mode="r+") as store:
        fill(store, {("made", "x"): torch.ones(50, 9), ("made", "y"): torch.arange(7)})
        store.resize({("n", "b"): 130})
        store.resize({("c",): 20})
        store.rename({("a",): ("moved", "a")})
        store.save_header(header_of({("made", "x"): torch.ones(1), ("moved", "a"): torch.ones(1)}))


def die_at(kill_at: int) -> None:
    """From now on count what is sent, and die before or after the `kill_at`-th time."""
    count = [0]
    send = connection.Wire.send

    def counted(self: Any, data: bytes) -> None:
        for when in (0, 1):
            count[0] += 1
            if count[0] == kill_at:
                die()
            if not when:
                send(self, data)

    connection.Wire.send = counted  # type: ignore[method-assign]


def outcome(place: str, new: Leaves) -> str:
    try:
        found = load(place, verify="full")
    except DirtyStoreError as error:
        assert error.leaves
        assert "recover='accept'" in str(error)
        with open_redis(place, recover="accept") as store:
            everything(store)
            assert store.verify() == []
        return "dirty"
    if same(found, OLD):
        return "old"
    assert same(found, new), f"neither old nor new: { {p: tuple(t.shape) for p, t in found.items()} }"
    return "new"


@pytest.mark.parametrize("work", [save_new, update_in_place, update_structure])
def test_kill_at_every_send(client: Redis, place: str, work: Callable[[str], None]) -> None:
    save(place, OLD)
    work(place)
    new = load(place)
    seen: dict[str, int] = {}
    kept: set[bytes] = set()

    def begin() -> None:
        save(place, OLD)
        kept.clear()
        kept.update(client.scan_iter())

    for died in deaths(begin, lambda: work(place), die_at):
        result = outcome(place, new)
        seen[result] = seen.get(result, 0) + 1
        assert died or result == "new"
        if result == "old":
            # What the dead writer left goes when the next one comes.
            open_redis(place, mode="w").close()
            assert set(client.scan_iter()) == kept
    assert seen["old"] > 1
    assert seen["new"] >= 1
    assert set(seen) == ({"old", "new", "dirty"} if work is update_in_place else {"old", "new"})
    save(place, OLD)
    assert len(blocks(client)) == 3


def test_kill_at_random_moments(client: Redis, place: str) -> None:
    big: Leaves = {("x",): torch.arange(1_000_000.0), ("y",): torch.arange(300_000)}
    new: Leaves = {p: t * 2 for p, t in big.items()}
    chance = random.Random(0)
    save(place, big)

    def saving() -> None:
        while True:
            save(place, new)

    for _ in range(12):
        assert killed_after(saving, chance.uniform(0.005, 0.15)) == -signal.SIGKILL
        found = load(place, verify="full")
        assert same(found, big) or same(found, new)
    save(place, big)
    assert len(blocks(client)) == 4 + 3


def test_a_writer_that_died_is_told_and_forgiven(client: Redis, place: str) -> None:
    save(place, OLD)

    def work() -> None:
        store = open_redis(place, mode="r+")
        store.write([Write(("a",), span(0, 1), torch.full((1, 40), -1.0))])
        die()

    assert in_child(work) == -signal.SIGKILL
    before = dump(client)
    for mode in ("r", "r+"):
        with pytest.raises(DirtyStoreError) as caught:
            open_redis(place, mode=mode)  # type: ignore[arg-type]
        assert caught.value.leaves == (("a",),)
        assert "pid " in str(caught.value)
    with open_redis(place, recover="accept") as store:
        assert store.read([Read(("a",))])[0][0, 0] == -1
    assert dump(client) == before
    open_redis(place, mode="r+", recover="accept").close()
    assert load(place, verify="full")[("a",)][0, 0] == -1


def test_a_writer_at_work_is_no_dead_one(place: str) -> None:
    save(place, OLD)
    with open_redis(place, mode="r+") as writer:
        writer.write([Write(("n", "b"), rows(5), torch.tensor([77]))])
        assert load(place)["n", "b"][5] == 77
        with open_redis(place, mode="r+") as other:
            other.write([Write(("n", "b"), rows(6), torch.tensor([88]))])
    assert load(place)["n", "b"][5:7].tolist() == [77, 88]


# -- rivals -------------------------------------------------------------------------------


def test_of_two_savers_one_is_told(client: Redis, place: str) -> None:
    save(place, OLD)
    first, second = open_redis(place, mode="w"), open_redis(place, mode="w")
    for store, leaves in ((first, NEW), (second, OLD)):
        fill(store, leaves)
    first.save_header(header_of(NEW))
    with pytest.raises(StoreBusyError, match="changed by another writer"):
        second.save_header(header_of(OLD))
    second.close()
    first.close()
    assert same(load(place), NEW)
    assert len(blocks(client)) == 3


def test_of_two_makers_one_is_told(place: str) -> None:
    first, second = open_redis(place, mode="x"), open_redis(place, mode="x")
    for store in (first, second):
        fill(store, OLD)
    second.save_header(header_of(OLD))
    with pytest.raises(StoreExistsError):
        first.save_header(header_of(OLD))
    first.close()
    second.close()
    assert same(load(place), OLD)


def test_a_saver_waits_for_who_writes_in_place(place: str) -> None:
    save(place, OLD)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            store = open_redis(place, mode="r+")
            store.write([Write(("n", "b"), rows(5), torch.tensor([77]))])
            os.write(write, b"!")
            time.sleep(60)
        finally:
            os._exit(0)
    assert os.read(read, 1) == b"!"
    store = open_redis(place, mode="w", lock_timeout=0.2)
    fill(store, NEW)
    with pytest.raises(StoreBusyError, match=f"pid {pid}"):
        store.save_header(header_of(NEW))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    store.save_header(header_of(NEW))  # nobody is in its way any more
    store.close()
    assert same(load(place), NEW)


def test_who_writes_what_was_replaced_is_told(place: str) -> None:
    save(place, OLD)
    store, reader = open_redis(place, mode="r+"), open_redis(place)
    assert same(everything(reader), OLD)
    save(place, NEW)
    for what in (
        lambda: store.write([Write(("n", "b"), rows(5), torch.tensor([77]))]),
        lambda: store.create({("z",): LeafSpec((2,), "int8")}),
        lambda: reader.read([Read(("a",))]),
    ):
        with pytest.raises(StoreError, match="replaced") as caught:
            what()
        assert not isinstance(caught.value, CorruptStoreError)
    store.close()
    reader.close()
    assert same(load(place), NEW)


def test_of_two_who_change_the_structure_one_is_told(place: str) -> None:
    save(place, OLD)
    first, second = (open_redis(place, mode="r+", lock_timeout=0.1) for _ in range(2))
    first.create({("one",): LeafSpec((2,), "int8")})
    with pytest.raises(StoreBusyError, match="open for writing in"):
        second.create({("two",): LeafSpec((2,), "int8")})
    leaves = {**OLD, ("one",): torch.zeros(2, dtype=torch.int8)}
    first.save_header(header_of(leaves))
    second.write([Write(("n", "b"), rows(5), torch.tensor([77]))])  # rows go on
    with pytest.raises(StoreBusyError, match="changed by another writer"):
        second.save_header(header_of({**OLD, ("two",): torch.zeros(1)}))
    second.close()
    first.close()
    found = load(place)
    assert set(found) == set(leaves)
    assert found["n", "b"][5] == 77


def test_threads_with_stores_of_their_own_lose_nothing(place: str) -> None:
    """Forty rows of one cell each, so that all of them are in each other's way."""
    with open_redis(place, mode="w") as store:
        store.create({("small",): LeafSpec((160,), "int16"), ("wide",): LeafSpec((160, 500), "uint8")})
        store.save_header(header_of({("small",): torch.zeros(1), ("wide",): torch.zeros(1)}))
    stores = [open_redis(place, mode="r+") for _ in range(4)]

    def work(i: int) -> None:
        for row in range(i, 160, 4):
            wide = torch.full((1, 500), row, dtype=torch.uint8)
            stores[i].write(
                [
                    Write(("small",), rows(row), torch.tensor([row], dtype=torch.int16)),
                    Write(("wide",), rows(row), wide),
                ]
            )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    found = load(place, verify="full")
    assert found[("small",)].tolist() == list(range(160))
    assert found[("wide",)][:, 499].tolist() == list(range(160))


# -- the server ---------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [False, True])
def test_a_restarted_server_is_no_success(keeps: bool) -> None:
    """In the middle of a save, and of an update; with a server that forgets, and with one that does not."""
    with redis_server(**({"appendonly": "yes", "appendfsync": "always"} if keeps else {})) as server:
        place = f"{server.url}/run"
        save(place, OLD)
        store = open_redis(place, mode="r+")
        store.write([Write(("n", "b"), rows(5), torch.tensor([77]))])
        saver = open_redis(f"{server.url}/other", mode="w")
        fill(saver, OLD)
        server.restart()
        for what in (
            lambda: store.write([Write(("n", "b"), rows(6), torch.tensor([88]))]),
            store.close,
            lambda: saver.write([Write(("n", "b"), rows(6), torch.tensor([88]))]),
            lambda: saver.save_header(header_of(OLD)),
        ):
            if what == store.close:
                what()
                continue
            with pytest.raises(StoreError, match="restarted|nothing more can be written|lost"):
                what()
        saver.close()
        with pytest.raises(StoreNotFoundError):
            open_redis(f"{server.url}/other")
        if keeps:
            with pytest.raises(DirtyStoreError):
                open_redis(place)
        else:
            with pytest.raises(StoreNotFoundError):
                open_redis(place)


def test_reads_survive_a_restart() -> None:
    with redis_server(appendonly="yes", appendfsync="always") as server:
        place = f"{server.url}/run"
        save(place, OLD)
        with open_redis(place, timeout=100) as store:
            assert same(everything(store), OLD)
            server.restart()
            assert same(everything(store), OLD)
            server.kill()
            start = time.monotonic()
            with pytest.raises(TransientError, match="connection refused"):
                everything(store)
            assert time.monotonic() - start < 50


def test_a_server_that_stands_still_ends_in_a_timeout() -> None:
    with redis_server() as server:
        place = f"{server.url}/run"
        save(place, OLD)
        reader = open_redis(place, timeout=1.0)
        store = open_redis(place, mode="r+", timeout=1.0)
        saver = open_redis(place, mode="w", timeout=1.0)
        fill(saver, NEW)
        store.write([Write(("n", "b"), rows(4), torch.tensor([66]))])
        server.pause()
        start = time.monotonic()
        with pytest.raises(TransientError, match="no answer"):
            everything(reader)
        with pytest.raises(TransientError, match="no answer"):
            store.write([Write(("a",), span(0, 3), torch.zeros(3, 40))])  # whole cells: sent at once
        with pytest.raises(TransientError, match="no answer"):
            saver.save_header(header_of(NEW))
        with pytest.raises(TransientError, match="no answer"):
            open_redis(place, timeout=1.0)
        assert time.monotonic() - start < 4 * 5  # the default is 5 s for each
        server.resume()
        with pytest.raises(StoreError, match="nothing more can be written"):
            store.write([Write(("n", "b"), rows(6), torch.tensor([88]))])
        assert torch.equal(everything(reader)[("c",)], OLD[("c",)])
        store.close()
        saver.close()
        # Whether the last write arrived is not known; that it was not committed is.
        with pytest.raises(DirtyStoreError) as caught:
            open_redis(place)
        assert ("n", "b") in caught.value.leaves
        with open_redis(place, recover="accept") as again:
            assert again.read([Read(("n", "b"), rows(4))])[0].item() == 66
            assert again.read([Read(("n", "b"), rows(6))])[0].item() == 6
        save(place, NEW)
        with Redis(port=server.port) as client:
            assert len(blocks(client)) == 3


def test_a_connection_that_idled_out_is_made_anew(client: Redis, place: str) -> None:
    save(place, OLD)
    with open_redis(place, mode="r+") as store:
        store.write([Write(("n", "b"), rows(5), torch.tensor([77]))])
        client.client_kill_filter(_type="normal", skipme=True)
        time.sleep(0.05)
        store.write([Write(("n", "b"), rows(6), torch.tensor([88]))])
        assert store.read([Read(("n", "b"), rows(6))])[0].item() == 88
        assert load(place)["n", "b"][5] == 77  # the writer that came back is alive
    assert load(place)["n", "b"][5:7].tolist() == [77, 88]


def test_a_session_that_the_server_forgot_is_told(client: Redis, place: str) -> None:
    save(place, OLD)
    store = open_redis(place, mode="r+")
    store.write([Write(("n", "b"), rows(5), torch.tensor([77]))])
    saved = {key: client.dump(key) for key in client.scan_iter() if not key.endswith(b":writers")}
    client.flushall()
    for key, value in saved.items():
        client.restore(key, 0, value)
    with pytest.raises(StoreError, match="forgot"):
        for i in range(2):
            store.write([Write(("n", "b"), rows(6), torch.tensor([88 + i]))])
    store.close()


def test_a_full_server_keeps_what_was() -> None:
    with redis_server(maxmemory="6mb", maxmemory_policy="noeviction") as server:
        place = f"{server.url}/run"
        save(place, OLD)
        with open_redis(place, mode="w") as store:
            store.create({("big",): LeafSpec((16 << 20,), "uint8")})
            with pytest.raises(StoreError, match="out of memory") as caught:
                for at in range(0, 16 << 20, 1 << 20):
                    store.write([Write(("big",), span(at, at + (1 << 20)), torch.ones(1 << 20, dtype=torch.uint8))])
            assert caught.value.errno == 28  # type: ignore[attr-defined]
        assert same(load(place), OLD)
        with Redis(port=server.port) as client:
            assert len(blocks(client)) == 3


def test_rows_that_a_full_server_refuses_are_not_there() -> None:
    """A write of many MiB finds no room in its middle: it is one transaction, and none of it is there."""
    with redis_server(maxmemory="40mb", maxmemory_policy="noeviction") as server:
        place = f"{server.url}/run"
        big: Leaves = {("big",): torch.zeros(24, 1 << 20, dtype=torch.uint8), ("small",): torch.arange(24)}
        save(place, big)
        with open_redis(place, mode="r+") as store:
            store.write([Write(("small",), span(0, 2), torch.tensor([7, 8]))])
            with pytest.raises(StoreError, match="out of memory"):
                store.write(
                    [
                        Write(("small",), span(0, 24), -torch.ones(24).long()),
                        Write(("big",), span(0, 24), torch.ones(24, 1 << 20, dtype=torch.uint8)),
                    ]
                )
            big["small",][:2] = torch.tensor([7, 8])
            assert same(everything(store), big)
        assert same(load(place), big)
