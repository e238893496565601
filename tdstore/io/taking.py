"""Deletion and renaming of a local file or folder of a backend, in one step, while no other process writes it."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tdstore.errors import (
    CorruptStoreError,
    DirtyStoreError,
    ReadOnlyError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
    UnsupportedError,
)
from tdstore.hookspecs import Backend
from tdstore.registry import registry, split_scheme, without_password
from tdstore.store import Cap, Store
from tdstore.storekit import files, refusals
from tdstore.storekit.publish import remove_tree
from tdstore.types import LeafSpec

_PROBE = ("tdstore.lock",)
"""The leaf whose creation takes the lock of a writer. It is never committed."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def local_place(backend: Backend, location: str | None, doing: str) -> Local:
    """Return the file or folder at a location.

    Args:
        backend: the backend that recognises it.
        location: a path, perhaps with a scheme of the backend.
        doing: what is done to it, for messages, such as "deleted".

    Raises:
        StoreNotFoundError: nothing is there. UnsupportedError: it is a link, or not a local file or folder.
    """
    found = Local(backend, location or "", doing)
    if not (backend.suffixes or backend.markers or backend.magic) or not found.path:
        raise UnsupportedError(
            f"{found.url} cannot be {doing}: the backend {backend.name!r} declares no `remove`, and its places are no "
            "local files",
            url=found.url,
            hint="remove it with the tools of its storage",
        )
    if not os.path.lexists(found.path):
        raise StoreNotFoundError(f"there is nothing at {found.url}", url=found.url)
    if os.path.islink(found.path):
        raise UnsupportedError(
            f"{found.url} cannot be {doing}: it is a link",
            url=found.url,
            hint=f"pass the place itself: {os.path.realpath(found.path)!r}",
        )
    return found


class Local:
    """A file or folder.

    Args:
        backend: the backend that recognises it.
        location: a path, perhaps with a scheme of the backend.
        doing: what is done to it, for messages.
    """

    def __init__(self, backend: Backend, location: str, doing: str) -> None:
        scheme, rest = split_scheme(location)
        self.backend = backend
        self.location = location
        self.url = without_password(location)
        local = (not scheme or scheme in backend.schemes) and "://" not in rest and "::" not in rest
        self.path = os.path.abspath(rest) if local and rest else ""
        self._doing = doing

    def delete(self, options: dict[str, Any]) -> None:
        """Delete the file or folder: first rename it away, then remove it.

        Args:
            options: options of the opener.
        """
        self.check_ours(options)
        folder, name = os.path.split(self.path)
        with files.io_errors(self.url, "deleting"), files.closing(files.open_dir(folder)) as parent:
            if not os.path.isdir(self.path):
                with self._locked(options, damaged=True):
                    files.unlink(name, parent)
                return
            # What a killed process leaves under this name is removed by the next save of a folder beside it.
            hidden = f".{name.encode()[:200].decode(errors='ignore')}.tdstore-{secrets.token_hex(8)}"
            with self._locked(options, damaged=True):
                files.rename(name, parent, hidden, parent)
            remove_tree(hidden, parent, first=self.backend.markers)

    def rename(self, target: Local) -> bool:
        """Rename the file or folder; return False if the target is on another file system.

        Args:
            target: where it is to be.
        """
        self.check_ours({})
        if os.path.lexists(target.path):
            raise refusals.place_exists(target.url, hint="delete it, or move to another place")
        with files.io_errors(target.url, "moving"):
            made = files.make_parents(os.path.dirname(target.path))
            try:
                if os.stat(os.path.dirname(target.path)).st_dev != os.lstat(self.path).st_dev:
                    return False
                with self._locked({}, damaged=False):
                    _rename_new(self.path, target.path)
            except BaseException:
                files.remove_empty(made)
                raise
        return True

    def check_ours(self, options: dict[str, Any]) -> None:
        """Refuse what mode "w" would refuse to replace, files of other programs, and parts of a larger dataset.

        Args:
            options: options of the opener.

        Raises:
            StoreExistsError: what is there belongs to another program. UnsupportedError: it is a group of a dataset.
        """
        above = os.path.dirname(self.path)
        if any(os.path.isfile(os.path.join(above, marker)) for marker in self.backend.markers):
            whole = without_password(os.path.dirname(self.location) or above)
            raise UnsupportedError(
                f"{self.url} is a part of what is stored at {whole}",
                url=self.url,
                hint="delete the entry of the TensorDict: del td[key]",
            )
        try:
            self._open("w", options).close()
        except StoreExistsError as error:
            raise StoreExistsError(
                f"{self.url} is not {self._doing}: {error.message}",
                url=self.url,
                hint="tdstore removes what it saved, and nothing else",
            ) from error

    @contextmanager
    def _locked(self, options: dict[str, Any], *, damaged: bool) -> Iterator[None]:
        """Hold the lock of a writer.

        Args:
            options: options of the opener.
            damaged: go on without the lock if the dataset cannot be opened, and so cannot be written either.
        """
        try:
            store = self._open("r+", options)
        except (DirtyStoreError, CorruptStoreError):
            if not damaged:
                raise
            yield
            return
        except (ReadOnlyError, UnsupportedError):  # a format that is never written in place
            yield
            return
        try:
            if Cap.VIEW | Cap.CONCURRENT_WRITE in store.caps:  # several may write: the lock is another one
                with store.alone() as alone:
                    if not alone:
                        raise refusals.busy(self.url, "another process")
                    yield
            else:
                store.create({_PROBE: LeafSpec((), "uint8")})
                yield
        except BaseException:
            _give_up(store)
            raise
        _give_up(store)

    def _open(self, mode: Any, options: dict[str, Any]) -> Store:
        known, quick = registry(), {"lock_timeout": 0.0, "verify": "none"}
        chosen = {**{name: value for name, value in quick.items() if known.has_option(self.backend, name)}, **options}
        return known.open(self.backend, self.location, mode=mode, **chosen)


def _rename_new(old: str, new: str) -> None:
    """Rename a file or folder without ever replacing a file; of folders, the system itself replaces only empty ones."""
    if os.path.isdir(old):
        os.rename(old, new)
        return
    try:
        os.link(old, new, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(old, new)  # a file system without links
        return
    os.unlink(old)


def _give_up(store: Store) -> None:
    """Close a store without committing anything. Its files may no longer exist."""
    with suppress(StoreError):
        if Cap.DISCARD in store.caps:
            store.discard()
    with suppress(StoreError):
        store.close()
