"""What it costs to compare rows of an HDF5 file with their checksums: the first pass over a leaf, and later ones.

python benchmarks/h5_verify.py [MiB]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable

import torch
from tdstore_h5.store import open_h5

from tdstore.types import LeafSpec, Read, Write

PATH = ("obs",)


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(mib: int) -> None:
    """Print a table of MB/s, by how rows are asked for and by `verify`."""
    rows = (mib << 20) // (84 * 84)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/t.h5"
        with open_h5(file, mode="w", durable="none") as store:
            store.create({PATH: LeafSpec((rows, 84, 84), "uint8")})
            store.write([Write(PATH, (), torch.randint(0, 255, (rows, 84, 84), dtype=torch.uint8))])
            store.save_header(store.load_header())
        order = torch.randperm(rows)
        asks = {
            "random rows, 256 at a time": [(part,) for part in order.split(256)],
            "slices of 256 rows": [(slice(i, min(i + 256, rows), 1),) for i in range(0, rows, 256)],
            "all rows": [()],
        }
        print(f"{'MB/s':30}{'verify=none':>14}{'first pass':>14}{'later':>14}")
        for name, indices in asks.items():
            results = []
            for verify, passes in (("none", 4), ("size", 4)):
                with open_h5(file, verify=verify) as store:  # type: ignore[arg-type]
                    times = [seconds(lambda: [store.read([Read(PATH, i)]) for i in indices]) for _ in range(passes)]  # noqa: B023
                results += [min(times)] if verify == "none" else [times[0], min(times[1:])]
            print(f"{name:30}" + "".join(f"{rows * 84 * 84 / t / 1e6:14.0f}" for t in results))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 256)
