"""Workers behind one interface: new processes, a pool of the caller, any `concurrent.futures.Executor`."""

from __future__ import annotations

import importlib.util
import multiprocessing
import multiprocessing.pool
import os
import random
import socket
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from typing import Any, Protocol

import numpy as np
import torch

from tdstore.errors import WorkerDiedError
from tdstore.parallel.byvalue import Packed, plain
from tdstore.parallel.failures import Failure

_POLL_SECONDS = 0.5
"""Interval for checking whether a worker of a pool died, in seconds."""
_PATIENCE_SECONDS = 5.0
"""Time that the end of a pool may take before its workers are killed, in seconds."""
_IN_FLIGHT = 2
"""Number of submitted tasks per worker: one that runs and one that waits."""
_DASK = "distributed.cfexecutor"
"""The module of the executor of dask."""
_LOSSES = 3
"""How often a task whose result dask lost is submitted again."""
_DEATHS = frozenset({"KilledWorker", "ActorDiedError", "WorkerCrashedError"})
"""Names of the errors of dask and ray for a dead worker; their classes are not imported."""
_shared_objects: dict[str, Any] = {}
"""In a worker process of `crew_for`: the objects that all tasks share."""


# -- in the worker -----------------------------------------------------------------------------
def here() -> tuple[str, int]:
    """Return the identity of this process, among all machines."""
    return socket.gethostname(), os.getpid()


def _start(counter: Any, seed: int, threads: int, shared: dict[str, Any]) -> None:
    """Initialise a worker: its own random seed, its number of threads, the objects that all tasks share."""
    with counter.get_lock():
        number = counter.value
        counter.value += 1
    own = (seed + number) % 2**63
    torch.manual_seed(own)
    np.random.seed(own % 2**32)
    random.seed(own)
    torch.set_num_threads(threads)
    _shared_objects.update(shared)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when the process that started it was killed: it would wait for tasks for ever.

    Forked workers hold each other's ends of pipes, so only the parent's number tells them; workers of a forkserver
    have that server as their parent, so only their pipe does.
    """
    parent, number = multiprocessing.parent_process(), os.getppid()
    while parent is not None and parent.is_alive() and os.getppid() == number:
        parent.join(_POLL_SECONDS)
    if parent is not None:
        os._exit(1)


class SharedObject:
    """The name of an object that `_start` received."""

    __slots__ = ("key",)

    def __init__(self, key: str) -> None:
        self.key = key


def call(fn: Any, task: Any, origin: tuple[str, int]) -> object:
    """Run one task. Its error is returned as a `Failure`, since executors treat raised errors in different ways."""
    try:
        if type(fn) is SharedObject:
            key = fn.key
            fn = _shared_objects[key] = plain(_shared_objects[key])
        result = plain(fn)(task)
        if here() == origin:
            return result
        packed = Packed(result)
        packed.data()  # a result that cannot be sent is an error of this task
        return packed
    except Exception as error:
        return error_of(error, origin)


def error_of(error: Exception, origin: tuple[str, int]) -> Failure:
    """Wrap the error of a task; in the process of the caller the exception is unchanged."""
    return Failure(error) if here() == origin else Failure.of(error)


# -- executors ---------------------------------------------------------------------------------
class InlineExecutor(Executor):
    """An executor that runs each call when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the call, and return a finished future."""
        return _future_of(fn(*args, **kwargs))  # a future here would be held by the traceback of an error that it holds


def _future_of(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class PoolExecutor(Executor):
    """An executor over a pool with `apply_async`: of multiprocessing, torch.multiprocessing, ray, ..."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self._known: dict[int, Any] = {}
        self.dead()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit the call to the pool."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self.pool.apply_async(fn, args, kwargs, callback=future.set_result, error_callback=future.set_exception)
        return future

    def dead(self) -> str | None:
        """Return the cause of a worker's death. Pools replace dead workers silently, and their tasks get no result.

        In pools whose workers end after a number of tasks, exit code 0 is not a death.
        """
        workers = getattr(self.pool, "_pool", None)
        for worker in list(workers) if isinstance(workers, list) else ():
            if hasattr(worker, "exitcode"):
                self._known[id(worker)] = worker
        retire = getattr(self.pool, "_maxtasksperchild", None) is not None
        for key, worker in list(self._known.items()):
            code = worker.exitcode
            if code == 0 and retire:
                del self._known[key]
            elif code is not None:
                return f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        return None


