"""Cases that share a test: each is run, and each that fails is told of by its name."""

from __future__ import annotations

import inspect

import pytest

from .cases import GROUP, Cases, Group, grouped


def groups_of(cases: Cases) -> list[Group]:
    @cases.parametrize
    def test(case: Group) -> None:
        case.check()

    return test.pytestmark[0].args[1]


def test_every_case_is_in_one_group_and_runs() -> None:
    cases, ran = Cases(), []
    for i in range(2 * GROUP + 1):
        cases(f"case {i}", lambda M, i=i: ran.append(i))
    groups = groups_of(cases)
    assert [repr(group) for group in groups] == ["case 0 to case 39", "case 40 to case 79", "case 80"]
    for group in groups:
        group.check()
    assert ran == [i for i in range(2 * GROUP + 1) for _ in ("the peer", "ours")]


def test_all_failures_are_told_by_name() -> None:
    cases = Cases()
    for i in range(5):
        cases(f"case {i}", lambda M, i=i: i if i % 2 or M.is_peer else "other")
    (group,) = groups_of(cases)
    with pytest.raises(AssertionError) as caught:
        group.check()
    told = str(caught.value)
    assert told.startswith("3 failed")
    assert [f"case {i}:" in told for i in range(5)] == [True, False, True, False, True]
    assert "expected 4, got 'other'" in told


def test_values_of_a_second_name_share_a_test() -> None:
    seen = []

    @grouped(("letter", "number"), [("a", 1), ("b", 2), ("a", 3)])
    def test(letter: str, number: int, more: str) -> None:
        seen.append((letter, number, more))
        assert number < 3, "too many"

    assert list(inspect.signature(test).parameters) == ["letter", "more"]
    assert test.pytestmark[0].args == ("letter", ["a", "b"])
    test(letter="b", more="x")
    with pytest.raises(AssertionError, match="number=3: too many"):
        test(letter="a", more="y")
    assert seen == [("b", 2, "x"), ("a", 1, "y"), ("a", 3, "y")]
