"""Epochs that were killed with kill -9 and resumed: each row once, on each backend."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests import scripts
from tests.data_loading.killed import SIZE, ranks_of
from tests.data_loading.places import LOCAL, SERVERS, stored

SHUFFLES = [True, False, "blocks"]
# (ranks, rows of a batch, workers) before and after
BEFORE = (2, 5, 0)
AFTER = {"as before": BEFORE, "one rank, workers": (1, 7, 2), "three ranks": (3, 4, 0)}


PROGRAM = """
import sys, warnings
warnings.resetwarnings()
sys.path.insert(0, sys.argv[1])
import json
from tests import scripts
from tests.data_loading.killed import main
main(*json.loads(sys.argv[2]))
"""


def killed(arguments: list[Any], steps: int) -> tuple[list[int], Any]:
    """Start the program, kill it after some steps, and return all rows that it has had, and its last state."""
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        os.mkfifo(output)
        with scripts.started(PROGRAM, root, json.dumps(arguments), output=output) as script, output.open() as printed:
            lines = [printed.readline() for _ in range(steps)]
            os.kill(script.pid, signal.SIGKILL)
            lines += [line for line in printed if line.endswith("\n")]
    assert script.status == -signal.SIGKILL, script.errors
    assert all(lines), "the program ended before it was killed"
    steps_done = [json.loads(line) for line in lines]
    return [row for rows, _ in steps_done for row in rows], steps_done[-1][1]


def rest(place: str, after: tuple[int, int, int], shuffle: Any, state: Any, options: dict[str, Any]) -> list[int]:
    world_size, batch_size, workers = after
    rows = []
    for epochs in ranks_of(place, world_size, batch_size, shuffle, options):
        epochs.load_state_dict(state)
        rows += [row for batch in DataLoader(epochs, None, num_workers=workers) for row in batch["row"].tolist()]
    return rows


@pytest.mark.parametrize("kind", LOCAL + SERVERS)
def test_each_row_is_read_once(kind: str, request: Any) -> None:
    with stored(kind, SIZE, request) as (place, options):
        had, state = killed([place, *BEFORE[:2], True, BEFORE[2], options], 4)
        assert 40 <= len(had) < SIZE
        for name, after in AFTER.items():
            left = rest(place, after, True, state, options)
            assert sorted(had + left) == list(range(SIZE)), name


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_loader_with_workers(shuffle: Any, request: Any) -> None:
    with stored("h5", SIZE, request) as (place, options):
        had, state = killed([place, 1, 5, shuffle, 2, options], 6)
        assert 30 <= len(had) < SIZE
        whole = rest(place, (1, 5, 0), shuffle, {**state, "items": 0}, options)
        for after in ((1, 5, 0), (1, 7, 2)):
            assert had + rest(place, after, shuffle, state, options) == whole
