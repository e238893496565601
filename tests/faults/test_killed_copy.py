"""A child dies at the k-th change of the medium while it copies: no trace, a partial copy, which is refused, or all.

Whatever it left, the same call makes the whole of it.
"""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import DirtyStoreError, StoreNotFoundError
from tdstore.io.copying import StoreReader
from tdstore.testing.processes.warm import python

ROWS = 512

# Kills itself before the k-th call of any primitive that changes a file; a run with k = 0 ends, and prints how
# many calls there were and how many batches were read.
CHILD = """
import json, os, signal, sys
import h5py, torch
torch.set_num_threads(1)
import tdstore
from tdstore.io.copying import StoreReader
source, target, at, options, calls, read = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]), 0, 0
def wrap(real):
    def counted(*args, **kwargs):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return counted
for name in ("pwrite", "pwritev", "rename", "replace", "link", "unlink", "write", "ftruncate"):
    setattr(os, name, wrap(getattr(os, name)))
h5py.File.flush = wrap(h5py.File.flush)
real = StoreReader.__call__
def counted(*args):
    global read
    read += 1
    return real(*args)
StoreReader.__call__ = counted
tdstore.copy(source, target, block_bytes=64 << 10, checkpoint=0, **options)
print(calls, read)
"""

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "memmap": ("copy", {}),
    "h5": ("copy.h5", {}),
    "chunked h5": ("copy.h5", {"chunks": 32, "compression": "lzf"}),
}


def _child(source: Path, target: Path, at: int, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    command = [*python(), "-c", CHILD, str(source), str(target), str(at), json.dumps(options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def _state(target: Path, expected: TensorDict) -> str:
    try:
        with TensorDict.load(target, verify="full") as td:
            for key in ("a", "b", ("n", "c")):
                assert torch.equal(td[key], expected[key]), key
            assert td["note"] == "kept"
        return "whole"
    except StoreNotFoundError:
        return "nothing"
    except DirtyStoreError as error:
        assert error.leaves
        assert "incomplete copy of" in error.message
        return "partial"


@pytest.mark.parametrize("form", FORMS)
def test_a_killed_copy_is_finished_by_the_same_call(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    expected = TensorDict(
        {"a": torch.randn(ROWS, 128), "b": torch.arange(ROWS), "n": {"c": torch.randn(ROWS, 64)}}, [ROWS]
    )
    expected["note"] = "kept"
    source = tmp_path / "source"
    expected.save(source).close()
    name, options = FORMS[form]
    done = _child(source, tmp_path / "whole" / name, 0, options)
    assert done.returncode == 0, done.stderr
    calls, batches = map(int, done.stdout.split())
    assert batches >= 6
    read: list[int] = []
    real = StoreReader.__call__
    monkeypatch.setattr(StoreReader, "__call__", lambda *args: read.append(1) or real(*args))
    states, again = [], []
    # A loaded machine makes a call or two fewer (what waits for the disk is not counted): not the very last.
    for at in sorted({1, calls // 2, 3 * calls // 4, calls - 5}):
        folder = tmp_path / str(at)
        killed = _child(source, folder / name, at, options)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        states.append(_state(folder / name, expected))
        if states[-1] != "whole":
            read.clear()
            tdstore.copy(source, folder / name, block_bytes=64 << 10, **options)
            again.append(len(read))
            assert _state(folder / name, expected) == "whole"
        tdstore.copy(source, folder / name, mode="w", **options)
        assert [p.name for p in folder.iterdir()] == [name], "what the dead left is swept by the next save"
    assert states[0] == "nothing"
    assert "partial" in states
    assert min(again) < batches / 2, "a copy that was nearly done was begun anew"
