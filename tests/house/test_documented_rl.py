"""What `tdstore.rl` exports says what it takes and what it raises."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import tdstore.rl
from tests.house.sources import none

MODULES = [
    "tdstore.rl",
    *(f"tdstore.rl.{found.name}" for found in pkgutil.iter_modules(tdstore.rl.__path__) if found.ispkg),
]


def exported() -> dict[str, Any]:
    """Functions and classes of this package in the `__all__` of `tdstore.rl` and of the packages below it."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for key in getattr(module, "__all__", ()):
            one = getattr(module, key)
            if (inspect.isclass(one) or inspect.isfunction(one)) and one.__module__.startswith("tdstore.rl."):
                found[f"{one.__module__}.{one.__qualname__}"] = one
    return found


def functions() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Name, function and docstrings of exported functions, constructors and public methods.

    A constructor has the docstring of its class. A method has also those of the methods that it overrides.
    """
    for name, one in exported().items():
        if inspect.isfunction(one):
            yield name, one, inspect.getdoc(one) or ""
            continue
        for key, value in vars(one).items():
            value = inspect.unwrap(getattr(value, "__func__", value))
            if not inspect.isfunction(value) or not value.__module__.startswith("tdstore.rl."):
                continue
            if key == "__init__" and not dataclasses.is_dataclass(one):
                yield name, value, one.__doc__ or ""
            elif not key.startswith("_"):
                above = [vars(base)[key] for base in one.__mro__ if key in vars(base)]
                yield f"{name}.{key}", value, "\n".join(inspect.getdoc(a) or "" for a in above)


def lacking_args(fn: Callable[..., Any], text: str) -> list[str]:
    """Parameters that no `Args` names, of a function with three or more."""
    parameters = [name for name in inspect.signature(fn).parameters if name not in ("self", "cls")]
    listed = "\n".join(re.findall(r"(?:Args|Attributes):\n(.*?)(?:\n\n|\Z)", text, re.DOTALL))
    missing = [name for name in parameters if not re.search(rf"(?<!\w)\*{{0,2}}{name}\b", listed)]
    return missing if len(parameters) >= 3 else []


def raises(fn: Callable[..., Any]) -> bool:
    """Check whether the function itself raises an error that it makes."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))


def test_the_rules_find_offenders() -> None:
    def three(first: int, second: int, third: int) -> None:
        raise ValueError(first)

    assert lacking_args(three, "Do.\n\nArgs:\n    first, third: numbers.\n") == ["second"]
    assert not lacking_args(three, "Do.\n\nArgs:\n    first, second, third: numbers.\n") and raises(three)
    assert len(exported()) > 40


def test_parameters_are_described() -> None:
    offenders = [
        f"{name}: {', '.join(lacking)}" for name, fn, text in functions() if (lacking := lacking_args(fn, text))
    ]
    none(offenders, "exported by tdstore.rl, with three parameters or more that Args does not describe")


def test_errors_are_described() -> None:
    offenders = [name for name, fn, text in functions() if raises(fn) and "Raises:" not in text]
    none(offenders, "exported by tdstore.rl, raising an error without a Raises section")
