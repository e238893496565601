"""Processes that start at once are like fresh ones in what a program can see of its command."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tdstore.testing.processes import warm
from tdstore.testing.processes.warm import python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is sys.executable itself")
SEEN = """
import atexit, os, sys
print(__name__, sys.argv[1:], os.getcwd(), os.environ["WORD"], sys.path[1], sorted(n for n in globals() if n[0] != "_"))
print(sys.stdin.read().upper(), file=sys.stderr)
class Last:
    def __del__(self): print("last")
kept = Last()
atexit.register(print, "before")
sys.exit(3)
"""


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*python(), *arguments], capture_output=True, text=True, check=False, **options)


def test_a_command_has_what_it_was_given(tmp_path: Path) -> None:
    env = {**os.environ, "WORD": "spoken", "PYTHONPATH": str(tmp_path)}
    done = run("-c", SEEN, "one", "two", cwd=tmp_path, env=env, input="in")
    assert done.stdout == (
        f"__main__ ['one', 'two'] {tmp_path} spoken {tmp_path} ['atexit', 'os', 'sys']\nbefore\nlast\n"
    )
    assert (done.returncode, done.stderr) == (3, "IN\n")
    assert run("-c", "import os; print('WORD' in os.environ)").stdout == "False\n"


def test_it_ends_as_its_program_does() -> None:
    done = run("-c", "1 / 0")
    assert (done.returncode, done.stderr.splitlines()[1:]) == (
        1,
        ['  File "<string>", line 1, in <module>', "ZeroDivisionError: division by zero"],
    )
    assert run("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)").returncode == -9
    assert (run("-c", "raise SystemExit('why')").returncode, run("-c", "exit(None)").returncode) == (1, 0)
    assert "name" in run("-m", "this_is_no_module_name").stderr
    assert run("-m", "calendar", "2026", "2").stdout.startswith("   February 2026")


def test_nobody_sees_what_another_did() -> None:
    run("-c", "import tdstore, sched; tdstore.mine = 1")
    seen = "import sys, tdstore, torch; print(hasattr(tdstore, 'mine'), 'sched' in sys.modules, 'h5py' in sys.modules)"
    assert run("-c", seen).stdout == "False False False\n"
    assert run("-c", "import torch; print(torch.ones(10**6).sum().item())").stdout == "1000000.0\n"


def test_a_setting_in_the_environment_of_the_server_is_not_that_of_its_processes(monkeypatch) -> None:
    monkeypatch.setattr(warm, "_address", "")
    with monkeypatch.context() as patch:
        patch.setenv("LIST_TO_STACK", "0")  # as tensordict sets it, for as long as a test wants
        python()
    done = run("-c", "import tdstore; print(tdstore.list_to_stack())")
    assert done.stdout == "True\n"


def test_a_killed_command_takes_its_program_along() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with subprocess.Popen([*python(), "-c", code], stdout=subprocess.PIPE, text=True) as command:
        pid = int(command.stdout.readline())
        command.kill()
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_program_can_start_others() -> None:
    code = "import subprocess; from tdstore.testing.processes.warm import python; "
    code += "print(python()[-1], subprocess.run([*python(), '-c', 'print(5)'], capture_output=True).stdout)"
    assert run("-c", code).stdout == f"{python()[-1]} b'5\\n'\n"


def test_the_server_ends_with_its_process() -> None:
    code = "import os; from tdstore.testing.processes.warm import python; print(os.path.dirname(python()[-1]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "tdstore-warm-" in done.stdout
    assert not os.path.exists(done.stdout.strip())
