"""Safe access to local files: no symlink is followed, no device is opened, nothing is published in part.

Every change of a disk goes through the functions of this module, which call `os.x` by
attribute: the fault tests fail or kill any single system call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NoReturn

from tdstore.errors import (
    CorruptStoreError,
    ReadOnlyError,
    StoreError,
    StoreExistsError,
    StoreIOError,
    StoreNotFoundError,
    TDStoreError,
)
from tdstore.storekit import refusals

# A FIFO would block without O_NONBLOCK; O_NOFOLLOW refuses a symlink as the last component.
SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
SAFE_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
TEMP_PREFIX = ".tdstore-new-"
_TEMP = re.compile(r"\.tdstore-new-[0-9a-f]{16}")

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_NOT_OURS = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.ENAMETOOLONG)


class NotRegularError(OSError):
    """A symlink, FIFO, device or folder where a plain file belongs."""


class io_errors(refusals.ErrorTranslation[OSError]):  # noqa: N801 - reads as a statement: `with io_errors(url):`
    """Turn every `OSError` into the corresponding `StoreError`, with the location and the file.

    Args:
        url, doing, writing: as of `raise_io`.

    Example:
        >>> with io_errors("runs/1", "opening"):  # doctest: +ELLIPSIS
        ...     os.open("/no/such/file", os.O_RDONLY)
        Traceback (most recent call last):
        ...
        tdstore.errors.StoreNotFoundError: runs/1: opening: No such file or directory (/no/such/file)
    """

    __slots__ = ("writing",)
    caught = (OSError,)

    def __init__(self, url: str, doing: str = "", *, writing: bool = True) -> None:
        self.url, self.doing, self.writing = url, doing, writing  # of every read: without a second call

    def translate(self, error: OSError) -> NoReturn:
        """Raise the `StoreError` for an error of the system."""
        raise_io(error, self.url, self.doing, writing=self.writing)


def raise_io(error: OSError, url: str, doing: str = "", *, writing: bool = True) -> NoReturn:
    """Raise the `StoreError` for an `OSError`; this function alone decides which. Errors of tdstore pass unchanged.

    Args:
        error: the error of the system.
        url: the location, for messages.
        doing: the operation, for messages, such as "publishing".
        writing: whether a refused access is a `ReadOnlyError`; otherwise it is a `StoreIOError`.

    Raises:
        StoreNotFoundError: no such file.
        StoreExistsError: the file exists already.
        CorruptStoreError: a link, pipe, device or folder in the place of a file.
        ReadOnlyError: the access is refused, and `writing`.
        StoreIOError: any other error; `errno` is that of the system.
    """
    if isinstance(error, TDStoreError):
        raise error
    where = f" ({error.filename!s})" if error.filename is not None and str(error.filename) != url else ""
    text = f"{url}: {doing + ': ' if doing else ''}{error.strerror or error}{where}"
    if isinstance(error, FileNotFoundError):
        raise StoreNotFoundError(text, url=url) from error
    if isinstance(error, FileExistsError):
        raise StoreExistsError(text, url=url) from error
    if isinstance(error, NotRegularError) or error.errno in (errno.ELOOP, errno.ENXIO):
        raise CorruptStoreError(
            f"{text}: not a plain file", url=url, hint="links, pipes and devices inside a store are never followed"
        ) from error
    if writing and error.errno in _READ_ONLY:
        raise ReadOnlyError(text, url=url, hint="open it with mode='r', or make the folder writable") from error
    raise StoreIOError(text, url=url, hint=_HINTS.get(error.errno or 0), errno=error.errno) from error


_HINTS = {
    errno.ENOSPC: "free some space and try again; what was saved before is intact",
    errno.ENOMEM: "raise the limit of its memory (ulimit -v), or let go of TensorDicts that it has open",
}


# -- opening, one component at a time -------------------------------------------------------
class Tree:
    """A cache of folder descriptors that opens files below one directory without following a link.

    Args:
        root: descriptor of the directory.
        keep: folders that stay open beside those of the last file: thousands of folders need few descriptors.
    """

    def __init__(self, root: int, keep: int = 4) -> None:
        self.root, self.keep = root, keep
        self._fds: OrderedDict[tuple[str, ...], int] = OrderedDict()

    def folder(self, parts: Sequence[str], *, create: bool = False) -> int:
        """Return a descriptor of a folder, valid until the next call but one.

        Args:
            parts: components of the folder's path below the root.
            create: make folders that are missing.

        Raises:
            OSError: no such folder, or a link in the path.
        """
        path, fds = tuple(parts), self._fds
        if path in fds:
            fds.move_to_end(path)
            return fds[path]
        while len(fds) > self.keep:
            os.close(fds.popitem(last=False)[1])
        known, parent = max(len(path) - 1, 0), self.root
        while known and path[:known] not in fds:
            known -= 1
        if known:
            parent = fds[path[:known]]
            fds.move_to_end(path[:known])  # its other folders are likely to be next
        for depth in range(known, len(path)):
            try:
                found = os.open(path[depth], SAFE_DIR, dir_fd=parent)
            except FileNotFoundError:
                if not create:
                    raise
                with contextlib.suppress(FileExistsError):  # opening it, without following links, finds its type
                    os.mkdir(path[depth], dir_fd=parent)
                found = os.open(path[depth], SAFE_DIR, dir_fd=parent)
            parent = fds[path[: depth + 1]] = found
        return parent

    def open(self, parts: Sequence[str], flags: int = os.O_RDONLY, *, create: bool = False) -> int:
        """Open a plain file; the caller closes the descriptor.

        Args:
            parts: components of the file's path below the root.
            flags: of `os.open`.
            create: make folders that are missing.

        Raises:
            NotRegularError: not a plain file. OSError: no such file, or a link in the path.
        """
        parent = self.folder(parts[:-1], create=create) if len(parts) > 1 else self.root
        return open_plain(parts[-1], parent, flags)

    def close(self, *exc: object) -> None:
        """Close the open folders."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def descriptors(self) -> Sequence[int]:
        """Return the descriptors of the open folders, for an owner whose finalizer closes them."""
        return tuple(self._fds.values())

    def __enter__(self) -> Tree:
        return self

    __exit__ = close


