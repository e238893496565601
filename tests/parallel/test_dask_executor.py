"""`DaskExecutor`: results that dask loses as they arrive."""

from __future__ import annotations

from concurrent.futures import CancelledError, Executor, Future
from typing import Any

import pytest
from distributed import cfexecutor
from tornado.ioloop import IOLoop

from tdstore.parallel.executors import DaskExecutor


class LostFuture:
    """A future of dask whose worker died between its result and the question for its status."""

    def __init__(self, status: str, result: Any) -> None:
        self.status, self.result = status, result

    async def _result(self, raiseit: bool) -> Any:
        return self.result


class Losing(Executor):
    """An executor that ends its futures as dask does: the first ones with these results and states."""

    def __init__(self, *ends: tuple[str, Any]) -> None:
        self.ends, self.calls = list(ends), 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls += 1
        future: Future[Any] = Future()
        status, result = self.ends.pop(0) if self.ends else ("finished", fn(*args))
        IOLoop(make_current=False).run_sync(lambda: cfexecutor._cascade_future(LostFuture(status, result), future))
        return future


def test_a_lost_result_is_computed_again() -> None:
    executor = Losing(("pending", 1), ("lost", object()))
    assert DaskExecutor(executor).submit(divmod, 7, 2).result() == (3, 1)
    assert executor.calls == 3


def test_errors_of_tasks_are_theirs() -> None:
    def task() -> None:
        raise TypeError("of the task")

    try:
        task()
    except TypeError as error:
        failure = ("error", (TypeError, error, error.__traceback__))
    executor = Losing(failure)
    with pytest.raises(TypeError, match="of the task"):
        DaskExecutor(executor).submit(divmod, 7, 2).result()
    assert executor.calls == 1


def test_it_is_not_tried_for_ever() -> None:
    executor = Losing(*[("pending", 1)] * 10)
    with pytest.raises(TypeError, match="unpack"):
        DaskExecutor(executor).submit(divmod, 7, 2).result()
    assert executor.calls == 4


def test_a_client_that_was_closed_meanwhile_is_an_error() -> None:
    class Closed(Losing):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            if self.calls:
                raise RuntimeError("the client is closed")
            return super().submit(fn, *args)

    future = DaskExecutor(Closed(("pending", 1))).submit(divmod, 7, 2)
    with pytest.raises(RuntimeError, match="is closed"):
        future.result(timeout=5)


def test_it_is_cancelled() -> None:
    with pytest.raises(CancelledError):
        DaskExecutor(Losing(("cancelled", None))).submit(divmod, 7, 2).result()

    class Waiting(Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.future: Future[Any] = Future()
            return self.future

    waiting = Waiting()
    assert DaskExecutor(waiting).submit(divmod, 7, 2).cancel()
    assert waiting.future.cancelled()
