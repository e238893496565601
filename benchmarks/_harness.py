"""Time candidates side by side and print how they compare.

The machine is shared and noisy, so ratios are made from interleaved repetitions: each round runs every
candidate once. Micro-operations count the thread's CPU time, which preemption does not touch; I/O
counts wall time. The figure of a candidate is the median over rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PEER, OURS, FLOOR = "peer", "tdstore", "floor"
Run = Callable[[], object]
_SECONDS = 0.5
"""What runs longer is warmed up by one run, and a first look takes two rounds of what runs much longer, or one."""
_LINE = "{:<12} {:<32} {:>10} {:>10} {:>10} {:>10} {:>11} {:>11}"


@dataclass
class Row:
    """One measured operation: its candidates, or the texts of the errors that they raised."""

    group: str
    name: str
    candidates: dict[str, Run]
    clock: str = "cpu"
    tidy: Run | None = None
    why: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def ratio(self, slow: str, fast: str) -> float | None:
        if slow in self.seconds and fast in self.seconds and self.seconds[fast] > 0:
            return self.seconds[slow] / self.seconds[fast]
        return None


@dataclass(frozen=True)
class Target:
    """The geometric mean of peer/tdstore that a group, or only its rows named so, is to reach."""

    group: str
    ratio: float
    row: str = ""


class Bench:
    """Collects rows, times them, prints the table and keeps the results."""

    def __init__(self, title: str, targets: Iterable[Target] = ()) -> None:
        parser = argparse.ArgumentParser(description=title)
        parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller data: for a first look")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
        parser.add_argument("--only", metavar="TEXT", help="only rows whose group or name contains TEXT")
        candidates = [PEER, OURS, FLOOR]
        parser.add_argument("--without", action="append", default=[], choices=candidates, help="leave a candidate out")
        self.options = parser.parse_args()
        self.title = title
        self.targets = tuple(targets)
        self.rows: list[Row] = []
        self.quick: bool = self.options.quick
        torch.set_num_threads(1)

    def wants(self, group: str, name: str) -> bool:
        only = self.options.only
        return only is None or only in group or only in name

    def has(self, candidate: str) -> bool:
        return candidate not in self.options.without

    def micro(self, group: str, name: str, candidates: dict[str, Run], *, why: str = "") -> None:
        """Add an operation of microseconds: many calls a round, CPU time. Arguments as of `io`."""
        self._add(Row(group, name, candidates, why=why))

    def io(self, group: str, name: str, candidates: dict[str, Run], *, tidy: Run | None = None, why: str = "") -> None:
        """Add an operation of milliseconds: one call a round, wall time.

        Args:
            group, name: where the row stands.
            candidates: what to call.
            tidy: runs untimed after each call.
            why: why ours may be behind; shown when it is.
        """
        self._add(Row(group, name, candidates, clock="wall", tidy=tidy, why=why))

    def _add(self, row: Row) -> None:
        if self.wants(row.group, row.name):
            row.candidates = {k: run for k, run in row.candidates.items() if self.has(k)}
            self._time(row)
            self.rows.append(row)
            self._print_row(row)

    def _time(self, row: Row) -> None:
        tidy = row.tidy or (lambda: None)
        once = 0.0
        for name, run in list(row.candidates.items()):
            try:
                for _ in range(2):  # the second time nothing is warmed up any more
                    start = time.perf_counter()
                    run()
                    spent = time.perf_counter() - start
                    tidy()
                    if spent > _SECONDS:
                        break  # warming up is a small part of it
                once += spent
            except Exception as error:  # one candidate without an ability must not end the run
                row.errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                del row.candidates[name]
        if row.clock == "cpu":
            clock, rounds = time.thread_time_ns, 7 if self.quick else 25
            calls = {name: _calls(run, 0.3e6 if self.quick else 1.5e6, clock) for name, run in row.candidates.items()}
        else:
            clock = time.perf_counter_ns
            few = 3 if once < 4 * _SECONDS else 2 if once < 8 * _SECONDS else 1
            least, budget = (few, 0.3) if self.quick else (5, 2.0)
            rounds = max(least, min(40, int(budget / max(once, 1e-9))))
            calls = dict.fromkeys(row.candidates, 1)
        samples: dict[str, list[float]] = {name: [] for name in row.candidates}
        gc.collect()
        gc.disable()
        try:
            for _ in range(rounds):
                for name, run in row.candidates.items():
                    n = calls[name]
                    start_ns = clock()
                    for _ in range(n):
                        run()
                    samples[name].append((clock() - start_ns) / n / 1e9)
                    tidy()
        finally:
            gc.enable()
        row.candidates = {}  # let go of the data
        row.seconds = {name: statistics.median(values) for name, values in samples.items()}
        row.best = {name: min(values) for name, values in samples.items()}

    def _print_row(self, row: Row) -> None:
        if len(self.rows) == 1:
            print(self.title)
            print(
                _LINE.format("group", "operation", "peer", "tdstore", "floor", "peer/ours", "ours/floor", "peer/floor")
            )
        cells = [
            _duration(row.seconds[c]) if c in row.seconds else "error" if c in row.errors else "-"
            for c in (PEER, OURS, FLOOR)
        ]
        ratios = [_ratio(row.ratio(PEER, OURS)), _ratio(row.ratio(OURS, FLOOR)), _ratio(row.ratio(PEER, FLOOR))]
        print(_LINE.format(row.group, row.name, *cells, *ratios), flush=True)
        if row.why and (behind := row.ratio(PEER, OURS)) is not None and behind < 1:
            print(f"{'':<12}   behind: {row.why}")
        for candidate, text in row.errors.items():
            print(f"{'':<12}   {candidate}: {text[:150]}")

    def finish(self) -> int:
        """Print the summary, write the JSON file, and return the exit status: 1 if one of ours raised."""
        print(f"\n{'group':<12} {'peer/ours':>10} {'least':>8} {'ours/floor':>11} {'peer/floor':>11}  target")
        summary: dict[str, dict[str, float | bool | None]] = {}
        for group in dict.fromkeys(row.group for row in self.rows):
            rows = [row for row in self.rows if row.group == group]
            ratios, floors = _ratios(rows, PEER, OURS), _ratios(rows, OURS, FLOOR)
            mean, floor, least = geomean(ratios), geomean(floors), min(ratios, default=None)
            ceiling = geomean(_ratios(rows, PEER, FLOOR))
            print(
                f"{group:<12} {_ratio(mean):>10} {_ratio(least):>8} {_ratio(floor):>11} {_ratio(ceiling):>11}", end="  "
            )
            summary[group] = {
                "peer_over_ours": mean, "least": least, "ours_over_floor": floor, "peer_over_floor": ceiling,
            }  # fmt: skip
            target = next((t for t in self.targets if t.group == group), None)
            if target is not None:
                counted = geomean(_ratios([row for row in rows if target.row in row.name], PEER, OURS))
                met = None if counted is None else counted >= target.ratio
                verdict = "no measure" if counted is None else f"{_ratio(counted)}, {'met' if met else 'NOT MET'}"
                print(f">= {target.ratio:g}x{target.row and f' ({target.row})'}: {verdict}", end="")
                summary[group] |= {"target": target.ratio, "met": met}
            print()
        every = _ratios(self.rows, PEER, OURS)
        print(f"{'all':<12} {_ratio(geomean(every)):>10} {_ratio(min(every, default=None)):>8}   ({len(every)} rows)")
        slower = [row.name for row in self.rows if (r := row.ratio(PEER, OURS)) is not None and r < 1]
        if slower:
            print(f"slower than the peer: {', '.join(slower)}")
        failed = [row.name for row in self.rows if OURS in row.errors]
        if failed:
            print(f"raised in tdstore: {', '.join(failed)}")
        if self.options.json:
            self.options.json.write_text(json.dumps(self._report(summary), indent=1))
        return 1 if failed else 0

    def _report(self, summary: dict[str, dict[str, float | bool | None]]) -> dict[str, object]:
        return {
            "title": self.title,
            "machine": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cpus": os.cpu_count(),
                "system": platform.platform(),
            },
            "quick": self.quick,
            "load": os.getloadavg()[0],
            "summary": summary,
            "rows": [
                {key: getattr(row, key) for key in ("group", "name", "clock", "why", "seconds", "best", "errors")}
                for row in self.rows
            ],
        }


def _ratios(rows: list[Row], slow: str, fast: str) -> list[float]:
    return [r for row in rows if (r := row.ratio(slow, fast)) is not None]


def geomean(values: list[float]) -> float | None:
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def _calls(run: Run, target_ns: float, clock: Callable[[], int]) -> int:
    """How many calls fill `target_ns`."""
    n = 1
    while True:
        start = clock()
        for _ in range(n):
            run()
        spent = clock() - start
        if spent > target_ns / 8:
            return max(1, round(n * target_ns / spent))
        n *= 4


def own(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function for one candidate alone, also of the functions that it defines.

    Python adapts the bytecode of a function to the types that it sees: with one function for all candidates, they
    slow each other by some 10 %.
    """
    return types.FunctionType(_own_code(fn.__code__), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def _own_code(code: types.CodeType) -> types.CodeType:
    constants = (_own_code(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.replace(co_consts=tuple(constants))  # which has seen no types yet


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.2f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def modules() -> dict[str, object]:
    """The peer and ours, as far as they can be imported; what is missing is said once."""
    found: dict[str, object] = {}
    for candidate, name in ((PEER, "tensordict"), (OURS, "tdstore")):
        try:
            module = __import__(name)
            module.TensorDict  # noqa: B018  (an unfinished tdstore imports, without it)
            found[candidate] = module
        except (ImportError, AttributeError) as error:
            print(f"{candidate}: left out ({error})", file=sys.stderr)
    return found
