"""Killed writers, full disks, flipped bytes, short, lost and swapped files: old, new, or an error that says so."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path as FsPath
from typing import Any

import msgspec
import pytest
import torch
from tdstore_zarr.place import folder
from tdstore_zarr.place.memory_engine import MemoryEngine
from tdstore_zarr.store import ZarrStore, open_on, open_zarr
from zarrhelp import NEW, OLD, everything, fill, header_of, load, same, save

from tdstore.errors import CorruptStoreError, DirtyStoreError, StoreIOError, StoreNotFoundError
from tdstore.store import Store
from tdstore.storekit import files
from tdstore.testing import CrashTests
from tdstore.testing.processes.syscalls import needs_strace, traced
from tdstore.types import LeafSpec, Write
from tests import scripts

LAYOUTS: dict[str, dict[str, Any]] = {"plain": {"chunks": 40, "checksum": False}, "shards": {"chunks": 8, "shards": 32}}


class TestCrash(CrashTests):
    durable = {"durable": "commit"}
    open = staticmethod(open_zarr)
    caps = ZarrStore.caps
    layouts = LAYOUTS
    reading = {"verify": "full", "lock_timeout": 0}
    points = [
        (os, "pwrite"), (os, "fsync"), (os, "rename"), (os, "unlink"), (os, "mkdir"), (os, "rmdir"), (os, "link"),
        (files, "exchange"), (files, "create_file"),
    ]  # fmt: skip
    least = 12
    copied = True
    random_kills = 10

    @pytest.fixture
    def location(self, place: FsPath) -> FsPath:
        return place

    @pytest.mark.parametrize("work", ["save", "rows"])
    @pytest.mark.parametrize("fault", ["signal=KILL", "error=ENOSPC", "error=EIO"])
    def test_system_calls_fail_or_kill(self, location: FsPath, work: str, fault: str) -> None:
        """As above, but below Python: what any library calls is counted too, and all calls from the fifth on fail."""
        needs_strace()
        put_back, new, _ = self.prepared(work, location, LAYOUTS["shards"])
        put_back()

        def failing() -> None:
            try:
                self.work(work, location, LAYOUTS["shards"])
            except StoreIOError:
                os._exit(3)

        status, calls = traced(failing, at=("pwrite64,fsync,renameat2,rename,renameat", "5+"), inject=fault)
        assert status == (-signal.SIGKILL if fault == "signal=KILL" else 3), calls[-5:]
        assert self.outcome(location, new) in self.outcomes.get(work, {"old", "new"})

    def test_in_place_on_a_full_disk(self, disk: FsPath) -> None:
        """An update that does not fit is an error, and the store is the old one."""
        place = disk / "t.zarr"
        old = {("x",): torch.zeros(1_000_000, dtype=torch.uint8)}
        save(place, old)
        store = open_zarr(place, mode="r+")
        with pytest.raises(StoreIOError):
            for _ in range(3):
                store.write([Write(("x",), (), torch.randint(0, 255, (1_000_000,), dtype=torch.uint8))])
                store.create({("y",): LeafSpec((4_000_000,), "uint8")})
                store.write([Write(("y",), (), torch.randint(0, 255, (4_000_000,), dtype=torch.uint8))])
                store.flush()
        assert same(load(place, verify="full"), old)
        store.discard()
        store.close()
        assert same(load(place, verify="full"), old)
        assert {entry.name for entry in place.iterdir()} == {"x", "zarr.json"}


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


def update(store: Store) -> None:
    """Write rows of every leaf."""
    store.write([Write(p, (), v) for p, v in NEW.items() if p != ("c",)])
    store.flush()
    store.write([Write(("c",), (), NEW[("c",)])])


def restructure(store: Store) -> None:
    """As `TestCrash.structure`, with names exchanged and a leaf replaced."""
    TestCrash().structure(store)
    store.rename({("moved", "a"): ("made", "x"), ("made", "x"): ("moved", "a")})
    store.create({("n", "b"): LeafSpec((3,), "float32", chunks=2)})
    store.write([Write(("n", "b"), (), torch.ones(3))])
    store.save_header(header_of(everything(store)))


def save_over(store: Store) -> None:
    fill(store, NEW)
    store.save_header(header_of(NEW))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("work", [save_over, update, restructure])
def test_object_stores_kill_at_every_request(work: Callable[[Store], None], after: bool) -> None:
    """The same without renames: a commit is one put. The next writer does what the dead one did not come to."""
    clean = MemoryEngine("memory://clean")
    with open_on(clean, mode="w", chunks=8, shards=32) as store:
        fill(store, OLD)
        store.save_header(header_of(OLD))
    options: dict[str, Any] = {"mode": "w", "chunks": 8, "shards": 32} if work is save_over else {"mode": "r+"}
    done = MemoryEngine("memory://done", dict(clean.objects))
    with open_on(done, **options) as store:
        work(store)
    new = everything(open_on(done, verify="full"))
    assert not same(new, OLD)
    states = {"old": OLD, "new": new}
    if work is restructure:
        with open_on(MemoryEngine("memory://between", dict(clean.objects)), mode="r+") as store:
            TestCrash().structure(store)
            states["between"] = everything(store)
    assert not [key for key in done.objects if key.startswith("tdstore")]

    seen: dict[str, int] = {}
    for k in range(1, 500):
        engine = DyingEngine(dict(clean.objects), k, after=after)
        died = True
        try:
            store = open_on(engine, **options)
            work(store)
            store._session.close()
            died = False
        except RuntimeError:
            engine.left = 10**9
        rest = MemoryEngine("memory://after", dict(engine.objects))
        before = dict(rest.objects)
        found = everything(open_on(rest, verify="full"))
        assert rest.objects == before, "reading changed it"
        (result,) = [name for name, leaves in states.items() if same(found, leaves)]
        seen[result] = seen.get(result, 0) + 1
        if not died:
            assert result == "new"
            break
        with open_on(rest, mode="r+", recover="accept") as store:
            store.write([Write(p, (), v) for p, v in found.items()])
        assert same(everything(open_on(rest, verify="full")), found)
        assert not [key for key in rest.objects if key.startswith("tdstore")]
    assert set(seen) == set(states)


def test_a_mark_of_an_earlier_version(place: FsPath) -> None:
    """It changed chunks in place: what its mark names is as it was committed, or the reader is told."""
    save(place, OLD, chunks=40)
    root = place / "zarr.json"
    mark = {"leaves": [["a"]], "pid": 1, "host": "elsewhere", "time": 0.0}
    content = msgspec.json.decode(root.read_bytes())
    content["attributes"]["tdstore_dirty"] = mark
    root.write_bytes(msgspec.json.encode(content))
    assert same(load(place), OLD)
    chunk = place / "a" / "c" / "0" / "0"
    chunk.write_bytes((place / "a" / "c" / "1" / "0").read_bytes())
    with pytest.raises(DirtyStoreError, match="'a'") as caught:
        open_zarr(place, lock_timeout=0)
    assert caught.value.leaves == (("a",),)
    assert torch.equal(load(place, recover="accept")[("a",)][:40], OLD[("a",)][40:80])
    open_zarr(place, mode="r+", recover="accept").close()
    assert torch.equal(load(place, verify="full")[("a",)][:40], OLD[("a",)][40:80])
    assert b"tdstore_dirty" not in root.read_bytes()


# -- damage --------------------------------------------------------------------------------
def every_file(place: FsPath) -> list[FsPath]:
    return sorted(p for p in place.rglob("*") if p.is_file())


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


def test_holders_do_not_outlive_their_store(place: FsPath) -> None:
    save(place, OLD)
    with open_zarr(place, mode="r+") as store:
        store.write([Write(("n", "b"), (), NEW[("n", "b")])])
        assert len(folder._HOLDERS) == 1
    assert not folder._HOLDERS


@pytest.mark.parametrize("opened", [False, True], ids=["saved", "opened"])
def test_a_folder_that_is_gone_is_reported_once(opened: bool, tmp_path: FsPath) -> None:
    program = f"""
import shutil, torch, tdstore
td = tdstore.TensorDict({{"a": torch.zeros(6)}}, [6]).save({str(tmp_path / "x.zarr")!r})
if {opened}:
    td.close()
    td = tdstore.open({str(tmp_path / "x.zarr")!r}, mode="r+")
td.set_at_("a", torch.tensor(1.0), 3)
shutil.rmtree({str(tmp_path / "x.zarr")!r})
"""
    done = scripts.run(program)
    assert done.status == 0
    (line,) = done.errors.splitlines()
    assert "x.zarr has uncommitted changes, and they are lost" in line
