"""SIGINT at each place of a change to a dataset, in a program that goes on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dis import get_instructions
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any

import torch

import tdstore
from tdstore import TensorDict

CHECKS = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_FUNCTION", "CALL_METHOD", "CALL_KW", "CALL_FUNCTION_EX"}
"""The interpreter looks for signals at these instructions only, so a `with lock:` is never left with the lock held."""


@cache
def _checks(code: CodeType) -> frozenset[int]:
    return frozenset(at.offset for at in get_instructions(code) if at.opname in CHECKS)


class Interruption:
    """SIGINT at the n-th place where the interpreter looks for signals, in functions of these names in tdstore.

    Args:
        number: n, counted from 1.
        within: the names of the functions.
    """

    def __init__(self, number: int, within: set[str]) -> None:
        self.left = number
        self.within = within

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        """Trace a function, as `sys.settrace` asks for it."""
        if frame.f_code.co_name not in self.within or "tdstore" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        checks, before = _checks(frame.f_code), frame.f_lasti

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal before
            if event == "opcode":
                checked, before = before in checks, frame.f_lasti
                self.left -= checked
                if checked and not self.left:
                    sys.settrace(None)
                    signal.raise_signal(signal.SIGINT)
            return trace

        return trace


@contextmanager
def python_handler() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt, as in a program that sets no handler; restore tracing at the end."""
    handler, trace = signal.signal(signal.SIGINT, signal.default_int_handler), sys.gettrace()
    try:
        yield
    finally:
        sys.settrace(trace)
        signal.signal(signal.SIGINT, handler)


def interrupted(step: Callable[[], object], number: int, within: set[str]) -> int:
    """Run a step with an `Interruption`; return how many places there were until it came, or the step ended."""
    interruption = Interruption(number, within)
    sys.settrace(interruption)
    try:
        step()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return number - interruption.left


def dataset() -> TensorDict:
    """Return what the sweeps save first."""
    rows = {"a": torch.arange(12.0).view(4, 3), "n": {"b": torch.arange(4)}, "t": [str(row) for row in range(4)]}
    return TensorDict(rows, [4])


def append(td: Any) -> None:
    """Add two rows."""
    td.append(TensorDict({"a": torch.full((2, 3), 9.0), "n": {"b": torch.ones(2).long()}, "t": ["x", "y"]}, [2]))


def replace(td: Any) -> None:
    """Set an entry of another shape."""
    td["a"] = torch.arange(8).view(4, 2)


def fill(td: Any) -> None:
    """Write all rows of one entry in place."""
    td.set_("a", torch.full((4, 3), 9.0))


def add(td: Any) -> None:
    """Set a new entry."""
    td["new"] = torch.arange(8.0).view(4, 2)


def rename(td: Any) -> None:
    """Give an entry another name."""
    td.rename_key_("a", "z")


def make(td: Any) -> None:
    """Make the file of a new entry in a new group."""
    td.make_memmap(("m", "new"), (4, 2), dtype=torch.float32)


def delete(td: Any) -> None:
    """Remove an entry."""
    td.del_("a")


def shrink(td: Any) -> None:
    """Keep the first two rows."""
    td.resize_(2)


def update(td: Any) -> None:
    """Write several entries in place."""
    td.update_({"a": torch.full((4, 3), 9.0), "n": {"b": torch.full((4,), 9)}})


def write_rows(td: Any) -> None:
    """Write two rows that a list names."""
    td[[1, 3]] = TensorDict({"a": torch.full((2, 3), 9.0), "n": {"b": torch.full((2,), 9)}, "t": ["x", "y"]}, [2])


def write_new_rows(td: Any) -> None:
    """Write two rows, one entry of which is new."""
    td[[1, 3]] = TensorDict({"a": torch.full((2, 3), 9.0), "n": {"b": torch.full((2,), 9)}, "new": torch.ones(2)}, [2])


def shown(td: Any) -> dict[Any, list[Any]]:
    """Return all columns, of one length."""
    columns = {key: list(td[key]) if key == "t" else td[key].tolist() for key in td.keys(True, True)}
    assert {len(column) for column in columns.values()} == {len(td)}
    return columns


def sweep(make: Callable[[], str], change: Callable[[Any], object], within: set[str]) -> int:
    """Interrupt a change at about 40 places in some functions; return how many there are.

    The change is done or not done, for the program that goes on and writes (after every other interrupt) or closes,
    and for the one that opens the dataset next.

    Args:
        make: makes the dataset anew, and returns where it is.
        change: changes the open dataset.
        within: the names of the functions.
    """
    with tdstore.open(make(), "r+") as td:
        states = [shown(td)]
        places = interrupted(partial(change, td), sys.maxsize, within)
        states.append(shown(td))
    writes = False
    for number in range(1, places + 1, -(-places // 40)):
        place = make()
        with tdstore.open(place, "r+") as td:
            assert interrupted(partial(change, td), number, within) == number
            assert shown(td) in states, number
            if writes := not writes:
                td.append(td[:1].clone())
                td["later"] = torch.arange(len(td))
            now = shown(td)
        with tdstore.open(place, "r+") as td:
            assert shown(td) == now, number
    return places


def sweep_version(make: Callable[[], str], within: set[str]) -> None:
    """Interrupt a commit that makes a version: there is one with what was written, or none; and the program goes on."""

    def written(place: str) -> Any:
        td = tdstore.open(place, "r+")
        td.set_at_("a", torch.full((3,), 9.0), 1)
        return td

    with written(make()) as td:
        places = interrupted(partial(td.commit, message="nine"), sys.maxsize, within)
    assert places > 10
    for number in range(1, places + 1, -(-places // 30)):
        place = make()
        with written(place) as td:
            assert interrupted(partial(td.commit, message="nine"), number, within) == number
            made = [version.message for version in tdstore.versions(place)]
            assert made in ([], ["nine"]), number
            with tdstore.open(place) as found:
                assert (found["a"][1].tolist() == [9, 9, 9]) == bool(made), number
            td.set_at_("a", torch.full((3,), 8.0), 2)
        assert [version.message for version in tdstore.versions(place)] == made, number
        with tdstore.open(place) as found:
            assert found["a"][1:3, 0].tolist() == [9, 8], number
