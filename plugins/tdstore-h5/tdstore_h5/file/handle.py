"""One opened file: its descriptor, its lock, its h5py handle, and what becomes of these in a forked child.

The locks are flocks on the file itself, so they exclude h5py in other processes as its own locks would:
a writer in place holds it alone, readers share it, and both end with their process.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import resource
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h5py
from h5py import h5f, h5fd, h5p

from tdstore.errors import OptionError, StoreBusyError, StoreError, StoreIOError, StoreNotFoundError
from tdstore.lifetime import LiveObjects, wait_before_locks_of_fork
from tdstore.storekit import refusals
from tdstore.storekit.files import NotRegularError, io_errors, raise_io, remove_empty, truncate
from tdstore.threads import without_interrupts
from tdstore_h5.faults import h5_errors
from tdstore_h5.file.journal import Journal
from tdstore_h5.rows.overlay import Overlay

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Replaced(StoreBusyError):
    """The path leads to another file than the one that was locked."""


class Handle:
    """The descriptors, the lock and the h5py handle of one file."""

    def __init__(self, path: str, fd: int, url: str, *, write: bool, locking: bool | None) -> None:
        self.path = path
        self.overlay: Overlay | None = None
        """What HDF5 writes in place; None while it only reads, and for a new file."""
        self.url = url
        self.fd = fd
        self.write = write
        self.locking = locking
        self.alone = False
        """Whether this handle holds the exclusive lock."""
        self.locked = False
        """Whether a lock is held at all: a file system may have none."""
        self.pid = os.getpid()
        self.child = False
        """Whether this is a forked copy: it may read, the parent alone writes."""
        self.unflushed = False
        self.temporary = False
        """Whether the file is not published yet, and vanishes with this handle."""
        self.made: list[str] = []
        """Folders that were made for it, and vanish with it."""
        self.diverted = False
        self.failed = False
        """Whether the storage refused a write of HDF5."""
        self.replaced = False
        """Whether this process published another file over it: there is nothing left to commit."""
        self._file: h5py.File | None = None
        self.guard = threading.RLock()
        """Held during use of the h5py handle, which is reopened before the first change, and after some commits."""
        self._close = os.close  # for `__del__`, which may run after this module was unloaded
        _LIVE.add(self)

    @property
    def committed(self) -> int:
        """Return where the last commit ends: bytes below must not change before the next one."""
        return 0 if self.overlay is None else self.overlay.committed

    @property
    def unwanted(self) -> bool:
        """Check whether the remaining writes of HDF5 must not reach the storage."""
        return self.temporary or self.failed or self.replaced

    @property
    def file(self) -> h5py.File:
        """Return the h5py handle."""
        if self._file is None:
            raise Replaced(f"{self.url} was replaced by another save", url=self.url, hint="open it again")
        return self._file

    def open(self, path: str, mode: str, libver: str | tuple[str, str]) -> None:
        """Open with h5py, and check that it is the file whose lock is held."""
        access = _access(libver, self.url)
        if self.alone or self.locking is not None:
            # A writer's lock would exclude ourselves. A reader's goes with ours, and must be requested
            # as other users of h5py in this process do, or HDF5 refuses to open one file twice.
            access.set_file_locking(False, True)
        if self._opened(os.fsencode(path), mode, access):
            return
        raise Replaced(f"{self.url} was replaced by another save", url=self.url, hint="open it again")

    def _opened(self, name: bytes, mode: str, access: Any) -> bool:
        """Open by a name; return False if the name leads to another file than that of this handle."""
        with h5_errors(self.url, "opening"):
            try:
                if mode == "w":
                    found = h5f.create(name, h5f.ACC_TRUNC, fapl=access)
                else:
                    found = h5f.open(name, h5f.ACC_RDONLY, fapl=access)
            except OSError:
                if self.is_at(os.fsdecode(name)):
                    raise
                return False
            mine, theirs = os.fstat(self.fd), os.fstat(found.get_vfd_handle())
            if (mine.st_dev, mine.st_ino) == (theirs.st_dev, theirs.st_ino):
                self._file = h5py.File(found)
                return True
            found.close()
            return False

    @without_interrupts
    def open_overlaid(self, journal: Journal, libver: str | tuple[str, str]) -> None:
        """Open again, for writing in place: the writes of HDF5 stay in memory until `commit`."""
        self.close_file()
        access = _access(libver, self.url)
        with h5_errors(self.url, "opening"):
            self.overlay = Overlay(self.fd, journal)
            access.set_fileobj_driver(h5fd.fileobj_driver, self.overlay)
            self._file = h5py.File(h5f.open(os.fsencode(self.path), h5f.ACC_RDWR, fapl=access))

    @contextmanager
    def writing(self, doing: str) -> Iterator[None]:
        """Map HDF5's errors while it writes. After a failure of the storage, HDF5 never writes to it again."""
        try:
            with h5_errors(self.url, doing):
                yield
            self._check_overlay(doing)
        except StoreError as error:
            failed = self.overlay is not None and self.overlay.failure is not None
            if isinstance(error, StoreIOError) or failed:
                self.divert()
            if failed:
                self._check_overlay(doing)
            raise

    def _check_overlay(self, doing: str) -> None:
        failure = None if self.overlay is None else self.overlay.failure
        if failure is not None:
            raise_io(failure, self.url, doing)

    def commit(self, *, sync: bool) -> None:
        """Write HDF5's changes to the file, by way of the journal, so that they are applied whole or not at all.

        Raises:
            StoreIOError: the storage failed; the last commit stands, or the next opener completes this one.
        """
        overlay = self.overlay
        assert overlay is not None
        with h5_errors(self.url, "committing"):
            if sync:
                os.fsync(self.fd)  # rows that were written past HDF5
            try:
                overlay.commit(sync=sync)
            except OSError as error:
                self.failed = self.failed or overlay.complete
                raise_io(error, self.url, "committing")

    def close_overlaid(self) -> None:
        """Close only HDF5's handle: its writes, also those while it closes, are held until `commit`."""
        file, self._file = self._file, None
        if file is not None:
            with self.writing("closing"):
                file.close()

    def divert_and_restart(self) -> None:
        """Close HDF5's handle of a new file, and empty the file."""
        self.divert()
        file, self._file = self._file, None
        if file is not None and not file.id.locked:
            with h5_errors(self.url, "closing"):
                file.close()
        self.failed = self.diverted = False
        with io_errors(self.url, "emptying a new file"):
            truncate(self.fd, 0)

    def abandon(self) -> None:
        """Close HDF5's handle, and drop its writes since the last commit.

        Raises:
            StoreIOError: a commit is in the journal, and could not be applied: the file must be opened again.
        """
        overlay = self.overlay
        if overlay is None or overlay.complete:
            self.check_storage()
            return
        overlay.abandon()
        self.close_file()
        self.failed = self.diverted = False
        with io_errors(self.url, "dropping what was not committed"):
            if os.fstat(self.fd).st_size > overlay.committed:
                truncate(self.fd, overlay.committed)

    def check_storage(self) -> None:
        """Refuse to continue after the storage failed."""
        if self.diverted or (self.failed and self.overlay is not None):
            raise StoreIOError(
                f"{self.url} cannot be used any more: the storage failed",
                url=self.url,
                hint="discard() takes it back to the last commit; or close it and open it again",
            )

    def need_room(self) -> None:
        """Refuse more writes while the storage has no space for those that are waiting for the commit.

        Raises:
            StoreIOError: an error of the storage. Nothing was changed, and nothing is lost.
        """
        if self.overlay is not None and self.overlay.refused is not None:
            with io_errors(self.url, "writing what waits for the commit"):
                self.overlay.try_again()

    def divert(self) -> None:
        """Direct HDF5's writes to memory, for a file whose remaining changes are to be dropped.

        HDF5 must not meet an error while it closes: after that it may crash the process.
        """
        self.failed = True
        if self.overlay is not None:
            if not self.overlay.complete:
                self.overlay.abandon()
            return
        if self._file is None or self.diverted:
            return
        self.diverted = True
        limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
        if limited or _memfd is None:
            sink = os.open(os.devnull, os.O_RDONLY)
            self._file.id.locked = True  # even memory may be exhausted: HDF5 never closes the file
        else:
            sink = _memfd("tdstore-h5", os.MFD_CLOEXEC)
        os.dup2(sink, self._file.id.get_vfd_handle(), inheritable=False)
        os.close(sink)

    def close_file(self) -> None:
        """Close HDF5's handle, but not the descriptor."""
        if self.overlay is not None:
            self.overlay.abandon()  # it was committed, or is not wanted
        file, self._file = self._file, None
        if file is not None:
            with h5_errors(self.url, "closing"):
                file.close()
        self.overlay = None

    def flush(self) -> None:
        """Write everything to the system's cache."""
        if self.unflushed and not self.child:
            with self.writing("flushing"):
                self.file.flush()
            self.unflushed = False

    def sync(self) -> None:
        """Wait until flushed data is on the storage."""
        try:
            os.fsync(self.fd)
        except OSError as error:
            raise_io(error, self.url, "syncing")

    def release(self) -> None:
        """Release everything; an error of the storage during HDF5's last writes is raised at the end."""
        if self.unwanted and self.pid == os.getpid() and not self.child:
            self.divert()
        file, self._file = self._file, None
        try:
            if file is not None:
                if self.overlay is not None:
                    if self.pid == os.getpid() and not self.child:
                        self.overlay.abandon()
                    file.close()
                elif self.pid != os.getpid() or self.child:
                    file.id.locked = True  # nothing of HDF5's is to be written by a child
                elif not (self.diverted and file.id.locked):
                    with h5_errors(self.url, "closing"):
                        file.close()
        finally:
            self.overlay = None
            _LIVE.discard(self)
            fd, self.fd = self.fd, -1
            if fd >= 0:
                if self.temporary and self.pid == os.getpid():
                    _unlink_same(self.path, fd)
                    remove_empty(self.made)
                if self.pid == os.getpid() and self.locking is not False and not self.child:
                    # Closing is not enough where a child, between fork and exec, still has a copy.
                    fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)

    def __del__(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:  # the store was dropped without close(), and had nothing to commit
            if self.overlay is not None:
                self.overlay.abandon()
            self._file = None
            self._close(fd)

    # -- locks --------------------------------------------------------------------------
    def lock(self, *, alone: bool, timeout: float, why: str) -> None:
        """Take the file's lock, waiting up to `timeout` seconds.

        Args:
            alone: take it exclusively.
            timeout: seconds.
            why: the purpose, for messages.

        Raises:
            StoreBusyError: another process still holds it; the message names it if the system knows.
        """
        if self.locking is False:
            self.alone = alone
            return
        deadline = time.monotonic() + timeout
        pause = 0.001
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        while True:
            try:
                fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    how = "open in" if alone else "open for writing in"
                    raise refusals.busy(self.url, holders(self.fd), timeout, why=why, how=how) from None
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            except OSError as error:
                if error.errno not in _NO_LOCKS or self.locking:
                    raise_io(error, self.url, "locking")
                self.alone = alone
                return
            else:
                self.alone, self.locked = alone, True
                return

    def holds(self, info: os.stat_result) -> bool:
        """Check whether this is an open handle of that file. Another thread may close it meanwhile."""
        if self.fd < 0:
            return False
        try:
            return os.path.samestat(os.fstat(self.fd), info)
        except OSError:
            return False

    def is_at(self, path: str) -> bool:
        """Check whether the path still names this file."""
        try:
            there = os.stat(path)
        except OSError:
            return False
        mine = os.fstat(self.fd)
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def _before_fork(self) -> None:
        if self.temporary and self._file is not None and not self.child:
            self.flush()

    def _in_child(self) -> None:
        """Give the child its own descriptors, for reading only.

        The parent's descriptors share their lock, and HDF5 would write through its own descriptor when the child exits.
        """
        self.child = True
        self.guard = threading.RLock()  # another thread may have held it
        fds = [self.fd] if self.fd >= 0 else []
        if self.overlay is not None:
            self.overlay.sealed = True
            atexit.register(self.release)  # HDF5 calls the overlay while it closes: the interpreter must be there
        elif self._file is not None:
            fds.append(self._file.id.get_vfd_handle())
            self._file.id.locked = True
        for fd in fds:
            own = os.open(f"/proc/self/fd/{fd}" if os.path.isdir("/proc/self/fd") else self.path, os.O_RDONLY)
            os.dup2(own, fd, inheritable=False)
            os.close(own)
        if not self.write and self.locking is not False and self.fd >= 0:
            # The parent holds the same lock at this moment, so this cannot have to wait.
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


_VERSIONS: dict[str, int] = {
    name[7:].lower().replace("v18", "v108"): getattr(h5f, name) for name in dir(h5f) if name.startswith("LIBVER_")
}
"""The versions of the HDF5 format, as users name them."""


def _access(libver: str | tuple[str, str], url: str) -> Any:
    bounds = (libver, "latest") if isinstance(libver, str) else tuple(libver)
    if len(bounds) != 2 or bounds[0] not in _VERSIONS or bounds[1] not in _VERSIONS:
        raise OptionError(f"{url}: libver must be two of {', '.join(_VERSIONS)}, not {libver!r}", url=url)
    # The close degree stays the default, h5py's own: HDF5 refuses a file that is open with another in this process.
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(_VERSIONS[bounds[0]], _VERSIONS[bounds[1]])
    # We read and write raw data past HDF5 wherever we can: it must keep none of it.
    access.set_sieve_buf_size(0)
    # Raw data at multiples of 64, so that a mapping of it is a tensor.
    access.set_alignment(128, 64)
    return access


def open_plain(path: str, url: str, *, write: bool, locking: bool | None) -> Handle:
    """Open an existing regular file, without h5py yet."""
    try:
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise StoreNotFoundError(f"{url}: there is no such file", url=url) from None
    except OSError as error:
        raise_io(error, url, "opening", writing=write)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise_io(NotRegularError(errno.ELOOP, "cannot be opened", path), url)
    return Handle(path, fd, url, write=write, locking=locking)


def own_writers(info: os.stat_result) -> list[Handle]:
    """Return the handles of this process that hold a file exclusively."""
    return [h for h in _LIVE if h.alone and not h.child and h.holds(info)]


def holders(fd: int) -> str:
    """Describe the processes that hold a file's locks, for messages."""
    info = os.fstat(fd)
    place = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    pids = []
    try:
        with open("/proc/locks", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                words = line.split()
                if place in words and "FLOCK" in words and "->" not in words:
                    pids.append(int(words[words.index(place) - 1]))
    except (OSError, ValueError):
        return "another process"
    others = [f"process {pid}" for pid in dict.fromkeys(pids) if pid > 0 and pid != os.getpid()]
    if os.getpid() in pids:
        others.append("this process")
    return " and ".join(others) or "another process"


def _unlink_same(path: str, fd: int) -> None:
    """Remove the temporary file of this handle, unless another file has its name by now."""
    try:
        there, mine = os.stat(path), os.fstat(fd)
        if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
            os.unlink(path)
    except FileNotFoundError:
        return  # another process removed it
    except OSError as error:
        raise StoreIOError(f"cannot remove the temporary file {path}: {error.strerror}", errno=error.errno) from error


_memfd = getattr(os, "memfd_create", None)
_LIVE: LiveObjects[Handle] = LiveObjects()


def _before_fork() -> None:
    for handle in _LIVE:
        handle._before_fork()


def _after_fork_in_child() -> None:
    for handle in _LIVE:
        handle._in_child()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
wait_before_locks_of_fork()  # h5py's is one of them
