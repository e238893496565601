"""How costs grow: with rows, leaves, nesting, batch and workers, beside the peer; what should be flat must not rise.

Run `python benchmarks/growth.py` (two minutes), `--quick` for fewer and smaller steps (20 s). The group of a row is
the operation and what grows ("read 256 rows: rows"), its name the number. A summary says how much each curve rose
from its first step to its last, and names those that should be flat and are not.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _harness import OURS, PEER, Bench, modules

import tdstore

BATCH = 256
FLAT = 1.5
"""A curve that should be flat may rise by this factor: caches and the noise of a shared machine."""
Prepared = Callable[[], Callable[[], object]]


class Growth:
    """The bench, the two packages, a scratch folder, and the curves that should be flat."""

    def __init__(self, bench: Bench, root: Path) -> None:
        self.bench, self.root = bench, root
        self.modules: dict[str, Any] = modules()
        self.names = (root / str(i) for i in itertools.count())
        self.flat: list[str] = []
        self.rng = np.random.default_rng(0)

    def curve(
        self,
        name: str,
        steps: tuple[int, ...],
        make: Callable[[Any, int], Callable[[], object]],
        *,
        flat: bool = False,
        io: bool = False,
    ) -> None:
        """Measure `make(module, step)` at each step.

        Args:
            name: the operation, a colon, and what grows.
            steps: the sizes.
            make: prepares a candidate's call.
            flat: the cost should not depend on the step.
            io: milliseconds of wall time rather than microseconds of CPU time.
        """
        if flat:
            self.flat.append(name)
        for step in steps[: 2 + len(steps) // 3] if self.bench.quick else steps:
            if self.bench.wants(name, str(step)):
                runs = {c: make(m, step) for c, m in self.modules.items() if self.bench.has(c)}
                (self.bench.io if io else self.bench.micro)(name, str(step), runs)

    def summary(self) -> list[str]:
        """Print how much each curve rose; return those that should be flat and rose."""
        print(f"\n{'curve':<34} {'ours rose':>10} {'peer rose':>10}  should be flat")
        risen = []
        for name in dict.fromkeys(row.group for row in self.bench.rows):
            rows = [row for row in self.bench.rows if row.group == name]
            rise = {
                c: rows[-1].best[c] / rows[0].best[c] for c in (OURS, PEER) if c in rows[0].best and c in rows[-1].best
            }
            shown = [f"{rise[c]:.2f}x" if c in rise else "-" for c in (OURS, PEER)]
            bad = name in self.flat and rise.get(OURS, 0) > FLAT
            verdict = "" if name not in self.flat else "NO: it rises" if bad else "yes"
            print(f"{name:<34} {shown[0]:>10} {shown[1]:>10}  {verdict}")
            risen += [name] if bad else []
        return risen

    def stored(self, module: Any, tree: dict[str, Any], rows: int) -> Any:
        place = str(next(self.names))
        module.TensorDict(tree, [rows]).memmap(place)
        return module.TensorDict.load_memmap(place)

    def rows(self, n: int, batch: int = BATCH) -> Callable[[], torch.Tensor]:
        drawn = itertools.cycle([torch.from_numpy(self.rng.integers(0, n, batch)) for _ in range(32)])
        return lambda: next(drawn)


def steps_of(rows: int) -> dict[str, torch.Tensor]:
    return {"obs": torch.rand(rows, 16), "action": torch.zeros(rows, dtype=torch.int64), "done": torch.zeros(rows, 1)}


def leaves_of(count: int) -> dict[str, torch.Tensor]:
    return {f"leaf {i}": torch.rand(4, 8) for i in range(count)}


def nested(depth: int) -> dict[str, Any]:
    node: dict[str, Any] = {"leaf": torch.rand(4, 8)}
    for _ in range(depth - 1):
        node = {"leaf": torch.rand(4, 8), "n": node}
    return node


def by_rows(g: Growth) -> None:
    sizes = (1_000, 10_000, 100_000, 1_000_000)

    def read(module: Any, n: int) -> Callable[[], object]:
        td, rows = g.stored(module, steps_of(n), n), g.rows(n)
        return lambda: td[rows()]

    def opened(module: Any, n: int) -> Callable[[], object]:
        place = str(next(g.names))
        module.TensorDict(steps_of(n), [n]).memmap(place)
        return lambda: module.TensorDict.load_memmap(place)

    def window(module: Any, n: int) -> Callable[[], object]:
        td = module.TensorDict(steps_of(n), [n])
        return lambda: td[100:356]

    g.curve("memory, window of 256: rows", sizes, window, flat=True)
    g.curve("memmap, 256 random rows: rows", sizes, read, io=True)  # caches of the processor: the floor rises too
    # Datasets of up to 16 MiB are compared whole with their checksums at opening, so that the first steps would rise.
    g.curve("memmap, open: rows", (250_000, 500_000, 1_000_000), opened, flat=True, io=True)


def appends(g: Growth) -> None:
    """Appending is ours alone; the peer has no place that grows."""
    for storage in ("memmap", "h5", "zarr"):
        name = f"{storage}, append 16 rows: rows"
        if storage != "zarr":
            g.flat.append(name)
        for n in (1_000, 10_000) if g.bench.quick else (1_000, 10_000, 100_000):
            td = tdstore.save(tdstore.TensorDict(steps_of(n), [n]), next(g.names), storage=storage)
            more = tdstore.TensorDict(steps_of(16), [16])
            g.bench.io(name, str(n), {OURS: lambda td=td, more=more: td.append(more)})
            td.close()


def by_neighbours(g: Growth) -> None:
    """Saving into a folder that holds more and more."""
    data = {"a": torch.rand(10), "b": torch.rand(10)}

    def save(module: Any, n: int) -> Callable[[], object]:
        folder = next(g.names)
        folder.mkdir()
        for i in range(n):
            (folder / f"other {i}").touch()
        td, numbers = module.TensorDict(data, [10]), itertools.count()
        return lambda: td.memmap(folder / f"new {next(numbers)}")

    g.curve("memmap, save: files beside it", (10, 1_000, 20_000), save, flat=True, io=True)


def by_leaves(g: Growth) -> None:
    counts = (1, 10, 100, 1_000)
    g.curve("memory, one row: leaves", counts, lambda m, n: _call(m.TensorDict(leaves_of(n), [4]), lambda td: td[1]))
    g.curve("memory, td['key']: leaves", counts, lambda m, n: _call(m.TensorDict(leaves_of(n), [4]), _first), flat=True)
    g.curve(
        "memory, one row: nesting", (1, 4, 16, 64), lambda m, n: _call(m.TensorDict(nested(n), [4]), lambda td: td[1])
    )
    g.curve("memmap, open: leaves", counts, lambda m, n: _call(_saved(g, m, n), m.TensorDict.load_memmap), io=True)


def by_batch(g: Growth) -> None:
    n = 10_000 if g.bench.quick else 100_000
    batches = (1, 16, 256, 4_096)

    def in_memory(module: Any, batch: int) -> Callable[[], object]:
        td, rows = module.TensorDict(steps_of(n), [n]), g.rows(n, batch)
        return lambda: td[rows()]

    def stored(module: Any, batch: int) -> Callable[[], object]:
        td, rows = g.stored(module, steps_of(n), n), g.rows(n, batch)
        return lambda: td[rows()]

    g.curve("memory, random rows: batch", batches, in_memory)
    g.curve("memmap, random rows: batch", batches, stored, io=True)


def by_workers(g: Growth) -> None:
    """An epoch of 64 batches by a stock DataLoader; the processes are started before the clock."""
    n = 16_384

    def epoch(module: Any, workers: int) -> Callable[[], object]:
        td = g.stored(module, steps_of(n), n)
        loader = torch.utils.data.DataLoader(
            td, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0, collate_fn=_same
        )
        return lambda: sum(len(batch) for batch in loader)

    g.curve("memmap, an epoch: workers", (0, 1, 2), epoch, io=True)


def _same(batch: Any) -> Any:
    return batch


def _call(data: Any, run: Callable[[Any], object]) -> Callable[[], object]:
    return lambda: run(data)


def _first(td: Any) -> object:
    return td["leaf 0"]


def _saved(g: Growth, module: Any, count: int) -> str:
    place = str(next(g.names))
    module.TensorDict(leaves_of(count), [4]).memmap(place)
    return place


def main() -> int:
    bench = Bench("How costs grow, beside the peer")
    with tempfile.TemporaryDirectory(prefix="tdstore-bench-") as folder:
        growth = Growth(bench, Path(folder))
        for part in (by_rows, by_leaves, by_batch, by_neighbours, appends, by_workers):
            part(growth)
        status = bench.finish()
        return status or (1 if growth.summary() else 0)


if __name__ == "__main__":
    sys.exit(main())
