"""Several processes, or several stores of one process, at one place: nothing acknowledged is lost, nothing torn."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path as FsPath

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.builtin.memmap.store import open_memmap
from tdstore.errors import StoreBusyError, StoreClosedError, StoreExistsError, TDStoreError
from tdstore.lifetime import settle
from tdstore.types import LeafSpec, Read, Write
from tests.builtin.memmap.support import NEW, OLD, content, header_of, in_child, load, remains, same, save

ON_DISK = True  # numbers of files are used again


def start(body: Callable[[], object]) -> int:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            torch.set_num_threads(1)
            body()
            code = 0
        except BaseException:
            traceback.print_exc()  # pytest shows it with the failure
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_two_processes_save_to_one_path(tmp_path: FsPath) -> None:
    """And readers beside them always see one generation whole."""
    location = tmp_path / "d"
    save(location, OLD)

    def saving(leaves: dict) -> None:  # type: ignore[type-arg]
        for _ in range(40):
            save(location, leaves)

    pids = [start(lambda: saving(OLD)), start(lambda: saving(NEW))]  # type: ignore[arg-type]
    reads, seen = 0, set()
    while reads < 60:
        got = load(location)
        assert same(got, OLD) or same(got, NEW)
        seen.add(same(got, OLD))
        reads += 1
    assert [ended(pid) for pid in pids] == [0, 0]
    assert remains(tmp_path) == []
    got = load(location)
    assert same(got, OLD) or same(got, NEW)


def test_exclusive_creation(tmp_path: FsPath) -> None:
    """Of many that make a store with mode "x", exactly one does."""
    location = tmp_path / "d"

    def body() -> None:
        try:
            save(location, OLD, mode="x")
        except StoreExistsError:
            os._exit(3)

    codes = [ended(pid) for pid in [start(body) for _ in range(6)]]
    assert sorted(codes) == [0, 3, 3, 3, 3, 3]
    assert same(load(location), OLD)


def test_save_waits_for_a_live_writer_of_another_process(tmp_path: FsPath) -> None:
    """Told who holds it when the wait is over; then nothing is changed, and the writer loses nothing."""
    location = tmp_path / "d"
    save(location, OLD)
    ready, go = os.pipe(), os.pipe()

    def writer() -> None:
        with open_memmap(str(location), mode="r+") as store:
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            store.write([Write(("s",), (), torch.tensor(99))])

    pid = start(writer)
    os.read(ready[0], 1)
    with pytest.raises(StoreBusyError, match=f"pid {pid} on") as caught:
        save(location, NEW, lock_timeout=0.1)
    assert str(location) in str(caught.value)
    os.write(go[1], b"x")
    assert ended(pid) == 0
    assert int(load(location)[("s",)]) == 99
    assert remains(tmp_path) == []


def test_save_that_waited_goes_through(tmp_path: FsPath) -> None:
    location = tmp_path / "d"
    save(location, OLD)
    ready = os.pipe()

    def writer() -> None:
        with open_memmap(str(location), mode="r+"):
            os.write(ready[1], b"x")
            time.sleep(0.3)

    pid = start(writer)
    os.read(ready[0], 1)
    save(location, NEW, lock_timeout=20)
    assert ended(pid) == 0
    assert same(load(location), NEW)


def test_writers_on_disjoint_rows(tmp_path: FsPath) -> None:
    """Four processes, each its rows of one leaf, some through views and some through writes."""
    location = tmp_path / "d"
    with open_memmap(str(location), mode="w", durable="none") as store:
        store.create({("a",): LeafSpec((400, 3), "int64")})
        store.save_header(header_of({("a",): torch.zeros(1)}))

    def body(worker: int) -> None:
        with open_memmap(str(location), mode="r+", durable="none") as store:
            for row in range(worker, 400, 4):
                if worker % 2:
                    store.write([Write(("a",), (slice(row, row + 1, 1),), torch.full((1, 3), row))])
                else:
                    store.view(("a",))[row] = row

    pids = [start(lambda w=w: body(w)) for w in range(4)]
    assert [ended(pid) for pid in pids] == [0] * 4
    assert torch.equal(load(location)[("a",)], torch.arange(400)[:, None].expand(400, 3))
    assert not (location / "tdstore.session").exists()


def test_second_structural_commit_is_told(tmp_path: FsPath) -> None:
    """Two writers that both add a leaf: the later one is told, and the earlier one's leaf stays."""
    location = tmp_path / "d"
    save(location, OLD)
    extra = {**OLD, ("x",): torch.ones(3)}
    with open_memmap(str(location), mode="r+") as one, open_memmap(str(location), mode="r+") as two:
        for store, name in ((one, "x"), (two, "y")):
            store.create({(name,): LeafSpec((3,), "float32")})
            store.write([Write((name,), (), torch.ones(3))])
        one.save_header(header_of(extra))
        with pytest.raises(StoreBusyError, match="another writer"):
            two.save_header(header_of({**OLD, ("y",): torch.ones(3)}))
    assert same(load(location), extra)
    assert remains(location) == []


