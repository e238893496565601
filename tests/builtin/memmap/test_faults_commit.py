"""A save that is killed, or meets a failing or full disk, leaves exactly the old dataset or the new one."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path as FsPath

import pytest
import torch

from tdstore.builtin.memmap.store import open_memmap
from tdstore.errors import StoreIOError
from tdstore.storekit import files
from tdstore.testing.processes.syscalls import is_traceable, traced
from tdstore.types import LeafSpec, Write
from tests.builtin.memmap.support import (
    EIO,
    ENOSPC,
    NEW,
    OLD,
    FaultyOs,
    at_each_change,
    die,
    header_of,
    in_child,
    injected,
    killed_after,
    layout,
    load,
    remains,
    same,
    save,
    small_disk,
)

__all__ = ["layout"]  # every test runs with a file for each leaf, and with packed leaves
pytestmark = pytest.mark.usefixtures("layout")


def old_or_new(location: FsPath) -> str:
    got = load(location)
    assert same(got, OLD) or same(got, NEW), {k: v.shape for k, v in got.items()}
    return "old" if same(got, OLD) else "new"


def commit_in_place(location: FsPath, durable: str) -> None:
    """A structural change of an open store: replaces nothing, adds and drops leaves."""
    with open_memmap(str(location), mode="r+", durable=durable) as store:
        store.delete([("s",), ("n", "b")])
        store.create({("n", "c"): LeafSpec((40, 3), "bfloat16"), ("z",): LeafSpec((0, 4), "float32")})
        store.write([Write(("n", "c"), (), NEW[("n", "c")])])
        store.save_header(header_of(NEW))


@pytest.mark.parametrize("durable", ["none", "commit"])
def test_killed_at_every_call(tmp_path: FsPath, durable: str) -> None:
    """A kill at each call that changes the disk, in a save over an old dataset; the next save tidies up."""
    location = tmp_path / "d"
    save(location, OLD)
    seen = []
    for _ in at_each_change(lambda: save(location, NEW, durable=durable), tmp_path):
        seen.append(old_or_new(location))
        save(location, OLD)
        assert remains(tmp_path) == []
    assert seen == sorted(seen, reverse=True), "new, then old again"  # "old" ... "old" "new" ... "new"
    assert seen[0] == "old" and seen[-1] == "new"


def test_killed_when_nothing_was_there(tmp_path: FsPath) -> None:
    """A first save that is killed leaves nothing, or all."""
    location = tmp_path / "d"
    there = []
    for _ in at_each_change(lambda: save(location, NEW, durable="commit"), tmp_path):
        there.append(location.exists())
        if location.exists():
            assert same(load(location), NEW)
    assert not there[0] and there[-1]


def test_killed_at_random_moments(tmp_path: FsPath) -> None:
    """SIGKILL by the clock, in a process that saves over and over."""
    location = tmp_path / "d"
    save(location, OLD)
    chance = random.Random(5)

    def saving() -> None:
        while True:
            save(location, NEW)
            save(location, OLD)

    for _ in range(25):
        killed_after(saving, chance.uniform(0.001, 0.04))
        old_or_new(location)
    save(location, OLD)
    assert remains(tmp_path) == []


@pytest.mark.skipif(not is_traceable(), reason="strace is not installed")
@pytest.mark.parametrize(
    ("call", "when"),
    [("pwrite64", 2), ("mkdirat", 1), ("renameat2", 1), ("fsync", 4), ("unlinkat", 2), ("pwrite64", 3)],
)
def test_killed_by_strace(tmp_path: FsPath, call: str, when: int, request: pytest.FixtureRequest) -> None:
    """Killed from outside at real system calls, with nothing patched."""
    if call == "pwrite64" and request.node.callspec.params["layout"] == "packed":  # packed leaves are written at once
        call, when = [("ftruncate", 1), ("pwrite64", 1)][when - 2]
    location = tmp_path / "d"
    save(location, OLD)
    status, _ = traced(lambda: save(location, NEW, durable="commit"), at=(call, when))
    assert status == -signal.SIGKILL
    old_or_new(location)
    save(location, OLD)
    assert remains(tmp_path) == []


@pytest.mark.parametrize("fault", [ENOSPC, EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("durable", ["none", "commit"])
def test_failing_disk(tmp_path: FsPath, fault: Callable[[str], None], durable: str) -> None:
    """From the k-th call on every call fails: an error with the path, and the old dataset."""
    location = tmp_path / "d"
    save(location, OLD)
    for k in range(1, 400):
        error = None
        with injected(FaultyOs(k, fault)) as faults:
            try:
                save(location, NEW, durable=durable)
            except StoreIOError as caught:
                error = caught
        state = old_or_new(location)
        if error is None:
            assert state == "new", "a success was reported, but the old data is there"
        else:
            assert str(location) in str(error)
        if faults.count < k:
            break
        if state == "new":
            save(location, OLD)
    assert faults.count < k and k > 10
    save(location, OLD)
    assert remains(tmp_path) == []


@pytest.mark.parametrize("fault", [ENOSPC, EIO], ids=["ENOSPC", "EIO"])
def test_failing_once(tmp_path: FsPath, fault: Callable[[str], None]) -> None:
    """One call fails and the next ones work: told, and nothing lost."""
    location = tmp_path / "d"
    save(location, OLD)
    for k in range(1, 400):
        faults = FaultyOs(k, lambda name: None)

        def once(name: str, faults: FaultyOs = faults, k: int = k) -> None:
            if faults.count == k:
                fault(name)

        faults.act = once
        error = None
        with injected(faults):
            try:
                save(location, NEW, durable="commit")
            except StoreIOError as caught:
                error = caught
        state = old_or_new(location)
        assert error is not None or state == "new"
        if faults.count < k:
            break
        save(location, OLD)
    assert k > 10


def test_in_place_commit_killed(tmp_path: FsPath) -> None:
    """A structural commit of an open store: its leaves are the old ones or the new ones, none torn."""
    location = tmp_path / "d"
    new = {("a",): OLD[("a",)], ("n", "c"): NEW[("n", "c")], ("z",): NEW[("z",)]}
    states = set()
    save(location, OLD)
    for _ in at_each_change(lambda: commit_in_place(location, "commit"), tmp_path):
        got = load(location)
        assert same(got, OLD) or same(got, new)
        states.add(same(got, OLD))
        # The next writer tidies up, and then a whole save is not refused for leftovers.
        open_memmap(str(location), mode="r+").close()
        assert remains(tmp_path) == []
        assert same(load(location), OLD if same(got, OLD) else new)
        save(location, NEW)
    assert states == {True, False}


@pytest.fixture
def tiny_disk(tmp_path: FsPath) -> Iterator[FsPath]:
    with small_disk(tmp_path / "tiny", 4) as disk:
        yield disk


def test_really_full_disk(tiny_disk: FsPath) -> None:
    """A disk of 4 MB: whole saves, partial writes into sparse leaves, and preallocation."""
    location = tiny_disk / "d"
    save(location, OLD)
    big = {("a",): torch.ones(2 << 20)}
    with pytest.raises(StoreIOError) as caught:
        save(location, big)
    assert caught.value.errno == 28
    assert same(load(location), OLD)
    with open_memmap(str(tiny_disk / "sparse"), mode="w", durable="none") as store:
        store.create({("a",): LeafSpec((64, 64 << 10), "float32", preallocate=False)})  # 16 MB of holes
        rows = torch.ones(16, 64 << 10)
        with pytest.raises(StoreIOError):
            for start in range(0, 64, 16):
                store.write([Write(("a",), (slice(start, start + 16, 1),), rows)])
        with pytest.raises(StoreIOError):
            store.write([Write(("a",), (slice(0, 64, 1), slice(0, 1, 1)), torch.ones(64, 1))])
        with pytest.raises(StoreIOError):
            store.create({("b",): LeafSpec((8 << 20,), "uint8", preallocate=True)})
    # A view cannot raise: what fits the disk is found out when the leaf is made.
    with pytest.raises(StoreIOError), open_memmap(str(tiny_disk / "whole"), mode="w") as store:
        store.create({("a",): LeafSpec((64, 64 << 10), "float32")})
    assert same(load(location), OLD)
    save(location, NEW)
    assert same(load(location), NEW)
    assert remains(tiny_disk) == []


def test_exchange_by_plain_renames(tmp_path: FsPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without renameat2: a kill between the renames hides the old dataset, and the next save brings it back."""
    monkeypatch.setattr(files, "_renameat2", None)
    location = tmp_path / "d"
    hidden = 0
    for k in range(1, 200):
        save(location, OLD)

        def body(k: int = k) -> None:
            with injected(FaultyOs(k, die, frozenset({"rename"}))):
                save(location, NEW)

        code = in_child(body)
        if not location.exists():
            hidden += 1
            save(tmp_path / "another", NEW)  # any save into this folder
            assert same(load(location), OLD)
        old_or_new(location)
        if code == 0:
            break
    assert code == 0 and hidden == 1
    save(location, OLD)
    assert remains(tmp_path) == []
