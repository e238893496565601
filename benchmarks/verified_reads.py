"""What comparing rows with checksums costs a read: `verify="size"`, the default, beside `verify="none"`.

The first read of a block is timed on its own, from the page cache, where it costs most beside the copy. Times are of
the processor, with one thread, so that other work on the machine changes little. The two ways to open are timed in
turn, each in a dataset that was opened anew.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tdstore
from tdstore import TensorDict, lifetime

SIZES = {"42 MB": 1500, "169 MB": 6000}
PLACES = ("d", "x.tdz", "x.h5", "x.td")
TURNS = 9
FRAME = 84 * 84 * 4


def seconds(read: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.process_time()
    read()
    return time.process_time() - start


def opened(path: Path, verify: str) -> Any:
    """Open a dataset, or a consolidated file."""
    return tdstore.from_consolidated(path, verify=verify) if path.suffix == ".td" else tdstore.open(path, verify=verify)


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    heads = ("first: none", "first: size", "more", "later: none", "later: size")
    print(f"{'leaf':8}{'place':8}{'read':10}" + "".join(f"{head:>14}" for head in heads))
    for size, rows in SIZES.items():
        measure(size, rows)


def measure(label: str, rows: int) -> None:
    """Print the lines of one size."""
    with tempfile.TemporaryDirectory() as folder:
        td = TensorDict({"obs": torch.randint(0, 255, (rows, FRAME), dtype=torch.uint8)}, [rows])
        indices: dict[str, Any] = {"256 rows": torch.randperm(rows)[:256], "all": None}
        for name in PLACES:
            path = Path(folder) / name
            if path.suffix == ".td":
                td.consolidate(path)
                lifetime.settle()
            else:
                td.save(path).close()
            for text, index in indices.items():
                print(f"{label:8}{name:8}{text:10}" + line(path, index), flush=True)


def line(path: Path, index: Any) -> str:
    """Medians of first and later reads, with what the first costs more when it compares."""
    first: dict[str, list[float]] = {"none": [], "size": []}
    later: dict[str, list[float]] = {"none": [], "size": []}
    for _ in range(TURNS):
        for verify in first:
            dataset = opened(path, verify)
            first[verify].append(seconds(lambda: dataset.read(index)))  # noqa: B023
            later[verify].append(seconds(lambda: dataset.read(index)))  # noqa: B023
            getattr(dataset, "close", lambda: None)()
    none, size = (statistics.median(times) * 1e3 for times in first.values())
    cells = "".join(f"{statistics.median(times) * 1e3:11.2f} ms" for times in later.values())
    return f"{none:11.2f} ms{size:11.2f} ms{100 * (size / none - 1):+13.0f}%{cells}"


if __name__ == "__main__":
    main()
