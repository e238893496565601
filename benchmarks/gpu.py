"""Copies to and from a GPU, batches for training, operations on it: absolute figures, beside raw torch and the peer.

    python benchmarks/gpu.py                     # 100 seconds at most
    python benchmarks/gpu.py --cpu               # the same calls on tiny data without a GPU: does everything run?
    python benchmarks/gpu.py --only link         # rows whose group or name contains the text

Each candidate of a row is called in turns. `wall` is the median time of a call with a synchronization behind it;
`launch` the time after which a call returns, in a loop without synchronizations. GB are 10**9 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _gpu import GB, Gpu, Run, measure_blocks, measure_link, measured_memory, pin

from tdstore import PersistentTensorDict, TensorDict
from tdstore.data import Epochs, TensorDictDataset
from tdstore.rl import LazyMemmapStorage, TensorDictReplayBuffer

FRAME = (84, 84, 3)
BATCH = 256


def peer() -> Any:
    """The `tensordict` package, or None."""
    try:
        import tensordict
    except ImportError as error:
        print(f"tensordict is left out: {error}", file=sys.stderr)
        return None
    return tensordict


# -- TensorDicts in memory -----------------------------------------------------------------
def leaves_of(kind: str, gpu: Gpu) -> dict[str, torch.Tensor]:
    count, size = {
        "1 GiB in 4 leaves": (4, 256 << 20),
        "256 leaves of 256 B": (256, 256),
        "1000 leaves of 16 KB": (1000, 16 << 10),
    }[kind]
    if gpu.tiny:
        count, size = min(count, 8), 256
    return {f"leaf{i}": torch.ones(size // 4) for i in range(count)}


def measure_moves(gpu: Gpu, theirs: Any) -> None:
    for kind in ("1 GiB in 4 leaves", "256 leaves of 256 B", "1000 leaves of 16 KB"):
        if not gpu.wants("to", kind):
            continue
        leaves = leaves_of(kind, gpu)
        nbytes = sum(leaf.nbytes for leaf in leaves.values())
        other = None if theirs is None else theirs.TensorDict(dict(leaves), [])
        td = TensorDict(dict(leaves), [])
        found: dict[str, Run] = {
            "raw loop": lambda leaves=leaves: {k: v.to(gpu.device) for k, v in leaves.items()},
            "tdstore": lambda td=td: td.to(gpu.device),
            "tdstore non_blocking": lambda td=td: td.to(gpu.device, non_blocking=True),
        }
        if other is not None:
            found["tensordict"] = lambda other=other: other.to(gpu.device)
            found["tensordict non_blocking"] = lambda other=other: other.to(gpu.device, non_blocking=True)
        gpu.row("to", kind, found, nbytes=nbytes, least=2, budget=0.8)
        small = {"tdstore": td.consolidate()}
        if other is not None:
            small["tensordict"] = other.consolidate()
        gpu.row(
            "to", f"{kind}, consolidated",
            {name: lambda one=one: one.to(gpu.device) for name, one in small.items()},
            nbytes=nbytes, budget=0.8,
        )  # fmt: skip
        on = {"tdstore": td.to(gpu.device)}
        if other is not None:
            on["tensordict"] = other.to(gpu.device)
        back: dict[str, Run] = {name: lambda one=one: one.cpu() for name, one in on.items()}
        back["raw loop"] = lambda on=on: {k: v.cpu() for k, v in on["tdstore"].items()}
        gpu.row("to", f"{kind}, back to the CPU", back, nbytes=nbytes, least=2, budget=0.5)


# -- stored data ---------------------------------------------------------------------------
FORMATS = ("memmap", "tdz", "h5", "zarr", "objects")


def save(td: TensorDict, folder: Path, storage: str) -> Any:
    if storage == "objects":
        return td.save(f"file://{folder}/objects")
    return td.save(folder / storage, storage=storage)


def large(gpu: Gpu) -> TensorDict:
    rows = 8 if gpu.tiny else (256 << 20) // 21168
    noise = torch.randint(0, 255, (-(-rows // 8), *FRAME), dtype=torch.uint8)
    return TensorDict({f"leaf{i}": noise.repeat(8, 1, 1, 1)[:rows] ^ i for i in range(4)}, [rows])


def measure_stored(gpu: Gpu, folder: Path, theirs: Any, td: TensorDict) -> dict[str, Any]:
    """1 GiB in four leaves, from files that are in the page cache."""
    nbytes = sum(leaf.nbytes for leaf in td.values())
    opened: dict[str, Any] = {}
    for storage in FORMATS:
        if not (gpu.wants("stored", storage) or gpu.wants("batches") or gpu.wants("blocks")):
            continue
        began = time.perf_counter()
        try:
            stored = opened[storage] = save(td, folder, storage)
        except Exception as error:
            gpu.add("stored", storage, {"tdstore save": {"error": f"{type(error).__name__}: {error}"}})
            gpu.errors += 1
            continue
        seconds = time.perf_counter() - began
        if gpu.wants("stored", storage):
            gpu.add("stored", f"{storage}: saved from memory", {"tdstore": {"gb_s": nbytes / seconds / GB}})
        found: dict[str, Run] = {
            "tdstore": lambda stored=stored: resident(stored.to(gpu.device)),
            "read, then torch": lambda stored=stored: read_then_move(stored, gpu),
        }
        if storage == "memmap" and theirs is not None:
            other = theirs.TensorDict(dict(td.items()), td.batch_size).memmap(str(folder / "theirs"))
            found["tensordict"] = lambda other=other: other.to(gpu.device)
        if storage == "h5" and theirs is not None:
            with contextlib.suppress(Exception):
                other = theirs.PersistentTensorDict.from_dict(
                    theirs.TensorDict(dict(td.items()), td.batch_size), filename=str(folder / "theirs.h5")
                )
                found["tensordict"] = lambda other=other: other.to_tensordict().to(gpu.device)
        gpu.row("stored", f"{storage}: 1 GiB", found, nbytes=nbytes, least=1, budget=0.6)
        if gpu.wants("stored", storage):
            with measured_memory(gpu) as memory:
                made = resident(stored.to(gpu.device))
                gpu.sync()
            del made
            gpu.add("stored", f"{storage}: memory", {"tdstore": memory})
    return opened


def resident(td: Any) -> Any:
    return td.to_tensordict() if isinstance(td, PersistentTensorDict) else td


def read_then_move(stored: Any, gpu: Gpu) -> Any:
    """What the library did before: whole leaves in pageable memory, and torch's copy of each."""
    return {key: leaf.to(gpu.device) for key, leaf in resident(stored).items()}


