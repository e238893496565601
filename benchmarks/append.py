"""What one `append` costs, on short and on long datasets: it must not grow with the length."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tdstore import TensorDict

LENGTHS = (100, 20_000, 200_000)
APPENDS = 30
PLACES: dict[str, dict[str, Any]] = {
    "memory": {},
    "shared memory": {"storage": "shared"},
    "memmap, durable='none'": {"storage": "memmap", "durable": "none"},
    "memmap, durable='commit'": {"storage": "memmap"},
    "h5, durable='none'": {"storage": "h5", "durable": "none"},
    "zarr, durable='none'": {"storage": "zarr", "durable": "none"},
    "object layout, local": {"storage": "remote"},
}


def cost(options: dict[str, Any], length: int, folder: Path) -> float:
    """Median milliseconds of an append of a row of 400 and one of 4 bytes."""
    td: Any = TensorDict({"obs": torch.zeros(length, 100), "n": {"reward": torch.zeros(length)}}, [length])
    row = TensorDict({"obs": torch.ones(100), "n": {"reward": torch.ones(())}})
    if options:
        storage = options["storage"]
        place = (folder / storage).as_uri() if storage == "remote" else folder / storage
        td = td.save(**options) if storage == "shared" else td.save(place, **options)
    td.append(row)  # the first growth of an h5 leaf copies it into chunks
    spent = []
    for _ in range(APPENDS):
        start = time.perf_counter()
        td.append(row)
        spent.append(time.perf_counter() - start)
    if options:
        td.close()
    return 1e3 * statistics.median(spent)


def main() -> None:
    """Print the table of docs/how-to/grow-a-dataset.md."""
    print("| ms an append |", " | ".join(f"{n:,} rows" for n in LENGTHS), "|")
    for name, options in PLACES.items():
        row = []
        for length in LENGTHS:
            with tempfile.TemporaryDirectory() as folder:
                row.append(f"{cost(options, length, Path(folder)):.2f}")
        print(f"| {name} |", " | ".join(row), "|")


if __name__ == "__main__":
    main()
