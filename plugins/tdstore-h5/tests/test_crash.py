"""Killed writers, full disks, flipped bytes, short files: old, new, or an error that says so. Never silently wrong."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path as FsPath
from typing import Any

import h5py
import pytest
import torch
from h5help import everything, fill, header_of, load, old_and_new, same, save
from h5py import h5d
from tdstore_h5.store import open_h5
from torch import Tensor

from tdstore.errors import CorruptStoreError, DirtyStoreError, StoreError, StoreIOError
from tdstore.types import LeafSpec, Path, Read, Write

IN_MEMORY = True
LAYOUTS: dict[str, dict[str, Any]] = {"contiguous": {}, "chunked": {"chunks": 8, "compression": "gzip"}}
OLD, NEW = old_and_new()


def save_new(file: FsPath, layout: dict[str, Any]) -> None:
    save(file, NEW, values={"s": "new"}, **layout)


def update_in_place(file: FsPath, layout: dict[str, Any]) -> None:
    with open_h5(file, mode="r+", **layout) as store:
        rows = torch.arange(100).flip(0)
        for path, value in NEW.items():
            for part in rows.split(40):
                store.write([Write(path, (part,), value[part])])


def update_structure(file: FsPath, layout: dict[str, Any]) -> None:
    with open_h5(file, mode="r+", **layout) as store:
        fill(store, {("made", "x"): torch.ones(50, 9), ("made", "y"): torch.arange(7)})
        store.resize({("n", "b"): 130})
        store.rename({("a",): ("moved", "a")})
        store.delete([("c",)])
        store.save_header(header_of({("made", "x"): torch.ones(1), ("moved", "a"): torch.ones(1)}))


POINTS: list[tuple[Any, str]] = [
    (os, "pwrite"), (os, "fsync"), (os, "replace"), (os, "ftruncate"), (os, "unlink"), (os, "fchmod"),
    (h5py.File, "flush"), (h5py.File, "close"),
    (h5py.AttributeManager, "create"), (h5py.AttributeManager, "__delitem__"),
    (h5py.Group, "__delitem__"), (h5py.Group, "create_dataset"), (h5py.Group, "move"), (h5py.Dataset, "__setitem__"),
    (h5py.Dataset, "resize"), (h5d, "create"),
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
        torch.set_num_threads(1)  # OpenMP threads do not survive a fork: a second one would be waited for
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outcome(file: FsPath, new: dict[Path, Tensor]) -> str:
    try:
        found = load(file, verify="full", lock_timeout=0)
    except DirtyStoreError as error:
        assert error.leaves
        assert "recover='accept'" in str(error)
        with open_h5(file, recover="accept") as store:
            everything(store)
        return "dirty"
    except CorruptStoreError:
        return "corrupt"
    if same(found, OLD):
        return "old"
    assert same(found, new), f"neither old nor new: { {p: tuple(t.shape) for p, t in found.items()} }"
    return "new"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("work", [save_new, update_in_place, update_structure])
def test_kill_at_every_call(tmp_path: FsPath, work: Callable[..., None], layout: str) -> None:
    options = LAYOUTS[layout]
    file, clean = tmp_path / "t.h5", tmp_path / "clean"
    save(clean, OLD, **options)
    shutil.copy(clean, file)
    work(file, options)
    new = load(file)
    seen: dict[str, int] = {}
    for k in range(1, 2000):
        for stray in tmp_path.glob(".t.h5*"):
            stray.unlink()
        shutil.copy(clean, file)

        def run(k: int = k) -> int:
            count_calls(k)
            work(file, options)
            return 0

        code = in_child(run)
        result = outcome(file, new)
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
    elif work is update_in_place:
        assert "dirty" in seen
        assert "corrupt" not in seen
    with open_h5(file, mode="w") as store:  # what dead writers left goes when the next one comes
        store.save_header(header_of({}))
    assert sorted(os.listdir(tmp_path)) == ["clean", "t.h5"]


@pytest.mark.parametrize("work", [save_new, update_in_place, update_structure])
def test_kill_at_random_moments(tmp_path: FsPath, work: Callable[..., None]) -> None:
    file, clean = tmp_path / "t.h5", tmp_path / "clean"
    save(clean, OLD, **LAYOUTS["chunked"])
    shutil.copy(clean, file)
    start = time.perf_counter()
    work(file, LAYOUTS["chunked"])
    span = time.perf_counter() - start
    new = load(file)
    chance = random.Random(0)
    for _ in range(40):
        shutil.copy(clean, file)
        pid = os.fork()
        if not pid:
            try:
                work(file, LAYOUTS["chunked"])
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0, 1.5 * span))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert outcome(file, new) in (("old", "new") if work is save_new else ("old", "new", "dirty", "corrupt"))


def test_accepting_a_dirty_file_makes_it_good(file: FsPath) -> None:
    save(file, OLD)

    def work() -> int:
        store = open_h5(file, mode="r+")
        store.write([Write(("a",), (slice(0, 1, 1),), torch.full((1, 40), -1.0))])
        os.kill(os.getpid(), signal.SIGKILL)
        return 1

    assert in_child(work) == -signal.SIGKILL
    for mode in ("r", "r+"):
        with pytest.raises(DirtyStoreError) as caught:
            open_h5(file, mode=mode)
        assert caught.value.leaves == (("a",),)
    before = file.read_bytes()
    with open_h5(file, recover="accept") as store:
        assert store.read([Read(("a",))])[0][0, 0] == -1
    assert file.read_bytes() == before
    open_h5(file, mode="r+", recover="accept").close()
    assert load(file, verify="full")[("a",)][0, 0] == -1


def test_a_mark_without_a_change_is_forgiven(file: FsPath) -> None:
    save(file, OLD)

    def work() -> int:
        store = open_h5(file, mode="r+")
        store.write([Write(("a",), (slice(0, 1, 1),), OLD[("a",)][:1])])
        os.kill(os.getpid(), signal.SIGKILL)
        return 1

    in_child(work)
    assert same(load(file, verify="full"), OLD)
    with open_h5(file, mode="r+") as store:
        store.write([Write(("n", "b"), (), NEW[("n", "b")])])
    with h5py.File(file) as f:
        assert list(f.attrs) == ["tdstore"]
    assert same(load(file, verify="full"), {**OLD, ("n", "b"): NEW[("n", "b")]})


# -- damage --------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flipped_bytes(file: FsPath, layout: str) -> None:
    """Every flip is noticed by verify="full", or changes nothing that is read."""
    save(file, OLD, values={"s": "text"}, **LAYOUTS[layout])
    good, chance = file.read_bytes(), random.Random(1)
    with open_h5(file) as store:
        header = store.load_header()
    noticed = 0
    for _ in range(250):
        at = chance.randrange(len(good))
        file.write_bytes(good[:at] + bytes([good[at] ^ (1 << chance.randrange(8))]) + good[at + 1 :])
        try:
            with open_h5(file, verify="full") as store:
                assert same(everything(store), OLD), f"byte {at}"
                assert store.load_header() == header
        except StoreError as error:
            assert str(file) in str(error)
            noticed += 1
    assert noticed > 100


@pytest.mark.parametrize("layout", LAYOUTS)
def test_short_files(file: FsPath, layout: str) -> None:
    save(file, OLD, **LAYOUTS[layout])
    good = file.read_bytes()
    for size in [0, 1, 7, 8, 100, *range(0, len(good), len(good) // 40)]:
        file.write_bytes(good[:size])
        with pytest.raises(CorruptStoreError) as caught:
            load(file)
        assert str(file) in str(caught.value)
        assert file.stat().st_size == size


def test_faults_name_the_leaf(file: FsPath) -> None:
    save(file, OLD)
    with open_h5(file) as store:
        offset = store._session.contents.leaves[("n", "b")].offset
    assert offset
    with open(file, "r+b") as f:
        f.seek(offset + 5)
        f.write(b"\x55")
    with open_h5(file) as store:
        assert [fault.path for fault in store.verify()] == [("n", "b")]
        assert store.verify([("a",)]) == []
    with pytest.raises(CorruptStoreError, match="'n' / 'b'"):
        open_h5(file, verify="full")


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


@pytest.mark.parametrize("layout", [{}, {"chunks": 1000}, {"chunks": 1000, "compression": "gzip"}])
def test_full_disk(small_disk: FsPath, layout: dict[str, Any]) -> None:
    """A save that does not fit is an error; the old file is whole and nothing is left behind."""
    file = small_disk / "t.h5"
    save(file, OLD)
    big = torch.randint(0, 255, (4 << 20,), dtype=torch.uint8)
    store = open_h5(file, mode="w", **layout)
    with pytest.raises(StoreIOError) as caught:
        for i in range(100):
            store.create({(f"x{i}",): LeafSpec((400_000,), "uint8")})
            store.write([Write((f"x{i}",), (), big[i * 1000 : i * 1000 + 400_000])])
            store.flush()
        store.save_header(header_of({}))
    assert caught.value.errno == 28
    try:
        store.close()
    except StoreIOError:
        assert store.writable
    del store
    assert os.listdir(small_disk) == ["t.h5"]
    assert same(load(file, verify="full"), OLD)
    save(file, NEW)
    assert same(load(file, verify="full"), NEW)


def test_full_disk_in_place(small_disk: FsPath) -> None:
    """In place: an error, and afterwards old, new or dirty, and reading holes of a full tmpfs harms nobody."""
    file = small_disk / "t.h5"
    with open_h5(file, mode="w") as store:
        store.create({("x",): LeafSpec((400_000,), "float64")})
        store.save_header(header_of({("x",): torch.zeros(1)}))
    with open_h5(file, mode="r+") as store:
        with pytest.raises(StoreIOError) as caught:
            for i in range(0, 400_000, 10_000):
                store.write([Write(("x",), (slice(i, i + 10_000, 1),), torch.ones(10_000, dtype=torch.float64))])
        assert caught.value.errno == 28
        (value,) = store.read([Read(("x",), (torch.tensor([0, 399_999]),))])
        assert value.tolist() == [1, 0]
        try:
            store.close()
        except StoreIOError:
            with pytest.raises(DirtyStoreError):
                open_h5(file)
            return
    assert load(file, verify="full")[("x",)][0] == 1


def test_save_beyond_a_file_size_limit(file: FsPath) -> None:
    save(file, OLD)

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        store = open_h5(file, mode="w")
        try:
            fill(store, {("x",): torch.ones(100_000)})
            store.save_header(header_of({}))
        except StoreIOError:
            store.close()
            return 0
        return 1

    assert in_child(work) == 0
    assert same(load(file, verify="full"), OLD)
    assert os.listdir(file.parent) == [file.name]
