"""What sources do not do: raise errors from outside the tree, name backends in containers, probe with `hasattr`."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path

import tdstore
from tests.house.sources import PACKAGE, ROOT, at_most, core, dotted, name_of, nodes, none, tree, walked

# -- every raise from the error tree --------------------------------------------------------
# What Python's own protocols ask for; AssertionError is what a test of the kit reports with, and an impossible branch.
OF_PYTHON = {"AttributeError", "NotImplementedError", "StopIteration", "AssertionError", "SystemExit"}
# (file, class) -> why a class of Python's is raised there. All but those of the system are caught by their callers.
_SHORT = "bytes that end too early; callers say which place, and take it for damage or for a change"
_SYSTEM = "the error of a system call, with its errno; `store_errors` says which place"
RAISED = {
    ("plugins/tdstore-h5/tdstore_h5/file/journal.py", "EOFError"): _SHORT,
    ("plugins/tdstore-redis/tdstore_redis/connection.py", "ssl.SSLError"): "what the ssl module raises for it",
    ("tdstore/builtin/mapping.py", "OSError"): _SYSTEM,
    ("tdstore/builtin/shared/arena.py", "OSError"): _SYSTEM,
    ("tdstore/builtin/tdz/reading.py", "EOFError"): _SHORT,
    ("tdstore/builtin/tdz/reading.py", "FileNotFoundError"): "no member of that name; the caller goes on without",
    ("tdstore/builtin/tdz/reading.py", "zipfile.BadZipFile"): "what the zipfile module raises for it",
    ("tdstore/builtin/tdz/writing.py", "EOFError"): _SHORT,
    ("tdstore/builtin/window.py", "OSError"): _SYSTEM,
    ("tdstore/bytestore/directory.py", "FileNotFoundError"): "what engines raise for an object that is not there",
    ("tdstore/bytestore/read.py", "EOFError"): _SHORT,
    ("tdstore/index/ranges.py", "EOFError"): _SHORT,
    ("tdstore/io/consolidated/sums.py", "EOFError"): _SHORT,
    ("tdstore/storekit/checksums.py", "EOFError"): _SHORT,
    ("tdstore/storekit/files.py", "OSError"): _SYSTEM,
}
# What the kit raises in child processes, to see what becomes of them.
FAKED = ("tdstore/testing/processes/",)
# Exceptions outside the tree that a module raises and its caller catches: no user sees them.
INTERNAL = {
    "plugins/tdstore-redis/tdstore_redis/cells/fetch.py": {"Damaged"},
    "plugins/tdstore-redis/tdstore_redis/faults.py": {"ServerError", "Lost"},
    "plugins/tdstore-remote/tdstore_remote/faults.py": {"Again", "NoRangesError"},
    "plugins/tdstore-zarr/tdstore_zarr/codec/codecs.py": {"ChunkError"},
    "tdstore/storekit/files.py": {"NotRegularError"},
    "tdstore/values.py": {"_Malformed"},
}


def is_builtin_error(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def raised_outside_the_tree() -> dict[str, list[str]]:
    """Places of `raise` by the class of Python's that they raise."""
    found: dict[str, list[str]] = {}
    for path, node in nodes(ast.Raise):
        if node.exc is None or name_of(path).startswith(FAKED):
            continue
        name = dotted(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
        if (is_builtin_error(name) and name not in OF_PYTHON) or name.split(".")[0] in ("ssl", "zipfile"):
            found.setdefault(name, []).append(f"{name_of(path)}:{node.lineno} {name}")
    return found


def test_raised_errors_are_of_the_tree():
    found = raised_outside_the_tree()
    used = {(place.partition(":")[0], name) for name, places in found.items() for place in places}
    offenders = [
        place for name, places in found.items() for place in places if (place.partition(":")[0], name) not in RAISED
    ]
    none(offenders, "raises of classes that are not in tdstore/errors.py")
    none([f"{entry}" for entry in RAISED if entry not in used], "entries of RAISED that are not needed")


# -- one text for one cause -----------------------------------------------------------------
# Errors about a place: `storekit/refusals.py` alone writes their texts.
PLACE_ERRORS = {"StoreBusyError", "DirtyStoreError", "StoreExistsError"}
BACKEND_FILES = ("tdstore/builtin/", "tdstore/bytestore/", "tdstore/storekit/", "tdstore/io/consolidated/", "plugins/")
# (file, class) -> why the text is not one of refusals.py.
TEXTS = {
    ("tdstore/storekit/files.py", "StoreExistsError"): "the text of the system for an OSError",
    ("plugins/tdstore-h5/tdstore_h5/faults.py", "StoreBusyError"): "the text of HDF5",
}


def test_errors_about_places_have_one_text_for_one_cause():
    found = [
        (name_of(path), dotted(node.func), node.lineno)
        for path, node in nodes(ast.Call)
        if dotted(node.func) in PLACE_ERRORS
        and name_of(path).startswith(BACKEND_FILES)
        and name_of(path) != "tdstore/storekit/refusals.py"
    ]
    none(
        [f"{path}:{line} {name}" for path, name, line in found if (path, name) not in TEXTS],
        "errors with a text of their own: take it from tdstore.storekit.refusals",
    )
    used = {(path, name) for path, name, _ in found}
    none([f"{entry}" for entry in TEXTS if entry not in used], "entries of TEXTS that are not needed")


def test_public_functions_of_refusals_tell_their_arguments():
    """Third parties take their errors from there: each function says what its arguments mean."""
    offenders = []
    for node in tree(ROOT / "tdstore/storekit/refusals.py").body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            text = ast.get_docstring(node) or ""
            names = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
            listed = text.partition("Args:")[2].partition("Example:")[0]
            missing = [name for name in names if name not in listed]
            if (len(names) > 1 and missing) or "Example:" not in text:
                offenders.append(f"{node.name}: {', '.join(missing) or 'no example'}")
    none(offenders, "functions of refusals.py without Args or an example")


def test_error_classes_are_of_the_tree():
    """A class of exceptions outside the tree is for one module and its callers, and listed."""
    offenders = []
    for path, node in nodes(ast.ClassDef):
        bases = [dotted(base) for base in node.bases]
        foreign = any(is_builtin_error(base) for base in bases) and path != PACKAGE / "errors.py"
        if foreign and node.name not in INTERNAL.get(name_of(path), ()):
            offenders.append(f"{name_of(path)}:{node.lineno} {node.name}({', '.join(bases)})")
    none(offenders, "exceptions outside the tree")


def test_no_key_error_shows_its_repr():
    """`str(KeyError("text"))` has quotes around it; KeyNotFoundError has none."""
    error = tdstore.errors.KeyNotFoundError("no entry 'a'")
    assert str(error).startswith("no entry")
    assert isinstance(error, KeyError)


# -- containers know no backend -------------------------------------------------------------
CONTAINERS = ("container", "tensordicts", "ops", "tensorclass")
BACKENDS = {"memmap", "h5", "zarr", "icechunk", "redis", "remote", "tdz", "shared", "memory"}
NAMES_FILE = "tdstore/container/persistence/backend_names.py"
# (file, backend) -> why it may name that backend
NAMED_BACKENDS = {
    ("tdstore/container/persistence/saving.py", "memmap"): "what `save` writes where nothing says more",
    ("tdstore/container/persistence/saving.py", "tdz"): "`archive=True` of `memmap`, which tensordict has",
    ("tdstore/container/persistence/consolidate.py", "memory"): "a container over one buffer, in no place",
    ("tdstore/container/distribute/rank_trees.py", "memory"): "a container over what a rank received, in no place",
    ("tdstore/container/distribute/row_tasks.py", "shared"): "the way of rows between processes of one machine",
    ("tdstore/tensordicts/persistent/persistent.py", "h5"): "the default of `from_dict`, as tensordict has it",
    ("tdstore/tensordicts/redis_names.py", "redis"): "the names of tensordict's class over redis; nothing else",
}
# (file, module) -> why it may import a backend
IMPORTED_BACKENDS = {
    ("tdstore/tensordicts/rebuild.py", "tdstore.builtin"): "the kinds of pickles that older versions wrote",
    ("tdstore/tensordicts/tensordict_pickles.py", "tdstore.builtin"): "pickles name classes of tensors",
}


def backend_mentions(path: Path) -> set[tuple[str, str, int]]:
    """(file, backend, line) of each text of a file that is the name of a backend."""
    return {
        (name_of(path), node.value, node.lineno)
        for node in walked(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in BACKENDS
    }


def test_containers_name_no_backend():
    offenders, used = [], set()
    for path in [p for p in core() if p.relative_to(PACKAGE).parts[0] in CONTAINERS and name_of(p) != NAMES_FILE]:
        for file, backend, line in sorted(backend_mentions(path)):
            used.add((file, backend))
            if (file, backend) not in NAMED_BACKENDS and not is_a_word_of_a_display(file, backend):
                offenders.append(f"{file}:{line} {backend!r}")
    none(offenders, f"containers that name a backend: only {NAMES_FILE} does")
    none([f"{entry}" for entry in NAMED_BACKENDS if entry not in used], "entries of NAMED_BACKENDS that are not needed")


def is_a_word_of_a_display(file: str, backend: str) -> bool:
    """`shared` is also what a display says of tensors in shared memory."""
    return file.startswith("tdstore/container/display/") and backend == "shared"


def test_containers_import_no_backend():
    offenders = []
    plugins = {path.name for path in ROOT.glob("plugins/*/tdstore_*")}
    for path in [p for p in core() if p.relative_to(PACKAGE).parts[0] in CONTAINERS]:
        for node in walked(path):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                backend = "tdstore.builtin" if module.startswith("tdstore.builtin") else module.split(".")[0]
                known = (name_of(path), backend) in IMPORTED_BACKENDS
                if (backend == "tdstore.builtin" or backend in plugins) and not known:
                    offenders.append(f"{name_of(path)}:{node.lineno} imports {module}")
    none(offenders, "containers that import a backend")


# -- no probing -----------------------------------------------------------------------------
# Folders where every object is ours. (file, attribute) -> why it is asked for nevertheless
OURS = (*CONTAINERS, "io", "storekit", "builtin", "bytestore", "index")
PROBED = {
    ("tdstore/builtin/memmap/tensor.py", "fileno"): "any file object",
    ("tdstore/container/functions/vmap.py", "vmap_impl"): "a private name of torch",
    ("tdstore/index/rows.py", None): "dtypes of this torch",
    ("tdstore/index/tracing.py", None): "private names of torch",
    ("tdstore/tensorclass/base.py", None): "attributes of the classes of users",
    ("tdstore/tensorclass/fields.py", None): "attributes of the classes of users",
    ("tdstore/tensordicts/params.py", None): "attributes of torch.nn.Module",
    ("tdstore/tensordicts/resident/indexing.py", "__array__"): "an index of any array library",
    ("tdstore/container/methods/facts.py", "_leaf_list"): "a tensor, a list of them, or a container",
    ("tdstore/container/methods/update_source.py", "items"): "any mapping",
}
# Left over from before the rule: a number that may only fall.
PROBES = 0
STORES = {"td", "tensordict", "store", "stored", "handle", "container", "window", "tds"}


def test_nothing_probes_stores_or_containers():
    """An ability is asked for (`Cap`, a class), and declared; `hasattr` says nothing to mypy or to a reader."""
    offenders = []
    for path, node in nodes(ast.Call):
        if dotted(node.func) != "hasattr":
            continue
        file, parts = name_of(path), path.relative_to(ROOT).parts
        attribute = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        of_a_store = dotted(node.args[0]).split(".")[-1].lstrip("_") in STORES
        in_ours = parts[0] == "tdstore" and parts[1] in OURS
        if (in_ours or of_a_store) and not {(file, attribute), (file, None)} & PROBED.keys():
            offenders.append(f"{file}:{node.lineno} {ast.unparse(node)}")
    at_most(PROBES, offenders, "hasattr on a store or container")


# -- records of values are decoded in one place ---------------------------------------------
CONTAINERS_AT = ("tdstore/container/", "tdstore/tensordicts/")
RECORD_KEYS = {"codec", "column", "nested", "refused", "unbatched"}
# (file, what it looks for) -> why there
RECORDS_TOLD_APART = {
    ("tdstore/container/storage/entry_kinds.py", "is_column"): "the one place that decides what an entry is",
    ("tdstore/container/storage/entry_kinds.py", "is_nested"): "the same",
    ("tdstore/container/storage/entry_kinds.py", "unbatched"): "the same",
    ("tdstore/container/storage/describe.py", "codec"): "a value of the header, decoded",
    ("tdstore/container/storage/describe.py", "refused"): "a value of the header, decoded",
    ("tdstore/container/storage/value_records.py", "unbatched"): "a value of the header, decoded",
    ("tdstore/container/varlen/columns.py", "column"): "the definition of is_column",
    ("tdstore/container/varlen/nested_leaves.py", "nested"): "the definition of is_nested",
    ("tdstore/container/varlen/nested_leaves.py", "is_nested"): "a header that no handle holds: of a foreign leaf",
}


def test_records_of_values_are_told_apart_in_one_place():
    """`StoreHandle.entries` says what an entry is: nothing else looks for the keys of its record."""
    found = {}
    for path, node in nodes(ast.Compare):
        if isinstance(node.left, ast.Constant) and isinstance(node.ops[0], ast.In | ast.NotIn):
            if node.left.value in RECORD_KEYS and name_of(path).startswith(CONTAINERS_AT):
                found[name_of(path), node.left.value] = node.lineno
    for path, node in nodes(ast.Call):
        if (name := dotted(node.func)) in ("is_column", "is_nested") and name_of(path).startswith(CONTAINERS_AT):
            found[name_of(path), name] = node.lineno
    wrong = [
        f"{file}:{line} looks for {key!r}"
        for (file, key), line in found.items()
        if (file, key) not in RECORDS_TOLD_APART
    ]
    none(wrong, "places that tell value records apart: ask StoreHandle.entries")
    none([f"{entry}" for entry in RECORDS_TOLD_APART if entry not in found], "entries of RECORDS_TOLD_APART not needed")


# -- sizes of folders -----------------------------------------------------------------------
MOST_FILES = 12
# The modules of the top level are import paths that users and authors of backends have in their code: `tdstore.store`,
# `tdstore.types`, `tdstore.utils`, ... A folder for them would be a second name for each.
LARGE_FOLDERS = {"tdstore"}


def test_folders_have_few_files():
    offenders = []
    folders = {path.parent for path, _ in nodes(ast.Module)}
    for folder in sorted(folders):
        files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        if len(files) > MOST_FILES and name_of(folder) not in LARGE_FOLDERS:
            offenders.append(f"{name_of(folder)}: {len(files)} files")
    none(offenders, f"folders with more than {MOST_FILES} files")


def test_every_module_is_read():
    assert len(core()) > 100
    assert all(isinstance(tree(path), ast.Module) for path in core())


def test_asserts_of_the_kit_say_what_is_wrong():
    """An author of a backend reads messages of the kit, not its source: no `assert False`."""
    bare = [
        f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"
        for path, node in nodes(ast.Assert)
        if name_of(path).startswith("tdstore/testing/") and node.msg is None
    ]
    none(bare, "asserts of the kit without a message: give one, or use a helper of tdstore/testing/comparing.py")
