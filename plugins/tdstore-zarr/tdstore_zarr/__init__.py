"""zarr v3 storage for tdstore: groups are nested TensorDicts, arrays are leaves."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable

from tdstore.hookspecs import Backend, hookimpl
from tdstore.store import Cap


@hookimpl
def tdstore_backends() -> Iterable[Backend]:
    """Declare `zarr`; its libraries are imported when a store is first opened."""
    yield Backend(
        name="zarr",
        opener="tdstore_zarr.store:open_zarr",
        summary="zarr v3 groups: a folder, a zip file, memory, or any URL",
        caps=Cap.WRITE
        | Cap.DISCARD
        | Cap.PARTIAL_READ
        | Cap.PARTIAL_WRITE
        | Cap.RESIZE
        | Cap.PERSISTENT
        | Cap.CONCURRENT_READ,
        schemes=("zarr",),
        suffixes=(".zarr", ".zarr.zip"),
        markers=("zarr.json",),
        magic=(b"PK\x03\x04",),
        remove="tdstore_zarr.removal:remove_zarr",
        install="pip install ./plugins/tdstore-zarr   # from a clone of tdstore",
    )


@hookimpl
def tdstore_guess_backend(location: str) -> str | None:
    """Recognise a zip file of any name with a zarr group in it, and a folder of zarr v2, for an error that says so."""
    if any(os.path.isfile(os.path.join(location, name)) for name in (".zgroup", ".zarray")):
        return "zarr"
    try:
        with zipfile.ZipFile(location) as archive:
            return "zarr" if "zarr.json" in archive.NameToInfo else None
    except (OSError, ValueError, zipfile.BadZipFile):
        return None
