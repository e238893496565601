"""What `gpu.py` measures with: the clock and the rows, the limit of the link, ways to move many bytes or many leaves.

The last two are raw torch and `tdstore.container.core.staging`: they say which sizes that module should have.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tdstore.container.core import staging

Run = Callable[[], object]
GB = 1e9


class Gpu:
    """The device, the clock, and the rows that were measured.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.tiny: bool = options.cpu
        self.device = torch.device("cpu" if self.tiny else "cuda:0")
        self.only: str | None = options.only
        self.json: Path | None = options.json
        self.began, self.limit = time.perf_counter(), 600.0 if self.tiny else float(options.seconds)
        self.rows: list[dict[str, Any]] = []
        self.errors = 0
        self.link = {"to": 0.0, "from": 0.0}

    @property
    def left(self) -> float:
        return self.limit - (time.perf_counter() - self.began)

    def note(self, text: str) -> None:
        """Print when a part begins."""
        print(f"-- {text}: after {time.perf_counter() - self.began:.1f} s", flush=True)

    def sync(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()

    def wants(self, group: str, name: str = "") -> bool:
        return self.only is None or self.only in group or self.only in name

    def row(
        self,
        group: str,
        name: str,
        candidates: dict[str, Run],
        *,
        nbytes: int = 0,
        items: int = 0,
        launches: bool = False,
        least: int = 3,
        budget: float = 1.0,
    ) -> None:
        """Measure an operation.

        Args:
            group, name: where the row stands.
            candidates: what to call.
            nbytes: the bytes that a call moves.
            items: the rows that a call yields.
            launches: measure `launch`, too.
            least: the least number of rounds.
            budget: seconds for the rounds of all candidates.
        """
        if not self.wants(group, name):
            return
        found: dict[str, dict[str, Any]] = {}
        ready: dict[str, Run] = {}
        once = 0.0
        for candidate, run in candidates.items():
            if self.left < 0:
                found[candidate] = {"error": "left out: the time is over"}
                continue
            try:
                for _ in range(1 if self.tiny else 2):  # the second time nothing is warmed up any more
                    began = time.perf_counter()
                    run()
                    self.sync()
                    spent_once = time.perf_counter() - began
                    if spent_once > 0.3:
                        break
                once += spent_once
                ready[candidate] = run
            except Exception as error:
                found[candidate] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
                self.errors += candidate.startswith("tdstore")
        rounds = 1 if self.tiny else max(1 if once > 3 else least, min(30, int(budget / max(once, 1e-9))))
        walls: dict[str, list[float]] = {candidate: [] for candidate in ready}
        spent: dict[str, list[float]] = {candidate: [] for candidate in ready}
        if nbytes > 1 << 28:
            gc.collect()
        gc.disable()
        try:
            for _ in range(rounds):
                for candidate, run in ready.items():
                    self.sync()
                    began, cpu = time.perf_counter(), time.process_time()
                    run()
                    self.sync()
                    walls[candidate].append(time.perf_counter() - began)
                    spent[candidate].append(time.process_time() - cpu)
        finally:
            gc.enable()
        for candidate, run in ready.items():
            wall = statistics.median(walls[candidate])
            figures: dict[str, Any] = {
                "wall_us": wall * 1e6,
                "best_us": min(walls[candidate]) * 1e6,
                "cpu_us": statistics.median(spent[candidate]) * 1e6,
                "rounds": rounds,
            }
            if nbytes:
                figures["gb_s"] = nbytes / wall / GB
            if items:
                figures["rows_s"] = items / wall
            if launches:
                figures["launch_us"] = self._launch(run, wall) * 1e6
            found[candidate] = figures
        self.add(group, name, found, nbytes=nbytes)

    def _launch(self, run: Run, wall: float) -> float:
        calls = 2 if self.tiny else max(3, min(100, int(0.01 / wall)))
        times = []
        for _ in range(3):
            self.sync()
            began = time.perf_counter()
            for _ in range(calls):
                run()
            times.append((time.perf_counter() - began) / calls)
        self.sync()
        return min(times)

    def add(self, group: str, name: str, found: dict[str, dict[str, Any]], *, nbytes: int = 0) -> None:
        """Keep a row, and print it."""
        self.rows.append({"group": group, "name": name, "nbytes": nbytes, "candidates": found})
        for number, (candidate, figures) in enumerate(found.items()):
            head = f"{group:<8} {name:<34}" if not number else " " * 43
            print(f"{head} {candidate:<26} {shown(figures)}", flush=True)
        self.write()

    def write(self) -> None:
        if self.json is None:
            return
        machine: dict[str, Any] = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": "cpu" if self.tiny else torch.cuda.get_device_name(),
        }
        spent = time.perf_counter() - self.began
        self.json.write_text(json.dumps({"machine": machine, "seconds": spent, "rows": self.rows}, indent=1))


