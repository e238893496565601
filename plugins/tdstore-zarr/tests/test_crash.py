"""Killed writers, full disks, flipped bytes, short, lost and swapped files: old, new, or an error that says so."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch
from tdstore_zarr import folderplace
from tdstore_zarr.memory import MemoryEngine
from tdstore_zarr.store import open_on, open_zarr
from torch import Tensor
from zarrhelp import everything, fill, header_of, load, old_and_new, same, save

from tdstore import files
from tdstore.errors import CorruptStoreError, DirtyStoreError, StoreError, StoreIOError, StoreNotFoundError
from tdstore.types import LeafSpec, Mode, Path, Read, Write

IN_MEMORY = True
LAYOUTS: dict[str, dict[str, Any]] = {"shards": {"chunks": 8, "shards": 32}, "plain": {"chunks": 40, "checksum": False}}
OLD, NEW = old_and_new()


def save_new(place: FsPath, layout: dict[str, Any]) -> None:
    save(place, NEW, values={"s": "new"}, **layout)


def update_in_place(place: FsPath, layout: dict[str, Any]) -> None:
    with open_zarr(place, mode="r+", **layout) as store:
        rows = torch.arange(100).flip(0)
        for path, value in NEW.items():
            for part in rows.split(40):
                store.write([Write(path, (part,), value[part])])
            store.flush()


def update_structure(place: FsPath, layout: dict[str, Any]) -> None:
    with open_zarr(place, mode="r+", **layout) as store:
        fill(store, {("made", "x"): torch.ones(50, 9), ("made", "y"): torch.arange(7)})
        store.resize({("n", "b"): 130})
        store.rename({("a",): ("moved", "a")})
        store.delete([("c",)])
        store.save_header(header_of({("made", "x"): torch.ones(1), ("moved", "a"): torch.ones(1)}))


POINTS: list[tuple[Any, str]] = [
    (os, "pwrite"), (os, "fsync"), (os, "rename"), (os, "unlink"), (os, "mkdir"), (os, "rmdir"),
    (files, "exchange"), (files, "create_file"),
]  # fmt: skip


def count_calls(kill_at: int) -> list[int]:
    """From now on count the calls that change a disk, and die before or after the `kill_at`-th."""
    count = [0]

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **options)
            count[0] += 1
            if count[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted

    for owner, name in POINTS:
        setattr(owner, name, wrap(getattr(owner, name)))
    return count


def in_child(work: Callable[[], int]) -> int:
    """Run in a forked child: its exit code, or -9 when it was killed."""
    pid = os.fork()
    if not pid:
        code = 99
        torch.set_num_threads(1)
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outcome(place: FsPath, new: dict[Path, Tensor]) -> str:
    try:
        found = load(place, verify="full", lock_timeout=0)
    except DirtyStoreError as error:
        assert "recover='accept'" in str(error)
        return "dirty"
    except CorruptStoreError:
        return "corrupt"
    if same(found, OLD):
        return "old"
    assert same(found, new), f"neither old nor new: { {p: tuple(t.shape) for p, t in found.items()} }"
    return "new"


def fresh(clean: FsPath, place: FsPath) -> None:
    for stray in place.parent.iterdir():
        if stray != clean:
            shutil.rmtree(stray)
    shutil.copytree(clean, place)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("work", [save_new, update_in_place, update_structure])
def test_kill_at_every_call(tmp_path: FsPath, work: Callable[..., None], layout: str) -> None:
    options = LAYOUTS[layout]
    place, clean = tmp_path / "t.zarr", tmp_path / "clean"
    save(clean, OLD, **options)
    shutil.copytree(clean, place)
    work(place, options)
    new = load(place)
    seen: dict[str, int] = {}
    step = 2 if work is save_new else 3
    for k in range(1, 3000, step):
        fresh(clean, place)

        def run(k: int = k) -> int:
            count_calls(k)
            work(place, options)
            return 0

        code = in_child(run)
        result = outcome(place, new)
        seen[result] = seen.get(result, 0) + 1
        if code == 0:
            assert result == "new"
            break
        assert code == -signal.SIGKILL
    assert k > 12
    assert seen["old"] > 1
    assert seen["new"] >= 1
    if work is save_new:
        assert set(seen) == {"old", "new"}
    else:
        assert "dirty" in seen
        assert "corrupt" not in seen
    with open_zarr(place, mode="w") as store:  # what dead writers left goes when the next one comes
        store.save_header(header_of({}))
    assert sorted(os.listdir(tmp_path)) == ["clean", "t.zarr"]


@pytest.mark.parametrize("work", [save_new, update_in_place, update_structure])
def test_kill_at_random_moments(tmp_path: FsPath, work: Callable[..., None]) -> None:
    place, clean = tmp_path / "t.zarr", tmp_path / "clean"
    save(clean, OLD, **LAYOUTS["shards"])
    shutil.copytree(clean, place)
    start = time.perf_counter()
    work(place, LAYOUTS["shards"])
    span = time.perf_counter() - start
    new = load(place)
    chance = random.Random(0)
    for _ in range(25):
        fresh(clean, place)
        pid = os.fork()
        if not pid:
            try:
                work(place, LAYOUTS["shards"])
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0, 1.5 * span))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert outcome(place, new) in (("old", "new") if work is save_new else ("old", "new", "dirty"))


_CHILD = """
import sys, torch
sys.path.insert(0, sys.argv[2])
import test_crash
getattr(test_crash, sys.argv[3])(test_crash.FsPath(sys.argv[1]), test_crash.LAYOUTS["shards"])
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("work", [save_new, update_in_place])
@pytest.mark.parametrize("fault", ["signal=KILL", "error=ENOSPC", "error=EIO"])
def test_system_calls_fail_or_kill(tmp_path: FsPath, work: Callable[..., None], fault: str) -> None:
    """As above, but below Python: what any library calls is counted too."""
    place, clean = tmp_path / "t.zarr", tmp_path / "clean"
    save(clean, OLD, **LAYOUTS["shards"])
    shutil.copytree(clean, place)
    work(place, LAYOUTS["shards"])
    new = load(place)
    for k in (5,):
        fresh(clean, place)
        calls = "pwrite64,fsync,renameat2,rename,renameat"
        inject = ["-e", f"trace={calls}", "-e", f"inject={calls}:{fault}:when={k}+", "-o", "/dev/null"]
        child = [sys.executable, "-W", "ignore", "-c", _CHILD, str(place), str(FsPath(__file__).parent), work.__name__]
        done = subprocess.run(["strace", "-f", "-qq", *inject, *child], capture_output=True, text=True, check=False)
        assert done.returncode != 0, "the fault was not injected"
        if fault != "signal=KILL":
            assert "StoreIOError" in done.stderr, done.stderr[-2000:]
        result = outcome(place, new)
        assert result in (("old", "new") if work is save_new else ("old", "new", "dirty"))


