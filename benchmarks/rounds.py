"""What latency costs a batch of mixed entries: rounds of `Store.read`, and wall time behind a slow store.

Run `python benchmarks/rounds.py` (10 seconds). A store that waits 20 ms per call stands for a bucket. `sum` is the
latency of the entries read one by one; a batch of all of them should cost what its slowest entry costs.
"""

from __future__ import annotations

import functools
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tdstore
from tdstore import TensorDict, UnbatchedTensor
from tdstore.testing import CountingStore, SlowStore

ROWS = 2_000
LATENCY = 0.02
REPEATS = 5
ROWS_READ = torch.randint(0, ROWS, (64,), generator=torch.Generator().manual_seed(0))


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(row % 7, 8) for row in range(ROWS)], layout=layout)


def dataset() -> TensorDict:
    texts = [f"caption number {row}" for row in range(ROWS)]
    td = TensorDict({"tensor": torch.zeros(ROWS, 64), "strings": texts}, [ROWS])
    td["jagged"], td["strided"] = nested(torch.jagged), nested(torch.strided)
    td["unbatched"] = UnbatchedTensor(torch.zeros(100))
    td["group"] = TensorDict({"tensor": torch.zeros(ROWS), "strings": texts, "jagged": nested(torch.jagged)}, [ROWS])
    return td


def measured(td: Any, read: Callable[[], Any]) -> tuple[int, float]:
    """Rounds of one read, and the median of its milliseconds behind the latency."""
    inner = td._handle.store
    counting = td._handle.store = CountingStore(inner)
    read()
    td._handle.store = SlowStore(counting, LATENCY)
    times = []
    counting.reset()
    for _ in range(REPEATS):
        start = time.perf_counter()
        read()
        times.append(time.perf_counter() - start)
    td._handle.store = inner
    return counting.calls["read"] // REPEATS, sorted(times)[REPEATS // 2] * 1e3


def report(kind: str, td: Any) -> None:
    """Print a line per entry, one for all in one batch, and one for the sum of the entries."""
    total = [0.0, 0.0]
    for key in td.keys():  # noqa: SIM118 - iterating a TensorDict gives its rows
        rounds, ms = measured(td, functools.partial(td.read, ROWS_READ, keys=[key]))
        total = [total[0] + rounds, total[1] + ms]
        print(f"{kind:12} {key:12} {rounds:6} {ms:8.1f}")
    rounds, ms = measured(td, functools.partial(td.read, ROWS_READ))
    print(f"{kind:12} {'all':12} {rounds:6} {ms:8.1f}")
    print(f"{kind:12} {'sum':12} {total[0]:6.0f} {total[1]:8.1f}")


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{'64 rows':12} {'entry':12} {'rounds':>6} {'ms':>8}")
    for kind in ("h5", "zarr", "objects"):
        with tempfile.TemporaryDirectory() as folder:
            place = f"file://{folder}/data" if kind == "objects" else str(Path(folder) / f"data.{kind}")
            dataset().save(place).close()
            td = tdstore.open(place)
            report(kind, td)
            td.close()


if __name__ == "__main__":
    main()
