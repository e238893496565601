"""Fixtures of this plugin's tests."""

from __future__ import annotations

from pathlib import Path as FsPath

import pytest
import torch

torch.set_num_threads(1)  # many tests fork, and OpenMP threads do not survive that


@pytest.fixture
def place(tmp_path: FsPath) -> FsPath:
    return tmp_path / "t.icechunk"
