"""Folders on the way to a new dataset: they come with it, and go where nothing was committed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tdstore import TensorDict
from tdstore.registry import registry
from tdstore.store import Store
from tdstore.types import LeafSpec

BACKENDS = {"": "memmap", ".h5": "h5", ".tdz": "tdz", ".zarr": "zarr", ".zarr.zip": "zarr"}


def new(place: Path, suffix: str) -> Store:
    return registry().open(registry().get(BACKENDS[suffix]), place / f"x{suffix}", mode="w")


@pytest.mark.parametrize("suffix", BACKENDS)
def test_folders_go_with_a_dataset_that_was_never_committed(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "old").mkdir()
    with new(tmp_path / "old" / "new" / "deep", suffix) as store:
        store.create({("a",): LeafSpec((3,), "int8")})
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]


@pytest.mark.parametrize("suffix", BACKENDS)
def test_folders_of_others_stay(tmp_path: Path, suffix: str) -> None:
    with new(tmp_path / "new" / "deep", suffix) as store:
        store.create({("a",): LeafSpec((3,), "int8")})
        (tmp_path / "new" / "file").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "new"]


@pytest.mark.parametrize("suffix", BACKENDS)
def test_folders_stay_with_a_dataset(tmp_path: Path, suffix: str) -> None:
    place = tmp_path / "new" / "deep" / f"x{suffix}"
    TensorDict({"a": torch.arange(3)}, [3]).save(place).close()
    assert place.exists() and [path.name for path in place.parent.iterdir()] == [place.name]
