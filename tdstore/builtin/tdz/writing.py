"""Writing of `.tdz` archives: places for the leaves first, then the documents, then the directory of the zip.

A stored leaf gets its place, aligned and with room for its local header, before its bytes are known. Local headers
are written later: `zipfile` makes them, as it makes the directory.
"""

from __future__ import annotations

import os
import re
import secrets
import time
import zipfile
from collections.abc import Iterable, Mapping
from typing import IO, Any

from tdstore.builtin.memmap.layout import Layout
from tdstore.builtin.memmap.tensordict_layout import meta_files
from tdstore.builtin.tdz.reading import LeafEntry, as_file
from tdstore.header import Header
from tdstore.storekit import documents, files
from tdstore.storekit.checksums import BLOCK, next_data
from tdstore.storekit.publish import leftovers
from tdstore.storekit.session import FileParts
from tdstore.threads import without_interrupts

ALIGN = 64
_BLOCK_ID = b"td"
"""The id of the extra field that aligns an entry."""
_LOCAL = 30
_ZIP64 = 20
CRC_AT = 14
"""The offset of the CRC-32 in a local header."""
DESCRIPTOR = 0x8
"""The flag of an entry whose CRC-32 follows its data; no reader checks that one."""


def new_info(name: str, nbytes: int, at: int) -> tuple[zipfile.ZipInfo, int]:
    """Build a stored entry whose local header begins at `at`; also returns where its own bytes, aligned, begin."""
    info = zipfile.ZipInfo(name, _now())
    info.external_attr = 0o644 << 16
    info.file_size = info.compress_size = nbytes
    info.header_offset = at
    plain = at + _LOCAL + len(name.encode()) + _ZIP64 + 4
    info.extra = _BLOCK_ID + (-plain % ALIGN).to_bytes(2, "little") + bytes(-plain % ALIGN)
    return info, plain + -plain % ALIGN


def _now() -> tuple[int, int, int, int, int, int]:
    found = time.localtime()[:6]
    return found if 1980 <= found[0] <= 2107 else (1980, 1, 1, 0, 0, 0)


def new_file(folder: int) -> tuple[int, str]:
    """Make a file in a folder, under a name that is no archive's, and locked as long as it is open.

    Files of processes that ended are removed.
    """
    for name in leftovers(folder, _NEW) or ():
        _remove_if_left(name, folder)
    while True:
        name = f".tdstore-tdz-{secrets.token_hex(8)}"
        fd = files.create_empty(name, folder)
        # Another process may have removed it between the two calls.
        if files.try_lock(fd, exclusive=True) and os.fstat(fd).st_nlink:
            return fd, name
        os.close(fd)


def _remove_if_left(name: str, folder: int) -> None:
    """Remove an unfinished file, if its process ended."""
    try:
        fd = files.open_plain(name, folder)
    except OSError:
        return  # removed meanwhile, or not ours
    try:
        if files.try_lock(fd, exclusive=True):
            files.unlink_if_there(name, folder)
    finally:
        os.close(fd)


_NEW = re.compile(r"\.tdstore-tdz-[0-9a-f]{16}")


class ArchiveFiles:
    """The descriptors of one store, and the unfinished file; released also when the store is not closed."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.fd = -1
        """The descriptor of the published archive."""
        self.folder = -1
        self.new = -1
        """The descriptor of the archive that is being built."""
        self.temp: str | None = None
        self.made: list[str] = []
        """Folders that were made on the way to an archive that is not published yet."""

    @without_interrupts
    def begin(self) -> None:
        """Make the file of a new archive. Nobody else removes it, not even this process, while it is open."""
        self.new, self.temp = new_file(self.folder)

    @without_interrupts
    def drop_unfinished(self) -> None:
        """Remove the unfinished file."""
        if self.temp is not None:
            files.unlink_if_there(self.temp, self.folder)
        if self.new >= 0:
            os.close(self.new)
        self.new, self.temp = -1, None

    def remove_unfinished(self) -> None:
        """Remove the unfinished file, and folders that were made for it. In a forked child they are the parent's."""
        if self.pid == os.getpid():
            self.drop_unfinished()
            files.remove_empty(self.made)

    def end(self) -> None:
        """Release everything."""
        self.remove_unfinished()
        for fd in (self.fd, self.folder):
            if fd >= 0:
                os.close(fd)
        self.fd = self.folder = -1


