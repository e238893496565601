"""The tiers of the suite hold: each test gets the markers of what it uses, and the quick ones use nothing slow."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from typing import Any

import pytest

from tdstore.testing import crash
from tests import servers, tiers
from tests.house.collected import uses
from tests.house.sources import ROOT


def by_subprocess():
    return subprocess.run([], check=True)


def by_helper():
    return by_subprocess()


def by_fork():
    return os.fork()


def by_method():
    return multiprocessing.get_context("spawn").Process()


def by_sweep():
    return crash.in_child


def by_inner():
    def inner():
        return by_subprocess()

    return inner


def by_import():
    import tensordict  # noqa: PLC0415

    return tensordict


def by_server():
    return servers.redis_server()


def plain():
    return sum([1, 2])


class Methods:
    def test_one(self):
        return by_subprocess()


@pytest.mark.parametrize("function", [by_subprocess, by_helper, by_fork, by_method, by_inner, Methods])
def test_a_function_that_reaches_a_process_is_seen(function):
    assert tiers.reached(function) == {"process"}


def test_peers_and_servers_are_seen():
    assert "peer" in tiers.reached(by_import)
    assert "server" in tiers.reached(by_server)
    assert "sweep" in tiers.reached(by_sweep)
    assert tiers.reached(plain) == set()
    assert tiers.reached("a parameter") == set()


def has_the_tier(config: pytest.Config) -> bool:
    """Whether this run has all tests of the local tier."""
    everything = set(config.args) == set(config.getini("testpaths"))
    chosen = config.option.markexpr in ("", "local")
    return everything and chosen and not config.option.keyword and not config.option.deselect


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Every test of the local tier: of this run where it has them, otherwise as another process collects them."""
    if has_the_tier(request.config):
        return [test for test in uses(request.session) if "local" in test["marks"]]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-m", "local", "-p", "no:cacheprovider"]
    command += ["-p", "no:xdist", "-p", "tests.house.collected"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("COLLECTED"))
    return json.loads(line.removeprefix("COLLECTED"))


def test_the_tiers_hold(collected):
    quick = [t for t in collected if "quick" in t["marks"] and not tiers.is_beyond(ROOT / t["file"], "quick")]
    assert len(quick) > 3000
    assert len(collected) > 2 * len(quick)
    beyond = {"server", "peer", "types", "sweep", "slow"}
    for tests, without in ((collected, beyond), (quick, {"process", "disk", "compile"})):
        wrong = [t["id"] for t in tests if without & set(t["marks"]) or tiers.SERVERS & set(t["fixtures"])]
        assert not wrong, f"tests of a tier that has no {', '.join(sorted(without))}:\n" + "\n".join(wrong)
    assert not [t["id"] for t in quick if {"tmp_path", "tmp_path_factory"} & set(t["fixtures"])]


def test_a_process_beyond_the_tier_is_refused(monkeypatch, request):
    monkeypatch.setattr(tiers, "_running", request.node)
    monkeypatch.setattr(request.node, "get_closest_marker", lambda name: name in ("quick", "local") or None)
    with pytest.raises(pytest.fail.Exception, match="is a quick test and starts a process"):
        subprocess.run(["true"], check=True)
    with pytest.raises(pytest.fail.Exception, match="is a local test and starts a server"):
        tiers.refuse("server")
