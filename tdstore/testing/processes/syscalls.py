"""System calls of a writer, by `strace`: below Python, so that those of C libraries are included."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path as FsPath

import pytest

_DATA = "write pwrite64 writev pwritev pwritev2 sendfile copy_file_range ftruncate fallocate"
_SYNCS = "fsync fdatasync msync sync_file_range"
_NAMES = "rename renameat renameat2 link linkat unlink unlinkat rmdir mkdir mkdirat"
CHANGES = ",".join(f"?{name}" for name in f"{_DATA} {_SYNCS} {_NAMES}".split())
"""Calls that change the storage, or wait for it; those that a system lacks are skipped."""
_CALL = re.compile(r"^\d+\s+(\w+)\((.*)$")
_DESCRIPTOR = re.compile(r"^\d+<([^>]*)>")
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')


def needs_strace() -> None:
    """Skip a test where `strace` is missing."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: what a library does between two calls of Python is not seen")


def traced(work: Callable[[], object], *, kill_at: int | None = None) -> tuple[int, list[str]]:
    """Run the work in a forked child under `strace`.

    Args:
        work: the work of the child.
        kill_at: the number, from 1, of the call of `CHANGES` at which the child is killed.

    Returns:
        The exit status of the child, or minus the signal that ended it, and the calls that it made.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = FsPath(folder) / "calls"
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.close(writing)
                os.read(reading, 1)  # until it is traced
                work()
                status = 0
            finally:
                os._exit(status)
        os.close(reading)
        inject = ["-e", f"inject={CHANGES}:signal=KILL:when={kill_at}"] if kill_at else []
        command = ["strace", "-f", "-y", "-s", "4096", "-e", "signal=none", "-e", f"trace={CHANGES}", *inject]
        tracer = subprocess.Popen([*command, "-o", str(log), "-p", str(pid)], stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        first = tracer.stderr.readline()
        os.write(writing, b".")
        os.close(writing)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        tracer.communicate()
        if "attached" not in first:
            pytest.skip(f"strace may not look at other processes here: {first.strip()}")
        return status, [line for line in log.read_text(errors="replace").splitlines() if _CALL.match(line)]


def unsynced(calls: list[str], folder: FsPath) -> list[str]:
    """List files that were published before they were on the disk: renamed, or left at the end, without a sync.

    Args:
        calls: the calls of `traced`.
        folder: only files below it are considered. Writes through a memory map are not seen.
    """
    waiting: dict[str, int] = {}
    faults: list[str] = []
    inside = f"{folder.resolve()}/"
    for line in calls:
        found = _CALL.match(line)
        assert found
        name, rest = found.groups()
        descriptor = _DESCRIPTOR.match(rest)
        path = descriptor[1] if descriptor else ""
        if name in _DATA.split() and path.startswith(inside):
            waiting[path] = waiting.get(path, 0) + 1
        elif name in ("fsync", "fdatasync"):
            waiting.pop(path, None)
        elif name.startswith(("rename", "link")):
            old, new = _TEXT.findall(rest)[:2]
            for file in [file for file in waiting if file == old or file.startswith(f"{old}/")]:
                count = waiting.pop(file)
                faults.append(f"{file} is published as {new} after {count} writes, and no sync between them")
        elif name.startswith(("unlink", "rmdir")):
            for gone in _TEXT.findall(rest)[:1]:
                waiting.pop(gone, None)
    left = [file for file in waiting if os.path.exists(file)]
    return faults + [f"{file}: {waiting[file]} writes and no sync after them" for file in left]
