"""mypy and pyright reveal for everyday code what its comments say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).with_name("everyday.py")


def expected() -> dict[int, str]:
    """Return the comment of each line that reveals a type."""
    lines = enumerate(PAGE.read_text().splitlines(), 1)
    return {n: line.split("  # ", 1)[1] for n, line in lines if line.lstrip().startswith("reveal_type(")}


def without_modules(text: str) -> str:
    """Take the modules off the names of a type."""
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).rstrip("?*")


def checker(module: str, *args: str) -> str:
    """Run a type checker on the page, and return what it prints; it reaches for no network."""
    env = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *args, str(PAGE)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False).stdout


def test_mypy_reveals_what_the_comments_say():
    printed = checker("mypy", "--strict")
    found = re.findall(r"everyday\.py:(\d+): note: Revealed type is \"(.*)\"", printed)
    assert {int(line): without_modules(text) for line, text in found} == expected()
    assert "error:" not in printed, printed


def test_pyright_reveals_what_the_comments_say():
    report = json.loads(checker("pyright", "--outputjson", "--pythonpath", sys.executable))
    notes = report["generalDiagnostics"]
    found = {n["range"]["start"]["line"] + 1: n["message"] for n in notes if n["severity"] == "information"}
    revealed = {line: re.search(r' is "(.*)"$', text) for line, text in found.items()}
    assert {line: without_modules(match[1]) for line, match in revealed.items() if match} == expected()
    assert report["summary"]["errorCount"] == 0, notes
