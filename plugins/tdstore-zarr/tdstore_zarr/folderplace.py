"""A store in a local folder: built beside its target and swapped in by one rename, written in place under a lock."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tdstore import files
from tdstore.errors import StoreBusyError, StoreError, StoreExistsError, StoreNotFoundError
from tdstore_zarr.document import MAX_ROOT, NAME, Mark
from tdstore_zarr.folder import FolderEngine
from tdstore_zarr.place import Place

_TEMP = re.compile(r"\..*\.tdstore-[0-9a-f]{16}(-old)?")
# What zarr writes into a folder: metadata of both versions, and chunks under all encodings of their keys.
_ZARR_FILE = re.compile(r"(.*/)?(zarr\.json|\.z(group|array|attrs|metadata)|(c[./])?\d+([./]\d+)*|c)")
_SHOWN = 5
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class FolderPlace(Place):
    """A folder that is there, or one that is being built."""

    local = True

    def __init__(self, path: str, url: str, *, timeout: float, writable: bool) -> None:
        self.path = path
        self.url = url
        self.timeout = timeout
        self.pid = os.getpid()
        self.replaced = False
        """Whether this very process published another store over it."""
        self._exclusive = False
        self._temp = ""
        self._parent = -1
        self._lock = -1
        self._made: list[str] = []
        self._tag: tuple[int, int, int] | None = None
        self._writable = writable
        self.engine: FolderEngine

    # -- opening -------------------------------------------------------------------------
    @classmethod
    def existing(cls, path: str, url: str, *, timeout: float, writable: bool) -> FolderPlace:
        """Open the folder at `path`."""
        place = cls(path, url, timeout=timeout, writable=writable)
        try:
            root = files.open_dir(path)
        except FileNotFoundError:
            raise StoreNotFoundError(f"{url}: there is no such folder", url=url) from None
        except OSError as error:
            files.raise_io(error, url, "opening", writing=False)
        place._attach(root, private=False)
        return place

    @classmethod
    def new(cls, path: str, url: str, *, timeout: float, exclusive: bool) -> FolderPlace:
        """Begin to build a folder beside `path`."""
        place = cls(path, url, timeout=timeout, writable=True)
        place.published = False
        place._exclusive = exclusive
        folder, name = os.path.split(path)
        if not name:
            raise StoreExistsError(f"{url} cannot be replaced by a store", url=url)
        try:
            with files.io_errors(url, "making its folder"):
                place._make_parents(folder)
                place._parent = files.open_dir(folder)
                with place._parent_locked():
                    place._sweep()
                    place._attach(place._make_temp(name), private=True)
        except BaseException:
            place.close()
            raise
        return place

    def _attach(self, root: int, *, private: bool) -> None:
        self.engine = FolderEngine(root, self.url, writable=self._writable, private=private)
        # flock belongs to the open file: a second opening gives a lock of our own.
        self._lock = os.open(".", files.SAFE_DIR, dir_fd=root)
        if private:
            files.try_lock(self._lock, exclusive=True)  # tells a sweeper that we are alive
        _LIVE.add(self)

    # -- the root ------------------------------------------------------------------------
    def read_root(self) -> bytes:
        try:
            before = self._root_tag()
            data = self.engine.get(NAME, MAX_ROOT).data
        except StoreNotFoundError:
            raise StoreNotFoundError(
                f"{self.url} holds no zarr v3 group: there is no {NAME}{self._other_kind()}", url=self.url
            ) from None
        self._tag = before
        return bytes(data)

    def _other_kind(self) -> str:
        for name in (".zgroup", ".zarray"):
            with contextlib.suppress(OSError):
                os.stat(name, dir_fd=self.engine.root, follow_symlinks=False)
                return " (but that of zarr v2: convert it with `zarr migrate v3`)"
        return ""

    def _root_tag(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(NAME, dir_fd=self.engine.root, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def changed(self) -> str | None:
        """A root that is gone was replaced with its folder: what is read there still belongs together."""
        tag = self._root_tag()
        if tag is None or tag == self._tag:
            return None
        return "was changed by another process since it was opened"

    def moved(self) -> bool:
        """Whether the path leads to another folder by now."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self.engine.root))
        except OSError:
            return True

    # -- writing in place ------------------------------------------------------------------
    def take(self) -> None:
        if self in _HOLDERS:
            return
        deadline = time.monotonic() + self.timeout
        while not self._try_lock():
            if time.monotonic() >= deadline or any(h._same(self) for h in list(_HOLDERS)):
                raise StoreBusyError(
                    f"{self.url} is being written by {self._holder()}; waited {self.timeout:g} s",
                    url=self.url,
                    hint="close or commit it there, or pass a longer lock_timeout=",
                )
            time.sleep(0.01)
        if self.moved() or self._root_tag() != self._tag:
            self.release()
            raise StoreBusyError(
                f"{self.url} was changed by another writer since it was opened here", url=self.url, hint="open it again"
            )
        _HOLDERS.add(self)

    def _try_lock(self) -> bool:
        try:
            return files.try_lock(self._lock, exclusive=True)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return True  # a file system without locks: the comparison of generations is what is left
            files.raise_io(error, self.url, "locking")

    def _same(self, other: FolderPlace) -> bool:
        return os.path.samestat(os.fstat(self._lock), os.fstat(other._lock))

    def _holder(self) -> str:
        return "this process" if any(h._same(self) for h in list(_HOLDERS)) else "another process"

    def writer(self, mark: Mark) -> str | None:
        if any(h._same(self) for h in list(_HOLDERS)):
            return "this process"
        probe = os.open(".", files.SAFE_DIR, dir_fd=self.engine.root)
        try:
            return None if files.try_lock(probe, exclusive=False) else mark.who
        finally:
            os.close(probe)

    def put_root(self, data: bytes, *, sync: bool) -> None:
        with files.io_errors(self.url, "committing"):
            files.replace_file(NAME, self.engine.root, data, sync=sync)
            if sync:
                files.fsync(self.engine.root)
        self._tag = self._root_tag()

    def release(self) -> None:
        _HOLDERS.discard(self)
        if self.pid == os.getpid() and self.published and self._lock >= 0:
            files.unlock(self._lock)

    def sync(self) -> None:
        self.engine.sync()

    def remove(self, node: str, keys: Iterable[str]) -> None:
        self.engine.remove(node)

    def move(self, old: str, new: str, keys: Iterable[str]) -> None:
        self.engine.move(old, new)

    # -- publishing ------------------------------------------------------------------------
    def publish(self, data: bytes, *, sync: bool) -> None:
        with files.io_errors(self.url, "publishing"):
            files.create_file(NAME, self.engine.root, data, sync=sync)
            try:
                if sync:
                    files.fsync(self.engine.root)
                with self._parent_locked():
                    while not self._swap(sync=sync):
                        pass
            except BaseException:
                files.unlink_if_there(NAME, self.engine.root)
                raise
        self.published = True
        self.engine.private = False
        self.engine.forget()
        self._tag = self._root_tag()
        self.release()

    def _swap(self, *, sync: bool) -> bool:
        name = os.path.basename(self.path)
        old = self.check_target()
        if old < 0:
            files.rename(self._temp, self._parent, name, self._parent)
            self._temp = ""
            self._made.clear()
            if sync:
                files.fsync(self._parent)
            return True
        try:
            rivals = [h for h in list(_LIVE) if h is not self and h.published and h._is(old)]
            for rival in rivals:
                if rival in _HOLDERS:
                    rival.release()
            if not self._wait_for_writers(old):
                return False
            files.exchange(self._temp, name, self._parent)
            for rival in rivals:
                rival.replaced = True
            left, self._temp = self._temp, ""
            if sync:
                files.fsync(self._parent)
            # Unlinking many files takes long: others may save beside us meanwhile.
            files.unlock(self._parent)
            _remove_later(left, self._parent)
        finally:
            os.close(old)
        return True

    def _is(self, fd: int) -> bool:
        return self.engine.root >= 0 and os.path.samestat(os.fstat(self.engine.root), os.fstat(fd))

    def _wait_for_writers(self, old: int) -> bool:
        """Hold the old folder alone; False when it was replaced while we waited."""
        deadline = time.monotonic() + self.timeout
        while not files.try_lock(old, exclusive=True):
            if time.monotonic() >= deadline:
                raise StoreBusyError(
                    f"{self.url} is being written by another process; waited {self.timeout:g} s",
                    url=self.url,
                    hint="close it there, save to another place, or pass a longer lock_timeout=",
                )
            files.unlock(self._parent)
            time.sleep(0.02)
            files.lock(self._parent, exclusive=True, timeout=max(self.timeout, 1.0), url=self.url)
        return files.is_still(old, os.path.basename(self.path), self._parent)

    def check_target(self) -> int:
        """Look at what is at the target: a descriptor of a store that may be replaced, -1 if there is nothing.

        Raises:
            StoreExistsError: something that is no zarr store, or one with files that are not its own.
        """
        while True:
            try:
                return self._look_at_target()
            except (StoreError, OSError):
                # A rival may have swapped its own folder in, and be removing the one that was looked at.
                if not self._swapped:
                    raise

    def _look_at_target(self) -> int:
        name = os.path.basename(self.path)
        self._swapped = False
        try:
            info = os.stat(name, dir_fd=self._parent, follow_symlinks=False)
        except FileNotFoundError:
            return -1
        if not stat.S_ISDIR(info.st_mode):
            raise StoreExistsError(
                f"{self.url} is a file, not a folder", url=self.url, hint="remove it, or choose another name"
            )
        try:
            fd = os.open(name, files.SAFE_DIR, dir_fd=self._parent)
        except FileNotFoundError:
            self._swapped = True
            raise
        try:
            names = os.listdir(fd)
            if names and self._exclusive:
                raise StoreExistsError(f"{self.url} exists", url=self.url, hint="mode='w' replaces it")
            if names and (strangers := _strangers(fd)):
                more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
                raise StoreExistsError(
                    f"{self.url} holds what is not part of a zarr store: {', '.join(strangers[:_SHOWN])}{more}",
                    url=self.url,
                    hint="nothing was deleted; move these away, or save to another place",
                )
            if not names:
                os.close(fd)
                return -1
        except BaseException:
            self._swapped = not files.is_still(fd, name, self._parent)
            os.close(fd)
            raise
        return fd

    @contextmanager
    def _parent_locked(self) -> Iterator[None]:
        files.lock(self._parent, exclusive=True, timeout=max(self.timeout, 1.0), url=self.url)
        try:
            yield
        finally:
            files.unlock(self._parent)

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

    def _make_temp(self, name: str) -> int:
        short = name.encode()[:200].decode(errors="ignore")
        temp = f".{short}.tdstore-{secrets.token_hex(8)}"
        files.make_dir(temp, self._parent)
        self._temp = temp
        return os.open(temp, files.SAFE_DIR, dir_fd=self._parent)

    def _sweep(self) -> None:
        with os.scandir(self._parent) as entries:
            names = [e.name for e in entries if _TEMP.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        for name in names:
            original = name[1 : name.rindex(".tdstore-")]
            if name.endswith("-old") and not os.path.lexists(os.path.join(os.path.dirname(self.path), original)):
                # An exchange by plain renames died half-way: this is the only copy of what was there.
                files.rename(name, self._parent, original, self._parent)
            else:
                _sweep_dead(name, self._parent)

    # -- life --------------------------------------------------------------------------------
    def close(self) -> None:
        _LIVE.discard(self)
        _HOLDERS.discard(self)
        if self.pid == os.getpid():
            if self._temp:
                _remove_later(self._temp, self._parent)
                self._temp = ""
            if self._lock >= 0:
                files.unlock(self._lock)  # closing is not enough: a forked child holds the same open file
        for fd in (self._lock, self._parent):
            if fd >= 0:
                os.close(fd)
        self._lock = self._parent = -1
        if hasattr(self, "engine"):
            self.engine.close()
        if self.pid == os.getpid():
            for folder in reversed(self._made):
                try:
                    os.rmdir(folder)
                except OSError:
                    break  # somebody put something into it meanwhile
            self._made.clear()


_LIVE: weakref.WeakSet[FolderPlace] = weakref.WeakSet()
_HOLDERS: weakref.WeakSet[FolderPlace] = weakref.WeakSet()
"""Those of this process that write in place now."""


def _in_child() -> None:
    _HOLDERS.clear()


os.register_at_fork(after_in_child=_in_child)


def _sweep_dead(name: str, parent: int) -> None:
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
        files.remove_tree(name, parent, first=(NAME,))
    except OSError:
        return


def _strangers(root: int) -> list[str]:
    """Files of a folder that zarr would not have written; all of them if there is no zarr store."""
    names = os.listdir(root)
    if not {NAME, ".zgroup", ".zarray"} & set(names):
        return sorted(names)
    found = ("/".join(parts) for parts, is_dir in files.walk(root) if not is_dir and not files.is_temp(parts[-1]))
    return sorted(key for key in found if not _ZARR_FILE.fullmatch(key))
