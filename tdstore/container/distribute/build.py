"""`tdstore.build`: a dataset that many workers write at once, each its own objects, published by one manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from torch import Tensor

from tdstore.bytestore import open_objects
from tdstore.bytestore.commit import NOTHING_THERE, Publisher, fetch_manifest
from tdstore.bytestore.manifest import Document, decode_objects, encode_objects
from tdstore.container.core.container import Container
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.distribute.build_target import PLAN, Target, read_object, remove_late_part
from tdstore.container.distribute.part_values import join_documents
from tdstore.container.distribute.parts import PARTS, PartEngine, part_name
from tdstore.container.storage.describe import describe
from tdstore.engine import Engine
from tdstore.errors import (
    ConflictError,
    InvalidArgumentError,
    InvalidStateError,
    InvalidTypeError,
    MismatchError,
    StoreExistsError,
    WorkerDiedError,
)
from tdstore.header import Header
from tdstore.io.blocks import leaf_batches
from tdstore.io.opening import locate_text
from tdstore.parallel.byvalue import Packed
from tdstore.parallel.executors import bar, crew_for
from tdstore.registry import registry
from tdstore.storekit import refusals
from tdstore.storekit.documents import MAX_FILE_BYTES
from tdstore.threads import ThreadPool
from tdstore.types import Path, StoreIndex, Write

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase

_BLOCK = 32 << 20
_THREADS = 16
_DEATHS = 20
"""Pools of our own that may lose a worker one after the other without finishing a task."""


class _Task(NamedTuple):
    """One task: its number, and its inputs."""

    number: int
    inputs: Any


class _PartWriter:
    """The function that workers run: compute the rows of a task, and publish them as a part.

    The first attempt that publishes a part wins. Another one of the same task leaves objects that no part names, which
    the end of the build removes.
    """

    def __init__(
        self,
        location: str,
        options: Mapping[str, Any],
        fn: Callable[[Any], Any],
        probed: tuple[bool, ...] | None = None,
    ) -> None:
        self.probed = probed
        self.location = location
        self.options = dict(options)
        self.fn = fn

    def __call__(self, task: _Task) -> int:
        with registry().engine(self.location, self.options) as engine:
            if self.probed is not None:
                engine.accept_probed(self.probed)
            if read_object(engine, PLAN) is None:
                raise InvalidStateError(f"{self.location}: there is no plan of a build: it was finished, or given up")
            if read_object(engine, part_name(task.number)) is None:
                rows = self.fn(task.inputs)
                _check_rows(rows, task.number, self.location)
                try:
                    self._write(engine, task.number, rows)
                except (ConflictError, StoreExistsError):
                    if read_object(engine, part_name(task.number)) is None:
                        raise
                if read_object(engine, PLAN) is None:  # another run of this task finished the build meanwhile
                    remove_late_part(engine, part_name(task.number))
        return task.number

    def _write(self, engine: Engine, number: int, rows: Any) -> None:
        payloads: dict[Path, Tensor] = {}
        groups, specs = describe(rows, payloads=payloads)
        td = unwrap(rows)
        # Rivals write the same rows, and nobody removes objects of a part: so a server without conditions will do.
        part = PartEngine(engine, part_name(number))
        with open_objects(part, mode="x", single_writer=not engine.conditional(), close_engine=False) as store:
            store.create(specs)
            for batch in leaf_batches(specs, _BLOCK):
                rest = iter(td._read_pieces([piece for piece in batch if piece[0] not in payloads]))
                values = [_piece(payloads[path], at) if path in payloads else next(rest) for path, at in batch]
                store.write(
                    [Write(path, at, value.detach().cpu()) for (path, at), value in zip(batch, values, strict=True)]
                )
            store.save_header(Header(groups))


def _piece(leaf: Tensor, index: StoreIndex) -> Tensor:
    return leaf[index] if index else leaf


def build(
    location: str | os.PathLike[str],
    fn: Callable[[Any], Any],
    inputs: Sequence[Any] | Container,
    *,
    rows_per_task: int = 1024,
    executor: Executor | None = None,
    num_workers: int | None = None,
    storage: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    save_options: Mapping[str, Any] | None = None,
    token: str = "",
    pbar: bool = False,
    mp_start_method: str | None = None,
) -> TensorDictBase:
    """Make a dataset from the results of a function, which many workers write at once.

    Each task calls `fn` with the next `rows_per_task` inputs. Its worker writes the rows as objects of their own,
    straight to the place. At a URL, one manifest is put at the end, and the dataset is there as a whole. In another
    format (memmap, zarr, h5, tdz) the objects are at `LOCATION.build` meanwhile; at the end this process copies them to
    the location, block by block and along its chunks, and removes them. Rows keep the order of the inputs. A task that
    runs twice counts once. Where a build was interrupted, the same call goes on: finished tasks are not repeated.
    Workers that this call starts are replaced when they die; an `executor` has to replace its own.

    Args:
        location: a URL or path where nothing is yet: `s3://bucket/run`, `/data/run`, `/data/run.h5`. All workers
            reach it.
        fn: called with a slice of the inputs; returns a TensorDict or tensorclass of one row or more.
        inputs: anything with a length and slices: a list, a range, a TensorDict.
        rows_per_task: the number of inputs of a task.
        executor: any `concurrent.futures.Executor`: processes, threads, dask (`client.get_executor()`), MPI, ray (by
            the adapter of docs/how-to/map-over-a-cluster.md).
        num_workers: the number of processes, without an executor; default: one per CPU; 0 runs in this process.
        storage: name of the backend. Default: found from the location.
        storage_options: credentials and settings of the URL.
        save_options: options of the format that the rows are copied to, as `td.save` takes them: `chunks`, ...
        token: names the version of `fn` and `inputs`; a build is resumed under the same token only.
        pbar: show a progress bar (tqdm).
        mp_start_method: "fork", "spawn" or "forkserver", without an executor.

    Returns:
        The dataset, opened for reading.

    Raises:
        InvalidArgumentError: there are no inputs, a number is out of range, or `save_options` for the object layout.
        InvalidTypeError: `fn` returns no TensorDict with rows.
        StoreExistsError: there is something at the location.
        MismatchError: another build was begun there, or tasks return rows of different structure.
        UnsupportedError: the rows of a task are a lazy stack.
        WorkerDiedError: workers die again and again. The same call goes on later.
        Exception: what `fn` raised, of its own type.

    Example:
        >>> def squares(numbers):
        ...     x = torch.tensor(numbers)
        ...     return TensorDict({"x": x, "y": x**2}, [len(x)])
        >>> td = tdstore.build(f"file://{tmp_path}/squares", squares, range(10), rows_per_task=4, num_workers=0)
        >>> td["y"][-2:]
        tensor([64, 81])
    """
    if not isinstance(inputs, Sized) or (isinstance(inputs, Mapping) and not isinstance(inputs, Container)):
        raise InvalidTypeError(
            f"inputs have a length and slices, and a {type(inputs).__name__} has none", hint="list(inputs)"
        )
    if rows_per_task < 1 or not len(inputs):
        raise InvalidArgumentError(f"{len(inputs)} inputs, rows_per_task={rows_per_task}: both are 1 or more")
    text, found = locate_text(location, {"storage_options": storage_options})
    options = dict(found["storage_options"] or {})
    target = Target(text, storage, options, dict(save_options or {}))
    place = target.stage
    count = -(-len(inputs) // rows_per_task)
    plan = msgspec.json.encode({"inputs": len(inputs), "rows_per_task": rows_per_task, "token": token})
    with registry().engine(place, options) as engine:
        begun = read_object(engine, PLAN)
        if begun is None:
            if fetch_manifest(engine) is not None:
                raise refusals.place_exists(place)
            target.begin(engine, plan)
        elif begun != plan:
            raise MismatchError(
                f"{place}: another build was begun there: {begun.decode(errors='replace')[:200]}, not {plan.decode()}",
                hint=f"finish that one, or remove the objects under {place}",
            )
        if not target.is_there(engine):
            if fetch_manifest(engine) is None:
                work = Packed(_PartWriter(place, options, fn, engine.probed()), cloud_first=executor is not None)
                todo = _unfinished(engine, count)
                shown = bar(count, pbar)
                if shown is not None:
                    shown.update(count - len(todo))
                try:
                    _run(engine, work, inputs, rows_per_task, count, executor, num_workers, mp_start_method, shown)
                finally:
                    if shown is not None:
                        shown.close()
                _publish(engine, place, count)
            target.copy(engine)
        target.sweep(engine)
    return target.opened()


def _run(
    engine: Engine,
    work: Packed,
    inputs: Any,
    size: int,
    count: int,
    executor: Executor | None,
    num_workers: int | None,
    start_method: str | None,
    shown: Any,
) -> None:
    """Run the tasks that are unfinished; where workers of our own die, with new ones."""
    deaths = 0
    while todo := _unfinished(engine, count):
        crew = crew_for(
            work,
            num_workers=num_workers,
            most=len(todo),
            pool=None,
            executor=executor,
            generator=None,
            max_tasks_per_child=None,
            worker_threads=1,
            start_method=start_method,
        )
        tasks: Iterator[_Task] = (_Task(number, inputs[number * size : (number + 1) * size]) for number in todo)
        try:
            for _ in crew.run(work, tasks, ordered=False):
                deaths = 0
                if shown is not None:
                    shown.update(1)
        except WorkerDiedError:
            deaths += 1
            if executor is not None or deaths > _DEATHS:
                raise


def _unfinished(engine: Engine, count: int) -> list[int]:
    there = {entry.key for entry in engine.list(PARTS)}
    return [number for number in range(count) if part_name(number) not in there]


def _publish(engine: Engine, location: str, count: int) -> None:
    def part(number: int) -> Document:
        where = f"{location}/{part_name(number)}"
        return decode_objects(bytes(engine.get(part_name(number), MAX_FILE_BYTES).data), url=where)

    with ThreadPool(_THREADS) as threads:
        whole = join_documents(engine, list(threads.map(part, range(count))), location)
    names = [record.name for record in whole.objects]
    publisher = Publisher(engine, location, NOTHING_THERE, single_writer=not engine.conditional(), keep_old=0)
    publisher.publish(encode_objects(whole, url=location), whole.generation, names, (), lambda: None)


def _check_rows(rows: Any, number: int, location: str) -> None:
    """Raise `InvalidTypeError` for what is no TensorDict with rows."""
    found = unwrap(rows)
    if not isinstance(found, Container) or not found.batch_size or not found.batch_size[0]:
        shape = f" of batch size {list(found.batch_size)}" if isinstance(found, Container) else ""
        raise InvalidTypeError(
            f"fn returned {type(rows).__name__}{shape} for task {number} of {location}, not a TensorDict with rows"
        )
