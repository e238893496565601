"""What the kit does not ask: locations, passwords, round trips, layouts, large leaves, forks, containers."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis
from redishelp import Leaves, blocks, dump, everything, fill, header_of, in_child, load, rows, same, save, span
from tdstore_redis import connection
from tdstore_redis.address import parse
from tdstore_redis.cells.layout import new_array
from tdstore_redis.store import open_redis
from tdstore_redis.transactions.keyspace import Keys

import tdstore
from tdstore.dtypes import NAME_TO_DTYPE
from tdstore.errors import OptionError, StoreBusyError, StoreNotFoundError
from tdstore.testing.samples import assign, pick, sample, store_indices
from tdstore.types import LeafSpec, Read, Write
from tests.servers import redis_server

LEAVES: Leaves = {("a",): torch.arange(4000.0).view(100, 40), ("n", "b"): torch.arange(100)}


# -- locations ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://h/0/run", ("h", 6379, 0, "run")),
        ("redis://h:7000/3/runs/of mine/1", ("h", 7000, 3, "runs/of mine/1")),
        ("rediss://u:p%40ss@h:1/0/x?y#z", ("h", 1, 0, "x?y#z")),
        ("redis://[::1]:7/0/x", ("::1", 7, 0, "x")),
        ("dragonfly://h/1/x", ("h", 6379, 1, "x")),
        ("valkey://:p:q@h/1/x", ("h", 6379, 1, "x")),
        ("only a name", ("localhost", 6379, 0, "only a name")),
        ("redis+unix:///run/redis.sock?db=2&name=a/b", ("localhost", 6379, 2, "a/b")),
    ],
)
def test_locations(text: str, expected: tuple[Any, ...]) -> None:
    found = parse(text, {}, new=False)
    assert (found.host, found.port, found.db, found.name) == expected
    assert found.password in (None, "p@ss", "p:q")
    assert "p@ss" not in repr(found) + found.url
    assert "p%40" not in repr(found) + found.url
    assert "p:q" not in repr(found) + found.url
    if "@" not in text and "://" in text:
        assert found.url == text


def test_options_go_over_the_location(client: Redis, redis: Any, place: str) -> None:
    save(place, LEAVES)
    name = place.partition("/0/")[2]
    for location, options in (
        (name, {"host": "127.0.0.1", "port": redis.port, "db": 0}),
        (f"redis://elsewhere/7/{name}", {"host": "127.0.0.1", "port": redis.port, "db": 0}),
    ):
        assert same(load(location, **options), LEAVES)
    with open_redis(None, mode="w", host="127.0.0.1", port=redis.port) as store:
        fill(store, LEAVES)
        store.save_header(header_of(LEAVES))
        assert "tensordict:" in store.url


def test_a_place_where_nothing_is_needs_no_second_look(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`StoreNotFoundError` is an `OSError`, and no lost connection: nothing is waited for."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(StoreNotFoundError):
        open_redis(place)
    assert not pauses


@pytest.mark.parametrize(
    "text", ["redis://h/run", "redis://h/0/", "redis://h", "redis://h:x/0/r", "redis://h:99999/0/r", "http://h/0/r"]
    + ["redis://:secret/x@h/0/r", "redis+unix://x?name=r", "redis+unix:///x?nome=r", "redis+unix:///x", ""]
)  # fmt: skip
def test_locations_that_are_none(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        open_redis(text)
    assert caught.value.hint
    assert "secret" not in str(caught.value)


def test_a_unix_socket(place: str, tmp_path: Any) -> None:
    with redis_server(unixsocket=str(tmp_path / "r.sock")):
        where = f"redis+unix://{tmp_path}/r.sock?db=0&name=x/y"
        save(where, LEAVES)
        assert same(load(where), LEAVES)
        assert same(load("x/y", unix_socket_path=str(tmp_path / "r.sock")), LEAVES)


@settings(max_examples=60)
@given(st.lists(st.text(), min_size=2, max_size=2, unique=True))
def test_names_do_not_meet(names: list[str]) -> None:
    try:
        keys = [Keys(name) for name in names]
    except UnicodeEncodeError:
        return  # lone surrogates are refused when a location is read
    assert len({key for k in keys for key in (k.head, k.writers, k.pending)}) == 6


# -- values -------------------------------------------------------------------------------


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_index_of_any_layout(place: str, data: st.DataObject) -> None:
    """Cells with several rows, one row, and parts of rows; against numpy."""
    shape = data.draw(st.sampled_from([(50, 3), (9, 200), (4, 40, 30), (3, 70, 500), (300,), (2, 0, 3)]))
    dtype = NAME_TO_DTYPE[data.draw(st.sampled_from(["uint8", "float64", "bfloat16"]))]
    value = sample(dtype, shape)
    with open_redis(place, mode="w", block=data.draw(st.sampled_from([64, 5000, 1 << 20]))) as store:
        store.create({("a",): LeafSpec(shape, dtype)})
        if data.draw(st.booleans()):
            store.save_header(header_of({("a",): value}))
        store.write([Write(("a",), (), value)])
        for seed in range(3):
            index = data.draw(store_indices(shape))
            new = sample(dtype, tuple(pick(value, index).shape), seed)
            store.write([Write(("a",), index, new)])
            value = assign(value, index, new)
            index = data.draw(store_indices(shape))
            got = store.read([Read(("a",), index), Read(("a",))])
            assert same({("x",): got[0], ("y",): got[1]}, {("x",): pick(value, index), ("y",): value})
        store.save_header(header_of({("a",): value}))
    assert same(load(place, verify="full"), {("a",): value})


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.lists(st.text(max_size=5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6, unique=True))
def test_any_path(place: str, paths: list[Any]) -> None:
    leaves = {path: torch.full((2,), i) for i, path in enumerate(paths)}
    with open_redis(place, mode="w") as store:
        fill(store, leaves)
        store.save_header(header_of({}))
    assert same(load(place), leaves)


def test_growing_in_place_and_what_a_dead_writer_left_beyond(client: Redis, place: str) -> None:
    save(place, {("a",): torch.arange(10)})

    def work() -> None:
        store = open_redis(place, mode="r+")
        store.resize({("a",): 300})
        store.write([Write(("a",), span(5, 300), torch.full((295,), 9))])

    in_child(work)
    with open_redis(place, mode="r+", recover="accept") as store:
        store.resize({("a",): 300})
        want = torch.cat([torch.arange(5), torch.full((5,), 9), torch.zeros(290, dtype=torch.int64)])
        assert torch.equal(store.read([Read(("a",))])[0], want), "rows of a writer that died came back"
        store.write([Write(("a",), span(5, 10), torch.arange(5, 10))])
        keys = len(blocks(client))
        for length in range(301, 600, 50):
            store.resize({("a",): length})
            store.write([Write(("a",), span(length - 1, length), torch.tensor([length]))])
            store.save_header(header_of({("a",): torch.zeros(1)}))
        assert len(blocks(client)) <= keys + 1
    found = load(place, verify="full")[("a",)]
    assert found[:10].tolist() == list(range(10))
    assert found[[300, 350, 400]].tolist() == [301, 351, 401]
    assert int((found != 0).sum()) == 9 + 6


def test_a_filled_leaf_needs_no_bitmap_any_more(client: Redis, place: str) -> None:
    with open_redis(place, mode="w") as store:
        store.create({("a",): LeafSpec((1000, 300), "uint8")})
        store.save_header(header_of({("a",): torch.zeros(1)}))
        store.write([Write(("a",), span(0, 500), torch.ones(500, 300, dtype=torch.uint8))])
        store.save_header(header_of({("a",): torch.zeros(1)}))
        assert any(key.endswith(b"w") for key in blocks(client))
        with open_redis(place) as early:
            store.write([Write(("a",), span(500, 1000), torch.ones(500, 300, dtype=torch.uint8))])
            store.save_header(header_of({("a",): torch.zeros(1)}))
            assert not any(key.endswith(b"w") for key in blocks(client))
            assert int(early.read([Read(("a",))])[0].sum()) == 300_000
    with open_redis(place) as store:
        assert store.verify() == []
        assert store.nbytes_stored() == 1000 * 304


# -- round trips, memory, size --------------------------------------------------------------


def test_round_trips(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch over all leaves is one; opening is four; a write of whole cells one."""
    leaves: Leaves = {(f"k{i}",): torch.arange(512 * 64.0).view(512, 64) + i for i in range(24)}
    save(place, leaves)
    sent: list[int] = []
    send = connection.Wire.send
    monkeypatch.setattr(connection.Wire, "send", lambda self, data: (sent.append(len(data)), send(self, data))[1])

    def cost(what: Any) -> int:
        sent.clear()
        what()
        return len(sent)

    store = open_redis(place, mode="r+")
    assert cost(lambda: open_redis(place).close()) <= 5
    picked = rows(5, 3, 500, 3, 77)
    assert cost(lambda: store.read([Read(p, picked) for p in leaves])) == 1
    assert cost(lambda: store.read([Read(p, span(100, 356)) for p in leaves])) == 1
    assert cost(lambda: store.read([Read(p, (slice(0, 512, 3), slice(2, 9, 2))) for p in leaves])) == 1
    block = torch.zeros(256, 64)
    store.write([Write(p, span(0, 256), block) for p in leaves])
    assert cost(lambda: store.write([Write(p, span(100, 356), block) for p in leaves])) == 1
    assert cost(lambda: store.write([Write(p, picked, torch.arange(320.0).view(5, 64)) for p in leaves])) <= 3
    assert store.read([Read(("k3",), rows(5, 3))])[0][:, 0].tolist() == [0, 192]
    store.close()


