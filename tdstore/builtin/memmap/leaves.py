"""The leaves of an open directory store: specs, reads and writes in place, new leaves under temporary names."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tdstore.builtin.memmap.layout import Layout, LeafFile
from tdstore.builtin.memmap.resources import Hold
from tdstore.builtin.memmap.steps import Recorded
from tdstore.builtin.memmap.tensor import MemoryMappedTensor
from tdstore.builtin.memmap.writing import LeafWriter
from tdstore.builtin.resident import MappedStore
from tdstore.errors import CorruptStoreError, StoreClosedError, UnsupportedError
from tdstore.header import Header, without_collection
from tdstore.index.ranges import byte_ranges, index_shape
from tdstore.index.rows import runs
from tdstore.index.selection import gather
from tdstore.keys import encode_file_name
from tdstore.lifetime import Ending
from tdstore.store import Cap
from tdstore.storekit import documents, files, refusals
from tdstore.storekit.documents import PACKED_BYTES, PACKED_FROM
from tdstore.storekit.pages import is_in_memory
from tdstore.storekit.session import Lease
from tdstore.types import LeafSpec, Mode, Path, Read, Write, path_text

_PREALLOCATED = 256 << 20
_MADE_LATER = 64 << 10
"""Files of up to so many bytes are made when they are first written, or at the commit."""

_MANY = 64
"""Writes of so many leaves make enough objects for the garbage collector to run, which looks at all of torch's."""
OVERTAKEN = "open it again to build on what the other one wrote; rows written in place are kept"
"""What to do after a commit that was refused."""
_LONG_ROW = 1 << 24
"""Rows of more bytes are not read whole for a part of them."""


