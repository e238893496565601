"""The examples in the docstrings of the conversions."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

import tdstore

MODULES = (
    "convert.arrays convert.arrow convert.frames convert.methods convert.python convert.pytree convert.reprtext "
    "container.defaults container.measuring container.merging container.padding container.paths container.printing "
    "container.ragged"
).split()


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    known = {**{public: getattr(tdstore, public) for public in tdstore.__all__}, "torch": torch, "tdstore": tdstore}
    done = doctest.testmod(importlib.import_module(f"tdstore.{name}"), extraglobs=known)
    assert done.attempted
    assert not done.failed
