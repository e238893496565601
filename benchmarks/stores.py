"""Reading and writing what is stored: memmap, HDF5 and shared memory, beside the peer and a floor.

Run `python benchmarks/stores.py` (about 2 minutes), `--quick` for smaller data (20 s).
The floors are what numpy, h5py, mmap and pwrite do without any library around them.
"""

from __future__ import annotations

import itertools
import json
import mmap
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch
from _harness import FLOOR, OURS, Bench, Target, modules

BATCH = 256
# SPEED.md section 6, "goal (solid)"
TARGETS = [
    Target("memmap read", 4.0),
    Target("memmap write", 3.0),
    Target("memmap save", 10.0),
    Target("memmap open", 4.0),
    Target("h5 random", 50.0, row="of 60000"),
    Target("h5 slice", 200.0, row="of 60000"),
    Target("h5 fill", 15.0),
    Target("shared ipc", 30.0),
]


class Stores:
    """What every part needs: the bench, the two packages, a scratch folder and a source of indices."""

    def __init__(self, bench: Bench, root: Path) -> None:
        self.bench = bench
        self.quick = bench.quick
        self.root = root
        self.modules: dict[str, Any] = modules()
        self.rng = np.random.default_rng(0)

    def rows(self, n: int) -> Callable[[], torch.Tensor]:
        """Fresh random rows at each call, so that nothing stays in the cache from the call before."""
        drawn = itertools.cycle([torch.from_numpy(self.rng.integers(0, n, BATCH)) for _ in range(64)])
        return lambda: next(drawn)

    def folder(self, name: str) -> Path:
        path = self.root / name
        path.mkdir(parents=True)
        return path

    def clear(self, folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()

    def wants(self, *groups: str) -> bool:
        only = self.bench.options.only
        return only is None or any(only in group for group in groups)

    def each(self, make: Callable[[str, Any], Callable[[], object]]) -> dict[str, Callable[[], object]]:
        """`make(candidate, module)` for the two packages; a failure to prepare is reported as the row's error."""
        runs: dict[str, Callable[[], object]] = {}
        for candidate, module in self.modules.items():
            if not self.bench.has(candidate):
                continue
            try:
                runs[candidate] = make(candidate, module)
            except Exception as error:
                runs[candidate] = _raising(error)
        return runs


def _raising(error: Exception) -> Callable[[], object]:
    def run() -> object:
        raise error

    return run


def frames(n: int, side: int = 84) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(1)
    obs = torch.from_numpy(rng.integers(0, 255, (n, side, side), dtype=np.uint8))
    return {"obs": obs, "action": torch.arange(n), "reward": torch.rand(n)}


# --- memmap ---


def memmap_read(s: Stores) -> None:
    n = 4_000 if s.quick else 20_000
    for name, data in (
        ("256 frames x 3 keys", frames(n)),
        ("256 rows x 24 keys", {str(i): torch.rand(n, 8) for i in range(24)}),
    ):
        root = s.folder(f"read {len(data)}")
        rows = s.rows(n)

        def make(
            candidate: str, module: Any, data: Any = data, root: Path = root, rows: Any = rows
        ) -> Callable[[], object]:
            path = str(root / candidate)
            module.TensorDict(data, [n]).memmap(path)
            td = module.TensorDict.load_memmap(path)
            return lambda: td[rows()]

        maps = {}
        for key, value in data.items():
            value.numpy().tofile(root / f"{key}.bin")
            maps[key] = np.memmap(root / f"{key}.bin", mode="r", dtype=value.numpy().dtype, shape=tuple(value.shape))

        def floor(maps: Any = maps, rows: Any = rows) -> object:
            index = rows().numpy()
            return {k: np.take(m, index, axis=0, mode="clip") for k, m in maps.items()}

        s.bench.io("memmap read", name, {**s.each(make), FLOOR: floor})


def memmap_write(s: Stores) -> None:
    n, block = (2_000, 500) if s.quick else (10_000, 1_000)
    data = frames(block)
    root = s.folder("write")

    fresh = itertools.count()

    def make(candidate: str, module: Any) -> Callable[[], object]:
        one = module.TensorDict(data, [block])

        def run() -> None:
            store = one[0].expand(n).memmap_like(str(root / f"{candidate}{next(fresh)}"))
            for start in range(0, n, block):
                store[start : start + block] = one

        return run

    def floor() -> None:
        folder = root / f"floor{next(fresh)}"
        folder.mkdir()
        files = {k: os.open(folder / f"{k}.bin", os.O_RDWR | os.O_CREAT) for k in data}
        for start in range(0, n, block):
            for k, v in data.items():
                os.pwrite(files[k], memoryview(v.numpy()).cast("B"), start * v[0].nbytes)
        for fd in files.values():
            os.close(fd)

    name = f"new, {n} frames, blocks of {block}"
    s.bench.io("memmap write", name, {**s.each(make), FLOOR: floor}, tidy=lambda: s.clear(root))


def memmap_write_again(s: Stores) -> None:
    """Blocks that go round and round in a dataset that is there, as a replay buffer writes them."""
    n = 1_024
    root = s.folder("memmap again")
    for block in (16, 256):
        frames = {"frame": torch.randint(0, 256, (block, 84, 84), dtype=torch.uint8)}

        def make(candidate: str, module: Any, block: int = block, frames: Any = frames) -> Callable[[], object]:
            place = str(root / f"{candidate}{block}")
            td = module.TensorDict({"frame": torch.zeros(n, 84, 84, dtype=torch.uint8)}, [n]).memmap(place)
            rows, starts = module.TensorDict(frames, [block]), itertools.cycle(range(0, n, block))

            def write() -> None:
                start = next(starts)
                td[start : start + block] = rows

            for _ in range(n // block):
                write()
            return write

        s.bench.io("memmap write again", f"{block} frames", s.each(make), why=ASKED)
    s.clear(root)


def memmap_save_open(s: Stores) -> None:
    small, large = (128, 1024 * 1024) if s.quick else (1024, 8 * 1024 * 1024)
    many = {str(i): torch.rand(4096) for i in range(small)}
    for name, data, pack in (
        (f"{small} leaves of 16 KB", many, False),
        (f"{small} leaves of 16 KB, packed", many, True),
        (f"4 leaves of {large // 2**20 * 4} MB", {str(i): torch.rand(large) for i in range(4)}, False),
    ):
        root, kept = s.folder(f"save {name}"), s.folder(f"open {name}")
        fresh = itertools.count()

        def save(
            candidate: str, module: Any, data: Any = data, root: Path = root, fresh: Any = fresh, pack: bool = pack
        ) -> Callable[[], object]:
            td = module.TensorDict(data, [])
            options = {"pack": True} if pack and candidate == OURS else {}
            return lambda: td.memmap(str(root / f"{candidate}{next(fresh)}"), **options)

        def save_floor(data: Any = data, root: Path = root, fresh: Any = fresh, pack: bool = pack) -> None:
            (write_one_file if pack else write_files)(root / f"floor{next(fresh)}", data)

        opener = open_one_file if pack else open_files

        def open_(
            candidate: str, module: Any, data: Any = data, kept: Path = kept, pack: bool = pack
        ) -> Callable[[], object]:
            path = str(kept / candidate)
            module.TensorDict(data, []).memmap(path, **({"pack": True} if pack and candidate == OURS else {}))
            return lambda: list(module.TensorDict.load_memmap(path).values(True, True))

        tidy, why = (lambda root=root: s.clear(root)), "" if pack else WHY
        s.bench.io("memmap save", name, {**s.each(save), FLOOR: save_floor}, tidy=tidy, why=why)
        save_floor(root=kept, fresh=itertools.repeat(""))
        opened = {**s.each(open_), FLOOR: lambda kept=kept, opener=opener: opener(kept / "floor")}
        s.bench.io("memmap open", name, opened, why=why)


ASKED = "ours asks first whether the pages are mapped: into those that are not, it writes by the system"
WHY = "a folder is built aside and has checksums, and each file is compared when it is opened; the peer does neither"


def write_files(folder: Path, data: dict[str, torch.Tensor]) -> None:
    """One file a leaf, each mapped, in a folder that is renamed when it is whole; sums for `open_files`.

    Nothing is synced, as `memmap` does not wait for the disk.
    """
    building = folder.with_suffix(".new")
    building.mkdir()
    layout, mapped = {}, []
    for k, v in data.items():
        memory = memoryview(v.numpy()).cast("B")
        layout[k] = [str(v.dtype), list(v.shape), google_crc32c.value(sampled(memory))]
        fd = os.open(building / k, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.write(fd, memory)
            mapped.append(torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=v.numel(), dtype=v.dtype))
        finally:
            os.close(fd)
    (building / "layout").write_bytes(json.dumps(layout).encode())
    building.rename(folder)


def sampled(memory: memoryview) -> bytes:
    """All of a small leaf, 12 KiB of a large one."""
    n = len(memory)
    ranges = [(0, n)] if n <= 64 << 10 else [(0, 4096), (n // 2, n // 2 + 4096), (n - 4096, n)]
    return b"".join(memory[a:b] for a, b in ranges)


def open_files(folder: Path) -> dict[str, torch.Tensor]:
    """Open, compare and map each file of `write_files`."""
    out = {}
    for k, (_, shape, crc) in json.loads((folder / "layout").read_bytes()).items():
        fd = os.open(folder / k, os.O_RDONLY)
        try:
            n = os.fstat(fd).st_size
            ranges = [(0, n)] if n <= 64 << 10 else [(0, 4096), (n // 2, 4096), (n - 4096, 4096)]
            if google_crc32c.value(b"".join([os.pread(fd, size, at) for at, size in ranges])) != crc:
                raise ValueError(k)
            memory = mmap.mmap(fd, n, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        out[k] = torch.frombuffer(memory, dtype=torch.float32).view(shape)
    return out


def write_one_file(path: Path, data: dict[str, torch.Tensor]) -> None:
    """All leaves in one file, 64-byte aligned, after a JSON header."""
    offset, layout = 0, {}
    for k, v in data.items():
        layout[k] = [str(v.dtype), list(v.shape), offset]
        offset += -(-v.nbytes // 64) * 64
    header = json.dumps(layout).encode()
    start = -(-(len(header) + 16) // 64) * 64
    head = start.to_bytes(8, "little") + len(header).to_bytes(8, "little") + header
    parts: list[Any] = [head.ljust(start, b"\0")]
    for v in data.values():
        parts += [memoryview(v.numpy()).cast("B"), bytes(-v.nbytes % 64)]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for i in range(0, len(parts), 1000):  # IOV_MAX is 1024
            os.writev(fd, parts[i : i + 1000])
    finally:
        os.close(fd)


def open_one_file(path: Path) -> dict[str, torch.Tensor]:
    with open(path, "rb") as f:
        mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    start, length = int.from_bytes(mapped[:8], "little"), int.from_bytes(mapped[8:16], "little")
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    out = {}
    for k, (_, shape, offset) in json.loads(mapped[16 : 16 + length]).items():
        size = 4 * int(np.prod(shape))
        out[k] = whole[start + offset : start + offset + size].view(torch.float32).view(shape)
    return out


# --- HDF5 ---


def h5_read(s: Stores) -> None:
    """One data set of three sizes: figures that grow with it read more than the batch."""
    for n in (1_000, 4_000) if s.quick else (5_000, 20_000, 60_000):
        h5_read_rows_of(s, n)


def h5_read_rows_of(s: Stores, n: int) -> None:
    data, root, rows, middle = frames(n), s.folder(f"h5 {n}"), s.rows(n), n // 2
    opened: dict[str, Any] = {}
    maps = h5_floor(root / "floor.h5", data)

    def open_(candidate: str, module: Any) -> Any:
        if candidate not in opened:
            path = str(root / f"{candidate}.h5")
            module.TensorDict(data, [n]).to_h5(path).close()
            opened[candidate] = module.PersistentTensorDict.from_h5(path)
        return opened[candidate]

    def random(candidate: str, module: Any) -> Callable[[], object]:
        td = open_(candidate, module)
        return lambda: td[rows()].contiguous()

    def get_at(candidate: str, module: Any) -> Callable[[], object]:
        td = open_(candidate, module)
        if candidate == OURS:
            return lambda: td[rows()].contiguous()

        def run() -> object:
            # The peer's best: h5py takes increasing rows only, so the caller sorts and undoes it.
            index, inverse = rows().unique(return_inverse=True)
            return {k: td.get_at(k, index)[inverse] for k in data}

        return run

    def part(index: Any) -> Callable[[str, Any], Callable[[], object]]:
        def make(candidate: str, module: Any) -> Callable[[], object]:
            td = open_(candidate, module)
            return lambda: td[index].contiguous()

        return make

    def take() -> object:
        index = rows().numpy()
        return {k: np.take(m, index, axis=0, mode="clip") for k, m in maps.items()}

    def copy(index: Any) -> Callable[[], object]:
        return lambda: {k: np.array(m[index]) for k, m in maps.items()}

    some = slice(middle, middle + BATCH)
    s.bench.io("h5 random", f"{BATCH} rows of {n}", {**s.each(random), FLOOR: take})
    s.bench.io("h5 get_at", f"{BATCH} rows, sorted, of {n}", {**s.each(get_at), FLOOR: take})
    s.bench.io("h5 slice", f"{BATCH} rows of {n}", {**s.each(part(some)), FLOOR: copy(some)})
    s.bench.io("h5 one row", f"one row of {n}", {**s.each(part(7)), FLOOR: copy(7)})
    for td in opened.values():
        td.close()


def h5_floor(path: Path, data: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Contiguous data sets, mapped at their offsets in the file."""
    import h5py

    with h5py.File(path, "w") as f:
        offsets = {k: f.create_dataset(k, data=v.numpy()).id.get_offset() for k, v in data.items()}
    return {
        k: np.memmap(path, mode="r", dtype=v.numpy().dtype, shape=tuple(v.shape), offset=offsets[k])
        for k, v in data.items()
    }


def h5_fill(s: Stores) -> None:
    n, block = (2_000, 500) if s.quick else (10_000, 500)
    data = frames(block, side=28)
    root = s.folder("h5 fill")

    def make(candidate: str, module: Any) -> Callable[[], object]:
        empty = {k: torch.zeros(n, *v.shape[1:], dtype=v.dtype) for k, v in data.items()}
        one = module.TensorDict(data, [block])
        store = module.TensorDict(empty, [n]).to_h5(str(root / f"{candidate}.h5"))

        def run() -> None:
            for start in range(0, n, block):
                store[start : start + block] = one

        return run

    import h5py

    f = h5py.File(root / "floor.h5", "w")
    sets = {k: f.create_dataset(k, shape=(n, *v.shape[1:]), dtype=v.numpy().dtype) for k, v in data.items()}

    def floor() -> None:
        for start in range(0, n, block):
            for k, v in data.items():
                sets[k][start : start + block] = v.numpy()

    s.bench.io("h5 fill", f"{n} rows in blocks of {block}", {**s.each(make), FLOOR: floor})
    f.close()


# --- shared memory ---


def shared(s: Stores) -> None:
    """Send a shared TensorDict to another process, which opens every leaf and answers."""
    context = multiprocessing.get_context("fork")
    for leaves in (30,) if s.quick else (4, 30, 100):
        data = {str(i): torch.rand(16_384) for i in range(leaves)}
        children: list[tuple[Any, Connection]] = []

        def make(candidate: str, module: Any, data: Any = data, children: Any = children) -> Callable[[], object]:
            td = module.TensorDict(data, []).clone().share_memory_()
            return ask(start(context, open_td, children), td)

        arena = shared_memory.SharedMemory(create=True, size=leaves * 65_536)
        message = {"arena": arena.name, "leaves": [[k, i * 65_536, 65_536] for i, k in enumerate(data)]}
        floor = ask(start(context, open_arena, children), message)
        try:
            s.bench.io("shared ipc", f"{leaves} leaves of 64 KB", {**s.each(make), FLOOR: floor})
        finally:
            for process, pipe in children:
                pipe.send(None)
                process.join(10)
            arena.close()
            arena.unlink()


def start(context: Any, opener: Callable[[Any], float], children: list[tuple[Any, Connection]]) -> Connection:
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, opener), daemon=True)
    process.start()
    children.append((process, here))
    return here  # type: ignore[no-any-return]


def ask(pipe: Connection, message: object) -> Callable[[], object]:
    def run() -> object:
        pipe.send(message)
        if not pipe.poll(20):
            raise TimeoutError("no answer in 20 s")
        answer = pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    return run


def serve(pipe: Connection, opener: Callable[[Any], float]) -> None:
    while True:
        try:
            message = pipe.recv()
            if message is None:
                return
            pipe.send(opener(message))
        except EOFError:
            return
        except Exception as error:
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def open_td(td: Any) -> float:
    return sum(float(v[0]) for v in td.values(True, True))


_ARENAS: dict[str, Any] = {}


def open_arena(message: dict[str, Any]) -> float:
    name = message["arena"]
    if name not in _ARENAS:
        arena = shared_memory.SharedMemory(name)
        _ARENAS[name] = arena, torch.frombuffer(arena.buf, dtype=torch.uint8)
    whole = _ARENAS[name][1]
    return sum(float(whole[start : start + size].view(torch.float32)[0]) for _, start, size in message["leaves"])


def main() -> int:
    bench = Bench("Stored data (wall time per call)", TARGETS)
    root = Path(tempfile.mkdtemp(prefix="tdstore-bench-"))
    s = Stores(bench, root)
    try:
        for part, groups in (
            (memmap_read, ["memmap read"]),
            (memmap_write, ["memmap write"]),
            (memmap_write_again, ["memmap write again"]),
            (memmap_save_open, ["memmap save", "memmap open"]),
            (h5_read, ["h5 random", "h5 get_at", "h5 slice", "h5 one row"]),
            (h5_fill, ["h5 fill"]),
            (shared, ["shared ipc"]),
        ):
            if s.wants(*groups):
                part(s)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
