"""Ctrl-C within a write to several live tensors, in a program that goes on: all entries are written, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tests import interrupts

WITHIN = {"__setitem__", "_set_rows", "_write_same", "_write_views", "update_", "_copy_over", "copy_all", "copy_plain"}


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    with interrupts.python_handler():
        yield


def data(value: float, *batch: int) -> TensorDict:
    entries = {"a": torch.full((*batch, 3), value), "n": {"b": torch.full(batch, value)}}
    return TensorDict({**entries, "c": torch.full((*batch, 2), value)}, batch)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a row": lambda td: td.__setitem__(1, data(9.0)),
    "a row of another dtype": lambda td: td.__setitem__(1, data(9.0).double()),
    "a slice": lambda td: td.__setitem__(slice(1, 3), data(9.0, 2)),
    "all": lambda td: td.update_(data(9.0, 4)),
    "update in place": lambda td: td.update(data(9.0, 4), inplace=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["memory", "memmap", "tdz"])
def test_all_entries_are_written_or_none(kind: str, change: str, tmp_path: Path) -> None:
    def write(number: int) -> tuple[int, set[float]]:
        td: Any = data(0.0, 4)
        if kind != "memory":
            td.save(tmp_path / f"x.{kind}", mode="w").close()
            td = tdstore.open(tmp_path / f"x.{kind}", "r+")
        places = interrupts.interrupted(partial(CHANGES[change], td), number, WITHIN)
        found = {float(td[key][1].sum() / td[key][1].numel()) for key in ("a", ("n", "b"), "c")}
        if kind != "memory":
            td.close()
        return places, found

    places, found = write(10**6)
    assert found == {9.0} and places > 3
    for number in range(1, places + 1):
        assert write(number)[1] in ({0.0}, {9.0}), number
