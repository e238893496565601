"""The end of a handle that nobody closed: rows are there, no mark stays, and a folder that is gone is no matter."""

from __future__ import annotations

import gc
import logging
import pickle
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path as FsPath

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.builtin.memmap.store import open_memmap
from tdstore.lifetime import settle
from tdstore.types import Write
from tests import scripts


def saved(folder: FsPath, name: str) -> FsPath:
    path = folder / name
    TensorDict({"x": torch.zeros(8, 3)}, [8]).save(path).close()
    return path


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tdstore")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def is_whole(path: FsPath, value: float = 1) -> bool:
    """Whether a dataset holds one value in row 2, has no mark of a writer, and fits its checksums."""
    with tdstore.open(path, verify="full") as td:
        rows = td["x"][2].tolist()
    marks = path.is_dir() and (path / "tdstore.session").exists()
    return rows == [value] * 3 and not marks and tdstore.verify(path) == []


def script(body: str, *args: object) -> str:
    """The standard error of a script, which ends well."""
    head = "import os, shutil, sys, tempfile\nimport torch, tdstore\nfrom tdstore import TensorDict\n"
    done = scripts.run(head + textwrap.dedent(body), *args)
    assert done.status == 0, done.errors
    return done.errors


@pytest.mark.parametrize("name", ["d", "x.tdz"])
@pytest.mark.parametrize(
    "body",
    [
        'td = tdstore.open(sys.argv[1], mode="r+"); td["x"][2] = 1',
        'td = tdstore.open(sys.argv[1], mode="r+"); td["x"].numpy()[2] = 1',
        'td = TensorDict({"x": torch.zeros(8, 3)}, [8]).save(sys.argv[1]); td["x"][2] = 1',
        """
        def work():
            td = tdstore.open(sys.argv[1], mode="r+")
            td["x"][2] = 1
        work()
        """,
        'td = tdstore.open(sys.argv[1], mode="r+"); td["x"][2] = 1; td.me = td; del td',
        'td = tdstore.open(sys.argv[1], mode="r+"); td[2:3] = TensorDict({"x": torch.ones(1, 3)}, [1]); sys.exit(0)',
    ],
    ids=["module", "numpy", "save", "function", "cycle", "sys.exit"],
)
def test_the_end_of_a_script_keeps_rows(tmp_path: FsPath, name: str, body: str) -> None:
    path = saved(tmp_path, name)
    if "td.me" in body:
        body = body.replace("td.me = td", "cycle = [td]; cycle.append(cycle); del cycle")
    assert script(body, path) == ""
    assert is_whole(path)