class DaskExecutor(Executor):
    """An executor over that of dask, which submits a task again whose result was lost as it arrived.

    If the worker that had the result dies at that moment, dask runs the task again, but its executor does not wait for
    it: it takes the result for an error, and raises the `TypeError` of unpacking it. A task may run twice with dask.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit the call to dask."""
        outer: Future[Any] = Future()
        inner: list[Future[Any]] = []

        def begin() -> None:
            inner.append(self.executor.submit(fn, *args, **kwargs))
            inner[-1].add_done_callback(end)

        def end(future: Future[Any]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None and _is_lost_by_dask(error) and len(inner) <= _LOSSES and not outer.cancelled():
                try:
                    begin()
                    return
                except Exception as refused:  # of a client that was closed: a callback that raises ends no future
                    error = refused
            if future.cancelled():
                outer.cancel()
            elif outer.set_running_or_notify_cancel():
                if error is None:
                    outer.set_result(future.result())
                else:
                    outer.set_exception(error)

        begin()
        outer.add_done_callback(lambda _: inner[-1].cancel())
        return outer


def _is_lost_by_dask(error: BaseException) -> bool:
    """Check whether an error was raised by the executor itself: those of tasks have frames below it."""
    raised = error.__traceback__
    return type(error) is TypeError and raised is not None and raised.tb_next is None


class Crew:
    """An executor with its number of workers and the function that ends them.

    Args:
        executor: the executor of tasks.
        width: the number of tasks that run at once.
        close: ends the workers; its argument is whether all tasks succeeded.
        shared: the objects that the workers got at their start, by name.
    """

    def __init__(
        self,
        executor: Executor,
        width: int,
        close: Callable[[bool], None] | None = None,
        shared: dict[str, Any] | None = None,
    ) -> None:
        self.executor = executor
        self.width = width
        self._close = close
        self._shared = shared or {}

    def run(
        self, fn: Any, tasks: Iterable[Any], *, ordered: bool = True, done: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """Yield the results of `fn(task)`, with a bounded number of submitted tasks.

        Args:
            fn: the function, or its `Packed` form.
            tasks: its arguments, which are consumed as workers become free.
            ordered: whether results are in the order of tasks; else in the order in which they finish.
            done: called after each task.

        Raises:
            Exception: the error of `fn`, of its own type. WorkerDiedError: a worker ended before its task.
        """
        fn = SharedObject("fn") if "fn" in self._shared else fn
        origin = here()
        flying: deque[Future[Any]] = deque()
        most = 1 if isinstance(self.executor, InlineExecutor) else self.width * _IN_FLIGHT
        fine = False
        try:
            for task in tasks:
                if len(flying) >= most:
                    yield self._next(flying, ordered, done)
                flying.append(self._submit(fn, task, origin))
            while flying:
                yield self._next(flying, ordered, done)
            fine = True
        finally:
            for future in flying:
                if not future.cancel():
                    future.add_done_callback(_forget_error)
            if self._close is not None:
                self._close(fine)

    def _submit(self, fn: Any, task: Any, origin: tuple[str, int]) -> Future[Any]:
        try:
            return self.executor.submit(call, fn, task, origin)
        except BrokenExecutor as error:
            raise _died(str(error)) from error

    def _next(self, flying: deque[Future[Any]], ordered: bool, done: Callable[[], None] | None) -> Any:
        watched = [flying[0]] if ordered else list(flying)
        while not (finished := wait(watched, _POLL_SECONDS, FIRST_COMPLETED).done):
            how = self.executor.dead() if isinstance(self.executor, PoolExecutor) else None
            # Its result may have come just before its end.
            if how is not None and not wait(watched, _POLL_SECONDS, FIRST_COMPLETED).done:
                raise _died(f"it ended {how}")
        first = next(future for future in watched if future in finished)
        flying.remove(first)
        try:
            result = plain(first.result())
        except Exception as error:
            if isinstance(error, BrokenExecutor) or type(error).__name__ in _DEATHS:
                raise _died(str(error)) from error
            raise
        finally:
            del first, finished, watched  # they hold the error, whose traceback holds this frame
        if isinstance(result, Failure):
            result.reraise()
        if done is not None:
            done()
        return result


def _forget_error(future: Future[Any]) -> None:
    """Drop the error of a task whose result nobody asks for."""
    if not future.cancelled() and future.exception() is None and isinstance(result := future.result(), Failure):
        result.forget()


def _died(how: str) -> WorkerDiedError:
    return WorkerDiedError(
        f"a worker process ended before it had finished its task: {how}",
        hint="it was killed (out of memory?) or crashed; smaller chunks (chunksize=) or fewer workers "
        "(num_workers=) take less memory, and num_workers=0 runs fn in this process, where a debugger sees it",
    )


def crew_for(
    fn: Any,
    *,
    num_workers: int | None,
    most: int,
    pool: Any,
    executor: Any,
    generator: torch.Generator | None,
    max_tasks_per_child: int | None,
    worker_threads: int,
    start_method: str | None,
) -> Crew:
    """Create the workers that the arguments of `map` describe.

    Args:
        fn: the function that the workers run, in its `Packed` form.
        num_workers: the number of processes; 0 runs tasks in this process; default: one per CPU.
        most: the number of tasks, and so the largest number of workers.
        pool: a pool to use instead of new processes.
        executor: an executor to use instead of new processes.
        generator: draws the random seed of the workers.
        max_tasks_per_child: the number of tasks after which a worker is replaced.
        worker_threads: the number of threads of torch in each worker.
        start_method: of multiprocessing; default: that of the platform.

    Raises:
        ValueError: an unknown start method.
    """
    if executor is not None:
        width = num_workers or width_of(executor)
        return Crew(DaskExecutor(executor) if type(executor).__module__ == _DASK else executor, width)
    if pool is not None:
        return Crew(PoolExecutor(pool), width_of(pool))
    if num_workers == 0:
        return Crew(InlineExecutor(), 1)
    count = min(num_workers or cpus(), most)
    context = multiprocessing.get_context(start_method)
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))
    shared = {"fn": fn}
    if context.get_start_method() != "fork":
        fn.data()  # raises the error of a function that cannot be pickled before any process starts
    start = (context.Value("q", 0), seed, worker_threads, shared)
    if max_tasks_per_child is None:
        own = ProcessPoolExecutor(count, mp_context=context, initializer=_start, initargs=start)
        return Crew(own, count, lambda fine: own.shutdown(wait=True, cancel_futures=True), shared)
    # ProcessPoolExecutor cannot replace its workers under fork, and may hang where it does (python/cpython#115634).
    processes = context.Pool(count, _start, start, maxtasksperchild=max_tasks_per_child)

    def close(fine: bool) -> None:
        if fine:
            processes.close()
        else:
            _terminate(processes)
        processes.join()

    return Crew(PoolExecutor(processes), count, close, shared)


