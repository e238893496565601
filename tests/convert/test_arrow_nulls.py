"""Missing values of Arrow tables, `nulls=`; what is pinned here is what tensordict 0.15.3 returned."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import torch

from tdstore import from_arrow
from tdstore.errors import InvalidArgumentError, InvalidKeyError

NAN = float("nan")
COLUMNS: dict[str, tuple[Any, Any, Any]] = {  # the column, filled, and its mask
    "integers": (pa.array([1, None, 3]), [1, 0, 3], [True, False, True]),
    "float32": (pa.array([1.0, None, 2.0], pa.float32()), [1.0, NAN, 2.0], [True, False, True]),
    "flags": (pa.array([True, None, False]), [True, False, False], [True, False, True]),
    "texts": (pa.array(["a", None, "c"]), ["a", None, "c"], [True, False, True]),
    "lists": (pa.array([[1, 2], None, [None]]), [[1, 2], [], [0]], [True, False, True]),
    "fixed": (pa.array([[1, 2], None, [3, None]], pa.list_(pa.int64(), 2)), [[1, 2], [0, 0], [3, 0]], [1, 0, 1]),
    "first": (pa.array([None, [3, 4]], pa.list_(pa.float32(), 2)), [[NAN, NAN], [3.0, 4.0]], [False, True]),
    "inner": (pa.array([[1, None], [3, 4]], pa.list_(pa.int64(), 2)), [[1, 0], [3, 4]], None),
    "lists of texts": (pa.array([["a", None], None]), [["a", None], None], [True, False]),
    "all": (pa.array([None, None], pa.int32()), [0, 0], [False, False]),
    "none": (pa.array([1, 2]), [1, 2], None),
    "no rows": (pa.array([], pa.list_(pa.int64(), 2)), [], None),
}


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("case", COLUMNS)
def test_fill_and_mask(case: str, chunks: int) -> None:
    column, filled, mask = COLUMNS[case]
    table = pa.table({"c": column if chunks == 1 else pa.chunked_array([column[:1], column[1:]])})
    for nulls in ("fill", "mask"):
        td = from_arrow(table, nulls=nulls)  # type: ignore[arg-type]
        assert str(td.get("c").tolist()) == str(filled)
        if case == "float32":
            assert td["c"].dtype == torch.float32
        assert ("_mask" in td) is (nulls == "mask" and mask is not None)
    if mask is not None:
        assert td["_mask", "c"].tolist() == mask and td["_mask"].batch_size == td.batch_size


def test_structs() -> None:
    table = pa.table({"s": pa.array([{"x": 1, "y": "q"}, None, {"x": None, "y": "r"}]), "i": pa.array([1, None, 3])})
    td = from_arrow(table, nulls="mask", mask_key=("q", "m"))
    assert td["s", "x"].tolist() == [1, 0, 0] and td["s", "x"].dtype == torch.int64
    assert td["q", "m", "s", "x"].tolist() == [True, False, False]
    assert td["q", "m", "s", "y"].tolist() == [True, False, True] and td["q", "m", "i"].tolist() == [True, False, True]


@pytest.mark.parametrize("case", COLUMNS)
def test_raise(case: str) -> None:
    column, _, mask = COLUMNS[case]
    if mask is None and case != "inner":
        assert from_arrow(pa.table({"c": column}), nulls="raise").batch_size == torch.Size([len(column)])
        return
    with pytest.raises(InvalidArgumentError, match="'c' lacks"):
        from_arrow(pa.table({"c": column}), nulls="raise")
    with pytest.raises(InvalidArgumentError, match="'c' / 'x' lacks"):
        from_arrow(pa.table({"c": pa.StructArray.from_arrays([column], ["x"])}), nulls="raise")


def test_copies() -> None:
    table = pa.table({"a": pa.array([1, 2, 3])})
    place = table["a"].chunk(0).buffers()[1].address
    assert [from_arrow(table, copy=copy)["a"].data_ptr() == place for copy in (None, True, False)] == [
        True,
        False,
        True,
    ]


def test_wrong_arguments() -> None:
    table = pa.table({"_mask": pa.array([1, 2]), "a": pa.array([1, None])})
    with pytest.raises(InvalidArgumentError, match="not 'x'"):
        from_arrow(table, nulls="x")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="mask_key needs"):
        from_arrow(table, mask_key="m")
    with pytest.raises(InvalidArgumentError, match="column '_mask'"):
        from_arrow(table, nulls="mask")
    with pytest.raises(InvalidKeyError):
        from_arrow(table, nulls="mask", mask_key=3)  # type: ignore[arg-type]
    assert from_arrow(table)["a"].dtype == torch.float64
