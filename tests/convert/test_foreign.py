"""`from_any` of objects of other packages: converted, or refused; never handed back as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pytest
import torch
import xarray

import tdstore
from tdstore import TensorDict, from_any, is_tensor_collection
from tdstore.data import Epochs, TensorDictDataset
from tdstore.errors import BatchSizeError, InvalidTypeError, TDStoreError, UnsupportedError


def test_frames_of_polars() -> None:
    frame = pl.DataFrame(
        {
            "a": [1, 2],
            "s": ["x", None],
            "x": pl.Series([[1.0, 2.0], [3.0, 4.0]], dtype=pl.Array(pl.Float32, 2)),
            "n": [{"b": True}, {"b": False}],
            "c": pl.Series(["u", "v"], dtype=pl.Categorical),
            "when": [pd.Timestamp("2020-01-01"), pd.Timestamp("2020-01-02")],
        }
    )
    td = from_any(frame)
    assert td.batch_size == torch.Size([2])
    assert td["a"].tolist() == [1, 2]
    assert (td["s"], td["c"]) == (["x", None], ["u", "v"])
    assert (td["x"].dtype, td["x"].shape) == (torch.float32, torch.Size([2, 2]))
    assert td["n", "b"].tolist() == [True, False]
    assert (td["when"][1] - td["when"][0]).item() == 86400 * 10**9
    assert from_any(frame.vstack(frame))["c"] == ["u", "v", "u", "v"]
    td["a"] += 1  # memory of its own
    assert frame["a"].to_list() == [1, 2]


def test_python_objects_of_polars_are_refused() -> None:
    """polars exports their addresses."""
    frame = pl.DataFrame({"a": [1], "o": pl.Series([object()], dtype=pl.Object)})
    for call in (from_any, tdstore.from_arrow):
        with pytest.raises(UnsupportedError, match="column 'o' holds Python objects"):
            call(frame)
    with pytest.raises(UnsupportedError, match="holds Python objects"):
        from_any({"x": frame["o"]})


def test_columns_become_tensors() -> None:
    for column in (pl.Series([1, 2]), pa.array([1, 2]), pa.chunked_array([[1], [2]])):
        assert from_any(column).tolist() == [1, 2]
        assert from_any({"a": column}, auto_batch_size=True)["a"].tolist() == [1, 2]
    nested = from_any({"n": pl.DataFrame({"a": [1, 2]}), "b": 3})
    assert nested["n"].batch_size == torch.Size([2])


def test_relations_of_duckdb() -> None:
    td = from_any(duckdb.sql("select range as i, 'v' || range as s from range(3)"))
    assert (td["i"].tolist(), td["s"]) == ([0, 1, 2], ["v0", "v1", "v2"])


def test_queries_and_streams_are_refused_with_the_step_that_runs_them() -> None:
    table = pa.table({"a": [1]})
    stream = datasets.Dataset.from_dict({"a": [1]}).to_iterable_dataset()
    file = pa.BufferOutputStream()
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    for query, hint in (
        (pl.LazyFrame({"a": [1]}), "collect"),
        (stream, "take"),
        (pa.dataset.dataset(table), "to_table"),
        (pa.dataset.dataset(table).scanner(), "to_table"),
        (pa.ipc.open_file(file.getvalue()), "read_all"),
    ):
        for given in (query, {"q": query}):
            with pytest.raises(InvalidTypeError, match="no rows in memory") as caught:
                from_any(given)
            assert hint in str(caught.value.hint)


def test_datasets_of_hugging_face_as_they_show_their_rows() -> None:
    whole = datasets.Dataset.from_dict({"a": [1, 2, 3], "s": ["x", "y", "z"], "n": [{"b": [1.0]}] * 3})
    assert set(from_any(whole.with_format("numpy", columns=["a"])).keys()) == {"a"}
    made = whole.with_transform(lambda rows: {"twice": [torch.tensor([2 * a]) for a in rows["a"]], "s": rows["s"]})
    td = from_any(made)
    assert (td.batch_size, td["twice"].tolist(), td["s"]) == (torch.Size([3]), [[2], [4], [6]], ["x", "y", "z"])
    assert from_any(made.select([2]))["twice"].tolist() == [[6]]
    wrong = whole.with_transform(lambda rows: {"a": rows["a"], "b": [1]})
    with pytest.raises(BatchSizeError):
        from_any(wrong)
    assert from_any(whole.data)["s"] == ["x", "y", "z"]


def test_columns_of_hugging_face() -> None:
    features = datasets.Features({"a": datasets.Value("int16"), "n": {"b": datasets.Value("float64")}})
    whole = datasets.Dataset.from_dict({"a": [1, 2], "n": [{"b": 0.5}, {"b": 1.5}]}, features=features)
    assert torch.equal(from_any(whole["a"]), torch.tensor([1, 2], dtype=torch.int16))
    assert torch.equal(from_any(whole["n"]["b"]), torch.tensor([0.5, 1.5], dtype=torch.float64))
    assert from_any(whole["n"])["b"].tolist() == [0.5, 1.5]
    assert from_any({"x": whole["a"]})["x"].tolist() == [1, 2]
    assert from_any(whole.with_transform(lambda rows: {"a": [a + 1 for a in rows["a"]]})["a"]).tolist() == [2, 3]
    with pytest.raises(InvalidTypeError, match="no rows in memory"):
        from_any(whole.to_iterable_dataset()["a"])


def test_other_objects_than_rows_are_refused_with_the_function_that_converts_them(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_dict({"a": [1]})
    for call in (
        lambda: TensorDictDataset(whole),  # type: ignore[arg-type]
        lambda: Epochs(whole, 2),  # type: ignore[arg-type]
        lambda: tdstore.copy(whole, tmp_path / "x"),
        lambda: TensorDict(whole, [1]),  # type: ignore[arg-type]
    ):
        with pytest.raises(TDStoreError) as caught:
            call()
        assert "from_any" in str(caught.value.hint)


def test_datasets_of_hugging_face() -> None:
    whole = datasets.Dataset.from_dict({"a": [1, 2, 3], "s": ["x", "y", "z"], "x": [[1, 2], [3, 4], [5, 6]]})
    td = from_any(whole.select([2, 0]))
    assert (td["a"].tolist(), td["s"], td["x"].tolist()) == ([3, 1], ["z", "x"], [[5, 6], [1, 2]])
    splits = from_any(datasets.DatasetDict({"train": whole, "test": whole.select([1])}))
    assert (splits["train"].batch_size, splits["test", "a"].tolist()) == (torch.Size([3]), [2])
    assert from_any(whole.with_format("torch"))["a"].tolist() == [1, 2, 3]
    frames = datasets.Features({"f": datasets.Array2D((2, 2), "float32"), "k": datasets.ClassLabel(names=["u", "v"])})
    td = from_any(datasets.Dataset.from_dict({"f": [np.eye(2), np.ones((2, 2))], "k": [1, 0]}, features=frames))
    assert (td["f"].tolist(), td["k"].tolist()) == ([[[1, 0], [0, 1]], [[1, 1], [1, 1]]], [1, 0])


def test_datasets_of_hugging_face_take_ours() -> None:
    td = TensorDict({"a": torch.arange(3), "n": {"s": ["x", "y", "z"]}}, [3])
    assert datasets.Dataset(td.to_arrow())[1] == {"a": 1, "n": {"s": "y"}}


def labelled() -> Any:
    return xarray.Dataset(
        {
            "t": (("time", "x"), np.arange(6.0).reshape(3, 2)),
            "s": (("time",), ["a", "b", "c"]),
            "m": (("time", "x", "band"), np.zeros((3, 2, 4), np.int8)),
        },
        coords={"time": pd.date_range("2020", periods=3), "x": [10, 20], "unit": "kelvin"},
    )


def test_datasets_of_xarray() -> None:
    td = from_any(labelled())
    assert (td.batch_size, td.names) == (torch.Size([3]), ["time"])
    assert (td["t"].shape, td["m"].dtype, td["s"]) == (torch.Size([3, 2]), torch.int8, ["a", "b", "c"])
    assert td["time"].diff().tolist() == [86400 * 10**9] * 2
    assert td[1]["x"].tolist() == [10, 20]  # not of the rows: one for all
    assert td["unit"] == "kelvin"
    both = from_any(labelled().drop_vars("s"))
    assert (both.batch_size, both.names) == (torch.Size([3, 2]), ["time", "x"])
    text = from_any(xarray.Dataset({"s": (("a", "b"), [["u", "v"], ["w", "x"]])}))
    assert text[1, 0]["s"] == "w"
    assert from_any(labelled().chunk({"time": 1}))["t"].tolist() == td["t"].tolist()
    assert from_any(labelled()["t"]).tolist() == td["t"].tolist()
    assert from_any({"v": labelled()["t"].variable})["v"].shape == torch.Size([3, 2])
    assert from_any(xarray.Dataset()).is_empty()


def test_trees_of_xarray() -> None:
    tree = xarray.DataTree.from_dict({"/": xarray.Dataset({"g": 1.5}), "/a/b": labelled()})
    td = from_any(tree)
    assert td["a", "b"].batch_size == torch.Size([3])
    assert td["g"].item() == 1.5


def test_other_dtypes_of_xarray_are_refused() -> None:
    odd = xarray.Dataset({"o": (("x",), np.zeros(2, np.dtype("V3")))})
    with pytest.raises(UnsupportedError, match="'o'"):
        from_any(odd)


def test_other_objects_stay() -> None:
    thing = object()
    assert from_any(thing) is thing
    assert from_any(xarray.Variable) is xarray.Variable
    assert is_tensor_collection(from_any(TensorDict()))
