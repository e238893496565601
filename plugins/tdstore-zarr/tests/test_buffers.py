"""What waits to be written is bounded by `buffer_bytes`, and is the same in the end whatever the bound."""

from __future__ import annotations

from pathlib import Path as FsPath

import pytest
import torch
from tdstore_zarr.codec.buffers import LIMIT
from tdstore_zarr.place.folder_engine import FolderEngine
from tdstore_zarr.place.thread_pool import Pool
from tdstore_zarr.store import open_zarr
from zarrhelp import header_of, load

from tdstore.engine import Blob
from tdstore.errors import CorruptStoreError, OptionError
from tdstore.types import LeafSpec, Read, Write

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


def test_a_row_of_a_written_shard_reads_the_shard_once_and_starts_no_thread(
    tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.arange(64 * 64, dtype=torch.int32).view(64, 64)
    with open_zarr(tmp_path / "t.zarr", mode="w", durable="none", chunks=2, shards=32) as store:
        store.create({("a",): LeafSpec(value.shape, "int32"), ("b",): LeafSpec(value.shape, "int32")})
        store.write([Write(("a",), (), value), Write(("b",), (), value)])
        store.save_header(header_of({("a",): value, ("b",): value}))
    read: list[str] = []
    get = FolderEngine.get

    def counted(engine: FolderEngine, key: str, limit: int | None = None) -> Blob:
        read.append(key)
        return get(engine, key, limit)

    def refused(*_: object) -> None:
        raise AssertionError("a thread was started")

    row = torch.full((1, 64), 7, dtype=torch.int32)
    with open_zarr(tmp_path / "t.zarr", mode="r+", durable="none") as store:
        monkeypatch.setattr(FolderEngine, "get", counted)
        monkeypatch.setattr(Pool, "submit", refused)
        store.write([Write((name,), (slice(41, 42, 1),), row) for name in "ab"])
        store.save_header(store.load_header())
        monkeypatch.undo()
    assert sorted(key for key in read if "/c/" in key) == ["a/c/1/0", "b/c/1/0"]
    value[41] = 7
    for name in "ab":
        assert torch.equal(load(tmp_path / "t.zarr", verify="full")[(name,)], value)


def test_a_shard_that_was_cut_is_refused_by_a_write_to_one_of_its_rows(tmp_path: FsPath) -> None:
    value = torch.arange(64 * 64, dtype=torch.int32).view(64, 64)
    with open_zarr(tmp_path / "t.zarr", mode="w", durable="none", chunks=2, shards=32) as store:
        store.create({("a",): LeafSpec(value.shape, "int32")})
        store.write([Write(("a",), (), value)])
        store.save_header(header_of({("a",): value}))
    with open_zarr(tmp_path / "t.zarr", mode="r+", durable="none") as store:
        shard = tmp_path / "t.zarr" / "a" / "c" / "0" / "0"
        store.read([Read(("a",), (slice(0, 1, 1),))])  # its index is known now
        shard.write_bytes(shard.read_bytes()[:16])
        with pytest.raises(CorruptStoreError, match="'a'"):
            store.write([Write(("a",), (slice(5, 6, 1),), value[:1])])
            store.save_header(store.load_header())
