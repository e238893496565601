"""The event loop for all requests of a process, in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _after_fork() -> None:
    # The lock may be held, and the thread does not exist: replace both.
    global _lock, _loop
    _lock, _loop = threading.Lock(), None


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
    return asyncio.run_coroutine_threadsafe(work, background_loop())


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop, and wait for it. An interrupt cancels it."""
    future = submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
