"""The file layout of a directory store: names of files and folders, and the state of each leaf's file."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor

from tdstore.dtypes import DTYPE_TO_NAME, NAME_TO_DTYPE
from tdstore.header import NESTED_SHAPES, NESTED_SPANS, NESTED_VALUES
from tdstore.keys import encode_file_name, encode_names, fold
from tdstore.storekit.checksums import EMPTY, Summer, Sums
from tdstore.storekit.documents import LeafRecord
from tdstore.storekit.pages import Holes
from tdstore.storekit.session import FileParts
from tdstore.types import LeafSpec, Path
from tdstore.values import decode_value, encode_value

SUFFIX = ".memmap"
REHASH_LIMIT = 256 << 20
"""Up to this size a mapped leaf is hashed when its session ends: numpy aliases write unnoticed by torch."""


class LeafFile:
    """One leaf of an open store and its file. Holds no tensor that a caller has."""

    __slots__ = (
        "__weakref__",
        "changed",
        "dtype",
        "elders",
        "fd",
        "file",
        "fill",
        "floor",
        "grown",
        "handed",
        "holes",
        "inode",
        "known",
        "nbytes",
        "offset",
        "packed",
        "path",
        "probe",
        "room",
        "rows_written",
        "shape",
        "sparse",
        "summer",
        "sums",
        "temp",
        "unmade",
        "unsynced",
        "version",
    )

    path: Path
    file: FileParts
    """Components of its published name; empty without elements."""
    packed: bool
    """Its file holds other leaves, too."""
    offset: int
    """The byte of its file at which the leaf begins."""
    temp: str | None
    """Name in the root while it is not part of the store yet."""
    sums: Sums | None
    """None once the data may have changed since."""
    known: Sums
    """While `sums` is None: those of the leading blocks that have not changed since they were summed."""
    summer: Summer | None
    """Sums rows while they are written in order from the first one on, so that they are not read again."""
    elders: list[tuple[weakref.ref[Tensor], LeafFile]]
    """This leaf before it grew, as long as a caller may write through the tensor of that time."""
    holes: Holes | None
    """None when every byte has a block on the disk, so that writes through the mapping cannot fail."""
    sparse: bool
    """Whether its file had holes when it was opened."""
    changed: int
    """When its file was last written, in ns since 1970, as it was opened for writing; 0 if that is not significant."""
    fd: int
    probe: Tensor | None
    """The mapped tensor; shares its version counter with what was handed out."""
    inode: int
    """Of the mapped file: another writer may have put another one in its place."""
    version: int
    handed: bool
    """A view was handed out: data may change unseen."""
    grown: bool
    """Its file is longer than in the manifest, until the next commit."""
    floor: int
    """While it is: its bytes in the manifest."""
    unsynced: bool
    unmade: bool
    """Its file is made with the first bytes, or at the commit."""
    room: bool
    """Whether disk space is reserved then."""
    rows_written: int
    """Rows before this one have been written in long runs since the leaf was opened, all or some of them."""

    def __init__(self, path: Path, shape: Iterable[int], dtype: torch.dtype, fill: Any, file: FileParts) -> None:
        self.path = path
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.fill = fill
        self.nbytes = self.shape.numel() * dtype.itemsize
        self.file = file if self.nbytes else ()
        self.temp = None
        self.sums = None if self.nbytes else EMPTY
        self.holes = self.summer = None
        self.fd = -1
        self.probe = None
        self.version = self.floor = self.changed = self.offset = self.rows_written = self.inode = 0
        self.known = EMPTY
        self.elders = []
        self.packed = self.handed = self.grown = self.unsynced = self.sparse = self.unmade = self.room = False

    @classmethod
    def from_record(cls, record: LeafRecord) -> Self:
        """Build a leaf from its record in a checked manifest."""
        fill = decode_value(record.fill) if record.fill else 0
        leaf = cls(record.path, record.shape, NAME_TO_DTYPE[record.dtype], fill, record.file)
        if leaf.nbytes:
            leaf.sums = Sums(record.crc, record.tips, record.block)
        if record.offset >= 0:
            leaf.packed, leaf.offset = True, record.offset
        return leaf

    def record(self) -> LeafRecord:
        """Return the record for the manifest; the checksums must be known."""
        assert self.sums is not None, self.path
        fill = encode_value(self.fill) if self.fill else 0
        sums, offset = self.sums, self.offset if self.packed else -1
        return LeafRecord(
            self.path,
            DTYPE_TO_NAME[self.dtype],
            tuple(self.shape),
            self.nbytes,
            self.file,
            sums.text(),
            sums.tips,
            fill,
            sums.block,
            offset,
        )

    @property
    def spec(self) -> LeafSpec:
        """Return shape, dtype and fill value."""
        return LeafSpec.of_checked(tuple(self.shape), self.dtype, self.fill, self.nbytes)

    def seen(self) -> int:
        """Return the version of the mapped memory: torch's count of in-place operations."""
        try:
            return 0 if self.probe is None else self.probe._version
        except RuntimeError:  # mapped under inference_mode, which does not count
            return -1

    def written(self) -> bool:
        """Check whether the data is known to have changed since its checksums were computed."""
        return self.sums is None or self.written_to()

    def written_to(self) -> bool:
        """Check whether torch wrote to this mapping, or one from before the leaf grew, since checksums were taken."""
        probe = self.probe
        try:
            if probe is not None and probe._version != self.version:
                return True
        except RuntimeError:  # mapped under inference_mode, which does not count
            return True
        return bool(self.elders) and any(elder.written_to() for _, elder in self.elders)

    def handed_out(self) -> list[LeafFile]:
        """Return the mappings of its own file of which the caller has views: this one, and those before it grew."""
        if self.packed or self.temp is not None:
            return []
        return [leaf for leaf in (self, *[elder for _, elder in self.elders]) if leaf.handed and leaf.probe is not None]

    def leading(self) -> Sums:
        """Return the checksums of the leading whole blocks that are covered."""
        if self.written_to():
            return EMPTY
        return self.known if self.sums is None else self.sums.leading(self.nbytes)

    def changes_from(self, start: int) -> None:
        """Record that bytes from `start` on are about to change."""
        self.known = self.leading().leading(start)
        self.sums = None
        if self.summer is not None and self.summer.at != start:
            self.summer = None

    def follow(self, old: LeafFile, view: Tensor | None) -> None:
        """Adopt the checksums of this leaf before a change of its length, and watch the tensor of the caller."""
        self.known = old.leading().leading(min(old.nbytes, self.nbytes))
        self.elders = [pair for pair in old.elders if pair[0]() is not None]
        if old.handed and view is not None and not old.temp:
            old.elders = []
            self.elders.append((weakref.ref(view), old))

    def suspect(self) -> bool:
        """Check whether the data may have changed since: written, or small enough that hashing it is cheap."""
        return self.written() or (self.probe is not None and self.nbytes <= REHASH_LIMIT)