def test_a_leaf_beyond_512_mb_and_little_memory(place: str) -> None:
    """The limit of one value on the server; written and read in parts."""
    with open_redis(place, mode="w") as store:
        store.create({("big",): LeafSpec((600, 1 << 20), "uint8")})
        store.save_header(header_of({("big",): torch.zeros(1)}))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        part = torch.arange(2 << 20).view(2, 1 << 20).to(torch.uint8)
        for at in (0, 513, 598):
            store.write([Write(("big",), span(at, at + 2), part)])
        (got,) = store.read([Read(("big",), rows(599, 514, 300))])
        assert torch.equal(got, torch.stack([part[1], part[1], torch.zeros(1 << 20, dtype=torch.uint8)]))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 << 10
    with open_redis(place) as store:
        assert store.specs([("big",)])[0].shape == (600, 1 << 20)
        assert torch.equal(store.read([Read(("big",), span(513, 515))])[0], part)


def test_rows_and_their_keys() -> None:
    """Few keys however many rows; a row that fits a cell is never cut."""
    for row, cell in ((4, 512), (300, 300), (7056, 7056), (100, 500), (1 << 20, 64 << 10)):
        array = new_array(LeafSpec((10_000_000, row), "uint8"), 1, "0" * 16)
        assert array.cell == cell
        assert array.blocks < array.spec.nbytes / 900_000 + 2
        assert (array.rows_per_cell > 0) == (row <= 64 << 10)


