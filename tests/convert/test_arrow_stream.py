"""Arrow's C stream: what polars, duckdb, pyarrow and pandas make of a TensorDict, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

import tdstore
from tdstore import TensorDict, UnbatchedTensor, from_any, from_arrow, lazy_stack
from tdstore.errors import BatchSizeError, InvalidTypeError, UnsupportedError

from .conftest import in_container, rows, same


def ragged() -> TensorDict:
    """Three rows of 2, 0 and 3 pairs."""
    values, offsets = torch.arange(10.0).reshape(5, 2), torch.tensor([0, 2, 2, 5])
    return TensorDict({"j": torch.nested.nested_tensor_from_jagged(values, offsets), "s": ["a", "", None]}, [3])


def test_packages_take_every_container(held: Any) -> None:
    want = held.to_arrow()
    assert pa.table(held).equals(want)
    assert pa.RecordBatchReader.from_stream(held).read_all().equals(want)
    frame = pl.from_arrow(held.to_arrow_reader())
    assert frame.schema["v"] == pl.Array(pl.Float64, 2)
    same(from_any(frame), rows())
    same(from_any(pl.from_arrow(held).struct.unnest()), rows())
    assert duckdb.sql("select n.s from held where a > 1 order by a desc").fetchall() == [("row 3",), ("row 2",)]
    same(from_any(duckdb.sql("select * from held")), rows())
    assert pd.DataFrame.from_arrow(held)["a"].to_list() == [0, 1, 2, 3]


def test_the_consumer_may_ask_for_another_schema() -> None:
    td = TensorDict({"a": torch.arange(3)}, [3])
    asked = pa.RecordBatchReader.from_stream(td, schema=pa.schema([("a", pa.float32())]))
    assert asked.read_all().column("a").type == pa.float32()


@pytest.mark.parametrize("kind", ["h5", "zarr", "memmap"])
def test_stored_rows_are_read_in_blocks_when_they_are_asked_for(kind: str, tmp_path: Path) -> None:
    n = 3000
    td = TensorDict({"x": torch.arange(4 * n).reshape(n, 4), "s": ["text " * 50] * n}, [n])
    stored = in_container(td, kind, tmp_path)
    reader = stored.to_arrow_reader(block_bytes=32 << 10)
    first = reader.read_next_batch()
    batches = [first, *reader]
    # The first block is a guess, since the size of text is not known before.
    assert all(batch.nbytes < 64 << 10 for batch in batches[1:])
    assert first.num_rows <= 1024
    same(from_arrow(pa.Table.from_batches(batches)), td)


def test_a_reader_fails_once_its_dataset_is_closed(tmp_path: Path) -> None:
    stored = TensorDict({"x": torch.arange(4000)}, [4000]).save(tmp_path / "x.h5")
    reader = stored.to_arrow_reader(block_bytes=4096)
    reader.read_next_batch()
    stored.close()
    with pytest.raises(tdstore.errors.StoreError, match="closed"):
        reader.read_all()


def test_live_tensors_are_one_block_of_shared_memory() -> None:
    td = TensorDict({"a": torch.arange(100_000), "n": {"b": torch.zeros(100_000, 40)}}, [100_000])
    table = pa.table(td)
    assert table.column("a").num_chunks == 1
    td["a"][7] = -1
    assert table.column("a")[7].as_py() == -1


def test_lists_that_differ_in_length(tmp_path: Path) -> None:
    td = ragged()
    stacked = lazy_stack([TensorDict({"j": row, "s": s}) for row, s in zip(td["j"].unbind(), td["s"], strict=True)])
    for held in (td, td.save(tmp_path / "x.h5"), td.memmap(tmp_path / "m"), td.save(tmp_path / "z.zarr"), stacked):
        table = pa.table(held)
        assert table.column("j").to_pylist()[2] == [[4.0, 5.0], [6.0, 7.0], [8.0, 9.0]]
        assert pl.DataFrame(held.to_arrow_reader())["j"].list.len().to_list() == [2, 0, 3]
        assert duckdb.sql("select len(j) from held").fetchall() == [(2,), (0,), (3,)]
        back = from_arrow(table.slice(1), nested=True)["j"]
        assert [row.tolist() for row in back.unbind()] == [row.tolist() for row in td["j"].unbind()][1:]
        assert from_arrow(table)["j"] == table.column("j").to_pylist()
    inner = lazy_stack([TensorDict({"n": {"j": torch.ones(i)}}) for i in (1, 2)])
    assert pa.table(inner).column("n").to_pylist() == [{"j": [1.0]}, {"j": [1.0, 1.0]}]
    text = from_arrow(pa.table({"t": [["a"], ["b", "c"]], "gaps": [[1], None]}), nested=True)
    assert (text["t"], text["gaps"]) == ([["a"], ["b", "c"]], [[1], None])


def test_rows_that_differ_in_more_than_their_length_are_refused() -> None:
    for shapes in ([(2, 1), (2, 2)], [(1, 1), (2, 2)], [(1,), (2, 2)]):
        td = lazy_stack([TensorDict({"j": torch.zeros(shape)}) for shape in shapes])
        with pytest.raises(BatchSizeError, match=r"'j'(.|\n)*to_padded_tensor"):
            pa.table(td)
    along = lazy_stack([TensorDict({"j": torch.zeros(3, i)}, [3]) for i in (1, 2)], 1)
    with pytest.raises(BatchSizeError, match="'j'"):
        pa.table(along)


def test_fixed_shape_tensors() -> None:
    td = TensorDict({"x": torch.arange(12.0).reshape(2, 3, 2), "f": torch.ones(2, 3), "e": torch.ones(2, 0, 2)}, [2])
    td["n"] = TensorDict({"x": torch.ones(2, 2, 2, dtype=torch.bool)}, [2])
    table = td.to_arrow(tensors=True)
    assert table.column("x").type == pa.fixed_shape_tensor(pa.float32(), (3, 2))
    assert (table.column("x").combine_chunks().to_numpy_ndarray() == td["x"].numpy()).all()
    assert table.column("f").type == pa.list_(pa.float32(), 3)
    same(from_arrow(table.drop_columns(["e"])), td.exclude("e"))
    assert td.to_arrow_reader(tensors=True).schema == table.schema
    frame = pl.DataFrame(td.select("x").to_arrow_reader(tensors=True))  # an extension type of polars
    assert from_any(frame)["x"].tolist() == td["x"].tolist()


def test_types_of_values_are_those_of_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tdstore.convert.tables import arrow, arrow_stream

    monkeypatch.setattr(arrow, "VALUES", 2)
    monkeypatch.setattr(arrow_stream, "FIRST_ROWS", 2)
    values = TensorDict({"v": [None, None, {"x": 1}, {"x": 2.5, "y": "z"}], "w": [1, 2, 3, 2.5]}, [4])
    for held in (values, values.save(tmp_path / "x.h5")):
        table = pa.table(held)
        assert table.column("v").to_pylist() == [None, None, {"x": 1.0, "y": None}, {"x": 2.5, "y": "z"}]
        assert table.column("w").to_pylist() == [1.0, 2.0, 3.0, 2.5]
    with pytest.raises(UnsupportedError, match=r"values 'v'.*one column"):
        pa.table(TensorDict({"v": [1, 2, "text", "text"]}, [4]))


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(BatchSizeError, match="batch"):
        pa.table(TensorDict({"a": 1}))
    with pytest.raises(UnsupportedError, match="'u'"):
        pa.table(TensorDict({"a": torch.ones(2), "u": UnbatchedTensor(torch.ones(3))}, [2]))
    for wrong, text in (
        (pl.Series([1, 2]), "one column"),
        (pa.array([1]), "one column"),
        (3, "not a int"),
        (TensorDict(), "not a TensorDict"),
    ):
        with pytest.raises(InvalidTypeError, match=text):
            from_arrow(wrong)


def test_no_rows() -> None:
    td = TensorDict({"a": torch.arange(3), "s": ["x", "y", "z"]}, [3])[:0]
    assert pa.table(td).num_rows == 0
    assert from_arrow(pl.DataFrame({"a": pl.Series([], dtype=pl.Int8)})).batch_size == torch.Size([0])