CHILD = """
import multiprocessing, sys
import tdstore

def work(*paths):
    global left_open
    left_open = [tdstore.open(path, mode="r+") for path in paths]
    for td in left_open:
        td["x"][2] = 1

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=sys.argv[2:])
    process.start()
    process.join(200)
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_children_keep_rows(tmp_path: FsPath, start: str) -> None:
    paths = [saved(tmp_path, "d"), saved(tmp_path, "x.tdz")]
    main = tmp_path / "main.py"
    main.write_text(CHILD)
    if start == "fork":
        done = scripts.run(CHILD, start, *paths)
    else:
        done = scripts.run_file(main, start, *paths)
    assert (done.status, done.errors) == (0, "")
    assert all(map(is_whole, paths))


@pytest.mark.parametrize("name", ["d", "x.tdz"])
def test_a_handle_that_is_dropped(tmp_path: FsPath, name: str) -> None:
    path = saved(tmp_path, name)
    td = tdstore.open(path, mode="r+")
    td["x"][2] = 1
    del td
    gc.collect()
    settle()
    assert is_whole(path)


def test_a_leaf_that_outlives_its_handle(tmp_path: FsPath) -> None:
    path = saved(tmp_path, "d")
    leaf = tdstore.open(path, mode="r+")["x"]
    gc.collect()
    leaf[2] = 1
    del leaf
    gc.collect()
    settle()
    assert is_whole(path)


@pytest.mark.parametrize("how", ["memmap_", "save", "r+"])
def test_a_folder_that_is_removed_before_its_handle_ends(tmp_path: FsPath, how: str, told: list[str]) -> None:
    path = tmp_path / "d"
    td = TensorDict({"x": torch.zeros(8, 3), "n": {"y": torch.ones(8)}}, [8])
    td = td.memmap_(path) if how == "memmap_" else td.save(path)
    if how == "r+":
        td.close()
        td = tdstore.open(path, mode="r+")
    td["x"].fill_(1)
    shutil.rmtree(path)
    del td
    gc.collect()
    settle()
    assert told == []


def test_a_removed_folder_is_silent_at_the_end_of_a_script(tmp_path: FsPath) -> None:
    body = """
        d = sys.argv[1] + "/d"
        td = TensorDict({"x": torch.zeros(8, 3)}, [8]).memmap_(d)
        td["x"].fill_(1)
        shutil.rmtree(d)
        with tempfile.TemporaryDirectory() as folder:
            other = TensorDict({"x": torch.zeros(8, 3)}, [8]).memmap_(folder)
            other["x"][2] = 1
            archive = TensorDict({"x": torch.zeros(8, 3)}, [8]).save(folder + "/x.tdz")
            archive["x"][2] = 1
        kept = tempfile.TemporaryDirectory()  # removed by a finalizer at the end
        third = TensorDict({"x": torch.zeros(8, 3)}, [8]).memmap_(kept.name)
        third["x"][2] = 1
        kept.__exit__(None, None, None)
    """
    assert script(body, tmp_path) == ""


def test_a_pool_whose_folder_is_removed(tmp_path: FsPath) -> None:
    body = """
        def double(td):
            return td.apply(lambda leaf: leaf + 1)
        with tempfile.TemporaryDirectory() as folder:
            td = TensorDict({"x": torch.zeros(8, 3)}, [8]).memmap_(folder)
            assert td.map(double, num_workers=2, chunksize=2, mp_start_method="fork")["x"].sum() == 24
    """
    assert script(body) == ""


def test_a_folder_in_a_temporary_directory(tmp_path: FsPath, told: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        td = TensorDict({"x": torch.zeros(8, 3)}, [8]).memmap_(folder)
        td["x"].fill_(1)
    assert td["x"].sum() == 24
    td.close()
    assert told == []


@pytest.mark.parametrize("pack", [False, True])
def test_writes_after_close_stay_in_this_process(tmp_path: FsPath, pack: bool) -> None:
    path = tmp_path / "d"
    TensorDict({"x": torch.zeros(8, 3), "n": {"y": torch.zeros(8, 2)}}, [8]).save(path, pack=pack).close()
    td = tdstore.open(path, mode="r+")
    leaf, rows = td["x"], td["n", "y"][2:4]
    leaf[2] = 1
    td.close()
    leaf[3] = 5
    rows.fill_(7)
    assert leaf[:, 0].tolist() == [0, 0, 1, 5, 0, 0, 0, 0]
    assert rows.tolist() == [[7, 7], [7, 7]]
    assert is_whole(path)
    with tdstore.open(path) as td:
        assert td["x"][3].tolist() == [0, 0, 0]
        assert td["n", "y"].sum() == 0


def test_writes_after_close_to_a_leaf_from_before_it_grew(tmp_path: FsPath) -> None:
    path = saved(tmp_path, "d")
    td = tdstore.open(path, mode="r+")
    before = td["x"]
    td.append(TensorDict({"x": torch.full((1, 3), 4.0)}, [1]))
    before[2] = 1
    td.close()
    before[3] = 5
    assert is_whole(path)
    with tdstore.open(path) as td:
        assert td["x"][:, 0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 4]


def test_a_tensor_of_a_file_that_another_writer_replaced_keeps_its_rows(tmp_path: FsPath) -> None:
    path = saved(tmp_path, "d")
    td = tdstore.open(path, mode="r+")
    leaf = td["x"]
    leaf[2] = 1
    with tdstore.open(path, mode="r+") as other:
        del other["x"]
        other["x"] = torch.full((8, 3), 9.0)
    td.close()
    leaf[3] = 5
    assert leaf[:, 0].tolist() == [0, 0, 1, 5, 0, 0, 0, 0]
    assert is_whole(path, 9)


def test_a_tensor_that_outlives_its_session_is_pickled_as_it_is(tmp_path: FsPath) -> None:
    td = tdstore.open(saved(tmp_path, "d"), mode="r+")
    leaf = td["x"]
    td.close()
    leaf[2] = 5
    assert pickle.loads(pickle.dumps(leaf)).tolist() == leaf.tolist()


def test_a_writer_that_ends_after_it_lengthened_a_leaf(tmp_path: FsPath) -> None:
    path = saved(tmp_path, "d")
    store = open_memmap(str(path), mode="r+")
    rows = torch.ones(1, 3)
    store.write([Write(("x",), (slice(2, 3, 1),), rows)])
    store.resize({("x",): 9})
    store.write([Write(("x",), (slice(8, 9, 1),), rows)])
    store.close()
    file = next(path.glob("x*.memmap"))
    assert file.stat().st_size == 9 * 12
    for verify in ("size", "full"):
        with tdstore.open(path, verify=verify) as td:
            assert td["x"][:, 0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    tdstore.open(path, mode="r+").close()
    assert file.stat().st_size == 8 * 12
    assert is_whole(path)


IN_A_THREAD = """
import atexit, threading, time
from tdstore.builtin.memmap.leaves import MemmapLeaves

write, begun, ended = MemmapLeaves._write, threading.Event(), threading.Event()

def write_slowly(self, wanted):
    begun.set()
    while not self._hold.ending:
        time.sleep(0.01)
    write(self, wanted)

td = tdstore.open(sys.argv[1], mode="r+")
td["x"][2] = 1
MemmapLeaves._write = write_slowly

def go():
    try:
        td.append(TensorDict({"x": torch.ones(1, 3)}, [1]))
    except tdstore.errors.StoreClosedError:
        print("closed", file=sys.stderr)
    ended.set()

threading.Thread(target=go, daemon=True).start()
atexit.register(ended.wait, 60)  # after the stores were closed
begun.wait(60)
"""
A_HOOK = """
import time
import atexit
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
td = tdstore.open(sys.argv[1], mode="r+")
kept = td["x"]
kept[2] = 1

def write():
    kept[3] = 5
    print("written", file=sys.stderr)

atexit.register(write)
"""


def test_the_end_of_a_script_waits_for_a_write_of_a_thread(tmp_path: FsPath) -> None:
    """The thread is within an append: it is refused before it commits, and does not find its files closed."""
    path = saved(tmp_path, "d")
    assert script(IN_A_THREAD, path) == "closed\n"
    with tdstore.open(path, verify="full") as td:
        assert td["x"][:, 0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    tdstore.open(path, mode="r+").close()
    assert is_whole(path)


def test_a_tensor_that_is_written_after_its_store_was_closed_by_the_end(tmp_path: FsPath) -> None:
    path = saved(tmp_path, "d")
    assert script(A_HOOK, path) == "written\n"
    assert is_whole(path)
    with tdstore.open(path) as td:
        assert td["x"][3].sum() == 0
