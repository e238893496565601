"""Tiers of the suite: markers that each test gets from what it uses, so that nobody marks by hand.

    quick   no server, no other process, no peer, no file of a backend:  `make test-quick`, under a minute
    local   quick, and files and processes on this machine:              `make test-local`, under five minutes
    (all)   servers, the peer, type checkers and sweeps too:             `make test`

A test is a `server`, `peer`, `sweep`, `types`, `process` or `disk` test when its function, its fixtures or the helpers
they call name one: the call graph is followed through the modules of the tests and the kit. What that cannot see (a
method of tdstore that starts processes) stands in `FOLDERS`; a test that starts a process or server beyond its tier
fails there.
"""

from __future__ import annotations

import functools
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TRAITS = {
    "server": "uses a server, or a program that may not be installed",
    "peer": "compares with the tensordict package, torchrl or other libraries",
    "sweep": "kills a process, or fails its system calls, at each of many points",
    "types": "runs a type checker, which has a core for itself",
    "process": "starts other processes",
    "disk": "writes files",
    "compile": "compiles or exports a program with torch",
    "cuda": "needs a GPU, and TDSTORE_CUDA=1",
}
TIERS = {
    "quick": "no server, no process, no peer, no files; seconds each at most",
    "local": "quick, files and processes; no server, no comparison with a peer, no type checker, no sweep",
}
SERVERS = frozenset({"redis", "s3", "rgw", "azure", "http", "pyright"})  # fixtures of conftest.py
MODULES = {
    "tests.servers": "server",
    "moto": "server",
    "tensordict": "peer",
    "torchrl": "peer",
    "subprocess": "process",
    "multiprocessing": "process",
    "torch.multiprocessing": "process",
    "concurrent.futures.process": "process",
    "loky": "process",
    "ray": "process",
    "distributed": "process",
    "tdstore.testing.crash": "sweep",
    "tdstore.testing.processes": "process",
}
NAMES = {"fork": "process", "spawn": "process", "num_workers": "process", "tmp_path": "disk"}
# Folders, files and tests whose trait no name in them tells.
FOLDERS = {
    "tests/differential/": "peer",
    "tests/porting/": "peer",
    "tests/compile/": "compile",
    "tests/cuda/": "cuda",
    "tests/cuda/test_training.py::test_compiled": "process",
    "tests/builtin/test_cuda.py": "cuda",
    "tests/modules/test_params.py::test_compiled": "compile",
    "tests/torch_integration/test_export.py": "compile",
    "tests/torch_integration/test_regions.py": "compile",
    "tests/tensorclass/test_compile.py": "compile",
    "tests/faults/": "sweep",
    "tests/bytestore/test_conformance.py::test_refusal_of_the_storage": "sweep",
    "tests/builtin/memmap/test_faults_commit.py": "sweep",
    "tests/builtin/memmap/test_faults_inplace.py": "sweep",
    "tests/builtin/memmap/test_steps.py::test_killed_at_every_call": "sweep",
    "tests/builtin/tdz/test_writers.py::test_killed_updates_are_there_or_not": "sweep",
    "tests/container/distribute/test_build_formats.py::test_workers_killed_at_random": "sweep",
    "tests/data_loading/test_killed.py": "sweep",
    "tests/io/test_housekeeping.py::test_a_delete_that_is_killed": "sweep",
    "tests/io/test_housekeeping_refusals.py::test_a_killed_delete_leaves_all_or_nothing": "sweep",
    "tests/builtin/shared/test_shared_faults.py": "sweep",
    "tests/rl/test_crash.py": "sweep",
    "tests/testing/test_crash_kit.py": "sweep",
    "plugins/tdstore-h5/tests/test_crash.py": "sweep",
    "plugins/tdstore-h5/tests/test_kill_sweep.py": "sweep",
    "plugins/tdstore-zarr/tests/test_crash.py": "sweep",
    "plugins/tdstore-icechunk/tests/test_crash.py": "sweep",
    "tests/builtin/shared/test_processes.py": "process",
    "tests/parallel/test_map_stored.py": "process",
    "tests/reveal/": "types",
    "tests/tensorclass/test_typing.py": "types",
}
# What is not even imported for a tier.
BEYOND = {
    "quick": ("plugins/", "tests/differential/", "tests/porting/", "tests/faults/", "tests/compile/"),
    "local": ("tests/differential/", "tests/porting/", "tests/faults/", "tests/reveal/"),
}
IMPORTS_PEER = re.compile(r"^(import|from) (tensordict|torchrl)\b", re.MULTILINE)
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}  # events that Python tells an audit hook
FOLLOWED = ("tests", "plugins", "tdstore/testing")


