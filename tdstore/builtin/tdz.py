"""The `tdz` backend: a memmap directory as one zip file, whose stored entries are memory-mapped where they lie."""

from __future__ import annotations

import os
import sys
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any, Literal, get_args

from tdstore import files, manifest
from tdstore.builtin.localplace import local_place
from tdstore.builtin.tdz_leaves import TdzLeaves
from tdstore.builtin.tdz_read import (
    METHODS,
    LeafEntry,
    Member,
    blocks_of,
    check_bombs,
    crc_of_range,
    read_dataset,
    read_listing,
    sums_of_range,
    zip_errors,
)
from tdstore.builtin.tdz_write import (
    copy_head,
    descriptions,
    finish,
    finish_packed,
    new_file,
    padded_manifest,
    patch_local,
    write_crc,
)
from tdstore.errors import (
    CorruptStoreError,
    OptionError,
    StoreExistsError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.header import Header
from tdstore.types import MODES, Fault, Mode, Path, path_text

Verify = Literal["none", "size", "full"]
Durable = Literal["none", "commit"]


def open_tdz(
    location: str | None = None,
    *,
    mode: Mode = "r",
    compression: str | int | None = None,
    compresslevel: int | None = None,
    durable: Durable = "commit",
    verify: Verify = "size",
    max_bytes: int | None = None,
) -> TdzStore:
    """Open, or make, an archive.

    Args:
        compression: "stored" (default), "deflate", "bzip2", "lzma" or a constant of `zipfile`, for a new archive. A
            compressed leaf takes less room; it is unpacked into memory when it is read, and the archive cannot be
            opened with mode "r+".
        compresslevel: of deflate (0 to 9) and bzip2 (1 to 9).
        durable: "commit" waits for the medium before it publishes (survives a power cut); "none" does not.
        verify: "full" compares every byte with the checksums of the archive; "size" and "none" only its structure.
        max_bytes: refuse an archive that declares more data.

    Raises:
        StoreNotFoundError, StoreExistsError: by mode. CorruptStoreError: not an archive, or a damaged one.
        UnsupportedError: mode "r+" on compressed or unaligned leaves. StoreIOError: the medium failed.
    """
    for name, value, known in (("mode", mode, MODES), ("durable", durable, get_args(Durable))):
        if value not in known:
            raise OptionError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}", url=location)
    if verify not in get_args(Verify):
        raise OptionError(f"verify must be 'none', 'size' or 'full', not {verify!r}", url=location)
    if sys.byteorder != "little":
        raise UnsupportedError("the tdz backend needs a little-endian machine", url=location)
    method = method_of(compression)
    options: dict[str, Any] = {"durable": durable, "verify": verify, "max_bytes": max_bytes}
    store = TdzStore(local_place(location or "", "tdz", "file"), mode, method, compresslevel, options)
    store._start()
    return store


