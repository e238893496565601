from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Spawned processes import the functions they run by name.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def shm(tmp_path_factory, monkeypatch) -> str:
    """A folder for named stores, here and in child processes."""
    folder = str(tmp_path_factory.mktemp("shm"))
    monkeypatch.setenv("TDSTORE_SHM_DIR", folder)
    return folder
