"""Files of named stores: creation, publication, lookup, removal, and clean-up after dead owners.

A store is `tds_<boot>_<pid>_<start>_<n>` until its first commit, then `tds.<uid>.<name>`. Its owner, the
process that made it, holds a flock on the file until it ends; no other sign is as reliable.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote_from_bytes, unquote

import msgspec

from tdstore.builtin.shared.arena import read_what
from tdstore.builtin.shared.process import Process, alive, boot_id, this_process
from tdstore.errors import (
    CorruptStoreError,
    OptionError,
    ReadOnlyError,
    StoreBusyError,
    StoreNotFoundError,
)
from tdstore.lifetime import Ending
from tdstore.storekit import refusals
from tdstore.storekit.files import SAFE, io_errors

DEFAULT = "/dev/shm"
VARIABLE = "TDSTORE_SHM_DIR"
_PRIVATE = re.compile(r"tds_([0-9a-f]{8})_(\d+)_(\d+)_\d+")
_counter = itertools.count()

Inode = tuple[int, int]


class _Owned(msgspec.Struct):
    """A file that this process must remove, and the descriptor that holds its flock."""

    path: str
    lock: int
    pid: int


_owned: dict[Inode, _Owned] = {}
_removes_at_exit = 0


def directory_of(option: str | None) -> str:
    """Return the folder of named stores: the option, else the environment variable, else /dev/shm."""
    found = option or os.environ.get(VARIABLE) or DEFAULT
    if not os.path.isdir(found):
        raise OptionError(f"there is no folder {found!r} for shared stores", hint=f"pass directory=, or set {VARIABLE}")
    return found


def public_path(directory: str, name: str, url: str) -> str:
    """Return the file of a published store; names are percent-encoded, so none leaves the folder."""
    try:
        encoded = quote_from_bytes(name.encode(), safe="")
    except UnicodeEncodeError:
        raise OptionError(f"the name {name!r} has a lone surrogate", url=url, hint="use another name") from None
    if not 0 < len(encoded) <= 200:
        raise OptionError(
            f"the name {name!r} takes {len(encoded)} characters as a file name; 1 to 200 are possible",
            url=url,
            hint="letters, digits, '.', '_' and '-' take one each",
        )
    return os.path.join(directory, f"tds.{os.geteuid()}.{encoded}")


# -- making and publishing ------------------------------------------------------------------
def make_private(directory: str, url: str, timeout: float) -> tuple[str, int]:
    """Make a file under a private name, owned by this process; the caller closes the descriptor."""
    me = this_process()
    while True:
        name = f"tds_{boot_id().hex()[:8]}_{me.pid}_{me.start}_{next(_counter)}"
        path = os.path.join(directory, name)
        with io_errors(url, "making a shared store"):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE, 0o600)
            except FileExistsError:
                continue
            try:
                # A description of its own: children inherit that of the mapping, and would hold the lock.
                lock = os.open(path, os.O_RDONLY | SAFE)
            except BaseException:
                os.close(fd)
                os.unlink(path)
                raise
        _flock(lock, timeout, url)
        _own(_inode(fd), _Owned(path, lock, me.pid))
        return path, fd


def publish(inode: Inode, private: str, path: str, *, replace: bool, url: str, timeout: float) -> None:
    """Rename a private file to its public name, in the place of an earlier store.

    Args:
        inode: the inode of the private file.
        private: its name.
        path: its public name.
        replace: replace a store whose owner is running.
        url: the location, for messages.
        timeout: seconds to wait for the lock of the folder.

    Raises:
        StoreExistsError: the name is in use, its owner is running, and `replace` is False.
        StoreNotFoundError: the private file was removed.
    """
    with _folder_locked(os.path.dirname(path), url, timeout):
        there = _stat(path)
        if there is not None and not replace and not _is_left_over(path):
            raise refusals.place_exists(url)
        with io_errors(url, "publishing"):
            os.rename(private, path)
        if there is not None:
            _disown(there)  # its file was removed: only mappings are left
        if inode in _owned:
            _owned[inode].path = path


def open_public(path: str, *, write: bool, url: str) -> int:
    """Open a published store whose owner is running.

    Raises:
        StoreNotFoundError: none of that name, or its owner ended.
        CorruptStoreError: no file of ours.
    """
    try:
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | SAFE)
    except FileNotFoundError:
        raise _not_found(url) from None
    except PermissionError as error:
        raise ReadOnlyError(f"{path} belongs to another user", url=url, hint="use another name") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise CorruptStoreError(f"{path} is not a plain file", url=url) from error
        with io_errors(url, "opening"):
            raise
    try:
        _check_file(fd, path, url)
        if _lock_is_free(fd):
            raise _not_found(url)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _not_found(url: str) -> StoreNotFoundError:
    return StoreNotFoundError(
        f"no shared store {url} is open in any process", url=url, hint="it lives as long as the process that made it"
    )


def is_there(path: str) -> bool:
    """Check whether a published store exists and its owner is running."""
    return _stat(path) is not None and not _is_left_over(path)


def leads_to(path: str, inode: Inode) -> bool:
    """Check whether a name is that of a file, and not of one that took its place."""
    return _stat(path) == inode


def published(directory: str) -> list[str]:
    """Return the names of the published stores of this user whose owner is running."""
    mine = f"tds.{os.geteuid()}."
    found = [name for name in os.listdir(directory) if name.startswith(mine)]
    return [unquote(name[len(mine) :]) for name in found if is_there(os.path.join(directory, name))]


def inode_of(path: str, url: str) -> Inode | None:
    """Return the inode of a published store, whose owner may have ended; None where nothing is.

    Raises:
        CorruptStoreError: a file of another program.
    """
    with io_errors(url, "opening", writing=False):
        try:
            fd = os.open(path, os.O_RDONLY | SAFE)
        except FileNotFoundError:
            return None
    try:
        _check_file(fd, path, url)
        read_what(os.pread(fd, 4096, 0), path)
        return _inode(fd)
    finally:
        os.close(fd)


# -- removing --------------------------------------------------------------------------------
def remove_file(inode: Inode, path: str, *, timeout: float, url: str) -> bool:
    """Unlink `path` if it still is that file; returns whether it was."""
    with _folder_locked(os.path.dirname(path), url, timeout):
        if _stat(path) != inode:
            return False
        with io_errors(url, "removing"):
            os.unlink(path)
    _disown(inode)
    return True


def discard(inode: Inode, path: str, pid: int) -> None:
    """Remove a private file that will not be published. A forked child does nothing: the file is its parent's."""
    if pid == os.getpid() and inode in _owned and _owned[inode].path == path:
        _disown(inode)
        if _stat(path) == inode:
            os.unlink(path)


