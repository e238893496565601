"""The rules of the house, read from the sources: layers, sizes, docstrings, light imports, no code from data."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tdstore
import tdstore.errors
from tdstore import hookspecs
from tdstore.store import Cap, Store

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tdstore"

# Import only upwards in this table: a module may import those of the rows above it and, where its row
# says "together", those of its own row. A name ending in "/" is a folder, whose files may import one another.
ROWS: list[str] = [
    "errors",
    "dtypes",
    "types",
    "values header together",
    "keys indexing shapes plans rows ranges strings tracing lifetime together",
    "store",
    "engine localengine files publish holes checksums budget manifest objects session together",
    "hookspecs",
    "discovery replacing registry together",
    "builtin/ bytestore/ together",
    "io/ together",
    "ops/ parallel/",
    "container/ convert/ modules/ together",
    "tensorclass/",
    "interop base functional memmap nn persistent utils",
    "cli testing/",
    "__init__ __main__",
    "rl/",
]
# Rules that a file breaks on purpose: (file, what) -> why. Keep it short.
ALLOWED: dict[tuple[str, str], str] = {
    ("registry.py", "import_module"): "the one place that imports a backend's opener",
    ("discovery.py", "import_module"): "the built-in backends, by the same hook as everyone else's",
    ("events.py", "import_module"): "the opener that the author of a backend asks the kit to check",
    ("plain.py", "loads"): "for callers who say trust=True, of values only",
    ("pickles.py", "Unpickler"): "of a peer's pickles: a subclass whose names are a fixed table",
    ("pickles.py", "load"): "torch.load with that subclass, and of storages with weights_only=True",
    ("byvalue.py", "loads"): "what `map` sends to its own workers, which run the function in it anyway",
    ("warm.py", "exec"): "the `-c` of a command, which that gives to its own server as it would to an interpreter",
}
MAX_LINES = 600
HEAVY = ("h5py", "zarr", "redis", "obstore", "s3fs", "fsspec", "tensordict", "pytest", "hypothesis", "ml_dtypes")


def test_the_documented_layers_are_the_real_ones() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    rows = re.findall(r"^\| \d+ \| (.+?) \| *(yes)? *\|$", page, re.MULTILINE)
    documented = [" ".join(re.findall(r"`([^`]+)`", names)) + (" together" if yes else "") for names, yes in rows]
    assert [sorted(row.split()) for row in documented] == [sorted(row.split()) for row in ROWS]


def sources() -> list[Path]:
    plugins = (p for p in (ROOT / "plugins").rglob("*.py") if "tests" not in p.parts)
    return sorted([*PACKAGE.rglob("*.py"), *plugins])


def core() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def unit(path: Path) -> str:
    """The entry of ROWS that a file belongs to: its folder, or its own name."""
    parts = path.relative_to(PACKAGE).parts
    return f"{parts[0]}/" if len(parts) > 1 else path.stem


def place(name: str) -> tuple[int, bool]:
    for number, row in enumerate(ROWS):
        words = row.split()
        if name in words:
            return number, "together" in words
    raise AssertionError(f"tdstore/{name} has no row in ROWS of tests/test_house.py: give it one")


def imported(path: Path) -> list[tuple[int, str]]:
    """(line, unit) of each tdstore module that a file imports at run time."""
    found = []
    for node in runtime_nodes(tree(path)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tdstore":
            names = [node.module]
            if node.module == "tdstore":  # a module, or a name that the front door shows
                names = [f"tdstore.{a.name if is_module(a.name) else '__init__'}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "tdstore"]
        for name in names:
            parts = name.split(".")[1:]
            if parts:
                folder = (PACKAGE / parts[0]).is_dir()
                found.append((node.lineno, f"{parts[0]}/" if folder else parts[0]))
    return found


def is_module(name: str) -> bool:
    """Whether `from tdstore import name` is of a module, and not of a function or class."""
    return (PACKAGE / f"{name}.py").is_file() or (PACKAGE / name / "__init__.py").is_file()


def runtime_nodes(node: ast.AST) -> list[ast.AST]:
    """Every node but those under `if TYPE_CHECKING:`."""
    nodes = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        nodes += [child, *runtime_nodes(child)]
    return nodes


@pytest.mark.parametrize("path", core(), ids=name_of)
def test_imports_go_downward_only(path):
    mine = unit(path)
    row, together = place(mine)
    if mine == "__init__":
        return  # the front door shows everything
    for line, other in imported(path):
        if other == mine and mine.endswith("/"):
            continue
        there, _ = place(other)
        fine = there < row or (there == row and together)
        assert fine, f"{name_of(path)}:{line} imports tdstore.{other}, which is not below it (rows {row} and {there})"


def test_rows_name_each_module_once():
    words = [w for row in ROWS for w in row.split() if w != "together"]
    assert len(words) == len(set(words))


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_no_local_imports_of_our_own(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for inner in ast.walk(node):
                names = [a.name for a in inner.names] if isinstance(inner, ast.Import) else []
                names += [inner.module or ""] if isinstance(inner, ast.ImportFrom) else []
                ours = [n for n in names if n.split(".")[0].startswith("tdstore")]
                assert not ours, f"{name_of(path)}:{inner.lineno}: {node.name} imports {ours[0]} inside a function"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_no_file_is_too_long(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{name_of(path)} has {lines} lines: one file, one subject"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_nothing_imports_the_peer(path):
    if name_of(path) == "tdstore/interop.py":
        return
    for node in ast.walk(tree(path)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        assert not [n for n in names if n.split(".")[0] == "tensordict"], f"{name_of(path)}:{node.lineno}"


def dotted(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


FORBIDDEN = re.compile(
    r"^(pickle|cPickle|dill|cloudpickle|marshal|shelve)\.(load|loads|Unpickler|open)$"
    r"|^(builtins\.)?(eval|exec|__import__)$|^torch\.load$|(^|\.)import_module$"
)


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_no_code_from_data(path):
    """Nothing unpickles, evaluates, or imports a name that it was given."""
    for node in ast.walk(tree(path)):
        called = dotted(node.func) if isinstance(node, ast.Call) else ""
        if called and FORBIDDEN.search(called) and (path.name, called.rpartition(".")[2]) not in ALLOWED:
            raise AssertionError(f"{name_of(path)}:{node.lineno} calls {called}")
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "importlib", "marshal"):
            bad = {a.name for a in node.names} & {"load", "loads", "Unpickler", "import_module"}
            assert not bad, f"{name_of(path)}:{node.lineno} imports {bad}"


def test_the_rule_against_code_from_data_sees_it():
    for call in (
        "pickle.loads",
        "eval",
        "exec",
        "importlib.import_module",
        "import_module",
        "torch.load",
        "__import__",
    ):
        assert FORBIDDEN.search(call), call
    for call in ("msgspec.json.decode", "model.eval", "self.load", "re.compile"):
        assert not FORBIDDEN.search(call), call


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_no_error_is_swallowed_whole(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            wide = node.type is None or dotted(node.type) in ("Exception", "BaseException")
            silent = all(isinstance(s, (ast.Pass, ast.Continue)) or _is_constant(s) for s in node.body)
            assert not (wide and silent), f"{name_of(path)}:{node.lineno} swallows every error"
            assert node.type is not None, f"{name_of(path)}:{node.lineno}: a bare except"
        if isinstance(node, ast.Call) and dotted(node.func).endswith("suppress"):
            wide = [dotted(a) for a in node.args if dotted(a) in ("Exception", "BaseException")]
            assert not wide, f"{name_of(path)}:{node.lineno} swallows every error"


def _is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@pytest.mark.parametrize("path", [p for p in core() if p.parent == PACKAGE], ids=name_of)
def test_public_names_have_docstrings(path):
    module = tree(path)
    assert ast.get_docstring(module), f"{name_of(path)} has no docstring"
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in module.body:
        if not isinstance(node, definitions) or node.name.startswith("_"):
            continue
        assert ast.get_docstring(node), f"{name_of(path)}:{node.lineno} {node.name} has no docstring"
        for inner in node.body if isinstance(node, ast.ClassDef) and not node.bases else []:
            if isinstance(inner, definitions) and not inner.name.startswith("_"):
                assert ast.get_docstring(inner), f"{name_of(path)}:{inner.lineno} {node.name}.{inner.name}"


# -- structures on the public names ----------------------------------------------------------
PUBLIC_PAGE = ROOT / "docs" / "reference" / "public-modules.md"
RL = sorted((PACKAGE / "rl").rglob("*.py"))
OF_TORCHRL = {"_empty", "_write_count"}  # what torchrl's storages and writers call these
OF_PYTHON = {"_replace", "_fields", "_make"}  # of named tuples


def public_modules() -> set[str]:
    """The modules whose names are public: those of the table of the page."""
    return set(re.findall(r"^\| `(tdstore[.\w]*)` \|", PUBLIC_PAGE.read_text(), re.MULTILINE))


def test_the_page_of_public_modules_names_what_is_there():
    modules = public_modules()
    assert {"tdstore", "tdstore.store", "tdstore.types", "tdstore.errors"} <= modules
    for name in modules:
        importlib.import_module(name)


@pytest.mark.parametrize("path", RL, ids=name_of)
def test_rl_imports_public_names_only(path):
    allowed = public_modules()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                assert top != "tdstore" or alias.name in allowed, f"{name_of(path)}:{node.lineno}: {alias.name}"
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "tdstore":
            continue
        if node.module.startswith("tdstore.rl"):
            continue
        assert node.module in allowed, f"{name_of(path)}:{node.lineno}: {node.module} is not public"
        for alias in node.names:
            public = not alias.name.startswith("_")
            if node.module == "tdstore":
                public = alias.name in tdstore.__all__ or f"tdstore.{alias.name}" in allowed
            assert public, f"{name_of(path)}:{node.lineno}: {node.module}.{alias.name} is not public"


def private_names_of_rl() -> set[str]:
    """Attributes and functions with an underscore that `tdstore.rl` gives its own objects and modules."""
    found: set[str] = set()
    for path in RL:
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return {name for name in found if name.startswith("_")}


@pytest.mark.parametrize("path", RL, ids=name_of)
def test_rl_reads_no_private_attribute_of_the_library(path):
    own = private_names_of_rl() | OF_TORCHRL | OF_PYTHON
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            assert node.attr in own, f"{name_of(path)}:{node.lineno}: {ast.unparse(node)} is private"
        if isinstance(node, ast.Attribute) and dotted(node.value) == "tdstore":
            there = node.attr in tdstore.__all__ or f"tdstore.{node.attr}" in public_modules()
            assert there, f"{name_of(path)}:{node.lineno}: tdstore.{node.attr} is not public"


# -- errors --------------------------------------------------------------------------------
def error_classes() -> list[type[Exception]]:
    found = vars(tdstore.errors).values()
    return [c for c in found if isinstance(c, type) and issubclass(c, tdstore.errors.TDStoreError)]


@pytest.mark.parametrize("error", error_classes(), ids=lambda e: e.__name__)
def test_error_is_drawn_in_the_tree(error):
    drawn = {}
    above: list[str] = []
    for line in (tdstore.errors.__doc__ or "").splitlines():
        match = re.match(r"^    ([\s│├└─]*)(\w+)\s*(?:\(([^.)][^)]*)\))?", line)
        if match and match[2].endswith("Error"):
            depth = len(match[1]) // 4
            above[depth:] = [match[2]]
            drawn[match[2]] = (above[depth - 1] if depth else None, match[3])
    assert error.__name__ in drawn, f"{error.__name__} is not drawn in the docstring of tdstore/errors.py"
    parent, second = drawn[error.__name__]
    ours = [b.__name__ for b in error.__bases__ if b.__module__ == "tdstore.errors"]
    others = [b.__name__ for b in error.__bases__ if b.__module__ == "builtins" and b is not Exception]
    assert ours == ([parent] if parent else [])
    assert others == (second.split(", ") if second else [])


# -- documents -----------------------------------------------------------------------------
PROTOCOL = ROOT / "docs" / "reference" / "storage-protocol.md"


@pytest.mark.parametrize("cap", [c.name for c in Cap])
def test_ability_is_documented(cap):
    assert f"`{cap}`" in PROTOCOL.read_text()


@pytest.mark.parametrize("hook", [n for n in vars(hookspecs) if n.startswith("tdstore_")])
def test_hook_is_documented(hook):
    signature = inspect.signature(getattr(hookspecs, hook))
    assert f"def {hook}{signature}".replace("'", "") in PROTOCOL.read_text().replace("'", "")


@pytest.mark.parametrize("method", [n for n, f in vars(Store).items() if callable(f) and not n.startswith("_")])
def test_store_method_is_documented(method):
    assert f"`{method}" in PROTOCOL.read_text()


@pytest.mark.parametrize("field", [*hookspecs.Backend.__dataclass_fields__])
def test_backend_field_is_documented(field):
    assert f"`{field}`" in PROTOCOL.read_text()


# -- light imports -------------------------------------------------------------------------
@pytest.mark.parametrize("code", ["import tdstore", "import tdstore; tdstore.backends()"])
def test_importing_and_listing_is_light(code):
    code += f"\nimport sys; print(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"{code.splitlines()[0]} imports {done.stdout.strip()}"


def test_discovery_waits_for_first_use():
    code = "import sys, tdstore; r = sys.modules['tdstore.registry']; print(r.registry.cache_info().currsize)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]
