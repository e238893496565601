"""The main job of tdstore on real data: play, store everywhere, reopen elsewhere, compare to the bit.

`make demo` runs it; `--quick` is a small one. The exit code is 1 if anything differs or fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from batches import BATCH, Findings, examine
from places import Place, failures, not_installed, places, size_of
from play import GAMES, play
from servers import servers

from tdstore import errors

HERE = Path(__file__).parent
READER_TIMEOUT = 300


@dataclasses.dataclass
class Row:
    """What the table says of one place."""

    place: Place
    size: int = 0
    write_seconds: float = 0.0
    first_open: float | None = None
    open: float | None = None
    findings: Findings | None = None
    reader: str = "new process"
    fault: str = ""
    not_shown: str = ""


def show(place: Place, truth: Any, expected: Findings, seeds: range) -> Row:
    """Write to one place, read it back, in a new process where there can be one, and compare."""
    row = Row(place)
    try:
        start = time.perf_counter()
        td = truth.save(place.location, storage=place.storage, progress=True, **place.options)
        row.write_seconds = time.perf_counter() - start
    except errors.MissingDependencyError as error:
        row.not_shown = str(error).splitlines()[0]
        return row
    except errors.TDStoreError as error:
        row.fault = f"save: {error}"
        return row
    try:
        row.size = size_of(place, td)
        if place.location is None:
            row.reader = "this process only"
            row.findings = examine(td, seeds, place.label)
        elif place.storage == "shared":
            read_elsewhere(row, seeds)  # while its owner, this process, lives
        else:
            td.close()
            read_elsewhere(row, seeds)
    finally:
        td.close()
    if not row.fault:
        row.fault = difference(expected, row.findings)
    return row


def read_elsewhere(row: Row, seeds: range) -> None:
    """Have a new process open the place and report."""
    place = row.place
    job = {
        "location": place.read_from or place.location,
        "storage": place.storage,
        "seeds": len(seeds),
        "label": place.label,
    }
    command = [sys.executable, str(HERE / "reader.py"), json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=READER_TIMEOUT, check=False)
    if done.returncode:
        row.fault = f"the reading process failed with exit code {done.returncode}, see above"
        return
    report = json.loads(done.stdout)
    row.first_open, row.open = report["first_open"], report["open"]
    row.findings = Findings(**report["findings"])


def difference(expected: Findings, found: Findings | None) -> str:
    """What of the truth was not found; empty if all was."""
    if found is None:
        return "nothing was read"
    if found.shape != expected.shape:
        missing = [entry for entry in expected.shape if entry not in found.shape]
        extra = [entry for entry in found.shape if entry not in expected.shape]
        return f"entries: {extra} instead of {missing}" if missing or extra else "the order of the keys is another"
    for what, mine, theirs in (
        ("block of rows", expected.blocks, found.blocks),
        ("random batch", expected.batches, found.batches),
    ):
        wrong = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
        if wrong:
            return f"{what} {wrong[0]} differs from what was played ({len(wrong)} of {len(mine)} differ)"
    return ""


def table(rows: list[Row], nbytes: int, drawn: int) -> str:
    """The rows as text."""
    lines = [("backend", "read by", "MB", "write MB/s", "batch rows/s", "open ms", "first", "equal")]
    for row in rows:
        if row.not_shown:
            lines.append((row.place.label, "not shown", *("-",) * 6))
            continue
        opened = [f"{s * 1e3:.1f}" if s is not None else "-" for s in (row.open, row.first_open)]
        rate = f"{drawn / row.findings.seconds:,.0f}" if row.findings else "-"
        write = f"{nbytes / 1e6 / row.write_seconds:,.0f}" if row.write_seconds else "-"
        size = f"{row.size / 1e6:.1f}" if row.size else "-"
        equal = "NO" if row.fault else "yes"
        lines.append((row.place.label, row.reader if row.findings else "-", size, write, rate, *opened, equal))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        left = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        text.append("  ".join([*left, *(c.rjust(w) for c, w in zip(line[2:], widths[2:], strict=True))]).rstrip())
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="atari_demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some 300 transitions of one game")
    parser.add_argument("--dir", type=Path, default=Path("demo-data"), help="folder for the data, which stays there")
    args = parser.parse_args()
    began = time.perf_counter()
    args.dir.mkdir(parents=True, exist_ok=True)

    games, wanted, seeds = (GAMES[:1], 300, range(4)) if args.quick else (GAMES, 4000, range(24))
    truth = play(wanted, games)
    nbytes = sum(leaf.nbytes for leaf in truth.values(include_nested=True, leaves_only=True))
    rows, episodes = truth.batch_size[0], int(truth["next", "done"].sum())
    print(f"Played {episodes} episodes of {', '.join(games)}: {rows} transitions, {nbytes / 1e6:.1f} MB.", flush=True)
    expected = examine(truth, seeds, "what was played")

    with servers(args.dir) as running:
        shown = [show(place, truth, expected, seeds) for place in places(args.dir, running)]
    print("\n" + table(shown, nbytes, len(seeds) * BATCH) + "\n")
    print(f"Each batch is {BATCH} random rows, all entries; the files were just written, so the page cache is warm.")
    print("open: tdstore.open() in the reading process; first: the first time there, with the backend's imports.")
    print(f"equal: {len(seeds)} random batches and all {rows} rows have the hashes of what was played,")
    print("       and keys, their order, shapes, dtypes and batch sizes are the same.")
    for row in shown:
        if row.not_shown:
            print(f"{row.place.label}: not shown: {row.not_shown}")
    for name, why in running.missing.items():
        print(f"{name}: not shown: {why}")
    for name in not_installed():
        print(f"{name}: not shown: its plugin is not installed (pip install ./plugins/tdstore-{name})")
    faults = [f"{row.place.label}: {row.fault}" for row in shown if row.fault]
    faults += [f"a plugin is broken: {text}" for text in failures()]
    for fault in faults:
        print(f"FAULT {fault}")
    files = sum(row.size for row in shown if row.place.location and "://" not in row.place.location)
    print(f"The data is in {args.dir}/ ({files / 1e6:.0f} MB). This took {time.perf_counter() - began:.0f} s.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
