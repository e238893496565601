"""Writing in place: a crash is old, new, or a `DirtyStoreError` that names the leaves; an orderly end is clean."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path as FsPath

import pytest
import torch

from tdstore.builtin.memmap.store import MemmapStore, open_memmap
from tdstore.errors import DirtyStoreError, StoreIOError
from tdstore.lifetime import settle
from tdstore.types import LeafSpec, Read, Write
from tests import scripts
from tests.builtin.memmap.support import (
    EIO,
    ENOSPC,
    OLD,
    PACKED,
    FaultyOs,
    content,
    die,
    header_of,
    in_child,
    injected,
    layout,
    load,
    same,
    save,
)

__all__ = ["layout"]  # every test runs with a file for each leaf, and with packed leaves
pytestmark = pytest.mark.usefixtures("layout")

BIG = {("a",): torch.arange(3 << 20, dtype=torch.float32).view(3, -1), ("b",): torch.ones(100), ("c",): torch.zeros(5)}
NEW_A = BIG[("a",)] + 0.5


def manifest_time(location: FsPath) -> int:
    return (location / "tdstore.json").stat().st_mtime_ns


def write_all(location: FsPath) -> None:
    with open_memmap(str(location), mode="r+", durable="none") as store:
        store.write([Write(("a",), (), NEW_A), Write(("b",), (slice(0, 50, 1),), torch.zeros(50))])


def test_killed_at_every_write(tmp_path: FsPath) -> None:
    """SIGKILL before each call of an update in place, from the opening to the sealing."""
    outcomes = set()
    location = tmp_path / "d"
    new = {**BIG, ("a",): NEW_A, ("b",): torch.cat([torch.zeros(50), torch.ones(50)])}
    for k in range(1, 100):
        save(location, BIG)

        def body(k: int = k) -> None:
            with injected(FaultyOs(k, die)):
                write_all(location)

        code = in_child(body)
        try:
            got = load(location)
        except DirtyStoreError as error:
            assert set(error.leaves) <= {("a",), ("b",)} and error.leaves
            assert "'a'" in str(error) or "'b'" in str(error)
            accepted = load(location, recover="accept")
            assert same({("c",): accepted[("c",)]}, {("c",): BIG[("c",)]})
            with pytest.raises(DirtyStoreError):  # reading changed nothing
                load(location)
            open_memmap(str(location), mode="r+", recover="accept", durable="none").close()
            assert same(load(location), accepted)  # resealed
            outcomes.add("dirty")
        else:
            assert same(got, BIG) or same(got, new)
            outcomes.add("old" if same(got, BIG) else "new")
        if code == 0:
            break
    assert code == 0 and outcomes == {"old", "dirty", "new"}


def test_killed_while_a_view_was_written(tmp_path: FsPath) -> None:
    """Half a leaf written through its mapping, then SIGKILL."""
    location = tmp_path / "d"
    save(location, BIG)

    def body() -> None:
        store = open_memmap(str(location), mode="r+")
        store.view(("a",))[:1].add_(1)
        die("")

    assert in_child(body) == -signal.SIGKILL
    with pytest.raises(DirtyStoreError) as caught:
        open_memmap(str(location))
    assert caught.value.leaves == (("a",),)
    assert caught.value.hint is not None and "recover='accept'" in caught.value.hint


def test_killed_before_anything_was_written(tmp_path: FsPath) -> None:
    """A writer that died without writing leaves the old state, and reading it changes no file."""
    location = tmp_path / "d"
    save(location, BIG)
    assert in_child(lambda: (open_memmap(str(location), mode="r+"), die(""))) == -signal.SIGKILL
    before = {p.name: p.read_bytes() for p in location.iterdir()}
    assert "tdstore.session" in before
    assert same(load(location), BIG)
    assert {p.name: p.read_bytes() for p in location.iterdir()} == before
    open_memmap(str(location), mode="r+").close()
    assert not (location / "tdstore.session").exists()


def _numpy(store: MemmapStore) -> None:
    store.view(("b",)).numpy()[3] = 9


def _foreach(store: MemmapStore) -> None:
    torch._foreach_add_([store.view(("b",))], 1.0)


def _slice(store: MemmapStore) -> None:
    store.view(("b",))[4:6].zero_()


def _write(store: MemmapStore) -> None:
    store.write([Write(("b",), (torch.tensor([5, 1]),), torch.tensor([3.0, 4.0]))])


def _forked(store: MemmapStore) -> None:
    view = store.view(("b",))
    assert in_child(lambda: view.add_(2)) == 0


@pytest.mark.parametrize("change", [_numpy, _foreach, _slice, _write, _forked])
@pytest.mark.parametrize("end", ["close", "collect", "drop the store, keep the view"])
def test_every_way_to_write_is_sealed(tmp_path: FsPath, change: Callable[[MemmapStore], None], end: str) -> None:
    location = tmp_path / "d"
    save(location, BIG)
    store = open_memmap(str(location), mode="r+", durable="none")
    change(store)
    expected = content(store)
    if end == "close":
        store.close()
    elif end == "collect":
        del store
        gc.collect()
    else:
        view = store.view(("b",))
        del store
        gc.collect()
        view.mul_(2)
        expected[("b",)] = view.clone()
        del view
        gc.collect()
    settle()
    assert not (location / "tdstore.session").exists()
    assert same(load(location), expected)


EXIT = """
import sys, torch
from tdstore.builtin.memmap.store import open_memmap
store = open_memmap(sys.argv[1], mode="r+")
view = store.view(("b",))
view.add_(5)
"""


def test_program_that_never_closes(tmp_path: FsPath) -> None:
    """A normal exit of the interpreter seals the store."""
    location = tmp_path / "d"
    save(location, BIG)
    assert scripts.run(EXIT, location).status == 0
    assert not (location / "tdstore.session").exists()
    assert torch.equal(load(location)[("b",)], torch.full((100,), 6.0))


def test_nothing_written_nothing_rewritten(tmp_path: FsPath) -> None:
    location = tmp_path / "d"
    save(location, BIG)
    before = manifest_time(location)
    with open_memmap(str(location), mode="r+") as store:
        store.view(("a",))
    assert manifest_time(location) == before


def test_reader_beside_a_writer(tmp_path: FsPath) -> None:
    """While a session is live its half-written leaves open without complaint; afterwards the sums are right."""
    location = tmp_path / "d"
    save(location, BIG)
    with open_memmap(str(location), mode="r+") as store:
        store.view(("b",)).fill_(3)
        assert torch.equal(load(location)[("b",)], torch.full((100,), 3.0))
        with open_memmap(str(location), mode="r+") as second:
            second.write([Write(("c",), (), torch.ones(5))])
    got = load(location)
    assert torch.equal(got[("b",)], torch.full((100,), 3.0)) and torch.equal(got[("c",)], torch.ones(5))


def test_one_left_in_order_one_died(tmp_path: FsPath) -> None:
    """The leaves of the one that left are compared too: nothing is called clean that nobody vouches for."""
    location = tmp_path / "d"
    save(location, BIG)
    ready, go = os.pipe(), os.pipe()

    def body() -> None:
        store = open_memmap(str(location), mode="r+")
        store.view(("c",)).fill_(8)
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        die("")

    pid = os.fork()
    if not pid:
        torch.set_num_threads(1)
        body()
    os.read(ready[0], 1)
    with open_memmap(str(location), mode="r+") as store:
        store.write([Write(("b",), (), torch.zeros(100))])
    os.write(go[1], b"x")
    os.waitpid(pid, 0)
    with pytest.raises(DirtyStoreError) as caught:
        open_memmap(str(location))
    assert ("c",) in caught.value.leaves and ("a",) not in caught.value.leaves


@pytest.mark.parametrize("fault", [ENOSPC, EIO], ids=["ENOSPC", "EIO"])
def test_disk_fails_in_place(tmp_path: FsPath, fault: Callable[[str], None]) -> None:
    """From the k-th call on every call fails: told, and afterwards old, new, or named leaves."""
    location = tmp_path / "d"
    for k in range(1, 60):
        save(location, BIG)
        with injected(FaultyOs(k, fault)) as faults:
            try:
                write_all(location)
                failed = False
            except StoreIOError:
                failed = True
            gc.collect()
            settle()
        try:
            got = load(location)
            assert torch.equal(got[("a",)], BIG[("a",)]) or torch.equal(got[("a",)], NEW_A)
            assert failed or torch.equal(got[("a",)], NEW_A)
        except DirtyStoreError as error:
            assert failed and set(error.leaves) <= {("a",), ("b",)}
            open_memmap(str(location), mode="r+", recover="accept").close()
        if faults.count < k:
            break
    assert not failed and k > 8


def test_resize_without_commit(tmp_path: FsPath) -> None:
    """Rows that were added but not committed are not there afterwards; views of them stay readable meanwhile."""
    location = tmp_path / "d"
    save(location, OLD)
    store = open_memmap(str(location), mode="r+")
    old_view = store.view(("a",))
    store.resize({("a",): 5000})
    view = store.view(("a",))
    view[2000:] = 1
    assert torch.equal(old_view, OLD[("a",)]) and load(location)[("a",)].shape == (2000,)
    store.close()
    assert float(view.sum()) == float(OLD[("a",)].sum()) + 3000
    assert same(load(location), OLD)
    del view, old_view
    open_memmap(str(location), mode="r+").close()
    file = location / ("tdstore.pack" if PACKED[0] else "a.memmap")
    assert file.stat().st_size == (8000 + 4800 + 64 if PACKED[0] else 8000)


def test_resize_and_commit(tmp_path: FsPath) -> None:
    location = tmp_path / "d"
    with open_memmap(str(location), mode="w", durable="none") as store:
        store.create({("a",): LeafSpec((4, 2), "int16", fill_value=7)})
        store.save_header(header_of({("a",): torch.zeros(4, 2)}))
    with open_memmap(str(location), mode="r+") as store:
        first = store.view(("a",))
        store.resize({("a",): 6})
        store.write([Write(("a",), (slice(4, 5, 1),), torch.ones(1, 2, dtype=torch.int16))])
        store.save_header(store.load_header())
        store.resize({("a",): 3})
        shorter = store.view(("a",))
        store.resize({("a",): 5})
        store.save_header(store.load_header())
        assert first.shape == (4, 2) and int(first.sum()) == 56 and int(shorter.sum()) == 42
    with open_memmap(str(location), verify="full") as store:
        assert store.read([Read(("a",))])[0].tolist() == [[7, 7]] * 5
