"""Commits of what was written and never closed: after its owner was dropped, and before the process ends.

A finalizer may run in any thread, at any line, with any lock held. So it does no I/O here: it puts what has to be done
into a queue. A background thread does it soon; `settle` does it at once. What is left at the end of the interpreter, or
of a process of `multiprocessing`, is done there: when the main thread ended all is committed, and after the exit hooks
of the program, which may still write, all is closed.

The thread waits for `DELAY` seconds first. Programs drop a dataset and remove its folder in one breath, as the end of
a `with TemporaryDirectory()` does; a commit that writes files meanwhile would make the removal fail.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # its exit hook is registered before ours, and so runs after it
import logging
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from tdstore.errors import ConflictError
from tdstore.header import Header

logger = logging.getLogger("tdstore")
DELAY = 0.3
"""Seconds between a drop and what the background thread does about it."""


class Closable(Protocol):
    """A store, as far as this module knows it."""

    url: str
    restructured: bool

    def load_header(self) -> Header:
        """Return the header last saved."""

    def save_header(self, header: Header) -> None:
        """Commit."""

    def close(self) -> None:
        """Commit what was written in place, and let go."""


class Ending:
    """An action that is done once: when called, after its owner was garbage collected, or when the process ends.

    A forked child inherits none: what is open belongs to its parent.

    Args:
        owner: the object whose garbage collection is the end; None for the end of the process alone. `action` must
            not refer to it.
        action: what to do. It may do I/O, take locks and raise; it may run in another thread.
        place: what the action commits, for the message when it fails.
        commit: what to do before exit hooks of the program run, which may go on with the owner; it must not refer to
            it either. It is called several times.

    Example:
        >>> class Recording:
        ...     pass
        >>> done = []
        >>> recording = Recording()
        >>> ending = Ending(recording, lambda: done.append("committed"), "runs/1")
        >>> del recording
        >>> settle()
        >>> done
        ['committed']
    """

    __slots__ = ("__weakref__", "_action", "_commit", "_due", "_owner", "_pid", "_place")

    def __init__(
        self, owner: object | None, action: Callable[[], None], place: str, commit: Callable[[], None] | None = None
    ) -> None:
        self._action: Callable[[], None] | None = action
        self._commit = commit
        self._place = place
        self._due: float | None = None
        self._pid = os.getpid()
        self._owner = None if owner is None else weakref.ref(owner, self._dropped)
        _state.endings[id(self)] = self
        if None not in _known:
            _at_exit()
        if _state.thread is None:
            _start()

    def __call__(self) -> None:
        """Do it now, unless it was done or cancelled; errors are the caller's."""
        action = self._take()
        if action is not None:
            action()

    def cancel(self) -> None:
        """Forget the action."""
        self._take()

    def _take(self) -> Callable[[], None] | None:
        action, self._action, self._commit, self._owner = self._action, None, None, None
        _state.endings.pop(id(self), None)
        _state.dropped.pop(id(self), None)
        return action if self._pid == os.getpid() else None

    def _dropped(self, _: object, getpid: Callable[[], int] = os.getpid) -> None:
        # In a finalizer: these are re-entrant, and nothing else is done here.
        if self._pid != getpid():  # of the parent's; the interpreter may have emptied this module by now
            return
        self._due = time.monotonic() + DELAY
        _state.dropped[id(self)] = self
        _state.queue.put(self)

    def _report(self) -> None:
        """Do it where there is no caller to raise to."""
        try:
            self()
        except Exception as error:
            if self._due is not None and threading.current_thread() is _state.thread and not _is_gone(self._place):
                _state.ended.wait(DELAY)  # perhaps a removal is under way
            dropped_and_removed = self._due is not None and _is_gone(self._place)
            known = dropped_and_removed or (isinstance(error, ConflictError) and error.repeated)
            level = logging.DEBUG if known else logging.ERROR
            logger.log(level, "tdstore: %s has uncommitted changes, and they are lost: %s", self._place, error)

    def _wait(self, ended: threading.Event) -> None:
        """Wait until it is due, unless it was done or the process ends before."""
        if self._action is not None and self._due is not None:
            ended.wait(max(0.0, self._due - time.monotonic()))


def _is_gone(place: str) -> bool:
    """Check whether a place was a local path, and was removed with all that could be lost there."""
    path = place.partition("://")[2] or place
    return os.path.isabs(path) and not os.path.lexists(path)


T = TypeVar("T")