# -- batches -------------------------------------------------------------------------------
def work(gpu: Gpu) -> Callable[[Any], object]:
    """What a training step would do on the device: about 2 ms on an H100."""
    size = 8 if gpu.tiny else 4096
    weight = torch.ones(size, size, device=gpu.device, dtype=torch.bfloat16)

    def step(batch: Any) -> object:
        total = batch["pixels"][:, 0].sum()
        return weight @ weight @ weight @ weight @ weight @ weight, total

    return step


def measure_batches(gpu: Gpu, folder: Path, theirs: Any) -> None:
    """Random rows of 21 KB: read, moved and used by a step."""
    if not gpu.wants("batches"):
        return
    rows, batch = (64, 8) if gpu.tiny else (12800, BATCH)
    generator = torch.Generator().manual_seed(0)
    data = {
        "pixels": torch.randint(0, 255, (rows // 8, *FRAME), dtype=torch.uint8).repeat(8, 1, 1, 1),
        "action": torch.randint(0, 9, (rows,), generator=generator),
        "reward": torch.rand(rows, generator=generator),
        "done": torch.rand(rows, generator=generator) > 0.9,
    }
    td = TensorDict(data, [rows])
    row_bytes = sum(leaf.nbytes for leaf in data.values()) // rows
    step = work(gpu)
    batches = 2 if gpu.tiny else 60

    def train(stream: Iterator[Any]) -> None:
        """Take batches of a stream that goes on: starting it is not what is measured."""
        for _ in range(batches):
            step(next(stream))

    places: dict[str, Any] = {}
    for storage in ("memmap", "h5", "zarr", "objects"):
        try:
            save(td, folder / "batches", storage)
            places[storage] = (
                f"file://{folder}/batches/objects" if storage == "objects" else folder / "batches" / storage
            )
        except Exception as error:
            gpu.add("batches", storage, {"tdstore save": {"error": f"{type(error).__name__}: {error}"}})
            gpu.errors += 1
    device_only = {key: leaf[:batch].to(gpu.device) for key, leaf in data.items()}
    found: dict[str, Run] = {"the step alone": partial(train, forever(lambda: device_only))}
    pinned = {key: pin(leaf[:batch].clone(), gpu) for key, leaf in data.items()}
    found["one pinned batch, again and again"] = partial(
        train, forever(lambda: {key: leaf.to(gpu.device, non_blocking=True) for key, leaf in pinned.items()})
    )
    gpu.row("batches", "limits", found, items=batches * batch, nbytes=batches * batch * row_bytes, budget=0.6)
    for storage, place in places.items():
        found = {}
        options = {"storage": storage} if storage in ("memmap", "h5", "zarr") else None
        for prefetch in (1, 2, 4, 8) if storage == "memmap" else (2, 4):
            epochs = Epochs(place, batch, prefetch=prefetch, device=gpu.device, options=options)
            found[f"tdstore Epochs, prefetch={prefetch}"] = partial(train, endless(epochs))
        dataset = TensorDictDataset(place, options=options)
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=batch, shuffle=True, collate_fn=TensorDictDataset.collate, pin_memory=not gpu.tiny
        )
        if storage in ("memmap", "h5"):
            found["tdstore DataLoader, pinned"] = partial(
                train, (one.to(gpu.device, non_blocking=True) for one in endless(loader))
            )
        gpu.row(
            "batches", f"{storage}: 256 random rows", found,
            items=batches * batch, nbytes=batches * batch * row_bytes, least=1, budget=0.5,
        )  # fmt: skip
    found = {}
    for name, library in (("tdstore", None), ("tensordict", theirs)):
        if name == "tdstore":
            buffer: Any = TensorDictReplayBuffer(
                storage=LazyMemmapStorage(rows), batch_size=batch, pin_memory=not gpu.tiny, prefetch=4
            )
            buffer.extend(td)
        elif library is not None:
            try:
                import torchrl.data

                buffer = torchrl.data.TensorDictReplayBuffer(
                    storage=torchrl.data.LazyMemmapStorage(rows), batch_size=batch, pin_memory=not gpu.tiny, prefetch=4
                )
                buffer.extend(library.TensorDict(data, [rows]))
            except ImportError as error:
                print(f"torchrl is left out: {error}", file=sys.stderr)
                continue
        else:
            continue
        found[f"{name} sample, pinned"] = partial(train, forever(partial(sample, buffer, gpu)))
    gpu.row(
        "batches", "replay buffer over memmap", found,
        items=batches * batch, nbytes=batches * batch * row_bytes, least=1, budget=0.5,
    )  # fmt: skip


def forever(make: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield make()


def sample(buffer: Any, gpu: Gpu) -> Any:
    return buffer.sample().to(gpu.device, non_blocking=True)


def endless(epochs: Any) -> Iterator[Any]:
    while True:
        yield from epochs


# -- operations on the device --------------------------------------------------------------
def measure_operations(gpu: Gpu, theirs: Any, count: int) -> None:
    """Indexing, writing and arithmetic of leaves on the device: 1,024 rows of 16 floats each."""
    n, width = 1024, 16
    raw = {f"leaf{i}": torch.randn(n, width, device=gpu.device) for i in range(count)}
    made: dict[str, Any] = {"tdstore": TensorDict(dict(raw), [n], device=gpu.device)}
    if not gpu.tiny:
        made["tdstore cuda backend"] = TensorDict(dict(raw), [n]).save(storage="cuda")
    if theirs is not None:
        made["tensordict"] = theirs.TensorDict(dict(raw), [n], device=gpu.device)
    rows = torch.randint(0, n, (256,), device=gpu.device)
    mask = torch.rand(n, device=gpu.device) > 0.75
    indices: dict[str, Any] = {
        "int": 5, "slice": slice(100, 356), "list": list(range(0, 1024, 4)),
        "device rows": rows, "CPU rows": rows.cpu(), "device mask": mask,
    }  # fmt: skip
    for name, index in indices.items():
        found: dict[str, Run] = {which: lambda td=td, index=index: td[index] for which, td in made.items()}
        found["raw loop"] = lambda index=index: {k: v[index] for k, v in raw.items()}
        gpu.row("index", f"{count} leaves, {name}", found, launches=True, budget=0.03)
    for name in ("int", "slice", "device rows", "device mask"):
        index = indices[name]
        value = {which: td[index] + 1 for which, td in made.items()}
        plain = {k: v[index] + 1 for k, v in raw.items()}
        found = {
            which: lambda td=td, index=index, value=value[which]: put(td, index, value) for which, td in made.items()
        }
        found["raw loop"] = lambda index=index, plain=plain: [put(raw[k], index, v) for k, v in plain.items()]
        gpu.row("write", f"{count} leaves, {name}", found, launches=True, budget=0.03)
    copies, fresh = {id(td): td.clone() for td in made.values()}, {k: v.clone() for k, v in raw.items()}
    calls: dict[str, tuple[Callable[[Any], object], Run]] = {
        "update_ by a copy": (
            lambda td: td.update_(copies[id(td)]), lambda: [v.copy_(fresh[k]) for k, v in raw.items()]
        ),
        "clone": (lambda td: td.clone(), lambda: {k: v.clone() for k, v in raw.items()}),
        "+ 1": (lambda td: td + 1, lambda: {k: v + 1 for k, v in raw.items()}),
        "mul_": (lambda td: td.mul_(1.0), lambda: [v.mul_(1.0) for v in raw.values()]),
        "+ itself": (lambda td: td + td, lambda: {k: v + v for k, v in raw.items()}),
        "stack of 4": (
            lambda td: torch.stack([td, td, td, td]), lambda: {k: torch.stack([v] * 4) for k, v in raw.items()}
        ),
    }  # fmt: skip
    for name, (call, floor) in calls.items():
        found = {which: lambda td=td, call=call: call(td) for which, td in made.items()}
        found["raw loop"] = floor
        gpu.row("ops", f"{count} leaves, {name}", found, launches=True, budget=0.03)


def put(target: Any, index: Any, value: Any) -> None:
    target[index] = value


# -- from the device to files --------------------------------------------------------------
def measure_saves(gpu: Gpu, folder: Path, theirs: Any, td: TensorDict) -> None:
    if not gpu.wants("save"):
        return
    on = td.to(gpu.device)
    nbytes = sum(leaf.nbytes for leaf in td.values())
    raw = dict(on.items())
    found: dict[str, Run] = {
        "raw .cpu()": lambda: {k: v.cpu() for k, v in raw.items()},
        "tdstore memmap": lambda: on.save(folder / "saved", storage="memmap"),
        "tdstore memmap, not synced": lambda: on.save(folder / "saved", storage="memmap", durable="none"),
        "torch.save": lambda: torch.save(raw, folder / "saved.pt"),
    }
    if theirs is not None:
        other = theirs.TensorDict(raw, td.batch_size)
        found["tensordict memmap"] = lambda: other.memmap(str(folder / "saved-theirs"))
    gpu.row("save", "1 GiB from the device", found, nbytes=nbytes, least=1, budget=0.5)
    with measured_memory(gpu) as memory:
        on.save(folder / "saved", storage="memmap")
    gpu.add("save", "memory", {"tdstore memmap": memory})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="tiny data on the CPU: only to see that everything runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--only", metavar="TEXT", help="only rows whose group or name contains TEXT")
    parser.add_argument("--alone", action="store_true", help="without the tensordict package")
    parser.add_argument("--seconds", type=float, default=100, help="what is not begun by then is left out")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if not options.cpu and not torch.cuda.is_available():
        print("torch sees no CUDA device; --cpu runs tiny data without one", file=sys.stderr)
        return 2
    if options.cpu:
        torch.set_num_threads(1)
    gpu = Gpu(options)
    theirs = None if options.alone else peer()
    gc.freeze()
    folder = Path(tempfile.mkdtemp(prefix="tdstore-gpu-"))
    try:
        if gpu.wants("link"):
            measure_link(gpu)
        gpu.note("in memory")
        measure_moves(gpu, theirs)
        gpu.note("batches")
        measure_batches(gpu, folder, theirs)
        shutil.rmtree(folder / "batches", ignore_errors=True)
        gpu.note("stored data")
        td = large(gpu)
        opened = measure_stored(gpu, folder, theirs, td)
        gpu.note("saves")
        measure_saves(gpu, folder, theirs, td)
        gpu.note("blocks")
        if gpu.wants("blocks") and "memmap" in opened:
            measure_blocks(gpu, opened["memmap"]["leaf0"] if gpu.tiny else whole(opened["memmap"], folder))
        gpu.note("operations")
        for count in (3, 30) if gpu.tiny else (3, 30, 300):
            measure_operations(gpu, theirs, count)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    summarize(gpu)
    return 1 if gpu.errors else 0


def whole(stored: Any, folder: Path) -> torch.Tensor:
    """The first leaf of a memmap dataset, mapped anew."""
    del stored
    found: torch.Tensor = TensorDict.load_memmap(folder / "memmap")["leaf0"]
    return found


def summarize(gpu: Gpu) -> None:
    """Print what moves data, beside the limit of the link."""
    print(f"\n{time.perf_counter() - gpu.began:.1f} s; the link: {gpu.link['to']:.1f} GB/s to the device, "
          f"{gpu.link['from']:.1f} from it")  # fmt: skip
    for row in gpu.rows:
        if row["group"] not in ("to", "stored", "batches", "save"):
            continue
        back = row["group"] == "save" or "back" in row["name"]
        limit = gpu.link["from" if back else "to"]
        for candidate, figures in row["candidates"].items():
            if "gb_s" in figures and limit:
                figures["share"] = figures["gb_s"] / limit
                print(f"{row['group']:<8} {row['name']:<34} {candidate:<26} {figures['gb_s']:>7.2f} GB/s "
                      f"{figures['share']:>5.0%} of the link")  # fmt: skip
    for row in gpu.rows:
        for candidate, figures in row["candidates"].items():
            if "error" in figures:
                print(f"error: {row['group']} / {row['name']} / {candidate}: {figures['error']}")
    gpu.write()


if __name__ == "__main__":
    sys.exit(main())
