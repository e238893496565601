"""Opening of a directory store: read its manifest (or tensordict's meta.json files), check every file, then map it."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from operator import attrgetter

import google_crc32c
import msgspec

from tdstore.builtin.mapping import map_fd
from tdstore.builtin.memmap.layout import LeafFile
from tdstore.builtin.memmap.pack import Pack
from tdstore.builtin.memmap.tensordict_layout import META, read_tensordict
from tdstore.builtin.readcheck import OPENED
from tdstore.errors import (
    CorruptStoreError,
    ReadOnlyError,
    StoreBusyError,
    StoreError,
    StoreNotFoundError,
)
from tdstore.header import Header
from tdstore.storekit import documents, files, refusals, session
from tdstore.storekit.checksums import Sums, block_text, crc32c, sums_of_file, sums_of_part, tips_of_file
from tdstore.storekit.session import Log
from tdstore.types import Path, Verify, path_text

WHOLE = 64 << 10
"""Leaves of up to so many bytes are compared whole when they are opened, which is as cheap as three samples."""
MAX_MANIFEST = documents.MAX_FILE_BYTES
_NBYTES, _PACKED = attrgetter("nbytes"), attrgetter("packed")


class Contents(msgspec.Struct):
    """The contents of a directory."""

    raw: bytes
    """The manifest as stored; empty for a directory of tensordict."""
    header: Header
    leaves: list[LeafFile]
    nbytes: int
    """Bytes of all leaves together."""
    whole: int
    """Leaves of up to so many bytes are compared whole when they are opened."""


def _contents(raw: bytes, header: Header, leaves: list[LeafFile]) -> Contents:
    nbytes = sum(map(_NBYTES, leaves))
    return Contents(raw, header, leaves, nbytes, OPENED if nbytes <= OPENED else WHOLE)


class SessionState(msgspec.Struct):
    """The state of the checksums according to the session log."""

    log: Log | None
    live: bool
    """Another session is writing: data changes while checksums are compared."""

    @property
    def crashed(self) -> bool:
        """Check whether a writer was killed: every leaf must be compared."""
        return self.log is not None and not self.live and bool(self.log.opened or self.log.torn)

    def skips(self, leaf: LeafFile) -> bool:
        """Check whether the checksums of a leaf may differ from its data."""
        return self.live or (self.log is not None and not self.crashed and self.log.stale(leaf.path))


def session_state(root: int) -> SessionState:
    """Read the log and check for live sessions."""
    log = session.read_log(root)
    return SessionState(log, log is not None and session.has_live_session(root))


def read_contents(root: int, url: str) -> Contents:
    """Read the manifest, or the files of tensordict.

    Raises:
        StoreNotFoundError: neither exists.
        CorruptStoreError: it is damaged.
    """
    try:
        raw = files.read_small(documents.NAME, root, MAX_MANIFEST)
    except FileNotFoundError:
        return _read_tensordict(root, url)
    except CorruptStoreError as error:
        raise files.with_url(error, url) from None
    found, header = documents.decode_manifest(raw, url=url)
    return _contents(raw, header, [LeafFile.from_record(record) for record in found.leaves])


def _read_tensordict(root: int, url: str) -> Contents:
    try:
        os.stat(META, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        raise StoreNotFoundError(
            f"{url} holds neither {documents.NAME} nor {META}: it is not a dataset", url=url
        ) from None
    header, leaves = read_tensordict(root, url)
    return _contents(b"", header, leaves)


def grown_elsewhere(root: int, contents: Contents, url: str) -> Contents | None:
    """Return the contents of a folder to which the tensordict package has added rows since the last commit, or None.

    That package lengthens files and changes its `meta.json`, and knows nothing of the manifest. All entries must be
    those of the manifest, with other lengths, and all files must be as long as `meta.json` says.
    """
    try:
        header, found = read_tensordict(root, url)
        sizes = _sizes(root, found)
    except (StoreError, OSError):
        return None
    theirs = {leaf.path: leaf for leaf in found}
    groups = contents.header.groups
    if len(theirs) != len(contents.leaves) or header.groups.keys() != groups.keys() or not contents.raw:
        return None
    leaves = []
    for leaf in contents.leaves:
        there = theirs.get(leaf.path)
        if there is None or leaf.packed or (there.dtype, there.file) != (leaf.dtype, leaf.file):
            return None
        if there.shape[1:] != leaf.shape[1:] or sizes[leaf.path] != there.nbytes or there.nbytes < leaf.nbytes:
            return None
        leaves.append(LeafFile(leaf.path, there.shape, leaf.dtype, leaf.fill, leaf.file))
    if all(leaf.shape == old.shape for leaf, old in zip(leaves, contents.leaves, strict=True)):
        return None
    grown = {path: msgspec.structs.replace(groups[path], batch_size=g.batch_size) for path, g in header.groups.items()}
    return _contents(contents.raw, Header(grown), leaves)


def _sizes(root: int, leaves: list[LeafFile]) -> dict[Path, int]:
    """Return the bytes of the files of leaves."""
    with files.Tree(root) as tree:
        return {
            leaf.path: os.stat(leaf.file[-1], dir_fd=tree.folder(leaf.file[:-1]), follow_symlinks=False).st_size
            if leaf.file
            else 0
            for leaf in leaves
        }


def check_and_map(
    root: int, contents: Contents, now: SessionState, *, shared: bool, verify: Verify, accept: bool, url: str
) -> Pack | None:
    """Check every file against its declaration, and map those that pass.

    Leaves whose checksums may be stale (`accept`) end with `sums` None. Returns the file of packed leaves,
    if there is one; these have no tensors until one is requested.

    Args:
        root: descriptor of the folder.
        contents: the declared leaves.
        now: the state of the checksums.
        shared: map for writing; else writes stay in this process.
        verify: "full", "size" or "none", as `open_memmap` has it.
        accept: accept leaves that a dead writer left.
        url: the location, for messages.

    Raises:
        CorruptStoreError: missing, short, too long, not a plain file, shared by two leaves, other bytes.
        DirtyStoreError: a writer was killed, and these leaves differ from the last commit.
    """
    dirty: list[tuple[LeafFile, str]] = []
    whole = contents.whole
    pack: Pack | None = None
    if any(map(_PACKED, contents.leaves)):
        pack = _check_packed(root, contents, now, shared=shared, verify=verify, accept=accept, url=url, dirty=dirty)
    inodes: dict[tuple[int, int], LeafFile] = {}
    with files.Tree(root) as tree:
        for leaf in contents.leaves:
            if not leaf.nbytes or leaf.packed:
                continue
            opened = _open_leaf(tree, leaf, url, now, dirty)
            if opened is None:
                continue
            fd, info = opened
            try:
                other = inodes.setdefault((info.st_dev, info.st_ino), leaf)
                if other is not leaf:
                    raise CorruptStoreError(
                        f"{url}: leaves {path_text(other.path)} and {path_text(leaf.path)} share one file", url=url
                    )
                reason = _compare(fd, leaf, info, now, verify, whole)
                if reason is not None and not _accepted(leaf, reason, info, now, dirty, accept=accept, url=url):
                    continue
                leaf.sparse = info.st_blocks * 512 < leaf.nbytes
                leaf.changed = _settled_time(info) if shared and now.log is None else 0
                try:
                    leaf.probe = map_fd(fd, leaf.shape, leaf.dtype, shared=shared, path="/".join((url, *leaf.file)))
                except OSError as error:
                    files.raise_io(error, url, f"mapping leaf {path_text(leaf.path)}", writing=False)
                except RuntimeError as error:
                    raise _map_error(error, leaf, url) from error
                leaf.inode, leaf.version = info.st_ino, leaf.seen()
            finally:
                os.close(fd)
    if dirty:
        raise refusals.dirty(url, [leaf.path for leaf, _ in dirty], more=dirty[0][1])
    return pack


def _accepted(
    leaf: LeafFile,
    reason: str,
    info: os.stat_result,
    now: SessionState,
    dirty: list[tuple[LeafFile, str]],
    *,
    accept: bool,
    url: str,
) -> bool:
    """Judge a leaf that differs from the commit: accepted, left by a dead writer (added to `dirty`), or damaged."""
    end = leaf.offset + leaf.nbytes
    if now.crashed and not (accept and info.st_size >= end):
        dirty.append((leaf, reason))
        return False
    whole = info.st_size >= end if leaf.packed else info.st_size == end
    acceptable = whole or now.log is not None
    if not accept or not acceptable:
        raise CorruptStoreError(f"{url}: {reason}", url=url, hint=_ACCEPT if acceptable else _RESTORE)
    leaf.sums = None
    return True


def _check_packed(
    root: int,
    contents: Contents,
    now: SessionState,
    *,
    shared: bool,
    verify: Verify,
    accept: bool,
    url: str,
    dirty: list[tuple[LeafFile, str]],
) -> Pack | None:
    """Compare the packed leaves, and map their file; None if that is missing."""
    leaves = [leaf for leaf in contents.leaves if leaf.packed]
    pack = Pack(root, max(leaf.offset + leaf.nbytes for leaf in leaves), shared=shared)
    try:
        with files.Tree(root) as tree:
            opened = _open_leaf(tree, leaves[0], url, now, dirty, os.O_RDWR if shared else os.O_RDONLY)
        if opened is None:
            return None
        fd, info = opened
        pack.adopt(fd)
        sparse = info.st_blocks * 512 < pack.nbytes
        changed = _settled_time(info) if shared and now.log is None else 0
        compared = now.crashed or verify != "none"
        for leaf in leaves:
            reason = _compare_packed(fd, leaf, info, now, compared)
            if reason is not None:
                _accepted(leaf, reason, info, now, dirty, accept=accept, url=url)
            leaf.sparse, leaf.changed = sparse, changed
        if info.st_size >= pack.nbytes:
            pack.map()
    except BaseException:
        pack.close()
        raise
    return pack


def _compare_packed(fd: int, leaf: LeafFile, info: os.stat_result, now: SessionState, compared: bool) -> str | None:
    """Return how a packed leaf differs from the commit, or None."""
    if leaf.offset + leaf.nbytes > info.st_size:
        end = max(info.st_size - leaf.offset, 0)
        return f"leaf {path_text(leaf.path)} has {end} bytes in {documents.PACK}, expected {leaf.nbytes}"
    if leaf.sums is None or not compared or now.skips(leaf):
        return None
    return compare_sums(fd, leaf, leaf.sums)


_RESTORE = "restore it from a copy"
_ACCEPT = "restore it from a copy; if another program wrote it on purpose, open once with mode='r+', recover='accept'"


def _open_leaf(
    tree: files.Tree,
    leaf: LeafFile,
    url: str,
    now: SessionState,
    dirty: list[tuple[LeafFile, str]],
    flags: int = os.O_RDONLY,
) -> tuple[int, os.stat_result] | None:
    file = leaf.file
    try:
        fd = os.open(file[-1], flags | files.SAFE, dir_fd=tree.root if len(file) == 1 else tree.folder(file[:-1]))
        info = os.fstat(fd)  # which the caller needs too: `Tree.open` would ask a second time
        if stat.S_ISREG(info.st_mode):
            return fd, info
        os.close(fd)
        raise files.NotRegularError(errno.ELOOP, "not a plain file", file[-1])
    except FileNotFoundError as error:
        name = "/".join(file)
        reason = f"leaf {path_text(leaf.path)} is missing: there is no {name}, expected {leaf.nbytes} bytes"
        if now.crashed:
            dirty.append((leaf, reason))
            return None
        raise CorruptStoreError(f"{url}: {reason}", url=url, hint="restore it from a copy") from error
    except PermissionError as error:
        if flags == os.O_RDONLY:
            files.raise_io(error, url, f"leaf {path_text(leaf.path)}", writing=False)
        raise ReadOnlyError(f"{url}: {'/'.join(file)} cannot be written: {error.strerror}", url=url) from error
    except OSError as error:
        if files.is_foreign(error):
            raise CorruptStoreError(
                f"{url}: leaf {path_text(leaf.path)}: {'/'.join(file)} is not a plain file in plain folders "
                f"({error.strerror}), expected {leaf.nbytes} bytes",
                url=url,
                hint="links, pipes and devices inside a store are never followed",
            ) from error
        files.raise_io(error, url, f"leaf {path_text(leaf.path)}", writing=False)


def _compare(
    fd: int, leaf: LeafFile, info: os.stat_result, now: SessionState, verify: Verify, whole: int
) -> str | None:
    """Return how the file differs from the commit, or None; leaves of up to `whole` bytes are compared whole."""
    size = info.st_size
    # A session that grows a leaf lengthens its file before the manifest is written.
    if size < leaf.nbytes or (size > leaf.nbytes and now.log is None):
        return f"leaf {path_text(leaf.path)} has {size} bytes, expected {leaf.nbytes}"
    quiet = now.log is None and not now.live
    if leaf.sums is None or (not quiet and now.skips(leaf)):
        return None
    if verify == "full" or (not quiet and now.crashed):
        return compare_sums(fd, leaf, leaf.sums)
    if verify == "size" and leaf.nbytes <= whole:
        return compare_sums(fd, leaf, leaf.sums)
    if verify == "size" and (tips := tips_of_file(fd, leaf.nbytes)) != leaf.sums.tips:
        return (
            f"leaf {path_text(leaf.path)} holds other data than was committed "
            f"(crc32c of its tips is {tips:08x}, expected {leaf.sums.tips:08x})"
        )
    return None


def compare_sums(fd: int, leaf: LeafFile, expected: Sums) -> str | None:
    """Hash a file and describe the first block that differs from the commit."""
    if leaf.nbytes <= WHOLE:  # one block: one read, and no search for holes
        data = os.pread(fd, leaf.nbytes, leaf.offset)
        if len(data) == leaf.nbytes and google_crc32c.value(data).to_bytes(4, "little") == expected.crc:
            return None
    try:
        if leaf.packed:
            got = sums_of_part(fd, leaf.nbytes, leaf.offset)
        else:
            got = sums_of_file(fd, leaf.nbytes, block=expected.block)
    except EOFError:
        return f"leaf {path_text(leaf.path)} has {os.fstat(fd).st_size} bytes, expected {leaf.nbytes}"
    if got.crc == expected.crc:
        return None
    block = next(i for i in range(0, len(got.crc), 4) if got.crc[i : i + 4] != expected.crc[i : i + 4])
    return (
        f"leaf {path_text(leaf.path)} is damaged{block_text(block // 4, expected.block, leaf.nbytes)}: crc32c "
        f"{got.crc[block : block + 4][::-1].hex()}, expected {expected.crc[block : block + 4][::-1].hex()}"
    )


def crc_of_range(root: int, raw: bytes, leaf: LeafFile, start: int, stop: int) -> int | None:
    """Compute the crc32c of a part of a leaf's file; None if it was written since the manifest `raw` was read."""
    try:
        with files.Tree(root) as tree:
            fd = tree.open(leaf.file)
            try:
                found = crc32c(os.pread(fd, stop - start, leaf.offset + start))
            finally:
                os.close(fd)
        # Looked at last: a writer changes rows before its commit changes the manifest, and the log is there meanwhile.
        if session.read_log(root) is not None or files.read_small(documents.NAME, root, MAX_MANIFEST) != raw:
            return None
    except (OSError, CorruptStoreError):
        return None  # replaced, or removed
    return found


