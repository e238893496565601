"""Many slices of one leaf are read together: what they give is what each gives by itself."""

from __future__ import annotations

import random
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch
from tdstore_zarr.reading import row_slices
from tdstore_zarr.reading.reader import Reader
from tdstore_zarr.store import open_zarr
from zarrhelp import header_of

from tdstore.errors import CorruptStoreError, OutOfRangeError
from tdstore.types import LeafSpec, Read, Write

ROWS = 200
SHAPES: dict[str, Any] = {
    "numbers": torch.arange(ROWS, dtype=torch.int32),
    "rows": torch.arange(ROWS * 3, dtype=torch.float64).view(ROWS, 3),
    "bools": torch.arange(ROWS) % 3 == 0,
    "wide": torch.arange(ROWS * 4 * 5).view(ROWS, 4, 5),
}


@pytest.fixture(params=[{"chunks": 7, "shards": 21}, {"chunks": 16}, {"chunks": 1}, {"chunks": 500}], ids=str)
def place(request: pytest.FixtureRequest, tmp_path: FsPath) -> FsPath:
    with open_zarr(tmp_path / "x.zarr", mode="w", durable="none", **request.param) as store:
        leaves = {(name,): value for name, value in SHAPES.items()}
        store.create({path: LeafSpec(value.shape, value.dtype) for path, value in leaves.items()})
        store.create({("hole",): LeafSpec((ROWS,), "int64", fill_value=9)})
        store.write([Write(path, (), value) for path, value in leaves.items()])
        store.write([Write(("hole",), (slice(50, 60, 1),), torch.arange(10))])
        store.save_header(header_of({**leaves, ("hole",): torch.zeros(ROWS, dtype=torch.int64)}))
    return tmp_path / "x.zarr"


def slices(seed: int, count: int) -> list[slice]:
    rng = random.Random(seed)
    starts = [rng.randrange(ROWS) for _ in range(count)]
    return [slice(start, min(start + rng.choice([1, 2, 7, 16, 40]), ROWS), 1) for start in starts]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs of all reads that follow."""
    seen: list[Any] = []
    real = Reader.read
    monkeypatch.setattr(Reader, "read", lambda self, jobs, *more: (seen.extend(jobs), real(self, jobs, *more))[1])
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_slices_read_together_are_the_rows(place: FsPath, seed: int, jobs: list[Any]) -> None:
    with open_zarr(place) as store:
        for name, value in SHAPES.items():
            asked = slices(seed, 30)
            jobs.clear()
            found = store.read([Read((name,), (term,)) for term in asked])
            assert len(jobs) == 1
            assert jobs[0].rows is not None
            for part, term in zip(found, asked, strict=True):
                assert part.dtype is value.dtype
                assert torch.equal(part, value[term])


def test_rows_that_were_never_written_are_the_fill_value(place: FsPath) -> None:
    expected = torch.full((ROWS,), 9)
    expected[50:60] = torch.arange(10)
    with open_zarr(place) as store:
        for part, term in zip(store.read([Read(("hole",), (t,)) for t in slices(5, 60)]), slices(5, 60), strict=True):
            assert torch.equal(part, expected[term])


def test_what_is_not_a_short_slice_is_read_by_itself(
    place: FsPath, jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [Read(("numbers",), (term,)) for term in slices(0, 10)]
    out = torch.empty(5, dtype=torch.int32)
    others = {
        "a step": Read(("numbers",), (slice(0, 9, 2),)),
        "empty": Read(("numbers",), (slice(3, 3, 1),)),
        "rows": Read(("numbers",), (torch.tensor([5, 1]),)),
        "whole": Read(("numbers",)),
        "out": Read(("numbers",), (slice(1, 6, 1),), out=out),
    }
    value = SHAPES["numbers"]
    with open_zarr(place) as store:
        for name, other in others.items():
            jobs.clear()
            found = store.read([*plain, other])
            assert len(jobs) == len(plain) + 1, name
            expected = value[other.index[0]] if other.index else value
            assert torch.equal(found[-1], expected), name
            assert all(torch.equal(a, value[r.index[0]]) for a, r in zip(found, plain, strict=False)), name
        assert torch.equal(out, value[1:6])
        jobs.clear()
        store.read(plain[: row_slices.MANY - 1])
        assert len(jobs) == row_slices.MANY - 1, "few reads"
        monkeypatch.setattr(row_slices, "SHORT", 4)
        jobs.clear()
        assert torch.equal(store.read(plain)[3], value[plain[3].index[0]])
        assert len(jobs) == len(plain), "long slices"


def test_leaves_that_are_mixed_keep_their_order(place: FsPath) -> None:
    asked = [(name, term) for name in SHAPES for term in slices(1, 9)]
    random.Random(1).shuffle(asked)
    with open_zarr(place) as store:
        found = store.read([Read((name,), (term,)) for name, term in asked])
    for part, (name, term) in zip(found, asked, strict=True):
        assert torch.equal(part, SHAPES[name][term])


def test_slices_see_what_waits_to_be_written(place: FsPath) -> None:
    with open_zarr(place, mode="r+", durable="none") as store:
        expected = SHAPES["rows"].clone()
        expected[30:90] = -1.0
        store.write([Write(("rows",), (slice(30, 90, 1),), expected[30:90])])
        for part, term in zip(store.read([Read(("rows",), (t,)) for t in slices(2, 40)]), slices(2, 40), strict=True):
            assert torch.equal(part, expected[term])
        store.discard()


def test_a_slice_beyond_the_end_is_refused(place: FsPath) -> None:
    with open_zarr(place) as store, pytest.raises(OutOfRangeError):
        store.read([Read(("numbers",), (slice(at, at + 10, 1),)) for at in range(185, 200)])


def test_a_damaged_chunk_is_told(tmp_path: FsPath) -> None:
    value = torch.randint(0, 1 << 30, (ROWS,), dtype=torch.int32)
    with open_zarr(tmp_path / "x.zarr", mode="w", durable="none", chunks=50) as store:
        store.create({("a",): LeafSpec(value.shape, "int32")})
        store.write([Write(("a",), (), value)])
        store.save_header(header_of({("a",): value}))
    (chunk,) = (tmp_path / "x.zarr").rglob("c/2")
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 0xFF
    chunk.write_bytes(data)
    with open_zarr(tmp_path / "x.zarr") as store:
        fine = [Read(("a",), (slice(at, at + 3, 1),)) for at in range(40)]
        assert torch.equal(store.read(fine)[7], value[7:10])
        with pytest.raises(CorruptStoreError, match="c/2"):
            store.read([*fine, Read(("a",), (slice(120, 130, 1),))])