def method_of(compression: str | int | None) -> int:
    """The constant of `zipfile` for a name of a compression.

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


class TdzStore(TdzLeaves):
    """Leaves as stored entries of one zip file.

    Changes of structure build a new file and swap it in; leaves that stay keep their place in it, so that tensors
    that were handed out go on showing, and changing, the dataset.
    """

    # -- opening -------------------------------------------------------------------------
    def _start(self) -> None:
        try:
            with files.io_errors(self.url, "opening", writing=self.writable):
                self._open_by_mode()
        except BaseException:
            self._closed = True
            self._last()
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
        os.makedirs(os.path.dirname(self.location), exist_ok=True)
        self._open.folder = files.open_dir(os.path.dirname(self.location))

    def _check_replaceable(self) -> None:
        if self._mode == "x":
            raise StoreExistsError(f"{self.url} exists", url=self.url)
        size = os.path.getsize(self.location)
        if os.path.isdir(self.location) or (size and not zipfile.is_zipfile(self.location)):
            raise StoreExistsError(
                f"{self.url} is there, and is no archive", url=self.url, hint="remove it, or save to another place"
            )

    def _open_existing(self) -> None:
        hold = self._open
        try:
            hold.folder = files.open_dir(os.path.dirname(self.location))
            hold.fd = files.open_plain(self._name, hold.folder, os.O_RDWR if self.writable else os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreNotFoundError(f"there is nothing at {self.url}", url=self.url) from error
        except files.NotRegularError as error:
            raise StoreNotFoundError(f"{self.url} is not a file", url=self.url) from error
        self._read()
        if self._options["verify"] == "full":
            for fault in self.verify():
                raise CorruptStoreError(f"{self.url}: {fault.reason}", url=self.url)

    def _read(self) -> None:
        listing = read_listing(self._open.fd, self.url)
        _, self._header, leaves = read_dataset(self._open.fd, listing, self.url)
        check_bombs(leaves, self._options["max_bytes"], self.url)
        self._end = self._at = listing.end
        for leaf in leaves:
            if self.writable and leaf.info is not None:
                self._check_in_place(leaf)
                self._layout.adopt(leaf.path, leaf.file)
            self._entries[leaf.path] = leaf

    def _check_in_place(self, leaf: LeafEntry) -> None:
        assert leaf.info is not None
        packed = leaf.info.compress_type != zipfile.ZIP_STORED
        if packed or leaf.start % leaf.dtype.itemsize:
            raise UnsupportedError(
                f"{self.url}: leaf {path_text(leaf.path)} is {'compressed' if packed else 'not aligned'} and cannot "
                "be written in place",
                url=self.url,
                hint="load it and save it again without compression, or unpack_memmap() it",
            )

    # -- commit --------------------------------------------------------------------------
    def save_header(self, header: Header) -> None:
        self._check_writable()
        with files.io_errors(self.url, "committing"), zip_errors(self.url):
            if self._open.fd < 0 and self._method != zipfile.ZIP_STORED:
                self._publish_packed(header)
            elif self._open.fd < 0 or self._changed or header != self._header:
                self._publish(header)
            else:
                self._check_current()
                self.refresh()

    def _publish(self, header: Header) -> None:
        """Swap in a new archive: what the old one held, in the same places, and what came since."""
        hold, leaves = self._open, list(self._entries.values())
        if hold.new < 0:
            hold.new, hold.temp = new_file(hold.folder)
            self._at = self._end
        if hold.fd >= 0:
            self._check_current()
            copy_head(hold.fd, hold.new, self._end)
        self._take_sums(hold.new, [leaf for leaf in leaves if leaf.suspect() or leaf.crc is None])
        for leaf in leaves:
            if leaf.info is not None and leaf.crc is not None and not leaf.building:
                patch_local(hold.new, leaf.info, leaf.crc)
                leaf.info.CRC = leaf.crc
        end = finish(hold.new, self._at, leaves, descriptions(header, leaves, self._layout, self.url))
        self._swap_in(replace=self._mode != "x")
        if hold.fd >= 0:
            for window in self._windows:
                window.move_to(hold.new)  # those over new leaves are there already
            os.close(hold.fd)
        hold.fd, hold.new, hold.temp = hold.new, -1, None
        for leaf in leaves:
            leaf.building = False
        self._header, self._end, self._at, self._changed, self._mode = header, end, end, False, "r+"

    def _publish_packed(self, header: Header) -> None:
        """A first commit with compression: from here on the data is only to be read, from the uncompressed copy."""
        hold, leaves = self._open, list(self._entries.values())
        if hold.new < 0:
            hold.new, hold.temp = new_file(hold.folder)
        source, scratch = hold.new, hold.temp
        self._take_sums(source, leaves)
        hold.new, hold.temp = new_file(hold.folder)
        try:
            texts = descriptions(header, leaves, self._layout, self.url)
            finish_packed(hold.new, leaves, texts, source, self._method, self._level)
            self._swap_in(replace=self._mode != "x")
        except BaseException:
            hold.drop_new()
            hold.new, hold.temp = source, scratch
            raise
        os.close(hold.new)
        if scratch is not None:
            files.unlink_if_there(scratch, hold.folder)
        hold.fd, hold.new, hold.temp = source, -1, None
        for leaf in leaves:
            leaf.building = False
        self._header, self._end, self._changed, self._mode, self.writable = header, self._at, False, "r", False

    def _swap_in(self, *, replace: bool) -> None:
        hold = self._open
        assert hold.temp is not None
        if self._sync:
            files.fsync(hold.new)
        if replace:
            files.rename(hold.temp, hold.folder, self._name, hold.folder)
        else:
            files.link(hold.temp, hold.folder, self._name, hold.folder)
            files.unlink(hold.temp, hold.folder)
        if self._sync:
            files.fsync(hold.folder)

    def _take_sums(self, fd: int, leaves: Sequence[LeafEntry]) -> list[LeafEntry]:
        """Renew the checksums of leaves; those whose data had changed."""
        changed = []
        for leaf in leaves:
            if leaf.info is None:
                continue
            crc, sums = sums_of_range(fd, leaf.start, leaf.nbytes)
            if (crc, sums) != (leaf.crc, leaf.sums):
                changed.append(leaf)
            leaf.crc, leaf.sums = crc, sums
            leaf.version = leaf.seen()
        return changed

    def refresh(self, *, everything: bool = False) -> None:
        """Bring the checksums of the archive up to date with what was written in place."""
        leaves, fd = list(self._entries.values()), self._open.fd
        changed = self._take_sums(fd, [leaf for leaf in leaves if everything or leaf.suspect()])
        if not changed and not everything:
            return
        crcs = {leaf.file: leaf.crc for leaf in changed if leaf.crc is not None}
        members, end = read_listing(fd, self.url)
        kept = members.get((manifest.NAME,))
        if kept is not None:
            self._take_sums(fd, [leaf for leaf in leaves if leaf.sums is None])
            raw = padded_manifest(self._header, leaves, self.url)
            if len(raw) != kept.info.file_size or not kept.stored:
                self._publish(self._header)
                return
            files.write_at(fd, memoryview(raw), kept.start)
            crcs[(manifest.NAME,)] = zlib.crc32(raw)
        write_crc(fd, end, members, crcs)
        if self._sync:
            files.fsync(fd)

    # -- the rest ------------------------------------------------------------------------
    def flush(self) -> None:
        """Wait for the medium if the store is durable; other processes see writes at once anyway."""
        self._check_open()
        if self.writable and self._sync and self._open.fd >= 0:
            with files.io_errors(self.url, "flushing"):
                files.fsync(self._open.fd)

    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        """Compare every byte with the checksums of the archive; leaves that this store wrote to are left out."""
        leaves = [self._entry(path) for path in (self._entries if paths is None else paths)]
        with files.io_errors(self.url, "verifying", writing=False):
            found = [(leaf, self._fault(leaf)) for leaf in leaves]
        return [Fault(leaf.path, reason) for leaf, reason in found if reason is not None]

    def _fault(self, leaf: LeafEntry) -> str | None:
        if leaf.info is None or leaf.building or (self.writable and leaf.written()):
            return None
        try:
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

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        hold = self._open
        try:
            with files.io_errors(self.url, "closing"), zip_errors(self.url):
                # After changes that were not committed the manifest tells of other leaves than are here.
                current = hold.fd >= 0 and not self._changed and files.is_still(hold.fd, self._name, hold.folder)
                if self.writable and current:
                    self.refresh()
        finally:
            self._entries = {}
            self._windows.clear()
            self._last()
