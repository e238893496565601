"""Processes that write into a store and end in a given way: forks of one process that has imported the backend.

with Host(backend, import_path) as host:
    ended = host.run(location, "SIGKILL", mode="r+")
    ended.status, ended.errors, ended.stuck
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

import tdstore
from tdstore.errors import StoreError, UnsupportedError
from tdstore.hookspecs import Backend
from tdstore.registry import registry
from tdstore.store import Cap, Store
from tdstore.testing.comparing import difference
from tdstore.testing.processes.warm import python
from tdstore.testing.setup import Leaves, fill, header_for, numbers
from tdstore.types import Mode, Read, Write, path_text
from tdstore.values import decode_value, encode_value

OLD: Leaves = {("a",): numbers(6, 4), ("g", "b"): numbers(5).long(), ("c",): numbers(70, 9).int()}
NEW: Leaves = {path: value + 1000 for path, value in OLD.items()}
HEADER = header_for(OLD, {"text": "of the last commit"})
CARRIED: Leaves = {("large",): torch.zeros(64, 1 << 17, dtype=torch.uint8)}
"""More than a library buffers: a writer has put some of its change into the files before it commits."""
REMARK = "kit: "
"""The prefix of lines that report faults."""
ORDERLY = (
    *("close", "with", "with-exception", "dropped", "dropped-in-thread"),
    *("script", "sys.exit", "exception", "forked", "spawned"),
)
"""Ends after which rows that were written are there."""
KILLS = ("SIGTERM", "os._exit", "SIGKILL")
"""Ends after which the last commit is there, or an error that says so."""


class Ended(NamedTuple):
    """The end of a process."""

    status: int
    """Its exit status, or minus the signal that ended it."""
    errors: str
    """What it wrote to stderr and stdout."""
    stuck: bool
    """Whether it had to be ended; `errors` then shows where each thread was."""

    @property
    def remarks(self) -> list[str]:
        """Return the faults that the process itself found."""
        return [line[len(REMARK) :] for line in self.errors.splitlines() if line.startswith(REMARK)]


class Host:
    """A process that has imported a backend and opened nothing: each event is a fork of it."""

    def __init__(self, backend: Backend, import_path: list[str]) -> None:
        code = "import sys, json; job = json.loads(sys.stdin.readline()); sys.path[:] = job['path']; "
        code += "from tdstore.testing.processes.events import serve; serve(job)"
        self._process = subprocess.Popen(
            [*python(), "-W", "ignore", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._backend = [backend.name, backend.opener]
        self._seen: set[str] = set()
        """Events that were asked for."""
        self._ask({"path": import_path + [p for p in sys.path if p], "backend": self._backend})

    def run(
        self, location: Any, event: str, *, mode: str, options: Mapping[str, Any] | None = None, patience: float = 20
    ) -> Ended:
        """Write in a separate process and end it.

        Args:
            location: a store that holds `OLD`, unless the mode is "w".
            event: one of `EVENTS`.
            mode: "r+", in which a container writes; "w", in which the store itself does, after `save_header`; or "r".
            options: of the opener; plain values.
            patience: seconds after which the process is ended and `stuck`.
        """
        job = {"backend": self._backend, "location": str(location), "event": event, "mode": mode, "patience": patience}
        job["first"] = event not in self._seen
        self._seen.add(event)
        job |= {"options": encode_value(dict(options or {})), "env": dict(os.environ), "cwd": os.getcwd()}
        return Ended(*self._ask(job))

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)

    def _ask(self, message: object) -> Any:
        assert self._process.stdin is not None, "it was started with a pipe"
        assert self._process.stdout is not None, "it was started with a pipe"
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process that starts events ended with status {self._process.wait()} (its error is above)"
        return json.loads(line)


_hosts: dict[str, Host] = {}


def host(backend: Backend, import_path: list[str]) -> Host:
    """Return the process for the opener of this backend. It ends with this process."""
    if backend.opener not in _hosts:
        _hosts[backend.opener] = Host(backend, import_path)
        if len(_hosts) == 1:
            atexit.register(_close, os.getpid())
    return _hosts[backend.opener]


def _close(owner: int) -> None:
    if os.getpid() == owner:
        for one in _hosts.values():
            one.close()
        _hosts.clear()


# -- in the host -----------------------------------------------------------------------------
def serve(first: Mapping[str, Any]) -> None:
    """Fork a process for each job, wait for it, and answer how it ended, until stdin ends."""
    torch.set_num_threads(1)
    registry().status()
    name, opener = first["backend"]
    registry().opener(Backend(name=name, opener=opener, summary="under test"))  # so that no fork has to import it
    answers = os.fdopen(os.dup(1), "w")
    print("null", file=answers, flush=True)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            answers.close()
            _begin(job, writing)
        os.close(writing)
        print(json.dumps(_watch(pid, reading, job["patience"])), file=answers, flush=True)
        os.close(reading)


def _watch(pid: int, reading: int, patience: float) -> Ended:
    """Wait for a process; one that does not end in time is ended, after it has printed where it hangs."""
    said, stuck = bytearray(), False
    until = time.monotonic() + patience
    while True:
        if select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
            data = os.read(reading, 1 << 16)
            said += data
            if data:
                continue
        elif not stuck:
            stuck, until = True, time.monotonic() + 2
            os.killpg(pid, signal.SIGABRT)  # faulthandler shows all threads
            continue
        break
    if stuck:
        os.killpg(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = said.decode(errors="replace")
    return Ended(status, text, stuck)


# -- in the process that ends ----------------------------------------------------------------
_main = types.ModuleType("__main__")
"""What a script has at module level is here."""


def _begin(job: Mapping[str, Any], errors: int) -> None:
    """Become the process of one event. Never returns."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (errors, 1), (errors, 2)):
        os.dup2(source, target)
    os.close(errors)
    faulthandler.enable()  # SIGABRT shows where the threads are, here and in forks
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.modules["__main__"] = _main
    try:
        EVENTS[job["event"]](job)
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(70)