# The names that tensordict gives the files of a nested tensor: elements and shapes.
_PARTS = {NESTED_VALUES: "", NESTED_SPANS: ".spans", NESTED_SHAPES: ".shape"}


def _is_part(path: Path) -> bool:
    """Check whether a leaf is a part of a nested tensor."""
    return len(path) > 1 and path[-1] in _PARTS


class Layout:
    """Assign a folder to every group and a file to every leaf: injective, also where case does not count.

    A leaf's `NAME.memmap` and a group's folder never collide (`keys.encode_file_name`), so the two kinds
    of names are separate here.
    """

    def __init__(self) -> None:
        self._folders: dict[Path, FileParts] = {(): ()}
        self._files: dict[Path, FileParts] = {}
        self._used: dict[tuple[FileParts, bool], dict[str, str]] = {}

    def adopt(self, path: Path, file: FileParts) -> None:
        """Register the file of an existing leaf."""
        self._files[path] = file
        if _is_part(path):
            path = path[:-1]  # its file lies where tensordict has that of the entry
        groups = range(1, len(path)) if len(file) == len(path) else (len(path) - 1,)
        for depth in groups:
            self._folders.setdefault(path[:depth], file[: depth - len(path)])
        for depth in range(len(file) - 1):
            self._take(file[:depth], file[depth], group=True)
        self._take(file[:-1], file[-1].removesuffix(SUFFIX), group=False)

    def file(self, path: Path) -> FileParts:
        """Return the file of a leaf; the same each time."""
        if (found := self._files.get(path)) is None:
            entry, part = path, ""
            if len(path) > 1 and _is_part(path):
                entry, part = path[:-1], _PARTS[path[-1]]
            if (folder := self._folders.get(entry[:-1])) is None:
                folder = self.folder(entry[:-1])
            found = self._files[path] = (*folder, self._fresh(folder, entry[-1] + part, group=False) + SUFFIX)
        return found

    def folder(self, path: Path) -> FileParts:
        """Return the folder of a group; the same each time."""
        if path not in self._folders:
            parent = self.folder(path[:-1])
            self._folders[path] = (*parent, self._fresh(parent, path[-1], group=True))
        return self._folders[path]

    def is_free(self, folder: FileParts, name: str) -> bool:
        """Check whether no group has this folder."""
        return fold(name) not in self._used.get((folder, True), {})

    def _take(self, folder: FileParts, name: str, *, group: bool) -> None:
        self._used.setdefault((folder, group), {})[fold(name)] = name

    def _fresh(self, folder: FileParts, key: str, *, group: bool) -> str:
        if (used := self._used.get((folder, group))) is None:
            used = self._used[folder, group] = {}
        # Not portable to Windows, where this backend does not run: so tensordict finds a key such as "aux".
        name = encode_file_name(key, group=group, portable=False)
        if (folded := fold(name)) in used:
            name = encode_names([key], groups=(key,) if group else (), taken=used.values(), portable=False)[key]
            folded = fold(name)
        used[folded] = name
        return name
