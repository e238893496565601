"""The parts of `tdstore.delete` and `tdstore.list_datasets` for URLs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from tdstore import delete
from tdstore.bytestore import remove_objects
from tdstore.engine import Engine
from tdstore.errors import ReadOnlyError, StoreNotFoundError, UnsupportedError
from tdstore.registry import registry, split_scheme
from tdstore.storekit.local_engine import LocalEngine
from tdstore_remote.opening import LOCAL, open_engine
from tdstore_remote.options import HTTP, StorageOptions
from tdstore_remote.store import by_suffix
from tdstore_remote.urls import scheme_of, shown

_MARKERS = ("tdstore.json", "zarr.json", "meta.json")
_BRANCH = "/refs/branch.main/ref.json"
"""Of an icechunk repository."""
_FILES = (".h5", ".hdf5", ".tdz", ".zarr.zip")


def remove_remote(
    location: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    format: str = "auto",
    engine: str | None = None,
    timeout: float | None = None,
    **options: Any,
) -> None:
    """Remove a dataset of the object layout, or a zarr group, at a URL.

    Args:
        location: the URL.
        storage_options: credentials and endpoint, as in `open_remote`.
        format: "raw", "zarr" or "icechunk"; by default that of the suffix, otherwise of the objects found.
        engine: as in `open_remote`.
        timeout: seconds for one call, including all retries.
        **options: those of the other format.

    Raises:
        StoreNotFoundError: there is no dataset. ReadOnlyError: the location cannot be written.
        StoreBusyError: a zarr group that another process writes.
        UnsupportedError: an uploaded directory, or a file of another format.
    """
    plain = shown(location)
    if scheme_of(location) in (*HTTP, "hf"):
        raise ReadOnlyError(f"{plain} is read only", url=plain)
    asked = {"engine": engine, "timeout": timeout}
    settings = StorageOptions({**(storage_options or {}), **{k: v for k, v in asked.items() if v is not None}})
    kind = format if format != "auto" else by_suffix(location)
    if kind in ("zarr", "h5", "icechunk") and scheme_of(location) in LOCAL and "::" not in location:
        delete(split_scheme(location)[1], storage=kind, **options)
        return
    if kind == "h5":
        raise UnsupportedError(
            f"{plain} is a file behind a URL, which is read only", url=plain, hint="remove it with the storage's tools"
        )
    if kind not in ("zarr", "icechunk"):
        with open_engine(location, settings) as opened:
            if kind == "raw" or _has(opened, "tdstore.json") or not _has(opened, "zarr.json"):
                remove_objects(opened, plain)
                _remove_folders(opened)
                return
    other = registry().get(kind if kind == "icechunk" else "zarr")
    registry().call(other, "remove", location, {"storage_options": settings, **options})


def _has(engine: Engine, key: str) -> bool:
    try:
        engine.size(key)
    except StoreNotFoundError:
        return False
    return True


def _remove_folders(engine: Engine) -> None:
    """Remove the folders of a store in a local folder, unless other files are in them."""
    if isinstance(engine, LocalEngine):
        for folder in (*(os.path.join(engine.root, name) for name in ("data", "versions")), engine.root):
            with suppress(OSError):
                os.rmdir(folder)


def list_remote(
    location: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    engine: str | None = None,
    timeout: float | None = None,
) -> Iterable[str]:
    """List the datasets at and below a URL, by the names of its objects; nothing is opened.

    Args:
        location: the URL of a folder.
        storage_options: credentials and endpoint, as of `open_remote`.
        engine: as of `open_remote`.
        timeout: seconds for one call, all retries together.

    Raises:
        UnsupportedError: the server cannot list objects.
    """
    asked = {"engine": engine, "timeout": timeout}
    settings = StorageOptions({**(storage_options or {}), **{k: v for k, v in asked.items() if v is not None}})
    base = location.rstrip("/")
    with open_engine(location, settings, writable=False) as opened:
        keys = sorted(entry.key for entry in opened.list())
    folders = {folder for key in keys for folder, _, name in [key.rpartition("/")] if name in _MARKERS}
    folders |= {key.removesuffix(_BRANCH[1:]).rstrip("/") for key in keys if f"/{key}".endswith(_BRANCH)}
    found: list[str] = []
    for folder in sorted(folders, key=lambda name: name.split("/") if name else []):
        if not any(folder == above or folder.startswith(f"{above}/") or not above for above in found):
            found.append(folder)  # a zarr group and a memmap directory have such objects in each group
    found += [key for key in keys if key.lower().endswith(_FILES)]
    return [f"{base}/{name}" if name else base for name in found]
