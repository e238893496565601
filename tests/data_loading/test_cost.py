"""What a batch costs: one round of requests, and the quality of the shuffle that blocks give for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.data import Epochs, TensorDictDataset, measure_shuffle
from tdstore.errors import InvalidArgumentError
from tdstore.testing import CountingStore
from tests.data_loading.places import numbered
from tests.servers import FaultProxy


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"shuffle": "blocks"}, {"span": 4, "stride": 1}])
def test_a_batch_is_one_read_of_the_store(tmp_path: Any, suffix: str, options: Any) -> None:
    place = tmp_path / f"x{suffix}"
    numbered(64).exclude("name").save(place).close()
    with tdstore.open(place) as td:
        counting = td._handle.store = CountingStore(td._handle.store)
        batches = list(Epochs(td, 8, **options))
        assert counting.calls["read"] == len(batches)
        counting.reset()
        TensorDictDataset(td).__getitems__([5, 9, 60])
        assert counting.calls["read"] == 1


def test_a_batch_from_a_bucket_is_one_round(s3: Any) -> None:
    place = f"{s3.url}/rounds"
    data = TensorDict({"row": torch.arange(4000), "next": {"x": torch.randn(4000, 1000)}}, [4000])
    data.save(place, storage_options=s3.fsspec_options).close()
    with FaultProxy(s3.port, latency_ms=25) as proxy:
        options = {"storage_options": s3.through(proxy.port).fsspec_options}
        batches = iter(Epochs(place, 8, seed=1, prefetch=0, options=options))
        next(batches)  # opens the place and its connections
        for _ in range(5):
            proxy.forget()
            batch = next(batches)
            assert proxy.rounds() == 1
            assert torch.equal(batch["next", "x"], data["next", "x"][batch["row"]])


@pytest.mark.parametrize(
    "how", [{}, {"shuffle": False}, {"shuffle": "blocks", "block_rows": 64, "window_blocks": 4, "whole_blocks": True}]
)
def test_from_a_location_to_the_first_batch_in_two_rounds(s3: Any, how: dict[str, Any]) -> None:
    """The manifest, and the rows: their connections are opened while the manifest is read."""
    place = f"{s3.url}/first"
    data = TensorDict({"row": torch.arange(1000), "next": {"x": torch.randn(1000, 1000)}}, [1000])
    data.save(place, storage_options=s3.fsspec_options).close()
    with FaultProxy(s3.port, latency_ms=100) as proxy:
        options = {"storage_options": s3.through(proxy.port).fsspec_options}
        next(iter(Epochs(place, 8, prefetch=1, options=options, **how)))
        assert proxy.rounds() <= 2


def test_blocks_are_shuffled_nearly_as_well() -> None:
    td = TensorDict({"a": torch.zeros(1, dtype=torch.int8).expand(10**7)}, [10**7])
    full = measure_shuffle(Epochs(td, 128))
    assert abs(full.rank_correlation) < 0.02
    assert abs(full.displacement - 1) < 0.02
    assert abs(full.batch_spread - 1) < 0.02
    blocks = measure_shuffle(Epochs(td, 128, shuffle="blocks", block_rows=1000, window_blocks=16))
    assert abs(blocks.rank_correlation) < 0.1
    assert abs(blocks.displacement - 1) < 0.1
    assert 0.9 < blocks.batch_spread < 1.05  # 16 blocks drawn from all: their deviation is a little short
    one = measure_shuffle(Epochs(td, 128, shuffle="blocks", block_rows=1000, window_blocks=1))
    assert one.batch_spread < 0.1, "batches of one block are neighbours"
    none = measure_shuffle(Epochs(td, 128, shuffle=False))
    assert none.rank_correlation > 0.999
    assert none.displacement < 0.001
    with pytest.raises(InvalidArgumentError, match="3 items in batches of 4"):
        measure_shuffle(Epochs(td[:3], 4))
