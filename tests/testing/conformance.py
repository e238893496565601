"""Write `docs/reference/conformance.md`: `python -m tests.testing.conformance [BACKEND ...]`, some minutes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tdstore.testing.processes import warm
from tests.servers import redis_server

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "conformance.md"
ARGUMENTS: dict[str, list[str]] = {
    "memory": ["--no-location"],
    "shared": ["--location", "shm://kit-"],
    "memmap": ["--crash", "--dirty", "rows"],
    "tdz": ["--crash"],
    "h5": ["--crash", "--dirty", "rows"],
    "zarr": [],
    "icechunk": [],
    "remote": ["--location", "memory://kit-", "--one-process", "memory:// is the memory of one process"],
    "redis": ["--location", "redis://127.0.0.1:{port}/0/kit"],
}
"""Of each backend that needs no special machine: how it is checked."""


def command(backend: str) -> str:
    """What the page shows."""
    arguments = [f'"{a}"' if " " in a else a for a in ARGUMENTS[backend]]
    return " ".join(["python -m tdstore.testing", backend, *arguments, "--report"]).format(port=6379)


def report(backend: str, port: int = 0) -> str:
    """Run the kit, and return its tables."""
    arguments = [argument.format(port=port) for argument in ARGUMENTS[backend]]
    done = subprocess.run(
        [*warm.python(), "-W", "ignore", "-m", "tdstore.testing", backend, *arguments, "--report"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{backend}:\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def section(backend: str) -> str:
    """The part of the page about a backend."""
    found = re.search(rf"<!-- begin {backend} -->\n(.*?)<!-- end {backend} -->", PAGE.read_text(), re.DOTALL)
    assert found, f"{PAGE} has no section for {backend}"
    return found[1].strip()


def write(backends: list[str]) -> None:
    """Run the kit on these backends, and put the tables into the page."""
    for backend in backends:
        if backend == "redis":
            with redis_server() as server:
                tables = report(backend, server.port)
        else:
            tables = report(backend)
        block = f"```console\n$ {command(backend)}\n```\n\n{tables}\n"
        marked = f"<!-- begin {backend} -->\n{block}<!-- end {backend} -->"
        pattern = rf"<!-- begin {backend} -->\n.*?<!-- end {backend} -->"
        text, count = re.subn(pattern, lambda _, m=marked: m, PAGE.read_text(), flags=re.DOTALL)
        assert count == 1, f"{PAGE} has {count} sections for {backend}"
        PAGE.write_text(text)


if __name__ == "__main__":
    write(sys.argv[1:] or list(ARGUMENTS))
