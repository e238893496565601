"""Arrays, tables, files and values that are not tidy: nothing is lost, and what cannot be is named."""

from __future__ import annotations

import datetime
import enum
import io
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

import tdstore
from tdstore import (
    Codec,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    from_any,
    from_arrow,
    from_csv,
    from_json,
    from_pandas,
    from_parquet,
    from_safetensors,
    from_struct_array,
    lazy_stack,
)
from tdstore.errors import BatchSizeError, CorruptStoreError, UnsupportedError, UntrustedDataError
from tdstore.registry import registry

FAR = datetime.datetime(9999, 12, 31)


# -- numpy -------------------------------------------------------------------------------------
ODD = {
    "big-endian": np.arange(3).astype(">i4"),
    "big-endian complex": np.arange(3).astype(">c16"),
    "backwards": np.arange(3)[::-1],
    "packed field": np.array([(0, 1.5), (1, 2.5), (2, 3.5)], [("a", "i1"), ("b", "f8")])["b"],
}


class Auto(TensorClass, autocast=True):
    x: torch.Tensor


class Only(TensorClass, tensor_only=True):
    x: torch.Tensor


class Plain(TensorClass):
    x: torch.Tensor


@pytest.mark.parametrize("kind", ODD)
def test_odd_arrays_are_tensors(kind: str) -> None:
    array = ODD[kind]
    for td in (
        TensorDict({"x": array}, [3]),
        from_any({"x": array}, batch_size=[3]),
        lazy_stack([TensorDict({"x": 0}), TensorDict({"x": 1}), TensorDict({"x": 2})]).set("x", array),
    ):
        assert isinstance(td["x"], torch.Tensor)  # not one value for the whole batch
        assert td["x"].tolist() == array.tolist()
    for cls in (Auto, Only, Plain):
        made = cls(x=array, batch_size=[3])
        assert made.x.tolist() == array.tolist()
    assert np.array_equal(from_pandas(pd.DataFrame({"x": array}))["x"].numpy(), array)


def test_arrays_that_torch_has_not_stay_values() -> None:
    for array in (np.zeros(2, np.longdouble)[::-1], np.zeros(2, "M8[s]"), np.array(["a", 1], object)):
        assert TensorDict({"x": array}, [2])["x"] is array


def test_texts_in_subarrays_go_back() -> None:
    array = np.array([("a", ["u", "v"]), ("b", ["w", "x"])], [("s", "U3"), ("t", "U5", (2,))])
    back = from_struct_array(array).to_struct_array()
    assert back.dtype == array.dtype and back["t"].tolist() == array["t"].tolist()


# -- tables ------------------------------------------------------------------------------------
def test_columns_of_one_name_are_refused() -> None:
    two = [pa.array([1]), pa.array([2])]
    for table in (
        pa.table(two, names=["a", "a"]),
        pa.table({"s": pa.StructArray.from_arrays(two, ["a", "a"])}),
    ):
        with pytest.raises(ValueError, match="same name, 'a'"):
            from_arrow(table)
    for td in (
        TensorDict({"n": {"b": [1]}, "n.b": [2]}, [1]),
        TensorDict({"n.b": [2], "n": {"b": [1]}}, [1]),
        TensorDict({"n": {"m": {"b": [1]}, "m.b": [2]}}, [1]),
    ):
        for method in (td.to_pandas, td.to_arrow, lambda td=td, **kw: td.to_json(io.StringIO(), **kw)):
            with pytest.raises(ValueError, match=r"b'.*separator"):
                method(separator=".")


def test_integers_that_float64_lacks_stay_exact() -> None:
    big = 2**53 + 1
    assert from_arrow(pa.table({"x": [big, None]}))["x"] == [big, None]
    assert from_pandas(pd.DataFrame({"x": pd.array([big, None], dtype="Int64")}))["x"] == [big, None]
    few = from_pandas(
        pd.DataFrame({"x": pd.array([2**53, None], dtype="Int64"), "none": pd.array([None] * 2, "Int64")})
    )
    assert few["x"].nan_to_num(-1).tolist() == [2**53, -1] and few["none"].isnan().all()


