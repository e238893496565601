"""Slices of trajectories that are told by tensors, and slices that span the ends of their trajectories."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tdstore import TensorDict
from tdstore.rl import (
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)

LENGTH, SLICE = 6, 4


def pieces_of(rows, span, **options):
    """How often each piece was drawn, as its first step and its number of rows."""
    sampler = SliceSampler(slice_len=SLICE, traj_key="episode", span=span, **options)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=8)
    number = torch.arange(2 * rows)
    buffer.extend(TensorDict({"episode": number // rows, "t": number % rows}, [2 * rows]))
    torch.manual_seed(0)
    found = Counter()
    for _ in range(300):
        batch = buffer.sample()
        ends = batch["next", "truncated"].flatten().nonzero().flatten() + 1
        for piece in torch.tensor_split(batch["t"], ends[:-1]):
            assert (piece.diff() == 1).all()
            found[int(piece[0]), len(piece)] += 1
    return found


INSIDE = {(0, 4), (1, 4), (2, 4)}
BEFORE = {1: {(0, 3)}, 2: {(0, 3), (0, 2)}, 3: {(0, 3), (0, 2), (0, 1)}}
AFTER = {1: {(3, 3)}, 2: {(3, 3), (4, 2)}, 3: {(3, 3), (4, 2), (5, 1)}}


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (False, INSIDE),
        (0, INSIDE),
        (True, INSIDE | BEFORE[3] | AFTER[3]),
        (2, INSIDE | BEFORE[2] | AFTER[2]),
        (9, INSIDE | BEFORE[3] | AFTER[3]),
        ((True, False), INSIDE | BEFORE[3]),
        ((1, 2), INSIDE | BEFORE[1] | AFTER[2]),
    ],
)
def test_pieces_that_span_the_ends(span, expected):
    found = pieces_of(LENGTH, span)
    assert set(found) == expected
    assert min(found.values()) > 0.6 * 2400 / 4 / len(expected), "each with the same probability"


def test_short_trajectories_may_span_too():
    assert set(pieces_of(3, (True, False), strict_length=False)) == {(0, 3), (0, 2), (0, 1)}
    with pytest.raises(RuntimeError, match="no trajectory has 4 rows"):
        pieces_of(3, True)


@pytest.mark.parametrize("span", [-1, "all", (1, 2, 3), (0, -1)])
def test_spans_are_numbers_of_rows(span):
    with pytest.raises(ValueError, match="span"):
        SliceSampler(slice_len=4, span=span)


@pytest.mark.parametrize("marks", ["trajectories", "ends"])
@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
@pytest.mark.parametrize("ndim", [1, 2])
def test_trajectories_of_a_tensor(kind, marks, ndim):
    step = torch.arange(10).expand(4, 10)
    env = torch.arange(4)[:, None].expand(4, 10)
    given = (env * 2 + step // 5) if marks == "trajectories" else (step % 5 == 4)
    data = TensorDict({"t": step, "env": env}, [4, 10])
    data, given = (data.reshape(40), given.reshape(40)) if ndim == 1 else (data, given.T)
    first = (40, 1.0, 0.5) if kind is PrioritizedSliceSampler else ()
    sampler = kind(*first, slice_len=3, **{marks: given})
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40, ndim=ndim), sampler=sampler, batch_size=12)
    buffer.extend(data)
    for _ in range(10):
        found = buffer.sample()
        assert (found["t"].view(-1, 3).diff(dim=1) == 1).all()
        assert (found["env"].view(-1, 3).diff(dim=1) == 0).all()
        assert (found["t"].view(-1, 3)[:, 0] % 5 <= 2).all()


def test_a_tensor_for_fewer_rows_is_refused():
    sampler = SliceSampler(slice_len=3, trajectories=torch.zeros(5))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=12)
    buffer.extend(TensorDict({"t": torch.arange(6)}, [6]))
    with pytest.raises(ValueError, match="trajectories= has values for 5 rows"):
        buffer.sample()
    with pytest.raises(TypeError, match="one of trajectories and ends"):
        SliceSampler(slice_len=3, trajectories=torch.zeros(5), ends=torch.zeros(5))


@pytest.mark.parametrize(
    ("values", "index", "content"),
    [
        ([1.0, 3, 2, 5], [-1, 1, 2, 0], [5, 3, 2]),
        ([5.0, 4, 3, 2, 1], [0, 1, 2, -1, -1], [5, 4, 3]),
        ([1.0, 2, 3, 4, 5, 6, 7], [-1, -1, -1, -1, 1, 2, 0], [7, 5, 6]),
        ([2.0, 2, 2, 2, 3, 3], [-1, -1, 2, -1, 0, 1], [3, 3, 2]),
    ],
)
def test_of_the_rows_the_smallest_is_replaced_first(values, index, content):
    writer = TensorDictMaxValueWriter(rank_key="r")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=writer)
    assert buffer.extend(TensorDict({"r": torch.tensor(values)}, [len(values)])).tolist() == index
    assert buffer[:]["r"].tolist() == content
    one = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter(rank_key="r"))
    for value in values:
        one.add(TensorDict({"r": torch.tensor(value)}, []))
    assert one[:]["r"].tolist() == content


def test_what_is_said_of_a_batch_of_pieces_has_the_marks_of_its_steps():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(6), sampler=SliceSampler(slice_len=2, traj_key="episode"), batch_size=4
    )
    done = torch.tensor([[False], [False], [True]] * 2)
    buffer.extend(TensorDict({"episode": torch.arange(6) // 3, "next": {"done": done}}, [6]).auto_batch_size_(1))
    batch, info = buffer.sample(return_info=True)
    assert set(info) == {"index", *(("next", name) for name in ("done", "terminated", "truncated"))}
    for name in ("done", "terminated", "truncated"):
        assert torch.equal(info["next", name], batch["next", name])
    assert info["next", "done"].flatten().tolist() == [False, True, False, True]


def test_trajectories_are_told_apart_as_collectors_do_where_no_entry_is_named():
    done = torch.zeros(12, 1, dtype=torch.bool)
    done[1::2] = True
    rows = {"i": torch.arange(12), "next": {"done": done}}

    def starts(rows, storage=LazyTensorStorage, **options) -> set[int]:
        sampler = SliceSampler(slice_len=2, **options)
        buffer = TensorDictReplayBuffer(storage=storage(12), sampler=sampler, batch_size=200)
        buffer.extend(TensorDict(rows, [12]).auto_batch_size_(1))
        return set(buffer.sample()["i"].view(-1, 2)[:, 0].tolist())

    by_done = set(range(0, 12, 2))
    assert starts(rows) == by_done
    rows["episode"] = torch.arange(12) // 3
    by_episode = {0, 1, 3, 4, 6, 7, 9, 10}
    assert starts(rows) == starts(rows, LazyStackStorage) == by_episode
    rows["collector"] = {"traj_ids": torch.arange(12) // 6}
    assert starts(rows) == set(range(11)) - {5}
    assert starts(rows, end_key=("next", "done")) == starts(rows, end_keys=[("next", "done")]) == by_done
    assert starts(rows, traj_key="episode") == by_episode
    with pytest.raises(TypeError, match="ListStorage"):
        starts(rows, ListStorage)


def test_trajectories_of_a_tensor_are_there_after_the_rows_are_forgotten():
    sampler = SliceSampler(slice_len=3, trajectories=torch.arange(6) // 3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=3)
    for _ in range(2):
        buffer.extend(TensorDict({"i": torch.arange(6)}, [6]))
        assert buffer.sample()["i"].tolist() in ([0, 1, 2], [3, 4, 5])
        buffer.empty()


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("how", ["folder", "state"])
def test_a_pass_over_trajectories_goes_on(tmp_path, how, ndim):
    def made():
        sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="e")
        return TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=ndim), sampler=sampler, batch_size=4)

    def load(buffer):
        if how == "folder":
            first.dumps(tmp_path / "there")
            buffer.loads(tmp_path / "there")
        else:
            buffer.load_state_dict(first.state_dict())

    first, again, late = made(), made(), made()
    if ndim == 1:  # around the end of the ring: of run 0 nothing is left, of run 1 three rows
        for start in (0, 9):
            first.extend(TensorDict({"e": torch.arange(start, start + 9) // 3}, [9]))
    else:
        first.extend(TensorDict({"e": torch.arange(4).unsqueeze(1).expand(4, 3)}, [4, 3]))
    runs = set(first[:]["e"].flatten().tolist())
    seen = set(first.sample()["e"].tolist())
    load(again)
    load(late)
    more = again.sample()["e"].tolist()
    assert more == first.sample()["e"].tolist(), "the order of the pass is kept"
    assert seen | set(more) == runs and len(runs) == 4 and again.sampler.ran_out
    one = torch.full((3,), 99) if ndim == 1 else torch.full((4, 3), 99)
    late.extend(TensorDict({"e": one}, one.shape))
    assert 99 in {run for _ in range(3) for run in late.sample()["e"].tolist()}, "other trajectories, another pass"
