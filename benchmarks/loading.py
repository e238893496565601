"""Rows per second of epochs: full shuffle, blocks, sequential; the first batch, and a resume; beside other loaders.

Run `python benchmarks/loading.py` (under a minute). Frames of 84 x 84 bytes with a label, in one place of each kind,
and on a bucket with `--latency 30` (milliseconds, moto behind a proxy). Rounds of all candidates are interleaved, and
the median and the best are shown: on a loaded machine they are far from each other. Others are measured where they are
installed: zarr-python under a DataLoader, torchrl's buffer, and HF datasets; what is missing is named at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tdstore
from tdstore import TensorDict
from tdstore.data import Epochs

BATCH = 64
OTHERS = ["zarr", "torchrl", "datasets"]
Batches = Callable[[], Iterator[Any]]


def frames(rows: int) -> TensorDict:
    """Frames that compress somewhat, as those of games do."""
    made = torch.randint(0, 255, (rows, 84, 84), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return TensorDict({"pixels": made & 0xF0, "label": torch.arange(rows)}, [rows])


class ZarrRows(Dataset[Any]):
    """Rows of arrays of zarr-python, batch by batch."""

    def __init__(self, place: Path) -> None:
        import zarr

        group = zarr.open_group(place, mode="r")
        self.arrays: dict[str, Any] = {name: group[name] for name in ("pixels", "label")}

    def __len__(self) -> int:
        return int(self.arrays["label"].shape[0])

    def __getitems__(self, rows: list[int]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array.oindex[rows]) for name, array in self.arrays.items()}


def write_zarr(td: TensorDict, place: Path, rows: int) -> None:
    """Write arrays by zarr-python itself, so many rows to a chunk, without shards."""
    import zarr

    group = zarr.open_group(place, mode="w")
    group.create_array("pixels", data=td["pixels"].numpy(), chunks=(rows, 84, 84))
    group.create_array("label", data=td["label"].numpy())


def of_zarr(place: Path, shuffle: bool) -> Batches:
    return lambda: iter(DataLoader(ZarrRows(place), BATCH, shuffle=shuffle, collate_fn=lambda batch: batch))


def of_torchrl(td: TensorDict, folder: Path, shuffle: bool) -> Batches:
    """torchrl's memory-mapped storage, with its sampler that has each row once."""
    from tensordict import TensorDict as Theirs
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

    rows = len(td)
    storage = LazyMemmapStorage(rows, scratch_dir=folder)
    sampler = SamplerWithoutReplacement(shuffle=shuffle)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH)
    buffer.extend(Theirs({"pixels": td["pixels"], "label": td["label"]}, [rows]))
    return lambda: (buffer.sample() for _ in range(rows // BATCH))


def of_datasets(td: TensorDict, shuffle: bool) -> Batches:
    import datasets

    columns = {"pixels": td["pixels"].flatten(1).numpy(), "label": td["label"].numpy()}
    made = datasets.Dataset.from_dict(columns).with_format("torch")
    return lambda: iter(DataLoader(made, BATCH, shuffle=shuffle))


def candidates(td: TensorDict, folder: Path, stack: ExitStack, latency: float) -> dict[str, Batches]:
    """Epochs over each place, and the others that are installed."""
    found: dict[str, Batches] = {}
    orders: dict[str, Any] = {"shuffled": True, "blocks": "blocks", "sequential": False}
    places: dict[str, tuple[str, dict[str, Any]]] = {
        kind: (str(folder / f"frames{suffix}"), {})
        for kind, suffix in {"memmap": "", "h5": ".h5", "zarr": ".zarr"}.items()
    }
    for place, _ in places.values():
        td.save(place).close()
    if latency:
        from tests.servers import FaultProxy, s3_moto

        server = stack.enter_context(s3_moto())
        proxy = stack.enter_context(FaultProxy(server.port))
        td.save(f"{server.url}/frames", storage_options=server.fsspec_options).close()
        proxy.latency_ms = latency
        places["s3"] = (f"{server.url}/frames", {"storage_options": server.through(proxy.port).fsspec_options})
    for kind, (place, options) in places.items():
        for name, shuffle in orders.items():
            epochs = Epochs(place, BATCH, shuffle=shuffle, block_rows=128, prefetch=4, options=options)
            found[f"{kind} {name}"] = epochs.__iter__
    chunks = (1, 64) if importlib.util.find_spec("zarr") else ()
    for rows in chunks:
        write_zarr(td, folder / f"chunks{rows}", rows)
    for name, shuffle in (("shuffled", True), ("sequential", False)):
        for rows in chunks:
            found[f"zarr-python, chunks of {rows}, {name}"] = of_zarr(folder / f"chunks{rows}", shuffle)
        if importlib.util.find_spec("torchrl"):
            found[f"torchrl {name}"] = of_torchrl(td, folder / f"torchrl-{name}", shuffle)
        if importlib.util.find_spec("datasets"):
            found[f"datasets {name}"] = of_datasets(td, shuffle)
    return found


def seconds(batches: Iterator[Any], most: int) -> tuple[float, int]:
    """Seconds for so many batches, and the rows in them."""
    start, rows = time.perf_counter(), 0
    for batch in itertools.islice(batches, most):
        rows += len(batch["label"])
    return time.perf_counter() - start, rows


def first_batch(place: str, state: dict[str, Any] | None) -> float:
    """Milliseconds from nothing open to the first batch, with a state or from the start."""
    start = time.perf_counter()
    epochs = Epochs(place, BATCH)
    if state is not None:
        epochs.load_state_dict(state)
    next(iter(epochs))
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--batches", type=int, default=32, help="batches of each candidate in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--latency", type=float, default=0, help="milliseconds of a bucket behind a proxy; 0: no bucket"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        td = frames(options.rows)
        runs = candidates(td, Path(name), stack, options.latency)
        speeds: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(options.rounds):
            for label, run in runs.items():
                took, rows = seconds(run(), options.batches)
                speeds[label].append(rows / took)
        for label, values in sorted(speeds.items()):
            results[f"{label}, rows/s"] = statistics.median(values)
            results[f"{label}, rows/s at best"] = max(values)
        for kind, suffix in {"memmap": "", "h5": ".h5", "zarr": ".zarr"}.items():
            place = str(Path(name) / f"frames{suffix}")
            epochs = Epochs(place, BATCH)
            next(iter(epochs))
            state = epochs.state_dict()
            times = [(first_batch(place, None), first_batch(place, state)) for _ in range(options.rounds)]
            results[f"{kind} first batch, ms"] = statistics.median(start for start, _ in times)
            results[f"{kind} resumed, ms"] = statistics.median(resumed for _, resumed in times)
    for label, value in results.items():
        print(f"{label:<54}{value:>12,.1f}")
    missing = [name for name in OTHERS if importlib.util.find_spec(name) is None]
    print(f"not installed, and not measured: {', '.join(missing) or 'none'}; tdstore {tdstore.__version__}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
