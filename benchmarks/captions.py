"""A million captions: random rows of them beside random rows of integers, on every kind of store.

Run `python benchmarks/captions.py` (about two minutes; a redis too where `redis-server` is installed), `--quick` for
smaller data. In the first groups "peer" is an int64 leaf of the same dataset, read as a tensor, and captions become
Python strings; "index" is `td[rows]` by itself, which makes none. The floor is
h5py and zarr-python on arrays of strings of their own kind, and a list of Python for what is in memory. In the last
groups "peer" is the tensordict package with 20,000 captions (2,000 rows are its limit where each value is a file).
"""

from __future__ import annotations

import itertools
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import zarr
from _harness import FLOOR, OURS, PEER, Bench, modules
from redis_server import Server

BATCH = 256
STORES = ("memory", "memmap", "h5", "zarr", "remote", "redis")


def captions(n: int) -> list[str]:
    """Captions of 20 to 90 characters."""
    rng = random.Random(0)
    words = ["".join(rng.choice("abcdefghijklmnopqrst") for _ in range(rng.randint(2, 9))) for _ in range(5000)]
    made = []
    for _ in range(n):
        length, text = rng.randint(20, 90), ""
        while len(text) < length:
            text += rng.choice(words) + " "
        made.append(text[:length])
    return made


def indices(n: int) -> dict[str, Callable[[], Any]]:
    """What is asked for, another one each time."""
    rng = np.random.default_rng(0)
    drawn = itertools.cycle([torch.from_numpy(rng.integers(0, n, BATCH)) for _ in range(64)])
    starts = itertools.cycle(rng.integers(0, n - BATCH, 64).tolist())

    def some() -> slice:
        start = next(starts)
        return slice(start, start + BATCH)

    return {f"{BATCH} random rows": lambda: next(drawn), f"a slice of {BATCH}": some, "one row": lambda: next(starts)}


def place_of(kind: str, root: Path, server: Server | None) -> str:
    if kind == "redis" and server is not None:
        return f"redis://127.0.0.1:{server.port}/0/captions"
    return (root / kind).as_uri() if kind == "remote" else str(root / f"ours.{kind}")


def beside_integers(bench: Bench, root: Path, tdstore: Any, texts: list[str], server: Server | None) -> None:
    native = natives(root, texts)
    for kind in STORES:
        if not bench.wants(f"captions {kind}", "") or (kind == "redis" and server is None):
            continue
        td = tdstore.TensorDict({"id": torch.arange(len(texts)), "caption": texts}, [len(texts)])
        if kind == "memory":
            one_store(bench, kind, td, tdstore, native.get(kind))
            continue
        place = place_of(kind, root, server)
        td.save(place, storage=kind).close()
        with tdstore.open(place) as stored:
            one_store(bench, kind, stored, tdstore, native.get(kind))
        bench.io(f"captions {kind}", "open", {OURS: lambda place=place: tdstore.open(place).close()})


def one_store(bench: Bench, kind: str, td: Any, tdstore: Any, native: Callable[[Any], object] | None) -> None:
    n = len(td)
    parts = {key: td.select(key) for key in ("id", "caption")}

    def read(key: str, index: Any) -> object:
        rows = parts[key][index]
        found = (rows if isinstance(rows, tdstore.TensorDict) else rows.to_tensordict())[key]
        return list(found) if isinstance(found, list) else found

    for name, index in indices(n).items():
        candidates: dict[str, Callable[[], object]] = {
            PEER: lambda index=index: read("id", index()),
            OURS: lambda index=index: read("caption", index()),
        }
        if native is not None:
            candidates[FLOOR] = lambda index=index: native(index())
        bench.io(f"captions {kind}", f"{name} of {n}", candidates)
        only = {
            PEER: lambda index=index: parts["id"][index()],
            OURS: lambda index=index: parts["caption"][index()],
        }
        bench.io(f"index {kind}", f"{name} of {n}", only)


def natives(root: Path, texts: list[str]) -> dict[str, Callable[[Any], object]]:
    """The other readers of strings, over arrays of their own."""
    with h5py.File(root / "native.h5", "w") as file:
        file.create_dataset("c", data=texts, dtype=h5py.string_dtype())
    strings = h5py.File(root / "native.h5")["c"].asstr()
    array = zarr.create_array(str(root / "native.zarr"), shape=(len(texts),), chunks=(1024,), dtype=str)
    array[:] = np.array(texts, object)

    def from_h5(index: Any) -> object:
        if not isinstance(index, torch.Tensor):
            return strings[index]
        rows, back = np.unique(index.numpy(), return_inverse=True)  # h5py wants each row once, in order
        return strings[rows][back]

    def from_list(index: Any) -> object:
        return [texts[i] for i in index.tolist()] if isinstance(index, torch.Tensor) else texts[index]

    return {
        "memory": from_list,
        "h5": from_h5,
        "zarr": lambda index: array.oindex[getattr(index, "numpy", lambda: index)()],
    }


def beside_the_peer(bench: Bench, root: Path, found: dict[str, Any], texts: list[str]) -> None:
    stacks = {"memory": len(texts), "memmap": min(2_000, len(texts))}
    for kind, n in stacks.items():
        some, stores = texts[:n], {}
        if PEER in found:
            peer = found[PEER].TensorDict({"id": torch.arange(n)}, [n])
            peer["caption"] = found[PEER].NonTensorStack(*some)
            stores[PEER] = peer if kind == "memory" else peer.memmap(str(root / "peer"))
        ours = found[OURS].TensorDict({"id": torch.arange(n), "caption": some}, [n])
        stores[OURS] = ours if kind == "memory" else ours.save(root / "beside")
        for name, index in indices(n).items():
            runs = {who: lambda td=td, index=index: td[index()]["caption"] for who, td in stores.items()}
            bench.io(f"peer {kind}", f"{name} of {n}", runs)


def main() -> int:
    warnings.simplefilter("ignore")
    bench = Bench("captions: a value per row (wall time per call); 'peer' is integers of the same dataset")
    root = Path(tempfile.mkdtemp(prefix="tdstore-bench-"))
    program = shutil.which("redis-server")
    server = Server(program) if program else None
    try:
        found = modules()
        texts = captions(50_000 if bench.quick else 1_000_000)
        beside_integers(bench, root, found[OURS], texts, server)
        beside_the_peer(bench, root, found, texts[:20_000])
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(root, ignore_errors=True)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
