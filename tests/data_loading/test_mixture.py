"""`Mixture`: batches of several datasets by weights, resumed exactly."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tdstore.data import Epochs, Mixture
from tdstore.errors import InvalidArgumentError, MismatchError
from tests.data_loading.places import numbered

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torch; torchdata calls it


def mixture(batches: int | None = 60, prefetch: int = 2, seed: int = 4, **options: Any) -> Mixture:
    small, large = numbered(20), numbered(50)
    large["row"] += 1000
    sources = [Epochs(td, 4, seed=i, columns=["row"], **options) for i, td in enumerate([small, large])]
    return Mixture(sources, None if batches is None else [1, 3], seed, batches=batches, prefetch=prefetch)


def rows_of(batches: Any) -> list[list[int]]:
    return [batch["row"].tolist() for batch in batches]


def test_weights_and_sources_that_end() -> None:
    batches = rows_of(mixture(400))
    small = [batch for batch in batches if batch[0] < 1000]
    assert 70 < len(small) < 130
    assert all(sorted(sum(small[i : i + 5], [])) == list(range(20)) for i in range(0, len(small) - 5, 5))
    assert {row >= 1000 for batch in small for row in batch} == {False}, "a batch is of one dataset"
    assert len(mixture(None)) == len(rows_of(mixture(None))) == 5 + 13


@pytest.mark.parametrize("stop", [0, 1, 30, 60])
def test_a_state_gives_the_batches_that_were_left(stop: int) -> None:
    whole = mixture(prefetch=0)
    expected = [rows_of(whole) for _ in range(3)]
    assert expected[0] != expected[1]
    first = mixture()
    assert rows_of(first) == expected[0]
    assert rows_of(itertools.islice(first, stop)) == expected[1][:stop]
    again = mixture(prefetch=3, seed=0)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    left = expected[1][stop:]
    assert rows_of(again) == rows_of(first) == (left or expected[2])
    assert rows_of(again) == (expected[2] if left else rows_of(first))
    other = mixture()
    other.set_epoch(2)
    assert rows_of(other) == expected[2]


def test_ranks_choose_alike_and_share_rows() -> None:
    whole = rows_of(mixture(20, drop_last=True))
    ranks = [rows_of(mixture(20, rank=rank, world_size=2, drop_last=True)) for rank in range(2)]
    assert [[a[0] < 1000, b[0] < 1000] for a, b in zip(*ranks, strict=True)] == [[a[0] < 1000] * 2 for a in whole]
    first = [row for rank in ranks for batch in rank[:6] for row in batch]
    assert len(set(first)) == len(first)
    with pytest.raises(InvalidArgumentError, match="as many batches of each source"):
        mixture(20, world_size=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders(workers: int) -> None:
    alone = mixture()
    expected = [rows_of(alone) for _ in range(2)]
    loader = DataLoader(mixture(), batch_size=None, num_workers=workers)
    assert [rows_of(loader) for _ in range(2)] == expected
    first = StatefulDataLoader(mixture(), batch_size=None, num_workers=workers)
    assert rows_of(itertools.islice(first, 7)) == expected[0][:7]
    again = StatefulDataLoader(mixture(), batch_size=None, num_workers=workers)
    again.load_state_dict(first.state_dict())
    assert [rows_of(again), rows_of(again)] == [expected[0][7:], expected[1]]


def test_what_is_wrong_is_refused() -> None:
    sources = [Epochs(numbered(8), 2), Epochs(numbered(8), 2)]
    for weights in ([1], [1, 0], [1, float("nan")]):
        with pytest.raises(InvalidArgumentError, match="one positive number for each of 2"):
            Mixture(sources, weights)
    with pytest.raises(InvalidArgumentError, match="source 1 of a mixture has no batch"):
        Mixture([sources[0], Epochs(numbered(8), 9, drop_last=True)])
    with pytest.raises(InvalidArgumentError, match="not a state"):
        Mixture(sources).load_state_dict(sources[0].state_dict())
    with pytest.raises(MismatchError, match="of 2 sources, and this mixture has 1"):
        Mixture(sources[:1]).load_state_dict(Mixture(sources).state_dict())