# -- processes ----------------------------------------------------------------------------


def test_a_fork_has_connections_of_its_own(place: str) -> None:
    save(place, LEAVES)
    with open_redis(place, mode="r+") as store:
        store.write([Write(("n", "b"), rows(0), torch.tensor([-1]))])

        def work() -> None:
            for i in range(20):
                assert store.read([Read(("a",))])[0][3, 0] == 120
                store.write([Write(("n", "b"), rows(50 + i), torch.tensor([-2]))])
            store.close()

        pids = []
        for _ in range(2):
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    work()
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        for i in range(20):
            store.write([Write(("n", "b"), rows(20 + i), torch.tensor([-3]))])
            assert store.read([Read(("a",))])[0][3, 0] == 120
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    found = load(place)["n", "b"]
    assert found[[0, 20, 39, 50, 69]].tolist() == [-1, -3, -3, -2, -2]


def test_a_fork_leaves_the_parents_new_dataset_alone(client: Redis, place: str) -> None:
    store = open_redis(place, mode="w")
    fill(store, LEAVES)

    def work() -> None:
        with pytest.raises(StoreBusyError, match="forked"):
            store.write([Write(("n", "b"), rows(0), torch.tensor([-1]))])
        with pytest.raises(StoreBusyError):
            store.save_header(header_of(LEAVES))
        store.close()

    assert in_child(work) == 0
    store.save_header(header_of(LEAVES))
    store.close()
    assert same(load(place, verify="full"), LEAVES)


