"""What the suite of benchmarks says of two runs. The benchmarks are not run: figures depend on the machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def suite() -> ModuleType:
    spec = importlib.util.spec_from_file_location("suite", FOLDER / "suite.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(**seconds: tuple[float, float]) -> dict[str, Any]:
    rows = [
        {"group": "index", "name": name, "seconds": {"peer": peer, "tdstore": ours}}
        for name, (peer, ours) in seconds.items()
    ]
    return {"parts": {"ops": {"rows": [*rows, {"group": "index", "name": "floor only", "seconds": {"floor": 1.0}}]}}}


def test_ratios_are_the_time_of_the_peer_over_ours(suite: ModuleType) -> None:
    assert suite.ratios(results(one=(3.0, 2.0))) == {("ops", "index", "one"): 1.5}


def test_a_row_that_became_slower_is_named(suite: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    before = results(one=(4.0, 1.0), two=(4.0, 1.0), three=(4.0, 1.0))
    after = results(one=(4.0, 2.0), two=(4.0, 1.1), four=(1.0, 1.0))
    assert suite.compare(before, after) == 1
    shown = capsys.readouterr().out
    assert "ops / index / one" in shown
    assert "ops / index / two" not in shown
    assert "gone: ops / index / three" in shown
    assert "new: ops / index / four" in shown
    assert suite.compare(before, before) == 0


def test_each_script_of_the_suite_is_there(suite: ModuleType) -> None:
    assert [name for name in suite.SCRIPTS if not (FOLDER / f"{name}.py").is_file()] == []
