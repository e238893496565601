"""Tests on a machine that lacks some of what `make install` gives: `TDSTORE_WITHOUT="ray moto nginx"`.

The tests that need one of the things named are deselected. A name is a package, a program (nginx, strace) or a server
(a key of `SERVERS` or `ALSO`); one that is not known here is an error. What is not named and is missing still fails its
tests, or skips them as before.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LACKING = frozenset(os.environ.get("TDSTORE_WITHOUT", "").split())

# Fixtures of conftest.py, and what they start.
SERVERS = {"redis": "redis-server", "s3": "moto", "rgw": "ceph", "azure": "npm", "pyright": "npm", "http": "nginx"}
# Tests that need something which neither their imports nor their fixtures tell, by the start of their names.
ALSO: dict[str, tuple[str, ...]] = {
    "agilerl": ("tests/porting/test_agilerl.py",),
    "dask": ("tests/convert/test_xarray_engine.py::test_chunks_of_dask",),
    "icechunk": ("tests/testing/test_life_page.py", "plugins/tdstore-icechunk/"),
    "mypy": ("tests/tensorclass/test_typing.py", "tests/reveal/"),
    "installation": ("tests/plugins/test_third_party.py",),  # of tdstore as a distribution
    "npm": (),
    "redis-server": ("tests/servers/", "tests/rl/test_full_places.py::test_a_full_server"),
    "strace": (),
}
IMPORTS = r"(?:^|\n)[ \t]*(?:from|import)[ \t]+{0}\b|importorskip\(\s*[\"']{0}[\"']"
AT_THE_TOP = r"(?:^|\n)(?:from|import)[ \t]+{0}\b"


def known() -> frozenset[str]:
    """The names that may be given, packages aside."""
    return frozenset({*SERVERS.values(), *ALSO})


def needs(path: Path, pattern: str = AT_THE_TOP) -> frozenset[str]:
    """What of `LACKING` a file of tests imports, or is listed for as a whole."""
    if not path.is_relative_to(ROOT) or path.suffix != ".py":
        return frozenset()
    name = path.relative_to(ROOT).as_posix()
    return _imported(path.read_text(), pattern) | _listed(name)


def cannot_collect(path: Path) -> bool:
    """Whether a file is not even imported."""
    return bool(LACKING) and path.is_file() and bool(needs(path))


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take away the tests that need what is lacking here."""
    if not LACKING:
        return
    gone = [item for item in items if needs_of(item)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if not needs_of(item)]


def needs_of(item: pytest.Item) -> frozenset[str]:
    """What of `LACKING` a test needs: by its fixtures, its parameters, what its code imports, or `ALSO`."""
    found = {SERVERS[name] for name in _fixtures(item) if name in SERVERS} & LACKING
    for function in _functions(item):
        found |= _imports_of(function)
    name = item.path.relative_to(ROOT).as_posix() if item.path.is_relative_to(ROOT) else ""
    return frozenset(found) | _listed(f"{name}::{item.name}")


def _fixtures(item: pytest.Item) -> Iterator[str]:
    yield from getattr(item, "fixturenames", ())
    parameters = getattr(item, "callspec", None)
    for value in () if parameters is None else parameters.params.values():
        if isinstance(value, str):
            yield from value.split()


def _functions(item: pytest.Item) -> Iterator[object]:
    if (function := getattr(item, "function", None)) is not None:
        yield function
    info = getattr(item, "_fixtureinfo", None)
    for definitions in () if info is None else info.name2fixturedefs.values():
        yield definitions[-1].func


@functools.cache
def _imports_of(function: object) -> frozenset[str]:
    try:
        source = inspect.getsource(inspect.unwrap(function))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return frozenset()
    return _imported(source, IMPORTS)


def _imported(source: str, pattern: str) -> frozenset[str]:
    return frozenset(name for name in LACKING if re.search(pattern.format(re.escape(name)), source))


def _listed(name: str) -> frozenset[str]:
    return frozenset(thing for thing in LACKING & ALSO.keys() if ALSO[thing] and name.startswith(ALSO[thing]))
