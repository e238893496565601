"""Named stores end with their owner, however it ends, and with nobody else."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time

import pytest
from shm_children import START, forked, made, python, rival, set_row

import tdstore
from tdstore.builtin.shared import named_files
from tdstore.builtin.shared.process import Process, alive, boot_id, this_process
from tdstore.builtin.shared.store import open_shared, sweep
from tdstore.errors import StoreNotFoundError
from tdstore.lifetime import settle
from tests import scripts
from tests.references import frees_its_caller


class Owner:
    """A forked process that ran `run`, keeps what it returned, and lives until it is killed."""

    def __init__(self, run):
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                kept = run()
                os.write(writing, b"ready")
                time.sleep(100)
            finally:
                os._exit(kept is not None)
        os.close(writing)
        assert os.read(reading, 5) == b"ready"
        os.close(reading)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.mark.parametrize("end", ["s.close()", "1 / 0"])
def test_a_normal_end_removes(shm, end):
    done = scripts.run(f"{START}import os\ns = made('shm://x')\nassert os.listdir({shm!r})\n{end}")
    assert done.status == ("0" in end) and ("ZeroDivisionError" in done.errors) == ("0" in end)
    assert os.listdir(shm) == []


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_the_end_of_a_multiprocessing_child_removes(shm, how):
    child = multiprocessing.get_context(how).Process(target=made, args=("shm://x",))
    child.start()
    child.join(200)
    assert child.exitcode == 0
    assert os.listdir(shm) == []


def test_closing_does_not_remove(shm):
    made("shm://x", 4.0).close()
    assert open_shared("shm://x", mode="r").view(("a",)).tolist() == [4.0] * 4


def test_users_never_remove(shm):
    store = made("shm://x")
    assert forked(lambda: sys.exit(0)) == 0
    python("s = open_shared('shm://x', mode='r+'); set_row(s, 0, 1.0); import os; os.fork()")
    child = multiprocessing.get_context("fork").Process(target=store.close)
    child.start()
    child.join(200)
    assert len(os.listdir(shm)) == 1
    assert open_shared("shm://x", mode="r").view(("a",))[0] == 1.0


def test_a_killed_owner_is_swept(shm):
    process = Owner(lambda: (made("shm://x"), open_shared("shm://unsaved")))
    assert len(os.listdir(shm)) == 2 and sweep() == []
    reader = open_shared("shm://x", mode="r")
    process.kill()
    with pytest.raises(StoreNotFoundError, match="as long as the process that made it"):
        open_shared("shm://x", mode="r+")
    assert len(sweep()) == 2
    assert os.listdir(shm) == []
    assert reader.view(("a",)).tolist() == [0.0] * 4


def test_a_forked_child_does_not_keep_a_killed_owner_alive(shm):
    reading, writing = os.pipe()

    def fork_again():
        store = made("shm://x")
        child = os.fork()
        if child == 0:
            time.sleep(100)
            os._exit(0)
        os.write(writing, str(child).encode())
        return store

    process = Owner(fork_again)
    child = int(os.read(reading, 20))
    os.close(reading), os.close(writing)
    try:
        process.kill()
        with pytest.raises(StoreNotFoundError):
            open_shared("shm://x", mode="r")
        sweep()  # the first use of shared memory in this process may have swept already
        assert os.listdir(shm) == []
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_first_use_of_a_process_sweeps(shm):
    Owner(lambda: (made("shm://x"), open_shared("shm://y"))).kill()
    assert len(os.listdir(shm)) == 2
    done = python(f"import os; s = made('shm://z'); print(os.listdir({shm!r}))")
    assert done.stdout == f"['tds.{os.geteuid()}.z']\n", done.stderr
    assert os.listdir(shm) == []


def test_names_of_dead_owners_are_free(shm):
    process = Owner(lambda: made("shm://x"))
    process.kill()
    assert made("shm://x", 2.0, mode="x").view(("a",))[0] == 2.0
    process = Owner(lambda: made("shm://y"))
    process.kill()
    assert made("shm://y", 3.0, mode="a").view(("a",))[0] == 3.0


def test_a_later_process_with_the_same_pid_is_another(shm):
    me = this_process()
    assert alive(me)
    assert not alive(me._replace(start=me.start - 1))
    assert alive(me._replace(namespace=1))  # cannot be told from here
    assert not alive(Process(2**22 + 5, 1, me.namespace))
    boot = boot_id().hex()[:8]
    kept = {f"tds_{boot}_{me.pid}_{me.start}_99"}
    gone = {f"tds_{boot}_{me.pid}_{me.start - 1}_0", f"tds_00000000_{me.pid}_{me.start}_0"}
    for name in kept | gone:
        open(f"{shm}/{name}", "w").close()
    assert set(sweep()) == gone
    assert set(os.listdir(shm)) == kept


def test_a_zombie_is_dead():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    child = None
    for _ in range(1000):
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
        child = Process(pid, int(fields[19]), this_process().namespace)
        if fields[0] == "Z":
            break
        time.sleep(0.001)
    assert not alive(child)
    os.waitpid(pid, 0)


def test_files_of_others_are_not_swept(shm):
    for name in ("sem.x", f"tds.{os.geteuid()}.notours", "tds_", "tds_x_1_2_3", "tds.999999.x", "torch_1_2"):
        with open(f"{shm}/{name}", "w") as f:
            f.write("x" * 100)
    os.mkdir(f"{shm}/tds.{os.geteuid()}.folder")
    os.symlink("/etc/hostname", f"{shm}/tds.{os.geteuid()}.link")
    os.mkfifo(f"{shm}/tds.{os.geteuid()}.pipe")
    before = set(os.listdir(shm))
    assert sweep() == []
    assert set(os.listdir(shm)) == before


def test_saving_one_name_again_and_again_leaks_nothing(shm):
    made("shm://x")
    gc.collect()
    before, owned = len(os.listdir("/proc/self/fd")), len(named_files._owned)  # other tests' too
    for i in range(300):
        made("shm://x", float(i)).close()
        open_shared("shm://x", mode="r").close()
        open_shared().close()
    gc.collect()
    settle()
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    assert len(os.listdir(shm)) == 1
    assert len(named_files._owned) < owned + 20
    assert open_shared("shm://x", mode="r").view(("a",))[0] == 299.0


def test_one_of_many_rivals_creates(shm):
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(6), context.Queue()
    rivals = [context.Process(target=rival, args=("shm://x", barrier, answers)) for _ in range(6)]
    for process in rivals:
        process.start()
    found = [answers.get(timeout=200) for _ in rivals]
    for process in rivals:
        process.join(200)
    assert sorted(kind for kind, _ in found) == ["StoreExistsError"] * 5 + ["made"]
    assert os.listdir(shm) == []


def test_the_owner_of_a_replaced_store_does_not_remove_its_successor(shm):
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()

    def own():
        store = made("shm://x", 1.0)
        ready.set()
        assert end.wait(200) and store.view(("a",))[0] == 1.0

    child = context.Process(target=own)
    child.start()
    assert ready.wait(200)
    mine = made("shm://x", 2.0)
    end.set()
    child.join(200)
    assert child.exitcode == 0
    assert open_shared("shm://x", mode="r").view(("a",))[0] == 2.0
    set_row(mine, 0, 3.0)
    assert open_shared("shm://x", mode="r").view(("a",))[0] == 3.0


def test_a_place_that_is_not_there_holds_nothing():
    """The error would hold the frames of its callers, until Python looks for cycles."""
    assert frees_its_caller(lambda: tdstore.open("shm://none-of-that-name"), StoreNotFoundError)
