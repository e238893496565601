"""Where tests are: each folder of the sources has a folder of tests with its name, or one that this table names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.sources import PACKAGE, ROOT, core, name_of, none

TESTS = ROOT / "tests"
# Folders whose tests are in a suite with another name; most of these are tested on every container at once.
ELSEWHERE = {
    "container/methods": "surface",
    "convert/checkpoints": "convert",
    "convert/objects": "convert",
    "convert/tables": "convert",
    "data": "data_loading",  # tests/data has the files of older versions
    "data/images": "data_loading",
    "ops": "differential",
    "rl/storages": "rl",
    "rl/tables": "rl",
    "tensordicts/resident": "differential",
    "testing/checks": "testing",
    "testing/checks/places": "testing",
    "testing/checks/rivals": "testing",
    "testing/processes": "testing",
}
# Suites that cut across the folders of the sources, and what tests are made of.
ACROSS = set(
    """
    compile cuda data data_loading differential examples faults house plugins porting reveal servers surface
    sweep torch_integration
    """.split()
)


def folders_of_sources() -> set[str]:
    """Folders of `tdstore/` that hold modules, by their path below it; a module at the top level is tested beside."""
    folders = {path.parent for path in core() if path.name != "__init__.py"} - {PACKAGE}
    return {folder.relative_to(PACKAGE).as_posix() for folder in folders}


def has_tests(folder: Path) -> bool:
    return any(folder.glob("test_*.py"))


def test_each_folder_of_the_sources_has_its_tests():
    offenders = []
    for name in sorted(folders_of_sources()):
        if not has_tests(TESTS / ELSEWHERE.get(name, name)):
            offenders.append(f"tdstore/{name}: no tests/{name}, and no entry in ELSEWHERE of {name_of(Path(__file__))}")
    none(offenders, "folders without tests")


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_the_table_is_of_folders_that_are_there(name):
    assert (PACKAGE / name).is_dir()
    assert not has_tests(TESTS / name), f"tests/{name} is there: drop the entry"


def test_each_folder_of_tests_mirrors_one_of_the_sources():
    known = folders_of_sources() | ACROSS
    offenders = []
    for path in sorted(TESTS.rglob("test_*.py")):
        parts = path.parent.relative_to(TESTS).parts
        mirrors = any("/".join(parts[:end]) in known for end in range(1, len(parts) + 1))
        if parts and not mirrors and not (PACKAGE / "/".join(parts)).is_dir():
            offenders.append(name_of(path))
    none(offenders, "tests in folders that mirror none of the sources: move them, or name the suite in ACROSS")
