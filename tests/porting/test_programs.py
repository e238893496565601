"""Programs written for `tensordict` do the same after a change of the import."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peer import BEFORE_15, SINCE_15

from .running import PEER, PROGRAMS, named, run

REFUSED = {
    "values/ragged_storage": """
[0, 1] [3, 1, 3, 3]
[2, 3, 0] [4, 1, 2, 5]
[[50, 51, 52, 53], [20], [30, 31], [40, 41, 42, 43, 44]]
[[5.0, 5.0, 5.0, 5.0], [2.0], [3.0, 3.0], [4.0, 4.0, 4.0, 4.0, 4.0]]
True [1, 5, 1] [20]
[2, 2, 2, 5] [30, 31]
[30, 31] [-1, 31]
[False, False, True, True]
written in place, and of another shape
written in place, and of another shape
torch.Size([4, 5]) [2, 2, 2, 5]
"""
}
"""What a program prints that the peer refuses since 0.15: elements of other shapes at rows of a lazy stack."""


@pytest.mark.parametrize("program", [path for path in PROGRAMS if named(path) in REFUSED], ids=named)
def test_a_program_that_the_peer_refuses(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(program, "tdstore").lines == REFUSED[named(program)].strip().splitlines()
    if SINCE_15:
        with pytest.raises((RuntimeError, ValueError)):
            run(program, PEER)


@pytest.mark.parametrize("program", [path for path in PROGRAMS if BEFORE_15 or named(path) not in REFUSED], ids=named)
def test_program(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for package in (PEER, "tdstore"):
        (tmp_path / package).mkdir()
        monkeypatch.chdir(tmp_path / package)
        outcomes.append(run(program, package))
    theirs, ours = outcomes
    assert theirs.lines or theirs.result is not None, "the program shows nothing"
    assert ours.lines == theirs.lines
    assert ours.result == theirs.result


def test_there_are_forty_programs_that_vary_in_length() -> None:
    assert len(PROGRAMS) >= 40
    lengths = {named(path): len(path.read_text().splitlines()) for path in PROGRAMS}
    assert {name: lines for name, lines in lengths.items() if not 30 <= lines <= 300} == {}
