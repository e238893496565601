"""Entries that are listed are read once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tdstore import TensorDict
from tdstore.testing import CountingStore


@pytest.mark.parametrize("place", ["x.h5", "x.zarr"])
@pytest.mark.parametrize(
    "listed",
    [lambda td: td.items(True, True), lambda td: td.values(True, True), lambda td: td.items(leaves_only=True)],
    ids=["items", "values", "first level"],
)
def test_a_list_reads_each_entry_once(listed: Callable[[Any], Any], place: str, tmp_path: Path) -> None:
    memory = TensorDict({"a": torch.zeros(4, 3), "n": {"b": torch.ones(4), "c": torch.ones(4)}}, [4])
    with memory.save(tmp_path / place) as stored:
        counting = stored._handle.store = CountingStore(stored._handle.store)
        view = listed(stored)
        assert len(view) == len(listed(memory)) and counting.calls["read"] == 0
        assert len(list(view)) == len(view) == counting.leaves["read"]
