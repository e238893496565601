"""Write the section "On a GPU" of docs/benchmarks.md from the results of `gpu.py`.

python benchmarks/gpu_table.py gpu.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
STORED = {"memmap": "memmap", "tdz": "tdz (one file)", "h5": "h5", "zarr": "zarr", "objects": "objects in a folder"}
OPERATIONS = ("index", "write", "ops")


class Results:
    """The rows of a run, by group and name.

    Args:
        document: what `gpu.py --json` wrote.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.machine: dict[str, Any] = document["machine"]
        self.rows: dict[tuple[str, str], dict[str, Figures]] = {
            (row["group"], row["name"]): row["candidates"] for row in document["rows"]
        }

    def get(self, group: str, name: str, candidate: str, figure: str) -> float | None:
        found = self.rows.get((group, name), {}).get(candidate, {}).get(figure)
        return None if found is None else float(found)

    def names(self, group: str) -> list[str]:
        return [name for which, name in self.rows if which == group]


def section(results: Results) -> str:
    """Return the section as Markdown."""
    to = results.get("link", "to the device, 1 GiB", "pinned", "gb_s")
    back = results.get("link", "from the device, 1 GiB", "pinned", "gb_s")
    machine = results.machine
    lines = [
        "## On a GPU",
        "",
        f"`python benchmarks/gpu.py` on one {machine['device']} with {machine['cpus']} CPU cores, torch "
        f"{machine['torch']}, Python {machine['python']}.",
        f"From pinned memory the link takes {number(to)} GB/s to the device and {number(back)} GB/s back, which is the "
        "limit. GB are 10^9 bytes; files are in the page cache.",
        "",
        "Large data, in GB/s. `torch` copies leaf by leaf; for stored data, after reading all of it; for a save, it is "
        "`torch.save`.",
        "",
        *table(["1 GiB", "torch", "tensordict", "tdstore", "of the limit"], large(results, to, back)),
        "",
        "Many small leaves, in microseconds:",
        "",
        *table(["leaves", "torch", "tensordict", "tdstore"], small(results)),
        "",
        "Training: batches of 256 random rows of 21 KB, each used by a step of six products of matrices, in rows per "
        "second.",
        "",
        *table(["batches from", "rows/s", "GB/s", "of the limit"], batches(results, to)),
        "",
        "Operations on leaves of 1,024 rows of 16 floats on the device, in microseconds: with a synchronization after "
        "each call, and the time after which a call returns. `torch` is a loop over a dict.",
        "",
        *table(["operation", "torch", "tensordict", "tdstore", "returns after"], operations(results)),
    ]
    if memory := list(peaks(results)):
        lines += ["", "Memory of the host beyond what was there, in MiB:", ""]
        lines += table(["1 GiB to the device", "all memory", "pinned"], memory)
    return "\n".join(lines) + "\n"


def large(results: Results, to: float | None, back: float | None) -> Iterator[list[str]]:
    name = "1 GiB in 4 leaves"
    kinds = [
        ("to", name, "memory to the device", "raw loop", to),
        ("to", f"{name}, consolidated", "consolidated memory to the device", "raw loop", to),
        ("to", f"{name}, back to the CPU", "the device to memory", "raw loop", back),
        *(("stored", f"{key}: 1 GiB", f"{text} to the device", "read, then torch", to) for key, text in STORED.items()),
    ]
    for group, row, text, floor, limit in kinds:
        ours = results.get(group, row, "tdstore", "gb_s")
        theirs = [results.get(group, row, candidate, "gb_s") for candidate in (floor, "tensordict")]
        if ours is not None:
            yield [text, *map(number, [*theirs, ours]), share(ours, limit)]
    ours = results.get("save", "1 GiB from the device", "tdstore memmap", "gb_s")
    if ours is not None:
        theirs = [
            results.get("save", "1 GiB from the device", candidate, "gb_s")
            for candidate in ("torch.save", "tensordict memmap")
        ]
        yield ["the device to a memmap dataset", *map(number, [*theirs, ours]), share(ours, back)]


def small(results: Results) -> Iterator[list[str]]:
    for name in results.names("to"):
        if name.startswith("1 GiB"):
            continue
        figures = [results.get("to", name, candidate, "wall_us") for candidate in ("raw loop", "tensordict", "tdstore")]
        yield [name if "back" in name else f"{name}, to the device", *map(number, figures)]


def batches(results: Results, to: float | None) -> Iterator[list[str]]:
    for name in results.names("batches"):
        for candidate, figures in results.rows["batches", name].items():
            if "rows_s" in figures:
                moved = None if candidate == "the step alone" else figures["gb_s"]
                where = "" if name == "limits" else f"{name.split(':')[0]}, "
                yield [where + candidate, number(figures["rows_s"]), number(moved), share(moved, to)]


def operations(results: Results) -> Iterator[list[str]]:
    for group in OPERATIONS:
        for name in results.names(group):
            figures = [
                results.get(group, name, candidate, "wall_us") for candidate in ("raw loop", "tensordict", "tdstore")
            ]
            launch = results.get(group, name, "tdstore", "launch_us")
            if figures[-1] is not None:
                count, operation = name.split(", ", 1)
                verb = {"index": f"`td[{operation}]`", "write": f"`td[{operation}] =`", "ops": operation}[group]
                yield [f"{count}, {verb}", *map(number, [*figures, launch])]


def peaks(results: Results) -> Iterator[list[str]]:
    for (group, name), candidates in results.rows.items():
        for figures in candidates.values():
            if "peak_rss_mib" in figures and group in ("stored", "save"):
                where = name.split(":")[0] if group == "stored" else "saved to memmap"
                yield [where, str(figures["peak_rss_mib"]), str(figures.get("peak_pinned_mib", ""))]


def table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    """Return a table as lines of Markdown."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def number(value: float | None) -> str:
    """Return a figure with three digits at least."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def share(value: float | None, limit: float | None) -> str:
    return "-" if value is None or not limit else f"{value / limit:.0%}"


if __name__ == "__main__":
    sys.stdout.write(section(Results(json.loads(Path(sys.argv[1]).read_text()))))
