"""Versions of the object layout: what they cost, kills at every request, and writers that are open meanwhile."""

from __future__ import annotations

import pytest
import torch

from tdstore.bytestore import open_objects
from tdstore.engine import EngineCap
from tdstore.errors import ConflictError, CorruptStoreError, StoreNotFoundError, TransientError, UnsupportedError
from tdstore.types import Read, Write
from tests.bytestore.memory_engine import ALL, MemoryEngine
from tests.bytestore.support import contents, equal, numbered, save

OLD = {("a",): torch.arange(40).view(8, 5), ("b",): torch.arange(3)}
ROW = (slice(2, 3, 1),)


class Killed(BaseException):
    """The end of the process, as far as the store can tell."""


@pytest.fixture
def engine():
    engine = MemoryEngine()
    save(engine, OLD, n=8).close()
    engine.reset()
    return engine


def again(engine):
    return MemoryEngine(engine.bucket, can=engine.can)


def put_row(store, value):
    store.write([Write(("a",), ROW, torch.full((1, 5), value))])


def made(engine, *values):
    """A writer, and the ids of a version for each value of the row."""
    store = open_objects(engine, mode="r+")
    ids = []
    for value in values:
        put_row(store, value)
        ids.append(store.save_version(numbered(8), f"row {value}").id)
    return store, ids


def row_of(engine, version=None):
    return open_objects(again(engine), version=version).read([Read(("a",), ROW)])[0].tolist()[0][0]


def test_a_version_costs_what_changed():
    engine = MemoryEngine()
    large = {("a",): torch.zeros(4096, 1024), ("b",): torch.arange(3)}
    with save(engine, large, n=4096) as store:
        store.save_version(numbered(4096), "")
        before = {key: len(data) for key, (data, _, _) in engine.bucket.objects.items()}
        engine.reset()
        store.write([Write(("a",), ROW, torch.ones(1, 1024))])
        store.save_version(numbered(4096), "")
        new = {key: len(data) for key, (data, _, _) in engine.bucket.objects.items() if key not in before}
        assert sum(new.values()) < 4096 + 3000
        assert [verb for verb, _ in engine.log] == ["put"] * 3  # the row, the version's manifest, the manifest
        assert store.versions()[1].new_bytes == sum(n for key, n in new.items() if key.startswith("data/"))


def test_a_commit_without_a_message_costs_what_it_did(engine):
    with open_objects(engine, mode="r+") as store:
        store.save_version(numbered(8), "")
        engine.reset()
        put_row(store, 7)
        store.save_header(numbered(8))
        assert [verb for verb, _ in engine.log] == ["put"] * 2
        assert len(store.versions()) == 1


def test_old_objects_are_held_for_versions_only(engine):
    store, ids = made(engine, 1, 2, 3)
    with store:
        store.drop_versions([], 0.0)
        assert [row_of(engine, one) for one in ids] == [1, 2, 3]
        assert store.drop_versions(ids[:2], 0.0) == ids[:2]
        assert [row_of(engine, ids[2]), row_of(engine)] == [3, 3]
        assert store.drop_versions(ids[2:], 0.0) == ids[2:]
        put_row(store, 4)
        store.save_header(numbered(8))
        assert store.collect(0.0) == []
    assert engine.bucket.keys("versions/") == []
    assert row_of(engine) == 4


def steps(engine, work):
    """Run `work` on copies of the bucket, killed before each of its writes; yields what is there afterwards."""
    done = False
    for number in range(1, 100):
        if done:
            return
        copy = MemoryEngine(engine.bucket.copy())

        def fault(verb, key, at, number=number):
            if verb in ("put", "delete") and at >= number:
                raise Killed

        copy.fault = fault
        try:
            work(copy)
            done = True
        except Killed:
            pass
        copy.fault = lambda verb, key, at: None
        yield copy


def test_a_version_is_wholly_there_or_not_at_every_kill(engine):
    store, ids = made(engine, 1)
    store.close()
    seen = set()
    for bucket in steps(engine, lambda copy: made(copy, 2)):
        found = open_objects(again(bucket)).versions()
        seen.add(len(found))
        assert [v.id for v in found][:1] == ids
        assert [row_of(bucket, v.id) for v in found] == [1, 2][: len(found)]
        assert row_of(bucket) == len(found)
        with open_objects(again(bucket), mode="r+") as after:
            after.collect(0.0)
        assert [row_of(bucket, v.id) for v in found] == [1, 2][: len(found)]
    assert seen == {1, 2}


def test_a_prune_that_is_killed_leaves_every_other_version(engine):
    store, ids = made(engine, 1, 2, 3, 4)
    store.close()
    seen = set()

    def prune(copy):
        open_objects(copy, mode="r+").drop_versions([ids[0], ids[2]], 0.0)

    for bucket in steps(engine, prune):
        found = [v.id for v in open_objects(again(bucket)).versions()]
        seen.add(len(found))
        assert set(found) >= {ids[1], ids[3]}
        assert [row_of(bucket, one) for one in found] == [1 + ids.index(one) for one in found]
        assert row_of(bucket) == 4
        with open_objects(again(bucket), mode="r+") as after:
            after.collect(0.0)
        assert [row_of(bucket, one) for one in found] == [1 + ids.index(one) for one in found]
    assert seen == {2, 4}


