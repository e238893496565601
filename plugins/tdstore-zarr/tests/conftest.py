"""Fixtures of this plugin's tests; helpers are in `zarrhelp`."""

from __future__ import annotations

import sys
from pathlib import Path as FsPath

import pytest
import torch

torch.set_num_threads(1)  # many tests fork, and OpenMP threads do not survive that
sys.path.insert(0, str(FsPath(__file__).parent))


@pytest.fixture
def place(tmp_path: FsPath) -> FsPath:
    return tmp_path / "t.zarr"
