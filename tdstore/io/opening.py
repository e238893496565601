"""One way in: a location, and perhaps the name of a storage, to an open store."""

from __future__ import annotations

import os
from typing import Any

from tdstore.errors import StoreNotFoundError
from tdstore.hookspecs import Backend
from tdstore.registry import registry
from tdstore.store import Store
from tdstore.types import Mode

DEFAULT_ON_DISK = "memmap"
"""What a plain local path means when neither its name nor its content tells."""
DEFAULT_IN_MEMORY = "memory"

Location = str | os.PathLike[str] | None
Storage = str | Backend | None


def find_backend(location: Location, storage: Storage, mode: Mode) -> tuple[Backend, str | None]:
    """The backend of a location, and the location as text.

    `storage` may be a URL itself; then it is the location. A local path that nothing claims is the
    default on-disk format when writing.

    Raises:
        PluginError: see `Registry.resolve`. StoreNotFoundError: nothing is there to read.
    """
    if isinstance(storage, str) and "://" in storage and location is None:
        location, storage = storage, None
    text = os.fspath(location) if isinstance(location, os.PathLike) else location
    known = registry()
    if storage is not None and not isinstance(text, str):
        return known.resolve(None, storage) or known.get(DEFAULT_IN_MEMORY), text  # a store's own reopen_token
    backend = known.resolve(text, storage)
    if backend is None and text is None:
        backend = known.get(DEFAULT_IN_MEMORY)
    if backend is None:
        assert text is not None
        if mode in ("r", "r+"):
            there = os.path.exists(text)
            raise StoreNotFoundError(
                f"{text} is there, but no installed backend recognises it" if there else f"nothing is stored at {text}",
                url=text,
                hint="pass storage= to name its backend" if there else None,
            )
        backend = known.get(DEFAULT_ON_DISK)
    return backend, text


def open_store(
    location: Location = None, *, storage: Storage = None, mode: Mode = "r", **options: Any
) -> tuple[Store, Backend]:
    """Open a store through the registry.

    Raises:
        PluginError: no backend, or a broken one. StoreError: see `tdstore.store.Store` for the modes.
        OptionError: an option that the backend does not have.
    """
    backend, text = find_backend(location, storage, mode)
    return registry().open(backend, text, mode=mode, **options), backend
