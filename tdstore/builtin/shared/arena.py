"""The shared file of a store: its layout, its mappings, its allocator and its catalogue records.

    0      identification: magic, version, token, boot, owner, crc32c
    128    record A   the catalogue of one generation: offset, length, crc32c
    192    record B   and of the one before; a commit overwrites the older
    256    cursor     all space below it is allocated
    4096   512 slots  which leaf each writer is in the middle of writing (`marks.py`)
    20480  leaves, 64-byte aligned, and page-aligned catalogues, in the order of their creation

Space is allocated once: a tensor that a caller still has never becomes another leaf's memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from operator import sub
from typing import Any

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from tdstore.builtin.shared.catalogue import ALIGN, Catalogue, Entry, decode_catalogue
from tdstore.builtin.shared.process import Process, boot_id, this_process
from tdstore.errors import CorruptStoreError, StoreIOError
from tdstore.header import MAX_BYTES
from tdstore.storekit import refusals
from tdstore.storekit.files import io_errors

MAGIC = b"TDSHARED"
VERSION = 1
PAGE = 4096
SLOTS_AT = 4096
SLOTS = 512
SLOT_WORDS = 4
START = SLOTS_AT + SLOTS * SLOT_WORDS * 8
_WHAT = struct.Struct("<8sI4x16s16sQQQ")
_RECORDS = (128, 192)
_RECORD = struct.Struct("<QQQQI")
_CRC = struct.Struct("<I")
_CURSOR = 256 // 8
# A hole, which costs nothing: a small store then needs one mapping, and one descriptor.
_RESERVED = 4 << 20
_FALLOCATE = 256 << 20
_ASK = 64 << 20
_FEW = 3
"""Leaves of one dtype that are not worth a call of their own for all."""
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux


class Arena:
    """An open, mapped arena file. Leaves made by `tensor` stay valid as long as they are referenced."""

    def __init__(self, fd: int, url: str, *, writable: bool, preallocate: bool = True) -> None:
        """Map a file and check its identification; `fd` is closed, now or with the arena.

        Raises:
            CorruptStoreError: not an arena, or a truncated one.
        """
        self.url = url
        self.writable = writable
        self.preallocate = preallocate
        self.fd = fd
        try:
            self._open(fd)
        except BaseException:
            os.close(fd)
            raise
        if writable:
            # A writable mapping brings a descriptor of its own: one is enough.
            self.fd = self._first._share_fd_cpu_()[0]
            os.close(fd)
        else:
            weakref.finalize(self, os.close, fd)
        self._known: Catalogue | None = None
        self.inode = _inode(self.fd)

    def _open(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        if size < START:
            raise CorruptStoreError(f"{self.url} has {size} bytes; a shared store has at least {START}", url=self.url)
        self._map(size)
        self._first = self._storage
        head = _empty(torch.uint8).data.set_(self._first, 0, (START,), ())
        self.head = head.numpy()
        self.words = self.head.view(np.uint64)
        self.token, self.boot, self.owner = read_what(self.head[:128].tobytes(), self.url)
        self._cursor()

    @classmethod
    def create(cls, fd: int, url: str, *, preallocate: bool = True) -> Arena:
        """Write the layout of a new, empty file."""
        try:
            with io_errors(url, "making a shared store"):
                os.ftruncate(fd, _RESERVED)
                # Always: a store through the mapping must not meet a full disk.
                os.posix_fallocate(fd, 0, START)
                head = _WHAT.pack(MAGIC, VERSION, secrets.token_bytes(16), boot_id(), *this_process())
                os.pwrite(fd, head + _crc(head), 0)
                os.pwrite(fd, struct.pack("<Q", START), 8 * _CURSOR)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, url, writable=True, preallocate=preallocate)

    # -- exclusion ----------------------------------------------------------------------
    @contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Hold the lock for allocation, commits and slots; it ends with the process that holds it.

        Raises:
            StoreBusyError: another process held it for `timeout` seconds.
        """
        # A description of its own: a lock through an inherited descriptor would be shared with its other users.
        with io_errors(self.url, "locking"):
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._lock(fd, time.monotonic() + timeout, timeout)
            try:
                yield
            finally:
                # Unlocked explicitly: a fork at this moment would keep the open file, and with it the lock.
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0))
        finally:
            os.close(fd)

    def _lock(self, fd: int, deadline: float, timeout: float) -> None:
        pause = 0.0001
        while True:
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise StoreIOError(
                        f"{self.url} cannot be locked: {error}", url=self.url, errno=error.errno
                    ) from error
            if time.monotonic() > deadline:
                raise refusals.busy(self.url, "another process", timeout, how="being changed by")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    # -- space (under the lock) ----------------------------------------------------------
    def allocate(self, sizes: Sequence[int], *, align: int = ALIGN, reserve: int = 0) -> list[int]:
        """Allocate regions that read as zeros, and return their offsets.

        Args:
            sizes: bytes of each.
            align: alignment in bytes.
            reserve: bytes that are expected to be allocated soon.

        Raises:
            StoreIOError: no space; nothing was allocated.
        """
        cursor = self._cursor()
        size = os.fstat(self.fd).st_size
        allocated = max(self.catalogue().end, *(r[1] + r[3] if r else 0 for r in self._records()))
        if cursor < allocated:
            raise CorruptStoreError(f"the cursor of {self.url} is {cursor}, below the {allocated} in use", url=self.url)
        begin = _up(cursor, align)
        offsets = []
        end = begin
        for nbytes in sizes:
            offsets.append(end)
            # Never empty: the offset names the leaf.
            end = _up(end + max(nbytes, 1), align)
        with io_errors(self.url, f"making room for {end - begin} bytes"):
            if end > size:
                # Doubling keeps the mappings few; the tail is a hole and costs nothing.
                grown = end + reserve if cursor == START else max(end, 2 * size)
                os.ftruncate(self.fd, _up(grown, PAGE))
            if self.preallocate:
                self._reserve(begin, end)
        self.words[_CURSOR] = end
        return offsets

    def _cursor(self) -> int:
        # Before the size, which only grows: a writer may be at work.
        cursor = int(self.words[_CURSOR])
        size = os.fstat(self.fd).st_size
        if not START <= cursor <= size:
            raise CorruptStoreError(
                f"{self.url} has {size} bytes, but its cursor says that {cursor} were allocated: it was truncated",
                url=self.url,
            )
        return cursor

    def _reserve(self, begin: int, end: int) -> None:
        # Memory behind a memfd has no limit of its own: asking for too much would call the OOM killer.
        if end - begin > _ASK and end - begin > (available := _available_memory()):
            text = f"Cannot allocate memory: {available} bytes are available"
            raise OSError(errno.ENOMEM, text)
        # In pieces: a signal makes the kernel undo and repeat the whole call.
        for at in range(begin, end, _FALLOCATE):
            os.posix_fallocate(self.fd, at, min(_FALLOCATE, end - at))

    def used(self) -> int:
        """Return the bytes of memory that the arena takes."""
        return os.fstat(self.fd).st_blocks * 512

    # -- leaves ---------------------------------------------------------------------------
    def tensor(self, entry: Entry) -> Tensor:
        """Return the leaf of an entry that was allocated or checked."""
        shape, dtype, _, offset = entry
        itemsize = dtype.itemsize
        end = offset + prod(shape) * itemsize
        if end > self._size:
            self._map(os.fstat(self.fd).st_size)
            if end > self._size:
                raise CorruptStoreError(f"{self.url} was truncated to {self._size} bytes", url=self.url)
        # set_, not a slice: views would share a version counter, and autograd blame a leaf for its neighbour.
        # A new tensor by `.data`, contiguous by default: half the time of torch.empty and explicit strides.
        return _empty(dtype).data.set_(self._storage, offset // itemsize, shape, ())

    def tensors(self, entries: Sequence[Entry]) -> list[Tensor]:
        """Return the leaves of entries that were allocated or checked, as `tensor` does.

        One call of torch makes all of one dtype, cut at the offsets of the leaves.
        """
        if torch.is_inference_mode_enabled():  # where all that is cut from a tensor is a view of it
            return [*map(self.tensor, entries)]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, entry in enumerate(entries):
            by_dtype.setdefault(entry.dtype, []).append(i)
        made: list[Any] = [None] * len(entries)
        for dtype, which in by_dtype.items():
            if len(which) < _FEW:
                for i in which:
                    made[i] = self.tensor(entries[i])
                continue
            itemsize = dtype.itemsize
            which.sort(key=lambda i: entries[i].offset)
            cuts = [entries[i].offset // itemsize for i in which]
            last = entries[which[-1]]
            cuts.append(cuts[-1] + prod(last.shape))
            whole = self.tensor(Entry((cuts[-1],), dtype, 0, 0))
            # Not views: what `unsafe_split` returns has a version counter of its own.
            parts = torch.unsafe_split_with_sizes(whole, [cuts[0], *map(sub, cuts[1:], cuts)])
            for i, part in zip(which, parts[1:], strict=True):
                shape = entries[i].shape
                made[i] = part if part.shape == shape else part.resize_(shape)
        return made

    def _map(self, size: int) -> None:
        try:
            if self.writable:
                # torch keeps a descriptor with it, so that single leaves can be sent by torch.multiprocessing too.
                self._storage: Any = torch.UntypedStorage._new_shared_fd_cpu(self.fd, size)  # type: ignore[attr-defined]
            else:
                # Private: stores through the tensors stay in this process. PROT_READ would end it instead.
                self._storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{self.fd}", False, size)
        except RuntimeError as error:
            raise StoreIOError(
                f"{self.url} cannot be mapped: {error}",
                url=self.url,
                hint="a process may have `ulimit -n` open files; each open shared store takes one to three",
                errno=_why_not_mapped(self.fd),
            ) from error
        self._size = size

    # -- the catalogue --------------------------------------------------------------------
    def generation(self) -> int:
        """Return the last committed generation."""
        return max((r[0] for r in self._records() if r), default=0)

    def catalogue(self) -> Catalogue:
        """Return the last committed catalogue, consistent during a concurrent commit."""
        # Twice overtaken in a row by two commits each would need commits faster than a copy.
        for _ in range(100):
            records = [r for r in self._records() if r]
            if not records:
                if self.words[128 // 8] or self.words[192 // 8]:
                    raise CorruptStoreError(f"no catalogue record of {self.url} is intact", url=self.url)
                return Catalogue()
            generation, offset, length, _, crc = max(records)
            if self._known is not None and self._known.generation == generation:
                return self._known
            data = self._bytes(offset, length)
            if google_crc32c.value(data) == crc:
                size = os.fstat(self.fd).st_size
                self._known = Catalogue(generation, *decode_catalogue(data, start=START, size=size, url=self.url))
                return self._known
            if self.generation() == generation:
                break
        raise CorruptStoreError(f"the catalogue of {self.url} does not have the checksum of its record", url=self.url)

    def commit(self, data: bytes) -> int:
        """Replace the older of the two catalogues (under the lock); returns its generation."""
        records = self._records()
        # The intact record of the higher generation stays.
        which = 0 if records[0] is None or (records[1] is not None and records[1][0] > records[0][0]) else 1
        old = records[which]
        generation = self.generation() + 1
        if old is not None and len(data) <= old[3]:
            offset, room = old[1], old[3]
        else:
            room = _up(len(data) + len(data) // 2, PAGE)
            (offset,) = self.allocate([room], align=PAGE)
            if not self.preallocate:
                with io_errors(self.url, "making room for the catalogue"):
                    os.posix_fallocate(self.fd, offset, room)
        with io_errors(self.url, "writing the catalogue"):
            os.pwrite(self.fd, data, offset)
            record = _RECORD.pack(generation, offset, len(data), room, google_crc32c.value(data))
            os.pwrite(self.fd, record + _crc(record), _RECORDS[which])
        return generation

    def _records(self) -> list[tuple[int, int, int, int, int] | None]:
        found: list[tuple[int, int, int, int, int] | None] = []
        for at in _RECORDS:
            if not self.words[at // 8]:  # generation 0: nothing was committed there yet
                found.append(None)
                continue
            size = os.fstat(self.fd).st_size
            raw = self.head[at : at + _RECORD.size + 4].tobytes()
            record = _RECORD.unpack_from(raw)
            _, offset, length, room, _ = record
            intact = _crc(raw[:-4]) == raw[-4:]
            if intact and not (offset >= START and length <= min(room, MAX_BYTES) and offset + room <= size):
                raise CorruptStoreError(
                    f"the catalogue of {self.url} should be {length} bytes at {offset}, beyond its {size} bytes",
                    url=self.url,
                )
            found.append(record if intact else None)
        return found

    def _bytes(self, offset: int, length: int) -> bytes:
        # Read, not mapped: a file that is truncated meanwhile causes a short read, not a signal.
        return os.pread(self.fd, length, offset)


def read_what(head: bytes, url: str) -> tuple[bytes, bytes, Process]:
    """Read token, boot id and owner of an arena from its first bytes.

    Raises:
        CorruptStoreError: not an arena, or of another version.
    """
    what = head[: _WHAT.size]
    if len(head) < _WHAT.size + 4 or not head.startswith(MAGIC) or head[_WHAT.size : _WHAT.size + 4] != _crc(what):
        raise CorruptStoreError(f"{url} is not a shared store of tdstore", url=url)
    _, version, token, boot, *owner = _WHAT.unpack(what)
    if version != VERSION:
        raise CorruptStoreError(
            f"{url} has the layout {version}, this tdstore reads {VERSION}",
            url=url,
            hint="use the same tdstore in all processes",
        )
    return token, boot, Process(*owner)


def _crc(data: bytes) -> bytes:
    return _CRC.pack(google_crc32c.value(data))


def _up(n: int, align: int) -> int:
    return -(-n // align) * align


def _why_not_mapped(fd: int) -> int:
    # torch reports no errno: repeat its first step.
    try:
        os.close(os.dup(fd))
    except OSError as error:
        return error.errno or errno.ENOMEM
    return errno.ENOMEM


@lru_cache
def _empty(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device="cpu")


def _inode(fd: int) -> tuple[int, int]:
    found: Any = os.fstat(fd)
    return found.st_dev, found.st_ino


def _available_memory() -> int:
    with open("/proc/meminfo") as f:
        for line in f:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62
