"""`python -m tdstore.testing BACKEND --report`, and the page of the docs that is written with it."""

from __future__ import annotations

import re

import pytest

from tdstore.registry import registry
from tdstore.store import Cap
from tests.testing.conformance import ARGUMENTS, command, report, section

ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
ABILITY = re.compile(r"^\| `(\w+)` \| (yes|no) \|", re.MULTILINE)
OF_CRASHES = (
    "a writer that is killed leaves the old store, the new one, or an error that says so",
    "what finds no room on a disk is an error that leaves the old store whole",
)


@pytest.fixture(scope="module")
def memory() -> str:
    return report("memory")


def test_the_page_has_the_table_of_today(memory):
    assert section("memory") == f"```console\n$ {command('memory')}\n```\n\n{memory}", (
        "the kit or the memory backend has changed: `make conformance` writes the page"
    )


def counts(tables: str) -> dict[str, int]:
    """Of each promise: how many tests there are, shown or not."""
    promises = [row for row in ROW.findall(tables) if row[0] != "promise" and "---" not in row[0]]
    return {what: sum(map(int, re.findall(r"\d+", shown + " " + other))) for what, shown, other in promises}


@pytest.mark.parametrize("backend", ARGUMENTS)
def test_each_table_is_about_the_kit_and_the_declaration_of_today(memory, backend):
    found = counts(section(backend))
    for promise in OF_CRASHES:
        assert (found.pop(promise, 0) > 0) == ("--crash" in ARGUMENTS[backend])
    assert found == counts(memory), f"run `python -m tests.testing.conformance {backend}`"
    declared = registry().get(backend).caps & ~Cap.ASYNC  # which may depend on the place
    yes = {name for name, answer in ABILITY.findall(section(backend)) if answer == "yes"} - {"ASYNC"}
    assert yes == {cap.name for cap in declared}
    assert "failed" not in section(backend)


def test_what_was_not_shown_has_its_reason(memory):
    assert re.search(r"^\* \d+ skipped, no PERSISTENT$", memory, re.MULTILINE)
    skipped = sum(map(int, re.findall(r"^\* (\d+) skipped", memory, re.MULTILINE)))
    rows = [row for row in ROW.findall(memory) if row[0] != "promise" and "---" not in row[0]]
    assert skipped == sum(int(n) for *_, other in rows for n in re.findall(r"(\d+) skipped", other)) > 0
