"""The leaves of an open archive: specs, reads and writes in place, new leaves in a new file."""

from __future__ import annotations

import os
import weakref
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tdstore.builtin.memmap.layout import Layout
from tdstore.builtin.resident import MappedStore, put
from tdstore.builtin.tdz.reading import LeafEntry, Member, load_member
from tdstore.builtin.tdz.writing import ArchiveFiles, new_info
from tdstore.builtin.tdz.written_sums import add_crcs
from tdstore.builtin.tensorbytes import memory_of, write_tensor
from tdstore.builtin.window import Window
from tdstore.errors import ConflictError, StoreError, StoreNotFoundError
from tdstore.header import Header
from tdstore.store import Cap
from tdstore.storekit import files
from tdstore.storekit.budget import allocating
from tdstore.storekit.checksums import crc32c
from tdstore.storekit.pages import HOLES, Holes, empty, reserve
from tdstore.threads import ThreadPool
from tdstore.types import LeafSpec, Mode, Path, Read, Write, path_text

_TAIL = 4096
"""Bytes at the end of a file that tell one commit from another: members are listed there, with their checksums."""
_MANY = 1 << 20
"""Least bytes that are worth a thread, and reserving their blocks before."""
_GAP = 1 << 10
"""Most bytes between two leaves that follow one another."""


