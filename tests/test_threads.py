"""What needs threads, in a thread and in an exit hook that outlive the main thread: no other can start there."""

from __future__ import annotations

import gc
import signal
import weakref
from pathlib import Path

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.threads import ThreadPool, without_interrupts
from tests import scripts

LATE = """
import atexit, sys, threading, torch, tdstore
import h5py  # where a hook is the first to import it, it crashes when the process ends
from tdstore import TensorDict
from tdstore.data import Epochs

def work():
    if sys.argv[1] == "thread":
        threading.main_thread().join()
    place, copy, new = sys.argv[2:]
    assert sum(len(batch) for batch in Epochs(place, 2, prefetch=2)) == 4
    with tdstore.concat([place, place]) as td:
        assert td.read(torch.tensor([1, 6]))["a"].tolist() == [1, 2]
    tdstore.copy(place, copy)
    TensorDict({"a": torch.ones(3)}, [3]).save(new).close()
    with tdstore.open(new, "r+") as td:
        td.append({"a": 2.0})
    print("done")

if sys.argv[1] == "thread":
    threading.Thread(target=work).start()
else:
    atexit.register(work)
"""


@pytest.mark.parametrize("where", ["thread", "hook"])
@pytest.mark.parametrize("kind", ["memmap", "h5", "zarr", "file"])
def test_datasets_after_the_end_of_the_main_thread(kind: str, where: str, tmp_path: Path) -> None:
    places = [f"file://{tmp_path}/{name}" if kind == "file" else f"{tmp_path}/{name}.{kind}" for name in "pcn"]
    TensorDict({"a": torch.arange(4.0)}, [4]).save(places[0]).close()
    done = scripts.run(LATE, where, *places)
    assert (done.status, done.output, done.errors) == (0, "done\n", "")
    for place, want in zip(places, [[0, 1, 2, 3], [0, 1, 2, 3], [1, 1, 1, 2]], strict=True):
        with tdstore.open(place) as td:
            assert td["a"].tolist() == want


def test_a_task_that_runs_in_the_caller_fails_in_its_future() -> None:
    pool = ThreadPool(1)
    pool.shutdown()  # as at the end of the main thread
    assert pool.submit(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 7, 0).result()


def test_an_error_in_the_thread_of_the_caller_refers_to_no_frame_that_keeps_it() -> None:
    class Sentinel:
        pass

    def fail(sentinel: Sentinel) -> None:
        raise ValueError("no")

    pool = ThreadPool(1)
    pool.shutdown()
    sentinel = Sentinel()
    known = weakref.ref(sentinel)
    gc.collect()
    gc.disable()
    try:
        assert str(pool.submit(fail, sentinel).exception()) == "no"
        del sentinel
        assert known() is None
    finally:
        gc.enable()


def test_an_interrupt_waits_for_the_end_of_a_step_and_a_second_one_does_not() -> None:
    done: list[int] = []

    @without_interrupts
    def work(interrupts: int) -> None:
        for number in range(interrupts):
            signal.raise_signal(signal.SIGINT)
            done.append(number)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for interrupts in (1, 2):
            done.clear()
            with pytest.raises(KeyboardInterrupt):
                work(interrupts)
            assert done == [0]
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        work(0)
    finally:
        signal.signal(signal.SIGINT, before)
