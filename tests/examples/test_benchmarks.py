"""What the suite of benchmarks says of two runs, and that those for a GPU and of all methods run, on tiny data.

The others are not run: figures depend on the machine.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import programs

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)  # as for a script: its modules are beside it
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


def test_a_page_is_written_of_the_parts_that_were_run(suite: ModuleType, tmp_path: Path) -> None:
    run = results(one=(3.0, 2.0)) | {
        "date": "2026-01-01",
        "machine": {"cpus": 2, "system": "", "python": ""},
        "quick": True,
    }
    (tmp_path / "page.md").write_text(f"above\n{suite._report.BEGIN}\nold\n{suite._report.END}\nbelow\n")
    suite._report.write_page(run, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("above")
    assert page.endswith("below\n")
    assert "1.50 (one)" in page
    assert "old" not in page


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


def test_the_calls_for_a_gpu_run_on_tiny_data(tmp_path: Path) -> None:
    """So that the minutes on a GPU machine are not spent on a blunder in the script."""
    command = programs.command(FOLDER / "gpu.py", "--cpu", "--alone", "--json", tmp_path / "gpu.json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {row["group"] for row in rows} == {
        "link",
        "to",
        "batches",
        "index",
        "write",
        "ops",
        "stored",
        "blocks",
        "save",
    }
    errors = {
        (row["group"], row["name"], candidate): figures["error"]
        for row in rows
        for candidate, figures in row["candidates"].items()
        if "error" in figures
    }
    assert errors == {}
    command = programs.command(FOLDER / "gpu_table.py", tmp_path / "gpu.json")
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for row in (
        "| memory to the device |",
        "| objects in a folder to the device |",
        "| memmap, tdstore Epochs, prefetch=2 |",
    ):
        assert row in table
    assert "| 30 leaves, `td[device rows] =` |" in table


def test_the_calls_of_all_methods_run(tmp_path: Path) -> None:
    """On one shape of each kind of container: what tensordict can do, tdstore does as well."""
    shapes = ("7 leaves", "tensorclass", "lazy stack")
    command = programs.command(FOLDER / "methods.py", "--once", "--json", tmp_path / "methods.json")
    command += [part for shape in shapes for part in ("--shape", shape)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "methods.json").read_text())["rows"]
    made = {shape: {row["call"] for row in rows if row["shape"] == shape and not row["errors"]} for shape in shapes}
    assert min(map(len, made.values())) > 300
    assert len(set.union(*made.values())) > 350