def test_reopening_by_token(place: str) -> None:
    with open_redis(place, mode="w") as store:
        with pytest.raises(StoreNotFoundError, match="not saved yet"):
            store.reopen_token()
        fill(store, LEAVES)
        store.save_header(header_of(LEAVES))
        token = pickle.loads(pickle.dumps(store.reopen_token()))
        assert token[1] == "r+"
        with open_redis(token[0], mode=token[1], **token[2]) as again:
            assert same(everything(again), LEAVES)


def test_the_container(client: Redis, redis: Any, place: str) -> None:
    td = tdstore.TensorDict({"obs": torch.arange(600.0).view(20, 30), "n": {"x": torch.arange(20)}, "s": "text"}, [20])
    td.save(place).close()
    with tdstore.open(place, mode="r+") as stored:
        assert stored.batch_size == (20,)
        assert stored["s"] == "text"
        batch = stored[[3, 1, 3]].to_tensordict()
        assert torch.equal(batch["obs"], td["obs"][[3, 1, 3]])
        stored[2:5] = td[12:15]
        stored["n", "new"] = torch.ones(20, 2)
        stored.rename_key_("obs", "seen")
        stored["seen"].sum()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(_rows_of, [(stored, i) for i in range(4)]) == [float(i) for i in (0, 1, 12, 13)]
    with tdstore.open(place) as stored:
        assert torch.equal(stored["n", "x"][2:5], torch.arange(12, 15))
        assert torch.equal(stored["seen"][2], td["obs"][12])
        assert stored["n", "new"].shape == (20, 2)
    made = tdstore.TensorDict.from_schema(
        {"o": ((3,), "float32")},
        batch_size=[1000],
        storage="redis",
        location="schema",
        host="127.0.0.1",
        port=redis.port,
    )
    made[5:7] = tdstore.TensorDict({"o": torch.ones(2, 3)}, [2])
    assert float(made["o"].sum()) == 6
    made.close()
    before = dump(client)
    tdstore.open(place).close()
    assert dump(client) == before


def _rows_of(job: Any) -> float:
    td, i = job
    return float(td[i]["n", "x"])


def test_saving_over_its_own_source(place: str) -> None:
    td = tdstore.TensorDict({"a": torch.arange(1000), "b": torch.rand(1000, 7)}, [1000])
    td.save(place).close()
    with tdstore.open(place) as source:
        source[10:500].save(place).close()
    with tdstore.open(place) as found:
        assert torch.equal(found["a"], td["a"][10:500])
        assert torch.equal(found["b"], td["b"][10:500])


def test_readers_during_saves_see_one_generation(place: str) -> None:
    save(place, {("a",): torch.zeros(5000), ("b",): torch.zeros(5000)})
    pid = os.fork()
    if not pid:
        try:
            i = 0
            while True:
                i += 1
                save(place, {("a",): torch.full((5000,), float(i)), ("b",): torch.full((5000,), float(i))})
        finally:
            os._exit(1)
    seen, told = set(), 0
    begun = time.monotonic()
    try:
        while (len(seen) <= 3 or time.monotonic() - begun < 1.5) and time.monotonic() - begun < 60:
            try:
                found = load(place)
            except tdstore.errors.CorruptStoreError as error:
                raise AssertionError(str(error)) from error
            except tdstore.errors.StoreError:
                told += 1  # replaced between opening and reading
                continue
            both = torch.cat([found[("a",)], found[("b",)]])
            assert float(both.min()) == float(both.max()), "torn"
            seen.add(float(both[0]))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert len(seen) > 3


def test_many_scattered_rows_in_one_transaction(place: str) -> None:
    """Small rows share cells, and the changes of one transaction share some of these."""
    chance = torch.Generator().manual_seed(3)
    want: Leaves = {("a",): torch.arange(60_000), ("b",): torch.arange(60_000.0).view(20_000, 3)}
    save(place, want)
    with open_redis(place, mode="r+") as store:
        for path, value in want.items():
            for count in (9000, 19_999):
                index = torch.randperm(len(value), generator=chance)[:count]
                new = torch.randint(0, 10**6, (count, *value.shape[1:]), generator=chance).to(value.dtype)
                again = torch.randint(0, 10**6, (50, *value.shape[1:]), generator=chance).to(value.dtype)
                store.write([Write(path, (index,), new), Write(path, (index[:50],), again)])
                value[index] = new
                value[index[:50]] = again
                assert torch.equal(store.read([Read(path)])[0], value)
    assert same(load(place, verify="full"), want)
