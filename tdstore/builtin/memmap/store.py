"""The `memmap` backend: a directory of raw memory-mapped files, one per leaf, with a manifest and checksums."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, get_args

from torch import Tensor

from tdstore import lifetime
from tdstore.builtin.localplace import local_place
from tdstore.builtin.memmap.layout import LeafFile
from tdstore.builtin.memmap.leaves import OVERTAKEN, MemmapLeaves
from tdstore.builtin.memmap.opening import (
    Contents,
    SessionState,
    await_commit,
    check_and_map,
    compare_sums,
    crc_of_range,
    crc_unless_written,
    fingerprint,
    grown_elsewhere,
    manifest_identity,
    read_contents,
    session_state,
)
from tdstore.builtin.memmap.publish import build_site
from tdstore.builtin.memmap.steps import Recorded, append_step, has_room, plan_step
from tdstore.builtin.memmap.tensordict_layout import meta_files, write_meta_files
from tdstore.builtin.readcheck import ReadCheck
from tdstore.errors import (
    CorruptStoreError,
    OptionError,
    StoreError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.header import Header, without_collection
from tdstore.store import Cap
from tdstore.storekit import check_choices, documents, files, refusals, session
from tdstore.storekit.budget import check_declared
from tdstore.storekit.documents import PACKED_MOST
from tdstore.storekit.publish import Site
from tdstore.storekit.session import LOCK_TIMEOUT
from tdstore.threads import without_interrupts
from tdstore.types import MODES, Durable, Fault, Mode, Path, Recover, Verify, path_text

_ATTEMPTS = 50
_DURABLE, _VERIFY, _RECOVER = get_args(Durable), get_args(Verify), (None, *get_args(Recover))


def open_memmap(
    location: str | None = None,
    *,
    mode: Mode = "r",
    durable: Durable = "commit",
    verify: Verify = "size",
    recover: Recover | None = None,
    max_bytes: int | None = None,
    preallocate: bool | None = None,
    pack: bool | int | None = None,
    lock_timeout: float = LOCK_TIMEOUT,
) -> MemmapStore:
    """Open, or make, a directory of memory-mapped leaves. None (modes "w" and "x") is an anonymous one.

    Args:
        location: the folder, or None.
        mode: "r", "r+", "w", "x" or "a", as in `tdstore.Store`.
        durable: "commit" waits for the storage before it publishes (survives a power cut); "none" does not.
        verify: "size" checks sizes, all of a dataset of up to 16 MiB, of larger ones leaves of up to 64 KiB and three
            small samples of others, "full" every byte, "none" sizes only.
        recover: "accept" takes leaves as they are that a writer left unfinished or another program changed.
        max_bytes: refuse a store that declares more data.
        preallocate: reserve disk space for new leaves when they are made; default: for those of at most 256 MiB (of
            at most 64 KiB: with their first bytes, or at the commit of a new store). For others tdstore reserves it
            before it writes to them; torch's own operations on a leaf, which do not, end the process if the disk is
            full then.
        pack: write the leaves of at most 64 KiB that a new store is made with to one file; a number says how many bytes
            instead, up to 4 MiB. It is then saved and opened faster, and the `tensordict` package cannot read it.
            Default: where there are 256 of them or more. A store that exists remains as it is.
        lock_timeout: seconds to wait for another process that holds the store.

    Raises:
        StoreNotFoundError, StoreExistsError: by mode.
        CorruptStoreError: differs from the commit.
        DirtyStoreError: a writer was killed.
        StoreBusyError: another process holds it.
        StoreIOError: the storage failed.
    """
    check_choices(
        location or "memmap",
        mode=(mode, MODES),
        durable=(durable, _DURABLE),
        verify=(verify, _VERIFY),
        recover=(recover, _RECOVER),
    )
    if sys.byteorder != "little":
        raise UnsupportedError("the memmap backend needs a little-endian machine", url=location)
    if not isinstance(pack, bool | None) and not 0 < pack <= PACKED_MOST:
        raise OptionError(
            f"{location or 'memmap'}: pack={pack!r}", hint=f"True, False, or bytes of a leaf, up to {PACKED_MOST}"
        )
    options: dict[str, Any] = {
        "durable": durable,
        "verify": verify,
        "recover": recover,
        "max_bytes": max_bytes,
        "preallocate": preallocate,
        "pack": pack,
        "lock_timeout": lock_timeout,
    }
    site: Site | None = None
    if location is not None:
        location = local_place(location, "memmap", "folder", new=mode in ("w", "x"))
        if mode == "a":
            mode = "r+" if os.path.isdir(location) and os.listdir(location) else "x"
        if mode in ("w", "x"):
            site = build_site(location, timeout=lock_timeout)
            location = site.path
    store = MemmapStore(location, mode, options)
    store._start(site)
    return store


class MemmapStore(MemmapLeaves):
    """Leaves as memory-mapped files of one directory."""

    # -- opening -------------------------------------------------------------------------
    def _start(self, site: Site | None) -> None:
        try:
            if site is not None:
                self._hold.site, self._hold.root = site, site.root
                if (old := site.check(replace=self._mode == "w")) >= 0:
                    os.close(old)
            elif self.location is not None:
                self._open_existing()
            elif self._mode in ("r", "r+"):
                raise StoreNotFoundError("an anonymous memmap store cannot be opened again", hint="give a location")
            else:
                self._hold.make_anonymous()
        except BaseException as error:
            self._closed = True
            self._end()
            if isinstance(error, OSError):
                files.raise_io(error, self.url, "opening", writing=self.writable)
            raise

    def _open_existing(self) -> None:
        """Open, and again from the start whenever a writer replaced the store meanwhile."""
        assert self.location is not None
        before: object = None  # looked at from the second attempt on: most succeed at the first
        for attempt in range(_ATTEMPTS):
            if attempt:
                before = fingerprint(self.location)
            try:
                self._open_once()
            except (StoreError, OSError) as error:
                self._hold.reset()
                self._leaves.clear()
                # A disk that fails is no other writer: a second sync would not tell what the first one lost.
                if attempt == _ATTEMPTS - 1 or getattr(error, "errno", None) == errno.EIO:
                    raise
                await_commit(self.location, self._options["lock_timeout"])
                if attempt and fingerprint(self.location) == before:
                    raise
                continue
            return

    def _open_once(self) -> None:
        assert self.location is not None
        try:
            root = self._hold.root = files.open_dir(self.location)
        except NotADirectoryError as error:
            raise StoreNotFoundError(f"{self.url} is a file, not a dataset", url=self.url) from error
        except FileNotFoundError as error:
            raise StoreNotFoundError(f"there is nothing at {self.url}", url=self.url) from error
        if self._mode == "r":
            now = session_state(root)
            with without_collection():
                self._take(read_contents(root, self.url), now)
            return
        with self._hold.entering(self._options["lock_timeout"], self.location) as now:
            with without_collection():
                contents = read_contents(root, self.url)
                self._lease.session = self._hold.session
                contents = self._take(contents, now)
            stale = [leaf for leaf in contents.leaves if leaf.sums is None or now.skips(leaf)]
            if now.log is not None and not now.live:
                self._recover(contents, now.log)
            if not now.live and (stale or self._raw.startswith(documents.LOGGED)):
                self._reseal(stale)

    def _take(self, contents: Contents, now: SessionState) -> Contents:
        """Check and map the leaves; return the contents, which are others if another program has added rows."""
        check_declared(contents.nbytes, self._options["max_bytes"], self.url)
        shared = self._mode == "r+"
        try:
            self._hold.pack = check_and_map(
                self._hold.root,
                contents,
                now,
                shared=shared,
                verify=self._options["verify"],
                accept=self._options["recover"] == "accept",
                url=self.url,
            )
        except CorruptStoreError as error:
            return self._take(self._with_added_rows(contents, error), now)
        self._header, self._raw, self._hold.raw = contents.header, contents.raw, contents.raw
        for leaf in contents.leaves:
            self._files[leaf.path] = leaf
            if leaf.packed:
                continue  # mapped when it is first used
            if shared and leaf.file:
                self._layout.adopt(leaf.path, leaf.file)
            if shared and leaf.sparse:
                self._writer.watch(leaf)
            self._leaves[leaf.path] = self._wrap(leaf)
        if shared and self._hold.pack is not None:
            self._writer.fill_pack()
        if shared:
            self._committed_as(contents.raw)
        if self._raw and self._options["verify"] != "none" and not now.crashed:
            whole, sure = contents.whole, []
            if self._options["verify"] == "size" and contents.nbytes > whole:  # else each leaf was compared whole
                sure = [leaf for leaf in contents.leaves if leaf.nbytes > whole and not now.skips(leaf)]
            if sure:
                root = self._hold.root
                stored_crc = partial(crc_unless_written, root) if shared else partial(crc_of_range, root, self._raw)
                self._reading = ReadCheck(self.url, sure, stored_crc)

        return contents

    def _with_added_rows(self, contents: Contents, error: CorruptStoreError) -> Contents:
        """Return the contents with rows that another program has added.

        Raises:
            CorruptStoreError: it has added none; or they are not to be accepted.
        """
        grown = grown_elsewhere(self._hold.root, contents, self.url)
        if grown is None:
            raise error
        if self._options["recover"] == "accept":
            return grown
        before, after = (list(found.header.groups[()].batch_size or ()) for found in (contents, grown))
        raise CorruptStoreError(
            f"{error.message}: the tensordict package has added rows since the last commit, and its meta.json says "
            f"{after} where the manifest says {before}",
            url=self.url,
            hint="open it once with mode='r+', recover='accept' to take them over",
        ) from error

    def _recover(self, contents: Contents, log: session.Log) -> None:
        """Finish or undo an interrupted commit, as there is no other session."""
        root = self._hold.root
        self._hold.remove_remains(log, {leaf.file for leaf in contents.leaves})
        with files.Tree(root) as tree:
            for leaf in contents.leaves:
                if leaf.nbytes and not leaf.packed:
                    fd = tree.open(leaf.file, os.O_RDWR)
                    if os.fstat(fd).st_size > leaf.nbytes:
                        files.truncate(fd, leaf.nbytes)
                    os.close(fd)

    def _reseal(self, stale: list[LeafFile]) -> None:
        """Update checksums, and fold the log of the manifest."""
        if not self._raw:
            return
        for leaf in stale:
            leaf.sums = None
        self._writer.complete()
        self._writer.sync()  # a writer that was killed may have left rows in the cache of the system alone
        if self._raw.startswith(documents.LOGGED):
            self._write_meta(self._header)
        self._write_manifest()

    # -- commit --------------------------------------------------------------------------
    def _save(self, header: Header) -> None:
        try:
            if self.location is None:
                self._header = header
            elif self._hold.site is not None:
                self._publish(header)
            else:
                self._commit(header)
        except OSError as error:
            files.raise_io(error, self.url, "committing")

    def _publish(self, header: Header) -> None:
        """Commit a new store for the first time: seal it where it was built, then swap it in."""
        site, hold = self._hold.site, self._hold
        assert site is not None
        self._writer.complete()
        self._writer.place()
        self._write_meta(header)
        self._header, before = header, self._header
        try:
            if self._sync:
                self._writer.sync()
            self._write_manifest(published=False)
            site.publish(replace=self._mode == "w", sync=self._sync, alone=hold.alone, ready=hold.begin_built)
        except BaseException:
            hold.stay_unpublished()
            self._header = before
            raise
        site.close(keep_root=True)
        hold.site = None
        self._mode = "r+"
        self._lease.session = hold.session
        lifetime.settle()  # what was dropped and replaced has nothing to seal any more

    def _commit(self, header: Header) -> None:
        """Commit again, in place."""
        hold = self._hold
        assert hold.session is not None
        with hold.committing(self._options["lock_timeout"]):
            raw = self._manifest_now()
            changed = header != self._header or not self._raw or self._is_restructured()
            if raw != self._raw:
                if not changed:
                    return
                raise refusals.overtaken(self.url, OVERTAKEN)
            self._writer.complete()
            self._record(header, raw)

    @without_interrupts
    def _record(self, header: Header, raw: bytes) -> None:
        """Write what changed into the manifest, whose bytes were `raw`, and put new files in their places."""
        hold = self._hold
        assert hold.session is not None
        step = plan_step(self._header, header, self._recorded, self._files.values()) if raw else None
        if step == ([], []):  # no checksum and no length differs
            self._writer.sync()
            self._committed_as(raw)
            return
        if step is not None:
            line = documents.encode_step(*step)
            if has_room(raw, line):
                self._writer.sync()
                append_step(hold.root, raw, line, sync=self._sync)
                self._header = header
                self._committed_as(raw + line)
                return
        before = {known.file for known in self._recorded if known.file} if raw else set()
        after = {leaf.file for leaf in self._files.values() if leaf.file}
        drop = sorted(before - after)
        add = sorted(leaf.file for leaf in self._files.values() if leaf.temp is not None)
        if add or drop:
            hold.session.note(add, drop)
        self._writer.sync()
        self._header, before_that = header, self._header
        placed = self._writer.place()
        try:
            self._write_meta(header)
            self._write_manifest(logged=step is not None)  # rows that are added are added again, mostly
        except BaseException:
            self._header = before_that
            self._writer.place_back(placed)
            raise
        self._writer.settle(placed)
        hold.unlink(drop)

    def _is_restructured(self) -> bool:
        now = {leaf.path: (leaf.shape, leaf.dtype) for leaf in self._files.values()}
        then = {known.path: (known.shape, known.dtype) for known in self._recorded}
        return now != then or any(leaf.temp is not None for leaf in self._files.values())

    def _write_meta(self, header: Header) -> None:
        """Write the files of tensordict; each is recorded at once, as a disk may be full in between."""
        # tensordict could not read a folder with packed leaves: without these files it says so at once.
        packed = any(map(attrgetter("packed"), self._files.values()))
        wanted = {} if packed else meta_files(header, self._files.values(), self._layout)
        write_meta_files(self._hold.root, wanted, self._meta, fresh=self._hold.site is not None)

    def _write_manifest(self, *, published: bool = True, logged: bool = False) -> None:
        records = list(map(LeafFile.record, self._files.values()))
        raw = documents.encode_manifest(self._header, records, url=self.url, logged=logged)
        root = self._hold.root
        write = files.replace_file if published or self._raw else files.create_file
        write(documents.NAME, root, raw, sync=self._sync)
        if self._sync:
            if published:
                files.fsync(root)
            else:  # the folder itself is synced with the log of its session (`Session.begin`)
                for name in files.subfolders(root):
                    with files.closing(os.open(name, files.SAFE_DIR, dir_fd=root)) as fd:
                        files.fsync_tree(fd)
        self._committed_as(raw)

    def _committed_as(self, raw: bytes) -> None:
        self._raw = self._hold.raw = raw
        known = []
        for leaf in self._files.values():
            leaf.grown = leaf.grown and leaf.floor == leaf.nbytes  # longer still, after a growth that was taken back
            known.append(Recorded(leaf.path, leaf.shape, leaf.dtype, leaf.file, leaf.sums, leaf))
        self._recorded = known
        self._committed_meta = dict(self._meta)
        self._grown.clear()

    def _discard(self) -> None:
        """Discard changes of structure since the last commit; rows written into its leaves stay written."""
        if self.location is None:
            raise self.unsupported(Cap.DISCARD)
        with files.io_errors(self.url, "taking back changes"):
            now = {id(leaf): leaf for leaf in self._files.values()}
            for known in self._recorded:
                old, path = known.leaf, known.path
                grown: list[LeafFile] = []
                while (longer := self._grown.get(id(grown[-1] if grown else old))) is not None:
                    grown.append(longer)
                self._writer.restore(old, grown, known.file)
                old.path = path
                for leaf in (old, *grown):
                    now.pop(id(leaf), None)
            for leaf in now.values():
                self._writer.discard(leaf)
            self._files.clear()
            self._files.update({known.path: known.leaf for known in self._recorded})
            self._grown.clear()
            self._leaves = {path: self._leaves_of(leaf) for path, leaf in self._files.items() if leaf.probe is not None}
            if self._meta != self._committed_meta and self._raw:
                self._write_meta(self._header)
        self._hold.unlock_commits()

    def _leaves_of(self, leaf: LeafFile) -> Tensor:
        known = self._leaves.get(leaf.path)
        if known is not None and leaf.probe is not None and known.data_ptr() == leaf.probe.data_ptr():
            return known
        return self._wrap(leaf)

    # -- the rest ------------------------------------------------------------------------
    def flush(self) -> None:
        """Wait for the storage if the store is durable; other processes see writes at once anyway."""
        self._check_open()
        if self.writable and self._sync and self.location is not None:
            with files.io_errors(self.url, "flushing"):
                self._writer.sync(everything=True)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        own = self._hold.session
        if own is None or self._hold.building:
            yield False
            return
        with own.alone() as alone:
            yield alone

    def verify(self, paths: Sequence[Path] | None = None) -> list[Fault]:
        """Compare every byte with the checksums of the last commit; leaves that this store wrote to are left out."""
        leaves = [self._leaf(path) for path in (self._files if paths is None else paths)]
        faults = []
        now = session_state(self._hold.root) if self._mode == "r" else SessionState(None, live=False)
        # A growth that was not committed leaves a file longer, until the next writer opens it.
        longer = now.log is not None
        with files.io_errors(self.url, "verifying", writing=False), files.Tree(self._hold.root) as tree:
            for leaf in leaves:
                if leaf.sums is None or not leaf.nbytes or leaf.temp is not None or now.skips(leaf):
                    continue
                if self.writable and leaf.written():
                    continue
                reason = self._verify_one(tree, leaf, longer or leaf.grown)
                if reason is not None:
                    faults.append(Fault(leaf.path, reason))
        return faults

    def _verify_one(self, tree: files.Tree, leaf: LeafFile, longer: bool) -> str | None:
        assert leaf.sums is not None
        try:
            fd = tree.open(leaf.file)
        except OSError as error:
            if files.is_foreign(error) or isinstance(error, FileNotFoundError):
                name = "/".join(leaf.file)
                return f"leaf {path_text(leaf.path)}: {name}: {error.strerror}, expected {leaf.nbytes} bytes"
            raise
        try:
            size = os.fstat(fd).st_size - leaf.offset
            if size < leaf.nbytes or (size > leaf.nbytes and not longer and not leaf.packed):
                return f"leaf {path_text(leaf.path)} has {max(size, 0)} bytes, expected {leaf.nbytes}"
            return compare_sums(fd, leaf, leaf.sums)
        finally:
            os.close(fd)

    def generation(self) -> object:
        """Return the identity of the manifest; None without one (an anonymous store, files of tensordict)."""
        self._check_open()
        if self.location is None:
            return None
        with files.io_errors(self.url, "looking for commits", writing=False):
            return manifest_identity(self.location)

    def nbytes_stored(self) -> int | None:
        self._check_open()
        return self._writer.blocks() * 512

    def _close(self) -> None:
        self._leaves.clear()
        self._end()
