"""What comparing rows with checksums costs a read: `verify="size"`, the default, beside `verify="none"`.

The first read of a block is timed on its own, from the page cache, where it costs most beside the copy. Times are of
the processor, with one thread, so that other work on the machine changes little. Leaves of up to 64 MiB are compared
whole by the first read of any row, larger ones by blocks.
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
from tdstore import TensorDict

SIZES = {"42 MB": 1500, "169 MB": 6000}
TURNS = 20
FRAME = 84 * 84 * 4


def seconds(read: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.process_time()
    read()
    return time.process_time() - start


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    heads = ("first: none", "first: size", "later: none", "later: size")
    print(f"{'leaf':8}{'place':8}{'read':10}" + "".join(f"{head:>14}" for head in heads))
    for size, rows in SIZES.items():
        measure(size, rows)


def measure(label: str, rows: int) -> None:
    """Print the lines of one size."""
    with tempfile.TemporaryDirectory() as folder:
        td = TensorDict({"obs": torch.randint(0, 255, (rows, FRAME), dtype=torch.uint8)}, [rows])
        indices: dict[str, Any] = {"256 rows": torch.randperm(rows)[:256], "all": None}
        for name in ("d", "x.tdz"):
            path = Path(folder) / name
            td.save(path).close()
            for text, index in indices.items():
                cells = []
                for when in ("first", "later"):
                    for verify in ("none", "size"):
                        times = []
                        opened = tdstore.open(path, verify=verify)
                        opened.read(index)
                        for _ in range(TURNS if when == "later" else 7):
                            if when == "first":
                                opened = tdstore.open(path, verify=verify)
                            times.append(seconds(lambda: opened.read(index)))  # noqa: B023
                        cells.append(statistics.median(times) * 1e3)
                print(f"{label:8}{name:8}{text:10}" + "".join(f"{cell:11.2f} ms" for cell in cells))


if __name__ == "__main__":
    main()
