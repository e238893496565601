"""`PersistentTensorDict.file` and `.mode`, here and in tensordict, and `from_any` of what h5py has opened."""

from __future__ import annotations

import fcntl
import gc
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest
import tensordict
import torch

import tdstore
from tdstore import PersistentTensorDict, TensorDict
from tdstore.errors import StoreClosedError, UnsupportedError
from tdstore.testing.processes import warm
from tests import scripts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def data() -> dict[str, Any]:
    return {"a": torch.arange(3), "n": {"b": torch.ones(3, 2)}}


@pytest.fixture(params=["tensordict", "tdstore"])
def package(request: pytest.FixtureRequest) -> ModuleType:
    return {"tensordict": tensordict, "tdstore": tdstore}[request.param]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "x.h5"


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_the_open_file(place: Path, package: ModuleType, mode: str) -> None:
    ours = package is tdstore
    package.TensorDict(data(), [3]).to_h5(str(place), **({"chunks": 2} if ours else {})).close()
    td = package.PersistentTensorDict.from_h5(str(place), mode=mode)
    assert isinstance(td.file, h5py.File) and td.file.filename == str(place) and td.mode == mode
    file = td.file
    assert file is td.file and file["a"][:].tolist() == [0, 1, 2]
    nested = td["n"]
    assert isinstance(nested.file, h5py.Group) and nested.file.name == "/n"
    assert set(nested.file) == {"b"}
    if ours:  # there the mode of a nested one is "r", and chunks=2 loses the nested entry, or is an error since 0.15
        assert nested.mode == mode and file["a"].chunks == (2,)
    td.close()


def test_by_the_file_nothing_can_be_changed(place: Path) -> None:
    td = TensorDict(data(), [3]).to_h5(place)
    file = td.file
    assert file.mode == "r" and td.mode == "r+"
    with pytest.raises(ValueError, match="no write intent"):
        file["c"] = 1
    with pytest.raises(OSError, match="no write intent"):
        file["a"][0] = 5
    with pytest.raises((KeyError, OSError, RuntimeError)):
        del file["a"]
    with pytest.raises((OSError, RuntimeError)):
        file.attrs["x"] = 1
    file.close()
    td["c"] = torch.ones(3)
    td.close()
    assert not TensorDict.from_h5(place).verify()


def test_rows_that_were_written_are_in_the_file(place: Path) -> None:
    td = TensorDict(data(), [3]).to_h5(place)
    td[1:] = TensorDict({"a": torch.tensor([7, 8]), "n": {"b": torch.zeros(2, 2)}}, [2])
    assert td.file["a"][:].tolist() == [0, 7, 8] and td.file["n/b"][:].sum() == 2
    td["new"] = torch.arange(3)
    assert td.file["new"][:].tolist() == [0, 1, 2]


def test_a_change_ends_what_was_given(place: Path) -> None:
    td = TensorDict({"a": torch.arange(100_000)}, [100_000]).to_h5(place, chunks=10)
    file = td.file
    dataset = file["a"]
    assert dataset[5] == 5
    td.set_at_("a", torch.tensor(9), 5)
    with pytest.raises(OSError, match="open another"):
        dataset[:]
    assert td.file["a"][5] == 9 and td["a"][5] == 9
    file = td.file
    td.close()
    with pytest.raises(OSError, match="was closed"):
        file["a"][:]
    with pytest.raises(StoreClosedError):
        td.file  # noqa: B018


def test_a_file_in_use_keeps_its_store_open(place: Path) -> None:
    dataset = TensorDict(data(), [3]).to_h5(place).file["a"]
    gc.collect()
    tdstore.lifetime.settle()
    assert dataset[:].tolist() == [0, 1, 2]
    with open(place, "rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    del dataset
    gc.collect()
    tdstore.lifetime.settle()
    with open(place, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_other_processes_read_beside_it(place: Path) -> None:
    td = TensorDict(data(), [3]).to_h5(place)
    file = td.file
    code = f"import h5py; print(h5py.File({str(place)!r}, 'r')['a'][:].tolist())"
    done = subprocess.run([*warm.python(), "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[0, 1, 2]" and file["a"][1] == 1


def test_a_file_that_is_open_at_the_end_of_the_process(place: Path) -> None:
    code = (
        "import torch, tdstore\n"
        f"td = tdstore.TensorDict(a=torch.arange(3)).to_h5({str(place)!r})\n"
        "file = td.file; dataset = file['a']; assert dataset[:].tolist() == [0, 1, 2]"
    )
    done = scripts.run(code)
    assert (done.status, done.errors) == (0, "")


def test_keys_that_hdf5_cannot_name(place: Path) -> None:
    td = TensorDict({"a/b": {"c": torch.ones(2)}}, [2]).to_h5(place)
    assert td["a/b"].file["c"][:].tolist() == [1, 1]


def test_other_backends_have_none(tmp_path: Path) -> None:
    td = TensorDict(data(), [3]).to_zarr(tmp_path / "x.zarr")
    assert td.mode == "r+"
    with pytest.raises(UnsupportedError, match="x.zarr"):
        td.file  # noqa: B018


# -- from_any ------------------------------------------------------------------------------
def foreign(place: Path) -> Path:
    with h5py.File(place, "w") as file:
        file["a"] = np.arange(6).reshape(3, 2)
        file["n/b"] = np.ones(3)
    return place


def test_from_any_of_an_open_file(place: Path, package: ModuleType) -> None:
    with h5py.File(foreign(place), "r") as file:
        td = package.TensorDict.from_any(file)
        assert isinstance(td, package.PersistentTensorDict) and td["n", "b"].sum() == 3
        td = package.TensorDict.from_any({"q": file, "z": 1})
        assert isinstance(td["q"], package.PersistentTensorDict) and td["q", "a"].shape == (3, 2)


def test_from_any_of_open_groups(place: Path, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    with h5py.File(foreign(place), "r") as file:
        td = TensorDict.from_any(file["n"])
        assert isinstance(td, PersistentTensorDict) and list(td.keys()) == ["b"]
    group = zarr.open_group(zarr.storage.MemoryStore(), mode="w")
    group.create_group("n").create_array("b", data=np.ones(3))
    assert list(TensorDict.from_any(group["n"]).keys()) == ["b"]


def test_from_any_of_a_file_that_is_written(place: Path) -> None:
    with h5py.File(foreign(place), "r+") as file, pytest.raises(UnsupportedError, match="open for writing in h5py"):
        TensorDict.from_any(file)
