"""What was written and never closed is committed: by the garbage collector's help, and when the process ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import lifetime
from tdstore.lifetime import Ending
from tdstore.testing.processes import warm
from tests import scripts


class Owner:
    pass


def test_a_dropped_owner_s_action_runs_once() -> None:
    done: list[str] = []
    owner = Owner()
    ending = Ending(owner, lambda: done.append("end"), "a place")
    assert done == []
    del owner
    gc.collect()
    lifetime.settle()
    ending()
    assert done == ["end"]


def test_the_thread_does_it_without_being_asked() -> None:
    done = threading.Event()
    owner = Owner()
    Ending(owner, done.set, "a place")
    del owner
    gc.collect()
    assert done.wait(200)


def test_a_thread_does_not_wait_for_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have the lock of a store that is being committed there: neither would go on."""
    state = lifetime._State()
    state.hooks = True
    monkeypatch.setattr(lifetime, "_state", state)
    thread = threading.Thread(target=lifetime.settle, daemon=True)
    with state.running:
        thread.start()
        thread.join(200)
        assert not thread.is_alive()


def test_it_is_never_done_in_the_thread_that_drops() -> None:
    where: list[int] = []
    done = threading.Event()

    def action() -> None:
        where.append(threading.get_ident())
        done.set()

    owner = Owner()
    Ending(owner, action, "a place")
    del owner
    gc.collect()
    assert done.wait(200)
    assert where != [threading.get_ident()]


def test_settling_does_what_the_thread_has_taken_and_not_begun() -> None:
    done: list[str] = []
    owner = Owner()
    Ending(owner, lambda: done.append("end"), "a place")
    with lifetime._state.running:  # the thread waits for this before it begins
        del owner
        gc.collect()
        while not lifetime._state.queue.empty():
            time.sleep(0.001)
        lifetime.settle()
        assert done == ["end"]
    lifetime.settle()
    assert done == ["end"]


def test_a_cancelled_one_does_nothing() -> None:
    done: list[str] = []
    owner = Owner()
    Ending(owner, lambda: done.append("end"), "a place").cancel()
    del owner
    gc.collect()
    lifetime.settle()
    assert done == []


def test_called_it_raises_and_dropped_it_reports(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        Ending(None, fail, "a place")()
    owner = Owner()
    Ending(owner, fail, "runs/7")
    del owner
    gc.collect()
    lifetime.settle()
    assert "runs/7 has uncommitted changes, and they are lost: the disk is full" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["x", "x.tdz", "file"])
