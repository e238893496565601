"""Manifests that are damaged, or made to do harm: refused at once, each with what is wrong."""

from __future__ import annotations

import base64
import copy
import errno
import json
import random
import tracemalloc

import numpy as np
import pytest
import torch

from tdstore.builtin.memmap.store import open_memmap
from tdstore.bytestore import open_objects
from tdstore.bytestore.manifest import decode_objects, encode_objects
from tdstore.errors import CorruptStoreError, StoreError, StoreIOError
from tdstore.header import Group, Header
from tdstore.storekit.documents import NAME, decode_manifest, seal
from tdstore.types import LeafSpec, Read
from tests.bytestore.memory_engine import Bucket, MemoryEngine
from tests.bytestore.support import contents, open_local, save


@pytest.fixture(scope="module")
def good():
    engine = MemoryEngine()
    save(engine, {("a",): torch.arange(3000), ("g", "b"): torch.arange(8.0).view(4, 2)}, object_bytes=9000).close()
    return engine.bucket


def document(bucket):
    return json.loads(bucket.bytes_of(NAME).partition(b"\n")[2])


def sealed(doc):
    body = json.dumps(doc, separators=(",", ":")).encode()
    return seal(body)


def opened(bucket, data):
    other = bucket.copy()
    other.put(NAME, data)
    return open_objects(MemoryEngine(other))


def column(values, size=8):
    return f"{size}" + base64.b64encode(np.array(values, f"<u{size}").tobytes()).decode()


