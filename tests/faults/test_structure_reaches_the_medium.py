"""A change of structure in mode "r+" is in the dataset after close, or an error: never lost without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tdstore import TensorDict
from tdstore.errors import StoreError

CHANGES: dict[str, Callable[[Any], Any]] = {
    "new": lambda td: td.set("new", torch.ones(3)),
    "delete": lambda td: td.del_("x"),
    "rename": lambda td: td.rename_key_("x", "y"),
    "reshape": lambda td: td.set("x", torch.ones(3, 7)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["data", "data.h5"])
def test_a_change_of_structure_is_stored_or_refused(tmp_path: Path, name: str, change: str) -> None:
    path = tmp_path / name
    TensorDict({"a": torch.zeros(3), "x": torch.zeros(3)}, [3]).save(path).close()
    with TensorDict.load(path, mode="r+") as td:
        try:
            CHANGES[change](td)
        except (StoreError, RuntimeError):
            return  # refused, aloud
        expected = {key: td[key].clone() for key in td.keys()}
    with TensorDict.load(path) as again:
        assert set(again.keys()) == set(expected)
        for key, value in expected.items():
            assert torch.equal(again[key], value), key
