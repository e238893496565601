"""Frames, Arrow tables, and files of rows."""

from __future__ import annotations

import builtins
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import tdstore
from tdstore import TensorDict, from_arrow, from_csv, from_json, from_pandas, from_parquet
from tdstore.convert.tables import files, streaming
from tdstore.convert.tables import row_blocks as going
from tdstore.errors import BatchSizeError, MismatchError, MissingDependencyError, OptionError, UnsupportedError

from .conftest import in_container, rows, same


# -- frames ------------------------------------------------------------------------------------
def test_frames_of_every_container(held: Any) -> None:
    frame = held.to_pandas(separator=".")
    assert sorted(frame.columns) == ["a", "n.b", "n.s", "one", "v"]
    assert frame["n.s"].to_list() == [f"row {i}" for i in range(4)]
    back = from_pandas(frame, separator=".")
    same(back, rows())
    assert back[1]["one"] == "x"


def test_columns_of_pandas() -> None:
    frame = pd.DataFrame(
        {
            "c": pd.Categorical(["u", "v", "u"]),  # the peer keeps the codes and loses what they stand for
            "s": ["x", None, "z"],
            "o": [[1, 2], [3, 4], [5, 6]],
            "r": [[1], [2, 3], []],
            "z": pd.to_datetime(["2020-01-01"] * 3).tz_localize("Europe/Berlin"),
            "d": pd.to_timedelta([1, 2, 3], unit="s"),
            "i": pd.array([1, 2, 3], dtype="Int16"),
        }
    )
    td = from_pandas(frame)
    assert td["c"] == ["u", "v", "u"]
    assert td["s"] == ["x", None, "z"]
    assert td["o"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert td["r"] == [[1], [2, 3], []]
    assert td["z"].tolist() == [1577833200 * 10**9] * 3
    assert td["d"].tolist() == [n * 10**9 for n in (1, 2, 3)]
    assert td["i"].dtype == torch.int16
    levels = from_pandas(pd.DataFrame({("a", "b"): [1, 2]}))
    assert levels["a", "b"].tolist() == [1, 2]
    td["i"] += 1  # memory of its own, in spite of pandas' copy-on-write
    assert frame["i"].to_list() == [1, 2, 3]


def test_frames_without_rows_or_batch() -> None:
    td = TensorDict({"a": torch.arange(3), "b": torch.ones(3, 2)})
    assert td.to_pandas()["a"].to_list() == [0, 1, 2]
    with pytest.raises(BatchSizeError, match="batch_size"):
        TensorDict({"a": 1}).to_pandas()
    empty = rows()[:0].to_pandas(separator=".")
    assert (len(empty), "n.s" in empty.columns) == (0, True)
    with pytest.raises(ValueError, match=r"'n'.*separator"):
        rows().to_pandas()
    with pytest.raises(ValueError, match=r"column 'n\.b'"):
        TensorDict({"n.b": [1], "n": {"b": [1]}}, [1]).to_pandas(separator=".")


# -- Arrow -------------------------------------------------------------------------------------
def test_arrow_of_every_container(held: Any) -> None:
    table = held.to_arrow()
    assert table.column("n").type.field("s").type == pa.string()
    same(from_arrow(table), rows())
    flat = held.to_arrow(separator="/")
    same(from_arrow(flat, separator="/"), rows())


def test_arrow_shares_memory() -> None:
    td = TensorDict({"a": torch.arange(4), "f": torch.zeros(4, 3)}, [4])
    table = td.to_arrow()
    td["a"][1] = 9
    td["f"][2, 1] = 7
    assert table.column("a").to_pylist() == [0, 9, 2, 3]
    assert table.column("f").to_pylist()[2] == [0, 7, 0]
    back = from_arrow(table.slice(1, 2))
    back["f"][1, 0] = 5
    assert td["f"].tolist()[2] == [5, 7, 0]


def test_columns_of_arrow() -> None:
    table = pa.table(
        {
            "gaps": pa.array([1, None, 3]),
            "flag": pa.array([True, None, False]),
            "dict": pa.array(["u", "v", "u"]).dictionary_encode(),
            "list": pa.array([[1, 2], [3, 4], [5, 6]]),
            "ragged": pa.array([[1], [2, 3], None]),
            "cube": pa.array([[[1, 2]], [[3, 4]], [[5, 6]]], pa.list_(pa.list_(pa.int8(), 2), 1)),
            "date": pa.array([0, 1, None], pa.date32()),
            "time": pa.array([0, 1, 2], pa.time32("s")),
            "zone": pa.array([0, 1, 2], pa.timestamp("s", tz="Europe/Berlin")),
            "money": pa.array([1, 2, 3], pa.int64()).cast(pa.decimal128(21, 2)),
            "half": pa.array(np.array([1, 2, 3], np.float16)),
            "raw": pa.array([b"x", None, b"z"]),
            "none": pa.nulls(3),
            "s": pa.StructArray.from_arrays([pa.array([1, 2, 3])], ["i"]),
        }
    )
    chunked = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(6.0).reshape(3, 1, 2))
    for td in (from_arrow(table), from_arrow(chunked), from_arrow(table.to_batches()[0])):
        assert td["gaps"].dtype == torch.float64
        assert td["gaps"].nan_to_num(-1).tolist() == [1, -1, 3]
        assert td["flag"] == [True, None, False]
        assert td["dict"] == ["u", "v", "u"]
        assert td["list"].shape == torch.Size([3, 2])
        assert td["ragged"] == [[1], [2, 3], None]
        assert (td["cube"].shape, td["cube"].dtype) == (torch.Size([3, 1, 2]), torch.int8)
        assert td["date"].tolist() == [0, 86400 * 10**9, -(2**63)]
        assert td["time"].tolist() == td["zone"].tolist() == [0, 10**9, 2 * 10**9]
        assert td["money"].tolist() == [1.0, 2.0, 3.0]
        assert td["half"].dtype == torch.float16
        assert td["raw"] == [b"x", None, b"z"]
        assert td["none"] == [None] * 3
        assert td["s", "i"].tolist() == [1, 2, 3]
    assert from_arrow(pa.table({"t": tensor}))["t"].shape == torch.Size([3, 1, 2])
    assert from_arrow(table.slice(0, 0))["list"] == []