def test_accepting_a_dirty_store_makes_it_good(place: FsPath) -> None:
    save(place, OLD, chunks=8, shards=32)

    def work() -> int:
        store = open_zarr(place, mode="r+")
        store.write([Write(("a",), (slice(0, 1, 1),), torch.full((1, 40), -1.0))])
        store.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        return 1

    assert in_child(work) == -signal.SIGKILL
    for mode in ("r", "r+"):
        with pytest.raises(DirtyStoreError) as caught:
            open_zarr(place, mode=mode)
        assert caught.value.leaves == (("a",),)
    with open_zarr(place, recover="accept") as store:
        assert store.read([Read(("a",))])[0][0, 0] == -1
    with pytest.raises(DirtyStoreError):
        open_zarr(place)
    open_zarr(place, mode="r+", recover="accept").close()
    assert load(place, verify="full")[("a",)][0, 0] == -1


def test_a_mark_without_a_change_is_forgiven(place: FsPath) -> None:
    save(place, OLD)

    def work() -> int:
        store = open_zarr(place, mode="r+")
        store.write([Write(("a",), (slice(0, 1, 1),), -OLD[("a",)][:1])])
        os.kill(os.getpid(), signal.SIGKILL)
        return 1

    in_child(work)
    assert b"tdstore_dirty" in (place / "zarr.json").read_bytes()
    assert same(load(place, verify="full"), OLD)
    with open_zarr(place, mode="r+") as store:
        store.write([Write(("n", "b"), (), NEW[("n", "b")])])
    assert b"tdstore_dirty" not in (place / "zarr.json").read_bytes()
    assert same(load(place, verify="full"), {**OLD, ("n", "b"): NEW[("n", "b")]})


