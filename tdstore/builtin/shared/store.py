"""The `shared` backend: leaves in one file of shared memory, seen by every process that has it open.

Anonymous stores reach other processes by fork, or as arguments and queue items of
`multiprocessing`; named ones (`shm://name`) by name, from anywhere, while their owner is running.
See `docs/reference/shared-memory.md`.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import Tensor

from tdstore.builtin.resident import TensorStore, put
from tdstore.builtin.shared import handoff, named_files
from tdstore.builtin.shared.arena import Arena
from tdstore.builtin.shared.catalogue import Catalogue, Entry, check_path, encode_catalogue
from tdstore.builtin.shared.marks import DirtyMarkers, clear_markers, dirty_leaves
from tdstore.errors import (
    OptionError,
    StoreBusyError,
    StoreIOError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.header import Header
from tdstore.lifetime import Ending
from tdstore.pickling import rebuild
from tdstore.registry import split_scheme
from tdstore.store import Cap
from tdstore.storekit import accept_dirty, refusals
from tdstore.storekit.files import SAFE, io_errors
from tdstore.threads import without_interrupts
from tdstore.types import Fault, LeafSpec, Mode, Path, Recover, Write

ANONYMOUS = "shm://"
_Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
_swept_by = 0


def open_shared(
    location: str | SharedHandle | None = None,
    *,
    mode: Mode = "w",
    lock_timeout: float = 10.0,
    directory: str | None = None,
    preallocate: bool = True,
    recover: Recover | None = None,
) -> SharedStore:
    """Open a store in shared memory: `shm://name`, or an anonymous one without a location.

    Args:
        location: `"shm://name"`, a name, or None. Special characters of a name are percent-encoded.
            Or the handle of a store that another process sent; the other options are then those of its sender.
        mode: as every store; an anonymous one can only be new. "w" replaces a store of that name at
            its first `save_header`; processes that have the old one open keep it.
        lock_timeout: seconds to wait while another process changes the structure.
        directory: folder on a tmpfs instead of `TDSTORE_SHM_DIR` or `/dev/shm`.
        preallocate: allocate the memory of a leaf when it is created, so that a lack of it is an error
            there. False allocates it at the first write of each page, which then ends the process
            (SIGBUS) if there is none.
        recover: "accept" opens a store with leaves that a killed writer left half written.

    Raises:
        StoreNotFoundError: no such store, or its owner ended.
        StoreExistsError: mode "x" and it exists.
        DirtyStoreError: a writer was killed in the middle of writing the leaves it names.
        CorruptStoreError: the file is not a store, or truncated.
        UnsupportedError: not on Linux.

    Example:
        >>> store = open_shared("shm://readme-example")
        >>> store.create({("obs",): LeafSpec((4, 3), "float32")})
        >>> store.save_header(Header())
        >>> open_shared("shm://readme-example", mode="r").view(("obs",)).shape
        torch.Size([4, 3])
        >>> remove("shm://readme-example")
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(
            f"the 'shared' backend needs Linux, this is {sys.platform}", hint="a memmap store is shared by its path"
        )
    if recover not in (None, "accept"):
        raise OptionError(f"recover must be None or 'accept', not {recover!r}")
    if isinstance(location, SharedHandle):
        return attach_shared(location)
    name, url = _name_of(location)
    timeout = float(lock_timeout)
    handoff.collect()
    if not name:
        return _open_anonymous(mode, timeout, directory, preallocate)
    folder = named_files.directory_of(directory)
    path = named_files.public_path(folder, name, url)
    _sweep_once(folder, timeout)
    if mode == "a":
        mode = "r+" if named_files.is_there(path) else "x"
    if mode in ("r", "r+"):
        fd = named_files.open_public(path, write=mode == "r+", url=url)
        arena = Arena(fd, url, writable=mode == "r+", preallocate=preallocate)
        store = SharedStore(handoff.remember(arena), timeout=timeout, path=path)
        store._refuse_dirty(recover)
        return store
    if mode == "x" and named_files.is_there(path):
        raise refusals.place_exists(url)
    private, fd = named_files.make_private(folder, url, timeout)
    try:
        arena = handoff.remember(Arena.create(fd, url, preallocate=preallocate))
    except BaseException:
        found = os.stat(private)
        named_files.discard((found.st_dev, found.st_ino), private, os.getpid())
        raise
    return SharedStore(arena, timeout=timeout, path=path, private=private, replace=mode == "w")


