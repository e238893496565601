"""Saves that return a future at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.container.persistence import saving

WAYS = {
    "save": lambda td, to: td.save(to, return_early=True),
    "save to h5": lambda td, to: td.save(Path(to + ".h5"), return_early=True),
    "memmap": lambda td, to: td.memmap(to, return_early=True),
    "memmap_": lambda td, to: td.memmap_(to, return_early=True),
    "memmap_like": lambda td, to: td.memmap_like(to, return_early=True),
    "consolidate": lambda td, to: td.consolidate(to, return_early=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_relative_path_is_that_of_the_call(tmp_path, monkeypatch, way):
    (tmp_path / "first").mkdir(), (tmp_path / "second").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    submit = saving.ThreadPool.submit

    def moved(pool, run):
        os.chdir(tmp_path / "second")  # what the caller does next, before the thread begins
        return submit(pool, run)

    monkeypatch.setattr(saving.ThreadPool, "submit", moved)
    WAYS[way](TensorDict({"a": torch.arange(3)}, [3]), "data").result()
    assert [path.name.split(".")[0] for path in (tmp_path / "first").iterdir()] == ["data"]
    assert not list((tmp_path / "second").iterdir())
    if way == "save":
        assert tdstore.open(tmp_path / "first" / "data")["a"].tolist() == [0, 1, 2]
