"""Methods that users call most, and all that authors of backends call, are documented by examples that run."""

from __future__ import annotations

import builtins
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict, errors, storekit, testing
from tdstore.builtin.memory import open_memory
from tdstore.index.ranges import Range
from tdstore.store import Store
from tdstore.storekit.local_engine import LocalEngine
from tdstore.types import LeafSpec, Read, Write
from tests.house.sources import none

# A list that may only grow: the methods that the documents and the programs of users call most.
DOCUMENTED = """
add add_ all any append apply apply_ auto_batch_size_ backward bool broadcast_to bytes cat chunk clear clone close
commit consolidate contiguous copy copy_ cpu create_nested data_ptr del_ densify detach dim empty entry_class
exclude expand expand_as extend fill_ flatten flatten_keys float from_any from_consolidated from_dataclass from_dict
from_h5 from_module from_modules from_namedtuple from_pandas from_parquet from_pytree from_schema gather get get_at
is_memmap is_non_tensor is_shared items keys lazy_stack lerp load load_memmap load_state_dict lock_ map map_iter
masked_fill_ max maybe_dense_stack mean memmap memmap_ memmap_like memmap_refresh_ named_apply new_zeros norm numel
numpy pad permute pop popitem prod read refresh_ rename rename_key_ replace requires_grad_ reshape resize_ roll save
select set set_ set_at_ set_non_tensor setdefault share_memory_ size split split_keys squeeze stack state_dict std
sum to to_dict to_h5 to_lazystack to_module to_tensordict to_zarr tolist transpose type unbind unflatten
unflatten_keys unlock_ unsqueeze update update_ update_at_ values verify view where zero_ zero_grad
""".split()

# Of these, the calls in which nothing can go wrong: they have no `Raises`.
CANNOT_FAIL = frozenset(
    """
    auto_batch_size_ bool bytes clone copy cpu data_ptr densify detach dim float is_memmap is_shared items keys
    lock_ numel type values zero_grad
    """.split()
)

# Functions of the package: those that are a line over a method say which one it is.
FUNCTIONS = """
    cat collate copy from_dict from_schema group_by lazy_stack load memmap open pad pad_sequence save stack
    unpad_sequence verify
    """.split()


def function(name: str) -> Callable[..., Any]:
    found = inspect.getattr_static(TensorDict, name) if name in dir(TensorDict) else getattr(tdstore, name)
    return inspect.unwrap(getattr(found, "__func__", found))


def text_of(fn: Callable[..., Any]) -> str:
    return inspect.getdoc(fn) or ""


CASES = [pytest.param(function(name), id=name) for name in DOCUMENTED] + [
    pytest.param(getattr(tdstore, name), id=f"tdstore.{name}") for name in FUNCTIONS
]


def test_there_are_a_hundred_methods() -> None:
    assert len(set(DOCUMENTED)) == len(DOCUMENTED) >= 100
    assert set(DOCUMENTED) >= CANNOT_FAIL


@pytest.mark.parametrize("fn", CASES)
def test_what_users_call_most_is_documented(fn: Callable[..., Any]) -> None:
    text = text_of(fn)
    parameters = [name for name in inspect.signature(fn).parameters if name not in ("self", "cls")]
    listed = text.partition("Args:\n")[2].partition("\n\n")[0]
    unlisted = [name for name in parameters if not re.search(rf"(?<!\w)\*{{0,2}}{name}\b", listed)]
    assert len(parameters) < 2 or "Args:" in text
    assert "Args:" not in text or not unlisted
    assert "Raises:" in text or fn.__name__ in CANNOT_FAIL
    assert ">>>" in text


@pytest.mark.parametrize("fn", CASES)
def test_what_is_raised_is_an_exception(fn: Callable[..., Any]) -> None:
    raised = text_of(fn).partition("Raises:\n")[2].partition("\n\n")[0]
    for line in raised.splitlines():
        if not line.startswith("     "):  # the continuation of the line above
            name = line.strip().partition(":")[0]
            error = getattr(errors, name, None) or getattr(builtins, name)
            assert issubclass(error, Exception)


@pytest.mark.parametrize("fn", CASES)
def test_examples_run(fn: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = {**{public: getattr(tdstore, public) for public in tdstore.__all__}, "torch": torch, "tdstore": tdstore}
    # The text is that of a method that it overrides where it has none of its own, as `help` shows it.
    test = doctest.DocTestParser().get_doctest(text_of(fn), known, fn.__name__, None, None)
    assert test.examples
    assert not doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test).failed


# -- what authors of backends call --------------------------------------------------------------
FOR_AUTHORS = [
    *(f"tdstore.{name}" for name in ("engine", "hookspecs", "registry", "store")),
    *(f"tdstore.storekit.{found.name}" for found in pkgutil.iter_modules(storekit.__path__)),
    *(f"tdstore.testing.{found.name}" for found in pkgutil.iter_modules(testing.__path__) if found.name != "__main__"),
]
# Classes whose fields have a docstring each, instead of `Args`.
FIELDS = frozenset({"Backend", "Codec", "Log"})


def public(module: ModuleType) -> Iterator[tuple[str, Any, list[str]]]:
    """Name, object and parameters of each public function, class and method of a module; inherited ones are not."""
    for name, found in vars(module).items():
        if name.startswith("_") or getattr(found, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(found):
            yield name, inspect.unwrap(found), parameters_of(inspect.unwrap(found))
        elif inspect.isclass(found):
            own_init = inspect.isfunction(vars(found).get("__init__"))
            is_protocol = getattr(found, "_is_protocol", False)
            yield name, found, parameters_of(found.__init__) if own_init and not is_protocol else []
            for method, value in vars(found).items():
                value = getattr(value, "__func__", value)
                if inspect.isfunction(value) and not method.startswith(("_", "test_")):
                    yield f"{name}.{method}", inspect.unwrap(value), parameters_of(inspect.unwrap(value))


def parameters_of(fn: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(fn).parameters if name not in ("self", "cls")]


@pytest.mark.parametrize("name", FOR_AUTHORS)
def test_what_authors_call_says_what_it_takes(name: str) -> None:
    offenders = []
    for what, found, parameters in public(importlib.import_module(name)):
        text = text_of(found)
        first = text.partition("\n\n")[0]
        if re.search(r"as `\w+\.\w+` does", first) or what in FIELDS or not (text or inspect.isclass(found)):
            continue  # the text of the method that it overrides is the one that counts
        listed = text.partition("Args:\n")[2].partition("\n\n")[0]
        unlisted = [p for p in parameters if not re.search(rf"(?<!\w)\*{{0,2}}{p}\b", listed)]
        if not text or (unlisted and (len(parameters) > 1 or listed)):
            offenders.append(f"{name}.{what}: {', '.join(unlisted) or 'no docstring'}")
    none(offenders, "public functions, classes and methods whose docstrings lack Args")


@pytest.mark.parametrize("name", FOR_AUTHORS)
def test_examples_for_authors_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = {
        "tdstore": tdstore, "torch": torch, "tmp_path": tmp_path, "open_memory": open_memory,
        "Read": Read, "Write": Write, "LeafSpec": LeafSpec, "LocalEngine": LocalEngine, "Range": Range, "Store": Store,
    }  # fmt: skip
    module = importlib.import_module(name)
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert not doctest.testmod(module, extraglobs={**known, **vars(module)}, optionflags=options).failed
