"""Checkpoints of one process: `tdstore.dcp` beside the file writer and reader of `torch.distributed.checkpoint`.

Run `python benchmarks/checkpoints.py` (half a minute). Rounds are interleaved; the figures are medians of the wall time
and of the CPU time, and the ratio is that of torch to tdstore: above 1, tdstore is faster. A shared disk varies by 3x:
then the CPU time says more.

"save" is to a new place, as a run that keeps its checkpoints does. "again" is over the checkpoint of before, which
torch truncates first, so that a process that dies has none; tdstore writes beside it, and then removes it.
"""

from __future__ import annotations

import functools
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp

from tdstore.dcp import StorageReader, StorageWriter

ROUNDS = 7


def state_of(leaves: int, megabytes: int) -> dict[str, Any]:
    """A state of tensors of one size, and some numbers."""
    numbers = (megabytes << 20) // 4 // leaves
    return {**{f"layer.{i}.weight": torch.rand(numbers // 64, 64) for i in range(leaves)}, "step": 7, "lr": 0.5}


class Took(NamedTuple):
    """Seconds of a call."""

    wall: float
    cpu: float


def seconds(run: Callable[[], object]) -> Took:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Took(time.perf_counter() - wall, time.process_time() - cpu)


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
    found: dict[str, dict[str, list[Took]]] = {
        what: {name: [] for name in places} for what in ("save", "again", "load")
    }
    for what in ("save", "again"):
        for _ in range(ROUNDS):
            for name in places:
                if what == "save":
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir()
                writer = writers[name]()
                save = functools.partial(dcp.save, state, storage_writer=writer, no_dist=True)
                found[what][name].append(seconds(save))
        for name in places:  # what is loaded
            dcp.save(state, storage_writer=writers[name](), no_dist=True)
    for _ in range(ROUNDS):
        for name in places:
            target = {k: torch.empty_like(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
            load = functools.partial(dcp.load, target, storage_reader=readers[name](), no_dist=True)
            found["load"][name].append(seconds(load))
    for what, times in found.items():
        medians = {name: Took(*map(statistics.median, zip(*took, strict=True))) for name, took in times.items()}
        torchs = medians["torch"]
        shown = "  ".join(
            f"{name} {took.wall * 1e3:5.0f} ms ({torchs.wall / took.wall:.2f}x), "
            f"CPU {took.cpu * 1e3:4.0f} ms ({torchs.cpu / took.cpu:.2f}x)"
            for name, took in medians.items()
        )
        print(f"{what:5} {leaves:4} leaves, {megabytes} MB:  {shown}")


def main() -> None:
    warnings.simplefilter("ignore")
    for leaves, megabytes in ((20, 200), (1000, 100)):
        with tempfile.TemporaryDirectory() as folder:
            measure(leaves, megabytes, Path(folder) / "x")


if __name__ == "__main__":
    main()
