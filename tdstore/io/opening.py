"""Entry point for opening: from a location, and optionally the name of a backend, to an open store."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec

from tdstore.bytestore import BUILD_PLAN, unfinished_build
from tdstore.errors import (
    DirtyStoreError,
    InvalidTypeError,
    PluginError,
    StoreBusyError,
    StoreError,
    StoreNotFoundError,
    UnknownBackendError,
)
from tdstore.header import Header
from tdstore.hookspecs import Backend
from tdstore.io.partial import Mark, incomplete, mark_of
from tdstore.lifetime import close_for_hook
from tdstore.registry import registry
from tdstore.store import Store
from tdstore.types import Mode

DEFAULT_ON_DISK = "memmap"
"""The backend of a local path that neither its name nor its content determines."""
DEFAULT_IN_MEMORY = "memory"
BUILD_SUFFIX = ".build"
"""`tdstore.build` of another format than the object layout keeps finished tasks beside its location."""

Location = str | os.PathLike[str] | None
Storage = str | Backend | None


PLAIN = frozenset([str, type(None), pathlib.PosixPath, pathlib.WindowsPath])
"""Types of locations that stand for nothing else. Subclasses may: a `UPath` is a path, perhaps in a bucket."""


def locate(location: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the path or URL for which an object of another library stands, and the options to open it.

    Args:
        location: a file system with a path in it, or a store of objects; anything else is returned as it is.
        options: those of the caller, which take precedence over those of the object.
    """
    return (location, options) if type(location) in PLAIN else registry().locate(location, options)