def test_dates_out_of_reach_of_nanoseconds_are_values() -> None:
    near = datetime.datetime(2020, 1, 1)
    for frame in ({"t": np.array([FAR, near], "M8[s]")}, {"t": np.array([FAR, near], "M8[us]")}):
        assert from_pandas(pd.DataFrame(frame))["t"] == [FAR, near]
    table = pa.table({"t": pa.array([FAR, None], pa.timestamp("us")), "near": pa.array([near, near])})
    td = from_arrow(table)
    assert td["t"] == [FAR, None] and td["near"].dtype == torch.int64
    intervals = pa.table({"i": pa.array([(1, 2, 3)], pa.month_day_nano_interval())})
    assert tuple(from_arrow(intervals)["i"][0]) == (1, 2, 3)


def test_columns_of_unusual_types() -> None:
    frame = pd.DataFrame({"gaps": pd.Categorical([3, None]), "sparse": pd.arrays.SparseArray([0, 7])})
    td = from_pandas(frame)
    assert td["gaps"].nan_to_num(-1).tolist() == [3, -1] and td["sparse"].tolist() == [0, 7]
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3, 4], permutation=[2, 0, 1])
    column = pa.ExtensionArray.from_storage(kind, pa.array([list(range(24))], pa.list_(pa.int32(), 24)))
    assert np.array_equal(from_arrow(pa.table({"x": column}))["x"].numpy(), column.to_numpy_ndarray())


def test_tables_over_read_only_files_can_be_written(tmp_path: Path) -> None:
    table = pa.table({"x": [1, 2], "t": pa.array([1, 2], pa.timestamp("ns")), "l": pa.array([[1.0], [2.0]])})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    mapped = pa.ipc.open_file(pa.memory_map(str(tmp_path / "x.arrow"))).read_all()
    td = from_arrow(mapped)
    for key in td.keys():
        td[key] += 1  # and the process goes on
    assert td["x"].tolist() == [2, 3] and mapped.column("x").to_pylist() == [1, 2]


# -- files of text -----------------------------------------------------------------------------
class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value", [b"x", {"k": 1}, [1, 2], object(), Colour.RED, torch.zeros(2), 1j], ids=lambda v: type(v).__name__
)
def test_cells_that_would_only_be_named_are_refused(value: Any, tmp_path: Path) -> None:
    td = TensorDict({"x": [1, 2], "odd": NonTensorStack(NonTensorData("text"), NonTensorData(value))}, [2])
    path = tmp_path / "t.csv"
    path.write_text("old")
    with pytest.raises(UnsupportedError, match=r"'odd'.*csv"):
        td.to_csv(path)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_cells_of_text(tmp_path: Path) -> None:
    values = [Decimal("1.10"), datetime.date(2020, 1, 1), Path("a/b"), None, True, np.float32(1.5)]
    td = TensorDict({"v": NonTensorStack(*map(NonTensorData, values))}, [6])
    td.to_csv(tmp_path / "t.csv")
    assert from_csv(tmp_path / "t.csv")["v"] == ["1.10", "2020-01-01", "a/b", None, "True", "1.5"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_json_and_csv_lack_is_named(tmp_path: Path) -> None:
    for ending in ("json", "csv"):
        with pytest.raises(UnsupportedError, match="'c'"):
            getattr(TensorDict({"c": torch.zeros(2, dtype=torch.complex64)}, [2]), f"to_{ending}")(tmp_path / "t")
        ragged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.strided)
        with pytest.raises(BatchSizeError, match=r"'j'.*\n.*to_padded_tensor"):
            getattr(TensorDict({"j": ragged}, [2]), f"to_{ending}")(tmp_path / "t")
    with pytest.raises(UnsupportedError, match=r"'b'.*bytes.*\n.*exclude"):
        TensorDict({"a": ["x"], "b": NonTensorStack(NonTensorData(b"x"))}, [1]).to_json(tmp_path / "t")
    assert not list(tmp_path.iterdir())


def test_half_a_file_is_named(tmp_path: Path) -> None:
    table = pa.table({"a": list(range(100))})
    pq.write_table(table, tmp_path / "t.parquet")
    (tmp_path / "t.json").write_text(json.dumps([{"a": 1}, {"a": 2}]))
    (tmp_path / "t.csv").write_text("")
    TensorDict({"a": torch.zeros(100)}).to_safetensors(tmp_path / "t.safetensors")
    readers = {"parquet": from_parquet, "json": from_json, "csv": from_csv, "safetensors": from_safetensors}
    for ending, read in readers.items():
        path = tmp_path / f"t.{ending}"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(CorruptStoreError, match=rf"t\.{ending}"):
            read(path)
        path.unlink()
        with pytest.raises(FileNotFoundError):
            read(path)


