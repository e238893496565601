"""Zip files are found to be zarr by their names and by what is in them; those of other kinds are not."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import CorruptStoreError, MissingDependencyError
from tdstore.registry import Registry, registry


def backend(location: Path) -> str:
    with tdstore.open(location) as stored:
        assert stored["a"].tolist() == [0, 1, 2]
        found = registry().resolve(location)
    assert found is not None
    return found.name


def test_zips_by_name_and_by_content(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.arange(3)}, [3])
    for _ in range(2):  # the second replaces the first
        td.save(tmp_path / "x.zarr.zip").close()
        assert backend(tmp_path / "x.zarr.zip") == "zarr"
    td.save(tmp_path / "x.tdz").close()
    assert backend(tmp_path / "x.tdz") == "tdz"
    tdstore.copy(tmp_path / "x.tdz", tmp_path / "copy.zarr.zip")
    assert backend(tmp_path / "copy.zarr.zip") == "zarr"
    (tmp_path / "x.zarr.zip").rename(tmp_path / "zarr.zip")
    (tmp_path / "x.tdz").rename(tmp_path / "tdz.zip")
    assert backend(tmp_path / "zarr.zip") == "zarr" and backend(tmp_path / "tdz.zip") == "tdz"
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(CorruptStoreError, match="not an archive"):
        tdstore.open(tmp_path / "other.zip")


def test_without_the_plugin_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TensorDict({"a": torch.arange(3)}, [3]).save(tmp_path / "x.zarr.zip").close()
    bare = Registry()
    monkeypatch.setattr(sys.modules["tdstore.discovery"], "entry_points", lambda **_: [])
    with pytest.raises(MissingDependencyError, match="'zarr' backend is not installed"):
        bare.resolve(tmp_path / "x.zarr.zip")