def open_plain(name: str, parent: int, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of a folder; the caller closes the descriptor.

    Args:
        name, parent: the name in a folder, and the folder's descriptor.
        flags: of `os.open`.

    Raises:
        NotRegularError: a link, pipe, device or folder. OSError: no such file.
    """
    fd = os.open(name, flags | SAFE, 0o666, dir_fd=parent)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegularError(errno.ELOOP, "not a plain file", name)
    return fd


def still_named(info: os.stat_result, name: str, parent: int) -> bool:
    """Check whether an open file has its name still; some network file systems count no links.

    Args:
        info: of the open file.
        name, parent: the name in a folder, and the folder's descriptor.
    """
    if info.st_nlink:
        return True
    try:
        return os.path.samestat(info, os.stat(name, dir_fd=parent, follow_symlinks=False))
    except FileNotFoundError:
        return False


def is_foreign(error: OSError) -> bool:
    """Check whether opening failed because the entry is not a file or folder of a store."""
    return isinstance(error, NotRegularError) or error.errno in _NOT_OURS


def read_small(name: str, parent: int, limit: int) -> bytes:
    """Read a plain file of at most `limit` bytes.

    Args:
        name, parent: the name in a folder, and the folder's descriptor.
        limit: bytes that the file may have.

    Raises:
        CorruptStoreError: a larger file.
    """
    fd = open_plain(name, parent)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise CorruptStoreError(f"{name} has {size} bytes, more than the {limit} that a reader accepts")
        parts, total = [], 0
        # More than what is left is asked for: if exactly that comes, the file has ended.
        while total != size and (part := os.read(fd, max(size - total, 4096) + 1)):
            parts.append(part)
            total += len(part)
            if total > limit:
                raise CorruptStoreError(f"{name} grows beyond {limit} bytes while it is read")
        return b"".join(parts)
    finally:
        os.close(fd)


# -- writing ---------------------------------------------------------------------------------
def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of a contiguous view, of any shape and format, at an offset, as `os.pwrite` does for a part of it."""
    done, flat = 0, data
    while done < data.nbytes:
        if done and not flat.itemsize == flat.ndim == 1:
            flat = memoryview(data.tobytes())
        done += os.pwrite(fd, flat[done:] if done else data, offset + done)


def write_parts(fd: int, parts: Sequence[memoryview], offset: int) -> None:
    """Write all parts one after another, as `os.pwritev` does, or raise; at most 1,024 parts."""
    done = os.pwritev(fd, parts, offset)
    if done < sum(part.nbytes for part in parts):  # a signal came, or the disk is full: writing the rest decides
        write_at(fd, memoryview(b"".join(parts))[done:], offset + done)


def append(fd: int, data: bytes) -> None:
    """Append one record to a file opened with O_APPEND, as `os.write` does, by one call, or raise an `OSError`."""
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def truncate(fd: int, size: int) -> None:
    """Set the length of a file, as `os.ftruncate` does; new bytes are a hole that reads as zeros."""
    os.ftruncate(fd, size)


def allocate(fd: int, offset: int, size: int) -> None:
    """Reserve blocks, as `os.posix_fallocate` does, so that a write through a mapping cannot meet a full disk."""
    os.posix_fallocate(fd, offset, size)


def allocate_early(fd: int, offset: int, size: int) -> None:
    """Have blocks reserved for what is written next, which ext4 does faster at once; a hint: writes report errors.

    Args:
        fd, offset, size: as of `allocate`.
    """
    if _fallocate is not None:
        _fallocate(fd, 0, ctypes.c_int64(offset), ctypes.c_int64(size))


def create_file(name: str, parent: int, data: bytes | bytearray | memoryview, *, sync: bool = False) -> None:
    """Write a new small file.

    Args:
        name, parent: the name in a folder, and the folder's descriptor.
        data: the contents.
        sync: wait until they are on the storage.

    Raises:
        FileExistsError: there is a file of that name.
        OSError: the storage failed; the file was removed.
    """
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE, 0o666, dir_fd=parent)
    try:
        write_at(fd, memoryview(data), 0)
        if sync:
            os.fsync(fd)
    except BaseException:
        unlink_if_there(name, parent)  # so that it can be written again
        raise
    finally:
        os.close(fd)


