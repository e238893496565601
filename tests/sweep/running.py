"""Make each call on each container, of `tensordict` and of tdstore, and print in what the two outcomes differ.

python -m tests.sweep.running [CONTAINER ...] [GROUP ...] [/REGEX ...] [-v]

It is run by hand: all of it takes ten minutes. What it finds is mended, with a test in tests/differential, or stated on
the page of differences, with a claim in tests/porting and a row in documented.py. For each container it prints how many
calls there are, how many give the same, how many differ for a reason that the page gives, how many the peer fails or
refuses, and how many are left: those that differ, and those that the page tells without a reason that all users accept
(`-v` lists both). The percentage is of the calls that give the same among these and what is left.
"""

from __future__ import annotations

import ast
import logging
import re
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from functools import cache
from types import CodeType
from typing import Any

import torch

from tests.cuda import mode
from tests.differential.oracle import OURS, PEER, Raised, Side, describe, differences, outcome
from tests.differential.programs import namespace

from .calls import CALLS, START
from .calls_kept import KEPT
from .calls_more import MORE
from .containers import EVERYTHING, MAKE, ON_CUDA, PLACES
from .documented import documented

ALL = {**CALLS, **MORE, **KEPT}


@cache
def parts(source: str) -> tuple[CodeType, CodeType]:
    body = ast.parse(source).body
    last = body.pop()
    if isinstance(last, ast.Expr):
        value = last.value
    else:
        body.append(last)
        value = ast.parse("td", mode="eval").body
    return (
        compile(ast.Module(body, []), "call", "exec", dont_inherit=True),
        compile(ast.Expression(value), "call", "eval", dont_inherit=True),
    )


LIVE = ("memory", "text", "locked", "nested", "memmap", "loaded", "shared", "params", "class", "typed")
LIVE += tuple(place for place in ON_CUDA if "lazy" not in place)
"""Where reading an entry twice gives the same memory."""


def storages(value: Any) -> set[int]:
    """The memory that a result of live tensors stands on."""
    try:
        found = value.values(True, True) if hasattr(value, "batch_size") and hasattr(value, "values") else [value]
        return {x.untyped_storage().data_ptr() for x in found if isinstance(x, torch.Tensor) and x.numel()} - {0}
    except Exception:
        return set()


def run(call: str, place: str, side: Side) -> dict[str, Any]:
    """What a call gives on one side, what it leaves of the container and of `other`, and what shares memory."""
    with mode.default("cuda" if place == EVERYTHING else "cpu"):
        return _run(call, place, side)


def _run(call: str, place: str, side: Side) -> dict[str, Any]:
    names = namespace(side, __name__)
    names["tmp"] = folder = tempfile.mkdtemp()
    try:
        exec(parts(START + MAKE)[0], names)
        names["td"] = td = eval(PLACES[place], names)
        names["other"] = names["source"](100) if not place.startswith("text") else names["source"](100, s="other")
        if place in ON_CUDA:
            names["other"] = names["other"].to("cuda")
        before = storages(td)
        held = list(td.values(True, True)) if place in LIVE else []  # else its addresses may be given out again
        found: list[Any] = []

        def made() -> Any:
            mode.seed(0)
            first, last = parts(call)
            exec(first, names)
            found.append(eval(last, names))
            if place in ON_CUDA:
                torch.cuda.synchronize()  # copies with `non_blocking` have ended
            return found[0]

        result = outcome(made, forgive=side.is_peer)
        facts: dict[str, Any] = {"result": result}
        if found:
            facts["is td"] = found[0] is td
            if place in LIVE:
                facts["shares"] = bool(storages(found[0]) & before)
        facts["td"] = outcome(lambda: td, forgive=side.is_peer)
        facts["other"] = describe(names["other"])
        del held
        return facts
    finally:
        shutil.rmtree(folder, ignore_errors=True)


KINDS = {
    "window": {"_SubTensorDict": "TensorDict", "PersistentTensorDict": "TensorDict"},
    "h5": {"_SubTensorDict": "PersistentTensorDict"},
    "zarr": {"_SubTensorDict": "PersistentTensorDict"},
}
"""Names of classes that stand for one another: what is beside a window is a window or a TensorDict."""


