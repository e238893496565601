"""The resources of an open directory store (descriptors, session, temporary folder), and their release.

Nothing here refers to the store or to a tensor of a caller: the release runs when those are garbage collected.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter

from tdstore import lifetime
from tdstore.builtin.mapping import make_private
from tdstore.builtin.memmap.layout import Layout, LeafFile
from tdstore.builtin.memmap.opening import MAX_MANIFEST, SessionState, is_untouched
from tdstore.builtin.memmap.pack import Pack
from tdstore.builtin.memmap.publish import FIRST
from tdstore.builtin.memmap.tensor import scratch_dir
from tdstore.builtin.memmap.tensordict_layout import meta_files, stored_meta_files, write_meta_files
from tdstore.header import Header
from tdstore.storekit import WriterState, documents, end_writer, files, refusals, session
from tdstore.storekit.checked import CheckedStore
from tdstore.storekit.checksums import sums_of_file, sums_of_part
from tdstore.storekit.documents import LeafRecord, leaf_record
from tdstore.storekit.publish import Site, leftovers, remove_tree, sweep_dead
from tdstore.storekit.session import FileParts, Lease, Log, Session
from tdstore.threads import without_interrupts
from tdstore.types import Path, path_text

_IN_FLIGHT = 0.01
"""Seconds that an operation of another thread on a tensor may take to end, at the end of the process."""
_ANONYMOUS = re.compile(r"\.tdstore-anon-[0-9a-f]{16}")


class Hold:
    """Descriptors and locks of one store; `end` is called once, by the store or after the last of its tensors."""

    def __init__(self, url: str, *, sync: bool) -> None:
        self.url = url
        self.sync = sync
        self.pid = os.getpid()
        self.root = -1
        self.files: dict[Path, LeafFile] = {}
        self.pack: Pack | None = None
        self.site: Site | None = None
        """While a new store is built."""
        self.session: Session | None = None
        """While a published store is written in place."""
        self.private = False
        """Opened for reading: what is written to its tensors stays in this process."""
        self.raw = b""
        """The manifest of the last commit, which this store wrote or checked."""
        self.lock = threading.RLock()
        """Held while the store changes, and by `end`."""
        self.ending = False
        """`end` has begun: changes are refused, as a thread that goes on with them could keep the lock from it."""
        self.store: Callable[[], CheckedStore[LeafFile] | None] = _nothing
        """The store, which `end` closes if it is still there: at the end of the process."""
        self.lease: Callable[[], Lease | None] = _nothing
        """What the store and its tensors refer to."""
        self._scratch: tuple[int, str] | None = None
        self._commit_lock = -1

    @property
    def building(self) -> bool:
        """Check whether the folder is unpublished."""
        return self.session is None

    @property
    def has_commit_lock(self) -> bool:
        """Check whether other sessions are kept from committing."""
        return self._commit_lock >= 0

    # -- beginning -----------------------------------------------------------------------
    def make_anonymous(self) -> None:
        """Make a private folder, and remove those of dead processes."""
        parent = files.open_dir(scratch_dir())
        for name in leftovers(parent, _ANONYMOUS) or ():
            sweep_dead(name, parent, FIRST)
        while True:
            name = f".tdstore-anon-{os.urandom(8).hex()}"
            files.make_dir(name, parent, 0o700)
            # Another process that removes remains may have come between: the folder was removed, or is locked.
            try:
                self.root = os.open(name, files.SAFE_DIR, dir_fd=parent)
            except FileNotFoundError:
                continue
            if files.try_lock(self.root, exclusive=True) and os.fstat(self.root).st_nlink:
                break
            os.close(self.root)
        self._scratch = (parent, name)

    @contextmanager
    def entering(self, timeout: float, location: str) -> Iterator[SessionState]:
        """Begin a session on a published folder; the body reads it and repairs what a dead writer left."""
        parent = session.open_parent(self.root)
        try:
            if parent >= 0:
                files.lock(parent, exclusive=False, timeout=max(timeout, 1.0), url=location, what="the folder")
            here, there = os.fstat(self.root), os.stat(location)
            if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
                raise refusals.contended(location)
            self.session = Session(self.root, sync=self.sync)
            if self.session.try_alone():
                log = session.read_log(self.root)
                yield SessionState(log, live=False)
                if log is not None:
                    files.unlink(session.NAME, self.root)
                self.session.begin(timeout=timeout, url=location)
            else:
                self.session.begin(timeout=timeout, url=location)
                yield SessionState(session.read_log(self.root), live=True)
        finally:
            if parent >= 0:
                os.close(parent)

    def begin_built(self) -> None:
        """Begin the session of a folder that is about to be published: the lock of its builder becomes that of it."""
        begun = Session(self.root, sync=self.sync)
        try:
            begun.begin(timeout=1.0, url=self.url)
        except BaseException:
            begun.drop()
            raise
        self.session = begun

    def alone(self, old: int) -> AbstractContextManager[None]:
        """Hold the dataset that is to be replaced, once the sessions of other processes have ended."""
        assert self.site is not None
        return session.exclusive(old, parent=self.site.parent, timeout=self.site.timeout, url=self.url)

    def stay_unpublished(self) -> None:
        """Undo `begin_built` where the folder was not published after it."""
        if self.session is not None and self.site is not None and self.site.temp:
            self.session.drop()
            self.session = None
            files.unlink_if_there(session.NAME, self.root)
            files.try_lock(self.root, exclusive=True)

    @contextmanager
    def committing(self, timeout: float) -> Iterator[None]:
        """Keep other sessions from committing at the same time; after the body they may."""
        had_it = self.has_commit_lock
        self.lock_commits(timeout)
        try:
            yield
        except BaseException:
            if not had_it:
                self.unlock_commits()
            raise
        self.unlock_commits()

    def lock_commits(self, timeout: float) -> None:
        """Keep other sessions from committing, and from lengthening files, until `unlock_commits` or the end.

        Raises:
            StoreBusyError: another session still does so after `timeout` seconds.
        """
        if self.has_commit_lock:
            return
        while not self.has_commit_lock:
            fd = files.open_plain(session.NAME, self.root)
            try:
                files.lock(fd, exclusive=True, timeout=timeout, url=self.url, what="the log")
                there = files.still_named(os.fstat(fd), session.NAME, self.root)  # else a shorter one replaced it
            except BaseException:
                os.close(fd)
                raise
            if there:
                self._commit_lock = fd
            else:
                os.close(fd)

    @without_interrupts
    def unlock_commits(self) -> None:
        """Let other sessions commit; a forked child only closes its descriptor."""
        if self._commit_lock >= 0:
            fd, self._commit_lock = self._commit_lock, -1
            if self.pid == os.getpid():
                files.unlock(fd)  # closing is not enough: a forked child holds the same open file
            os.close(fd)

    # -- tidying -------------------------------------------------------------------------
    def remove_remains(self, log: Log, keep: set[FileParts]) -> None:
        """Remove the remains of interrupted commits: files that no leaf of the manifest names."""
        self.unlink([parts for parts, is_dir in files.walk(self.root) if not is_dir and files.is_temp(parts[-1])])
        self.unlink(parts for parts in log.files if parts not in keep and all(map(documents.is_plain_name, parts)))

    def unlink(self, parts: Iterable[FileParts]) -> None:
        """Remove files that belong to no leaf, and folders that become empty."""
        with files.Tree(self.root) as tree:
            for file in parts:
                if not file or file[-1] in documents.RESERVED:
                    continue
                try:
                    files.unlink_if_there(file[-1], tree.folder(file[:-1]))
                except OSError:
                    continue  # its folder was removed too

    def reset(self) -> None:
        """Release a folder that was replaced by another one meanwhile."""
        self.files.clear()
        self._drop_pack()
        if self.session is not None:
            self.session.drop()
            self.session = None
        if self.root >= 0:
            os.close(self.root)
            self.root = -1

    # -- the end -------------------------------------------------------------------------
    def end(self) -> None:
        """End the store by the commit policy (`storekit.session`), whose steps the next methods are."""
        try:
            if self.private:
                self.release()  # a reader has nothing to keep or to remove
                return
            self.ending = True
            with self.lock:  # at the end of the process another thread may be writing
                try:
                    end_writer(self)
                finally:
                    if (store := self.store()) is not None:
                        store.mark_closed()
        except OSError as error:
            files.raise_io(error, self.url, "closing")

    def state(self) -> WriterState:
        own = self.session
        # In a folder that was removed, sealed leaves would not be found.
        lost = own is not None and (own.ended or own.detached or not os.fstat(self.root).st_nlink)
        return WriterState(
            pid=self.pid,
            writable=not self.private,
            published=own is not None,
            structure=own is not None and any(map(attrgetter("temp"), self.files.values())),
            rows=own is not None,
            lost=lost,
        )

    def drop_structure(self) -> None:
        """Remove the files of leaves that no commit names."""
        for leaf in self.files.values():
            if leaf.temp is not None:
                files.unlink_if_there(leaf.temp, self.root)

    def commit_rows(self) -> None:
        """Seal leaves that were written in place, by the last session of the folder."""
        own = self.session
        assert own is not None
        if self._has_views():
            self._keep_later_writes_private()
        touched: set[Path] = set()
        for leaf in self.files.values():
            if leaf.temp is None and leaf.suspect():
                touched.add(leaf.path)
        own.leave(None if own.escaped else touched, self._seal)

    def _has_views(self) -> bool:
        """Check whether a tensor of a leaf exists, beside those that `end` releases."""
        lease = self.lease()
        others = 2 if self.store() is None else 3  # this variable, the argument, the store
        return lease is not None and sys.getrefcount(lease) > others

    def _keep_later_writes_private(self) -> None:
        """Have what is written to tensors of the caller from now on stay in this process.

        They may outlive the session, and what they wrote after its checksums would look like damage.
        """
        with files.Tree(self.root) as tree:
            handed = [(leaf, mapping) for leaf in self.files.values() for mapping in leaf.handed_out()]
            for leaf, mapping in handed:
                _make_private(tree, leaf, mapping)
        in_pack = self.pack is not None and any(leaf.packed and leaf.handed for leaf in self.files.values())
        if self.pack is not None and in_pack:
            self.pack.make_private()
        if (handed or in_pack) and lifetime.ends_beside_threads():
            time.sleep(_IN_FLIGHT)  # operations that had begun are counted by torch when they end

    def unmark(self) -> None:
        """Leave it: `commit_rows` ends the session, also where no row was written."""

    def take_back(self) -> None:
        """Leave it: rows are written in place, and the next writer compares them with their checksums."""

    def remove_uncommitted(self) -> None:
        """Remove a folder that was not published, and an anonymous one."""
        if self.site is not None:
            self.site.close(keep_root=True)
            self.site = None
        elif self._scratch is not None:
            parent, name = self._scratch
            remove_tree(name, parent)

    def release(self) -> None:
        """Close descriptors, which releases locks; in a forked child those of the child."""
        try:
            if self.private and self.pid == os.getpid():
                self._warn_lost_writes()
        finally:
            for leaf in self.files.values():
                leaf.holes = None
                if leaf.fd >= 0:
                    os.close(leaf.fd)
                    leaf.fd = -1
            self.files.clear()
            if self.pack is not None:
                self._drop_pack()
            if self.site is not None:
                self.site.close(forked=True, keep_root=True)
            if self._scratch is not None:
                os.close(self._scratch[0])
                self._scratch = None
            if self.session is not None and not self.session.ended:
                self.session.drop()
            if self._commit_lock >= 0:
                self.unlock_commits()
            if self.root >= 0:
                os.close(self.root)
                self.root = -1

    def _drop_pack(self) -> None:
        if self.pack is not None:
            self.pack.close()
            self.pack = None

    def _warn_lost_writes(self) -> None:
        """Warn of writes to read-only tensors, which torch cannot refuse."""
        lost = [leaf for leaf in self.files.values() if leaf.seen() not in (leaf.version, -1)]
        if lost:
            warnings.warn(
                f"{self.url} was opened for reading, and tensors of {', '.join(path_text(leaf.path) for leaf in lost)} "
                "were changed: the changes were private to this process and are lost; open it with mode='r+' to write",
                stacklevel=2,
            )

    def _seal(self, log: Log) -> bool:
        """Update the checksums of leaves that were written; the manifest is rewritten only if one differs.

        Returns:
            Whether files are longer than the manifest says: a growth was not committed. They may be mapped, and
            cutting them could end the process with SIGBUS; the next writer does it.
        """
        is_longer = any(map(attrgetter("grown"), self.files.values()))
        try:
            raw = files.read_small(documents.NAME, self.root, MAX_MANIFEST)
        except FileNotFoundError:
            return is_longer  # a directory of tensordict: it has no checksums
        found, header = documents.decode_manifest(raw, url=self.url, checked=raw == self.raw)
        records, changed = [], raw.startswith(documents.LOGGED)
        with files.Tree(self.root) as tree:
            for record in found.leaves:
                new = record
                if record.file and log.stale(record.path):
                    new, grew = self._resealed(tree, record)
                    is_longer = is_longer or grew
                changed = changed or new is not record
                records.append(new)
        if raw.startswith(documents.LOGGED):
            self._write_meta(header, records)
        if changed:
            data = documents.encode_manifest(header, records, url=self.url)
            files.replace_file(documents.NAME, self.root, data, sync=self.sync)
        if self.sync:
            files.fsync(self.root)
        return is_longer

    def _write_meta(self, header: Header, records: Iterable[LeafRecord]) -> None:
        """Write the files of tensordict that the commits of a log left as they were."""
        layout, leaves = Layout(), [LeafFile.from_record(record) for record in records]
        if any(leaf.packed for leaf in leaves):
            return
        for leaf in leaves:
            if leaf.file:
                layout.adopt(leaf.path, leaf.file)
        wanted = meta_files(header, leaves, layout)
        write_meta_files(self.root, wanted, stored_meta_files(self.root, wanted), fresh=False)

    def _resealed(self, tree: files.Tree, record: LeafRecord) -> tuple[LeafRecord, bool]:
        """Return the record of a leaf with its checksums of now, and whether its file is longer than it says."""
        try:
            fd = tree.open(record.file)
        except OSError:
            return record, False  # removed or replaced: the next opener compares with the old record
        try:
            if record.offset >= 0:
                is_longer = False
                sums = sums_of_part(fd, record.nbytes, record.offset)
            else:
                # By a growth of another session, too, which ended before this one.
                is_longer = os.fstat(fd).st_size > record.nbytes
                sums = sums_of_file(fd, record.nbytes, block=record.block)
            leaf = self.files.get(record.path)
            if sums == record.sums() or (leaf is not None and is_untouched(self.root, fd, leaf)):
                return record, is_longer  # else unchanged, and damaged: the old checksums show it
            if self.sync:
                files.fsync(fd)
        except EOFError:
            return record, False  # truncated by another program: the old record shows it
        finally:
            os.close(fd)
        new = leaf_record(
            record.path, record.dtype, record.shape, record.nbytes, record.file, sums, record.fill, record.offset
        )
        return new, is_longer


def _nothing() -> None:
    """Stand for a weak reference to nothing."""


def _make_private(tree: files.Tree, leaf: LeafFile, mapping: LeafFile) -> None:
    """Make a mapping of a leaf private, unless the file is that of another leaf now.

    Args:
        tree: the folder.
        leaf: the leaf.
        mapping: the same, or the leaf before it grew.
    """
    assert mapping.probe is not None
    fd = leaf.fd
    if fd < 0:
        try:
            fd = tree.open(leaf.file)
        except OSError:
            return  # removed or replaced by another session: no commit contains it
    try:
        if os.fstat(fd).st_ino == mapping.inode:
            make_private(mapping.probe, fd)
    finally:
        if fd != leaf.fd:
            os.close(fd)
