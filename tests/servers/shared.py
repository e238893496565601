"""One server for all processes of a test run: whoever needs it first starts its holder, the last one's end ends it.

A user holds a shared file lock on `NAME.users` for as long as it uses the server, so the kernel counts the users, and
does so rightly when some are killed. The holder is a process of its own: it starts the server, says where in
`NAME.json`, and stops when nobody has held the lock for a while. `NAME.start` serialises starting and stopping.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.servers.process import ServerFailed, tail

ROOT = Path(__file__).resolve().parents[2]
LINGER = 2.0  # seconds that a server waits for a new user


def run_folder() -> Path:
    """The folder that the processes of this run have in common: TDSTORE_SERVERS_DIR, or one for each pytest run."""
    given = os.environ.get("TDSTORE_SERVERS_DIR")
    if given:
        return Path(given)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"{os.getpid()}"
    return Path(tempfile.gettempdir(), f"tdstore-run-{os.getuid()}-{run}")


@contextmanager
def start_lock(folder: Path, name: str) -> Iterator[None]:
    """Be the only one who starts or stops this server."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{name}.start"
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(path.open("a"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                same = os.path.samestat(os.fstat(lock.fileno()), path.stat())
            except FileNotFoundError:
                continue  # the last holder removed the folder just now
            if same:
                yield
                return


@contextmanager
def shared_server(name: str, holder: str, answers: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
    """Yield what the holder (`python -m holder FOLDER`) wrote about its server; start it if nobody has.

    `answers(state)` tells whether the server that an earlier holder wrote about is still there.
    """
    folder = run_folder()
    with contextlib.ExitStack() as stack:
        with start_lock(folder, name):
            users = stack.enter_context((folder / f"{name}.users").open("a"))
            fcntl.flock(users, fcntl.LOCK_SH)
            state = read_state(folder, name)
            if state is None or not _still(answers, state):
                state = _start(folder, name, holder)
        yield state


def read_state(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    except FileNotFoundError:
        return None
    return state


def _still(answers: Callable[[dict[str, Any]], bool], state: dict[str, Any]) -> bool:
    try:
        return answers(state)
    except OSError:
        return False


def _start(folder: Path, name: str, holder: str) -> dict[str, Any]:
    log = folder / f"{name}.log"
    (folder / f"{name}.json").unlink(missing_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", holder, str(folder)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + 240
    while (state := read_state(folder, name)) is None:
        if process.poll() is not None:
            raise ServerFailed(f"{name} did not start\n{tail(log, 40)}")
        if time.monotonic() > deadline:
            process.terminate()
            process.wait()
            raise ServerFailed(f"{name} did not start within 240 s\n{tail(log, 40)}")
        time.sleep(0.05)
    process.returncode = 0  # it outlives us where others use it: no "still running" warning
    return state


def hold(folder: Path, name: str, server: AbstractContextManager[dict[str, Any]]) -> None:
    """Run a server until nobody uses it: the body of a holder's process."""
    with server as state:
        told = folder / f"{name}.json"
        new = told.with_suffix(".new")
        new.write_text(json.dumps(state))
        new.replace(told)
        idle_since = time.monotonic()
        while True:
            time.sleep(0.1)
            if not folder.is_dir():
                return
            with (folder / f"{name}.users").open("a") as users:
                if not _free(users.fileno()):
                    idle_since = time.monotonic()
            if time.monotonic() - idle_since > LINGER:
                with start_lock(folder, name), (folder / f"{name}.users").open("a") as users:
                    if _free(users.fileno()):
                        told.unlink(missing_ok=True)
                        break
    _remove_if_unused(folder)


def _free(users: int) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_if_unused(folder: Path) -> None:
    if not list(folder.glob("*.json")):
        shutil.rmtree(folder, ignore_errors=True)
