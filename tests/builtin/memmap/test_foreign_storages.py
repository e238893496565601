"""`make_memmap_from_storage`: whose memory an entry may be made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

PACKAGES = ("tensordict", "tdstore")


@pytest.mark.parametrize("package", PACKAGES)
def test_the_storage_of_another_file_is_refused(tmp_path: Path, package: str) -> None:
    module = pytest.importorskip(package)
    other = module.MemoryMappedTensor.from_tensor(torch.arange(4), filename=str(tmp_path / "other.memmap"))
    td = module.TensorDict({"a": torch.zeros(2)}).memmap_(tmp_path / "td")
    with pytest.raises(RuntimeError):
        td.make_memmap_from_storage("b", other.untyped_storage(), torch.Size([4]), dtype=torch.int64)
    assert "b" not in td.keys() and other.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_storage_of_an_entry_of_another_dataset_is_refused(tmp_path: Path, package: str) -> None:
    module = pytest.importorskip(package)
    other = module.TensorDict({"x": torch.arange(4)}).memmap_(tmp_path / "other")
    td = module.TensorDict({"a": torch.zeros(2)}).memmap_(tmp_path / "td")
    with pytest.raises(RuntimeError):
        td.make_memmap_from_storage("b", other["x"].untyped_storage(), torch.Size([4]), dtype=torch.int64)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("kind", ["plain", "anonymous"])
def test_memory_without_a_file_is_taken(tmp_path: Path, package: str, kind: str) -> None:
    module = pytest.importorskip(package)
    source = torch.arange(4) if kind == "plain" else module.MemoryMappedTensor.from_tensor(torch.arange(4))
    td = module.TensorDict({"a": torch.zeros(2)}).memmap_(tmp_path / "td")
    made = td.make_memmap_from_storage("b", source.untyped_storage(), torch.Size([4]), dtype=torch.int64)
    assert made.tolist() == [0, 1, 2, 3] and td["b"].tolist() == [0, 1, 2, 3]
