"""Reading of `.tdz` archives: zip files whose entries are the files of a memmap directory. Every entry is checked."""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import json
import lzma
import operator
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from tdstore.builtin.memmap.layout import LeafFile
from tdstore.builtin.memmap.tensordict_layout import MAX_META, MAX_PICKLE, META, TensordictReader
from tdstore.builtin.tdz.written_sums import WrittenSums
from tdstore.dtypes import to_numpy
from tdstore.errors import CorruptStoreError, StoreError, UnsupportedError
from tdstore.header import Header
from tdstore.storekit import documents
from tdstore.storekit.checksums import BLOCK, Summer, Sums, crc32_and_zeros, next_data
from tdstore.storekit.session import FileParts
from tdstore.types import Path, path_text
from tdstore.values import unique_keys

METHODS = {
    "stored": zipfile.ZIP_STORED,
    "deflate": zipfile.ZIP_DEFLATED,
    "deflated": zipfile.ZIP_DEFLATED,
    "bzip2": zipfile.ZIP_BZIP2,
    "lzma": zipfile.ZIP_LZMA,
}
MAX_ENTRIES = 2_000_000
DEFLATE_MOST = 1040
"""No deflate stream becomes more than so many times as long."""
SUSPECT_RATIO, SUSPECT_BYTES = 10_000, 1 << 30
MAX_READ = 1 << 29
"""Longest directory of a zip; it is read at once, and what a file without real bytes (a sparse one) claims costs."""
MAX_WINDOW = 1 << 27
"""Largest dictionary of an lzma entry: memory that unpacking takes before the first byte."""
_LOCAL = struct.Struct("<4s5H3L2H")
_HEADER_OFFSET = operator.attrgetter("header_offset")
ENCRYPTED = 0x1


class Member(NamedTuple):
    """One entry of an archive."""

    info: zipfile.ZipInfo
    start: int
    """Where its bytes begin in the file."""

    @property
    def stored(self) -> bool:
        """Check whether its bytes are the data themselves."""
        return self.info.compress_type == zipfile.ZIP_STORED


class Listing(NamedTuple):
    """The entries of an archive by the components of their names, and the end of the data."""

    members: dict[FileParts, Member]
    end: int


class LeafEntry(LeafFile):
    """A leaf of an archive: an entry of it, or one that is being built."""

    __slots__ = ("building", "crc", "info", "start", "written_sums")

    info: zipfile.ZipInfo | None
    """None for a leaf without elements; packed leaves share theirs."""
    start: int
    """Where its bytes begin in the archive, if they are not compressed."""
    crc: int | None
    """CRC-32 of the entry."""
    building: bool
    written_sums: WrittenSums | None
    """Of one that is being built, as long as its bytes are written in order and through no mapping."""

    def __init__(self, path: Path, shape: Iterable[int], dtype: torch.dtype, fill: Any, file: FileParts) -> None:
        LeafFile.__init__(self, path, shape, dtype, fill, file)
        self.info, self.start, self.crc, self.building, self.written_sums = None, 0, None, False, None

    def sums_from(self, at: int) -> WrittenSums | None:
        """Return what a write of bytes from `at` on is to be added to; None where the leaf must be read again."""
        if at == 0 and self.probe is None:
            self.written_sums = WrittenSums(self.nbytes)
        elif self.written_sums is not None and (self.probe is not None or self.written_sums.at != at):
            self.written_sums = None
        return self.written_sums

    def take_written_sums(self) -> bool:
        """Adopt the checksums of what was written, if that was the whole leaf; else return False."""
        known, self.written_sums = self.written_sums, None
        if known is None or not self.building or self.probe is not None or known.at != self.nbytes:
            return False
        self.crc, self.sums = known.crc, known.sums()
        return True


def as_entry(leaf: LeafFile) -> LeafEntry:
    """Turn a leaf of tensordict's files into one of an archive, without its place."""
    made = LeafEntry(leaf.path, leaf.shape, leaf.dtype, leaf.fill, leaf.file)
    made.sums, made.packed, made.offset = leaf.sums, leaf.packed, leaf.offset
    return made


