"""Publish a directory whole: built beside its target, swapped in by one rename, strangers' files never touched."""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tdstore import files, manifest, session
from tdstore.builtin.memmap_open import MAX_MANIFEST, read_contents
from tdstore.builtin.peer_memmap import META, peer_members
from tdstore.errors import CorruptStoreError, StoreError, StoreExistsError
from tdstore.session import FileParts

_TEMP = re.compile(r"\..*\.tdstore-[0-9a-f]{16}(-old)?")
_SHOWN = 5


class Site:
    """A folder being built beside its target; a dead owner's is swept by whoever saves here next.

    The owner holds an exclusive flock on the temporary folder, so that life and death are known
    without pids.
    """

    def __init__(self, location: str, *, timeout: float) -> None:
        self.location = location
        self.name = os.path.basename(location)
        self.timeout = timeout
        self._made: list[str] = []
        if not self.name:
            raise StoreExistsError(f"{location!r} cannot be replaced by a dataset", url=location)
        folder = os.path.dirname(location)
        with files.io_errors(location, "making its folder"):
            self._make_parents(folder)
            self.parent = files.open_dir(folder)
        try:
            with self.locked():
                self._sweep()
                self.temp, self.root = self._make_temp()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the parent's lock."""
        files.lock(self.parent, exclusive=True, timeout=max(self.timeout, 1.0), url=self.location, what="the folder")
        try:
            yield
        finally:
            files.unlock(self.parent)

    def check(self, *, replace: bool) -> int:
        """Look at what is at the target: the descriptor of a dataset that may be replaced, or -1 if nothing is.

        Raises:
            StoreExistsError: a file, a folder that is no dataset, or one with files that are not its own.
        """
        while True:
            try:
                return self._check(replace=replace)
            except (StoreError, OSError):
                # A rival may have swapped its own folder in, and be removing the one that was looked at.
                if not self._swapped:
                    raise

    def _check(self, *, replace: bool) -> int:
        url = self.location
        self._swapped = False
        try:
            info = os.stat(self.name, dir_fd=self.parent, follow_symlinks=False)
        except FileNotFoundError:
            return -1
        if not stat.S_ISDIR(info.st_mode):
            raise StoreExistsError(f"{url} is a file, not a folder", url=url, hint="remove it, or save elsewhere")
        try:
            fd = os.open(self.name, files.SAFE_DIR, dir_fd=self.parent)
        except FileNotFoundError:
            self._swapped = True
            raise
        try:
            with os.scandir(fd) as entries:
                empty = next(entries, None) is None
            if empty:
                os.close(fd)
                return -1
            if not replace:
                raise StoreExistsError(f"{url} is there already", url=url, hint="pass mode='w' to replace it")
            if strangers := _strangers(fd, url):
                more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
                raise StoreExistsError(
                    f"{url} holds what is not part of a dataset: {', '.join(strangers[:_SHOWN])}{more}",
                    url=url,
                    hint="nothing was deleted; move these away, or save to another place",
                )
        except BaseException:
            self._swapped = not files.is_still(fd, self.name, self.parent)
            os.close(fd)
            raise
        return fd

    def publish(self, *, replace: bool, sync: bool, ready: Callable[[], None]) -> None:
        """Swap the built folder in.

        Args:
            ready: called under the parent's lock, to trade the builder's lock for a session.
        """
        with files.io_errors(self.location, "publishing"), self.locked():
            ready()
            while not self._swap(replace=replace, sync=sync):
                pass

    def _swap(self, *, replace: bool, sync: bool) -> bool:
        """Put the built folder in the place of what is there; False if that changed while we waited for it."""
        old = self.check(replace=replace)
        if old < 0:
            files.rename(self.temp, self.parent, self.name, self.parent)
            self._published(sync)
            return True
        try:
            with session.exclusive(old, parent=self.parent, timeout=self.timeout, url=self.location):
                if not self._is_target(old):
                    return False
                files.exchange(self.temp, self.name, self.parent)
                leftover = self.temp
                self._published(sync)
                # Unlinking thousands of files takes long: others may save beside us meanwhile.
                files.unlock(self.parent)
                _remove_later(leftover, self.parent)
        finally:
            os.close(old)
        return True

    def _is_target(self, fd: int) -> bool:
        """Waiting lets go of the parent's lock, and a rival may have replaced the folder that we waited for."""
        try:
            there = os.stat(self.name, dir_fd=self.parent, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(fd))

    def _published(self, sync: bool) -> None:
        self.temp = ""
        self._made.clear()
        if sync:
            files.fsync(self.parent)

    def close(self) -> None:
        """Remove what was not published, and let go."""
        if getattr(self, "temp", ""):
            _remove_later(self.temp, self.parent)
            self.temp = ""
        for attr in ("root", "parent"):
            if (fd := getattr(self, attr, -1)) >= 0:
                os.close(fd)
                setattr(self, attr, -1)
        for folder in reversed(self._made):
            try:
                os.rmdir(folder)
            except OSError:
                break  # somebody put something into it meanwhile
        self._made.clear()

    def _make_parents(self, folder: str) -> None:
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for path in reversed(missing):
            try:
                os.mkdir(path)
            except FileExistsError:
                continue  # a rival made it; if it is a file, opening it says so
            self._made.append(path)

    def _make_temp(self) -> tuple[str, int]:
        # The name may be as long as the file system allows: ours must fit too.
        short = self.name.encode()[:200].decode(errors="ignore")
        name = f".{short}.tdstore-{secrets.token_hex(8)}"
        files.make_dir(name, self.parent)
        fd = os.open(name, files.SAFE_DIR, dir_fd=self.parent)
        files.try_lock(fd, exclusive=True)
        return name, fd

    def _sweep(self) -> None:
        with os.scandir(self.parent) as entries:
            names = [e.name for e in entries if _TEMP.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        for name in names:
            original = name[1 : name.rindex(".tdstore-")]
            if name.endswith("-old") and not os.path.lexists(os.path.join(os.path.dirname(self.location), original)):
                # An exchange by plain renames died half-way: this is the only copy of what was there.
                files.rename(name, self.parent, original, self.parent)
            else:
                sweep_dead(name, self.parent)


def sweep_dead(name: str, parent: int) -> None:
    """Remove a temporary folder if its owner is dead."""
    try:
        fd = os.open(name, files.SAFE_DIR, dir_fd=parent)
    except OSError:
        return  # gone meanwhile, or not ours to open
    try:
        if files.try_lock(fd, exclusive=True):
            _remove_later(name, parent)
    finally:
        os.close(fd)


def _remove_later(name: str, parent: int) -> None:
    """Remove a folder that is not part of any store; what cannot be removed is swept by the next save."""
    try:
        # Its description first: a reader that is just opening it must not take the rest for a whole.
        files.remove_tree(name, parent, first=(META, manifest.NAME))
    except OSError:
        return


def _strangers(root: int, url: str) -> list[str]:
    """Files of a folder that do not belong to the dataset in it; all of them if there is no dataset."""
    names = os.listdir(root)
    if manifest.NAME in names:
        return _not_ours(root, url)
    if META in names and _is_peer_meta(root):
        return peer_members(root, url, _ours_anywhere)
    return sorted(names)


def _not_ours(root: int, url: str) -> list[str]:
    try:
        contents = read_contents(root, url)
    except CorruptStoreError as error:
        raise StoreExistsError(
            f"{url} holds a damaged dataset, whose files cannot be told from others: {error.message}",
            url=url,
            hint="nothing was deleted; remove the folder yourself if it is of no use",
        ) from error
    known = {leaf.file for leaf in contents.leaves}
    log = session.read_log(root)
    if log is not None:
        known |= set(log.files)
    folders = {file[:depth] for file in known for depth in range(1, len(file))}
    # Folders of groups without leaves, and of values, hold nothing but the peer's description.
    return [
        "/".join(parts)
        for parts, is_dir in files.walk(root)
        if not is_dir and parts not in known and not _ours_anywhere(parts) and parts not in folders
    ]


def _ours_anywhere(parts: FileParts) -> bool:
    name = parts[-1]
    if len(parts) == 1 and (name in (manifest.NAME, session.NAME) or files.is_temp(name)):
        return True
    return name == META or files.is_temp(name)


def _is_peer_meta(root: int) -> bool:
    try:
        meta = json.loads(files.read_small(META, root, MAX_MANIFEST))
    except (OSError, StoreError, ValueError, RecursionError):
        return False
    return isinstance(meta, dict) and "_type" in meta
