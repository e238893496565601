"""`tdstore.build`: a dataset that many workers write at once, each its own objects, published by one manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tdstore.bytestore import open_objects
from tdstore.bytestore.commit import NOTHING_THERE, Publisher, fetch_manifest
from tdstore.bytestore.manifest import Document, decode_objects, encode_objects
from tdstore.container.core.container import Container
from tdstore.container.core.tensorclasses import unwrap
from tdstore.container.distribute.parts import PARTS, PartEngine, join_parts, part_name
from tdstore.container.storage.describe import STACK_KIND, describe
from tdstore.container.storage.open_and_save import open_container
from tdstore.engine import Engine
from tdstore.errors import (
    ConflictError,
    InvalidArgumentError,
    InvalidStateError,
    InvalidTypeError,
    MismatchError,
    StoreExistsError,
    StoreNotFoundError,
    UnsupportedError,
    WorkerDiedError,
)
from tdstore.header import Group, Header
from tdstore.io.blocks import leaf_batches
from tdstore.parallel.byvalue import Packed
from tdstore.parallel.executors import bar, crew_for
from tdstore.registry import registry
from tdstore.storekit import refusals
from tdstore.storekit.documents import MAX_FILE_BYTES, NAME
from tdstore.types import LeafSpec, Path, Write, path_text

if TYPE_CHECKING:
    from tdstore.tensordicts.base import TensorDictBase

_PLAN = PARTS + "plan.json"
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

    def __init__(self, location: str, options: Mapping[str, Any], fn: Callable[[Any], Any]) -> None:
        self.location = location
        self.options = dict(options)
        self.fn = fn

    def __call__(self, task: _Task) -> int:
        with registry().engine(self.location, self.options) as engine:
            if _read(engine, _PLAN) is None:
                raise InvalidStateError(f"{self.location}: there is no plan of a build: it was finished, or given up")
            if _read(engine, part_name(task.number)) is None:
                rows = self.fn(task.inputs)
                groups, specs = _described(rows, task.number, self.location)
                try:
                    self._write(engine, task.number, unwrap(rows), groups, specs)
                except (ConflictError, StoreExistsError):
                    if _read(engine, part_name(task.number)) is None:
                        raise
        return task.number

    def _write(
        self, engine: Engine, number: int, rows: Any, groups: Mapping[Path, Group], specs: Mapping[Path, LeafSpec]
    ) -> None:
        # Rivals write the same rows, and nobody removes objects of a part: so a server without conditions will do.
        part = PartEngine(engine, part_name(number))
        with open_objects(part, mode="x", single_writer=not engine.conditional(), close_engine=False) as store:
            store.create(specs)
            for batch in leaf_batches(specs, _BLOCK):
                values = [value.detach().cpu() for value in rows._read_pieces(batch)]
                store.write([Write(path, index, value) for (path, index), value in zip(batch, values, strict=True)])
            store.save_header(Header(groups))


def build(
    location: str,
    fn: Callable[[Any], Any],
    inputs: Sequence[Any] | Container,
    *,
    rows_per_task: int = 1024,
    executor: Executor | None = None,
    num_workers: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    token: str = "",
    pbar: bool = False,
    mp_start_method: str | None = None,
) -> TensorDictBase:
    """Make a dataset of the object layout from the results of a function, which many workers write at once.

    Each task calls `fn` with the next `rows_per_task` inputs. Its worker writes the rows as objects of their own,
    straight to the place; at the end one manifest is put, and the dataset is there as a whole. Rows keep the order of
    the inputs. A task that runs twice counts once. Where a build was interrupted, the same call goes on: finished tasks
    are not repeated. Workers that this call starts are replaced when they die; an `executor` has to replace its own.

    Args:
        location: a URL where nothing is yet: `s3://bucket/run`, `file:///data/run`. All workers reach it.
        fn: called with a slice of the inputs; returns a TensorDict or tensorclass of one row or more.
        inputs: anything with a length and slices: a list, a range, a TensorDict.
        rows_per_task: the number of inputs of a task.
        executor: any `concurrent.futures.Executor`: processes, threads, `dask` (`client.get_executor()`), MPI.
        num_workers: the number of processes, without an executor; default: one per CPU; 0 runs in this process.
        storage_options: credentials and settings of the URL.
        token: names the version of `fn` and `inputs`; a build is resumed under the same token only.
        pbar: show a progress bar (tqdm).
        mp_start_method: "fork", "spawn" or "forkserver", without an executor.

    Returns:
        The dataset, opened for reading.

    Raises:
        InvalidArgumentError: the location is no URL, there are no inputs, or a number is out of range.
        InvalidTypeError: `fn` returns no TensorDict with rows.
        StoreExistsError: there is a dataset at the location.
        MismatchError: another build was begun there, or tasks return rows of different structure.
        UnsupportedError: rows with entries that are not dense tensors.
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
    if rows_per_task < 1 or not len(inputs):
        raise InvalidArgumentError(f"{len(inputs)} inputs, rows_per_task={rows_per_task}: both are 1 or more")
    if "://" not in location:
        raise InvalidArgumentError(
            f"build writes the object layout, at a URL, not at {location!r}",
            hint="for a folder, write file:///absolute/path",
        )
    options = dict(storage_options or {})
    count = -(-len(inputs) // rows_per_task)
    plan = msgspec.json.encode({"inputs": len(inputs), "rows_per_task": rows_per_task, "token": token})
    with registry().engine(location, options) as engine:
        begun = _read(engine, _PLAN)
        if begun is None:
            if fetch_manifest(engine) is not None:
                raise refusals.place_exists(location)
            engine.put(_PLAN, plan)
        elif begun != plan:
            raise MismatchError(
                f"{location}: another build was begun there: {begun.decode(errors='replace')[:200]}, "
                f"not {plan.decode()}",
                hint=f"finish that one, or remove the objects under {location}",
            )
        if fetch_manifest(engine) is None:
            work = Packed(_PartWriter(location, options, fn), cloud_first=executor is not None)
            todo = _unfinished(engine, count)
            shown = bar(count, pbar)
            if shown is not None:
                shown.update(count - len(todo))
            try:
                _run(engine, work, inputs, rows_per_task, count, executor, num_workers, mp_start_method, shown)
            finally:
                if shown is not None:
                    shown.close()
            _publish(engine, location, count)
        _sweep(engine, location)
    opening: dict[str, Any] = {"storage_options": options} if options else {}
    found: TensorDictBase = open_container(location, mode="r", **opening)
    return found


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


def _read(engine: Engine, key: str) -> bytes | None:
    try:
        return bytes(engine.get(key, MAX_FILE_BYTES).data)
    except StoreNotFoundError:
        return None


def _publish(engine: Engine, location: str, count: int) -> None:
    def part(number: int) -> Document:
        where = f"{location}/{part_name(number)}"
        return decode_objects(bytes(engine.get(part_name(number), MAX_FILE_BYTES).data), url=where)

    with ThreadPoolExecutor(_THREADS) as threads:
        whole = join_parts(list(threads.map(part, range(count))), location)
    names = [record.name for record in whole.objects]
    publisher = Publisher(engine, location, NOTHING_THERE, single_writer=not engine.conditional(), keep_old=0)
    publisher.publish(encode_objects(whole, url=location), whole.generation, names, ())


def _sweep(engine: Engine, location: str) -> None:
    """Remove what attempts left that did not win, then the parts; the plan last, so that a kill changes nothing."""
    manifest = decode_objects(bytes(engine.get(NAME, MAX_FILE_BYTES).data), url=location)
    used = {record.name for record in manifest.objects}
    engine.delete([entry.key for entry in engine.list("data/") if entry.key not in used])
    engine.delete([entry.key for entry in engine.list(PARTS) if entry.key != _PLAN])
    engine.delete([_PLAN])


def _described(rows: Any, number: int, location: str) -> tuple[dict[Path, Group], dict[Path, LeafSpec]]:
    """Return the header and the leaves of the rows of a task, which are dense tensors all."""
    found = unwrap(rows)
    if not isinstance(found, Container) or not found.batch_size or not found.batch_size[0]:
        shape = f" of batch size {list(found.batch_size)}" if isinstance(found, Container) else ""
        raise InvalidTypeError(
            f"fn returned {type(rows).__name__}{shape} for task {number} of {location}, not a TensorDict with rows"
        )
    groups, specs = describe(rows)
    wrong = [(*path, key) for path, group in groups.items() for key in group.values]
    wrong += [path for path, group in groups.items() if group.kind == STACK_KIND or group.extra]
    wrong += [path for path, spec in specs.items() if path[:-1] not in groups or spec.shape[:1] != found.batch_size[:1]]
    if wrong:
        raise UnsupportedError(
            f"{location}: build writes dense tensors, and {path_text(wrong[0])} of task {number} is something else",
            hint="strings, values, nested tensors and lazy stacks: save each task to a place of its own, and read "
            "the places as one with tdstore.concat",
        )
    return groups, specs
