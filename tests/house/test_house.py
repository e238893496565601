"""The rules of the house, read from the sources: layers, sizes, light imports, no code from data; more: tests/house."""

from __future__ import annotations

import ast
import collections
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import tdstore
import tdstore.errors
from tdstore import hookspecs
from tdstore.container.core.primitives import Primitives
from tdstore.store import Cap, Store
from tdstore.tensordicts.base import TensorDictBase
from tests.house.sources import DEFINITIONS, PACKAGE, ROOT, core, dotted, name_of, nodes, none, sources, tree

# Import only upwards in this table: a module may import those of the rows above it and, where its row
# says "together", those of its own row. A name ending in "/" is a folder, whose files may import one another.
ROWS: list[str] = [
    "errors",
    "dtypes pickling settings",
    "types",
    "values header together",
    "arguments keys lifetime threads",
    "index/",
    "store",
    "engine storekit/ together",
    "hookspecs",
    "discovery plugin_calls registry replacing together",
    "builtin/ bytestore/ together",
    "io/",
    "ops/ parallel/",
    "container/values/",
    "container/entries/",
    "container/varlen/",
    "container/core/",
    "container/storage/",
    "container/concat/",
    "container/functions/",
    "container/methods/",
    "container/persistence/",
    "container/display/ container/distribute/",
    "convert/ modules/",
    "tensordicts/",
    "tensorclass/",
    "interop base functional memmap nn persistent tensordict utils",
    "cli testing/",
    "__init__ __main__",
    "data/ dcp/ rl/",
]
# Rules that a file breaks on purpose: (file, what) -> why. Keep it short.
ALLOWED: dict[tuple[str, str], str] = {
    ("plugin_calls.py", "import_module"): "the one place that imports a backend's opener",
    ("discovery.py", "import_module"): "the built-in backends, by the same hook as everyone else's",
    ("events.py", "import_module"): "the opener that the author of a backend asks the kit to check",
    ("codecs.py", "loads"): "for callers who say trust=True, of values only",
    ("tensordict_pickles.py", "Unpickler"): "of a peer's pickles: a subclass whose names are a fixed table",
    ("tensordict_pickles.py", "load"): "torch.load with that subclass, and of storages with weights_only=True",
    ("byvalue.py", "loads"): "what `map` sends to its own workers, which run the function in it anyway",
    ("warm.py", "exec"): "the `-c` of a command, which that gives to its own server as it would to an interpreter",
}
MAX_LINES = 600
HEAVY = (
    "h5py",
    "zarr",
    "icechunk",
    "redis",
    "obstore",
    "s3fs",
    "fsspec",
    "tenacity",
    "tensordict",
    "pytest",
    "hypothesis",
    "ml_dtypes",
)


def test_the_documented_layers_are_the_real_ones() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    rows = re.findall(r"^\| \d+ \| (.+?) \| *(yes)? *\|$", page, re.MULTILINE)
    documented = [" ".join(re.findall(r"`([^`]+)`", names)) + (" together" if yes else "") for names, yes in rows]
    assert [sorted(row.split()) for row in documented] == [sorted(row.split()) for row in ROWS]


def test_what_containers_implement_each_in_its_way_is_declared_once() -> None:
    shared = set(TensorDictBase.__mro__)
    own: dict[str, set[str]] = {}
    for cls in (tdstore.TensorDict, tdstore.PersistentTensorDict, tdstore.LazyStackedTensorDict):
        for base in set(cls.__mro__) - shared:
            for name in vars(base):
                own.setdefault(name, set()).add(cls.__name__)
    declared = {name for base in shared - {object} for name in vars(base)} | set(Primitives.__annotations__)
    wrong = [name for name, classes in own.items() if len(classes) > 1 and name not in declared and name[:2] != "__"]
    none(sorted(wrong), "primitives that container/core/primitives.py does not declare")


def test_mixins_inherit_the_core_alone_and_overlap_nowhere() -> None:
    *mixins, core = TensorDictBase.__bases__
    none([m.__name__ for m in mixins if m.__bases__ != (core,)], "mixins that inherit another one")
    names = collections.Counter(name for mixin in mixins for name in vars(mixin) if name[:2] != "__")
    none(sorted(name for name, count in names.items() if count > 1), "names that two mixins define")