def replace_file(name: str, parent: int, data: bytes | bytearray | memoryview, *, sync: bool = False) -> None:
    """Write a small file atomically: a reader sees the complete old file or the complete new one.

    Args:
        name, parent: the name in a folder, and the folder's descriptor.
        data: the contents.
        sync: wait until they are on the storage, before the rename.

    Example:
        >>> folder = open_dir(tmp_path)
        >>> replace_file("a.json", folder, b"{}")
        >>> read_small("a.json", folder, 100)
        b'{}'
        >>> os.close(folder)
    """
    temp, swapped = temp_name(), False
    try:
        create_file(temp, parent, data, sync=sync)
        if not sync:  # ext4 writes out what was not synced before a rename puts it over a file, not so by an exchange
            with contextlib.suppress(FileNotFoundError):
                old = os.stat(name, dir_fd=parent, follow_symlinks=False)
                swapped = stat.S_ISREG(old.st_mode) and _rename2(parent, temp, name, _RENAME_EXCHANGE) == 0
        if not swapped:
            os.rename(temp, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        unlink_if_there(temp, parent)
        raise
    if swapped:
        unlink_if_there(temp, parent)  # the old file


def create_empty(name: str, parent: int) -> int:
    """Create a file, as `os.open` does with O_EXCL, and open it for reading and writing."""
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE, 0o666, dir_fd=parent)


def temp_name() -> str:
    """Return a fresh name for a file that is not part of the store yet."""
    return TEMP_PREFIX + secrets.token_hex(8)


def is_temp(name: str) -> bool:
    """Check whether `temp_name` made this name."""
    return _TEMP.fullmatch(name) is not None


def link(old: str, old_parent: int, new: str, new_parent: int) -> None:
    """Give a file in a folder a second name, as `os.link` does; links are not followed."""
    os.link(old, new, src_dir_fd=old_parent, dst_dir_fd=new_parent, follow_symlinks=False)


def rename(old: str, old_parent: int, new: str, new_parent: int) -> None:
    """Rename an entry of a folder, as `os.rename` does, replacing a file or an empty folder."""
    os.rename(old, new, src_dir_fd=old_parent, dst_dir_fd=new_parent)


def unlink(name: str, parent: int) -> None:
    """Remove a file of a folder, as `os.unlink` does."""
    os.unlink(name, dir_fd=parent)


def unlink_if_there(name: str, parent: int) -> None:
    """Remove a file that may be missing, as `os.unlink` does; after a failure the next save removes it."""
    try:
        os.unlink(name, dir_fd=parent)
    except OSError:
        return


def make_dir(name: str, parent: int, mode: int = 0o777) -> None:
    """Create a folder in a folder, as `os.mkdir` does."""
    os.mkdir(name, mode, dir_fd=parent)


def open_dir(path: str) -> int:
    """Open a directory by path (the one step in which links of the user are followed)."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of a `with` block."""
    try:
        yield fd
    finally:
        os.close(fd)


def is_same_open(fd: int, other: int) -> bool:
    """Check whether two descriptors refer to one file or folder. One that another thread has closed refers to none.

    Args:
        fd, other: the descriptors; -1 for none.
    """
    if fd < 0 or other < 0:
        return False
    try:
        return os.path.samestat(os.fstat(fd), os.fstat(other))
    except OSError:
        return False


def is_same_entry(fd: int, name: str, parent: int) -> bool:
    """Check whether an entry of a folder is still the file that `fd` was opened from.

    Args:
        fd: a descriptor.
        name, parent: the name in a folder, and the folder's descriptor.
    """
    try:
        there = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def fsync(fd: int) -> None:
    """Wait until a file or folder is on the storage."""
    os.fsync(fd)


def start_writeback(fd: int) -> None:
    """Have the kernel begin writing a file, so that the fsyncs of many files overlap later."""
    if _sync_file_range is not None:
        _sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), 2)  # only a hint: fsync reports the errors


