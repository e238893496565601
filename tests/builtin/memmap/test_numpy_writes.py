"""Writes through numpy arrays, which torch does not count: the time of a file tells, where the file system keeps it."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import TensorDict

ON_DISK = True  # in memory a write through a map leaves the time of a file
MEMORY = Path("/dev/shm")


@pytest.mark.parametrize("first", ["read", "write"])
@pytest.mark.parametrize("where", ["disk", "memory"])
@pytest.mark.parametrize("pack", [False, True])
def test_what_numpy_wrote_is_committed(tmp_path, pack, where, first):
    if where == "memory" and not os.access(MEMORY, os.W_OK):
        where = "disk"
    with tempfile.TemporaryDirectory(dir=MEMORY if where == "memory" else tmp_path) as folder:
        place = Path(folder) / "data"
        TensorDict({"a": torch.arange(100)}, [100]).save(place, pack=pack).close()
        time.sleep(0.05)  # so that the time of the file is old enough to tell
        with tdstore.open(place, mode="r+") as td:
            if first == "read":
                assert td["a"].sum() == 4950
            td["a"].numpy()[3] = 77
        with tdstore.open(place) as td:
            assert td["a"][3] == 77
            assert td["a"][4] == 4
