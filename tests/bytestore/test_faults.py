"""Failed and torn puts at every call, killed writers, and objects that are damaged, missing, short or stale."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

import pytest
import torch

from tdstore.bytestore import open_objects
from tdstore.errors import CorruptStoreError, StoreError, StoreNotFoundError, TransientError
from tdstore.header import Header
from tdstore.storekit.files import is_temp
from tdstore.storekit.local_engine import LocalEngine
from tdstore.testing.processes.warm import python
from tdstore.types import LeafSpec, Read, Write
from tests.bytestore.memory_engine import Bucket, MemoryEngine
from tests.bytestore.support import contents, equal, numbered, save

OLD = {("a",): torch.arange(4000).view(400, 10), ("g", "b"): torch.arange(30.0), ("big",): torch.ones(20, 5000)}
NEW = {("a",): OLD[("a",)] + 1, ("g", "b"): OLD["g", "b"].clone(), ("c",): torch.arange(9)}


def change(store):
    """From OLD to NEW."""
    store.write([Write(("a",), (torch.arange(399, -1, -1),), NEW[("a",)].flip(0))])
    store.delete([("big",)])
    store.create({("c",): LeafSpec((5,), "int64")})
    store.resize({("c",): 9})
    store.write([Write(("c",), (slice(0, 9, 1),), NEW[("c",)])])
    store.save_header(numbered(2))


@pytest.fixture(scope="module")
def saved():
    engine = MemoryEngine()
    save(engine, OLD, n=1, buffer_bytes=30_000, object_bytes=20_000).close()
    return engine.bucket


# -- failing writers -----------------------------------------------------------------------
@pytest.mark.parametrize("answer", ["fail", "torn", "lost"])
@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
def test_a_failure_at_any_write_leaves_old_or_new(saved, answer, stays):
    """What was acknowledged is new; what failed is old, or new where the answer was lost; never between."""
    seen = set()
    for k in range(1, 200):
        engine = MemoryEngine(saved.copy())
        hit = []

        def fault(verb, key, number, k=k, hit=hit):
            if verb != "get" and (number == k or (stays and number > k)):
                hit.append(key)
                return answer
            return None

        engine.fault = fault
        store = open_objects(engine, mode="r+", buffer_bytes=5000, object_bytes=3000, keep_old=0.0)
        try:
            change(store)
            acknowledged = True
        except TransientError:
            acknowledged = False
        store.discard()
        store.close()
        found = contents(open_objects(MemoryEngine(engine.bucket)))
        assert equal(found, NEW) if acknowledged else (equal(found, OLD) or equal(found, NEW)), k
        seen.add((acknowledged, equal(found, NEW)))
        if not hit:
            break
    else:
        raise AssertionError("the sweep did not come to an end")
    assert k > 10
    assert (True, True) in seen
    assert (False, False) in seen


def test_a_failed_write_can_be_repeated(saved):
    """A store that could not put its objects keeps what was written, and puts it later."""
    engine = MemoryEngine(saved.copy())
    store = open_objects(engine, mode="r+", buffer_bytes=5000, object_bytes=3000)
    engine.fault = lambda verb, key, number: "fail" if verb == "put" else None
    with pytest.raises(TransientError):
        store.write([Write(("a",), (), NEW[("a",)])])
    engine.fault = lambda verb, key, number: None
    store.write([Write(("a",), (), NEW[("a",)])])
    store.close()
    assert torch.equal(contents(open_objects(MemoryEngine(engine.bucket)))[("a",)], NEW[("a",)])


def test_a_failed_change_can_be_taken_back_at_any_write(saved):
    """In the open store too, and what is committed afterwards is not the failed change."""
    for k in range(1, 200):
        engine = MemoryEngine(saved.copy())
        engine.fault = lambda verb, key, number, k=k: "fail" if verb == "put" and number >= k else None
        store = open_objects(engine, mode="r+", buffer_bytes=5000, object_bytes=3000, keep_old=0.0)
        try:
            change(store)
            break
        except TransientError:
            store.discard()
        assert equal(contents(store), OLD)
        engine.fault = lambda verb, key, number: None
        store.write([Write(("big",), (slice(0, 1, 1),), torch.full((1, 5000), 7.0))])
        store.close()
        found = contents(open_objects(MemoryEngine(engine.bucket)))
        expected = {**OLD, ("big",): OLD["big",].index_fill(0, torch.tensor([0]), 7.0)}
        assert equal(found, expected), k
        needed = {o.name for o in open_objects(MemoryEngine(engine.bucket))._before.objects}
        assert needed <= set(engine.bucket.keys())
    else:
        raise AssertionError("the sweep did not come to an end")
    assert k > 5


def test_closing_commits_rows_and_drops_structure_that_no_header_committed(saved):
    engine = MemoryEngine(saved.copy())
    with open_objects(engine, mode="r+") as store:
        store.write([Write(("a",), (slice(0, 1, 1),), torch.full((1, 10), -1))])
        store.create({("new",): LeafSpec((3,), "int64")})
        store.write([Write(("new",), (), torch.arange(3))])
        store.rename({("a",): ("moved",)})
        store.write([Write(("moved",), (slice(1, 2, 1),), torch.full((1, 10), -2))])
        store.resize({("moved",): 2})
        store.create({("big",): LeafSpec((2,), "bool")})
        store.delete([("g", "b")])
    expected = OLD[("a",)].clone()
    expected[0], expected[1] = -1, -2
    assert equal(contents(open_objects(MemoryEngine(engine.bucket))), {**OLD, ("a",): expected})


def test_flushing_commits_no_structure(saved):
    engine = MemoryEngine(saved.copy())
    store = open_objects(engine, mode="r+")
    store.write([Write(("a",), (slice(0, 1, 1),), torch.full((1, 10), -1))])
    store.flush()
    assert contents(open_objects(MemoryEngine(engine.bucket)))["a",][0, 0] == -1
    store.create({("new",): LeafSpec((3,), "int64")})
    store.flush()
    assert contents(open_objects(MemoryEngine(engine.bucket))).keys() == OLD.keys()
    store.save_header(numbered(3))
    assert ("new",) in contents(open_objects(MemoryEngine(engine.bucket)))
    store.close()


WRITERS = """
import os, sys, torch
from tdstore.bytestore import open_objects
from tdstore.header import Group, Header
from tdstore.storekit.local_engine import LocalEngine
from tdstore.types import Write