def test_each_folder_and_module_is_in_the_tables_of_the_house() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    said = set(re.findall(r"`([\w/]+)`", page[page.index("## The house") : page.index("## The layers")]))
    parts = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    folders = {f"{part.parent}/" for part in parts if len(part.parts) > 1 and len(part.parent.parts) == 1}
    folders |= {f"{part.parent}/" for part in parts if part.parts[0] == "container" and len(part.parts) > 2}
    modules = {part.stem for part in parts if len(part.parts) == 1} - {"__init__"}
    missing = sorted((folders | modules) - said - {"container/"})
    none(missing, "folders and modules without a row under 'The house'")


def unit(path: Path) -> str:
    """The entry of ROWS that a file belongs to: its folder, one above that, or its own name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return row_entry(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def row_entry(parts: tuple[str, ...]) -> str:
    """The longest entry of ROWS that a module's name begins with; the name of a package above others is its own."""
    entries = {word for row in ROWS for word in row.split()}
    for end in range(len(parts), 0, -1):
        if (folder := "/".join(parts[:end]) + "/") in entries:
            return folder
    return parts[0]


def place(name: str) -> tuple[int, bool]:
    for number, row in enumerate(ROWS):
        words = row.split()
        if name in words:
            return number, "together" in words
    raise AssertionError(f"tdstore/{name} has no row in ROWS of tests/house/test_house.py: give it one")


def imported(path: Path) -> list[tuple[int, str]]:
    """(line, unit) of each tdstore module that a file imports at run time."""
    found = []
    for node in runtime_nodes(tree(path)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tdstore":
            names = [node.module]
            if is_package(node.module):  # a module, or a name that the front door shows
                shown = ".__init__" if node.module == "tdstore" else ""
                modules = (f"{node.module}.{alias.name}" for alias in node.names)
                names = [name if is_module(name) else f"{node.module}{shown}" for name in modules]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "tdstore"]
        for name in names:
            if parts := tuple(name.split(".")[1:]):
                found.append((node.lineno, row_entry(parts)))
    return found


def is_module(name: str) -> bool:
    """Whether a dotted name is a module's, and not a function's or class's."""
    return ROOT.joinpath(*name.split(".")).with_suffix(".py").is_file() or is_package(name)


