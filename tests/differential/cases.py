"""Run one program with the peer's module and with ours, and compare what came out.

    case = Cases()
    case("get a nested leaf", lambda M: M.sample("nested")["n", "b"])

    @case.parametrize
    def test_access(case):
        case.check()

A difference that is meant is listed, with its reason and our value, in `intended.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .intended import INTENDED
from .oracle import OURS, PEER, SELF_CHECK, Side, differences, outcome


class Case:
    """One named program."""

    def __init__(self, name: str, program: Callable[[Side], object]) -> None:
        self.name = name
        self.program = program

    def __repr__(self) -> str:
        return self.name

    def run(self, side: Side) -> object:
        torch.manual_seed(0)
        return outcome(lambda: self.program(side), forgive=side.is_peer)

    def check(self) -> None:
        """Fail unless both sides agree, or differ in the way that `intended.py` says."""
        want, got = self.run(PEER), self.run(OURS)
        entry = next((entry for entry in INTENDED if entry.covers(self.name, want)), None)
        if entry is not None and not SELF_CHECK:
            want = entry.expected(self.name, want, OURS)
        found = list(differences(want, got))
        assert not found, "\n".join([f"{self.name}:", *found[:8], *(["..."] if len(found) > 8 else [])])


class Cases:
    """The cases of one test module."""

    def __init__(self) -> None:
        self.all: dict[str, Case] = {}

    def __call__(self, name: str, program: Callable[[Side], object]) -> None:
        assert name not in self.all, f"two cases are called {name!r}"
        self.all[name] = Case(name, program)

    def parametrize(self, test: Callable[[Case], None]) -> Any:
        return pytest.mark.parametrize("case", list(self.all.values()), ids=list(self.all))(test)
