"""Scripts that never close what they opened: rows stay, and nothing is printed at the end."""

from __future__ import annotations

import subprocess
from pathlib import Path as FsPath

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.testing.processes.warm import python

OPENED = {
    "r": "td = tdstore.open(file, 'r'); td[0]['x']",
    "r, an entry": "td = tdstore.open(file, 'r'); e = td.get('z'); td['z']",
    "r+": "td = tdstore.open(file, 'r+'); td.set_at_('x', torch.ones(3), 0)",
    "r+, unchanged": "td = tdstore.open(file, 'r+'); td['z']",
    "r+, compressed": "td = tdstore.open(file, 'r+'); td.set_at_('x', torch.ones(3), 0); "
    "td.set_at_('z', torch.ones(3), 0)",
    "r+, store": "td = open_h5(file, mode='r+'); td.write([Write(('x',), (slice(0, 1, 1),), torch.ones(1, 3))])",
    "w, store": "td = open_h5(file + '.w', mode='w'); td.create({('q',): LeafSpec((9,), 'int64')})",
    "save": "td = TensorDict({'x': torch.zeros(5, 3)}, [5]).save(file); td.set_at_('x', torch.ones(3), 0)",
    "schema": "td = TensorDict.from_schema({'x': LeafSpec((3,), 'float32')}, batch_size=[5], "
    "storage='h5://' + file, existsok=True); td.set_at_('x', torch.ones(3), 0)",
}
ENDS = {
    "the last line": "",
    "sys.exit": "sys.exit(0)",
    "an exception": "raise SystemExit from ValueError('x')",
}
SHAPES = {
    "module": "{opened}\n{end}\n",
    "function": "def main():\n    {opened}\n    {end}\n\nmain()\n",
    "fork": "def main():\n    {opened}\n    {end}\n\np = mp.get_context('fork').Process(target=main)\n"
    "p.start(); p.join(); sys.exit(p.exitcode)\n",
}
HEAD = """
import sys, multiprocessing as mp
import torch, tdstore
from tdstore import TensorDict
from tdstore.types import LeafSpec, Write
from tdstore_h5.store import open_h5
torch.set_num_threads(1)
file = sys.argv[1]
"""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("opened", OPENED)
def test_a_script_ends_quietly_and_rows_stay(file: FsPath, opened: str, shape: str) -> None:
    for end in ENDS.values() if opened in ("r", "r+") else [""]:
        old = TensorDict({"x": torch.zeros(5, 3), "z": torch.zeros(5, 3)}, batch_size=[5])
        with open_compressed(file, old):
            pass
        code = HEAD + SHAPES[shape].format(opened=OPENED[opened], end=end or "pass")
        done = subprocess.run(
            [*python(), "-c", code, str(file)], capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        with tdstore.open(file, verify="full") as td:
            written = opened not in ("r", "r, an entry", "r+, unchanged", "w, store")
            assert td["x"][0].tolist() == [float(written)] * 3
            if opened == "r+, compressed":
                assert td["z"][0].tolist() == [1.0] * 3
        assert [entry.name for entry in file.parent.iterdir()] == [file.name]


def open_compressed(file: FsPath, td: TensorDict) -> object:
    """Save with one leaf that is compressed."""
    saved = td.select("x").save(file)
    saved.close()
    opened = tdstore.open(file, "r+", chunks=2, compression="gzip")
    opened["z"] = td["z"]
    return opened