def _terminate(processes: Any) -> None:
    """End a pool's workers at once.

    A worker that is killed while it writes a result or reads a task never releases the lock of their queue, and
    `Pool.terminate()` waits for that lock for ever. Once all workers have ended, the lock is released here.
    """
    ender = threading.Thread(target=processes.terminate, daemon=True)
    ender.start()
    ender.join(_PATIENCE_SECONDS)
    while ender.is_alive():
        workers = list(processes._pool)
        for worker in workers:
            worker.kill()
        if all(_has_ended(worker) for worker in workers):
            for lock in (processes._inqueue._rlock, processes._outqueue._wlock):
                _free(lock)
        ender.join(_POLL_SECONDS)


def _free(lock: Any) -> None:
    """Release a lock that a killed process held, and wake a thread that waits for it.

    The lock may be free and its waiters asleep: a process that was woken to take it was killed before it did.
    """
    lock.acquire(block=False)
    lock.release()


def _has_ended(worker: Any) -> bool:
    """Check whether a worker process is gone. Its exit code is lost where other code of the program waited for it."""
    if worker.exitcode is not None:
        return True
    try:
        os.kill(worker.pid, 0)
    except ProcessLookupError:
        return True
    return False


def cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def width_of(workers: Any) -> int:
    """Return the number of tasks that a pool or an executor runs at once, or the number of CPUs if it is unknown."""
    for name in ("_max_workers", "num_workers", "_processes"):
        found = getattr(workers, name, None)
        if isinstance(found, int) and found > 0:
            return found
    client = getattr(workers, "_client", None)  # dask.distributed
    if client is not None and hasattr(client, "nthreads"):
        return max(1, sum(int(n) for n in client.nthreads().values()))
    return cpus()


def crosses_by_multiprocessing(workers: Any) -> bool:
    """Check whether a pool or an executor pickles with multiprocessing, which can also send open files."""
    pool = workers.pool if isinstance(workers, PoolExecutor) else workers
    return isinstance(pool, multiprocessing.pool.Pool) or type(pool) is ProcessPoolExecutor


class TaskBar(Protocol):
    """A progress bar over tasks."""

    def update(self, n: int = 1) -> object:
        """Count finished tasks."""

    def close(self) -> object:
        """Stop the display."""


def bar(total: int, wanted: bool) -> TaskBar | None:
    """Create a progress bar over tasks; None if not wanted or without tqdm."""
    if not wanted:
        return None
    if importlib.util.find_spec("tqdm") is None:
        warnings.warn("no progress bar: it needs tqdm (pip install tqdm)", stacklevel=3)
        return None
    from tqdm.auto import tqdm

    made: TaskBar = tqdm(total=total)
    return made
