"""Storages that are allocated by the first write: in memory, on a device, or on any backend."""

from __future__ import annotations

import contextlib
import math
import multiprocessing.context
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

import torch

from tdstore import StoreHandle
from tdstore.arguments import check_flags, check_number
from tdstore.errors import (
    BatchSizeError,
    InvalidArgumentError,
    InvalidStateError,
    OptionError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
    StoreTimeoutError,
    UnsupportedError,
)
from tdstore.rl.storages import checkpoints
from tdstore.rl.storages.places import (
    Cleanup,
    Found,
    Place,
    between_processes,
    device_of,
    find_place,
    make_table,
    memory_table,
    open_table,
    place_of_many,
    remove,
    scratch,
)
from tdstore.rl.storages.tabular import OnMismatch, TabularStorage
from tdstore.rl.tables.columns import Column
from tdstore.rl.tables.conversion import structure_of
from tdstore.rl.tables.live import LiveTable
from tdstore.rl.tables.state import State
from tdstore.rl.tables.stored import CachedTable, StoredTable
from tdstore.rl.tables.structure import Structure
from tdstore.rl.tables.table import Table
from tdstore.rl.torchrl import torchrl_storage
from tdstore.rl.types import BackendLike, PathLike
from tdstore.types import DeviceLike, Mode

INIT_TIMEOUT = 60.0
"""Seconds that a reader waits for the first writer of a shared storage."""
STORED = (LiveTable, StoredTable, CachedTable)


