"""The event loop for all requests of a process, in a thread of its own.

obstore answers from native threads, which release Python objects after the answer has arrived. If a native thread
does so while the interpreter is shutting down, the process ends with SIGABRT. So the end of a process waits for `QUIET`
seconds after its last request.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from tdstore.lifetime import call_after_end

T = TypeVar("T")

QUIET = 0.1
"""Seconds in which native threads release the objects of the last request."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_answered: float | None = None
"""When the last request ended."""
_background: set[concurrent.futures.Future[Any]] = set()
"""Requests for which nobody waits."""


def _after_fork() -> None:
    # The lock may be held, and the thread does not exist: replace both.
    global _lock, _loop
    _lock, _loop = threading.Lock(), None
    _background.clear()


os.register_at_fork(after_in_child=_after_fork)


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop of this process; started on first use."""
    global _loop
    with _lock:
        if _loop is None:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="tdstore-remote", daemon=True).start()
            _loop = loop
        return _loop


def submit(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start a coroutine on the background loop."""
    future = asyncio.run_coroutine_threadsafe(work, background_loop())
    future.add_done_callback(_note_answer)
    return future


def submit_in_background(work: Coroutine[Any, Any, Any]) -> None:
    """Start a coroutine for which nobody waits, except the end of the process."""
    future = submit(work)
    _background.add(future)
    future.add_done_callback(_background.discard)


def _note_answer(_: concurrent.futures.Future[Any]) -> None:
    global _answered
    _answered = time.monotonic()


def _quieten() -> None:
    """Wait until native threads have released their objects. Stores have been closed before."""
    for future in list(_background):
        future.cancel()
    concurrent.futures.wait(list(_background), QUIET)
    if _answered is not None and (rest := _answered + QUIET - time.monotonic()) > 0:
        time.sleep(rest)


call_after_end(_quieten)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop, and wait for it. An interrupt cancels it."""
    future = submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
    finally:
        del future  # it holds the error, whose traceback holds this frame


async def gather_all(work: Iterable[Awaitable[T]]) -> list[T]:
    """Await all; the first error cancels the others, and is raised once they have ended."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
