"""Fixtures of this plugin's tests; helpers are in `h5help`."""

from __future__ import annotations

import sys
from pathlib import Path as FsPath

import pytest

sys.path.insert(0, str(FsPath(__file__).parent))


@pytest.fixture
def file(tmp_path: FsPath) -> FsPath:
    return tmp_path / "t.h5"
