"""The whole suite: every comparison in one JSON file, one table and two pictures, or what moved since another run.

    python benchmarks/suite.py run [--quick] [--json FILE] [--pictures FOLDER]
    python benchmarks/suite.py compare BEFORE.json AFTER.json
    python benchmarks/suite.py draw RESULTS.json FOLDER
    python benchmarks/suite.py page RESULTS.json docs/benchmarks.md

`make bench` runs it (ten minutes; `make bench-quick`: two). The pictures need matplotlib
(`pip install -r benchmarks/requirements.txt`).
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import _report

HERE = Path(__file__).resolve().parent
SCRIPTS = ("ops", "tensorclass", "stores", "media", "remote", "streaming", "replay", "growth", "memory")
QUICK_SCRIPTS = ("ops", "tensorclass", "stores")
"""What `--quick` runs, in two minutes; the short forms of all others take six more."""
ALWAYS_QUICK = frozenset({"remote", "streaming", "replay"})
"""Their long forms take minutes each: `make bench` runs the short ones."""
MOVED = 1.25
"""Ratios that moved by less than this factor are noise on a shared machine."""
Results = dict[str, Any]


def run(scripts: Iterable[str], quick: bool) -> tuple[Results, list[str]]:
    """Run the scripts one after the other; return what they wrote, and the names of those that failed."""
    results: Results = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "quick": quick,
        "cpu_seconds": {},
        "parts": {},
    }
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in scripts:
            print(f"\n== {name}", flush=True)
            into = Path(folder, name)
            short = ["--quick"] if quick or name in ALWAYS_QUICK else []
            command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(into), *short]
            before = _cpu_seconds()
            status = subprocess.run(command, check=False).returncode
            results["cpu_seconds"][name] = round(_cpu_seconds() - before, 1)
            print(f"({results['cpu_seconds'][name]:.0f} s of CPU time)", flush=True)
            if status:
                failed.append(name)
            if into.exists():
                results["parts"][name] = json.loads(into.read_text())
    return results, failed


def _cpu_seconds() -> float:
    """CPU time of the children that have ended, and of theirs: wall time depends on what else the machine does."""
    spent = os.times()
    return spent.children_user + spent.children_system


def ratios(results: Results) -> dict[tuple[str, str, str], float]:
    """The peer's time over ours, by script, group and operation."""
    found = {}
    for part, report in results["parts"].items():
        for row in _report.rows_of(part, report):
            if (ratio := _report.ratio(row)) is not None:
                found[part, row["group"], row["name"]] = ratio
    return found


def compare(before: Results, after: Results) -> int:
    """Print what moved between two runs; 1 if anything became slower beside its peer."""
    old, new = ratios(before), ratios(after)
    both = [key for key in old if key in new]
    moved = sorted(((new[key] / old[key], key) for key in both), key=lambda pair: pair[0])
    slower = [pair for pair in moved if pair[0] < 1 / MOVED]
    faster = [pair for pair in moved if pair[0] > MOVED]
    print(f"{'operation':<64} {'before':>9} {'after':>9} {'moved':>8}   (peer / ours)")
    for factor, key in [*slower, *faster]:
        print(f"{' / '.join(key):<64} {old[key]:>8.2f}x {new[key]:>8.2f}x {factor:>7.2f}x")
    print(f"{len(both)} rows in both; {len(slower)} slower and {len(faster)} faster by more than {MOVED}x")
    for word, only in (("gone", old.keys() - new.keys()), ("new", new.keys() - old.keys())):
        if only:
            print(f"{word}: {', '.join(sorted(' / '.join(key) for key in only))}")
    return 1 if slower else 0


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw the ratios as bars and the costs as curves.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("the pictures need matplotlib: pip install -r benchmarks/requirements.txt") from None
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    return [_bars(results, folder / "ratios.svg"), _curves(results, folder / "growth.svg")]