_UNSOUND = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    struct.error,
    NotImplementedError,
    ValueError,
    OverflowError,
)


@contextlib.contextmanager
def zip_errors(url: str) -> Iterator[None]:
    """Raise errors of the zip library as `CorruptStoreError`."""
    try:
        yield
    except StoreError:
        raise
    except _UNSOUND as error:
        raise CorruptStoreError(f"{url} is not a sound archive: {error}", url=url) from error
    except OSError as error:
        if error.errno is not None:  # else bzip2 reports its data
            raise
        raise CorruptStoreError(f"{url} is not a sound archive: {error}", url=url) from error


def as_file(fd: int, mode: str = "rb") -> IO[Any]:
    """Return an independent file object over an open descriptor."""
    return os.fdopen(os.dup(fd), mode)


class _LimitedReader(io.BufferedReader):
    """A file that limits the size of a single read."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read, after a check of the size."""
        if size is not None and size > MAX_READ:
            raise zipfile.BadZipFile(f"its directory claims {size} bytes")
        return super().read(size)


@contextlib.contextmanager
def as_zip(fd: int, url: str) -> Iterator[zipfile.ZipFile]:
    """Open the zip in an open file, with its errors raised as ours."""
    with (
        zip_errors(url),
        _LimitedReader(io.FileIO(os.dup(fd))) as file,
        zipfile.ZipFile(cast(IO[bytes], file)) as archive,
    ):
        yield archive


# -- the directory of the zip ----------------------------------------------------------------
def read_listing(fd: int, url: str) -> Listing:
    """List all entries, each a plain file below the root whose bytes are its own.

    Raises:
        CorruptStoreError: not a zip, or one whose entries overlap, are outside, are links or leave their folder.
    """
    with as_zip(fd, url) as archive:
        infos, end = archive.infolist(), archive.start_dir
        if len(infos) > MAX_ENTRIES:
            raise CorruptStoreError(f"{url} has more than {MAX_ENTRIES} entries", url=url)
        members: dict[FileParts, Member] = {}
        at = 0
        for info in sorted(infos, key=_HEADER_OFFSET):
            parts = _parts(info, url)
            start = _payload(fd, info, url)
            if info.header_offset < at or start + info.compress_size > end:
                raise CorruptStoreError(
                    f"{url}: the entry {info.filename!r} overlaps another one, or is outside the archive", url=url
                )
            at = start + info.compress_size
            if info.filename[-1] == "/":
                continue
            if parts in members:
                raise CorruptStoreError(f"{url} has the entry {info.filename!r} twice", url=url)
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                _check_size(info, url)
                if info.compress_type == zipfile.ZIP_LZMA:
                    _check_window(fd, start, info, url)
            members[parts] = Member(info, start)
    names = sorted(members)
    for name, following in itertools.pairwise(names):  # entries below a name sort right behind it
        if following[: len(name)] == name:
            raise CorruptStoreError(f"{url} has {'/'.join(name)!r} as a file and as a folder", url=url)
    return Listing(members, end)


def _parts(info: zipfile.ZipInfo, url: str) -> FileParts:
    parts = tuple(info.filename.rstrip("/").split("/"))
    if len(parts) > 600 or info.orig_filename != info.filename or not all(map(documents.is_plain_name, parts)):
        raise CorruptStoreError(
            f"{url} has the entry {info.orig_filename[:200]!r}, which is not a plain file below its root", url=url
        )
    mode = info.external_attr >> 16
    if mode and stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise CorruptStoreError(f"{url}: the entry {info.filename!r} is a link or a device", url=url)
    if info.flag_bits & ENCRYPTED:
        raise UnsupportedError(f"{url}: the entry {info.filename!r} is encrypted", url=url)
    return parts


def _encoded(info: zipfile.ZipInfo, flags: int) -> bytes:
    name = info.orig_filename
    if name.isascii():  # the same in both, and quicker than by a table
        return name.encode("ascii")
    return name.encode("utf-8" if flags & 0x800 else "cp437", "replace")


