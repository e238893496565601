"""A session on a file: its contents, its changes, and its commits.

Rows of contiguous leaves are written in place, after the journal beside the file has named these leaves. All
other changes in place go through HDF5, whose writes are held in memory, and then in the journal, until the commit. So a
writer that is killed leaves the last commit or the next one, except for the rows of leaves that the journal names.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h5py
import numpy as np

from tdstore.errors import CorruptStoreError, StoreError
from tdstore.header import Header
from tdstore.lifetime import LiveObjects
from tdstore.storekit import WriterState, accept_dirty, commit_for_readers, end_writer, refusals
from tdstore.storekit.checked import fill_pattern
from tdstore.storekit.files import io_errors
from tdstore.storekit.foreign_strings import leaves_of_values
from tdstore.threads import without_interrupts
from tdstore.types import Fault, LeafSpec, Path, path_text
from tdstore_h5.faults import h5_errors
from tdstore_h5.file import datasets
from tdstore_h5.file.copies import write_copies
from tdstore_h5.file.document import (
    DIRTY,
    MANIFEST,
    Document,
    decode_dirty,
    decode_document,
    encode_document,
    get_attribute,
    put_attribute,
)
from tdstore_h5.file.handle import Handle
from tdstore_h5.file.journal import Journal
from tdstore_h5.file.names import encode_path
from tdstore_h5.file.publish import publish
from tdstore_h5.file.tree import Contents, Leaf, Walker, changed, check_believable, differences
from tdstore_h5.options import growing_chunks
from tdstore_h5.readonly import ReadOnlyFile
from tdstore_h5.rows import chunked
from tdstore_h5.rows.checksums import BlockSums, LeafSums, Sums
from tdstore_h5.rows.contiguous import Bytes, Ints, RawFile, blocks_of
from tdstore_h5.rows.uncommitted import Aside
from tdstore_h5.rows.undo import Undo


@dataclass(eq=False)
class Session:
    """The state of a store: file, contents, checksums, journal."""

    path: str
    url: str
    durable: bool
    timeout: float
    locking: bool | None
    libver: str | tuple[str, str]
    trust: bool
    verify: str = "size"
    handle: Handle = field(init=False)
    raw: RawFile = field(init=False)
    contents: Contents = field(default_factory=Contents)
    document: Document = field(default_factory=Document)
    ours: bool = False
    """Whether a manifest of ours is in the file."""
    sums: Sums = field(default_factory=Sums)
    marked: set[Path] = field(default_factory=set)
    """Leaves that the journal names: their rows were written in place since the last commit."""
    journal: Journal = field(init=False)
    undo: Undo = field(init=False)
    aside: Aside = field(init=False)
    accepted: bool = False
    """Whether the file differs from its manifest and was accepted as it is: closing writes a new manifest."""
    structure: bool = False
    """Whether leaves were made, removed, renamed or resized since the last commit."""
    pending: bool = False
    """Whether rows were written through HDF5 since the last commit."""
    exclusive: bool = False
    """Whether publishing must not replace anything."""
    manifest: bytes | str | None = None
    """The manifest of the last commit, as it is in the file."""
    _datasets: dict[Path, h5py.Dataset] = field(default_factory=dict)
    _removed: list[str] = field(default_factory=list)
    """Names of large datasets that the commit deletes: HDF5 would reuse their room, which the last commit uses."""
    thread: int = 0
    """Which one opened it."""
    exported: ReadOnlyFile = field(default_factory=ReadOnlyFile)
    """What the caller reads with h5py. It ends before this session changes the file."""

    def begin(self, handle: Handle, *, exclusive: bool) -> None:
        """Start on a new, empty file."""
        self.exclusive = exclusive
        self.attach(handle, "w")
        self.contents.groups[()] = []

    def attach(self, handle: Handle, mode: str) -> None:
        self.handle = handle
        self.raw = RawFile(handle.fd, self.url)
        if handle.write:  # a reader has no use for these
            self.journal = Journal(self.path, self.url, sync=self.durable)
            self.undo = Undo(self.raw, os.path.dirname(self.path))
            self.aside = Aside(os.path.dirname(self.path))
        handle.open(handle.path, mode, self.libver)
        self.thread = threading.get_ident()
        OPEN.add(self)

    def forget(self) -> None:
        """Close datasets that h5py has open."""
        self._datasets.clear()

    # -- lookups -----------------------------------------------------------------------
    def dataset(self, path: Path) -> h5py.Dataset:
        """Return the h5py dataset of a leaf, for access through HDF5."""
        found = self._datasets.get(path)
        if found is None:
            found = self._datasets[path] = self.handle.file[self.contents.leaves[path].name]
        return found

    def walker(self) -> Walker:
        """Return a walker, to describe datasets."""
        return Walker(self.handle.file, self.url, trust=self.trust)

    def read_bytes(self, path: Path, start: int, stop: int) -> Bytes:
        """Read bytes of a leaf in its memory layout, C order."""
        leaf = self.contents.leaves[path]
        if leaf.plain and leaf.offset is not None and not leaf.held:
            if self.raw.is_hole(leaf.offset + start, stop - start):
                self.raw.need(leaf.offset + stop)
                return np.zeros(stop - start, np.uint8)
            return self.raw.bytes_at(leaf.offset + start, stop - start)
        if leaf.plain and leaf.offset is None:
            pattern = fill_pattern(leaf.spec, self.url)
            return np.tile(np.frombuffer(pattern, np.uint8), leaf.spec.nbytes // len(pattern))[start:stop]
        with h5_errors(self.url, f"reading {path_text(path)}"):
            return chunked.read_bytes(self.dataset(path), leaf.spec, start, stop)

    def faults(self, paths: Iterable[Path]) -> list[Fault]:
        """Return the leaves whose bytes differ from the last commit."""
        found = []
        for path in paths:
            try:
                spec = self.contents.leaves[path].spec
                grain = self.sums.wrong_grain(path, spec, self.read_bytes)
            except CorruptStoreError as error:
                found.append(Fault(path, error.message))
                continue
            if grain is not None:
                rows = self.sums.leaves[path].rows(grain, spec)
                found.append(Fault(path, f"{rows}: the bytes have another checksum than was committed"))
        return found

    def verify_read(self, path: Path, leaf: Leaf, starts: Ints, size: int, copy: BlockSums | None = None) -> None:
        """Compare the grains of a read with their checksums, unless done since the file was opened.

        Args:
            path: the leaf.
            leaf: its dataset.
            starts, size: the elements, as `contiguous.blocks_of` returns them.
            copy: the bytes that were read, if that is one block.

        Raises:
            CorruptStoreError: names the leaf and the rows.
        """
        wrong = None
        if not leaf.held:
            look = partial(self.raw.look_at, leaf)
            wrong = self.sums.verify(path, leaf.spec, starts, size, self.read_bytes, copy, look)
        if wrong is not None:
            raise CorruptStoreError(
                f"{self.url}: {path_text(path)} is damaged in {wrong}: "
                "the bytes have another checksum than was committed",
                url=self.url,
                hint=DAMAGED,
            )

    # -- changes -----------------------------------------------------------------------
    def mark(self, paths: Iterable[Path]) -> None:
        """Record leaves of the last commit in the journal: their rows are about to change in place."""
        if self.handle.temporary:
            return
        self.become_alone()
        new: set[Path] = set()
        for path in paths:
            leaf = self.contents.leaves[path]
            if leaf.plain and leaf.committed is not None and leaf.committed not in self.marked:
                new.add(leaf.committed)
        if new:
            with io_errors(self.url, "marking leaves as being written"):
                self.journal.mark(sorted(new if self.journal.begun else new | self.marked))
            self.marked.update(new)

    def begin_structure(self) -> None:
        """Prepare a change of structure. `close` drops it, and commits rows written before."""
        if self.handle.temporary:
            return
        self.become_alone()
        if not self.structure and self.pending:
            self._put_aside()
        self.structure = True
        self.overlaid()

    def _put_aside(self) -> None:
        for path, leaf in self.contents.leaves.items():
            spec = leaf.spec
            for first, last in [] if leaf.plain else self.sums.written(path, spec):
                index = (slice(first, last, 1),) if spec.shape else ()
                with h5_errors(self.url, f"reading {path_text(path)}"):
                    self.aside.put(path, spec, first, last, chunked.read(self.dataset(path), spec, index, None))

    def _put_back(self) -> None:
        """Write rows that were set aside once more, after structure was dropped."""
        for path, first, last, value in self.aside.take():
            spec = self.contents.leaves[path].spec
            index = (slice(first, last, 1),) if spec.shape else ()
            self.overlaid()
            self.pending = True
            self.sums.touch(path, spec, *blocks_of(spec.shape, index))
            with self.handle.writing(f"writing {path_text(path)}"):
                chunked.write(self.dataset(path), spec, index, value)

    def overlaid(self) -> None:
        """Direct HDF5's writes to the overlay: the file has the last commit until the next one."""
        if self.handle.temporary or self.handle.overlay is not None:
            return
        self.become_alone()
        self._datasets.clear()
        self.handle.open_overlaid(self.journal, self.libver)

    def become_alone(self) -> None:
        """Trade the shared lock, under which a published file stays open, for the exclusive one."""
        if self.handle.alone:
            return
        self.exported.end()
        self._datasets.clear()
        generation = self.document.generation
        try:
            self.handle.close_file()  # HDF5 holds a reader's lock of its own
            self.handle.lock(alone=True, timeout=self.timeout, why="to write")
            self._reopen("r")
            self.load()
        except BaseException:  # Ctrl-C, too: it need not wait for the lock
            self.handle.lock(alone=False, timeout=self.timeout, why="to go on reading")
            self._reopen("r")
            raise
        # Between the two locks, another process may have had the file.
        if not self.handle.is_at(self.path) or self.document.generation != generation:
            raise refusals.overtaken(self.url)

    def _reopen(self, mode: str) -> None:
        self._datasets.clear()
        self.handle.close_file()
        self.handle.open(self.handle.path, mode, self.libver)

    def check_places(self, leaves: Mapping[Path, LeafSpec]) -> None:
        """Refuse leaves at the path of a group, and below leaves."""
        for path in leaves:
            for depth in range(1, len(path)):
                if path[:depth] in self.contents.leaves or path[:depth] in leaves:
                    raise StoreError(f"{path_text(path[:depth])} of {self.url} is a leaf and cannot hold {path[-1]!r}")
            if path in self.contents.groups and any(p[: len(path)] == path for p in self.contents.leaves):
                raise StoreError(f"{path_text(path)} of {self.url} is a group with leaves; delete those first")

    def make_way(self, leaves: Iterable[Path]) -> None:
        """Remove copies of strings where groups are created."""
        for above in {path[:depth] for path in leaves for depth in range(1, len(path))}:
            if above in self.contents.copies or above in self.contents.values:
                self.unlink(above)

    def add(self, path: Path, leaf: Leaf) -> None:
        """Add a new dataset."""
        self.contents.leaves[path] = leaf
        for depth in range(len(path)):
            self.contents.groups.setdefault(path[:depth], [])

    def unlink(self, path: Path) -> None:
        """Remove the object of that name: a leaf, an empty group, a value."""
        leaf = self.contents.leaves.pop(path, None)
        name = leaf.name if leaf else self.contents.values.pop(path, None)
        if name is None and (path in self.contents.groups or path in self.contents.copies):
            self.contents.forget(path)
            name = encode_path(path).encode()
        self._datasets.pop(path, None)
        self.sums.drop(path)
        if name is not None:
            self.handle.unflushed = True
            with self.handle.writing(f"removing {path_text(path)}"):
                self._delete(name, 0 if leaf is None else leaf.stored)

    def _delete(self, name: bytes, stored: int) -> None:
        """Delete an object, or rename it for deletion by the commit."""
        file = self.handle.file
        if self.handle.temporary or stored <= datasets.HELD:
            del file[name]
            return
        self._removed.append(datasets.HIDDEN + secrets.token_hex(6))
        file.move(name.decode(), self._removed[-1])

    def resize(self, path: Path, length: int) -> None:
        """Set the length of a leaf; a dataset that cannot grow is replaced by a copy that can."""
        leaf = self.contents.leaves[path]
        old, new = leaf.spec, leaf.spec.replace(shape=(length, *leaf.spec.shape[1:]))
        self.handle.unflushed = True
        with self.handle.writing(f"resizing {path_text(path)}"):
            dataset = None if leaf.plain else self.dataset(path)
            if dataset is not None and datasets.relengthen(dataset, old.shape[0], length):
                leaf.spec, leaf.stored = new, dataset.id.get_storage_size()
            else:
                self._remake(path, leaf, new, self._layout_to(path, leaf, new, dataset))
        last = new.nbytes - new.dtype.itemsize
        self.sums.resize(path, old, new, lambda: self.read_bytes(path, last, new.nbytes).tobytes())

    def _layout_to(self, path: Path, leaf: Leaf, new: LeafSpec, dataset: h5py.Dataset | None) -> dict[str, Any]:
        """Return layout options for a leaf of another length: it may grow again, and needs chunks for that."""
        if dataset is not None and dataset.chunks:
            return datasets.options_of(dataset)
        if new.shape[0] <= leaf.spec.shape[0] or 0 in new.shape[1:]:
            return {}
        columns = leaves_of_values({p: other.spec for p, other in self.contents.leaves.items()})
        return {"chunks": growing_chunks(new, column=path in columns), "maxshape": (None, *new.shape[1:])}

    def _remake(self, path: Path, leaf: Leaf, spec: LeafSpec, layout: dict[str, Any]) -> None:
        temp = encode_path(path[:-1]) + "/" if len(path) > 1 else ""
        temp += _REMADE + secrets.token_hex(6)
        fresh = datasets.make(self.handle, self.raw, path, temp, spec, layout, self.walker())
        rows = min(leaf.spec.shape[0], spec.shape[0])
        common = rows * spec.nbytes // max(1, spec.shape[0])
        if leaf.plain and fresh.plain and not (leaf.held or fresh.held):
            if leaf.offset is not None and fresh.offset is not None:
                datasets.copy_bytes(self.raw, leaf.offset, fresh.offset, common)
        elif common:
            source, target = self.handle.file[leaf.name], self.handle.file[temp]
            step = chunked.block_rows(target, spec)
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                target[start:stop] = source[start:stop]
            self.handle.file.flush()
        self._datasets.pop(path, None)
        self._delete(leaf.name, leaf.stored)
        self.handle.file.move(temp, leaf.name.decode())
        fresh.name = leaf.name
        self.contents.leaves[path] = fresh

    def rename(self, moves: Mapping[Path, Path]) -> None:
        """Move leaves; names may be exchanged."""
        if any(new in moves for new in moves.values()):
            parked = {old: ("%parked-" + secrets.token_hex(6),) for old in moves}
            self.rename(parked)
            self.rename({parked[old]: new for old, new in moves.items()})
            return
        self.check_places(
            {new: self.contents.leaves[old].spec for old, new in moves.items() if new not in self.contents.leaves}
        )
        self.handle.unflushed = True
        for old, new in moves.items():
            self.unlink(new)
            leaf = self.contents.leaves.pop(old)
            self._datasets.pop(old, None)
            name = encode_path(new)
            with self.handle.writing(f"renaming {path_text(old)}"):
                self.handle.file.move(leaf.name.decode(), name)
            leaf.name = name.encode()
            self.add(new, leaf)
            self.sums.move(old, new)

    # -- commit ------------------------------------------------------------------------
    def commit(self, header: Header) -> None:
        """Write the manifest, last; in a new file, publish it."""
        self.overlaid()
        with self.handle.writing("committing"):
            while self._removed:
                del self.handle.file[self._removed.pop()]
            write_copies(self.handle.file, self.contents, header)
            leaves = self.contents.leaves
            # That of a new file begins at random, so that it tells files of one name apart.
            before = self.document.generation or int.from_bytes(os.urandom(6), "little")
            found = Document(before + 1, Header(dict(header.groups)))
            for path, leaf in leaves.items():
                found.specs[path], found.sums[path] = leaf.spec, self._refreshed(path, leaf.spec)
            text = encode_document(found, url=self.url)
            put_attribute(self.handle.file, MANIFEST, text)
        self._settle()
        if self.handle.temporary:
            publish(
                self.handle,
                self.path,
                exclusive=self.exclusive,
                timeout=self.timeout,
                durable=self.durable,
                then=self._join_readers,
            )
        self._committed()
        self.ours = True
        self.document, self.manifest = found, text

    def _refreshed(self, path: Path, spec: LeafSpec) -> LeafSums:
        return self.sums.refresh(path, spec, self.read_bytes, lambda: self.accepted)

    def _settle(self) -> None:
        """Commit HDF5's changes to the file."""
        self.handle.unflushed = True
        if self.handle.temporary:
            self.handle.flush()
            return
        with self.handle.writing("committing"):
            if DIRTY in self.handle.file.attrs:
                del self.handle.file.attrs[DIRTY]
        flags = self.handle.file.id.get_create_plist().get_version()[0] >= 3
        if flags:  # such a superblock says "open for writing" until HDF5 closes the file
            self._datasets.clear()
            self.handle.close_overlaid()
        else:
            self.handle.flush()
        self.handle.commit(sync=self.durable)
        self.undo.forget()  # from here on the new rows are those of the file
        self.journal.remove()
        if flags:
            self._reopen("r")

    def _committed(self) -> None:
        self.marked.clear()
        self.undo.forget()
        self.aside.clear()
        self.accepted = self.structure = self.pending = False
        for path, leaf in self.contents.leaves.items():
            leaf.committed, leaf.held = path, False

    # -- the steps of the commit policy --------------------------------------------------
    def state(self) -> WriterState:
        handle = self.handle
        rows, lost = bool(self.marked or self.pending or self.accepted), handle.replaced or handle.fd < 0
        return WriterState(handle.pid, handle.write, not handle.temporary, self.structure, rows, lost)

    def drop_structure(self) -> None:
        self.discard(rows=False)
        self._put_back()

    @without_interrupts
    def commit_rows(self) -> None:
        if self.ours:
            self.commit(self.document.header)
        else:
            self.overlaid()
            self._settle()
            self._committed()

    def unmark(self) -> None:
        """Keep the lock: the next change would have to wait for it."""

    def take_back(self) -> None:
        self.handle.failed = True
        self.discard()  # where all old rows are saved for undo

    def remove_uncommitted(self) -> None:
        if self.handle.unwanted:
            self.handle.divert()

    def release(self) -> None:
        self._datasets.clear()
        self.raw.forget()
        if self.handle.write:
            self.journal.close()
            self.undo.forget()
            self.aside.clear()
        self.handle.release()

    def discard(self, *, rows: bool = True) -> None:
        """Discard changes; `StoreError` if more rows were written in place than are saved for undo: these rows stay."""
        handle = self.handle
        self._datasets.clear()
        self.raw.forget()
        if handle.temporary:
            handle.divert_and_restart()
            handle.open(handle.path, "w", self.libver)
            self.contents, self.sums = Contents(groups={(): []}), Sums()
        elif handle.overlay is not None:
            handle.abandon()
            self._reopen("r")
            self.load()
            for path in self.marked & self.contents.leaves.keys():
                self.sums.touch_all(path, self.contents.leaves[path].spec)
        self._removed.clear()
        self.structure = self.pending = False
        if rows:
            self.aside.clear()
        if handle.temporary:
            return
        with io_errors(self.url, "dropping what was not committed"):
            if rows and self.undo.complete:
                self._restore_rows()
            if not self.marked:
                self.journal.remove()
            elif self.journal.begun:
                self.journal.drop()
        if rows and self.marked and not self.accepted:
            raise StoreError(
                f"{self.url}: rows of {', '.join(map(path_text, sorted(self.marked)[:5]))} were written in place since "
                f"the last commit, more than can be taken back: they stay",
                url=self.url,
            )

    def _restore_rows(self) -> None:
        self.undo.restore()
        if self.durable:
            self.handle.sync()
        if self.accepted:
            return
        for path in self.marked & self.document.sums.keys():
            self.sums.put(path, self.document.sums[path])
        self.marked.clear()

    def share(self) -> None:
        """Commit rows written in place and, until the next change, hold a shared lock: others may open the file."""
        if not self.handle.alone or self.handle.child:
            return
        if not commit_for_readers(self):
            raise refusals.uncommitted(self.url)
        if self.handle.alone:
            self._join_readers()

    def _join_readers(self) -> None:
        """Hold a shared lock until the next change: others may open the committed file."""
        self.handle.lock(alone=False, timeout=self.timeout, why="after saving")
        self._reopen("r")

    def close(self) -> None:
        """Commit the rows that were written in place, drop structure that was not committed, and release the file."""
        self.exported.end()
        end_writer(self)

    # -- opening -----------------------------------------------------------------------
    def load(self) -> set[Path] | None:
        """Read contents and manifest; return the dirty marker of a dead writer of older versions."""
        with h5_errors(self.url, "reading its structure"):
            file = self.handle.file
            attributes = file.attrs
            text, mark = get_attribute(attributes, MANIFEST, self.url), get_attribute(attributes, DIRTY, self.url)
            self.contents = Walker(file, self.url, trust=self.trust).walk()
            for path, leaf in self.contents.leaves.items():
                leaf.committed = path
            self.ours = text is not None
            self.document = Document() if text is None else decode_document(text, self.contents.leaves, url=self.url)
            self.manifest = text
            self.sums = Sums(self.document.sums)
            return None if mark is None else decode_dirty(mark, url=self.url)

    def check(self, mark: set[Path] | None, *, verify: str, accept: bool) -> None:
        """Compare the file with its manifest, after a crash in detail."""
        leaves, specs = self.contents.leaves, self.document.specs
        if not self.ours and not self.trust:
            check_believable(self.contents, self.url)
        named, others = mark or set(), changed(leaves, specs)
        dirty = named & others if self.ours or mark is None else named & set(leaves)
        wrong = differences(leaves, specs, named) if others and self.ours and verify != "none" else ()
        end = 0
        for leaf in leaves.values():
            if leaf.offset is not None:
                end = max(end, leaf.offset + leaf.spec.nbytes)
        self.raw.need(end)
        for path in others:
            self.sums.drop(path)

        def damaged() -> list[Path]:
            comparable = [p for p in named if p in leaves and p not in dirty and p in self.sums.leaves]
            return sorted(dirty | {fault.path for fault in self.faults(comparable)})

        if (accept or named) and accept_dirty(
            self.url,
            sorted(named),
            accept=accept,
            damaged=damaged,
            hint="recover='accept' opens it as it is: those leaves hold old rows and new ones, and maybe rows that "
            "cannot be read; with mode='r+' this becomes what is committed",
        ):
            for path, leaf in leaves.items():
                self.sums.doubt(path, leaf.spec)
            self.document.specs = {p: leaf.spec for p, leaf in leaves.items()}
            self.marked, self.accepted = set(named), self.ours
            return
        if wrong:
            raise CorruptStoreError(f"{self.url}: {wrong[0]}", url=self.url, hint=_CHANGED)
        if verify == "full":
            for fault in self.faults(p for p in leaves if p not in named):
                raise CorruptStoreError(f"{self.url}: {path_text(fault.path)}: {fault.reason}", url=self.url)


DAMAGED = "other rows can be read; verify='none' reads all bytes as they are; restore the file from a copy"
_REMADE = "%resize-"
_CHANGED = "if another program changed the file on purpose, recover='accept' takes it as it is"
OPEN: LiveObjects[Session] = LiveObjects()
"""Every session of this process."""
