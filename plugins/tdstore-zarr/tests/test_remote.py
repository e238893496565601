"""The protocol of object stores on engines that count, forget conditions or lose answers; and rivals for one store."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch
from tdstore_zarr.place.memory_engine import MemoryEngine
from tdstore_zarr.place.objects import CLAIM
from tdstore_zarr.store import open_on, open_zarr
from zarrhelp import NEW, OLD, everything, fill, header_of, load, same, save

from tdstore.engine import Blob, Buffer, EngineCap
from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    OptionError,
    StoreBusyError,
    StoreError,
    StoreExistsError,
    StoreIOError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.index.ranges import Range
from tdstore.types import LeafSpec, Read, Write

ROWS = 3000
BIG = {
    ("obs",): torch.randint(0, 255, (ROWS, 4200), dtype=torch.uint8),
    ("action",): torch.arange(ROWS),
    ("next", "reward"): torch.rand(ROWS),
    ("done",): torch.rand(ROWS) > 0.5,
}


class CountingEngine(MemoryEngine):
    """Counts rounds, requests and bytes."""

    def __init__(self, objects: dict[str, tuple[bytes, int]]) -> None:
        super().__init__("memory://counted", objects)
        self.clear()

    def clear(self) -> None:
        self.rounds = self.requests = self.bytes = 0

    def get(self, key: str, limit: int | None = None) -> Blob:
        self.rounds += 1
        self.requests += 1
        blob = super().get(key, limit)
        self.bytes += len(blob.data)
        return blob

    def get_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        self.rounds += bool(ranges)
        self.requests += len(ranges)
        found = super().get_ranges(ranges)
        self.bytes += sum(map(len, found))
        return found


def saved(leaves: Any, engine: MemoryEngine | None = None, **options: Any) -> MemoryEngine:
    engine = MemoryEngine("memory://x") if engine is None else engine
    with open_on(engine, mode="w", **options) as store:
        fill(store, leaves)
        store.save_header(header_of(leaves))
    return engine


# -- rounds -----------------------------------------------------------------------------------
def test_rounds_and_bytes() -> None:
    """Opening takes two rounds, a batch over all leaves one, and little more than was asked for."""
    engine = CountingEngine(saved(BIG, compressors="none").objects)
    store = open_on(engine)
    assert engine.rounds <= 2
    engine.clear()
    rows = torch.randint(0, ROWS, (64,))
    got = store.read([Read(path, (rows,)) for path in BIG])
    for value, path in zip(got, BIG, strict=True):
        assert torch.equal(value, BIG[path][rows])
    assert engine.rounds == 1
    assert engine.bytes < 4 * sum(value.nbytes for value in got) + (64 << 10) * 64
    engine.clear()
    store.read([Read(path, (slice(7, 8, 1),)) for path in BIG])
    assert engine.rounds <= 1
    engine.clear()
    store.read([Read(("action",), (rows,)), Read(("done",), (rows,))])
    assert engine.requests == 0, "small leaves are kept"
    store.close()


def test_commit_is_one_put_of_the_root() -> None:
    engine = saved(OLD)
    before = dict(engine.objects)
    store = open_on(engine, mode="w")
    fill(store, NEW)
    store.flush()
    assert same(everything(open_on(MemoryEngine("memory://y", dict(engine.objects)))), OLD)
    assert {k: v for k, v in engine.objects.items() if k in before} == before
    store.save_header(header_of(NEW))
    store.close()
    assert same(everything(open_on(engine, verify="full")), NEW)
    assert CLAIM not in engine.objects
    chunks = [k for k in engine.objects if not k.endswith("zarr.json")]
    assert all("/c." in k for k in chunks), "the chunks of the store before this one are gone"
    saved(OLD, engine)
    assert all("/c/" in k for k in engine.objects if not k.endswith("zarr.json"))
    assert same(everything(open_on(engine, verify="full")), OLD)


def test_abandoned_leaves_no_object() -> None:
    for engine in (MemoryEngine("memory://x"), saved(OLD)):
        before = dict(engine.objects)
        with open_on(engine, mode="w") as store:
            fill(store, NEW)
            store.flush()
            assert len(engine.objects) > len(before)
        assert engine.objects == before


def test_structure_in_place() -> None:
    engine = saved(OLD, chunks=8, shards=32)
    with open_on(engine, mode="r+") as store:
        fill(store, {("made", "x"): torch.ones(50, 9)})
        store.resize({("n", "b"): 130})
        store.rename({("a",): ("moved", "a"), ("c",): ("a",)})
        store.delete([("made", "x")])
        store.save_header(header_of({("moved", "a"): torch.ones(1)}))
    found = everything(open_on(engine, verify="full"))
    assert set(found) == {("moved", "a"), ("a",), ("n", "b")}
    assert torch.equal(found["moved", "a"], OLD[("a",)])
    assert torch.equal(found[("a",)], OLD[("c",)])
    assert found["n", "b"].tolist() == [*range(100), *([0] * 30)]


# -- rivals -----------------------------------------------------------------------------------
def test_rival_builders() -> None:
    engine = saved(OLD)
    first = open_on(engine, mode="w")
    with pytest.raises(StoreBusyError, match="open for writing in this process"):
        open_on(engine, mode="w")
    with pytest.raises(StoreBusyError):
        open_on(engine, mode="x")
    fill(first, NEW)
    first.save_header(header_of(NEW))
    first.close()
    with pytest.raises(StoreExistsError):
        open_on(engine, mode="x")
    assert CLAIM not in engine.objects
    assert same(everything(open_on(engine)), NEW)


def test_rival_updates_in_place() -> None:
    """Whoever claims first wins; the other is told before it writes anything, and readers wait for nobody."""
    engine = saved(OLD)
    first, second = (open_on(engine, mode="r+") for _ in range(2))
    first.write([Write(("a",), (), NEW[("a",)])])
    first.flush()
    before = dict(engine.objects)
    with pytest.raises(StoreBusyError, match="open for writing in this process"):
        second.write([Write(("a",), (), -NEW[("a",)])])
    with pytest.raises(StoreBusyError, match="open for writing in"):
        open_on(engine, mode="r+")
    assert same(everything(open_on(engine)), OLD)
    assert engine.objects == before
    first.close()
    with pytest.raises(StoreBusyError, match="changed by another writer"):
        second.write([Write(("a",), (), -NEW[("a",)])])
    second.close()
    assert torch.equal(everything(open_on(engine))[("a",)], NEW[("a",)])
    assert not [key for key in engine.objects if key.startswith("tdstore")]


class LostAnswers(MemoryEngine):
    """The put of a root goes through, and its answer says that it did not."""

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        tag = super().put(key, data, if_absent=if_absent, if_match=if_match)
        if key == "zarr.json":
            raise ConflictError("somebody else was faster", url=self.where(key))
        return tag


def test_a_lost_answer_is_read_back() -> None:
    engine = saved(OLD, LostAnswers("memory://lost"))
    assert same(everything(open_on(engine)), OLD)
    with open_on(engine, mode="r+") as store:
        store.write([Write(("a",), (), NEW[("a",)])])
    assert torch.equal(everything(open_on(engine))[("a",)], NEW[("a",)])


class Unreachable(MemoryEngine):
    """A server that is lost in the middle of a change, and comes back."""

    down = False

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        self._reach(key)
        return super().put(key, data, if_absent=if_absent, if_match=if_match)

    def delete(self, keys: Sequence[str]) -> None:
        self._reach("objects")
        super().delete(keys)

    def _reach(self, key: str) -> None:
        if self.down:
            raise StoreIOError(f"{key}: the server cannot be reached", url=self.url)


@pytest.mark.parametrize("commits", [True, False])
def test_discard_needs_no_server(commits: bool) -> None:
    """A container that is put back must not show what the server refused, nor commit it later."""
    engine = saved(OLD, Unreachable("memory://lost"))
    with open_on(engine, mode="r+") as store:
        store.create({("a",): LeafSpec((3, 2), "int8", fill_value=1)})
        store.write([Write(("c",), (), NEW[("c",)])])
        store.flush()
        engine.down = True
        with pytest.raises(StoreIOError):
            store.save_header(header_of(OLD))
        store.discard()
        assert same(everything(store), OLD)
        engine.down = False
        assert CLAIM in engine.objects
        if commits:
            store.write([Write(("c",), (), NEW[("c",)])])
    assert same(everything(open_on(engine, verify="full")), {**OLD, ("c",): NEW[("c",)]} if commits else OLD)
    assert not [key for key in engine.objects if key.startswith("tdstore.")]


class Plain(MemoryEngine):
    """No listing, no conditions: plain http, or a very simple server."""

    able = EngineCap.WRITE

    @property
    def can(self) -> EngineCap:
        return self.able


def test_engines_that_can_little() -> None:
    engine = Plain("memory://plain")
    with pytest.raises(UnsupportedError, match="conditional put.*\n.*single_writer=True"):
        saved(OLD, engine)
    assert not engine.objects
    saved(OLD, engine, single_writer=True)
    saved(NEW, engine, single_writer=True)
    with open_on(engine, mode="r+") as store, pytest.raises(UnsupportedError, match="conditional put"):
        store.write([Write(("a",), (), OLD[("a",)])])
    with open_on(engine, mode="r+", single_writer=True) as store:
        store.write([Write(("a",), (), OLD[("a",)])])
        store.write([Write(("a",), (), NEW[("a",)])])
    assert same(everything(open_on(engine, verify="full")), NEW)
    engine.able = EngineCap.NONE
    assert same(everything(open_on(engine)), NEW)
    with pytest.raises(UnsupportedError):
        open_on(engine, mode="r+")
    with pytest.raises(UnsupportedError):
        open_on(engine, mode="w")


def test_a_chunk_that_is_gone_is_an_error_never_zeros() -> None:
    engine = saved(BIG)
    for key in [k for k in engine.objects if "zarr.json" not in k]:
        objects = dict(engine.objects)
        del objects[key]
        with pytest.raises(CorruptStoreError, match=r"'(obs|action|reward|done)'.*missing"):
            everything(open_on(MemoryEngine("memory://gone", objects)))


# -- rivals for a folder --------------------------------------------------------------------------
def test_writers_in_place_wait_or_are_told(place: FsPath) -> None:
    save(place, OLD)
    first = open_zarr(place, mode="r+")
    second = open_zarr(place, mode="r+", lock_timeout=0)
    reader = open_zarr(place)
    first.write([Write(("a",), (), NEW[("a",)])])
    with pytest.raises(StoreBusyError, match="this process"):
        second.write([Write(("c",), (), NEW[("c",)])])
    assert same(load(place, verify="full"), OLD)
    first.close()
    with pytest.raises(StoreBusyError, match="changed by another"):
        second.write([Write(("c",), (), NEW[("c",)])])
    second.close()
    assert same(everything(reader), {**OLD, ("a",): NEW[("a",)]})
    assert same(load(place, verify="full"), {**OLD, ("a",): NEW[("a",)]})


def test_saving_over_the_source(place: FsPath) -> None:
    save(place, OLD)
    source = open_zarr(place)
    values = everything(source)
    with open_zarr(place, mode="w") as target:
        fill(target, {p: v + 1 if v.dtype != torch.bool else ~v for p, v in values.items()})
        target.save_header(header_of(values))
    source.close()
    assert same(load(place, verify="full"), NEW)


def _keep_saving(place: str, stop: Any) -> None:
    for turn in range(10_000):
        if stop.is_set():
            return
        save(place, NEW if turn % 2 else OLD, durable="none")


def test_readers_see_one_generation(place: FsPath) -> None:
    save(place, OLD)
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    rival = context.Process(target=_keep_saving, args=(str(place), stop))
    rival.start()
    whole = told = 0
    try:
        begun = time.monotonic()
        while (whole <= 3 or time.monotonic() - begun < 3) and time.monotonic() - begun < 60:
            try:
                found = load(place)
            except (StoreBusyError, StoreNotFoundError):
                told += 1
                continue
            assert same(found, OLD) or same(found, NEW)
            whole += 1
    finally:
        stop.set()
        rival.join()
    assert whole > 3


def _save_some(place: str, number: int, results: Any) -> None:
    value = {("a",): torch.full((1000, 8), float(number)), ("b",): torch.full((100,), number)}
    try:
        save(place, value, durable="none")
        results.put((number, None))
    except StoreError as error:
        results.put((number, str(error)))


def test_rival_saves_leave_one_of_them(place: FsPath) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    rivals = [context.Process(target=_save_some, args=(str(place), n, results)) for n in range(4)]
    for rival in rivals:
        rival.start()
    assert all(results.get(timeout=200)[1] is None for _ in rivals)
    for rival in rivals:
        rival.join()
    found = load(place, verify="full")
    (number,) = found[("b",)].unique().tolist()
    assert (found[("a",)] == number).all()
    assert os.listdir(place.parent) == [place.name]


# -- layouts ---------------------------------------------------------------------------------------
def test_default_layout(place: FsPath) -> None:
    with open_zarr(place, mode="w") as store:
        store.create(
            {
                ("frames",): LeafSpec((100_000, 84, 84), "uint8"),
                ("small",): LeafSpec((100_000,), "float32"),
                ("huge",): LeafSpec((4, 3000, 3000), "float64"),
                ("scan",): LeafSpec((100_000, 84, 84), "uint8", layout="scan"),
            }
        )
        metas = {path[0]: leaf.meta for path, leaf in store._session.leaves.items()}
    assert metas["frames"].inner == (1, 84, 84)
    assert 4 << 20 <= 84 * 84 * metas["frames"].chunks[0] <= 64 << 20
    assert metas["small"].inner == (8192,)
    assert metas["huge"].inner_bytes <= 4 << 20
    assert metas["scan"].inner[0] > 100


def test_options_are_checked(place: FsPath) -> None:
    for options in ({"chunks": 0}, {"chunks": "x"}, {"shards": -1}, {"compressors": "lzma2"}, {"layout": "fast"}):
        with pytest.raises(OptionError, match=next(iter(options))), open_zarr(place, mode="w", **options) as store:
            store.create({("a",): LeafSpec((3, 4), "int8")})
    with open_zarr(place, mode="w") as store, pytest.raises(OptionError, match="did you mean 'chunks'"):
        store.create({("a",): LeafSpec((3, 4), "int8", chunk=3)})
    assert not place.exists()


def test_many_leaves(place: FsPath) -> None:
    leaves = {(f"leaf{i}",): torch.full((4,), i) for i in range(1500)}
    save(place, leaves, durable="none")
    assert same(load(place), leaves)