def crc_unless_written(root: int, leaf: LeafFile, start: int, stop: int) -> int | None:
    """Compute the crc32c of a part of a leaf mapped for writing; None if it may have been written since it was opened.

    torch counts its writes, but not those through numpy, nor those of other processes. The time of the file shows both.
    """
    try:
        with files.Tree(root) as tree:
            fd = tree.open(leaf.file)
        try:
            found = crc32c(os.pread(fd, stop - start, leaf.offset + start))
            return None if leaf.written() or not is_untouched(root, fd, leaf) else found
        finally:
            os.close(fd)
    except OSError:
        return None  # replaced, or removed


def is_untouched(root: int, fd: int, leaf: LeafFile) -> bool:
    """Check whether no process can have written to a leaf's file since it was opened for writing; False if unknown."""
    info = os.fstat(fd)
    return 0 < leaf.changed == info.st_mtime_ns and is_store_noticed(root, info.st_dev)


def _settled_time(info: os.stat_result) -> int:
    """Return the time of a file, if it is old enough that any later write changes it."""
    coarse = info.st_mtime_ns % 1_000_000 == 0  # a file system that counts in seconds, perhaps
    margin = 2_500_000_000 if coarse else 20_000_000
    return info.st_mtime_ns if info.st_mtime_ns < time.time_ns() - margin else 0