class LiveObjects(Generic[T]):
    """Objects that exist in this process, listed from any thread. They are not kept alive.

    A `WeakSet` cannot be listed while another thread, as that which closes dropped datasets, adds or discards.

    Example:
        >>> class Connection:
        ...     pass
        >>> connections = LiveObjects()
        >>> first, second = Connection(), Connection()
        >>> connections.add(first)
        >>> connections.add(second)
        >>> del first
        >>> list(connections) == [second]
        True
    """

    __slots__ = ("__weakref__", "_references")

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[T]] = {}

    def add(self, item: T) -> None:
        """Add an object, unless it is in the set already."""
        references, key = self._references, id(item)
        if (known := references.get(key)) is not None and known() is item:
            return

        def forget(reference: weakref.ref[T]) -> None:
            if references.get(key) is reference:
                references.pop(key, None)

        references[key] = weakref.ref(item, forget)

    def discard(self, item: T) -> None:
        """Remove an object, if it is there."""
        self._references.pop(id(item), None)

    def clear(self) -> None:
        """Remove all objects."""
        self._references.clear()

    def __len__(self) -> int:
        return len(self._references)

    def __contains__(self, item: object) -> bool:
        reference = self._references.get(id(item))
        return reference is not None and reference() is item

    def listed(self) -> list[T]:
        """Return those that exist now."""
        found = []
        # `list` of a dict's values runs no Python code, so that no other thread comes between.
        for reference in list(self._references.values()):
            if (item := reference()) is not None:
                found.append(item)
        return found

    def __iter__(self) -> Iterator[T]:
        return iter(self.listed())


class _State:
    """Pending work of a process. A forked child starts with a state of its own."""

    def __init__(self) -> None:
        self.endings: dict[int, Ending] = {}
        self.dropped: dict[int, Ending] = {}
        """Endings whose owner is gone and whose action has not begun."""
        self.changed: dict[int, Closable] = {}
        """Stores that were changed since they were opened and are not closed."""
        self.resident: LiveObjects[Closable] = LiveObjects()
        """Like `changed`, for stores of live tensors; each is closed with its last tensor."""
        self.queue: SimpleQueue[Ending | None] = SimpleQueue()
        self.running = threading.RLock()
        """Held while queued actions run, and around a fork."""
        self.starting = threading.Lock()
        self.thread: threading.Thread | None = None
        self.hooks = False
        """Whether exit hooks run, or will soon: the main thread ended."""
        self.ended = threading.Event()


_state = _State()


# -- stores --------------------------------------------------------------------------------------
def register(store: Closable, *, resident: bool = False) -> None:
    """Close a store at the end of the process unless it is closed before. Called by `Store` at each change.

    Args:
        resident: whether the store's leaves are live tensors. Such a store is not kept alive.
    """
    state = _state
    if resident:
        if id(store) in state.resident._references:  # one that is gone has left it
            return
        state.resident.add(store)
    else:
        if id(store) in state.changed:
            return
        state.changed[id(store)] = store
    if type(store) not in _known:
        _at_exit(type(store))


def unregister(store: Closable) -> None:
    """Forget a store that was closed."""
    _state.changed.pop(id(store), None)
    _state.resident.discard(store)


# -- doing it ------------------------------------------------------------------------------------
def settle() -> None:
    """Do what the owners that were dropped so far left to do. Returns when it is done."""
    state = _state
    while not state.running.acquire(timeout=DELAY):  # another thread may be in the middle of one
        if state.hooks:
            return  # the main thread does it, and may wait for a lock of a store that this thread has
    try:
        for ending in list(state.dropped.values()):
            ending._report()
    finally:
        state.running.release()


def ends_beside_threads() -> bool:
    """Check whether the process ends while threads of the program run."""
    return _state.ended.is_set() and _has_daemon_threads()


def _work(state: _State) -> None:
    while (ending := state.queue.get()) is not None:
        ending._wait(state.ended)
        with state.running:
            ending._report()
        del ending  # it holds a store until the next one comes


def _start() -> None:
    state = _state
    if state.thread is None and not state.ended.is_set():
        with state.starting:
            if state.thread is None:
                thread = threading.Thread(target=_work, args=(state,), name="tdstore-closing", daemon=True)
                with suppress(RuntimeError):  # after the main thread ended, Python 3.12 starts none: `_end` is left
                    thread.start()
                    state.thread = thread


def _commit(*, close_restructured: bool) -> None:
    """Commit everything, and leave it open for exit hooks of the program.

    Args:
        close_restructured: close stores whose structure is being changed: only `close` commits their rows and drops
            the rest. Otherwise they are left alone.
    """
    state = _state
    state.hooks = True
    settle()
    for ending in list(state.endings.values()):
        if (commit := ending._commit) is not None:
            _try(commit, ending._place)
    for store in [*state.changed.values(), *state.resident]:
        if store.restructured and close_restructured:
            _close(store)
        else:
            _try(partial(commit_store, store), store.url)


