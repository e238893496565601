"""Operations on whole storages: checkpoints, copies, state dicts, longer and wider tables."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import tdstore
from tdstore import StoreHandle, TensorDict
from tdstore.dtypes import dtype_name
from tdstore.errors import BatchSizeError, InvalidStateError, InvalidTypeError, StateDictError
from tdstore.rl.kinds import is_container
from tdstore.rl.storages.places import (
    Found,
    Place,
    keeps,
    make_table,
    memory_table,
    new_header,
    open_table,
    table_over,
)
from tdstore.rl.tables.conversion import columns_of, flatten_rows, length_of, structure_of
from tdstore.rl.tables.live import LiveTable
from tdstore.rl.tables.row_sets import blocks_of
from tdstore.rl.tables.state import LENGTH, State, new_numbers
from tdstore.rl.tables.stored import CachedTable, StoredTable
from tdstore.rl.tables.structure import Structure
from tdstore.rl.tables.table import STATE, UNDO, Table, undo_bytes
from tdstore.rl.types import Rows
from tdstore.store import Cap
from tdstore.types import LeafSpec, Path, Read, Write, path_text

if TYPE_CHECKING:
    from tdstore import TensorDictBase
    from tdstore.rl.storages.lazy import LazyStorage

METADATA = "storage_metadata.json"


# -- checkpoints -------------------------------------------------------------------------------
def dump(storage: LazyStorage, path: str) -> None:
    """Write a checkpoint of a storage into a folder."""
    if storage._table is None and not storage.shared_init:
        raise InvalidStateError(f"this {type(storage).__name__} has no rows yet: there is nothing to write to {path}")
    table = storage._ready()
    with storage._alone():
        if _is_own_place(storage, path):
            storage.flush()
            table = storage._ready()
        else:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            with _replaced(path):
                if storage._save_hooks:
                    data = storage.get(slice(None))
                    for hook in storage._save_hooks:
                        data = hook(data, path=path)
                    _write_data(data, storage, path)
                else:
                    _write_rows(storage, table, path)
        if os.path.isdir(path):
            _write_metadata(storage, path)


@contextlib.contextmanager
def _replaced(path: str) -> Iterator[None]:
    """Let an existing checkpoint be replaced: a folder with files beside its leaves would not be."""
    target = FilePath(path) / METADATA
    before = target.read_bytes() if target.is_file() else None
    if before is not None:
        target.unlink()
    try:
        yield
    except BaseException:
        if before is not None and target.parent.is_dir():
            target.write_bytes(before)
        raise


def _write_rows(storage: LazyStorage, table: Table, path: str) -> None:
    state = storage._state
    place = Place("memmap", path, {"preallocate": False})
    made = make_table(place, storage._structure, table.capacity, storage.ndim, mode="w")
    try:
        _copy(table, made, state)
        made.flush()
    finally:
        made.close()


def _is_own_place(storage: LazyStorage, path: str) -> bool:
    location = storage._place.location
    if location is None or "://" in location:
        return location is not None and location == path
    return os.path.realpath(path) == os.path.realpath(location)


def _write_data(data: Any, storage: LazyStorage, path: str) -> None:
    lead = length_of(data, storage.ndim)
    structure = structure_of(data, storage.ndim, lead[1:])
    place = Place("memmap", path, {"preallocate": False})
    made = make_table(place, structure, max(1, lead[0]), storage.ndim, mode="w")
    try:
        _write_all(made, structure, data, lead[0])
        made.commit(storage._state._replace(length=lead[0], scattered=0))
        made.flush()
    finally:
        made.close()


def _write_metadata(storage: LazyStorage, path: str) -> None:
    structure = storage._structure
    about: dict[str, Any] = {"metadata": {}, "is_pytree": structure.is_pytree, "len": len(storage)}
    if structure.is_pytree:
        capacity = storage.capacity
        about["metadata"] = {
            ".".join(c.path): {"dtype": dtype_name(c.dtype), "shape": [capacity, *structure.inner, *c.shape]}
            for c in structure.columns
        }
    target = FilePath(path) / METADATA
    beside = target.with_name(f".{METADATA}.{os.getpid()}")
    beside.write_text(json.dumps(about))
    beside.replace(target)


def load(storage: LazyStorage, path: str) -> None:
    """Take over a checkpoint."""
    plan_load(storage, path)[1]()


def plan_load(storage: LazyStorage, path: str) -> tuple[int | None, Callable[[], None]]:
    """Check that a storage can take over a checkpoint; nothing is changed.

    Returns:
        The rows of the first dimension for which it then has room (None: known only after the load), and the function
        that takes the checkpoint over.
    """
    storage._refuse_removed()
    if _is_own_place(storage, path) and not storage._load_hooks:
        room = _room_in(storage._place) if storage._table is None else storage.capacity
        return room, partial(_load_own, storage, path)
    found = _opened(path)
    try:
        if not storage._load_hooks:
            room = _room_for(storage, found, path)
            return room, partial(_take_over, storage, found, path)
        data, room = _through_hooks(storage, found)
        return room, partial(_take_rows, storage, found, data)
    except BaseException:
        found.table.close()
        raise


def _room_in(place: Place) -> int | None:
    found = open_table(place, "r")
    if isinstance(found, Found):
        found.table.close()
        return found.capacity
    found.close()
    return None


def _load_own(storage: LazyStorage, path: str) -> None:
    with storage._lock:
        if storage._table is None:
            found = open_table(storage._place, storage._mode)
            if isinstance(found, StoreHandle):
                found = _adopted_with_length(found, storage, path)
            storage._uses(found.table, found.structure)
        elif storage._known is not None:
            storage._known = storage._table.state


def _opened(path: str) -> Found:
    """Open the rows of a checkpoint, to read."""
    found = open_table(Place(None, path, {}), "r")
    if isinstance(found, Found):
        return found
    found.close()  # a checkpoint of another program: a folder of memory-mapped tensors
    td = tdstore.open(path)
    structure = structure_of(td, 1)
    capacity = int(td.batch_size[0])
    table = memory_table(structure, capacity, torch.device("cpu"))
    _write_all(table, structure, td, capacity)
    length = min(capacity, _length_beside(path, capacity))
    table.commit(State(length=length, cursor=length % capacity, write_count=length))
    return Found(table, structure, capacity, 1)


def _length_beside(path: str, default: int) -> int:
    try:
        return int(json.loads((FilePath(path) / METADATA).read_text())["len"])
    except FileNotFoundError:
        return default


def _adopted_with_length(handle: StoreHandle, storage: LazyStorage, path: str) -> Found:
    td = tdstore.open(path)
    found = adopted(handle, structure_of(td, storage.ndim, tuple(td.batch_size[1 : storage.ndim])), storage.ndim)
    rows = _length_beside(path, 0) // found.table.slots_per_row
    found.table.commit(State(length=rows, cursor=rows % found.capacity, write_count=rows, scattered=1))
    return found


def _through_hooks(storage: LazyStorage, found: Found) -> tuple[Any, int]:
    """Return what the hooks make of the rows of a checkpoint, and how many rows the storage has room for."""
    if found.structure.is_pytree:
        raise InvalidStateError("load hooks take TensorDicts and tensors, and the rows here are dicts or tuples")
    state = found.table.state
    slots = torch.arange(state.length * found.table.slots_per_row, device="cpu").numpy()
    data = found.structure.build(found.table.gather(slots), (len(slots),))
    out = None if storage._table is None else storage.get(slice(None))
    for hook in storage._load_hooks:
        data = hook(data, out=out)
    lead = length_of(data, storage.ndim)
    room = storage.capacity if storage._table is not None else -(-storage.max_size // max(1, math.prod(lead[1:])))
    if lead[0]:
        storage.check_rows(data)
    if lead[0] > room:
        raise BatchSizeError(f"the load hooks return {lead[0]} rows, and this storage has room for {room}")
    return data, room


def _take_rows(storage: LazyStorage, found: Found, data: Any) -> None:
    try:
        storage.empty()
        storage.set(slice(0, length_of(data)[0]), data)
    finally:
        found.table.close()


def _room_for(storage: LazyStorage, found: Found, path: str) -> int:
    """Return how many rows a storage has room for.

    Raises:
        BatchSizeError: the rows of a checkpoint are of another form, or more. StoreError: the storage is read only.
    """
    if storage._table is None:
        room = -(-storage.max_size // max(1, math.prod(found.structure.inner)))
    else:
        room = storage._table.capacity
        storage._table.check_writable()
        differs = storage._structure.same_rows(found.structure)
        if differs:
            raise BatchSizeError(f"the checkpoint {path} has other rows than this storage: {'; '.join(differs)}")
    length = found.table.state.length
    if length > room:
        raise BatchSizeError(
            f"the checkpoint {path} has {length} rows, and this storage has room for {room}",
            hint=f"make it with max_size={length * found.table.slots_per_row}",
        )
    return room


def _take_over(storage: LazyStorage, found: Found, path: str) -> None:
    try:
        with storage._alone():
            _room_for(storage, found, path)
            if storage._table is None:
                storage._make(found.structure)
            _fit_values(storage, found.structure)
            table, state = storage._ready(), found.table.state
            cursor = state.cursor
            if found.capacity != table.capacity and (state.length == found.capacity or cursor >= table.capacity):
                cursor = state.length % table.capacity
            after = state._replace(cursor=cursor, scattered=1, epoch=storage._state.epoch + 1, pending=0)
            if table.publish is None:
                storage._commit(table, State(scattered=1, epoch=after.epoch))
            _copy(found.table, table, after)
            storage._known = None if storage._known is None else after
    finally:
        found.table.close()


def _fit_values(storage: LazyStorage, structure: Structure) -> None:
    wider = {c.path: c for c in structure.columns}
    columns = [
        c.wider(max(c.shape[-1], wider[c.path].shape[-1])) if c.values else c for c in storage._structure.columns
    ]
    if columns != storage._structure.columns:
        storage._widen(columns)


def copy_rows(source: LazyStorage, target: LazyStorage) -> None:
    """Copy rows, length and cursor into a storage that has none."""
    with source._alone():
        target._make(source._structure)
        _copy(source._ready(), target._ready(), source._state)
        target._known = target._ready().state
        target.flush()


def flattened(source: LazyStorage, target: LazyStorage) -> LazyStorage:
    """Write the visible slots into a storage of one dimension of slots, and return it."""
    rows = flatten_rows(source.get(slice(None)), 1 + len(source._ready().inner))
    if len(source):
        target.set(slice(0, len(source)), rows)
    return target


def _copy(source: Table, target: Table, state: State) -> None:
    """Copy the visible rows by blocks, then the counters; values may become wider."""
    places = {c.path: k for k, c in enumerate(source.columns)}
    for rows in blocks_of(slice(0, state.length), source.row_bytes):
        stored = source.look(rows)
        values = [_as_wide(stored[places[c.path]], c.shape[-1] if c.values else None) for c in target.columns]
        target.write(rows, [value.cpu() for value in values])
    target.commit(state)


def _as_wide(value: Tensor, width: int | None) -> Tensor:
    if width is None or value.shape[-1] == width:
        return value
    room = value.new_zeros((*value.shape[:-1], width))
    room[..., : value.shape[-1]] = value
    return room


def _write_all(table: Table, structure: Structure, data: Any, rows: int) -> None:
    """Write data of that structure into the first rows."""
    if rows:
        table.write(slice(0, rows), columns_of(structure, data, length_of(data, 1 + len(structure.inner))))


# -- tables that change ----------------------------------------------------------------------
def adopted(handle: StoreHandle, structure: Structure, ndim: int) -> Found:
    """Make rows of a storage of leaves that something else wrote.

    Raises:
        BatchSizeError: the leaves are of another form.
    """
    url = handle.store.url
    sizes = {spec.shape[0] for spec in handle.specs.values() if spec.shape}
    capacity = min(sizes, default=0)
    wanted = structure.specs(capacity)
    for path, spec in wanted.items():
        there = handle.specs.get(path)
        if there is None or there.shape != spec.shape or there.dtype != spec.dtype:
            handle.close()
            raise BatchSizeError(
                f"what lies in {url} are other rows than the data: {path_text(path)} is "
                + (
                    "missing"
                    if there is None
                    else f"{list(there.shape)}, {there.dtype}, not {list(spec.shape)}, {spec.dtype}"
                ),
                hint="choose another place, or remove this one",
            )
    extra = {STATE: LeafSpec((LENGTH,), "int64")}
    if keeps(handle):
        size = undo_bytes(structure.columns, capacity, math.prod(structure.inner))
        extra[UNDO] = LeafSpec((size,), "uint8")
    handle.store.create(extra)
    handle.store.write([Write(STATE, (), torch.from_numpy(new_numbers(State())))])
    handle.commit(new_header(structure, capacity, ndim, UNDO in extra), {**handle.specs, **extra})
    return Found(table_over(handle, structure, capacity), structure, capacity, ndim)


def lengthened(found: Found, capacity: int) -> Found:
    """Return the same rows with a larger capacity."""
    assert isinstance(found.table, (LiveTable, StoredTable))
    handle = found.table.handle
    if Cap.RESIZE not in handle.store.caps:
        raise handle.store.unsupported(Cap.RESIZE)
    lengths = {column.path: capacity for column in found.structure.columns}
    handle.store.resize(lengths)
    specs = {**handle.specs, **found.structure.specs(capacity)}
    undo = UNDO in specs
    if undo:
        size = undo_bytes(found.structure.columns, capacity, math.prod(found.structure.inner))
        specs[UNDO] = LeafSpec((size,), "uint8")
        handle.store.create({UNDO: specs[UNDO]})
    handle.commit(new_header(found.structure, capacity, found.ndim, undo), specs)
    return Found(table_over(handle, found.structure, capacity), found.structure, capacity, found.ndim)


def with_columns(table: Table, structure: Structure, ndim: int, state: State) -> Table:
    """Add columns of zeros after the present ones: the whole change, or none of it."""
    if isinstance(table, CachedTable):
        table.flush()
        table = table.stored
    fresh = structure.columns[len(table.columns) :]
    if isinstance(table, (LiveTable, StoredTable)):
        handle, capacity = table.handle, table.capacity
        with handle.changing():
            more = {c.path: LeafSpec((capacity, *structure.inner, *c.shape), dtype_name(c.dtype)) for c in fresh}
            handle.store.create(more)
            _with_header({**handle.specs, **more}, handle, structure, capacity, ndim)
        return table_over(handle, structure, capacity)
    old = table.tensors  # type: ignore[attr-defined]
    added = memory_table(Structure(0, fresh, structure.inner), table.capacity, old[0].device)
    made = type(table)(structure.columns, table.capacity, table.inner, [*old, *added.tensors])  # type: ignore[call-arg,attr-defined]
    made.commit(state)
    return made


def _with_header(
    specs: dict[Path, LeafSpec], handle: StoreHandle, structure: Structure, capacity: int, ndim: int
) -> None:
    """Commit other columns, with the space for undoing a write of them."""
    if UNDO in specs:
        specs[UNDO] = LeafSpec((undo_bytes(structure.columns, capacity, math.prod(structure.inner)),), "uint8")
        handle.store.create({UNDO: specs[UNDO]})
    handle.commit(new_header(structure, capacity, ndim, UNDO in specs), specs)


def widened(table: Table, structure: Structure, ndim: int, state: State) -> Table:
    """Return the same rows with longer values."""
    if isinstance(table, CachedTable):
        table.flush()
        table = table.stored
    if not isinstance(table, (LiveTable, StoredTable)):
        device = table.tensors[0].device  # type: ignore[attr-defined]
        made = memory_table(structure, table.capacity, device)
        _copy(table, made, state)
        return made
    handle, capacity = table.handle, table.capacity
    wider = [new for old, new in zip(table.columns, structure.columns, strict=True) if old != new]
    specs = structure.specs(capacity)
    beside: dict[Path, Path] = {("_replay_wider", str(k)): column.path for k, column in enumerate(wider)}
    with handle.changing():
        handle.store.create({name: specs[path] for name, path in beside.items()})
        for name, path in beside.items():
            for rows in blocks_of(slice(0, state.length), specs[path].nbytes // capacity):
                index = (slice(rows.start, rows.stop, 1),)
                old = handle.store.read([Read(path, index)])[0]
                handle.store.write([Write(name, index, _as_wide(old, specs[path].shape[-1]))])
        handle.store.rename(beside)
        _with_header({**handle.specs, **specs}, handle, structure, capacity, ndim)
    return table_over(handle, structure, capacity)


def table_of(handle: StoreHandle, structure: Structure) -> Table:
    """Return the table of a place that was opened again, in another process."""
    return table_over(handle, structure, int(handle.groups[()].extra["replay"]["capacity"]))


# -- state dicts -------------------------------------------------------------------------------
def state_of(storage: LazyStorage) -> dict[str, Any]:
    """Return all slots as a state dict."""
    if storage._table is None:
        return {"_storage": {}, "initialized": False, "_len": 0}
    structure, table = storage._structure, storage._table
    if structure.is_pytree:
        raise InvalidTypeError(
            "a state dict has TensorDicts and tensors, and these rows are dicts or tuples: use dumps(path)"
        )
    columns = [column.clone() for column in table.look(slice(0, table.capacity))]
    data = structure.build(columns, (table.capacity, *structure.inner))
    rows = data if isinstance(data, Tensor) else data.state_dict()
    return {"_storage": rows, "initialized": True, "_len": len(storage), "_classes": class_names(data)}


def load_state(storage: LazyStorage, state_dict: dict[str, Any]) -> None:
    """Copy the rows of a state dict."""
    plan_state(storage, state_dict)()


def plan_state(storage: LazyStorage, state_dict: Mapping[str, Any]) -> Callable[[], None]:
    """Check that a storage can take over a state dict, and return the function that does so; nothing is changed."""
    missing = [name for name in ("_storage", "_len") if name not in state_dict]
    if missing:
        raise StateDictError(f"this is no state dict of a storage: it has no {', '.join(missing)}")
    rows, length = state_dict["_storage"], int(state_dict["_len"])
    if not state_dict.get("initialized", True) or (not isinstance(rows, Tensor) and not rows):
        return storage.empty
    data: Any = rows if isinstance(rows, Tensor) else td_of_state(rows, state_dict.get("_classes", ()))
    dims = length_of(data, storage.ndim)
    structure = None
    if storage._table is None:
        structure = structure_of(data, storage.ndim, dims[1:])
        inner = max(1, math.prod(structure.inner))
        room = -(-storage.max_size // inner)
    else:
        storage.check_rows(data)
        inner, room = storage._table.slots_per_row, storage._table.capacity
    count = length // inner
    if not 0 <= count <= min(room, dims[0]):
        raise BatchSizeError(
            f"the state dict has {dims[0]} rows and the length {count}, and this storage has room for {room}"
        )
    return partial(_take_state, storage, structure, data, count)


def _take_state(storage: LazyStorage, structure: Structure | None, data: Any, count: int) -> None:
    with storage._alone():
        if structure is not None:
            storage._make(structure)
        values = storage._prepare(data, length_of(data, storage.ndim))
        table = storage._ready()
        epoch = storage._state.epoch + 1
        storage._commit(table, State(scattered=1, epoch=epoch))
        if count:
            table.write(slice(0, count), [None if v is None else v[:count] for v in values])
        after = State(length=count, cursor=count % table.capacity, write_count=count, scattered=1, epoch=epoch)
        storage._commit(table, after)


def class_names(data: Rows) -> list[tuple[list[str], str]]:
    """Return the paths of the tensorclasses in data, and their names, innermost first."""
    td = tdstore.unwrap_tensorclass(data)
    if not is_container(td):
        return []
    below = [(key, class_names(value)) for key, value in td.items() if is_container(value)]
    found = [([key, *path], name) for key, names in below for path, name in names]
    return found if td is data else [*found, ([], tdstore.tensorclass_name(type(data)))]


def td_of_state(state: Mapping[str, Any], classes: Iterable[Any]) -> TensorDictBase:
    """Return the TensorDict of a state dict, as an object of the tensorclass that it was, if this process has that.

    Args:
        state: of `td.state_dict()`.
        classes: of `class_names`; none in state dicts of torchrl, and of earlier releases.

    Raises:
        StateDictError: the classes are malformed.
    """
    td: Any = TensorDict({}, batch_size=[]).load_state_dict(state, strict=False)
    try:
        for path, name in classes:
            cls = tdstore.find_tensorclass(str(name))
            if cls is not None and path:
                td.set(tuple(path), tdstore.wrap_tensorclass(cls, td[tuple(path)]))
            elif cls is not None:
                td = tdstore.wrap_tensorclass(cls, td)
    except (KeyError, TypeError, ValueError) as error:
        raise StateDictError(f"_classes of the state dict is malformed: {error}") from error
    made: TensorDictBase = td
    return made


def rows_of(storage: LazyStorage) -> list[tuple[Any, torch.dtype, torch.Size]]:
    """Return the visible rows of each column, as bytes.

    torch would send tensors to a spawned process as memory that both share, which is gone when these copies are.
    """
    columns = storage._ready().look(slice(0, storage._state.length))
    return [(c.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy(), c.dtype, c.shape) for c in columns]


def load_rows(storage: LazyStorage, rows: list[tuple[Any, torch.dtype, torch.Size]]) -> None:
    """Write the result of `rows_of` into the table of a storage."""
    values = [torch.from_numpy(array).view(dtype).reshape(shape) for array, dtype, shape in rows]
    length = len(values[0]) if values else 0
    table = storage._ready()
    if length:
        table.write(slice(0, length), values)
    storage._commit(table, State(length=length))