def _payload(fd: int, info: zipfile.ZipInfo, url: str) -> int:
    """Return where the bytes of an entry begin: behind its local header, which must agree with the directory."""
    expected = _encoded(info, info.flag_bits)
    # Most names are as long as the directory says: then one read has header and name.
    raw = os.pread(fd, _LOCAL.size + len(expected), info.header_offset) if info.header_offset >= 0 else b""
    if len(raw) < _LOCAL.size:
        raise CorruptStoreError(f"{url}: the entry {info.filename!r} is beyond the end", url=url)
    signature, _, flags, method, *_, name_length, extra_length = _LOCAL.unpack_from(raw)
    start = info.header_offset + _LOCAL.size
    name = raw[_LOCAL.size :] if name_length == len(expected) else os.pread(fd, name_length, start)
    wanted = expected if flags == info.flag_bits else _encoded(info, flags)
    if signature != b"PK\x03\x04" or method != info.compress_type or name != wanted:
        raise CorruptStoreError(f"{url}: the entry {info.filename!r} is not where the directory says", url=url)
    return int(start + name_length + extra_length)


def _check_size(info: zipfile.ZipInfo, url: str) -> None:
    long, short = info.file_size, info.compress_size
    lies = long != short if info.compress_type == zipfile.ZIP_STORED else False
    lies |= info.compress_type == zipfile.ZIP_DEFLATED and long > DEFLATE_MOST * (short + 64)
    if lies or long >= 2**62:
        raise CorruptStoreError(f"{url}: the entry {info.filename!r} cannot hold {long} bytes in {short}", url=url)
    if info.compress_type not in METHODS.values():
        raise UnsupportedError(
            f"{url}: the entry {info.filename!r} is compressed by an unknown method, {info.compress_type}",
            url=url,
        )


def _check_window(fd: int, start: int, info: zipfile.ZipInfo, url: str) -> None:
    """Refuse an lzma entry whose dictionary is larger than any that is written."""
    window = int.from_bytes(os.pread(fd, 4, start + 5), "little")
    if window > MAX_WINDOW:
        raise CorruptStoreError(
            f"{url}: the entry {info.filename!r} needs {window} bytes of memory to be unpacked", url=url
        )


# -- the bytes of an entry -------------------------------------------------------------------
def read_member(fd: int, member: Member, limit: int, url: str) -> bytes:
    """Read all bytes of a small entry, compared with their checksum."""
    if member.info.file_size > limit:
        raise CorruptStoreError(
            f"{url}: {member.info.filename!r} has {member.info.file_size} bytes, more than {limit}", url=url
        )
    with as_zip(fd, url) as archive, archive.open(member.info) as source:
        data = source.read(limit + 1)
        if len(data) != member.info.file_size:
            raise CorruptStoreError(f"{url}: {member.info.filename!r} is shorter or longer than it says", url=url)
        return data


def read_manifest(fd: int, member: Member, url: str) -> bytes:
    """Read the manifest by its own checksum: that in the zip is renewed a moment after it, and may be older."""
    if not member.stored or member.info.file_size > documents.MAX_FILE_BYTES:
        return read_member(fd, member, documents.MAX_FILE_BYTES, url)
    return os.pread(fd, member.info.file_size, member.start)


def blocks_of(fd: int, member: Member, url: str) -> Iterator[bytes]:
    """Yield the unpacked bytes of an entry, in blocks of 4 MiB: as many as declared, compared with their checksum."""
    with as_zip(fd, url) as archive, archive.open(member.info) as source:
        left = member.info.file_size
        while left:
            block = source.read(min(BLOCK, left))
            if not block:
                raise EOFError(f"{member.info.filename!r} ends too early")
            left -= len(block)
            yield block
        if source.read(1):
            raise zipfile.BadZipFile(f"{member.info.filename!r} is longer than it says")