def is_package(name: str) -> bool:
    """Whether a dotted name is a folder's."""
    return ROOT.joinpath(*name.split("."), "__init__.py").is_file()


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING:`."""
    todo = [node]
    while todo:
        for child in ast.iter_child_nodes(todo.pop()):
            if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
                todo.append(child)
                yield child


def test_imports_go_downward_only():
    offenders = []
    for path in core():
        mine = unit(path)
        if path.name == "__init__.py" and not imported(path):
            continue  # nothing but what the folder is for
        row, together = place(mine)
        if mine == "__init__":
            continue  # the front door shows everything
        for line, other in imported(path):
            there, _ = place(other)
            below = there < row or (there == row and together) or (other == mine and mine.endswith("/"))
            if not below:
                offenders.append(f"{name_of(path)}:{line}: tdstore.{other} is not below it (rows {row} and {there})")
    none(offenders, "imports that do not go downward")


def test_rows_name_each_module_once():
    words = [w for row in ROWS for w in row.split() if w != "together"]
    assert len(words) == len(set(words))


def names_imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports from anywhere."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def test_no_local_imports_of_our_own():
    offenders = []
    for path, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        for inner in ast.walk(node):
            ours = [name for name in names_imported(inner) if name.split(".")[0].startswith("tdstore")]
            offenders += [f"{name_of(path)}:{inner.lineno}: {node.name} imports {name}" for name in ours]
    none(offenders, "imports inside a function")


def test_no_file_is_too_long():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in sources()}
    none([f"{name}: {n} lines" for name, n in lengths.items() if n > MAX_LINES], "files with more than one subject")


def test_nothing_imports_the_peer():
    offenders = [
        f"{name_of(path)}:{node.lineno}"
        for path, node in nodes(ast.Import, ast.ImportFrom)
        if name_of(path) != "tdstore/interop.py"
        and any(name.split(".")[0] == "tensordict" for name in names_imported(node))
    ]
    none(offenders, "imports of the tensordict package")


FORBIDDEN = re.compile(
    r"^(pickle|cPickle|dill|cloudpickle|marshal|shelve)\.(load|loads|Unpickler|open)$"
    r"|^(builtins\.)?(eval|exec|__import__)$|^torch\.load$|(^|\.)import_module$"
)


def test_no_code_from_data():
    """Nothing unpickles, evaluates, or imports a name that it was given."""
    offenders = []
    for path, node in nodes(ast.Call):
        called = dotted(node.func)
        if called and FORBIDDEN.search(called) and (path.name, called.rpartition(".")[2]) not in ALLOWED:
            offenders.append(f"{name_of(path)}:{node.lineno} calls {called}")
    for path, node in nodes(ast.ImportFrom):
        if node.module in ("pickle", "importlib", "marshal"):
            bad = {a.name for a in node.names} & {"load", "loads", "Unpickler", "import_module"}
            offenders += [f"{name_of(path)}:{node.lineno} imports {name}" for name in bad]
    none(offenders, "ways to run code that a file names")


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


def test_no_error_is_swallowed_whole():
    offenders = []
    for path, node in nodes(ast.ExceptHandler):
        wide = node.type is None or dotted(node.type) in ("Exception", "BaseException")
        silent = all(isinstance(s, (ast.Pass, ast.Continue)) or _is_constant(s) for s in node.body)
        if node.type is None or (wide and silent):
            offenders.append(f"{name_of(path)}:{node.lineno}")
    for path, node in nodes(ast.Call):
        if dotted(node.func).endswith("suppress") and any(
            dotted(arg) in ("Exception", "BaseException") for arg in node.args
        ):
            offenders.append(f"{name_of(path)}:{node.lineno}")
    none(offenders, "handlers that swallow every error")


def _is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def test_public_names_have_docstrings():
    offenders = []
    for path in [p for p in core() if p.parent == PACKAGE]:
        module = tree(path)
        offenders += [] if ast.get_docstring(module) else [name_of(path)]
        for node in module.body:
            if not isinstance(node, DEFINITIONS) or node.name.startswith("_"):
                continue
            inside = node.body if isinstance(node, ast.ClassDef) and not node.bases else []
            offenders += [
                f"{name_of(path)}:{one.lineno} {one.name}"
                for one in [node, *inside]
                if isinstance(one, DEFINITIONS) and not one.name.startswith("_") and not ast.get_docstring(one)
            ]
    none(offenders, "public names without docstrings")


# -- structures on the public names ----------------------------------------------------------
PUBLIC_PAGE = ROOT / "docs" / "reference" / "public-modules.md"
RL = sorted(path for name in ("rl", "data", "dcp") for path in (PACKAGE / name).rglob("*.py"))
OWN = ("tdstore.rl", "tdstore.data", "tdstore.dcp")
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


def test_rl_imports_public_names_only():
    none(
        private_imports((path, node) for path, node in nodes(ast.Import, ast.ImportFrom) if path in RL), "private names"
    )


def test_plugins_and_examples_import_public_names_only():
    folders = [path / path.name.replace("-", "_") for path in (ROOT / "plugins").iterdir() if path.is_dir()]
    folders += [ROOT / "examples" / name for name in ("tdstore-safetensors", "tdstore-sqlite")]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(paths) > 80
    imports = ((path, n) for path in paths for n in ast.walk(tree(path)) if isinstance(n, (ast.Import, ast.ImportFrom)))
    none(private_imports(imports), "private names")


def test_tutorials_import_public_names_only():
    pages = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
    assert pages
    imported = {
        (page.name, module)
        for page in pages
        for module in re.findall(r"^[+ ]?\s*(?:from|import) (tdstore(?:\.\w+)*)", page.read_text(), re.MULTILINE)
    }
    assert len(imported) > 10
    none(
        [f"{page}: {module}" for page, module in sorted(imported) if module not in public_modules()], "private modules"
    )


def test_each_public_module_is_imported_by_a_document_or_a_plugin():
    """The list is no longer than what is needed outside of the package."""
    files = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *RL]
    files += [path for folder in ("plugins", "examples") for path in (ROOT / folder).rglob("*.py")]
    imported = set()
    for path in files:
        text = path.read_text()
        for module, names in re.findall(r"^[+ ]?\s*from (tdstore[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
            imported |= {module, *(f"{module}.{name.strip()}" for name in names.split(","))}
        imported.update(re.findall(r"^[+ ]?\s*import (tdstore[\w.]*)", text, re.MULTILINE))
    none(sorted(public_modules() - imported), "public modules that nobody imports")


def is_ours(module: str) -> bool:
    """Whether a module is of tdstore or of a plugin in this repository."""
    root = module.split(".")[0]
    return root == "tdstore" or (root.startswith("tdstore_") and (ROOT / "plugins" / root.replace("_", "-")).is_dir())


def private_imports(imports: Iterable[tuple[Path, ast.Import | ast.ImportFrom]]) -> list[str]:
    """Imports of tdstore's that are not of the page of public modules."""
    allowed = public_modules()
    offenders = []
    for path, node in imports:
        own = path.relative_to(ROOT).parts[2] if path.is_relative_to(ROOT / "plugins") else ""
        modules = [m for m in names_imported(node) if is_ours(m) and m.split(".")[0] != own and not m.startswith(OWN)]
        inside = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else [""]
        wrong = [module for module in modules if module not in allowed and not allowed.issuperset(inside)]
        for alias in node.names if isinstance(node, ast.ImportFrom) and modules else []:
            public = not alias.name.startswith("_")
            if node.module == "tdstore":
                public = alias.name in tdstore.__all__ or f"tdstore.{alias.name}" in allowed
            wrong += [] if public else [f"{node.module}.{alias.name}"]
        offenders += [f"{name_of(path)}:{node.lineno}: {name}" for name in wrong]
    return offenders


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


def test_rl_reads_no_private_attribute_of_the_library():
    own, modules = private_names_of_rl() | OF_TORCHRL | OF_PYTHON, public_modules()
    offenders = []
    for path, node in nodes(ast.Attribute):
        if path not in RL:
            continue
        private = node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in own
        if dotted(node.value) == "tdstore":
            private = node.attr not in tdstore.__all__ and f"tdstore.{node.attr}" not in modules
        offenders += [f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"] if private else []
    none(offenders, "private names")


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


def test_abilities_are_documented():
    page = PROTOCOL.read_text()
    none([cap.name for cap in Cap if f"`{cap.name}`" not in page], "abilities without a word in the reference")


def test_hooks_are_documented():
    page = PROTOCOL.read_text().replace("'", "")
    hooks = {name: inspect.signature(hook) for name, hook in vars(hookspecs).items() if name.startswith("tdstore_")}
    missing = [name for name, signature in hooks.items() if f"def {name}{signature}".replace("'", "") not in page]
    none(missing, "hooks whose signature the reference does not show")


def test_store_methods_and_backend_fields_are_documented():
    page = PROTOCOL.read_text()
    methods = [name for name, member in vars(Store).items() if callable(member) and not name.startswith("_")]
    none([name for name in methods if f"`{name}" not in page], "methods of Store without a word in the reference")
    fields = hookspecs.Backend.__dataclass_fields__
    none([name for name in fields if f"`{name}`" not in page], "fields of Backend without a word in the reference")


# -- light imports -------------------------------------------------------------------------
IMPORTING = f"""
import sys
def heavy(): return ",".join(m for m in {HEAVY!r} if m in sys.modules)
import tdstore
print(f"imported={{heavy()}} discovered={{sys.modules['tdstore.registry'].registry.cache_info().currsize}}")
tdstore.backends()
print(f"listed={{heavy()}}")
"""


def test_importing_and_listing_is_light_and_discovery_waits_for_first_use():
    command = [sys.executable, "-W", "ignore", "-c", IMPORTING]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["imported=", "discovered=0", "listed="], "these are imported"