def shown(figures: dict[str, Any]) -> str:
    """The figures of one candidate as text."""
    if "error" in figures:
        return str(figures["error"])[:200]
    cells = []
    if "wall_us" in figures:
        cells.append(f"{figures['wall_us']:>11.1f} us wall")
    if "launch_us" in figures:
        cells.append(f"{figures['launch_us']:>9.1f} us launch")
    if "gb_s" in figures:
        cells.append(f"{figures['gb_s']:>7.2f} GB/s")
    if "rows_s" in figures:
        cells.append(f"{figures['rows_s']:>9.0f} rows/s")
    if "cpu_us" in figures:
        cells.append(f"{figures['cpu_us']:>11.1f} us cpu")
    cells += [f"{key} {value}" for key, value in figures.items() if key.startswith("peak")]
    if "share" in figures:
        cells.append(f"{figures['share']:.0%} of the link")
    return "  ".join(cells)


# -- the link ------------------------------------------------------------------------------
def pin(tensor: torch.Tensor, gpu: Gpu) -> torch.Tensor:
    return tensor if gpu.tiny else tensor.pin_memory()


def measure_link(gpu: Gpu) -> None:
    for name, size in (("1 GiB", 1 << 30), ("16 MiB", 16 << 20), ("64 KiB", 64 << 10)):
        nbytes = min(size, 1 << 16) if gpu.tiny else size
        host = torch.ones(nbytes, dtype=torch.uint8)
        pinned = pin(host, gpu)
        on = torch.empty(nbytes, dtype=torch.uint8, device=gpu.device)
        gpu.row(
            "link", f"to the device, {name}",
            {
                "pinned": lambda on=on, pinned=pinned: on.copy_(pinned, non_blocking=True),
                "pageable": lambda on=on, host=host: on.copy_(host),
            },
            nbytes=nbytes, budget=0.4,
        )  # fmt: skip
        gpu.row(
            "link", f"from the device, {name}",
            {
                "pinned": lambda on=on, pinned=pinned: pinned.copy_(on, non_blocking=True),
                "pageable": lambda on=on, host=host: host.copy_(on),
            },
            nbytes=nbytes, budget=0.4,
        )  # fmt: skip
        if name == "1 GiB":
            gpu.row(
                "link", "on the CPU, 1 GiB",
                {
                    "to pinned": lambda pinned=pinned, host=host: pinned.copy_(host),
                    "to pageable": lambda pinned=pinned, host=host: host.copy_(pinned),
                },
                nbytes=nbytes, budget=0.4,
            )  # fmt: skip
    for row in gpu.rows:
        if row["name"] == "to the device, 1 GiB" and "gb_s" in row["candidates"]["pinned"]:
            gpu.link["to"] = row["candidates"]["pinned"]["gb_s"]
        if row["name"] == "from the device, 1 GiB" and "gb_s" in row["candidates"]["pinned"]:
            gpu.link["from"] = row["candidates"]["pinned"]["gb_s"]


# -- ways to stage -------------------------------------------------------------------------
def copy_stream(gpu: Gpu) -> Any:
    if gpu.tiny:
        return CpuCopyStream()
    found = staging.cuda_copy_stream(gpu.device, non_blocking=False)
    assert found is not None
    return found


