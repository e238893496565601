"""A child dies at the k-th write to the medium while it updates several leaves: old, new, or an error with names."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tdstore import TensorDict
from tdstore.errors import DirtyStoreError
from tdstore.testing.processes.warm import python

ROWS = 4096

# Kills itself before the k-th call of any primitive that changes the file; the first argument of a
# run with k = 0 is never reached, and the child prints how many calls there were.
CHILD = """
import os, signal, sys
import h5py, torch
torch.set_num_threads(1)
from tdstore import TensorDict
path, at, calls = sys.argv[1], int(sys.argv[2]), 0
def wrap(real):
    def counted(*args, **kwargs):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return counted
td = TensorDict.load(path, mode="r+")
for name in ("pwrite", "pwritev", "rename", "unlink", "write"):
    setattr(os, name, wrap(getattr(os, name)))
h5py.File.flush = wrap(h5py.File.flush)
td.update_({"x": torch.full((4096, 128), 2.0), "b": torch.full((4096, 128), 2.0), "s": torch.full((4096,), 2.0)})
td.close()
print(calls)
"""


def _dataset(value: float) -> TensorDict:
    return TensorDict(
        {
            "x": torch.full((ROWS, 128), value),
            "b": torch.full((ROWS, 128), value),
            "s": torch.full((ROWS,), value),
        },
        batch_size=[ROWS],
    )


def _child(path: Path, at: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python(), "-c", CHILD, str(path), str(at)], capture_output=True, text=True, timeout=200, check=False
    )


def _state(path: Path, verify: str) -> str:
    try:
        td = TensorDict.load(path, verify=verify)
    except DirtyStoreError as error:
        assert error.leaves
        return "dirty"
    with td:
        found = {key: td[key].unique().tolist() for key in ("x", "b", "s")}
    assert found in ({k: [1.0] for k in found}, {k: [2.0] for k in found}), f"silently mixed: {found}"
    return "old" if found["x"] == [1.0] else "new"


@pytest.mark.parametrize("name", ["data", "data.h5"])
def test_an_update_killed_at_a_write_is_old_new_or_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    _dataset(1.0).save(path).close()
    done = _child(path, 0)
    assert done.returncode == 0, done.stderr
    assert _state(path, "full") == "new"
    calls = int(done.stdout)
    assert calls > 0
    for at in sorted({1, 2, 3, calls // 2 + 1, calls}):
        _dataset(1.0).save(path).close()
        killed = _child(path, at)
        if at == calls and killed.returncode == 0:  # HDF5 has fewer calls where the manifest keeps its length
            assert int(killed.stdout) < calls
            continue
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert _state(path, "size") == _state(path, "full")
