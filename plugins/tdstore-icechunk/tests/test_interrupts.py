"""Ctrl-C within a commit, in a program that goes on: it is done or not done, and the session goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests import interrupts


def test_an_interrupted_version_is_made_or_not(tmp_path: Path) -> None:
    """icechunk ends a session with its commit: the next change needs another one."""
    before, place = tmp_path / "before.icechunk", tmp_path / "now.icechunk"
    interrupts.dataset().save(before).close()

    def make() -> str:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(before, place)
        return str(place)

    within = {"_commit_root", "_put_root", "_save", "call", "commit", "put_root", "release", "save_version"}
    with interrupts.python_handler():
        interrupts.sweep_version(make, within)
