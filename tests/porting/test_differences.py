"""What the page of differences claims is so: each program gives what the page says, and something else there."""

from __future__ import annotations

import ast
import importlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.peer import is_adopted

from . import differences
from .differences_more import ADOPTED, MORE

CLAIMS = [*differences.CLAIMS, *MORE]
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "differences.md").read_text()


def attempt(action: Callable[[], object]) -> None:
    try:
        action()
    except (RuntimeError, KeyError, ValueError):
        pass
    else:
        raise AssertionError("nothing was refused")


def failing(td: Any) -> None:
    with td.unlock_():
        raise KeyError("of the body")


def outcome(program: str, package: str) -> list[str]:
    """What the last expression gives, as text, or the names of the built-in errors that it is."""
    M = importlib.import_module(package)
    T = M.TensorDict
    names = {
        "M": M,
        "T": T,
        "torch": torch,
        "np": np,
        "pd": pd,
        "attempt": attempt,
        "failing": failing,
        "td": T({"a": torch.ones(3)}, [3]),
        "two": T({"a": torch.ones(3), "b": torch.zeros(3)}, [3]),
        "named": T({"s": "text", "a": torch.ones(3)}, [3]),
        "nested": T({"n": {"a": torch.ones(3), "b": torch.ones(3)}}, [3]),
    }
    *body, last = ast.parse(program).body
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(ast.Module(body, []), "claim", "exec"), names)
            if not isinstance(last, ast.Expr):
                exec(compile(ast.Module([last], []), "claim", "exec"), names)
                return ["done"]
            return [str(eval(compile(ast.Expression(last.value), "claim", "eval"), names))]
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]


@pytest.mark.parametrize(("phrase", "program", "ours"), CLAIMS, ids=[phrase for phrase, _, _ in CLAIMS])
def test_claim(phrase: str, program: str, ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [" ".join(entry.split()) for entry in re.split(r"\n(?=[*|#]|\n)", PAGE.lower())]
    holding = [entry for entry in entries if phrase.lower() in entry]
    assert holding
    assert phrase not in ADOPTED or any("0.15" in entry for entry in holding)
    outcomes = {}
    for package in ("tensordict", "tdstore"):
        (tmp_path / package).mkdir()
        monkeypatch.chdir(tmp_path / package)
        outcomes[package] = outcome(program, package)
    assert ours in outcomes["tdstore"], outcomes
    assert (ours in outcomes["tensordict"]) is is_adopted(phrase, ADOPTED), outcomes


def test_what_was_adopted_is_claimed() -> None:
    assert set(ADOPTED) <= {phrase for phrase, _, _ in CLAIMS}
