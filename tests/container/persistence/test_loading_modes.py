"""Loading makes no dataset: modes "w" and "x" are refused before anything is touched, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tdstore
from tdstore import LazyStackedTensorDict, PersistentTensorDict, TensorDict
from tdstore.errors import OptionError

LOADERS: dict[str, Callable[..., Any]] = {
    "load": TensorDict.load,
    "load_memmap": TensorDict.load_memmap,
    "load_": lambda *args, **kwargs: TensorDict().load_(*args, **kwargs),
    "load_memmap_": lambda *args, **kwargs: TensorDict().load_memmap_(*args, **kwargs),
    "of a lazy stack": LazyStackedTensorDict.load,
    "of a stored one": PersistentTensorDict.load,
    "tdstore.load": tdstore.load,
    "tdstore.load_memmap": tdstore.load_memmap,
}


@pytest.mark.parametrize("mode", ["w", "x"])
@pytest.mark.parametrize("loader", LOADERS)
def test_loading_refuses_modes_that_make_a_dataset(loader: str, mode: str, tmp_path: Any) -> None:
    TensorDict(a=torch.arange(3)).save(tmp_path / "there").close()
    for name in ("there", "absent"):
        with pytest.raises(OptionError, match="would make a new, empty one") as caught:
            LOADERS[loader](tmp_path / name, mode=mode)
        assert isinstance(caught.value, ValueError)
        assert "from_schema" in str(caught.value.hint) and "save" in str(caught.value.hint)
    assert TensorDict.load(tmp_path / "there")["a"].tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("mode", ["w", "x"])
def test_loading_of_every_backend_refuses_them(reopened: str, place: Any, mode: str) -> None:
    where = place(reopened)
    TensorDict(a=torch.arange(3)).save(**where).close()
    with pytest.raises(OptionError):
        TensorDict.load(**where, mode=mode)
    assert TensorDict.load(**where)["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("mode", ["w", "x"])
@pytest.mark.parametrize("method", [TensorDict.from_h5, TensorDict.from_zarr, tdstore.from_h5, tdstore.from_zarr])
def test_the_methods_named_after_a_format_refuse_them(method: Any, mode: str, tmp_path: Any) -> None:
    with pytest.raises(OptionError, match="reads a dataset"):
        method(tmp_path / "x", mode=mode)
    assert list(tmp_path.iterdir()) == []