def write_for_ever(location):
    while True:
        store = open_objects(LocalEngine(location, durable=False), mode="r+", buffer_bytes=20_000, object_bytes=9_000)
        n = int(store.load_header().groups[()].batch_size[0]) + 1
        store.write([Write(("a",), (torch.randperm(400),), torch.full((400, 10), n))])
        store.write([Write(("b",), (slice(0, 50, 1),), torch.full((50,), n))])
        store.save_header(Header({(): Group(batch_size=(n,))}))
        store.close()

for line in sys.stdin:
    pid = os.fork()  # so that torch is imported once
    if not pid:
        write_for_ever(sys.argv[1])
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


def test_killed_writers_leave_a_whole_generation(tmp_path):
    location = tmp_path / "store"
    leaves = {("a",): torch.zeros(400, 10, dtype=torch.int64), ("b",): torch.zeros(50, dtype=torch.int64)}
    save(LocalEngine(location, durable=False), leaves, n=0).close()
    rng = random.Random(1)
    last = rounds = 0
    pipe = subprocess.PIPE
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*python(), "-c", WRITERS, str(location)], stdin=pipe, stdout=pipe, env=env) as writers:
        while rounds < 25 or not last:
            rounds += 1
            writers.stdin.write(b"go\n")
            writers.stdin.flush()
            pid = int(writers.stdout.readline())
            # Where none of them came to its first commit the machine is busy: the next ones live longer.
            time.sleep(rng.uniform(0.001, 0.15) * max(1, rounds - 24))
            os.kill(pid, signal.SIGKILL)
            assert writers.stdout.readline() == b"dead\n"
            store = open_objects(LocalEngine(location))
            n = store.load_header().groups[()].batch_size[0]
            a, b = store.read([Read(("a",)), Read(("b",))])
            assert bool((a == n).all()), "rows of two generations"
            assert bool((b == n).all())
            assert store.verify() == []
            assert n >= last
            last = n
        writers.stdin.close()
    with open_objects(LocalEngine(location, durable=False), mode="r+", keep_old=0.0) as store:
        store.save_header(numbered(last))
        store.collect(older_than=-1)
        on_disk = {f"data/{name}" for name in os.listdir(location / "data") if not is_temp(name)}
        assert on_disk == {o.name for o in store._before.objects}
    assert bool((contents(open_objects(LocalEngine(location)))[("a",)] == last).all())


# -- damaged objects -----------------------------------------------------------------------
def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def outcome(bucket):
    """What a reader sees; None when it is told that something is wrong."""
    try:
        return contents(open_objects(MemoryEngine(bucket)))
    except StoreError:
        return None


