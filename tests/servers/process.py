"""Server processes: start, wait until they answer, and end them, also when this process is killed."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

LOOPBACK = "127.0.0.1"
T = TypeVar("T")


class MissingServer(RuntimeError):
    """A server's program is not on this machine. The text says how to install it."""


class ServerFailed(RuntimeError):
    """A server did not start, or ended by itself. The text ends with its log."""


def find_program(name: str, hint: str, *more: str | Path | None) -> str:
    """Return the path of a program, looked for in `more` first. Raise MissingServer if there is none."""
    for path in more:
        if path and os.access(path, os.X_OK):
            return str(path)
    # nginx and the ceph daemons live in sbin, which is not on the PATH of everybody but root
    found = shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin")
    if found is None:
        raise MissingServer(f"needs {name}: {hint}")
    return found


def free_port() -> int:
    """Return a loopback port that nobody listens on. Another process may take it first: start() tries again."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def wait_until(answers: Callable[[], bool], what: str, seconds: float) -> None:
    """Call `answers` until it returns True. Its OSErrors count as "not yet". Raise ServerFailed after `seconds`."""
    deadline = time.monotonic() + seconds
    pause, reason = 0.005, ""
    while True:
        try:
            if answers():
                return
        except OSError as error:
            reason = f" ({type(error).__name__}: {error})"
        if time.monotonic() > deadline:
            raise ServerFailed(f"{what} gave no answer within {seconds:g} s{reason}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.2)


def listens(port: int) -> bool:
    """Tell whether something accepts connections on a loopback port."""
    with socket.create_connection((LOOPBACK, port), timeout=1):
        return True


def tail(log: Path, lines: int = 25) -> str:
    """Return the end of a log file, for an error's text."""
    try:
        text = log.read_text(errors="replace").splitlines()[-lines:]
    except OSError as error:
        return f"(no log: {error})"
    return f"--- the end of {log.name} ---\n" + "\n".join(text or ["(empty)"])


# -- what outlives a kill --------------------------------------------------------------------
# One watcher per process. It reads "+group", "-group" and "folder" lines; at the end of its input, or when its parent
# is another one (a forked child may keep the input open), it kills the groups and removes the folders that are left.
WATCHER = """
import os, select, shutil, signal, sys
parent, groups, folders = os.getppid(), set(), set()
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pending = b""
while os.getppid() == parent:
    if not select.select([0], [], [], 0.5)[0]:
        continue
    got = os.read(0, 65536)
    if not got:
        break
    *lines, pending = (pending + got).split(b"\\n")
    for line in lines:
        kind, value = line.decode()[0], line.decode()[1:]
        wanted = folders if value.startswith("/") else groups
        (wanted.add if kind == "+" else wanted.discard)(value)
for group in groups:
    try:
        os.killpg(int(group), signal.SIGKILL)
    except ProcessLookupError:
        pass
for folder in folders:
    shutil.rmtree(folder, ignore_errors=True)
"""


class Watcher:
    """Tell the watcher of this process what to clean up. A forked child gets a watcher of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, value: int | Path) -> None:
        self._say(f"+{value}\n")

    def remove(self, value: int | Path) -> None:
        if self._pid == os.getpid():
            self._say(f"-{value}\n")

    def _say(self, line: str) -> None:
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", WATCHER],
                    stdin=subprocess.PIPE,
                    # whoever reads our output must not wait for the watcher to close it
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                atexit.register(self._end)
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def _end(self) -> None:
        if self._process is not None and self._pid == os.getpid():
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


watcher = Watcher()


class Folder:
    """A temporary folder of one server, removed when the server stops or this process dies."""

    def __init__(self, name: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"tdstore-{name}-"))
        watcher.add(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        watcher.remove(self.path)


class Server:
    """A server process, leader of its own process group, whose output goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.command, self.log = list(command), log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=log.parent,
                env=None if env is None else {**os.environ, **env},
            )
        watcher.add(self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until(self, answers: Callable[[], bool], seconds: float = 200) -> None:
        """Wait until the server answers. Raise ServerFailed, with the log, if it ends or takes too long."""

        def checked() -> bool:
            if not self.alive:
                raise ServerFailed(f"it ended with {self._process.returncode}")
            return answers()

        try:
            wait_until(checked, self.command[0], seconds)
        except ServerFailed as error:
            self.kill()
            raise ServerFailed(f"{' '.join(self.command)}: {error}\n{tail(self.log)}") from None

    def signal(self, number: int) -> None:
        """Send a signal to every process of the server."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            if self.alive:
                raise

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        watcher.remove(self.pid)

    def stop(self, seconds: float = 5) -> None:
        """Ask the server to end; kill what is left of its group after `seconds`."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            with self.log.open("a") as log:
                log.write(f"\nstill there {seconds:g} s after SIGTERM: killed\n")
        self.kill()


def start(attempt: Callable[[int], T], tries: int = 3, again: str = "in use|EADDRINUSE|bind") -> T:
    """Call `attempt(port)` with a free port. Where its error matches `again`, somebody took the port: try another."""
    for _ in range(tries - 1):
        try:
            return attempt(free_port())
        except ServerFailed as error:
            if not re.search(again, str(error), re.IGNORECASE):
                raise
            print(f"trying again with another port, since {error}", file=sys.stderr)
    return attempt(free_port())
