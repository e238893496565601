"""The examples run as their users run them, and leave what they say."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tdstore
from tdstore.rl import MCTSForest, Tree
from tests import programs

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments, ends_with=0, **options):
    command = programs.command(EXAMPLES / name, *arguments)  # an example that starts workers starts interpreters
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == ends_with, done.stdout + done.stderr
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


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["memmap", "h5", "zarr", "shared", "redis", "s3"])
def test_dqn_goes_on_after_a_kill(tmp_path, storage, request):
    pytest.importorskip("plotly")
    goal = 151 if storage == "memmap" else 30  # the whole way once; elsewhere until it has learned after the kill
    more = ["--goal", goal, "--kill-at", 1500 if storage == "memmap" else 600, "--out", tmp_path]
    if storage == "redis":
        storage = f"{request.getfixturevalue('redis').url}/cartpole-{tmp_path.name}"
    elif storage == "s3":
        server = request.getfixturevalue("s3")
        storage = f"{server.url}/cartpole-{tmp_path.name}"
        more += ["--options", json.dumps(server.fsspec_options)]
    done = run("dqn_cartpole.py", "--storage", storage, *more)
    assert re.search(r"killed after \d+ committed rows: \d+ are there and whole, 0 are lost", done.stdout + done.stderr)
    reached = re.search(r"mean return of the last 20 of \d+ episodes: (\d+)", done.stdout)
    assert reached is not None and int(reached[1]) >= goal
    assert "row/s" in done.stderr
    assert "Plotly.newPlot" in (tmp_path / "returns.html").read_text()
    if goal == 30:
        return
    refused = run("dqn_cartpole.py", "--out", tmp_path, ends_with=2)
    assert "another run: pass --resume" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["memmap", "zarr"])
def test_dqn_is_resumed_after_a_kill_from_outside(tmp_path, storage):
    pytest.importorskip("plotly")
    command = [sys.executable, str(EXAMPLES / "dqn_cartpole.py"), "--storage", storage, "--out", str(tmp_path)]
    options = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([*command, "--kill-at", "100000"], **options) as playing:
        said = ""
        while not re.search(r"\| [1-9]\d\d+/", said):  # so many rows are committed
            read = playing.stderr.read(1)
            assert read, said
            said += read
        os.killpg(playing.pid, signal.SIGKILL)
    done = run("dqn_cartpole.py", "--storage", storage, "--out", tmp_path, "--goal", 20, "--resume")
    whole = re.search(r"resumed: (\d+) are there and whole, 0 are lost", done.stdout + done.stderr)
    assert whole is not None and int(whole[1]) >= 100
    assert int(re.search(r"mean return of the last 20 of \d+ episodes: (\d+)", done.stdout)[1]) >= 20
    assert "Plotly.newPlot" in (tmp_path / "returns.html").read_text()


@pytest.mark.slow
def test_offline_atari_learns_from_a_bucket(tmp_path, s3):
    pytest.importorskip("plotly")
    place = f"{s3.url}/atari-{tmp_path.name}"
    more = ["--storage", place, "--rows", 600, "--passes", 6, "--out", tmp_path]
    done = run("offline_atari.py", *more, env={**os.environ, **s3.env})
    assert "transitions are in s3://" in done.stdout
    right, frequent = re.search(r"episodes: (\d+)%; by the most frequent answer: (\d+)%", done.stdout).groups()
    assert int(right) > int(frequent)
    assert "row/s" in done.stderr
    assert "Plotly.newPlot" in (tmp_path / "moves.html").read_text()
    other = run("offline_atari.py", *more, "--game", "asterix", ends_with=2, env={**os.environ, **s3.env})
    assert "no rows of asterix" in other.stderr, "the data that is there is used"


@pytest.mark.slow
def test_trajectories_of_agents_outlive_a_kill(tmp_path, s3):
    where = ["--storage", f"{s3.url}/agents-{tmp_path.name}", "--options", json.dumps(s3.fsspec_options)]
    done = run("agent_trajectories.py", *where, "--workers", 2, "--trajectories", 12, "--out", tmp_path)
    said = re.search(r"killed after (\d+) committed trajectories: (\d+) are there and whole, 0 are lost", done.stdout)
    assert said is not None and 12 <= int(said[1]) <= int(said[2])
    assert "24 of 24 trajectories replayed" in done.stdout
    assert "trajectory/s" in done.stderr
