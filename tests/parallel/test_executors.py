"""`map` over executors of others: threads, processes, loky, dask; and one that behaves as those of ray and MPI do."""

from __future__ import annotations

import gc
import multiprocessing.dummy
import threading
import weakref
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest
import torch

import tdstore
from tdstore import TensorDict
from tdstore.errors import WorkerDiedError
from tdstore.parallel.executors import width_of

from . import work


def rows(n=20):
    return TensorDict({"a": torch.arange(float(n)), "n": {"b": torch.zeros(n, 2)}}, [n])


@pytest.fixture(scope="module")
def dask():
    distributed = pytest.importorskip("distributed", reason="make dev installs it")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor()


@pytest.fixture(scope="module")
def loky():
    pytest.importorskip("loky", reason="make dev installs it")
    import loky

    made = loky.ProcessPoolExecutor(2)
    yield made
    made.shutdown(wait=True, kill_workers=True)


class Foreign(Executor):
    """Pickles what it is sent with plain pickle, and runs it in a thread: as an executor on another machine would."""

    def __init__(self):
        self.inner = ThreadPoolExecutor(2)
        self.sizes = []

    def submit(self, fn, /, *args, **kwargs):
        import pickle

        data = pickle.dumps((fn, args, kwargs))
        self.sizes.append(len(data))

        def run():
            fn, args, kwargs = pickle.loads(data)
            return fn(*args, **kwargs)

        return self.inner.submit(run)


@pytest.fixture(params=["threads", "processes", "foreign", "loky", "dask"])
def executor(request):
    if request.param in ("loky", "dask"):
        yield request.getfixturevalue(request.param)
    elif request.param == "foreign":
        made = Foreign()
        yield made
        made.inner.shutdown()
    else:
        kind = ThreadPoolExecutor(2) if request.param == "threads" else None
        with kind or ProcessPoolExecutor(2, mp_context=get_context("fork")) as made:
            yield made


def test_any_executor(executor, tmp_path):
    td = rows()
    assert (td.map(work.plus_one, executor=executor, chunksize=6) == td + 1).all()
    assert td.map(lambda x: x["a"] * 3, executor=executor, chunksize=6).tolist() == [3.0 * i for i in range(20)]
    assert [len(r) for r in td.map_iter(work.first_leaf, executor=executor, chunksize=6)] == [6, 6, 6, 2]
    shuffled = torch.cat(list(td.map_iter(work.first_leaf, executor=executor, chunksize=6, shuffle=True)))
    assert sorted(shuffled.tolist()) == [2.0 * i for i in range(20)]
    assert (td.map(work.plus_one, executor=executor, chunksize=0) == td + 1).all()
    with pytest.raises(ValueError, match="five"):
        td.map(work.value_error_at_five, executor=executor, chunksize=2)

    for name in ("x.h5", "x"):
        td.save(tmp_path / name).close()
        with tdstore.open(tmp_path / name) as stored:
            assert (stored.map(work.plus_one, executor=executor, chunksize=6) == td + 1).all()
    rows().apply(torch.zeros_like).save(tmp_path / "out").close()
    with tdstore.open(tmp_path / "out", mode="r+") as out, tdstore.open(tmp_path / "x.h5") as stored:
        assert stored.map(work.plus_one, executor=executor, chunksize=3, out=out) is out
    with tdstore.open(tmp_path / "out", verify="full") as out:
        assert (out == td + 1).all()
    assert executor.submit(int, 3).result() == 3  # it was not shut down


def test_an_anonymous_store_goes_by_value_where_it_cannot_be_sent():
    td, out = rows().save(storage="shared"), rows().save(storage="shared")
    far = Foreign()
    assert (td.map(work.plus_one, executor=far, out=out, chunksize=6) == rows() + 1).all()
    far.inner.shutdown()
    td.close()
    out.close()


def test_tasks_are_small_where_the_source_is_stored(tmp_path):
    TensorDict({"a": torch.zeros(200_000)}, [200_000]).save(tmp_path / "big.h5").close()
    far = Foreign()
    with tdstore.open(tmp_path / "big.h5") as td:
        td.map(work.nothing, executor=far, num_workers=4)
    far.inner.shutdown()
    assert len(far.sizes) == 4
    assert max(far.sizes) < 3000


