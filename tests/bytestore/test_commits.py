"""Commits: rivals, lost acknowledgements, engines without conditions, old generations, and what is left behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from tdstore.bytestore import open_objects
from tdstore.engine import EngineCap
from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    ReadOnlyError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
    TransientError,
    UnsupportedError,
)
from tdstore.header import Header
from tdstore.storekit.local_engine import LocalEngine
from tdstore.types import LeafSpec, Read, Write
from tests.bytestore.memory_engine import ALL, MemoryEngine
from tests.bytestore.support import contents, equal, numbered, save

OLD = {("a",): torch.arange(40).view(8, 5), ("b",): torch.arange(3)}
ROW = (slice(2, 3, 1),)


def put_row(store, value):
    store.write([Write(("a",), ROW, torch.full((1, 5), value))])


def row_of(engine):
    return open_objects(engine).read([Read(("a",), ROW)])[0].tolist()[0][0]


@pytest.fixture
def engine():
    engine = MemoryEngine()
    save(engine, OLD, n=8).close()
    engine.reset()
    return engine


def again(engine):
    return MemoryEngine(engine.bucket, can=engine.can)


def test_threads_that_read_see_what_they_wrote_while_others_commit(engine):
    """Neither rows of before, kept by a read that another thread's write overtook, nor bytes of another piece."""
    with save(MemoryEngine(), {("a",): torch.zeros(64, 3), ("b",): torch.zeros(64, 40)}, n=64) as store:
        wrong = []

        def work(thread):
            rows = (slice(8 * thread, 8 * thread + 8, 1),)
            for turn in range(1, 150):
                store.write([Write((k,), rows, torch.full((8, n), float(turn))) for k, n in (("a", 3), ("b", 40))])
                if turn % 7 == thread % 7:
                    store.save_header(numbered(64))
                for value in store.read([Read(("a",), rows), Read(("b",), rows)]):
                    if not bool((value == turn).all()):
                        wrong.append((thread, turn, value))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


# -- rivals --------------------------------------------------------------------------------
def test_of_two_rivals_one_wins_and_the_other_is_told(engine):
    first, second = open_objects(engine, mode="r+"), open_objects(again(engine), mode="r+")
    put_row(first, 100)
    put_row(second, 200)
    first.save_header(numbered(1))
    with pytest.raises(ConflictError, match="another writer committed generation") as caught:
        second.save_header(numbered(2))
    assert "open it again" in caught.value.hint
    assert second.read([Read(("a",), ROW)])[0].tolist()[0] == [200] * 5  # to be put in again by hand
    with pytest.raises(ConflictError):
        put_row(second, 300)
    second.close()
    first.close()
    assert row_of(again(engine)) == 100
    named = {o.name for o in first._before.objects} | {r.name for r in first._before.retired}
    assert set(engine.bucket.keys()) == named, "the loser left objects behind"


def test_rivals_for_a_new_store():
    one = MemoryEngine()
    first, second = open_objects(one, mode="w"), open_objects(again(one), mode="w")
    for n, store in enumerate((first, second)):
        store.create({("n",): LeafSpec((), "int64", fill_value=n)})
    second.save_header(Header())
    with pytest.raises(ConflictError, match="made a store there"):
        first.save_header(Header())
    first.close()
    assert contents(open_objects(again(one)))[("n",)].item() == 1


def test_many_threads_lose_nothing_that_was_acknowledged(tmp_path):
    """Eight writers add one to a counter each, again and again, until told that it worked."""
    location = tmp_path / "s"
    save(LocalEngine(location, durable=False), {("n",): torch.zeros(1, dtype=torch.int64)}).close()
    conflicts = []

    def work():
        for _ in range(6):
            while True:
                store = open_objects(LocalEngine(location, durable=False), mode="r+")
                value = store.read([Read(("n",))])[0]
                store.write([Write(("n",), (), value + 1)])
                try:
                    store.save_header(Header())
                    break
                except ConflictError as error:
                    conflicts.append(error)
                finally:
                    store.close()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(open_objects(LocalEngine(location)))[("n",)].item() == 48