def remove(location: str, *, directory: str | None = None, lock_timeout: float = 10.0) -> None:
    """Remove a named store now, instead of at the end of its owner; processes that have it open keep it.

    Raises:
        StoreNotFoundError: none of that name. CorruptStoreError: a file of another program has its name.
    """
    name, url = _name_of(location)
    path = named_files.public_path(named_files.directory_of(directory), name, url)
    found = named_files.inode_of(path, url)
    if found is None:
        raise StoreNotFoundError(f"there is no shared store {url}", url=url)
    named_files.remove_file(found, path, timeout=lock_timeout, url=url)


def list_stores(location: str = ANONYMOUS, *, directory: str | None = None) -> list[str]:
    """List the named stores whose owner is running.

    Args:
        location: `shm://`, or the beginning of their names: `shm://run/` lists `shm://run/1`.
        directory: folder on a tmpfs instead of `TDSTORE_SHM_DIR` or `/dev/shm`.
    """
    name, _ = _name_of(location)
    return [
        f"{ANONYMOUS}{found}"
        for found in named_files.published(named_files.directory_of(directory))
        if found.startswith(name)
    ]


def sweep(directory: str | None = None, *, lock_timeout: float = 10.0) -> list[str]:
    """Remove the files of named stores whose owner was killed; returns their names.

    Also done when a process first opens a named store.
    """
    return named_files.sweep(named_files.directory_of(directory), lock_timeout)


