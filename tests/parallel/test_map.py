"""`map` and `map_iter` on memory: chunks, results, errors, and the workers' state."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import platform
import sys
import threading
import time
import warnings

import pytest
import torch

import tdstore
from tdstore import NonTensorStack, TensorDict
from tdstore.errors import WorkerDiedError
from tdstore.parallel import executors
from tdstore.parallel.executors import cpus

from . import work


@pytest.fixture(scope="module")
def pool():
    with multiprocessing.get_context("fork").Pool(2) as made:
        yield made


@pytest.fixture(autouse=True)
def no_process_is_left(pool):
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


def rows(n=10, **kwargs):
    return TensorDict({"a": torch.arange(float(n)), "n": {"b": torch.zeros(n, 2)}}, [n], **kwargs)


FORK = {"num_workers": 2, "mp_start_method": "fork"}


# -- chunks ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        ({}, [5, 5]),
        ({"chunksize": 3}, [3, 3, 3, 1]),
        ({"num_chunks": 4}, [3, 3, 3, 1]),
        ({"num_chunks": 40}, [1] * 10),
        ({"chunksize": 20}, [10]),
    ],
)
def test_chunks_are_cut_as_the_peer_cuts_them(pool, sizes, chunks):
    expected = [n for n in chunks for _ in range(n)]
    assert rows().map(work.lengths, pool=pool, **sizes).tolist() == expected
    assert [len(r) for r in rows().map_iter(work.lengths, pool=pool, **sizes)] == chunks


@pytest.mark.parametrize("index_with_generator", [True, False])
def test_a_chunk_size_of_zero_gives_single_rows(pool, index_with_generator):
    td = rows()
    found = td.map(work.plus_one, chunksize=0, pool=pool, index_with_generator=index_with_generator)
    assert (found == td + 1).all()
    single = list(td.map_iter(work.lengths, chunksize=0, pool=pool))
    assert [tuple(r.shape) for r in single] == [()] * 10
    assert td.map(work.lengths, chunksize=0, pool=pool).tolist() == [-1] * 10


def test_another_dimension(pool):
    td = TensorDict({"a": torch.arange(24).view(4, 3, 2)}, [4, 3])
    assert (td.map(work.plus_one, 1, pool=pool, chunksize=2) == td + 1).all()
    assert (td.map(work.plus_one, -1, pool=pool, chunksize=0) == td + 1).all()
    assert [tuple(r.batch_size) for r in td.map_iter(work.plus_one, 1, pool=pool, chunksize=2)] == [(4, 2), (4, 1)]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"chunksize": 1, "num_chunks": 1}, ValueError),
        ({"chunksize": -1}, ValueError),
        ({"num_chunks": 0}, ValueError),
        ({"num_workers": -1}, ValueError),
        ({"dim": 1}, IndexError),
        ({"mp_start_method": "bogus"}, ValueError),
        ({"pool": object(), "executor": object()}, ValueError),
    ],
)
def test_arguments_out_of_range(arguments, error):
    with pytest.raises(error):
        rows().map(work.plus_one, **arguments)
    with pytest.raises(error):
        list(rows().map_iter(work.plus_one, **arguments))


def test_no_batch_dimension():
    with pytest.raises(IndexError):
        TensorDict({"a": torch.zeros(())}).map(work.plus_one)


def test_an_empty_dimension_gives_an_empty_result():
    found = rows(0).map(work.key_error)
    assert found.batch_size == (0,)
    assert set(found.keys()) == {"a", "n"}
    assert list(rows(0).map_iter(work.key_error)) == []


# -- results -----------------------------------------------------------------------------------
def test_results_of_every_kind(pool):
    td = rows()
    assert (td.map(work.plus_one, chunksize=3, pool=pool) == td + 1).all()
    assert td.map(work.first_leaf, chunksize=3, pool=pool).tolist() == [2.0 * i for i in range(10)]
    assert td.map(work.nothing, pool=pool) is None
    assert list(td.map_iter(work.nothing, chunksize=5, pool=pool)) == [None, None]
    assert td.map(work.doubled_rows, chunksize=4, pool=pool)["a"].tolist() == (
        [0, 1, 2, 3] * 2 + [4, 5, 6, 7] * 2 + [8, 9] * 2
    )
    assert list(td.map_iter(work.a_string, chunksize=5, pool=pool)) == ["x", "x"]
    for wrong in (work.a_string, work.now_and_then):
        with pytest.raises(TypeError, match="for all rows"):
            td.map(wrong, chunksize=5, pool=pool)


def test_names_values_and_devices_travel(pool):
    td = rows(4, names=["t"], device="cpu")
    td["s"] = NonTensorStack("p", "q", "r", "s")
    td["one"] = "hello"
    found = td.map(work.names_and_values, chunksize=2, pool=pool)
    assert (found["s"], found["one"], found.device) == (["p", "q", "r", "s"], "hello", torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool, torch.uint16, torch.float8_e5m2])
def test_every_dtype_travels(pool, dtype):
    td = TensorDict({"a": torch.arange(6).to(dtype), "e": torch.zeros(6, 0, dtype=dtype)}, [6])
    found = td.map(_same, chunksize=4, pool=pool)
    assert found["a"].dtype == dtype
    assert torch.equal(found["a"].view(torch.uint8), td["a"].view(torch.uint8))
    assert found["e"].shape == (6, 0)


def _same(td):
    return td


def test_lambdas_travel_with_cloudpickle(pool):
    pytest.importorskip("cloudpickle")
    bias = 3
    assert rows().map(lambda td: td["a"] + bias, pool=pool).tolist() == [i + 3.0 for i in range(10)]


def test_without_cloudpickle_a_lambda_is_refused_in_words(pool, monkeypatch):
    monkeypatch.setattr("tdstore.parallel.byvalue._cloud_pickler", lambda: None)
    with pytest.raises(TypeError, match="pip install cloudpickle"):
        rows().map(lambda td: td, pool=pool)


def test_chunks_are_copies_wherever_they_go(pool):
    td = rows()
    td.map(work.change_in_place, pool=pool)
    assert td["a"].tolist() == list(range(10))
    assert not td["a"].is_shared()


def test_a_lazy_stack(pool):
    lazy = tdstore.LazyStackedTensorDict(*[rows(3) for _ in range(4)])
    found = lazy.map(work.plus_one, chunksize=3, pool=pool)
    assert found["a"].tolist() == [[1, 2, 3]] * 4


# -- out ---------------------------------------------------------------------------------------
def test_out_is_filled_in_place_and_returned(pool):
    td, out = rows(), rows()
    before = out["a"].data_ptr()
    assert td.map(work.plus_one, out=out, chunksize=3, pool=pool) is out
    assert (out == td + 1).all()
    assert out["a"].data_ptr() == before


def test_out_may_be_longer_than_the_source_and_a_tensor(pool):
    out = torch.zeros(10)
    assert rows().map(work.first_leaf, out=out, chunksize=3, pool=pool) is out
    assert out.tolist() == [2.0 * i for i in range(10)]
    longer = rows(20)
    rows().map(work.doubled_rows, out=longer, chunksize=5, pool=pool)
    assert longer["a"].tolist() == [*range(5)] * 2 + [*range(5, 10)] * 2


@pytest.mark.parametrize("n", [8, 12])
def test_out_of_another_length_is_refused(pool, n):
    with pytest.raises(ValueError, match=f"`out` has {n} rows"):
        rows().map(work.plus_one, out=rows(n), chunksize=3, pool=pool)


def test_a_key_that_out_lacks_is_an_error(pool):
    with pytest.raises(KeyError, match="'z'"):
        rows().map(work.other_key, out=rows(), pool=pool)


# -- errors ------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", [{"num_workers": 0}, FORK, {**FORK, "max_tasks_per_child": 1}], ids=str)
def test_errors_keep_their_type(where):
    with pytest.raises(KeyError, match="boom") as caught:
        rows().map(work.key_error, **where)
    if where["num_workers"]:
        assert "in key_error" in caught.value.__notes__[0]  # the worker's traceback
    with pytest.raises(ValueError, match="five"):
        list(rows().map_iter(work.value_error_at_five, chunksize=1, **where))


def test_an_error_that_cannot_be_pickled_is_told():
    # Where a library has taught pickle more about exceptions (dask's does), it arrives as it is.
    with pytest.raises((RuntimeError, work.Odd), match="1 2"):
        rows().map(work.odd_error, **FORK)


def test_a_result_that_cannot_be_pickled_is_told():
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        list(rows().map_iter(work.unpicklable, **FORK))


@pytest.mark.parametrize(
    ("end", "how"),
    # One that ends by itself, with 0, is what max_tasks_per_child asks for.
    [(work.killed, FORK), (work.leaves_quietly, FORK), (work.killed, {**FORK, "max_tasks_per_child": 5})],
    ids=["killed", "left", "killed in a pool"],
)
def test_a_worker_that_dies_is_an_error_and_not_a_hang(end, how):
    with pytest.raises(WorkerDiedError, match="ended before") as caught:
        rows().map(end, chunksize=1, **how)
    assert "num_workers=0" in caught.value.hint


@pytest.mark.parametrize("end", [work.killed, work.leaves_quietly])
def test_a_given_pool_whose_worker_dies_does_not_hang_either(end):
    with multiprocessing.get_context("fork").Pool(2) as own:
        with pytest.raises(WorkerDiedError, match=r"ended (by signal 9|with exit code 0)"):
            rows().map(end, chunksize=1, pool=own)


def test_an_iterator_that_is_left_ends_its_workers():
    results = rows(50).map_iter(work.plus_one, chunksize=1, **FORK)
    next(results)
    assert len(multiprocessing.active_children()) > 0
    results.close()  # the fixture looks whether they are gone


# -- workers -----------------------------------------------------------------------------------
def test_seeds_come_from_the_generator():
    base = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(7)))
    found = rows(8).map(work.seeds, chunksize=1, generator=torch.Generator().manual_seed(7), **FORK)
    by_process = dict(zip(found["pid"].tolist(), found["seed"].tolist(), strict=True))
    assert sorted(by_process.values()) == [base + k for k in range(len(by_process))]


def test_replaced_workers_have_streams_of_their_own():
    found = rows(4).map(work.seeds, chunksize=1, max_tasks_per_child=1, **FORK)
    assert len(set(found["seed"].tolist())) == len(set(found["pid"].tolist())) == 4


def test_the_state_of_this_process_is_left_alone():
    before = torch.random.get_rng_state(), torch.get_num_threads()
    rows().map(work.plus_one, generator=torch.Generator().manual_seed(0), worker_threads=2, **FORK)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


def test_worker_threads():
    assert set(rows().map(work.threads, worker_threads=3, **FORK).tolist()) == {3}
    assert set(rows().map(work.threads, **FORK).tolist()) == {1}


def test_no_worker_at_all():
    import os

    assert set(rows().map(work.pids, num_workers=0).tolist()) == {os.getpid()}
    assert rows().map(lambda td: td["a"], num_workers=0).tolist() == list(range(10))


def test_not_more_processes_than_chunks():
    found = rows(6).map(work.pids, num_workers=8, chunksize=3, mp_start_method="fork")
    assert len(set(found.tolist())) <= 2


def test_one_worker_per_cpu_by_default():
    found = rows(4 * cpus()).map(work.lengths, mp_start_method="fork")
    assert set(found.tolist()) == {4}


def test_what_a_given_pool_decides_is_told(pool):
    with pytest.warns(UserWarning, match="num_workers, generator, mp_start_method ignored"):
        rows().map(work.plus_one, num_workers=3, generator=torch.Generator(), mp_start_method="fork", pool=pool)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_ways_to_start(method):
    td = rows()
    assert (td.map(work.plus_one, num_workers=2, chunksize=3, mp_start_method=method) == td + 1).all()


# -- order and progress ------------------------------------------------------------------------
def test_shuffled_rows_come_once_each(pool):
    found = torch.cat(list(rows(40).map_iter(work.first_leaf, chunksize=7, shuffle=True, pool=pool)))
    assert sorted(found.tolist()) == [2.0 * i for i in range(40)]
    assert found.tolist() != [2.0 * i for i in range(40)]


def test_a_generator_decides_the_shuffle():
    def run():
        made = rows(30).map_iter(
            _same, shuffle=True, chunksize=30, num_workers=0, generator=torch.Generator().manual_seed(3)
        )
        return next(iter(made))["a"].tolist()

    assert run() == run()
    with pytest.raises(RuntimeError, match="index_with_generator"):
        rows().map_iter(_same, shuffle=True, index_with_generator=False)


def test_a_progress_bar_counts_chunks(pool, capsys):
    pytest.importorskip("tqdm")
    rows().map(work.plus_one, chunksize=3, pbar=True, pool=pool)
    assert "4/4" in capsys.readouterr().err


def test_without_tqdm_the_missing_bar_is_told(pool, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr("tdstore.parallel.executors.importlib.util.find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="pip install tqdm"):
        rows().map(work.plus_one, pbar=True, pool=pool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows().map(work.plus_one, pool=pool)


def lost_exitcode(worker):
    """The exit code of a worker that other code of the program waits for: there is none."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(worker.pid, os.WNOHANG)