def test_a_folder_that_is_removed_after_a_drop_stays_removed(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written while it is removed, nor made anew, and changes of what is gone are nobody's loss."""
    monkeypatch.setattr(lifetime, "DELAY", 30.0)  # however slow the machine is
    for _ in range(10):
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            place = f"file://{folder}/x" if where == "file" else f"{folder}/{where}"
            td = tdstore.TensorDict({"a": torch.zeros(50, 300), "n": {"b": torch.zeros(50)}}, [50]).save(place)
            td.set_at_("a", torch.ones(300), 3)
            del td
            gc.collect()
    lifetime.settle()
    assert capsys.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


def test_a_drop_whose_place_is_there_still_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise OSError("the disk is full")

    owner = Owner()
    Ending(owner, fail, f"zarr://{tmp_path}")
    del owner
    gc.collect()
    lifetime.settle()
    assert "has uncommitted changes, and they are lost" in capsys.readouterr().err


def test_a_forked_child_leaves_alone_what_its_parent_has() -> None:
    done: list[str] = []
    owner = Owner()
    ending = Ending(owner, lambda: done.append("end"), "a place")
    child = os.fork()
    if child == 0:
        del owner
        gc.collect()
        lifetime.settle()
        ending()
        os._exit(len(done))
    assert os.waitpid(child, 0)[1] == 0
    ending()
    assert done == ["end"]


SCRIPTS = {
    "end": "",
    "function": "import gc; gc.collect()",
    "sys.exit": "import sys; sys.exit(3)",
    "exception": "raise RuntimeError('as it happens')",
    "a thread goes on": "import threading, time; threading.Thread(target=lambda: time.sleep(0.2)).start()",
}


@pytest.mark.parametrize("how", SCRIPTS)
@pytest.mark.parametrize("owner", ["module", "dropped", "process"])
def test_the_end_of_a_script(how: str, owner: str, tmp_path: Path) -> None:
    lines = [
        "from tdstore.lifetime import Ending",
        "class Owner: pass",
        f"o = {'None' if owner == 'process' else 'Owner()'}",
        f"Ending(o, lambda: open({str(tmp_path / 'done')!r}, 'a').write('x'), 'a place')",
        "del o" if owner == "dropped" else "",
        SCRIPTS[how],
    ]
    run = subprocess.run([*warm.python(), "-c", "\n".join(lines)], capture_output=True, text=True, timeout=200)
    assert (tmp_path / "done").read_text() == "x"
    assert ("as it happens" in run.stderr) == (how == "exception")
    assert "Exception ignored" not in run.stderr


@pytest.mark.parametrize("structure", [False, True])
def test_structure_without_a_header_is_dropped_beside_a_thread_that_goes_on(structure: bool, tmp_path: Path) -> None:
    """The rows of the last commit's leaves are committed, and no leaf is there that no header names."""
    place = f"file://{tmp_path}/data"
    tdstore.TensorDict({"a": torch.zeros(4)}, [4]).save(place).close()
    lines = [
        "import threading, time, torch",
        "from tdstore.registry import registry",
        "from tdstore.types import LeafSpec, Write",
        f"store = registry().open(registry().resolve({place!r}), {place!r}, mode='r+')",
        "store.write([Write(('a',), (), torch.ones(4))])",
        "store.create({('new',): LeafSpec((4,), 'int64')})" if structure else "",
        "threading.Thread(target=lambda: time.sleep(0.3)).start()",
    ]
    run = subprocess.run([*warm.python(), "-c", "\n".join(lines)], capture_output=True, text=True, timeout=200)
    assert (run.returncode, run.stderr) == (0, "")
    with tdstore.open(place) as td:
        assert list(td._handle.store.paths()) == [("a",)]
        assert td["a"].tolist() == [1.0] * 4


IN_AN_EXIT_HOOK = """
import atexit, sys, torch, tdstore
import h5py  # where a hook is the first to import it, it crashes when the process ends
from tdstore import TensorDict

@atexit.register
def hook():
    td = tdstore.open(sys.argv[1], "r+")
    td.set_at_("a", torch.ones(3), 1)
    TensorDict({"a": torch.ones(2)}, [2]).save(sys.argv[2]).set_at_("a", torch.tensor(5.0), 0)

if sys.argv[3] == "again":
    with tdstore.open(sys.argv[1], "r+") as td:
        td.set_at_("a", torch.ones(3), 0)
"""


@pytest.mark.parametrize("before", ["never", "again"])
@pytest.mark.parametrize("kind", ["memmap", "h5", "zarr", "file"])
def test_what_an_exit_hook_opens_is_committed(kind: str, before: str, tmp_path: Path) -> None:
    """It was lost, and memmap and HDF5 were left as a writer leaves them that died."""
    old, new = (f"file://{tmp_path}/{name}" if kind == "file" else f"{tmp_path}/{name}.{kind}" for name in "on")
    for place in (old, new):
        tdstore.TensorDict({"a": torch.zeros(4, 3)}, [4]).save(place).close()
    done = scripts.run(IN_AN_EXIT_HOOK, old, new, before)
    assert (done.status, done.errors) == (0, "")
    with tdstore.open(old) as td:
        assert td["a"][:, 0].tolist() == [float(before == "again"), 1, 0, 0]
    with tdstore.open(new) as td:
        assert td["a"].tolist() == [5, 1]


OPENED_BEFORE_A_HOOK = """
import atexit, sys, torch, tdstore
from tdstore import TensorDict

def hook():
    if sys.argv[3] == "opens again":
        with tdstore.open(sys.argv[1], "r+") as again:
            again.set_at_("a", torch.ones(3), 2)
        return
    td["a"][1] = 7  # of live tensors: it changed a file whose checksums were written, which was damaged then
    td.set_at_("a", torch.ones(3), 2)
    td["b"] = torch.ones(4)

if sys.argv[2] == "first":
    atexit.register(hook)
td = tdstore.open(sys.argv[1], "r+")
td.set_at_("a", torch.ones(3), 0)
if sys.argv[2] == "last":
    atexit.register(hook)
"""


@pytest.mark.parametrize("registered", ["first", "last"])
@pytest.mark.parametrize("kind", ["memmap", "h5", "zarr", "file", "tdz"])
def test_an_exit_hook_writes_to_what_was_open(kind: str, registered: str, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/d" if kind == "file" else f"{tmp_path}/d.{kind}"
    tdstore.TensorDict({"a": torch.zeros(4, 3)}, [4]).save(place).close()
    done = scripts.run(OPENED_BEFORE_A_HOOK, place, registered, "goes on")
    assert (done.status, done.errors) == (0, "")
    with tdstore.open(place) as td:
        assert td["a"][:, 0].tolist() == [1, 7 * (kind in ("memmap", "tdz")), 1, 0]
        assert td["b"].tolist() == [1] * 4


BESIDE_A_DAEMON = """
import atexit, sys, threading, torch, tdstore

@atexit.register
def hook():
    try:
        td.set_at_("a", torch.ones(3), 2)
    except tdstore.errors.StoreClosedError:
        print("closed")

td = tdstore.open(sys.argv[1], "r+")
td.set_at_("a", torch.ones(3), 0)
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.mark.parametrize("kind", ["h5", "zarr", "file"])
def test_beside_a_daemon_thread_a_store_is_closed_when_the_main_thread_ended(kind: str, tmp_path: Path) -> None:
    """The thread may be within an append; a commit then named rows that were not written, and left a damaged file."""
    place = f"file://{tmp_path}/d" if kind == "file" else f"{tmp_path}/d.{kind}"
    tdstore.TensorDict({"a": torch.zeros(4, 3)}, [4]).save(place).close()
    done = scripts.run(BESIDE_A_DAEMON, place)
    assert (done.status, done.errors, done.output) == (0, "", "closed\n")
    with tdstore.open(place) as td:
        assert td["a"][:, 0].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("kind", ["memmap", "h5", "zarr", "tdz"])
def test_an_exit_hook_opens_again_what_was_open(kind: str, tmp_path: Path) -> None:
    place = f"{tmp_path}/d.{kind}"
    tdstore.TensorDict({"a": torch.zeros(4, 3)}, [4]).save(place).close()
    done = scripts.run(OPENED_BEFORE_A_HOOK, place, "last", "opens again")
    assert (done.status, done.errors) == (0, "")
    with tdstore.open(place) as td:
        assert td["a"][:, 0].tolist() == [1, 0, 1, 0]


def test_the_end_of_a_process_of_multiprocessing(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"""
import multiprocessing
from tdstore.lifetime import Ending

def work(method):
    Ending(None, lambda: open({str(tmp_path / "done")!r}, "a").write(method + " "), "a place")

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=work, args=[method])
        process.start()
        process.join()
""")
    done = scripts.run_file(program, warnings="ignore")
    assert (done.status, done.errors) == (0, "")
    assert (tmp_path / "done").read_text() == "fork spawn forkserver "


FORK_BESIDE_A_COMMIT = """
import faulthandler
faulthandler.dump_traceback_later(60, exit=True)
import os, sys, threading, time
import torch
from tdstore import TensorDict
from tdstore.lifetime import Ending
TensorDict(a=torch.ones(2)).save(sys.argv[1]).close()  # imports h5py, after tdstore.lifetime
import h5py
class Owner:
    pass
begun = threading.Event()
def action():
    begun.set()
    time.sleep(0.5)
    h5py.h5p.create(h5py.h5p.FILE_ACCESS).close()  # takes h5py's lock, as each commit of a dataset does
owner = Owner()
Ending(owner, action, "a place")
del owner
assert begun.wait(200)
child = os.fork()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("forked")
"""


def test_a_fork_beside_a_commit_that_needs_the_lock_of_h5py(tmp_path: Path) -> None:
    """A fork waits for the commit, and must not hold what the commit needs."""
    done = subprocess.run(
        [*warm.python(), "-c", FORK_BESIDE_A_COMMIT, str(tmp_path / "a.h5")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "forked\n", done.stderr


def test_live_objects_are_listed_while_another_thread_changes_them() -> None:
    found: lifetime.LiveObjects[Owner] = lifetime.LiveObjects()
    owners = [Owner() for _ in range(50)]
    for owner in owners:
        found.add(owner)
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            other = Owner()
            found.add(other)
            found.discard(other)
            found.add(Owner())

    thread = threading.Thread(target=come_and_go)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(2000):
            assert owners == [owner for owner in found if owner in owners]
    finally:
        sys.setswitchinterval(before)
        ended.set()
        thread.join()
    assert list(found) == owners
    assert len(found) == 50 and owners[0] in found and Owner() not in found
    del owner
    owners.clear()
    gc.collect()
    assert list(found) == []