class SharedStore(TensorStore):
    """Leaves in one arena of shared memory.

    All processes see row writes at once. The structure (which leaves, their lengths, the header) is
    that of the time when this object was opened, or last refreshed or saved.
    """

    caps = (
        Cap.WRITE
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.VIEW
        | Cap.SHARED
        | Cap.CONCURRENT_READ
        | Cap.CONCURRENT_WRITE
        | Cap.DISCARD
    )

    def __init__(
        self,
        arena: Arena,
        *,
        timeout: float = 10.0,
        path: str | None = None,
        private: str | None = None,
        replace: bool = True,
    ) -> None:
        self.url = arena.url
        self.writable = arena.writable
        self._arena = arena
        self._timeout = timeout
        self._path = path
        self._private = private
        self._replace = replace
        self._marks = DirtyMarkers(arena, timeout)
        self._room: dict[int, int] = {}
        """By offset: how many bytes a leaf that this store has grown may take there."""
        self._remove_private: Callable[[], object] | None = None
        if private is not None:
            # Closed, or dropped, before its first commit: leave no trace.
            discard = partial(named_files.discard, arena.inode, private, os.getpid())
            self._remove_private = Ending(self, discard, self.url)
        self._adopt(arena.catalogue())

    # -- the catalogue ----------------------------------------------------------------------
    def specs(self, paths: Sequence[Path]) -> list[LeafSpec]:
        self._check_open()
        self._check_all(paths)
        if not self._staged and self._generation == self._adopted.generation:
            return [*map(self._adopted.specs.__getitem__, paths)]
        made = LeafSpec.of_checked
        found = map(self._entries.__getitem__, paths)
        return [made(e.shape, e.dtype, e.fill, prod(e.shape) * e.dtype.itemsize) for e in found]

    def _save(self, header: Header) -> None:
        unchanged = not self._staged and self._generation and self._private is None and header == self._header
        if not unchanged:
            self._commit(header)
        if self._private is not None:
            assert self._path is not None
            named_files.publish(
                self._arena.inode,
                self._private,
                self._path,
                replace=self._replace,
                url=self.url,
                timeout=self._timeout,
            )
            self._private = None
        elif self._path is not None and not os.fstat(self._arena.fd).st_nlink:
            raise StoreNotFoundError(
                f"{self.url} was removed or replaced since it was opened: data saved here would not be found",
                url=self.url,
                hint="open it again",
            )

    def refresh(self) -> bool:
        """Adopt the commits of other processes; returns whether there were any.

        Raises:
            StoreBusyError: this store has unsaved changes.
        """
        self._check_open()
        if self._arena.generation() == self._generation:
            return False
        if self._staged:
            raise self._overtaken()
        self._adopt(self._arena.catalogue())
        return True

    def generation(self) -> object:
        """Return the token of the memory and the number of its last commit; None before the first one.

        Where the name leads to other memory by now, each call returns another value.
        """
        self._check_open()
        if self._private is not None:
            return None
        if self._path is not None and not named_files.leads_to(self._path, self._arena.inode):
            return object()
        return self._arena.token, self._arena.generation()

    # -- the data ---------------------------------------------------------------------------
    def _create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        for path in leaves:
            check_path(path, self.url)
        # The first commit finds its place in the same mapping.
        reserve = 4096 + 256 * len(leaves)
        with self._arena.locked(self._timeout):
            offsets = self._arena.allocate([spec.nbytes for spec in leaves.values()], reserve=reserve)
        for (path, spec), offset in zip(leaves.items(), offsets, strict=True):
            entry = Entry(spec.shape, spec.dtype, spec.fill_value, offset)
            leaf = self._arena.tensor(entry)
            if spec.fill_value:
                leaf.fill_(spec.fill_value)
            self._put_entry(path, entry, leaf)

    def _write(self, wanted: Sequence[tuple[Tensor, Write]]) -> None:
        # Rows that no other process can see need no dirty marker.
        offsets = [0 if self._is_fresh(w) else self._entries[w.path].offset for _, w in wanted]
        if not any(offsets):
            for leaf, w in wanted:
                put(leaf, w.index, w.value)
            return
        words = self._arena.words
        mark = self._marks.take()
        try:
            for (leaf, w), offset in zip(wanted, offsets, strict=True):
                words[mark] = offset
                put(leaf, w.index, w.value)
        finally:
            self._marks.give(mark)

    def _discard(self) -> None:
        self._entries = dict(self._committed)
        self._leaves = dict(zip(self._entries, self._arena.tensors([*self._entries.values()]), strict=True))
        self._staged = False

    def _delete(self, paths: Sequence[Path]) -> None:
        super()._delete(paths)
        for path in paths:
            del self._entries[path]
        self._staged = True

    def _rename(self, moves: Mapping[Path, Path]) -> None:
        for new in moves.values():
            check_path(new, self.url)
        moved = [(new, self._entries.pop(old), self._leaves.pop(old)) for old, new in moves.items()]
        for path, entry, leaf in moved:
            self._put_entry(path, entry, leaf)

    def _resize(self, lengths: Mapping[Path, int]) -> None:
        """Set the length of the first dimension; others see it once `save_header` was called.

        A leaf that grows gets new memory, which earlier views do not share; one that grows again gets twice as much as
        it needs, and from then on grows in place, until that is used up.
        """
        specs = dict(zip(lengths, self.specs(list(lengths)), strict=True))
        grown = {}
        for path, length in lengths.items():
            spec = specs[path]
            new = spec.replace(shape=(length, *spec.shape[1:]))
            entry = self._entries[path]._replace(shape=new.shape)
            if length > spec.shape[0] and (entry.offset not in self._room or new.nbytes > self._room[entry.offset]):
                grown[path] = new
                continue
            old_length = spec.shape[0]
            self._put_entry(path, entry, self._arena.tensor(entry))
            if length > old_length:
                self._leaves[path][old_length:].fill_(spec.fill_value)
            elif length < old_length and not self._is_ours(path, length):
                self._room.pop(entry.offset, None)  # a tensor may still show the removed rows
        self._grow(grown)

    def _grow(self, grown: dict[Path, LeafSpec]) -> None:
        """Allocate larger memory for leaves, and copy their rows."""
        old = {path: (self._entries[path].offset, self._leaves[path]) for path in grown}
        for path, spec in grown.items():
            again = old[path][0] in self._room
            wide = spec.replace(shape=(2 * spec.shape[0] if again else spec.shape[0], *spec.shape[1:]))
            try:
                self._create({path: wide})
            except StoreIOError:
                wide = spec
                self._create({path: wide})
            entry = self._entries[path]._replace(shape=spec.shape)
            self._put_entry(path, entry, self._arena.tensor(entry))
            self._room[entry.offset] = wide.nbytes
            leaf = old[path][1]
            self._leaves[path][: len(leaf)] = leaf

    def _is_fresh(self, w: Write) -> bool:
        rows = w.index[0] if w.index else slice(0, 0)
        return self._staged and isinstance(rows, slice) and self._is_ours(w.path, rows.start)

    def _is_ours(self, path: Path, rows: int) -> bool:
        """Check whether no other process can have seen the rows of a leaf from `rows` on: they were never committed."""
        committed = self._arena.catalogue().entries.get(path)
        if committed is None or committed.offset != self._entries[path].offset:
            return True
        return bool(committed.shape) and committed.shape[0] <= rows

    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        """Report leaves whose writer was killed in the middle of a write. There are no checksums of live memory."""
        self._check_open()
        ended = dirty_leaves(self._arena)
        return [
            Fault(path, f"process {ended[entry.offset].pid} ended in the middle of writing it")
            for path, entry in self._entries.items()
            if entry.offset in ended and (paths is None or path in paths)
        ]

    def nbytes_stored(self) -> int | None:
        self._check_open()
        return self._arena.used()

    def _close(self) -> None:
        """Release the memory; existing tensors stay valid. A saved, named store stays until its owner ends."""
        self._leaves = {}
        if self._private is not None and self._remove_private is not None:
            self._remove_private()
        self._marks = DirtyMarkers(self._arena, self._timeout)
        handoff.collect()

    # -- sending ------------------------------------------------------------------------------
    def reopen_token(self) -> tuple[SharedHandle, Mode, dict[str, Any]]:
        return self.share_handle(), "r+" if self.writable else "r", {}

    def share_handle(self) -> SharedHandle:
        """Return a handle to send to another process: a few words, whatever the size of the store.

        It works wherever `multiprocessing` pickles (queues, pipes, arguments of a process, also of
        `torch.multiprocessing`); that of a named store can be pickled anywhere.
        """
        self._check_open()
        return SharedHandle(self)

    def _message(self) -> handoff.Message:
        if self.writable and (self._staged or not self._generation):
            self._commit(self._header)
        return handoff.send(self._arena)

    @property
    def _by_name(self) -> bool:
        return self._path is not None and self._private is None

    # -- inside -------------------------------------------------------------------------------
    def _adopt(self, catalogue: Catalogue) -> None:
        self._adopted = catalogue
        self._generation = catalogue.generation
        self._header = catalogue.header
        self._entries = dict(catalogue.entries)
        self._committed: Mapping[Path, Entry] = catalogue.entries
        self._leaves = dict(zip(self._entries, self._arena.tensors([*self._entries.values()]), strict=True))
        self._staged = False

    def _put_entry(self, path: Path, entry: Entry, leaf: Tensor) -> None:
        self._entries[path] = entry
        self._leaves[path] = leaf
        self._staged = True

    def _commit(self, header: Header) -> None:
        data = encode_catalogue(self._entries, header, url=self.url)
        with self._arena.locked(self._timeout):
            if self._arena.generation() != self._generation:
                raise self._overtaken()
            self._publish(data, header)

    @without_interrupts
    def _publish(self, data: bytes, header: Header) -> None:
        self._generation = self._arena.commit(data)
        self._header = header
        self._committed = dict(self._entries)
        self._staged = False

    def _overtaken(self) -> StoreBusyError:
        hint = "open it again, or refresh() before the first change; only row writes need no turns"
        return refusals.overtaken(self.url, hint)

    def _refuse_dirty(self, recover: str | None) -> None:
        faults = self.verify()
        accepted = accept_dirty(
            self.url,
            [fault.path for fault in faults],
            accept=recover == "accept",
            writer=faults[0].reason.partition(" ended ")[0] if faults else "",
            hint="recover='accept' opens it with the rows of that write half old, half new",
        )
        if self.writable and accepted:
            clear_markers(self._arena, self._timeout)


