"""The examples in the docstrings of modules, state dicts and interop."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

import tdstore


@pytest.mark.parametrize("name", ["modules.methods", "tensordicts.params", "convert.checkpoints.state_dict", "interop"])
def test_examples(name: str) -> None:
    module = importlib.import_module(f"tdstore.{name}")
    public = {key: getattr(tdstore, key) for key in tdstore.__all__}
    done = doctest.testmod(module, extraglobs={**public, "torch": torch, "tdstore": tdstore, **vars(module)})
    assert done.attempted
    assert not done.failed
