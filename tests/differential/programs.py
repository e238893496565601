"""Programs as text, run with the peer's names and with ours.

    @programs('''
    TensorDict({"a": torch.zeros(3)}, [3])["a"]
    ---
    td = TensorDict({"a": torch.zeros(3)}, [3])
    td[0]
    ''')
    def test_subject(source: str) -> None:
        check(source)

A program has the public names of the package, `torch`, `np` and `tmp`, the name of an empty folder. Its result is
its last expression.

A program that has the line `# as since 0.15` is one in which ours does what the peer does since that version,
and did not before.
"""

from __future__ import annotations

import ast
import importlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda import mode
from tests.peer import BEFORE_15

from .oracle import OURS, PEER, Raised, Side, differences, outcome

NEWER = "# as since 0.15\n"
PEER_MODULES = ("tensordict", "tensordict.utils", "tensordict.base", "tensordict.tensorclass", "tensordict.functional")
ALSO = ("dense_stack_tds", "is_leaf_nontensor", "MetaData", "is_leaf_nontensor", "UnbatchedTensor", "is_non_tensor")
"""Names that the peer has in modules of its own."""


def programs(text: str) -> Any:
    """Parametrise a test over the programs of a text, which lines `---` part."""
    sources = [part.strip() for part in text.split("\n---\n")]
    assert len(set(sources)) == len(sources), "a program is there twice"
    return pytest.mark.parametrize("source", sources)


def result(source: str, side: Side) -> Any:
    """The described outcome of a program on one side."""
    return _run(source, side, lambda run: outcome(run, forgive=side.is_peer))


def check_error(source: str) -> None:
    """Run a program that both sides refuse: ours is caught as the built-in exceptions that the peer's is caught as."""
    want, got = (_run(source, side, _raised) for side in (PEER, OURS))
    # Since 0.15 the peer has classes of its own over several of these.
    kinds = {kind for kind in type(want).__mro__ if kind.__module__ == "builtins"} - set(Exception.__mro__)
    assert kinds, want
    assert all(isinstance(got, kind) for kind in kinds), f"{source}\nexpected {want!r}, got {got!r}"


def _raised(run: Callable[[], object]) -> Exception:
    try:
        found = run()
    except Exception as error:
        return error
    raise AssertionError(f"nothing is raised, the result is a {type(found).__name__}")


def namespace(side: Side, module_name: str) -> dict[str, Any]:
    """The names that a program has: torch, numpy and the public names of the package."""
    names: dict[str, Any] = {"torch": torch, "np": np, "Any": Any, "M": side, "__name__": module_name}
    names.update({name: getattr(side.module, name) for name in dir(side.module) if not name.startswith("_")})
    for module in map(importlib.import_module, PEER_MODULES if side.is_peer else ()):
        names.update({name: getattr(module, name) for name in ALSO if name not in names and hasattr(module, name)})
    return names


def _run(source: str, side: Side, how: Callable[[Callable[[], object]], Any]) -> Any:
    names = namespace(side, __name__)
    names["tmp"] = folder = tempfile.mkdtemp()
    body = ast.parse(source).body
    last = body.pop()
    assert isinstance(last, ast.Expr), "a program ends with an expression"

    def run() -> Any:
        mode.seed(0)
        exec(compile(ast.Module(body, []), "program", "exec", dont_inherit=True), names)
        return eval(compile(ast.Expression(last.value), "program", "eval", dont_inherit=True), names)

    try:
        return how(run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check(source: str) -> None:
    """Run a program on both sides: the outcomes are alike."""
    if mode.by_default():
        with torch.device("cpu"):
            if isinstance(result(source, PEER), Raised):
                return  # as in cases.py
    want, got = result(source, PEER), result(source, OURS)
    if mode.by_default() and isinstance(want, Raised) and not isinstance(got, Raised):
        return
    found = list(differences(want, got))
    if BEFORE_15 and NEWER in source:
        assert found, f"{source}\nthe peer does so before 0.15, too"
        return
    assert not found, source + "\n" + "\n".join(found[:6])
