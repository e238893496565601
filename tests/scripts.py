"""Scripts that end as interpreters do, or when they are killed: each a fork of a process that has imported tdstore.

`tdstore.testing.processes.warm` leaves out the last step of an interpreter, which empties all modules, and what is
killed there is another process than the one that works. The first script costs what a fresh interpreter does, each
later one a fraction.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# A fork leaves the loop, and ends as an interpreter whose program is what it was sent.
_SERVER = """
import json, os, sys
import torch, tdstore
for _line in sys.stdin:
    _job = json.loads(_line)
    _pid = os.fork()
    if not _pid:
        break
    print(_pid, flush=True)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(_job["output"], os.O_WRONLY), 1)
os.dup2(os.open(_job["errors"], os.O_WRONLY), 2)
os.chdir(_job["cwd"])
os.environ.clear()
os.environ.update(_job["env"])
sys.argv[1:] = _job["argv"]
_code = compile(_job["code"], "<string>", "exec")
del _line, _job, _pid
exec(_code)
"""


@dataclass
class Script:
    """A script that was started."""

    pid: int
    status: int | None = None
    """Its exit status, or minus the signal that ended it, when it has ended."""
    errors: str = ""
    """What it wrote to its standard error, when it has ended."""


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    owner = os.getpid()
    atexit.register(lambda: server.communicate() if os.getpid() == owner else None)
    return server


@contextmanager
def started(code: str, *arguments: object, output: Path | None = None) -> Iterator[Script]:
    """Start a script as `python -W error -c CODE ARGUMENT...` would, in an empty folder; leaving it waits for the end.

    Args:
        code: of the script.
        arguments: of the script.
        output: what its standard output is written to, a pipe for example.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        errors, work = Path(folder, "errors"), Path(folder, "work")
        work.mkdir()
        errors.touch()
        if output is None:
            output = Path(folder, "output")
            output.touch()
        argv = [str(argument) for argument in arguments]
        job = {"code": code, "argv": argv, "cwd": str(work), "output": str(output), "errors": str(errors)}
        job["env"] = dict(os.environ)
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        script = Script(int(server.stdout.readline()))
        try:
            yield script
        except BaseException:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(script.pid, signal.SIGKILL)
            raise
        finally:
            script.status = int(server.stdout.readline())
            script.errors = errors.read_text()


def run(code: str, *arguments: object) -> Script:
    """Run a script, and wait for its end."""
    with started(code, *arguments) as script:
        pass
    return script
