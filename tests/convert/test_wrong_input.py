"""What no converter can read: an error of ours that names the argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tdstore import TensorDict
from tdstore.errors import DeviceError, InvalidArgumentError, InvalidTypeError, TDStoreError


@dataclasses.dataclass
class Point:
    x: torch.Tensor


@pytest.fixture
def files(tmp_path: Path) -> Path:
    td = TensorDict({"a": torch.ones(3)}, [3])
    td.to_parquet(tmp_path / "a.parquet")
    td.to_safetensors(tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", a=np.ones(3))
    return tmp_path


TABLE = pd.DataFrame({"a": [1, 2]})
CALLS: dict[str, tuple[Callable[[Path], Any], type[TDStoreError], str]] = {
    "no DataFrame": (lambda p: TensorDict.from_pandas({"a": [1]}), InvalidTypeError, "a DataFrame, not a dict"),
    "a separator": (lambda p: TensorDict.from_pandas(TABLE, separator=3), InvalidTypeError, "must be a string"),
    "no separator": (lambda p: TensorDict.from_pandas(TABLE, separator=""), InvalidArgumentError, "must not be empty"),
    "a device": (lambda p: TensorDict.from_pandas(TABLE, device="gpu"), DeviceError, "'gpu' is no device"),
    "columns": (lambda p: TensorDict.from_parquet(p / "a.parquet", columns=3), InvalidTypeError, "list of names"),
    "one column": (
        lambda p: TensorDict.from_parquet(p / "a.parquet", columns="a"),
        InvalidTypeError,
        "not a str",
    ),
    "column numbers": (
        lambda p: TensorDict.from_parquet(p / "a.parquet", columns=[0]),
        InvalidTypeError,
        "list of names",
    ),
    "no archive": (
        lambda p: TensorDict.from_npz(None),
        InvalidTypeError,
        "a path or an open file, not None",
    ),
    "parts of an archive": (
        lambda p: TensorDict.from_npz(p / "a.npz", separator=1),
        InvalidTypeError,
        "separator must",
    ),
    "no path": (lambda p: TensorDict.from_safetensors(None), InvalidTypeError, "path must be a path, not None"),
    "parts of names": (
        lambda p: TensorDict.from_safetensors(p / "a.safetensors", separator=1),
        InvalidTypeError,
        "separator must be a string",
    ),
    "names of tensors": (
        lambda p: TensorDict({"a": torch.ones(1)}, [1]).to_safetensors(p / "b.safetensors", separator=None),
        InvalidTypeError,
        "separator must be a string",
    ),
    "no writer": (lambda p: TensorDict({"a": torch.ones(1)}, [1]).to_mds(writer="x"), InvalidTypeError, "an MDSWriter"),
    "no list": (lambda p: TensorDict.from_list(None), InvalidTypeError, "a list, not None"),
    "dimensions": (
        lambda p: TensorDict.from_list([{"a": 1}], batch_dims="x"),
        InvalidTypeError,
        "batch_dims",
    ),
    "no dict": (lambda p: TensorDict().from_dict_instance([1]), InvalidTypeError, "a dict or a TensorDict, not a list"),
    "no keys": (lambda p: TensorDict.fromkeys(3), InvalidTypeError, "a sequence of keys, not an int"),
    "no schema": (lambda p: TensorDict.from_schema(["a"], batch_size=[3]), InvalidTypeError, "and entries, not a list"),
    "no tensorclass": (
        lambda p: TensorDict.from_dataclass(Point(torch.ones(3)), dest_cls=int),
        InvalidTypeError,
        "dest_cls must be a tensorclass, not a type",
    ),
    "no module": (
        lambda p: TensorDict.from_module(torch.nn.Linear(1, 1)).to_module(torch.nn.Linear(1, 1), swap_dest={}),
        InvalidTypeError,
        "swap_dest must be a TensorDict",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_error_names_the_argument(files: Path, name: str) -> None:
    call, kind, text = CALLS[name]
    before = sorted(files.iterdir())
    with pytest.raises(kind, match=text):
        call(files)
    assert sorted(files.iterdir()) == before
