"""Byte ranges of an index, and the batch that fetches them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdstore.index.ranges import Batch, byte_ranges, cover, cover_objects, distinct, index_shape, join
from tdstore.types import StoreIndex


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], StoreIndex]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    count = draw(st.integers(0, len(shape)))
    rows_at = draw(st.integers(0, 4))
    index: list[slice | torch.Tensor] = []
    for dim, size in enumerate(shape[:count]):
        if dim == rows_at:
            rows = draw(st.lists(st.integers(0, size - 1), max_size=8)) if size else []
            index.append(torch.tensor(rows, dtype=torch.int64))
        else:
            start = draw(st.integers(0, size))
            index.append(slice(start, draw(st.integers(start, size)), draw(st.integers(1, 3))))
    return shape, tuple(index)


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([1, 2, 8]), st.sampled_from([0, 3, 1000]), st.sampled_from([1, 5, 1 << 20]))
def test_the_ranges_of_an_index_are_its_bytes(
    case: tuple[tuple[int, ...], StoreIndex], itemsize: int, gap: int, part: int
) -> None:
    shape, index = case
    array = np.random.default_rng(0).integers(0, 127, (*shape, itemsize), dtype=np.uint8)
    raw = array.tobytes()
    expected = torch.from_numpy(array)[index] if index else torch.from_numpy(array)
    ranges = byte_ranges(shape, itemsize, index)
    assert index_shape(shape, index) == expected.shape[:-1]
    assert b"".join(raw[a:b] for a, b in ranges.tolist()) == expected.contiguous().numpy().tobytes()

    batch = Batch[str](gap=gap, part=part)
    batch.want("leaf", ranges)
    batch.fetch(lambda asked: [raw[a:b] for _, a, b in asked])
    assert b"".join(batch.take("leaf", a, b) for a, b in ranges.tolist()) == expected.contiguous().numpy().tobytes()


def test_a_slice_of_rows_is_one_range() -> None:
    assert byte_ranges((1000, 84, 84), 1, (slice(10, 20, 1),)).tolist() == [[70560, 141120]]
    assert byte_ranges((1000, 84, 84), 1, ()).tolist() == [[0, 7056000]]
    assert byte_ranges((10**9, 4), 2, (slice(0, 10**9, 1), slice(0, 4, 1))).tolist() == [[0, 8 * 10**9]]


def test_near_ranges_are_one_request_and_large_ones_several() -> None:
    asked: list[tuple[str, int, int]] = []

    def get(requests: list[tuple[str, int, int]]) -> list[bytes]:
        asked.extend(requests)
        return [bytes(b - a) for _, a, b in requests]

    batch = Batch[str](gap=100, part=1000)
    batch.want("a", np.array([[500, 600], [0, 10], [5, 60], [150, 160]]))
    batch.want("b", np.array([[0, 2500]]))
    batch.fetch(get)
    assert asked == [("a", 0, 160), ("a", 500, 600), ("b", 0, 1000), ("b", 1000, 2000), ("b", 2000, 2500)]
    assert len(batch.take("b", 900, 2100)) == 1200


def test_a_short_answer_is_an_error() -> None:
    batch = Batch[str]()
    batch.want("a", np.array([[3, 10]]))
    with pytest.raises(EOFError) as caught:
        batch.fetch(lambda asked: [b"123456"])
    assert caught.value.args == ("a", 3, 10, 6)


def test_nothing_wanted_asks_nothing() -> None:
    batch = Batch[str]()
    batch.want("a", np.empty((0, 2), np.int64))

    def get(requests: list[tuple[str, int, int]]) -> list[bytes]:
        raise AssertionError(requests)

    batch.fetch(get)


def test_cover_holds_every_range_and_nothing_far() -> None:
    rng = random.Random(0)
    for _ in range(200):
        starts = [rng.randrange(1000) for _ in range(rng.randrange(1, 20))]
        ranges = np.array([[a, a + rng.randrange(1, 30)] for a in starts])
        gap = rng.randrange(40)
        covered = cover(ranges, gap).tolist()
        assert all(any(a <= start and stop <= b for a, b in covered) for start, stop in ranges.tolist())
        assert all(nxt[0] - this[1] > gap for this, nxt in zip(covered, covered[1:], strict=False))
        wanted = {i for a, b in ranges.tolist() for i in range(a - gap, b + gap + 1)}
        assert all(i in wanted for a, b in covered for i in range(a, b))


def test_join_keeps_the_order() -> None:
    assert join(np.array([[8, 10], [10, 12], [0, 8], [8, 9]])).tolist() == [[8, 12], [0, 9]]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=30),
    st.sampled_from([0, 2, 100]),
)
def test_many_objects_are_covered_as_each_by_itself(wanted: list[tuple[int, int, int]], gap: int) -> None:
    objects = np.array([n for n, _, _ in wanted])
    ranges = np.array([[start, start + size] for _, start, size in wanted])
    found, covered = cover_objects(objects, ranges, gap)
    want = [(n, *r) for n in sorted(set(objects.tolist())) for r in cover(ranges[objects == n], gap).tolist()]
    assert [(n, *r) for n, r in zip(found.tolist(), covered.tolist(), strict=True)] == want

    data = [bytes((n * 50 + i) % 256 for i in range(70)) for n in range(5)]
    asked: list[tuple[int, int, int]] = []

    def get(requests: list[tuple[int, int, int]]) -> list[bytes]:
        asked.extend(requests)
        return [data[n][a:b] for n, a, b in requests]

    batch = Batch[int](gap=gap, part=7)
    for n, one in zip(objects.tolist(), ranges, strict=True):
        batch.want(n, one[None])
    expected = batch.requests()
    batch.fetch(get)
    assert asked == expected
    for n, start, size in wanted:
        assert batch.take(n, start, start + size) == data[n][start : start + size]


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=20), st.booleans())
def test_distinct_numbers_are_those_of_numpy(numbers: list[int], column: bool) -> None:
    array = np.array(numbers, np.int64).reshape(-1, 1) if column else np.array(numbers, np.int64)
    found = distinct(array)
    assert found.tolist() == np.unique(array).tolist()
    assert found.dtype == np.int64