class MemmapLeaves(MappedStore[LeafFile]):
    """A directory store without opening, commit and close."""

    leaf_options = frozenset({"preallocate"})
    caps = (
        Cap.WRITE
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.VIEW
        | Cap.SHARED
        | Cap.PERSISTENT
        | Cap.CONCURRENT_READ
        | Cap.CONCURRENT_WRITE
        | Cap.DISCARD
    )

    def __init__(self, location: str | None, mode: Mode, options: dict[str, Any]) -> None:
        self.location = location
        self.url = location or "an anonymous memmap store"
        self.writable = mode != "r"
        if location is None:
            # It ends with the store, and deleted leaves are removed at once.
            self.caps = MemmapLeaves.caps & ~(Cap.PERSISTENT | Cap.DISCARD)  # type: ignore[misc]
        self._mode: Mode = mode
        self._options = options
        self._sync = options["durable"] == "commit"
        self._leaves: dict[Path, Tensor] = {}
        self._header = Header()
        self._raw = b""
        self._meta: dict[tuple[str, ...], bytes] = {}
        self._layout = Layout()
        self._hold = Hold(self.url, sync=self._sync)
        self._hold.private = mode == "r"
        if self.writable:
            self._lock = self._hold.lock
        self._files = self._hold.files
        self._recorded: list[Recorded] = []
        """The leaves of the last commit, in the order of the manifest."""
        self._committed_meta: dict[tuple[str, ...], bytes] = {}
        self._grown: dict[int, LeafFile] = {}
        """By the id of a leaf that grew in place: the leaf that it became. Both are kept, here or by the commit."""
        self._in_memory: bool | None = None
        self._writer = LeafWriter(self._hold)
        # Tensors hold the lease, so that a session lasts as long as anything can be written through it.
        self._lease = Lease()
        self._hold.store, self._hold.lease = weakref.ref(self), weakref.ref(self._lease)
        # A reader has nothing to commit, and only releases descriptors.
        self._end: Callable[[], object] = (
            Ending(self._lease, self._hold.end, self.url)
            if self.writable
            else weakref.finalize(self._lease, self._hold.end)
        )

    # -- catalogue -----------------------------------------------------------------------
    def _catalogue(self) -> Mapping[Path, LeafFile]:
        return self._files

    def _typed(self, leaf: LeafFile) -> LeafFile:
        return leaf

    def leaf_file(self, path: Path) -> str:
        """Return the absolute name of a leaf's file after the commit.

        Raises:
            UnsupportedError: the store is anonymous, or the leaf has no elements and so no file.
        """
        leaf = self._leaf(path)
        if self.location is None or not leaf.file or leaf.packed:
            raise UnsupportedError(f"leaf {path_text(path)} of {self.url} has no file of its own", url=self.url)
        return os.path.join(self.location, *leaf.file)

    def group_location(self, path: Path) -> str:
        if self.location is None:
            return self.url
        return os.path.join(self.location, *(encode_file_name(key, group=True, portable=False) for key in path))

    def reopen_token(self) -> tuple[str, Mode, dict[str, Any]] | None:
        if self.location is None:
            raise UnsupportedError(
                f"{self.url} is temporary: no other process can open it", url=self.url, hint="give memmap() a prefix"
            )
        return self.location, "r+" if self.writable else "r", dict(self._options, recover=None)

    def _summed(self, path: Path) -> LeafFile:
        return self._leaf(path)

    # -- data ----------------------------------------------------------------------------
    def view(self, path: Path) -> Tensor:
        leaf = self._files.get(path)
        if leaf is None or self._closed:
            leaf = self._leaf(path)  # which raises
        tensor = self._leaves.get(path)
        if tensor is None:
            tensor = self._mapped(leaf)
        leaf.handed = True
        if self.writable and leaf.nbytes and (leaf.temp is not None or self._hold.session is None):
            leaf.changes_from(0)  # an uncommitted leaf is then hashed once
        return tensor

    def _read(self, wanted: Sequence[tuple[LeafFile, Read]]) -> list[Tensor]:
        tensors = [self._mapped(leaf) for leaf, _ in wanted]
        for leaf, r in wanted:
            if r.out is None:
                self._refuse_holes(leaf, r.index)
        return [
            self._read_file(leaf, r) if self._lacks_blocks(leaf) else self._gather(tensor, r)
            for (leaf, r), tensor in zip(wanted, tensors, strict=True)
        ]

    def _lacks_blocks(self, leaf: LeafFile) -> bool:
        """Check whether a read through the mapping may end the process: on a full tmpfs, a hole finds no page."""
        holes = leaf.holes is not None and leaf.holes.left
        if not holes and (self.writable or not leaf.sparse):
            return False
        if self._in_memory is None:
            self._in_memory = is_in_memory(self._hold.root)
        return self._in_memory

    def _read_file(self, leaf: LeafFile, r: Read) -> Tensor:
        if self._reading is not None:
            self._reading.check(leaf, r.index[0] if r.index else slice(None))
        with files.io_errors(self.url, f"reading leaf {path_text(r.path)}", writing=False):
            fd = self._writer.open_to_read(leaf)
            try:
                if len(r.index) > 1 and leaf.nbytes // (leaf.shape[0] or 1) > _LONG_ROW:
                    return _read_ranges(fd, leaf, r)
                first = r.index[0] if r.index else slice(0, leaf.shape[0] if leaf.shape else 1, 1)
                if isinstance(first, Tensor):
                    numbers, first = torch.unique(first, return_inverse=True)
                    wanted = runs(numbers)
                else:
                    wanted = [(first.start, max(first.start, first.stop))]
                    first = slice(0, wanted[0][1] - first.start, first.step)
                rows = _read_runs(fd, wanted, leaf)
                return gather(rows, (first, *r.index[1:]) if r.index else (), r.out)
            finally:
                os.close(fd)

    def _bytes_there(self, leaf: LeafFile) -> int:
        return self._writer.bytes_of(leaf)

    def _mapped(self, leaf: LeafFile) -> Tensor:
        tensor = self._leaves.get(leaf.path)
        if tensor is None:
            if leaf.probe is None:
                pack = self._hold.pack
                if leaf.packed and pack is not None and pack.is_mapped:
                    leaf.probe = pack.tensor(leaf)
                else:
                    with files.io_errors(self.url, f"mapping leaf {path_text(leaf.path)}"):
                        self._writer.map(leaf)
                leaf.version = leaf.seen()
            tensor = self._leaves[leaf.path] = self._wrap(leaf)
        return tensor

    def _create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        try:
            if len(leaves) < _MANY:
                self._create_files(leaves)
            else:
                with without_collection():
                    self._create_files(leaves)
        except OSError as error:
            files.raise_io(error, self.url, "making leaves")

    def _create_files(self, leaves: Mapping[Path, LeafSpec]) -> None:
        asked = self._options["pack"]
        packed: Collection[Path] = ()
        if asked or (asked is None and len(leaves) >= PACKED_FROM):
            packed = self._create_packed(leaves)
        for path, spec in leaves.items():
            if path in packed:
                continue
            if path in self._files:
                self._drop(path)
            leaf = LeafFile(path, spec.shape, spec.dtype, spec.fill_value, self._layout.file(path))
            self._files[path] = leaf
            room = spec.options.get("preallocate", self._options["preallocate"])
            allocate = leaf.nbytes <= _PREALLOCATED if room is None else room
            self._writer.make(leaf, allocate=allocate, later=room is None and leaf.nbytes <= _MADE_LATER)

    def _create_packed(self, leaves: Mapping[Path, LeafSpec]) -> Collection[Path]:
        """Make the file of packed leaves, once, for the small ones that a new store is made with."""
        asked = self._options["pack"]
        if self._hold.site is None or self._hold.pack is not None:
            return ()
        most = PACKED_BYTES if asked is None or asked is True else asked
        packed: dict[Path, LeafFile] = {}
        for path, spec in leaves.items():
            if spec.options.get("preallocate") is None and 0 < spec.nbytes <= most:
                packed[path] = LeafFile(path, spec.shape, spec.dtype, spec.fill_value, ())
        if len(packed) < (PACKED_FROM if asked is None else 1):
            return ()
        self._writer.make_pack(packed.values())
        for path in packed:
            self._drop(path)
        self._files.update(packed)
        return packed

    def _write(self, wanted: Sequence[tuple[LeafFile, Write]]) -> None:
        if len(wanted) < _MANY:
            self._write_leaves(wanted)
        else:
            with without_collection():
                self._write_leaves(wanted)

    def _write_leaves(self, wanted: Sequence[tuple[LeafFile, Write]]) -> None:
        if self._hold.session is not None:
            for leaf, w in wanted:  # all, before the first row of any is overwritten
                if leaf.nbytes and w.value.numel():
                    self._writer.reserve(leaf, w.index)
        elif self._hold.pack is not None:
            with files.io_errors(self.url, "writing packed leaves"):
                wanted = self._writer.write_packed([(leaf, w) for leaf, w in wanted if w.value.numel()])
        write = self._writer.write
        try:  # once for all: most leaves are small
            for leaf, w in wanted:
                if leaf.nbytes and w.value.numel():
                    write(leaf, w.index, w.value, self._mapped)
        except OSError as error:
            files.raise_io(error, self.url, f"writing leaf {path_text(w.path)}")

    def _delete(self, paths: Sequence[Path]) -> None:
        with files.io_errors(self.url, "deleting"):
            for path in paths:
                self._drop(path)

    def _resize(self, lengths: Mapping[Path, int]) -> None:
        with files.io_errors(self.url, "resizing"):
            for path, length in lengths.items():
                old = self._files[path]
                if old.shape[0] == length:
                    continue
                shape = (length, *old.shape[1:])
                leaf = LeafFile(path, shape, old.dtype, old.fill, self._layout.file(path))
                if old.nbytes and old.temp is None and not old.packed and not self._hold.building:
                    self._lock_lengths()
                is_longer = old.grown and old.floor == old.nbytes  # its file, after a growth that was taken back
                # What grows in place is noted first: where the disk is full in the middle, `discard` cuts the file.
                if old.nbytes and leaf.nbytes > old.nbytes and not is_longer and not old.packed:
                    self._grown[id(old)] = leaf
                    self._writer.grow(old, leaf, self._leaves.get(path))
                elif old.grown and not old.handed and old.probe is None and 0 < old.floor <= leaf.nbytes:
                    self._grown[id(old)] = leaf
                    self._writer.ungrow(old, leaf)
                else:
                    self._make_other_length(old, leaf)
                self._files[path] = leaf
                self._leaves.pop(path, None)

    def _lock_lengths(self) -> None:
        """Keep other writers from changing the lengths of committed files until the commit, or until it is discarded.

        Two writers that lengthen one file would write their rows into one place, and whoever is refused at the commit
        would cut off those that the other one committed.

        Raises:
            StoreBusyError: another writer is doing so, or committed since this one opened.
        """
        if self._hold.has_commit_lock:
            return
        self._hold.lock_commits(self._options["lock_timeout"])
        if self._manifest_now() != self._raw:
            self._hold.unlock_commits()
            raise refusals.overtaken(self.url, OVERTAKEN)

    def _manifest_now(self) -> bytes:
        """Read the manifest as it is now; nothing where there is none, as in a directory of tensordict."""
        return files.read_small(documents.NAME, self._hold.root, documents.MAX_FILE_BYTES) if self._raw else b""

    def _make_other_length(self, old: LeafFile, leaf: LeafFile) -> None:
        """Copy the remaining rows to a new file: shortening the old one would take pages from old mappings."""
        try:
            self._writer.make(leaf, aside=True)
            if leaf.nbytes and old.nbytes:
                rows = self._mapped(old)[: leaf.shape[0]]
                index = tuple(slice(0, n, 1) for n in rows.shape)
                self._writer.write(leaf, index, rows, lambda _: self._mapped(old))
        except BaseException:
            self._writer.discard(leaf)
            raise
        self._drop(old.path)

    def _rename(self, moves: Mapping[Path, Path]) -> None:
        leaves = {new: self._files[old] for old, new in moves.items()}
        with files.io_errors(self.url, "renaming"):
            for leaf in leaves.values():
                self._writer.set_aside(leaf)
            for old in moves:
                self._files.pop(old, None)
                self._leaves.pop(old, None)
            for new, leaf in leaves.items():
                self._drop(new)
                leaf.path = new
                if not leaf.packed:
                    leaf.file = self._layout.file(new) if leaf.nbytes else ()
                self._files[new] = leaf
                if leaf.probe is not None:
                    self._leaves[new] = self._wrap(leaf)

    def _drop(self, path: Path) -> None:
        leaf = self._files.pop(path, None)
        self._leaves.pop(path, None)
        if leaf is not None:
            self._writer.discard(leaf)

    def _wrap(self, leaf: LeafFile) -> MemoryMappedTensor:
        file, writable = leaf.file, self.writable
        mapped = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") if leaf.probe is None else leaf.probe
        return MemoryMappedTensor.wrap(
            mapped,
            None if self.location is None or not file else f"{self.location}/{'/'.join(file)}",
            shared=writable,
            lease=self._lease if writable else None,
            offset=leaf.offset if leaf.packed else None,
        )

    def _check_writable(self) -> None:
        super()._check_writable()
        if self._hold.ending:
            raise refusals.closed(self.url)
        if self._hold.session is not None and self._hold.session.detached:
            raise StoreClosedError(
                f"{self.url} was replaced by a later save of this process",
                url=self.url,
                hint="what was mapped stays readable; open the location again to write to the new data",
            )


