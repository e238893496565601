"""Every python block of the documents runs: the blocks of a file, in order, as one module in an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(p for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")] if "```python" in p.read_text())
BLOCK = re.compile(r"^([ ]*)```python[^\n]*\n(.*?)^\1```", re.M | re.S)


def program(text: str) -> str:
    """The python blocks of a document, each at its own line so that a traceback points into the document."""
    lines = [""] * (text.count("\n") + 1)
    for match in BLOCK.finditer(text):
        first = text.count("\n", 0, match.start(2))
        indent = len(match[1])
        for offset, line in enumerate(match[2].splitlines()):
            lines[first + offset] = line[indent:]
    return "\n".join(lines)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)  # classes of the document can be found by name
    exec(compile(program(path.read_text()), str(path), "exec"), module.__dict__)


def test_the_example_store_passes_the_kit(tmp_path):
    document = ROOT / "docs" / "reference" / "storage-protocol.md"
    (tmp_path / "test_document.py").write_text(program(document.read_text()))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_document.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_blocks_are_found_at_their_lines():
    text = "a\n```python\nx = 1\n```\n\n* item\n  ```python\n  y = x + 1\n  ```\n```toml\nz\n```\n"
    assert program(text).splitlines()[2] == "x = 1"
    assert program(text).splitlines()[7] == "y = x + 1"
    assert "z" not in program(text)
