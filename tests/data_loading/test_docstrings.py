"""The examples in the docstrings of `tdstore.data`."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import numpy as np
import pytest
import torch

import tdstore
import tdstore.data

MODULES = [one.name for one in pkgutil.walk_packages(tdstore.data.__path__, "tdstore.data.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    known = {"torch": torch, "tdstore": tdstore, "np": np}
    known |= {key: getattr(tdstore.data, key) for key in tdstore.data.__all__ if not hasattr(module, key)}
    done = doctest.testmod(module, extraglobs=known, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not done.failed, f"{done.failed} of {done.attempted} examples of {name} fail"