def _remark(text: str) -> None:
    print(f"{REMARK}{text}", file=sys.stderr, flush=True)


def _backend(job: Mapping[str, Any]) -> Backend:
    name, opener = job["backend"]
    known = registry().backends()
    if name not in known:
        registry().register(Backend(name=name, opener=opener, summary="under test"))
        known = registry().backends()
    return known[name]


def _open(job: Mapping[str, Any], mode: Mode | None = None) -> Any:
    """Open a container over the location."""
    options = decode_value(job["options"])
    return tdstore.open(job["location"], storage=_backend(job).name, mode=mode or job["mode"], **options)


def _written(job: Mapping[str, Any]) -> Any:
    """Write rows without a commit: through a container, or ("w") into a new store."""
    if job["mode"] == "w":
        options = decode_value(job["options"])
        store = registry().open(_backend(job), job["location"], mode="w", **options)
        fill(store, OLD)
        store.save_header(HEADER)
        _write(store)
        return store
    td = _open(job)
    if job["mode"] == "r+":
        for path, value in NEW.items():
            td.set_(path, value)
    return td


def _write(store: Store) -> None:
    if Cap.PARTIAL_WRITE not in store.caps:
        store.write([Write(path, (), value) for path, value in NEW.items()])
        return
    for start, stop in ((0, 3), (3, None)):
        store.write([Write(p, (slice(start, stop or len(v), 1),), v[start:stop]) for p, v in NEW.items()])


def _close_it(job: Mapping[str, Any]) -> None:
    _written(job).close()
    os._exit(0)


def _leave_with(job: Mapping[str, Any]) -> None:
    with _written(job):
        pass
    os._exit(0)


def _leave_with_exception(job: Mapping[str, Any]) -> None:
    try:
        with _written(job):
            raise ZeroDivisionError
    except ZeroDivisionError:
        os._exit(0)


def _drop(job: Mapping[str, Any]) -> None:
    """Drop a container over rows that were written, in this thread or in another one, and read them."""
    box = [_open({**job, "mode": "r+"})] if job["mode"] == "r+" else [_made(job)]
    for path, value in NEW.items():
        box[0].set_(path, value)
    box.append(box)  # in a cycle: the collector finds it, not the last reference
    del box, value
    if job["event"] == "dropped":
        _collect_and_read(job)
    thread = threading.Thread(target=_collect_and_read, args=(job,))
    thread.start()
    thread.join()


def _collect_and_read(job: Mapping[str, Any]) -> None:
    """Collect what was dropped, look at its rows, and end the process."""
    gc.collect()
    found = _open(job, "r")  # opening waits for pending closes
    for path, value in NEW.items():
        differs = difference(found.get(path).cpu(), value)
        if differs:
            _remark(f"after the last handle was dropped, the next opening finds in {path}: {differs}")
    os._exit(0)


def _made(job: Mapping[str, Any]) -> Any:
    """Save a container, and return it."""
    td = tdstore.TensorDict({}, batch_size=[])
    for path, value in OLD.items():
        td[path] = value
    return td.save(job["location"], storage=_backend(job).name, **decode_value(job["options"]))


def _end_script(job: Mapping[str, Any]) -> None:
    vars(_main)["td"] = _written(job)
    if job["mode"] == "w":
        _end_as_interpreter(0)
    ctypes.pythonapi.Py_Exit(0)


def _exit(job: Mapping[str, Any]) -> None:
    try:
        vars(_main)["td"] = _written(job)
        sys.exit(3)
    except SystemExit:
        _end_as_interpreter(3)


def _raise(job: Mapping[str, Any]) -> None:
    try:
        vars(_main)["td"] = _written(job)
        raise RuntimeError("as it happens")
    except RuntimeError:
        _end_as_interpreter(1)


