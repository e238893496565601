"""Methods that users call most say what they take, raise and give, by examples that run."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict

# A list that may only grow. Behind a name: whether nothing can go wrong in the call, so that there is no `Raises`.
DOCUMENTED = {
    "cat": False,
    "clone": True,
    "consolidate": False,
    "exclude": False,
    "expand_as": False,
    "extend": False,
    "from_dict": False,
    "get": False,
    "get_at": False,
    "items": True,
    "keys": True,
    "map": False,
    "map_iter": False,
    "permute": False,
    "reshape": False,
    "save": False,
    "select": False,
    "split_keys": False,
    "stack": False,
    "state_dict": False,
    "sum": False,
    "values": True,
    "view": False,
}


def function(name: str) -> Callable[..., Any]:
    found = inspect.getattr_static(TensorDict, name)
    return inspect.unwrap(getattr(found, "__func__", found))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_users_call_most_is_documented(name: str) -> None:
    text = inspect.getdoc(function(name)) or ""
    parameters = inspect.signature(function(name)).parameters.keys() - {"self", "cls"}
    assert len(parameters) < 3 or "Args:" in text
    assert DOCUMENTED[name] or "Raises:" in text
    assert ">>>" in text


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_run(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = {**{public: getattr(tdstore, public) for public in tdstore.__all__}, "torch": torch, "tdstore": tdstore}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(recurse=False).find(function(name), name, globs=known):
        assert test.examples
        assert not runner.run(test).failed
