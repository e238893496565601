"""The report of a run of the suite: its rows in one form, and the text of docs/benchmarks.md that shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Results = dict[str, Any]
BEGIN = "<!-- From here on `benchmarks/suite.py page` writes. -->"
END = "<!-- To here. -->"

SAME_ORDER = {"full": "full", "sequential": "sequential", "chunks": "blocks", "buffer": "blocks"}
"""The order of tdstore that the order of another loader is compared with."""


def rows_of(part: str, report: Results) -> list[Results]:
    """Return the rows of a script's report, with group, name, and seconds of `peer` and `tdstore`."""
    if part == "remote":
        return _remote_rows(report)
    if part == "streaming":
        return _streaming_rows(report)
    rows: list[Results] = report.get("rows", [])
    return rows


def _remote_rows(report: Results) -> list[Results]:
    ours = report.get("tdstore zarr", {})
    rows = []
    for package, operations in report.items():
        if package.startswith("tdstore"):
            continue
        for name, found in operations.items():
            seconds = {"peer": found.get("seconds"), "tdstore": ours.get(name, {}).get("seconds")}
            rows.append(
                {
                    "group": "zarr at a URL",
                    "name": f"{name}, {package}",
                    "seconds": {who: took for who, took in seconds.items() if took},
                    "errors": {"peer": found["error"]} if "error" in found else {},
                    "why": "ours reads a manifest and the indices of shards before it trusts the rows",
                }
            )
    return rows


def _streaming_rows(report: Results) -> list[Results]:
    """Compare the epochs of other loaders with ours: seconds for 1,000 rows, the opening included."""
    rows = []
    for case, found in report.items():
        where, corpus, library, *_, order = case.split(" ")
        if library == "tdstore":
            continue
        kind = "memmap" if where == "local" else "objects"
        ours = report.get(f"{where} {corpus} tdstore {kind} {SAME_ORDER[order]}")
        seconds = {"peer": 1000 / found["rows_per_s"]}
        if ours is not None:
            seconds["tdstore"] = 1000 / ours["rows_per_s"]
        why = "512 rows and one round: opening the dataset is a large part of it"
        rows.append(
            {"group": f"epoch, {where}", "name": f"{corpus}, {library}, {order}", "seconds": seconds, "why": why}
        )
    return rows


def ratio(row: Results) -> float | None:
    """Return the peer's time over ours."""
    seconds = row.get("seconds", {})
    if seconds.get("peer") and seconds.get("tdstore"):
        found: float = seconds["peer"] / seconds["tdstore"]
        return found
    return None


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def page(results: Results) -> str:
    """Return the generated part of the page: where the figures come from, and the tables."""
    parts = results["parts"]
    return "\n".join(
        [
            *_origin(results),
            "",
            "### By group",
            "",
            *_groups(parts),
            "",
            "### Each medium",
            "",
            *_media(parts),
            "",
            "### Slower than the peer",
            "",
            *_slower(parts),
            "",
            "### Peaks of memory",
            "",
            *_memory(parts),
        ]
    )


def write_page(results: Results, path: Path) -> None:
    """Replace the generated part of a page.

    Raises:
        ValueError: the page has no marks around it.
    """
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} lacks the lines {BEGIN!r} and {END!r}, between which the tables go")
    path.write_text(f"{before}{BEGIN}\n\n{page(results)}\n\n{END}{after}")


def _origin(results: Results) -> list[str]:
    machine = results["machine"]
    loads = [report["load"] for report in results["parts"].values() if "load" in report]
    load = f", under a load of {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    command = "make bench-quick" if results["quick"] else "make bench"
    spent = sum(results.get("cpu_seconds", {}).values())
    return [
        f"The figures come from `{command}` on {results['date']}: {machine['cpus']} cores{load}, {machine['system']},",
        f"Python {machine['python']}; {spent / 60:.0f} minutes of CPU time.",
    ]


def _table(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> list[str]:
    found = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *found] if found else ["None."]


def _groups(parts: Results) -> list[str]:
    groups: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for part, report in parts.items():
        if part != "growth":
            for row in rows_of(part, report):
                if (found := ratio(row)) is not None:
                    groups.setdefault((part, row["group"]), []).append((found, row["name"]))
    return _table(
        ("part", "group", "rows", "geometric mean", "least"),
        (
            (part, group, str(len(found)), f"{geomean([r for r, _ in found]):.2f}", "{:.2f} ({})".format(*min(found)))
            for (part, group), found in groups.items()
        ),
    )


def _media(parts: Results) -> list[str]:
    rows = [row for part in ("media", "remote", "streaming") for row in rows_of(part, parts.get(part) or {})]
    return _table(
        ("package", "operation", "theirs", "tdstore", "times the speed"),
        (
            (row["group"], row["name"], _time(row, "peer"), _time(row, "tdstore"), _times(ratio(row)))
            for row in rows
            if row.get("seconds")
        ),
    )


def _slower(parts: Results) -> list[str]:
    found = []
    for part, report in parts.items():
        if part != "growth":
            for row in rows_of(part, report):
                if (times := ratio(row)) is not None and times < 1:
                    found.append(
                        (f"{part}: {row['group']}", row["name"], f"{times:.2f}", row.get("why") or "not known")
                    )
    return _table(("group", "operation", "times the speed", "why"), found)


def _memory(parts: Results) -> list[str]:
    rows = parts.get("memory", {"rows": []})["rows"]
    return _table(
        ("place", "work", "peak", "in multiples of the"),
        (
            (row["place"], row["work"], f"{row['bytes'] / (1 << 20):.1f} MiB", f"{row['of']}: {row['multiple']:.2f}")
            for row in rows
            if "bytes" in row
        ),
    )


def _time(row: Results, who: str) -> str:
    seconds = row["seconds"].get(who)
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _times(found: float | None) -> str:
    return "-" if found is None else f"{found:.2f}"