def plain(value: Any, place: str) -> Any:
    """A description without names of private classes and, on zarr, without the order of keys: there it is chance."""
    if isinstance(value, dict):
        kinds = KINDS.get(place, {})
        made = {k: kinds.get(v, v) if k == "kind" and isinstance(v, str) else plain(v, place) for k, v in value.items()}
        return {**made, "keys": sorted(made["keys"])} if place == "zarr" and "keys" in made else made
    if isinstance(value, (list, tuple)):
        return type(value)(plain(v, place) for v in value)
    return value


def compare(call: str, place: str) -> tuple[str, list[str]]:
    """ "alike", "peer fails" (or refuses, and ours works), or "differs", and the lines of it."""
    if place in ON_CUDA and _refuses(call):
        return "alike", []  # rows out of range, for one, end the work of a GPU
    theirs, ours = (plain(run(call, place, side), place) for side in (PEER, OURS))
    want, got = theirs["result"], ours["result"]
    if isinstance(want, Raised) and isinstance(got, Raised):
        # What a failed call leaves behind is not compared: there some leaves are written.
        alike = want == got or want.text.split(":")[0] == got.text.split(":")[0]
        return ("alike", []) if alike else ("differs", list(differences(want, got)))
    if isinstance(want, Raised):
        return "peer fails", [repr(want)]
    if isinstance(got, Raised):
        return "differs", [f"ours {got!r}", f"expected {want!r}"]
    found = list(differences(theirs, ours, ""))
    return ("differs", found) if found else ("alike", [])


@cache
def _refuses(call: str) -> bool:
    """Whether the peer refuses a call on the CPU because of its index."""
    found = run(call, "memory", PEER)["result"]
    return isinstance(found, Raised) and "IndexError" in found.families


KEYED = re.compile(r"""["'](a|n|i|b|x|new|missing)["']""")


def calls_of(group: str, place: str) -> list[str]:
    """The calls of a group that can be made: a value has no keys."""
    return [c for c in ALL[group] if "value" not in place or not KEYED.search(c)]


class Slow(Exception):
    """A call that does not end."""


def _alarm(*_: object) -> None:
    raise Slow


def counted(place: str, group: str, match: list[str], total: Counter[str]) -> None:
    """Make the calls of a group, count them, and print those that no row of the page tells."""
    for call in calls_of(group, place):
        if match and not any(re.search(m, call) for m in match):
            continue
        signal.alarm(60)
        try:
            kind, found = compare(call, place)
        except Exception as error:
            kind, found = "differs", [f"HARNESS {type(error).__name__}: {error}"]
        finally:
            signal.alarm(0)
        row = documented(call, place, found) if kind == "differs" else None
        if row is not None:
            kind = "left" if row.weak else "documented"
            total[f"  {row.words}"] += 1
        total[kind] += 1
        if kind == "differs" or match or ("-v" in sys.argv and row is not None):
            print(f"{place} | {group} | {kind} | {call}" + (f" | {row.words}" if row else ""))
            for line in found[: 40 if match else 4]:
                print("      ", line[:300])


COLUMNS = ("alike", "documented", "peer fails", "left", "differs")


def summary(total: Counter[str]) -> str:
    """The counts, and how many of the fair calls give the same."""
    counts = "".join(f" {total[kind]:10}" for kind in COLUMNS)
    fair = total["alike"] + total["left"] + total["differs"]
    return f"{sum(total[kind] for kind in COLUMNS):6}{counts} {100 * total['alike'] / max(fair, 1):9.1f}%"


def main() -> None:
    """Print what differs, for the containers (and groups) that are named, or for all."""
    shm = tempfile.mkdtemp(dir="/dev/shm")
    tempfile.tempdir = shm
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _alarm)
    places = [a for a in sys.argv[1:] if a in PLACES] or list(PLACES)
    groups = [a for a in sys.argv[1:] if a in ALL] or list(ALL)
    match = [a[1:] for a in sys.argv[1:] if a.startswith("/")]
    table = {}
    try:
        for place in places:
            whole: Counter[str] = Counter()
            for group in groups:
                total: Counter[str] = Counter()
                counted(place, group, match, total)
                whole += total
            table[place] = summary(whole)
            print(f"== {place}: {table[place]}")
            for words, n in whole.most_common():
                if words.startswith(" "):
                    print(f"{n:6}{words}", flush=True)
        print(f"{'container':20}  calls" + "".join(f" {kind:>10}" for kind in COLUMNS) + "       fair")
        for place, counts in table.items():
            print(f"{place:20} {counts}")
    finally:
        shutil.rmtree(shm, ignore_errors=True)


if __name__ == "__main__":
    main()