# -- lost answers --------------------------------------------------------------------------
def fail_manifest(engine, *answers):
    left = list(answers)
    engine.fault = lambda verb, key, number: left.pop(0) if verb == "put" and key == "tdstore.json" and left else None


@pytest.mark.parametrize("answers", [("lost",), ("fail",), ("fail", "lost"), ("fail", "fail"), ("torn",)])
def test_a_commit_survives_lost_answers(engine, answers):
    store = open_objects(engine, mode="r+")
    put_row(store, 100)
    fail_manifest(engine, *answers)
    store.save_header(numbered(1))
    put_row(store, 101)
    store.save_header(numbered(2))  # and knows the tag of what is there
    store.close()
    assert row_of(again(engine)) == 101


def test_an_answer_lost_by_the_engine_is_not_taken_for_a_rival(engine):
    """The engine repeats the put by itself, and the condition does not hold any more: because of us."""
    store = open_objects(engine, mode="r+")
    put_row(store, 100)
    real = engine.put

    def put(key, data, **conditions):
        tag = real(key, data, **conditions)
        return real(key, data, **conditions) if key == "tdstore.json" else tag

    engine.put = put
    store.save_header(numbered(1))
    engine.put = real
    store.close()
    assert row_of(again(engine)) == 100


def test_a_lost_answer_and_a_rival(engine):
    store = open_objects(engine, mode="r+")
    put_row(store, 100)
    fail_manifest(engine, "fail")
    with open_objects(again(engine), mode="r+") as rival:
        put_row(rival, 7)
    with pytest.raises(ConflictError):
        store.save_header(numbered(1))
    store.close()
    assert row_of(again(engine)) == 7


def test_when_nobody_answers_nothing_that_may_be_needed_is_removed(engine):
    store = open_objects(engine, mode="r+")
    put_row(store, 100)
    down = []

    def fault(verb, key, number):
        if down and verb == "get":
            raise TransientError("no route", url="mem://")
        if verb == "put" and key == "tdstore.json":
            down.append(1)
            return "lost"
        return None

    engine.fault = fault
    with pytest.raises(TransientError, match="is not known"):
        store.save_header(numbered(1))
    engine.fault = lambda verb, key, number: None
    before = engine.bucket.keys()
    store.discard()  # the process gives up
    store.close()
    assert engine.bucket.keys() == before
    assert row_of(again(engine)) == 100


@pytest.mark.parametrize("answer", ["lost", "fail"])
@pytest.mark.parametrize("can", [ALL, ALL & ~EngineCap.CONDITIONAL], ids=["conditions", "none"])
def test_a_commit_whose_end_nobody_knew_can_be_repeated(answer, can):
    engine = MemoryEngine(can=can)
    save(engine, OLD, single_writer=True).close()
    store = open_objects(engine, mode="r+", single_writer=True)
    put_row(store, 100)
    down = []

    def fault(verb, key, number):
        if down and verb == "get":
            raise TransientError("no route", url="mem://")
        if verb == "put" and key == "tdstore.json":
            down.append(1)
            return answer
        return None

    engine.fault = fault
    with pytest.raises(TransientError, match="is not known"):
        store.save_header(numbered(1))
    engine.fault = lambda verb, key, number: None
    put_row(store, 101)
    store.save_header(numbered(2))
    put_row(store, 102)
    store.close()
    assert row_of(again(engine)) == 102
    named = {o.name for o in store._before.objects} | {r.name for r in store._before.retired}
    assert set(engine.bucket.keys()) == named


# -- engines that can do less --------------------------------------------------------------
def test_without_conditions_a_single_writer_must_be_promised():
    engine = MemoryEngine(can=ALL & ~EngineCap.CONDITIONAL)
    store = open_objects(engine, mode="w")
    with pytest.raises(UnsupportedError, match="conditional put") as caught:
        store.create({("a",): LeafSpec((3,), "int8")})
    assert "single_writer=True" in caught.value.hint
    store.close()
    assert not engine.bucket.objects


