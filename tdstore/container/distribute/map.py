"""`map` and `map_iter`: a function over the rows of a container, on many workers."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tdstore.arguments import check_callable, check_int
from tdstore.container.core.container import LEAF, Container
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.distribute.build import build
from tdstore.container.distribute.row_tasks import (
    Chunk,
    Place,
    Rows,
    Target,
    handle_of,
    join,
    near_chunk,
    place_of,
    write_rows,
)
from tdstore.errors import BatchSizeError, InvalidArgumentError, InvalidStateError, InvalidTypeError
from tdstore.index.shapes import as_dim
from tdstore.io.opening import locate
from tdstore.parallel.byvalue import Packed
from tdstore.parallel.executors import Crew, InlineExecutor, bar, cpus, crew_for, crosses_by_multiprocessing, width_of
from tdstore.store import Cap

_ROWS_PER_TASK = 64
"""Rows that are mapped one by one go to a worker so many at a time, at most."""


class MappingMixin(Container):
    """A function over chunks of rows."""

    __slots__ = ()

    def map(
        self,
        fn: Callable[[Any], Any],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        out: Any = None,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        pool: Any = None,
        executor: Executor | None = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        index_with_generator: bool = False,
        pbar: bool = False,
        mp_start_method: str | None = None,
        storage: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function on chunks of rows, in worker processes, and concatenate the results along `dim` in order.

        Stored rows are sent as a reference to their store: each worker opens the store once, and reads its rows itself.
        Rows in memory are sent by value: what `fn` changes in them in place is not changed here.

        Args:
            fn: called with a TensorDict of some rows; returns a TensorDict or a tensor (of any length along `dim`). If
                it always returns None, so does `map`.
            dim: the batch dimension to divide.
            num_workers: number of processes. Default: one per CPU. 0 runs `fn` in this process.
            out: a TensorDict to write the results into, in place, which is returned (a tensor, if `fn` returns
                tensors), with at least the keys of the results. The workers themselves write into stores that many
                processes may write (shared memory, memmap, ...); results must then be as long as their chunks. A URL
                or path where nothing is yet becomes a dataset of what the workers write, by `tdstore.build`.
            chunksize: rows per chunk; 0 calls `fn` with single rows, which lack `dim`, and stacks the results.
            num_chunks: the largest number of chunks, instead. Default: one per worker. Chunks end where those of the
                store do, if it has chunks and they are not larger.
            pool: a pool (multiprocessing, torch.multiprocessing, ray) to run in; it is not closed.
            executor: any `concurrent.futures.Executor` to run in: threads, processes, loky, dask, MPI; it is not shut
                down. `num_workers` is then the number of its workers, if it does not tell.
            generator: seeds the workers: worker `k` has the first number drawn from it, plus `k`.
            max_tasks_per_child: replace a process after this many chunks.
            worker_threads: threads of torch in each process.
            index_with_generator: accepted for compatibility; chunks are always cut when they are sent.
            pbar: show a progress bar (tqdm).
            mp_start_method: "fork", "spawn" or "forkserver". Default: that of multiprocessing.
            storage: name of the backend of a new dataset `out`. Default: found from its location.
            storage_options: credentials and settings of the URL `out`.

        Raises:
            Exception: what `fn` raised, of its own type.
            DimensionError: there is no dimension `dim`.
            InvalidArgumentError: `storage` or `storage_options` without a location `out`, both `chunksize` and
                `num_chunks`, or a number out of range.
            InvalidTypeError: `fn` or a result cannot be pickled, or is of another type.
            WorkerDiedError: a worker was killed.

        Example:
            >>> td = TensorDict({"x": torch.arange(6)}, [6])
            >>> td.map(lambda rows: rows["x"] * 2, num_workers=0, chunksize=4)
            tensor([ 0,  2,  4,  6,  8, 10])
        """
        plan = _Plan(self, fn, dim, num_workers, pool, executor, chunksize, num_chunks)
        plan.warn_of_ignored(generator, max_tasks_per_child, mp_start_method)
        if not isinstance(unwrap(out), (Container, torch.Tensor)):
            out, own = locate(out, {"storage_options": storage_options})
            storage_options = own["storage_options"]
            if out is not None and not isinstance(out, (str, os.PathLike)):
                raise InvalidTypeError(f"out= is a TensorDict, a tensor, a path or a URL, not a {type(out).__name__}")
        if not isinstance(out, (str, os.PathLike)) and (storage is not None or storage_options is not None):
            raise InvalidArgumentError("storage= and storage_options= are for a new dataset: out= is its URL or path")
        if isinstance(out, (str, os.PathLike)):
            if plan.dim or plan.one_by_one or pool is not None:
                raise InvalidArgumentError(f"out={out!r}: a new dataset needs dim=0, chunksize > 0, and no pool")
            return build(
                out,
                fn,
                self,
                rows_per_task=plan.size,
                executor=executor,
                num_workers=num_workers,
                storage=storage,
                storage_options=storage_options,
                pbar=pbar,
                mp_start_method=mp_start_method,
            )
        if not plan.length:
            return out if out is not None else self._at(plan.index(slice(0, 0)))._resident()
        work = Packed(Rows(fn, plan.dim, plan.one_by_one, True), cloud_first=plan.far)
        crew = plan.crew(work, generator, max_tasks_per_child, worker_threads, mp_start_method)
        place = None if out is None else _writable_by_workers(out, crew)
        results, done = [], 0
        with _Bar(plan, pbar) as shown:
            for made in crew.run(work, plan.tasks(crew, place), done=shown.advance):
                if out is None:
                    results.append(made)
                elif place is None and join([made], plan.dim, torch.cat) is not None:
                    rows = made.shape[plan.dim]
                    _check_length(out, plan, done + rows, more=True)
                    write_rows(out, plan.index(slice(done, done + rows)), made)
                    done += rows
        if done:
            _check_length(out, plan, done, more=False)
        return out if out is not None else join(results, plan.dim, torch.cat)

    def map_iter(
        self,
        fn: Callable[[Any], Any],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        shuffle: bool = False,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        pool: Any = None,
        executor: Executor | None = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        index_with_generator: bool = True,
        pbar: bool = False,
        mp_start_method: str | None = None,
    ) -> Generator[Any, None, None]:
        """Call a function on chunks of rows, in worker processes, and iterate over its results, which may be anything.

        A few chunks are in flight at a time, so a dataset may be of any size. The workers end with the
        iterator: exhaust it, or `close()` it.

        Args:
            fn: called with a TensorDict of some rows.
            dim: as of `map`, as are `num_workers`, `chunksize`, `num_chunks`, `pool`, `executor`, `generator`,
                `max_tasks_per_child`, `worker_threads`, `pbar` and `mp_start_method`.
            shuffle: draw the rows of each chunk at random, each row once; results come as they are ready.
            index_with_generator: accepted for compatibility; chunks are always cut when they are sent. False refuses
                `shuffle`.

        Raises:
            Exception: what `fn` raised, of its own type.
            DimensionError: there is no dimension `dim`.
            InvalidArgumentError: both `chunksize` and `num_chunks`, or a number out of range.
            InvalidTypeError: `fn` or a result cannot be pickled.
            WorkerDiedError: a worker was killed.
            InvalidStateError: `shuffle` without `index_with_generator`.

        Example:
            >>> td = TensorDict({"x": torch.arange(6)}, [6])
            >>> [int(x) for x in td.map_iter(lambda rows: rows["x"].sum(), num_workers=0, chunksize=4)]
            [6, 9]
        """
        if shuffle and not index_with_generator:
            raise InvalidStateError("shuffle=True needs index_with_generator=True: rows are drawn as they are sent")
        plan = _Plan(self, fn, dim, num_workers, pool, executor, chunksize, num_chunks)
        plan.warn_of_ignored(None if shuffle else generator, max_tasks_per_child, mp_start_method)
        if shuffle and plan.length:
            plan.order = torch.randperm(plan.length, generator=generator, device="cpu")
        work = Packed(Rows(fn, plan.dim, plan.one_by_one, False), cloud_first=plan.far)

        def results() -> Generator[Any, None, None]:
            if not plan.length:
                return
            crew = plan.crew(work, generator, max_tasks_per_child, worker_threads, mp_start_method)
            with _Bar(plan, pbar) as shown:
                for made in crew.run(work, plan.tasks(crew, None), ordered=not shuffle, done=shown.advance):
                    if plan.one_by_one:
                        yield from made
                    else:
                        yield made

        return results()


