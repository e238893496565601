"""Sums that stay exact over many changes, draws that a generator repeats, and states of the sampler over the tree."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tdstore import TensorDict
from tdstore.rl import transitions
from tdstore.rl.buffers import PrioritizedSampler, ReplayBuffer, SegmentTree, segment_tree
from tdstore.rl.storages import LazyTensorStorage


@pytest.mark.parametrize("size", [1000, 400_000])
def test_sums_do_not_drift_over_a_million_updates(size):
    random = np.random.default_rng(0)
    tree, weights = SegmentTree(size), np.zeros(size)
    for _ in range(250):
        slots = random.integers(0, size, 4000)
        values = random.random(4000) * 10.0 ** random.integers(-12, 12, 4000)
        values[random.random(4000) < 0.1] = 0.0
        tree.update(slots, values)
        weights[slots] = values
    anew = SegmentTree(size)
    anew.update(np.arange(size), weights)
    assert tree.total == anew.total and tree.smallest == anew.smallest == weights[weights > 0].min()
    assert (tree.weights(size) == weights).all()
    masses = random.random(2000) * tree.total
    assert (tree.find(masses) == anew.find(masses)).all()
    np.testing.assert_allclose(tree.total, weights.sum(), rtol=1e-12)


@pytest.mark.parametrize("size", [5, 40_000, 2_000_000])
def test_the_smallest_weight_follows_changes_one_by_one(size):
    tree = SegmentTree(size)
    tree.update(np.arange(size), 4.0)
    last = np.array([size - 1])
    for weight, smallest in ((2.0, 2.0), (3.0, 3.0), (0.0, 4.0), (5.0, 4.0), (1.0, 1.0), (1.5, 1.5), (4.0, 4.0)):
        tree.update(last, weight)
        assert tree.smallest == smallest
    tree.update(np.arange(size), 0.0)
    assert tree.smallest == np.inf and tree.total == 0.0


def test_the_smallest_weight_is_exact_over_many_changes(monkeypatch):
    monkeypatch.setattr(segment_tree, "_STALE", 60)  # so that minima are brought up to date in the middle, too
    random = np.random.default_rng(1)
    tree, weights = SegmentTree(200), np.zeros(200)
    for step in range(400):
        slots = random.integers(0, 200, 8)
        values = random.integers(0, 4, 8) / 2  # many zeros, many equal ones
        tree.update(slots, values if step % 3 else float(values[0]))
        for slot, value in zip(slots, values, strict=True):
            weights[slot] = value if step % 3 else values[0]
        if step % 5 == 0:
            assert tree.smallest == weights[weights > 0].min(initial=np.inf)
        if step % 100 == 50:
            tree.update(np.arange(200), 0.0)
            weights[:] = 0
            assert tree.smallest == np.inf


def test_a_copy_of_a_tree_goes_its_own_way():
    tree = SegmentTree(40)
    tree.update(np.arange(40), np.arange(40) / 4)
    for made in (pickle.loads(pickle.dumps(tree)), copy.deepcopy(tree)):
        made.update(np.array([0, 39]), 100.0)
        assert made.total == tree.total + 200 - 39 / 4 and made.smallest == 0.25
        assert made.find(np.array([99.0, made.total - 1])).tolist() == [0, 39]
    slots, weights = tree.draw(np.array([tree.total - 0.1, 0.1]))
    assert slots.tolist() == [39, 1] and weights.tolist() == [39 / 4, 0.25]


def calls(run: Callable[[], object]) -> int:
    """Count the calls of Python and of C functions, which are passes over the arrays of a batch."""
    found = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_passes_grow_with_the_levels_alone():
    passes = {}
    for size in (10_000, 300_000, 10_000_000):
        tree = SegmentTree(size)
        slots = np.arange(0, size, size // 1000)[:1000]
        tree.update(slots, 1.0)
        for batch in (256, 1000):
            masses = np.linspace(0, 999, batch)
            assert tree.smallest == 1.0 and tree.total == 1000
            find, update = calls(lambda: tree.find(masses)), calls(lambda: tree.update(slots[:batch], 2.0))
            passes[size, batch] = (find, update)
            tree.update(slots, 1.0)
    for size in (10_000, 300_000, 10_000_000):
        assert passes[size, 256] == passes[size, 1000], "no pass is of single rows"
    assert passes[10_000, 256] == passes[300_000, 256]
    more = np.subtract(passes[10_000_000, 256], passes[300_000, 256])
    assert 0 < more[0] <= 16 and 0 < more[1] <= 16, "one level more"


def test_new_rows_get_the_largest_priority_of_the_present_ones_where_asked():
    sampler = PrioritizedSampler(4, alpha=0.5, beta=1.0, eps=0.0, max_priority_within_buffer=True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=4)
    buffer.extend(torch.arange(2))
    assert sampler.default_priority == 1.0
    buffer.update_priority([0, 1], torch.tensor([4.0, 16.0]))
    assert sampler.default_priority == 16.0
    buffer.update_priority(1, 9.0)
    buffer.add(torch.tensor(2))
    np.testing.assert_allclose(sampler.priorities(3), np.array([2, 3, 3]) / 8)
    buffer.empty()
    assert sampler.default_priority == 1.0


def test_masses_are_answered_in_their_order():
    tree = SegmentTree(100)
    tree.update(np.arange(100), 1.0)
    assert tree.find(np.array([99.5, 0.5, 42.5, 0.1, 99.9])).tolist() == [99, 0, 42, 0, 99]
    assert tree.find(np.zeros(0)).tolist() == []


def test_a_generator_repeats_the_draws():
    def draws() -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(1000), sampler=PrioritizedSampler(1000, 0.7, 0.5), batch_size=300,
            generator=generator,
        )  # fmt: skip
        buffer.update_priority(buffer.extend(torch.arange(1000)), torch.linspace(0, 5, 1000))
        return torch.cat([buffer.sample() for _ in range(3)])

    first = draws()
    assert torch.equal(first, draws()) and len(first.unique()) > 300


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_state_of_an_earlier_release_is_loaded(dtype):
    state = {
        "_weights": torch.tensor([1.0, 0.0, 3.0, 4.0], dtype=dtype), "_alpha": 1.0, "_beta": 0.5, "_eps": 0.0,
        "_largest": 4.0, "_max_capacity": 4,
    }  # fmt: skip
    sampler = PrioritizedSampler(6, alpha=0.3, beta=0.1)
    sampler.load_state_dict(state)
    assert sampler.priorities(4).tolist() == [0.125, 0.0, 0.375, 0.5]
    assert (sampler.alpha, sampler.beta, sampler.eps, sampler.default_priority) == (1.0, 0.5, 0.0, 4.0)
    again = sampler.state_dict()
    assert again["_weights"][:4].tolist() == state["_weights"].tolist() and set(again) == set(state)


@pytest.mark.parametrize(
    ("index", "priority", "error", "match"),
    [
        ([4], 1.0, IndexError, "index 4 is beyond the 4 rows"),
        ([1], "high", TypeError, "priority .* 'high'"),
        ([1], None, TypeError, "priority .* None"),
        ([1], torch.ones(1, dtype=torch.complex64), TypeError, "complex64"),
        (None, 1.0, TypeError, "index .* None"),
    ],
)
def test_what_is_no_priority_or_no_row_is_named(index, priority, error, match):
    sampler = PrioritizedSampler(6, alpha=0.7, beta=0.5)
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=4)
    buffer.extend(torch.arange(4))
    before = sampler.priorities()
    with pytest.raises(error, match=match):
        buffer.update_priority(index, priority)
    assert (sampler.priorities() == before).all() and len(buffer.sample()) == 4


def test_parameters_of_buffers_of_transitions_are_finite():
    with pytest.raises(ValueError, match="alpha"):
        transitions.PrioritizedReplayBuffer(4, alpha=float("inf"))
    with pytest.raises(ValueError, match="gamma"):
        transitions.MultiStepReplayBuffer(4, gamma=float("nan"))
    with pytest.raises(ValueError, match="device='quux'"):
        LazyTensorStorage(4, device="quux")
    buffer = transitions.PrioritizedReplayBuffer(4)
    buffer.add(TensorDict({"obs": torch.arange(3)}, [3]))
    with pytest.raises(IndexError, match="integers"):
        buffer.update_priorities([0.5], [3.0])
    buffer.update_priorities([], [])
    with pytest.raises(ValueError, match="beta"):
        buffer.sample(2, beta=float("inf"))
    assert buffer.priorities.tolist() == [1.0] * 3