def add_markers(items: Iterable[pytest.Item]) -> None:
    """Give each test the markers of its traits and of the tiers that run it."""
    for item in items:
        marks = traits(item)
        if item.get_closest_marker("slow") is None:
            if not marks & {"server", "peer", "types", "sweep"}:
                marks.add("local")
                if not marks & {"process", "disk", "compile"}:
                    marks.add("quick")
        for mark in sorted(marks):
            item.add_marker(mark)


def traits(item: pytest.Item) -> set[str]:
    """Return which of `TRAITS` a test has."""
    path, folders = listed(item.path)
    name = f"{path}::{item.name}"
    found = {FOLDERS[start] for start in folders if name.startswith(start)}
    if (parameters := getattr(item, "callspec", None)) is not None:
        for value in parameters.params.values():
            found |= {"server"} if isinstance(value, str) and SERVERS & set(value.split()) else set()
            found |= reached(value)
    return found | traits_of_functions(item)


@functools.cache
def listed(path: Path) -> tuple[str, list[str]]:
    """Return the path of a file in the checkout, and what of `FOLDERS` may be said of its tests."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return name, [start for start in FOLDERS if name.startswith(start) or start.startswith(name)]


def traits_of_functions(item: pytest.Item) -> frozenset[str]:
    """Return the traits of a test's function and of its fixtures, which are one for all of its parameters."""
    info = getattr(item, "_fixtureinfo", None)
    key = (id(info), getattr(item, "function", None))
    if info is None or key not in _of_functions:
        fixtures = set(getattr(item, "fixturenames", ()))
        found = {"server"} if fixtures & SERVERS else set()
        found |= {"disk"} if fixtures & {"tmp_path", "tmp_path_factory"} else set()
        found = found.union(*map(reached, functions_of(item)))
        _of_functions[key] = info, frozenset(found)
    return _of_functions[key][1]


# By the id of what pytest knows of a function's fixtures, which is kept here so that no other gets that id.
_of_functions: dict[tuple[int, Any], tuple[Any, frozenset[str]]] = {}


def functions_of(item: pytest.Item) -> Iterator[Any]:
    """The function of a test, and those of the fixtures that it asks for."""
    if (function := getattr(item, "function", None)) is not None:
        yield function
    info = getattr(item, "_fixtureinfo", None)
    for definitions in () if info is None else info.name2fixturedefs.values():
        yield definitions[-1].func


def reached(thing: Any) -> frozenset[str]:
    """Return the traits of a function or class, and of the ones of the tests that it names."""
    function = getattr(thing, "__func__", thing)
    if not isinstance(function, (FunctionType, type)):
        return frozenset()
    return _reached(function)


@functools.cache
def _reached(start: FunctionType | type) -> frozenset[str]:
    found: set[str] = set()
    seen: set[int] = set()
    todo: list[Any] = [start]
    while todo:
        thing = todo.pop()
        if id(thing) not in seen:
            seen.add(id(thing))
            _, own, named = _known.get(id(thing)) or looked_at(thing)
            found |= own
            todo += named
    return frozenset(found)


# The traits that each thing has by itself, and what it names, by its id: tests share most of their helpers.
_known: dict[int, tuple[Any, frozenset[str], list[Any]]] = {}


