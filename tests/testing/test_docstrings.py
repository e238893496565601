"""The examples in the docstrings of the kit."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

from tdstore.builtin.memory import open_memory
from tdstore.types import LeafSpec, Read


@pytest.mark.parametrize("name", ["samples", "wrappers"])
def test_examples(name: str) -> None:
    known = {"torch": torch, "open_memory": open_memory, "LeafSpec": LeafSpec, "Read": Read}
    done = doctest.testmod(importlib.import_module(f"tdstore.testing.{name}"), extraglobs=known)
    assert done.attempted
    assert not done.failed
