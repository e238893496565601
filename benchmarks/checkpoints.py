"""Checkpoints of one process: `tdstore.dcp` beside the file writer and reader of `torch.distributed.checkpoint`.

Run `python benchmarks/checkpoints.py` (half a minute). Rounds are interleaved; the figures are medians, and the ratio
is that of torch to tdstore: above 1, tdstore is faster.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tdstore.dcp import StorageReader, StorageWriter

ROUNDS = 7


def state_of(leaves: int, megabytes: int) -> dict[str, Any]:
    """A state of tensors of one size, and some numbers."""
    numbers = (megabytes << 20) // 4 // leaves
    return {**{f"layer.{i}.weight": torch.rand(numbers // 64, 64) for i in range(leaves)}, "step": 7, "lr": 0.5}


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(leaves: int, megabytes: int, folder: Path) -> None:
    """Print what a save and a load of one state take."""
    state = state_of(leaves, megabytes)
    places = {"torch": str(folder / "torch"), "tdstore": str(folder / "ours"), "objects": f"file://{folder}/objects"}
    writers = {
        name: (lambda place=place: dcp.FileSystemWriter(place) if "torch" in place else StorageWriter(place))
        for name, place in places.items()
    }
    readers = {
        name: (lambda place=place: dcp.FileSystemReader(place) if "torch" in place else StorageReader(place))
        for name, place in places.items()
    }
    saves: dict[str, list[float]] = {name: [] for name in places}
    loads: dict[str, list[float]] = {name: [] for name in places}
    for _ in range(ROUNDS):
        for name in places:
            writer = writers[name]()
            saves[name].append(seconds(lambda writer=writer: dcp.save(state, storage_writer=writer, no_dist=True)))
    for _ in range(ROUNDS):
        for name in places:
            target = {k: torch.empty_like(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
            reader = readers[name]()
            loads[name].append(seconds(lambda r=reader, t=target: dcp.load(t, storage_reader=r, no_dist=True)))
    for what, found in (("save", saves), ("load", loads)):
        medians = {name: statistics.median(times) for name, times in found.items()}
        shown = "  ".join(
            f"{name} {took * 1e3:7.1f} ms ({medians['torch'] / took:.2f}x)" for name, took in medians.items()
        )
        print(f"{what}, {leaves} leaves, {megabytes} MB:  {shown}")


def main() -> None:
    warnings.simplefilter("ignore")
    for leaves, megabytes in ((20, 200), (1000, 100)):
        with tempfile.TemporaryDirectory() as folder:
            measure(leaves, megabytes, Path(folder) / "x")


if __name__ == "__main__":
    main()
