"""Forked children that are killed in their work, and small disks."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch
from torch import Tensor

from tdstore.testing.comparing import check_own_memory, error_name, failure
from tdstore.testing.processes.points import point_name, watch

Work = Callable[[], object]


def in_child(work: Work, *, quiet: bool = False) -> int:
    """Run in a forked child: 0, 1 after an exception (printed unless `quiet`), or minus the signal that ended it."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            torch.set_num_threads(1)  # OpenMP's threads do not survive a fork: a second one would be waited for
            work()
            code = 0
        except BaseException:
            if not quiet:
                traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check_in_child(work: Callable[[Callable[[str], object]], object], doing: str, hint: str = "") -> None:
    """Run in a forked child; its failure, or the signal that ended it, is a failure here.

    Args:
        work: the function to run; it checks by exceptions. It is called with a function that takes the next step of
            the work, for the message.
        doing: its first step.
        hint: what a SIGBUS or SIGSEGV there means.

    Raises:
        AssertionError: the work raised an exception, whose text this one has, or the child was ended by a signal.
    """
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory() as folder:
        file, step = FsPath(folder) / "error", FsPath(folder) / "step"
        step.write_text(doing)

        def body() -> None:
            try:
                work(step.write_text)
            except BaseException as error:
                name = "" if isinstance(error, AssertionError) else f"{error_name(type(error))}: "
                file.write_text(f"{name}{error}")
                raise

        status = in_child(body)
        doing = step.read_text()
        if status < 0:
            name = signal.Signals(-status).name
            known = f": {hint}" if hint and name in ("SIGBUS", "SIGSEGV") else ""
            raise failure(f"{doing}: the process was ended by {name}{known}")
        if status:
            raise AssertionError(file.read_text() if file.exists() else f"{doing}: the process ended with {status}")


def check_writable(tensor: Tensor, what: object = "") -> None:
    """Check that a tensor can be written, in a forked child: over read-only memory a write ends the process.

    Args:
        tensor: the tensor.
        what: its name, for the message.
    """
    __tracebackhide__ = True
    check_own_memory(tensor, what)
    if tensor.numel() and tensor.device.type == "cpu" and hasattr(os, "fork"):
        doing = f"writing into {what}" if what else "writing into an answer"
        check_in_child(lambda _: tensor.zero_(), doing, "its memory is read-only")


