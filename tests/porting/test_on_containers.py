"""Every cause by which code written for `tensordict` broke, on every container that it concerns, beside the peer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.differential.oracle import OURS, PEER, Raised, Side, differences
from tests.differential.programs import result
from tests.peer import BEFORE_15, is_adopted

from . import on_containers, on_containers_more, rows, rows_more
from .on_containers import ADOPTED, BETTER, BY_CHANCE, FOLLOWED, OURS_ALONE, PLACES, START, UNCONCERNED

ROWS = on_containers.ROWS | on_containers_more.ROWS
FREE = ("h5", "zarr", "lazy stack", "params", "window", "class")
"""Where ours may do what its TensorDict in memory does if the peer refuses; elsewhere a refusal may be a lock."""
PROGRAMS = [(row, i, part.strip()) for row, text in ROWS.items() for i, part in enumerate(text.split("\n---\n"))]
REASONS = {case: why for why, cases in BETTER.items() for case in cases}
ALONE = {case: (why, program) for why, (cases, program) in OURS_ALONE.items() for case in cases}


@pytest.fixture(autouse=True)
def folders_in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the folders of programs where fsync costs nothing: a third of the time. The peer leaves some behind."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory, ignore_cleanup_errors=True) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@cache
def in_memory(program: str) -> Any:
    return ran(program, "memory", PEER)


def ran(program: str, place: str, side: Side) -> Any:
    return result(f"{START}\ndef place(source):\n    return {PLACES[place]}\n{program.strip()}", side)


def refused(outcome: Any) -> bool:
    if isinstance(outcome, dict):
        return any(map(refused, outcome.values()))
    return isinstance(outcome, Raised) or (isinstance(outcome, (list, tuple)) and any(map(refused, outcome)))


def concerned(row: int) -> tuple[str, ...]:
    return UNCONCERNED[row][1] if row in UNCONCERNED else tuple(PLACES)


def test_every_cause_is_here_or_concerns_no_container() -> None:
    assert not {row for row, (_, places) in UNCONCERNED.items() if places} - ROWS.keys()
    assert sorted([*ROWS, *(row for row, (_, places) in UNCONCERNED.items() if not places)]) == sorted(
        [*rows.ROWS, *rows_more.ROWS, *rows_more.ELSEWHERE]
    )


def test_every_reason_is_of_a_case() -> None:
    tried = {(row, i, place) for row, i, _ in PROGRAMS for place in concerned(row)}
    listed = [*REASONS, *ALONE]
    assert len(set(listed)) == len(listed) and set(listed) <= tried


@pytest.mark.parametrize(("row", "number", "program"), PROGRAMS, ids=[f"{row}-{i}" for row, i, _ in PROGRAMS])
def test_row_on_containers(row: int, number: int, program: str) -> None:
    wrong = []
    for place in concerned(row):
        case = (row, number, place)
        theirs, ours = ran(program, place, PEER), ran(program, place, OURS)
        found = list(differences(theirs, ours))
        if BEFORE_15 and case in FOLLOWED:
            wrong += [] if found else [f"{place}: the peer does so before 0.15, too"]
        elif case in ALONE or (case in REASONS and not is_adopted(case, ADOPTED)):
            want = in_memory(ALONE[case][1] if case in ALONE else program)
            wrong += [f"{place}: {line}" for line in differences(want, ours)]
            if not found and case not in BY_CHANCE:
                wrong.append(f"{place}: the two agree by now, so that the reason can go")
        elif found and (place not in FREE or not refused(theirs) or list(differences(in_memory(program), ours))):
            wrong += [f"{place}: {line}" for line in found]
    assert not wrong, program + "\n" + "\n".join(wrong[:8])
