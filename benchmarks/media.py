"""Each medium's best package beside ours: the same data, written, opened and read.

Run `python benchmarks/media.py` (two minutes), `--quick` for smaller data (30 s). Here "peer" is the package that the
row names, called as its documentation shows, and there is no floor. Weights are 60 tensors of a network; frames are
84 x 84 bytes with an action and a reward. What is not installed is named at the end:
`pip install -r benchmarks/requirements.txt`.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _harness import OURS, PEER, Bench

import tdstore
from tdstore import TensorDict

BATCH = 256
PACKAGES = ("safetensors", "h5py", "zarr", "tensorstore", "lance", "torchrl")
Run = Callable[[], object]


def weights(quick: bool) -> dict[str, torch.Tensor]:
    """A state dict of 30 layers: a matrix and a bias each, 63 MB (quick: 4 MB)."""
    width = 192 if quick else 720
    made = {}
    for i in range(30):
        made[f"layers.{i}.weight"] = torch.randn(width, width)
        made[f"layers.{i}.bias"] = torch.randn(width)
    return made


def frames(rows: int) -> dict[str, torch.Tensor]:
    made = torch.randint(0, 255, (rows, 84, 84), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return {"pixels": made & 0xF0, "action": torch.arange(rows), "reward": torch.rand(rows)}


class Media:
    """The bench, a scratch folder, and the data."""

    def __init__(self, bench: Bench, root: Path) -> None:
        self.bench, self.root = bench, root
        self.weights = weights(bench.quick)
        self.count = 2_000 if bench.quick else 10_000
        self.frames = frames(self.count)
        self.numpy = {name: leaf.numpy() for name, leaf in self.frames.items()}
        self.names = (self.root / str(i) for i in itertools.count())
        drawn = np.random.default_rng(0).integers(0, self.count, (64, BATCH))
        self.drawn = itertools.cycle(drawn)
        self.starts = itertools.cycle(range(0, self.count - BATCH, BATCH))

    def new(self, suffix: str = "") -> Path:
        return next(self.names).with_suffix(suffix)

    def row(self, package: str, name: str, peer: Run, ours: Run, why: str = "", tidy: Run | None = None) -> None:
        """Add a row; `why` says why ours may be behind."""
        self.bench.io(package, name, {PEER: peer, OURS: ours}, tidy=tidy, why=why or FIRST)

    def saves(self, package: str, name: str, peer: Callable[[Path], object], ours: Run, suffix: str, why: str) -> None:
        """A row of savings to new places, which are removed after each."""
        made: list[Path] = []

        def save() -> None:
            made.append(self.new(suffix))
            peer(made[-1])

        self.row(package, name, save, ours, why, tidy=lambda: self._clear(made))

    def _clear(self, made: list[Path]) -> None:
        for path in [*made, *self.root.glob("ours-*")]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        made.clear()

    def save_ours(self, data: dict[str, torch.Tensor], suffix: str, batch: list[int], **options: Any) -> Run:
        td = TensorDict(data, batch)

        def save() -> None:
            # Without a wait for the disk, as the others save.
            tdstore.save(td, self.root / f"ours-{next(self.names).name}{suffix}", durable="none", **options).close()

        return save

    def open_ours(self, data: dict[str, torch.Tensor], suffix: str, batch: list[int], **options: Any) -> Any:
        place = self.new(suffix)
        tdstore.save(TensorDict(data, batch), place, **options).close()
        return place

    def random(self, td: Any) -> Run:
        # Rows of live tensors are a copy already; those of a window are read.
        return lambda: td[torch.from_numpy(next(self.drawn))].contiguous()

    def block(self, td: Any) -> Run:
        return lambda: _block(td, next(self.starts))


def _block(td: Any, start: int) -> object:
    return td[start : start + BATCH].to_tensordict()


CHECKSUMS = "ours writes or compares a checksum of each block, and publishes by a rename"
FIRST = "rows that are read for the first time are compared with their checksums"


def state_dicts(m: Media) -> None:
    """safetensors, torch.save and DCP: a state dict, saved and read whole."""
    total = sum(leaf.nbytes for leaf in m.weights.values()) >> 20
    ours = {suffix: m.open_ours(m.weights, suffix, []) for suffix in ("", ".tdz")}

    def read(suffix: str) -> Run:
        return lambda: _touch(tdstore.load(ours[suffix]).values())

    if importlib.util.find_spec("safetensors"):
        from safetensors.torch import load_file, save_file

        place = m.new(".safetensors")
        save_file(m.weights, place)
        m.saves(
            "safetensors",
            f"save {total} MB",
            lambda p: save_file(m.weights, p),
            m.save_ours(m.weights, ".tdz", []),
            ".safetensors",
            CHECKSUMS,
        )
        m.row("safetensors", "load, read all", lambda: _touch(load_file(place).values()), read(".tdz"), CHECKSUMS)
    place = m.new(".pt")
    torch.save(m.weights, place)
    save = m.save_ours(m.weights, ".tdz", [])
    m.saves("torch", f"torch.save {total} MB", lambda p: torch.save(m.weights, p), save, ".pt", CHECKSUMS)
    mapped: Run = lambda: torch.load(place, mmap=True, weights_only=True)  # noqa: E731
    m.row("torch", "torch.load(mmap=True)", mapped, lambda: tdstore.load(ours[""]), CHECKSUMS)
    loaded: Run = lambda: _touch(torch.load(place, weights_only=True).values())  # noqa: E731
    m.row("torch", "torch.load, read all", loaded, read(""), CHECKSUMS)

    import torch.distributed.checkpoint as dcp

    def dcp_save(path: Path) -> None:
        dcp.save(dict(m.weights), checkpoint_id=path, no_dist=True)

    place_dcp = m.new()
    dcp_save(place_dcp)

    def dcp_load() -> None:
        into = {name: torch.empty_like(leaf) for name, leaf in m.weights.items()}
        dcp.load(into, checkpoint_id=place_dcp, no_dist=True)

    m.saves("torch dcp", f"save {total} MB", dcp_save, m.save_ours(m.weights, "", []), "", CHECKSUMS)
    m.row("torch dcp", "load", dcp_load, read(""), CHECKSUMS)


def _touch(leaves: Any) -> float:
    """Read a byte of every page, as a program that uses the tensors does."""
    return sum(float(leaf.reshape(-1)[::1024].sum()) for leaf in leaves)


def arrays(m: Media) -> None:
    """NumPy's memmap, h5py, zarr-python, tensorstore, lance and torchrl: random rows, blocks and filling."""
    for add in (numpy_memmap, h5py_file, zarr_python, tensorstore_arrays, lance_table, torchrl_storage):
        if add is numpy_memmap or importlib.util.find_spec(add.__name__.partition("_")[0].removesuffix("_file")):
            add(m)


