"""Ctrl-C within a write of rows to several live entries, in a program that goes on: all are written, or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.storekit.foreign_strings import COLUMN_FROM
from tests import interrupts

WITHIN = {"__call__", "__setitem__", "_run", "_set_rows", "_write_number", "_write_same", "_write_views", "add", "add_"}
WITHIN |= {"assign_at", "begin", "begin_all", "call", "complete", "copy_all", "copy_plain", "fill_at", "fill_masked"}
WITHIN |= {
    "fill_rows",
    "finish",
    "grow",
    "keep",
    "placed",
    "put",
    "put_rows",
    "run",
    "set_each",
    "update_",
    "_assign_each",
}
WITHIN |= {
    "_call_each",
    "_copy_each",
    "_copy_over",
    "_fill_each",
    "_fill_masked",
    "_fill_rows",
    "_keep_values",
    "_put_all",
}
WITHIN |= {"_write_each"}
ROWS = [1, 3]
MASK = torch.tensor([False, True, False, True])


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    with interrupts.python_handler():
        yield


def data(value: float, *batch: int) -> TensorDict:
    entries = {"a": torch.full((*batch, 3), value), "n": {"b": torch.full(batch, value)}}
    return TensorDict({**entries, "c": torch.full((*batch, 2), value)}, batch)


def texts(value: float, rows: int) -> TensorDict:
    """Return entries of tensors and of strings; the longer the larger the value."""
    text = [str(value) * int(1 + value)] * rows
    return TensorDict(
        {"a": torch.full((rows, 3), value), "t": text, "n": {"u": text, "b": torch.full((rows,), value)}}, [rows]
    )


Change = Callable[[Any], Any]
CHANGES: dict[str, Change] = {
    "a row": lambda td: td.__setitem__(1, data(9.0)),
    "a row of another dtype": lambda td: td.__setitem__(1, data(9.0).double()),
    "a dict": lambda td: td.__setitem__(1, data(9.0).to_dict()),
    "a slice": lambda td: td.__setitem__(slice(1, 3), data(9.0, 2)),
    "a list": lambda td: td.__setitem__(ROWS, data(9.0, 2)),
    "a list, another dtype": lambda td: td.__setitem__(ROWS, data(9.0, 2).double()),
    "a tensor": lambda td: td.__setitem__(torch.tensor(ROWS), data(9.0, 2)),
    "a mask": lambda td: td.__setitem__(MASK, data(9.0, 2)),
    "terms": lambda td: td.__setitem__((torch.tensor(ROWS),), data(9.0, 2)),
    "many bytes": lambda td: td.__setitem__([1] * 3000, data(9.0, 3000)),
    "a number": lambda td: td.__setitem__(1, 9.0),
    "a number at a list": lambda td: td.__setitem__(ROWS, 9.0),
    "a number at a mask": lambda td: td.__setitem__(MASK, 9.0),
    "update_at_": lambda td: td.update_at_(data(9.0, 2), torch.tensor(ROWS)),
    "all": lambda td: td.update_(data(9.0, 4)),
    "update in place": lambda td: td.update(data(9.0, 4), inplace=True),
}
TEXTS: dict[str, Change] = {
    "a row": lambda td: td.__setitem__(1, texts(9.0, 1)[0]),
    "a list": lambda td: td.__setitem__(ROWS, texts(9.0, 2)),
    "a list, another dtype": lambda td: td.__setitem__(ROWS, texts(9.0, 2).apply(lambda t: t.double())),
    "a mask": lambda td: td.__setitem__(torch.arange(len(td)) % 2 == 1, texts(9.0, len(td) // 2)),
    "all": lambda td: td.update_(texts(9.0, len(td))),
}


def opened(kind: str, td: TensorDict, folder: Path) -> Any:
    if kind == "memory":
        return td.clone()
    place = f"shm://rows-{os.getpid()}" if kind == "shm" else str(folder / f"x.{kind}")
    td.save(place, mode="w").close()
    return tdstore.open(place, "r+")


def sweep(td: Any, before: TensorDict, change: Change, shown: Callable[[Any], set[Any]], most: int) -> None:
    """Interrupt a write at about so many places, each time of what was there before."""
    old = shown(td)
    places = interrupts.interrupted(partial(change, td), 10**6, WITHIN)
    new = shown(td)
    assert len(old) == len(new) == 1 and places > 3
    for number in range(1, places + 1, -(-places // most)):
        if shown(td) != old:
            td.update_(before)
        interrupts.interrupted(partial(change, td), number, WITHIN)  # the first write to a column may take more places
        assert shown(td) in (old, new), number


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["memory", "memmap", "tdz", "shm"])
def test_all_entries_are_written_or_none(kind: str, change: str, tmp_path: Path) -> None:
    def shown(td: Any) -> set[float]:
        return {float(value) for key in ("a", ("n", "b"), "c") for value in td[key][1].flatten()}

    before = data(0.0, 4)
    td = opened(kind, before, tmp_path)
    sweep(td, before, CHANGES[change], shown, 200)
    if kind != "memory":
        td.close()


@pytest.mark.parametrize("change", TEXTS)
@pytest.mark.parametrize(("kind", "rows"), [("memory", 4), ("memmap", 4), ("memmap", COLUMN_FROM), ("shm", 4)])
def test_all_values_are_written_or_none(kind: str, rows: int, change: str, tmp_path: Path) -> None:
    """A header with some values, or a column of many, beside tensors in memory."""

    def shown(td: Any) -> set[str]:
        numbers = {str(float(value)) for key in ("a", ("n", "b")) for value in td[key][1].flatten()}
        return numbers | {td[key][1][:3] for key in ("t", ("n", "u"))}

    before = texts(0.0, rows)
    td = opened(kind, before, tmp_path)
    sweep(td, before, TEXTS[change], shown, 60)
    if kind != "memory":
        td.close()
