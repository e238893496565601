"""What comparing rows with checksums costs a read: `verify="size"`, the default, beside `verify="none"`.

The first read of a block is timed on its own, from the page cache, where it costs most beside the copy.
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

ROWS, TURNS = 1500, 60
FRAME = 84 * 84 * 4


def seconds(read: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    read()
    return time.perf_counter() - start


def main() -> None:
    """Print a table."""
    print(f"{'place':8}{'read':16}{'first: none':>14}{'first: size':>14}{'later: none':>14}{'later: size':>14}")
    with tempfile.TemporaryDirectory() as folder:
        td = TensorDict({"obs": torch.randint(0, 255, (ROWS, FRAME), dtype=torch.uint8)}, [ROWS])
        indices: dict[str, Any] = {"256 rows": torch.randperm(ROWS)[:256], "all": None}
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
                        for _ in range(TURNS if when == "later" else 8):
                            if when == "first":
                                opened = tdstore.open(path, verify=verify)
                            times.append(seconds(lambda: opened.read(index)))  # noqa: B023
                        cells.append(statistics.median(times) * 1e3)
                print(f"{name:8}{text:16}" + "".join(f"{cell:11.2f} ms" for cell in cells))


if __name__ == "__main__":
    main()