def numpy_memmap(m: Media) -> None:
    maps = {}
    for name, array in m.numpy.items():
        path = m.new(".bin")
        array.tofile(path)
        maps[name] = np.memmap(path, mode="r", dtype=array.dtype, shape=array.shape)
    td = tdstore.load(m.open_ours(m.frames, "", [m.count]))

    def rows() -> object:
        at = next(m.drawn)
        return {name: torch.from_numpy(array[at]) for name, array in maps.items()}

    def block() -> object:
        s = next(m.starts)
        return {name: torch.from_numpy(array[s : s + BATCH].copy()) for name, array in maps.items()}

    m.row("numpy", f"{BATCH} random frames", rows, m.random(td), FIRST)
    m.row("numpy", f"block of {BATCH}", block, m.block(td), FIRST)

    def fill(path: Path) -> None:
        path.mkdir()
        for name, array in m.numpy.items():
            made = np.memmap(path / name, mode="w+", dtype=array.dtype, shape=array.shape)
            made[:] = array
            made.flush()

    m.saves("numpy", f"write {m.count} frames", fill, m.save_ours(m.frames, "", [m.count]), "", CHECKSUMS)


def h5py_file(m: Media) -> None:
    import h5py

    def fill(path: Path) -> None:
        with h5py.File(path, "w") as file:
            for name, array in m.numpy.items():
                file.create_dataset(name, data=array)

    place = m.new(".h5")
    fill(place)
    file = h5py.File(place, "r")
    td = tdstore.load(m.open_ours(m.frames, ".h5", [m.count]))

    def rows() -> object:
        # h5py takes ascending indices without repetition only.
        at, back = np.unique(next(m.drawn), return_inverse=True)
        return {name: torch.from_numpy(file[name][at][back]) for name in m.numpy}

    def block() -> object:
        s = next(m.starts)
        return {name: torch.from_numpy(file[name][s : s + BATCH]) for name in m.numpy}

    m.row("h5py", f"{BATCH} random frames", rows, m.random(td), FIRST)
    m.row("h5py", f"block of {BATCH}", block, m.block(td), FIRST)
    m.saves("h5py", f"write {m.count} frames", fill, m.save_ours(m.frames, ".h5", [m.count]), ".h5", CHECKSUMS)


