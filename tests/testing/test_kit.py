"""The command line of the kit, declared deviations, and the wrappers. Wrong stores: `test_wrong_stores.py`."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tdstore.builtin.memory import open_memory
from tdstore.errors import TransientError
from tdstore.header import Header
from tdstore.testing import CountingStore, FlakyStore, SlowStore, StoreTests, WrappedStore
from tdstore.testing.processes.warm import python
from tdstore.testing.setup import with_promise
from tdstore.types import LeafSpec, Read, Write

ROOT = Path(__file__).parents[2]


def outcomes(*tests: str) -> dict[str, str]:
    """Of each test that is not right about its deviations, what pytest says about it."""
    command = [*python(), "-m", "pytest", "-q", "-rA", "--tb=line", "-p", "no:cacheprovider"]
    command += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    done = subprocess.run(
        [*command, *tests], cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"}
    )
    said = re.findall(r"^([A-Z]+) tests/testing/deviating.py::\w+::(\S+)(?: - (.*))?$", done.stdout, re.MULTILINE)
    assert said, done.stdout + done.stderr
    return {test: f"{what}: {why}" for what, test, why in said}


def test_deviations():
    """One that is real is an expected failure; one that was repaired, or names no test, fails."""
    file = "tests/testing/deviating.py"
    real = outcomes(f"{file}::TestDeclared", "-k", "resize or closed or missing_leaf")
    assert real["test_resize_tells_the_truth"] == "XFAIL: declared deviation: no resize yet"
    assert real["test_closed"] == "XFAIL: declared deviation: no resize yet"
    assert real["test_missing_leaf_read"] == "PASSED: "
    assert not [what for what in real.values() if what.startswith(("FAILED", "ERROR"))]
    stale = outcomes(f"{file}::TestStale", "-k", "delete or round_trip_dtype or deviations")
    assert stale["test_delete"] == "FAILED: [XPASS(strict)] declared deviation: was broken"
    assert stale["test_round_trip_dtype[bfloat16]"].startswith("FAILED: [XPASS(strict)]")
    assert stale["test_round_trip_dtype[float32]"] == "PASSED: "
    assert stale["test_deviations_name_tests"].startswith("FAILED: AssertionError: deviations names 'test_delet_all_or")


def test_an_error_that_nobody_expects_comes_with_the_promise():
    class Broken(StoreTests):
        def test_reopen(self):
            """Check that all is there again."""
            raise KeyError("an error of the store")

    with pytest.raises(KeyError) as caught:
        with_promise(Broken().test_reopen)()
    (note,) = caught.value.__notes__
    assert note == "The store raised this where no error is expected.\nThe test: Check that all is there again."


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
