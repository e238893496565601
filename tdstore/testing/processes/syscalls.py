"""System calls of a writer, by `strace`: below Python, so that those of C libraries are included."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path as FsPath

import pytest

_DATA = "write pwrite64 writev pwritev pwritev2 sendfile copy_file_range ftruncate fallocate"
_SYNCS = "fsync fdatasync msync sync_file_range"
_NAMES = "rename renameat renameat2 link linkat unlink unlinkat rmdir mkdir mkdirat"
_OPENS = "open openat openat2 creat"
CHANGES = ",".join(f"?{name}" for name in f"{_DATA} {_SYNCS} {_NAMES} {_OPENS}".split())
"""Calls that may change the storage, or wait for it; those that a system lacks are skipped."""
_CALL = re.compile(r"^\d+\s+(\w+)\((.*)$")
_DESCRIPTOR = re.compile(r"^\d+<([^>]*)>")
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')


def is_traceable() -> bool:
    """Check whether there is `strace`."""
    return shutil.which("strace") is not None


def needs_strace() -> None:
    """Skip a test where `strace` is missing."""
    if not is_traceable():
        pytest.skip("strace is not installed: what a library does between two calls of Python is not seen")


def traced(
    work: Callable[[], object], *, at: tuple[str, int | str] | None = None, inject: str = "signal=KILL"
) -> tuple[int, list[str]]:
    """Run the work in a forked child under `strace`.

    Args:
        work: the work of the child.
        at: a call by its name, and the number of the one, from 1, at which something happens to the child; or calls,
            and a text such as "5+": what `strace` understands.
        inject: what happens to it: "signal=KILL", or "error=EIO" for a call that fails.

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
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(reading)
        injected = ["-e", f"inject={at[0]}:{inject}:when={at[1]}"] if at else []
        command = ["strace", "-f", "-y", "-s", "4096", "-e", "signal=none", "-e", f"trace={CHANGES}", *injected]
        tracer = subprocess.Popen([*command, "-o", str(log), "-p", str(pid)], stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None, "it was started with a pipe"
        first = tracer.stderr.readline()
        os.write(writing, b".")
        os.close(writing)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        tracer.communicate()
        if "attached" not in first:
            pytest.skip(f"strace may not look at other processes here: {first.strip()}")
        return status, [line for line in log.read_text(errors="replace").splitlines() if _CALL.match(line)]


def kill_points(calls: list[str], count: int) -> list[int]:
    """Choose calls to kill a writer at: one of each kind (a call on a file), then others, spread over all of them.

    Args:
        calls: the calls of `traced`.
        count: how many to choose at least, where there are that many.

    Returns:
        Numbers of calls, from 1, in order.
    """
    changing = [number for number, line in enumerate(calls, 1) if changes_storage(line)]
    first: dict[str, int] = {}
    for number in changing:
        first.setdefault(kind(calls[number - 1].partition(" ")[2].partition(", ")[0]), number)
    spread = [changing[i * len(changing) // count] for i in range(count)] if len(changing) > count else changing
    return sorted({*first.values(), *spread})


_NUMBERS = re.compile(r"[0-9a-f]{4,}|\d+")


def kind(text: str) -> str:
    """Return a text without its numbers: temporary files and descriptors of one kind look the same."""
    return _NUMBERS.sub("#", text)


def changes_storage(line: str) -> bool:
    """Check whether a call changes the storage; an opening does where it makes or empties a file."""
    found = _CALL.match(line)
    opens = found is not None and found[1] in _OPENS.split()
    return not opens or "O_TRUNC" in line or "O_CREAT" in line


def named_call(calls: list[str], number: int) -> tuple[str, int]:
    """Return the name of a call, and its number among those of this name in its thread: what `strace` counts.

    Args:
        calls: the calls of `traced`.
        number: of the call, from 1.
    """
    thread, name = _thread_and_name(calls[number - 1])
    return name, sum(_thread_and_name(line) == (thread, name) for line in calls[:number])


def _thread_and_name(line: str) -> tuple[str, str]:
    thread, _, rest = line.partition(" ")
    return thread, rest.lstrip().partition("(")[0]


def synced_files(calls: list[str], folder: FsPath) -> dict[int, str]:
    """Return the numbers of calls, from 1, that sync a file, and the name of the file; no folders.

    Args:
        calls: the calls of `traced`.
        folder: only files below it are considered.
    """
    inside = f"{folder.resolve()}/"
    changed: set[str] = set()
    found: dict[int, str] = {}
    for number, line in enumerate(calls, 1):
        call = _CALL.match(line)
        assert call, f"strace wrote a line of no call: {line}"
        descriptor = _DESCRIPTOR.match(call[2])
        path = descriptor[1] if descriptor else ""
        if call[1] == "msync":
            found[number] = "a mapped file"
        elif call[1] in _DATA.split():
            changed.add(path)
        elif call[1] not in ("fsync", "fdatasync") or not path.startswith(inside):
            continue
        elif path in changed or os.path.isfile(path):  # not a folder
            found[number] = path.removeprefix(inside)
    return found


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
        assert found, f"strace wrote a line of no call: {line}"
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
