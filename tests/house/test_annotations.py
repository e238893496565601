"""Public functions say what they return: the share of those that say `Any` may only fall."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FunctionType, ModuleType

import pytest

import tdstore
from tests.house.sources import PACKAGE, at_most, name_of, none, sources, tree

MOST = 89
"""How many public functions are left that return `Any`."""

SHARE = 0.021
"""Which part of all public functions that is."""

PARAMETERS = 32
"""How many parameters of the methods of a TensorDict say `Any`; `**kwargs` and `*args` are not counted."""

OF_PACKAGES = {
    "__init__.py": 2,
    "convert": 27,
    "data": 0,
    "dcp": 0,
    "interop.py": 1,
    "modules": 4,
    "rl": 102,
    "tensorclass": 35,
}
"""How many parameters of public functions and methods of these packages are `Any`, and nothing else."""

ENTRIES = 15
"""How many return `Entry`, an alias of `Any` for what `td[key]` returns."""


def scopes(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yield a body, and those of the classes and conditions in it."""
    yield body
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.If)):
            yield from scopes(node.body)


def decorated(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    return any(name in ast.unparse(decorator) for decorator in node.decorator_list)


def returned() -> Iterator[tuple[str, set[str]]]:
    """Yield each public function with what callers see that it returns: of its overloads, where it has some."""
    for path in sources():
        for body in scopes(tree(path).body):
            found: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
            for node in body:
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(node)
            for name, nodes in found.items():
                if any(decorated(n, "signature_of") for n in nodes):
                    continue  # it has the signature of the method that it overrides, overloads included
                seen = [n for n in nodes if decorated(n, "overload")] or [
                    n for n in nodes if not decorated(n, ".setter")
                ]
                yield f"{name_of(path)}: {name}", {ast.unparse(n.returns) for n in seen if n.returns is not None}


def test_few_public_functions_return_any():
    functions = list(returned())
    offenders = [name for name, kinds in functions if "Any" in kinds]
    at_most(MOST, offenders, "public functions that return Any")
    assert len(offenders) / len(functions) <= SHARE


def test_few_parameters_of_methods_say_any():
    offenders = [
        f"{name}({parameter}: {said})"
        for name, (_, method) in sorted(methods().items())
        for parameter, said in method.__annotations__.items()
        if parameter not in ("return", "args", "kwargs", "options") and "Any" in said
    ]
    at_most(PARAMETERS, offenders, "parameters of TensorDict's methods that are Any")


def parameters(package: str) -> Iterator[str]:
    """Yield each parameter of a public function or method of a package that says `Any`, overloads included."""
    for path in sources():
        if not path.is_relative_to(PACKAGE) or path.relative_to(PACKAGE).parts[0] != package:
            continue
        for body in scopes(tree(path).body):
            for node in body:
                if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    continue
                if (node.name.startswith("_") and node.name != "__init__") or decorated(node, "signature_of"):
                    continue
                of_it = node.args
                for parameter in (*of_it.posonlyargs, *of_it.args, *of_it.kwonlyargs):
                    if parameter.annotation is not None and ast.unparse(parameter.annotation) == "Any":
                        yield f"{name_of(path)}:{node.lineno}: {node.name}({parameter.arg})"


@pytest.mark.parametrize("package", OF_PACKAGES)
def test_few_parameters_of_packages_are_any(package: str) -> None:
    found = list(parameters(package))
    at_most(OF_PACKAGES[package], found, f"parameters of public functions of {package} that are Any")


def methods() -> dict[str, tuple[type, FunctionType]]:
    """Return the public methods of containers, with the classes that define them, as editors show them."""
    kinds = (tdstore.TensorDict, tdstore.LazyStackedTensorDict, tdstore.PersistentTensorDict)
    found = {}
    for kind in kinds:
        for cls in kind.__mro__:
            for name, held in vars(cls).items():
                method = held.__func__ if isinstance(held, (classmethod, staticmethod)) else held
                if isinstance(method, FunctionType) and not name.startswith("_"):
                    found[f"{cls.__name__}.{name}"] = (cls, method)
    return found


def test_entries_are_few():
    at_most(ENTRIES, [name for name, kinds in returned() if "Entry" in kinds], "public functions that return Entry")


def test_the_public_namespace_is_what_completes():
    assert dir(tdstore) == sorted(tdstore.__all__)
    assert all(hasattr(tdstore, name) for name in tdstore.__all__)


def test_no_other_module_is_an_attribute_of_the_namespace():
    stray = [
        name
        for name, value in vars(tdstore).items()
        if isinstance(value, ModuleType) and value.__name__ != f"tdstore.{name}"
    ]
    none(stray, "modules that `tdstore` shows as its own: import them in `if TYPE_CHECKING`, or from them")
    classes = [
        name
        for name, value in vars(tdstore).items()
        if isinstance(value, type) and value.__module__.startswith("torch")
    ]
    none(classes, "classes of torch that `tdstore` shows as its own")


def test_backends_print_as_a_table():
    table = tdstore.backends()
    lines = repr(table).splitlines()
    assert lines[0].split() == ["backend", "plugin", "summary"]
    assert [line.split()[0] for line in lines[1:]] == [status.name for status in table]
    assert [line.split()[1] for line in lines[1:]] == [status.plugin for status in table]
    assert table._repr_html_().count("<tr>") == len(table) + 1
    assert table[0] == next(iter(table))
