"""`make demo`: that it ends well, and that it would not if a backend changed a bit."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tests import programs

DEMO = Path(__file__).parents[2] / "examples" / "atari_demo"
SEEDS = range(2)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The demo's `__main__`, as a module."""
    monkeypatch.syspath_prepend(str(DEMO))
    spec = importlib.util.spec_from_file_location("atari_demo_main", DEMO / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def played(rows: int = 300) -> TensorDict:
    """Something of the shape of what the demo plays, small."""
    frames = torch.arange((rows + 1) * 48, dtype=torch.int64).remainder(251).to(torch.uint8).view(rows + 1, 4, 4, 3)
    return TensorDict(
        {
            "obs": frames[:-1],
            "action": torch.arange(rows).remainder(4),
            "meaning": ["FIRE" if i % 3 else "NOOP" for i in range(rows)],
            "info": {"pair": torch.zeros(rows, 2)},
            "next": {"obs": frames[1:], "reward": torch.zeros(rows), "done": torch.zeros(rows, dtype=torch.bool)},
        },
        batch_size=[rows],
    )


def changed(how: str) -> TensorDict:
    td = played()
    if how == "one bit of a frame":
        obs = td["obs"].clone()
        obs[123, 2, 1, 0] ^= 1
        td["obs"] = obs
    elif how == "the sign of a zero":
        td["next", "reward"] = td["next", "reward"].clone()
        td["next", "reward"][299] = -0.0
    elif how == "a string":
        td["meaning"] = [*td["meaning"][:-1], "DOWN"]
    elif how == "two rows swapped":
        order = torch.arange(300)
        order[7], order[200] = 200, 7
        td = td[order]
    elif how == "a dtype":
        td["action"] = td["action"].to(torch.int32)
    elif how == "the order of the keys":
        td["obs"] = td.pop("obs")
    elif how == "a nested batch size":
        td["info"].batch_size = [300, 2]
    elif how == "a missing entry":
        del td["next", "done"]
    else:
        raise AssertionError(how)
    return td


@pytest.mark.slow
def test_quick_demo(tmp_path: Path) -> None:
    command = programs.command(
        DEMO, "--quick", "--dir", tmp_path, interpreter=programs.make_interpreter(tmp_path)
    )  # its readers too are programs of their own
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split("  ")[0].strip(): line for line in done.stdout.splitlines()}
    shown = ["memory", "shared", "memmap", "h5", "h5 gzip", "zarr", "s3 (Ceph RGW)", "s3 zarr", "http", "redis"]
    assert [name for name in lines if name in shown] == shown
    for name in shown:
        assert lines[name].endswith("yes"), lines[name]
        assert ("this process only" in lines[name]) == (name == "memory")
        assert "new process" in lines[name] or name == "memory"
    if torch.cuda.is_available():
        assert lines["cuda"].endswith("yes")
    else:
        assert "not shown" in lines["cuda"]
        assert "cuda: not shown: the 'cuda' backend needs a CUDA device" in done.stdout
    assert "FAULT" not in done.stdout
    with tdstore.open(tmp_path / "atari-memmap") as td:  # what it wrote is there to be looked at
        assert td["next", "obs"].shape[1:] == (84, 84, 3)
        assert set(td["meaning"]) <= {"NOOP", "FIRE", "RIGHT", "LEFT"}
        assert td["next", "done"][-1]
        assert td["obs"].unique().numel() > 2


def test_shown_as_equal(demo: ModuleType, tmp_path: Path) -> None:
    truth = played()
    expected = demo.examine(truth, SEEDS, "truth")
    for place in (demo.Place("memory"), demo.Place("memmap", str(tmp_path / "a"))):
        row = demo.show(place, played(), expected, SEEDS)
        assert not row.fault
        assert row.findings.batches == expected.batches


@pytest.mark.parametrize(
    "how",
    [
        "one bit of a frame",
        "the sign of a zero",
        "a string",
        "two rows swapped",
        "a dtype",
        "the order of the keys",
        "a nested batch size",
        "a missing entry",
    ],
)
def test_a_difference_is_a_fault(demo: ModuleType, how: str) -> None:
    expected = demo.examine(played(), SEEDS, "truth")
    row = demo.show(demo.Place("memory"), changed(how), expected, SEEDS)
    assert row.fault
    assert demo.table([row], 1, 1).endswith("NO")


def test_a_difference_is_a_fault_across_processes(demo: ModuleType, tmp_path: Path) -> None:
    expected = demo.examine(played(), SEEDS, "truth")
    row = demo.show(demo.Place("memmap", str(tmp_path / "a")), changed("one bit of a frame"), expected, SEEDS)
    assert row.reader == "new process"
    assert "block of rows 0 differs" in row.fault


def test_a_reader_that_fails_is_a_fault(demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", programs.make_interpreter(tmp_path))
    row = demo.Row(demo.Place("memmap", str(tmp_path / "nothing-here")))
    demo.read_elsewhere(row, SEEDS)
    assert "exit code 1" in row.fault


def test_a_save_that_fails_is_a_fault(demo: ModuleType, tmp_path: Path) -> None:
    expected = demo.examine(played(), SEEDS, "truth")
    place = demo.Place("memmap", str(tmp_path / "a"), {"no_such_option": 1})
    assert "no_such_option" in demo.show(place, played(), expected, SEEDS).fault
