"""The kit is tested on wrong stores: each breaks one promise and must be caught by the test of that promise."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from tdstore.builtin.memory import open_memory
from tdstore.errors import TransientError
from tdstore.header import Header
from tdstore.testing import CountingStore, FlakyStore, SlowStore, StoreTests, WrappedStore
from tdstore.testing.processes.warm import python
from tdstore.types import LeafSpec, Read, Write
from tests.testing import wrong_stores
from tests.testing.verdicts import CAUGHT_BY, SAYS

ROOT = Path(__file__).parents[2]

# Most of a wrong store is right: a kit that fails everything would "catch" it too. The whole kit runs on these;
# on the others the tests that must catch them, and there pytest tells of each that is no longer in the kit.
MOSTLY_RIGHT = ("LostFlag", "AnyOption", "KeptOnCreate", "AppendTruncates", "BlindVerify")
WHOLE = (*MOSTLY_RIGHT, "SqliteStore", "Declared", "Stale")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, str]]:
    """Class -> test -> "passed", "skipped" or what went wrong, from one run of the kit on the wrong stores."""
    report = tmp_path_factory.mktemp("kit") / "report.xml"
    # The tests left out cost seconds and catch nothing here
    # (the state machine proves itself on one store).
    chosen = "not concurrent_reads and not many_leaves and not large"
    chosen += " and (not state_machine or IgnoredIndex) and (not create_is_lazy or EagerCreate or ReadsW)"
    file = "tests/testing/wrong_stores.py"
    tests = [f"{file}::Test{name}" for name in WHOLE]
    tests += [f"{file}::Test{name}::{test}" for name in CAUGHT_BY if name not in WHOLE for test in CAUGHT_BY[name]]
    command = [sys.executable, "-m", "pytest", *tests, "-q", "--tb=line", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", "-k", chosen], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, dict[str, str]] = {}
    for case in ET.parse(report).iter("testcase"):
        ends = [end for end in case if end.tag in ("failure", "error", "skipped")]
        what = "; ".join(f"{end.tag}: {end.get('message', '')}" for end in ends)
        cases = found.setdefault(case.get("classname", "").rpartition(".")[2], {})
        earlier = cases.get(case.get("name", ""))  # a test that fails, and again when it is taken down, is there twice
        cases[case.get("name", "")] = f"{earlier}; {what}" if earlier else what or "passed"
    return found


def failed(outcomes: dict[str, dict[str, str]], name: str) -> set[str]:
    cases = outcomes[f"Test{name}"]
    wrong = [case for case, what in cases.items() if what.startswith(("failure", "error"))]
    return {case.partition("[")[0] for case in wrong} | {case for case in wrong if case in CAUGHT_BY.get(name, ())}


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_wrong_store_is_caught(outcomes, name):
    missed = CAUGHT_BY[name] - failed(outcomes, name)
    assert not missed, f"{missed} did not notice that {name} is wrong; noticed by {sorted(failed(outcomes, name))}"


def test_every_wrong_store_has_its_words():
    assert SAYS.keys() == CAUGHT_BY.keys()


@pytest.mark.parametrize("name", SAYS)
def test_the_message_names_what_is_wrong(outcomes, name):
    messages = [what for what in outcomes[f"Test{name}"].values() if what.startswith("failure")]
    assert any(SAYS[name] in text for text in messages), messages


def test_every_wrong_store_is_in_the_table(outcomes):
    classes = {name for name in vars(wrong_stores) if name.startswith("Test")}
    assert {f"Test{name}" for name in (*CAUGHT_BY, *WHOLE)} == classes == set(outcomes)


def test_the_store_they_are_wrong_versions_of_passes(outcomes):
    for name in MOSTLY_RIGHT:
        assert len(outcomes[f"Test{name}"]) > 60
        assert len(failed(outcomes, name)) <= 4, (name, failed(outcomes, name))
    assert failed(outcomes, "SqliteStore") == set()


def test_declared_deviation_is_an_expected_failure(outcomes):
    cases = outcomes["TestDeclared"]
    assert failed(outcomes, "Declared") == set()
    for name in ("test_resize_tells_the_truth", "test_resize_missing", "test_closed"):
        assert "declared deviation: no resize yet" in cases[name]


def test_stale_deviation_fails(outcomes):
    cases = outcomes["TestStale"]
    assert cases["test_delete"].startswith("failure: [XPASS(strict)] declared deviation: was broken")
    assert cases["test_round_trip_dtype[bfloat16]"].startswith("failure: [XPASS(strict)]")
    assert cases["test_round_trip_dtype[float32]"] == "passed"


def test_deviation_that_names_no_test_fails(outcomes):
    assert "test_delet_all_or_nothing" in outcomes["TestStale"]["test_deviations_name_tests"]
    assert "test_delete_all_or_nothing" in outcomes["TestStale"]["test_deviations_name_tests"]


def test_the_kit_has_some_sixty_tests():
    names = [name for name in dir(StoreTests) if name.startswith("test_")]
    assert len(names) >= 60
    assert all(getattr(StoreTests, name).__doc__ for name in names)


# -- without writing code ------------------------------------------------------------------
def kit(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [*python(), "-m", "tdstore.testing", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env}, cwd="/")


def test_command_line_on_a_backend():
    done = kit("memory", "--no-location", "-k", "header or closed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


def test_command_line_on_an_opener(tmp_path):
    source = "from tdstore.builtin.memory import MemoryStore\nfrom tdstore.store import Cap, Store\n\n"
    source += "class Bad(MemoryStore):\n    resize = Store.resize\n\n"
    source += "def open_bad(location=None, *, mode='w'):\n    return Bad()\n"
    (tmp_path / "badplugin.py").write_text(source)
    done = kit("badplugin:open_bad", "--no-location", "-k", "resize or delete", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "test_resize_tells_the_truth" in done.stdout
    assert "::test_delete" not in done.stdout


TWINS = """
from tdstore.builtin.memory import open_memory
from tdstore.hookspecs import Backend, hookimpl
from tdstore.store import Cap