class _Plan:
    """Division of the rows into tasks, and the workers."""

    def __init__(
        self,
        td: Any,
        fn: Callable[[Any], Any],
        dim: int,
        num_workers: int | None,
        pool: Any,
        executor: Executor | None,
        chunksize: int | None,
        num_chunks: int | None,
    ) -> None:
        if chunksize is not None and num_chunks is not None:
            raise InvalidArgumentError("give chunksize or num_chunks, not both")
        if pool is not None and executor is not None:
            raise InvalidArgumentError("give pool or executor, not both")
        check_callable(fn, "fn")
        counts = (("chunksize", chunksize, 0), ("num_chunks", num_chunks, 1), ("num_workers", num_workers, 0))
        for name, value, least in counts:
            if value is not None:
                check_int(value, name)
                if value < least:
                    raise InvalidArgumentError(f"{name} must be at least {least}, not {value}")
        self.td = td
        self.dim = as_dim(dim, td.batch_dims)
        self.length: int = td.batch_size[self.dim]
        self.num_workers, self.pool, self.executor = num_workers, pool, executor
        pool_or_executor = executor if executor is not None else pool
        self.far = pool_or_executor is not None and not crosses_by_multiprocessing(pool_or_executor)
        """The workers may not have the modules of this process."""
        self.one_by_one = chunksize == 0
        self.order: Tensor | None = None
        self.size = self._size(chunksize, num_chunks)
        self.count = -(-self.length // self.size)

    def _size(self, chunksize: int | None, num_chunks: int | None) -> int:
        """Return the number of rows per task."""
        if chunksize:
            return chunksize
        pool_or_executor = self.executor if self.executor is not None else self.pool
        if pool_or_executor is None:
            workers = cpus() if self.num_workers is None else max(1, self.num_workers)
        else:
            workers = (self.executor is not None and self.num_workers) or width_of(pool_or_executor)
        if self.one_by_one:
            return max(1, min(_ROWS_PER_TASK, self.length // (4 * workers)))
        size = max(1, -(-self.length // (num_chunks or workers)))
        unit = _chunk_rows(self.td, self.dim, size)
        return -(-size // unit) * unit

    def index(self, rows: Any) -> tuple[Any, ...]:
        """Return the batch index of some rows along `dim`."""
        return (*(slice(None),) * self.dim, rows)

    def warn_of_ignored(self, generator: Any, max_tasks_per_child: Any, start_method: Any) -> None:
        """Warn of arguments that a given pool or executor has decided already."""
        if self.pool is None and self.executor is None:
            return
        asked = {
            "num_workers": self.num_workers if self.executor is None else None,
            "generator": generator,
            "max_tasks_per_child": max_tasks_per_child,
            "mp_start_method": start_method,
        }
        ignored = [name for name, value in asked.items() if value is not None]
        if ignored:
            which = "pool" if self.executor is None else "executor"
            warnings.warn(f"{', '.join(ignored)} ignored: the workers are those of the {which}", stacklevel=3)

    def crew(self, fn: Packed, generator: Any, max_tasks_per_child: Any, threads: int, start_method: Any) -> Crew:
        """Create the workers."""
        return crew_for(
            fn,
            num_workers=self.num_workers,
            most=self.count,
            pool=self.pool,
            executor=self.executor,
            generator=generator,
            max_tasks_per_child=max_tasks_per_child,
            worker_threads=threads,
            start_method=start_method,
        )

    def tasks(self, crew: Crew, target: Place | None) -> Iterator[tuple[Chunk, Target | None]]:
        """Yield the chunks, cut one by one as they are asked for."""
        near = crosses_by_multiprocessing(crew.executor)
        source = place_of(self.td, by_multiprocessing=near) or self.td
        for start in range(0, self.length, self.size):
            rows = slice(start, min(start + self.size, self.length))
            at = self.index(rows if self.order is None else self.order[rows])
            chunk = near_chunk(source, at) if near else Chunk(source, at)
            yield chunk, None if target is None else Target(target, at)


class _Bar:
    """The progress bar of a call, or none."""

    def __init__(self, plan: _Plan, wanted: bool) -> None:
        self._bar = bar(plan.count, wanted)

    def __enter__(self) -> _Bar:
        return self

    def advance(self) -> None:
        """Count a finished chunk."""
        if self._bar is not None:
            self._bar.update()

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _chunk_rows(td: Any, dim: int, size: int) -> int:
    """Return the rows along `dim` whose multiples are borders of the chunks in the store, at most `size`; 1 if none."""
    lengths = {n for n in _stored_chunks(td, dim) if 1 < n <= size}
    common = math.lcm(*lengths)
    return common if common <= size else max(lengths)


def _stored_chunks(td: Any, dim: int) -> Iterator[int]:
    handle = handle_of(td)
    if handle is None:
        return
    for node, key in td._leaf_places():
        if node._kind(key) != LEAF or getattr(node, "_sel", None) is None or not node._sel.is_full:
            continue
        if (spec := handle.specs.get((*node._path, key))) is None:
            continue  # a nested tensor
        chunks = spec.options.get("chunks")
        if isinstance(chunks, (tuple, list)) and len(chunks) > dim:
            yield int(chunks[dim])


def _writable_by_workers(out: Any, crew: Crew) -> Place | None:
    """Return the place of an `out=` that workers may write themselves; None where this process has to."""
    if not isinstance(out, Container) or isinstance(crew.executor, (InlineExecutor, ThreadPoolExecutor)):
        return None
    handle = handle_of(out)
    if handle is None or not handle.store.writable or Cap.CONCURRENT_WRITE not in handle.store.caps:
        return None
    return place_of(out, by_multiprocessing=crosses_by_multiprocessing(crew.executor))


def _check_length(out: Any, plan: _Plan, rows: int, *, more: bool) -> None:
    there = out.shape[plan.dim]
    if there < rows or (there > rows and not more):
        raise BatchSizeError(
            f"`out` has {there} rows along dimension {plan.dim}, the results {rows}{' or more' if more else ''}"
        )
