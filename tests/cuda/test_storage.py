"""Data of a GPU in stores, and stored data on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import PersistentTensorDict, TensorDict
from tests.conftest import assert_same
from tests.cuda.test_moves import GPU, on_gpu

PLACES = {"memmap": "", "h5": ".h5", "zarr": ".zarr", "tdz": ".tdz"}


def source() -> TensorDict:
    td = TensorDict(
        {
            "a": torch.arange(24.0).reshape(4, 3, 2),
            "n": {"b": torch.arange(4, dtype=torch.uint8), "h": torch.arange(4).bfloat16()},
            "s": "text",
            "rows": [f"r{i}" for i in range(4)],
            "big": torch.arange(4 * 3000).reshape(4, 3000),
        },
        [4],
    )
    td["j"] = torch.nested.nested_tensor([torch.arange(i + 1.0) for i in range(4)], layout=torch.jagged)
    return td


def same(got: Any, want: Any) -> None:
    got, want = got.to("cpu"), want.to("cpu")
    assert [t.tolist() for t in got["j"].unbind()] == [t.tolist() for t in want["j"].unbind()]
    assert_same(got.exclude("j"), want.exclude("j"))


@pytest.mark.parametrize("place", PLACES)
def test_saved_from_there_and_read_to_it(place: str, tmp_path: Path) -> None:
    at = tmp_path / f"x{PLACES[place]}"
    td = source().to("cuda")
    td.save(at).close()
    assert on_gpu(td)
    opened = tdstore.open(at)
    same(opened, source())
    moved = opened.to("cuda")
    assert on_gpu(moved)
    assert moved.device == GPU
    same(moved, source())
    loaded = TensorDict.load(at, device="cuda")
    assert loaded.device == GPU
    assert loaded["a"].device == loaded["n", "h"].device == GPU
    assert loaded[[2, 0]]["big"].device == GPU
    same(loaded, source())
    rows = opened[torch.tensor([3, 1, 1], device="cuda")]
    assert rows["n", "b"].tolist() == [3, 1, 1]
    assert rows.to("cuda")["a"].device == GPU


@pytest.mark.parametrize("place", ["memmap", "h5", "zarr"])
def test_rows_written_from_there(place: str, tmp_path: Path) -> None:
    at = tmp_path / f"x{PLACES[place]}"
    td = source().exclude("j", "s", "rows")
    td.save(at).close()
    with tdstore.open(at, mode="r+") as stored:
        new = (td * 0 + 7).to("cuda")
        stored[torch.tensor([2, 0], device="cuda")] = new[:2]
        stored[1] = new[1]
        stored.set_at_("a", torch.ones(3, 2, device="cuda"), 3)
        stored["new"] = torch.arange(4, device="cuda")
    again = tdstore.open(at)
    assert again["n", "b"].tolist() == [7, 7, 7, 3]
    assert again["big"][:, 5].tolist() == [7, 7, 7, 9005]
    assert again["a"][3].sum().item() == 6
    assert again["new"].tolist() == [0, 1, 2, 3]


def test_by_the_names_of_backends(tmp_path: Path) -> None:
    td = source().to("cuda")
    mapped = td.memmap(tmp_path / "m")
    assert mapped.device == torch.device("cpu")
    loaded = TensorDict.load_memmap(tmp_path / "m", device="cuda")
    assert loaded.device == GPU
    assert on_gpu(loaded)
    same(loaded, source())
    stored = PersistentTensorDict.from_dict(td.exclude("j"), filename=tmp_path / "x.h5", batch_size=[4], device="cuda")
    assert stored["a"].device == GPU
    assert stored[1:3]["big"].device == GPU
    again = torch.zeros_like(source()).to("cuda").load_memmap_(tmp_path / "m")
    assert again.device == GPU
    assert on_gpu(again)
    like = td.memmap_like(tmp_path / "like")
    assert like["a"].shape == (4, 3, 2)
    td.exclude("j").to_h5(tmp_path / "y.h5").close()
    assert TensorDict.from_h5(tmp_path / "y.h5", device="cuda")["a"].device == GPU


def test_a_store_on_the_gpu() -> None:
    td = source().exclude("j")
    on = td.save(storage="cuda")
    assert on["a"].device == GPU
    assert_same(on.to("cpu"), td.to("cpu"))
    made = TensorDict.from_schema({"a": ((2,), "float32"), "n": {"b": "int64"}}, batch_size=[5], storage="cuda")
    assert made["a"].device == GPU
    made[torch.tensor([1, 3], device="cuda")] = TensorDict({"a": torch.ones(2, 2), "n": {"b": torch.ones(2)}}, [2])
    assert made["n", "b"].tolist() == [0, 1, 0, 1, 0]
    assert made["a"].sum().item() == 4


def test_consolidated(tmp_path: Path) -> None:
    td = source()
    there = td.consolidate().to("cuda")
    assert there.is_consolidated()
    assert on_gpu(there)
    same(there, td)
    again = td.to("cuda").consolidate()
    assert again.is_consolidated()
    assert on_gpu(again)
    same(again, td)
    pinned = td.consolidate().pin_memory().to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    same(pinned, td)
    td.to("cuda").consolidate(tmp_path / "x.td")
    same(TensorDict.from_consolidated(tmp_path / "x.td"), td)
    assert on_gpu(td.consolidate(device="cuda"))


def test_copied_between_stores(tmp_path: Path) -> None:
    td = source().exclude("j").to("cuda")
    td.save(tmp_path / "first").close()
    tdstore.copy(str(tmp_path / "first"), str(tmp_path / "x.h5"))
    assert_same(tdstore.open(tmp_path / "x.h5").to("cpu"), td.to("cpu"))
    td[:2].save(tmp_path / "y").close()
    with tdstore.open(tmp_path / "y", mode="r+") as stored:
        stored.append(td[2:])
    assert tdstore.open(tmp_path / "y")["n", "b"].tolist() == [0, 1, 2, 3]


def test_files_of_others(tmp_path: Path) -> None:
    td = source().select("a", ("n", "b")).to("cuda")
    td.to_safetensors(tmp_path / "x.safetensors")
    found = tdstore.from_safetensors(tmp_path / "x.safetensors", device="cuda")
    assert found["a"].device == GPU
    assert found["a"].tolist() == td["a"].tolist()
    torch.save(td, tmp_path / "x.pt")
    again = torch.load(tmp_path / "x.pt", weights_only=False)
    assert again["a"].device == GPU
    assert torch.load(tmp_path / "x.pt", weights_only=False, map_location="cpu")["a"].device.type == "cpu"
    state = td.state_dict()
    fresh = torch.zeros_like(td)
    fresh.load_state_dict(state)
    assert on_gpu(fresh)
    assert fresh["n", "b"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
def test_lazily_conjugated_and_negated_leaves(dtype: str, tmp_path: Path) -> None:
    """torch loses the sign of negated views that it copies to a GPU."""
    value = torch.tensor([[1 + 2j, 3 - 4j], [5j, -6 + 0.5j]], dtype=torch.complex128)
    leaves = {"conj": value.conj(), "neg": value.conj().imag}
    td = TensorDict(leaves, [2])
    assert td.save(storage="cuda")["neg"].tolist() == value.conj().imag.resolve_neg().tolist()
    there = TensorDict({"conj": value.cuda().conj(), "neg": value.cuda().conj().imag}, [2])
    there.save(tmp_path / "x").close()
    got = tdstore.open(tmp_path / "x")
    assert got["neg"].tolist() == value.conj().imag.resolve_neg().tolist()
    assert got["conj"].tolist() == value.conj().resolve_conj().tolist()
