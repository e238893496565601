"""Places of the rows of a storage: create one, or open an existing one."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

import tdstore
from tdstore import StoreHandle
from tdstore.arguments import as_device, check_path
from tdstore.errors import (
    CorruptStoreError,
    DirtyStoreError,
    InvalidArgumentError,
    OptionError,
    SecondWriterError,
    StoreBusyError,
    StoreError,
    UnsupportedError,
)
from tdstore.header import Group
from tdstore.hookspecs import Backend
from tdstore.lifetime import Ending
from tdstore.registry import registry
from tdstore.rl.tables.live import LiveTable
from tdstore.rl.tables.state import LENGTH, State, new_numbers
from tdstore.rl.tables.stored import StoredTable
from tdstore.rl.tables.structure import RESERVED, Structure, decode_structure
from tdstore.rl.tables.table import FIRST_UNDO_BYTES, STATE, UNDO, ArrayTable, DeviceTable, Table, undo_bytes, undo_rows
from tdstore.rl.types import BackendLike, PathLike
from tdstore.store import Cap
from tdstore.types import DeviceLike, LeafSpec, Mode, Path, Write

VERSION = 1


class Place(NamedTuple):
    """A backend and a location; both None: memory, or another device."""

    storage: str | None
    location: str | None
    options: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The place, for messages."""
        return self.location or (f"a new place of {self.storage}" if self.storage else "the memory")


def find_place(
    storage: BackendLike | None, path: PathLike | None, options: Mapping[str, Any]
) -> tuple[Place, torch.device]:
    """Find the place that `storage=` and `path=` specify, and the device of tensors that are in no store.

    Raises:
        UnknownBackendError: no backend has that name. OptionError: a path for tensors in memory.
    """
    if isinstance(storage, Backend):
        storage = storage.name
    if path is not None:
        check_path(path, "path")
    location = None if path is None else os.fspath(path)
    if storage is None and location is not None:
        return Place(None, location, dict(options)), torch.device("cpu")
    if storage is None or storage == "memory" or str(storage).split(":")[0] in ("cpu", "cuda"):
        if location is not None:
            raise OptionError(f"path={location!r}: rows in the memory have no place", hint="name a backend: storage=")
        if options:
            raise OptionError(f"a storage in the memory has no option {next(iter(options))!r}")
        return Place(None, None, {}), torch.device("cpu" if storage in (None, "memory") else storage)
    storage = str(storage)  # an error for what no backend can be named
    if "://" in storage:
        if location is not None:
            raise OptionError(f"storage={storage!r} is a place already, and path={location!r} another one")
        return Place(None, storage, dict(options)), torch.device("cpu")
    registry().get(storage)
    return Place(storage, location, dict(options)), torch.device("cpu")


def device_of(asked: DeviceLike | None, default: torch.device, *, in_memory: bool) -> torch.device:
    """Return the device that `device=` specifies.

    Raises:
        ValueError: rows in a backend are read to the CPU; or there is no such device.
    """
    if asked in (None, "auto"):
        return default
    text = str(asked)
    kind = text.split(":")[0]
    if not in_memory:
        if kind != "cpu":
            raise InvalidArgumentError(
                f"device={text!r}: rows in a backend are read to the CPU; move batches with "
                f"transform=lambda td: td.to({text!r})"
            )
        return default
    if kind == "cpu" or default.type != "cpu":
        return default
    try:
        device = as_device(asked)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(f"device={text!r}: torch knows no such device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError(f"device={text!r}: this machine has no CUDA device")
    return device


def place_of_many(place: Place) -> Place:
    """Return a place that several processes can write.

    Raises:
        UnsupportedError: its backend takes one writer at a time.
    """
    backend = registry().resolve(place.location, place.storage)
    if backend is not None and Cap.CONCURRENT_WRITE not in backend.caps:
        raise UnsupportedError(
            f"shared_init: {backend.name} takes one writer at a time",
            url=place.location,
            hint="memmap, shared and redis take many",
        )
    if place.storage == "shared" and place.location is None:
        # A segment ends with the process that made it, which is whichever writes first: files in memory do not.
        return place._replace(storage="memmap")
    return place


def scratch(storage: str, *, in_memory: bool = False) -> tuple[str, str]:
    """Create a temporary folder, on a disk or in memory, and return a location in it for a backend."""
    memory = "/dev/shm" if in_memory and os.path.isdir("/dev/shm") else None
    folder = tempfile.mkdtemp(prefix="tdstore-replay-", dir=memory)
    suffixes = registry().get(storage).suffixes
    return folder, os.path.join(folder, f"rows{suffixes[0] if suffixes else ''}")


def remove(folder: str, creator: int) -> bool:
    """Remove a folder or file of rows, only in the process that made it; return whether anything was removed."""
    if os.getpid() != creator or not os.path.lexists(folder):
        return False
    if os.path.isdir(folder) and not os.path.islink(folder):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder)
    return True


