"""Fixtures of this plugin's tests; helpers are in `zarrhelp`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path as FsPath

import pytest
import torch

torch.set_num_threads(1)  # many tests fork, and OpenMP threads do not survive that
sys.path.insert(0, str(FsPath(__file__).parent))


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: FsPath) -> Iterator[FsPath]:
    """For the modules that sync a lot: a folder in memory, where that costs nothing. A disk for the others."""
    if not getattr(request.module, "IN_MEMORY", False) or not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield FsPath(folder)


@pytest.fixture
def place(tmp_path: FsPath) -> FsPath:
    return tmp_path / "t.zarr"