def setter(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(doc):
        for key in keys:
            doc = doc[key]
        doc[last] = value

    return change


def bump(table, index, value):
    """Replace one column of a table by a constant."""

    def change(doc):
        rows, columns = doc[table]
        columns[index] = column([value] * rows)

    return change


CASES = {
    "generation": setter("generation", "../../x"),
    "path out of data": setter("objects", 0, "name", "data/../tdstore.json"),
    "absolute name": setter("objects", 0, "name", "/etc/passwd"),
    "the manifest as data": setter("objects", 0, "name", "tdstore.json"),
    "object twice": lambda doc: doc["objects"].append(doc["objects"][0]),
    "negative size": setter("objects", 0, "size", -1),
    "no room for sums": setter("objects", 0, "size", 3),
    "huge size": setter("objects", 0, "size", 2**61),
    "billions of sums": setter("objects", 0, "sums", 2**50),
    "sums without crc": setter("objects", 0, "crc", ""),
    "crc is no base64": setter("objects", 0, "crc", "!!!!!!!!"),
    "size is text": setter("objects", 0, "size", "9000"),
    "unknown field": setter("objects", 0, "url", "https://elsewhere"),
    "unknown dtype": setter("leaves", 0, "dtype", "object"),
    "negative shape": setter("leaves", 0, "shape", [-3000]),
    "overflowing shape": setter("leaves", 0, "shape", [2**40, 2**40]),
    "shape too small for its bytes": setter("leaves", 0, "shape", [2]),
    "shape is a float": setter("leaves", 0, "shape", [1.5]),
    "too many dimensions": setter("leaves", 0, "shape", [1] * 100),
    "leaf twice": setter("leaves", 1, "path", ["a"]),
    "leaf without a name": setter("leaves", 1, "path", []),
    "too deep": setter("leaves", 1, "path", ["x"] * 300),
    "fill is text": setter("leaves", 0, "fill", "rm -rf"),
    "fill is a bomb": setter("leaves", 0, "fill", {"$bytes": "AAAA"}),
    "fill has a codec": setter("leaves", 0, "fill", {"$codec": ["x", [1.0]]}),
    "fill of 100,000 digits": setter("leaves", 0, "fill", {"$int": "9" * 100_000}),
    "fill of an object": setter("leaves", 0, "fill", {"$complex": ["x", {}]}),
    "fill of a set": setter("leaves", 0, "fill", {"$set": [1, 2]}),
    "fill does not fit": setter("leaves", 0, "fill", {"$complex": [1.0, 2.0]}),
    "more extents than there are": setter("leaves", 0, "extents", 10**6),
    "negative extents": setter("leaves", 0, "extents", -1),
    "billions of extents": setter("extents", [2**40, ["0", "0", "0", "0"]]),
    "billions of pieces": setter("pieces", [2**40, ["0"] * 5]),
    "extents of nothing": setter("extents", 1, 1, "0"),
    "missing column": setter("extents", 1, ["0", "0"]),
    "column of another length": setter("extents", 1, 0, column([1])),
    "column of width 3": setter("extents", 1, 0, "3AAAA"),
    "column is no base64": setter("extents", 1, 0, "8%%%%"),
    "number beyond 2**62": bump("extents", 1, 2**63),
    "sum beyond 2**63": bump("extents", 0, 2**60),
    "gap beyond the leaf": bump("extents", 0, 2**30),
    "no such piece": bump("extents", 2, 99),
    "beyond its piece": bump("extents", 3, 10**6),
    "no such object": bump("pieces", 0, 99),
    "beyond its object": bump("pieces", 1, 10**6),
    "into the checksums": bump("pieces", 1, 8000),
    "empty piece": bump("pieces", 2, 0),
    "grain of nothing": bump("pieces", 3, 0),
    "grain of gigabytes": bump("pieces", 3, 2**40),
    "sums that are not there": bump("pieces", 4, 5000),
    "retires what is in use": lambda doc: doc.update(retired=[[doc["objects"][0]["name"], 1, 1]]),
    "retires a user's file": setter("retired", [["photos/cat.jpg", 1, 1]]),
    "retires twice": setter("retired", [["data/0.bin", 1, 1], ["data/0.bin", 1, 1]]),
    "retired in the far future": setter("retired", [["data/0.bin", 1, 2**63]]),
    "header is a list": setter("header", []),
    "header of another format": setter("header", {"format": 99, "groups": []}),
    "not a document": lambda doc: doc.clear(),
    "layout of another kind": setter("layout", "objects2"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_is_refused(good, name):
    doc = copy.deepcopy(document(good))
    CASES[name](doc)
    tracemalloc.start()
    with pytest.raises(CorruptStoreError, match="mem://bucket"):
        contents(opened(good, sealed(doc)))
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_the_cases_start_from_something_good(good):
    assert torch.equal(contents(opened(good, sealed(document(good))))[("a",)], torch.arange(3000))


def test_random_changes_of_a_sealed_manifest_never_escape(good):
    """Whatever the body says, as long as its checksum fits: right values, or an error of ours."""
    rng = random.Random(0)
    body = good.bytes_of(NAME).partition(b"\n")[2]
    for _ in range(400):
        data = bytearray(body)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(20, len(data))
            if rng.random() < 0.3:
                del data[at : at + rng.randrange(1, 9)]
            else:
                data[at] = rng.choice(b'0123456789"[]{},:AZaz-/.=') if rng.random() < 0.8 else rng.randrange(256)
        try:
            contents(opened(good, seal(bytes(data))))
        except StoreError:
            continue


def test_every_flip_of_a_manifest_is_noticed(good):
    data = good.bytes_of(NAME)
    for at in range(0, len(data), 3):
        with pytest.raises(CorruptStoreError):
            opened(good, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    for end in range(0, len(data), 17):
        with pytest.raises(CorruptStoreError):
            opened(good, data[:end])


@pytest.mark.parametrize("kind", ["leaves", "same leaves", "objects", "spaces", "deep", "extents", "fills"])
def test_large_manifests_are_refused_before_they_cost_much(good, kind):
    doc = document(good)
    if kind == "extents":
        doc["extents"] = [4_000_000, [column([1], 1)] * 4]
    elif kind == "fills":
        doc["leaves"][0]["fill"] = [[[]]] * 10**6
    body = json.dumps(doc, separators=(",", ":")).encode()
    if kind == "leaves":
        body = body.replace(b'"leaves":[', b'"leaves":[' + b'{"path":["x"],"dtype":"int8","shape":[0]},' * 1_000_001)
    elif kind == "objects":
        body = body.replace(b'"objects":[', b'"objects":[' + b'{"name":"data/0.bin","size":0},' * 1_000_001)
    elif kind == "same leaves":
        body = body.replace(b'"leaves":[', b'"leaves":[' + b'{"path":["x"],"dtype":"int8","shape":[0]},' * 900_000)
    elif kind == "spaces":
        body += b" " * (64 << 20)
    elif kind == "deep":
        body = body.replace(b'"header":{', b'"header":{"x":' + b"[" * 10**6)
    with pytest.raises(CorruptStoreError):
        decode_objects(seal(body), url="x")


def test_more_than_max_bytes_is_refused(good):
    with pytest.raises(CorruptStoreError, match="max_bytes=100"):
        open_objects(MemoryEngine(good), max_bytes=100)


GIB = 1 << 30


def fills_of(*sizes):
    """A store of leaves of fill value only."""
    engine = MemoryEngine()
    store = open_objects(engine, mode="w")
    store.create({(f"leaf {i}",): LeafSpec((n,), "uint8", fill_value=1) for i, n in enumerate(sizes)})
    store.save_header(Header())
    store.close()
    return engine


def test_a_read_does_not_allocate_what_only_was_declared():
    engine = fills_of(10, 2 * GIB)
    store = open_objects(engine)
    with pytest.raises(
        CorruptStoreError, match=r"mem://bucket: reading 'leaf 1' would take 2147483648 bytes"
    ) as caught:
        store.read([Read(("leaf 1",))])
    assert "max_bytes=" in caught.value.hint
    assert store.read([Read(("leaf 1",), (slice(GIB, GIB + 3, 1),))])[0].tolist() == [1, 1, 1]
    assert store.read([Read(("leaf 0",))])[0].tolist() == [1] * 10
    allowed = open_objects(engine, max_bytes=3 * GIB)
    assert allowed.read([Read(("leaf 1",), (slice(0, GIB + (1 << 20), 1),))])[0].nbytes > GIB
    with pytest.raises(CorruptStoreError, match="max_bytes="):
        open_objects(engine, max_bytes=GIB)


def test_many_leaves_of_fill_value_count_together():
    store = open_objects(fills_of(*[GIB // 8] * 9))
    with pytest.raises(CorruptStoreError, match="of which 0 are stored"):
        store.read([Read((f"leaf {i}",)) for i in range(9)])
    assert store.read([Read(("leaf 3",))])[0].nbytes == GIB // 8


def test_pieces_that_leaves_share_count_for_each():
    """A manifest of some MB can give the same 4 MiB to thousands of leaves, or many times to one."""
    engine = MemoryEngine()
    save(engine, {("a",): torch.zeros(4 << 20, dtype=torch.uint8)}).close()
    doc = document(engine.bucket)
    (piece,) = doc["leaves"]
    doc["leaves"] = [{**piece, "path": [f"{i}"]} for i in range(400)]
    rows, columns = doc["extents"]
    assert rows == 1
    doc["extents"] = [400, [c if c == "0" else column([4 << 20] * 400) for c in columns]]
    shared = opened(engine.bucket, sealed(doc))
    with pytest.raises(CorruptStoreError, match="of which 4194304 are stored"):
        shared.read([Read(path) for path in shared.paths()])
    assert shared.read([Read(("7",), (slice(0, 9, 1),))])[0].tolist() == [0] * 9
    doc["leaves"] = [{**piece, "shape": [400 * (4 << 20)], "extents": 400}]
    long = opened(engine.bucket, sealed(doc))
    with pytest.raises(CorruptStoreError, match="'a' would take 1677721600 bytes of memory, of which 4194304"):
        long.read([Read(("a",))])


def test_a_leaf_larger_than_memory_is_an_error_that_names_it():
    engine = fills_of(1 << 50)
    with pytest.raises(StoreIOError, match=r"mem://bucket: no memory for 'leaf 0'") as caught:
        open_objects(engine, max_bytes=1 << 60).read([Read(("leaf 0",))])
    assert caught.value.errno == errno.ENOMEM


def test_rows_that_are_asked_for_many_times_are_meant():
    engine = MemoryEngine()
    save(engine, {("a",): torch.zeros(2, 1 << 20, dtype=torch.uint8)}).close()
    rows = torch.zeros(1100, dtype=torch.int64)
    assert open_objects(engine).read([Read(("a",), (rows,))])[0].nbytes > GIB


def test_a_larger_manifest_than_anybody_reads_is_not_written():
    engine = MemoryEngine()
    store = open_objects(engine, mode="w")
    big = Header({(): Group(values={"x": "y" * (65 << 20)})})
    with pytest.raises(ValueError, match="manifest that cannot be read"):
        store.save_header(big)
    store.close()
    assert not engine.bucket.objects


def test_the_two_kinds_of_manifest_refuse_one_another(good, tmp_path):
    with pytest.raises(CorruptStoreError, match="object layout") as caught:
        decode_manifest(good.bytes_of(NAME), url="here")
    assert "remote" in caught.value.hint
    store = open_memmap(str(tmp_path / "m"), mode="w")
    store.save_header(Header())
    store.close()
    with pytest.raises(CorruptStoreError, match="directory of files"):
        decode_objects((tmp_path / "m" / NAME).read_bytes(), url="here")
    store = open_local(str(tmp_path / "o"), mode="w")
    store.save_header(Header())
    store.close()
    with pytest.raises(CorruptStoreError, match="object layout"):
        open_memmap(str(tmp_path / "o"))


def test_what_is_decoded_encodes_to_the_same(good):
    data = good.bytes_of(NAME)
    assert encode_objects(decode_objects(data, url="x"), url="x") == data


def test_no_store_reaches_outside_of_its_objects(good):
    """A manifest may point at any object of ours below data/, and at nothing else."""
    bucket = Bucket()
    engine = MemoryEngine(bucket)
    bucket.objects = good.copy().objects
    contents(open_objects(engine))
    assert {key for _, key in engine.log} <= {NAME, *good.keys()}
    assert open_objects(engine).read([Read(("a",), (slice(0, 1, 1),))])[0].tolist() == [0]