def zarr_python(m: Media) -> None:
    import zarr

    ours = m.open_ours(m.frames, ".zarr", [m.count])
    group = zarr.open_group(ours, mode="r")
    theirs: dict[str, Any] = {name: group[name] for name in m.numpy}
    td = tdstore.load(ours)

    def fill(path: Path) -> None:
        made = zarr.open_group(path, mode="w")
        for name, like in theirs.items():  # the same chunks, shards and compression on both sides
            kind = {key: getattr(like, key) for key in ("shape", "dtype", "chunks", "shards", "compressors")}
            made.create_array(name, **kind)[:] = m.numpy[name]

    def rows() -> object:
        at = next(m.drawn)
        return {name: torch.from_numpy(array.oindex[at]) for name, array in theirs.items()}

    def block() -> object:
        s = next(m.starts)
        return {name: torch.from_numpy(array[s : s + BATCH]) for name, array in theirs.items()}

    m.row("zarr", f"{BATCH} random frames", rows, m.random(td))
    m.row("zarr", f"block of {BATCH}", block, m.block(td))
    m.saves("zarr", f"write {m.count} frames", fill, m.save_ours(m.frames, ".zarr", [m.count]), ".zarr", CHECKSUMS)


def tensorstore_arrays(m: Media) -> None:
    import tensorstore
    import zarr

    place = m.open_ours(m.frames, ".zarr", [m.count])
    theirs = {}
    for name in m.numpy:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(place / name)}}
        theirs[name] = tensorstore.open(spec, read=True).result()
    td = tdstore.load(place)
    assert set(m.numpy) <= set(zarr.open_group(place, mode="r"))

    def rows() -> object:
        at = next(m.drawn)
        read = {name: array[at].read() for name, array in theirs.items()}
        return {name: torch.from_numpy(future.result()) for name, future in read.items()}

    def block() -> object:
        s = next(m.starts)
        read = {name: array[s : s + BATCH].read() for name, array in theirs.items()}
        return {name: torch.from_numpy(future.result()) for name, future in read.items()}

    m.row("tensorstore", f"{BATCH} random frames", rows, m.random(td), FIRST)
    m.row("tensorstore", f"block of {BATCH}", block, m.block(td), FIRST)


def lance_table(m: Media) -> None:
    import lance
    import pyarrow as pa

    size = 84 * 84
    table = pa.table(
        {
            "pixels": pa.FixedSizeListArray.from_arrays(m.numpy["pixels"].reshape(-1), size),
            "action": m.numpy["action"],
            "reward": m.numpy["reward"],
        }
    )
    place = m.new(".lance")
    lance.write_dataset(table, place)
    dataset = lance.dataset(place)
    td = tdstore.load(m.open_ours(m.frames, "", [m.count]))

    def tensors(got: Any) -> object:
        pixels = got["pixels"].combine_chunks().flatten().to_numpy().reshape(-1, 84, 84)
        return [torch.from_numpy(pixels), *(torch.from_numpy(got[n].to_numpy()) for n in ("action", "reward"))]

    def rows() -> object:
        return tensors(dataset.take(next(m.drawn)))

    def block() -> object:
        return tensors(dataset.to_table(offset=next(m.starts), limit=BATCH))

    m.row("lance", f"{BATCH} random frames", rows, m.random(td))
    m.row("lance", f"block of {BATCH}", block, m.block(td))
    m.saves(
        "lance",
        f"write {m.count} frames",
        lambda p: lance.write_dataset(table, p),
        m.save_ours(m.frames, "", [m.count]),
        ".lance",
        CHECKSUMS,
    )


def torchrl_storage(m: Media) -> None:
    import tensordict
    from torchrl.data import LazyMemmapStorage

    theirs = LazyMemmapStorage(m.count, scratch_dir=m.new())
    theirs.set(range(m.count), tensordict.TensorDict(m.frames, [m.count]))
    td = tdstore.load(m.open_ours(m.frames, "", [m.count]))
    m.row("torchrl", f"{BATCH} random frames", lambda: theirs.get(torch.from_numpy(next(m.drawn))), m.random(td))


@contextmanager
def scratch() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="tdstore-bench-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    bench = Bench("The best package of each medium beside ours (wall time; floors are left out)")
    with ExitStack() as stack:
        media = Media(bench, stack.enter_context(scratch()))
        state_dicts(media)
        arrays(media)
    if missing := [name for name in PACKAGES if not importlib.util.find_spec(name)]:
        print(f"not installed: {', '.join(missing)} (pip install -r benchmarks/requirements.txt)", file=sys.stderr)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
