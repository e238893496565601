"""A thread pool that works until the interpreter ends; steps and loops that Ctrl-C does not divide."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` looks each handler up in an enumeration: 30 µs a step
import functools
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")


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
    # The traceback of an error holds this frame, which must not hold the error by its future.
    done: list[Future[T]] = [Future()]
    try:
        done[0].set_result(fn(*args, **kwargs))
    except BaseException as error:
        done[0].set_exception(error)
    return done.pop()


def without_frames(fn: Callable[P, T]) -> Callable[P, T]:
    """Have tracebacks of errors of a function keep no local variables.

    For a task of an object that keeps its future: the frames refer to the object, which then refers to itself.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            del args, kwargs
            traceback.clear_frames(error.__traceback__)
            raise

    return call


def without_interrupts(fn: Callable[P, T]) -> Callable[P, T]:
    """Have Ctrl-C wait for the end of a function, which must be short: what it does cannot be half done.

    Its error is raised after the function, instead of the result. The callbacks of a library in C, which may lose
    errors, are not interrupted either. A second Ctrl-C does not wait.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        handler = _signal.getsignal(signal.SIGINT)
        if not callable(handler) or threading.get_ident() != threading.main_thread().ident:
            return fn(*args, **kwargs)
        came: list[FrameType | None] = []

        def keep(_: int, frame: FrameType | None) -> None:
            came.append(frame)
            _signal.signal(signal.SIGINT, handler)

        _signal.signal(signal.SIGINT, keep)
        try:
            return fn(*args, **kwargs)
        finally:
            _signal.signal(signal.SIGINT, handler)
            if came:
                handler(signal.SIGINT, came.pop())

    return call


def complete(loop: Callable[[Iterator[T], U], None], items: Iterator[T], operand: U) -> None:
    """Run a loop over an iterator; what Ctrl-C raises between two items is raised after the last one.

    A second Ctrl-C does not wait. This costs a tenth of what `without_interrupts` does.

    Args:
        loop: does one thing with each item, by a function of C or an assignment: Ctrl-C comes after it, not within.
        items: what it loops over; an iterator of C, such as that of a list.
        operand: what all items are used with.

    Example:
        >>> def fill(places, values):
        ...     for place in places:
        ...         values[place] = 0
        >>> complete(fill, iter([0, 2]), values := [1, 2, 3])
        >>> values
        [0, 2, 0]
    """
    try:
        loop(items, operand)
    except KeyboardInterrupt:
        loop(items, operand)
        raise
