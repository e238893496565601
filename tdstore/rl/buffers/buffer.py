"""Replay buffers: a storage, a writer that fills it, and a sampler that reads it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from tdstore.arguments import check_flags, check_int
from tdstore.errors import InvalidArgumentError, InvalidStateError
from tdstore.rl.buffers.access import RowAccess, rows_first
from tdstore.rl.buffers.checkpoints import Checkpointer, Resumable, batches_of_state
from tdstore.rl.buffers.parts import (
    asked_size,
    call_transform,
    check_generator,
    check_settings,
    check_transform,
    checkpointer_of,
    collated,
    consuming,
    describe,
    inverted,
    is_sampler,
    is_storage,
    is_writer,
    made_part,
    mark_pieces,
    refuse,
    refuse_empty,
    stats_of,
    storage_for,
    transforms_of,
    written_rows,
)
from tdstore.rl.buffers.prioritized import PrioritizedSampler
from tdstore.rl.buffers.samplers import ConsumingSampler, RandomSampler, Sampler, as_index, as_slots
from tdstore.rl.buffers.slices import SliceSampler
from tdstore.rl.buffers.writers import RoundRobinWriter, Writer
from tdstore.rl.kinds import is_collection
from tdstore.rl.storages.base import Storage
from tdstore.rl.storages.indices import is_key
from tdstore.rl.storages.lists import ListStorage
from tdstore.rl.storages.tabular import TabularStorage
from tdstore.rl.types import Priorities, RowIndex, Rows, SamplerPart, StoragePart, Transform, WriterPart
from tdstore.threads import ThreadPool, without_frames

T = TypeVar("T")

_DELAYED = threading.RLock()
"""Held while the parts of a buffer are created at its first use."""


class ReplayBuffer(RowAccess, Resumable):
    """Rows that are written one way and sampled another.

    One lock guards rows, writer and sampler, so threads may extend and sample at the same time.

    Args:
        storage: where rows are; a `Storage`, or a function that creates one. Default: `ListStorage(1000)`.
        sampler: which rows a batch has. Default: `RandomSampler()`.
        writer: which slots new rows go to. Default: `RoundRobinWriter()`.
        collate_fn: makes a batch of what the storage returns. Default: a list is stacked, anything else is the batch.
        pin_memory: whether batches are pinned, for a faster way to a CUDA device.
        prefetch: number of batches prepared in threads ahead of `sample()`; they lack what is written later.
        transform: called with each batch; returns the result of `sample`. torchrl's transforms are called with its
            TensorDicts.
        transform_factory: creates the transform instead.
        batch_size: of `sample()` without one, and of iteration.
        dim_extend: dimension of the incoming data that indexes rows; by default the last of the storage's `ndim`,
            which is time in a collector's output. Rows by index have the dimensions of the data,
            samples those of a row.
        checkpointer: writes and reads the rows of checkpoints, by `dumps(storage, path)` and `loads(storage, path)`; or
            a function that creates one. Default: the storage itself.
        generator: draws all random numbers.
        consume_after_n_samples: sample each row this many times, as `ConsumingSampler` does.
        delayed_init: create the parts at the first use of the buffer, in the process that uses it. Default: if there is
            a `transform_factory`.
        shared, compilable: no effect; accepted for callers of torchrl.
        **unsupported: other arguments of torchrl's buffers; any value other than the default is refused.

    Raises:
        ValueError: an argument is out of its range. TypeError: an argument is not such a part, or is not supported.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rb.extend(TensorDict({"obs": torch.zeros(10, 3)}, [10])).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> rb.sample()["obs"].shape
        torch.Size([4, 3])
    """

    def __init__(
        self,
        *,
        storage: StoragePart | None = None,
        sampler: SamplerPart | None = None,
        writer: WriterPart | None = None,
        collate_fn: Transform | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Transform | None = None,
        transform_factory: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: Checkpointer | Callable[[], Checkpointer] | None = None,
        generator: torch.Generator | None = None,
        consume_after_n_samples: int | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        **unsupported: Any,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "unsupported")}
        refuse(type(self).__name__, unsupported)
        optional = {"compilable": compilable, "delayed_init": delayed_init}
        check_flags(**{name: value for name, value in optional.items() if value is not None})
        if delayed_init or (delayed_init is None and transform_factory is not None):
            self._delayed = {**arguments, "delayed_init": False}
            return
        self._lock = threading.RLock()
        self._storage: Any = made_part("storage", storage, lambda: ListStorage(1000), is_storage)
        sampler = made_part("sampler", sampler, RandomSampler, is_sampler)
        self._sampler: Any = consuming(sampler, consume_after_n_samples, prefetch)
        self._checkpointer = checkpointer_of(checkpointer)
        self._writer: Any = made_part("writer", writer, self._default_writer, is_writer)
        check_settings(batch_size, prefetch, dim_extend, collate_fn, pin_memory, shared)
        if batch_size is None and getattr(self._sampler, "drop_last", False):
            raise InvalidArgumentError("a sampler with drop_last needs batch_size= in the constructor of the buffer")
        self._collate, self._pin, self._prefetch = collate_fn, pin_memory, prefetch or 0
        self._batch_size, self._dim_extend = batch_size, dim_extend
        self.shared = shared
        self._transforms: list[tuple[Any, bool]] = []
        if (transform := transforms_of(transform, transform_factory)) is not None:
            self.append_transform(transform)
        self._pool: ThreadPool | None = None
        self._pending: deque[Future[Any]] = deque()
        self._generator: torch.Generator | None = None
        self._marked: deque[Any] = deque()
        """Rows that others wrote into the storage, and whose priorities are not set yet."""
        self._writing = 0
        """The thread in which this buffer writes; 0: none."""
        self._begin()
        self.set_rng(generator)

    def _begin(self) -> None:
        """Write and sample in the rows that the storage has."""
        self._writer.register_storage(storage_for(self._writer, self._storage))
        if isinstance(self._storage, Storage):
            self._storage.attach(self)
            if self._storage.filled_directly and isinstance(self._writer, RoundRobinWriter):
                self._writer.empty()
        if isinstance(self._sampler, PrioritizedSampler) and len(self._storage):
            self._rank_rows()

    def _rank_rows(self) -> None:
        """Set the priorities of rows that the storage has."""
        filled = torch.arange(len(self._storage), device="cpu")
        self._sampler.extend(filled, storage=storage_for(self._sampler, self._storage))

    def __getattr__(self, name: str) -> Any:
        """Create the parts, if that was delayed: called for attributes that do not exist."""
        with _DELAYED:
            arguments = self.__dict__.pop("_delayed", None)
            if arguments is not None:
                try:
                    ReplayBuffer.__init__(self, **arguments)
                except BaseException:
                    self.__dict__["_delayed"] = arguments
                    raise
        return object.__getattribute__(self, name)

    _default_writer: Callable[[], Writer] = RoundRobinWriter
    _described = False
    """Whether samples have entries with what the sampler says about their rows."""

    # -- parts -------------------------------------------------------------------------------
    @property
    def storage(self) -> Storage:
        """Storage of the rows."""
        return cast("Storage", self._storage)

    @property
    def sampler(self) -> Sampler:
        """Sampler, which chooses the rows of a batch."""
        return cast("Sampler", self._sampler)

    @property
    def writer(self) -> Writer:
        """Writer, which chooses the slots of new rows."""
        return cast("Writer", self._writer)

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch, as passed to the constructor."""
        return self._batch_size

    @property
    def dim_extend(self) -> int:
        """Dimension of data that is along the rows."""
        return int(self._storage.ndim) - 1 if self._dim_extend is None else self._dim_extend

    @property
    def write_count(self) -> int:
        """Rows that were ever written."""
        return int(self._writer.write_count if isinstance(self._writer, Writer) else self._writer._write_count)

    @property
    def initialized(self) -> bool:
        """Whether the parts exist: False before the first use with `delayed_init`."""
        return "_delayed" not in self.__dict__

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Set the generator of all random numbers."""
        check_generator(generator)
        self._generator = generator
        ours = isinstance(self._sampler, Sampler)
        self._direct = ours and isinstance(self._storage, (TabularStorage, ListStorage))
        """Whether slots go from the sampler to the storage as they are: neither is of another package."""
        self._ranks = isinstance(self._sampler, PrioritizedSampler)
        self._follows = self._ranks and getattr(self._storage, "others_write", False)
        """Whether other processes write rows whose priorities are set here."""
        self._slices = isinstance(self._sampler, SliceSampler)
        if isinstance(self._sampler, Sampler):
            self._sampler.set_rng(generator)
        elif generator is not None:
            self._sampler._rng = generator

    def set_sampler(self, sampler: SamplerPart | None) -> Sampler:
        """Sample in another way; return the previous sampler. Rows that have no priority in a new one get one."""
        with self._lock:
            before: Sampler = self._sampler
            self._sampler = made_part("sampler", sampler, RandomSampler, is_sampler)
            self.set_rng(self._generator)
            if self._ranks and not self._sampler.cover(self._storage) and len(self._storage):
                self._rank_rows()
        return before

    def set_writer(self, writer: WriterPart | None) -> Writer:
        """Write in another way; return the previous writer."""
        with self._lock:
            before: Writer = self._writer
            self._writer = made_part("writer", writer, RoundRobinWriter, is_writer)
            self._writer.register_storage(storage_for(self._writer, self._storage))
        return before

    def set_storage(self, storage: StoragePart | None, collate_fn: Transform | None = None) -> Storage:
        """Keep the rows in another storage, whose rows are used from now on; return the previous one.

        Args:
            storage: a storage, or a function without arguments that creates one.
            collate_fn: makes a batch of a list of rows; None for the default.
        """
        with self._lock:
            before: Storage = self._storage
            self._storage = made_part("storage", storage, lambda: ListStorage(1000), is_storage)
            self._collate = collate_fn
            self._clear_prefetched()
            self._marked.clear()
            self._sampler.empty()
            self._writer.empty()
            self._begin()
            self.set_rng(self._generator)
        return before

    def append_transform(self, transform: Transform, *, invert: bool = False) -> ReplayBuffer:
        """Call a function with each batch, after those before it.

        Args:
            invert: call it with the data that is written, instead.
        """
        return self.insert_transform(len(self._transforms), transform, invert=invert)

    def insert_transform(self, index: int, transform: Transform, *, invert: bool = False) -> ReplayBuffer:
        """Insert a transform, otherwise as `append_transform`.

        Args:
            index: the number of the transform before which this one is inserted.
            invert: whether it is called before writing instead of after reading.
        """
        check_transform(transform)
        check_int(index, "index")
        self._transforms.insert(index, (transform, invert))
        return self

    # -- writing -----------------------------------------------------------------------------
    def extend(self, data: Rows) -> Tensor:
        """Write rows.

        Args:
            data: a batch (TensorDict, tensorclass, tensor, dict or tuple of these), or a list of rows; not changed.

        Returns:
            int64 indices of the rows, `[n]`.

        Raises:
            RuntimeError: there are no rows, or they do not fit the storage. After an error nothing is changed.
        """
        index: Tensor = self._write(self._writer.extend, self._sampler.extend, self._incoming(data))
        return index

    def _planned(self, data: Any) -> Callable[[], Tensor]:
        """Check that rows can be written, and return the function that writes them."""
        incoming = self._incoming(data)
        if isinstance(self._writer, Writer):
            self._writer.check_rows(incoming)
        return partial(self._write, self._writer.extend, self._sampler.extend, incoming)

    def _incoming(self, data: Any) -> Any:
        """Return rows in the form in which they are written: transformed, and along the first dimension."""
        if isinstance(data, list) and not data:
            raise InvalidStateError("extend needs at least one row")
        data = inverted(self._transforms, data) if self._transforms else data
        if (self._dim_extend or self._storage.ndim > 1) and (dim := self.dim_extend):
            data = rows_first(data, dim)
        return data

    def add(self, data: Any) -> int | Tensor | None:
        """Write one row, and return its index; None if the writer dropped the row."""
        data = inverted(self._transforms, data) if self._transforms else data
        index: int | Tensor | None = self._write(self._writer.add, self._sampler.add, data)
        return index

    def _write(self, write: Callable[[Any], T], tell_sampler: Callable[[T], None], data: Any) -> T:
        if self._ranks:
            return self._ranked(write, data)
        with self._lock:
            index = write(data)
            tell_sampler(index)
        return index

    def _ranked(self, write: Callable[[Any], T], data: Any) -> T:
        """Write rows, and set their priorities."""
        with self._lock:
            self._writing = threading.get_ident()
            try:
                index = write(data)
            finally:
                self._writing = 0
            written: Any = written_rows(index)
            self._sampler.extend(written, storage=self._storage)
            if self._follows:
                self._sampler.follow(self._storage, as_slots(written, self._storage))
        return index

    def update_priority(self, index: RowIndex, priority: Priorities) -> None:
        """Set priorities of rows, for samplers that use them.

        Raises:
            ValueError: a priority is negative or NaN. IndexError: an index is beyond the end.
        """
        with self._lock:
            self._rank_marked()
            if self._ranks or isinstance(self._sampler, Sampler):
                self._sampler.update_priority(index, priority, storage=self._storage)
            else:
                self._sampler.update_priority(index, priority)

    def mark_update(self, index: RowIndex) -> None:
        """Record rows that a writer wrote: called by storages that the buffer listens to.

        Rows of another buffer over the same storage get the largest priority before the next sample. No lock is taken
        here: two buffers that write at the same time notify each other.
        """
        if self._ranks and self._writing != threading.get_ident():
            self._marked.append(index)

    def _rank_marked(self) -> None:
        """Set the priorities of rows that other buffers and processes wrote."""
        while self._marked:
            self._sampler.mark_update(written_rows(self._marked.popleft()), storage=self._storage)
        if self._follows:
            self._sampler.follow(self._storage)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all rows; the writer starts again.

        Args:
            empty_write_count: whether `write_count` starts at 0 again; a `RoundRobinWriter` can keep it.
        """
        with self._lock:
            written = None if empty_write_count else self.write_count
            self._clear_prefetched()
            self._marked.clear()
            for part in (self._storage, self._writer, self._sampler):
                (part.empty if hasattr(part, "empty") else part._empty)()
            if written is not None and isinstance(self._writer, RoundRobinWriter):
                self._writer.load_state_dict({"_cursor": 0, "_write_count": written})

    # -- reading -----------------------------------------------------------------------------
    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Read a batch of rows that the sampler chooses.

        Args:
            batch_size: the number of rows; default: that of the constructor. It replaces that one, with a warning.
            return_info: whether to return a tuple of the batch and a dict, with "index" and facts from the sampler,
                such as "priority_weight".

        Raises:
            RuntimeError: there is no batch size, or there are no rows.
        """
        size = asked_size(batch_size, self._batch_size)
        ahead = (self._prefetch or self._pending) and size == self._batch_size
        batch, info = (self._prefetched if ahead else self._sample)(size)
        return (batch, info) if return_info else batch

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Check whether a batch can be sampled now; nothing is drawn.

        Args:
            batch_size: the number of rows; default: that of the constructor.

        Raises:
            RuntimeError: there is no batch size, or the sampler has no batches of that size.
        """
        size = asked_size(self._batch_size if batch_size is None else batch_size, None)
        with self._lock:
            if not len(self._storage):
                return False
            self._rank_marked()
            return bool(self._sampler.can_sample(storage_for(self._sampler, self._storage), size))

    def _sample(self, size: int) -> tuple[Any, dict[Any, Any]]:
        """Sample one batch now."""
        with self._lock:
            storage, sampler = self._storage, self._sampler
            refuse_empty(storage)
            if self._marked or self._follows:
                self._rank_marked()
            if self._direct:
                slots, info = sampler.slots(storage, size)
                batch = storage.take_slots(slots)
                index = as_index(slots, storage)
            else:
                index, info = sampler.sample(storage_for(sampler, self._storage), size)
                batch = storage.get(index)
        info = {"index": index, **info}
        return self._finished(batch, info), info

    def _finished(self, batch: Any, info: dict[Any, Any]) -> Any:
        """Return the result of `sample` for rows: collated, marked, transformed, pinned."""
        listed = isinstance(batch, list)
        adds_index = self._described or getattr(self._writer, "adds_index", False)
        if adds_index and not listed:  # so that `collate_fn` gets the entries, too
            describe(batch, info, self._described)
        if self._collate is not None:
            batch = self._collate(batch)
        elif listed:
            batch = collated(batch)
        if adds_index and listed:
            describe(batch, info, self._described)
        if self._slices and is_collection(batch):
            mark_pieces(batch, self._sampler, info)
        batch = self._transformed(batch)
        if self._pin and hasattr(batch, "pin_memory"):
            batch = batch.pin_memory()
        return batch

    def _prefetched(self, size: int) -> tuple[Any, dict[Any, Any]]:
        with self._lock:
            if not self._pending:
                self._fill(size, 1)
            future = self._pending.popleft()
            self._fill(size, self._prefetch)
        try:
            batch, info, self._ran_out = future.result()  # without the lock: the thread may wait for it
        finally:
            del future  # it holds the error, whose traceback holds this frame
        return batch, info

    def _fill(self, size: int, wanted: int) -> None:
        """Choose the rows of the next batches now, in order, and read them in threads."""
        while len(self._pending) < wanted:
            self._pool = self._pool or ThreadPool(self._prefetch, thread_name_prefix="tdstore-prefetch")
            left = self._sampler.batches_left(self._storage, size) if isinstance(self._sampler, Sampler) else None
            if self._pending and left is not None and self._sampler.ran_out:
                break
            storage, sampler = self._storage, self._sampler
            refuse_empty(storage)
            self._rank_marked()
            if self._direct:
                slots, info = sampler.slots(storage, size)
                index = as_index(slots, storage)
                self._pending.append(self._pool.submit(self._read, slots, {"index": index, **info}, sampler.ran_out))
            else:
                self._latest = self._pool.submit(self._read_foreign, size, self._latest)
                self._pending.append(self._latest)

    @without_frames
    def _read(self, slots: Any, info: dict[Any, Any], ran_out: bool) -> tuple[Any, dict[Any, Any], bool]:
        return self._finished(self._storage.take_slots(slots), info), info, ran_out

    @without_frames
    def _read_foreign(self, size: int, before: Future[Any] | None) -> tuple[Any, dict[Any, Any], bool]:
        if before is not None:
            wait([before])  # batches are sampled in the order in which they are given
        batch, info = self._sample(size)
        return batch, info, bool(getattr(self._sampler, "ran_out", False))

    _ran_out = False
    _latest: Future[Any] | None = None
    """The last batch that samples and reads in a thread."""
    _iterator: Iterator[Any] | None = None

    def _clear_prefetched(self) -> None:
        while self._pending:
            self._pending.popleft().cancel()

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the sampler has run out: for ever, if it draws with replacement.

        Raises:
            RuntimeError: the constructor was given no batch size, or there is no first batch.
        """
        if self._batch_size is None:
            raise InvalidStateError("iteration needs batch_size= in the constructor of the buffer")
        while True:
            ahead = self._prefetch or self._pending
            yield self.sample()
            sampler = self._sampler
            if self._ran_out if ahead else getattr(sampler, "ran_out", False):
                return
            ours = isinstance(sampler, Sampler) and not self._pending
            if ours and sampler.batches_left(self._storage, self._batch_size) == 0:  # others sampled meanwhile
                return

    def next(self) -> Any:
        """Return the next batch of the pass; None when it is over."""
        self._iterator = self._iterator or iter(self)
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator = None
        return batch

    # -- rows by index -----------------------------------------------------------------------
    def __len__(self) -> int:
        """Return the number of rows; with a `ConsumingSampler`, of those that are left to sample."""
        if isinstance(self._sampler, ConsumingSampler):
            return len(self._sampler.left(self._storage))
        return len(self._storage)

    def __getitem__(self, index: Any) -> Any:
        """Return rows by index, transformed as samples are, or one entry of all rows by its key, as it is stored."""
        with self._lock:
            if is_key(index):
                return self._rows(slice(None))[index]
            found = self._rows(index)
            found = collated(found) if isinstance(found, list) and self._collate is None else found
            if self._transforms and hasattr(found, "clone"):
                found = found.clone()  # a slice is a view of stored rows: transforms may work in place
            return self._transformed(found)

    def _transformed(self, batch: Any) -> Any:
        for transform, invert in self._transforms:
            if not invert:
                batch = call_transform(transform, batch)
        return batch

    def stats(self) -> dict[str, Any]:
        """Return how full the buffer is."""
        return stats_of(self)

    # -- the end -----------------------------------------------------------------------------
    def flush(self) -> None:
        """Commit the rows, where they outlive this process."""
        with self._lock:
            if isinstance(self._storage, Storage):
                self._storage.flush()

    def close(self) -> None:
        """Commit, stop the threads that prefetch, and release the rows."""
        with self._lock:
            self._clear_prefetched()
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
        if isinstance(self._storage, Storage):
            self._storage.close()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Listen to the storage again."""
        batches = state.pop("_prefetched_batches", ())
        self.__dict__.update(state)
        if "_delayed" in state:
            return
        self._lock, self._pool, self._pending = threading.RLock(), None, deque(batches_of_state(batches))
        self._marked, self._writing = deque(), 0
        self._writer.register_storage(storage_for(self._writer, self._storage))
        if isinstance(self._storage, Storage):
            self._storage.attach(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(storage={self._storage!r}, sampler={self._sampler!r}, writer={self._writer!r})"
