"""The `memmap` backend: a directory of raw memory-mapped files, one per leaf, with a manifest that checks itself."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tdstore import files, lifetime, manifest, session
from tdstore.builtin.localplace import local_place
from tdstore.builtin.memmap_hold import Hold
from tdstore.builtin.memmap_layout import Layout, LeafFile
from tdstore.builtin.memmap_open import (
    Contents,
    Situation,
    Verify,
    check_and_map,
    check_budget,
    compare_sums,
    fingerprint,
    read_contents,
    situation,
)
from tdstore.builtin.memmap_publish import build_site
from tdstore.builtin.memmap_write import LeafWriter, take_sums
from tdstore.builtin.mmtensor import MemoryMappedTensor
from tdstore.builtin.peer_memmap import META, meta_files
from tdstore.builtin.resident import ResidentStore
from tdstore.errors import (
    KeyNotFoundError,
    OptionError,
    StoreBusyError,
    StoreClosedError,
    StoreError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.header import Header
from tdstore.indexing import gather
from tdstore.keys import encode_file_name
from tdstore.lifetime import Ending
from tdstore.rows import check_indices
from tdstore.session import LOCK_TIMEOUT, Lease
from tdstore.store import Cap
from tdstore.types import MODES, Fault, LeafSpec, Mode, Path, Read, Write, path_text

Durable = Literal["none", "commit"]
_ATTEMPTS = 50
_PREALLOCATED = 256 << 20


def open_memmap(
    location: str | None = None,
    *,
    mode: Mode = "r",
    durable: Durable = "commit",
    verify: Verify = "size",
    recover: Literal["accept"] | None = None,
    max_bytes: int | None = None,
    preallocate: bool | None = None,
    lock_timeout: float = LOCK_TIMEOUT,
) -> MemmapStore:
    """Open, or make, a directory of memory-mapped leaves. None (modes "w" and "x") is an anonymous one.

    Args:
        durable: "commit" waits for the medium before it publishes (survives a power cut); "none" does not.
        verify: "size" checks sizes and three small samples of each leaf, "full" every byte, "none" sizes only.
        recover: "accept" takes leaves as they are that a writer left unfinished or somebody else changed.
        max_bytes: refuse a store that declares more data.
        preallocate: reserve disk space for new leaves when they are made; default: for those of at most 256 MiB. For
            others tdstore takes it before it writes to them; torch's own operations on a leaf, which do not, end the
            process if the disk is full then.
        lock_timeout: seconds to wait for another process that holds the store.

    Raises:
        StoreNotFoundError, StoreExistsError: by mode. CorruptStoreError: not what was committed.
        DirtyStoreError: a writer died. StoreBusyError: another process holds it. StoreIOError: the medium failed.
    """
    for name, value, known in (
        ("mode", mode, MODES),
        ("durable", durable, get_args(Durable)),
        ("verify", verify, get_args(Verify)),
        ("recover", recover, (None, "accept")),
    ):
        if value not in known:
            raise OptionError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}", url=location)
    if sys.byteorder != "little":
        raise UnsupportedError("the memmap backend needs a little-endian machine", url=location)
    options: dict[str, Any] = {
        "durable": durable,
        "verify": verify,
        "recover": recover,
        "max_bytes": max_bytes,
        "preallocate": preallocate,
        "lock_timeout": lock_timeout,
    }
    lifetime.settle()
    store = MemmapStore(None if location is None else local_place(location, "memmap", "folder"), mode, options)
    store._start()
    return store


class MemmapStore(ResidentStore):
    """Leaves as memory-mapped files of one directory."""

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
    )

    def __init__(self, location: str | None, mode: Mode, options: dict[str, Any]) -> None:
        self.location = location
        self.url = location or "an anonymous memmap store"
        self.writable = mode != "r"
        if location is None:
            self.caps = MemmapStore.caps & ~Cap.PERSISTENT  # type: ignore[misc] # it ends with the store
        self._mode: Mode = mode
        self._options = options
        self._sync = options["durable"] == "commit"
        self._leaves = {}
        self._header = Header()
        self._raw = b""
        self._meta: dict[tuple[str, ...], bytes] = {}
        self._layout = Layout()
        self._hold = Hold(self.url, sync=self._sync)
        self._hold.private = mode == "r"
        self._files = self._hold.files
        self._writer = LeafWriter(self._hold)
        # Tensors hold the lease, so that a session lasts as long as anything can be written through it.
        self._lease = Lease()
        # A reader has nothing to commit, and only lets go of descriptors.
        self._end: Callable[[], object] = (
            Ending(self._lease, self._hold.end, self.url)
            if self.writable
            else weakref.finalize(self._lease, self._hold.end)
        )

    # -- opening -------------------------------------------------------------------------
    def _start(self) -> None:
        try:
            with files.io_errors(self.url, "opening", writing=self.writable):
                self._open_by_mode()
        except BaseException:
            self._closed = True
            self._end()
            raise

    def _open_by_mode(self) -> None:
        if self.location is None:
            if self._mode in ("r", "r+"):
                raise StoreNotFoundError("an anonymous memmap store cannot be opened again", hint="give a location")
            self._hold.make_anonymous()
            return
        if self._mode == "a":
            self._mode = "r+" if os.path.isdir(self.location) and os.listdir(self.location) else "x"
        if self._mode in ("w", "x"):
            site = build_site(self.location, timeout=self._options["lock_timeout"])
            self._hold.site, self._hold.root = site, os.dup(site.root)
            if (old := site.check(replace=self._mode == "w")) >= 0:
                os.close(old)
            return
        self._open_existing()

    def _open_existing(self) -> None:
        """Open, and once more from the start whenever a writer replaced the store meanwhile."""
        assert self.location is not None
        for attempt in range(_ATTEMPTS):
            before = fingerprint(self.location)
            try:
                self._open_once()
            except (StoreError, OSError):
                self._hold.reset()
                self._leaves.clear()
                if attempt == _ATTEMPTS - 1 or fingerprint(self.location) == before:
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
            now = situation(root)
            self._take(read_contents(root, self.url), now)
            return
        with self._hold.entering(self._options["lock_timeout"], self.location) as now:
            contents = read_contents(root, self.url)
            self._lease.session = self._hold.session
            self._take(contents, now)
            stale = [leaf for leaf in contents.leaves if leaf.sums is None or now.skips(leaf)]
            if now.log is not None and not now.live:
                self._recover(contents, stale, now.log)
            elif stale and not now.live:
                self._reseal(stale)

    def _take(self, contents: Contents, now: Situation) -> None:
        check_budget(contents.leaves, self._options["max_bytes"], self.url)
        shared = self._mode == "r+"
        check_and_map(
            self._hold.root,
            contents,
            now,
            shared=shared,
            verify=self._options["verify"],
            accept=self._options["recover"] == "accept",
            url=self.url,
        )
        self._header, self._raw = contents.header, contents.raw
        for leaf in contents.leaves:
            self._files[leaf.path] = leaf
            if shared and leaf.file:
                self._layout.adopt(leaf.path, leaf.file)
            if shared and leaf.sparse:
                self._writer.watch(leaf)
            self._leaves[leaf.path] = self._wrap(leaf)

    def _recover(self, contents: Contents, stale: list[LeafFile], log: session.Log) -> None:
        """Nobody is in: bring sums up to date, finish or undo a commit that was cut short."""
        root = self._hold.root
        self._hold.clear_remains(log, {leaf.file for leaf in contents.leaves})
        with files.Tree(root) as tree:
            for leaf in contents.leaves:
                if leaf.nbytes:
                    fd = tree.open(leaf.file, os.O_RDWR)
                    if os.fstat(fd).st_size > leaf.nbytes:
                        files.truncate(fd, leaf.nbytes)
                    os.close(fd)
        if stale:
            self._reseal(stale)

    def _reseal(self, stale: list[LeafFile]) -> None:
        if not self._raw:
            return
        for leaf in stale:
            leaf.sums = None
        self._take_sums()
        self._write_manifest()

    def _wrap(self, leaf: LeafFile) -> MemoryMappedTensor:
        mapped = torch.empty(leaf.shape, dtype=leaf.dtype) if leaf.probe is None else leaf.probe
        name = None if self.location is None else f"{self.location}/{'/'.join(leaf.file)}"
        return MemoryMappedTensor.wrap(
            mapped, name if leaf.file else None, shared=self.writable, lease=self._lease if self.writable else None
        )

    # -- catalogue -----------------------------------------------------------------------
    def paths(self) -> Iterator[Path]:
        self._check_open()
        return iter(tuple(self._files))

    def specs(self, paths: Sequence[Path]) -> list[LeafSpec]:
        return [self._leaf(path).spec() for path in paths]

    def load_header(self) -> Header:
        self._check_open()
        return self._header

    def leaf_file(self, path: Path) -> str:
        """Absolute name of a leaf's file, as it is once the store is committed.

        Raises:
            UnsupportedError: the store is anonymous, or the leaf has no elements and so no file.
        """
        leaf = self._leaf(path)
        if self.location is None or not leaf.file:
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

    def _leaf(self, path: Path) -> LeafFile:
        self._check_open()
        try:
            return self._files[path]
        except KeyError:
            raise KeyNotFoundError(f"no leaf {path_text(path)} in {self.url}") from None

    # -- data ----------------------------------------------------------------------------
    def view(self, path: Path) -> Tensor:
        tensor = self._mapped(path)
        leaf = self._files[path]
        leaf.handed = True
        if self.writable and leaf.nbytes and (leaf.temp is not None or self._hold.building):
            leaf.changes_from(0)  # what is not committed yet is looked at once, then
        return tensor

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        leaves = [self._mapped(r.path) for r in reads]
        check_indices((r.index, leaf.shape) for r, leaf in zip(reads, leaves, strict=True))
        return [gather(leaf, r.index, r.out) for leaf, r in zip(leaves, reads, strict=True)]

    def _mapped(self, path: Path) -> Tensor:
        leaf = self._leaf(path)
        tensor = self._leaves.get(path)
        if tensor is None:
            if leaf.probe is None:
                with files.io_errors(self.url, f"mapping leaf {path_text(path)}"):
                    self._writer.map(leaf)
                leaf.version = leaf.seen()
            tensor = self._leaves[path] = self._wrap(leaf)
        return tensor

    def create(self, leaves: Mapping[Path, LeafSpec]) -> None:
        self._check_writable()
        for path, spec in leaves.items():
            if unknown := set(spec.options) - {"preallocate"}:
                raise OptionError(
                    f"{self.url} has no leaf option {sorted(unknown)[0]!r}; its option is preallocate", url=self.url
                )
            if not path:
                raise ValueError(f"a leaf of {self.url} needs a name")
        with files.io_errors(self.url, "making leaves"):
            for path, spec in leaves.items():
                self._discard(path)
                leaf = LeafFile(path, spec.shape, spec.dtype, spec.fill_value, self._layout.file(path))
                self._files[path] = leaf
                asked = spec.options.get("preallocate", self._options["preallocate"])
                self._writer.make(leaf, allocate=leaf.nbytes <= _PREALLOCATED if asked is None else asked)

    def write(self, writes: Sequence[Write]) -> None:
        self._check_writable()
        wanted = [(self._leaf(w.path), w) for w in writes]
        check_indices((w.index, leaf.shape) for leaf, w in wanted)
        wanted = [(leaf, w) for leaf, w in wanted if leaf.nbytes and w.value.numel()]
        if not self._hold.building:
            for leaf, w in wanted:  # all, before the first row of any is overwritten
                self._writer.reserve(leaf, w.index)
        for leaf, w in wanted:
            with files.io_errors(self.url, f"writing leaf {path_text(w.path)}"):
                self._writer.write(leaf, w.index, w.value, partial(self._mapped, w.path))

    def delete(self, paths: Sequence[Path]) -> None:
        self._check_writable()
        for path in paths:
            self._leaf(path)
        with files.io_errors(self.url, "deleting"):
            for path in paths:
                self._discard(path)

    def resize(self, lengths: Mapping[Path, int]) -> None:
        self._check_writable()
        for path, length in lengths.items():
            if not self._leaf(path).shape or length < 0:
                raise ValueError(f"leaf {path_text(path)} of {self.url} cannot be resized to {length} rows")
        with files.io_errors(self.url, "resizing"):
            for path, length in lengths.items():
                old = self._files[path]
                if old.shape[0] == length:
                    continue
                shape = (length, *old.shape[1:])
                leaf = LeafFile(path, shape, old.dtype, old.fill, self._layout.file(path))
                if old.nbytes and leaf.nbytes > old.nbytes:
                    self._writer.grow(old, leaf, self._leaves.get(path))
                elif old.grown and not old.handed and old.probe is None and 0 < old.floor <= leaf.nbytes:
                    self._writer.ungrow(old, leaf)
                else:
                    # Shortening a file would take pages from under old mappings: the rows that stay are copied.
                    self._writer.make(leaf, aside=True)
                    if leaf.nbytes and old.nbytes:
                        self._writer.write(leaf, (), self._mapped(path)[:length], partial(self._mapped, path))
                    self._discard(path)
                self._files[path] = leaf
                self._leaves.pop(path, None)

    def rename(self, moves: Mapping[Path, Path]) -> None:
        self._check_writable()
        leaves = {new: self._leaf(old) for old, new in moves.items()}
        with files.io_errors(self.url, "renaming"):
            for leaf in leaves.values():
                self._writer.set_aside(leaf)
            for old in moves:
                self._files.pop(old, None)
                self._leaves.pop(old, None)
            for new, leaf in leaves.items():
                self._discard(new)
                leaf.path = new
                leaf.file = self._layout.file(new) if leaf.nbytes else ()
                self._files[new] = leaf
                if leaf.probe is not None:
                    self._leaves[new] = self._wrap(leaf)

    def _discard(self, path: Path) -> None:
        leaf = self._files.pop(path, None)
        self._leaves.pop(path, None)
        if leaf is not None:
            self._writer.discard(leaf)

    # -- commit --------------------------------------------------------------------------
    def save_header(self, header: Header) -> None:
        self._check_writable()
        with files.io_errors(self.url, "committing"):
            if self.location is None:
                self._header = header
            elif self._hold.site is not None:
                self._publish(header)
            else:
                self._commit(header)

    def _publish(self, header: Header) -> None:
        """First commit of a new store: seal it where it was built, then swap it in."""
        site, hold = self._hold.site, self._hold
        assert site is not None
        self._take_sums()
        self._writer.place()
        self._write_meta(header)
        self._header, before = header, self._header
        try:
            self._writer.sync()
            self._write_manifest(tree_sync=True)
            with hold.publishing():
                site.publish(replace=self._mode == "w", sync=self._sync, alone=hold.alone, ready=hold.begin_built)
        except BaseException:
            self._header = before
            raise
        site.close()
        hold.site = None
        self._mode = "r+"
        self._lease.session = hold.session

    def _commit(self, header: Header) -> None:
        """A later commit, in place."""
        hold = self._hold
        assert hold.session is not None
        with hold.committing(self._options["lock_timeout"]):
            raw = files.read_small(manifest.NAME, hold.root, manifest.MAX_FILE_BYTES) if self._raw else b""
            changed = header != self._header or not self._raw or self._is_restructured()
            if raw != self._raw:
                if not changed:
                    return
                raise StoreBusyError(
                    f"{self.url} was committed by another writer since it was opened here",
                    url=self.url,
                    hint="open it again to build on what the other one wrote; rows written in place are kept",
                )
            self._take_sums()
            before = self._committed_files()
            after = {leaf.file for leaf in self._files.values() if leaf.file}
            drop = sorted(before - after)
            add = sorted(leaf.file for leaf in self._files.values() if leaf.temp is not None)
            if add or drop:
                hold.session.note(add, drop)
            self._writer.sync()
            self._writer.place()
            self._write_meta(header)
            self._header, before_that = header, self._header
            try:
                self._write_manifest()
            except BaseException:
                self._header = before_that
                raise
            hold.unlink(drop)

    def _committed_files(self) -> set[tuple[str, ...]]:
        if not self._raw:
            return set()
        found, _ = manifest.decode_manifest(self._raw, url=self.url)
        return {record.file for record in found.leaves if record.file}

    def _is_restructured(self) -> bool:
        found, _ = manifest.decode_manifest(self._raw, url=self.url)
        now = [(leaf.path, tuple(leaf.shape), leaf.dtype) for leaf in self._files.values()]
        then = [(r.path, r.shape, LeafSpec((), r.dtype).dtype) for r in found.leaves]
        return sorted(now, key=lambda r: r[0]) != sorted(then, key=lambda r: r[0]) or any(
            leaf.temp is not None for leaf in self._files.values()
        )

    def _take_sums(self) -> None:
        for leaf in self._files.values():
            if leaf.written():
                take_sums(leaf, self._writer)

    def _write_meta(self, header: Header) -> None:
        """The peer's files; what is written is remembered at once, for a disk may be full in between."""
        wanted = meta_files(header, self._files.values(), self._layout)
        with files.Tree(self._hold.root) as tree:
            for parts, data in wanted.items():
                if self._meta.get(parts) != data:
                    folder = tree.folder(parts[:-1], create=True)
                    if self._hold.site is not None and parts not in self._meta:
                        files.create_file(META, folder, data)
                    else:
                        files.replace_file(META, folder, data)
                    self._meta[parts] = data
            for parts in self._meta.keys() - wanted.keys():
                files.unlink_if_there(META, tree.folder(parts[:-1]))
        self._meta = wanted

    def _write_manifest(self, *, tree_sync: bool = False) -> None:
        raw = manifest.encode_manifest(self._header, [leaf.record() for leaf in self._files.values()], url=self.url)
        root = self._hold.root
        files.replace_file(manifest.NAME, root, raw, sync=self._sync)
        if self._sync:
            files.fsync_tree(root) if tree_sync else files.fsync(root)
        self._raw = raw
        for leaf in self._files.values():
            leaf.grown = False

    # -- the rest ------------------------------------------------------------------------
    def flush(self) -> None:
        """Wait for the medium if the store is durable; other processes see writes at once anyway."""
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
        now = situation(self._hold.root) if self._mode == "r" else Situation(None, live=False)
        with files.io_errors(self.url, "verifying", writing=False), files.Tree(self._hold.root) as tree:
            for leaf in leaves:
                if leaf.sums is None or not leaf.nbytes or leaf.temp is not None or now.skips(leaf):
                    continue
                if self.writable and leaf.written():
                    continue
                reason = self._verify_one(tree, leaf)
                if reason is not None:
                    faults.append(Fault(leaf.path, reason))
        return faults

    def _verify_one(self, tree: files.Tree, leaf: LeafFile) -> str | None:
        assert leaf.sums is not None
        try:
            fd = tree.open(leaf.file)
        except OSError as error:
            if files.is_foreign(error) or isinstance(error, FileNotFoundError):
                name = "/".join(leaf.file)
                return f"leaf {path_text(leaf.path)}: {name}: {error.strerror}, expected {leaf.nbytes} bytes"
            raise
        try:
            size = os.fstat(fd).st_size
            if size != leaf.nbytes:
                return f"leaf {path_text(leaf.path)} has {size} bytes on the medium, expected {leaf.nbytes}"
            return compare_sums(fd, leaf, leaf.sums)
        finally:
            os.close(fd)

    def nbytes_stored(self) -> int | None:
        self._check_open()
        return self._writer.blocks() * 512

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._leaves.clear()
        with files.io_errors(self.url, "closing"):
            self._end()

    def _check_writable(self) -> None:
        super()._check_writable()
        if self._hold.session is not None and self._hold.session.detached:
            raise StoreClosedError(
                f"{self.url} was replaced by a later save of this process",
                url=self.url,
                hint="what was mapped stays readable; open the location again to write to the new data",
            )
