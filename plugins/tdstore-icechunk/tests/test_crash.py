"""Killed writers, full disks, flipped bits, lost files: old, new, or an error that says so.

The kit forks its writers, and icechunk cannot be used in a child of a process that used it: writers are forked from a
process that imported it and nothing more.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path as FsPath

import icechunk
import pytest
from icechunk.store import IcechunkStore as SessionStore
from tdstore_icechunk.store import IcechunkStore, open_icechunk

from tdstore.errors import StoreNotFoundError
from tdstore.storekit import files
from tdstore.testing import CrashTests
from tdstore.testing import full_disks as kit
from tdstore.testing.comparing import check_equal, check_leaves
from tdstore.testing.crash import NEW, OLD, WORKS, save_leaves
from tdstore.testing.processes import warm
from tdstore.testing.processes.deaths import die_at, in_child, killed_after
from tdstore.testing.setup import load

LAYOUT = {"chunks": 8, "shards": 32}
POINTS = [
    (SessionStore, "set"), (SessionStore, "delete"), (icechunk.Session, "commit"), (icechunk.Repository, "create"),
    (icechunk.Repository, "garbage_collect"), (files, "rename"),
]  # fmt: skip
STEP = 6
BY_THE_CLOCK = 6


class TestCrash(CrashTests):
    open = staticmethod(open_icechunk)
    caps = IcechunkStore.caps
    layouts = {"shards": LAYOUT}
    reading = {"verify": "full"}
    flips = 2

    @pytest.fixture
    def location(self, place: FsPath) -> FsPath:
        return place

    @pytest.mark.parametrize("work", WORKS)
    def test_kill_at_every_call(self, place: FsPath, tmp_path: FsPath, work: str) -> None:  # type: ignore[override]
        """Kill a writer at every `STEP`th change, and by the clock; the next writer tidies up."""
        stored = tmp_path / "stored" / place.name
        stored.parent.mkdir()
        _, new, seconds = self.prepared(work, place, LAYOUT)
        save_leaves(self.made, stored, OLD, **LAYOUT)
        seen = []
        for number, dead in enumerate(killed(work, stored, tmp_path / "dead", seconds)):
            seen.append(self.outcome(dead, new))
            if number % 4 == 0:
                self.check_tidied(dead)
        assert seen.count("old") > 1
        assert set(seen) == {"old", "new"}

    test_kill_at_random_moments = test_kill_at_system_calls = None  # type: ignore[assignment]  # as above

    def test_kill_a_first_save(self, place: FsPath, tmp_path: FsPath) -> None:  # type: ignore[override]
        """Kill a writer that makes a repository where none is: there is none then, or the whole one."""
        start = time.perf_counter()
        self.work("save", place, LAYOUT)
        seconds = time.perf_counter() - start
        found = 0
        for number, dead in enumerate(killed("save", tmp_path / "none" / place.name, tmp_path / "dead", seconds)):
            try:
                check_leaves(load(self.made, dead, **self.reading), NEW, "a writer that made a repository was killed")
                found += 1
            except StoreNotFoundError:
                pass
            if number % 4 == 0:
                self.check_tidied(dead)
        assert 0 < found < number

    def check_tidied(self, dead: FsPath) -> None:
        """Save once more, and look for what the dead writer left."""
        save_leaves(self.made, dead, {})
        check_equal(self.strays(dead), [], "what a dead writer left when the next one has saved")

    def test_nearly_full_disk(  # type: ignore[override]
        self, disk: FsPath, place: FsPath, disk_layout: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As the kit's, in this process."""
        monkeypatch.setattr(kit, "check_in_child", lambda work, doing, hint: work(str))
        super().test_nearly_full_disk(disk, place, disk_layout)

    def test_full_disk_in_place(  # type: ignore[override]
        self, disk: FsPath, place: FsPath, disk_layout: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As the kit's, in this process: there is no mapped memory that could end it."""
        monkeypatch.setattr(kit, "check_in_child", lambda work, doing, hint: work(str))
        super().test_full_disk_in_place(disk, place, disk_layout)


def killed(work: str, stored: FsPath, dead: FsPath, seconds: float) -> list[FsPath]:
    """Return the places at which writers were killed, by a process that has imported icechunk and not used it."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_crash; test_crash.kill_all(*sys.argv[2:])"
    arguments = [str(FsPath(__file__).parent), work, str(stored), str(dead), str(seconds)]
    done = subprocess.run([*warm.python(), "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [folder / stored.name for folder in sorted(dead.iterdir())]


def kill_all(work: str, stored: str, dead: str, seconds: str) -> None:
    """Kill writers, each in a folder of its own with a copy of what is stored; the last one of the sweep lives."""
    os.mkdir(dead)
    chance = random.Random(0)

    def writer(name: str) -> Callable[[], None]:
        place = FsPath(dead, name, FsPath(stored).name)
        place.parent.mkdir()
        if os.path.exists(stored):
            shutil.copytree(stored, place)
        return lambda: TestCrash().work(work, place, LAYOUT)

    for k in range(1, 1000, STEP):
        status = in_child(lambda k=k, do=writer(f"call-{k:03}"): (die_at(POINTS, k), do()))  # type: ignore[misc]
        assert status <= 0, status
        if not status:
            break
    for number in range(BY_THE_CLOCK):
        killed_after(writer(f"clock-{number}"), chance.uniform(0.2, 1.2) * float(seconds))