@pytest.mark.parametrize("can", [ALL, ALL & ~EngineCap.CONDITIONAL], ids=["conditional", "single-writer"])
def test_tags_and_prunes_do_not_disturb_a_writer(can):
    engine = MemoryEngine(can=can)
    options = {} if can == ALL else {"single_writer": True}
    save(engine, OLD, n=8, **options).close()
    store = open_objects(engine, mode="r+", **options)
    ids = []
    for value in (1, 2):
        put_row(store, value)
        ids.append(store.save_version(numbered(8), "").id)
    put_row(store, 3)
    with open_objects(again(engine), mode="r+", **options) as other:
        other.set_tag("best", ids[1])
        assert other.drop_versions(ids, 0.0) == ids[:1]
    store.save_header(numbered(8))
    assert [(v.id, v.tags) for v in store.versions()] == [(ids[1], ("best",))]
    assert [row_of(engine, ids[1]), row_of(engine)] == [2, 3]
    with open_objects(again(engine), mode="r+", **options) as other:
        other.set_tag("best", None)
    put_row(store, 4)
    third = store.save_version(numbered(8), "").id
    store.close()
    assert [(v.id, v.tags) for v in open_objects(again(engine)).versions()] == [(ids[1], ()), (third, ())]


def test_a_manifest_that_was_put_again_is_no_conflict(engine):
    store, ids = made(engine, 1)
    put_row(store, 2)
    engine.bucket.put("tdstore.json", engine.bucket.bytes_of("tdstore.json"))
    store.save_header(numbered(8))
    store.close()
    assert [row_of(engine, ids[0]), row_of(engine)] == [1, 2]


def test_a_tag_that_is_there_already_puts_nothing(engine):
    store, ids = made(engine, 1)
    with store:
        store.set_tag("best", ids[0])
        engine.reset()
        store.set_tag("best", ids[0])
        store.drop_versions([], 0.0)
        assert [verb for verb, _ in engine.log] == ["get"] * 2


def test_a_rival_commit_is_a_conflict_still(engine):
    store, ids = made(engine, 1)
    with open_objects(again(engine), mode="r+") as rival:
        put_row(rival, 2)
        rival.save_header(numbered(8))
        rival.set_tag("best", ids[0])
    put_row(store, 3)
    with pytest.raises(ConflictError, match="another writer committed"):
        store.save_version(numbered(8), "lost")
    store.close()
    assert [v.message for v in open_objects(again(engine)).versions()] == ["row 1"]
    assert len(engine.bucket.keys("versions/")) == 1


def test_a_lost_answer_is_looked_up(engine):
    store, ids = made(engine, 1)
    lost = iter(["lost"])
    engine.fault = lambda verb, key, number: next(lost, None) if (verb, key) == ("put", "tdstore.json") else None
    store.set_tag("best", ids[0])
    assert store.versions()[0].tags == ("best",)
    put_row(store, 2)
    store.save_header(numbered(8))
    assert store.versions()[0].tags == ("best",)
    store.close()


def test_a_commit_believed_lost_takes_over_later_tags(engine):
    store, ids = made(engine, 1)
    put_row(store, 2)
    down = []

    def fault(verb, key, number):
        if down:
            raise TransientError("nobody answers")
        if (verb, key) == ("put", "tdstore.json"):
            down.append(key)
            return "lost"
        return None

    engine.fault = fault
    with pytest.raises(TransientError):
        store.save_header(numbered(8))
    engine.fault = lambda verb, key, number: None
    with open_objects(again(engine), mode="r+") as other:
        other.set_tag("best", ids[0])
    put_row(store, 3)
    store.save_header(numbered(8))
    store.close()
    assert open_objects(again(engine)).versions()[0].tags == ("best",)
    assert [row_of(engine, ids[0]), row_of(engine)] == [1, 3]


def test_a_manifest_that_is_missing_stops_a_prune(engine):
    store, ids = made(engine, 1, 2)
    del engine.bucket.objects[f"versions/{ids[1]}.json"]
    before = set(engine.bucket.objects)
    with pytest.raises(CorruptStoreError, match=f"{ids[1]} is missing; nothing was pruned"):
        store.drop_versions(ids[:1], 0.0)
    assert set(engine.bucket.objects) == before
    store.close()


def test_pinned_readers_have_one_generation(engine):
    store, ids = made(engine, 1, 2)
    with store, open_objects(again(engine), version=ids[0]) as reader:
        put_row(store, 3)
        store.save_header(numbered(8))
        assert reader.refresh() is False
        assert reader.generation() == ids[0]
        assert reader.read([Read(("a",), ROW)])[0][0, 0] == 1


def test_a_replaced_dataset_has_its_versions(engine):
    store, ids = made(engine, 1)
    store.close()
    fresh = {("z",): torch.ones(2)}
    with save(again(engine), fresh, n=2) as store:
        assert [v.id for v in store.versions()] == ids
        assert store.collect(0.0) == []
    old = contents(open_objects(again(engine), version=ids[0]))
    assert old["a",][2, 0] == 1
    assert equal(contents(open_objects(again(engine))), fresh)


def test_versions_need_conditional_puts(engine):
    plain = MemoryEngine(engine.bucket, can=ALL & ~EngineCap.CONDITIONAL)
    with open_objects(plain, mode="r+") as store:
        for attempt in (lambda: store.set_tag("a", None), lambda: store.drop_versions([], 0.0)):
            with pytest.raises(UnsupportedError, match="no conditional put"):
                attempt()


def test_an_unknown_version_is_not_found(engine):
    for name in ("0" * 32, "../x", "", "latest"):
        with pytest.raises(StoreNotFoundError, match=r"has no version .*\n.*tdstore.versions"):
            open_objects(again(engine), version=name)