def sweep(directory: str, timeout: float) -> list[str]:
    """Remove the files of owners that ended without doing so; returns their names."""
    gone = []
    mine = f"tds.{os.geteuid()}."
    with _folder_locked(directory, directory, timeout):
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            if (name.startswith(mine) or _PRIVATE.fullmatch(name)) and _is_left_over(path):
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    continue
                gone.append(name)
    return gone


def _is_left_over(path: str) -> bool:
    """Check whether a file is certainly a store of ours whose owner ended."""
    try:
        fd = os.open(path, os.O_RDONLY | SAFE)
    except OSError:
        return False  # removed meanwhile, or not a file of ours
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or not _lock_is_free(fd):
            return False
        # Free, yet its owner is running: it is about to take the lock.
        if match := _PRIVATE.fullmatch(os.path.basename(path)):
            boot, pid, start = match.groups()
            return boot != boot_id().hex()[:8] or not alive(Process(int(pid), int(start), this_process().namespace))
        try:
            read_what(os.pread(fd, 4096, 0), path)
        except CorruptStoreError:
            return False  # a file of another program under such a name
        return True
    finally:
        os.close(fd)


# -- locks -----------------------------------------------------------------------------------
@contextmanager
def _folder_locked(directory: str, url: str, timeout: float) -> Iterator[None]:
    """Lock the folder against other processes of ours between a look-up of a name and its change."""
    with io_errors(url, "opening its folder"):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _flock(fd, timeout, url)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _flock(fd: int, timeout: float, url: str) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise refusals.busy(
                    f"the folder of {url}", "another process", timeout, how="being changed by"
                ) from None
        time.sleep(0.001)


def _lock_is_free(fd: int) -> bool:
    # Shared, so that two processes that check at once do not take each other for the owner.
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _check_file(fd: int, path: str, url: str) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise CorruptStoreError(f"{path} is not a plain file", url=url)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise CorruptStoreError(
            f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; only files that "
            f"only user {os.geteuid()} can change are opened",
            url=url,
        )


# -- files that this process owns --------------------------------------------------------------------
def _own(inode: Inode, owned: _Owned) -> None:
    global _removes_at_exit
    if _removes_at_exit != owned.pid:
        Ending(None, _remove_owned, os.path.dirname(owned.path))
        _removes_at_exit = owned.pid
    _owned[inode] = owned


def _disown(inode: Inode) -> None:
    owned = _owned.pop(inode, None)
    if owned is not None:
        os.close(owned.lock)


def _remove_owned() -> None:
    for inode, owned in list(_owned.items()):
        if owned.pid == os.getpid():
            try:
                remove_file(inode, owned.path, timeout=1.0, url=owned.path)
            except (StoreBusyError, OSError):
                continue  # the process ends: the next sweep finds it


def _forget_in_child() -> None:
    # The parent's: a copy of the descriptor would keep its lock when it has ended.
    for owned in _owned.values():
        os.close(owned.lock)
    _owned.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _stat(path: str) -> Inode | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _inode(fd: int) -> Inode:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