def descriptions(header: Header, leaves: Iterable[LeafEntry], layout: Layout, url: str) -> dict[FileParts, bytes]:
    """Return the manifest and the `meta.json` files of tensordict, which come first."""
    known = list(leaves)
    raw = documents.encode_manifest(header, [leaf.record() for leaf in known], url=url)
    # tensordict knows no packed leaves.
    metas = {} if any(leaf.packed for leaf in known) else meta_files(header, known, layout)
    return {(documents.NAME,): raw, **metas}


def finish(fd: int, at: int, leaves: Iterable[LeafEntry], small_files: Mapping[FileParts, bytes]) -> int:
    """Write local headers of stored leaves, the small files, and the directory; returns where the directory begins."""
    infos = {leaf.info.filename: leaf.info for leaf in leaves if leaf.info is not None}
    for leaf in leaves:
        if leaf.info is not None and leaf.building:
            assert leaf.crc is not None
            leaf.info.CRC = leaf.crc
            files.write_at(fd, memoryview(leaf.info.FileHeader(zip64=True)), leaf.info.header_offset)
    files.truncate(fd, at)
    with as_file(fd, "r+b") as file:
        file.seek(at)
        with zipfile.ZipFile(file, "w") as archive:
            add_small_files(archive, small_files)
            # Entries whose bytes are there already: the directory is all that they lack.
            archive.filelist.extend(infos.values())
            archive.NameToInfo.update(infos)
        return archive.start_dir


def add_small_files(archive: zipfile.ZipFile, small_files: Mapping[FileParts, bytes]) -> None:
    """Add small files, those of the root first."""
    for parts, data in sorted(small_files.items(), key=lambda item: len(item[0])):
        info = zipfile.ZipInfo("/".join(parts), _now())
        info.external_attr = 0o644 << 16
        archive.writestr(info, data)


def finish_packed(
    fd: int,
    leaves: Iterable[LeafEntry],
    small_files: Mapping[FileParts, bytes],
    source: int,
    method: int,
    level: int | None,
) -> None:
    """Write a whole archive of compressed leaves, whose bytes are in another file."""
    with as_file(fd, "r+b") as file, zipfile.ZipFile(file, "w", method, compresslevel=level) as archive:
        add_small_files(archive, small_files)
        for leaf in leaves:
            if leaf.info is None:
                continue
            with archive.open("/".join(leaf.file), "w", force_zip64=True) as target:
                copy_range(source, leaf.start, leaf.nbytes, target)


def copy_range(fd: int, start: int, nbytes: int, target: IO[Any]) -> None:
    """Copy bytes of a file into a file object."""
    while nbytes:
        block = os.pread(fd, min(BLOCK, nbytes), start)
        if not block:
            raise EOFError("a file ends too early")
        target.write(block)
        start, nbytes = start + len(block), nbytes - len(block)


def copy_head(source: int, target: int, nbytes: int) -> None:
    """Copy the first bytes of a file to the same place of another; holes stay holes."""
    if os.fstat(source).st_size < nbytes:
        raise EOFError("the archive became shorter while it was copied")
    if os.fstat(target).st_size < nbytes:
        files.truncate(target, nbytes)
    at = 0
    while at < nbytes:
        start, stop = next_data(source, at, nbytes)
        _copy_extent(source, target, start, min(stop, nbytes))
        at = stop


def _copy_extent(source: int, target: int, at: int, stop: int) -> None:
    while at < stop:
        block = os.pread(source, min(BLOCK, stop - at), at)
        if not block:
            raise EOFError("the archive became shorter while it was copied")
        files.write_at(target, memoryview(block), at)
        at += len(block)


def patch_local(fd: int, info: zipfile.ZipInfo, crc: int) -> None:
    """Correct the CRC-32 in the local header of an entry."""
    if not info.flag_bits & DESCRIPTOR:
        files.write_at(fd, memoryview(crc.to_bytes(4, "little")), info.header_offset + CRC_AT)
