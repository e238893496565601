"""Arrays of strings that h5py and zarr-python made, opened here; and ours, read by them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from numcodecs import zstd
from tdstore_h5.remote.engine_file import EngineFile
from tdstore_h5.remote.store import RemoteH5Store

import tdstore
from tdstore import TensorDict
from tdstore.errors import CorruptStoreError, UnsupportedError
from tdstore.storekit.local_engine import LocalEngine

N = 300
"""As many as leaves need."""
CAPTIONS = [f"caption {i} {'é' * (i % 3)}" if i % 7 else "" for i in range(N)]
ROWS = torch.tensor([255, 3, 3, 299, 0, 7])


def h5_file(path: Path, values: list[str], **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        file["x"] = file["g/y"] = np.arange(len(values))
        file.create_dataset("g/caption", data=values, **{"dtype": h5py.string_dtype(), **options})
    return path


def zarr_store(path: Path, values: list[str], dtype: Any = str, **options: Any) -> Path:
    group = zarr.open_group(str(path), mode="w")
    group["x"] = group["g/y"] = np.arange(len(values))
    array = group.create_array("g/caption", shape=(len(values),), dtype=dtype, **options)
    kind = object if dtype is str else None
    array[:] = np.array([v.encode() for v in values] if str(dtype).startswith("S") else values, kind)
    return path


MAKERS: dict[str, Any] = {
    "h5": lambda p, v: h5_file(p / "a.h5", v),
    "h5 chunks": lambda p, v: h5_file(p / "a.h5", v, chunks=(16,)),
    "h5 gzip": lambda p, v: h5_file(p / "a.h5", v, chunks=(16,), compression="gzip", shuffle=True),
    "h5 fixed": lambda p, v: h5_file(p / "a.h5", [s.encode() for s in v], dtype="S24"),
    "h5 fixed utf-8": lambda p, v: h5_file(p / "a.h5", [s.encode() for s in v], dtype=h5py.string_dtype("utf-8", 24)),
    "zarr": lambda p, v: zarr_store(p / "a.zarr", v),
    "zarr plain": lambda p, v: zarr_store(p / "a.zarr", v, chunks=(64,), compressors=None),
    "zarr gzip": lambda p, v: zarr_store(p / "a.zarr", v, chunks=(64,), compressors=zarr.codecs.GzipCodec()),
    "zarr blosc": lambda p, v: zarr_store(p / "a.zarr", v, chunks=(64,), compressors=zarr.codecs.BloscCodec()),
    "zarr crc": lambda p, v: zarr_store(
        p / "a.zarr", v, chunks=(64,), compressors=[zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]
    ),
    "zarr unicode": lambda p, v: zarr_store(p / "a.zarr", v, "U16", chunks=(64,)),
    "zarr unicode big": lambda p, v: zarr_store(p / "a.zarr", v, ">U16", chunks=(64,)),
    "zarr bytes": lambda p, v: zarr_store(p / "a.zarr", v, "S24", chunks=(64,)),
}


@pytest.mark.filterwarnings("ignore:The data type")
@pytest.mark.parametrize("n", [N, 20])
@pytest.mark.parametrize("maker", MAKERS)
def test_strings_are_values_per_row(maker: str, n: int, tmp_path: Path) -> None:
    values = CAPTIONS[:n]
    rows = ROWS % n
    place = MAKERS[maker](tmp_path, values)
    with tdstore.open(place) as td:
        assert td["g"].batch_size == torch.Size([n])
        assert td["g", "caption"] == values
        assert td["g"][rows]["caption"] == [values[i] for i in rows]
        assert td["g"][5:9]["caption"] == values[5:9]
        assert td["g"][3]["caption"] == values[3]
        td.save(tmp_path / "copy").close()
    assert tdstore.open(tmp_path / "copy")["g", "caption"] == values
    tdstore.copy(place, tmp_path / "streamed.zarr")
    assert tdstore.open(tmp_path / "streamed.zarr")["g", "caption"] == values


@pytest.mark.parametrize("maker", ["h5", "zarr"])
def test_in_a_store_that_is_written(maker: str, tmp_path: Path) -> None:
    place = MAKERS[maker](tmp_path, CAPTIONS)
    with tdstore.open(place, mode="r+") as td:
        assert td["g", "caption"] == CAPTIONS
        td["x"] = td["x"] + 1
        td.set(("g", "more"), torch.zeros(N))
    with tdstore.open(place, mode="r+") as td:
        assert td["x"][0] == 1
        assert td["g", "caption"] == CAPTIONS
        td.set(("g", "caption"), CAPTIONS[::-1])
    with tdstore.open(place) as td:
        assert td["g", "caption"] == CAPTIONS[::-1]


def test_arrays_of_strings_with_more_dimensions(tmp_path: Path) -> None:
    values = np.array(CAPTIONS, object).reshape(60, 5)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("c", data=values, dtype=h5py.string_dtype())
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    group.create_array("c", shape=(60, 5), chunks=(7, 2), dtype=str, fill_value="none")[:50] = values[:50]
    assert tdstore.open(tmp_path / "a.h5")["c"] == values.tolist()
    assert tdstore.open(tmp_path / "a.zarr")["c"] == [*values[:50].tolist(), *[["none"] * 5] * 10]


def test_what_is_not_utf8_is_bytes(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["c"] = np.array([b"a", b"\xff\xfe", *[b"b"] * 300])
    assert tdstore.open(tmp_path / "a.h5")["c"] == ["a", b"\xff\xfe", *["b"] * 300]


# -- what lies -------------------------------------------------------------------------------
def _shares_one_string(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(N)
        dataset = file.create_dataset("g/caption", data=["y" * 60_000, *"z" * (N - 1)], dtype=h5py.string_dtype())
        file.flush()
        at = dataset.id.get_offset()
    raw = bytearray(path.read_bytes())
    raw[at : at + 16 * N] = bytes(raw[at : at + 16]) * N
    path.write_bytes(raw)


def _zarr_chunk(data: bytes) -> Any:
    def make(path: Path) -> None:
        zarr_store(path, CAPTIONS)
        (path / "g/caption/c/0").write_bytes(data)

    return make


def _zarr_json(change: Any) -> Any:
    def make(path: Path) -> None:
        zarr_store(path, CAPTIONS, "U16")
        node = path / "g/caption/zarr.json"
        found = json.loads(node.read_text())
        change(found)
        node.write_text(json.dumps(found))
        root = json.loads((path / "zarr.json").read_text())
        root.pop("consolidated_metadata", None)
        (path / "zarr.json").write_text(json.dumps(root))

    return make


def _resize(found: dict[str, Any]) -> None:
    found["shape"] = [1 << 50]


def _widen(found: dict[str, Any]) -> None:
    found["data_type"]["configuration"]["length_bytes"] = 1 << 40


LIARS: dict[str, Any] = {
    "one string many times.h5": _shares_one_string,
    "count.zarr": _zarr_chunk(zstd.compress(struct.pack("<I", 2**32 - 1) + bytes(2000))),
    "length.zarr": _zarr_chunk(zstd.compress(struct.pack("<II", N, 2**32 - 1) + bytes(4 * N))),
    "bomb.zarr": _zarr_chunk(bytes.fromhex("28b52ffde0") + struct.pack("<Q", 1 << 40) + bytes(20)),
    "cut.zarr": _zarr_chunk(zstd.compress(b"abc")[:9]),
    "shape.zarr": _zarr_json(_resize),
    "width.zarr": _zarr_json(_widen),
    "sharded.zarr": lambda path: zarr_store(path, CAPTIONS, chunks=(10,), shards=(100,)),
    "bytes.zarr": lambda path: zarr_store(path, CAPTIONS, "variable_length_bytes"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LIARS)
def test_strings_that_cannot_be_read_leave_the_other_keys(name: str, tmp_path: Path) -> None:
    if name == "bytes.zarr":
        group = zarr.open_group(str(tmp_path / name), mode="w")
        group["x"] = np.arange(N)
        group.create_array("g/caption", shape=(N,), dtype="variable_length_bytes")
    else:
        LIARS[name](tmp_path / name)
    with tdstore.open(tmp_path / name) as td:
        assert td["x"].tolist() == list(range(N))
        assert "caption" in repr(td)
        with pytest.raises(UnsupportedError, match="caption.*\n.*exclude"):
            td["g", "caption"]
        with pytest.raises(UnsupportedError, match="caption"):
            td.to_tensordict()
        assert set(td.exclude(("g", "caption")).to_tensordict().keys()) >= {"x"}


def test_spans_that_overlap_are_an_error_not_memory(tmp_path: Path) -> None:
    td = TensorDict({"c": CAPTIONS}, [N])
    for kind in ("memmap", "h5"):
        place = tmp_path / kind
        td.save(place, storage=kind).close()
        with tdstore.open(place, mode="r+") as stored:
            handle = stored._handle if kind == "h5" else stored._binding[0]
            spans = torch.tensor([[16, 1016 - i] for i in range(N)])
            handle.store.write([tdstore.Write(("c", "spans"), (), spans)])
        with tdstore.open(place) as stored, pytest.raises(CorruptStoreError, match="overlap"):
            list(stored["c"])


def test_rows_that_share_a_value_are_one_object(tmp_path: Path) -> None:
    long = "x" * 1000
    td = TensorDict({"c": [long] * N}, [N])
    expanded = TensorDict({"c": long}, []).expand(N)
    for kind in ("memmap", "h5"):
        place = tmp_path / kind
        td.save(place, storage=kind).close()
        assert tdstore.open(place)["c"] == [long] * N
    assert expanded["c"] == long


# -- ours, read by others ----------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_three_lines_read_ours_without_us(kind: str, tmp_path: Path) -> None:
    """The lines of docs/reference/values.md."""
    place = tmp_path / f"ours.{kind}"
    td = TensorDict({"g": TensorDict({"caption": CAPTIONS}, [N])}, [N])
    td.save(place, storage=kind).close()
    file: Any = h5py.File(place) if kind == "h5" else zarr.open_group(str(place), mode="r")
    spans, text = file["g/caption/spans"], file["g/caption/text"]
    rows = spans[100:200]
    captions = [bytes(text[a:b]).decode() for a, b in rows]
    assert captions == CAPTIONS[100:200]


def test_texts_are_cut_for_random_rows_whatever_rows_are_cut_to(tmp_path: Path) -> None:
    n = 3000
    td = TensorDict({"x": torch.zeros(n, 8), "c": [*["a caption of some length"] * (n - 1), ""]}, [n])
    td.save(tmp_path / "a.zarr", storage="zarr", chunks=64).close()
    td.save(tmp_path / "b.zarr", storage="zarr").close()
    td.save(tmp_path / "a.h5", storage="h5", chunks=64, maxshape=(4000, None), compression="gzip").close()
    ours = zarr.open_group(str(tmp_path / "a.zarr"))
    assert ours["x"].chunks == (64, 8)
    assert ours["c/text"].chunks == (8192,)
    assert ours["c/spans"].chunks == (64, 2)
    assert zarr.open_group(str(tmp_path / "b.zarr"))["c/spans"].chunks == (512, 2)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["x"].chunks == (64, 8)
        assert file["c/text"].chunks == (8192,)
        assert file["c/text"].maxshape == (None,)
    for name in ("a.zarr", "b.zarr", "a.h5"):
        assert tdstore.open(tmp_path / name)[2990:]["c"] == td[2990:]["c"]


def test_strings_of_a_file_over_a_wire(tmp_path: Path) -> None:
    place = h5_file(tmp_path / "a.h5", CAPTIONS)
    source = EngineFile(LocalEngine(str(tmp_path)), place.name)
    with RemoteH5Store(source, trust=False, reopen=()) as store:
        store.load()
        store.compare_manifest(verify="size", accept=False)
        assert store.load_header().groups[("g",)].values["caption"]["stack"] == CAPTIONS


def test_leaves_of_a_user_that_are_called_as_ours_keep_their_layout(tmp_path):
    """Only the container's own leaves of values are laid out as such: not any that are named spans and text."""
    own = {"text": torch.zeros(3000, dtype=torch.uint8), "spans": torch.zeros(3000, 2, dtype=torch.int64)}
    td = TensorDict({**own, "x": own["spans"].clone(), "said": ["words"] * 3000}, [3000])
    td.save(tmp_path / "x.h5", chunks=64).close()
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["text"].chunks == (64,) and file["spans"].chunks == (64, 2) == file["x"].chunks
        assert file["said/text"].chunks == (8192,)
    td.save(tmp_path / "x.zarr").close()
    group = zarr.open_group(str(tmp_path / "x.zarr"), mode="r")
    assert group["spans"].chunks == group["x"].chunks and group["spans"].compressors == group["x"].compressors
    assert group["said/spans"].compressors != group["x"].compressors
    tdstore.copy(tmp_path / "x.zarr", tmp_path / "copy.h5", chunks=64)  # what is a column stays one
    with h5py.File(tmp_path / "copy.h5") as file:
        assert file["text"].chunks == (64,) and file["said/text"].chunks == (8192,)
