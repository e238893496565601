"""Build a `.tdz` archive: places for the leaves first, then what describes them, then the directory of the zip.

A stored leaf gets its place, aligned and with room for its local header, before its bytes are known. Local headers
are written when they are: `zipfile` makes them, as it makes the directory.
"""

from __future__ import annotations

import os
import struct
import time
import zipfile
from collections.abc import Iterable, Mapping
from typing import IO, Any

from tdstore import files, manifest
from tdstore.builtin.memmap_layout import Layout
from tdstore.builtin.peer_memmap import meta_files
from tdstore.builtin.tdz_read import LeafEntry, Member, as_file
from tdstore.checksums import BLOCK
from tdstore.header import Header
from tdstore.session import FileParts

ALIGN = 64
_BLOCK_ID = b"td"
"""Of the extra field that aligns an entry."""
_LOCAL = 30
_ZIP64 = 20
_RECORD = 46
"""Bytes of a record of the directory, before its name."""
CRC_AT = 14
"""Where the CRC-32 is in a local header."""
DESCRIPTOR = 0x8
"""Of the flags of an entry whose CRC-32 stands behind its data instead, where no reader looks."""


def new_info(name: str, nbytes: int, at: int) -> tuple[zipfile.ZipInfo, int]:
    """A stored entry whose local header begins at a byte, and where its own bytes, aligned, do."""
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
    """A new file in a folder, under a name that nobody takes for an archive."""
    name = files.temp_name()
    return files.create_empty(name, folder), name


class Held:
    """The descriptors of one store, and the file that is being built; let go of also when nobody closes the store."""

    def __init__(self) -> None:
        self.fd = -1
        """Of the published archive."""
        self.folder = -1
        self.new = -1
        """Of the one that is being built."""
        self.temp: str | None = None

    def drop_new(self) -> None:
        """Give up what is being built."""
        if self.temp is not None:
            files.unlink_if_there(self.temp, self.folder)
        if self.new >= 0:
            os.close(self.new)
        self.new, self.temp = -1, None

    def end(self) -> None:
        """Let go of everything."""
        self.drop_new()
        for fd in (self.fd, self.folder):
            if fd >= 0:
                os.close(fd)
        self.fd = self.folder = -1


def descriptions(header: Header, leaves: Iterable[LeafEntry], layout: Layout, url: str) -> dict[FileParts, bytes]:
    """The manifest and the peer's `meta.json` files, which come first."""
    known = list(leaves)
    return {(manifest.NAME,): padded_manifest(header, known, url), **meta_files(header, known, layout)}


def padded_manifest(header: Header, leaves: list[LeafEntry], url: str) -> bytes:
    """A manifest as long as that of other checksums would be, so that it can be overwritten where it is."""
    raw = manifest.encode_manifest(header, [leaf.record() for leaf in leaves], url=url)
    records = [leaf.record() for leaf in leaves]
    short = sum(10 + len(',"tips":') - _told(record.tips) for record in records)
    return manifest.seal(manifest.unseal(raw, url=url) + b" " * short)


def _told(tips: int) -> int:
    return len(f',"tips":{tips}') if tips else 0


def repadded(raw: bytes, url: str) -> bytes:
    """The manifest of a directory, with the same room to grow."""
    document, _ = manifest.decode_manifest(raw, url=url)
    short = sum(10 + len(',"tips":') - _told(record.tips) for record in document.leaves)
    return manifest.seal(manifest.unseal(raw, url=url).rstrip() + b" " * short)


def finish(fd: int, at: int, leaves: Iterable[LeafEntry], texts: Mapping[FileParts, bytes]) -> int:
    """Write local headers of stored leaves, the small files, and the directory; where the directory begins."""
    infos = [leaf.info for leaf in leaves if leaf.info is not None]
    for leaf in leaves:
        if leaf.info is not None and leaf.building:
            assert leaf.crc is not None
            leaf.info.CRC = leaf.crc
            files.write_at(fd, memoryview(leaf.info.FileHeader(zip64=True)), leaf.info.header_offset)
    files.truncate(fd, at)
    with as_file(fd, "r+b") as file:
        file.seek(at)
        with zipfile.ZipFile(file, "w") as archive:
            add_texts(archive, texts)
            # Entries whose bytes are there already: the directory is all that they lack.
            archive.filelist.extend(infos)
            archive.NameToInfo.update({info.filename: info for info in infos})
        return archive.start_dir


def add_texts(archive: zipfile.ZipFile, texts: Mapping[FileParts, bytes]) -> None:
    """Add small files, those of the root first."""
    for parts, data in sorted(texts.items(), key=lambda item: len(item[0])):
        info = zipfile.ZipInfo("/".join(parts), _now())
        info.external_attr = 0o644 << 16
        archive.writestr(info, data)


def finish_packed(
    fd: int, leaves: Iterable[LeafEntry], texts: Mapping[FileParts, bytes], source: int, method: int, level: int | None
) -> None:
    """A whole archive of compressed leaves, whose bytes are in another file."""
    with as_file(fd, "r+b") as file, zipfile.ZipFile(file, "w", method, compresslevel=level) as archive:
        add_texts(archive, texts)
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
    """Copy the first bytes of a file to the same place of another."""
    at = 0
    while at < nbytes:
        block = os.pread(source, min(BLOCK, nbytes - at), at)
        if not block:
            raise EOFError("the archive became shorter while it was copied")
        files.write_at(target, memoryview(block), at)
        at += len(block)


def write_crc(fd: int, end: int, members: Mapping[FileParts, Member], crcs: Mapping[FileParts, int]) -> None:
    """Correct the CRC-32 of stored entries where they are, in their local headers and in the directory of the zip.

    Args:
        end: where the directory begins.

    Nothing else changes, so that an archive whose writer is killed in between is whole but for checksums.
    """
    wanted = {"/".join(parts): crc for parts, crc in crcs.items() if crc != members[parts].info.CRC}
    for parts, crc in crcs.items():
        info = members[parts].info
        if crc != info.CRC:
            patch_local(fd, info, crc)
        info.CRC = crc
    raw, at = os.pread(fd, os.fstat(fd).st_size - end, end), 0
    while wanted and raw[at : at + 4] == b"PK\x01\x02":
        (flags,), lengths = struct.unpack_from("<H", raw, at + 8), struct.unpack_from("<3H", raw, at + 28)
        name = raw[at + _RECORD : at + _RECORD + lengths[0]].decode("utf-8" if flags & 0x800 else "cp437")
        if (found := wanted.pop(name, None)) is not None:
            _patch(fd, end + at + 16, found)
        at += _RECORD + sum(lengths)


def patch_local(fd: int, info: zipfile.ZipInfo, crc: int) -> None:
    """Correct the CRC-32 in the local header of an entry."""
    if not info.flag_bits & DESCRIPTOR:
        _patch(fd, info.header_offset + CRC_AT, crc)


def _patch(fd: int, at: int, crc: int) -> None:
    files.write_at(fd, memoryview(crc.to_bytes(4, "little")), at)
