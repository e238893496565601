"""Python processes that start at once: forks of one that has imported torch and tdstore, and has run nothing else.

    subprocess.run([*python(), "-c", "import tdstore; ...", "an argument"])

A fresh interpreter spends two seconds of CPU importing torch. A process started here is otherwise like a fresh one:
its own arguments, environment, folder, streams, `__main__`, exit status. It does not heed: `PYTHON*` variables other
than `PYTHONPATH`, those that `tdstore.settings` reads as it is imported, options other than `-W ACTION`, `-c` and `-m`,
and more than one thread of OpenMP.

Each command is a small process that passes its streams to the server and waits: killing it kills the process that it
stands for. It runs this file without tdstore, so everything here is from the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterable

_LENGTH = 8
_READ_EARLY = ("PYTHON", "LIST_TO_STACK", "CAPTURE_NONTENSOR_STACK")
"""Variables that the server must not have: what they say when it starts would hold for all of its processes."""
_MOST = 64
"""Descriptors that a command may pass."""
_address = ""  # where the server of this process listens


def python(passed: Iterable[int] = ()) -> list[str]:
    """Return a command that stands for `sys.executable`, and start the server that it needs.

    Where forking is not safe (on all systems but Linux) it is `sys.executable` itself.

    Args:
        passed: descriptors that the command inherits and its program is to have, under the same numbers.
    """
    global _address
    if sys.platform != "linux":
        return [sys.executable]
    _address = _address or _start()
    return [sys.executable, "-I", "-S", __file__, _address, *(f"--pass={number}" for number in passed)]


def _start() -> str:
    """Start the server of this process; it ends with it. Returns the address of the server."""
    import atexit
    import shutil
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="tdstore-warm-")  # for this user only
    address = os.path.join(folder, "socket")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    # The server keeps the path that it starts with, which is a fresh interpreter's, and finds tdstore by ours.
    code = "import sys; path = sys.path[1:]; sys.path[:0] = sys.argv[2:]; "
    code += "from tdstore.testing.processes.warm import serve; serve(int(sys.argv[1]), path)"
    hidden = {name: value for name, value in os.environ.items() if not name.startswith(_READ_EARLY)}
    server = subprocess.Popen(
        [sys.executable, "-c", code, str(listening.fileno()), *(entry for entry in sys.path if entry)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[listening.fileno()],
        start_new_session=True,
        env={**hidden, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    listening.close()
    owner = os.getpid()

    def end() -> None:
        if os.getpid() == owner:
            server.communicate()
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return address


def serve(listening: int, path: list[str]) -> None:
    """Fork a process for each command that comes, until stdin ends; `path` is that of a fresh interpreter."""
    global _address
    import contextlib
    import gc
    import select

    gc.collect()
    gc.freeze()  # so that a collection in a fork does not write to all that it shares with us
    server = socket.socket(fileno=listening)
    _address = server.getsockname()  # a program that asks for processes of its own gets them here too
    while 0 not in select.select([server.fileno(), 0], [], [])[0]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # a keeper that is done
        command, _ = server.accept()
        if not os.fork():
            server.close()
            _keep(command, path)
        command.close()


def _keep(command: socket.socket, path: list[str]) -> None:
    """Fork the program's process, kill it if its command dies, and report how it ended. Never returns."""
    import contextlib
    import select

    head, streams, _, _ = socket.recv_fds(command, _LENGTH, _MOST)
    job = json.loads(_receive(command, int.from_bytes(head, "big")))
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing)
    pid = os.fork()
    if not pid:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        command.close()
        for number in (reading, writing):
            os.close(number)
        _move([0, 1, 2, *job.pop("passed")], streams)
        _run(path, **job)
    for stream in streams:
        os.close(stream)  # its reader waits for all its writers
    ready, _, _ = select.select([command.fileno(), reading], [], [])
    if reading not in ready:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # the receiver has ended
        command.sendall(str(status).encode())
    os._exit(0)


def _move(numbers: list[int], found: list[int]) -> None:
    """Give descriptors other numbers, which some of them may have now."""
    import fcntl

    free = max(numbers) + 1
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free) for fd in found]
    for fd in found:
        os.close(fd)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _run(path: list[str], cwd: str, env: dict[str, str], argv: list[str]) -> None:
    """Run the program with the folder and the environment of its command, and end as it does. Never returns.

    Args:
        path: that of a fresh interpreter.
        cwd: the folder.
        env: the environment.
        argv: the arguments.
    """
    import atexit
    import gc
    import importlib
    import runpy
    import threading
    import types
    import warnings

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    while argv[0] == "-W":
        warnings.simplefilter(argv[1])  # type: ignore[arg-type]
        argv = argv[2:]
    option, program, *sys.argv[1:] = argv
    sys.argv[0] = option
    sys.path[:] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *path]
    importlib.invalidate_caches()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    status = 0
    try:
        if option == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            assert option == "-c", f"{option} is not understood here"
            exec(compile(program, "<string>", "exec"), vars(main))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this file's frame
        sys.excepthook(type(error), error, error.__traceback__)
    # In the interpreter's order; its last step, emptying a thousand modules, costs more than most programs.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(main).clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 0xFF)


def _receive(stream: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = stream.recv(size - len(data))
        if not part:
            raise EOFError("the command ended before it had said what to run")
        data += part
    return data


def _command() -> None:
    """Run as the command: `warm.py SOCKET [--pass=FD...] [-W ACTION] -c CODE | -m MODULE [ARGUMENT...]`."""
    address, *arguments = sys.argv[1:]
    passed = []
    while arguments[0].startswith("--pass="):
        passed.append(int(arguments.pop(0).partition("=")[2]))
    seen = {"argv": arguments, "passed": passed, "cwd": os.getcwd(), "env": dict(os.environ)}
    job = json.dumps(seen).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(job).to_bytes(_LENGTH, "big")], [0, 1, 2, *passed])
        server.sendall(job)
        answer = server.recv(64)
    status = int(answer) if answer else 70
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    _command()
