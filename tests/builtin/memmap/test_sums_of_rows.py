"""Checksums of leaves that are written by rows: taken while rows are written in order, else of the file."""

from __future__ import annotations

from pathlib import Path as FsPath
from typing import Any

import pytest
import torch

import tdstore
from tdstore.builtin.memmap import writing
from tdstore.builtin.memmap.store import open_memmap
from tdstore.types import LeafSpec, Write
from tests.builtin.memmap.support import header_of

PATH = ("a",)
ROWS, ROW = 700, 1000
"""700 kB: several blocks of checksums, whose borders are within rows."""


@pytest.fixture
def files_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the leaves that were read for their checksums."""
    found: list[int] = []
    whole = writing.sums_of_file

    def told(fd: int, nbytes: int, *args: Any) -> Any:
        found.append(nbytes)
        return whole(fd, nbytes, *args)

    monkeypatch.setattr(writing, "sums_of_file", told)
    return found


def values(seed: int) -> torch.Tensor:
    return torch.randint(0, 255, (ROWS, ROW), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def written(place: FsPath, runs: list[tuple[int, int, int]]) -> torch.Tensor:
    """Write rows `[start, stop)` of the values of a seed, run after run, and return what the leaf should hold."""
    want = torch.zeros(ROWS, ROW, dtype=torch.uint8)
    with open_memmap(str(place), mode="w") as store:
        store.create({PATH: LeafSpec((ROWS, ROW), "uint8")})
        for start, stop, seed in runs:
            want[start:stop] = values(seed)[start:stop]
            store.write([Write(PATH, (slice(start, stop, 1),), want[start:stop].clone())])
        store.save_header(header_of({PATH: want}))
    return want


def check(place: FsPath, want: torch.Tensor) -> None:
    with tdstore.open(place) as td:
        assert torch.equal(td["a"], want)
    assert not tdstore.verify(place)


@pytest.mark.parametrize("runs", [[(0, 700)], [(0, 1), (1, 333), (333, 700)], [(0, 9), (0, 350), (350, 700)]], ids=str)
def test_rows_in_order_are_not_read_again(runs: Any, tmp_path: FsPath, files_read: list[int]) -> None:
    want = written(tmp_path / "d", [(*run, seed) for seed, run in enumerate(runs)])
    assert not files_read
    check(tmp_path / "d", want)


@pytest.mark.parametrize(
    "runs",
    [
        [(0, 350)],
        [(0, 350), (351, 700)],
        [(350, 700), (0, 350)],
        [(0, 350), (350, 700), (5, 6)],
        [(0, 350), (5, 6), (350, 700)],
        [(0, 350), (350, 360), (350, 700)],
    ],
    ids=str,
)
def test_the_file_is_read_after_other_orders(runs: Any, tmp_path: FsPath, files_read: list[int]) -> None:
    want = written(tmp_path / "d", [(*run, seed) for seed, run in enumerate(runs)])
    assert files_read == [ROWS * ROW]
    check(tmp_path / "d", want)


def test_a_write_that_fails_is_not_counted(
    tmp_path: FsPath, files_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = writing.files.write_at
    with open_memmap(str(tmp_path / "d"), mode="w") as store:
        store.create({PATH: LeafSpec((ROWS, ROW), "uint8")})
        store.write([Write(PATH, (slice(0, 350, 1),), values(0)[:350])])

        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(writing.files, "write_at", full)
        with pytest.raises(OSError, match="space"):
            store.write([Write(PATH, (slice(350, 700, 1),), values(1)[350:])])
        monkeypatch.setattr(writing.files, "write_at", whole)
        store.write([Write(PATH, (slice(350, 700, 1),), values(2)[350:])])
        want = torch.cat([values(0)[:350], values(2)[350:]])
        store.save_header(header_of({PATH: want}))
    check(tmp_path / "d", want)


def test_a_dataset_that_is_converted_is_not_read_again(tmp_path: FsPath, files_read: list[int]) -> None:
    td = tdstore.TensorDict({"a": values(3), "b": values(4)}, [ROWS])
    td.save(tmp_path / "d.h5").save(tmp_path / "d", storage="memmap")
    assert not files_read
    check(tmp_path / "d", values(3))
