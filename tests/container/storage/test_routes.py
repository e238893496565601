"""The calls of Python functions that common operations on stores make: they may only get fewer.

A count is the same on every machine, and differs between versions of Python: 3.12 makes no call of a comprehension.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tdstore_h5
import tdstore_zarr
import torch

import tdstore
from tdstore import TensorDict, lifetime

ON_DISK = True  # opening a file asks what file system it is on
FOLDERS = tuple(str(Path(module.__file__).parent) for module in (tdstore, tdstore_h5, tdstore_zarr))
ROWS = torch.tensor([3, 7, 11, 50])

MOST = {
    ("memmap", "save"): 486,
    ("memmap", "open"): 175,
    ("h5", "write"): 132,
    ("h5", "save"): 588,  # 586 by itself, as zarr's
    ("h5", "open"): 199,
    ("zarr", "write"): 127,
    ("zarr", "save"): 1002,  # 988 by itself, a few more in whole runs, after other tests
    ("zarr", "open"): 357,
}
"""Calls of a route, the second time that it is taken. Where a change makes fewer, lower the number."""

pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the numbers are those of Python 3.11")


def transition(rows: int) -> TensorDict:
    """Three leaves in two groups."""
    following = TensorDict({"obs": torch.ones(rows, 4)}, [rows])
    return TensorDict({"obs": torch.ones(rows, 4), "action": torch.ones(rows), "next": following}, [rows])


def calls(run: Callable[[], object]) -> int:
    """Count the calls of functions of ours."""
    found = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(FOLDERS)

    before = sys.getprofile()
    gc.collect()
    lifetime.settle()  # what other tests dropped is closed now, and not by the route
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found


def route(kind: str, name: str, folder: Path) -> Callable[[], object]:
    """An operation that can be repeated."""
    place = folder / f"data.{kind}"
    transition(100).save(place).close()
    if name == "open":

        def opened() -> None:
            td = tdstore.open(place)
            td.read(ROWS)
            td.close()

        return opened
    if name == "save":
        data = transition(100)
        return lambda: data.save(folder / f"saved.{kind}").close()
    stored: Any = tdstore.open(place, mode="r+")
    batch = transition(4)
    return lambda: stored.__setitem__(ROWS, batch)


@pytest.mark.parametrize(("kind", "name"), MOST, ids=[" ".join(route) for route in MOST])
def test_a_route_makes_no_more_calls(kind: str, name: str, tmp_path: Path) -> None:
    run = route(kind, name, tmp_path)
    run()  # imports, and fills caches
    assert calls(run) <= MOST[kind, name], "see `python benchmarks/routes.py --tree`"


def test_a_save_over_files_makes_few_calls_for_each_leaf(tmp_path: Path) -> None:
    def saving(leaves: int) -> int:
        data = TensorDict({str(i): torch.ones(3, 4) for i in range(leaves)}, [3])
        data.memmap(str(tmp_path / str(leaves)))
        return calls(lambda: data.memmap(str(tmp_path / str(leaves))))

    assert saving(40) - saving(10) <= 30 * 26  # a call more for each leaf is seen


def test_one_small_leaf_takes_few_calls(tmp_path: Path) -> None:
    data = TensorDict({"a": torch.ones(256)}, [])
    held: list[Any] = []

    def save(name: str) -> None:
        held.append(data.memmap(str(tmp_path / name)))

    for name in ("first", "first", "second"):  # the second time over the first
        save(name)
        held.pop().close()
    found = {
        "save": calls(lambda: save("new")),
        "close": calls(lambda: held.pop().close()),
        "save over": calls(lambda: save("new")),
        "open": calls(lambda: held.append(tdstore.open(tmp_path / "second"))),
    }
    for td in held:
        td.close()
    most = {"save": 184, "close": 82, "save over": 223, "open": 89}
    assert {name for name, count in found.items() if count > most[name]} == set(), found