def open_one(location=None, *, mode="w"):
    return open_memory(location, mode=mode)

@hookimpl
def tdstore_backends():
    for name in ("left", "right"):
        caps = open_memory().caps
        yield Backend(name=name, opener="twins:open_one", summary=f"the {name} one", caps=caps, schemes=(name,))
"""


@pytest.mark.parametrize("report", [[], ["--report"]])
def test_command_line_on_two_backends_of_one_distribution(tmp_path, report):
    (tmp_path / "twins.py").write_text(TWINS)
    (tmp_path / "twins-1.0.dist-info").mkdir()
    (tmp_path / "twins-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: twins\nVersion: 1.0\n")
    (tmp_path / "twins-1.0.dist-info" / "entry_points.txt").write_text("[tdstore]\ntwins = twins\n")
    done = kit("twins", "--no-location", "-k", "header_minimal", *report, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    headings = [line for line in done.stdout.splitlines() if line.startswith("## ")]
    assert headings == ["## left: the left one", "## right: the right one"]
    if report:
        assert done.stdout.index("## left") < done.stdout.index("| promise |") < done.stdout.index("## right")


def test_command_line_says_what_was_left_out(tmp_path):
    done = kit("h5", "--location", str(tmp_path), "-k", "view or second_process_reads or closed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped 1, no VIEW: test_view_missing_leaf" in done.stdout.splitlines()
    assert "CrashTests, which kill writers, were not run" in done.stdout
    assert "CrashTests" not in kit("memory", "--no-location", "-k", "closed").stdout


def test_command_line_on_nothing():
    done = kit("memroy", "--no-location")
    assert done.returncode == 2
    assert "did you mean 'memory'" in done.stderr


# -- wrappers ------------------------------------------------------------------------------
def filled(wrap) -> WrappedStore:
    store = wrap(open_memory())
    store.create({("a",): LeafSpec((3,), "int64"), ("b",): LeafSpec((3,), "int64")})
    return store


def test_counting_store():
    store = filled(CountingStore)
    store.read([Read(("a",)), Read(("b",))])
    store.write([Write(("a",), (), torch.arange(3))])
    list(store.paths())
    assert store.calls == {"create": 1, "read": 1, "write": 1, "paths": 1}
    assert store.leaves["read"] == 2
    assert store.rounds == 3
    store.reset()
    assert store.rounds == 0
    assert store.view(("a",)).tolist() == [0, 1, 2]
    assert store.rounds == 0


def test_flaky_store_fails_before_it_acts():
    store = filled(lambda inner: FlakyStore(inner, every=2))
    with pytest.raises(TransientError, match="write on ram"):
        store.write([Write(("a",), (), torch.ones(3, dtype=torch.int64))])
    assert store.read([Read(("a",))])[0].tolist() == [0, 0, 0]
    with pytest.raises(TransientError):
        store.save_header(Header())
    with pytest.raises(ValueError):
        FlakyStore(open_memory(), every=0)


def test_slow_store_waits(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("tdstore.testing.wrappers.time.sleep", waits.append)
    store = filled(lambda inner: SlowStore(inner, latency=0.5))
    store.read([Read(("a",)), Read(("b",))])
    store.view(("a",))
    assert waits == [0.5, 0.5]


def open_wrapped(location: str | None = None, *, mode: str = "w") -> WrappedStore:
    return CountingStore(open_memory(location, mode=mode))


class TestWrapped(StoreTests):
    """A wrapper is a store like the one inside."""

    open = staticmethod(open_wrapped)
    caps = open_memory().caps
    max_examples = 3

    @pytest.fixture
    def location(self) -> None:
        return None
