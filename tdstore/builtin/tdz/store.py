"""The `tdz` backend: a memmap directory as one zip file, whose stored entries are memory-mapped in place."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

from tdstore.builtin.localplace import local_place
from tdstore.builtin.memmap.layout import LeafFile
from tdstore.builtin.readcheck import OPENED, ReadCheck
from tdstore.builtin.tdz.leaves import TdzLeaves
from tdstore.builtin.tdz.reading import (
    METHODS,
    LeafEntry,
    Member,
    as_bytes,
    blocks_of,
    check_bombs,
    crc_of_range,
    differs,
    read_dataset,
    read_listing,
    sums_of_range,
    zip_errors,
)
from tdstore.builtin.tdz.writing import (
    ArchiveFiles,
    copy_head,
    descriptions,
    finish,
    finish_packed,
    patch_local,
)
from tdstore.builtin.window import Window
from tdstore.errors import (
    CorruptStoreError,
    OptionError,
    StoreIOError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.header import Header
from tdstore.storekit import WriterState, check_choices, end_writer, files, refusals
from tdstore.storekit.checksums import crc32c
from tdstore.storekit.publish import take_mode
from tdstore.storekit.session import LOCK_TIMEOUT
from tdstore.threads import without_interrupts
from tdstore.types import MODES, Durable, Fault, Mode, Path, Verify, path_text

_LOOKED_AT = 1 << 30
"""Bytes of a window of which all pages are looked at, and not those of each leaf that was read."""


def open_tdz(
    location: str | None = None,
    *,
    mode: Mode = "r",
    compression: str | int | None = None,
    compresslevel: int | None = None,
    durable: Durable = "commit",
    verify: Verify = "size",
    max_bytes: int | None = None,
    lock_timeout: float = LOCK_TIMEOUT,
) -> TdzStore:
    """Open, or make, an archive. Changes are in memory until a commit rewrites the file and swaps it in.

    Args:
        location: the file.
        mode: "r", "r+", "w", "x" or "a", as in `tdstore.Store`.
        compression: "stored" (default), "deflate", "bzip2", "lzma" or a constant of `zipfile`, for a new archive. A
            compressed leaf takes less space; it is unpacked into memory when it is read, and the archive cannot be
            opened with mode "r+".
        compresslevel: of deflate (0 to 9) and bzip2 (1 to 9).
        durable: "commit" waits for the storage before it publishes (survives a power cut); "none" does not.
        verify: "full" compares every byte with the checksums of the archive; "size" its structure, and all bytes of
            archives of up to 16 MiB; "none" only its structure.
        max_bytes: refuse an archive that declares more data.
        lock_timeout: seconds to wait for another process that is swapping in its archive.

    Raises:
        StoreNotFoundError, StoreExistsError: by mode.
        CorruptStoreError: not an archive, or a damaged one.
        UnsupportedError: mode "r+" on compressed leaves.
        StoreIOError: the storage failed.
        ConflictError: by a commit: another writer committed since this one opened the archive.
    """
    check_choices(
        location or "tdz",
        mode=(mode, MODES),
        durable=(durable, get_args(Durable)),
        verify=(verify, get_args(Verify)),
    )
    if sys.byteorder != "little":
        raise UnsupportedError("the tdz backend needs a little-endian machine", url=location)
    method = method_of(compression)
    options: dict[str, Any] = {
        "durable": durable,
        "verify": verify,
        "max_bytes": max_bytes,
        "lock_timeout": lock_timeout,
    }
    store = TdzStore(local_place(location or "", "tdz", "file"), mode, method, compresslevel, options)
    store._start()
    return store


def method_of(compression: str | int | None) -> int:
    """Return the constant of `zipfile` for a name of a compression.

    Raises:
        OptionError: no such compression.
    """
    found = METHODS.get(compression) if isinstance(compression, str) else compression
    if compression is None:
        return zipfile.ZIP_STORED
    if found is None or isinstance(found, bool) or found not in METHODS.values():
        raise OptionError(
            f"compression must be one of {', '.join(map(repr, METHODS))} or a constant of zipfile, not {compression!r}"
        )
    return found


def _crc_of_range(hold: ArchiveFiles, leaf: LeafFile, start: int, stop: int) -> int:
    """Compute the crc32c of a part of a leaf in an archive, which no process writes in place."""
    assert isinstance(leaf, LeafEntry)
    return crc32c(os.pread(hold.fd, stop - start, leaf.start + start))


class TdzStore(TdzLeaves):
    """Leaves as stored entries of one zip file, which is never written in place.

    Rows that are written stay in private memory of this process. A commit builds a new file and swaps it in;
    leaves that stay keep their place in it, so that existing tensors still show the dataset.
    """

    # -- opening -------------------------------------------------------------------------
    def _start(self) -> None:
        try:
            with files.io_errors(self.url, "opening", writing=self.writable):
                self._open_by_mode()
        except BaseException:
            end_writer(_Steps(self), keep=False)
            raise

    def _open_by_mode(self) -> None:
        there = os.path.lexists(self.location)
        if self._mode == "a":
            self._mode = "r+" if there else "x"
        if self._mode in ("r", "r+"):
            self._open_existing()
            return
        if there:
            self._check_replaceable()
        self._open.made = files.make_parents(os.path.dirname(self.location))
        self._open.folder = files.open_dir(os.path.dirname(self.location))

    def _check_replaceable(self) -> None:
        if self._mode == "x":
            raise refusals.place_exists(self.url)
        size = os.path.getsize(self.location)
        if os.path.isdir(self.location) or (size and not zipfile.is_zipfile(self.location)):
            raise refusals.other_kind(self.url, "not an archive")

    def _open_existing(self) -> None:
        hold = self._open
        try:
            hold.folder = files.open_dir(os.path.dirname(self.location))
            hold.fd = files.open_plain(self._name, hold.folder, os.O_RDWR if self.writable else os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreNotFoundError(f"there is nothing at {self.url}", url=self.url) from error
        except files.NotRegularError as error:
            raise StoreNotFoundError(f"{self.url} is not a file", url=self.url) from error
        self._load()
        if self._options["verify"] == "full":
            for fault in self.verify():
                raise CorruptStoreError(f"{self.url}: {fault.reason}", url=self.url)
        elif self._reading is not None and sum(leaf.nbytes for leaf in self._entries.values()) <= OPENED:
            for leaf in list(self._entries.values()):
                if leaf.path in self._reading.pending:
                    self._tensor(leaf)
                    self._reading.check(leaf, None)

    def _load(self) -> None:
        listing = read_listing(self._open.fd, self.url)
        _, self._header, leaves = read_dataset(self._open.fd, listing, self.url)
        check_bombs(leaves, self._options["max_bytes"], self.url)
        self._end = self._at = listing.end
        for leaf in leaves:
            if self.writable and leaf.info is not None:
                self._check_writable_leaf(leaf)
                if not leaf.packed:
                    self._layout.adopt(leaf.path, leaf.file)
            self._entries[leaf.path] = leaf
        self._committed = dict(self._entries)
        if self._options["verify"] != "none":
            stored = [x for x in leaves if x.info is not None and x.info.compress_type == zipfile.ZIP_STORED]
            self._reading = ReadCheck(self.url, stored, partial(_crc_of_range, self._open))

    def _check_writable_leaf(self, leaf: LeafEntry) -> None:
        assert leaf.info is not None
        if leaf.info.compress_type != zipfile.ZIP_STORED:
            raise UnsupportedError(
                f"{self.url}: leaf {path_text(leaf.path)} is compressed and cannot be changed",
                url=self.url,
                hint="load it and save it again without compression, or unpack_memmap() it",
            )

    # -- commit --------------------------------------------------------------------------
    def _save(self, header: Header) -> None:
        with files.io_errors(self.url, "committing"), zip_errors(self.url):
            if self._open.fd < 0 and self._method != zipfile.ZIP_STORED:
                self._publish_packed(header)
                return
            written = self._written_leaves()
            if self._open.fd < 0 or self._changed or written or header != self._header:
                self._publish(header, written)
            else:
                self._check_current()

    def refresh(self) -> None:
        """Rewrite the archive with the checksums of its bytes."""
        self._check_writable()
        with files.io_errors(self.url, "committing"), zip_errors(self.url):
            self._publish(self._header, list(self._committed.values()), compare=False)

    def _written_leaves(self) -> list[LeafEntry]:
        """Return the committed leaves whose bytes in this process differ from those of the archive."""
        read = [leaf for leaf in self._entries.values() if leaf.probe is not None and not leaf.building and leaf.nbytes]
        # One look at all pages of a window: most of them have none that was written to.
        windows = {window for leaf in read if (window := self._window_of(leaf)) is not None}
        clean = {w for w in windows if w.stop - w.start <= _LOOKED_AT and w.changed_ranges(w.start, w.stop) == []}
        return [leaf for leaf in read if self._window_of(leaf) not in clean and self._is_written(leaf)]

    def _is_written(self, leaf: LeafEntry) -> bool:
        # torch counts its own writes only: compare the bytes, not the checksums, as the archive may be damaged.
        assert leaf.probe is not None
        data = as_bytes(leaf.probe)
        ranges = self._ranges_to_compare(leaf)
        return any(differs(data[a - leaf.start : b - leaf.start], self._open.fd, a) for a, b in ranges)

    def _window_of(self, leaf: LeafEntry) -> Window | None:
        """Return the window that the tensor of a leaf lies in; None where it is a copy."""
        if leaf.start % leaf.dtype.itemsize:
            return None
        return self._window_over(leaf.start, leaf.start + leaf.nbytes)

    def _ranges_to_compare(self, leaf: LeafEntry) -> list[tuple[int, int]]:
        """Return the ranges of the file outside of which a leaf has the same bytes in memory."""
        window, stop = self._window_of(leaf), leaf.start + leaf.nbytes
        ranges = None if window is None else window.changed_ranges(leaf.start, stop)
        return [(leaf.start, stop)] if ranges is None else ranges

    def _publish(self, header: Header, written: Sequence[LeafEntry], *, compare: bool = True) -> None:
        """Swap in a new archive: the contents of the old one, in the same places, and the later additions."""
        hold, leaves = self._open, list(self._entries.values())
        before = [(leaf, leaf.crc, leaf.sums) for leaf in leaves]
        try:
            if compare:
                for leaf in written:
                    self._compare_before(leaf)
            end = self._build(header, leaves, written)
            self._swap_in(partial(self._adopt, header, end), current=hold.fd >= 0)
        except BaseException:
            if hold.new >= 0:  # else it is published
                for leaf, crc, sums in before:
                    leaf.crc, leaf.sums = crc, sums
                    if leaf.info is not None and crc is not None:
                        leaf.info.CRC = crc
                if not any(leaf.building for leaf in leaves):
                    hold.drop_unfinished()  # it takes room, and is soon built again
            raise

    def _adopt(self, header: Header, end: int) -> None:
        """Hold the published archive instead of the one before."""
        hold = self._open
        for window in self._windows:
            window.move_to(hold.new)
        if hold.fd >= 0:
            os.close(hold.fd)
        hold.fd, hold.new, hold.temp = hold.new, -1, None
        self._settle(header, end, "r+")

    def _build(self, header: Header, leaves: list[LeafEntry], written: Sequence[LeafEntry]) -> int:
        """Build the whole new file; returns where its directory begins."""
        hold = self._open
        if hold.new < 0:
            self._begin_file()
        if hold.fd >= 0:
            self._check_current()
            copy_head(hold.fd, hold.new, self._end)
        for leaf in written:
            if leaf.probe is not None:
                data = as_bytes(leaf.probe)
                for start, stop in self._ranges_to_compare(leaf):
                    files.write_at(hold.new, data[start - leaf.start : stop - leaf.start].data, start)
        renewed = {id(leaf) for leaf in written}
        self._take_sums(hold.new, [x for x in leaves if id(x) in renewed or x.building or x.sums is None])
        for leaf in leaves:
            if leaf.info is not None and leaf.crc is not None and not leaf.building:
                patch_local(hold.new, leaf.info, leaf.crc)
                leaf.info.CRC = leaf.crc
        return finish(hold.new, self._at, leaves, descriptions(header, leaves, self._layout, self.url))

    def _compare_before(self, leaf: LeafEntry) -> None:
        """Refuse new checksums for a leaf that was written in part, if the rest of it is damaged."""
        if self._options["verify"] == "none" or leaf.sums is None or leaf.building:
            return
        _, found = sums_of_range(self._open.fd, leaf.start, leaf.nbytes, leaf.sums.block)
        if found.crc != leaf.sums.crc:
            raise CorruptStoreError(
                f"{self.url}: leaf {path_text(leaf.path)} was changed, and the archive holds other bytes of it than "
                "were committed",
                url=self.url,
                hint="restore it from a copy; to write over all of it, open with verify='none'",
            )

    def _settle(self, header: Header, end: int, mode: Mode) -> None:
        """Adopt the published archive as the present one."""
        for leaf in self._entries.values():
            if leaf.holes is not None:
                leaf.holes.filled()  # written to memory from now on
            leaf.building, leaf.holes, leaf.version = False, None, leaf.seen()
        self._committed = dict(self._entries)
        self._header, self._end, self._at, self._changed, self._mode = header, end, end, False, mode

    def _publish_packed(self, header: Header) -> None:
        """Commit for the first time with compression: the data is then read-only, from the uncompressed copy."""
        hold, leaves = self._open, list(self._entries.values())
        if hold.new < 0:
            self._begin_file()
        source, scratch = hold.new, hold.temp
        self._take_sums(source, leaves)
        try:
            hold.begin()
            small_files = descriptions(header, leaves, self._layout, self.url)
            finish_packed(hold.new, leaves, small_files, source, self._method, self._level)
            self._swap_in(partial(self._adopt_packed, header, source, scratch), current=False)
        except BaseException:
            if hold.fd < 0:  # else it is published
                if hold.new != source:
                    hold.drop_unfinished()
                hold.new, hold.temp = source, scratch
            raise

    def _adopt_packed(self, header: Header, source: int, scratch: str | None) -> None:
        """Hold the uncompressed copy of the published archive."""
        hold = self._open
        os.close(hold.new)
        if scratch is not None:
            files.unlink_if_there(scratch, hold.folder)
        hold.fd, hold.new, hold.temp = source, -1, None
        for window in self._windows:
            window.move_to(source)
        self._settle(header, self._at, "r")
        self.writable = False

    def _swap_in(self, adopt: Callable[[], None], *, current: bool) -> None:
        """Rename the new file to the name of the archive, in the place of the one that this store holds, or of any.

        Args:
            adopt: what the store does then, before Ctrl-C is noticed: it holds the new archive, or the old one.
            current: whether it holds one.
        """
        hold = self._open
        if self._sync:
            files.fsync(hold.new)
        # Two writers that commit at once: the second one looks when the first is through.
        with self._place_locked():
            if current:
                self._check_current()
            self._rename_in(adopt)
        if self._sync:
            files.fsync(hold.folder)

    @without_interrupts
    def _rename_in(self, adopt: Callable[[], None]) -> None:
        hold = self._open
        assert hold.temp is not None
        if self._mode == "x":
            files.link(hold.temp, hold.folder, self._name, hold.folder)
            files.unlink(hold.temp, hold.folder)
        else:
            take_mode(hold.new, self._name, hold.folder)
            files.rename(hold.temp, hold.folder, self._name, hold.folder)
        hold.made.clear()
        files.unlock(hold.new)
        adopt()

    @contextmanager
    def _place_locked(self) -> Iterator[None]:
        """Hold the lock of the present archive, so that no other writer replaces it meanwhile."""
        hold = self._open
        while True:
            try:
                fd = files.open_plain(self._name, hold.folder)
            except (FileNotFoundError, files.NotRegularError):
                yield
                return
            try:
                files.lock(fd, exclusive=True, timeout=self._options["lock_timeout"], url=self.url, what="the archive")
                if files.is_same_entry(fd, self._name, hold.folder):
                    yield
                    return
            finally:
                os.close(fd)

    def _take_sums(self, fd: int, leaves: Sequence[LeafEntry]) -> None:
        """Compute the checksums of leaves in a file."""
        pack: LeafEntry | None = None
        for leaf in leaves:
            if leaf.info is not None:
                if not leaf.take_written_sums():
                    leaf.crc, leaf.sums = sums_of_range(fd, leaf.start, leaf.nbytes)
                pack = leaf if leaf.packed else pack
        if pack is not None and pack.info is not None:
            crc = crc_of_range(fd, pack.start - pack.offset, pack.info.file_size)
            for leaf in self._entries.values():
                if leaf.packed:
                    leaf.crc = crc

    # -- the rest ------------------------------------------------------------------------
    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        """Compare every byte of the archive with its checksums; uncommitted changes are left out."""
        leaves = [self._leaf(path) for path in (self._entries if paths is None else paths)]
        with files.io_errors(self.url, "verifying", writing=False):
            found = [(leaf, self._fault(leaf)) for leaf in leaves]
        return [Fault(leaf.path, reason) for leaf, reason in found if reason is not None]

    def _fault(self, leaf: LeafEntry) -> str | None:
        if leaf.info is None or leaf.building:
            return None
        try:
            if leaf.packed:
                return self._packed_fault(leaf)
            if leaf.info.compress_type != zipfile.ZIP_STORED:
                for _ in blocks_of(self._open.fd, Member(leaf.info, leaf.start), self.url):
                    pass
                return None
            crc = crc_of_range(self._open.fd, leaf.start, leaf.nbytes)
        except (EOFError, CorruptStoreError) as error:
            return f"leaf {path_text(leaf.path)} cannot be read: {error}"
        if crc == leaf.crc:
            return None
        return f"leaf {path_text(leaf.path)} is damaged: its CRC-32 is {crc:08x}, expected {leaf.crc:08x}"

    def _packed_fault(self, leaf: LeafEntry) -> str | None:
        assert leaf.sums is not None
        assert leaf.info is not None
        if leaf.info.compress_type != zipfile.ZIP_STORED:
            self._unpacked(leaf)  # compared with the CRC-32 of the entry
            return None
        _, found = sums_of_range(self._open.fd, leaf.start, leaf.nbytes, leaf.sums.block)
        if found.crc == leaf.sums.crc:
            return None
        got, expected = found.crc[::-1].hex(), leaf.sums.crc[::-1].hex()
        return f"leaf {path_text(leaf.path)} is damaged: its crc32c is {got}, expected {expected}"

    def close(self) -> None:
        """Commit rows that were written into leaves of the last commit, drop other changes, close the file.

        Raises:
            StoreIOError: the storage failed. The store stays open, and `close` can be called again.
            CorruptStoreError: a leaf that was changed is damaged in the archive. The store stays open, too.
            ConflictError: another writer committed since. The store is closed, and its changes are lost.
        """
        if not self._closed:
            end_writer(_Steps(self), stay_open=(StoreIOError, CorruptStoreError))


class _Steps:
    """The steps of the commit policy."""

    def __init__(self, store: TdzStore) -> None:
        self._store = store

    def state(self) -> WriterState:
        store = self._store
        return WriterState(
            pid=store._open.pid,
            writable=store.writable,
            published=store._open.fd >= 0,
            structure=store._changed or any(leaf.building for leaf in store._entries.values()),
            rows=any(leaf.probe is not None for leaf in store._entries.values()),
        )

    def drop_structure(self) -> None:
        self._store.discard()

    def commit_rows(self) -> None:
        """Publish an archive with the leaves whose bytes in memory differ, unless the archive was removed."""
        store = self._store
        with files.io_errors(store.url, "closing"), zip_errors(store.url):
            if (written := store._written_leaves()) and os.fstat(store._open.fd).st_nlink:
                store._publish(store._header, written)
            elif written and os.path.lexists(store.location):
                store._check_current()

    def unmark(self) -> None:
        """Leave it: an archive has no mark of a writer."""

    def take_back(self) -> None:
        """Leave it: the archive is as the last commit left it, and the rows are in memory."""

    def remove_uncommitted(self) -> None:
        self._store._open.remove_unfinished()

    def release(self) -> None:
        store = self._store
        store._closed = True
        store._entries, store._committed = {}, {}
        store._windows.clear()
        store._pack = None
        store._last()