def killed_after(work: Work, seconds: float) -> int:
    """Run in a forked child that is killed by the clock.

    Args:
        work: the function to run.
        seconds: time until it is killed.

    Returns:
        The exit code, as of `in_child`.
    """
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die(*_: object) -> None:
    """End this process by SIGKILL: at once. What was passed to the system stays, which it does not at a power cut."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(points: Sequence[tuple[Any, str]], kill_at: int, found: Collection[str] = ()) -> None:
    """Count the calls of functions from now on, and die before or after one: twice a call, at `kill_at`.

    Args:
        points: owners of functions, and their names there.
        kill_at: the number of the step, from 1.
        found: names of further functions, as `find_points` gives them.
    """
    at_steps(points, lambda number: die() if number == kill_at else None, found)


def at_steps(points: Sequence[tuple[Any, str]], do: Callable[[int], object], found: Collection[str] = ()) -> None:
    """Call a function before and after each call of some functions from now on, with a number that counts from 1.

    Args:
        points: owners of functions, and their names there.
        do: what is called.
        found: names of further functions, as `find_points` gives them.
    """
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        do(count)

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            step()
            result = call(*args, **options)
            step()
            return result

        return counted

    for owner, name in points:
        call = getattr(owner, name)
        if point_name(call) not in found:
            setattr(owner, name, wrap(call))
    if found:
        watch(lambda name: step() if name in found else None)


def deaths(
    begin: Work, work: Work, arm: Callable[[int], object], *, step: int = 1, least: int = 12, most: int = 3000
) -> Iterator[bool]:
    """Let child after child die a little later; yields after each whether it died. The last one lives.

    Args:
        begin: called here before each child: restores the old data.
        work: the work of a child.
        arm: called in the k-th child with k; makes it die at its k-th change of the storage.
        step: how much later each child dies than the one before.
        least: a shorter sweep is an error: it counts the wrong calls.
        most: and so is a longer one.
    """
    for k in range(1, most, step):
        begin()

        def body(k: int = k) -> None:
            arm(k)
            work()

        code = in_child(body)
        assert code in (0, -signal.SIGKILL), f"the writer that was to die at change {k} ended with {code}"
        yield code != 0
        if not code:
            assert k > least, f"only {k} changes were counted: the sweep does not see this storage"
            return
    raise AssertionError(f"the writer did not end within {most} changes")


class StoredFiles:
    """The files and folders below a folder; calling it restores them, and removes all others.

    A file that is still there keeps its inode, by which a journal may know it.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: FsPath) -> None:
        self._folder = folder
        paths = sorted(folder.rglob("*"))
        self._found = {p: (p.stat().st_ino, None if p.is_dir() else p.read_bytes()) for p in paths}

    def __call__(self) -> None:
        """Restore them."""
        for path in sorted(self._folder.rglob("*"), reverse=True):  # what a folder has comes before it
            inode, data = self._found.get(path, (None, b""))
            here = path.lstat()
            if stat.S_ISDIR(here.st_mode):
                if data is not None:
                    path.rmdir()
            elif here.st_ino != inode or here.st_nlink > 1:
                path.unlink()
        for path, (_, data) in self._found.items():
            if data is None:
                path.mkdir(exist_ok=True)
                continue
            with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                file.write(data)
                file.truncate()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredFiles) and self._found == other._found

    __hash__ = None  # type: ignore[assignment]


def copies(
    work: Work, arm: Callable[[Callable[[int], object]], object], copy: Callable[[], Work], *, step: int, least: int
) -> Iterator[bool]:
    """Let one child do the work, stop it at each change, and copy the storage; then put one copy after the other back.

    A copy is what a kill at that change leaves: all threads stop at once. What differs is what the system does when a
    process dies, such as releasing its locks; `deaths` covers that. Equal copies that follow each other are one.

    Args:
        work: the work of the child.
        arm: called in the child; makes a function be called with the number of each change of the storage.
        copy: copies the storage; what it returns puts the copy back.
        step: every so-many-th change is a copy.
        least: a shorter work is an error: it counts the wrong calls.

    Yields:
        Whether the work was still being done. The last one is not a copy.
    """
    pid = os.fork()
    if not pid:
        code = 1
        try:
            writer = os.getpid()
            torch.set_num_threads(1)
            arm(lambda number: None if (number - 1) % step else os.kill(writer, signal.SIGSTOP))
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    found: list[Work] = []
    stops = 0
    try:
        while os.WIFSTOPPED(status := os.waitpid(pid, os.WUNTRACED)[1]):
            stops += 1
            now = copy()
            if not found or now != found[-1]:
                found.append(now)
            os.kill(pid, signal.SIGCONT)
    except BaseException:
        os.kill(pid, signal.SIGKILL)  # it would stay stopped
        os.waitpid(pid, 0)
        raise
    code = os.waitstatus_to_exitcode(status)
    assert code == 0, f"the writer that was stopped at each change ended with {code}"
    assert stops * step > least, f"only {stops * step} changes were counted: the sweep does not see this storage"
    end = copy()
    for put_back in found:
        put_back()
        yield True
    end()
    yield False


@contextmanager
def small_disk(folder: FsPath, mib: int) -> Iterator[FsPath]:
    """Mount a small disk at a new folder. Where mounting is refused the test is skipped.

    Args:
        folder: the folder.
        mib: size of the disk in MiB.
    """
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs was refused: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