def test_a_single_writer_still_notices_another():
    engine = MemoryEngine(can=ALL & ~EngineCap.CONDITIONAL)
    save(engine, OLD, single_writer=True).close()
    store = open_objects(again(engine), mode="r+", single_writer=True)
    put_row(store, 1)
    with open_objects(again(engine), mode="r+", single_writer=True) as other:
        put_row(other, 2)
    with pytest.raises(ConflictError):
        store.save_header(Header())
    store.close()
    assert row_of(again(engine)) == 2


def test_a_read_only_engine(engine):
    plain = MemoryEngine(engine.bucket, can=EngineCap.NONE)
    for mode in ("r+", "w", "x", "a"):
        with pytest.raises(ReadOnlyError, match="cannot be written"):
            open_objects(plain, mode=mode)
    assert equal(contents(open_objects(plain)), OLD)


# -- modes ---------------------------------------------------------------------------------
def test_a_foreign_manifest_is_not_replaced():
    engine = MemoryEngine()
    engine.bucket.put("tdstore.json", b"mine, not yours")
    with pytest.raises(StoreExistsError):
        open_objects(engine, mode="w")
    with pytest.raises(CorruptStoreError):
        open_objects(engine)


def test_a_damaged_store_can_be_replaced(engine):
    data = engine.bucket.bytes_of("tdstore.json")
    engine.bucket.put("tdstore.json", data[:-30])
    with pytest.raises(CorruptStoreError):
        open_objects(engine)
    save(again(engine), OLD).close()
    assert equal(contents(open_objects(again(engine))), OLD)


def test_nothing_there():
    with pytest.raises(StoreNotFoundError, match=r"tdstore\.json"):
        open_objects(MemoryEngine())


def test_uploaded_objects_of_an_abandoned_store_are_removed():
    engine = MemoryEngine()
    store = open_objects(engine, mode="w", buffer_bytes=1000)
    store.create({("a",): LeafSpec((100, 100), "uint8")})
    store.write([Write(("a",), (), torch.ones(100, 100, dtype=torch.uint8))])
    assert len(engine.bucket.keys()) > 2
    store.close()
    assert not engine.bucket.objects
    assert engine.closed


def test_a_store_that_was_changed_is_held_until_it_is_closed(engine):
    store = open_objects(engine, mode="r+")
    put_row(store, 9)
    held = weakref.ref(store)
    del store
    gc.collect()
    held().close()
    assert row_of(again(engine)) == 9
    gc.collect()
    assert held() is None


def test_reopen_token_commits_and_reads(engine):
    store = open_objects(engine, mode="r+", reopen=("place", {"verify": "size"}))
    put_row(store, 5)
    assert store.reopen_token() == ("place", "r", {"verify": "size"})
    assert row_of(again(engine)) == 5
    fresh = open_objects(MemoryEngine(), mode="w", reopen=("place", {}))
    with pytest.raises(StoreNotFoundError, match="not saved"):
        fresh.reopen_token()


# -- generations ---------------------------------------------------------------------------
def test_a_reader_keeps_its_generation_until_it_is_refreshed(engine):
    reader = open_objects(again(engine))
    generation = reader.opened_generation
    assert reader.refresh() is False
    with open_objects(engine, mode="r+") as writer:
        writer.delete([("b",)])
        put_row(writer, 77)
        writer.save_header(numbered(5))
    assert equal(contents(reader), OLD)
    assert reader.refresh() is True
    assert reader.opened_generation == writer.opened_generation != generation
    assert list(reader.paths()) == [("a",)]
    assert reader.read([Read(("a",), ROW)])[0].tolist()[0] == [77] * 5
    assert reader.load_header() == numbered(5)