def locate_text(location: Any, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the location of `locate` as text, and the options to open it.

    Raises:
        InvalidTypeError: it is no location.
    """
    location, options = locate(location, options)
    text = os.fspath(location) if isinstance(location, os.PathLike) else location
    if not isinstance(text, str):
        raise _no_location(text, "a location is a path or a URL")
    return text, options


def find_backend(location: Location, storage: Storage, mode: Mode) -> tuple[Backend, str | None]:
    """Return the backend of a location, and the location as text.

    `storage` may be a URL itself; then it is the location. A local path that no backend recognises gets the
    default on-disk format when writing, unless its suffix is that of a file format (`FILE_SUFFIXES`).

    Raises:
        PluginError: see `Registry.resolve`. StoreNotFoundError: there is nothing to read.
        UnknownBackendError: the suffix of a new path names a file format that no installed backend writes.
        InvalidTypeError: the location is neither a string nor a path.
    """
    if isinstance(storage, str) and "://" in storage and location is None:
        location, storage = storage, None
    text = location if type(location) is str else os.fspath(location) if isinstance(location, os.PathLike) else location
    known = registry()
    if storage is not None and not isinstance(text, str):
        return known.resolve(None, storage) or known.get(DEFAULT_IN_MEMORY), text  # a store's own reopen_token
    if not isinstance(text, str | None):
        raise _no_location(text, "a location is a path, a URL or None")
    backend = known.resolve(text, storage)
    if backend is None and text is None:
        backend = known.get(DEFAULT_IN_MEMORY)
    if backend is None:
        assert text is not None
        if mode in ("r", "r+"):
            raise _not_found(text)
        _refuse_file_suffix(text)
        backend = known.get(DEFAULT_ON_DISK)
    return backend, text


def open_store(
    location: Location = None, *, storage: Storage = None, mode: Mode = "r", **options: Any
) -> tuple[Store, Backend]:
    """Open a store through the registry.

    Raises:
        PluginError: the backend is missing or broken. StoreError: see `tdstore.store.Store` for the modes.
        OptionError: the backend lacks an option.
        DirtyStoreError: the store is an unfinished copy, and `recover="accept"` is not set.
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
    """Raise `DirtyStoreError` for the header of an unfinished copy, unless the options accept it."""
    mark = None if options.get("recover") == "accept" else mark_of(header, url)
    if mark is not None:
        raise incomplete(mark, url)


def open_unread(
    location: Location = None, *, storage: Storage = None, mode: Mode = "r", **options: Any
) -> tuple[Store, Backend]:
    """Open as `open_store`, for callers that pass the header to `refuse_partial`, so that it is decoded once."""
    if type(location) not in PLAIN:
        location, options = locate(location, options)
    backend, text = find_backend(location, storage, mode)
    return open_backend(backend, text, mode, options), backend


def open_backend(backend: Backend, location: str | None, mode: Mode, options: Mapping[str, Any]) -> Store:
    """Open a store with the results of `find_backend`; `refuse_partial` judges its header, unless it is a new one."""
    try:
        return registry().open(backend, location, mode=mode, **options)
    except StoreBusyError as error:
        if not close_for_hook(error.url):
            raise
        return registry().open(backend, location, mode=mode, **options)
    except StoreNotFoundError:
        if isinstance(location, str) and _build_at(location):
            raise unfinished_build(location) from None
        raise
    except DirtyStoreError:
        found = find_partial(backend, location, options)
        if found is not None:
            raise incomplete(found.mark, found.url) from None  # more precise than the error of the backend
        raise


class Partial(msgspec.Struct, frozen=True):
    """An unfinished copy."""

    mark: Mark
    url: str
    dirty: bool
    """Whether its writer died while it was writing."""


def find_partial(backend: Backend, location: str | None, options: Mapping[str, Any]) -> Partial | None:
    """Return the partial copy at a location; None if there is none. Nothing is changed.

    Raises:
        StoreBusyError: a process, perhaps that of the copy, is writing there.
    """
    dirty = False
    try:
        try:
            store = registry().open(backend, location, mode="r", **options)
        except DirtyStoreError:
            # A backend without this option raises OptionError, which is caught below.
            store = registry().open(backend, location, mode="r", **{**options, "recover": "accept"})
            dirty = True
        with store:
            mark = mark_of(store.load_header(), store.url)
            return None if mark is None else Partial(mark, store.url, dirty)
    except StoreBusyError:
        raise
    except StoreError:
        return None  # not a copy that could be finished


def _no_location(location: object, wanted: str) -> InvalidTypeError:
    """Create the error for an object that is given as a location, and is none."""
    return InvalidTypeError(
        f"{wanted}, not {type(location).__name__} {location!r:.100}",
        hint="file systems of fsspec are given with a path, (fs, path); plugins/tdstore-remote knows them"
        if isinstance(location, tuple)
        else "tdstore.from_any() makes a TensorDict of tables and other objects, and save() gives it a location",
    )


FILE_SUFFIXES = frozenset(
    # arrays and tensors
    ".arrow .avro .beton .bin .ckpt .feather .fits .gguf .h4 .h5 .hdf .hdf5 .he5 .keras .lance .lmdb .mat .mds "
    ".msgpack .n5 .nc .nc4 .npy .npz .nwb .onnx .orc .parquet .pb .pickle .pkl .pt .pth .safetensors .tdz .tfrecord "
    ".tfrecords .tflite .zarr "
    # databases and tables
    ".bson .csv .db .db3 .duckdb .json .jsonl .mdb .ndjson .ods .rdb .sqlite .sqlite3 .tsv .txt .xls .xlsx .xml .yaml "
    ".yml "
    # archives, images, sound
    ".7z .bz2 .gz .rar .tar .tgz .xz .zip .zst .bmp .gif .jpeg .jpg .png .tif .tiff .webp .avi .mkv .mov .mp4 .webm "
    ".flac .mp3 .ogg .wav".split()
)
"""Suffixes of file formats, which the caller does not expect on a directory.

Any other ending is part of a name: `runs/exp.1`, `v1.2`, `data.2024-01-01`, `ppo.best` are directories.
"""

READERS = {
    ".csv": "tdstore.from_csv",
    ".json": "tdstore.from_json",
    ".parquet": "tdstore.from_parquet",
    ".safetensors": "tdstore.from_safetensors",
}
"""The functions that read files which are no datasets. Those of `.npz` are zip files: `tdz` tells of them."""


def _refuse_file_suffix(location: str) -> None:
    """Raise `UnknownBackendError` for the suffix of a file format. A trailing slash asks for a directory."""
    suffix = os.path.splitext(location)[1].lower()
    if suffix in FILE_SUFFIXES:
        causes, error = _failed_plugins()
        raise UnknownBackendError(
            f"no installed backend writes {suffix!r} files ({location}){causes}",
            hint="tdstore.backends() lists what is installed; "
            f"storage={DEFAULT_ON_DISK!r} makes a directory of that name",
        ) from error


def _build_at(location: str) -> bool:
    """Check whether a local path has an unfinished `tdstore.build`, in the folder or beside it."""
    return any(os.path.exists(f"{location.rstrip('/')}{end}/{BUILD_PLAN}") for end in ("", BUILD_SUFFIX))


def _not_found(location: str) -> StoreNotFoundError:
    """Create the error for a path that no backend recognises."""
    if _build_at(location):
        return unfinished_build(location)
    if not os.path.exists(location):
        return StoreNotFoundError(f"nothing is stored at {location}", url=location)
    causes, error = _failed_plugins()
    missing = StoreNotFoundError(
        f"{location} is there, but no installed backend recognises it{causes}",
        url=location,
        hint=_reader_of(location, causes),
    )
    missing.__cause__ = error
    return missing


def _reader_of(location: str, causes: str) -> str:
    """Return a hint: the function for the suffix of a path, or how to name a backend."""
    reader = READERS.get(os.path.splitext(location)[1].lower())
    if reader is not None:
        return f"{reader}({location!r}) reads it; storage= names a backend"
    return "pass storage= to name its backend" + ("; tdstore.backends() says why a plugin failed" if causes else "")


def _failed_plugins() -> tuple[str, PluginError | None]:
    """Return the note on unavailable plugins for messages, and the error of the first."""
    failed = registry().failed()
    return "".join(f"; {error.message}" for error in failed), failed[0] if failed else None
