"""Names and docstrings: field terms, and an imperative first word. What is left of before is counted."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.sources import at_most, name_of, none, sources, walked

# -- docstrings begin with an imperative ----------------------------------------------------
NOT_VERBS = frozenset(
    """
    a after all always an and another any are as at batch because before below between both but by c-order called
    class closed contiguous crc32c data device either element empty entry every everything false first flat for from
    group how if in into it key largest last lazy leaf length location memory more nested new no nobody none not
    nothing number object of on one our out over own packed part path position r r+ row second shape size smallest
    so some somebody something std store's tensor than that the their them then there they this three to torch true
    each fifty json many product reqwest several small softmax standard state structure those torchrl two until
    value what when where whether which who whole why with without you
    """.split()
)
VERBS = frozenset("bring discuss embed expand feed focus need pass process progress string bless press access".split())


def is_imperative(word: str) -> bool:
    """Guess whether the first word of a docstring is a verb in the imperative."""
    word = word.rstrip(".,:;").lower()
    if not word.isalpha():
        return False
    return word in VERBS or not (word in NOT_VERBS or word.endswith(("s", "ing", "ed")))


def docstrings() -> Iterator[tuple[Path, int, str, str]]:
    """File, line, name and docstring of every function and method; a property is a noun, and may say so."""
    for path in sources():
        for node in walked(path):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            if text := ast.get_docstring(node):
                yield path, node.lineno, node.name, text


def test_docstrings_begin_with_an_imperative():
    offenders = [
        f"{name_of(path)}:{line} {name}: {text.split()[0]} ..."
        for path, line, name, text in docstrings()
        if not is_imperative(text.split()[0])
    ]
    none(offenders, "docstrings that do not begin with an imperative")


@pytest.mark.parametrize("word", ["Return", "Write", "Pass", "Bring", "Process", "Open"])
def test_imperatives_are_known(word):
    assert is_imperative(word)


@pytest.mark.parametrize("word", ["The", "Whether", "Returns", "Writing", "Packed", "What", "Rows", "`td[index]`", "0"])
def test_other_first_words_are_seen(word):
    assert not is_imperative(word)


# -- retired words --------------------------------------------------------------------------
@functools.cache
def names_defined(path: Path) -> list[tuple[int, str, frozenset[str]]]:
    """Line, name and words of every function, class, argument, variable and attribute of a file, and its own."""
    return [(line, name, words_of(name)) for line, name in [(1, path.stem), *names_within(path)]]


def names_within(path: Path) -> Iterator[tuple[int, str]]:
    for node in walked(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


@functools.cache
def words_of(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name))


# word -> (the term to write instead, how many names of a file still have it: a number that may only fall)
RETIRED: dict[str, tuple[str, int]] = {
    "apart": ("separate, own copy", 0),
    "crowded": ("needs_compaction", 0),
    "dressed": ("wrapped", 0),
    "envelope": ("value record", 0),
    "given": ("name what it is", 1),
    "hollow": ("empty", 0),
    "home": ("binding", 0),
    "kept": ("inline", 0),
    "lent": ("lazy gather", 0),
    "medium": ("storage", 0),
    "odd": ("mismatched, name what it is", 0),
    "packing": ("compaction", 0),
    "peer": ("tensordict", 0),
    "redressed": ("rewrapped", 0),
    "shut": ("closed", 0),
    "somebody": ("holder", 0),
    "spans": ("offsets", 0),
    "taken": ("lazy gather", 0),
    "texts": ("var-length columns", 0),
    "told": ("warned, reported", 0),
    "travelling": ("task payload", 0),
    "undressed": ("unwrapped", 0),
    "unmoved": ("unchanged", 0),
    "worn": ("tensorclass", 0),
}
# Public names that have a retired word: others may use or override them. -> why they stay
STAY: dict[tuple[str, str], str] = {
    ("tdstore/keys.py", "taken"): "an argument of the public `encode_names`",
    (
        "tdstore/testing/checks/catalogue.py",
        "test_odd_groups",
    ): "authors of backends name it in `deviations`",
    ("tdstore/testing/checks/catalogue.py", "test_odd_keys"): "as above",
    ("tdstore/testing/checks/headers.py", "test_header_is_apart_from_leaves"): "as above",
    ("tdstore/testing/checks/headers.py", "test_header_kept_by_writes"): "as above",
    ("tdstore/testing/checks/headers.py", "test_header_odd_keys"): "as above",
    ("tdstore/testing/crash.py", "kept"): "`CrashTests.kept`, which authors of backends override",
}


@pytest.mark.parametrize("word", sorted(RETIRED))
def test_retired_words_do_not_come_back(word):
    term, limit = RETIRED[word]
    offenders = []
    for path in sources():
        lines: dict[str, int] = {}
        for line, name, words in names_defined(path):
            if word in words and (name_of(path), name) not in STAY:
                lines.setdefault(name, line)
        offenders += [f"{name_of(path)}:{line} {name}" for name, line in lines.items()]
    at_most(limit, offenders, f"names with {word!r}, which is now: {term}")


def test_names_that_stay_are_there():
    defined = {(name_of(path), name) for path in sources() for _, name, _ in names_defined(path)}
    assert set(STAY) <= defined
