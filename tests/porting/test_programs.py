"""Programs written for `tensordict` do the same after a change of the import."""

from __future__ import annotations

from pathlib import Path

import pytest

from .running import PEER, PROGRAMS, named, run

pytest.importorskip(PEER)


@pytest.mark.parametrize("program", PROGRAMS, ids=named)
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
