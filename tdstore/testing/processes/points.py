"""Functions during which a writer changes the storage, found by tracing: where `CrashTests` kills it."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType
from typing import Any

from tdstore.testing.processes.syscalls import changes_storage, traced

_MARK = re.compile(r'^(\d+)\s+write\(-1, "kit([+-])([^"]*)"')
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset, type, type(None))
"""Methods of these change no storage, and are called too often to be marked."""
OUTSIDE = "?"
"""The name for a change outside of every function that is seen: in a thread of a C library."""


def find_points(work: Callable[[], object]) -> dict[str, list[str]]:
    """Run the work in a forked child, and return the functions that change the storage.

    A function is named `module.name`. It is the innermost one that Python called before the system was asked for the
    change.

    Args:
        work: the work of the child.

    Returns:
        Calls of the system by function, as `strace` writes them.
    """

    def marked() -> None:
        write = ctypes.CDLL(None).write

        def mark(sign: str, name: str) -> None:
            text = f"kit{sign}{name}".encode()
            write(-1, text, len(text))

        watch(lambda name: mark("+", name), lambda name: mark("-", name))
        work()

    status, calls = traced(marked)
    assert status == 0, "the work failed under strace"
    running: dict[str, list[str]] = {}
    found: dict[str, list[str]] = {}
    for line in calls:
        if mark := _MARK.match(line):
            stack = running.setdefault(mark[1], [])
            if mark[2] == "+":
                stack.append(mark[3])
            elif mark[3] in stack:  # an exception ends several at once
                del stack[len(stack) - 1 - stack[::-1].index(mark[3]) :]
        elif changes_storage(line):
            stack = running.get(line.partition(" ")[0], [])
            found.setdefault(stack[-1] if stack else OUTSIDE, []).append(line)
    return found


def watch(begins: Callable[[str], object], ends: Callable[[str], object] | None = None) -> None:
    """Call these functions with the name of each function that begins and ends, in this thread and in new ones.

    Args:
        begins: called where a function begins.
        ends: called where it ends, by a result or by an exception; by default the same.
    """
    after = begins if ends is None else ends
    names: dict[CodeType, str] = {}

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "return"):
            code = frame.f_code
            name = names.get(code)
            if name is None:
                name = names[code] = f"{frame.f_globals.get('__name__')}.{code.co_qualname}"
        elif isinstance(arg, BuiltinFunctionType) and isinstance(arg.__self__, _PLAIN):
            return
        else:
            name = point_name(arg)
        (begins if event in ("call", "c_call") else after)(name)

    threading.setprofile(profile)
    sys.setprofile(profile)


def point_name(function: Any) -> str:
    """Return the name of a function, as `find_points` gives it."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType):
        return f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', '?')}"
    return f"{type(owner).__module__}.{type(owner).__qualname__}.{getattr(function, '__name__', '?')}"
