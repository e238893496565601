"""Replay buffers beside those of torchrl and raw tensors: `index_select` for a sample, a copy of rows for a write.

Frames of 84x84 and small rows, in the memory and in memory-mapped files, 100,000 rows, batches of 256.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import tempfile
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from _harness import FLOOR, OURS, PEER, Bench, Target

from tdstore import TensorDict
from tdstore import rl as ours
from tdstore.rl import transitions as agile

BATCH = 256
SLICES = 16
TARGETS = [
    Target("sample", 3.0),
    Target("extend(1)", 5.0),
    Target("extend(1000)", 8.0),
    Target("prioritized", 3.0),
    Target("slices", 3.0),
]


def entries(kind: str, n: int, start: int = 0) -> dict[Any, torch.Tensor]:
    """Rows of one kind, flat."""
    episode = (torch.arange(start, start + n) // 200) % 1000
    if kind == "frames":
        frames = torch.randint(0, 255, (n, 84, 84), dtype=torch.uint8)
        return {
            "pixels": frames,
            "action": torch.zeros(n, dtype=torch.int64),
            "reward": torch.rand(n),
            "episode": episode,
        }
    return {
        "observation": torch.rand(n, 17), "action": torch.rand(n, 6), "reward": torch.rand(n, 1),
        "done": torch.zeros(n, 1, dtype=torch.bool), "next_observation": torch.rand(n, 17), "episode": episode,
    }  # fmt: skip


class Raw:
    """The floor: one tensor for each entry, and a cursor."""

    def __init__(self, kind: str, rows: int, folder: Path | None) -> None:
        self.tensors: dict[Any, torch.Tensor] = {}
        for key, value in entries(kind, 1).items():
            shape = (rows, *value.shape[1:])
            if folder is None:
                self.tensors[key] = torch.zeros(shape, dtype=value.dtype)
            else:
                flat = torch.from_file(
                    str(folder / f"{key}.raw"), shared=True, size=torch.Size(shape).numel(), dtype=value.dtype
                )
                self.tensors[key] = flat.view(shape)
        self.rows, self.at = rows, 0

    def extend(self, data: dict[Any, torch.Tensor]) -> None:
        n = len(data["episode"])
        if self.at + n > self.rows:
            self.at = 0
        for key, value in data.items():
            self.tensors[key][self.at : self.at + n] = value
        self.at += n

    def sample(self, n: int) -> dict[Any, torch.Tensor]:
        index = torch.randint(self.rows, (n,))
        return {key: tensor.index_select(0, index) for key, tensor in self.tensors.items()}

    def slices(self, n: int, length: int) -> dict[Any, torch.Tensor]:
        first = torch.randint(self.rows // 200, (n,)) * 200 + torch.randint(200 - length, (n,))
        index = (first[:, None] + torch.arange(length)).view(-1)
        return {key: tensor.index_select(0, index) for key, tensor in self.tensors.items()}


class Trio:
    """The same buffer three times, filled with the same rows."""

    def __init__(self, bench: Bench, kind: str, place: str, rows: int, folder: Path, **parts: Any) -> None:
        self.kind = kind
        self.parts: dict[str, Any] = {}
        if bench.has(FLOOR):
            where = folder / "raw" if place == "memmap" else None
            if where is not None:
                where.mkdir(parents=True)
            self.parts[FLOOR] = Raw(kind, rows, where)
        if bench.has(OURS):
            storage = (
                ours.LazyTensorStorage(rows)
                if place == "memory"
                else ours.LazyMemmapStorage(rows, scratch_dir=folder / "ours", auto_cleanup=True)
            )
            self.parts[OURS] = ours.TensorDictReplayBuffer(storage=storage, batch_size=BATCH, **parts.get(OURS, {}))
        if bench.has(PEER):
            from torchrl import data as theirs

            peer = (
                theirs.LazyTensorStorage(rows)
                if place == "memory"
                else theirs.LazyMemmapStorage(rows, scratch_dir=str(folder / "peer"))
            )
            self.parts[PEER] = theirs.TensorDictReplayBuffer(storage=peer, batch_size=BATCH, **parts.get(PEER, {}))
        for start in range(0, rows, 5000):
            block = entries(kind, min(5000, rows - start), start)
            for name, buffer in self.parts.items():
                buffer.extend(self.rows_for(name, block))

    @staticmethod
    def rows_for(name: str, block: dict[Any, torch.Tensor]) -> Any:
        """Rows as a candidate takes them."""
        if name == FLOOR:
            return block
        if name == OURS:
            return TensorDict(block, [len(block["episode"])])
        import tensordict

        return tensordict.TensorDict(block, [len(block["episode"])])

    def runs(self, make: Any) -> dict[str, Any]:
        return {name: make(name, buffer) for name, buffer in self.parts.items()}


def sampling(name: str, buffer: Any) -> Any:
    """A batch of random rows."""
    return partial(buffer.sample, BATCH) if name == FLOOR else buffer.sample


def extending(name: str, buffer: Any, block: dict[Any, torch.Tensor]) -> Any:
    """A write of rows."""
    return partial(buffer.extend, Trio.rows_for(name, block))


def slicing(name: str, buffer: Any) -> Any:
    """A batch of pieces of trajectories."""
    return partial(buffer.slices, SLICES, BATCH // SLICES) if name == FLOOR else buffer.sample


def write_back(folder: Path) -> None:
    """Have the disk take the pages of all files, so that each candidate meets them in the same state."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())