class TdzLeaves(MappedStore[LeafEntry]):
    """An archive's store without opening, commit and close."""

    caps = (
        Cap.WRITE
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.VIEW
        | Cap.PERSISTENT
        | Cap.CONCURRENT_READ
        | Cap.DISCARD
    )

    def __init__(
        self,
        location: str,
        mode: Mode,
        method: int,
        level: int | None,
        options: dict[str, Any],
    ) -> None:
        self.location = self.url = location
        self.writable = mode != "r"
        self._mode: Mode = mode
        self._method, self._level = method, level
        self._sync = options["durable"] == "commit"
        self._options = options
        self._name = os.path.basename(location)
        self._entries: dict[Path, LeafEntry] = {}
        self._committed: dict[Path, LeafEntry] = {}
        """The leaves of the last commit."""
        self._header = Header()
        self._layout = Layout()
        self._end = 0
        """Where the data of the published archive ends, and new leaves begin."""
        self._at = 0
        """Where the next new leaf begins."""
        self._changed = False
        """Leaves were added, moved or removed since the last commit."""
        self._windows: list[Window] = []
        self._pack: Tensor | None = None
        """The bytes of the entry of packed leaves, where these cannot be mapped."""
        self._open = ArchiveFiles()
        # Descriptors only: a store that was changed is held, and closed, by `tdstore.lifetime`.
        self._conflicts = False
        """Whether a conflict with another writer was raised."""
        self._last = weakref.finalize(self, self._open.end)
        self._last.atexit = False

    # -- catalogue -----------------------------------------------------------------------
    def _catalogue(self) -> Mapping[Path, LeafEntry]:
        return self._entries

    def _typed(self, leaf: LeafEntry) -> LeafEntry:
        return leaf

    def reopen_token(self) -> tuple[str, Mode, dict[str, Any]] | None:
        return self.location, "r+" if self.writable else "r", dict(self._options)

    def nbytes_stored(self) -> int | None:
        self._check_open()
        return os.fstat(self._open.fd).st_blocks * 512 if self._open.fd >= 0 else None

    def _summed(self, path: Path) -> LeafEntry:
        return self._leaf(path)

    # -- data ----------------------------------------------------------------------------
    def view(self, path: Path) -> Tensor:
        leaf = self._leaf(path)
        leaf.handed = True
        return self._tensor(leaf)

    def _read(self, wanted: Sequence[tuple[LeafEntry, Read]]) -> list[Tensor]:
        for entry, r in wanted:
            if r.out is None:
                self._refuse_holes(entry, r.index)
        tensors = [self._tensor(entry) for entry, _ in wanted]
        return [self._gather(tensor, r) for tensor, (_, r) in zip(tensors, wanted, strict=True)]

    def _bytes_there(self, leaf: LeafEntry) -> int:
        if leaf.info is None or leaf.building:
            return leaf.nbytes
        return self.nbytes_stored() or 0

    def _tensor(self, leaf: LeafEntry) -> Tensor:
        if leaf.probe is None:
            try:
                leaf.probe = self._mapped(leaf)
            except OSError as error:
                if isinstance(error, StoreError):
                    raise
                files.raise_io(error, self.url, f"mapping leaf {path_text(leaf.path)}", writing=self.writable)
            leaf.version = leaf.seen()
        return leaf.probe

    def _mapped(self, leaf: LeafEntry) -> Tensor:
        if leaf.info is None:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        if leaf.info.compress_type != zipfile.ZIP_STORED or leaf.start % leaf.dtype.itemsize:
            if leaf.packed:
                pack = self._unpacked(leaf).numpy()
                flat = torch.frombuffer(pack, dtype=leaf.dtype, count=leaf.shape.numel(), offset=leaf.offset)
                return flat.view(leaf.shape)
            with allocating(leaf.path, leaf.shape, leaf.dtype, self.url):
                unpacked = empty(leaf.shape, leaf.dtype)
            load_member(self._open.fd, Member(leaf.info, leaf.start), unpacked, self.url)
            return unpacked
        stop = leaf.start + leaf.nbytes
        if leaf.building:
            window = Window(self._open.new, leaf.start, stop, shared=True)
        else:
            window = self._window_over(leaf.start, stop) or self._private_window()
        found = window.tensor(leaf.start, leaf.shape, leaf.dtype)
        if leaf.building:
            self._windows.append(window)
            self._guard_holes(leaf, window, found)
        return found

    def _window_over(self, start: int, stop: int) -> Window | None:
        """Return the window that has a range of the file."""
        for window in self._windows:
            if window.start <= start and stop <= window.stop:
                return window
        return None

    def _private_window(self) -> Window:
        """Map the published archive: writes stay in this process until a commit rewrites it."""
        window = Window(self._open.fd, 0, self._end, shared=False)
        self._windows.append(window)
        return window

    def _unpacked(self, leaf: LeafEntry) -> Tensor:
        """Return the bytes of the entry of packed leaves, unpacked once."""
        if self._pack is None:
            assert leaf.info is not None
            shape = torch.Size((leaf.info.file_size,))
            with allocating(leaf.path, shape, torch.uint8, self.url):
                pack = empty(shape, torch.uint8)
            load_member(self._open.fd, Member(leaf.info, leaf.start - leaf.offset), pack, self.url)
            self._pack = pack
        return self._pack

    def _guard_holes(self, leaf: LeafEntry, window: Window, mapped: Tensor) -> None:
        """Register that the mapping of a new leaf is a hole: writers through it reserve blocks first."""
        fd, start, url = os.dup(self._open.new), leaf.start, f"{self.url}: leaf {path_text(leaf.path)}"

        def allocate(a: int, b: int) -> None:
            with files.io_errors(url, "making room"):
                files.allocate(fd, start + a, b - a)

        leaf.holes = Holes(leaf.nbytes, allocate)
        leaf.holes.guard(mapped)
        window.keep(leaf.holes)
        weakref.finalize(leaf.holes, os.close, fd)

    def _create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        with files.io_errors(self.url, "making leaves"):
            made = [self._make(path, spec) for path, spec in leaves.items()]
            self._extend()
            for leaf in made:
                self._fill(leaf)

    def _make(self, path: Path, spec: LeafSpec) -> LeafEntry:
        """Give a new leaf its place in the archive that is being built; it reads as zeros once `_extend` was called."""
        self._changed = True
        if self._open.new < 0:
            self._begin_file()
        leaf = LeafEntry(path, spec.shape, spec.dtype, spec.fill_value, self._layout.file(path))
        if leaf.nbytes:
            leaf.info, leaf.start = new_info("/".join(leaf.file), leaf.nbytes, self._at)
            self._at = leaf.start + leaf.nbytes
            leaf.building = True
        self._entries.pop(path, None)
        self._entries[path] = leaf
        return leaf

    def _begin_file(self) -> None:
        """Begin a new archive, with room for the bytes of the present one."""
        self._at = self._end
        self._open.begin()

    def _extend(self) -> None:
        """Lengthen the archive that is being built by what `_make` gave."""
        if self._open.new >= 0:
            files.truncate(self._open.new, self._at)

    def _write(self, wanted: Sequence[tuple[LeafEntry, Write]]) -> None:
        wanted = [(leaf, w) for leaf, w in wanted if leaf.nbytes and w.value.numel()]
        self._check_current()
        for leaf, w in wanted if HOLES else ():  # all, before the first row of any is overwritten
            if not leaf.building:
                with files.io_errors(self.url, f"taking room for leaf {path_text(w.path)}"):
                    reserve(self._tensor(leaf), w.index)
        runs = [_run(leaf, w) for leaf, w in wanted]
        try:
            new = [(leaf, w, run) for (leaf, w), run in zip(wanted, runs, strict=True) if run is not None]
            if len(new) < len(wanted) or not self._write_new(new):
                for (leaf, w), run in zip(wanted, runs, strict=True):
                    self._write_one(leaf, w, run)
        except BaseException:
            for leaf, _ in wanted:
                leaf.written_sums = None  # it is read again
            raise

    def _write_one(self, leaf: LeafEntry, w: Write, run: range | None) -> None:
        with files.io_errors(self.url, f"writing leaf {path_text(w.path)}"):
            if run is not None:
                sums = leaf.sums_from(run.start - leaf.start)
                write_tensor(self._open.new, w.value, run.start, None if sums is None else sums.add)
                return
            target = self._tensor(leaf)
            if HOLES:
                reserve(target, w.index)
            put(target, w.index, w.value)

    def _write_new(self, wanted: Sequence[tuple[LeafEntry, Write, range]]) -> bool:
        """Write rows of new leaves, each once, while a thread computes their CRC-32; or return False.

        The values stay the same meanwhile: none is memory of a leaf that is not mapped.
        """
        nbytes = sum([len(run) for _, _, run in wanted])
        if nbytes < _MANY or len({leaf.path for leaf, _, _ in wanted}) < len(wanted):
            return False
        found = [
            (w, run, sums) for leaf, w, run in wanted if (sums := leaf.sums_from(run.start - leaf.start)) is not None
        ]
        if len(found) < len(wanted):
            return False
        fd, start, stop = self._open.new, wanted[0][2].start, wanted[-1][2].stop
        if 0 < stop - start <= nbytes + _GAP * len(wanted):
            files.allocate_early(fd, start, stop - start)
        memories = [memory_of(w.value) for w, _, _ in found]
        todo = [(sums, memory) for (_, _, sums), memory in zip(found, memories, strict=True) if memory is not None]
        with ThreadPool(1, "tdstore-tdz") as pool:
            crcs = pool.submit(add_crcs, todo)
            for (w, run, sums), memory in zip(found, memories, strict=True):
                with files.io_errors(self.url, f"writing leaf {path_text(w.path)}"):
                    write_tensor(fd, w.value, run.start, sums.add if memory is None else sums.add_blocks)
            crcs.result()
        return True

    def _delete(self, paths: Sequence[Path]) -> None:
        self._changed = True
        for path in paths:
            del self._entries[path]

    def _rename(self, moves: Mapping[Path, Path]) -> None:
        moved = {new: self._entries[old] for old, new in moves.items() if old != new}
        self._changed = self._changed or bool(moved)
        for leaf in moved.values():
            self._entries.pop(leaf.path, None)
        with files.io_errors(self.url, "renaming"):
            for new, leaf in moved.items():  # an entry has its name in front of it: a copy under the new one
                made = self._make(new, leaf.spec)
                self._extend()
                self._copy(leaf, made)

    def _resize(self, lengths: Mapping[Path, int]) -> None:
        with files.io_errors(self.url, "resizing"):
            for path, length in lengths.items():
                old = self._entries[path]
                if old.shape[0] == length:
                    continue
                made = self._make(path, old.spec.replace(shape=(length, *old.shape[1:])))
                self._extend()
                self._fill(made)
                self._copy(old, made)

    def _copy(self, old: LeafEntry, new: LeafEntry) -> None:
        """Copy the rows of one leaf that fit into another, which is being built."""
        nbytes = min(old.nbytes, new.nbytes)
        if nbytes:
            memory = self._tensor(old).reshape(-1)[: nbytes // old.dtype.itemsize]  # with later writes
            write_tensor(self._open.new, memory, new.start)

    def _fill(self, leaf: LeafEntry) -> None:
        if leaf.nbytes and (leaf.fill or str(leaf.fill) == "-0.0"):
            filled = torch.full((), leaf.fill, dtype=leaf.dtype, device="cpu").expand(leaf.shape)
            write_tensor(self._open.new, filled, leaf.start)

    def _discard(self) -> None:
        """Discard changes of structure since the last commit; rows written into its leaves stay written."""
        if self._changed:
            with files.io_errors(self.url, "taking back changes"):
                self._open.drop_unfinished()
            for leaf in self._entries.values():
                leaf.holes = None
            self._windows = [window for window in self._windows if not window.shared]
            self._entries, self._at, self._changed = dict(self._committed), self._end, False

    def generation(self) -> object:
        """Return the identity of the present file, and the checksum of its end, where the list of members is."""
        self._check_open()
        try:
            with files.io_errors(self.url, "looking for commits", writing=False), open(self.location, "rb") as file:
                info = os.fstat(file.fileno())
                tail = os.pread(file.fileno(), _TAIL, max(info.st_size - _TAIL, 0))
        except StoreNotFoundError:
            return None
        return (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size, crc32c(tail))

    def _check_current(self) -> None:
        if self._open.fd >= 0 and not files.is_same_entry(self._open.fd, self._name, self._open.folder):
            error = ConflictError(
                f"{self.url} was replaced since it was opened here",
                url=self.url,
                hint="what was mapped stays readable; open the location again to write to the new data",
            )
            error.repeated, self._conflicts = self._conflicts, True
            raise error


def _run(leaf: LeafEntry, w: Write) -> range | None:
    """Return the bytes of the file that a write of contiguous whole rows of a new leaf is for; None for any other."""
    if not leaf.building:
        return None
    if not w.index:
        first = 0
    elif len(w.index) == 1 and isinstance(w.index[0], slice) and w.index[0].step == 1 and leaf.shape:
        first = int(w.index[0].start) * (leaf.nbytes // leaf.shape[0])
    else:
        return None
    return range(leaf.start + first, leaf.start + first + w.value.nbytes)
