"""Manifests and hashes of a dataset, changed at random from a fixed seed: what is malformed is an error of ours."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import google_crc32c
import msgspec
import pytest
import torch
from redis import Redis
from redishelp import Leaves, everything, header_of, rows, same, save
from tdstore_redis.document import Document, decode
from tdstore_redis.store import open_redis
from tdstore_redis.transactions.keyspace import Keys, Pending, Writing, record

from tdstore.errors import StoreError, TDStoreError
from tdstore.types import LeafSpec, Write

URL = "redis://host:6379/0/run"
LEAVES: Leaves = {
    ("frames",): torch.randint(0, 255, (30, 300), dtype=torch.uint8),
    ("n", "small"): torch.arange(100),
}
HUGE = "1" * 400
ODD = (
    "null", "true", "-1", "0", "1e308", "9223372036854775807", "18446744073709551616", HUGE, "-" + HUGE, '""', '"a"',
    '"\\ud800"', "[]", "{}", "[[]]", '{"$int":"' + HUGE + '"}', '{"$call":"os.system"}', "[" * 3000 + "]" * 3000,
    '{"a":' * 2000 + "1" + "}" * 2000, '"' + "x" * 900 + '"', "NaN", "1.5",
)  # fmt: skip
RECORD = msgspec.json.encode(Writing("0" * 32, 7, 1, "host", [("a", "b")]))
WASTE = msgspec.json.encode(Pending("0" * 16, [(1, 2), (3, 4)], "0" * 32, 7))


def nodes(tree: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all nodes of a JSON document."""
    yield way
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from nodes(value, (*way, key))


def put(tree: Any, way: tuple[Any, ...], raw: str | None) -> bytes:
    """The document with one node replaced by raw JSON, or removed."""
    if not way:
        return (raw or "").encode()
    made = msgspec.json.decode(msgspec.json.encode(tree))
    node = made
    for key in way[:-1]:
        node = node[key]
    if raw is None:
        del node[way[-1]]
    else:
        node[way[-1]] = "@@HERE@@"
    return msgspec.json.encode(made).replace(b'"@@HERE@@"', (raw or "").encode())


def altered(data: bytes, count: int, chance: random.Random) -> Iterator[bytes]:
    """Cut short, with flipped bits, of wrong types, with parts missing or twice."""
    tree = msgspec.json.decode(data)
    ways = list(nodes(tree))
    for _ in range(count):
        kind = chance.randrange(6)
        if kind == 0:
            yield data[: chance.randrange(len(data))]
        elif kind == 1:
            flipped = bytearray(data)
            for _ in range(chance.randrange(1, 4)):
                flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            yield bytes(flipped)
        elif kind == 2:
            yield put(tree, chance.choice(ways[1:]), None)
        elif kind == 3:
            at, stop = sorted(chance.randrange(len(data)) for _ in range(2))
            yield data[:stop] + data[at:]
        else:
            yield put(tree, chance.choice(ways), chance.choice(ODD))


def signed(body: bytes) -> bytes:
    return b"TDR1 %08x\n" % google_crc32c.value(body) + body


@pytest.fixture
def filled(place: str) -> str:
    save(place, LEAVES)
    return place


def keys_of(place: str) -> Keys:
    return Keys(place.partition("/0/")[2])


def body_of(client: Redis, place: str) -> bytes:
    """The manifest without its first line."""
    found: Any = client.hget(keys_of(place).head, "manifest")
    return bytes(found).partition(b"\n")[2]


def use(place: str) -> None:
    """Read all, write rows, change the structure, replace it."""
    with open_redis(place) as store:
        everything(store)
        store.load_header()
    with open_redis(place, mode="r+", lock_timeout=0.1) as store:
        if store.specs([("frames",)]) == [LeafSpec((30, 300), "uint8")]:  # else the value is what does not fit
            store.write([Write(("frames",), rows(3), torch.zeros(1, 300, dtype=torch.uint8))])
        store.create({("new",): LeafSpec((3,), "int64")})
        store.save_header(header_of({**LEAVES, ("new",): torch.zeros(3)}))
    save(place, LEAVES, lock_timeout=0.1)