class DyingEngine(MemoryEngine):
    """Dies at the k-th change, and answers nothing more."""

    def __init__(self, objects: dict[str, tuple[bytes, int]], at: int, *, after: bool) -> None:
        super().__init__("memory://dying", objects)
        self.left, self.after, self.count = at, after, 0

    def _step(self) -> None:
        self.count += 1
        if self.count >= self.left:
            raise RuntimeError("the process is dead")

    def put(self, key: str, data: Any, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        if not self.after:
            self._step()
        tag = super().put(key, data, if_absent=if_absent, if_match=if_match)
        if self.after:
            self._step()
        return tag

    def delete(self, keys: Any) -> None:
        self._step()
        super().delete(keys)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("work", ["save", "update"])
def test_object_stores_kill_at_every_request(work: str, after: bool) -> None:
    """The same without renames: chunks under other keys, the root last; in place, a mark."""
    clean = MemoryEngine("memory://clean")
    with open_on(clean, mode="w", chunks=8, shards=32) as store:
        fill(store, OLD)
        store.save_header(header_of(OLD))

    def change(engine: MemoryEngine) -> None:
        mode: Mode = "w" if work == "save" else "r+"
        store = open_on(engine, mode=mode, recover="accept", **({"chunks": 8, "shards": 32} if mode == "w" else {}))
        try:
            if work == "save":
                fill(store, NEW)
                store.save_header(header_of(NEW))
            else:
                store.write([Write(p, (), v) for p, v in NEW.items()])
                store.flush()
            store._session.close()
        finally:
            store._closed = True  # the dead commit nothing

    seen: dict[str, int] = {}
    for k in range(1, 200):
        engine = DyingEngine(dict(clean.objects), k, after=after)
        alive = False
        try:
            change(engine)
            alive = True
        except RuntimeError:
            engine.left = 10**9
        try:
            with open_on(MemoryEngine("memory://after", dict(engine.objects)), verify="full", lock_timeout=0) as store:
                found = everything(store)
            result = "old" if same(found, OLD) else "new"
            assert result == "old" or same(found, NEW)
        except StoreError as error:
            assert "being written by process" in str(error) or isinstance(error, DirtyStoreError)
            result = "dirty"
        seen[result] = seen.get(result, 0) + 1
        if alive:
            assert result == "new"
            break
    assert set(seen) == {"old", "new"} if work == "save" else set(seen) >= {"dirty", "new"}


# -- damage --------------------------------------------------------------------------------
def every_file(place: FsPath) -> list[FsPath]:
    return sorted(p for p in place.rglob("*") if p.is_file())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flipped_bytes(place: FsPath, layout: str) -> None:
    """Every flip is noticed by verify="full", or changes nothing that is read."""
    save(place, OLD, values={"s": "text"}, **LAYOUTS[layout])
    chance = random.Random(1)
    with open_zarr(place) as store:
        header = store.load_header()
    noticed = 0
    for file in every_file(place) * 4:
        good = file.read_bytes()
        at = chance.randrange(len(good))
        file.write_bytes(good[:at] + bytes([good[at] ^ (1 << chance.randrange(8))]) + good[at + 1 :])
        try:
            with open_zarr(place, verify="full") as store:
                assert same(everything(store), OLD), f"{file} byte {at}"
                assert store.load_header() == header
        except StoreError as error:
            assert str(place) in str(error)
            noticed += 1
        file.write_bytes(good)
    assert noticed > 30


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reading_notices_flips_in_chunks(place: FsPath, layout: str) -> None:
    """Without any verify=: chunks carry checksums."""
    save(place, OLD, **LAYOUTS[layout])
    chance = random.Random(2)
    for file in [p for p in every_file(place) if p.name != "zarr.json"] * 3:
        good = file.read_bytes()
        at = chance.randrange(len(good))
        file.write_bytes(good[:at] + bytes([good[at] ^ 0x20]) + good[at + 1 :])
        with pytest.raises(CorruptStoreError, match=r"'[abcn]'"):
            load(place)
        file.write_bytes(good)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verify", ["none", "size"])
def test_short_lost_and_swapped_files(place: FsPath, layout: str, verify: str) -> None:
    save(place, OLD, **LAYOUTS[layout])
    chunks = [p for p in every_file(place) if p.name != "zarr.json"]
    for file in chunks:
        good = file.read_bytes()
        for size in (0, 3, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:size])
            with pytest.raises(CorruptStoreError, match=r"'[abcn]'"):
                load(place, verify=verify)
        file.unlink()
        with pytest.raises(CorruptStoreError, match=r"'[abcn]'.*missing"):
            load(place, verify=verify)
        assert not file.exists()
        file.write_bytes(good)
    first, second = [p for p in chunks if p.parts[-4] == "a" or p.parts[-3] == "a"][:2]
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    with pytest.raises(CorruptStoreError, match="'a'"):
        load(place, verify=verify)
    first.write_bytes(one)
    second.write_bytes(two)
    assert same(load(place, verify="full"), OLD)
    root = place / "zarr.json"
    good = root.read_bytes()
    for size in (0, 1, 100, len(good) // 2, len(good) - 1):
        root.write_bytes(good[:size])
        with pytest.raises(CorruptStoreError):
            load(place, verify=verify)
    root.unlink()
    with pytest.raises(StoreNotFoundError):
        load(place, verify=verify)


@pytest.mark.parametrize("options", [{"chunks": 8}, {"chunks": 4, "shards": 8}])
def test_swapped_files_of_one_size(place: FsPath, options: dict[str, Any]) -> None:
    """The crc32c of what ends in its own crc32c is a constant: another checksum must tell files apart."""
    save(place, {("a",): torch.arange(64.0).view(32, 2)}, compressors="none", **options)
    first, second = (place / "a" / "c" / number / "0" for number in ("0", "1"))
    one, two = first.read_bytes(), second.read_bytes()
    assert len(one) == len(two)
    first.write_bytes(two)
    second.write_bytes(one)
    with pytest.raises(CorruptStoreError, match="'a'.*not the one that was committed"):
        load(place)
    with open_zarr(place) as store:
        assert [fault.path for fault in store.verify()] == [("a",)]


def test_faults_name_the_leaf(place: FsPath) -> None:
    save(place, OLD)
    file = next(p for p in every_file(place / "n" / "b") if p.name != "zarr.json")
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(bytes(data))
    with open_zarr(place) as store:
        assert [fault.path for fault in store.verify()] == [("n", "b")]
        assert store.verify([("a",)]) == []
    with pytest.raises(CorruptStoreError, match="'n' / 'b'"):
        open_zarr(place, verify="full")


# -- full disks ----------------------------------------------------------------------------
@pytest.fixture
def small_disk(tmp_path: FsPath) -> Iterator[FsPath]:
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs was refused: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_full_disk(small_disk: FsPath) -> None:
    """A save that does not fit is an error; the old store is whole and nothing is left behind."""
    place = small_disk / "t.zarr"
    save(place, OLD)
    big = torch.randint(0, 255, (4 << 20,), dtype=torch.uint8)
    store = open_zarr(place, mode="w")
    with pytest.raises(StoreIOError) as caught:
        for i in range(100):
            store.create({(f"x{i}",): LeafSpec((400_000,), "uint8")})
            store.write([Write((f"x{i}",), (), big[i * 1000 : i * 1000 + 400_000])])
            store.flush()
        store.save_header(header_of({}))
    assert caught.value.errno == 28
    store.close()
    assert os.listdir(small_disk) == ["t.zarr"]
    assert same(load(place, verify="full"), OLD)


def test_in_place_on_a_full_disk(small_disk: FsPath) -> None:
    """An update that does not fit is an error, and the next reader is told."""
    place = small_disk / "t.zarr"
    save(place, {("x",): torch.zeros(1_000_000, dtype=torch.uint8)})
    store = open_zarr(place, mode="r+")
    with pytest.raises(StoreIOError):
        for _ in range(3):
            store.write([Write(("x",), (), torch.randint(0, 255, (1_000_000,), dtype=torch.uint8))])
            store.create({("y",): LeafSpec((4_000_000,), "uint8")})
            store.write([Write(("y",), (), torch.randint(0, 255, (4_000_000,), dtype=torch.uint8))])
    with pytest.raises(StoreIOError):
        store.close()
    del store
    with pytest.raises(DirtyStoreError, match="'x'"):
        open_zarr(place, lock_timeout=0)


def test_holders_do_not_outlive_their_store(place: FsPath) -> None:
    save(place, OLD)
    with open_zarr(place, mode="r+") as store:
        store.write([Write(("n", "b"), (), NEW[("n", "b")])])
        assert len(folderplace._HOLDERS) == 1
    assert not folderplace._HOLDERS
