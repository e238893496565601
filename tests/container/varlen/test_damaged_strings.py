"""Strings of other programs that are damaged or lie: the entry says so, and the rest of the file is read."""

from __future__ import annotations

import gzip
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr

import tdstore
from tdstore import TensorDict
from tdstore.errors import CorruptStoreError, UnsupportedError

N = 300


def zarr_store(path: Path, n: int = N, **options: Any) -> Path:
    group = zarr.open_group(str(path), mode="w")
    group["x"] = np.arange(n)
    array = group.create_array("c", shape=(n,), dtype=str, **options)
    array[:] = np.array([f"s{i}" for i in range(n)], object)
    return path


def change(path: Path, **changed: Any) -> None:
    node, root = path / "c" / "zarr.json", path / "zarr.json"
    node.write_text(json.dumps({**json.loads(node.read_text()), **changed}))
    root.write_text(json.dumps({k: v for k, v in json.loads(root.read_text()).items() if k != "consolidated_metadata"}))


def refused(path: Path, mode: Any = "r", match: str = "the (array|dataset) 'c'") -> None:
    with tdstore.open(path, mode=mode) as td:
        assert len(td["x"]) > 0
        with pytest.raises(UnsupportedError, match=match):
            td["c"]


@pytest.mark.parametrize("codecs", [None, 5])
def test_codecs_that_are_no_list(codecs: Any, tmp_path: Path) -> None:
    change(zarr_store(tmp_path / "a.zarr"), codecs=codecs)
    refused(tmp_path / "a.zarr")


def test_a_fill_value_is_not_made_for_every_row(tmp_path: Path) -> None:
    """A header has each string by itself: 8 MiB that 200 rows share would be 1.6 GB."""
    for mode, n in (("r", 200), ("r+", N)):
        path = zarr_store(tmp_path / f"{mode}.zarr", n)
        shutil.rmtree(path / "c" / "c")
        change(path, fill_value="x" * (8 << 20))
        refused(path, mode, "more than 1073741824 bytes")


def test_a_chunk_of_more_strings_than_the_array_has(tmp_path: Path) -> None:
    count = 5_000_000
    path = zarr_store(tmp_path / "a.zarr", 3, compressors=zarr.codecs.GzipCodec())
    (path / "c" / "c" / "0").write_bytes(gzip.compress(struct.pack("<I", count) + bytes(4 * count)))
    change(path, chunk_grid={"name": "regular", "configuration": {"chunk_shape": [count]}})
    refused(path, match="declares 80000000 bytes")


def h5_file(path: Path, **options: Any) -> Any:
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(N)
        data = file.create_dataset("c", data=[f"s{i}" for i in range(N)], dtype=h5py.string_dtype(), **options)
        file.flush()
        return data.id.get_chunk_info(0).byte_offset + 20 if options else data.id.get_offset()


@pytest.mark.parametrize("damage", ["chunk", "address", "number", "length"])
def test_damaged_strings_of_hdf5(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    at = h5_file(path, **({"chunks": (N,), "compression": "gzip"} if damage == "chunk" else {}))
    skip, data = {
        "chunk": (0, b"\xff" * 40),
        "address": (4, struct.pack("<Q", 1 << 50)),
        "number": (12, struct.pack("<I", 77777)),
        "length": (0, struct.pack("<I", 1)),
    }[damage]
    raw = bytearray(path.read_bytes())
    raw[at + skip : at + skip + len(data)] = data
    path.write_bytes(raw)
    refused(path, match="cannot be decompressed" if damage == "chunk" else "is damaged")


@pytest.mark.parametrize("kind", [None, "memmap", "h5", "zarr"])
def test_a_tensor_among_the_values_of_rows(kind: str | None, tmp_path: Path) -> None:
    td: Any = TensorDict({"x": torch.zeros(N), "c": [f"s{i}" for i in range(N)]}, [N])
    if kind is not None:
        td.save(tmp_path / "a", storage=kind).close()
        td = tdstore.open(tmp_path / "a", mode="r+")
    td[3] = {"c": torch.tensor(5)}
    td[4] = TensorDict({"x": torch.tensor(1.0), "c": torch.tensor([1.0, 2.0])}, [])
    td.set_at_("c", 6, 5)
    found = td["c"][2:7]
    assert found[0] == "s2"
    assert found[1] == 5
    assert found[2].tolist() == [1.0, 2.0]
    assert found[3:] == [6, "s6"]
    assert td["x"][4] == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_rows_of_a_nested_tensor_that_are_all_the_same_elements(layout: torch.layout, tmp_path: Path) -> None:
    n = 20
    nested = torch.nested.as_nested_tensor([torch.arange(3.0), torch.arange(5.0)] * (n // 2), layout=layout)
    TensorDict({"w": nested}, [n]).save(tmp_path / "a.h5", storage="h5").close()
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        spans = file["w/nested.spans"]
        spans[...] = np.array([[0, 4 * n]] * n)
        if layout is torch.strided:
            file["w/nested.shapes"][...] = np.full((n, 1), 4 * n)
    with tdstore.open(tmp_path / "a.h5", recover="accept") as td:
        assert td[[1, 1]]["w"].unbind()[1].shape == (4 * n,)
        with pytest.raises(CorruptStoreError, match="rows overlap"):
            td[:3]["w"]
        with pytest.raises(CorruptStoreError, match="rows overlap"):
            td[[1, 2]]["w"]
