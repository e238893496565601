"""Windows along a dimension."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tdstore import TensorDict
from tdstore.errors import BatchSizeError, DimensionError, InvalidArgumentError


@pytest.mark.parametrize("place", ["d", "x.h5", "x.zarr"])
@pytest.mark.parametrize(
    ("size", "dim", "error"),
    [
        (0, 0, InvalidArgumentError),
        (-1, 0, InvalidArgumentError),
        ([1, 2], 0, BatchSizeError),
        ([-1, 5], 0, BatchSizeError),
        (2, 2, DimensionError),
    ],
)
def test_pieces_that_do_not_fit(place: str, size: Any, dim: int, error: type[Exception], tmp_path: Path) -> None:
    memory = TensorDict({"a": torch.zeros(4, 3)}, [4, 3])
    with memory.save(tmp_path / place) as stored:
        for td in (memory, stored):
            with pytest.raises(error):
                td.split(size, dim)
        for size, dim in ((3, 0), ([1, 3], 0), (2, -1)):
            assert [p.batch_size for p in stored.split(size, dim)] == [p.batch_size for p in memory.split(size, dim)]
