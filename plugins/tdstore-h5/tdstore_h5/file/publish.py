"""Publication of new files: written beside the old one under a temporary name, then renamed (or linked) once."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tdstore.errors import StoreNotFoundError
from tdstore.storekit import files, refusals
from tdstore.storekit.publish import leftovers
from tdstore_h5.file.handle import Handle, open_plain, own_writers
from tdstore_h5.file.journal import journal_path, unlink_journal

_TEMP = re.compile(r"\..*\.tdstore-[0-9a-f]{12}")


@contextmanager
def folder_lock(path: str, url: str, timeout: float, locking: bool | None) -> Iterator[int]:
    """Lock the folder of a file: publication, clean-up and new temporary files happen one at a time."""
    parent = os.path.dirname(path)
    with files.io_errors(url, "making its folder"):
        os.makedirs(parent, exist_ok=True)
    try:
        fd = files.open_dir(parent)
    except OSError as error:
        files.raise_io(error, url, "opening its folder")
    try:
        if locking is not False:
            files.lock(fd, exclusive=True, timeout=timeout, url=url)
        yield fd
    finally:
        os.close(fd)


def new_file(path: str, url: str, *, timeout: float, locking: bool | None) -> Handle:
    """Create an empty, locked temporary file beside `path`, and remove those of dead processes."""
    folder, name = os.path.split(path)
    prefix = f".{_cut(name)}.tdstore-"
    with files.io_errors(url, "making its folder"):
        made = files.make_parents(folder)
    with folder_lock(path, url, timeout, locking) as parent:
        sweep(folder, parent, prefix if locking is False else "")
        temp = os.path.join(folder, prefix + secrets.token_hex(6))
        try:
            fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            files.remove_empty(made)
            files.raise_io(error, url, "making a temporary file")
        handle = Handle(temp, fd, url, write=True, locking=locking)
        handle.temporary, handle.made = True, made
        # Even with locking=False: this lock shows other processes that the writer is alive.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        handle.alone = True
    return handle


def publish(
    handle: Handle, path: str, *, exclusive: bool, timeout: float, durable: bool, then: Callable[[], None]
) -> None:
    """Put the flushed temporary file in place of `path`, and call `then` before another writer can replace it.

    Args:
        handle: the temporary file.
        path: the target.
        exclusive: refuse an existing file.
        timeout: seconds to wait.
        durable: wait until the rename is on the storage.
        then: called under the folder's lock.

    Raises:
        StoreExistsError: `exclusive`, and the target exists by now.
        StoreBusyError: another process still writes the target in place after `timeout` seconds.
    """
    with folder_lock(path, handle.url, timeout, handle.locking) as folder:
        old = None if exclusive else _old_file(path, handle)
        try:
            if old is not None:
                _wait_for_writers(old, timeout)
                _like(handle.fd, old.fd)
            if durable:
                handle.sync()
            with files.io_errors(handle.url, "publishing"):
                if exclusive:
                    _link(handle.path, path, handle.url)
                else:
                    os.replace(handle.path, path)
            handle.temporary = False
            handle.made.clear()
            handle.path = path
            unlink_journal(journal_path(path), handle.url)  # of a dead writer of the old file; it fits no other
            if old is not None:
                for other in own_writers(os.fstat(old.fd)):
                    other.replaced = True
            if durable:
                with files.io_errors(handle.url, "syncing its folder"):
                    files.fsync(folder)
            then()
            if durable:  # HDF5 writes its superblock once more when it closes the file
                handle.sync()
        finally:
            if old is not None:
                old.release()


def _old_file(path: str, handle: Handle) -> Handle | None:
    try:
        return open_plain(path, handle.url, write=False, locking=handle.locking)
    except StoreNotFoundError:
        return None


def _wait_for_writers(old: Handle, timeout: float) -> None:
    # Readers share the lock and keep the old file. A writer of this very process may be the source
    # of what is saved: it is cut off instead of waited for.
    if not own_writers(os.fstat(old.fd)):
        old.lock(alone=False, timeout=timeout, why="to replace it")


def _like(fd: int, old: int) -> None:
    mode = os.fstat(old).st_mode & 0o777
    if os.fstat(fd).st_mode & 0o777 != mode:
        os.fchmod(fd, mode)


def _link(temp: str, path: str, url: str) -> None:
    try:
        os.link(temp, path)
    except FileExistsError:
        raise refusals.place_exists(url) from None
    os.unlink(temp)


def sweep(folder: str, parent: int, prefix: str) -> None:
    """Remove temporary files whose writer has ended.

    Args:
        folder, parent: the folder, and a descriptor of it. The caller holds its lock, or names its own files only.
        prefix: what their names begin with.
    """
    for name in leftovers(parent, _TEMP) or ():
        if not name.startswith(prefix):
            continue
        temp = os.path.join(folder, name)
        try:
            fd = os.open(temp, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # removed meanwhile, or not a file of ours
        try:
            if files.try_lock(fd, exclusive=True):
                os.unlink(temp)
        finally:
            os.close(fd)


def _cut(name: str) -> str:
    return os.fsencode(name)[:200].decode("utf-8", "replace").replace("\ufffd", "_")
