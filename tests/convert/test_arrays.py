"""Structured arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tdstore import TensorDict, from_struct_array
from tdstore.errors import BatchSizeError

from .conftest import rows

DOGS: list[Any] = [("name", "U8"), ("age", "i4"), ("size", [("w", "f4"), ("legs", "i8", (2,))]), ("born", "M8[D]")]


def dogs() -> Any:
    return np.array([("Rex", 9, (81.0, [1, 2]), "2020-01-01"), ("Fido", 3, (27.0, [3, 4]), "2021-02-03")], dtype=DOGS)


def test_there_and_back() -> None:
    array = dogs()
    for shape in ((2,), (2, 1), (1, 2)):
        td = from_struct_array(array.reshape(shape))
        assert td.batch_size == torch.Size(shape)
        back = td.to_struct_array()
        assert back.dtype == array.dtype  # the peer makes U10 of every text, and fails on structs in structs
        assert (back == array.reshape(shape)).all()
    assert td[0, 1]["name"] == "Fido"  # of the peer every row has all names
    assert (td.reshape(2)[1:].to_struct_array() == array[1:]).all()
    assert from_struct_array(array[1])["name"] == "Fido"


def test_numbers_share_memory() -> None:
    array = dogs()
    td = from_struct_array(array)
    td["age"] += 1
    td["size", "legs"][0, 1] = 7
    assert array["age"].tolist() == [10, 4]
    assert array["size"]["legs"].tolist() == [[1, 7], [3, 4]]


@pytest.mark.parametrize("dtype", [[("a", "i1"), ("b", "f8")], [("a", ">i4"), ("b", ">f8")], [("a", "?"), ("b", "c8")]])
def test_fields_that_torch_cannot_view_are_copied(dtype: Any) -> None:
    array = np.zeros(3, dtype)
    array["b"] = [1, 2, 3]
    td = from_struct_array(array)
    assert td["b"].tolist() == [1, 2, 3]
    array.flags.writeable = False
    read_only = from_struct_array(array)
    read_only["b"] += 1  # would be a crash if it were shared
    assert array["b"].tolist() == [1, 2, 3]


def test_of_every_container(held: Any) -> None:
    array = held.to_struct_array()
    assert array.shape == (4,)
    assert array["a"].tolist() == [0, 1, 2, 3]
    assert array["v"].tolist() == rows()["v"].tolist()
    assert array["n"]["s"].tolist() == rows()["n", "s"]
    assert array["one"].tolist() == ["x"] * 4
    assert from_struct_array(array).to_struct_array().dtype == array.dtype


def test_values_of_other_kinds() -> None:
    td = TensorDict({"b": [b"x", b"yz"], "o": [{"k": 1}, None], "t": ["x" * 30, ""]}, [2])
    array = td.to_struct_array()
    assert array["b"].tolist() == [b"x", b"yz"]
    assert array["o"].tolist() == [{"k": 1}, None]
    assert array["t"].tolist() == ["x" * 30, ""]


def test_refusals() -> None:
    with pytest.raises(TypeError, match="structured array"):
        from_struct_array(np.arange(3))
    with pytest.raises(TypeError, match="'h'"):
        TensorDict({"h": torch.zeros(2).bfloat16()}, [2]).to_struct_array()
    ragged = TensorDict.lazy_stack([TensorDict({"a": torch.zeros(i)}) for i in (1, 2)])
    with pytest.raises(BatchSizeError, match="'a'"):
        ragged.to_struct_array()
