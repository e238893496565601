"""What comes from npm: `.ci/npm.txt` pins it, and `.ci/run` installs it into `.servers`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.process import MissingServer, find_program

ROOT = Path(__file__).resolve().parents[2]
MODULES = ROOT / ".servers" / "node_modules"
# All in one command: an install removes what it was not told.
HINT = "npm install --no-audit --no-fund --no-save --prefix .servers $(cat .ci/npm.txt) (in the repository's root)"


@contextmanager
def pyright() -> Iterator[list[str]]:
    """The command of the type checker pyright, which needs node and no network. PyPI's one would download itself."""
    node = find_program("node", "apt-get install nodejs")
    script = MODULES / "pyright" / "index.js"
    if not script.exists():
        raise MissingServer(f"needs pyright: {HINT}")
    yield [node, str(script)]
