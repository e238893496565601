"""Scripts that run to the real end of their interpreter, each in a fork of one that has imported torch and tdstore.

`tdstore.testing.processes.warm` leaves out the last step of an interpreter, which empties all modules: for tests of
what happens there. The first script costs what a fresh interpreter does, each later one a tenth.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# A fork leaves the loop, and ends as an interpreter whose program is what it was sent.
_SERVER = """
import json, os, sys
import torch, tdstore
for _line in sys.stdin:
    _job = json.loads(_line)
    if not os.fork():
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(_job["output"], os.O_WRONLY), 1)
os.dup2(os.open(_job["errors"], os.O_WRONLY), 2)
os.chdir(_job["cwd"])
sys.argv[1:] = _job["argv"]
_code = compile(_job["code"], "<string>", "exec")
del _line, _job
exec(_code)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    owner = os.getpid()
    atexit.register(lambda: server.communicate() if os.getpid() == owner else None)
    return server


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script as `python -W error -c CODE ARGUMENT...` would, in an empty folder, and wait for its end."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    argv = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        work = Path(folder, "work")
        work.mkdir()
        output.touch()
        errors.touch()
        job = {"code": code, "argv": argv, "cwd": str(work), "output": str(output), "errors": str(errors)}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        status = server.stdout.readline()
        assert status, "the process that is forked has ended"
        return subprocess.CompletedProcess(argv, int(status), output.read_text(), errors.read_text())
