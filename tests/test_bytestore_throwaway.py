"""The kit on a store that knows only objects and byte ranges: the proof that the protocol fits such media."""

from __future__ import annotations

import itertools

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdstore.store import Cap
from tdstore.testing import StoreTests, same, store_indices
from tdstore.testing.samples import pick
from tdstore.testing.setup import fill, numbers
from tdstore.types import LeafSpec, Read
from tests.throwaway_bytestore import ByteStore, merge, open_bytes, result_shape, runs

_count = itertools.count()


class TestByteStore(StoreTests):
    open = staticmethod(open_bytes)
    caps = ByteStore.caps
    deviations = {
        "test_second_process_reads": "memory:// lives in one process",
        "test_second_process_writes": "memory:// lives in one process",
    }

    @pytest.fixture
    def location(self):
        url = f"memory://kit-{next(_count)}/store"
        yield url
        fs, root = fsspec.core.url_to_fs(url)
        for name in fs.find(root):
            fs.rm_file(name)

    def fingerprint(self, location):
        fs, root = fsspec.core.url_to_fs(location)
        return {name: fs.cat_file(name) for name in fs.find(root)}

    def corrupt(self, location):
        self._damage(location, lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:])

    def truncate(self, location):
        self._damage(location, lambda data: data[: len(data) // 2])

    def _damage(self, location, change):
        fs, root = fsspec.core.url_to_fs(location)
        name = max((n for n in fs.find(root) if n.endswith(".bin")), key=fs.size)
        fs.pipe_file(name, change(fs.cat_file(name)))


@given(st.data(), st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(["uint8", "float32"]))
def test_runs_pick_the_bytes_of_the_index(data, shape, dtype):
    value = numbers(*shape).to(getattr(torch, dtype))
    index = data.draw(store_indices(shape))
    raw = value.numpy().tobytes()
    plan = runs(LeafSpec(shape, dtype), index)
    assert b"".join(raw[a:b] for a, b in plan.tolist()) == pick(value, index).numpy().tobytes()
    assert result_shape(shape, index) == tuple(pick(value, index).shape)


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 50))), st.integers(0, 40))
def test_merge_covers_and_separates(pairs, gap):
    plan = np.array([(a, a + n) for a, n in pairs], np.int64).reshape(-1, 2)
    merged = merge(plan, gap)
    assert all(any(a <= start and stop <= b for a, b in merged) for start, stop in plan.tolist())
    assert all(right[0] - left[1] > gap for left, right in itertools.pairwise(merged))


def test_a_batch_of_rows_is_few_requests():
    store = open_bytes("memory://few/store", mode="w")
    value = numbers(4000, 50)
    fill(store, {("a",): value, ("b",): value + 1})
    store.requests = 0
    near = torch.arange(100, 200, 2).flip(0)  # gaps of one row: 200 bytes
    far = torch.tensor([10, 3000, 2000])
    got = store.read([Read(("a",), (near,)), Read(("b",), (far,)), Read(("a",), (near,))])
    assert store.requests == 1 + 3
    assert same(got[0], value[near])
    assert same(got[1], value[far] + 1)
    store.close()
    assert Cap.ASYNC not in store.caps