def test_shapes_and_dtypes_through_arrow() -> None:
    td = TensorDict(
        {"e": torch.zeros(2, 0, 3), "h": torch.ones(2).bfloat16(), "u": torch.ones(2).to(torch.uint64)}, [2]
    )
    back = from_arrow(td.to_arrow())
    assert (back["h"].dtype, back["u"].dtype) == (torch.float32, torch.uint64)
    assert from_arrow(td[:0].exclude("e").to_arrow()).batch_size == torch.Size([0])
    assert td.reshape(1, 2).to_arrow().column("h").to_pylist() == [[1, 1]]
    with pytest.raises(UnsupportedError, match="'c'"):
        TensorDict({"c": torch.zeros(2, dtype=torch.complex64)}, [2]).to_arrow()
    with pytest.raises(UnsupportedError, match="'o'"):
        TensorDict({"o": [1, "x"]}, [2]).to_arrow()


# -- files -------------------------------------------------------------------------------------
FORMATS = {
    "parquet": (TensorDict.to_parquet, from_parquet),
    "csv": (TensorDict.to_csv, from_csv),
    "json": (TensorDict.to_json, from_json),
    "jsonl": (lambda td, path, **kw: td.to_json(path, lines=True, **kw), from_json),
}


def table(ending: str, td: Any) -> Any:
    """`td` without what that kind of file cannot hold."""
    return td.exclude("v") if ending == "csv" else td


