"""The storage protocol: nine methods a backend must write; the rest has working defaults.

A store is an opened place that holds named leaves (arrays) and one small header. Batch dimensions,
nesting, locks and devices of a TensorDict are not its concern. See
`docs/reference/storage-protocol.md` for the contract in full and `tdstore.testing` for the
kit that checks it.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor

from tdstore import lifetime
from tdstore.errors import InvalidArgumentError, UnsupportedError
from tdstore.header import Header
from tdstore.index.ranges import check_writes as check_writes  # for backends, whose `write` calls it
from tdstore.index.rows import check_indices as check_indices  # for backends, whose `read` and `write` call it
from tdstore.index.tracing import keep_out
from tdstore.types import Fault, LeafSpec, Mode, Path, Read, Version, Write

if TYPE_CHECKING:
    from tdstore.tensordicts.redis_names import LazyStackedTensorDictStore as LazyStackedTensorDictStore
    from tdstore.tensordicts.redis_names import TensorDictStore as TensorDictStore

_CONTAINERS = frozenset({"LazyStackedTensorDictStore", "TensorDictStore"})
"""Names that code imports from this module. They are defined above this module, so they are looked up on access."""


def __getattr__(name: str) -> Any:
    if name in _CONTAINERS:
        return getattr(sys.modules["tdstore"], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Cap(enum.Flag):
    """Abilities of a store. Declared, never probed: the core uses declared abilities only."""

    NONE = 0
    WRITE = enum.auto()
    """`create`, `write`, `delete` and `save_header` work (in modes other than "r")."""
    PARTIAL_READ = enum.auto()
    """`read` takes an index; without it the core reads whole leaves."""
    PARTIAL_WRITE = enum.auto()
    """`write` takes an index; without it the core writes whole leaves."""
    RESIZE = enum.auto()
    """`resize` changes the length of the first dimension."""
    VIEW = enum.auto()
    """`view` returns live tensors: the store is resident."""
    SHARED = enum.auto()
    """Other processes that opened the store see writes."""
    PERSISTENT = enum.auto()
    """The data outlives the process."""
    CONCURRENT_READ = enum.auto()
    """Several threads may `read` one store object at once."""
    CONCURRENT_WRITE = enum.auto()
    """Many processes may write disjoint rows at once and lose none."""
    ASYNC = enum.auto()
    """`aread` is native, not a thread."""
    DIRECT_DEVICE = enum.auto()
    """Leaves live on a device other than the CPU."""
    DISCARD = enum.auto()
    """`discard` takes back what was not committed."""
    VERSIONS = enum.auto()
    """A commit can be made a version, and the opener takes `version=`."""


LIVE = Cap.VIEW | Cap.SHARED
"""Writes to tensors of such a store need no commit; it ends with the last of its tensors."""
_PERSISTENT, _LIVE = Cap.PERSISTENT.value, LIVE.value
_CHANGES = frozenset({"create", "write", "delete", "rename", "resize", "save_header", "save_version"})
"""Methods that change a store: from the first call on, the end of the process closes it if nothing else did."""
_STRUCTURE = frozenset({"create", "delete", "rename", "resize"})
_COMMITS = frozenset({"save_header", "save_version", "discard"})


def _tracked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep `uncommitted` and `restructured` of a store up to date around a method that changes it, or commits."""
    changes, commits = method.__name__ in _CHANGES, method.__name__ in _COMMITS
    structure = method.__name__ in _STRUCTURE

    @functools.wraps(method)
    def change(self: Store, *args: Any, **kwargs: Any) -> Any:
        if changes:
            caps = self.caps._value_  # `in` of an enum costs as much as a short write
            if caps & _PERSISTENT:
                lifetime.register(self, resident=caps & _LIVE == _LIVE)
            self.uncommitted = True
            if structure:
                self.restructured = True
        done = method(self, *args, **kwargs)
        if commits:
            self.uncommitted = self.restructured = False
        return done

    return change