def commit_store(store: Closable) -> None:
    """Commit what was written, unless the structure of the store is being changed or it was never committed."""
    if not store.restructured and (header := store.load_header()):
        store.save_header(header)


def _try(commit: Callable[[], None], place: str) -> None:
    try:
        with _state.running:
            commit()
    except Exception as error:  # `_end` tries again, and reports
        logger.debug("tdstore: committing %s: %s", place, error)


def _close(store: Closable) -> None:
    with _state.running:
        Ending(None, store.close, store.url)._report()
    unregister(store)


def close_for_hook(url: str | None) -> bool:
    """Close a store for an exit hook that opens its place again; return whether there was one.

    Before exit hooks run nothing is closed: a program that opens twice what admits one writer is told so.
    """
    if not _state.hooks or url is None:
        return False
    stores = [store for store in [*_state.changed.values(), *_state.resident] if store.url == url]
    endings = [ending for ending in list(_state.endings.values()) if ending._place == url]
    for ending in endings:
        with _state.running:
            ending._report()
    for store in stores:
        _close(store)
    return bool(stores or endings)


def _end() -> None:
    """Close everything. Only what was registered by this process is in the state."""
    state = _state
    state.ended.set()
    settle()
    for ending in list(state.endings.values()):
        with state.running:
            ending._report()
    for store in [*state.changed.values(), *state.resident]:
        _close(store)
    if state.thread is not None and state.thread is not threading.current_thread():
        state.queue.put(None)
        state.thread.join(1.0)
        state.thread = None


_known: set[type | None] = set()


def _at_exit(kind: type | None = None) -> None:
    """Run before the exit hooks of the libraries that stores of a class use; those are registered by now."""
    if kind in _known:
        return
    _known.add(kind)
    atexit.unregister(_commit_before_libraries)
    atexit.register(_commit_before_libraries)
    _before_threads_end()


def _before_threads_end() -> None:
    # Executors take no work once the main thread ended, and processes of multiprocessing do not run atexit hooks.
    # What `concurrent.futures` uses for the same reason; without it, `atexit` alone is left.
    register_hook = getattr(threading, "_register_atexit", None)
    if register_hook is not None and not _state.ended.is_set():
        with suppress(RuntimeError):  # the main thread ended, and this is another one: `atexit` is left
            register_hook(_end_in_time)


def _end_in_time() -> None:
    """Commit while executors still take work; close as well where no exit hook follows.

    A store whose structure is being changed waits for other threads that go on writing.
    """
    if multiprocessing.parent_process() is not None:
        _end()
    else:
        current = threading.current_thread()
        _commit_or_end(close_restructured=all(t is current or t.daemon for t in threading.enumerate()))


def _commit_before_libraries() -> None:
    """Commit what threads and hooks wrote since the main thread ended; libraries of stores have not been shut down."""
    _commit_or_end(close_restructured=True)


def _commit_or_end(*, close_restructured: bool) -> None:
    """Commit, or close where daemon threads of the program run, which never end.

    Between the steps of a change that one of them makes, only `close` knows what to drop.
    """
    if _has_daemon_threads():
        _end()
    else:
        _commit(close_restructured=close_restructured)


def _has_daemon_threads() -> bool:
    return any(t.daemon and not t.name.startswith(_OURS) for t in threading.enumerate() if t is not _state.thread)


_OURS = ("tdstore-", "zarr_", "fsspec")
"""Daemon threads that do nothing but what others ask them for."""


def _end_after_hooks() -> None:
    """Close everything: no hook that was registered after the import of this module is left."""
    _end()
    for function in _after_end:
        function()


_after_end: list[Callable[[], None]] = []


def call_after_end(function: Callable[[], None]) -> None:
    """Call a function when the interpreter ends, after all stores were closed. It must not raise."""
    _after_end.append(function)


atexit.register(_end_after_hooks)  # registered first, it runs last


# -- forks ---------------------------------------------------------------------------------------
def _before_fork() -> None:
    _state.running.acquire()


def _after_fork() -> None:
    _state.running.release()


def _in_child() -> None:
    global _state
    _state = _State()
    _known.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def wait_before_locks_of_fork() -> None:
    """Have a fork wait for running commits before it takes the locks of the libraries that are imported by now.

    Hooks that run before a fork run in the reverse order of their registration. Without this, a library that is
    imported after tdstore and takes a lock before a fork, as h5py does, has it taken when the fork waits for a commit
    that needs it: neither goes on. Called by a backend's module after its imports.
    """
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)