def looked_at(thing: Any) -> tuple[Any, frozenset[str], list[Any]]:
    """Return a thing, the traits that it has by itself, and what it names; and keep that."""
    own: set[str] = set()
    named: list[Any] = []
    inner = getattr(thing, "__wrapped__", thing)
    if trait := trait_of(inner):
        own = {trait}
    elif isinstance(inner, type) and followed(inner.__module__):
        named = [getattr(member, "__func__", member) for member in vars(inner).values()]
    elif isinstance(inner, FunctionType) and followed(inner.__module__):
        helpers = helpers_of(inner)
        for name, modules in set(names(inner.__code__)):
            own |= {NAMES[name]} if name in NAMES else set()
            own |= {trait for trait in [module_trait(name)] if trait and modules}
            named += values(name, inner, helpers)
    _known[id(thing)] = thing, frozenset(own), named
    return _known[id(thing)]


def helpers_of(function: FunctionType) -> list[ModuleType]:
    """The modules of tests that a function names."""
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    return [module for module in named if isinstance(module, ModuleType) and followed(module.__name__)]


def values(name: str, function: FunctionType, helpers: list[ModuleType]) -> list[Any]:
    """What a name in a function stands for: a global of its module, or one of a module of tests that it names."""
    space = function.__globals__
    if name in space:
        return [space[name]]
    return [vars(module)[name] for module in helpers if name in vars(module)]


def names(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Each name in a code and in those within it, and whether it may be an import."""
    imports = "." in "".join(code.co_names) or bool(set(code.co_names) & set(MODULES))
    yield from ((name, imports) for name in code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names(constant)
        elif isinstance(constant, tuple):  # names of keyword arguments
            yield from ((name, False) for name in constant if isinstance(name, str))


def trait_of(thing: Any) -> str | None:
    """Return the trait of a module, or of what is defined in one."""
    if isinstance(thing, ModuleType):
        return module_trait(thing.__name__)
    return module_trait(getattr(thing, "__module__", None) or type(thing).__module__)


@functools.cache
def module_trait(name: str) -> str | None:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if trait := MODULES.get(".".join(parts[:end])):
            return trait
    return None


@functools.cache
def followed(module: str) -> bool:
    """Whether a module is one of the tests or of the kit."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or not Path(file).is_relative_to(ROOT):
        return False
    return Path(file).relative_to(ROOT).as_posix().startswith(FOLLOWED)


# -- a test within its tier -----------------------------------------------------------------
_running: pytest.Item | None = None  # the test that is running, when it is of a tier


@contextmanager
def within(item: pytest.Item) -> Iterator[None]:
    """Refuse, while a test runs, what is beyond its tier."""
    global _running
    _running = item if item.get_closest_marker("local") is not None else None
    try:
        yield
    finally:
        _running = None


def refuse(trait: str) -> None:
    """Fail the running test if it is of a tier that has nothing with a trait.

    Raises:
        Failed: the test has a marker that it should not have.
    """
    tier = "local" if trait == "server" else "quick"
    if _running is not None and _running.get_closest_marker(tier) is not None:
        pytest.fail(f"{_running.nodeid} is a {tier} test and starts a {trait}: name it in FOLDERS of tests/tiers.py")


def _audit(event: str, _: tuple[Any, ...], starts: set[str] = STARTS) -> None:
    if event in starts:  # an argument: at the end of the interpreter the names of this module are gone
        refuse("process")


platform.processor()  # asks a process once, and h5py asks for it when it is imported
sys.addaudithook(_audit)


def is_beyond(path: Path, expression: str) -> bool:
    """Whether a file or folder is not collected for `-m EXPRESSION`."""
    folders = BEYOND.get(expression)
    if folders is None or not path.is_relative_to(ROOT):
        return False
    if f"{path.relative_to(ROOT).as_posix()}/".startswith(folders):
        return True
    # Importing the peer takes seconds in each process, more than the few quick tests of such a file.
    return expression == "quick" and path.suffix == ".py" and IMPORTS_PEER.search(path.read_text()) is not None