def _unregistering(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def close(self: Store) -> Any:
        try:
            return method(self)
        finally:
            lifetime.unregister(self)

    return close


class Store(ABC):
    """Named leaves and one small header, at one location.

    How a store is opened is up to its backend's opener (`open_h5(location, *, mode="r", ...)`), whose modes mean:

    ==== =======================================================================================
    "r"  must exist; nothing is ever changed
    "r+" must exist; changed in place
    "w"  new, replacing what is there **when `save_header` is first called**, not before
    "x"  as "w", but `StoreExistsError` if anything is there
    "a"  as "r+" if it exists, else as "x"
    ==== =======================================================================================

    A store opened with "w" or "x" and closed before the first `save_header` leaves no trace.
    """

    caps: ClassVar[Cap] = Cap.NONE
    url: str
    """The location, for messages; never parsed."""
    writable: bool
    """False in mode "r"."""
    uncommitted: bool = False
    """Whether a method changed something since the last commit. Kept up to date by this class."""
    opened_as: str | None = None
    """Name of the backend whose opener made this, if the registry opened it; `reopen_token` is for that backend."""
    restructured: bool = False
    """Whether leaves were created, deleted, renamed or resized since the last commit. Kept up to date by this class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in Store.__dict__:  # the protocol
            method = cls.__dict__.get(name)
            if isinstance(method, FunctionType):
                if name in _CHANGES or name in _COMMITS:
                    method = _tracked(method)
                elif name == "close":
                    method = _unregistering(method)
                setattr(cls, name, method)
                keep_out(method)

    # -- catalogue: cheap, no data moves ---------------------------------------------------
    @abstractmethod
    def paths(self) -> Iterator[Path]:
        """Return the paths of all leaves, in any order (the header keeps the order)."""

    @abstractmethod
    def specs(self, paths: Sequence[Path]) -> list[LeafSpec]:
        """Return shape, dtype and fill value of each; `KeyNotFoundError` names a leaf that does not exist."""

    @abstractmethod
    def load_header(self) -> Header:
        """Return the header last saved; an empty one when the store is new or foreign."""

    @abstractmethod
    def save_header(self, header: Header) -> None:
        """Commit: written last, atomically. What was created, written or deleted before is now durable."""

    # -- data: many at a time, so that a wire or a disk can be kept busy --------------------
    @abstractmethod
    def create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        """Create leaves that read as their fill value, without allocating them in memory.

        A leaf that is already there is replaced. Unknown `LeafSpec.options` are an `OptionError`.
        """

    @abstractmethod
    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """Read the requested rows, in request order, each into memory of its own or into `Read.out`."""

    @abstractmethod
    def write(self, writes: Sequence[Write]) -> None:
        """Write values; where an index names a row twice the last value in its order wins.

        If it raises, the leaves read as before: no row of the call has changed.
        """

    @abstractmethod
    def delete(self, paths: Sequence[Path]) -> None:
        """Remove leaves; all must exist, else `KeyNotFoundError` and nothing is removed."""

    @abstractmethod
    def close(self) -> None:
        """Commit in-place writes and release every handle. A second call does nothing.

        What was written into leaves of the last commit is committed. A change of structure (`create`, `delete`,
        `rename`, `resize`) that no `save_header` committed is dropped.
        """

    # -- optional: each default is correct; override for speed or ability --------------------
    async def aread(self, reads: Sequence[Read]) -> list[Tensor]:
        """Read as `read`, without blocking the event loop. Override where the storage has async I/O of its own."""
        return await asyncio.to_thread(self.read, reads)

    def view(self, path: Path) -> Tensor:
        """Return the live tensor behind a leaf (VIEW)."""
        raise self.unsupported(Cap.VIEW)

    def resize(self, lengths: Mapping[Path, int]) -> None:
        """Set the length of the first dimension; new rows read as the fill value (RESIZE)."""
        raise self.unsupported(Cap.RESIZE)

    def rename(self, moves: Mapping[Path, Path]) -> None:
        """Move leaves, all at once: a swap swaps, and what was at a new name is replaced.

        All must exist, else `KeyNotFoundError` and nothing is moved. The default copies, one leaf at a time; override
        where a name can change without its data.
        """
        specs = dict(zip(moves, self.specs(list(moves)), strict=True))
        if len(set(moves.values())) < len(moves):
            raise InvalidArgumentError(f"two leaves of {self.url} cannot have the same name: {dict(moves)}")
        moves = {old: new for old, new in moves.items() if old != new}
        # Where a new name is also an old one, its values must be taken before they are overwritten.
        replaced = [old for old in moves if old in set(moves.values())]
        values = dict(zip(replaced, self.read([Read(old) for old in replaced]), strict=True))
        for old, new in sorted(moves.items(), key=lambda move: move[1] in values):
            value = values[old] if old in values else self.read([Read(old)])[0]
            self.create({new: specs[old]})
            self.write([Write(new, (), value)])
        gone = [old for old in moves if old not in set(moves.values())]
        if gone:
            self.delete(gone)

    def discard(self) -> None:
        """Take back every change since the last `save_header`, or since the store was opened (DISCARD).

        Afterwards, leaves, values and lengths are those of that commit, even if the storage refused a change in its
        middle. What was written through live tensors (VIEW) stays. So do rows that others see at once and may have
        written since (CONCURRENT_WRITE), unless they were written after the structure began to change.
        """
        raise self.unsupported(Cap.DISCARD)

    def save_version(self, header: Header, message: str) -> Version:
        """Commit as `save_header` does, and make the commit a version: both are there, or neither (VERSIONS).

        It takes space for what changed since the version before. `open(..., version=id)` reads it as it is now,
        whatever is written later.

        Args:
            header: the header.
            message: a text of at most 65,536 characters; may be empty.
        """
        raise self.unsupported(Cap.VERSIONS)

    def versions(self) -> list[Version]:
        """List the versions that are there now, whoever made them, oldest first (VERSIONS)."""
        raise self.unsupported(Cap.VERSIONS)

    def set_tag(self, name: str, version: str | None) -> None:
        """Give a tag to a version, and remove it from any other that has it (VERSIONS).

        Args:
            name: the tag.
            version: the id of the version; None removes the tag.

        Raises:
            StoreNotFoundError: there is no such version.
        """
        raise self.unsupported(Cap.VERSIONS)

    def drop_versions(self, versions: Sequence[str], grace: float) -> list[str]:
        """Drop versions, and remove what was dropped earlier and whose grace period is over (VERSIONS).

        Readers of a dropped version can go on for `grace` seconds. Versions with a tag are kept. If the call is killed
        at any moment, every other version stays readable.

        Args:
            versions: the ids; those that do not exist are ignored.
            grace: seconds.

        Returns:
            The ids of those that were dropped.
        """
        raise self.unsupported(Cap.VERSIONS)

    def flush(self) -> None:
        """Make earlier writes visible to other readers. Nothing to do by default."""

    def generation(self) -> object:
        """Return a value that differs once another process has committed; None where the store has none.

        Equal results mean that no other process committed between the calls. It is cheap, reads no data, and
        takes no lock, so that `refresh_` of a TensorDict can compare it before opening a store again.

        Raises:
            StoreBusyError: the storage cannot be read while another process commits.
        """
        return None

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Hold the store exclusively; yields False if another writer has it open (VIEW).

        The default yields False, which is always safe: memory that others may have mapped is then not moved.
        """
        yield False

    def layout(self, path: Path) -> Mapping[str, Any]:
        """Describe the layout of a leaf on the storage for display: chunks, shards, compression. Reads no data."""
        return {}

    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        """Compare leaves with the checksums of the last commit. A store without checksums finds no fault."""
        return []

    def check(self, paths: Sequence[Path], rows: slice | Tensor | None = None) -> None:
        """Compare leaves with their checksums before rows are copied from live tensors (VIEW). Nothing by default.

        Args:
            paths: the leaves.
            rows: the rows that are copied, a slice or int64 row numbers; None for any.
        """

    def reopen_token(self) -> tuple[Any, Mode, dict[str, Any]] | None:
        """Return `(location, mode, options)` with which another process can open the store; None: as it was opened.

        The location may be any picklable object that the opener takes. Modes that build something new
        must have become "r+" here, or a copy would wipe the data.
        """
        return None

    def group_location(self, path: Path) -> str:
        """Return the location of a group, in the form that a user would write; by default the store's url."""
        return self.url

    def native_group(self, path: Path, owner: object) -> object:
        """Return a group of the last commit as an object of the format's own library, by which nothing can be changed.

        Args:
            path: the path of the group.
            owner: an object that keeps the store open; the result must refer to it.

        Raises:
            UnsupportedError: this backend has none.
        """
        raise UnsupportedError(
            f"{self.url} has no object of another library",
            url=self.url,
            hint="td.commit(), and open it with that library",
        )

    def nbytes_stored(self) -> int | None:
        """Return how many bytes the store takes in the storage; None if that is unknown."""
        return None

    def unsupported(self, cap: Cap) -> UnsupportedError:
        """Create the error for an ability that this store lacks."""
        name = str(cap.name).lower().replace("_", " ")
        return UnsupportedError(
            f"{type(self).__name__} at {self.url} has no {cap.name} ability ({name})",
            url=self.url,
            hint="tdstore.backends() lists which backends have it",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
