"""Extents, and any sequence of writes and commits against a dict, in crumbs and with fragmentation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tdstore.bytestore import open_objects
from tdstore.bytestore import tidy as bytestore_tidy
from tdstore.bytestore.table import NOTHING, Extents, Leaf, coalesce, locate, overlay, select
from tdstore.header import Header
from tdstore.storekit.documents import NAME
from tdstore.testing.samples import assign, pick, same, sample, store_indices
from tdstore.types import LeafSpec, Read, Write
from tests.bytestore.memory_engine import Bucket, MemoryEngine
from tests.bytestore.support import contents, equal, save

SIZE = 60


@st.composite
def extents(draw):
    edges = sorted(draw(st.sets(st.integers(0, SIZE), max_size=12)))
    spans = [(a, b) for a, b in zip(edges, edges[1:]) if draw(st.booleans())]
    pieces = [draw(st.integers(0, 2)) for _ in spans]
    offsets = [draw(st.sampled_from([0, 5, a])) for a, _ in spans]
    columns = [[a for a, _ in spans], [b for _, b in spans], pieces, offsets]
    return Extents(*(np.array(c, np.int64) for c in columns))


def as_bytes(e):
    """Which piece and offset each byte of a leaf comes from."""
    out = [None] * SIZE
    for a, b, piece, offset in zip(*(c.tolist() for c in e)):
        for i in range(a, b):
            assert out[i] is None
            out[i] = (piece, offset + i - a)
    assert e.start.tolist() == sorted(e.start.tolist())
    return out


@given(extents(), extents())
def test_overlay_is_one_over_the_other(old, new):
    expected = [b if b is not None else a for a, b in zip(as_bytes(old), as_bytes(new))]
    assert as_bytes(overlay(old, new)) == expected
    assert as_bytes(overlay(old, NOTHING)) == as_bytes(old)
    assert as_bytes(coalesce(old)) == as_bytes(old)


def test_rows_at_the_end_lengthen_the_last_extent_or_are_one_more():
    old = Extents(*map(np.array, ([0, 20], [10, 30], [1, 2], [0, 5])))
    longer = overlay(old, Extents(*map(np.array, ([30, 50], [40, 60], [2, 2], [15, 35]))))
    assert [column.tolist() for column in longer] == [[0, 20, 50], [10, 40, 60], [1, 2, 2], [0, 5, 35]]
    for start, piece, offset in ((31, 2, 16), (30, 3, 15), (30, 2, 14)):
        other = overlay(old, Extents(*map(np.array, ([start], [start + 10], [piece], [offset]))))
        assert other.start.tolist() == [0, 20, start]


@given(extents(), st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, 20)), max_size=6))
def test_locate_finds_every_byte_of_every_range(e, spans):
    ranges = np.array([(a, min(a + n, SIZE)) for a, n in spans], np.int64).reshape(-1, 2)
    found = {}
    for q, k, a, b in zip(*(c.tolist() for c in locate(e, ranges))):
        for i in range(a, b):
            found[q, i] = (int(e.piece[k]), int(e.offset[k]) + i - int(e.start[k]))
    known = as_bytes(e)
    expected = {(q, i): known[i] for q, (a, b) in enumerate(ranges.tolist()) for i in range(a, b) if known[i]}
    assert found == expected


@given(extents(), st.integers(0, SIZE))
def test_select_cuts(e, length):
    kept = as_bytes(select(e, np.array([[0, length]])))
    assert kept == [b if i < length else None for i, b in enumerate(as_bytes(e))]


# -- a store beside a dict -------------------------------------------------------------------
PATHS = (("a",), ("b",), ("g", "c"))
SHAPES = st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 3))


class Fragments(RuleBasedStateMachine):
    """Small buffers, small objects, few extents allowed: every path through packing and tidying."""

    @initialize(buffer=st.sampled_from([1, 100, 10_000]), objects=st.sampled_from([1, 64, 500]))
    def start(self, buffer, objects):
        self.limits = {"buffer_bytes": buffer, "object_bytes": objects, "keep_old": 0.0}
        self.bucket = Bucket()
        self.model = {}
        self.store = open_objects(MemoryEngine(self.bucket), mode="w", **self.limits)
        self.store.save_header(Header())
        self.start_anew()

    def start_anew(self):
        """All is as it was committed."""
        self.committed = dict(self.model)
        self.origin = {path: path for path in self.model}
        self.written = {path: torch.zeros(value.shape, dtype=torch.bool) for path, value in self.model.items()}

    @rule(path=st.sampled_from(PATHS), shape=SHAPES, dtype=st.sampled_from(["int64", "bool", "bfloat16"]))
    def create(self, path, shape, dtype):
        spec = LeafSpec(shape, dtype, fill_value=1)
        self.store.create({path: spec})
        self.model[path] = torch.full(spec.shape, 1, dtype=spec.dtype)
        self.origin.pop(path, None)
        self.written[path] = torch.zeros(spec.shape, dtype=torch.bool)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), seed=st.integers(0, 50))
    def write(self, data, seed):
        path = data.draw(st.sampled_from(sorted(self.model)))
        old = self.model[path]
        index = data.draw(store_indices(tuple(old.shape)))
        value = sample(old.dtype, tuple(pick(old, index).shape), seed)
        self.store.write([Write(path, index, value)])
        self.model[path] = assign(old, index, value)
        self.written[path] = assign(self.written[path], index, torch.ones(value.shape, dtype=torch.bool))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), length=st.integers(0, 12))
    def resize(self, data, length):
        path = data.draw(st.sampled_from(sorted(self.model)))
        old = self.model[path]
        self.store.resize({path: length})
        new = torch.full((length, *old.shape[1:]), 1, dtype=old.dtype)
        new[: min(length, len(old))] = old[:length]
        self.model[path] = new
        written = torch.zeros(new.shape, dtype=torch.bool)
        written[: min(length, len(old))] = self.written[path][:length]
        self.written[path] = written

    @precondition(lambda self: self.model)
    @rule(data=st.data(), new=st.sampled_from(PATHS))
    def rename(self, data, new):
        path = data.draw(st.sampled_from(sorted(self.model)))
        self.store.rename({path: new})
        origin = self.origin.pop(path, None)
        self.origin.pop(new, None)
        self.model[new] = self.model.pop(path)
        self.written[new] = self.written.pop(path)
        if origin is not None:
            self.origin[new] = origin

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data):
        path = data.draw(st.sampled_from(sorted(self.model)))
        self.store.delete([path])
        del self.model[path]
        self.origin.pop(path, None)

    @rule()
    def commit(self):
        self.store.save_header(Header())
        self.start_anew()

    @rule(leave=st.booleans())
    def discard(self, leave):
        """What was committed last is there."""
        self.store.discard()
        self.model = dict(self.committed)
        self.start_anew()
        if leave:
            self.store.close()
            self.store = open_objects(MemoryEngine(self.bucket), mode="r+", **self.limits)

    @rule()
    def close(self):
        """Rows of leaves of the last commit are committed, and nothing else is."""
        self.store.close()
        expected = dict(self.committed)
        for path, origin in self.origin.items():
            now, before = self.model[path], expected[origin]
            common = min(len(now), len(before))
            value = before.clone()
            value[:common] = torch.where(self.written[path][:common], now[:common], before[:common])
            expected[origin] = value
        self.model = expected
        self.start_anew()
        self.store = open_objects(MemoryEngine(self.bucket), mode="r+", **self.limits)

    @invariant()
    def agrees(self):
        if not hasattr(self, "store"):
            return
        found = contents(self.store)
        assert found.keys() == self.model.keys()
        for path, value in self.model.items():
            assert same(found[path], value), path
        fresh = contents(open_objects(MemoryEngine(self.bucket)))
        assert fresh.keys() == self.committed.keys()
        for path, value in self.committed.items():
            assert same(fresh[path], value), path

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            assert set(self.bucket.keys()) == {o.name for o in self.store._before.objects}, "left behind"


@pytest.fixture
def crowding(monkeypatch):
    """Allow next to nothing, so that tidying happens all the time."""
    for name in ("SPARE", "SMALL_SPARE", "MANY_TINY"):
        monkeypatch.setattr(bytestore_tidy, name, 2)
    monkeypatch.setattr(bytestore_tidy, "SMALL_LEAF", 50)
    monkeypatch.setattr(bytestore_tidy, "WINDOW", 40)
    monkeypatch.setattr("tdstore.bytestore.view.SMALL_LEAF", 30)
    monkeypatch.setattr("tdstore.bytestore.table.SMALL_GRAIN", 16)


def test_any_sequence_of_calls(crowding):
    run_state_machine_as_test(
        Fragments,
        settings=settings(
            max_examples=60,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# -- fragmentation ---------------------------------------------------------------------------
def test_ten_thousand_row_updates_stay_bounded():
    """Rows of a leaf of 16 MB, 250 a commit: few extents, few objects, and not much more on the medium."""
    rows = 10_000
    expected = torch.zeros(rows, 400, dtype=torch.int32)
    engine = MemoryEngine()
    small = torch.zeros(rows, dtype=torch.int64)
    store = save(engine, {("a",): expected, ("small",): small}, keep_old=0.0)
    generator = torch.Generator().manual_seed(0)
    for turn in range(40):
        index = torch.randint(0, rows, (250,), generator=generator)
        value = torch.full((250, 400), turn + 1, dtype=torch.int32)
        store.write([Write(("a",), (index,), value), Write(("small",), (index,), value[:, 0].long())])
        expected[index] = turn + 1
        small[index] = turn + 1
        store.save_header(Header())
    leaf = store._view.table.leaves[("a",)]
    assert len(leaf.extents.start) <= bytestore_tidy.allowed(leaf.spec.nbytes)
    assert len(store._view.table.leaves[("small",)].extents.start) <= bytestore_tidy.SMALL_SPARE
    assert len(engine.bucket.bytes_of(NAME)) < 100_000
    assert len(engine.bucket.keys()) <= bytestore_tidy.MANY_TINY + 110
    live = sum(v.nbytes for v in (expected, small))
    assert store.nbytes_stored() < 5 * live
    store.close()
    assert equal(contents(open_objects(MemoryEngine(engine.bucket))), {("a",): expected, ("small",): small})


def test_rows_that_are_appended_one_by_one_are_copied_a_few_times_each():
    engine = MemoryEngine()
    rows, wide, narrow = 700, torch.arange(700 * 64).to(torch.uint8).view(-1, 64), torch.arange(700)
    store = save(engine, {("a",): wide[:10], ("b",): narrow[:10]})
    lengths, most = [], 0
    for row in range(10, rows):
        store.resize({("a",): row + 1, ("b",): row + 1})
        at = (slice(row, row + 1, 1),)
        store.write([Write(("a",), at, wide[row : row + 1]), Write(("b",), at, narrow[row : row + 1])])
        store.save_header(Header())
        lengths += [len(leaf.extents.start) for leaf in store._view.table.leaves.values()]
        most = max(most, len(store._view.table.objects))
    assert max(lengths) <= bytestore_tidy.SMALL_SPARE and most <= bytestore_tidy.SMALL_SPARE + 1
    # With `keep_old` nothing is removed: what is there is what was put. A row alone is 132 bytes, with its checksums.
    assert len(engine.bucket.keys()) == 1 + rows - 10
    assert sum(len(engine.bucket.bytes_of(key)) for key in engine.bucket.keys()) < 6 * 132 * rows
    store.close()
    assert equal(contents(open_objects(MemoryEngine(engine.bucket))), {("a",): wide, ("b",): narrow})


def test_what_is_merged_of_a_small_leaf_is_its_end():
    def merged(*sizes):
        stop = torch.tensor(sizes).cumsum(0).numpy()
        extents = Extents(stop - sizes, stop, np.arange(len(sizes)), stop * 0)
        ranges = bytestore_tidy.ranges_to_merge(Leaf(LeafSpec((int(stop[-1]),), "uint8"), extents))
        return ranges if ranges is None else ranges.tolist()

    ones = (1,) * 13
    assert merged(100, 20, 7, *ones) is None
    assert merged(100, 23, 13, 1, *ones) == [[100, 150]]
    assert merged(100, 24, 13, 1, *ones) == [[0, 151]]
    assert merged(162, 54, 13, 1, *ones) == [[216, 243]]
    assert merged(161, 54, 13, 1, *ones) == [[0, 242]]
    assert merged(*ones, 10, 54, 13, 100) == [[0, 190]]
    # At most half of the allowed number stays, also where each is large enough.
    assert merged(*(3**n for n in range(12, 3, -1)), *ones[:8])[0][0] == sum(3**n for n in range(12, 4, -1))


def test_a_column_write_does_not_make_an_extent_of_each_element():
    engine = MemoryEngine()
    value = torch.zeros(20_000, 20)
    store = save(engine, {("a",): value})
    store.write([Write(("a",), (slice(0, 20_000, 1), slice(3, 4, 1)), torch.ones(20_000, 1))])
    value[:, 3] = 1
    store.save_header(Header())
    assert len(store._view.table.leaves[("a",)].extents.start) < 1100
    assert equal(contents(open_objects(MemoryEngine(engine.bucket))), {("a",): value})


def test_a_half_empty_object_is_given_up():
    engine = MemoryEngine()
    value = torch.zeros(1000, 1000, dtype=torch.uint8)
    store = save(engine, {("a",): value}, keep_old=0.0)
    first = engine.bucket.keys()
    store.write([Write(("a",), (slice(0, 900, 1),), torch.ones(900, 1000, dtype=torch.uint8))])
    value[:900] = 1
    store.save_header(Header())
    assert not set(first) & set(engine.bucket.keys())
    assert equal(contents(open_objects(MemoryEngine(engine.bucket))), {("a",): value})


def test_a_lazily_created_leaf_of_a_terabyte_takes_nothing():
    engine = MemoryEngine()
    store = open_objects(engine, mode="w")
    store.create({("a",): LeafSpec((1 << 28, 4096), "uint8", fill_value=3)})
    store.write([Write(("a",), (slice(1 << 27, (1 << 27) + 1, 1),), torch.zeros(1, 4096, dtype=torch.uint8))])
    store.save_header(Header())
    assert store.nbytes_stored() < 10_000
    rows = torch.tensor([0, 1 << 27, (1 << 28) - 1])
    reader = open_objects(MemoryEngine(engine.bucket))
    assert reader.read([Read(("a",), (rows,))])[0][:, 5].tolist() == [3, 0, 3]
    assert reader.verify() == []
