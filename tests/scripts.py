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
if _job["warnings"] != "error":
    import warnings
    sys.warnoptions[:] = [_job["warnings"]]  # what multiprocessing starts has them too
    warnings.simplefilter(_job["warnings"])
    del warnings
_code = compile(_job["code"], "<string>", "exec")
del _line, _job, _pid
exec(_code)
"""
_FILE = """
__file__ = {path!r}
with open(__file__) as _file:
    _code = compile(_file.read(), __file__, "exec")
del _file
exec(_code)
"""


@dataclass
class Script:
    """A script that was started."""

    pid: int
    status: int | None = None
    """Its exit status, or minus the signal that ended it, when it has ended."""
    output: str = ""
    """What it wrote to its standard output, when it has ended."""
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
def started(code: str, *arguments: object, output: Path | None = None, warnings: str = "error") -> Iterator[Script]:
    """Start a script as `python -W error -c CODE ARGUMENT...` would, in an empty folder; leaving it waits for the end.

    Args:
        code: of the script.
        arguments: of the script.
        output: what its standard output is written to, a pipe for example.
        warnings: what becomes of them.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        errors, work = Path(folder, "errors"), Path(folder, "work")
        work.mkdir()
        errors.touch()
        kept = Path(folder, "output")
        kept.touch()
        argv = [str(argument) for argument in arguments]
        job: dict[str, object] = {
            "code": code,
            "argv": argv,
            "cwd": str(work),
            "output": str(output or kept),
            "errors": str(errors),
        }
        job |= {"env": dict(os.environ), "warnings": warnings}
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
            script.output, script.errors = kept.read_text(), errors.read_text()


def run(code: str, *arguments: object, warnings: str = "error") -> Script:
    """Run a script, and wait for its end."""
    with started(code, *arguments, warnings=warnings) as script:
        pass
    return script


def run_file(path: Path, *arguments: object, warnings: str = "error") -> Script:
    """Run a file as `python -W error FILE ARGUMENT...` would; processes of multiprocessing can import it."""
    return run(_FILE.format(path=str(path)), *arguments, warnings=warnings)