def test_manifests_of_any_content(client: Redis, filled: str) -> None:
    good = body_of(client, filled)
    chance = random.Random(11)
    refused = 0
    for body in altered(good, 3000, chance):
        began = time.process_time()
        try:
            assert isinstance(decode(signed(body), url=URL), Document)
        except StoreError as error:
            refused += 1
            assert URL in str(error) and len(str(error)) < 2000, body[:200]
        assert time.process_time() - began < 5, body[:200]
    assert refused > 2000


def test_a_cell_of_any_size_takes_no_memory(client: Redis, filled: str) -> None:
    """A thousand leaves, each with cells of 500 MB and a fill value."""
    manifest = msgspec.json.decode(body_of(client, filled))
    leaf = {"dtype": "uint8", "shape": [2**40], "cell": 500 << 20, "block": 1, "fill": 7}
    manifest["leaves"] = [leaf | {"path": [str(n)], "array": n} for n in range(1, 1001)]
    manifest["next"] = 1001
    document = decode(signed(msgspec.json.encode(manifest)), url=URL)
    assert all(array._fill is None for array in document.arrays.values())


@pytest.mark.parametrize(("kind", "good"), [(Writing, RECORD), (Pending, WASTE)])
def test_records_of_any_content(kind: type[Any], good: bytes) -> None:
    refused = 0
    for data in altered(good, 2000, random.Random(12)):
        try:
            assert isinstance(record(data, kind, URL, b"tds:{3:run}:head", b"owner"), kind)
        except StoreError as error:
            refused += 1
            assert URL in str(error) and "tds:{3:run}:head" in str(error) and "'owner'" in str(error)
    assert refused > 1000


def tampered(client: Redis, place: str, change: Callable[[], Any]) -> TDStoreError | None:
    """What using a dataset says after a change of the server's data, which is taken back."""
    before = {name: client.dump(name) or b"" for name in client.scan_iter()}
    change()
    said = None
    try:
        use(place)
    except TDStoreError as error:
        said = error
        assert place in str(error)
    client.flushdb()
    for name, value in before.items():
        client.restore(name, 0, value)
    return said


def test_heads_and_records_on_a_server(client: Redis, filled: str) -> None:
    keys, chance = keys_of(filled), random.Random(13)
    body = body_of(client, filled)
    junk = [
        b"",
        b"x",
        b"\0\xff\xfe",
        b"{",
        b"null",
        b"[1]",
        HUGE.encode(),
        b"[" * 50_000,
        b'{"session":3}',
        RECORD[:-9],
    ]
    for field in ("owner", "dataset", "revision", "manifest"):
        for value in junk:
            error = tampered(client, filled, lambda f=field, v=value: client.hset(keys.head, f, v))  # type: ignore[misc]
            assert error is not None, (field, value[:20])
            assert field != "owner" or ("'owner'" in str(error) and keys.head.decode() in str(error)), value[:20]
    for name in (keys.writers, keys.pending):
        for value in junk:
            error = tampered(client, filled, lambda n=name, v=value: client.hset(n, "w", v))  # type: ignore[misc]
            assert error is not None and name.decode() in str(error), value[:20]
    for data in altered(body, 400, chance):
        tampered(client, filled, lambda d=data: client.hset(keys.head, "manifest", signed(d)))  # type: ignore[misc]
    for good, name, field in ((RECORD, keys.head, "owner"), (RECORD, keys.writers, "w"), (WASTE, keys.pending, "w")):
        for data in altered(good, 60, chance):
            tampered(client, filled, lambda d=data, n=name, f=field: client.hset(n, f, d))  # type: ignore[misc]
    with open_redis(filled) as store:
        assert same(everything(store), LEAVES)
    use(filled)


def test_a_record_of_any_number_of_blocks_is_swept_in_little_time(client: Redis, filled: str) -> None:
    """Four thousand million blocks are told; the server has a dozen keys."""
    left = b"tds:" + b"0" * 16 + b":7:3"
    client.mset({left: "x", left + b"0": "x", b"tds:" + b"0" * 16 + b":9:3": "of another array", left + b":x": "odd"})
    record = {"dataset": "0" * 16, "arrays": [[7, 2**32 - 1], [8, 2**32 - 1]]}
    client.hset(keys_of(filled).pending, "w", msgspec.json.encode(record))
    open_redis(filled, mode="r+").close()
    assert not client.exists(left, left + b"0")
    assert client.exists(b"tds:" + b"0" * 16 + b":9:3", left + b":x") == 2
    assert not client.exists(keys_of(filled).pending)
