"""Imports of other people's code work when the package's name is replaced."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tdstore
from tests.peer import is_adopted

from .imports import IMPORTS, LEFT_OUT, LEFT_OUT_15

NAMES = [(module, name) for module, groups in IMPORTS.items() for names in groups for name in names.split()]
MODULES = sorted(set(IMPORTS) - {"tensordict"})


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda part: str(part))
@pytest.mark.parametrize("package", ["tensordict", "tdstore"])
def test_the_name_is_imported(package: str, module: str, name: str) -> None:
    pytest.importorskip("tensordict")
    if package == "tensordict" and is_adopted((module, name), LEFT_OUT_15):
        with pytest.raises(ImportError):
            exec(f"from {module} import {name}")
        return
    namespace: dict[str, object] = {}
    exec(f"from {module.replace('tensordict', package, 1)} import {name}", namespace)
    assert name in namespace


# A process that has imported torch, and nothing of tdstore, is forked for each line.
ALONE = """
import os, sys, torch
assert not any(name.partition(".")[0] == "tdstore" for name in sys.modules)
for line in sys.argv[1:]:
    if not os.fork():
        exec(line)
        os._exit(0)
    assert os.wait()[1] == 0, line
"""


def test_each_import_stands_alone() -> None:
    """A process whose first import is one of these paths, whichever it is."""
    lines = []
    for module in MODULES:
        names = ", ".join(name for where, name in NAMES if where == module)
        lines.append(f"from {module.replace('tensordict', 'tdstore', 1)} import {names}")
    command = [sys.executable, "-W", "ignore", "-c", ALONE, *lines]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", MODULES)
def test_a_path_gives_the_objects_of_the_top_level(module: str) -> None:
    ours = importlib.import_module(module.replace("tensordict", "tdstore", 1))
    for where, name in NAMES:
        if where == module and hasattr(tdstore, name):
            assert getattr(ours, name) is getattr(tdstore, name)


def test_modules_do_not_hide_the_functions_of_their_names() -> None:
    import tdstore.memmap
    import tdstore.tensorclass

    assert tdstore.memmap(tdstore.TensorDict(a=torch.ones(2))).is_memmap()
    assert tdstore.is_tensorclass(tdstore.tensorclass(type("T", (), {"__annotations__": {"a": torch.Tensor}})))


@pytest.mark.parametrize("name", ["base", "functional", "memmap", "nn", "persistent", "tensordict", "utils"])
def test_the_modules_hold_names_and_no_code(name: str) -> None:
    path = Path(tdstore.__file__).parent / f"{name}.py"
    for node in ast.parse(path.read_text()).body:
        assert isinstance(node, (ast.ImportFrom, ast.Expr, ast.Assign)), ast.unparse(node)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ImportError, match="Stores"):
        from tdstore.store import Stores  # noqa: F401


@pytest.mark.parametrize("library", ["torchrl"])
def test_the_table_has_all_that_the_library_imports(library: str) -> None:
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        pytest.skip(f"{library} is not installed")
    known = {*NAMES}
    for lines in LEFT_OUT.values():
        for line in lines:
            module, names = line.split(": ")
            known |= {(module, name) for name in names.split()}
    found = set()
    for path in Path(spec.origin).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tensordict":
                found |= {(node.module, alias.name) for alias in node.names if node.level == 0}
    assert len(found) > 50
    assert found - known == set()
