"""Batches read ahead by threads, in order, and never more of them than requested."""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Generic, Protocol, TypeVar

import torch

from tdstore import TensorDictBase
from tdstore.errors import StoreTimeoutError, TDStoreError
from tdstore.threads import ThreadPool

from .source import Allocator
from .transfer import Transfer


class Task(Protocol):
    """A batch that is still to be read."""

    def plan(self, allocator: Allocator | None = None) -> Callable[[], TensorDictBase]:
        """Return the function that reads the batch; called in the order of the batches.

        Args:
            allocator: allocates the memory that tensors are read into, if the batch can be read into given memory.
        """
        ...

    def describe(self) -> str:
        """Name the rows, the epoch and the place."""
        ...


ALONE = 0.02
"""Seconds in which nothing is planned beside the first batch. By then it is read, or its requests are under way."""

T = TypeVar("T", bound=Task)
P = TypeVar("P")
Sent = tuple[TensorDictBase, "torch.cuda.Event | None"]


class ReadAhead(Generic[T, P]):
    """Read the batches of tasks in threads, and hand them out in order.

    Besides the batch that the caller has, up to `prefetch` batches are in memory or being read.

    Args:
        tasks: the batches to read, each with what is passed on with it.
        prefetch: the number of batches to read ahead. 0 reads in the thread of the caller.
        threads: the most threads that read.
        transfer: moves batches to the device.
        timeout: seconds to wait for one batch. Default: no limit.
    """

    _is_ending = staticmethod(sys.is_finalizing)
    """Whether the interpreter ends: it has waited for all threads then, and modules are being cleared."""

    def __init__(
        self,
        tasks: Iterator[tuple[T, P]],
        prefetch: int,
        threads: int,
        transfer: Transfer,
        timeout: float | None = None,
    ) -> None:
        self._tasks, self._prefetch, self._transfer, self._timeout = tasks, prefetch, transfer, timeout
        self._pool = ThreadPool(min(threads, prefetch), "tdstore-data") if prefetch else None
        self._waiting: deque[tuple[T, P, Future[Sent]]] = deque()

    def __iter__(self) -> Iterator[tuple[TensorDictBase, P]]:
        try:
            if self._pool is None:
                for task, position in self._tasks:
                    yield self._finished(task, None), position
                return
            self._fill(self._pool, 1)
            wait([future for *_, future in self._waiting], ALONE)
            self._fill(self._pool, self._prefetch)
            while self._waiting:
                task, position, future = self._waiting.popleft()
                try:
                    batch = self._finished(task, future)
                finally:
                    # It holds the batch while the caller has the next one, or the error that holds this frame.
                    del future
                self._fill(self._pool, self._prefetch)
                yield batch, position
                del batch
        finally:
            self.close()

    def close(self) -> None:
        """Drop what was read ahead. Reads that have begun end in their threads, and nobody waits for them."""
        self._waiting.clear()
        if self._pool is not None and not self._is_ending():
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill(self, pool: ThreadPool, batches: int) -> None:
        while len(self._waiting) < batches:
            found = next(self._tasks, None)
            if found is None:
                return
            self._waiting.append((*found, self._submitted(pool, found[0])))

    def _submitted(self, pool: ThreadPool, task: T) -> Future[Sent]:
        try:
            return pool.submit(self._send, task.plan(self._transfer.allocator))
        except Exception as error:  # raised when it is the turn of the batch
            return _failed_future(error)

    def _send(self, read: Callable[[], TensorDictBase]) -> Sent:
        return self._transfer.send(read())

    def _finished(self, task: T, future: Future[Sent] | None) -> TensorDictBase:
        try:
            sent = self._send(task.plan(self._transfer.allocator)) if future is None else future.result(self._timeout)
        except FutureTimeoutError as error:
            if future is not None and not future.done():
                raise StoreTimeoutError(
                    f"nothing was read within {self._timeout} s: {task.describe()}",
                    hint="iterate again to read these rows again, or give a longer timeout=",
                ) from error
            raise located(error, task) from error.__cause__
        except Exception as error:
            raise located(error, task) from error.__cause__
        finally:
            del future  # it holds the error, whose traceback holds this frame
        return self._transfer.receive(sent)


def _failed_future(error: Exception) -> Future[Sent]:
    failed: Future[Sent] = Future()
    failed.set_exception(error)
    return failed


def located(error: Exception, task: Task) -> Exception:
    """Add to an error which rows were being read: in the message of our errors, as a note on others."""
    text = f"while reading {task.describe()}"
    if isinstance(error, TDStoreError):
        error.message = f"{error.message} ({text})"
        error.args = (error.message, *error.args[1:])
    else:
        error.add_note(text)
    return error