def test_a_writer_with_changes_is_not_refreshed(engine):
    store = open_objects(engine, mode="r+")
    put_row(store, 1)
    with pytest.raises(StoreError, match="changes of its own"):
        store.refresh()
    store.flush()
    assert store.refresh() is False
    with open_objects(again(engine), mode="r+") as other:
        put_row(other, 2)
    assert store.refresh() is True
    put_row(store, 3)
    store.close()
    assert row_of(again(engine)) == 3


def test_old_objects_stay_for_a_while_and_then_go(engine):
    first = engine.bucket.keys()
    with open_objects(engine, mode="r+", keep_old=0.0) as store:
        store.write([Write(path, (), value) for path, value in OLD.items()])
        store.save_header(numbered(1))
        assert not set(first) & set(engine.bucket.keys())
    with open_objects(again(engine), mode="r+") as store:
        kept = engine.bucket.keys()
        store.write([Write(path, (), value + 1) for path, value in OLD.items()])
        store.save_header(numbered(1))
        assert set(kept) < set(engine.bucket.keys())
        total = sum(len(engine.bucket.bytes_of(k)) for k in (*engine.bucket.keys(), "tdstore.json"))
        assert store.nbytes_stored() == total
    with open_objects(again(engine), mode="r+", keep_old=0.0) as store:
        store.save_header(numbered(2))
        assert not set(kept) & set(engine.bucket.keys())
    assert contents(open_objects(again(engine)))[("b",)].tolist() == [1, 2, 3]


def test_replacing_retires_what_was_there(engine):
    first = engine.bucket.keys()
    reader = open_objects(again(engine))
    with open_objects(engine, mode="w") as store:
        store.create({("c",): LeafSpec((2,), "int8")})
        store.save_header(Header())
        assert [r.name for r in store._before.retired] == first
    assert equal(contents(reader), OLD)


def test_a_reader_of_removed_objects_is_told(engine):
    reader = open_objects(again(engine))
    with open_objects(engine, mode="w", keep_old=0.0) as store:
        store.create({("a",): LeafSpec((8, 5), "int64")})
        store.save_header(Header())
    with pytest.raises(CorruptStoreError, match="'a'.*missing") as caught:
        reader.read([Read(("a",))])
    assert "open it again" in caught.value.hint


def test_what_was_written_twice_before_a_commit_is_removed_at_once():
    engine = MemoryEngine()
    store = open_objects(engine, mode="w", buffer_bytes=100)
    store.create({("a",): LeafSpec((50,), "int64")})
    for n in range(5):
        store.write([Write(("a",), (), torch.full((50,), n))])
    assert len(engine.bucket.keys()) > 1
    store.save_header(Header())
    assert set(engine.bucket.keys()) == {o.name for o in store._before.objects}


# -- collecting ----------------------------------------------------------------------------
def test_collect_removes_what_killed_writers_left(engine):
    orphan = f"data/{'0' * 32}-1.bin"
    engine.bucket.put(orphan, b"left")
    engine.bucket.put("data/notes.txt", b"a user's")
    with open_objects(engine, mode="r+") as store:
        put_row(store, 1)
        with pytest.raises(StoreError, match="not committed"):
            store.collect()
        store.save_header(numbered(1))
        assert store.collect() == []
        assert store.collect(older_than=-1) == [orphan]
    assert "data/notes.txt" in engine.bucket.objects
    assert row_of(again(engine)) == 1
    with pytest.raises(ReadOnlyError):
        open_objects(again(engine)).collect()


def test_a_slow_writer_whose_objects_were_collected_is_told(engine, monkeypatch):
    monkeypatch.setattr("tdstore.bytestore.commit.LONG_UPLOAD", 0.0)
    slow = open_objects(engine, mode="r+", buffer_bytes=10)
    put_row(slow, 100)
    time.sleep(0.01)
    with open_objects(again(engine), mode="r+") as other:
        assert len(other.collect(older_than=0)) == 1
    with pytest.raises(StoreError, match="were deleted"):
        slow.save_header(numbered(1))
    slow.discard()
    slow.close()
    assert row_of(again(engine)) == 10