def learn(name: str, buffer: Any) -> Any:
    """A prioritized sample, and the update of its priorities."""
    errors = torch.rand(BATCH)

    def run() -> None:
        sample = buffer.sample()
        sample.set("td_error", errors)
        buffer.update_tensordict_priority(sample)

    return run


def main() -> int:
    """Measure, and print the table."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    bench = Bench("Replay buffers: torchrl, tdstore, raw tensors", TARGETS)
    rows = 10_000 if bench.quick else 100_000
    with tempfile.TemporaryDirectory() as root:
        for kind in ("small", "frames"):
            for place in ("memory", "memmap"):
                name, folder = f"{kind}, {place}", Path(root) / f"{kind}-{place}"
                trio = Trio(bench, kind, place, rows, folder)
                bench.micro("sample", name, trio.runs(sampling))
                for n in (1, 1000):
                    runs = trio.runs(partial(extending, block=entries(kind, n)))
                    if n > 1 and bench.wants(f"extend({n})", name):
                        # Once around the ring: the disk took pages after the filling, which cost a fault each.
                        write_back(folder)
                        for run in runs.values():
                            for _ in range(rows // n):
                                run()
                    bench.micro(f"extend({n})", name, runs)
                if place == "memmap" and bench.wants("safe from kills", name):
                    safe = ours.LazyMemmapStorage(rows, scratch_dir=folder / "safe", auto_cleanup=False)
                    trio.parts[OURS] = ours.TensorDictReplayBuffer(storage=safe, batch_size=BATCH)
                    kept = trio.runs(partial(extending, block=entries(kind, 1000)))
                    for _ in range(rows // 1000):
                        kept[OURS]()
                    bench.micro("safe from kills", f"extend(1000), {name}", kept)
                if place == "memmap" and bench.wants("on clean pages", name):
                    write_back(folder)
                    bench.micro("on clean pages", f"extend(1000), {name}", runs)
                del trio
        slices(bench, rows, Path(root))
        prioritized(bench, rows, Path(root))
        agilerl(bench, rows)
        growth(bench)
    return bench.finish()


def touching(observation: torch.Tensor, weights: torch.Tensor | None) -> Any:
    """The accesses of a sample to random places of the memory, and nothing else.

    With weights, each of the rows that are read has its node of 32 weights read, and its weight written.
    """
    rows = len(observation)
    value = torch.ones(BATCH, dtype=torch.float64)

    def run() -> None:
        index = torch.randint(rows, (BATCH,))
        observation.index_select(0, index)
        if weights is not None:
            weights.index_select(0, index >> 5)
            weights.view(-1).index_copy_(0, index, value)

    return run


def growth(bench: Bench) -> None:
    """What a sample costs by the number of rows, beside its accesses to the memory."""
    for rows in (10_000, 100_000, 1_000_000, 10_000_000)[: 3 if bench.quick else 4]:
        observation = torch.rand(rows, 4)
        data = TensorDict({"observation": observation}, [rows])
        weights = torch.from_numpy(np.ones((-(-rows // 32), 32)))  # in huge pages, as numpy has it from the system
        for name, sampler in (
            ("random", ours.RandomSampler()),
            ("prioritized", ours.PrioritizedSampler(rows, 0.7, 0.5)),
        ):
            buffer = ours.TensorDictReplayBuffer(storage=ours.TensorStorage(data), sampler=sampler, batch_size=BATCH)
            run = learn(OURS, buffer) if name == "prioritized" else buffer.sample
            for _ in range(50):  # priorities of their own for some rows
                run()
            floor = touching(observation, weights if name == "prioritized" else None)
            bench.micro("growth", f"{name}, {rows:,} rows", {OURS: run, FLOOR: floor})
    for name in ("random", "prioritized"):
        found = [row for row in bench.rows if row.group == "growth" and row.name.startswith(name)]
        for candidate in (OURS, FLOOR):
            took = [row.best[candidate] for row in found if candidate in row.best]
            if len(took) > 1:
                print(f"{name}, {candidate}: {took[-1] / took[0]:.2f}x from the fewest rows to the most")


def prioritized(bench: Bench, rows: int, root: Path) -> None:
    """Samples by priority, with the update of the priorities.

    torchrl keeps priorities in a compiled extension, which loads only with the torch that it was built for. Without
    it, and without a compiler to build it, there is no figure of the peer.
    """
    if not bench.wants("prioritized", "small, memory"):
        return
    parts: dict[str, Any] = {OURS: {"sampler": ours.PrioritizedSampler(rows, 0.7, 0.5)}}
    without = list(bench.options.without)
    if bench.has(PEER):
        from torchrl.data import PrioritizedSampler

        try:
            built_extension()
            parts[PEER] = {"sampler": PrioritizedSampler(rows, 0.7, 0.5)}
        except RuntimeError as error:
            print(f"torchrl's PrioritizedSampler does not work here ({error}): no ratio")
            bench.options.without.append(PEER)
    trio = Trio(bench, "small", "memory", rows, root / "prioritized", **parts)
    bench.micro("prioritized", "small, memory", {k: v for k, v in trio.runs(learn).items() if k != FLOOR})
    bench.options.without[:] = without
    del trio


def built_extension() -> None:
    """Give torchrl its segment trees where the compiled ones of its wheel do not load, built from its sources.

    This takes a minute, and is kept in torch's folder of extensions.

    Raises:
        RuntimeError: there is no compiler, or it failed.
    """
    try:
        importlib.import_module("torchrl._torchrl")
        return
    except ImportError as error:
        print(f"building torchrl's extension: {str(error)[:150]}")
    from torch.utils import cpp_extension
    from torchrl.data.replay_buffers.samplers import prioritized as theirs

    sources = Path(theirs.__file__).parents[3] / "csrc"
    made = cpp_extension.load(
        "_torchrl", [str(sources / name) for name in ("pybind.cpp", "utils.cpp")],
        extra_include_paths=[str(sources)], extra_cflags=["-O3"],
    )  # fmt: skip
    for kind in ("Sum", "Min"):
        for dtype in ("Fp32", "Fp64"):
            name = f"{kind}SegmentTree{dtype}"
            setattr(theirs, name, getattr(made, name))


def agilerl_buffers() -> Any:
    """Import AgileRL's module of buffers; None where it is not installed.

    The module needs torch, numpy, tensordict, and from its own package the segment trees and one assertion of a type.
    Its package, when imported, needs all that AgileRL depends on. So its folders are imported as packages without
    their `__init__`, and the assertion is replaced by the identity, which costs less.
    """
    found = find_spec("agilerl")
    if found is None or not found.submodule_search_locations:
        return None
    root = Path(found.submodule_search_locations[0])
    for name in ("agilerl", "agilerl.components", "agilerl.utils", "agilerl.utils.algo_utils"):
        shell = ModuleType(name)
        shell.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = shell
    sys.modules["agilerl.utils.algo_utils"].narrow_tensor = lambda value: value  # type: ignore[attr-defined]
    return importlib.import_module("agilerl.components.replay_buffer")


def agilerl(bench: Bench, rows: int) -> None:
    """AgileRL's buffers beside ours of the same interface: random, and by priority."""
    buffers = agilerl_buffers()
    if buffers is None:
        print("AgileRL is not installed (pip install --no-deps agilerl): not compared")
        return
    if not (bench.has(PEER) and bench.has(OURS)):
        return
    import tensordict

    def filled(peer: Any, mine: Any) -> dict[str, Any]:
        for start in range(0, rows, 5000):
            block = entries("small", min(5000, rows - start), start)
            peer.add(tensordict.TensorDict(block, [len(block["episode"])]))
            mine.add(TensorDict(block, [len(block["episode"])]))
        return {PEER: peer, OURS: mine}

    pair = filled(buffers.ReplayBuffer(rows), agile.ReplayBuffer(rows))
    bench.micro("AgileRL", "sample", {name: partial(buffer.sample, BATCH) for name, buffer in pair.items()})
    for n in (1, 1000):
        block = entries("small", n)
        runs = {name: partial(buffer.add, Trio.rows_for(name, block)) for name, buffer in pair.items()}
        bench.micro("AgileRL", f"add({n})", runs)
    pair = filled(buffers.PrioritizedReplayBuffer(rows, alpha=0.6), agile.PrioritizedReplayBuffer(rows, alpha=0.6))
    bench.micro("AgileRL", "prioritized", {name: learn_by_index(buffer) for name, buffer in pair.items()})


def learn_by_index(buffer: Any) -> Any:
    """A prioritized sample of a buffer of AgileRL's kind, and the update of its priorities."""
    errors = torch.rand(BATCH)

    def run() -> None:
        sample = buffer.sample(BATCH, beta=0.4)
        buffer.update_priorities(sample["idxs"], errors)

    return run


def slices(bench: Bench, rows: int, root: Path) -> None:
    """Pieces of 16 rows of trajectories of 200."""
    for kind in ("small", "frames"):
        parts = {OURS: {"sampler": ours.SliceSampler(num_slices=SLICES, traj_key="episode")}}
        if bench.has(PEER):
            from torchrl.data import SliceSampler

            parts[PEER] = {"sampler": SliceSampler(num_slices=SLICES, traj_key="episode")}
        trio = Trio(bench, kind, "memory", rows, root / f"slices-{kind}", **parts)
        bench.micro("slices", f"{kind}, memory", trio.runs(slicing))
        del trio


if __name__ == "__main__":
    sys.exit(main())
