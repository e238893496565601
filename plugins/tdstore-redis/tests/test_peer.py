"""Datasets that the released `tensordict` package wrote, opened here."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from redis import Redis
from redishelp import dump, everything, load, rows, same, save, span
from tdstore_redis.store import open_redis

import tdstore
from tdstore.errors import (
    CorruptStoreError,
    ReadOnlyError,
    StoreError,
    StoreNotFoundError,
    UnsupportedError,
    UntrustedDataError,
)
from tdstore.testing.samples import INDICES, pick
from tdstore.types import Read
from tdstore.values import decode_value
from tests.peer import SINCE_15

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tensordict
    from tensordict import (
        LazyStackedTensorDictStore,
        NonTensorData,
        NonTensorStack,
        TensorDict,
        TensorDictStore,
        lazy_stack,
    )

LEAVES = {
    ("f",): torch.randn(6, 4, 3),
    ("half",): torch.randn(6).half(),
    ("n", "flag"): torch.tensor([True, False, True, True, False, False]),
    ("n", "z"): torch.randn(6, 2, dtype=torch.complex64),
    ("n", "deep", "u"): torch.arange(6, dtype=torch.uint8),
    ("empty",): torch.zeros(6, 0),
}


@pytest.fixture
def peer(client: Redis, redis: Any) -> Any:
    def write(prefix: str = "their run", **values: Any) -> Any:
        td = TensorDict({}, [6])
        for path, value in LEAVES.items():
            td.set(path, value)
        for key, value in values.items():
            td.set(key, value if isinstance(value, NonTensorStack) else NonTensorData(value, batch_size=[6]))
        return TensorDictStore.from_tensordict(td, host="127.0.0.1", port=redis.port, prefix=prefix)

    return write


@pytest.fixture
def theirs(redis: Any) -> str:
    return f"{redis.url}/their run"


def test_we_read_the_peers(client: Redis, peer: Any, theirs: str) -> None:
    store = peer(s="grüße", k=3, none=None, nested={"x": [1, 2]}, stack=NonTensorStack(*"abcdef"))
    before = dump(client)
    ident = store._td_id
    for where in (theirs, f"{theirs}/{ident}", f"{theirs}:{{{ident}}}", theirs.replace("their run", ident)):
        assert same(load(where), LEAVES)
    with open_redis(theirs) as ours:
        for index in INDICES.values():
            (got,) = ours.read([Read(("f",), index)])
            assert same({(): got}, {(): pick(LEAVES[("f",)], index)})
        header = ours.load_header()
        records = dict(header.groups[()].values)
        stack = records.pop("stack")  # before 0.15 there is no telling rows of values from a list
        assert stack == ({"stack": list("abcdef"), "dim": 0} if SINCE_15 else {"data": list("abcdef")})
        values = {key: decode_value(v["data"]) for key, v in records.items()}
        assert values == {"s": "grüße", "k": 3, "none": None, "nested": {"x": [1, 2]}}
    td = tdstore.open(theirs)
    assert td.batch_size == (6,)
    assert td["s"] == "grüße"
    assert torch.equal(td[[5, 1]]["n", "z"], LEAVES["n", "z"][[5, 1]])
    td.close()
    assert dump(client) == before


def test_it_is_for_reading(client: Redis, peer: Any, theirs: str) -> None:
    peer()
    before = dump(client)
    with open_redis(theirs) as store:
        for change in (lambda: store.delete([("f",)]), lambda: store.create({}), lambda: store.write([])):
            with pytest.raises(ReadOnlyError):
                change()
    for mode in ("r+", "a"):
        with pytest.raises(ReadOnlyError, match="tensordict package"):
            open_redis(theirs, mode=mode)  # type: ignore[arg-type]
    assert dump(client) == before
    save(theirs, {("new",): torch.ones(2)})  # beside it, under keys of our own
    assert set(before) < set(dump(client))
    assert list(load(theirs)) == [("new",)]


def test_what_it_pickled_is_not_read(peer: Any, theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    peer(bad=slice(1, 2))
    monkeypatch.setattr(pickle, "loads", lambda *a, **k: pytest.fail("unpickled"))
    with open_redis(theirs) as store:
        assert same(everything(store), LEAVES)
        store.load_header()
    with tdstore.open(theirs) as stored, pytest.raises(UntrustedDataError, match="'bad'.*it is pickled"):
        stored["bad"]
    monkeypatch.undo()
    with tdstore.open(theirs, trust=True) as stored:
        assert stored["bad"] == slice(1, 2)


def test_damage_and_doubt(client: Redis, redis: Any, peer: Any, theirs: str) -> None:
    ident = peer()._td_id
    base = f"their run:{{{ident}}}:"
    for key, change in (
        ("d:f", lambda key: client.setrange(key, 10_000, b"x")),
        ("d:f", lambda key: client.set(key, b"x")),
        ("d:f", lambda key: client.delete(key)),
        ("m:f", lambda key: client.hset(key, "shape", "[1e9]")),
        ("m:f", lambda key: client.hset(key, "shape", "[-4, 3]")),
        ("m:f", lambda key: client.hset(key, "shape", "[4611686018427387904, 9]")),
        ("m:f", lambda key: client.hset(key, "dtype", "os.system")),
        ("m:f", lambda key: client.delete(key)),
        ("__batch_size__", lambda key: client.set(key, "[[]]")),
    ):
        saved = client.dump(base + key)
        change(base + key)
        with pytest.raises(CorruptStoreError):
            load(theirs)
        client.restore(base + key, 0, saved, replace=True)
    with open_redis(theirs) as store:
        client.set(base + "d:f", b"x")
        with pytest.raises(CorruptStoreError, match="missing or short"):
            store.read([Read(("f",), span(3, 6)), Read(("half",), rows(1))])
    peer()
    with pytest.raises(StoreError, match="2 datasets") as caught:
        open_redis(theirs)
    assert "{" in str(caught.value.hint)
    with pytest.raises(StoreNotFoundError):
        open_redis(f"{redis.url}/their*")


@pytest.mark.parametrize("package", [tdstore, tensordict], ids=["ours", "peer"])
def test_a_stack_put_on_a_server_in_both_packages(client: Redis, redis: Any, package: Any) -> None:
    elements = [package.TensorDict({"a": torch.full((4, 2), float(i))}, [4]) for i in range(5)]
    stored = package.lazy_stack(elements).to_store(host="127.0.0.1", port=redis.port)
    assert type(stored) is package.LazyStackedTensorDictStore
    assert stored.batch_size == (5, 4)
    for line in ("LazyStackedTensorDictStore(", "count=5", "stack_dim=0", "backend='redis'", "td_id='"):
        assert line in repr(stored)
    local = stored.to_local()
    assert type(local) is package.TensorDict
    assert local.batch_size == (5, 4)
    assert local["a"][:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    stored.clear_redis()
    stored.close()
    plain = elements[0].to_store(host="127.0.0.1", port=redis.port)
    assert type(plain) is package.TensorDictStore
    for line in ("TensorDictStore(", "batch_size=torch.Size([4])", "device=None", "backend='redis'", "td_id='"):
        assert line in repr(plain)
    assert plain.to_local()["a"].shape == (4, 2)
    plain.clear_redis()
    plain.close()


def test_lazy_stacks_are_told(client: Redis, redis: Any) -> None:
    stack = lazy_stack([TensorDict({"a": torch.ones(i + 1)}, []) for i in range(3)])
    LazyStackedTensorDictStore.from_lazy_stack(stack, host="127.0.0.1", port=redis.port, prefix="lazy")
    with pytest.raises(UnsupportedError, match="lazy_stack"):
        open_redis(f"{redis.url}/lazy")