def as_bytes(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of a contiguous tensor."""
    found: np.ndarray[tuple[int], np.dtype[np.uint8]] = to_numpy(tensor).reshape(-1).view("uint8")
    return found


def load_member(fd: int, member: Member, out: Tensor, url: str) -> None:
    """Fill a contiguous tensor with the bytes of an entry."""
    target = as_bytes(out)
    at = 0
    for block in blocks_of(fd, member, url):
        target[at : at + len(block)] = np.frombuffer(block, np.uint8)
        at += len(block)


def sums_of_range(fd: int, start: int, nbytes: int, block: int | None = None) -> tuple[int, Sums]:
    """Compute CRC-32 and the checksums of a manifest, of `block` bytes each, in one pass; holes are not read."""
    crc, summer = 0, Summer(nbytes, block)
    buffer = np.empty(min(BLOCK, nbytes), np.uint8)
    at, data_until = 0, 0  # [at, data_until) is known to hold data
    while at < nbytes:
        if at >= data_until:
            found, until = next_data(fd, start + at, start + nbytes)
            data_until = until - start
            hole = (nbytes if found >= start + nbytes else (found - start) // BLOCK * BLOCK) - at
            if hole > 0:
                if os.fstat(fd).st_size < start + at + hole:
                    raise EOFError("the archive ends too early")
                crc = crc32_and_zeros(crc, hole)
                summer.add_zeros(hole)
                at += hole
                continue
        piece = buffer[: min(BLOCK, nbytes - at)]
        read_all(fd, piece, start + at)
        crc = zlib.crc32(piece.data, crc)
        summer.add(piece)
        at += len(piece)
    return crc, summer.sums()


def differs(memory: np.ndarray[tuple[int], np.dtype[np.uint8]], fd: int, start: int) -> bool:
    """Check whether memory differs from the bytes of a file.

    Args:
        memory: the bytes.
        fd: descriptor of the file.
        start: position of the first byte in the file.
    """
    buffer = np.empty(min(BLOCK, len(memory)), np.uint8)
    for at in range(0, len(memory), BLOCK):
        mine = memory[at : at + BLOCK]
        read_all(fd, buffer[: len(mine)], start + at)
        if not np.array_equal(mine, buffer[: len(mine)]):
            return True
    return False


def read_all(fd: int, out: np.ndarray[tuple[int], np.dtype[np.uint8]], at: int) -> None:
    """Fill an array with bytes of a file.

    Args:
        fd: descriptor of the file.
        out: the array.
        at: position in the file.

    Raises:
        EOFError: the file ends before.
    """
    got = 0
    while got < len(out):
        n = os.preadv(fd, [out[got:].data], at + got)
        if not n:
            raise EOFError("the archive ends too early")
        got += n


def crc_of_range(fd: int, start: int, nbytes: int) -> int:
    """Compute the CRC-32 of bytes of a file."""
    crc = 0
    while nbytes:
        block = os.pread(fd, min(BLOCK, nbytes), start)
        if not block:
            raise EOFError("the archive ends too early")
        crc = zlib.crc32(block, crc)
        start, nbytes = start + len(block), nbytes - len(block)
    return crc


# -- the dataset -----------------------------------------------------------------------------
def read_dataset(fd: int, listing: Listing, url: str) -> tuple[bytes, Header, list[LeafEntry]]:
    """Read the manifest (empty for archives of tensordict), the header, and the leaves with their places."""
    found = listing.members.get((documents.NAME,))
    if found is not None:
        raw = read_manifest(fd, found, url)
        document, header = documents.decode_manifest(raw, url=url)
        entries = [LeafEntry.from_record(record) for record in document.leaves]
    elif (META,) in listing.members:
        raw = b""
        header, leaves = _ArchiveReader(fd, listing, url).read()
        entries = [as_entry(leaf) for leaf in leaves]
    else:
        hint = "tdstore.from_npz reads the arrays of numpy.savez" if url.lower().endswith(".npz") else None
        raise CorruptStoreError(f"{url} is a zip without {META}: not an archive of a dataset", url=url, hint=hint)
    for leaf in entries:
        if not leaf.nbytes:
            continue
        member = listing.members.get(leaf.file)
        end = leaf.offset + leaf.nbytes
        if member is None or (member.info.file_size != end and (member.info.file_size < end or not leaf.packed)):
            have = "is missing" if member is None else f"has {member.info.file_size} bytes"
            raise CorruptStoreError(
                f"{url}: leaf {path_text(leaf.path)}: {'/'.join(leaf.file)} {have}, expected {end}", url=url
            )
        leaf.info, leaf.start, leaf.crc = member.info, member.start + leaf.offset, member.info.CRC
    return raw, header, entries


class _ArchiveReader(TensordictReader):
    """Read the `meta.json` files of tensordict from the entries of an archive."""

    def __init__(self, fd: int, listing: Listing, url: str) -> None:
        super().__init__(url)
        self._fd = fd
        self._members = listing.members
        self._names = sorted(listing.members)

    def _meta(self, folder: FileParts, path: Path) -> dict[str, Any]:
        name = (*folder, META)
        if name not in self._members:
            raise self._corrupt(f"is missing: there is no {'/'.join(name)}", path)
        try:
            meta = json.loads(
                read_member(self._fd, self._members[name], MAX_META, self.url), object_pairs_hook=unique_keys
            )
        except (ValueError, RecursionError) as error:
            if isinstance(error, CorruptStoreError):
                raise
            raise self._corrupt(f"{'/'.join(name)} is not readable: {error}", path) from error
        if not isinstance(meta, dict):
            raise self._corrupt(f"{'/'.join(name)} is not an object", path)
        return meta

    def _entries(self, folder: FileParts) -> set[str]:
        found: set[str] = set()
        depth, at = len(folder), bisect.bisect_left(self._names, folder)
        while at < len(self._names) and self._names[at][:depth] == folder:
            name = self._names[at][depth]
            found.add(name)
            at = bisect.bisect_left(self._names, (*folder, name + "\0"), at)  # behind all that is below that one
        return found

    def _read_pickle(self, parts: FileParts) -> bytes:
        if parts not in self._members:
            raise FileNotFoundError(parts[-1])
        return read_member(self._fd, self._members[parts], MAX_PICKLE, self.url)

    def _size(self, parts: FileParts) -> int | None:
        member = self._members.get(parts)
        return None if member is None else member.info.file_size

    def _is_there(self, parts: FileParts) -> bool:
        at = bisect.bisect_left(self._names, parts)
        return at < len(self._names) and self._names[at][: len(parts)] == parts

    def _name(self, folder: FileParts, key: str, suffix: str, path: Path) -> str:
        name, bare = self.wanted_name(key, suffix, path), key + suffix
        return bare if not self._is_there((*folder, name)) and self._is_there((*folder, bare)) else name


def check_bombs(leaves: list[LeafEntry], max_bytes: int | None, url: str) -> None:
    """Refuse an archive that would fill the memory from few bytes, unless the caller allows so many bytes."""
    infos = {id(leaf.info): leaf.info for leaf in leaves if leaf.info is not None}.values()
    total = sum(info.file_size for info in infos)
    if max_bytes is not None:
        if total > max_bytes:
            raise CorruptStoreError(
                f"{url} declares {total} bytes of data, more than max_bytes={max_bytes}",
                url=url,
                hint="pass a larger max_bytes= if that is meant",
            )
        return
    for info in infos:
        if info.file_size > SUSPECT_BYTES:
            check_ratio(info, url)


def check_ratio(info: zipfile.ZipInfo, url: str) -> None:
    """Refuse an entry that unpacks few bytes to more than the memory of small machines."""
    if info.file_size > SUSPECT_BYTES and info.file_size > SUSPECT_RATIO * info.compress_size:
        raise CorruptStoreError(
            f"{url}: {info.filename!r} unpacks {info.compress_size} bytes to {info.file_size}",
            url=url,
            hint="pass max_bytes= to tdstore.open if that is meant",
        )
