"""Publication of a folder: it is built beside its target and swapped in by one rename; files of other programs stay."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from tdstore.errors import StoreError
from tdstore.storekit import files, refusals
from tdstore.storekit.session import own_sessions

_TEMP = re.compile(r"\..*\.tdstore-[0-9a-f]{16}(-old)?")
_ENTRIES_A_SAVE = 64
"""How many entries of a folder a save may look at, on average, for what others left."""
_LONGEST = 200
"""Bytes of a target's name that a temporary name has room for, as both may be as long as the file system allows."""
_saves_until_look: dict[tuple[int, int, re.Pattern[str]], int] = {}
"""By device and inode of a folder, and by what is looked for; not there: look now."""

ForeignFiles = Callable[[int], Sequence[str]]
"""Called with the descriptor of a folder; returns its files that do not belong to a replaceable store."""


class Site:
    """A folder that is built beside its target; the next save at the target removes one whose owner has ended.

    The owner holds an exclusive flock on the temporary folder, which shows without process ids
    that it is alive.

    Args:
        path: the target, absolute; no link, but below folders that may be links.
        url: the location for messages.
        timeout: seconds to wait for other processes.
        foreign: selects the files at the target that do not belong to a store.
        first: files that identify the format. They are removed before the rest of the folder, so that a concurrent
            reader cannot mistake the remainder for a complete store.
        kind: what is stored, for messages.

    Attributes:
        path: the target, without links.
        parent: a descriptor of the folder that holds the target.
        root: a descriptor of the temporary folder, with the lock.
        temp: the name of the temporary folder; "" once it is published.
    """

    parent = -1

    def __init__(
        self,
        path: str,
        *,
        url: str,
        timeout: float,
        foreign: ForeignFiles,
        first: Sequence[str],
        kind: str = "a dataset",
    ) -> None:
        self.path = path
        self.url = url
        folder, _, self.name = path.rpartition("/")
        folder = folder or "/"
        self.timeout = timeout
        self.temp = ""
        self.root = -1
        self._pid = os.getpid()
        self._prefix = f".{self.name.encode()[:_LONGEST].decode(errors='ignore')}.tdstore-"
        # Always the same for a target, and of no other one: it need not be looked for.
        self._aside = f"{self._prefix}{hashlib.blake2b(os.fsencode(self.name), digest_size=8).hexdigest()}-old"
        self._foreign = foreign
        self._first = tuple(first)
        self._kind = kind
        self._made: list[str] = []
        self._swapped = False
        self._there: os.stat_result | None = None
        """What was at the target when it was last looked at."""
        if not self.name:
            raise refusals.other_kind(url, "the root of all folders")
        try:
            try:
                self.parent = files.open_dir(folder)
            except FileNotFoundError:
                self._made += files.make_parents(folder)
                self.parent = files.open_dir(folder)
            self.path = os.path.join(_name_of(self.parent, folder), self.name)
            info = os.fstat(self.parent)
            # Waiting for the lock of a folder that this process holds would never end.
            if own_sessions((info.st_dev, info.st_ino)):
                raise refusals.inside_open(url, folder)
            self._lock_parent()
            try:
                self._sweep(info)
                self._make_temp()
            finally:
                files.unlock(self.parent)
        except OSError as error:
            self.close()
            files.raise_io(error, url, "making its folder")
        except BaseException:
            self.close()
            raise

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the parent's lock. A save does so by hand: a generator is four more calls, each time."""
        self._lock_parent()
        try:
            yield
        finally:
            files.unlock(self.parent)

    def _lock_parent(self) -> None:
        timeout = max(self.timeout, 1.0)
        files.lock(self.parent, exclusive=True, timeout=timeout, url=self.url, what="the parent folder")

    # -- the target ------------------------------------------------------------------------
    def check(self, *, replace: bool) -> int:
        """Return the descriptor of a replaceable store at the target, or -1 if the target is free.

        Args:
            replace: whether a store at the target may be replaced.

        Raises:
            StoreExistsError: a file, a folder that is not a store, or one with files that do not belong to the store.
        """
        while True:
            try:
                return self._check(replace=replace)
            except (StoreError, OSError):
                # Another process may have swapped its folder in, and be removing the one examined here.
                if not self._swapped:
                    raise

    def _check(self, *, replace: bool) -> int:
        url = self.url
        self._swapped = False
        self._there = None
        try:
            self._there = info = os.stat(self.name, dir_fd=self.parent, follow_symlinks=False)
        except FileNotFoundError:
            return -1
        if not stat.S_ISDIR(info.st_mode):
            raise refusals.other_kind(url, "a file, not a folder")
        try:
            fd = os.open(self.name, files.SAFE_DIR, dir_fd=self.parent)
        except FileNotFoundError:
            self._swapped = True
            raise
        try:
            for name in self._first:
                if os.access(name, os.F_OK, dir_fd=fd):
                    break  # not empty, and not listed for that by seven calls of the system
            else:
                with os.scandir(fd) as entries:
                    if next(entries, None) is None:
                        os.close(fd)
                        return -1
            if not replace:
                raise refusals.place_exists(url)
            if foreign := self._foreign(fd):
                raise refusals.foreign_files(url, foreign, self._kind)
        except BaseException:
            self._swapped = not files.is_same_entry(fd, self.name, self.parent)
            os.close(fd)
            raise
        return fd

    # -- publishing ------------------------------------------------------------------------
    def publish(
        self,
        *,
        replace: bool,
        sync: bool,
        alone: Callable[[int], AbstractContextManager[None]],
        ready: Callable[[], None] = lambda: None,
        swapped: Callable[[], None] = lambda: None,
    ) -> None:
        """Swap the built folder in.

        Args:
            replace: replace a store at the target.
            sync: wait until the rename is on the storage.
            alone: locks the folder at the target against other writers, given its descriptor; called under
                the parent's lock, which may be released while it waits.
            ready: called under the parent's lock, before the target is examined.
            swapped: called once the built folder has replaced another one.
        """
        try:
            self._lock_parent()
            try:
                ready()
                while not self._swap(replace=replace, sync=sync, alone=alone, swapped=swapped):
                    pass
            finally:
                files.unlock(self.parent)
        except OSError as error:
            files.raise_io(error, self.url, "publishing")

    def _swap(
        self,
        *,
        replace: bool,
        sync: bool,
        alone: Callable[[int], AbstractContextManager[None]],
        swapped: Callable[[], None],
    ) -> bool:
        """Put the built folder in the place of the target; return False if the target changed during the wait."""
        self._undo_swap(self._aside, self.name)
        old = self.check(replace=replace)
        if self._there is not None:
            _take_mode_of(self._there, self.root)
        if old < 0:
            files.rename(self.temp, self.parent, self.name, self.parent)
            self._published(sync)
            return True
        try:
            with alone(old):
                if not files.is_same_entry(old, self.name, self.parent):
                    return False
                files.exchange(self.temp, self.name, self.parent, self._aside)
                swapped()
                leftover = self.temp
                self._published(sync)
                # Unlinking thousands of files takes long: others may save beside us meanwhile.
                files.unlock(self.parent)
                remove_later(leftover, self.parent, self._first)
        finally:
            os.close(old)
        return True

    def wait_alone(self, old: int) -> None:
        """Take the lock of the folder at the target; the parent's lock is released while waiting.

        Raises:
            StoreBusyError: another process still holds it after `timeout` seconds.
        """
        deadline = time.monotonic() + self.timeout
        while not files.try_lock(old, exclusive=True):
            if time.monotonic() >= deadline:
                raise refusals.busy(self.url, "another process", self.timeout)
            files.unlock(self.parent)
            time.sleep(0.02)
            self._lock_parent()

    def _published(self, sync: bool) -> None:
        self.temp = ""
        self.keep_parents()
        if sync:
            files.fsync(self.parent)

    def keep_parents(self) -> None:
        """Keep the folders that were created above the target: they are no longer empty."""
        self._made.clear()

    def close(self, *, forked: bool = False, keep_root: bool = False) -> None:
        """Remove an unpublished folder, and release locks and descriptors.

        Args:
            forked: this is a child of the owner: close its own descriptors only.
            keep_root: leave `root` open, with its lock: the caller closes it.
        """
        if self.temp and not forked:
            remove_later(self.temp, self.parent, self._first)
        self.temp = ""
        if self.root >= 0 and not keep_root:
            os.close(self.root)
        if self.parent >= 0:
            os.close(self.parent)
        self.root = self.parent = -1
        if self._made and not forked:
            files.remove_empty(self._made)

    def __del__(
        self, getpid: Callable[[], int] = os.getpid, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        # Ctrl-C may come before an owner has it, who would close it: nobody else may remove what is locked.
        if self.parent >= 0 and getpid() == self._pid and not is_finalizing():
            self.close()

    # -- beginning -------------------------------------------------------------------------
    def _make_temp(self) -> None:
        name = self._prefix + os.urandom(8).hex()
        files.make_dir(name, self.parent)
        self.temp = name
        self.root = os.open(name, files.SAFE_DIR, dir_fd=self.parent)
        files.try_lock(self.root, exclusive=True)

    def _sweep(self, info: os.stat_result) -> None:
        names = leftovers(self.parent, _TEMP, info)
        if names is None:
            self._undo_swap(self._aside, self.name)
        for name in names or ():
            original = name[1 : name.rindex(".tdstore-")]
            if name == self._aside:
                self._undo_swap(name, self.name)
            elif not name.endswith("-old"):
                sweep_dead(name, self.parent, self._first)
            elif len(original.encode()) <= _LONGEST - 4:  # a longer one may be cut: the save at its target finds it
                self._undo_swap(name, original)

    def _undo_swap(self, aside: str, target: str) -> None:
        """Put the old folder of an interrupted swap by plain renames back; or remove it, if the new one is there."""
        try:
            if not stat.S_ISDIR(os.stat(aside, dir_fd=self.parent, follow_symlinks=False).st_mode):
                return
        except FileNotFoundError:
            return
        if os.path.lexists(os.path.join(os.path.dirname(self.path), target)):
            sweep_dead(aside, self.parent, self._first)
        else:  # it is the only copy
            files.rename(aside, self.parent, target, self.parent)


def _name_of(fd: int, path: str) -> str:
    """Return the real name of a folder.

    Args:
        fd: a descriptor of the folder.
        path: the path that it was opened by.
    """
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # another system than Linux, or one without /proc
        return os.path.realpath(path)


def leftovers(folder: int, pattern: re.Pattern[str], info: os.stat_result | None = None) -> list[str] | None:
    """Return names in a folder as killed processes leave them; None where it is not yet time to look again.

    A look takes as long as the folder has entries. A process looks before its first save there, and afterwards so
    seldom that saving many datasets into one folder takes no longer for each as they become more.

    Args:
        folder: a descriptor of the folder.
        pattern: matches such names, which begin with a dot; the same one at each save.
        info: what `os.fstat` says of the folder, if the caller knows it.
    """
    info = info or os.fstat(folder)
    key = info.st_dev, info.st_ino, pattern
    if wait := _saves_until_look.pop(key, 0):
        _saves_until_look[key] = wait - 1
        return None
    names = os.listdir(folder)
    if wait := len(names) // _ENTRIES_A_SAVE:
        if len(_saves_until_look) >= 1024:  # looking too early does no harm
            _saves_until_look.clear()
        _saves_until_look[key] = wait
    found = []
    for name in names:
        if name[0] == "." and pattern.fullmatch(name):
            found.append(name)
    return found


def take_mode(fd: int, name: str, parent: int) -> None:
    """Give a file or folder the permission bits of the one that it is about to replace: what was private stays private.

    Args:
        fd: descriptor of the new file or folder.
        name, parent: the name of the old one in a folder, and the descriptor of that folder.
    """
    try:
        old = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    _take_mode_of(old, fd)


def _take_mode_of(old: os.stat_result, fd: int) -> None:
    mode = stat.S_IMODE(old.st_mode)
    if not stat.S_ISLNK(old.st_mode) and stat.S_IMODE(os.fstat(fd).st_mode) != mode:
        os.fchmod(fd, mode)


def sweep_dead(name: str, parent: int, first: Sequence[str]) -> None:
    """Remove a temporary folder whose owner has ended.

    Args:
        name: the folder.
        parent: descriptor of its parent.
        first: names of files that are removed before the rest.
    """
    try:
        fd = os.open(name, files.SAFE_DIR, dir_fd=parent)
    except OSError:
        return  # removed meanwhile, or no permission to open it
    try:
        if files.try_lock(fd, exclusive=True):
            remove_later(name, parent, first)
    finally:
        os.close(fd)


def remove_later(name: str, parent: int, first: Sequence[str]) -> None:
    """Remove a folder that is not part of any store; the next save removes what cannot be removed now.

    Args:
        name: the folder.
        parent: descriptor of its parent.
        first: names of files that are removed before the rest.
    """
    try:
        remove_tree(name, parent, first=first)
    except OSError:
        return


def remove_tree(name: str, parent: int, *, first: Sequence[str] = ()) -> None:
    """Remove a folder and its contents, the files named in `first` before the rest; links are not followed.

    Args:
        name, parent: the name in a folder, and the folder's descriptor.
        first: names of files that are removed before the rest.
    """
    fd = os.open(name, files.SAFE_DIR, dir_fd=parent)
    try:
        for early in first:
            files.unlink_if_there(early, fd)
        with os.scandir(fd) as entries:
            found = [(e.name, e.is_dir(follow_symlinks=False)) for e in entries]
        for child, is_dir in found:
            if is_dir:
                remove_tree(child, fd)
            else:
                os.unlink(child, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)