# -- safetensors -------------------------------------------------------------------------------
def test_names_and_dtypes_that_safetensors_lacks(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_file({"old": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="'__metadata__'"):  # it would be written, and never be read
        TensorDict({"__metadata__": torch.zeros(2)}).to_safetensors(path)
    with pytest.raises(UnsupportedError, match=r"'n' / 'c'.*complex128"):
        TensorDict({"n": {"c": torch.zeros(2, dtype=torch.complex128)}}).to_safetensors(path)
    assert list(from_safetensors(path).keys()) == ["old"]


# -- enums -------------------------------------------------------------------------------------
class Rights(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4
    ALL = 7


class Bits(enum.IntFlag):
    A = 1
    B = 4


@pytest.mark.parametrize("place", ["flags", "flags.h5"])
def test_flags_that_are_set_together_are_stored(place: str, tmp_path: Path) -> None:
    tdstore.register_enum(Rights, name="test.Rights")
    tdstore.register_enum(Bits, name="test.Bits")
    values = [Rights.READ, Rights.READ | Rights.WRITE, Rights.ALL, Rights(0), Bits.A | Bits.B, Bits(0), Bits(3)]
    td = TensorDict({"one": NonTensorData(values), "x": torch.zeros(7)})
    td["rows"] = NonTensorStack(*map(NonTensorData, values))
    td.save(tmp_path / place).close()
    with tdstore.open(tmp_path / place) as back:
        assert back["one"] == values and list(back["rows"]) == values
        assert [type(v) for v in back["rows"]] == [type(v) for v in values]


# -- codecs ------------------------------------------------------------------------------------
class Sealed:
    pass


class Other:
    pass


@pytest.fixture
def codec() -> Iterator[Any]:
    def declare(encode: Any, decode: Any, kind: Any = Sealed) -> None:
        tdstore.register_codec(Codec(name="test.sealed", kind=kind, encode=encode, decode=decode))

    yield declare
    registry().unregister_codec("test.sealed")


@pytest.mark.parametrize("place", ["sealed", "sealed.h5"])
def test_codecs_that_fail_are_named(codec: Any, place: str, tmp_path: Path) -> None:
    td = TensorDict({"n": {"v": NonTensorData(Sealed())}, "x": torch.zeros(2)})
    codec(lambda value: 1 / 0, lambda data: data)
    with pytest.raises(UntrustedDataError, match=r"'n' / 'v' .*'test.sealed' failed: ZeroDivisionError"):
        td.save(tmp_path / place)
    assert not list(tmp_path.iterdir())
    codec(lambda value: "plain", lambda data: 1 / 0)
    with pytest.raises(CorruptStoreError, match=r"'n' / 'v' .*'test.sealed' failed: ZeroDivisionError"):
        td.save(tmp_path / place)["n", "v"]  # where values are live, saving reads them


def test_codecs_are_not_taken_from_one_another(codec: Any) -> None:
    codec(lambda value: 0, lambda data: 1)
    codec(lambda value: 0, lambda data: 2)  # the same again, as in a notebook
    with pytest.raises(ValueError, match="Sealed is registered as 'test.sealed'"):
        codec(lambda value: 0, lambda data: 3, Other)
    with pytest.raises(TypeError, match="'test.sealed' is a class"):
        codec(lambda value: 0, lambda data: 3, "Sealed")


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    td = TensorDict({"n": {"f": NonTensorData(lambda: 0)}})
    with pytest.raises(UntrustedDataError, match="'n' / 'f' .*cannot be pickled"):
        td.save(tmp_path / "f.h5", trust=True)
    assert not list(tmp_path.iterdir())


def test_a_structured_array_as_an_entry_is_a_nested_tensordict_of_its_fields():
    dtype = [("a", "i4"), ("b", "f4", (2,)), ("s", "U3"), ("n", [("c", "i8")])]
    array = np.array([(1, [0, 1], "x", (5,)), (2, [2, 3], "y", (6,))], dtype)
    td = TensorDict({"e": array}, [2])
    assert td["e"].batch_size == (2,) and td["e", "s"] == ["x", "y"] and td["e", "n", "c"].tolist() == [5, 6]
    td["e", "a"] += 1
    assert array["a"].tolist() == [2, 3]  # shares memory
    td["later"] = array
    assert td["later"].to_struct_array().dtype == array.dtype
    with pytest.raises(BatchSizeError, match=r"'a' has shape \[2\]"):
        TensorDict({"e": array}, [3])
