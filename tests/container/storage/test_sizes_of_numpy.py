"""Integers and strings of numpy, and those of enums, as sizes, names and keys: stored as plain ones."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tdstore
from tdstore import TensorDict


class Key(enum.StrEnum):
    OBS = "obs"


STRINGS = pytest.mark.parametrize("name", [np.str_("obs"), Key.OBS], ids=["numpy", "enum"])


def opened(arguments: dict[str, Any]) -> Any:
    return tdstore.open(**arguments)


@pytest.mark.parametrize(
    "size", [[np.int64(3)], (np.int32(3),), np.array([3]), torch.Size([np.int64(3)]), np.int64(3), torch.tensor(3)]
)
def test_batch_sizes(size: Any, reopened: str, place: Callable[[str], dict[str, Any]]) -> None:
    where, made = place(reopened), place(reopened)
    below = TensorDict({"b": torch.ones(3, 2)}, (np.int64(3), np.int64(2)))
    saved = TensorDict({"a": torch.zeros(3), "n": below}, size).save(**where)
    schema = TensorDict.from_schema({"a": ((np.int64(2),), "float32")}, batch_size=size, **made)
    for td, there in ((saved, where), (schema, made)):
        with opened(there) as found:
            assert found.batch_size == (3,)
        td.close()
    with pytest.raises(tdstore.errors.NoSizeError):
        TensorDict({}, "3")


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_what_is_set_in_a_store(suffix: str, tmp_path: Path) -> None:
    place = tmp_path / f"run{suffix}"
    TensorDict({"a": torch.zeros(3, 2)}, [3]).save(place).close()
    with tdstore.open(place, "r+") as td:
        td["n"] = TensorDict({"b": torch.ones(3, 2)}, (np.int64(3), np.int64(2)))
        td.batch_size = np.array([3, 2])
        td.names = np.array(["x", "y"])
    with tdstore.open(place) as found:
        assert found.batch_size == found["n"].batch_size == (3, 2)
        assert found.names == ["x", "y"]


def test_elements_of_a_lazy_stack(reopened: str, place: Callable[[str], dict[str, Any]]) -> None:
    where = place(reopened)
    parts = [TensorDict({"a": torch.zeros(2)}, [np.int64(2)]) for _ in range(3)]
    saved = tdstore.lazy_stack(parts, np.int64(1)).save(**where)
    with opened(where) as found:
        assert found.batch_size == (2, 3)
    saved.close()


@STRINGS
def test_names(name: Any, reopened: str, place: Callable[[str], dict[str, Any]]) -> None:
    where = place(reopened)
    td = TensorDict({"a": torch.zeros(3)}, [3], names=[name])
    assert type(td.names[0]) is str
    saved = td.save(**where)
    with opened(where) as found:
        assert found.names == ["obs"]
    saved.close()


@STRINGS
def test_keys(name: Any, reopened: str, place: Callable[[str], dict[str, Any]]) -> None:
    where = place(reopened)
    td = TensorDict({"a": torch.zeros(3), "n": {}}, [3])
    td[name] = torch.ones(3)
    td["n", name] = torch.ones(3)
    saved = td.save(**where).unlock_()
    saved[name] = torch.full((3,), 2.0)
    assert [type(key) for key in saved.keys()] == [str] * 3
    assert saved[name].tolist() == [2.0] * 3 and saved["n", name].tolist() == [1.0] * 3
    del saved[name]
    assert name not in saved
    saved.close()
