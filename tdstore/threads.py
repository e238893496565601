"""A thread pool that works until the interpreter ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ThreadPool(ThreadPoolExecutor):
    """A pool whose tasks the caller does where no thread starts any more: after the main thread ended.

    Other threads and exit hooks of a program outlive that. Tasks must not wait for one another, and one may be
    done twice where the system refuses a thread.

    Example:
        >>> with ThreadPool(1) as pool:
        ...     pool.submit(len, [1, 2]).result()
        2
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function in a thread, or in this one."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            return _done(fn, *args, **kwargs)


def _done(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    done: Future[T] = Future()
    try:
        done.set_result(fn(*args, **kwargs))
    except BaseException as error:
        done.set_exception(error)
    return done
