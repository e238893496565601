"""Every known cause by which code written for `tensordict` broke has a program that both packages run alike."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.differential.oracle import OURS, PEER, differences
from tests.differential.programs import check, result
from tests.peer import is_adopted

from . import rows, rows_more
from .dangers import ADOPTED, BETTER, DANGERS, PLACES, START
from .rows_more import ELSEWHERE

ROWS = rows.ROWS | rows_more.ROWS
ROOT = Path(__file__).parents[2]
PARTS = [(row, part.strip()) for row, text in ROWS.items() for part in text.split("\n---\n")]
TRIED = [
    (name, place, i) for name, text in DANGERS.items() for place in PLACES for i in range(len(text.split("\n---\n")))
]


def test_every_cause_is_shown_once() -> None:
    assert sorted([*ROWS, *ELSEWHERE]) == list(range(1, 84))
    assert 69 in ROWS and sorted(DANGERS) == ["D2", "D3", "D4", "D5", "D6"]  # D1 is the cause 69


@pytest.mark.parametrize("row", ELSEWHERE)
def test_a_test_elsewhere_is_there(row: int) -> None:
    path, name = ELSEWHERE[row]
    assert name in {
        node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize(("row", "source"), PARTS, ids=[f"{row}-{i}" for i, (row, _) in enumerate(PARTS)])
def test_row(row: int, source: str) -> None:
    check(source)


@pytest.mark.parametrize(("name", "place", "number"), TRIED, ids=[f"{n}-{p}-{i}" for n, p, i in TRIED])
def test_danger(name: str, place: str, number: int) -> None:
    program = DANGERS[name].split("\n---\n")[number].strip()
    theirs, ours = (result(f"{START}\n{PLACES[place]}\n{program}", side) for side in (PEER, OURS))
    if (name, place, number) in BETTER and not is_adopted((name, place, number), ADOPTED):
        assert list(differences(theirs, ours)), "the two agree by now: take it out of BETTER"
        theirs = result(f"{START}\n{PLACES['memory']}\n{program}", PEER)
    assert not list(differences(theirs, ours))
