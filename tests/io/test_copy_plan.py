"""How a copy is cut and which options its leaves get: pure functions, no store."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdstore.errors import KeyNotFoundError, OptionError
from tdstore.io.blocks import MOST_BLOCKS, index_shape, leaf_batches, pieces
from tdstore.io.rules import apply_rules, matches
from tdstore.types import LeafSpec

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
chunk = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@given(shapes, st.integers(1, 200), st.lists(chunk, max_size=2), st.sampled_from([1, 2, 8]))
def test_pieces_cover_each_element_once_in_bounded_blocks(shape, block, chunks, itemsize):
    seen = np.zeros(shape, int)
    for index in pieces(shape, itemsize, block, chunks):
        assert all(0 <= t.start < t.stop <= n and t.step == 1 for t, n in zip(index, shape, strict=False))
        seen[index] += 1
        assert math.prod(index_shape(shape, index)) * itemsize <= max(itemsize, MOST_BLOCKS * block)
    assert (seen == 1).all()


@given(shapes, st.integers(1, 200))
def test_without_chunks_no_block_is_larger_than_asked(shape, block):
    for index in pieces(shape, 1, block):
        assert math.prod(index_shape(shape, index)) <= max(block, 1)


def test_borders_are_those_of_both_chunkings_where_that_fits():
    starts = [index[0].start for index in pieces((100, 10), 1, 250, [(4, 10), (6, 10)])]
    assert starts == list(range(0, 100, 24))
    # 4 x 6 rows do not fit: the target's chunks, which come first, are kept whole
    assert [i[0].start for i in pieces((24, 10), 1, 110, [(4, 10), (6, 10)])] == [0, 8, 16]
    # a chunk of a few blocks is moved whole; one of many is not
    assert [i[0].start for i in pieces((24, 10), 1, 20, [(12, 10)])] == [0, 12]
    assert [i[0].start for i in pieces((4, 1000), 1, 20, [(4, 1000)])][:2] == [0, 0]


def test_long_rows_are_cut_further_in():
    found = list(pieces((2, 3, 10), 1, 4))
    assert found[:3] == [(slice(0, 1, 1), slice(0, 1, 1), slice(a, b, 1)) for a, b in ((0, 4), (4, 8), (8, 10))]
    assert len(found) == 18


def test_small_leaves_share_a_batch():
    specs = {(str(n),): LeafSpec((16,), "uint8") for n in range(10)} | {("big",): LeafSpec((300,), "uint8")}
    batches = list(leaf_batches(specs, 256))
    assert [len(b) for b in batches] == [4, 4, 2, 1, 1]  # each takes 64 bytes of a shared buffer
    assert [path for path, _ in itertools.chain(*batches)] == [*specs, ("big",)]


def specs(*paths):
    return {path: LeafSpec((4,), "uint8") for path in paths}


@pytest.mark.parametrize(
    ("pattern", "hits"),
    [
        ("obs", {("obs",)}),
        ("*", {("obs",), ("next", "obs"), ("next", "deep", "image"), ("image",)}),
        ("next", {("next", "obs"), ("next", "deep", "image")}),
        ("*.image", {("next", "deep", "image")}),
        ("*image", {("next", "deep", "image"), ("image",)}),
        (("next", "*"), {("next", "obs"), ("next", "deep", "image")}),
        (("*", "obs"), {("next", "obs")}),
        (("next", ("deep", "im?ge")), {("next", "deep", "image")}),
        (("next", "obs", "x"), set()),
        ("Obs", set()),
    ],
)
def test_patterns(pattern, hits):
    paths = [("obs",), ("next", "obs"), ("next", "deep", "image"), ("image",)]
    assert {path for path in paths if matches(pattern, path)} == hits


def test_of_one_option_the_last_rule_wins():
    found = apply_rules(specs(("a",), ("n", "b")), {"*": {"chunks": 1, "x": 2}, ("n", "*"): {"chunks": 3}})
    assert found["a",].options == {"chunks": 1, "x": 2}
    assert found["n", "b"].options == {"chunks": 3, "x": 2}


def test_a_rule_without_a_leaf_names_the_nearest_key():
    with pytest.raises(KeyNotFoundError, match=r"did you mean \('next', 'obs'\)\?"):
        apply_rules(specs(("next", "obs"), ("done",)), {("nxt", "obs"): {}})
    with pytest.raises(KeyNotFoundError, match="did you mean 'done'"):
        apply_rules(specs(("next", "obs"), ("done",)), {"dome": {}})


@pytest.mark.parametrize("rule", ["gzip", {"dtype": "int8"}, {"shape": (3,)}, {1: 2}])
def test_a_rule_is_options_and_never_changes_what_a_leaf_is(rule):
    with pytest.raises(OptionError, match="rule 'a'"):
        apply_rules(specs(("a",)), {"a": rule})
