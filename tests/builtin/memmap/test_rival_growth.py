"""Two writers of one memmap dataset that add rows: what one of them committed stays, whatever the other one does."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.builtin.memmap.store import MemmapStore
from tdstore.errors import StoreBusyError

ON_DISK = True  # numbers of files are used again


def numbers(start: int, stop: int) -> TensorDict:
    ids = torch.arange(start, stop)
    return TensorDict({"id": ids, "x": ids[:, None] * torch.arange(1, 9)}, [stop - start])


def store_of(td: Any) -> MemmapStore:
    return cast(MemmapStore, td._binding[0].store)


def check_waits_for_the_end(first: Any, second: Any, place: str) -> None:
    """Check that `second` cannot add rows until `first`, which has added some, discards them."""
    with pytest.raises(StoreBusyError):
        second.extend(numbers(3, 4))
    store_of(first).discard()
    second.extend(numbers(3, 4))
    second.close()
    first.close()
    check(place, 4)


@pytest.fixture
def place(tmp_path: Path) -> str:
    numbers(0, 3).save(tmp_path / "run").close()
    return str(tmp_path / "run")


def check(place: str, rows: int) -> None:
    assert tdstore.verify(place) == []
    with tdstore.open(place) as td:
        assert (td == numbers(0, rows)).all()
        assert td.batch_size == (rows,)


def test_a_refused_writer_does_not_cut_off_rows_of_another_one(place: str) -> None:
    for late_rows in (numbers(90, 91), numbers(90, 99)):
        late = tdstore.open(place, mode="r+")
        rows = len(late)
        with tdstore.open(place, mode="r+") as first:
            first.extend(numbers(rows, rows + 4))
        check(place, rows + 4)
        with pytest.raises(StoreBusyError, match="open it again"):
            late.extend(late_rows)
        late.close()
        check(place, rows + 4)
    with tdstore.open(place, mode="r+") as again:
        again.extend(numbers(11, 13))
    check(place, 13)


def test_who_adds_rows_keeps_others_from_it_until_the_commit(place: str) -> None:
    first = tdstore.open(place, mode="r+")
    second = tdstore.open(place, mode="r+", lock_timeout=0.05)
    store_of(first).resize({("id",): 5, ("x",): 5})
    check_waits_for_the_end(first, second, place)


def test_rows_of_a_writer_that_was_killed_are_not_in_new_rows(place: str) -> None:
    """Another writer is open, so that nobody compares the files meanwhile."""
    with tdstore.open(place, mode="r+") as td:
        for name in ("id", "x"):
            with open(f"{place}/{name}.memmap", "ab") as file:
                file.write(b"\x7f" * 1000)
        td.resize_(6)
        assert td["id"].tolist() == [0, 1, 2, 0, 0, 0]
        assert not td["x"][3:].any()
    assert os.path.getsize(f"{place}/id.memmap") == 6 * 8


def test_a_forked_child_does_not_keep_the_lock(place: str) -> None:
    """The child holds the same open file: it neither ends the lock before the commit, nor keeps it behind it."""
    first = tdstore.open(place, mode="r+")
    store_of(first).resize({("id",): 5, ("x",): 5})
    waits, ends = os.pipe()
    child = os.fork()
    if not child:
        os.close(ends)
        del first
        gc.collect()
        os.read(waits, 1)
        os._exit(0)
    os.close(waits)
    try:
        check_waits_for_the_end(first, tdstore.open(place, mode="r+", lock_timeout=0.05), place)
    finally:
        os.close(ends)
        os.waitpid(child, 0)
