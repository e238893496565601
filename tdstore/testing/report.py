"""The table of `python -m tdstore.testing BACKEND --report`: what a backend promises, and what the kit has shown."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from tdstore.store import Cap

CAP = "ability"
"""The property of a test in which `StoreSetup.needs` records an ability."""


class Result(NamedTuple):
    """The result of one test."""

    subject: str
    """What the class promises that declares the test."""
    caps: frozenset[str]
    """The abilities that it needs."""
    outcome: str
    """"passed", "failed", "skipped" or "deviates"."""
    reason: str
    """Why it was skipped, or why the store deviates."""
    name: str
    """Of the test, without its case."""


class Results:
    """A pytest plugin that collects results and prints tables of them."""

    def __init__(self) -> None:
        self._subjects: dict[str, str] = {}
        self.results: dict[str, Result] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Record the promise of the class of each test."""
        self._subjects = {item.nodeid: subject_of(item) for item in items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the result of a test: the worst of its phases."""
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        caps = frozenset(str(value) for key, value in report.user_properties if key == CAP)
        reason = ""
        if hasattr(report, "wasxfail"):
            outcome, reason = "deviates", str(report.wasxfail).removeprefix("declared deviation: ")
        elif report.skipped and isinstance(report.longrepr, tuple):
            outcome, reason = "skipped", report.longrepr[2].removeprefix("Skipped: ")
        else:
            outcome = report.outcome
        worse = outcome != "passed" or report.when == "call"
        if report.nodeid not in self.results or worse:
            self.results[report.nodeid] = Result(self._subjects[report.nodeid], caps, outcome, reason, name)

    def skipped(self) -> list[str]:
        """Return one line for each reason, with the tests that were skipped for it."""
        reasons: dict[str, list[str]] = {}
        for result in self.results.values():
            if result.outcome == "skipped":
                reasons.setdefault(result.reason, []).append(result.name)
        return [
            f"skipped {len(names)}, {reason}: {', '.join(dict.fromkeys(names))}"
            for reason, names in sorted(reasons.items())
        ]

    def table(self, caps: Cap) -> str:
        """Return the report as Markdown: a table of promises, a table of abilities, and what was not shown.

        Args:
            caps: the abilities that the stores declare.
        """
        every = [r for r in self.results.values() if r.name != "test_deviations_name_tests"]  # about the test class
        lines = ["| promise | shown by | not shown |", "|---|---|---|"]
        for subject in dict.fromkeys(result.subject for result in every):
            lines.append(f"| {subject} | {_counts(r for r in every if r.subject == subject)} |")
        lines += ["", "| ability | declared | shown by | not shown |", "|---|---|---|---|"]
        for cap in Cap:
            needing = [r for r in every if cap.name in r.caps]
            declared = "yes" if cap in caps else "no"
            lines.append(f"| `{cap.name}` | {declared} | {_counts(needing) if cap in caps else '- | -'} |")
        reasons = Counter(f"{r.outcome}, {r.reason}" for r in every if r.reason)
        if reasons:
            lines += ["", "Not shown:", "", *(f"* {count} {reason}" for reason, count in sorted(reasons.items()))]
        return "\n".join(lines)


def _counts(results: Iterable[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    shown = f"{counts['passed']} test{'s' * (counts['passed'] > 1)}" if counts["passed"] else "no test"
    others = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()) if what != "passed")
    return f"{shown} | {others or '-'}"


def subject_of(item: pytest.Item) -> str:
    """Return the promise of the class that declares a test: its docstring after "Tests that"."""
    name = getattr(item, "originalname", item.name)
    for cls in getattr(item, "cls", object).__mro__:
        if name in vars(cls):
            text = " ".join((inspect.getdoc(cls) or cls.__name__).splitlines()[0].split())
            return (
                text.removeprefix("Tests that ")
                .removeprefix("A test that ")
                .replace(", and that ", ", and ")
                .rstrip(".")
            )
    raise AssertionError(f"{item.nodeid} is a test of no class")
