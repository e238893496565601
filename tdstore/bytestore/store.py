"""`ByteStore`: a store over any engine, made of immutable objects and one manifest that is put last.

`docs/reference/object-layout.md` specifies the format. Reads of a batch are planned together and fetched in one
round; writes are buffered in memory, packed into new objects, and become visible by one conditional put.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
from torch import Tensor

from tdstore.bytestore.commit import (
    MaintenanceError,
    ManifestState,
    Publisher,
    fetch_manifest,
    generation_of,
    state_of,
)
from tdstore.bytestore.directory import DIRECTORY_HINT, UploadedDirectory
from tdstore.bytestore.manifest import (
    MAX_GRAIN,
    Document,
    decode_objects,
    encode_objects,
    new_generation,
    version_name,
)
from tdstore.bytestore.read import Check, Want, drive
from tdstore.bytestore.table import Leaf, Table, check_table, fill_bytes, to_document
from tdstore.bytestore.tidy import ranges_to_merge, ranges_to_rewrite
from tdstore.bytestore.uncommitted import Uncommitted
from tdstore.bytestore.versions.maintenance import RIVALS, Change, Pruning, load_document, maintain, tagging
from tdstore.bytestore.versions.records import following, to_version, with_version
from tdstore.bytestore.view import View
from tdstore.bytestore.write import Buffer, Names, flat_bytes, pack, placed, portions, store_in_memory
from tdstore.engine import EngineCap
from tdstore.errors import (
    ConflictError,
    CorruptStoreError,
    OptionError,
    ReadOnlyError,
    StoreError,
)
from tdstore.header import Header
from tdstore.index.ranges import Ints, distinct
from tdstore.store import Cap
from tdstore.storekit import CheckedStore, WriterState, commit_for_readers, end_writer, refusals
from tdstore.threads import without_interrupts
from tdstore.types import Fault, LeafSpec, Mode, Path, Read, Version, Write, path_text

Reopen = tuple[Any, dict[str, Any]]
P = ParamSpec("P")
R = TypeVar("R")

VERIFY_BYTES = 64 << 20


class Limits(NamedTuple):
    """Limits in bytes: of an object, of the write buffer, and of a read."""

    object_bytes: int
    """No new object is larger."""
    buffer_bytes: int
    """Writes that are in memory before they are put."""
    max_bytes: int | None
    """The most bytes that the store may declare; None: any number."""


class ByteStore(CheckedStore[Leaf]):
    """Leaves as pieces of immutable objects. Made by `open_objects` and `open_directory`.

    A reader stays at the generation that it opened (for `keep_old` seconds after it was replaced); `refresh` moves it.
    """

    caps = (
        Cap.WRITE
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.PERSISTENT
        | Cap.CONCURRENT_READ
        | Cap.DISCARD
        | Cap.VERSIONS
    )

    def __init__(
        self,
        view: View,
        publisher: Publisher,
        before: Document | UploadedDirectory | None,
        mode: Mode,
        limits: Limits,
        reopen: Reopen | None,
        close_engine: bool,
        *,
        pinned: bool = False,
    ) -> None:
        super().__init__(view.url, writable=mode != "r")
        self.engine = view.engine
        if EngineCap.ASYNC in self.engine.can:
            vars(self)["caps"] = type(self).caps | Cap.ASYNC
        self._view = view
        self._publisher = publisher
        self._before = before
        self._committed = mode in ("r", "r+")
        self._limits = limits
        self._reopen = reopen
        self._close_engine = close_engine
        self._pinned = pinned
        self._buffer = Buffer()
        self._names = Names()
        self._uncommitted = Uncommitted(view.table.leaves)
        self._conflict: ConflictError | None = None
        self._can_commit = False
        self._lock = threading.RLock()  # each write overlays the state before it
        view.memory = self._buffer.pieces

    def generation(self) -> object:
        """Return the name of the newest generation; None for a directory of files, which has no manifest."""
        self._check_open()
        if self._pinned:
            return self.opened_generation
        blob = fetch_manifest(self.engine) if isinstance(self._before, Document) and self._committed else None
        return None if blob is None else generation_of(bytes(blob.data))

    @property
    def opened_generation(self) -> str | None:
        """Return the name of the open generation; None for a store that was never committed, or has no manifest."""
        return self._before.generation if self._before is not None and self._committed else None

    # -- catalogue -----------------------------------------------------------------------
    def _catalogue(self) -> Mapping[Path, Leaf]:
        return self._view.table.leaves

    def load_header(self) -> Header:
        """Return the header, as `Store.load_header` does."""
        return self._open().header

    def _save(self, header: Header) -> None:
        """Commit, as `Store.save_header` does: put the buffered rows, then the manifest, if that is unchanged since.

        Raises:
            ConflictError: another writer committed since this store was opened.
            UnsupportedError: the engine has no conditional puts, and `single_writer` is not set.
        """
        self._commit(self._view, header)

    # -- data ----------------------------------------------------------------------------
    def _create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        view = self._view
        for path, spec in leaves.items():
            try:
                fill_bytes(spec)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise OptionError(f"{self.url}: {path_text(path)} cannot be filled: {error}", url=self.url) from error
        self._uncommitted.record_removed(leaves)
        with view.guard:
            for path, spec in leaves.items():
                view.replace(path, Leaf(spec))

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """Read, as `Store.read` does: one round of requests, however many leaves and rows (several above 128 MiB)."""
        view = self._open()
        return view.read(lambda: self._wanted(reads, view.table.leaves))

    async def aread(self, reads: Sequence[Read]) -> list[Tensor]:
        """Read, as `Store.aread` does, with the asynchronous requests of the engine."""
        view = self._open()
        return await view.aread(lambda: self._wanted(reads, view.table.leaves))

    def _read(self, wanted: Sequence[tuple[Leaf, Read]]) -> list[Tensor]:
        return self._view.read(lambda: wanted)

    def _write(self, wanted: Sequence[tuple[Leaf, Write]]) -> None:
        """Write into the buffer, which is put as new objects when it is full."""
        view = self._view
        size = sum(w.value.numel() * w.value.dtype.itemsize + 1024 for _, w in wanted)
        if self._buffer.nbytes + size >= self._limits.buffer_bytes:
            self._flush_buffer(view)  # before any change: the storage may refuse it
        self._uncommitted.rows = True
        before = {w.path: self._leaf(w.path) for _, w in wanted}
        fits = bool(self._buffer.pieces)  # then nothing is put meanwhile
        # What is put before this returns need not be copied. Two writes of a leaf may overlap: the later one copies.
        borrow = size >= self._limits.buffer_bytes and len(before) == len(wanted)
        try:
            if fits:
                self._buffer_in_memory(view, wanted)
            else:
                for _, w in wanted:
                    self._buffer_value(view, w, borrow=borrow)
            if borrow:
                self._flush_buffer(view)
        except BaseException:
            if not fits:
                with view.guard:
                    for path, leaf in before.items():
                        view.replace(path, leaf)
                    self._buffer.clear()
            raise

    @without_interrupts
    def _buffer_in_memory(self, view: View, wanted: Sequence[tuple[Leaf, Write]]) -> None:
        """Buffer values that fit: rows that are in memory already are overwritten there."""
        for _, w in wanted:
            self._buffer_value(view, w, borrow=False)

    def _buffer_value(self, view: View, w: Write, *, borrow: bool) -> None:
        """Buffer a value; a large one in portions, each of which is put as new objects."""
        leaf = self._leaf(w.path)
        if not w.value.numel():
            return
        if not w.index and not len(leaf.extents.start) and leaf.spec.nbytes <= self._limits.buffer_bytes:
            data = flat_bytes(w.value)
            with view.guard:
                view.replace(w.path, leaf.filled(self._buffer.add(data if borrow else data.copy())))
            if self._buffer.nbytes >= self._limits.buffer_bytes:
                self._flush_buffer(view)
            return
        ranges, source, data = placed(leaf.spec.shape, leaf.spec.dtype.itemsize, w.index, w.value)
        for some, begins in portions(ranges, source, self._limits.buffer_bytes, leaf.grain):
            with view.guard:
                leaf = store_in_memory(self._leaf(w.path), some, begins, data, self._buffer, borrow=borrow)
                view.replace(w.path, leaf)
            if self._buffer.nbytes >= self._limits.buffer_bytes:
                self._flush_buffer(view)

    def _delete(self, paths: Sequence[Path]) -> None:
        view = self._view
        self._uncommitted.record_removed(paths)
        with view.guard:
            for path in paths:
                view.remove(path)

    def _resize(self, lengths: Mapping[Path, int]) -> None:
        """Resize leaves without moving a byte."""
        view = self._view
        self._uncommitted.record_resized()
        with view.guard:
            for path, length in lengths.items():
                view.replace(path, self._leaf(path).resized(length))

    def _rename(self, moves: Mapping[Path, Path]) -> None:
        """Rename leaves without moving a byte."""
        view = self._view
        leaves = {path: self._leaf(path) for path in moves}
        self._uncommitted.record_renamed(moves)
        with view.guard:
            for path in leaves:
                view.remove(path)
            for path, leaf in leaves.items():
                view.replace(moves[path], leaf)

    # -- life ----------------------------------------------------------------------------
    def discard(self) -> None:
        """Restore the leaves of the last commit, as `Store.discard` does, without a request.

        Objects that were put for no commit are removed by the next commit, or by `close`.
        """
        with self._guard:
            super()._check_writable()  # after a conflict, too, changes may be taken back
            self._take_back(self._view)

    def flush(self) -> None:
        """Commit rows that were written into leaves of the last commit; a change of structure waits for `save_header`.

        Rows that are flushed while the structure changes are committed with it.
        """
        self._open()
        if self._uncommitted:
            with self._guard:
                commit_for_readers(_Steps(self))

    def refresh(self) -> bool:
        """Move to the newest generation; returns True if it differs from the one before.

        Raises:
            StoreError: there are uncommitted changes.
            StoreNotFoundError: the store was removed.
        """
        with self._guard:
            return self._refresh(self._open())

    def _refresh(self, view: View) -> bool:
        if self._pinned:
            return False
        if self._uncommitted or not isinstance(self._before, Document) or not self._committed:
            raise StoreError(
                f"{self.url} cannot be refreshed: it has changes of its own, or is a directory of files",
                url=self.url,
                hint="commit the changes, or open it again",
            )
        blob = fetch_manifest(self.engine)
        if blob is None:
            raise refusals.not_found(self.url)
        data = bytes(blob.data)
        if generation_of(data) == self._before.generation:
            return False
        document = decode_objects(data, url=self.url)
        table = Table.from_document(document)
        check_table(table, self._limits.max_bytes, self.url)
        fresh = View(self.engine, self.url, table, document.header, check=view.check, nbytes=len(data), wary=view.wary)
        fresh.memory = self._buffer.pieces
        self._move_to(fresh, document, state_of(blob))
        return True

    @without_interrupts
    def _move_to(self, view: View, document: Document, state: ManifestState) -> None:
        """Take the commit of another writer for the last one: a later commit replaces what `seen` says."""
        self._publisher.seen = state
        self._before, self._view = document, view
        self._uncommitted = Uncommitted(view.table.leaves)
        self._conflict = None

    # -- versions ------------------------------------------------------------------------
    def save_version(self, header: Header, message: str) -> Version:
        """Commit and make the commit a version, as `Store.save_version` does: one manifest more."""
        with self._guard:
            self._check_writable()
            self._commit(self._view, header, message)
            document = self._before
            assert isinstance(document, Document)
            return to_version(document.versions[-1])

    def versions(self) -> list[Version]:
        """List the versions, as `Store.versions` does, with one request."""
        self._check_open()
        if not isinstance(self._before, Document) or not self._committed:
            return []
        return [to_version(record) for record in load_document(self.engine, self.url)[0].versions]

    def set_tag(self, name: str, version: str | None) -> None:
        """Tag a version, as `Store.set_tag` does; writers that are open go on."""
        self._maintain(tagging(self.url, name, version))

    def drop_versions(self, versions: Sequence[str], grace: float) -> list[str]:
        """Drop versions, as `Store.drop_versions` does; writers that are open go on."""
        pruning = Pruning(self._publisher, versions, grace)
        self._maintain(pruning)
        return pruning.dropped

    def _maintain(self, change: Change) -> None:
        with self._guard:
            self._check_writable()
            before = self._before
            if not isinstance(before, Document) or not self._committed:
                raise refusals.not_saved(self.url)
            document, state = maintain(self._publisher, change)
            if document.generation == before.generation:
                self._before, self._publisher.seen = document, state

    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        """Fetch whole leaves, 64 MiB at a time, and compare every checksum; also with `verify="size"`."""
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
        """Return the bytes of the objects and the manifest of this generation, and of versions and older generations
        that are not removed yet."""
        view = self._open()
        rows = view.table.pieces.rows[view.table.used_pieces(), 0]
        total: int = view.nbytes + sum(view.table.objects[o].size for o in distinct(rows).tolist())
        before = self._before
        if isinstance(before, Document):
            total += sum(item.size for item in before.retired) + sum(item.size for item in before.held)
        return total

    def reopen_token(self) -> tuple[Any, Mode, dict[str, Any]] | None:
        """Return location, mode "r" and options to reopen with; uncommitted changes are committed first."""
        self._open()
        if not self._committed:
            raise refusals.not_saved(self.url)
        self.flush()
        return None if self._reopen is None else (self._reopen[0], "r", dict(self._reopen[1]))

    def collect(self, older_than: float = 86400.0) -> list[str]:
        """Remove objects that no manifest names: of writers that were killed. Needs an engine that can list.

        Args:
            older_than: keep objects younger than so many seconds, since a writer may be about to commit them.

        Returns:
            The names of the objects that were removed.
        """
        with self._guard:
            self._check_writable()
            if self._uncommitted:
                raise StoreError(
                    f"{self.url} has changes that are not committed", url=self.url, hint="commit them first"
                )
            return self._publisher.collect(older_than)

    def _close(self) -> None:
        """Commit written rows, drop other changes, remove uncommitted objects, close the engine."""
        end_writer(_Steps(self))

    # -- inside --------------------------------------------------------------------------
    def _open(self) -> View:
        if self._closed:
            raise refusals.closed(self.url)
        return self._view

    def _read_only(self) -> ReadOnlyError:
        known = isinstance(self._before, UploadedDirectory)
        return refusals.read_only(self.url, DIRECTORY_HINT) if known else super()._read_only()

    def _check_writable(self) -> None:
        super()._check_writable()
        if self._conflict is not None:
            raise self._conflict.with_traceback(None)
        if not self._can_commit:
            self._publisher.check_can_commit()  # now, not after rows were written that could not be committed
            self._can_commit = True

    def _take_back(self, view: View) -> None:
        with view.guard:
            view.restore(self._uncommitted.saved)
            self._uncommitted = Uncommitted(view.table.leaves)
            self._buffer.clear()

    def _flush_buffer(self, view: View) -> None:
        """Put the buffer as new objects; besides it, at most `object_bytes` times the number of lanes are in memory."""
        if not self._buffer.pieces:
            return
        packed = pack(view.table, self._buffer.pieces, self._names, self._limits.object_bytes, self.engine.lanes)
        if packed.objects:
            self._publisher.upload([(stored.name, parts) for stored, parts in packed.objects])
        with view.guard:
            if packed.objects:
                packed.install(view.table)
            self._buffer.clear()

    def _commit(self, view: View, header: Header, message: str | None = None) -> None:
        if self._uncommitted:
            self._tidy(view)
        self._flush_buffer(view)
        before = self._before if isinstance(self._before, Document) else None
        bare, which = to_document(view.table, new_generation(), header)
        names = [record.name for record in bare.objects]
        if message is not None:
            name = version_name(bare.generation)
            self._publisher.upload([(name, [encode_objects(bare, url=self.url)])])
            names.append(name)
        for _ in range(RIVALS):
            document, expired = following(bare, before, keep_old=self._publisher.keep_old, now=time.time())
            if message is not None:
                document = with_version(document, message, now=time.time())
            data = encode_objects(document, url=self.url)
            adopt = partial(self._adopt, view, document, view.table.compacted(document, which), header, len(data))
            try:
                self._publisher.publish(data, document.generation, names, expired, adopt)
                return
            except MaintenanceError:
                try:
                    before = decode_objects(self._publisher.rebase(), url=self.url)
                except ConflictError as error:
                    self._conflict = error
                    raise
            except ConflictError as error:
                self._conflict = error
                raise
        raise ConflictError(
            f"{self.url} cannot be committed: its list of versions is changed again and again; nothing of this "
            "writer was published",
            url=self.url,
            hint="commit once more",
        )

    def _adopt(self, view: View, document: Document, table: Table, header: Header, nbytes: int) -> None:
        """Take a published manifest for the last commit, and drop objects and pieces that it does not need."""
        view.adopt(table, header, nbytes)
        self._before, self._committed = document, True
        self._uncommitted = Uncommitted(table.leaves)

    def _tidy(self, view: View) -> None:
        for path, leaf in list(view.table.leaves.items()):
            ranges = ranges_to_merge(leaf)
            if ranges is not None:
                self._rewrite(view, path, ranges)
        for path, ranges in ranges_to_rewrite(view.table).items():
            self._rewrite(view, path, ranges)

    def _rewrite(self, view: View, path: Path, ranges: Ints) -> None:
        """Read ranges of a leaf and write each again, as one run."""
        sizes = ranges[:, 1] - ranges[:, 0]
        limit = self._limits.buffer_bytes
        for some, _ in portions(ranges, np.cumsum(sizes) - sizes, limit, self._leaf(path).grain):
            leaf = self._leaf(path)
            lengths = some[:, 1] - some[:, 0]
            out = np.empty(int(lengths.sum()), np.uint8)
            want = Want(path, leaf, some, memoryview(out))  # type: ignore[arg-type]
            # Unreadable leaves stay as they are: they must not prevent a commit of others.
            with suppress(CorruptStoreError):
                drive(view.fetcher().rounds([want], check=Check.FULL), self.engine.get_ranges)
                with view.guard:
                    view.replace(path, store_in_memory(leaf, some, np.cumsum(lengths) - lengths, out, self._buffer))
            if self._buffer.nbytes >= limit:
                self._flush_buffer(view)


class _Steps:
    """The steps of the commit policy."""

    def __init__(self, store: ByteStore) -> None:
        self._store = store

    def state(self) -> WriterState:
        store = self._store
        changes = store._uncommitted
        return WriterState(
            pid=store._pid or 0,
            writable=store.writable,
            published=store._committed,
            structure=changes.structure,
            rows=changes.rows,
            lost=store._conflict is not None,
        )

    def drop_structure(self) -> None:
        view = self._store._view
        with view.guard:
            view.restore(self._store._uncommitted.without_structure(view.table.leaves))

    def commit_rows(self) -> None:
        self._store._check_writable()
        self._store._commit(self._store._view, self._store._view.header)

    def unmark(self) -> None:
        """Leave it: objects of a writer are in nobody's way."""

    def take_back(self) -> None:
        """Leave it: what is not committed is in memory, or removed by `remove_uncommitted`."""

    def remove_uncommitted(self) -> None:
        self._store._publisher.discard()

    def release(self) -> None:
        self._store._buffer.clear()
        if self._store._close_engine:
            self._store.engine.close()
