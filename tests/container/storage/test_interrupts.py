"""Ctrl-C within `append`, in a program that goes on: the rows are there or not, in memory and in the store."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import tdstore
from tdstore import TensorDict

WITHIN = {"_catch_up", "_commit", "_follow", "_record", "_save", "_settle", "append_step", "apply", "commit"}
WITHIN |= {"put_attribute", "replace_file"}
"""Functions, each line of which is interrupted."""


class Interruption:
    """SIGINT before the n-th line of these functions."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        return self.line if frame.f_code.co_name in WITHIN and "tdstore" in frame.f_code.co_filename else None

    def line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self.line


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    handler, trace = signal.signal(signal.SIGINT, signal.default_int_handler), sys.gettrace()
    yield
    sys.settrace(trace)
    signal.signal(signal.SIGINT, handler)


def shown(td: Any) -> list[list[Any]]:
    """Return all columns, of one length."""
    columns = [td["a"].tolist(), td["n", "b"].tolist(), list(td["t"])]
    assert [len(column) for column in columns] == [len(td)] * 3
    return columns


@pytest.mark.parametrize("kind", ["memmap", "h5"])
def test_an_interrupted_append_happened_or_did_not(kind: str, tmp_path: Path) -> None:
    first, rows = (
        TensorDict({"a": torch.full((n,), x), "n": {"b": torch.full((n,), x)}, "t": [str(x)] * n}, [n])
        for n, x in ((4, 0.0), (2, 9.0))
    )
    before, place = tmp_path / f"before.{kind}", tmp_path / f"now.{kind}"
    first.save(before).close()
    for number in count(1):
        if place.is_dir():
            shutil.rmtree(place)
        (shutil.copytree if before.is_dir() else shutil.copy)(before, place)
        interruption = Interruption(number)
        with tdstore.open(place, "r+") as td:
            sys.settrace(interruption)
            try:
                td.append(rows)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            assert shown(td) in (shown(first), shown(torch.cat([first, rows]))), number
            td.append(rows[:1])
            in_memory = shown(td)
        with tdstore.open(place) as td:
            assert shown(td) == in_memory, number
        if interruption.left > 0:
            break
    assert number > 20