def test_alias_save(tmp_path: FsPath) -> None:
    """Saving a part of a loaded dataset over itself; old views keep their data."""
    location = tmp_path / "d"
    save(location, OLD)
    for mode in ("r", "r+"):
        store = open_memmap(str(location), mode=mode)  # type: ignore[arg-type]
        before = content(store)
        part = {("a",): store.view(("a",))[5:]}
        save(location, part)
        expected = {("a",): before[("a",)][5:]}
        assert same(load(location), expected)
        assert same({p: store.view(p) for p in store.paths()}, before)
        if mode == "r+":
            with pytest.raises(StoreClosedError, match="replaced"):
                store.write([Write(("a",), (), before[("a",)])])
        store.close()
        assert same(load(location), expected)
        save(location, OLD)
    assert remains(tmp_path) == []


def test_opener_of_a_moving_store(tmp_path: FsPath) -> None:
    """Writers that open in place while another saves over: each change lands in the store that is there."""
    location = tmp_path / "d"
    save(location, OLD)

    def opening() -> None:
        for i in range(30):
            with open_memmap(str(location), mode="r+", durable="none") as store:
                store.write([Write(("a",), (slice(0, 1, 1),), torch.tensor([float(i)]))])

    pid = start(opening)
    for _ in range(15):
        save(location, OLD)
    assert ended(pid) == 0
    got = load(location)
    assert torch.equal(got[("a",)][1:], OLD[("a",)][1:])
    assert remains(tmp_path) == []


def test_no_leaks(tmp_path: FsPath) -> None:
    """Descriptors do not grow, whichever way a store ends; anonymous folders go with it."""
    location = tmp_path / "d"
    save(location, OLD)

    def count() -> int:
        gc.collect()
        settle()
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for i in range(60):
        store = open_memmap(str(location), mode=("r", "r+")[i % 2], durable="none")  # type: ignore[arg-type]
        store.view(("a",))
        if i % 3 == 0:
            store.close()
        del store
        open_memmap(str(tmp_path / "never"), mode="w").create({("a",): LeafSpec((3,), "int8")})
        with pytest.raises(TDStoreError):
            open_memmap(str(tmp_path / "nothing"))
    assert count() <= before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]


def test_many_leaves_few_descriptors(tmp_path: FsPath) -> None:
    """5,000 leaves at `ulimit -n` 256."""
    import resource

    location = tmp_path / "d"
    leaves = {(f"g{i % 50}", f"leaf{i}"): torch.full((2,), i) for i in range(5000)}

    def body() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        save(location, leaves)
        store = open_memmap(str(location))
        assert all(int(store.view(path)[0]) == int(value[0]) for path, value in leaves.items())

    assert in_child(body) == 0
    with open_memmap(str(location)) as store:
        assert store.read([Read(("g7", "leaf4957"))])[0].tolist() == [4957, 4957]


def test_a_save_into_a_dataset_that_this_process_writes_is_refused_at_once(tmp_path):
    """Its lock is our own, so that waiting for it ends in nothing; a closed one holds no lock."""
    outer = TensorDict({"a": torch.zeros(3)}, [3]).memmap_(tmp_path / "x")
    with pytest.raises(StoreBusyError, match="inside the dataset .*x, which this process has open") as caught:
        TensorDict({"b": torch.ones(3)}, [3]).save(tmp_path / "x" / "sub", lock_timeout=60)
    assert "save beside it" in caught.value.hint
    assert not (tmp_path / "x" / "sub").exists()
    assert tdstore.open(tmp_path / "x")["a"].tolist() == [0, 0, 0]
    del outer
