"""One way in: a location, and perhaps the name of a storage, to an open store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tdstore.errors import DirtyStoreError, StoreBusyError, StoreError, StoreNotFoundError, UnknownBackendError
from tdstore.header import Header
from tdstore.hookspecs import Backend
from tdstore.io.partial import Mark, incomplete, mark_of
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
        _refuse_file_ending(text)
        backend = known.get(DEFAULT_ON_DISK)
    return backend, text


def open_store(
    location: Location = None, *, storage: Storage = None, mode: Mode = "r", **options: Any
) -> tuple[Store, Backend]:
    """Open a store through the registry.

    Raises:
        PluginError: no backend, or a broken one. StoreError: see `tdstore.store.Store` for the modes.
        OptionError: an option that the backend does not have.
        DirtyStoreError: a copy that was not finished (and `recover="accept"` was not given).
    """
    store, backend = open_unread(location, storage=storage, mode=mode, **options)
    if mode in ("r", "r+", "a"):
        try:
            refuse_partial(store.load_header(), store.url, options)
        except BaseException:
            store.close()
            raise
    return store, backend


def refuse_partial(header: Header, url: str, options: Mapping[str, Any]) -> None:
    """Raise `DirtyStoreError` for the header of a copy that was not finished, unless it is to be taken as it is."""
    mark = None if options.get("recover") == "accept" else mark_of(header, url)
    if mark is not None:
        raise incomplete(mark, url)


def open_unread(
    location: Location = None, *, storage: Storage = None, mode: Mode = "r", **options: Any
) -> tuple[Store, Backend]:
    """As `open_store`, for who reads the header and passes it to `refuse_partial`: decoding one may take long."""
    backend, text = find_backend(location, storage, mode)
    try:
        store = registry().open(backend, text, mode=mode, **options)
    except DirtyStoreError:
        found = find_partial(backend, text, options)
        if found is not None:
            raise incomplete(found.mark, found.url) from None  # says more than that a writer died
        raise
    return store, backend


@dataclass(frozen=True, slots=True)
class Partial:
    """A copy that was not finished."""

    mark: Mark
    url: str
    dirty: bool
    """Its writer died in the middle of writing."""


def find_partial(backend: Backend, location: str | None, options: Mapping[str, Any]) -> Partial | None:
    """The partial copy at a location; None if something else is there. Nothing is changed.

    Raises:
        StoreBusyError: somebody is writing there, perhaps the very copy.
    """
    dirty = False
    try:
        try:
            store = registry().open(backend, location, mode="r", **options)
        except DirtyStoreError:
            # Backends that know of dead writers take this option; where one does not, the OptionError ends it here.
            store = registry().open(backend, location, mode="r", **{**options, "recover": "accept"})
            dirty = True
        with store:
            mark = mark_of(store.load_header(), store.url)
            return None if mark is None else Partial(mark, store.url, dirty)
    except StoreBusyError:
        raise
    except StoreError:
        return None  # whatever it is, it is not a copy that could be finished


# Endings that name a file of a certain kind: a directory of that name would not be what was asked for.
_FILES = frozenset(
    ".arrow .bin .ckpt .csv .feather .gguf .h5 .hdf5 .json .mat .msgpack .nc .npy .npz .onnx .parquet .pickle .pkl "
    ".pt .pth .safetensors .tar .tdz .tfrecord .txt .zarr .zip".split()
)


def _refuse_file_ending(location: str) -> None:
    ending = os.path.splitext(location)[1].lower()
    if ending in _FILES and not os.path.isdir(location):
        raise UnknownBackendError(
            f"no installed backend writes {ending!r} files ({location})",
            hint="tdstore.backends() lists what is installed; "
            f"storage={DEFAULT_ON_DISK!r} makes a directory of that name",
        )