class LazyStorage(TabularStorage):
    """A table of at most `max_size` rows on any backend, allocated when the first row is written.

    Rows, their number and the position of the writer change together: after a process was killed at any moment,
    `LazyStorage.open(place)` finds only complete rows.

    Args:
        max_size: number of slots. With several dimensions of slots it is rounded up to whole rows.
        storage: None, "cpu", "cuda", ... for tensors in memory or on that device; the name of a backend; a URL
            (`redis://host/0/name`, `s3://bucket/name`, ...); or a `Backend`.
        path: where the rows are, for a backend that is named. Without it they are temporary.
        device: "cpu" and "auto" for a backend; for tensors, the device ("auto": that of the first data).
        ndim: number of leading dimensions of the data that are slots.
        existsok: take over what is at `path`: its space, not its rows.
        shared_init: the storage may be sent to other processes of this host before its first write. The process that
            writes first allocates the rows; all write and read the same ones.
        auto_cleanup: remove the rows when the storage is garbage collected, or this process ends. Default: whether
            they are temporary.
        on_mismatch: what happens to data with other keys or dtypes. "raise" refuses it; "peer" leaves out unexpected
            keys, keeps the old values of missing ones, and casts.
        compilable: no effect; accepted for callers of torchrl.
        consolidated: keep all tensors in one buffer (tensors in memory, or on a device).
        init_timeout: seconds that a reader of a shared storage waits for the first write.
        write_buffer: for places that are slow to reach: all rows are in memory too, and new ones go to the place in one
            commit as soon as this many wait, at `flush`, at a checkpoint, and at the end.
        **options: of the backend.

    Raises:
        ValueError: an argument is out of its range. RuntimeError: two arguments exclude each other.

    Example:
        >>> storage = LazyStorage(100)
        >>> storage.set(range(3), TensorDict({"obs": torch.ones(3, 4)}, [3]))
        >>> len(storage), storage[0]["obs"].shape
        (3, torch.Size([4]))
    """

    def __init__(
        self,
        max_size: int,
        storage: BackendLike | None = "memmap",
        *,
        path: PathLike | None = None,
        device: DeviceLike | None = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        shared_init: bool = False,
        auto_cleanup: bool | None = None,
        compilable: bool = False,
        on_mismatch: OnMismatch = "raise",
        consolidated: bool = False,
        init_timeout: float = INIT_TIMEOUT,
        write_buffer: int = 0,
        **options: Any,
    ) -> None:
        if isinstance(max_size, bool) or not isinstance(max_size, int) or not 1 <= max_size < 1 << 62:
            raise InvalidArgumentError(f"max_size is a number of slots, at least 1 and below 2**62, not {max_size!r}")
        if isinstance(ndim, bool) or not isinstance(ndim, int) or ndim < 1:
            raise InvalidArgumentError(f"ndim is a number of dimensions, at least 1, not {ndim!r}")
        if on_mismatch not in ("raise", "peer"):
            raise InvalidArgumentError(f"on_mismatch is 'raise' or 'peer', not {on_mismatch!r}")
        check_flags(existsok=existsok, shared_init=shared_init, compilable=compilable, consolidated=consolidated)
        if auto_cleanup is not None:
            check_flags(auto_cleanup=auto_cleanup)
        check_number(init_timeout, "init_timeout", 0.0)
        if shared_init and compilable:
            raise InvalidStateError("shared_init and compilable cannot be combined: a compiled program takes no lock")
        if write_buffer and shared_init:
            raise InvalidStateError("write_buffer and shared_init cannot be combined: others would not see what waits")
        if isinstance(write_buffer, bool) or not isinstance(write_buffer, int) or write_buffer < 0:
            raise InvalidArgumentError(f"write_buffer is a number of rows, not {write_buffer!r}")
        super().__init__(max_size, ndim)
        self._write_buffer = write_buffer
        self.on_mismatch = on_mismatch
        self.existsok = existsok
        self.shared_init = shared_init
        self.init_timeout = init_timeout
        self._consolidated = consolidated
        self._mode: Mode = "r+"
        self._place, self._device = find_place(storage, path, options)
        in_memory = self._place.storage is None and self._place.location is None
        self._device = device_of(device, self._device, in_memory=in_memory)
        self._follows_data = in_memory and device in (None, "auto") and storage in (None, "memory")
        """Whether the rows are on the device of the first data, and name the one that it names."""
        if consolidated and not in_memory:
            raise OptionError("consolidated is for tensors in the memory: a backend lays its leaves out itself")
        if in_memory and shared_init:
            raise InvalidStateError(
                "tensors in the memory of one process cannot be made by another one: "
                "shared_init needs a backend, for example storage='memmap'"
            )
        in_shm = self._place.storage == "shared"
        if shared_init:
            self._place = place_of_many(self._place)
        self._folder: str | None = None
        """What is removed in the end."""
        temporary = self._place.location is None and self._place.storage not in (None, "shared", "cuda")
        if temporary:
            assert self._place.storage is not None
            self._folder, location = scratch(self._place.storage, in_memory=in_shm)
            self._place = self._place._replace(location=location)
        self.auto_cleanup = auto_cleanup if auto_cleanup is not None else temporary
        if self.auto_cleanup and self._folder is None:
            self._folder = self._place.location
        self._end = Cleanup.of(self, self._folder) if self.auto_cleanup and self._folder else None
        self._removed = False

    # -- places --------------------------------------------------------------------------------
    @classmethod
    def open(
        cls, place: PathLike, mode: Mode = "r+", *, storage: str | None = None, write_buffer: int = 0, **options: Any
    ) -> Self:
        """Open the rows that a storage wrote, with their length and the cursor of the writer.

        A write that a killed process left unfinished is taken back first, so every visible row is whole.

        Args:
            place: path or URL.
            mode: "r+" to go on writing; "r" to read only.
            storage: name of the backend, if the place does not determine it.
            write_buffer, **options: as the constructor's.

        Raises:
            StoreNotFoundError: nothing is there. ValueError: no storage wrote it. CorruptStoreError: damaged.

        Example:
            >>> storage = LazyStorage.open("runs/replay")  # doctest: +SKIP
        """
        if mode not in ("r", "r+"):
            raise OptionError(f"a storage is opened with mode 'r' or 'r+', not {mode!r}")
        where = Place(storage, os.fspath(place), dict(options))
        found = open_table(where, mode)
        if isinstance(found, StoreHandle):
            found.close()
            raise StoreError(
                f"{where.text} was not written by a storage: it has no length and no cursor",
                url=where.location,
                hint="read it with tdstore.open, or pass existsok=True to use its room",
            )
        made = cls.__new__(cls)
        LazyStorage.__init__(
            made, found.capacity * math.prod(found.structure.inner), storage, path=place, ndim=found.ndim,
            existsok=True, auto_cleanup=False, write_buffer=write_buffer, **options,
        )  # fmt: skip
        made._mode = mode
        made._uses(found.table, found.structure)
        return made

    @property
    def place(self) -> str:
        """Path or URL of the rows; for rows in memory, what they are in."""
        return self._place.text

    @property
    def others_write(self) -> bool:
        """Whether other processes write the rows too, and their writes are visible here.

        This is the case with `shared_init=True`, and if live rows (memmap, shared) are opened with mode "r".
        """
        return self.shared_init or (self._mode == "r" and isinstance(self._table, LiveTable))

    @property
    def device(self) -> torch.device:
        """Device of what is read."""
        return self._device if isinstance(self._device, torch.device) else torch.device("cpu")

    @property
    def storage_name(self) -> str | None:
        """Name of the backend; None for tensors in memory."""
        return self._place.storage

    def _uses(self, table: Table, structure: Structure) -> None:
        if self._write_buffer and isinstance(table, StoredTable) and self._mode == "r+":
            table = CachedTable(table, self._write_buffer)
        super()._uses(table, structure)
        if not self._follows_data:
            structure.name_device(self.device)
        if self.others_write:
            self._known = None
        if self._end is not None and isinstance(table, STORED):
            self._end.holds(table)

    def _make(self, structure: Structure) -> None:
        self._refuse_removed()
        capacity = -(-self.max_size // max(1, math.prod(structure.inner)))
        if self._place.location is None and self._place.storage in (None, "cuda"):
            if self._consolidated and (structure.is_pytree or structure.is_tensor):
                raise InvalidArgumentError(
                    "consolidated puts the tensors of a TensorDict in one buffer, and this is none"
                )
            if self._follows_data and structure.device is not None:
                self._device = structure.device
            device = self._device if isinstance(self._device, torch.device) else torch.device("cpu")
            self._uses(memory_table(structure, capacity, device, consolidated=self._consolidated), structure)
            return
        if self.shared_init and self._open_shared():
            return
        if self.existsok:
            found = self._found_there(structure, capacity)
            if found is not None:
                self._uses(found.table, found.structure)
                return
        try:
            mode: Mode = "w" if self.existsok else "x"
            temporary = self.auto_cleanup and not self.shared_init and self._place.storage != "shared"
            table = make_table(self._place, structure, capacity, self.ndim, mode=mode, temporary=temporary)
        except StoreExistsError as error:
            error.hint = "pass existsok=True to use its room, or open its rows with LazyStorage.open()"
            raise
        self._uses(table, structure)

    def _found_there(self, structure: Structure, capacity: int) -> Found | None:
        """Return the table in the place, if rows of that structure fit; lengthened if the capacity must grow."""
        try:
            found = open_table(self._place, "r+")
        except StoreNotFoundError:
            return None
        if isinstance(found, StoreHandle):
            found = checkpoints.adopted(found, structure, self.ndim)
        differs = found.structure.same_rows(structure)
        if differs:
            found.table.close()
            raise BatchSizeError(
                f"the rows in {self.place} are others than the data: {'; '.join(differs)}",
                hint="choose another place, or remove this one",
            )
        if found.capacity < capacity:
            found = checkpoints.lengthened(found, capacity)
        found.table.commit(State(scattered=1, epoch=found.table.state.epoch + 1))
        return found

    def _widen(self, columns: list[Column]) -> None:
        table = self._ready()
        if self.shared_init:
            raise UnsupportedError(
                f"a value is longer than the rows of {self.place} have room for, and other processes have them open",
                url=self.place,
                hint="let the first row have the longest value",
            )
        structure = Structure(self._structure.root, columns, self._structure.inner)
        self._uses(checkpoints.widened(table, structure, self.ndim, self._state), structure)

    def add_entries(self, data: Any) -> None:
        """Add the entries that `data` has and the rows lack; they are zero in all rows, strings are None.

        Args:
            data: rows; their values are not written.

        Raises:
            UnsupportedError: other processes write the rows too, or the rows are those of a `TensorStorage`.
        """
        with self._alone():
            table = self._ready()
            if self.shared_init or not self._may_change:
                raise UnsupportedError(
                    f"entries cannot be added to the rows of {self.place}: "
                    + ("other processes have them open" if self.shared_init else "they are tensors of the caller"),
                    url=self.place,
                    hint="write all entries from the first row on",
                )
            structure = self._structure.with_more(structure_of(data, self.ndim, self._structure.inner))
            if len(structure.columns) > len(self._structure.columns):
                self._uses(checkpoints.with_columns(table, structure, self.ndim, self._state), structure)

    _may_change: ClassVar[bool] = True
    """Whether another table may take the place of the existing one."""

    # -- several processes ------------------------------------------------------------------------
    def _alone(self) -> AbstractContextManager[Any]:
        return self._exclusive() if self.shared_init else self._lock

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock, between_processes(self._place.text):
            if self._table is None:
                self._open_shared()
            elif self._table.state.pending:  # its writer died
                self._table.undo()
            yield

    def _open_shared(self) -> bool:
        try:
            found = open_table(self._place, "r+")
        except StoreNotFoundError:
            return False
        assert isinstance(found, Found)
        self._uses(found.table, found.structure)
        return True

    def _ready(self) -> Table:
        self._refuse_removed()
        if self._table is None and self.shared_init:
            end = time.monotonic() + self.init_timeout
            while not self._open_shared():
                if time.monotonic() > end:
                    message = f"no process wrote into {self.place} within {self.init_timeout:g} seconds"
                    raise StoreTimeoutError(message, hint="start the process that writes, or raise init_timeout")
                time.sleep(0.01)
        return super()._ready()

    def __len__(self) -> int:
        """Return the number of visible slots."""
        if self._table is None and self.shared_init and not self._removed:
            self._open_shared()
        return TabularStorage.__len__(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state: for another process the place of the rows, for a copy the rows themselves."""
        state = {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_attached", "_end", "_table", "_known")}
        state["_folder"] = None
        stored = isinstance(self._table, STORED)
        spawning = multiprocessing.context.get_spawning_popen() is not None
        if self._table is None and not self.shared_init and spawning:
            raise InvalidStateError(
                "this storage has no rows yet, and each process would make rows of its own: write a row first, or "
                "make the storage with shared_init=True"
            )
        if spawning and stored:
            assert isinstance(self._table, STORED)
            if isinstance(self._table, CachedTable):
                self._table.flush()
            self._table.handle.store.flush()
            state["rows"] = self._table.handle
        elif self._table is not None:
            state["rows"] = checkpoints.rows_of(self)
            state["counters"] = (self.cursor, self.write_count)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the rows, or take over a copy of them."""
        rows, counters = state.pop("rows", None), state.pop("counters", None)
        structure = state.pop("_structure")
        self.__dict__.update(state)
        self._lock, self._attached, self._end = threading.RLock(), [], None
        self._table, self._known, self._structure = None, None, structure
        if isinstance(rows, StoreHandle):
            found = checkpoints.table_of(rows, structure)
            self._uses(found, structure)
        elif rows is not None:
            self._place = Place(None, None, {})
            self._device = torch.device("cpu")
            self.shared_init = False
            capacity = -(-self.max_size // max(1, math.prod(structure.inner)))
            self._uses(memory_table(structure, capacity, self.device), structure)
            checkpoints.load_rows(self, rows)
            self.set_counters(*counters)

    # -- the end ---------------------------------------------------------------------------------
    def flush(self) -> None:
        """Commit what was written: durable where the backend is, with checksums."""
        with self._lock:
            if self._table is not None and self._mode == "r+":
                self._table.flush()

    def close(self) -> None:
        """Commit, and release the rows; reading and writing fail after that."""
        with self._lock:
            if self._table is not None:
                self._table.close()
            self._table, self.initialized, self._known = None, False, None
            self._removed = True

    def cleanup(self) -> bool:
        """Remove the rows from their place; return whether there were any. Later reads and writes fail."""
        with self._lock:
            if self._removed:
                return False
            if self._end is not None:
                done = self._end()
            else:
                if isinstance(self._table, STORED):
                    self._table.close()
                done = remove(self._place.location or "", os.getpid()) if self._is_local() else False
            self._table, self.initialized, self._removed = None, False, True
            return done

    def _is_local(self) -> bool:
        return self._place.location is not None and "://" not in self._place.location

    def _refuse_removed(self) -> None:
        if self._removed:
            raise InvalidStateError(
                f"the rows in {self.place} were removed or closed: this storage cannot be used any more"
            )

    # -- checkpoints -------------------------------------------------------------------------------
    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint: the rows, and `storage_metadata.json`.

        If the rows are already in that folder, nothing is copied: they are committed, and the files stay the same.
        Otherwise the rows that were written are copied, into a folder that is complete or not there.

        Raises:
            RuntimeError: nothing was ever written.
        """
        checkpoints.dump(self, os.fspath(path))

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Take over a checkpoint, with its length and cursor.

        Before the first write, rows are allocated for it; its capacity may differ. If the checkpoint is in the place of
        this storage, it is opened there.

        Raises:
            RuntimeError: it has more rows than `max_size`, or rows of another structure.
        """
        checkpoints.load(self, os.fspath(path))

    def state_dict(self) -> dict[str, Any]:
        """Return all `max_size` slots as a state dict, with whether rows were written, and how many.

        Raises:
            TypeError: rows are dicts or tuples.
        """
        with self._lock:
            return checkpoints.state_of(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the rows of a state dict, and take over its length."""
        with self._alone():
            checkpoints.load_state(self, dict(state_dict))

    def copy_to(self, storage: BackendLike = "memmap", *, path: PathLike | None = None, **options: Any) -> LazyStorage:
        """Copy the rows, block by block, into a new place; return the storage over it.

        Args:
            storage, path, **options: as for `LazyStorage`.

        Example:
            >>> kept = LazyStorage.open("runs/replay").copy_to("zarr", path="replay.zarr")  # doctest: +SKIP
        """
        self._ready()
        made = LazyStorage(self.max_size, storage, path=path, ndim=self.ndim, on_mismatch=self.on_mismatch, **options)
        checkpoints.copy_rows(self, made)
        return made

    def all_slots(self) -> Any:
        """Return all `max_size` slots, with zeros or former rows beyond the length; views of live tensors."""
        with self._lock:
            table = self._ready()
            return self._structure.build(table.look(slice(0, table.capacity)), (table.capacity, *table.inner))

    @property
    def _storage(self) -> Any:
        """All slots, under the name that storages of torchrl use; None before the first write."""
        return self.all_slots() if self.initialized else None

    def flatten(self) -> LazyStorage:
        """Return the visible slots as a storage of one dimension of slots, in memory."""
        return checkpoints.flattened(self, LazyStorage(max(1, len(self)), None, on_mismatch=self.on_mismatch))

    def __call__(self) -> Any:
        """Return this storage as one of torchrl, whose buffers call a function passed as `storage=`.

        Raises:
            MissingDependencyError: `torchrl` is not installed.

        Example:
            >>> buffer = torchrl.data.ReplayBuffer(storage=LazyStorage(1000, "zarr"))  # doctest: +SKIP
        """
        return torchrl_storage(self)

    def __repr__(self) -> str:
        """Return the place, and how much of it is filled."""
        return f"{type(self).__name__}({self.place}, {len(self)} of {self.max_size} slots)"