class SharedHandle:
    """A reference to a shared store for another process; see `SharedStore.share_handle`."""

    __slots__ = ("_unused", "store")

    def __init__(self, store: SharedStore, *, unused: bool = False) -> None:
        self.store = store
        self._unused = unused

    def attach(self) -> SharedStore:
        """Open the store: the one that was made when this was received, the first time, else another one."""
        unused, self._unused = self._unused, False
        store = self.store
        if unused:
            return store
        return SharedStore(store._arena, timeout=store._timeout, path=store._path if store._by_name else None)

    def __reduce__(self) -> _Reduced:
        # Plain pickle: bytes that may be stored, or read anywhere. ForkingPickler does not come here.
        store = self.store
        if store._by_name:
            return rebuild, (
                "SharedHandle",
                store.url,
                os.path.dirname(store._path or ""),
                store.writable,
                store._arena.token,
            )
        raise _not_picklable(store)


def attach_shared(handle: SharedHandle) -> SharedStore:
    """Open the store of a handle: in the sender's own process, a second one on the same memory."""
    return handle.attach()


def _not_picklable(store: SharedStore) -> UnsupportedError:
    return UnsupportedError(
        f"an anonymous shared store ({store.url}) can be sent to processes of multiprocessing, not pickled otherwise",
        url=store.url,
        hint="give it a name (shm://NAME) for unrelated processes of this machine, or save it to a memmap store",
    )


