"""A store in a local folder: built beside its target and swapped in by one rename, written in place under a lock."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tdstore.errors import StoreNotFoundError
from tdstore.lifetime import LiveObjects
from tdstore.storekit import files, refusals
from tdstore.storekit.publish import Site
from tdstore_zarr.layout.document import MAX_ROOT, NAME, Mark
from tdstore_zarr.place.base import Place, no_group
from tdstore_zarr.place.folder_engine import FolderEngine, close_quietly
from tdstore_zarr.place.folder_log import FolderLog

# What zarr writes into a folder: metadata of both versions, and chunks under all encodings of their keys.
_ZARR_FILE = re.compile(r"(.*/)?(zarr\.json|\.z(group|array|attrs|metadata)|(c[./])?\d+([./]\d+)*|c)")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class FolderPlace(Place):
    """An existing folder, or one that is being built."""

    local = True

    def __init__(self, path: str, url: str, *, timeout: float, writable: bool) -> None:
        self.path = path
        self.url = url
        self.timeout = timeout
        self.pid = os.getpid()
        self.replaced = False
        """Whether this very process published another store over it."""
        self._exclusive = False
        self._site: Site | None = None
        self._rivals: list[FolderPlace] = []
        self._lock = -1
        self._tag: tuple[int, int, int] | None = None
        self._writable = writable
        self.engine: FolderLog

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
        place._begin()
        return place

    def _begin(self) -> None:
        try:
            self._site = Site(
                self.path,
                url=self.url,
                timeout=self.timeout,
                foreign=_foreign_files,
                first=(NAME,),
                kind="a zarr store",
            )
            self._attach(os.dup(self._site.root), private=True)
        except BaseException:
            self.close()
            raise

    def _attach(self, root: int, *, private: bool) -> None:
        self.engine = FolderLog(FolderEngine(root, self.url, writable=self._writable, private=private))
        self.engine.active = not private
        # flock belongs to the open file: a second opening gives a lock of our own. That of a folder being
        # built is its site's, and shows other processes that the writer is alive.
        self._lock = os.dup(root) if private else os.open(".", files.SAFE_DIR, dir_fd=root)
        _LIVE.add(self)

    # -- the root ------------------------------------------------------------------------
    def read_root(self) -> bytes:
        try:
            before = self._root_tag()
            data = self.engine.base.get(NAME, MAX_ROOT).data
        except StoreNotFoundError:
            raise no_group(self.url, self._is_there) from None
        self._tag = before
        return bytes(data)

    def newest_root(self) -> bytes:
        # By its path: the folder may have been replaced as a whole.
        with files.io_errors(self.url, "looking for commits", writing=False):
            engine = FolderEngine(files.open_dir(self.path), self.url, writable=False)
        try:
            return bytes(engine.get(NAME, MAX_ROOT).data)
        finally:
            engine.close()

    def _is_there(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.engine.base.root, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _root_tag(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(NAME, dir_fd=self.engine.base.root, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def changed(self) -> str | None:
        """Describe a replacement: a missing root was replaced with its folder, and open files still belong together."""
        tag = self._root_tag()
        if tag is None or tag == self._tag:
            return None
        return "was changed by another process since it was opened"

    def stale(self) -> bool:
        return self.moved() or self.changed() is not None

    def forget(self) -> None:
        self.engine.base.forget()

    def moved(self) -> bool:
        """Check whether the path leads to another folder by now."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self.engine.base.root))
        except OSError:
            return True

    # -- writing in place ------------------------------------------------------------------
    def take(self) -> None:
        if self in _HOLDERS:
            return
        deadline = time.monotonic() + self.timeout
        while not self._try_lock():
            if time.monotonic() >= deadline or any(h._same(self) for h in list(_HOLDERS)):
                raise refusals.busy(self.url, self._holder(), self.timeout)
            time.sleep(0.01)
        if self.moved() or self._root_tag() != self._tag:
            self.release()
            raise refusals.overtaken(self.url)
        _HOLDERS.add(self)

    def _try_lock(self) -> bool:
        try:
            return files.try_lock(self._lock, exclusive=True)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return True  # a file system without locks: only generations can be compared
            files.raise_io(error, self.url, "locking")

    def _same(self, other: FolderPlace) -> bool:
        return files.is_same_open(self._lock, other._lock)

    def _holder(self) -> str:
        return "this process" if any(h._same(self) for h in list(_HOLDERS)) else "another process"

    def holder(self, mark: Mark | None) -> str | None:
        if any(h._same(self) for h in list(_HOLDERS)):
            return "this process"
        probe = os.open(".", files.SAFE_DIR, dir_fd=self.engine.base.root)
        try:
            if files.try_lock(probe, exclusive=False):
                return None
            return "another process" if mark is None else mark.who
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            files.raise_io(error, self.url, "locking")
        finally:
            os.close(probe)

    def put_root(self, data: bytes, *, sync: bool) -> None:
        with files.io_errors(self.url, "committing"):
            files.replace_file(NAME, self.engine.base.root, data, sync=sync)
            if sync:
                files.fsync(self.engine.base.root)
        self._tag = self._root_tag()

    def release(self) -> None:
        _HOLDERS.discard(self)
        if self.pid == os.getpid() and self.published and self._lock >= 0:
            files.unlock(self._lock)

    def sync(self) -> None:
        self.engine.base.sync()

    def remove(self, node: str, keys: Iterable[str]) -> None:
        if self.engine.active:
            self.engine.delete([entry.key for entry in self.engine.list(node + "/")])
        else:
            self.engine.base.remove(node)

    def move(self, old: str, new: str, keys: Iterable[str]) -> bool:
        self.engine.base.move(old, new)
        return True

    # -- publishing ------------------------------------------------------------------------
    def publish(self, data: bytes, *, sync: bool) -> None:
        assert self._site is not None
        with files.io_errors(self.url, "publishing"):
            files.create_file(NAME, self.engine.base.root, data, sync=sync)
            try:
                if sync:
                    files.fsync(self.engine.base.root)
                replace = not self._exclusive
                self._site.publish(replace=replace, sync=sync, alone=self._alone, swapped=self._tell_rivals)
            except BaseException:
                files.unlink_if_there(NAME, self.engine.base.root)
                raise
        self._site.close()
        self._site = None
        self.published = True
        self.engine.base.private = False
        self.engine.active = True
        self.engine.base.forget()
        self._tag = self._root_tag()
        self.release()

    @contextmanager
    def _alone(self, old: int) -> Iterator[None]:
        """Hold the store that is to be replaced; other stores of this process over it release it."""
        assert self._site is not None
        self._rivals = [h for h in list(_LIVE) if h is not self and h.published and h._is(old)]
        for rival in self._rivals:
            if rival in _HOLDERS:
                rival.release()
        self._site.wait_alone(old)
        yield

    def _tell_rivals(self) -> None:
        for rival in self._rivals:
            rival.replaced = True

    def _is(self, fd: int) -> bool:
        return files.is_same_open(self.engine.base.root, fd)

    def check_target(self) -> int:
        """Check the target, as `Site.check` does."""
        assert self._site is not None
        return self._site.check(replace=not self._exclusive)

    # -- life --------------------------------------------------------------------------------
    def close(self) -> None:
        _LIVE.discard(self)
        _HOLDERS.discard(self)
        forked = self.pid != os.getpid()
        if self._site is not None:
            self._site.close(forked=forked)
        if self._lock >= 0:
            if not forked:
                files.unlock(self._lock)  # closing is not enough: a forked child holds the same open file
            os.close(self._lock)
        self._lock = -1
        if hasattr(self, "engine"):
            self.engine.close()

    def __del__(self, _close: Callable[[int], None] = os.close, _quietly: Any = close_quietly) -> None:
        _quietly([self._lock], _close)


_LIVE: LiveObjects[FolderPlace] = LiveObjects()
_HOLDERS: LiveObjects[FolderPlace] = LiveObjects()
"""Those of this process that write in place now."""


def _in_child() -> None:
    _HOLDERS.clear()


os.register_at_fork(after_in_child=_in_child)


def _foreign_files(root: int) -> list[str]:
    """Return the files of a folder that zarr would not have written; all of them if there is no zarr store."""
    names = os.listdir(root)
    if not {NAME, ".zgroup", ".zarray"} & set(names):
        return sorted(names)
    found = []
    for parts, is_dir in files.walk(root):
        if not is_dir and not _ZARR_FILE.fullmatch(key := "/".join(parts)) and not files.is_temp(parts[-1]):
            found.append(key)
    return sorted(found)
