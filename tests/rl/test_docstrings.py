"""The examples in the docstrings of `tdstore.rl`."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import tdstore
import tdstore.rl
import tdstore.tensorclass.wrapping
from tdstore import TensorDict, tensorclass

MODULES = [one.name for one in pkgutil.walk_packages(tdstore.rl.__path__, "tdstore.rl.") if not one.ispkg]


@pytest.mark.parametrize("name", [*MODULES, "tdstore.tensorclass.wrapping"])
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    known = {"torch": torch, "tdstore": tdstore, "TensorDict": TensorDict, "tensorclass": tensorclass}
    known |= {key: getattr(tdstore.rl, key) for key in tdstore.rl.__all__ if not hasattr(module, key)}
    done = doctest.testmod(module, extraglobs=known, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not done.failed, f"{done.failed} of {done.attempted} examples of {name} fail"
