"""Consolidated files: written to a temporary file and renamed, mapped when opened, compared with checksums.

During a mapping for writing the checksums are marked as stale; its end renews them.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tdstore import lifetime
from tdstore.builtin.mapping import map_fd
from tdstore.builtin.memmap.opening import is_store_noticed
from tdstore.builtin.readcheck import OPENED, ReadCheck, Rows
from tdstore.builtin.resident import bytes_of
from tdstore.builtin.tensorbytes import write_tensor
from tdstore.errors import CorruptStoreError
from tdstore.io.consolidated import layout, sums
from tdstore.io.consolidated.buffer import Slot
from tdstore.storekit import files, refusals
from tdstore.storekit.budget import check_declared, check_holes
from tdstore.storekit.checksums import Sums, block_bytes, block_text, crc32c
from tdstore.storekit.pages import copy_rows
from tdstore.types import Fault, Path, Verify, path_text

_BUSY = 600.0
"""Time to wait for a process that renews the checksums, in seconds."""


def write_file(url: str, contents: layout.Contents, values: Iterable[tuple[int, Tensor]]) -> None:
    """Publish a file in one step: readers see the old one, or all of the new one.

    Args:
        url: absolute path.
        contents: the description.
        values: pieces of leaves, each with its first byte.
    """
    tail = layout.encode(contents)
    size = max((slot.stop for slot in contents.every_slot()), default=0)
    with files.io_errors(url, "consolidating"):
        os.makedirs(os.path.dirname(url), exist_ok=True)
        if os.path.isdir(url):
            raise refusals.other_kind(url, "a folder, not a file")
        folder, temp = files.open_dir(os.path.dirname(url)), files.temp_name()
        try:
            fd = files.create_empty(temp, folder)
            try:
                files.truncate(fd, size)
                for start, value in values:
                    write_tensor(fd, value, start)
                files.write_at(fd, memoryview(tail), size)
                files.fsync(fd)
            finally:
                os.close(fd)
            files.rename(temp, folder, os.path.basename(url), folder)
        except BaseException:
            files.unlink_if_there(temp, folder)
            raise
        finally:
            os.close(folder)


class _Leaf:
    """A leaf in the form for `ReadCheck`."""

    __slots__ = ("nbytes", "path", "probe", "shape", "start", "sums")

    def __init__(self, path: Path, slot: Slot, crc: bytes) -> None:
        self.path, self.start = path, slot.start
        self.shape = torch.Size(slot.shape)
        self.nbytes = slot.nbytes
        self.sums: Sums | None = Sums(crc, 0, block_bytes(slot.nbytes))
        self.probe: Tensor | None = None
        """Its mapped memory, during a comparison."""


class OneFile:
    """An open consolidated file: its contents, and the leaves to compare. It has no reference to a tensor over it.

    Args:
        fd: a descriptor, which this object closes.
        wary: whether to refuse reads that allocate far more than is stored.
    """

    def __init__(self, url: str, fd: int, *, wary: bool = True) -> None:
        self.url, self._fd, self._wary = url, fd, wary
        weakref.finalize(self, os.close, fd).atexit = False
        total = os.fstat(fd).st_size
        tail = os.pread(fd, layout.TAIL, max(0, total - layout.TAIL))
        self.size, self._length = layout.split_tail(tail, total, url)
        self._text = self._read_text()
        self.contents = layout.decode(self._text, self.size, url)
        self.placed = self.contents.placed()
        self._starts = [slot.start for _, slot in self.placed]
        self._left: dict[int, tuple[_Leaf, ReadCheck[_Leaf]]] = {}
        """The leaves that are not compared as a whole yet, by their first byte."""
        self._comparing = threading.Lock()

    def _read_text(self) -> bytes:
        return os.pread(self._fd, self._length, self.size)

    def seal(self) -> sums.Seal | None:
        """Return the checksums in the description; None where it has none.

        Raises:
            CorruptStoreError: it is damaged.
        """
        return sums.read_seal(self._text, self.placed, self.size, self.url) if self.contents.summed else None

    def map(self, *, shared: bool) -> Tensor:
        """Map the leaves as one uint8 tensor; a private one unless `shared`."""
        if not self.size:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return map_fd(self._fd, (self.size,), torch.uint8, shared=shared, path=self.url)

    def begin_writing(self) -> None:
        """Make the checksums stale for as long as this object lives."""
        writing = _Writing(self.url, os.dup(self._fd), self._length, self.placed, self.size)
        lifetime.Ending(self, writing.end, self.url)
        writing.begin()

    # -- comparing -----------------------------------------------------------------------
    def compare(self, verify: Verify, *, shared: bool) -> None:
        """Compare a small file as a whole, and prepare comparisons of the reads of a larger one.

        Raises:
            CorruptStoreError: the file does not match its checksums.
        """
        seal = self.seal() if verify != "none" else None
        if seal is None or seal.crcs is None:
            return
        if verify == "full" or self.size <= OPENED:
            for fault in self._faults(seal.crcs):
                raise CorruptStoreError(f"{self.url}: {fault.reason}", url=self.url, hint=sums.HINT)
            return
        if sums.crc_between(self._fd, self.placed, self.size) != seal.crcs[-4:] and self._is_current():
            raise CorruptStoreError(f"{self.url}: {_UNUSED}", url=self.url, hint=sums.HINT)
        at = 0
        for path, slot in () if shared else self.placed:
            count = 4 * -(-slot.nbytes // block_bytes(slot.nbytes))
            leaf = _Leaf(path, slot, seal.crcs[at : at + count])
            self._left[slot.start] = leaf, ReadCheck(self.url, [leaf], self._stored_crc)
            at += count

    def _stored_crc(self, leaf: _Leaf, start: int, stop: int) -> int | None:
        found = crc32c(os.pread(self._fd, stop - start, leaf.start + start))
        return found if self._is_current() else None

    def check(self, tensor: Tensor, rows: Rows) -> None:
        """Compare the part of a view of the mapped leaves that is about to be copied.

        Args:
            tensor: the view.
            rows: rows of its first dimension; None for all.

        Raises:
            CorruptStoreError: the file does not match its checksums, or stores far fewer bytes than the copy allocates.
        """
        if (found := self._unread(tensor, rows)) is not None:
            start, leaf, reading, rows = found
            with self._comparing, _probing(leaf, tensor):
                reading.check(leaf, rows)
            self._drop_compared(start)

    def clone(self, tensor: Tensor) -> Tensor:
        """Copy a view of the mapped leaves, and compare the copied bytes.

        Raises:
            CorruptStoreError: as for `check`.
        """
        if (found := self._unread(tensor, slice(None))) is None:
            return copy_rows(tensor, ())
        start, leaf, reading, rows = found
        with self._comparing, _probing(leaf, tensor):
            if tensor.shape == leaf.shape and tensor.is_contiguous() and not tensor.requires_grad:
                copy = reading.gather(leaf, tensor, ())
            else:
                reading.check(leaf, rows)
                copy = tensor.clone()
        self._drop_compared(start)
        return copy

    def _unread(self, tensor: Tensor, rows: Rows) -> tuple[int, _Leaf, ReadCheck[_Leaf], Rows] | None:
        """Return first byte, leaf, comparison and rows of the leaf that a tensor views; None if it is compared."""
        start = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
        at = bisect.bisect_right(self._starts, start) - 1
        if at < 0 or not tensor.numel():
            return None
        path, slot = self.placed[at]
        if start != slot.start or tensor.nbytes != slot.nbytes or tensor.shape[:1] != slot.shape[:1]:
            rows = _rows_between(tensor, start - slot.start, slot)
        self._refuse_holes(path, slot, rows)
        found = self._left.get(slot.start)
        return None if found is None else (slot.start, *found, rows)

    def _drop_compared(self, start: int) -> None:
        found = self._left.get(start)
        if found is not None and not found[1].pending:
            self._left.pop(start, None)

    def _refuse_holes(self, path: Path, slot: Slot, rows: Rows) -> None:
        if self._wary:
            wanted = bytes_of(slot.shape, slot.nbytes, () if rows is None else (rows,))
            check_holes(path, wanted, lambda: os.fstat(self._fd).st_blocks * 512, self.url)

    def verify(self, starts: set[int] | None = None) -> list[Fault]:
        """Compare every byte with the checksums. A file with stale or without checksums has no faults.

        Args:
            starts: the first bytes of the leaves to compare; default: all bytes of the file.
        """
        with files.io_errors(self.url, "verifying", writing=False):
            self._text = self._read_text()
            seal = self.seal()
            return [] if seal is None or seal.crcs is None else self._faults(seal.crcs, starts)

    def _faults(self, crcs: bytes, starts: set[int] | None = None) -> list[Fault]:
        faults, at = [], 0
        leaves: list[tuple[Path, Slot] | None] = [*self.placed, None]
        try:
            for leaf, found in zip(leaves, sums.crcs_of(self._fd, self.placed, self.size), strict=True):
                expected = crcs[at : at + len(found)]
                at += len(found)
                if found == expected or (starts is not None and (leaf is None or leaf[1].start not in starts)):
                    continue
                faults.append(Fault((), _UNUSED) if leaf is None else Fault(leaf[0], _reason(leaf, found, expected)))
        except EOFError:
            return [Fault((), f"the file was cut short, expected {self.size} bytes of leaves")]
        return faults if faults and self._is_current() else []

    def _is_current(self) -> bool:
        """Check whether the description, and so the checksums, are unchanged since they were read."""
        return self._read_text() == self._text


@contextmanager
def _probing(leaf: _Leaf, tensor: Tensor) -> Iterator[None]:
    """Set the mapped memory of a leaf, from the storage of a view of it, during the block."""
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    leaf.probe = memory.set_(tensor.untyped_storage(), leaf.start, (leaf.nbytes,), (1,))
    try:
        yield
    finally:
        leaf.probe = None


def _reason(leaf: tuple[Path, Slot], found: bytes, expected: bytes) -> str:
    size = block_bytes(leaf[1].nbytes)
    at = next(i for i in range(0, len(found), 4) if found[i : i + 4] != expected[i : i + 4])
    return (
        f"leaf {path_text(leaf[0])} is damaged{block_text(at // 4, size, leaf[1].nbytes)}: the crc32c is "
        f"{found[at : at + 4][::-1].hex()}, expected {expected[at : at + 4][::-1].hex()}"
    )


def _rows_between(part: Tensor, start: int, slot: Slot) -> slice | None:
    """Return the rows of a leaf that contain a view of a part of it.

    Args:
        part: the view.
        start: its first byte, from the beginning of the leaf.
        slot: the leaf.
    """
    if not slot.shape:
        return None
    row = slot.nbytes // slot.shape[0]
    reach = 1 + sum((n - 1) * step for n, step in zip(part.shape, part.stride(), strict=True))
    return slice(start // row, -(-(start + reach * part.itemsize) // row))


_UNUSED = "bytes between its leaves are damaged"


# -- opening ---------------------------------------------------------------------------------
def map_file(
    url: str, *, shared: bool, verify: Verify = "size", max_bytes: int | None = None
) -> tuple[layout.Contents, Tensor]:
    """Map a file, and return its checked contents and one uint8 tensor of its leaves.

    Args:
        url: absolute path.
        shared: whether writes to the tensor change the file; else the mapping is private.
        verify: "full" compares all bytes now, "size" those of a small file now and others when they are copied.
        max_bytes: the largest number of bytes of leaves; default: in proportion to the size of the file.

    Raises:
        StoreNotFoundError: there is no file. CorruptStoreError: it is not a consolidated file, or is damaged.
    """
    lifetime.settle()
    with files.io_errors(url, "opening", writing=shared):
        found = OneFile(url, _opened(url, os.O_RDWR if shared else os.O_RDONLY), wary=max_bytes is None)
        check_declared(sum(slot.nbytes for _, slot in found.placed), max_bytes, url)
        buffer = found.map(shared=shared)
        found.compare(verify, shared=shared)
        if shared and found.contents.summed:
            found.begin_writing()
        buffer.untyped_storage().tdstore_onefile = found  # type: ignore[attr-defined]  # as long as any view lives
        return found.contents, buffer


def verify_file(url: str) -> list[Fault]:
    """Compare every byte of a consolidated file with its checksums.

    Raises:
        StoreNotFoundError: there is no file. CorruptStoreError: it is not a consolidated file, or its description is
            damaged.
    """
    lifetime.settle()
    with files.io_errors(url, "verifying", writing=False):
        return OneFile(url, _opened(url, os.O_RDONLY)).verify()


def is_consolidated_file(place: str) -> bool:
    """Check whether a plain file ends like a file of `consolidate`."""
    if not os.path.isfile(place):
        return False
    with open(place, "rb") as file:
        total = os.fstat(file.fileno()).st_size
        try:
            size, length = layout.split_tail(os.pread(file.fileno(), layout.TAIL, total - layout.TAIL), total, place)
        except (CorruptStoreError, OSError):
            return False
        return os.pread(file.fileno(), 2 * sums.SECTOR, size).lstrip(b" ").startswith(b"{") and length > 0


def file_of(leaf: Tensor) -> OneFile | None:
    """Return the consolidated file that a tensor is a view of."""
    try:
        return getattr(leaf.untyped_storage(), "tdstore_onefile", None)
    except (RuntimeError, NotImplementedError):
        return None  # sparse, fake, ...: no memory of its own


def _opened(url: str, flags: int) -> int:
    folder = files.open_dir(os.path.dirname(url))
    try:
        return files.open_plain(os.path.basename(url), folder, flags)
    finally:
        os.close(folder)


# -- writing ---------------------------------------------------------------------------------
class _Writing:
    """A mapping for writing. The checksums are stale until the last such mapping of all processes ends regularly.

    Args:
        fd: open to read and write; its lock, which this object takes, is shared with other writers.
    """

    def __init__(self, url: str, fd: int, length: int, placed: sums.Placed, size: int) -> None:
        self._url, self._fd, self._length, self._placed, self._size = url, fd, length, placed, size
        self._tail = length.to_bytes(layout.TAIL, "little")
        self._pid = os.getpid()
        self.escaped = False
        """Whether a forked child may write too, and for longer."""
        self._before: bytes | None = None
        """The checksums before this mapping, if there was no other writer."""
        self._changed = 0

    def begin(self) -> None:
        """Mark the checksums in the file as stale."""
        files.lock(self._fd, exclusive=False, timeout=_BUSY, url=self._url, what="the file")
        text, seal = self._sealed()
        if seal.crcs is not None:
            self._write(text, sums.sealed(text, None), seal.stop, len(text))
            files.fsync(self._fd)
        self._before = seal.crcs
        # A store through the mapping sets the time of the file anew, later than this by more than clocks are coarse.
        self._changed = time.time_ns() - _TICK
        os.utime(self._fd, ns=(self._changed, self._changed))
        if os.fstat(self._fd).st_mtime_ns != self._changed:
            self._changed = 0
        _WRITERS.add(self)

    def end(self) -> None:
        """Renew the checksums, unless another process is still writing."""
        try:
            with files.io_errors(self._url, "renewing checksums"):
                info = os.fstat(self._fd)
                if self.escaped or self._pid != os.getpid() or not info.st_nlink:
                    return
                if files.try_lock(self._fd, exclusive=True):
                    self._renew(info.st_mtime_ns)
        finally:
            os.close(self._fd)

    def _renew(self, changed: int) -> None:
        try:
            text, seal = self._sealed()
        except CorruptStoreError:
            return  # written by another program meanwhile: the next opening reports it
        crcs = self._before if changed == self._changed and self._is_store_noticed() else None
        if crcs is None:
            try:
                crcs = b"".join(sums.crcs_of(self._fd, self._placed, self._size))
            except EOFError:
                return  # truncated by another program: the next opening reports it
        made = sums.sealed(text, crcs)
        if self._write(text, made, seal.start, seal.stop):
            files.fsync(self._fd)  # a state of "known" never reaches the disk before the checksums
            self._write(made[: seal.stop] + text[seal.stop :], made, seal.stop, len(made))

    def _write(self, before: bytes, after: bytes, start: int, stop: int) -> bool:
        """Write a part of the description, unless another program has changed the file meanwhile."""
        if os.pread(self._fd, len(before) + layout.TAIL, self._size) != before + self._tail:
            return False
        files.write_at(self._fd, memoryview(after)[start:stop], self._size + start)
        return True

    def _sealed(self) -> tuple[bytes, sums.Seal]:
        text = os.pread(self._fd, self._length, self._size)
        return text, sums.read_seal(text, self._placed, self._size, self._url)

    def _is_store_noticed(self) -> bool:
        try:
            folder = files.open_dir(os.path.dirname(self._url))
        except OSError:
            return False
        try:
            return is_store_noticed(folder, os.fstat(self._fd).st_dev)
        except OSError:
            return False  # a folder that nothing can be written to
        finally:
            os.close(folder)


_TICK = 50_000_000
_WRITERS: lifetime.LiveObjects[_Writing] = lifetime.LiveObjects()


def _forked() -> None:
    for writing in _WRITERS:
        writing.escaped = True


os.register_at_fork(before=_forked)
