"""`ByteStore`: a whole store over any engine, as immutable objects and one manifest that is put last.

`docs/reference/object-layout.md` has the format. Reads of a batch are planned together and fetched in one
round; writes are kept in memory, packed into new objects, and become visible by one conditional put.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
from torch import Tensor

from tdstore.bytestore.commit import NOTHING_THERE, Publisher, Seen, generation_of
from tdstore.bytestore.directory import Uploaded, read_uploaded
from tdstore.bytestore.read import Check, Want, drive
from tdstore.bytestore.table import Leaf, Table, check_fills, fill_bytes, to_document
from tdstore.bytestore.tidy import crowded, wasteful
from tdstore.bytestore.view import View
from tdstore.bytestore.write import Buffer, Names, pack, placed, portions, store_in_memory
from tdstore.engine import Blob, Engine, EngineCap
from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    KeyNotFoundError,
    OptionError,
    ReadOnlyError,
    StoreBusyError,
    StoreClosedError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from tdstore.header import Header
from tdstore.manifest import MAX_FILE_BYTES, NAME, OBJECTS_START
from tdstore.objects import MAX_GRAIN, Document, decode_objects, encode_objects, new_generation
from tdstore.ranges import Ints, index_shape
from tdstore.rows import check_indices
from tdstore.store import Cap, Store
from tdstore.types import MODES, Fault, LeafSpec, Mode, Path, Read, Write, path_text

Verify = Literal["full", "size", "none"]
Reopen = tuple[Any, dict[str, Any]]
P = ParamSpec("P")
R = TypeVar("R")

VERIFY_BYTES = 64 << 20
DIRECTORY_HINT = "a directory of files that was uploaded can be read only: save it anew somewhere else to change it"


def open_objects(
    engine: Engine,
    *,
    mode: Mode = "r",
    url: str | None = None,
    verify: Verify | None = None,
    single_writer: bool = False,
    object_bytes: int = 64 << 20,
    buffer_bytes: int = 64 << 20,
    keep_old: float = 3600.0,
    max_bytes: int | None = None,
    reopen: Reopen | None = None,
    close_engine: bool = True,
) -> ByteStore:
    """Open what `tdstore.json` at the engine's root describes, or make something new there. One request.

    To read, that may also be a directory of files that was uploaded as it is (see `open_directory`).

    Args:
        mode: "r", "r+", "w", "x" or "a", as `tdstore.Store` says.
        url: what messages call the place; the engine's own by default.
        verify: "full" compares all that is read with its checksums, "size" and "none" only that it is there and
            long enough. By default "full" for the object layout and "size" for a directory (see there).
        single_writer: the word of the caller that nobody else writes; needed where the engine has no
            conditional put.
        object_bytes: no new object is larger than this (or than one row).
        buffer_bytes: writes are kept in memory up to about so many bytes, then put as new objects.
        keep_old: seconds for which objects stay that only older generations need: for readers that have those open.
        max_bytes: refuse a store that declares more data than this.
        reopen: the location and options with which the backend's opener opens this place again, elsewhere.
        close_engine: close the engine with the store.

    Raises:
        StoreNotFoundError: there is no `tdstore.json`; something else may be there.
        StoreExistsError: by the mode. ReadOnlyError: the engine cannot write.
        CorruptStoreError: damaged, or not what a writer would write.

    Example:
        >>> store = open_objects(LocalEngine(tmp_path / "run"), mode="w")
        >>> store.create({("a",): LeafSpec((3, 2), "int64")})
        >>> store.write([Write(("a",), (slice(1, 2, 1),), torch.tensor([[5, 6]]))])
        >>> store.save_header(Header())
        >>> open_objects(LocalEngine(tmp_path / "run")).read([Read(("a",))])[0].tolist()
        [[0, 0], [5, 6], [0, 0]]
    """
    place = engine.url if url is None else url
    _check_options(place, mode, verify, object_bytes, buffer_bytes)
    if mode != "r" and EngineCap.WRITE not in engine.can:
        raise ReadOnlyError(f"{place} cannot be written to", url=place, hint="open it with mode='r'")
    blob = _manifest(engine, place)
    if mode == "a":
        mode = "x" if blob is None else "r+"
    if mode == "x" and blob is not None:
        raise StoreExistsError(
            f"there is a store at {place} already", url=place, hint="mode='w' replaces it, mode='r+' changes it"
        )
    seen = NOTHING_THERE if blob is None else Seen(True, generation_of(bytes(blob.data[:400])), blob.tag)
    publisher = Publisher(engine, place, seen, single_writer=single_writer, keep_old=keep_old)
    limits = (object_bytes, buffer_bytes)
    check = Check.NONE if verify in ("size", "none") else Check.FULL
    if mode in ("w", "x"):
        before = None if blob is None else _replaced(blob, place)
        view = View(engine, place, Table.empty(), Header(), check=check)
        return ByteStore(view, publisher, before, "w", limits, reopen, close_engine)
    if blob is None:
        raise StoreNotFoundError(f"nothing is stored at {place}: there is no {NAME}", url=place)
    data = bytes(blob.data)
    if not _is_ours(data):
        if mode == "r+":
            raise ReadOnlyError(f"{place} is a directory of files", url=place, hint=DIRECTORY_HINT)
        return open_directory(
            engine,
            url=url,
            verify=verify or "size",
            max_bytes=max_bytes,
            reopen=reopen,
            close_engine=close_engine,
            manifest=blob,
        )
    document = decode_objects(data, url=place)
    table = Table.from_document(document)
    _check_budget(table, max_bytes, place)
    view = View(engine, place, table, document.header, check=check, nbytes=len(data))
    return ByteStore(view, publisher, document, mode, limits, reopen, close_engine)


def open_directory(
    engine: Engine,
    *,
    url: str | None = None,
    verify: Verify = "size",
    max_bytes: int | None = None,
    reopen: Reopen | None = None,
    close_engine: bool = True,
    manifest: Blob | None = None,
    peer: bool = False,
) -> ByteStore:
    """Open a directory of files, ours or the peer's, that was uploaded as it is. It can be read only.

    Its checksums are of 4 MiB each. "size" compares blocks that are read whole, and the first, middle and last
    4 KiB of each leaf; "full" fetches whole blocks and compares everything, which for scattered rows is
    many times what was asked for; "none" compares nothing. Directories of the peer have no checksums.

    Args:
        manifest: its `tdstore.json`, if that was fetched already.
        peer: it is known that there is no `tdstore.json`: do not ask again.

    Raises:
        StoreNotFoundError: there is neither `tdstore.json` nor `meta.json`.
        CorruptStoreError: damaged. UntrustedDataError: a value is pickled.
    """
    place = engine.url if url is None else url
    _check_options(place, "r", verify, 1, 1)
    blob = _manifest(engine, place) if manifest is None and not peer else manifest
    uploaded = read_uploaded(engine, place, None if blob is None else bytes(blob.data))
    _check_budget(uploaded.table, max_bytes, place)
    check = {"full": Check.FULL, "size": Check.COVERED, "none": Check.NONE}[verify]
    tips = {} if verify == "none" else uploaded.tips
    view = View(engine, place, uploaded.table, uploaded.header, check=check, tips=tips)
    publisher = Publisher(engine, place, NOTHING_THERE, single_writer=False, keep_old=0.0)
    return ByteStore(view, publisher, uploaded, "r", (1, 1), reopen, close_engine)


def _check_options(place: str, mode: str, verify: str | None, object_bytes: int, buffer_bytes: int) -> None:
    for name, value, allowed in (("mode", mode, MODES), ("verify", verify, (None, "full", "size", "none"))):
        if value not in allowed:
            raise OptionError(
                f"{place}: {name} must be one of {', '.join(map(repr, allowed))}, not {value!r}", url=place
            )
    for name, size in (("object_bytes", object_bytes), ("buffer_bytes", buffer_bytes)):
        if size < 1:
            raise OptionError(f"{place}: {name} must be at least 1, not {size}", url=place)


def _manifest(engine: Engine, place: str) -> Blob | None:
    try:
        return engine.get(NAME, MAX_FILE_BYTES)
    except StoreNotFoundError:
        return None


def _is_ours(data: bytes) -> bool:
    return data.startswith(OBJECTS_START, data.find(b"\n", 0, 40) + 1)


def _replaced(blob: Blob, place: str) -> Document | None:
    """The generation that mode "w" is to replace; None when it is damaged, so that nobody needs its objects."""
    data = bytes(blob.data)
    if not _is_ours(data):
        raise StoreExistsError(
            f"{place} holds a {NAME} that is not of the object layout",
            url=place,
            hint="remove what is there first, or choose another place",
        )
    with suppress(CorruptStoreError):
        return decode_objects(data, url=place)
    return None


def _check_budget(table: Table, max_bytes: int | None, place: str) -> None:
    check_fills(table.leaves, place)
    total = sum(leaf.spec.nbytes for leaf in table.leaves.values())
    if max_bytes is not None and total > max_bytes:
        raise CorruptStoreError(
            f"{place} declares {total} bytes of data, more than max_bytes={max_bytes}",
            url=place,
            hint="pass a larger max_bytes= if that is meant",
        )


def _in_turn(fn: Callable[Concatenate[ByteStore, P], R]) -> Callable[Concatenate[ByteStore, P], R]:
    """Let the threads that change a store do so one after another: what each writes is laid over what is there."""

    @functools.wraps(fn)
    def run(self: ByteStore, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._pid != os.getpid():  # a thread of the parent may have had its turn when this process was forked
            return fn(self, *args, **kwargs)
        with self._turn:
            return fn(self, *args, **kwargs)

    return run


class ByteStore(Store):
    """Leaves as pieces of immutable objects. Made by `open_objects` and `open_directory`.

    A reader keeps the generation that it opened (for `keep_old` seconds after it was replaced); `refresh` moves it.
    """

    caps = Cap.WRITE | Cap.PARTIAL_READ | Cap.PARTIAL_WRITE | Cap.RESIZE | Cap.PERSISTENT | Cap.CONCURRENT_READ

    def __init__(
        self,
        view: View,
        publisher: Publisher,
        before: Document | Uploaded | None,
        mode: Mode,
        limits: tuple[int, int],
        reopen: Reopen | None,
        close_engine: bool,
    ) -> None:
        self.url = view.url
        self.writable = mode != "r"
        self.engine = view.engine
        if EngineCap.ASYNC in self.engine.can:
            vars(self)["caps"] = type(self).caps | Cap.ASYNC
        self._view = view
        self._publisher = publisher
        self._before = before
        self._committed = mode in ("r", "r+")
        self._object_bytes, self._buffer_bytes = limits
        self._reopen = reopen
        self._close_engine = close_engine
        self._buffer = Buffer()
        self._names = Names()
        self._dirty = False
        self._conflict: ConflictError | None = None
        self._closed = False
        self._pid = os.getpid()
        self._turn = threading.RLock()
        view.memory = self._buffer.pieces

    @property
    def generation(self) -> str | None:
        """The name of the generation that is open; None for a store that was never committed, or has no manifest."""
        return self._before.generation if self._before is not None and self._committed else None

    # -- catalogue -----------------------------------------------------------------------
    def paths(self) -> Iterator[Path]:
        """As `Store.paths`."""
        return iter(tuple(self._open().table.leaves))

    def specs(self, paths: Sequence[Path]) -> list[LeafSpec]:
        """As `Store.specs`."""
        self._open()
        return [self._leaf(path).spec for path in paths]

    def load_header(self) -> Header:
        """As `Store.load_header`."""
        return self._open().header

    @_in_turn
    def save_header(self, header: Header) -> None:
        """As `Store.save_header`: puts what is in memory, then the manifest, on the condition that it is unchanged.

        Raises:
            ConflictError: somebody else committed since this store was opened.
            UnsupportedError: the engine knows no conditions, and `single_writer` was not given.
        """
        self._commit(self._changing(), header)

    # -- data ----------------------------------------------------------------------------
    @_in_turn
    def create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        """As `Store.create`. There are no leaf options."""
        view = self._changing()
        for path, spec in leaves.items():
            if spec.options:
                raise OptionError(
                    f"{self.url}: {path_text(path)} has the unknown option {next(iter(spec.options))!r}; "
                    "the object layout has no leaf options",
                    url=self.url,
                )
            try:
                fill_bytes(spec)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise OptionError(f"{self.url}: {path_text(path)} cannot be filled: {error}", url=self.url) from error
        self._dirty = True
        for path, spec in leaves.items():
            view.replace(path, Leaf(spec))

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """As `Store.read`: one round of requests, however many leaves and rows (more than 128 MiB come in several)."""
        view = self._open()
        return view.read(self._within(reads))

    async def aread(self, reads: Sequence[Read]) -> list[Tensor]:
        """As `Store.aread`, over the engine's own."""
        view = self._open()
        return await view.aread(self._within(reads))

    def _within(self, reads: Sequence[Read]) -> list[tuple[Read, Leaf]]:
        found = [(r, self._leaf(r.path)) for r in reads]
        check_indices((r.index, leaf.spec.shape) for r, leaf in found)
        return found

    @_in_turn
    def write(self, writes: Sequence[Write]) -> None:
        """As `Store.write`: into memory, and on to new objects when that is full."""
        view = self._changing()
        check_indices((w.index, self._leaf(w.path).spec.shape) for w in writes)
        for w in writes:
            spec = self._leaf(w.path).spec
            expected = index_shape(spec.shape, w.index)
            if tuple(w.value.shape) != expected or w.value.dtype != spec.dtype:
                raise ValueError(
                    f"{path_text(w.path)} takes shape {list(expected)} and dtype {spec.dtype} at this index, "
                    f"not {list(w.value.shape)} and {w.value.dtype}"
                )
        self._dirty = True
        for w in writes:
            leaf = self._leaf(w.path)
            if not w.value.numel():
                continue
            ranges, source, data = placed(leaf.spec.shape, leaf.spec.dtype.itemsize, w.index, w.value)
            for some, begins in portions(ranges, source, self._buffer_bytes, leaf.grain):
                view.replace(w.path, store_in_memory(self._leaf(w.path), some, begins, data, self._buffer))
                if self._buffer.nbytes >= self._buffer_bytes:
                    self._flush_buffer(view)

    @_in_turn
    def delete(self, paths: Sequence[Path]) -> None:
        """As `Store.delete`."""
        view = self._changing()
        for path in paths:
            self._leaf(path)
        self._dirty = True
        for path in dict.fromkeys(paths):
            view.remove(path)

    @_in_turn
    def resize(self, lengths: Mapping[Path, int]) -> None:
        """As `Store.resize`: no byte moves."""
        view = self._changing()
        for path, length in lengths.items():
            if not self._leaf(path).spec.shape or length < 0:
                raise ValueError(f"{path_text(path)} of {self.url} cannot have length {length}")
        self._dirty = True
        for path, length in lengths.items():
            view.replace(path, self._leaf(path).resized(length))

    @_in_turn
    def rename(self, moves: Mapping[Path, Path]) -> None:
        """As `Store.rename`: no byte moves."""
        view = self._changing()
        leaves = {path: self._leaf(path) for path in moves}
        if len(set(moves.values())) < len(moves):
            raise ValueError(f"two leaves of {self.url} cannot be given the same name: {dict(moves)}")
        self._dirty = True
        for path in leaves:
            view.remove(path)
        for path, leaf in leaves.items():
            view.replace(moves[path], leaf)

    # -- life ----------------------------------------------------------------------------
    @_in_turn
    def flush(self) -> None:
        """Commit changes to a store that was committed before; a new one waits for its first `save_header`."""
        view = self._open()
        if self.writable and self._committed and self._dirty:
            self._commit(self._changing(), view.header)

    @_in_turn
    def refresh(self) -> bool:
        """Move to the newest generation; True if it is another one than before.

        Raises:
            StoreError: there are changes that were not committed.
            StoreNotFoundError: the store was removed.
        """
        view = self._open()
        if self._dirty or not isinstance(self._before, Document) or not self._committed:
            raise StoreError(
                f"{self.url} cannot be refreshed: it has changes of its own, or is a directory of files",
                url=self.url,
                hint="commit the changes, or open it again",
            )
        blob = _manifest(self.engine, self.url)
        if blob is None:
            raise StoreNotFoundError(f"nothing is stored at {self.url} any more", url=self.url)
        data = bytes(blob.data)
        if generation_of(data) == self._before.generation:
            return False
        document = decode_objects(data, url=self.url)
        table = Table.from_document(document)
        check_fills(table.leaves, self.url)
        fresh = View(self.engine, self.url, table, document.header, check=view.check, nbytes=len(data))
        fresh.memory = self._buffer.pieces
        self._publisher.seen = Seen(True, document.generation, blob.tag)
        self._before, self._view = document, fresh
        self._conflict = None
        return True

    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        """Fetch leaves whole, 64 MiB at a time, and compare every checksum; also with `verify="size"`."""
        view = self._open()
        faults = []
        for path in view.table.leaves if paths is None else paths:
            try:
                self._compare(view, path, self._leaf(path))
            except CorruptStoreError as error:
                faults.append(Fault(path, error.message))
        return faults

    def _compare(self, view: View, path: Path, leaf: Leaf) -> None:
        extents = leaf.extents.take(leaf.extents.piece >= 0)
        ranges = np.stack([extents.start, extents.stop], 1)
        sizes = ranges[:, 1] - ranges[:, 0]
        if not len(ranges):
            return
        # In steps of whole grains, the largest there are.
        for some, _ in portions(ranges, np.cumsum(sizes) - sizes, max(VERIFY_BYTES, leaf.row), MAX_GRAIN):
            out = np.empty(int((some[:, 1] - some[:, 0]).sum()), np.uint8)
            want = Want(path, leaf, some, memoryview(out))  # type: ignore[arg-type]
            drive(view.fetcher().rounds([want], check=Check.FULL), self.engine.get_ranges)

    def nbytes_stored(self) -> int | None:
        """Bytes of the objects and the manifest of this generation, and of older ones that were not removed yet."""
        view = self._open()
        rows = view.table.pieces.rows[view.table.used_pieces(), 0]
        total: int = view.nbytes + sum(view.table.objects[o].size for o in np.unique(rows).tolist())
        retired = self._before.retired if isinstance(self._before, Document) else ()
        return total + sum(r.size for r in retired)

    def reopen_token(self) -> tuple[Any, Mode, dict[str, Any]] | None:
        """To read: what this store changed is committed first, and then it is this store that writes."""
        self._open()
        if not self._committed:
            raise StoreNotFoundError(f"{self.url} is not saved yet: no other process can open it", url=self.url)
        self.flush()
        return None if self._reopen is None else (self._reopen[0], "r", dict(self._reopen[1]))

    @_in_turn
    def collect(self, older_than: float = 86400.0) -> list[str]:
        """Remove objects that no manifest names: of writers that were killed. Needs an engine that can list.

        Args:
            older_than: leave alone what is younger than so many seconds, since a writer may be about to commit it.

        Returns:
            The names of the objects that were removed.
        """
        self._changing()
        if self._dirty:
            raise StoreError(f"{self.url} has changes that are not committed", url=self.url, hint="commit them first")
        return self._publisher.collect(older_than)

    @_in_turn
    def close(self) -> None:
        """Commit in-place changes, remove what was put for nothing, and close the engine. Twice is fine."""
        if self._closed:
            return
        try:
            if self._dirty and self._committed and self._conflict is None and self._pid == os.getpid():
                self._commit(self._changing(), self._view.header)
        finally:
            self._closed = True
            if self._pid == os.getpid():
                self._publisher.discard()
            self._buffer.clear()
            if self._close_engine:
                self.engine.close()

    def __del__(self) -> None:
        # Not while the interpreter ends: an engine's threads may be gone, and waiting for them would never end.
        if not getattr(self, "_closed", True) and not sys.is_finalizing() and self._pid == os.getpid():
            self.close()

    # -- inside --------------------------------------------------------------------------
    def _open(self) -> View:
        if self._closed:
            raise StoreClosedError(f"{self.url} was closed", url=self.url)
        return self._view

    def _changing(self) -> View:
        view = self._open()
        if not self.writable:
            hint = DIRECTORY_HINT if isinstance(self._before, Uploaded) else "open it with mode='r+' to write"
            raise ReadOnlyError(f"{self.url} was opened for reading only", url=self.url, hint=hint)
        if self._conflict is not None:
            raise self._conflict.with_traceback(None)
        if self._pid != os.getpid():
            raise StoreBusyError(
                f"{self.url} was opened before this process was forked: its parent alone writes it",
                url=self.url,
                hint="close it before forking, and open it in the child",
            )
        return view

    def _leaf(self, path: Path) -> Leaf:
        try:
            return self._view.table.leaves[path]
        except KeyError:
            raise KeyNotFoundError(f"no leaf {path_text(path)} in {self.url}") from None

    def _flush_buffer(self, view: View) -> None:
        """Put what is in memory, as new objects; at most `object_bytes` times the lanes are in memory beside it."""
        if not self._buffer.pieces:
            return
        self._publisher.check_can_commit()
        packed = pack(view.table, self._buffer.pieces, self._names, self._object_bytes)
        if packed.objects:
            self._publisher.upload([(stored.name, data) for stored, data in packed.objects])
            packed.install(view.table)
        self._buffer.clear()

    def _commit(self, view: View, header: Header) -> None:
        self._publisher.check_can_commit()
        if self._dirty:
            self._tidy(view)
        self._flush_buffer(view)
        before = self._before if isinstance(self._before, Document) else None
        document, which = to_document(view.table, new_generation(), header)
        names = [record.name for record in document.objects]
        retired, expired = self._publisher.retire(before, names)
        document = document.with_retired(retired)
        data = encode_objects(document, url=self.url)
        try:
            self._publisher.publish(data, document.generation, names, expired)
        except ConflictError as error:
            self._conflict = error
            raise
        view.header, view.nbytes = header, len(data)
        view.compact(document, which)
        self._before, self._committed, self._dirty = document, True, False

    def _tidy(self, view: View) -> None:
        for path, leaf in list(view.table.leaves.items()):
            ranges = crowded(leaf)
            if ranges is not None:
                self._rewrite(view, path, ranges)
        for path, ranges in wasteful(view.table).items():
            self._rewrite(view, path, ranges)

    def _rewrite(self, view: View, path: Path, ranges: Ints) -> None:
        """Read ranges of a leaf and write them anew, each as one run."""
        sizes = ranges[:, 1] - ranges[:, 0]
        limit = self._buffer_bytes
        for some, _ in portions(ranges, np.cumsum(sizes) - sizes, limit, self._leaf(path).grain):
            leaf = self._leaf(path)
            lengths = some[:, 1] - some[:, 0]
            out = np.empty(int(lengths.sum()), np.uint8)
            want = Want(path, leaf, some, memoryview(out))  # type: ignore[arg-type]
            # What cannot be read stays as it is: it must not keep anybody from committing other leaves.
            with suppress(CorruptStoreError):
                drive(view.fetcher().rounds([want], check=Check.FULL), self.engine.get_ranges)
                view.replace(path, store_in_memory(leaf, some, np.cumsum(lengths) - lengths, out, self._buffer))
            if self._buffer.nbytes >= limit:
                self._flush_buffer(view)