@pytest.mark.parametrize("ending", FORMATS)
def test_files_of_every_container(held: Any, ending: str, tmp_path: Path) -> None:
    write, read = FORMATS[ending]
    path = tmp_path / f"t.{ending}"
    write(table(ending, held), path, separator=".")
    back = read(path, separator=".")
    same(back, table(ending, rows()))
    assert [p.name for p in tmp_path.glob(f"*.{ending}*")] == [path.name]  # nothing is left beside it


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("kind", ["TensorDict", "h5"])
def test_files_are_written_in_blocks(ending: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def small(td: Any, block_bytes: int) -> Any:
        for start, stop, block in going.row_blocks(td, 64):
            sizes.append(len(block))
            yield start, stop, block

    monkeypatch.setattr(files, "row_blocks", small)
    td = table(ending, in_container(rows(20), kind, tmp_path))
    write, read = FORMATS[ending]
    write(td, tmp_path / f"t.{ending}", separator=".")
    assert sum(sizes) == 20
    assert max(sizes) < 10
    same(read(tmp_path / f"t.{ending}", separator="."), table(ending, rows(20)))


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("where", ["h5", "memmap", "zarr", "memory"])
def test_files_are_read_into_a_store(ending: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BLOCK_ROWS", 6)
    write, read = FORMATS[ending]
    want = table(ending, rows(20))
    write(want, tmp_path / f"t.{ending}", separator=".")
    location = None if where == "memory" else tmp_path / f"x.{where}"
    with read(tmp_path / f"t.{ending}", separator=".", location=location, storage=where) as td:
        same(td, want)
    if location is not None:
        same(tdstore.open(location, storage=where), want)


@pytest.mark.parametrize("ending", FORMATS)
def test_files_of_no_rows(ending: str, tmp_path: Path) -> None:
    write, read = FORMATS[ending]
    td = TensorDict({"a": torch.arange(3)}, [3])[:0]
    write(td, tmp_path / f"t.{ending}")
    assert read(tmp_path / f"t.{ending}").batch_size == torch.Size([0])


def test_columns_that_change_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BLOCK_ROWS", 2)
    (tmp_path / "t.csv").write_text("a,b\n1,1\n2,2\n3.5,3\n4,x\n")
    td = from_csv(tmp_path / "t.csv", location=tmp_path / "x.h5", usecols=["a"])
    assert td["a"].tolist() == [1.0, 2.0, 3.5, 4.0]
    with pytest.raises(MismatchError, match=r"'b'.*row 2"):
        from_csv(tmp_path / "t.csv", location=tmp_path / "y.h5")
    assert not (tmp_path / "y.h5").exists()
    with pytest.raises(OptionError, match="batch_size"):
        from_csv(tmp_path / "t.csv", location=tmp_path / "y.h5", batch_size=[4])


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    for write, name in ((TensorDict.to_parquet, "t.parquet"), (TensorDict.to_json, "t.json")):
        (tmp_path / name).write_text("old")
        with pytest.raises((UnsupportedError, TypeError)):
            write(TensorDict({"o": [object(), "x"]}, [2]), tmp_path / name)
        assert (tmp_path / name).read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_json_keeps_what_it_says(tmp_path: Path) -> None:
    td = TensorDict({"x": torch.tensor([0.1, float("nan"), float("inf")]).double() / 3, "s": ["1", "é", None]}, [3])
    td.to_json(tmp_path / "t.json")
    records = json.loads((tmp_path / "t.json").read_text())
    assert records[0] == {"x": td["x"][0].item(), "s": "1"}  # the peer's has ten digits
    assert records[1]["x"] is None
    back = from_json(tmp_path / "t.json")
    assert back["s"] == ["1", "é", None]  # the peer makes numbers of quoted ones
    assert torch.equal(back["x"][::2], td["x"][::2])
    td.to_json(tmp_path / "p.json", indent=1)
    assert (tmp_path / "p.json").read_text().startswith("[\n {")
    buffer = io.StringIO()
    td.to_json(buffer, lines=True)
    assert len(buffer.getvalue().splitlines()) == 3


def test_csv_options(tmp_path: Path) -> None:
    td = TensorDict({"a": torch.arange(3), "x": torch.rand(3, dtype=torch.float64)}, [3])
    td.to_csv(tmp_path / "t.csv.gz", sep=";")
    back = from_csv(tmp_path / "t.csv.gz", sep=";")
    assert torch.equal(back["x"], td["x"])
    with pytest.raises(ValueError, match=r"'v' of shape \[4, 2\]"):
        rows().to_csv(tmp_path / "no.csv", separator=".")


def test_parquet_options(tmp_path: Path) -> None:
    td = rows()
    td.to_parquet(tmp_path / "t.parquet", separator=".", compression="zstd", engine="pyarrow")
    assert pq.ParquetFile(tmp_path / "t.parquet").metadata.row_group(0).column(0).compression == "ZSTD"
    assert set(from_parquet(tmp_path / "t.parquet", columns=["a"]).keys()) == {"a"}
    assert from_parquet(tmp_path / "t.parquet", filters=[("a", ">", 1)])["a"].tolist() == [2, 3]
    td.to_pandas(separator=".").set_index("a").to_parquet(tmp_path / "p.parquet")
    assert "a" not in from_parquet(tmp_path / "p.parquet").keys()


# -- rows elsewhere ------------------------------------------------------------------------------
class Writer:
    """What the methods use of `streaming.MDSWriter`."""

    made: list[Any] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.samples = options, []
        self.made.append(self)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    finished = False

    def finish(self) -> None:
        self.finished = True

    def write(self, sample: dict[str, Any]) -> None:
        self.samples.append(sample)


def test_mds(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("streaming")
    fake.MDSWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "streaming", fake)
    held.to_mds(out="there", compression="zstd")
    made = Writer.made.pop()
    assert made.options["out"] == "there"
    assert made.options["columns"] == {"a": "int64", "v": "ndarray:float64:2", "n.b": "int", "n.s": "str", "one": "str"}
    assert made.samples[2]["v"].tolist() == [2.0, 2.25]
    assert {k: v for k, v in made.samples[2].items() if k != "v"} == {"a": 2, "n.b": False, "n.s": "row 2", "one": "x"}
    writer = Writer()
    held.to_mds(columns={"a": "int64"}, writer=writer)
    assert writer.samples == [{"a": i} for i in range(4)]
    assert not hasattr(writer, "closed")
    held.to_mds(columns={"a": "int64"}, writer=writer, finish_writer=False)
    assert not writer.finished
    held.to_mds(columns={"a": "int64"}, writer=writer, finish_writer=True)
    assert writer.finished and len(writer.samples) == 12


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] in ("pandas", "pyarrow", "streaming", "safetensors"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for call, package in (
        (lambda: rows().to_pandas(separator="."), "pandas"),
        (lambda: rows().to_arrow(), "pyarrow"),
        (lambda: from_parquet(tmp_path / "x"), "pyarrow"),
        (lambda: rows().to_mds(out="x"), "mosaicml-streaming"),
        (lambda: tdstore.from_safetensors(tmp_path / "x"), "safetensors"),
    ):
        with pytest.raises(MissingDependencyError, match=package) as caught:
            call()
        assert caught.value.hint == f"pip install {package}"
