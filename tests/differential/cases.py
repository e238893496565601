"""Run one program with the peer's module and with ours, and compare what came out.

    case = Cases()
    case("get a nested leaf", lambda M: M.sample("nested")["n", "b"])

    @case.parametrize
    def test_access(case):
        case.check()

A difference that is meant is listed, with its reason and our value, in `intended.py`. Some cases in a row are one
test, which tells of each that fails; to run one alone, say `case.all["get a nested leaf"].check()`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from tests.cuda import mode
from tests.peer import BEFORE_15

from .intended import FOLLOWED, INTENDED
from .oracle import OURS, PEER, SELF_CHECK, Raised, Side, differences, outcome

GROUP = 40  # what pytest itself does for one test costs as much as several cases


def seed(number: int) -> None:
    """Seed the generator of each device there is."""
    mode.seed(number)


def check_all(checks: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Make all named checks, and fail with what each that fails has to say."""
    problems: list[str] = []
    for name, check in checks:
        try:
            check()
        except AssertionError as error:
            problems.append(f"{name}: {error}")
        except Exception as error:
            error.add_note(f"in {name}")
            raise
    assert not problems, f"{len(problems)} failed\n" + "\n".join(problems)


def grouped(names: tuple[str, str], values: Iterable[tuple[Any, Any]]) -> Any:
    """Parametrise a test over the first name; each test checks all values that the second has there."""
    groups: dict[Any, list[Any]] = {}
    for first, second in values:
        groups.setdefault(first, []).append(second)

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            group = groups[given[names[0]]]
            check_all((f"{names[1]}={x!r}", functools.partial(test, **given, **{names[1]: x})) for x in group)

        taken = inspect.signature(test)
        run.__signature__ = taken.replace(  # type: ignore[attr-defined]  # what pytest has to give
            parameters=[p for name, p in taken.parameters.items() if name != names[1]]
        )
        return pytest.mark.parametrize(names[0], list(groups))(run)

    return decorate


class Case:
    """One named program."""

    def __init__(self, name: str, program: Callable[[Side], object]) -> None:
        self.name = name
        self.program = program

    def __repr__(self) -> str:
        return self.name

    def run(self, side: Side) -> object:
        seed(0)
        return outcome(lambda: self.program(side), forgive=side.is_peer)

    def check(self) -> None:
        """Fail unless both sides agree, or differ in the way that `intended.py` says."""
        if mode.by_default():
            with torch.device("cpu"):
                if isinstance(self.run(PEER), Raised):
                    return  # refused as on the CPU, or, for rows out of range, by ending the work of the GPU
        want, got = self.run(PEER), self.run(OURS)
        if mode.by_default() and isinstance(want, Raised) and not isinstance(got, Raised):
            return  # what fails there on a GPU, and works here
        entry = next((entry for entry in INTENDED if entry.covers(self.name, want)), None)
        if entry is not None and not SELF_CHECK:
            want = entry.expected(self.name, want, OURS)
        found = list(differences(want, got))
        if BEFORE_15 and any(re.fullmatch(pattern, self.name) for pattern in FOLLOWED):
            assert found, f"{self.name}: the peer does so before 0.15, too"
            return
        assert not found, "\n".join([f"{self.name}:", *found[:8], *(["..."] if len(found) > 8 else [])])


class Group:
    """Cases that are one test."""

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases

    def __repr__(self) -> str:
        first, last = self.cases[0].name, self.cases[-1].name
        return first if first == last else f"{first} to {last}"

    def check(self) -> None:
        check_all((case.name, case.check) for case in self.cases)


class Cases:
    """The cases of one test module."""

    def __init__(self) -> None:
        self.all: dict[str, Case] = {}

    def __call__(self, name: str, program: Callable[[Side], object]) -> None:
        assert name not in self.all, f"two cases are called {name!r}"
        self.all[name] = Case(name, program)

    def parametrize(self, test: Callable[[Group], None]) -> Any:
        cases = list(self.all.values())
        groups = [Group(cases[at : at + GROUP]) for at in range(0, len(cases), GROUP)]
        return pytest.mark.parametrize("case", groups, ids=repr)(test)
