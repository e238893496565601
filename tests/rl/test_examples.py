"""The examples run as their users run them, and leave what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tdstore
from tdstore.rl import MCTSForest, Tree

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments, **options):
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_tree_search(tmp_path):
    pytest.importorskip("plotly")
    done = run("tree_search.py", "--games", 4, "--simulations", 60, "--out", tmp_path)
    assert "4 games against random moves" in done.stdout
    assert "game/s" in done.stderr
    for picture in ("tree.html", "boxes.html", "openings.html"):
        assert "Plotly.newPlot" in (tmp_path / picture).read_text()
    with tdstore.open(tmp_path / "tree.h5") as tree:
        assert type(tree) is Tree
        assert tree.num_children == 9
        assert tree.count == 100
        assert sum(child.count for child in tree.children()) == 100
    forest = MCTSForest(max_size=100)
    forest.loads(tmp_path / "games")
    assert len(forest) > 10
