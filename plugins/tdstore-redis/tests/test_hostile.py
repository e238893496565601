"""Flipped, cut, swapped, stale and missing values, crafted manifests, other applications' keys."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import google_crc32c
import msgspec
import pytest
import torch
from redis import Redis
from redishelp import Leaves, blocks, dump, everything, header_of, load, rows, same, save, span
from tdstore_redis import document
from tdstore_redis.store import open_redis
from tdstore_redis.transactions.keyspace import Keys

from tdstore.errors import CorruptStoreError, StoreError, StoreExistsError
from tdstore.store import Store
from tdstore.types import LeafSpec, Read, Write
from tests.servers import redis_server

LEAVES: Leaves = {
    ("frames",): torch.randint(0, 255, (30, 3000), dtype=torch.uint8),
    ("n", "small"): torch.arange(1000),
    ("huge row",): torch.arange(100_000.0).view(2, 50_000),
    ("scalar",): torch.tensor(3.5),
}
BLOCK = 20_000


@pytest.fixture
def filled(place: str) -> str:
    save(place, LEAVES, block=BLOCK)
    return place


def head(place: str) -> bytes:
    return Keys(place.partition("/0/")[2]).head


def sees(place: str, damaged: bytes | None) -> str:
    """Open, read and verify: the name of the leaf that is told to be damaged."""
    said = []
    try:
        with open_redis(place) as store:
            for path in store.paths():
                try:
                    (got,) = store.read([Read(path)])
                    assert same({path: got}, {path: LEAVES[path]}), f"{path} is silently wrong"
                except CorruptStoreError as error:
                    said.append(str(error))
            faults = store.verify()
            assert [f.path for f in faults] == [p for p in store.paths() if any(repr(p[-1]) in text for text in said)]
    except CorruptStoreError as error:
        said.append(str(error))
    assert len(said) == 1, (damaged, said)
    assert place in said[0]
    return re.findall(r"leaf (.*?): ", said[0])[0]


def test_every_kind_of_damage_is_told(client: Redis, filled: str) -> None:
    chance = random.Random(0)
    keys = blocks(client)
    values = {key: client.get(key) or b"" for key in keys}
    with open_redis(filled) as store:
        numbers = {b"%d" % a.number: path for path, a in store._session.document.arrays.items()}  # type: ignore[attr-defined]

    def flip(key: bytes) -> None:
        at, value = chance.randrange(len(values[key])), bytearray(values[key])
        value[at] ^= 1 << chance.randrange(8)
        client.set(key, bytes(value))

    def cut(key: bytes) -> None:
        client.set(key, values[key][: chance.randrange(len(values[key]))])

    def zero(key: bytes) -> None:
        client.set(key, bytes(len(values[key])))

    damages: list[Callable[[bytes], Any]] = [flip, cut, zero, lambda key: client.delete(key)]
    for damage in damages:
        for key in keys if damage is not flip else keys * 4:
            damage(key)
            path = numbers[key.split(b":")[2]]
            assert sees(filled, key) == " / ".join(map(repr, path)), (damage, key)
            client.set(key, values[key])
    assert same(load(filled, verify="full"), LEAVES)


def test_cells_that_changed_places_are_told(client: Redis, filled: str) -> None:
    """Whole blocks swapped, one block in the place of another, and two cells of a block."""
    keys = [key for key in blocks(client) if client.strlen(key) > 10_000]
    first, second = keys[0], keys[1]
    a, b = client.get(first) or b"", client.get(second) or b""
    client.mset({first: b, second: a})
    sees(filled, first)
    client.mset({first: a, second: a})
    sees(filled, second)
    client.mset({first: a, second: b})
    with open_redis(filled) as store:
        array = store._session.document.arrays[("n", "small")]  # type: ignore[attr-defined]
    value = bytearray(client.get(array.key(0)) or b"")
    stride = array.stride
    value[:stride], value[stride : 2 * stride] = value[stride : 2 * stride], value[:stride]
    client.set(array.key(0), bytes(value))
    assert sees(filled, None) == "'n' / 'small'"


def test_values_of_an_older_generation_are_told(client: Redis, filled: str) -> None:
    old = {key.split(b":", 2)[2]: client.get(key) for key in blocks(client)}
    save(filled, {p: t.clone() for p, t in LEAVES.items()}, block=BLOCK)
    new = {key.split(b":", 2)[2]: key for key in blocks(client)}
    assert old.keys() == new.keys()
    client.mset({new[k]: v for k, v in old.items() if v is not None})
    with open_redis(filled) as store:
        assert {fault.path for fault in store.verify()} == set(LEAVES)


def test_a_leaf_with_gaps_is_checked_too(client: Redis, place: str) -> None:
    with open_redis(place, mode="w", block=BLOCK) as store:
        store.create({("a",): LeafSpec((100, 3000), "uint8", fill_value=7)})
        store.save_header(header_of({("a",): torch.zeros(1)}))
        store.write([Write(("a",), span(20, 60), torch.full((40, 3000), 9, dtype=torch.uint8))])
    want = torch.full((100, 3000), 7, dtype=torch.uint8)
    want[20:60] = 9
    assert torch.equal(load(place)[("a",)], want)
    written = [key for key in blocks(client) if not key.endswith(b"w")]
    (bits,) = [key for key in blocks(client) if key.endswith(b"w")]
    for key in (*written, bits):
        value = client.get(key)
        client.delete(key)
        with pytest.raises(CorruptStoreError, match="'a'"):
            load(place)
        assert value
        client.set(key, value)
    assert torch.equal(load(place)[("a",)], want)


def test_manifests_that_are_damaged_or_lie(client: Redis, filled: str) -> None:
    key = head(filled)
    good = client.hget(key, "manifest") or b""
    first, _, body = good.partition(b"\n")
    manifest = msgspec.json.decode(body)

    def crafted(**changes: Any) -> bytes:
        made = msgspec.json.decode(msgspec.json.encode(manifest))
        for name, value in changes.items():
            if name in made:
                made[name] = value
            else:
                made["leaves"][0][name] = value
        data = msgspec.json.encode(made)
        return b"TDR1 %08x\n" % google_crc32c.value(data) + data

    leaf = manifest["leaves"][0]
    chance = random.Random(1)
    bad = [
        b"",
        b"x",
        good[:-1],
        good + b" ",
        good.replace(b"TDR1", b"TDR9"),
        b"\x80\x04K\x01.",
        crafted(dataset="../x"),
    ]
    bad += [crafted(revision=-1), crafted(next=0), crafted(leaves=[leaf, leaf]), crafted(header=3), crafted(header={})]
    bad += [crafted(array=0), crafted(array=10**6), crafted(cell=0), crafted(cell=-4), crafted(cell=2**40)]
    bad += [crafted(block=0), crafted(block=2**50), crafted(shape=[-1]), crafted(shape=[2**61, 8]), crafted(path=[])]
    bad += [crafted(dtype="object"), crafted(sealed=10**9), crafted(path=["x"] * 300), crafted(shape=[10**12, 3000])]
    bad += [crafted(fill={"$call": "os.system"}), crafted(dataset="0" * 16), crafted(leaves=[[[]]] * 9)]
    bad += [crafted(path=leaf["path"], array=manifest["leaves"][1]["array"])]
    for _ in range(60):
        value = bytearray(good)
        value[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        bad.append(bytes(value))
    for data in bad:
        client.hset(key, "manifest", data)
        before = dump(client)
        with pytest.raises(StoreError) as caught, open_redis(filled) as store:
            everything(store)
        assert filled in str(caught.value)
        assert dump(client) == before
    client.hdel(key, "manifest")
    with pytest.raises(CorruptStoreError):
        open_redis(filled)
    client.hset(key, "manifest", good)
    assert same(load(filled), LEAVES)


def test_a_manifest_that_is_too_large_is_not_fetched(client: Redis, filled: str) -> None:
    client.config_resetstat()
    client.hset(head(filled), "manifest", b"TDR1 00000000\n" + bytes(document.MAX_MANIFEST))
    with pytest.raises(CorruptStoreError, match="more than"):
        open_redis(filled)
    assert "cmdstat_hmget" not in client.info("commandstats")


def test_records_of_writers_that_lie(client: Redis, filled: str) -> None:
    name = filled.partition("/0/")[2]
    keys = Keys(name)
    client.set("precious", "x")
    for value in (b"{", b"[]", b"\x80\x04K\x01.", b'{"session":3}'):
        client.hset(keys.writers, "w", value)
        with pytest.raises(CorruptStoreError):
            open_redis(filled)
        client.delete(keys.writers)
        client.hset(keys.pending, "w", value)
        with pytest.raises(CorruptStoreError):
            open_redis(filled, mode="r+")
        client.delete(keys.pending)
    # What names our own arrays, or keys of others, removes neither.
    with open_redis(filled) as store:
        dataset = store._session.document.dataset  # type: ignore[attr-defined]
    for record in (
        {"dataset": dataset, "arrays": [[1, 3], [2, 3]]},
        {"dataset": "precious", "arrays": [[1, 3]]},
        {"dataset": dataset, "arrays": [[-1, 10**15], [0, 4]], "session": "zz", "client": 1},
    ):
        client.hset(keys.pending, "w", msgspec.json.encode(record))
    open_redis(filled, mode="r+").close()
    assert same(load(filled, verify="full"), LEAVES)
    assert client.get("precious") == b"x"
    assert not client.exists(keys.pending)


@pytest.mark.parametrize("kind", ["set", "rpush", "sadd"])
def test_keys_of_other_applications_are_left_alone(client: Redis, place: str, kind: str) -> None:
    getattr(client, kind)(head(place), "theirs")
    getattr(client, kind)("a", "theirs")
    before = dump(client) if kind != "rpush" else client.keys()
    for mode in ("r", "r+", "w", "x", "a"):
        error = StoreExistsError if mode in ("w", "x") else CorruptStoreError
        with pytest.raises(error, match="another application"):
            open_redis(place, mode=mode)  # type: ignore[arg-type]
    assert (dump(client) if kind != "rpush" else client.keys()) == before


def test_a_block_of_another_type(client: Redis, filled: str) -> None:
    key = blocks(client)[0]
    client.delete(key)
    client.rpush(key, "theirs")
    with pytest.raises(CorruptStoreError, match="another type"), open_redis(filled) as store:
        everything(store)


def test_a_shape_that_nobody_has_takes_no_memory(client: Redis, place: str) -> None:
    """A terabyte declared, a few bytes there."""
    save(place, {("a",): torch.zeros(100, 1000, dtype=torch.uint8)})
    key = head(place)
    manifest = msgspec.json.decode((client.hget(key, "manifest") or b"").partition(b"\n")[2])
    manifest["leaves"][0] |= {"shape": [10**9, 1000], "sealed": 10**9}
    data = msgspec.json.encode(manifest)
    client.hset(key, "manifest", b"TDR1 %08x\n" % google_crc32c.value(data) + data)
    with pytest.raises(CorruptStoreError):
        open_redis(place)
    for index in ((), rows(5, 10**8)):
        with pytest.raises(CorruptStoreError), open_redis(place, verify="none") as store:
            store.read([Read(("a",), index)])


# -- errors that say which -----------------------------------------------------------------


def refused(location: str, match: str, mode: str = "r", **options: Any) -> StoreError:
    with pytest.raises(StoreError, match=match) as caught:
        open_redis(location, mode=mode, **options)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(caught.value)
    return caught.value


def test_passwords_and_users() -> None:
    with redis_server() as server:
        with Redis(port=server.port) as client:
            client.config_set("requirepass", "secret")
        place = f"redis://127.0.0.1:{server.port}/0/run"
        told = place.replace("//", "//:secret@")
        assert "wants a password" in str(refused(place, "authentication failed"))
        assert "refused the user name or password" in str(refused(place, "authentication", password="secret2"))
        refused(place.replace("//", "//nobody:secret@"), "authentication failed")
        save(told, LEAVES)
        save(place, LEAVES, password="secret")
        with open_redis(told) as store:
            assert "secret" not in store.url + repr(store) + repr(vars(store._session.line.address.__class__))  # type: ignore[attr-defined]
            assert "secret" not in repr(store._session.line.address)  # type: ignore[attr-defined]
            with pytest.raises(StoreError) as caught:
                store.write([])
            assert "secret" not in str(caught.value)
        refused(told.replace("/0/run", "/0/none"), "nothing is stored at redis://:\\*\\*\\*@")
        with Redis(port=server.port, password="secret") as client:
            client.execute_command("ACL", "SETUSER", "reader", "on", ">secret3", "~*", "+@read", "+@connection")
            reader = place.replace("//", "//reader:secret3@")
            assert same(load(reader), LEAVES)
            with open_redis(place, mode="r+", password="secret") as writer:
                assert isinstance(writer, Store)
            with pytest.raises(StoreError, match="NOPERM"), open_redis(reader, mode="w") as denied:
                denied.create({("a",): LeafSpec((2,), "int8")})


def test_places_where_no_redis_is(client: Redis, redis: Any) -> None:
    refused("redis://127.0.0.1:1/0/run", "connection refused")
    refused("redis://no.such.host.invalid/0/run", "host of no.such.host.invalid:6379 is not known")
    refused(f"redis://127.0.0.1:{redis.port}/99/run", "no such database")
    refused("redis+unix:///tmp/no-such.sock?name=x", "no socket")
    refused(f"rediss://127.0.0.1:{redis.port}/0/run", "TLS with", timeout=0.5)


def test_replicas_are_for_reading(place: str, redis: Any) -> None:
    save(place, LEAVES)
    with redis_server(replicaof=f"127.0.0.1 {redis.port}") as replica:
        there = place.replace(str(redis.port), str(replica.port))
        deadline = time.monotonic() + 60  # a replica is synchronized after 5 s at the earliest
        while time.monotonic() < deadline:
            try:
                assert same(load(there), LEAVES)
                break
            except StoreError:
                time.sleep(0.05)
        with pytest.raises(StoreError, match="read-only replica"), open_redis(there, mode="r+") as store:
            store.write([Write(("n", "small"), rows(1), torch.tensor([1]))])
