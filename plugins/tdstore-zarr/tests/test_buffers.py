"""What waits to be written is bounded by `buffer_bytes`, and is the same in the end whatever the bound."""

from __future__ import annotations

from pathlib import Path as FsPath

import pytest
import torch
from tdstore_zarr.codec.buffers import LIMIT
from tdstore_zarr.store import open_zarr
from zarrhelp import header_of, load

from tdstore.errors import OptionError
from tdstore.types import LeafSpec, Write

ROWS, SHARD = 64, 8
VALUE = torch.arange(ROWS * 16, dtype=torch.int32).view(ROWS, 16)


def written_by(place: FsPath, limit: int) -> int:
    """Write one row of every shard, then the others; how many shards were written before anyone said flush."""
    with open_zarr(place, mode="w", durable="none", chunks=2, shards=SHARD, buffer_bytes=limit) as store:
        store.create({("a",): LeafSpec(VALUE.shape, "int32")})
        first = torch.arange(0, ROWS, SHARD)
        others = torch.tensor([row for row in range(ROWS) if row % SHARD])
        store.write([Write(("a",), (first,), VALUE[first])])
        waiting = store._session.buffers._bytes
        assert waiting <= max(limit, 0)
        written = len(store._session.leaves[("a",)].objects)
        store.write([Write(("a",), (others,), VALUE[others])])
        store.save_header(header_of({("a",): VALUE}))
    return written


@pytest.mark.parametrize(("shards", "written"), [(0, 8), (3, 8), (7, 8), (8, 0)])
def test_shards_wait_for_the_rest_of_their_rows(tmp_path: FsPath, shards: int, written: int) -> None:
    place = tmp_path / "t.zarr"
    nbytes = SHARD * 16 * 4
    found = written_by(place, shards * nbytes)
    assert (found >= written // 2) if written else found == 0
    assert torch.equal(load(place, verify="full")[("a",)], VALUE)


def test_the_default_and_what_cannot_be(tmp_path: FsPath) -> None:
    with open_zarr(tmp_path / "t.zarr", mode="w", durable="none") as store:
        assert store._session.buffers.limit == LIMIT
    for wrong in (-1, 1.5, "64 MiB", True):
        with pytest.raises(OptionError, match="buffer_bytes must be a number of bytes"):
            open_zarr(tmp_path / "t.zarr", buffer_bytes=wrong)
