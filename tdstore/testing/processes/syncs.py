"""Syncs of a writer that fail: by `strace`, or where that is missing by another `os.fsync`."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path as FsPath
from typing import NamedTuple

from tdstore.errors import StoreError
from tdstore.testing.comparing import error_name
from tdstore.testing.processes.deaths import Work, in_child
from tdstore.testing.processes.syscalls import is_traceable, kind, named_call, synced_files, traced


class Sync(NamedTuple):
    """One sync of a file, by which it is found again when the work is repeated."""

    name: str
    """"fsync", "fdatasync" or "msync"."""
    number: int
    """Its number among the calls of this name, from 1."""
    file: str
    """The file, as far as it is known."""


class Outcome(NamedTuple):
    """What became of a work, one of whose syncs was to fail."""

    error: str
    """The error of the work, with its name; empty where there was none."""
    is_own: bool
    """Whether it is a `StoreError`."""
    failed: bool
    """Whether that sync was made, and failed."""


def find_syncs(work: Work, folder: FsPath) -> list[Sync]:
    """Run the work in a forked child, and return the first sync of each kind of file that it makes.

    Args:
        work: the work of the child.
        folder: only files below it are considered.
    """
    if is_traceable():
        status, calls = traced(work)
        every = [Sync(*named_call(calls, number), file) for number, file in synced_files(calls, folder).items()]
    else:
        status, every = _counted(work, folder)
    assert status == 0, "the work failed in a child whose syncs are counted"
    first: dict[tuple[str, str], Sync] = {}
    for sync in every:
        first.setdefault((sync.name, kind(sync.file)), sync)
    return list(first.values())


def with_failing_sync(work: Work, sync: Sync) -> Outcome:
    """Run the work in a forked child, one of whose syncs fails with EIO.

    Args:
        work: the work of the child.
        sync: the one that fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = FsPath(folder) / "said"

        def body() -> None:
            error, is_own = "", False
            failed: list[int] = []

            def fail(name: str, number: int, fd: int) -> None:
                if (name, number) == (sync.name, sync.number):
                    failed.append(fd)
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

            if not is_traceable():
                _watch_syncs(fail)
            try:
                work()
            except Exception as caught:
                error, is_own = f"{error_name(type(caught))}: {caught}", isinstance(caught, StoreError)
            file.write_text(json.dumps([error, is_own, bool(failed)]))

        calls: list[str] = []
        if is_traceable():
            status, calls = traced(body, at=(sync.name, sync.number), inject="error=EIO")
        else:
            status = in_child(body)
        assert status == 0, f"the work ended with {status} when a sync failed"
        error, is_own, failed = json.loads(file.read_text())
        return Outcome(error, is_own, failed or any("(INJECTED)" in line for line in calls))


def _counted(work: Work, folder: FsPath) -> tuple[int, list[Sync]]:
    """Return the status of a child that does the work, and the syncs of files that it makes from Python."""
    with tempfile.TemporaryDirectory() as other:
        file = FsPath(other) / "syncs"

        def body() -> None:
            found: list[Sync] = []

            def note(name: str, number: int, fd: int) -> None:
                path = os.readlink(f"/proc/self/fd/{fd}") if os.path.isdir("/proc/self/fd") else f"descriptor {fd}"
                inside = path.startswith(f"{folder.resolve()}/") or not path.startswith("/")
                if inside and stat.S_ISREG(os.fstat(fd).st_mode):
                    found.append(Sync(name, number, path.removeprefix(f"{folder.resolve()}/")))

            _watch_syncs(note)
            work()
            file.write_text(json.dumps(found))

        status = in_child(body)
        return status, [Sync(*fields) for fields in json.loads(file.read_text())] if status == 0 else []


def _watch_syncs(look: Callable[[str, int, int], object]) -> None:
    """Call a function before each sync that Python makes from now on, in this process.

    Args:
        look: called with the name, its number among the calls of this name, and the descriptor.
    """

    def wrap(name: str) -> None:
        call: Callable[[int], None] = getattr(os, name)
        count = 0

        def watched(fd: int) -> None:
            nonlocal count
            count += 1
            look(name, count, fd)
            call(fd)

        setattr(os, name, watched)

    for name in ("fsync", "fdatasync"):
        if hasattr(os, name):
            wrap(name)