def _end_as_interpreter(status: int) -> None:
    """End in the order of the interpreter, but without emptying a thousand modules, which costs a fifth of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(_main).clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _work(job: Mapping[str, Any]) -> None:
    vars(_main)["td"] = _written(job)


def _end_forked(job: Mapping[str, Any]) -> None:
    process = multiprocessing.get_context("fork").Process(target=_work, args=(job,))
    process.start()
    process.join()
    os._exit(process.exitcode or 0)


def _end_spawned(job: Mapping[str, Any]) -> None:
    """Run in a process that `multiprocessing` spawns, once; else as in one, without two seconds of importing torch."""
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(dict(job),))
    if job["first"]:
        process.start()
        process.join()
        os._exit(process.exitcode or 0)
    status = process._bootstrap(parent_sentinel=None)  # type: ignore[attr-defined]  # what spawn_main calls
    _end_as_interpreter(status)


def _kill(number: int) -> Callable[[Mapping[str, Any]], None]:
    def event(job: Mapping[str, Any]) -> None:
        vars(_main)["td"] = _written(job)
        os.kill(os.getpid(), number)
        time.sleep(60)

    return event


def _end_at_once(job: Mapping[str, Any]) -> None:
    vars(_main)["td"] = _written(job)
    os._exit(0)


def _carry(job: Mapping[str, Any]) -> None:
    """Write, fork, let the child end in order, and end this process by a kill, or after a close.

    In two events the child closes what its parent opened before it ends.
    """
    closed = job["event"] in ("carried-closed", "carried-closed-by-both")
    opened = vars(_main)["td"] = _large_write(job) if closed else _written(job)
    pid = os.fork()
    if not pid:
        if job["event"] in ("carried-closed-in-child", "carried-closed-by-both"):
            with suppress(StoreError):
                opened.close()
        del opened
        if not closed:
            _end_as_interpreter(0)
        ctypes.pythonapi.Py_Exit(0)  # frees all objects: those of a library end as the library ends them
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        _remark(f"a forked child that did nothing ended with status {status}")
    if closed:
        did = "ended" if job["event"] == "carried-closed" else "called close() and ended"
        try:
            if job["mode"] == "w":
                opened.save_header(HEADER)
            opened.close()
        except Exception as error:
            _remark(f"the parent cannot commit after its forked child {did}: {type(error).__name__}: {error}")
    os._exit(0)


def _large_write(job: Mapping[str, Any]) -> Store:
    """Return a store that was opened alone, with no container to keep it, and has a large uncommitted write."""
    store = registry().open(_backend(job), job["location"], mode=job["mode"], **decode_value(job["options"]))
    if job["mode"] == "w":
        fill(store, {**OLD, **CARRIED})
    store.write([Write(path, (), value + 1) for path, value in CARRIED.items()])
    _write(store)
    return store


def _read_in_both(job: Mapping[str, Any]) -> None:
    """Read in a parent and in its forked child at once, through the store opened before."""
    store = registry().open(_backend(job), job["location"], mode="r", **decode_value(job["options"]))
    store.read([Read(path) for path in OLD])
    pid = os.fork()
    who = "the parent" if pid else "a forked child"
    try:
        for turn in range(60):
            paths = list(OLD)[:: 1 if (turn + bool(pid)) % 2 else -1]
            for path, got in zip(paths, store.read([Read(path) for path in paths]), strict=True):
                differs = difference(got, OLD[path])
                if differs:
                    _remark(f"{who} reads other values while its fork reads too: leaf {path_text(path)}: {differs}")
                    os._exit(0)
    except StoreError as error:
        if pid:  # a child may not be allowed to use resources of its parent
            _remark(f"the parent cannot read while a forked child reads too: {type(error).__name__}: {error}")
    except Exception as error:
        _remark(f"{who} cannot read while its fork reads too: {type(error).__name__}: {error}")
    if not pid:
        try:
            found = _open(job, "r")
            wrong = [path for path, value in OLD.items() if difference(found.get(path).cpu(), value)]
            if wrong:
                _remark(f"what a forked child opens for itself has other values in {wrong}")
        except UnsupportedError:
            pass  # a library that does not survive forks: refused by name, where it would wait for ever
        except Exception as error:
            _remark(f"a forked child cannot open the store for itself: {type(error).__name__}: {error}")
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        _remark(f"a forked child that reads what its parent opened ended with status {status}")
    os._exit(0)


EVENTS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "close": _close_it,
    "with": _leave_with,
    "with-exception": _leave_with_exception,
    "dropped": _drop,
    "dropped-in-thread": _drop,
    "script": _end_script,
    "sys.exit": _exit,
    "exception": _raise,
    "forked": _end_forked,
    "spawned": _end_spawned,
    "SIGTERM": _kill(signal.SIGTERM),
    "os._exit": _end_at_once,
    "SIGKILL": _kill(signal.SIGKILL),
    "carried-closed": _carry,
    "carried-closed-by-both": _carry,
    "carried-killed": _carry,
    "carried-closed-in-child": _carry,
    "both": _read_in_both,
}
