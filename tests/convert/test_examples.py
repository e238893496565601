"""The examples in the docstrings of the conversions."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import tdstore

MODULES = (
    "convert.methods convert.objects.arrays convert.objects.python convert.objects.pytree convert.objects.reprs "
    "convert.objects.collate convert.tables.arrow convert.tables.pandas convert.tables.files "
    "convert.checkpoints.safetensors_files container.functions.grouping tensordicts.kinds "
    "container.core.defaults container.core.paths container.methods.facts "
    "container.functions.merge container.functions.padding container.display.options container.entries.nested_tensors"
).split()


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = {**{public: getattr(tdstore, public) for public in tdstore.__all__}, "torch": torch, "tdstore": tdstore}
    done = doctest.testmod(importlib.import_module(f"tdstore.{name}"), extraglobs=known)
    assert done.attempted
    assert not done.failed
