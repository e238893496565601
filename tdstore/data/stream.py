"""Streams of batches whose position is a few integers, alone and in the workers of a `DataLoader`."""

import threading
from collections.abc import Iterator
from types import NoneType
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from tdstore import TensorDictBase
from tdstore.arguments import as_device, check_int, check_prefetch, refuse_type
from tdstore.errors import InvalidArgumentError, InvalidStateError

from .reading import ReadAhead, Task
from .transfer import Transfer

State: TypeAlias = dict[str, Any]
P = TypeVar("P")
MOST_WORKERS = 1024
MOST_EPOCHS = 1 << 62
VERSION = 1
# Rows of the shared numbers, a column per worker: 1 + the epoch that it begins next; 1 + the epoch that it has begun;
# how often a state was loaded by the process that owns the loader. 0 says that there is none.
NEXT, BEGUN, LOADS = 0, 1, 2


def _check_epoch(epoch: int) -> None:
    check_int(epoch, "epoch")
    if not 0 <= epoch < MOST_EPOCHS:
        raise InvalidArgumentError(f"epoch {epoch}: epochs are counted from 0, up to 2**62")


class Stream(IterableDataset[TensorDictBase], Generic[P]):
    """Batches in an order that a position and a few integers determine.

    A subclass says what follows a position. This class reads ahead, deals batches out to the workers of a `DataLoader`
    in turns, and reports where the caller is.

    Workers of a loader are started again for each iteration of it, with the position that this process knows. The epoch
    that they begin is therefore in memory that all processes share: each iteration of a loader is the next epoch.

    Args:
        prefetch: the number of batches that are read ahead, in each process.
        device: where batches go.
        timeout: seconds to wait for one batch.
    """

    def __init__(self, prefetch: int, device: torch.device | str | None, timeout: float | None) -> None:
        super().__init__()
        check_prefetch(prefetch)
        if not isinstance(timeout, (int, float, NoneType)):
            raise refuse_type("timeout", "a number of seconds", timeout)
        if timeout is not None and not (0 < timeout <= threading.TIMEOUT_MAX and prefetch):
            raise InvalidArgumentError(
                f"timeout={timeout}: it is a number of seconds, at most {threading.TIMEOUT_MAX:.0f}, "
                "and needs prefetch=1 or more"
            )
        self.prefetch = prefetch
        self.device = None if device is None else as_device(device)
        self.timeout = timeout
        self._position = self._first(0)
        self._resumed = False  # whether the position is that of a state, and no iteration has begun since
        self._loaded_here = False  # whether this process is a worker, and has loaded a state of its own
        self._done = 0  # batches that this worker has handed out since the position
        self._loads = 0  # how often a state was loaded, as far as this process knows
        self._shared = torch.zeros(3, MOST_WORKERS, dtype=torch.int64, device="cpu").share_memory_()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._shared.is_shared():  # a copy, and not what a worker is started with
            self._shared = self._shared.clone().share_memory_()

    # -- what a subclass says ----------------------------------------------------------------
    def _first(self, epoch: int) -> P:
        """Return the position at which an epoch begins, seen from the current one."""
        raise NotImplementedError

    def _epoch_of(self, position: P) -> int:
        raise NotImplementedError

    def _batches_left(self, position: P) -> int:
        """Return how many batches are left in the epoch of a position."""
        raise NotImplementedError

    def _is_end(self, position: P) -> bool:
        """Check whether nothing is left of the epoch of a position, for any rank."""
        raise NotImplementedError

    def _tasks(self, position: P, first: int, stride: int) -> Iterator[tuple[Task, P]]:
        """Yield every `stride`-th batch that follows in the epoch, and the position after it."""
        raise NotImplementedError

    def _after(self, position: P, batches: int) -> P:
        """Return the position after some batches of the epoch."""
        raise NotImplementedError

    def _as_state(self, position: P) -> State:
        raise NotImplementedError

    def _from_state(self, state: State) -> P:
        raise NotImplementedError

    def _threads(self) -> int:
        """Open what is to be read, and return how many threads may read at once."""
        raise NotImplementedError

    # -- position ----------------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """The number of the epoch that is being read, or is next."""
        begun = int(self._shared[BEGUN].max())
        return begun - 1 if begun and get_worker_info() is None else self._epoch_of(self._position)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch.

        Args:
            epoch: its number, 0 or more.

        Raises:
            InvalidArgumentError: the number is negative.
        """
        _check_epoch(epoch)
        self._set(self._first(epoch))
        self._shared[NEXT] = epoch + 1

    def state_dict(self, batches: int | None = None, *, epoch: int | None = None) -> State:
        """Return the position after the last batch that was handed out: a few integers.

        Args:
            batches: how many batches of the loader's current iteration the caller has received. Only for workers of a
                stock `DataLoader`, which do not say how far the caller is.
            epoch: the epoch of that iteration; default: the one that its workers have begun. Before the first batch of
                an iteration they may not have begun it, and the default would be the epoch before.

        Raises:
            InvalidStateError: workers read, and `batches` is missing.
            InvalidArgumentError: `epoch` is negative, or there are fewer batches in it.

        Example:
            >>> epochs = Epochs(tdstore.TensorDict({"a": torch.arange(6)}, [6]), 2, shuffle=False)
            >>> batches = iter(epochs)
            >>> next(batches)["a"].tolist()
            [0, 1]
            >>> again = Epochs(tdstore.TensorDict({"a": torch.arange(6)}, [6]), 2, shuffle=False)
            >>> again.load_state_dict(epochs.state_dict())
            >>> [batch["a"].tolist() for batch in again]
            [[2, 3], [4, 5]]
        """
        worker = get_worker_info()
        if worker is not None:
            share = {"worker": worker.id, "workers": worker.num_workers, "done": self._done}
            return {**self._as_state(self._position), **share}
        begun = int(self._shared[BEGUN].max())
        if batches is not None:
            check_int(batches, "batches")
            position = self._position
            if epoch is None:
                epoch = begun - 1 if begun else self._epoch_of(position)
            else:
                _check_epoch(epoch)
            if epoch != self._epoch_of(position):
                position = self._first(epoch)
            if not 0 <= batches <= self._batches_left(position):
                raise InvalidArgumentError(
                    f"batches={batches}: the epoch had {self._batches_left(position)} batches left"
                )
            return self._as_state(self._after(position, batches))
        if begun:
            raise InvalidStateError(
                "workers of a DataLoader read, and they do not say how many batches the loader has handed out",
                hint="state_dict(batches=n), n batches of this iteration; or torchdata's StatefulDataLoader",
            )
        return self._as_state(self._position)

    def load_state_dict(self, state: State) -> None:
        """Go to the position of a state: the next iteration yields exactly the rows that were left.

        If nothing was left of the epoch, it yields the rows of the next one, and `epoch` is the number of that. The
        number of ranks, workers, batches read ahead and rows of a batch may differ from before.

        Args:
            state: of `state_dict`, or a copy of it that went through JSON or `torch.save`.

        Raises:
            InvalidArgumentError: the state is of another dataset, order or version.
        """
        if not isinstance(state, dict) or state.get("version") != VERSION:
            raise InvalidArgumentError(f"not the state of a stream of batches, version {VERSION}: {state!r:.200}")
        worker = get_worker_info()
        workers = (state.get("worker"), state.get("workers"))
        if "worker" in state and (worker is None or workers != (worker.id, worker.num_workers)):
            raise InvalidArgumentError(
                f"the state of worker {workers[0]} of {workers[1]} of a loader is not one of the whole stream",
                hint="load the state of the StatefulDataLoader into one with as many workers",
            )
        position = self._from_state(state)
        if worker is None:
            self._set(position)
            if self._is_end(position):
                self._set(self._first(self._epoch_of(position) + 1))
            self._resumed = True
            self._shared[LOADS] += 1
            self._loads += 1
        else:
            self._position, self._loaded_here, self._done = position, True, int(state.get("done", 0))

    def _set(self, position: P) -> None:
        self._position, self._done, self._resumed = position, 0, False
        self._shared[:LOADS] = 0

    # -- iteration ---------------------------------------------------------------------------
    def __iter__(self) -> Iterator[TensorDictBase]:
        worker = get_worker_info()
        if worker is None:
            return self._alone()
        if worker.num_workers > MOST_WORKERS:
            raise InvalidArgumentError(f"{worker.num_workers} workers of a loader: {MOST_WORKERS} at most")
        return self._in_worker(worker.id, worker.num_workers, self._begin(worker.id))

    def _alone(self) -> Iterator[TensorDictBase]:
        """Yield what is left of the epoch."""
        begun = int(self._shared[BEGUN].max())
        if begun:  # workers of a loader have read before: what follows their epoch
            self._set(self._first(begun))
        elif not self._resumed and not self._batches_left(self._position):
            # A caller that counts batches took them all, and did not ask for the end.
            following = self._first(self._epoch_of(self._position) + 1)
            if self._batches_left(following):
                self._set(following)
        self._resumed = False
        epoch = self._epoch_of(self._position)
        for batch, position in self._read(self._tasks(self._position, 0, 1)):
            self._position = position
            yield batch
        self._position = self._first(epoch + 1)

    def _begin(self, worker: int) -> bool:
        """Go to where a worker begins: the position of a state, or the epoch after its last one.

        Returns:
            False where neither is known, since the owner of the loader has loaded a state meanwhile.
        """
        following = int(self._shared[NEXT, worker])
        if not self._loaded_here:
            if not following and int(self._shared[LOADS, worker]) != self._loads:
                return False
            self._position, self._done = self._first(following - 1) if following else self._position, 0
        self._loaded_here = False
        epoch = self._epoch_of(self._position)
        self._shared[NEXT, worker], self._shared[BEGUN, worker] = epoch + 2, epoch + 1
        return True

    def _in_worker(self, worker: int, workers: int, begun: bool) -> Iterator[TensorDictBase]:
        """Yield the share of one worker: every `workers`-th of the batches that are left."""
        if not begun:  # raised here, since an error in `__iter__` would end the worker without telling the caller
            raise InvalidStateError(
                "a state was loaded while the loader had workers, which do not know of it",
                hint="load it before the first iteration of the DataLoader, or make a new DataLoader",
            )
        for batch, _ in self._read(self._tasks(self._position, worker + self._done * workers, workers)):
            self._done += 1
            yield batch

    def _read(self, tasks: Iterator[tuple[Task, P]]) -> Iterator[tuple[TensorDictBase, P]]:
        threads = self._threads()
        return iter(ReadAhead(tasks, self.prefetch, threads, Transfer(self.device), self.timeout))