class Cleanup:
    """Removal of a place: after its owner was dropped, at the end of the process, or at SIGTERM."""

    pending: ClassVar[set[Cleanup]] = set()

    def __init__(self, owner: object, folder: str) -> None:
        self.folder, self.pid = folder, os.getpid()
        self.tables: list[Table] = []
        self.removed = False
        self._ending = Ending(owner, self._remove, folder)
        Cleanup.pending.add(self)

    @classmethod
    def of(cls, owner: object, folder: str) -> Cleanup:
        """Create one for a storage, and listen to SIGTERM."""
        _listen_to_sigterm()
        return cls(owner, folder)

    def holds(self, table: Table) -> None:
        """Name the table that is closed with the place."""
        self.tables = [table]

    def __call__(self) -> bool:
        """Remove the place now; return whether this call removed something."""
        before = self.removed
        self._ending()
        return self.removed and not before

    def _remove(self) -> None:
        Cleanup.pending.discard(self)
        self.removed = remove(self.folder, self.pid)
        for table in self.tables:
            with contextlib.suppress(StoreError, OSError):
                table.close()
        self.tables.clear()
        remove(self.folder, self.pid)


def _listen_to_sigterm() -> None:
    """Remove temporary rows at SIGTERM too, unless the application listens to it; it may do so later."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _guard_forks()
        signal.signal(signal.SIGTERM, _terminated)


@functools.cache
def _guard_forks() -> None:
    """Give forked children the default action of SIGTERM: the rows are their parent's.

    CPython drops the signals that reach a child before its interpreter runs again, where a handler is in Python. A pool
    that ends while it replaces a worker would then wait for that worker for ever. So the signal is blocked from before
    the fork until the child has the default action.
    """
    masks: dict[int, set[int | signal.Signals]] = {}  # by thread: the mask before the fork

    def before() -> None:
        if signal.getsignal(signal.SIGTERM) is _terminated:
            masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def in_child() -> None:
        mask = masks.pop(threading.get_ident(), None)
        masks.clear()
        if mask is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def in_parent() -> None:
        if (mask := masks.pop(threading.get_ident(), None)) is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    os.register_at_fork(before=before, after_in_child=in_child, after_in_parent=in_parent)


def _terminated(number: int, frame: FrameType | None) -> None:
    for cleanup in list(Cleanup.pending):
        cleanup()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# -- making ------------------------------------------------------------------------------------
def make_table(
    place: Place,
    structure: Structure,
    capacity: int,
    ndim: int,
    *,
    mode: Mode = "x",
    state: State | None = None,
    temporary: bool = False,
) -> Table:
    """Allocate rows of zeros in a place, which is committed with the first counters.

    Args:
        place: the place.
        structure: columns of a row.
        capacity: rows of the first dimension.
        ndim: dimensions of slots.
        mode: "x" refuses a place where there is something; "w" replaces it.
        state: the first counters.
        temporary: whether the rows end with this process, their only writer. Live rows that are overwritten are then
            not saved first, which doubles the speed of large writes; after a kill, the rows end at the first of these.

    Raises:
        StoreExistsError: something is there.
    """
    handle = StoreHandle.open(place.location, storage=place.storage, mode=mode, **place.options)
    try:
        specs = structure.specs(capacity)
        specs[STATE] = LeafSpec((LENGTH,), "int64")
        per_row = _product(structure.inner)
        if keeps(handle) and not (temporary and _is_live(handle)):
            specs[UNDO] = LeafSpec((undo_bytes(structure.columns, capacity, per_row),), "uint8")
        handle.store.create(specs)
        handle.store.write([Write(STATE, (), torch.from_numpy(new_numbers(state or State())))])
        table = _table_over(handle, structure, capacity, undo_rows(structure.columns, capacity, per_row), UNDO in specs)
        table.publish = lambda: handle.commit(new_header(structure, capacity, ndim, UNDO in specs), specs)
        return table
    except BaseException:
        handle.close()
        raise


def keeps(handle: StoreHandle) -> bool:
    """Check whether rows of a store outlive this process, or are visible to others."""
    return bool(handle.store.caps & (Cap.PERSISTENT | Cap.SHARED))


def table_over(handle: StoreHandle, structure: Structure, capacity: int) -> Table:
    """Build the table of an open store."""
    saved = handle.groups[()].extra["replay"].get("undo_rows")
    if saved is None:  # the first places did not note it
        saved = undo_rows(structure.columns, capacity, _product(structure.inner), FIRST_UNDO_BYTES)
    return _table_over(handle, structure, capacity, int(saved), UNDO in handle.specs)


def _table_over(handle: StoreHandle, structure: Structure, capacity: int, saved: int, keeps_old: bool) -> Table:
    if _is_live(handle):
        return LiveTable(structure.columns, capacity, structure.inner, handle, saved=saved if keeps_old else 0)
    return StoredTable(structure.columns, capacity, structure.inner, handle, saved=saved)


def _is_live(handle: StoreHandle) -> bool:
    # Live leaves that no other process sees reach their place at a commit: a kill would lose what was written since.
    caps = handle.store.caps
    return Cap.VIEW in caps and (Cap.SHARED in caps or not keeps(handle)) and Cap.DIRECT_DEVICE not in caps


def memory_table(structure: Structure, capacity: int, device: torch.device, *, consolidated: bool = False) -> Table:
    """Allocate a table of zeros in memory, or on a device; large ones on the CPU use no memory until written."""
    shapes = [(capacity, *structure.inner, *column.shape) for column in structure.columns]
    if consolidated:
        tensors = _in_one_buffer(structure, shapes, device)
    elif device.type == "cpu":
        tensors = [_lazy_zeros(shape, c.dtype) for shape, c in zip(shapes, structure.columns, strict=True)]
    else:
        tensors = [
            torch.zeros(shape, dtype=c.dtype, device=device) for shape, c in zip(shapes, structure.columns, strict=True)
        ]
    kind = ArrayTable if device.type == "cpu" else DeviceTable
    return kind(structure.columns, capacity, structure.inner, tensors)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    nbytes = _product(shape) * dtype.itemsize
    if nbytes < 1 << 16:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    # torch.zeros writes its zeros; numpy's come from the system, page by page as they are touched.
    return torch.from_numpy(np.zeros(nbytes, np.uint8)).view(dtype).view(shape)


def _in_one_buffer(structure: Structure, shapes: list[tuple[int, ...]], device: torch.device) -> list[torch.Tensor]:
    sizes = [_product(shape) * c.dtype.itemsize for shape, c in zip(shapes, structure.columns, strict=True)]
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // 64) * 64)
    room = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
    return [
        room[at : at + size].view(c.dtype).view(shape)
        for at, size, c, shape in zip(starts, sizes, structure.columns, shapes, strict=False)
    ]


def _product(sizes: tuple[int, ...]) -> int:
    made = 1
    for size in sizes:
        made *= size
    return made


def new_header(structure: Structure, capacity: int, ndim: int, undo: bool) -> dict[Path, Group]:
    """Build the header: every folder of rows is a TensorDict and opens as one."""
    lead = (capacity, *structure.inner)
    keys: dict[Path, dict[str, None]] = {(): {}}
    for column in structure.columns:
        for depth in range(len(column.path)):
            keys.setdefault(column.path[:depth], {})[column.path[depth]] = None
    known = {node.path: node for node in structure.collections()}
    groups = {}
    for path, below in sorted(keys.items(), key=lambda item: len(item[0])):
        node = known.get(path)
        kind = (
            "TensorDict" if node is None or node.kind is None else f"tensorclass:{tdstore.tensorclass_name(node.kind)}"
        )
        batch = lead if node is None else (*lead, *node.batch)
        groups[path] = Group(batch_size=batch, kind=kind, keys=tuple(below))
    names = RESERVED if undo else RESERVED[:1]
    saved = undo_rows(structure.columns, capacity, _product(structure.inner))
    about = {
        "undo_rows": saved,
        "version": VERSION,
        "capacity": capacity,
        "ndim": ndim,
        "structure": structure.encode(),
    }
    root = groups[()]
    # The reserved leaves have no field in a class: the whole is a TensorDict, and its rows are of the class.
    groups[()] = Group(
        batch_size=lead, keys=root.keys, values={name: {"unbatched": 1} for name in names}, extra={"replay": about}
    )
    return groups


# -- opening -----------------------------------------------------------------------------------
class Found(NamedTuple):
    """An open place of rows."""

    table: Table
    structure: Structure
    capacity: int
    ndim: int


def open_table(place: Place, mode: Mode) -> Found | StoreHandle:
    """Open the rows of a place; the open handle alone where no storage made it.

    A writer that was killed may have left a write unfinished: in mode "r+" the rows that it was overwriting are put
    back, so that all visible ones are whole.

    Raises:
        StoreNotFoundError: nothing is there. CorruptStoreError: it is not what a storage makes.
        SecondWriterError: another writer has the rows, and its backend takes one at a time.
    """
    try:
        handle = _opened(place, mode)
    except StoreBusyError as error:
        if mode == "r" or type(error) is not StoreBusyError:
            raise
        raise SecondWriterError(error.message, url=error.url, hint=error.hint) from error
    try:
        about = handle.groups[()].extra.get("replay")
        if about is None:
            return handle
        url = handle.store.url
        if not isinstance(about, dict) or about.get("version") != VERSION:
            raise CorruptStoreError(f"{url} is a storage of an unknown version", url=url)
        structure = decode_structure(about.get("structure"), url)
        capacity, ndim = int(about["capacity"]), int(about["ndim"])
        expected = structure.specs(capacity)
        for path, spec in expected.items():
            there = handle.specs.get(path)
            if there is None or there.shape != spec.shape or there.dtype != spec.dtype:
                raise CorruptStoreError(f"the leaf {'/'.join(path)} of {url} is not what its storage says", url=url)
        table = table_over(handle, structure, capacity)
        if mode == "r+":
            table.undo()
        return Found(table, structure, capacity, ndim)
    except BaseException:
        handle.close()
        raise


def _opened(place: Place, mode: Mode) -> StoreHandle:
    try:
        return StoreHandle.open(place.location, storage=place.storage, mode=mode, **place.options)
    except DirtyStoreError:
        # The counters say which rows are whole, whatever a dead writer left after them.
        options = {**place.options, "recover": "accept"}
        return StoreHandle.open(place.location, storage=place.storage, mode=mode, **options)


@contextlib.contextmanager
def between_processes(key: str) -> Iterator[None]:
    """Hold a lock that all processes of this host share, by the name of a place; it ends with its holder."""
    name = hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
    file = os.path.join(tempfile.gettempdir(), f"tdstore-replay-{os.getuid()}-{name}.lock")
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
