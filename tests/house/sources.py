"""Read the sources of tdstore and of its plugins as syntax trees, once for all rules."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tdstore"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def sources() -> list[Path]:
    """Return the files of the core and of the plugins, without tests."""
    plugins = (p for p in (ROOT / "plugins").rglob("*.py") if "tests" not in p.parts)
    return sorted([*PACKAGE.rglob("*.py"), *plugins])


def core() -> list[Path]:
    """Return the files of the core."""
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Return a path relative to the checkout."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(path.read_text(), str(path))


@functools.cache
def walked(path: Path) -> list[ast.AST]:
    """Return all nodes of a file."""
    return list(ast.walk(tree(path)))


def forget() -> None:
    """Let go of all that was parsed: millions of objects, through which each later collection of garbage would go."""
    tree.cache_clear()
    walked.cache_clear()


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[Path, Any]]:
    """Yield every node of some kinds in the sources, with its file."""
    for path in sources():
        yield from ((path, node) for node in walked(path) if isinstance(node, kinds))


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` of a name or an attribute, "" of anything else."""
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def none(offenders: list[str], what: str) -> None:
    """Fail with all offenders against a rule."""
    assert not offenders, f"{what}:\n" + "\n".join(offenders)


def at_most(limit: int, offenders: list[str], what: str) -> None:
    """Fail when there are more offenders against a rule than there were: a number that may only fall."""
    assert len(offenders) <= limit, (
        f"{what}: {len(offenders)}, and at most {limit} are left over from before the rule. "
        "Mend the new ones; when you mend old ones, lower the number in this test.\n" + "\n".join(offenders)
    )