def test_a_pool_ends_though_other_code_waits_for_its_workers(monkeypatch):
    monkeypatch.setattr(executors, "_PATIENCE_SECONDS", 0.3)
    pool = multiprocessing.get_context("fork").Pool(2)
    pool._outqueue._wlock.acquire()
    monkeypatch.setattr(type(pool._pool[0]), "exitcode", property(lost_exitcode))
    done = threading.Thread(target=executors._terminate, args=(pool,), daemon=True)
    done.start()
    done.join(200)
    assert not done.is_alive()
    for worker in multiprocessing.active_children():  # multiprocessing would never learn that they are gone
        worker._popen.returncode = -9


def test_a_pool_ends_though_a_worker_was_killed_as_it_wrote_a_result(monkeypatch):
    monkeypatch.setattr(executors, "_PATIENCE_SECONDS", 0.3)
    pool = multiprocessing.get_context("fork").Pool(2)
    workers = list(pool._pool)
    pool._outqueue._wlock.acquire()  # as such a worker leaves it
    executors._terminate(pool)
    pool.join()
    assert all(worker.exitcode is not None for worker in workers)


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or sys.maxsize < 2**32, reason="knows the semaphores of glibc")
def test_a_lock_of_a_killed_process_is_freed_and_its_waiter_wakes(value):
    """The process held the lock (0), or was woken to take it (1)."""
    lock = multiprocessing.get_context("fork").Lock()
    lock.acquire()
    waiter = threading.Thread(target=lock.acquire, daemon=True)
    waiter.start()
    time.sleep(0.3)  # it sleeps by now
    ctypes.c_uint32.from_address(lock._semlock.handle).value = value
    executors._free(lock)
    waiter.join(30)
    assert not waiter.is_alive()
