"""A thread pool that still works at interpreter exit, where no thread can start: the caller does the work then."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Pool(ThreadPoolExecutor):
    """A pool that works after the main thread ended, which other threads and exit hooks may outlive.

    Args:
        workers: the largest number of threads.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers, "tdstore-zarr")

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function in a thread, or in this one."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            done: Future[T] = Future()
            try:
                done.set_result(fn(*args, **kwargs))
            except BaseException as error:
                done.set_exception(error)
            return done