def _read_runs(fd: int, wanted: Iterable[tuple[int, int]], leaf: LeafFile) -> Tensor:
    """Read runs `[start, stop)` of rows, concatenated, without the mapping: holes stay holes."""
    row = leaf.nbytes // leaf.shape[0] if leaf.shape and leaf.shape[0] else leaf.nbytes
    out = _read_bytes(fd, [(start * row, stop * row) for start, stop in wanted], leaf)
    shape = (len(out) // row, *leaf.shape[1:]) if leaf.shape and row else tuple(leaf.shape)
    return (
        torch.frombuffer(out, dtype=leaf.dtype).reshape(shape)
        if out
        else torch.empty(shape, dtype=leaf.dtype, device="cpu")
    )


def _read_ranges(fd: int, leaf: LeafFile, read: Read) -> Tensor:
    """Read exactly the elements of a request, without the mapping: for rows that are too long to read whole."""
    out = _read_bytes(fd, byte_ranges(leaf.shape, leaf.dtype.itemsize, read.index).tolist(), leaf)
    shape = index_shape(leaf.shape, read.index)
    value = (
        torch.frombuffer(out, dtype=leaf.dtype).reshape(shape)
        if out
        else torch.empty(shape, dtype=leaf.dtype, device="cpu")
    )
    return value if read.out is None else read.out.copy_(value)


def _read_bytes(fd: int, ranges: Iterable[Sequence[int]], leaf: LeafFile) -> bytearray:
    ranges = list(ranges)
    out = bytearray(sum(stop - start for start, stop in ranges))
    at = 0
    for start, stop in ranges:
        size, offset = stop - start, leaf.offset + start
        while size:
            n = os.preadv(fd, [memoryview(out)[at : at + size]], offset)
            if not n:
                raise CorruptStoreError(f"leaf {path_text(leaf.path)} was truncated by another program")
            at, offset, size = at + n, offset + n, size - n
    return out
