"""Changes that are taken back, and what closing does with those that nobody committed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from redis import Redis
from redishelp import Leaves, blocks, dump, everything, header_of, load, same, save, span
from tdstore_redis.store import open_redis
from tdstore_redis.transactions.keyspace import Keys

from tdstore.errors import CorruptStoreError, StoreError, StoreIOError
from tdstore.header import Header
from tdstore.storekit.budget import SUSPECT_BYTES
from tdstore.types import LeafSpec, Read, Write

LEAVES: Leaves = {("a",): torch.arange(4000).view(400, 10), ("n", "b"): torch.arange(30.0), ("c",): torch.ones(5)}


@pytest.fixture
def filled(place: str) -> str:
    save(place, LEAVES, block=4000)
    return place


def change(store: Any) -> None:
    """Everything but the commit."""
    store.create({("new",): LeafSpec((7, 3), "int64"), ("c",): LeafSpec((2,), "bool")})
    store.write([Write(("new",), (), torch.ones(7, 3, dtype=torch.int64))])
    store.write([Write(("a",), span(3, 9), torch.full((6, 10), -1))])
    store.write([Write(("a",), (torch.tensor([4, 4, 399]),), torch.full((3, 10), -2))])
    store.rename({("a",): ("moved",)})
    store.write([Write(("moved",), (span(0, 400)[0], slice(2, 3, 1)), torch.full((400, 1), -3))])
    store.resize({("moved",): 410})
    store.write([Write(("moved",), span(400, 410), torch.full((10, 10), -4))])
    store.delete([("n", "b")])


def test_discarding_takes_back_leaves_rows_and_names(client: Redis, filled: str) -> None:
    before = set(client.scan_iter())
    with open_redis(filled, mode="r+") as store, open_redis(filled) as reader:
        for _ in range(2):
            change(store)
            store.discard()
            assert same(everything(store), LEAVES)
            assert same(everything(reader), LEAVES)
            assert client.hget(Keys(filled.partition("/0/")[2]).head, "owner") is None
        with open_redis(filled, mode="r+") as other:  # the structure is free for others
            other.create({("theirs",): LeafSpec((1,), "bool")})
            other.save_header(Header())
    assert before <= set(client.scan_iter())
    assert same(load(filled, verify="full"), {**LEAVES, ("theirs",): torch.zeros(1, dtype=torch.bool)})


def test_after_discarding_a_change_can_be_committed(filled: str) -> None:
    with open_redis(filled, mode="r+") as store:
        change(store)
        store.discard()
        change(store)
        store.save_header(Header())
        new = everything(store)
    assert same(load(filled, verify="full"), new)
    assert ("moved",) in new and ("new",) in new


def test_closing_commits_rows_and_drops_structure(client: Redis, filled: str) -> None:
    count = len(blocks(client))
    with open_redis(filled, mode="r+") as store:
        store.write([Write(("a",), span(0, 1), torch.full((1, 10), -9))])
        store.create({("new",): LeafSpec((7,), "int64"), ("c",): LeafSpec((2,), "bool")})
        store.write([Write(("new",), (), torch.arange(7)), Write(("a",), span(1, 2), torch.full((1, 10), -8))])
        store.delete([("n", "b")])
    expected = LEAVES["a",].clone()
    expected[0], expected[1] = -9, -8
    assert same(load(filled, verify="full"), {**LEAVES, ("a",): expected})
    assert len(blocks(client)) == count


def test_a_new_dataset_is_taken_back_whole(client: Redis, place: str) -> None:
    store = open_redis(place, mode="w")
    store.create({("a",): LeafSpec((3,), "int64")})
    store.write([Write(("a",), (), torch.arange(3))])
    store.discard()
    assert list(store.paths()) == []
    store.create({("b",): LeafSpec((3,), "int64", fill_value=4)})
    store.save_header(header_of({("b",): torch.ones(3)}))
    store.close()
    assert same(load(place, verify="full"), {("b",): torch.full((3,), 4)})


def test_a_lost_connection_leaves_what_was_committed(client: Redis, filled: str) -> None:
    store = open_redis(filled, mode="r+")
    store.create({("new",): LeafSpec((7,), "int64")})
    store._session._wire.close()  # type: ignore[attr-defined]
    client.client_kill_filter(_type="normal", skipme=True)
    client.hdel(Keys(filled.partition("/0/")[2]).head, "owner")
    with pytest.raises(StoreError):
        store.write([Write(("new",), (), torch.arange(7))])
    store.discard()
    assert same(everything(store), LEAVES)
    store.close()
    assert same(load(filled, verify="full"), LEAVES)
    open_redis(filled, mode="r+").close()
    assert [key for key in dump(client) if key.endswith(b"pending")] == []


def test_a_read_does_not_allocate_what_only_was_declared(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = SUSPECT_BYTES
    with open_redis(place, mode="w") as store:
        store.create({("x",): LeafSpec((3 * gib,), "uint8", fill_value=1), ("y",): LeafSpec((8 * gib,), "uint8")})
        store.write([Write(("x",), span(0, 3), torch.zeros(3, dtype=torch.uint8))])
        store.save_header(Header())
    with open_redis(place) as store:
        with pytest.raises(CorruptStoreError, match=r"reading 'x' would take .* of which 512 are stored") as caught:
            store.read([Read(("x",), span(0, 2 * gib))])
        assert place in str(caught.value) and "max_bytes=" in str(caught.value)
        assert store.read([Read(("x",), span(1, 5))])[0].tolist() == [0, 0, 1, 1]
        with pytest.raises(CorruptStoreError, match="'y'"):
            store.read([Read(("y",))])
    monkeypatch.setattr("tdstore.storekit.budget.memory_bytes", lambda: 4 * gib)
    with open_redis(place, max_bytes=1 << 60) as store:
        with pytest.raises(StoreIOError, match=r"no memory for 'y'"):
            store.read([Read(("y",))])
    with pytest.raises(CorruptStoreError, match="max_bytes="):
        open_redis(place, max_bytes=gib)
    with open_redis(place, mode="r+") as store, pytest.raises(StoreIOError, match=r"no memory for 'huge'"):
        store.create({("huge",): LeafSpec((1 << 50,), "uint8")})