def test_no_damage_to_any_object_goes_unnoticed(saved):
    """Flip, cut, lengthen, empty, remove or swap each object, the manifest too: an error, or nothing of it is read."""
    rng = random.Random(0)
    names = saved.keys("")
    assert len(names) > 5
    silent = []
    for name in names:
        data = saved.bytes_of(name)
        other = saved.bytes_of(names[names.index(name) - 1])
        wrong = [flipped(data, at) for at in {0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(3))}]
        wrong += [data[:-1], data[: len(data) // 2], b"", data + b"x", other, bytes(len(data)), data[1:] + data[:1]]
        for damaged in (*wrong, None):
            bucket = saved.copy()
            if damaged is None:
                del bucket.objects[name]
            else:
                bucket.put(name, damaged)
            found = outcome(bucket)
            if found is not None and not equal(found, OLD):
                silent.append((name, damaged))
    assert not silent


def test_a_stale_manifest_is_an_older_generation(saved):
    engine = MemoryEngine(saved.copy())
    stale = engine.bucket.bytes_of("tdstore.json")
    with open_objects(engine, mode="r+") as store:
        change(store)
    engine.bucket.put("tdstore.json", stale)
    assert equal(contents(open_objects(MemoryEngine(engine.bucket))), OLD)


def test_damage_is_told_with_leaf_and_rows(saved):
    engine = MemoryEngine(Bucket())
    store = save(engine, {("g", "frames"): torch.zeros(20, 100, 100, dtype=torch.uint8), ("ok",): torch.arange(5)})
    (name,) = engine.bucket.keys()
    first = int(store._view.table.pieces.rows[0, 1])
    engine.bucket.put(name, flipped(engine.bucket.bytes_of(name), first + 7 * 10_000 + 5))
    reader = open_objects(MemoryEngine(engine.bucket))
    with pytest.raises(CorruptStoreError, match=r"'g' / 'frames' is damaged from row 7 on: bytes of data/"):
        reader.read([Read(("g", "frames"), (torch.tensor([3, 7, 9]),))])
    assert reader.read([Read(("g", "frames"), (torch.tensor([3, 8]),)), Read(("ok",))])[1].tolist() == [0, 1, 2, 3, 4]
    faults = reader.verify()
    assert [f.path for f in faults] == [("g", "frames")]
    assert "row 7" in faults[0].reason
    assert reader.verify([("ok",)]) == []
    as_it_is = open_objects(MemoryEngine(engine.bucket), verify="size")
    assert int(as_it_is.read([Read(("g", "frames"))])[0].sum()) == 0x10
    assert len(as_it_is.verify()) == 1


def test_a_missing_object_is_an_error_never_zeros(saved):
    engine = MemoryEngine(saved.copy())
    reader = open_objects(engine)
    for name in engine.bucket.keys():
        del engine.bucket.objects[name]
    with pytest.raises(CorruptStoreError, match=r"leaf 'a' cannot be read: data/.* is missing"):
        reader.read([Read(("a",), (slice(3, 4, 1),))])
    assert {f.path for f in reader.verify()} == set(OLD)


@pytest.mark.parametrize("verify", ["full", "size"])
def test_answers_that_are_wrong_once_are_asked_for_again(saved, verify):
    for spoil in (lambda d: d[:-1], lambda d: d + b"x", lambda d: flipped(d, len(d) // 2), None):
        if verify == "size" and spoil is not None and len(spoil(b"12345")) == 5:
            continue
        engine = MemoryEngine(saved)
        store = open_objects(engine, verify=verify)
        once = ["data"]
        engine.spoil = lambda key, data, once=once, spoil=spoil: spoil(data) if spoil and once and once.pop() else data

        def fault(verb, key, number, once=once, spoil=spoil):
            if spoil is None and once and once.pop():
                raise StoreNotFoundError("spurious", url=f"mem://bucket/{key}")

        engine.fault = fault
        assert equal(contents(store), OLD)
        assert not once


def test_answers_that_stay_wrong_are_an_error(saved):
    for spoil in (lambda d: d[:-1], lambda d: flipped(d, len(d) // 2)):
        engine = MemoryEngine(saved)
        store = open_objects(engine)
        engine.spoil = lambda key, data, spoil=spoil: spoil(data)
        with pytest.raises(CorruptStoreError, match="leaf '"):
            store.read([Read(("a",), (slice(0, 300, 1),))])
        with pytest.raises(CorruptStoreError):
            store.read([Read(("g", "b"))])


def test_damage_elsewhere_does_not_spoil_a_read(saved):
    """The first read fetches other leaves along; what is wrong with those concerns nobody yet."""
    engine = MemoryEngine(Bucket())
    store = save(engine, {("a",): torch.arange(9)})
    store.create({("b",): LeafSpec((9,), "int64")})
    store.write([Write(("b",), (), torch.arange(9))])
    store.save_header(Header())
    del engine.bucket.objects[store._before.objects[1].name]
    reader = open_objects(MemoryEngine(engine.bucket))
    assert reader.read([Read(("a",))])[0].tolist() == list(range(9))
    with pytest.raises(CorruptStoreError, match="'b'"):
        reader.read([Read(("b",))])


def test_damage_does_not_keep_others_from_committing(saved):
    engine = MemoryEngine(Bucket())
    leaves = {("a",): torch.zeros(5000, dtype=torch.int64), ("b",): torch.zeros(9, dtype=torch.int64)}
    save(engine, leaves, object_bytes=30_000).close()
    name = engine.bucket.keys()[0]
    engine.bucket.put(name, flipped(engine.bucket.bytes_of(name), 9))
    store = open_objects(MemoryEngine(engine.bucket), mode="r+")
    store.write([Write(("a",), (torch.arange(0, 5000, 9),), torch.ones(556, dtype=torch.int64))])
    store.write([Write(("b",), (), torch.ones(9, dtype=torch.int64))])
    store.close()
    assert contents_of(engine, ("b",)).tolist() == [1] * 9
    with pytest.raises(CorruptStoreError):
        contents_of(engine, ("a",))


def contents_of(engine, path):
    return open_objects(MemoryEngine(engine.bucket)).read([Read(path)])[0]
