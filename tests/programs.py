"""Programs, files of Python, that run as forks of a process that has imported torch and tdstore.

They save the two seconds of CPU of each start, see `tdstore.testing.processes.warm`. What a program is killed by must
not be waited for: where that matters, as where the end of the interpreter does, `tests/scripts.py` runs it.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tdstore.testing.processes import warm

_RUN = "import os, runpy, sys; del sys.argv[0]; sys.path[0] = os.path.dirname(sys.argv[0]); "
_RUN += "runpy.run_path(sys.argv[0], run_name='__main__')"


def command(program: Path, *arguments: object, interpreter: Path | None = None) -> list[str]:
    """Return a command that stands for `python PROGRAM ARGUMENT...`.

    Args:
        program: a file, or a folder with a `__main__.py`.
        arguments: of the program.
        interpreter: what the program finds as `sys.executable`, see `make_interpreter`.
    """
    run = f"import sys; sys.executable = {str(interpreter)!r}; {_RUN}" if interpreter else _RUN
    return [*warm.python(), "-c", run, str(program), *map(str, arguments)]


def make_interpreter(folder: Path) -> Path:
    """Make an executable file in a folder that runs files as `command` does and else is Python, and return its path."""
    path = folder / "python"
    files = shlex.join([*warm.python(), "-c", _RUN])
    path.write_text(
        f'#!/bin/sh\ncase "$1" in *.py) exec {files} "$@" ;; esac\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    path.chmod(0o755)
    return path
