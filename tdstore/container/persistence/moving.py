"""`tdstore.move`: move a dataset to another location, by a rename if the storage can, otherwise by a verified copy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tdstore.container.storage.copy_dataset import copy_dataset
from tdstore.errors import ConflictError, InvalidArgumentError, UnsupportedError
from tdstore.hookspecs import Backend
from tdstore.io.housekeeping import check_deletable, delete, ending, info, rename
from tdstore.io.opening import Location, Storage, find_backend, locate
from tdstore.registry import registry, without_password
from tdstore.store import Cap


def move(
    src: Location,
    dst: Location,
    *,
    storage: Storage = None,
    src_storage: Storage = None,
    src_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Move a dataset. Between locations of one backend on one file system this is a rename, also for terabytes.

    Otherwise the dataset is copied, compared with what was written, and then deleted at its old location. A process
    that is killed leaves it at the old location, or at both; the same call continues an unfinished copy.

    Args:
        src: the location of the dataset.
        dst: its new location, where nothing may exist.
        storage: name of the backend at the new location. Default: found from `dst`, as everywhere; that of the
            source if neither location has a suffix or scheme that names one.
        src_storage: name of the backend of the source. Default: found from `src`.
        src_options: options of the backend of the source, such as credentials.
        **options: those of the backend at the new location. With any option, the dataset is copied: options may
                change its layout.

    Raises:
        StoreNotFoundError: there is no dataset at `src`.
        StoreExistsError: something is at `dst`; or files of other programs are in the folder `src`.
        StoreBusyError: another process writes the source.
        ConflictError: the source was changed while it was copied; it is at both locations.
        UnsupportedError: one of them exists only as long as a process, or the source cannot be deleted.

    Example:
        >>> TensorDict({"a": torch.arange(3)}, [3]).save("runs/1").close()
        >>> tdstore.move("runs/1", "best.h5")
        >>> tdstore.exists("runs/1"), tdstore.load("best.h5")["a"].tolist()
        (False, [0, 1, 2])
    """
    known = registry()
    src, mine = locate(src, dict(src_options or {}))
    dst, options = locate(dst, options)
    source, old = find_backend(src, src_storage, "r")
    named = old is None or "://" in old or "::" in old or ending(source, old)[0]
    if storage is None and not named and isinstance(dst, (str, os.PathLike)):
        storage = None if known.resolve(dst) else source  # the name of the source does not tell its backend either
    target, new = find_backend(dst, storage, "x")
    if old == new:
        raise InvalidArgumentError(f"{src} is to be moved to its own location")
    _refuse(source, old, target, new, mine)
    renamed = source.name == target.name and new is not None and not options and rename(source, old, new)
    if renamed:
        return
    before = info(old, storage=source, **mine).generation
    copy_dataset(old, new, storage=target, src_storage=source, src_options=mine, progress=False, **options)
    if before is not None and info(old, storage=source, **mine).generation != before:
        raise ConflictError(
            f"{_shown(old)} was changed while it was copied to {_shown(new)}; it was not deleted",
            url=_shown(old),
            hint=f"delete {_shown(new)} and move it again, when no process writes it",
        )
    delete(old, storage=source, **mine)


def _refuse(source: Backend, old: str | None, target: Backend, new: str | None, options: dict[str, Any]) -> None:
    """Refuse locations that end with a process, and a source that could not be deleted after a copy."""
    for backend, place in ((source, old), (target, new)):
        if Cap.PERSISTENT not in backend.caps:
            raise UnsupportedError(
                f"{_shown(place)} cannot be moved: the backend {backend.name!r} holds data of running processes",
                url=_shown(place),
                hint="save() it to another place",
            )
    check_deletable(source, old, options)


def _shown(place: str | None) -> str:
    return without_password(place or "None")
