"""Files of leaves: make, write and move them; always by `pwrite`, so that a full disk is an error and not a signal."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tdstore.builtin.mapping import map_fd
from tdstore.builtin.memmap.layout import LeafFile
from tdstore.builtin.memmap.pack import Pack, arrange
from tdstore.builtin.memmap.resources import Hold
from tdstore.builtin.resident import put
from tdstore.dtypes import to_numpy
from tdstore.errors import CorruptStoreError, StoreClosedError
from tdstore.index.rows import runs, take
from tdstore.storekit import files
from tdstore.storekit.checksums import (
    BLOCK,
    EMPTY,
    SHORT,
    Summer,
    byte_blocks,
    sums_of_block,
    sums_of_file,
    sums_of_part,
    sums_of_short,
    sums_of_zeros,
)
from tdstore.storekit.pages import Holes, are_mapped, map_cached_pages
from tdstore.storekit.session import FileParts
from tdstore.types import StoreIndex, Write, path_text

_OPEN_FILES = 32
_MAPPED = 16384
"""A new store of up to so many leaves maps them as they are written: a process has 65,530 mappings at most."""
_LONG = 512 << 10
"""Runs of so many bytes are written by `pwrite` where the leaf is mapped, too: torch would start threads for them, and
fresh pages cost a fault each."""
Placed = tuple[LeafFile, str, str | None]
"""A leaf, the name that its file had, and the name of the file that it took the place of."""


class LeafWriter:
    """Write the leaves of one store; a few files stay open between calls."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._open: OrderedDict[int, LeafFile] = OrderedDict()

    # -- descriptors ---------------------------------------------------------------------
    def fd(self, leaf: LeafFile) -> int:
        """Return a descriptor of a leaf's file, to read and write; it belongs to this writer."""
        if leaf.packed:
            return self._pack.fd
        if leaf.unmade:
            self._make_now(leaf)
        if leaf.fd < 0:
            if leaf.temp is not None:
                fd = files.open_plain(leaf.temp, self._hold.root, os.O_RDWR)
            else:
                with files.Tree(self._hold.root) as tree:
                    fd = tree.open(leaf.file, os.O_RDWR)
            self._keep(leaf, fd)
        return leaf.fd

    def open_to_read(self, leaf: LeafFile) -> int:
        """Open a leaf's file for the caller, which closes the descriptor."""
        if leaf.unmade:
            self._make_now(leaf)
        if leaf.temp is not None:
            return files.open_plain(leaf.temp, self._hold.root)
        with files.Tree(self._hold.root) as tree:
            return tree.open(leaf.file)

    @property
    def _pack(self) -> Pack:
        """The file of packed leaves, where there is one."""
        assert self._hold.pack is not None
        return self._hold.pack

    def _keep(self, leaf: LeafFile, fd: int) -> None:
        leaf.fd = fd
        self._open[id(leaf)] = leaf
        if len(self._open) > _OPEN_FILES:
            self._drop(next(iter(self._open.values())))

    def _drop(self, leaf: LeafFile) -> None:
        self._open.pop(id(leaf), None)
        if leaf.fd >= 0:
            os.close(leaf.fd)
            leaf.fd = -1

    # -- files ---------------------------------------------------------------------------
    def make(self, leaf: LeafFile, *, allocate: bool = False, aside: bool = False, later: bool = False) -> None:
        """Make the file of a new leaf; zeros are a hole that takes no space and no time.

        Args:
            leaf: the leaf.
            allocate: reserve disk space.
            aside: use a temporary name, because the final one is in use.
            later: make the file of an unpublished store with the first bytes of the leaf, one block at most.
        """
        if not leaf.nbytes:
            return
        leaf.unsynced = True
        leaf.room = allocate
        if aside or self._hold.session is not None:
            leaf.temp = files.temp_name()
            self._keep(leaf, files.create_empty(leaf.temp, self._hold.root))
            self._extend(leaf)
        elif leaf.fill or not later:
            self._make_now(leaf)
        else:
            leaf.unmade = True  # most are written whole next
        if leaf.fill:
            self._fill(leaf, 0)
        else:
            leaf.sums = sums_of_zeros(leaf.nbytes)

    def make_pack(self, leaves: Collection[LeafFile]) -> None:
        """Make the file of packed leaves, which tells each its place."""
        pack = Pack(self._hold.root, arrange(leaves), shared=True)
        pack.create()
        self._hold.pack = pack
        for leaf in leaves:
            leaf.sums = sums_of_zeros(leaf.nbytes)
            leaf.unsynced = True
        filled = [leaf for leaf in leaves if leaf.fill]
        self.write_packed(
            [
                (leaf, Write(leaf.path, (), torch.full(leaf.shape, leaf.fill, dtype=leaf.dtype, device="cpu")))
                for leaf in filled
            ]
        )

    def fill_pack(self) -> None:
        """Reserve disk space for packed leaves that lack it, as in a sparse copy: no write ends the process."""
        with files.io_errors(self._hold.url, "taking room for packed leaves"):
            for leaf in self._hold.files.values():
                if leaf.packed and leaf.sparse:
                    files.allocate(self._pack.fd, leaf.offset, leaf.nbytes)
                    leaf.sparse = False

    def complete(self) -> None:
        """Make the files of leaves that nothing was written to, and compute checksums that are not known."""
        for leaf in self._hold.files.values():
            if leaf.unmade:
                self._make_now(leaf)
            if leaf.sums is None or leaf.written_to():
                compute_checksums(leaf, self)

    def _make_now(self, leaf: LeafFile) -> None:
        self._keep(leaf, self._create(leaf))
        self._extend(leaf)

    def _create(self, leaf: LeafFile) -> int:
        """Make an empty file, and return its descriptor."""
        file, root = leaf.file, self._hold.root
        if len(file) == 1:
            fd = files.create_empty(file[0], root)
        else:
            with files.Tree(root) as tree:
                fd = files.create_empty(file[-1], tree.folder(file[:-1], create=True))
        leaf.unmade = False
        return fd

    def _extend(self, leaf: LeafFile) -> None:
        """Give a new file its length."""
        files.truncate(leaf.fd, leaf.nbytes)
        if leaf.room:
            try:
                files.allocate(leaf.fd, 0, leaf.nbytes)
            except OSError:
                self.watch(leaf)  # whatever is done with it later reserves first
                raise
        elif not leaf.fill:
            self.watch(leaf)

    def _fill(self, leaf: LeafFile, start: int) -> None:
        count = min(BLOCK, leaf.nbytes - start) // leaf.dtype.itemsize
        block = to_numpy(torch.full((count,), leaf.fill, dtype=leaf.dtype, device="cpu")).view("uint8")
        while start < leaf.nbytes:
            part = block[: leaf.nbytes - start]
            files.write_at(leaf.fd, part.data, start)
            start += len(part)

    def map(self, leaf: LeafFile) -> None:
        """Map a leaf, shared."""
        if leaf.packed:
            leaf.probe = self._pack.tensor(leaf)
        elif leaf.nbytes:
            fd = self.fd(leaf)
            leaf.probe = map_fd(fd, leaf.shape, leaf.dtype, shared=True, path="/".join(leaf.file))
            leaf.inode = os.fstat(fd).st_ino
            if leaf.holes is not None:
                leaf.holes.guard(leaf.probe)

    # -- room ----------------------------------------------------------------------------
    def watch(self, leaf: LeafFile) -> None:
        """Register that the file of a leaf has holes: blocks are reserved before a write into them."""
        leaf.holes = Holes(leaf.nbytes, partial(self._allocate, weakref.ref(leaf)))
        if leaf.probe is not None:
            leaf.holes.guard(leaf.probe)

    def _allocate(self, ref: weakref.ref[LeafFile], start: int, stop: int) -> None:
        leaf, hold = ref(), self._hold
        assert leaf is not None
        with files.io_errors(hold.url, f"taking room for leaf {path_text(leaf.path)}"):
            if hold.session is not None and hold.session.detached:
                raise StoreClosedError(
                    f"{hold.url} was replaced by a later save of this process, and leaf {path_text(leaf.path)} with it",
                    url=hold.url,
                    hint="open the location again to write to the new data",
                )
            files.allocate(self.fd(leaf), start, stop - start)

    def reserve(self, leaf: LeafFile, index: StoreIndex) -> None:
        """Reserve blocks for a write at an index: whole rows, a little more than needed."""
        if leaf.holes is None:
            return
        rows = index[0] if index else slice(0, 1, 1)
        row = leaf.nbytes // leaf.shape[0] if index else leaf.nbytes
        if isinstance(rows, Tensor):
            leaf.holes.runs(rows.numpy() * row, row)
        elif rows.step == 1:
            leaf.holes.span(rows.start * row, rows.stop * row)
        else:
            leaf.holes.runs(np.arange(rows.start, rows.stop, rows.step) * row, row)
        if not leaf.holes.left:
            leaf.holes = None

    def grow(self, old: LeafFile, new: LeafFile, view: Tensor | None) -> None:
        """Lengthen a file in place: old mappings, here and elsewhere, still share its rows."""
        new.floor = old.floor if old.grown else old.nbytes
        new.grown = True
        fd = self._succeed(old, new, view)
        has_remains = os.fstat(fd).st_size > old.nbytes  # rows of a writer that was killed before it committed them
        files.truncate(fd, new.nbytes)
        if new.fill or has_remains:
            self._fill(new, old.nbytes)
        if old.holes is not None or not new.fill:
            self.watch(new)

    def ungrow(self, old: LeafFile, new: LeafFile) -> None:
        """Cut off rows that were never committed, nor seen by a reader."""
        new.floor, new.grown = old.floor, new.nbytes > old.floor
        files.truncate(self._succeed(old, new, None), new.nbytes)
        if new.grown or old.sparse:
            self.watch(new)

    def restore(self, old: LeafFile, grown: list[LeafFile], file: FileParts) -> None:
        """Restore a leaf of the last commit.

        Args:
            old: the leaf as committed.
            grown: the leaves that had its file since, each longer than the one before.
            file: the name of its file at the commit.
        """
        for leaf in (old, *grown):
            self._drop(leaf)
            if leaf.temp is not None:
                files.unlink_if_there(leaf.temp, self._hold.root)
                leaf.temp = None
        old.file = file
        if grown:
            old.sums, old.known = None, EMPTY  # its rows may have been written through the others
            old.unsynced = True
            if any(leaf.probe is not None for leaf in grown):
                # Truncating the file would take memory from a tensor: the next opener for writing does it.
                old.grown, old.floor = True, old.nbytes
            else:
                files.truncate(self.fd(old), old.nbytes)

    def _succeed(self, old: LeafFile, new: LeafFile, view: Tensor | None) -> int:
        fd = self.fd(old)
        self._open.pop(id(old))
        old.fd = -1
        self._keep(new, fd)
        new.follow(old, view)
        new.temp, new.file = old.temp, old.file
        new.unsynced = True
        new.sums = None
        return fd

    def set_aside(self, leaf: LeafFile) -> None:
        """Give a leaf's file a temporary name, from which it can be placed under another."""
        if not leaf.nbytes or leaf.temp is not None or leaf.packed:
            return
        if leaf.unmade:
            self._make_now(leaf)
        root, temp = self._hold.root, files.temp_name()
        with files.Tree(root) as tree:
            parent = tree.folder(leaf.file[:-1])
            if self._hold.building:
                files.rename(leaf.file[-1], parent, temp, root)
            else:
                files.link(leaf.file[-1], parent, temp, root)
        leaf.temp = temp

    def discard(self, leaf: LeafFile) -> None:
        """Drop a leaf; the file of a committed one stays until the next commit."""
        self._drop(leaf)
        if leaf.temp is not None:
            files.unlink_if_there(leaf.temp, self._hold.root)  # Ctrl-C may have come before it was made
            leaf.temp = None
        elif self._hold.building and leaf.nbytes and not leaf.unmade and not leaf.packed:
            with files.Tree(self._hold.root) as tree:
                files.unlink(leaf.file[-1], tree.folder(leaf.file[:-1]))

    def place(self) -> list[Placed]:
        """Move the files that were set aside to their names; returns the input of `place_back`."""
        done: list[Placed] = []
        root = self._hold.root
        aside = []
        for leaf in self._hold.files.values():
            if leaf.temp is not None:
                aside.append(leaf)
        if not aside:
            return done
        with files.Tree(root) as tree:
            for leaf in aside:
                parent = tree.folder(leaf.file[:-1], create=True)
                before: str | None = files.temp_name()
                try:
                    files.link(leaf.file[-1], parent, before, root)  # type: ignore[arg-type]
                except FileNotFoundError:
                    before = None
                assert leaf.temp is not None
                done.append((leaf, leaf.temp, before))
                files.rename(leaf.temp, root, leaf.file[-1], parent)
                # Renaming onto another name of the same file does nothing and reports success.
                files.unlink_if_there(leaf.temp, root)
                leaf.temp = None
        return done

    def place_back(self, done: list[Placed]) -> None:
        """Undo `place`."""
        root = self._hold.root
        with files.Tree(root) as tree:
            for leaf, temp, before in reversed(done):
                parent = tree.folder(leaf.file[:-1])
                if leaf.temp is None:
                    files.link(leaf.file[-1], parent, temp, root)
                    leaf.temp = temp
                if before is not None:
                    files.rename(before, root, leaf.file[-1], parent)
                    files.unlink_if_there(before, root)
                else:
                    files.unlink_if_there(leaf.file[-1], parent)

    def settle(self, done: list[Placed]) -> None:
        """Release the files that `place_back` would need."""
        for _, _, before in done:
            if before is not None:
                files.unlink_if_there(before, self._hold.root)

    def sync(self, *, everything: bool = False) -> None:
        """Wait until the data of changed leaves is on the storage, if the store is durable."""
        if not self._hold.sync:
            return
        leaves = [x for x in self._hold.files.values() if x.nbytes and (everything or x.unsynced)]
        packed = [leaf for leaf in leaves if leaf.packed]
        leaves = [leaf for leaf in leaves if not leaf.packed]
        if packed:
            files.start_writeback(self._pack.fd)
        for leaf in leaves:
            files.start_writeback(self.fd(leaf))
        for leaf in leaves:
            files.fsync(self.fd(leaf))
            leaf.unsynced = False
        if packed:
            files.fsync(self._pack.fd)
            for leaf in packed:
                leaf.unsynced = False

    def blocks(self) -> int:
        """Return the 512-byte blocks that the data files take."""
        found = sum(self.blocks_of(leaf) for leaf in self._hold.files.values() if not leaf.packed)
        return found + (0 if self._hold.pack is None else os.fstat(self._hold.pack.fd).st_blocks)

    def bytes_of(self, leaf: LeafFile) -> int:
        """Return the bytes that the file of a leaf takes."""
        return self.blocks_of(leaf) * 512

    def blocks_of(self, leaf: LeafFile) -> int:
        """Return the 512-byte blocks that the file of a leaf takes."""
        if not leaf.nbytes or leaf.unmade:
            return 0
        if leaf.packed:
            return -(-leaf.nbytes // 512)
        with files.Tree(self._hold.root) as tree:
            parent, name = self._hold.root, leaf.temp
            if name is None:
                parent, name = tree.folder(leaf.file[:-1]), leaf.file[-1]
            return os.stat(name, dir_fd=parent, follow_symlinks=False).st_blocks

    # -- data ----------------------------------------------------------------------------
    def write_packed(self, wanted: Sequence[tuple[LeafFile, Write]]) -> list[tuple[LeafFile, Write]]:
        """Write whole packed leaves that nobody has mapped together; returns the other writes."""
        parts: dict[int, tuple[LeafFile, memoryview]] = {}
        others: list[tuple[LeafFile, Write]] = []
        for leaf, w in wanted:
            if not leaf.packed or leaf.probe is not None or id(leaf) in parts or not _is_full(w.index, leaf.shape):
                others.append((leaf, w))
                continue
            (block,) = byte_blocks(w.value.cpu())
            parts[id(leaf)] = leaf, block.data
            leaf.sums, leaf.unsynced = None, True
        self._pack.write(list(parts.values()))
        if self._hold.sync and sum(leaf.nbytes for leaf, _ in parts.values()) >= _LONG:
            files.start_writeback(self._pack.fd)  # beside the checksums
        for leaf, data in parts.values():
            leaf.sums = sums_of_block(np.frombuffer(data, np.uint8))
        return others

    def write(self, leaf: LeafFile, index: StoreIndex, value: Tensor, view: Callable[[LeafFile], Tensor]) -> None:
        """Assign `leaf[index] = value`; `view` returns the mapped leaf where a mapping is the better way."""
        if not value.is_cpu:
            value = value.cpu()
        if leaf.probe is not None and value.untyped_storage().data_ptr() == leaf.probe.untyped_storage().data_ptr():
            value = value.clone()  # a part of this very leaf, which would change while it is copied
        leaf.unsynced = True
        if not index or _is_full(index, leaf.shape):
            if leaf.unmade:
                self._write_new(leaf, value)
            else:
                self._write_whole(leaf, value)
            return
        if leaf.unmade:
            self._make_now(leaf)
        first, *rest = index
        leaf.changes_from(_first_row(first) * (leaf.nbytes // leaf.shape[0]))
        filled = leaf.holes is None
        self.reserve(leaf, index)
        by_rows = _is_full(tuple(rest), leaf.shape[1:])
        is_run = isinstance(first, slice) and (leaf.probe is None or (first.step == 1 and value.nbytes >= _LONG))
        if not by_rows or (filled and not is_run):
            put(view(leaf), index, value)
        else:
            self._write_rows(leaf, first, value)
            if leaf.handed and leaf.probe is not None:
                increment_version(leaf.probe)  # as torch's own write does

    def _write_new(self, leaf: LeafFile, value: Tensor) -> None:
        """Make the file of a leaf with all its bytes: opened, written and mapped once."""
        fd = self._create(leaf)
        try:
            if leaf.nbytes <= SHORT and value.is_contiguous():
                data = to_numpy(value)
                files.write_at(fd, data.data, 0)
                sums = sums_of_short(data)
            else:
                (block,) = byte_blocks(value)
                files.write_at(fd, block.data, 0)
                sums = sums_of_block(block)
            if len(self._hold.files) <= _MAPPED:
                leaf.probe = map_fd(fd, leaf.shape, leaf.dtype, shared=True, path="/".join(leaf.file))
                leaf.inode, leaf.version = os.fstat(fd).st_ino, leaf.seen()
        except BaseException:
            self._keep(leaf, fd)
            leaf.sums = None
            self.watch(leaf)
            files.truncate(fd, leaf.nbytes)
            raise
        leaf.sums = sums
        if self._hold.sync:
            self._keep(leaf, fd)  # `sync` needs it again
        else:
            os.close(fd)

    def _write_whole(self, leaf: LeafFile, value: Tensor) -> None:
        fd = self.fd(leaf)
        leaf.changes_from(0)
        ours = self._is_ours(leaf)
        summer = Summer(leaf.nbytes)
        at = 0
        for block in byte_blocks(value):
            files.write_at(fd, block.data, leaf.offset + at)
            at += len(block)
            if ours:
                summer.add(block)
        if leaf.holes is not None:
            leaf.holes.filled()
            leaf.holes = None
        if ours:
            self._keep_sums(leaf, summer, fd)

    def _is_ours(self, leaf: LeafFile) -> bool:
        # The checksum of a shared leaf is computed when other writers have ended, that of a private one now.
        return leaf.probe is None and (self._hold.building or leaf.temp is not None)

    def _summer_of(self, leaf: LeafFile, rows: slice | Tensor) -> Summer | None:
        """Return what sums the rows that come next, if all have been written in order so far."""
        if not isinstance(rows, slice) or rows.step not in (None, 1) or not self._is_ours(leaf):
            leaf.summer = None
        elif rows.start == 0:
            leaf.summer = Summer(leaf.nbytes)
        return leaf.summer

    def _write_rows(self, leaf: LeafFile, rows: slice | Tensor, value: Tensor) -> None:
        fd = self.fd(leaf)
        row = leaf.nbytes // leaf.shape[0]
        summer = self._summer_of(leaf, rows)
        if isinstance(rows, Tensor):
            value = take(value, 0, torch.argsort(rows))
        first = 0
        for start, stop in _row_runs(rows):
            run = value[first : first + stop - start]
            first += stop - start
            if (rows_there := self._rows_to_copy_to(leaf, start, stop)) is not None:
                np.copyto(to_numpy(rows_there), to_numpy(run))  # in one thread: torch's others may be kept waiting
                continue
            at = leaf.offset + start * row
            for block in byte_blocks(run):
                files.write_at(fd, block.data, at)
                at += len(block)
                if summer is not None:
                    summer.add(block)
        if summer is not None and summer.at == leaf.nbytes:
            self._keep_sums(leaf, summer, fd)

    def _keep_sums(self, leaf: LeafFile, summer: Summer, fd: int) -> None:
        leaf.sums, leaf.summer = summer.sums(), None
        if self._hold.sync and leaf.nbytes >= _LONG:
            files.start_writeback(fd)  # beside the leaves that follow

    @staticmethod
    def _rows_to_copy_to(leaf: LeafFile, start: int, stop: int) -> Tensor | None:
        """Return mapped rows if copying to them is faster than a system call, which takes up to six times as long.

        A page that is not mapped costs a fault. Rows that are written again are mapped first.
        """
        again, leaf.rows_written = start < leaf.rows_written, max(stop, leaf.rows_written)
        mapped = leaf.probe
        if mapped is None or stop > len(mapped):
            return None
        rows = mapped[start:stop]
        where = rows.data_ptr(), rows.nbytes
        return rows if are_mapped(*where) or (again and map_cached_pages(*where)) else None


def compute_checksums(leaf: LeafFile, writer: LeafWriter) -> None:
    """Compute the checksums of a leaf as stored."""
    known, version = leaf.leading(), leaf.seen()
    for _, elder in leaf.elders:
        elder.version = elder.seen()
    try:
        if leaf.packed:
            leaf.sums = sums_of_part(writer.fd(leaf), leaf.nbytes, leaf.offset)
        else:
            leaf.sums = sums_of_file(writer.fd(leaf), leaf.nbytes, known)
    except EOFError:
        raise CorruptStoreError(
            f"leaf {path_text(leaf.path)} was truncated by another program, expected {leaf.nbytes} bytes"
        ) from None
    leaf.version, leaf.changed = version, 0
    leaf.unsynced = True  # torch wrote to it, and perhaps nobody has told the store


def _first_row(term: slice | Tensor) -> int:
    if isinstance(term, Tensor):
        return int(term.min()) if len(term) else 0
    return int(term.start)


def _is_full(index: StoreIndex, shape: torch.Size) -> bool:
    return not index or all(
        isinstance(term, slice) and term.start == 0 and term.stop == n and term.step == 1
        for term, n in zip(index, shape, strict=False)
    )


def _row_runs(term: slice | Tensor) -> list[tuple[int, int]]:
    """Return the rows that a term selects, as increasing `[start, stop)` runs."""
    if isinstance(term, Tensor):
        return runs(torch.unique(term))
    if term.step == 1:
        return [(term.start, term.stop)]
    return [(row, row + 1) for row in range(term.start, term.stop, term.step)]