def test_a_module_that_workers_lack_is_told(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def double(td):\n    return td + td\n")
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as own:
        own.submit(int).result()  # it has started, and does not see the folder
        monkeypatch.syspath_prepend(str(tmp_path))
        import only_here

        with pytest.raises(ModuleNotFoundError, match="only_here"):
            rows().map(only_here.double, executor=own)
        assert (rows().map(work.plus_one, executor=own) == rows() + 1).all()


def test_threads_share_the_memory_of_the_source():
    td = rows()
    with ThreadPoolExecutor(2) as threads:
        td.map(work.change_in_place, executor=threads)
    assert td["a"].tolist() == [100.0 + i for i in range(20)]


def test_a_killed_process_of_a_given_executor():
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as own:
        with pytest.raises(WorkerDiedError):
            rows().map(work.killed, chunksize=1, executor=own)
        with pytest.raises(WorkerDiedError):
            rows().map(work.plus_one, executor=own)


def test_the_death_of_a_worker_as_dask_and_ray_tell_it():
    for name in ("KilledWorker", "ActorDiedError"):
        error = type(name, (Exception,), {})("it is gone")

        class Deadly(Executor):
            def submit(self, fn, /, *args, error=error, **kwargs):
                future: Future = Future()
                future.set_exception(error)
                return future

        with pytest.raises(WorkerDiedError, match="it is gone"):
            rows().map(work.plus_one, executor=Deadly(), num_workers=1)


@pytest.mark.parametrize("kind", ["torch", "threads"])
def test_other_pools(kind):
    if kind == "torch":
        made = torch.multiprocessing.get_context("fork").Pool(2)
    else:
        made = multiprocessing.dummy.Pool(2)
    with made as pool:
        assert (rows().map(work.plus_one, pool=pool, chunksize=6) == rows() + 1).all()


def test_an_error_of_the_executor_itself_is_passed_on():
    class Broken(Executor):
        def submit(self, fn, /, *args, **kwargs):
            future: Future = Future()
            future.set_exception(OSError("no network"))
            return future

    with pytest.raises(OSError, match="no network"):
        rows().map(work.plus_one, executor=Broken(), num_workers=1)


def test_how_many_workers_an_executor_has():
    with ThreadPoolExecutor(3) as threads:
        assert width_of(threads) == 3
        assert set(rows(9).map(work.lengths, executor=threads).tolist()) == {3}
        assert set(rows(8).map(work.lengths, executor=threads, num_workers=2).tolist()) == {4}


def test_not_all_chunks_are_sent_at_once():
    """A source larger than memory is cut as its chunks are worked on."""
    seen, most = [], []
    lock = threading.Lock()

    def look(td):
        with lock:
            seen.append(len(td))
        return td["a"]

    with ThreadPoolExecutor(2) as threads:
        results = rows(100).map_iter(look, executor=threads, chunksize=1)
        for _ in range(10):
            next(results)
            most.append(len(seen))
        results.close()
    assert max(most) <= 10 + 2 * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_task_holds_no_rows(workers):
    """They would stay in memory until Python looks for cycles."""
    td = rows()
    held = weakref.ref(td)
    gc.collect()
    gc.disable()
    try:
        try:
            td.map(work.key_error, num_workers=workers, chunksize=2)
        except KeyError as error:
            assert error.args == ("boom",)
        else:
            pytest.fail("the task did not fail")
        del td
        assert held() is None
    finally:
        gc.enable()


def test_errors_of_threads_hold_no_rows():
    """Those of all tasks: also of the ones that fail beside that whose error is raised."""
    td = rows()
    held = weakref.ref(td)
    gc.collect()
    gc.disable()
    try:
        with ThreadPoolExecutor(4) as threads:
            try:
                td.map(work.key_error, executor=threads, chunksize=2)
            except KeyError as error:
                assert error.args == ("boom",)
            else:
                pytest.fail("the task did not fail")
        del td
        assert held() is None
    finally:
        gc.enable()
