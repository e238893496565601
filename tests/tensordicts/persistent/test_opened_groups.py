"""`PersistentTensorDict(group=...)` of groups that h5py and zarr have opened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tdstore
from tdstore import PersistentTensorDict
from tdstore.errors import UnsupportedError

h5py = pytest.importorskip("h5py")


def written(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file["b/x"] = np.arange(6).reshape(3, 2)
        file["b/n/y"] = np.zeros(3)
        file["z"] = np.zeros(4)
    return path


@pytest.mark.parametrize("package", ["tensordict", "tdstore"])
def test_a_group_of_h5py(tmp_path: Path, package: str) -> None:
    module = pytest.importorskip(package)
    with h5py.File(written(tmp_path / "d.h5"), "r") as file:
        td = module.PersistentTensorDict(group=file["b"], batch_size=[3])
        assert td.batch_size == (3,) and sorted(map(str, td.keys(True, True))) == ["('n', 'y')", "x"]
        assert torch.equal(td[1]["x"], torch.tensor([2, 3])) and not td["n", "y"].any()


def test_a_file_of_h5py_is_its_root(tmp_path: Path) -> None:
    with h5py.File(written(tmp_path / "d.h5"), "r") as file:
        assert set(PersistentTensorDict(group=file).keys()) == {"b", "z"}


def test_a_group_that_is_written_is_refused(tmp_path: Path) -> None:
    with h5py.File(written(tmp_path / "d.h5"), "r+") as file:
        with pytest.raises(UnsupportedError, match="open for writing in h5py"):
            PersistentTensorDict(group=file["b"])
        file["b/x"][0, 0] = 9
    td = PersistentTensorDict(filename=tmp_path / "d.h5", group="/b", mode="r+")
    td["w"] = torch.ones(td.batch_size)
    td.close()
    with h5py.File(tmp_path / "d.h5", "r") as file:
        assert set(file["b"]) >= {"x", "n", "w"} and file["b/x"][0, 0] == 9


@pytest.mark.parametrize("package", ["tensordict", "tdstore"])
def test_a_group_of_zarr(tmp_path: Path, package: str) -> None:
    module, zarr = pytest.importorskip(package), pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "d.zarr", mode="w").create_group("b")
    group.create_array("x", data=np.arange(6).reshape(3, 2))
    td = module.PersistentTensorDict(group=group, batch_size=[3], backend="zarr")
    assert td.batch_size == (3,) and torch.equal(td["x"], torch.arange(6).reshape(3, 2))


@pytest.mark.parametrize("package", ["tensordict", "tdstore"])
def test_a_group_of_zarr_in_memory(package: str) -> None:
    module, zarr = pytest.importorskip(package), pytest.importorskip("zarr")
    group = zarr.open_group(zarr.storage.MemoryStore(), mode="w").create_group("b")
    group.create_array("x", data=np.arange(6).reshape(3, 2))
    td = module.PersistentTensorDict(group=group, batch_size=[3], backend="zarr")
    assert td.batch_size == (3,) and torch.equal(td["x"], torch.arange(6).reshape(3, 2))


def test_a_path_still_names_a_nested_tensordict(tmp_path: Path) -> None:
    tdstore.TensorDict({"b": {"x": torch.ones(3)}}, [3]).save(tmp_path / "d.h5").close()
    for group in ("b", "/b", ("b",)):
        assert list(PersistentTensorDict(filename=tmp_path / "d.h5", group=group).keys()) == ["x"]