def fsync_tree(root: int) -> None:
    """Call fsync for every folder below `root`, then for `root`."""
    for name in subfolders(root):
        with closing(os.open(name, SAFE_DIR, dir_fd=root)) as fd:
            fsync_tree(fd)
    os.fsync(root)


def subfolders(fd: int) -> list[str]:
    """Return the names of the folders in a folder."""
    with os.scandir(fd) as entries:
        return [e.name for e in entries if e.is_dir(follow_symlinks=False)]


def walk(fd: int, parts: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield every entry below a folder, as (components, is a folder), without following links.

    Args:
        fd, parts: descriptor of the folder, and the components with which each result begins.
    """
    open_folders = [(fd, parts, _entries(fd))]
    try:
        while open_folders:
            folder, above, rest = open_folders[-1]
            for name, is_dir in rest:
                path = (*above, name)
                yield path, is_dir
                if is_dir:
                    sub = os.open(name, SAFE_DIR, dir_fd=folder)
                    open_folders.append((sub, path, iter(())))  # closed below, whatever happens
                    open_folders[-1] = sub, path, _entries(sub)
                    break
            else:
                open_folders.pop()
                if folder != fd:
                    os.close(folder)
    finally:
        for folder, _, _ in open_folders[1:]:
            os.close(folder)


def _entries(fd: int) -> Iterator[tuple[str, bool]]:
    """Return the names in a folder, and whether each is a folder."""
    with os.scandir(fd) as entries:
        return iter([(e.name, e.is_dir(follow_symlinks=False)) for e in entries])


# -- publishing and locks --------------------------------------------------------------------
_libc = ctypes.CDLL(None, use_errno=True)
_renameat2 = getattr(_libc, "renameat2", None)
_sync_file_range = getattr(_libc, "sync_file_range", None)
_fallocate = getattr(_libc, "fallocate", None)
_RENAME_EXCHANGE = 2


def exchange(a: str, b: str, parent: int, aside: str = "") -> None:
    """Swap two entries of one folder in a single step.

    Where the system cannot (`renameat2` is missing), three renames do it: a crash between them leaves `b` under the
    name `aside`, and the next writer restores it.

    Args:
        a, b, parent: the names, and the descriptor of their folder.
        aside: a free name in that folder; default: `a` + "-old".

    Raises:
        OSError: an entry is missing, or the access is refused.
    """
    if _rename2(parent, a, b, _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if _renameat2 is not None and code not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(code, os.strerror(code), b)
    for old, new in ((b, aside := aside or a + "-old"), (a, b), (aside, a)):
        os.rename(old, new, src_dir_fd=parent, dst_dir_fd=parent)


def _rename2(parent: int, a: str, b: str, flags: int) -> int:
    args = parent, os.fsencode(a), parent, os.fsencode(b), ctypes.c_uint(flags)
    return -1 if _renameat2 is None else int(_renameat2(*args))


def make_parents(folder: str) -> list[str]:
    """Create a folder and those above it; return those that did not exist before, the outermost first."""
    missing, made = [], []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for path in reversed(missing):
        try:
            os.mkdir(path)
        except FileExistsError:
            continue  # another process made it; if it is a file, opening it fails
        made.append(path)
    return made


def remove_empty(folders: list[str]) -> None:
    """Remove the folders that `make_parents` created and that are still empty, and clear the list."""
    with contextlib.suppress(OSError):  # something is in one, perhaps of another process
        for folder in reversed(folders):
            os.rmdir(folder)
    folders.clear()


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Take a flock without waiting, as `fcntl.flock` does; return whether that succeeded.

    On failure a lock that `fd` held before may be lost.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(fd: int, *, exclusive: bool, timeout: float, url: str, what: str = "the folder") -> None:
    """Take a flock, waiting up to `timeout` seconds.

    Args:
        fd: descriptor of a file or folder.
        exclusive: True for an exclusive lock, False for a shared one.
        timeout: seconds to wait.
        url: the location, for messages.
        what: the locked thing, for messages.

    Raises:
        StoreBusyError: another process still holds it.
    """
    deadline = time.monotonic() + timeout
    pause = 0.001
    while not try_lock(fd, exclusive=exclusive):
        if time.monotonic() >= deadline:
            raise refusals.busy(f"{what} of {url}", "another process", timeout, how="locked by")
        time.sleep(pause)
        pause = min(pause * 2, 0.05)


def unlock(fd: int) -> None:
    """Release a flock."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def with_url(error: StoreError, url: str) -> StoreError:
    """Add the location to an error that was raised without one.

    Args:
        error: the error, which is changed.
        url: the location, for messages.
    """
    if error.url is None:
        error.url = url
        error.message = f"{url}: {error.message}"
    return error