def is_store_noticed(root: int, device: int) -> bool:
    """Check whether a write through a mapping changes the time of a file. On file systems in memory it does not."""
    if device not in _noticed:
        name = files.temp_name()
        fd = files.create_empty(name, root)
        try:
            files.unlink(name, root)
            os.pwrite(fd, bytes(mmap.PAGESIZE), 0)
            os.utime(fd, ns=(0, 0))
            with mmap.mmap(fd, mmap.PAGESIZE) as mapped:
                # Read first, as checks do: tmpfs notices a store into a page that was not mapped yet, and no other.
                mapped[0] = mapped[0] + 1
                _noticed[device] = os.fstat(fd).st_mtime_ns != 0
        finally:
            os.close(fd)
    return _noticed[device]


_noticed: dict[int, bool] = {}
"""By the device number of a file system."""


def _map_error(error: RuntimeError, leaf: LeafFile, url: str) -> StoreError:
    text = str(error).splitlines()[0]
    if "Permission denied" in text or "Read-only" in text:
        return ReadOnlyError(f"{url}: leaf {path_text(leaf.path)} cannot be written: {text}", url=url)
    return CorruptStoreError(f"{url}: leaf {path_text(leaf.path)} cannot be mapped: {text}", url=url)


def await_commit(location: str, timeout: float) -> None:
    """Wait while another process commits: files get their names a moment before the manifest that refers to them."""
    try:
        fd = os.open(os.path.join(location, session.NAME), os.O_RDONLY | files.SAFE)
    except OSError:
        return  # no writer
    try:
        files.lock(fd, exclusive=False, timeout=timeout, url=location)
    except StoreBusyError:
        return  # the caller reports the contents
    finally:
        os.close(fd)


def fingerprint(location: str) -> object:
    """Return the identity of the present generation: the folder, the manifest, and whether it is being written."""
    found: list[object] = []
    for name in ("", documents.NAME, session.NAME):
        try:
            info = os.stat(os.path.join(location, name) if name else location)
        except OSError as error:
            found.append(error.errno)
            continue
        identity = (info.st_ino, info.st_mtime_ns, info.st_ctime_ns, info.st_size)
        found.append((info.st_dev, info.st_ino) if stat.S_ISDIR(info.st_mode) else identity)
    return found


def manifest_identity(location: str) -> object:
    """Return what every commit changes: the manifest's file, and the checksum of its contents; None without one."""
    path = os.path.join(location, documents.NAME)
    try:
        info = os.stat(path)
        with open(path, "rb") as file:
            data = file.read(MAX_MANIFEST)
    except FileNotFoundError:
        return None
    return (info.st_dev, info.st_ino, info.st_mtime_ns, crc32c(data))
