"""zarr stores on a local disk: beside the peer, zarr-python and tensorstore.

Run `python benchmarks/zarr_stores.py` (about 2 minutes), `--quick` for smaller data. The floor is tensorstore on the
store that we wrote, where it is installed (`pip install tensorstore`); else zarr-python on it. The last rows are an
icechunk repository: the floor is zarr-python on it, or our zarr folder.
"""

from __future__ import annotations

import importlib
import itertools
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import torch
import zarr
from _harness import FLOOR, OURS, PEER, Bench, Target, modules

BATCH = 256
# SPEED.md section 6 and issue 3
TARGETS = [
    Target("zarr random", 50.0, row="default"),
    Target("zarr get_at", 15.0),
    Target("zarr slice", 50.0, row="default"),
    Target("zarr fill", 10.0),
]


def frames(n: int) -> dict[str, torch.Tensor]:
    """Frames with some structure, as games have."""
    rng = np.random.default_rng(1)
    base = np.broadcast_to((np.arange(84, dtype=np.uint8) // 12 * 20)[:, None], (32, 84, 84)).copy()
    for frame in base:
        for x, y in rng.integers(0, 76, (40, 2)):
            frame[x : x + 4, y : y + 8] = rng.integers(0, 255)
    obs = torch.from_numpy(base[rng.integers(0, 32, n)])
    return {"obs": obs, "action": torch.arange(n), "reward": torch.rand(n)}


def floor_reader(place: Path) -> tuple[str, Callable[[Any], object]]:
    """The fastest other reader of a store of ours."""
    names = ("obs", "action", "reward")
    try:
        ts = importlib.import_module("tensorstore")
    except ImportError:
        arrays = {k: zarr.open_array(str(place), path=k, mode="r") for k in names}
        return "zarr-python", lambda index: [a.oindex[index] for a in arrays.values()]
    opened = [
        ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{place}/{k}/"}}).result() for k in names
    ]
    return "tensorstore", lambda index: [f.result() for f in [a[index].read() for a in opened]]


def reads(bench: Bench, root: Path, found: dict[str, Any]) -> None:
    n = 2_000 if bench.quick else 20_000
    data = frames(n)
    rng = np.random.default_rng(0)
    drawn = itertools.cycle([torch.from_numpy(rng.integers(0, n, BATCH)) for _ in range(64)])
    starts = itertools.cycle(rng.integers(0, n - BATCH, 64).tolist())
    place = root / "ours.zarr"
    stores: dict[str, Any] = {}
    if OURS in found:
        found[OURS].TensorDict(data, [n]).save(place, storage="zarr").close()
        stores[OURS] = found[OURS].open(place)
    name, floor = floor_reader(place)
    print(f"floor: {name} on the store that tdstore wrote")
    for label, options in (("default", {}), ("chunks=64", {"chunks": 64})):
        if PEER in found:
            peer = found[PEER].TensorDict({k: v.clone() for k, v in data.items()}, [n])
            target = root / f"peer {label}.zarr"
            try:
                stores[PEER] = peer.to_zarr(str(target), **options)
            except TypeError:
                continue

        def whole(td: Any) -> Callable[[], object]:
            return lambda: td[next(drawn)].to_tensordict()

        def at(td: Any) -> Callable[[], object]:
            if not hasattr(td, "get_at"):
                return whole(td)

            def run() -> object:
                index = next(drawn)
                return {k: td.get_at(k, index) for k in ("obs", "action", "reward")}

            return run

        def part(td: Any) -> Callable[[], object]:
            def run() -> object:
                start = next(starts)
                return td[start : start + BATCH].to_tensordict()

            return run

        def wall(make: Callable[[Any], Callable[[], object]], other: Callable[[], object]) -> dict[str, Any]:
            return {**{who: make(td) for who, td in stores.items() if bench.has(who)}, FLOOR: other}

        bench.io("zarr random", f"256 of {n} frames, {label}", wall(whole, lambda: floor(next(drawn).numpy())))
        bench.io("zarr get_at", f"256 of {n} frames, {label}", wall(at, lambda: floor(next(drawn).numpy())))

        def slices() -> object:
            start = next(starts)
            return floor(slice(start, start + BATCH))

        bench.io("zarr slice", f"256 of {n} frames, {label}", wall(part, slices))


def fill(bench: Bench, root: Path, found: dict[str, Any]) -> None:
    n, block = (1_000, 250) if bench.quick else (8_000, 500)
    data = frames(block)
    fresh = itertools.count()
    empty = {k: torch.zeros(n, *v.shape[1:], dtype=v.dtype) for k, v in data.items()}
    runs: dict[str, Callable[[], object]] = {}
    if PEER in found:
        one = found[PEER].TensorDict(data, [block])
        store = found[PEER].TensorDict(empty, [n]).to_zarr(str(root / "filled peer.zarr"), chunks=64)

        def theirs() -> None:
            for start in range(0, n, block):
                store[start : start + block] = one

        runs[PEER] = theirs
    if OURS in found:
        leaves = {k: found[OURS].types.LeafSpec(tuple(v.shape[1:]), v.dtype) for k, v in data.items()}
        mine = found[OURS].TensorDict(data, [block])

        def ours() -> None:
            place = root / f"filled {next(fresh)}.zarr"
            td = found[OURS].TensorDict.from_schema(leaves, batch_size=[n], storage=f"zarr://{place}", durable="none")
            for start in range(0, n, block):
                td[start : start + block] = mine
            td.close()

        runs[OURS] = ours

    def floor() -> None:
        group = zarr.open_group(str(root / f"floor {next(fresh)}.zarr"), mode="w")
        for k, v in data.items():
            array = group.create_array(k, shape=(n, *v.shape[1:]), dtype=v.numpy().dtype, chunks=(block, *v.shape[1:]))
            for start in range(0, n, block):
                array[start : start + block] = v.numpy()

    bench.io("zarr fill", f"{n} frames in blocks of {block}", {**runs, FLOOR: floor})


def repositories(bench: Bench, root: Path, found: dict[str, Any]) -> None:
    """An icechunk repository beside zarr-python on it, and beside a zarr folder of ours."""
    if OURS not in found:
        return
    ours, n = found[OURS], 2_000 if bench.quick else 8_000
    data = ours.TensorDict(frames(n), [n])
    rng = np.random.default_rng(0)
    drawn = itertools.cycle([torch.from_numpy(np.unique(rng.integers(0, n, BATCH))) for _ in range(64)])
    places = {suffix: root / f"beside.{suffix}" for suffix in ("icechunk", "zarr")}
    for place in places.values():
        data.save(place).close()
    opened = {suffix: ours.open(place) for suffix, place in places.items()}
    repository = icechunk.Repository.open(icechunk.local_filesystem_storage(str(places["icechunk"])))
    session = repository.readonly_session("main")
    arrays = [zarr.open_array(session.store, path=k, mode="r") for k in ("obs", "action", "reward")]

    def rows(suffix: str) -> Callable[[], object]:
        return lambda: opened[suffix][next(drawn)].to_tensordict()

    def by_zarr() -> object:
        index = next(drawn).numpy()
        return [array.oindex[index] for array in arrays]

    def saved(suffix: str) -> Callable[[], object]:
        fresh = itertools.count()
        return lambda: data.save(root / f"saved {next(fresh)}.{suffix}").close()

    def changed(suffix: str) -> Callable[[], object]:
        writer = ours.open(places[suffix], mode="r+")

        def run() -> None:
            writer[100:132] = data[100:132]
            writer.commit()

        return run

    bench.io("icechunk beside zarr-python", f"256 of {n} frames", {OURS: rows("icechunk"), FLOOR: by_zarr})
    for name, make in ((f"256 of {n} frames", rows), (f"save {n} frames", saved), ("32 frames, commit", changed)):
        bench.io("icechunk beside a zarr folder", name, {OURS: make("icechunk"), FLOOR: make("zarr")})


def main() -> int:
    warnings.simplefilter("ignore")
    bench = Bench("zarr on a local disk (wall time per call)", TARGETS)
    root = Path(tempfile.mkdtemp(prefix="tdstore-bench-"))
    try:
        found = {who: module for who, module in modules().items() if bench.has(who)}
        reads(bench, root, found)
        fill(bench, root, found)
        repositories(bench, root, found)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
