"""Rows of small chunks, with one row each and with more: what a read gives is what torch's indexing gives."""

from __future__ import annotations

from pathlib import Path as FsPath
from typing import Any

import pytest
import torch
from tdstore_zarr.reading import reader
from tdstore_zarr.store import open_zarr
from zarrhelp import header_of

from tdstore.errors import CorruptStoreError
from tdstore.store import Store
from tdstore.types import LeafSpec, Read, Write

ROWS = 90
LEAVES: dict[str, torch.Tensor] = {
    "numbers": torch.arange(ROWS, dtype=torch.int32),
    "bytes": torch.arange(ROWS, dtype=torch.uint8),
    "frames": torch.arange(ROWS * 60, dtype=torch.int16).view(ROWS, 5, 12),
    "large": torch.arange(ROWS * 5000).view(ROWS, 5000),  # 40 KB a row
    "complex": torch.complex(torch.rand(ROWS, 3), torch.rand(ROWS, 3)),
}
INDICES: dict[str, Any] = {
    "random": (torch.randint(0, ROWS, (50,), generator=torch.Generator().manual_seed(0)),),
    "repeated": (torch.tensor([7, 7, 3, 89, 7, 0, 3]),),
    "none": (torch.tensor([], dtype=torch.int64),),
    "one": (torch.tensor([42]),),
    "block": (slice(13, 77, 1),),
    "one of a slice": (slice(13, 14, 1),),
    "empty slice": (slice(13, 13, 1),),
    "steps": (slice(3, 80, 7),),
    "all": (),
}
LAYOUTS: list[dict[str, Any]] = [
    {"chunks": 1, "shards": 30},
    {"chunks": 1},
    {"chunks": 4, "shards": 32},
    {"chunks": 4, "compressors": "none"},
    {"chunks": 1, "shards": 30, "compressors": "zstd"},
]


def written(place: FsPath, **layout: Any) -> Store:
    store = open_zarr(place, mode="w", durable="none", **layout)
    store.create({(name,): LeafSpec(value.shape, value.dtype) for name, value in LEAVES.items()})
    store.create({("hole",): LeafSpec((ROWS, 3), "int64", fill_value=9)})
    store.write([Write((name,), (), value) for name, value in LEAVES.items()])
    store.write([Write(("hole",), (slice(50, 60, 1),), torch.arange(30).view(10, 3))])
    return store


def expected() -> dict[str, torch.Tensor]:
    hole = torch.full((ROWS, 3), 9)
    hole[50:60] = torch.arange(30).view(10, 3)
    return {**LEAVES, "hole": hole}


@pytest.fixture(params=LAYOUTS, ids=str)
def store(request: pytest.FixtureRequest, tmp_path: FsPath) -> Store:
    with written(tmp_path / "x.zarr", **request.param) as made:
        made.save_header(header_of({(name,): value for name, value in expected().items()}))
    return open_zarr(tmp_path / "x.zarr")


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_rows_are_those_of_torch(store: Store, index: Any) -> None:
    with store:
        for name, value in expected().items():
            (found,) = store.read([Read((name,), index)])
            assert found.dtype is value.dtype
            assert torch.equal(found, value[index]), name


@pytest.mark.parametrize("index", [INDICES["repeated"], INDICES["block"]], ids=["repeated", "block"])
def test_columns_of_rows_and_memory_with_gaps(store: Store, index: Any) -> None:
    with store:
        (columns,) = store.read([Read(("frames",), (*index, slice(1, 4, 1)))])
        assert torch.equal(columns, LEAVES["frames"][index][:, 1:4])
        want = LEAVES["frames"][index]
        room = torch.zeros(len(want), 5, 24, dtype=torch.int16)[:, :, ::2]
        (found,) = store.read([Read(("frames",), index, room)])
        assert found is room
        assert torch.equal(room, want)


@pytest.mark.parametrize("index", [INDICES["repeated"], INDICES["block"]], ids=["repeated", "block"])
def test_rows_that_are_not_committed_yet(tmp_path: FsPath, index: Any) -> None:
    with written(tmp_path / "x.zarr", chunks=1, shards=30) as store:
        store.save_header(header_of({(name,): value for name, value in expected().items()}))
        changed = expected()["frames"].clone()
        changed[:20] = -1
        store.write([Write(("frames",), (slice(0, 20, 1),), changed[:20])])
        (found,) = store.read([Read(("frames",), index)])
        assert torch.equal(found, changed[index])


def test_rows_that_are_decoded_in_threads(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_THREADS_PAY", 1 << 18)
    monkeypatch.setattr(reader, "_workers", lambda: 3)
    with written(tmp_path / "x.zarr", chunks=1, shards=30) as store:
        store.save_header(header_of({(name,): value for name, value in expected().items()}))
        for index in (INDICES["random"], INDICES["repeated"], INDICES["block"]):
            (found,) = store.read([Read(("large",), index)])
            assert torch.equal(found, LEAVES["large"][index])


@pytest.mark.parametrize("index", [INDICES["repeated"], INDICES["block"]], ids=["repeated", "block"])
@pytest.mark.parametrize("name", ["frames", "large"])
def test_a_damaged_row_is_told_with_its_leaf(tmp_path: FsPath, index: Any, name: str) -> None:
    place = tmp_path / "x.zarr"
    with written(place, chunks=1, shards=30) as store:
        store.save_header(header_of({(key,): value for key, value in expected().items()}))
    (shard,) = place.glob(f"{name}/c/2/*") if name == "large" else place.glob(f"{name}/c/2/0/0")
    data = bytearray(shard.read_bytes())
    with open_zarr(place) as store:
        store.read([Read((name,), (slice(60, 61, 1),))])
        start = len(data) // 60  # in the first rows, of which the index says more than 60
        data[start * 3 : start * 59] = bytes(start * 56)
        shard.write_bytes(data)
        with pytest.raises(CorruptStoreError, match=f"of '{name}' cannot be decoded"):
            store.read([Read((name,), index)])