class CpuCopyStream:
    """A stream of copies in the memory of the CPU, for `--cpu`."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def target(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def copy(self, pairs: Any) -> Any:
        for target, source in pairs:
            target.copy_(source)
        return self

    def synchronize(self) -> None:
        """Nothing is under way."""

    def join(self, targets: Any) -> None:
        """Nothing is under way."""


def measure_blocks(gpu: Gpu, mapped: torch.Tensor) -> None:
    """Which size of block, how many buffers, and what small leaves cost one by one or together."""
    nbytes = 1 << 16 if gpu.tiny else 512 << 20
    host = torch.ones(nbytes, dtype=torch.uint8)
    mapped = mapped.reshape(-1)[:nbytes]
    for name, source in (("memory", host), ("mapped file", mapped)):
        found: dict[str, Run] = {"raw .to": lambda source=source: source.to(gpu.device)}
        for mib, buffers in ((8, 3), (16, 2), (16, 3), (32, 2), (32, 3), (64, 2)):
            block = 4096 if gpu.tiny else mib << 20
            found[f"{buffers} x {mib} MiB"] = partial(stage, gpu, source, block, buffers)
        gpu.row("blocks", f"512 MiB of {name}", found, nbytes=source.nbytes, budget=0.5)
    on = host.to(gpu.device)
    ways: dict[str, Run] = {"raw .cpu()": on.cpu}
    for mib, buffers in ((8, 3), (16, 2), (32, 2), (32, 3), (64, 2)):
        ways[f"{buffers} x {mib} MiB"] = partial(fetch, gpu, on, 4096 if gpu.tiny else mib << 20, buffers)
    gpu.row("blocks", "512 MiB back to the CPU", ways, nbytes=nbytes, budget=0.5)
    for count, size in ((256, 256), (256, 16 << 10), (1000, 16 << 10), (16, 256 << 10)):
        leaves = [torch.ones(size // 4) for _ in range(4 if gpu.tiny else count)]
        ways = {way.__name__: partial(way, leaves, gpu) for way in (one_by_one, unsynced, each_pinned, split, unshared)}
        gpu.row("blocks", f"{count} leaves of {size} B", ways, nbytes=size * len(leaves), budget=0.4)
    for size in (64 << 10, 256 << 10, 1 << 20, 4 << 20):
        leaf = torch.ones(size, dtype=torch.uint8)
        gpu.row(
            "blocks", f"one leaf of {size >> 10} KiB",
            {"raw .to": partial(leaf.to, gpu.device), "staged": partial(stage, gpu, leaf, 32 << 20, 2)},
            nbytes=size, budget=0.1,
        )  # fmt: skip


def stage(gpu: Gpu, source: torch.Tensor, block_bytes: int, buffers: int) -> object:
    return staging.move_in_blocks([source], copy_stream(gpu), block_bytes=block_bytes, buffers=buffers)


def fetch(gpu: Gpu, source: torch.Tensor, block_bytes: int, buffers: int) -> object:
    return staging.fetch_in_blocks([source], copy_stream(gpu), block_bytes=block_bytes, buffers=buffers)


def one_by_one(leaves: list[torch.Tensor], gpu: Gpu) -> object:
    return [leaf.to(gpu.device) for leaf in leaves]


def unsynced(leaves: list[torch.Tensor], gpu: Gpu) -> object:
    return [leaf.to(gpu.device, non_blocking=True) for leaf in leaves]


def gathered(leaves: list[torch.Tensor], gpu: Gpu) -> torch.Tensor:
    total = sum(leaf.numel() for leaf in leaves)
    room = torch.empty(total, dtype=leaves[0].dtype, pin_memory=not gpu.tiny)
    return torch.cat(leaves, out=room)


def each_pinned(leaves: list[torch.Tensor], gpu: Gpu) -> object:
    parts = gathered(leaves, gpu).split([leaf.numel() for leaf in leaves])
    return [part.to(gpu.device, non_blocking=True) for part in parts]


def split(leaves: list[torch.Tensor], gpu: Gpu) -> list[torch.Tensor]:
    room = gathered(leaves, gpu).to(gpu.device, non_blocking=True)
    parts = room.split([leaf.numel() for leaf in leaves])
    return [part.view(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]


def unshared(leaves: list[torch.Tensor], gpu: Gpu) -> object:
    views = split(leaves, gpu)
    made = [torch.empty_like(view) for view in views]
    torch._foreach_copy_(made, views)
    return made


# -- memory ---------------------------------------------------------------------------------
@contextlib.contextmanager
def measured_memory(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Peaks of pinned memory and of all resident memory, beyond what was there."""
    found: dict[str, Any] = {}
    stats = not gpu.tiny and hasattr(torch.cuda, "reset_peak_host_memory_stats")
    if stats:
        with contextlib.suppress(AttributeError):
            torch._C._host_emptyCache()
        torch.cuda.reset_peak_host_memory_stats()
    before = status("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    yield found
    found["peak_rss_mib"] = max(status("VmHWM") - before, 0) >> 20
    if stats:
        known = torch.cuda.host_memory_stats()
        found["peak_pinned_mib"] = known.get("allocated_bytes.peak", 0) >> 20
        found["peak_pinned_used_mib"] = known.get("active_bytes.peak", 0) >> 20


def status(name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return 0