def found(url: str, directory: str, writable: bool, token: bytes) -> SharedHandle:
    """Unpickle the handle of a named store."""
    store = open_shared(url, mode="r+" if writable else "r", directory=directory)
    if store._arena.token != token:
        raise StoreNotFoundError(
            f"{url} was replaced since this reference to it was made", url=url, hint=f"open {url} itself"
        )
    return SharedHandle(store, unused=True)


def _received(message: tuple[Any, ...]) -> SharedHandle:
    """Unpickle the handle of an anonymous store."""
    return SharedHandle(SharedStore(handoff.receive(handoff.Message(*message))), unused=True)


def _reduce_handle(handle: SharedHandle) -> _Reduced:
    if handle.store._by_name:
        return handle.__reduce__()
    return _received, (tuple(handle.store._message()),)


def _reduce_store(store: SharedStore) -> _Reduced:
    return attach_shared, (store.share_handle(),)


ForkingPickler.register(SharedHandle, _reduce_handle)
ForkingPickler.register(SharedStore, _reduce_store)


def _name_of(location: str | None) -> tuple[str, str]:
    scheme, name = split_scheme(location or "")
    if scheme not in ("", "shm"):
        raise OptionError(f"the 'shared' backend does not store at {location}", hint="shared stores are shm://NAME")
    return name, ANONYMOUS + name


def _open_anonymous(mode: Mode, timeout: float, directory: str | None, preallocate: bool) -> SharedStore:
    if mode in ("r", "r+"):
        raise StoreNotFoundError("an anonymous shared store cannot be opened again", hint="give it a name: shm://NAME")
    with io_errors(ANONYMOUS, "making a shared store"):
        if directory is None:
            fd = os.memfd_create("tdstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # A receiver that shortened it would end every process that has it mapped.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        else:
            # In the folder, but never under a name in it.
            fd = os.open(named_files.directory_of(directory), os.O_TMPFILE | os.O_RDWR | (SAFE & ~os.O_NOFOLLOW), 0o600)
    return SharedStore(handoff.remember(Arena.create(fd, ANONYMOUS, preallocate=preallocate)), timeout=timeout)


def _sweep_once(folder: str, timeout: float) -> None:
    global _swept_by
    if _swept_by != os.getpid():
        _swept_by = os.getpid()
        named_files.sweep(folder, timeout)