def _bars(results: Results, path: Path) -> Path:
    from matplotlib import pyplot

    by_group: dict[tuple[str, str], list[float]] = {}
    for (part, group, _), ratio in ratios(results).items():
        if part != "growth":
            by_group.setdefault((part, group), []).append(ratio)
    names = [f"{group} ({part})" for part, group in by_group]
    means = [_report.geomean(values) for values in by_group.values()]
    figure, axes = pyplot.subplots(figsize=(8, 0.26 * len(names) + 1))
    places = range(len(names), 0, -1)
    axes.barh(places, [m - 1 for m in means], left=1, color=["#2a7f62" if m >= 1 else "#b3452c" for m in means])
    for at, values in zip(places, by_group.values(), strict=True):
        axes.plot(values, [at] * len(values), ".", color="#222", markersize=3)
    axes.set_xscale("log")
    axes.axvline(1, color="#222", linewidth=0.8)
    axes.set_yticks(list(places), names, fontsize=7)
    axes.set_ylim(0.3, len(names) + 0.7)
    axes.set_xlabel("times the speed of the peer (log scale); bar: geometric mean, dots: operations")
    return _saved(figure, path)


def _curves(results: Results, path: Path) -> Path:
    from matplotlib import pyplot, ticker

    curves: dict[str, list[dict[str, Any]]] = {}
    for row in results["parts"].get("growth", {"rows": []})["rows"]:
        curves.setdefault(row["group"], []).append(row)
    columns = 4
    count = max(1, math.ceil(len(curves) / columns))
    figure, grid = pyplot.subplots(count, columns, figsize=(12, 2.4 * count), squeeze=False)
    for axes in grid.flat[len(curves) :]:
        axes.set_visible(False)
    for axes, (name, rows) in zip(grid.flat, curves.items(), strict=False):
        for candidate, color in (("peer", "#999"), ("tdstore", "#2a7f62")):
            points = [(int(r["name"]), r["seconds"][candidate] * 1e6) for r in rows if candidate in r["seconds"]]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=color, label=candidate, markersize=3)
        operation, _, unit = name.partition(": ")
        axes.set_title(operation, fontsize=8)
        axes.set_xlabel(unit, fontsize=7)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        middle = math.sqrt(low * high)  # at least two decades: noise must not look like a slope
        axes.set_ylim(min(low, middle / 10), max(high, middle * 10))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        if all(int(r["name"]) > 0 for r in rows):
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.tick_params(labelsize=6)
    grid.flat[0].set_ylabel("microseconds", fontsize=7)
    if curves:
        grid.flat[0].legend(fontsize=7)
    return _saved(figure, path)


def _saved(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("run", help="run all comparisons")
    verb.add_argument("--quick", action="store_true", help="fewer rounds; without --only, three parts")
    verb.add_argument("--json", type=Path, metavar="FILE", default=Path("bench.json"), help="default: bench.json")
    verb.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the pictures there")
    verb.add_argument("--only", action="append", choices=SCRIPTS, help="this part (may be given more than once)")
    verb = verbs.add_parser("compare", help="say what moved between two runs")
    verb.add_argument("before", type=Path)
    verb.add_argument("after", type=Path)
    verb = verbs.add_parser("draw", help="draw the pictures of a run")
    verb.add_argument("results", type=Path)
    verb.add_argument("folder", type=Path)
    verb = verbs.add_parser("page", help="write the tables of a run into docs/benchmarks.md")
    verb.add_argument("results", type=Path)
    verb.add_argument("page", type=Path)
    options = parser.parse_args()
    if options.verb == "page":
        _report.write_page(json.loads(options.results.read_text()), options.page)
        return 0
    if options.verb == "compare":
        return compare(json.loads(options.before.read_text()), json.loads(options.after.read_text()))
    if options.verb == "draw":
        print(*draw(json.loads(options.results.read_text()), options.folder), sep="\n")
        return 0
    results, failed = run(options.only or (QUICK_SCRIPTS if options.quick else SCRIPTS), options.quick)
    options.json.write_text(json.dumps(results, indent=1))
    print(f"\nwritten: {options.json}")
    if options.pictures:
        print(*draw(results, options.pictures), sep="\n")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
